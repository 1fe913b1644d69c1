"""Arithmetic with values of which some aren't known: None."""

import math
from collections.abc import Iterable
from statistics import median


def known_values(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def median_known(values: Iterable[float | None]) -> float | None:
    """Returns the median of the values that are known, of which infinity stands for never; None
    where that is the median, or where none is known."""
    known = known_values(values)
    if not known or math.isinf(median(known)):
        return None
    return median(known)


def ratio(a: float | None, b: float | None) -> float | None:
    """Returns a / b; None where one of them isn't known, or is 0."""
    if a and b:
        return a / b
    return None


def subtract(a: float | None, b: float | None) -> float | None:
    """Returns a - b; None where one of them isn't known."""
    if a is None or b is None:
        return None
    return a - b
