"""Are a script's gradients right? What the comparisons of bench/measure/gradients.py come to."""

from dataclasses import dataclass, field
from math import hypot, inf, isfinite
from statistics import median

from bench.measure.records import Record

FLOAT32 = 1e-4  # how far a tensor's gradient may be off, relative to its norm
# Half of the distance between two neighbouring numbers of a type, relative to them. In such a type
# half of the tensors are off by less than MEDIAN roundings, and each by less than TENSOR of them. A
# norm's gradient is a sum over tokens that nearly cancel, so that only its angle and length tell.
ROUNDING = {"bfloat16": 2**-8, "float16": 2**-11, "float8": 2**-4}
MEDIAN, TENSOR, COSINE, NORM = 2, 8, 0.9, 1.25
COMPILED = 3, 8  # times what the uncompiled one is off by, plus so many roundings
DROPOUT = 0.02  # how far a tensor's gradient may be from numeric derivatives
SEEN = 0.01  # how uncertain those may be, where a tensor is judged
ENOUGH = 0.5  # of the tensors have to be judged


@dataclass
class Verdict:
    """What the comparisons of a script come to: a text for each, and what is wrong."""

    cells: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)  # comparisons that decide nothing

    @property
    def text(self) -> str:
        if self.wrong:
            return f"**wrong**: {self.wrong[0]}"
        return "not checkable" if set(self.unchecked) >= self.cells.keys() else "right"

    def add(self, comparison: str, text: str, wrong: list[str]) -> None:
        self.cells[comparison] = text
        self.wrong += [f"{comparison}: {reason}" for reason in wrong]


def type_of(record: Record) -> str:
    """Returns the type in which matrices are multiplied."""
    config = record.config
    if config.get("float8"):
        return "float8"
    return config.get("autocast") or config.get("dtype") or "float32"


def verdict_of(record: Record) -> Verdict:
    """Returns what a record's comparisons come to."""
    verdict, events = Verdict(), {event["comparison"]: event for event in record.gradients}
    rounding = ROUNDING.get(type_of(record))
    uncompiled = events.get("uncompiled to reference")
    for comparison, event in events.items():
        if comparison == "dropout":
            judge_dropout(verdict, event)
        elif not event["tensors"]:
            verdict.add(comparison, "", ["no optimizer was given a gradient"])
        elif rounding is None:
            judge_exact(verdict, comparison, event["tensors"])
        elif comparison == "compiled to uncompiled" and uncompiled:
            judge_compiled(verdict, event["tensors"], uncompiled["tensors"], rounding)
        else:
            judge_rounded(verdict, comparison, event["tensors"], rounding)
    if not events:
        verdict.wrong.append("nothing was compared")
    return verdict


def judge_exact(verdict: Verdict, comparison: str, tensors: dict[str, list[float]]) -> None:
    """Judges gradients in float32, which are those of the other program but for rounding."""
    wrong = [
        f"{name} is off by {error:.1%}"
        for name, (error, *_) in tensors.items()
        if not error <= FLOAT32
    ]
    verdict.add(comparison, f"{largest(tensors):.0e}", wrong)


def judge_rounded(
    verdict: Verdict, comparison: str, tensors: dict[str, list[float]], rounding: float
) -> None:
    """Judges gradients in a smaller type by those in float32."""
    wrong = [
        f"{name} is off by {error:.1%}, cosine {cosine:.3f}, norm × {norm:.2f}"
        for name, (error, cosine, norm) in tensors.items()
        if not is_near(name, error, cosine, norm, rounding)
    ]
    middle = median(error for error, *_ in tensors.values())
    if not middle <= MEDIAN * rounding:
        wrong.append(f"half of the tensors are off by more than {middle:.1%}")
    verdict.add(comparison, f"{largest(tensors):.0e} (median {middle:.0e})", wrong)


def is_near(name: str, error: float, cosine: float, norm: float, rounding: float) -> bool:
    """Returns whether a tensor's gradient is that in float32 but for so coarse a rounding."""
    if "norm" in name:
        return cosine >= COSINE and 1 / NORM <= norm <= NORM
    return error <= TENSOR * rounding


def judge_compiled(
    verdict: Verdict,
    tensors: dict[str, list[float]],
    uncompiled: dict[str, list[float]],
    rounding: float,
) -> None:
    """Judges a compiled program in a smaller type by the uncompiled one, which rounds as often."""
    times, more = COMPILED
    wrong = [
        f"{name} is off by {error:.1%}"
        for name, (error, *_) in tensors.items()
        if not error <= times * uncompiled[name][0] + more * rounding
    ]
    verdict.add("compiled to uncompiled", f"{largest(tensors):.0e}", wrong)


def judge_dropout(verdict: Verdict, event: dict) -> None:
    """Judges gradients with dropout by numeric derivatives, where those are certain enough."""
    if "refused" in event:
        verdict.add("dropout", f"refused: {event['refused']}", [])
        verdict.unchecked.append("dropout")
        return
    tensors = {name: dropout_error(lines) for name, lines in event["directions"].items()}
    judged = {name: error for name, error in tensors.items() if error}
    wrong = [
        f"{name} is off by {error:.0%}"
        for name, (error, bound) in judged.items()
        if not error <= bound
    ]
    text = f"{len(judged)} of {len(tensors)} tensors, noise {event['loss_noise']:.0e}"
    if judged:
        text = f"{max(error for error, _ in judged.values()):.1%}; {text}"
    if len(judged) < ENOUGH * len(tensors):
        verdict.unchecked.append("dropout")
        text = f"not checkable: {text}"
    verdict.add("dropout", text, wrong)


def dropout_error(directions: list[list[float]]) -> tuple[float, float] | None:
    """Returns how far a tensor's derivatives by autograd are from the numeric ones, relative to the
    larger of both, and how far they may be; None where the numeric ones are too uncertain."""
    numeric, uncertain, autograd = (hypot(*column) for column in zip(*directions, strict=True))
    error = hypot(*(a - b for a, _, b in directions))
    if not isfinite(numeric + autograd):
        return inf, DROPOUT
    size = max(numeric, autograd)
    if uncertain >= SEEN * size:
        return None
    return error / size, max(DROPOUT, 4 * uncertain / size)


def largest(tensors: dict[str, list[float]]) -> float:
    """Returns the largest error of a comparison; infinite where one isn't a number."""
    return max(error if isfinite(error) else inf for error, *_ in tensors.values())
