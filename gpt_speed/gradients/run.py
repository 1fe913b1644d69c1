"""Runs somebody's script several times until its first update, and compares the gradients."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from gpt_speed import children
from gpt_speed.common import UserError, script_name
from gpt_speed.gradients.judge import Check, by_numbers, by_other_run, unlike
from gpt_speed.gradients.order import MENDS, Order
from gpt_speed.gradients.tolerance import TOLERANCES

CHILD = Path(__file__).with_name("child.py")
ROUNDINGS = 4  # by which weights are changed, to see what rounding does to gradients
SECONDS = 60  # for numeric derivatives
# What a user reads while nothing else is printed for a while.
BEGINS = (
    "{script} runs until its first update, two to ten times, uncompiled and compiled: on two cores"
    " mostly a minute or two"
)


@dataclass
class Answer:
    """What is known of a script's gradients."""

    command: list[str]
    tensors: int = 0  # how many have gradients
    backwards: int = 0  # how many backward passes precede the update
    checks: list[Check] = field(default_factory=list)
    mends: list[str] = field(default_factory=list)  # those of MENDS that make them right
    notes: list[str] = field(default_factory=list)  # why something wasn't compared

    @property
    def wrong(self) -> list[Check]:
        return [check for check in self.checks if check.wrong]

    @property
    def verdict(self) -> str:
        if self.wrong:
            return "wrong"
        if any(check.judged for check in self.checks):
            return "right"
        return "not compared"


