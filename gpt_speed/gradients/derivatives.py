"""Numeric derivatives of a script's loss, beside those that autograd has made."""

import random
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gpt_speed import numeric
from gpt_speed.gradients.calls import Call

ALL_ZEROS = 0.02  # the size of weights that are all 0: as GPT-2's are drawn


def derivative_facts(calls: list[Call], names: dict, seconds: float) -> dict:
    """Returns for the report the derivatives of the loss along a random direction in each of the
    named weights of float32, until the time is over: [numeric, its uncertainty, by autograd]; and
    the noise of the loss. The calls are made again one by one, each weighted as the loss's gradient
    by its outputs says, so that its own gradient is checked."""
    end = time.monotonic() + seconds
    loss = Loss([call for call in calls if call.cotangents])
    weights = [weight for weight in names if weight.dtype == torch.float32]
    if not loss.calls or not weights:
        return dict(derivatives={}, noise=None)
    gradients = loss.gradients(weights)
    random.Random(0).shuffle(gradients)
    noise = loss.noise(weights)
    derivatives = {}
    for weight, gradient in gradients:
        if gradient is not None and time.monotonic() < end:
            along = Along(loss, weight, gradient.double(), direction_in(weight, names[weight]))
            derivatives[names[weight]] = [*along.by_losses(noise), along.by_autograd()]
    return dict(derivatives=derivatives, noise=noise)


@dataclass
class Loss:
    """A script's loss, by calls that are made again."""

    calls: list[Call]

    def gradients(self, weights: list) -> list[tuple]:
        """Returns each of the weights with the gradient that autograd makes now; None of one that
        the loss doesn't need."""
        total = torch.stack([call.loss() for call in self.calls]).sum()
        gradients = torch.autograd.grad(total, weights, allow_unused=True)
        return list(zip(weights, gradients, strict=True))

    def at(self, offsets: dict) -> float:
        """Returns the loss at other weights."""
        with moved(offsets):
            return sum(call.loss().item() for call in self.calls)

    def noise(self, weights: list) -> float:
        """Returns the standard deviation of the loss by rounding alone."""
        return numeric.noise([self.near(weights, str(number)) for number in range(numeric.JITTERS)])

    def near(self, weights: list, name: str) -> float:
        """Returns the loss at weights that differ by little more than rounding, as drawn for this
        name."""
        return self.at(
            {
                weight: numeric.JITTER * weight.detach() * randn_like(weight, name)
                for weight in weights
            }
        )


@dataclass
class Along:
    """The derivative of the loss along a direction in a weight."""

    loss: Loss
    weight: torch.Tensor
    gradient: torch.Tensor
    direction: torch.Tensor

    def by_losses(self, noise: float) -> tuple[float, float]:
        """Returns the numeric derivative and its uncertainty, with the noise of the loss."""
        # What a derivative along a random direction is, about: its root mean square.
        slope = self.gradient.norm().item() * size_of(self.weight)
        return numeric.derivative_along(self.loss_at, slope, noise)

    def loss_at(self, distance: float) -> float:
        return self.loss.at({self.weight: distance * self.direction})

    def by_autograd(self) -> float:
        return (self.gradient * self.direction.double()).sum().item()


def direction_in(weight, name: str) -> torch.Tensor:
    """Returns a random direction, as long as the weight is, which each name has alike."""
    return size_of(weight) * randn_like(weight, name)


def size_of(weight) -> float:
    """Returns the root mean square of a weight's numbers."""
    return weight.detach().square().mean().sqrt().item() or ALL_ZEROS


def randn_like(weight, name: str) -> torch.Tensor:
    draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(weight.shape, generator=draw).to(weight.device)


@contextmanager
def moved(offsets: dict) -> Iterator[None]:
    """Adds offsets to weights while the context lasts."""
    before = {weight: weight.detach().clone() for weight in offsets}
    try:
        with torch.no_grad():
            for weight, offset in offsets.items():
                weight.add_(offset)
        yield
    finally:
        with torch.no_grad():
            for weight, value in before.items():
                weight.copy_(value)
