"""Are a script's gradients right? What the comparisons of bench/measure/gradients.py come to."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import hypot, inf, isfinite
from statistics import median

from bench.measure.records import Record

FLOAT32 = 1e-4  # how far a tensor's gradient may be off, relative to its norm
# Half of the distance between two neighbouring numbers of a type, relative to them. In such a type
# half of the tensors are off by less than twice as much, each points where it should, and what the
# compiler rounds otherwise comes to a few times as much as the type itself does.
ROUNDING = {"bfloat16": 2**-8, "float16": 2**-11, "float8": 2**-4}
MEDIAN, COSINE, NORM = 2, 0.9, 1.25
COMPILED = 3, 8  # times what the uncompiled one is off by, plus so many roundings
DROPOUT = 0.02  # how far a tensor's gradient may be from numeric derivatives
SEEN = 0.01  # how uncertain those may be, where a tensor is judged


@dataclass
class Verdict:
    """What the comparisons of a script come to: a text for each, and what is wrong."""

    cells: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def add(self, comparison: str, text: str, *wrong: str) -> None:
        self.cells[comparison] = text
        self.wrong += [f"{comparison}: {reason}" for reason in wrong]


def type_of(record: Record) -> str:
    """Returns the type in which matrices are multiplied."""
    config = record.config
    return (
        "float8"
        if config.get("float8")
        else config.get("autocast") or config.get("dtype") or ("float32")
    )


def verdict_of(record: Record) -> Verdict:
    """Returns what a record's comparisons come to."""
    verdict, events = Verdict(), {event["comparison"]: event for event in record.gradients}
    for comparison, event in events.items():
        if comparison == "dropout":
            judge_dropout(verdict, event)
        elif type_of(record) == "float32":
            judge_exact(verdict, comparison, event["tensors"])
        elif comparison == "compiled to uncompiled":
            rounded = events["uncompiled to reference"]["tensors"]
            judge_compiled(verdict, event["tensors"], rounded, ROUNDING[type_of(record)])
        else:
            judge_rounded(verdict, comparison, event["tensors"], ROUNDING[type_of(record)])
    return verdict


def judge_exact(verdict: Verdict, comparison: str, tensors: dict[str, list[float]]) -> None:
    """Judges gradients in float32, which are those of the other program but for rounding."""
    errors = {name: error for name, (error, *_) in tensors.items()}
    verdict.add(
        comparison,
        f"{largest(errors.values()):.0e}",
        *(
            f"{name} is off by {error:.1%}"
            for name, error in errors.items()
            if not error <= FLOAT32
        ),
    )


def judge_rounded(
    verdict: Verdict, comparison: str, tensors: dict[str, list[float]], rounding: float
) -> None:
    """Judges gradients in a smaller type by those in float32: how far they are off in the median,
    and each one's angle and norm."""
    errors = [error for error, *_ in tensors.values()]
    middle = median(errors)
    reasons = [
        f"{name} is off by {worst:.1%}, cosine {cosine:.3f}, norm × {norm:.2f}"
        for name, (worst, cosine, norm) in tensors.items()
        if not (cosine >= COSINE and 1 / NORM <= norm <= NORM)
    ]
    if not middle <= MEDIAN * rounding:
        reasons.append(f"half of the tensors are off by more than {middle:.1%}")
    verdict.add(comparison, f"{largest(errors):.0e} (median {middle:.0e})", *reasons)


def judge_compiled(
    verdict: Verdict,
    tensors: dict[str, list[float]],
    uncompiled: dict[str, list[float]],
    rounding: float,
) -> None:
    """Judges a compiled program in a smaller type by the uncompiled one, which rounds as often."""
    times, more = COMPILED
    errors = {name: error for name, (error, *_) in tensors.items()}
    verdict.add(
        "compiled to uncompiled",
        f"{largest(errors.values()):.0e}",
        *(
            f"{name} is off by {error:.1%}"
            for name, error in errors.items()
            if not error <= times * uncompiled[name][0] + more * rounding
        ),
    )


def judge_dropout(verdict: Verdict, event: dict) -> None:
    """Judges gradients with dropout by numeric derivatives, where those are certain enough."""
    if "refused" in event:
        verdict.add("dropout", f"refused: {event['refused']}")
        return
    judged = {
        name: answer
        for name, directions in event["directions"].items()
        if (answer := dropout_error(directions))
    }
    worst = f"{largest(error for error, _ in judged.values()):.1%}; " if judged else ""
    count = f"{len(judged)} of {len(event['directions'])} tensors"
    verdict.add(
        "dropout",
        f"{worst}{count}, noise {event['loss_noise']:.0e}",
        *(
            f"{name} is off by {error:.0%}"
            for name, (error, bound) in judged.items()
            if not error <= bound
        ),
    )


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


def largest(errors: Iterable[float]) -> float:
    """Returns the largest error; infinite where one isn't a number."""
    return max(error if isfinite(error) else inf for error in errors)