class Script:
    """Starts a script until its first update, each time in a process of its own."""

    def __init__(self, command: list[str], python: str, minutes: float, folder: Path):
        self.command = command
        self.python = python
        self.minutes = minutes
        self.folder = folder

    def run(self, what: str, order: Order) -> dict:
        """Returns what child.py reports; `what` says to a reader how the script runs. Raises
        UserError where it makes no update."""
        began = time.monotonic()
        facts, err = self.reported(self.folder / f"{what}.json", order)
        self.check(facts, what, err)
        print(f"{what}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        return facts

    def reported(self, report: Path, order: Order) -> tuple[dict, str]:
        """Returns what child.py writes into the file `report`, and its stderr. Raises UserError
        where it writes nothing."""
        words = json.dumps(asdict(replace(order, report=str(report))))
        command = [self.python, CHILD, words, *self.command]
        try:
            return children.report_of_child(command, report, 60 * self.minutes, order.environment)
        except children.NoReport as child:
            problem = f"made no update in {self.minutes:g} minutes: see --minutes"
            if child.ending:
                problem = f"{child.ending}, before its first update"
            raise UserError(f"{script_name(self.command)} {problem}")

    def check(self, facts: dict, what: str, err: str) -> None:
        """Raises UserError unless a run came to its first update."""
        if facts["how"] == "failed":
            print(err, file=sys.stderr, end="")
            raise UserError(f"{script_name(self.command)} failed, {what}: {facts['error']}")
        if facts["how"] == "ended":
            update = "made no update by an optimizer of torch.optim"
            raise UserError(f"{script_name(self.command)} {update} in its own process", 3)


def gradients(command: list[str], python: str, minutes: float) -> Answer:
    """Returns what is known of a script's first gradients. Raises UserError."""
    if "RANK" in os.environ:
        raise UserError("start it without torchrun, as one process", 2)
    children.keep_stdin()
    print(BEGINS.format(script=script_name(command)), file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        script = Script(command, python, minutes, Path(folder))
        runs = ComparedRuns(script, Answer(command))
        runs.compare()
    return runs.answer


@dataclass(frozen=True)
class Trial:
    """A run whose gradients are judged."""

    name: str
    order: Order
    judge: Callable[[dict], Check]  # by what child.py reports


class NotCompared(Exception):
    """The reason, in words, for which a script's gradients can't be compared."""


@dataclass(frozen=True)
class Baseline:
    """An uncompiled run whose gradients the other runs' are compared to: in float32, where the
    script has autocast."""

    file: str  # of its gradients
    order: Order  # how the script runs in all runs that are compared to it
    facts: dict  # what child.py reports

    @property
    def type(self) -> str:
        """The coarsest of the weights."""
        return coarsest(self.facts["types"])

    @property
    def autocast(self) -> str | None:
        """The type of the script's autocast, also where that was switched off; None without."""
        return self.facts["autocast"]

    @property
    def compiles(self) -> bool:
        """Whether the script asks for torch.compile, which does nothing here."""
        return bool(self.facts["compiles"])

    @property
    def compiled_order(self) -> Order:
        return replace(self.order, compiled=True, compare=self.file)


class ComparedRuns:
    """The runs of a script that are compared."""

    def __init__(self, script: Script, answer: Answer):
        self.script, self.answer = script, answer
        self.judged: list[tuple[Trial, Check]] = []

    def compare(self) -> None:
        """Adds what comes out to the answer. Raises UserError."""
        try:
            self.compare_all()
        except NotCompared as reason:
            self.answer.notes.append(str(reason))

    def compare_all(self) -> None:
        """Adds all checks to the answer. Raises NotCompared where the script forbids them."""
        baseline = self.baseline()
        roundings = self.roundings(baseline)
        if not baseline.compiles:
            self.answer.notes.append("nothing is compiled")
            self.compare_to_numeric(baseline, risks_of(baseline.facts))
            return
        compiled = self.script.run("compiled", baseline.compiled_order)
        self.compare_compiled(baseline, compiled, roundings)
        if baseline.autocast:
            self.compare_autocast(baseline, baseline.autocast)
        self.compare_to_numeric(baseline, risks_of(baseline.facts, compiled["budget"]))
        self.find_mends()

    def baseline(self) -> Baseline:
        """Runs the script uncompiled, and where it has autocast again without. Raises
        NotCompared."""
        as_it_is = self.uncompiled()
        if not as_it_is.autocast:
            return as_it_is
        return self.without_autocast(as_it_is)

    def uncompiled(self) -> Baseline:
        """Runs the script as it is, uncompiled. Raises NotCompared if its gradients aren't there
        before its update."""
        file = self.file("gradients")
        facts = self.script.run("uncompiled", Order(keep=file))
        self.answer.tensors = facts["weights"]
        self.answer.backwards = facts["backwards"]
        if facts["updates"]:
            raise NotCompared("its optimizer takes a closure, which isn't supported")
        return Baseline(file, Order(), facts)

    def without_autocast(self, with_autocast: Baseline) -> Baseline:
        """Runs the script in float32; the facts tell how far autocast takes the gradients."""
        file = self.file("float32")
        order = Order(float32=True)
        ordered = replace(order, keep=file, compare=with_autocast.file)
        return Baseline(file, order, self.script.run("uncompiled, autocast off", ordered))

    def file(self, name: str) -> str:
        """Returns the file of a run's gradients."""
        return str(self.script.folder / f"{name}.pt")

    def roundings(self, baseline: Baseline) -> dict:
        """Returns how far each gradient is from the baseline's in a run with other weights: what
        that does to a gradient, rounding does. Raises NotCompared if the two differ by more than
        that."""
        jitter = ROUNDINGS * TOLERANCES[baseline.type].rounding
        order = replace(baseline.order, compare=baseline.file, jitter=jitter)
        again = self.script.run("uncompiled, weights changed by rounding", order)
        difference = unlike(baseline.facts, again, jitter)
        if difference:
            raise NotCompared(f"uncompiled it isn't the same twice: {difference}")
        return again["tensors"]

    def compare_compiled(self, baseline: Baseline, compiled: dict, roundings: dict) -> None:
        """Compares the gradients of the compiled run to the uncompiled ones."""
        if not compiled["graphs"]:
            self.answer.notes.append("torch.compile was called, but compiled nothing until then")
            return
        name = f"compiled to uncompiled, in {baseline.type}"
        judge = partial(by_other_run, name, roundings, baseline.type)
        self.add(Trial(name, baseline.compiled_order, judge), judge(compiled))

    def compare_autocast(self, baseline: Baseline, autocast: str) -> None:
        """Compares the compiled gradients with autocast to those in float32; what autocast does to
        the uncompiled ones counts as rounding."""
        name = f"compiled to uncompiled, in {autocast}"
        order = replace(baseline.compiled_order, float32=False)
        roundings = baseline.facts["tensors"]
        trial = Trial(name, order, partial(by_other_run, name, roundings, autocast))
        self.add(trial, trial.judge(self.script.run("compiled, with autocast", order)))

    def compare_to_numeric(self, baseline: Baseline, risks: list[str]) -> None:
        """Compares to numeric derivatives, where there are risks: masks may be drawn anew in the
        backward pass, or a backward pass is written by hand."""
        if not risks:
            return
        name = f"numeric derivatives ({', '.join(risks)})"
        if baseline.type != "float32":
            self.answer.notes.append(f"{name}: not in {baseline.type}, which rounds too much")
            return
        order = replace(
            baseline.order,
            compiled=baseline.compiles,
            compare=baseline.file,
            same_masks=False,
            seconds=SECONDS,
        )
        trial = Trial(name, order, partial(by_numbers, name))
        check = self.further_check(trial, "numeric derivatives", name)
        if check:
            self.add(trial, check)

    def further_check(self, trial: Trial, what: str, note: str) -> Check | None:
        """Runs a trial, which `what` names, and judges it. Raises UserError if it fails; but where
        a gradient is known to be wrong already, the answer is that, with the error behind a
        `note`."""
        try:
            return trial.judge(self.script.run(what, trial.order))
        except UserError as error:
            if not self.answer.wrong:
                raise
            self.answer.notes.append(f"{note}: {error}")
            return None

    def add(self, trial: Trial, check: Check) -> None:
        self.judged.append((trial, check))
        self.answer.checks.append(check)

    def find_mends(self) -> None:
        """Runs the first wrong check, if there is one, with each of MENDS; adds those to the answer
        with which it comes out right."""
        wrong = next((trial for trial, check in self.judged if check.wrong), None)
        if not wrong:
            return
        for mend in MENDS:
            mended = replace(wrong, order=replace(wrong.order, compiled=True, mend=mend))
            check = self.further_check(mended, f"with {mend}", f"{mend} wasn't tried")
            if check and check.is_right:
                self.answer.mends.append(mend)


def coarsest(types: list[str]) -> str:
    """Returns the coarsest of the types of weights."""
    for type in reversed(TOLERANCES):
        if type in types:
            return type
    return "float32"


def risks_of(facts: dict, budget: float = 1.0) -> list[str]:
    """Returns, in words, what of a script may draw other masks in the backward pass, or has a
    backward pass of its own."""
    risks = []
    if facts["checkpoints"]:
        risks.append("activation checkpointing")
    risks += [f"the autograd function {name}" for name in facts["functions"]]
    if budget < 1:
        risks.append(f"a memory budget of {budget:g}")
    return risks
