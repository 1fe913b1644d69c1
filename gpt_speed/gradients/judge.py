"""How far gradients may be off."""

from dataclasses import dataclass, field
from math import inf, isfinite

# Half of the distance between two neighbouring numbers of a type, relative to them.
UNIT = {"float64": 2**-53, "float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}
# How far a tensor's gradient may be off, relative to its norm, where rounding does less; and how
# many times what rounding alone does to it.
FLOOR = {"float64": 1e-6, "float32": 1e-4, "float16": 8 * 2**-11, "bfloat16": 8 * 2**-8}
TIMES = 4
HIDDEN = 0.2  # by so much rounding alone changes a tensor's gradient that nothing can be told
NUMERIC = 0.02  # how far a gradient may be from numeric derivatives
CERTAIN = 0.01  # how uncertain those may be, where a tensor is judged
SAME_LOSS = 1e-3  # relative to it: of two runs that are the same but for rounding
TINY = 1e-20


@dataclass
class Check:
    """One comparison of all tensors."""

    name: str
    judged: int  # tensors, of how many:
    of: int
    worst: float  # of those
    rounding: float  # the most that rounding alone does to one of those
    wrong: dict[str, float] = field(default_factory=dict)  # how far tensors are off
    is_numeric: bool = False


def exact(name: str, tensors: dict, again: dict, type: str) -> Check:
    """Judges the gradients of a compiled program by those of the uncompiled one, and by what
    changing the weights by rounding does to the latter."""
    roundings = {tensor: error_of(facts) for tensor, facts in again.items()}
    return judged_by(name, tensors, roundings, TIMES, FLOOR[type])


def rounded(name: str, tensors: dict, uncompiled: dict, type: str) -> Check:
    """Judges the gradients of a compiled program with autocast, relative to those in float32, by
    how far the uncompiled one with autocast is off."""
    roundings = {tensor: error_of(facts) for tensor, facts in uncompiled.items()}
    return judged_by(name, tensors, roundings, TIMES, FLOOR[type])


def judged_by(name: str, tensors: dict, roundings: dict, times: float, floor: float) -> Check:
    errors = {
        tensor: error_of(facts)
        for tensor, facts in tensors.items()
        if roundings.get(tensor, 0) <= HIDDEN
    }
    wrong = {
        tensor: error
        for tensor, error in errors.items()
        if not error <= floor + times * roundings.get(tensor, 0)
    }
    rounding = max((roundings.get(tensor, 0) for tensor in errors), default=0)
    return Check(name, len(errors), len(tensors), max(errors.values(), default=0), rounding, wrong)


def error_of(facts: list[float]) -> float:
    """Returns how far a gradient is off, relative to the other one's norm; infinite for NaN."""
    return facts[0] if isfinite(facts[0]) else inf


def numeric(name: str, facts: dict) -> Check:
    """Judges gradients by numeric derivatives, where those are certain enough."""
    errors, wrong, uncertainties = {}, {}, [0.0]
    for tensor, (derivative, uncertain, autograd) in facts["derivatives"].items():
        size = max(abs(derivative), abs(autograd), TINY)
        if not isfinite(derivative + autograd):
            errors[tensor] = wrong[tensor] = inf
        elif uncertain < CERTAIN * size:
            errors[tensor] = abs(derivative - autograd) / size
            uncertainties.append(uncertain / size)
            if errors[tensor] > max(NUMERIC, 4 * uncertain / size):
                wrong[tensor] = errors[tensor]
    worst = max(errors.values(), default=0)
    return Check(
        name, len(errors), facts["weights"], worst, max(uncertainties), wrong, is_numeric=True
    )


def unlike(base: dict, again: dict, jitter: float) -> str:
    """Returns the first thing in which two runs differ that should be the same; "" for none."""
    if again["batch"] != base["batch"]:
        return "the first batch is another one"
    if again["weight_change"] > 100 * jitter:
        return "the initial weights are other ones"
    losses = base["loss"], again["loss"]
    bound = max(SAME_LOSS, 100 * jitter)
    if None not in losses and abs(losses[0] - losses[1]) > bound * abs(losses[0]):
        return f"the loss is {losses[0]:.6g} and {losses[1]:.6g}"
    return ""
