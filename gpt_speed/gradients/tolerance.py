"""How far gradients may be off, in every comparison of gradients of this repository."""

from math import hypot, inf, isfinite
from typing import NamedTuple

NUMERIC = 0.02  # how far a gradient may be from numeric derivatives, relative to the larger of both
UNCERTAIN = 0.01  # how uncertain those may be, where a tensor is judged
TINY = 1e-20  # in place of derivatives of 0
# How many times what rounding does to a gradient a compiled program's may be off. A reference in
# float32 shows all that rounding does; weights that are changed by a few digits show a part of it.
TIMES_REFERENCE, TIMES_CHANGED = 3, 8


class Tolerance(NamedTuple):
    """What a type's rounding does to a gradient."""

    rounding: float  # half of the distance between two neighbouring numbers, relative to them
    floor: float  # how far a tensor may always be off, relative to its norm


TOLERANCES = {  # from the finest type to the coarsest
    "float64": Tolerance(2**-53, floor=1e-6),
    "float32": Tolerance(2**-24, floor=1e-4),
    "float16": Tolerance(2**-11, floor=8 * 2**-11),
    "bfloat16": Tolerance(2**-8, floor=8 * 2**-8),
    "float8": Tolerance(2**-4, floor=8 * 2**-4),
}


class Deviation(NamedTuple):
    """How far a tensor's gradient is off, relative to it, and how far it may be."""

    error: float
    bound: float

    @property
    def is_wrong(self) -> bool:
        return not self.error <= self.bound


def wrong_ones(deviations: dict[str, Deviation]) -> dict[str, float]:
    """Returns the errors of the tensors that are off by more than their bounds, by name."""
    return {name: deviation.error for name, deviation in deviations.items() if deviation.is_wrong}


def error_of(distances: list[float]) -> float:
    """Returns how far a tensor is off, by numeric.distances(); infinite for NaN."""
    if isfinite(distances[0]):
        return distances[0]
    return inf


def deviation_from_numeric(directions: list[list[float]]) -> Deviation | None:
    """Returns how far a tensor's derivatives by autograd are from the numeric ones, relative to the
    larger of both; None where the numeric ones are too uncertain. Each direction has the numeric
    derivative, its uncertainty, and the derivative by autograd."""
    numeric, uncertain, autograd = (hypot(*column) for column in zip(*directions, strict=True))
    if not isfinite(numeric + autograd):
        return Deviation(inf, NUMERIC)
    size = max(numeric, autograd, TINY)
    if not uncertain < UNCERTAIN * size:
        return None
    difference = hypot(*(derivative - own for derivative, _, own in directions))
    return Deviation(difference / size, max(NUMERIC, 4 * uncertain / size))


def deviations_from_numeric(tensors: dict[str, list[list[float]]]) -> dict[str, Deviation]:
    """Returns by their names the deviations of those tensors whose derivatives are certain."""
    deviations = {name: deviation_from_numeric(tensor) for name, tensor in tensors.items()}
    return {name: deviation for name, deviation in deviations.items() if deviation}
