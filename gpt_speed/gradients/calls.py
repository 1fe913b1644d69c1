"""Calls of a model, or of a compiled function, that can be made again."""

import functools

import torch
from torch.utils._pytree import tree_leaves, tree_map


class Call:
    """A call that can be made again: with the same random numbers, at other weights."""

    def __init__(self, function, args: tuple, kwargs: dict):
        self.function = function
        self.args, self.kwargs = tree_map(cut_off, (args, kwargs))
        self.random = random_state()
        self.cotangents = {}  # the loss's gradient by the call's outputs, by their places

    def watch(self, output) -> None:
        """Keeps the gradients by the outputs, once they are computed."""
        for place, tensor in differentiable(output):
            tensor.register_hook(functools.partial(self.take, place))

    def take(self, place: int, gradient) -> None:
        """A hook of the output at this place."""
        if gradient is not None:  # as of logits that the loss doesn't need
            self.cotangents[place] = gradient.detach().double()

    def loss(self) -> torch.Tensor:
        """Returns a sum of the outputs whose gradient by the weights is the loss's."""
        set_random_state(self.random)
        output = self.function(*self.args, **self.kwargs)
        parts = [
            (tensor.double() * self.cotangents[place]).sum()
            for place, tensor in differentiable(output)
            if place in self.cotangents
        ]
        return torch.stack(parts).sum()


def cut_off(value):
    """Returns a tensor without what made it, and other values as they are."""
    if not isinstance(value, torch.Tensor) or value.grad_fn is None:
        return value
    return value.detach().requires_grad_()


def differentiable(output) -> list[tuple[int, torch.Tensor]]:
    """Returns the tensors of an output through which gradients flow, with their places."""
    return [
        (place, leaf)
        for place, leaf in enumerate(tree_leaves(output))
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.grad_fn is not None
    ]


def random_state() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns the states of the CPU's random numbers, and of each GPU's."""
    if not torch.cuda.is_initialized():
        return torch.get_rng_state(), []
    return torch.get_rng_state(), torch.cuda.get_rng_state_all()


def set_random_state(state: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    cpu, gpus = state
    torch.set_rng_state(cpu)
    if gpus:
        torch.cuda.set_rng_state_all(gpus)
