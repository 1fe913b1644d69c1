"""Numbers by which gradients are judged: how far tensors are from other ones, and derivatives of a
loss by its values. Only PyTorch and the standard library are imported."""

import math
import statistics
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

import torch

TINY = 1e-30  # in place of a norm of 0
ALL_ZEROS = 0.02  # the size of weights that are all 0: as GPT-2's are drawn
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


def seeded(name: str) -> torch.Generator:
    """Returns a generator that each name has alike, in every process."""
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def randn_like(weight: torch.Tensor, name: str) -> torch.Tensor:
    """Returns random numbers that each name has alike, whatever the device."""
    return torch.randn(weight.shape, generator=seeded(name)).to(weight.device)


@dataclass(frozen=True)
class Derivatives:
    """Numeric derivatives of a loss by its weights, beside those that autograd has made.

    `loss_at` returns the loss at the weights plus offsets of some, both by their names."""

    loss_at: Callable[[dict[str, torch.Tensor]], float]
    weights: dict[str, torch.Tensor]

    @cached_property
    def noise(self) -> float:
        """The standard deviation of the loss by rounding alone."""
        return rounding_noise([self.loss_at(self.jitter(number)) for number in range(JITTERS)])

    def jitter(self, number: int) -> dict[str, torch.Tensor]:
        """Returns offsets that are little more than rounding; each number has others."""
        return {
            name: JITTER * weight.detach() * randn_like(weight, f"{name} jitter {number}")
            for name, weight in self.weights.items()
        }

    def along(self, name: str, gradient: torch.Tensor, number: int = 0) -> list[float]:
        """Returns [numeric derivative, its uncertainty, derivative by autograd] along a random
        direction, which is as long as the weight of this name; each `number` has another direction.
        `gradient` is autograd's, in float64."""
        weight = self.weights[name].detach()
        size = weight.square().mean().sqrt().item() or ALL_ZEROS
        direction = size * randn_like(weight, f"{name} {number}")
        # What a derivative along a random direction is, about: its root mean square.
        slope = size * gradient.norm().item()
        step = min(LARGEST_STEP, CHANGE / max(slope, TINY))

        def loss_towards(distance: float) -> float:
            return self.loss_at({name: distance * direction})

        estimate = most_certain(loss_towards, step, self.noise, enough=CERTAIN * slope)
        return [*estimate, (gradient * direction).sum().item()]


def rounding_noise(losses: list[float]) -> float:
    """Returns the standard deviation of a float32 loss by rounding alone, by its values at JITTERS
    weights; at least that of its last digit."""
    _, exponent = math.frexp(losses[0])
    last_digit = 2.0 ** (exponent - 24)
    return max(statistics.stdev(losses), last_digit / 12**0.5)


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
