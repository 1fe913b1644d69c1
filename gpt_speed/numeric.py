"""How far gradients are off, by other gradients and by the values of a loss. Only the standard
library is imported: a script's own process runs this file, too."""

import math
from collections.abc import Callable, Mapping
from operator import itemgetter
from statistics import stdev
from typing import Any

STEP_SIZES = 3  # that are tried, each a quarter of the one before
CHANGE = 4e-3  # of the loss by a step of a numeric derivative, about
LARGEST_STEP = 0.3  # relative to a tensor's size
CERTAIN = 0.005  # how uncertain a derivative may be, relative to the usual one, to try no more
JITTERS, JITTER = 8, 1e-6  # weights so near each other that a loss differs by rounding alone
TINY = 1e-30  # in place of a norm of 0


def differences(own: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, list[float]]:
    """Returns by name how far each tensor is from another one: [the norm of the difference relative
    to the other's, the cosine, the ratio of the norms]. One that is missing counts as zeros."""
    tensors = {}
    for name in sorted(own.keys() | other.keys()):
        like = own[name] if name in own else other[name]
        zeros = like.new_zeros(like.shape)
        a, b = own.get(name, zeros).double(), other.get(name, zeros).double()
        size, expected = max(a.norm().item(), TINY), max(b.norm().item(), TINY)
        tensors[name] = [
            (a - b).norm().item() / expected,
            (a * b).sum().item() / (size * expected),
            size / expected,
        ]
    return tensors


def noise_of(losses: list[float]) -> float:
    """Returns the standard deviation of a loss by rounding alone, from its values at weights that
    are next to equal; at least that of the last digit of float32."""
    _, exponent = math.frexp(losses[0])
    last_digit = 2.0 ** (exponent - 24)
    return max(stdev(losses), last_digit / 12**0.5)


def loss_derivative(
    loss: Callable[[float], float], usual: float, noise: float
) -> tuple[float, float]:
    """Returns the derivative of a loss at 0, and its uncertainty; `usual` is about how large it
    should be."""
    step = min(LARGEST_STEP, CHANGE / max(usual, TINY))
    return most_certain(loss, step, noise, CERTAIN * usual)


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
