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
TIMES, MORE = 3, 8  # a compiled one: times what the uncompiled is off by, plus so many roundings
DROPOUT = 0.02  # how far a tensor's gradient may be from numeric derivatives
SEEN = 0.01  # how uncertain those may be, where a tensor is judged
ENOUGH = 0.5  # of the tensors have to be judged

COMPILED, UNCOMPILED = "compiled to uncompiled", "uncompiled to reference"  # comparisons
Tensors = dict[str, list[float]]  # by name: relative error, cosine, ratio of norms


@dataclass(frozen=True)
class Judgement:
    """What one comparison comes to."""

    text: str
    wrong: list[str] = field(default_factory=list)  # a reason for each tensor that is off
    decides: bool = True  # enough to call gradients right, where nothing is wrong


@dataclass(frozen=True)
class Verdict:
    """What all comparisons of a script come to, by their names."""

    judgements: dict[str, Judgement] = field(default_factory=dict)

    @property
    def cells(self) -> dict[str, str]:
        return {comparison: judgement.text for comparison, judgement in self.judgements.items()}

    @property
    def wrong(self) -> list[str]:
        if not self.judgements:
            return ["nothing was compared"]
        return [
            f"{comparison}: {reason}"
            for comparison, judgement in self.judgements.items()
            for reason in judgement.wrong
        ]

    @property
    def text(self) -> str:
        if self.wrong:
            return f"**wrong**: {self.wrong[0]}"
        is_decided = any(judgement.decides for judgement in self.judgements.values())
        if is_decided:
            return "right"
        return "not checkable"


def type_of(record: Record) -> str:
    """Returns the type in which matrices are multiplied."""
    config = record.config
    if config.get("float8"):
        return "float8"
    return config.get("autocast") or config.get("dtype") or "float32"


def verdict_of(record: Record) -> Verdict:
    """Returns what a record's comparisons come to."""
    events = {event["comparison"]: event for event in record.gradients}
    rounding = ROUNDING.get(type_of(record))
    return Verdict({comparison: judge(comparison, events, rounding) for comparison in events})


def judge(comparison: str, events: dict[str, dict], rounding: float | None) -> Judgement:
    """Judges one of a record's comparisons; `rounding` is that of a type smaller than float32."""
    if comparison == "dropout":
        return judge_dropout(events[comparison])
    tensors = events[comparison]["tensors"]
    if not tensors:
        return Judgement("", ["no optimizer was given a gradient"])
    if rounding is None:
        return judge_exact(tensors)
    if comparison == COMPILED and UNCOMPILED in events:
        return judge_compiled(tensors, events[UNCOMPILED]["tensors"], rounding)
    return judge_rounded(tensors, rounding)


def judge_exact(tensors: Tensors) -> Judgement:
    """Judges gradients in float32, which are those of the other program but for rounding."""
    wrong = [
        f"{name} is off by {error:.1%}"
        for name, (error, *_) in tensors.items()
        if not error <= FLOAT32
    ]
    return Judgement(f"{largest(tensors):.0e}", wrong)


def judge_rounded(tensors: Tensors, rounding: float) -> Judgement:
    """Judges gradients in a smaller type by those in float32."""
    wrong = [
        f"{name} is off by {error:.1%}, cosine {cosine:.3f}, norm × {norm:.2f}"
        for name, (error, cosine, norm) in tensors.items()
        if not is_near(name, error, cosine, norm, rounding)
    ]
    middle = median(error for error, *_ in tensors.values())
    if not middle <= MEDIAN * rounding:
        wrong.append(f"half of the tensors are off by more than {middle:.1%}")
    return Judgement(f"{largest(tensors):.0e} (median {middle:.0e})", wrong)


def is_near(name: str, error: float, cosine: float, norm: float, rounding: float) -> bool:
    """Returns whether a tensor's gradient is that in float32 but for so coarse a rounding."""
    if "norm" in name:
        return cosine >= COSINE and 1 / NORM <= norm <= NORM
    return error <= TENSOR * rounding


def judge_compiled(tensors: Tensors, uncompiled: Tensors, rounding: float) -> Judgement:
    """Judges a compiled program in a smaller type by the uncompiled one, which rounds as often."""
    wrong = [
        f"{name} is off by {error:.1%}"
        for name, (error, *_) in tensors.items()
        if not error <= TIMES * uncompiled[name][0] + MORE * rounding
    ]
    return Judgement(f"{largest(tensors):.0e}", wrong)


def judge_dropout(event: dict) -> Judgement:
    """Judges gradients with dropout by numeric derivatives, where those are certain enough."""
    if "refused" in event:
        return Judgement(f"refused: {event['refused']}", decides=False)
    tensors = event["directions"]
    certain = certain_errors(tensors)
    wrong = [
        f"{name} is off by {error:.0%}"
        for name, (error, bound) in certain.items()
        if not error <= bound
    ]
    text = f"{len(certain)} of {len(tensors)} tensors, noise {event['loss_noise']:.0e}"
    if certain:
        text = f"{max(error for error, _ in certain.values()):.1%}; {text}"
    if len(certain) < ENOUGH * len(tensors):
        return Judgement(f"not checkable: {text}", wrong, decides=False)
    return Judgement(text, wrong)


def certain_errors(tensors: dict[str, list[list[float]]]) -> dict[str, tuple[float, float]]:
    """Returns dropout_error() of the tensors whose numeric derivatives are certain enough."""
    errors = {name: dropout_error(directions) for name, directions in tensors.items()}
    return {name: error for name, error in errors.items() if error}


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


def largest(tensors: Tensors) -> float:
    """Returns the largest error of a comparison; infinite where one isn't a number."""
    return max(error if isfinite(error) else inf for error, *_ in tensors.values())
