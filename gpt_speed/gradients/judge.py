"""How far gradients may be off."""

from dataclasses import dataclass, field
from math import inf, isfinite

# Half of the distance between two neighbouring numbers of a type, relative to them.
UNIT = {"float64": 2**-53, "float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}
# How far a tensor's gradient may be off, relative to its norm, where rounding does less; and how
# many times what rounding alone does to it.
FLOOR = {"float64": 1e-6, "float32": 1e-4, "float16": 8 * 2**-11, "bfloat16": 8 * 2**-8}
TIMES = 8
# By so much rounding alone changes a tensor's gradient that nothing can be told, as where it is
# nothing but rounding: a softmax doesn't change with the bias of attention's keys.
HIDDEN = {"float64": 0.01, "float32": 0.01, "float16": 0.1, "bfloat16": 0.2}
NUMERIC = 0.02  # how far a gradient may be from numeric derivatives
UNCERTAIN = 0.01  # how uncertain those may be, where a tensor is judged
SAME_LOSS = 1e-3  # relative to it: of two runs that are the same but for rounding
TINY = 1e-20


@dataclass
class Check:
    """One comparison of all tensors."""

    name: str
    judged: int  # tensors, of how many:
    of: int
    worst: float  # of those
    rounding: float | None = None  # the most that rounding alone does to one of those
    wrong: dict[str, float] = field(default_factory=dict)  # how far tensors are off
    is_numeric: bool = False


def by_other_run(name: str, roundings: dict, type: str, facts: dict) -> Check:
    """Judges the gradients of a compiled program by how far each tensor is from that of the
    uncompiled one, and by how far rounding alone brings that: both as child.py compares them."""
    rounding_of = {tensor: error_of(distances) for tensor, distances in roundings.items()}
    errors = {
        tensor: error_of(distances)
        for tensor, distances in facts["tensors"].items()
        if rounding_of.get(tensor, 0) <= HIDDEN[type]
    }
    wrong = {
        tensor: error
        for tensor, error in errors.items()
        if not error <= FLOOR[type] + TIMES * rounding_of.get(tensor, 0)
    }
    return Check(
        name,
        judged=len(errors),
        of=len(facts["tensors"]),
        worst=max(errors.values(), default=0),
        rounding=max((rounding_of.get(tensor, 0) for tensor in errors), default=0),
        wrong=wrong,
    )


def error_of(distances: list[float]) -> float:
    """Returns how far a gradient is off, relative to the other one's norm; infinite for NaN."""
    if isfinite(distances[0]):
        return distances[0]
    return inf


def by_numbers(name: str, facts: dict) -> Check:
    """Judges gradients by numeric derivatives, where those are certain enough."""
    errors, bounds = {}, {}
    for tensor, (derivative, uncertain, autograd) in facts["derivatives"].items():
        size = max(abs(derivative), abs(autograd), TINY)
        if not isfinite(derivative + autograd):
            errors[tensor], bounds[tensor] = inf, NUMERIC
        elif uncertain < UNCERTAIN * size:
            errors[tensor] = abs(derivative - autograd) / size
            bounds[tensor] = max(NUMERIC, 4 * uncertain / size)
    return Check(
        name,
        judged=len(errors),
        of=facts["weights"],
        worst=max(errors.values(), default=0),
        wrong={tensor: error for tensor, error in errors.items() if error > bounds[tensor]},
        is_numeric=True,
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
