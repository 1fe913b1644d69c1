"""Derivatives of a function of one number, by its values. Only the standard library is imported."""

from collections.abc import Callable
from operator import itemgetter

STEP_SIZES = 3  # that are tried, each a quarter of the one before


def most_certain(
    function: Callable[[float], float], step: float, noise: float, enough: float
) -> tuple[float, float]:
    """Returns a derivative at 0, and its uncertainty, by the first of some step sizes with which it
    is certain enough, or by the best of them. `noise` is the standard deviation of each value by
    rounding alone."""
    attempts = []
    for shorter in range(STEP_SIZES):
        attempt = derivative(function, step / 4**shorter, noise)
        if attempt[1] <= enough:
            return attempt
        attempts.append(attempt)
    return min(attempts, key=itemgetter(1))


def derivative(
    function: Callable[[float], float], step: float, noise: float
) -> tuple[float, float]:
    """Returns a derivative at 0, and its uncertainty. Central differences at three distances are
    extrapolated in pairs (Richardson); the nearer pair counts, and how far the other one is from it
    is the uncertainty, together with that by rounding."""
    wide, middle, near = (
        (function(h) - function(-h)) / (2 * h) for h in (step, step / 2, step / 4)
    )
    outer, inner = (4 * middle - wide) / 3, (4 * near - middle) / 3
    # Of the inner one, whose four values weigh 4/3, 4/3, 1/6 and 1/6 over half a step.
    rounding = noise / (step / 2) * (2 * (4 / 3) ** 2 + 2 * (1 / 6) ** 2) ** 0.5
    return inner, rounding + abs(inner - outer)
