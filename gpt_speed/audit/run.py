"""Runs somebody's script twice until some of its steps are over: timed, then watched."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from gpt_speed import children
from gpt_speed.common import UserError
from gpt_speed.common import counted as count

CHILD = Path(__file__).with_name("child.py")
# What PyTorch's logs say since 2.5, by what a report calls it.
LINES = dict(
    breaks_at=r"Graph break .*in user code at (\S+:\d+)",
    recompiled_at=r"Recompiling function \S+ in (\S+:\d+)",
)


def audit(command: list[str], minutes: float, python: str = sys.executable) -> tuple[dict, dict]:
    """Returns the reports of child.py on the timed and the watched run of a command: a script,
    or "-m" and a module, with arguments. Raises UserError, which says what to do."""
    children.keep_stdin()
    timed = run(command, dict(mode="time"), minutes, python)
    key, steps = timed["key"], timed["steps"]
    if key is None:
        cause = (
            f"its children computed for {timed['children']:.0f} s. Start one of them, or let"
            " torchrun or accelerate launch start `measure.py audit` with it"
            if timed["children"] > 1
            else "no backward pass, or no update by an optimizer of torch.optim"
        )
        raise UserError(f"{command[0]} trained nothing in its own process: {cause}")
    if steps < 2:
        raise UserError(
            f"{command[0]} ended after {count(steps, 'step')}, and an audit needs 2:"
            " let it train longer"
        )
    watch = dict(mode="watch", key=key, watched=min(2, steps - 1))
    watched = run(command, watch, minutes, python)
    if not any(op.get("flops") for op in watched["ops"]):
        if any(op.get("origin") is not None for op in watched["ops"]):
            raise UserError(
                f"a step of {command[0]} multiplies no matrices: the techniques are for"
                " models that do"
            )
        raise UserError(
            f"no matmul was seen in a step of {command[0]}: let it train in the main"
            " thread of its own process, on dense tensors"
        )
    if not timed["graphs"]:  # as with TORCH_COMPILE_DISABLE=1
        for op in watched["ops"]:
            op["compiled"] = False
    return timed, watched


def run(command: list[str], order: dict, minutes: float, python: str) -> dict:
    """Returns the report of a child. Raises UserError."""
    watching = order["mode"] == "watch"
    children.rewind_stdin()
    if watching and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun's store still holds what the ranks of the first run exchanged.
        os.environ |= dict(
            TORCHELASTIC_USE_AGENT_STORE="False",
            MASTER_PORT=str(int(os.environ["MASTER_PORT"]) - 1),
        )
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        try:
            code, out, err = children.run_child(
                [python, CHILD, json.dumps(order | dict(report=str(report))), *command],
                timeout=60 * minutes,
            )
            problem = f"{children.ending(code)}, before the audit was done"
        except subprocess.TimeoutExpired as stuck:
            out, err = map(children.decoded, (stuck.stdout, stuck.stderr))
            problem = (
                f"is stuck, or too slow to be {'watched' if watching else 'timed'} in"
                f" {minutes:g} minutes: give it a smaller batch or fewer micro-batches, or"
                " the audit more --minutes"
            )
        if not report.exists():  # which it may have written before it was stuck
            print(err or out, file=sys.stderr, end="")
            raise UserError(f"{command[0]} {problem}")
        facts = json.loads(report.read_text(encoding="utf-8"))
    for name, line in LINES.items():
        facts[name] = [*dict.fromkeys(map(os.path.basename, re.findall(line, err)))]
    if facts["how"] == "failed" or watching and facts["how"] != "watched":
        print(err, file=sys.stderr, end="")
        when = " while it was watched" if watching else ""
        raise UserError(f"{command[0]} failed{when}: {facts['error'] or facts['how']}")
    return facts
