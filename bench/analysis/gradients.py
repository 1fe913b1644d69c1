"""Are a script's gradients right? What the comparisons of bench/measure/gradients.py come to."""

from dataclasses import dataclass, field
from statistics import median

from bench.measure.records import Record
from gpt_speed.gradients.tolerance import (
    TIMES_REFERENCE,
    TOLERANCES,
    Deviation,
    Tolerance,
    deviations_from_numeric,
    error_of,
    wrong_ones,
)

# In a type smaller than float32 half of the tensors are off by less than MEDIAN roundings. A norm's
# gradient is a sum over tokens that nearly cancel, so that only its angle and length tell.
MEDIAN, COSINE, NORM = 2, 0.9, 1.25
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
    return Verdict(
        {comparison: judge(comparison, events, type_of(record)) for comparison in events}
    )


def judge(comparison: str, events: dict[str, dict], type: str) -> Judgement:
    """Judges one of a record's comparisons; `type` is that of its matrices."""
    if comparison == "dropout":
        return judge_dropout(events[comparison])
    tensors = events[comparison]["tensors"]
    tolerance = TOLERANCES[type]
    if not tensors:
        return Judgement("", ["no optimizer was given a gradient"])
    if type == "float32":
        return judge_exact(tensors, tolerance)
    if comparison == COMPILED and UNCOMPILED in events:
        return judge_compiled(tensors, events[UNCOMPILED]["tensors"], tolerance)
    return judge_rounded(tensors, tolerance)


def judge_exact(tensors: Tensors, tolerance: Tolerance) -> Judgement:
    """Judges gradients in float32, which are those of the other program but for rounding."""
    return judgement_of(
        {
            name: Deviation(error_of(distances), tolerance.floor)
            for name, distances in tensors.items()
        }
    )


def judge_compiled(tensors: Tensors, uncompiled: Tensors, tolerance: Tolerance) -> Judgement:
    """Judges a compiled program in a smaller type by the uncompiled one, which rounds as often."""
    deviations = {}
    for name, distances in tensors.items():
        bound = tolerance.floor + TIMES_REFERENCE * uncompiled[name][0]
        deviations[name] = Deviation(error_of(distances), bound)
    return judgement_of(deviations)


def judgement_of(deviations: dict[str, Deviation]) -> Judgement:
    """Returns what a comparison comes to in which each tensor has its bound."""
    worst = max(deviation.error for deviation in deviations.values())
    wrong = [f"{name} is off by {error:.1%}" for name, error in wrong_ones(deviations).items()]
    return Judgement(f"{worst:.0e}", wrong)


def judge_rounded(tensors: Tensors, tolerance: Tolerance) -> Judgement:
    """Judges gradients in a smaller type by those in float32."""
    wrong = [
        f"{name} is off by {error:.1%}, cosine {cosine:.3f}, norm × {norm:.2f}"
        for name, (error, cosine, norm) in tensors.items()
        if not is_near(name, error, cosine, norm, tolerance)
    ]
    middle = median(error for error, *_ in tensors.values())
    if not middle <= MEDIAN * tolerance.rounding:
        wrong.append(f"half of the tensors are off by more than {middle:.1%}")
    worst = max(error_of(distances) for distances in tensors.values())
    return Judgement(f"{worst:.0e} (median {middle:.0e})", wrong)


def is_near(name: str, error: float, cosine: float, norm: float, tolerance: Tolerance) -> bool:
    """Returns whether a tensor's gradient is that in float32 but for rounding."""
    if "norm" in name:
        return cosine >= COSINE and 1 / NORM <= norm <= NORM
    return error <= tolerance.floor


def judge_dropout(event: dict) -> Judgement:
    """Judges gradients with dropout by numeric derivatives, where those are certain enough."""
    if "refused" in event:
        return Judgement(f"refused: {event['refused']}", decides=False)
    tensors = event["directions"]
    certain = deviations_from_numeric(tensors)
    wrong = [f"{name} is off by {error:.0%}" for name, error in wrong_ones(certain).items()]
    text = f"{len(certain)} of {len(tensors)} tensors, noise {event['loss_noise']:.0e}"
    if certain:
        text = f"{max(error for error, _ in certain.values()):.1%}; {text}"
    if len(certain) < ENOUGH * len(tensors):
        return Judgement(f"not checkable: {text}", wrong, decides=False)
    return Judgement(text, wrong)
