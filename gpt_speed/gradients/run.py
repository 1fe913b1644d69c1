"""Runs somebody's script several times until its first update, and compares the gradients."""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from gpt_speed import children
from gpt_speed.common import UserError
from gpt_speed.gradients.judge import UNIT, Check, exact, numeric, rounded, unlike

CHILD = Path(__file__).with_name("child.py")
JITTER = 4  # roundings by which weights are changed, to see what rounding does to gradients
SECONDS = 60  # for numeric derivatives
# What may mend a wrong gradient of a compiled program, with what to type.
MENDS = {
    "allow_buffer_reuse": "torch._inductor.config.allow_buffer_reuse = False",
    "mix_order_reduction": "TORCHINDUCTOR_MIX_ORDER_REDUCTION=0 in the environment",
    "memory_budget": "torch._functorch.config.activation_memory_budget = 1",
    "aot_eager": 'torch.compile(..., backend="aot_eager"), which leaves Inductor out',
}
VARIABLES = dict(mix_order_reduction=dict(TORCHINDUCTOR_MIX_ORDER_REDUCTION="0"))


@dataclass
class Answer:
    """What is known of a script's gradients."""

    command: list[str]
    weights: int = 0  # tensors that have gradients
    backwards: int = 0  # passes before the update
    checks: list[Check] = field(default_factory=list)
    mends: list[str] = field(default_factory=list)  # of MENDS, with each of which they are right
    notes: list[str] = field(default_factory=list)  # why something wasn't compared

    @property
    def wrong(self) -> list[Check]:
        return [check for check in self.checks if check.wrong]

    @property
    def verdict(self) -> str:
        if self.wrong:
            return "wrong"
        return "right" if any(check.judged for check in self.checks) else "not compared"


class Script:
    """Starts a script, with its compiler or without, each time in a process of its own."""

    def __init__(self, command: list[str], python: str, minutes: float, folder: Path):
        self.command, self.python, self.minutes, self.folder = command, python, minutes, folder

    def run(self, what: str, compiled: bool, switches: tuple[str, ...] = (), **order) -> dict:
        """Returns what child.py reports of a run until the first update. Raises UserError where
        it doesn't come to one."""
        began = time.monotonic()
        report = self.folder / f"{what}.json"
        orders = dict(
            report=str(report),
            keep="",
            compare="",
            float32=False,
            same_masks=True,
            jitter=0,
            switches=switches,
            seconds=0,
        )
        environment = dict(PYTHONHASHSEED="0", TORCH_COMPILE_DISABLE=str(int(not compiled)))
        for switch in switches:
            environment |= VARIABLES.get(switch, {})
        children.rewind_stdin()
        child = [self.python, CHILD, json.dumps(orders | order), *self.command]
        try:
            code, out, err = children.run_child(child, timeout=60 * self.minutes, **environment)
            problem = f"{children.ending(code)}, before its first update"
        except subprocess.TimeoutExpired as stuck:
            out, err = map(children.decoded, (stuck.stdout, stuck.stderr))
            problem = f"made no update in {self.minutes:g} minutes: see --minutes"
        if not report.exists():
            print(err or out, file=sys.stderr, end="")
            raise UserError(f"{self.command[0]} {problem}")
        facts = json.loads(report.read_text(encoding="utf-8"))
        if facts["how"] == "failed":
            print(err, file=sys.stderr, end="")
            raise UserError(f"{self.command[0]} failed, {what}: {facts['error']}")
        if facts["how"] == "ended":
            raise UserError(
                f"{self.command[0]} made no update by an optimizer of torch.optim in its own"
                " process",
                3,
            )
        print(f"{what}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        return facts


def gradients(command: list[str], python: str, minutes: float) -> Answer:
    """Returns what is known of a script's first gradients. Raises UserError."""
    if "RANK" in os.environ:
        raise UserError("start it without torchrun, with one process", 2)
    children.keep_stdin()
    with tempfile.TemporaryDirectory() as folder:
        script = Script(command, python, minutes, Path(folder))
        return compared(script, Answer(command))


def compared(script: Script, answer: Answer) -> Answer:
    """Compares the gradients, and returns the answer. Raises UserError."""
    kept, kept_float32 = script.folder / "kept.pt", script.folder / "float32.pt"
    plain = script.run("uncompiled", False, keep=str(kept))
    answer.weights, answer.backwards = plain["weights"], plain["backwards"]
    if plain["updates"]:
        answer.notes.append("the optimizer computes gradients in a closure: not compared")
        return answer
    mode = dict(float32=bool(plain["autocast"]))
    base = plain
    if mode["float32"]:
        base = script.run(
            "uncompiled, autocast off",
            False,
            keep=str(kept_float32),
            compare=str(kept),
            **mode,
        )
        kept = kept_float32
    coarse = coarsest(base["types"])
    again = script.run(
        "uncompiled, weights changed by rounding",
        False,
        compare=str(kept),
        jitter=JITTER * UNIT[coarse],
        **mode,
    )
    if reason := unlike(base, again, JITTER * UNIT[coarse]):
        answer.notes.append(f"uncompiled it isn't the same twice: {reason}")
        return answer
    risks = risks_of(base)
    if plain["compiles"]:
        compiled = script.run("compiled", True, compare=str(kept), **mode)
        risks += [f"a memory budget of {compiled['budget']}"] if compiled["budget"] < 1 else []
        name = f"compiled to uncompiled, in {coarse}"
        answer.checks.append(exact(name, compiled["tensors"], again["tensors"], coarse))
        if mode["float32"]:
            as_it_is = script.run("compiled, with autocast", True, compare=str(kept))
            answer.checks.append(
                rounded(
                    f"compiled to uncompiled, in {plain['autocast']}",
                    as_it_is["tensors"],
                    base["tensors"],
                    plain["autocast"],
                )
            )
    else:
        answer.notes.append("nothing is compiled")
    if risks and coarse == "float32":
        checked = script.run(
            "numeric derivatives",
            bool(plain["compiles"]),
            same_masks=False,
            seconds=SECONDS,
            **mode,
        )
        answer.checks.append(numeric(f"numeric derivatives ({', '.join(risks)})", checked))
    if answer.wrong and plain["compiles"]:
        answer.mends = mends_of(script, answer.wrong[0], kept, again, coarse, mode)
    return answer


def coarsest(types: list[str]) -> str:
    """Returns the coarsest of the types of weights."""
    return max((name for name in types if name in UNIT), key=UNIT.__getitem__, default="float32")


def risks_of(facts: dict) -> list[str]:
    """Returns, in words, what of a script may draw other masks in the backward pass, or has a
    backward pass of its own."""
    risks = ["activation checkpointing"] if facts["checkpoints"] else []
    return risks + [f"the autograd function {name}" for name in facts["functions"]]


def mends_of(
    script: Script, wrong: Check, kept: Path, again: dict, coarse: str, mode: dict
) -> list[str]:
    """Returns the switches of the compiler with each of which a wrong check comes out right."""
    mends = []
    for switch in MENDS:
        if wrong.is_numeric:
            order = dict(same_masks=False, seconds=SECONDS)
        else:
            order = dict(compare=str(kept))
        facts = script.run(f"with {switch}", True, switches=(switch,), **order, **mode)
        if wrong.is_numeric:
            check = numeric(wrong.name, facts)
        else:
            check = exact(wrong.name, facts["tensors"], again["tensors"], coarse)
        if not check.wrong and check.judged:
            mends.append(switch)
    return mends
