"""Numbers by which gradients are judged: how far tensors are from other ones, and derivatives of a
loss by its values. Only the standard library is imported."""

import math
import statistics
from collections.abc import Callable
from operator import itemgetter

TINY = 1e-30  # in place of a norm of 0
JITTERS, JITTER = 8, 1e-6  # weights so near each other that a loss differs by rounding alone
CHANGE = 4e-3  # of the loss by a step of a numeric derivative, about
LARGEST_STEP = 0.3  # relative to a tensor's size
CERTAIN = 0.005  # how uncertain a derivative may be, relative to the usual one, to try no more
STEP_SIZES = 3  # that are tried, each a quarter of the one before


def distances(own: dict, other: dict) -> dict[str, list[float]]:
    """Returns how far each tensor is from another one of its name: the norm of their difference,
    relative to that of the other one; the cosine between them; the ratio of the norms. One that is
    missing counts as 0."""
    return {
        name: distances_of(*both(own.get(name), other.get(name)))
        for name in sorted(own.keys() | other.keys())
    }


def both(tensor, other) -> tuple:
    """Returns two tensors, of which one may be None: zeros in its place."""
    if tensor is None:
        tensor = other.new_zeros(other.shape)
    if other is None:
        other = tensor.new_zeros(tensor.shape)
    return tensor.double(), other.double()


def distances_of(tensor, other) -> list[float]:
    """Returns how far a tensor is from another one, as distances()."""
    size, expected = max(tensor.norm().item(), TINY), max(other.norm().item(), TINY)
    return [
        (tensor - other).norm().item() / expected,
        (tensor * other).sum().item() / (size * expected),
        size / expected,
    ]


def noise(losses: list[float]) -> float:
    """Returns the standard deviation of a float32 loss by rounding alone, by its values at JITTERS
    weights; at least that of its last digit."""
    _, exponent = math.frexp(losses[0])
    last_digit = 2.0 ** (exponent - 24)
    return max(statistics.stdev(losses), last_digit / 12**0.5)


def derivative_along(
    loss: Callable[[float], float], slope: float, noise: float
) -> tuple[float, float]:
    """Returns the derivative at 0 of the loss, by how far weights are moved in a direction, and its
    uncertainty. `slope` is about what it may be."""
    step = min(LARGEST_STEP, CHANGE / max(slope, TINY))
    return most_certain(loss, step, noise, CERTAIN * slope)


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
