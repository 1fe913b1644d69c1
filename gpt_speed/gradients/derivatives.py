"""Numeric derivatives of a script's loss, beside those that autograd has made."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gpt_speed.gradients.calls import Call
from gpt_speed.numeric import Derivatives


def derivative_facts(calls: list[Call], names: dict, seconds: float) -> dict:
    """Returns for the report the derivatives of the loss along a random direction in each of the
    named weights of float32, until the time is over: [numeric, its uncertainty, by autograd]; and
    the noise of the loss. The calls are made again one by one, each weighted as the loss's gradient
    by its outputs says, so that its own gradient is checked."""
    deadline = time.monotonic() + seconds
    weights = {name: weight for weight, name in names.items() if weight.dtype == torch.float32}
    loss = Loss([call for call in calls if call.cotangents], weights)
    if not loss.calls or not weights:
        return dict(derivatives={}, noise=None)
    numeric, gradients = Derivatives(loss.at, weights), loss.gradients()
    noise = numeric.noise  # before the others, which need it
    return dict(derivatives=derivatives_until(deadline, numeric, gradients), noise=noise)


def derivatives_until(deadline: float, numeric: Derivatives, gradients: dict) -> dict:
    """Returns the derivatives along a direction in each weight, in a random order, until the
    deadline; `gradients` are autograd's."""
    names = [*gradients]
    random.Random(0).shuffle(names)
    derivatives = {}
    for name in names:
        if time.monotonic() >= deadline:
            break
        if gradients[name] is not None:
            derivatives[name] = numeric.along(name, gradients[name].double())
    return derivatives


@dataclass
class Loss:
    """A script's loss, by calls that are made again, and the weights by their names."""

    calls: list[Call]
    weights: dict[str, torch.Tensor]

    def gradients(self) -> dict:
        """Returns the gradients that autograd makes now, by the weights' names; None of one that
        the loss doesn't need."""
        total = torch.stack([call.loss() for call in self.calls]).sum()
        gradients = torch.autograd.grad(total, [*self.weights.values()], allow_unused=True)
        return dict(zip(self.weights, gradients, strict=True))

    def at(self, offsets: dict[str, torch.Tensor]) -> float:
        """Returns the loss at the weights plus offsets of some."""
        with moved({self.weights[name]: offset for name, offset in offsets.items()}):
            return sum(call.loss().item() for call in self.calls)


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
