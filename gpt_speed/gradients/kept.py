"""The weights and gradients of a run, in a file for other runs to compare theirs to."""

from dataclasses import dataclass

import torch

from gpt_speed.gradients.keeper import Keeper
from gpt_speed.numeric import distances


@dataclass
class Kept:
    """The gradients of a run and the weights that have them, both by name; and of all parameters in
    their order the names and shapes."""

    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    parameters: list[tuple[str, tuple[int, ...]]]

    @classmethod
    def load(cls, file: str) -> "Kept":
        return cls(**torch.load(file))

    def save(self, file: str) -> None:
        torch.save(vars(self), file)

    def distances_from(self, other: "Kept") -> dict:
        """Returns for the report how far these gradients and weights are from other ones."""
        changes = [error for error, *_ in distances(self.weights, other.weights).values()]
        tensors = distances(self.gradients, other.gradients)
        return dict(tensors=tensors, weight_change=max(changes))


def kept_by(keeper: Keeper, names: dict) -> Kept:
    """Returns what the keeper has, by the parameters' names."""
    return Kept(
        {names[parameter]: gradient for parameter, gradient in keeper.gradients.items()},
        {names[parameter]: parameter.detach().float().cpu() for parameter in keeper.gradients},
        [(names[parameter], tuple(parameter.shape)) for parameter in keeper.parameters()],
    )


def names_as_in(other: Kept, parameters: list) -> dict:
    """Returns the parameters' names in another run: in this one torch.compile may hide them. Raises
    ValueError where that one has other parameters."""
    names = [name for name, _ in other.parameters]
    shapes = [shape for _, shape in other.parameters]
    if [tuple(parameter.shape) for parameter in parameters] != shapes:
        raise ValueError("it has other parameters than in another run")
    return dict(zip(parameters, names, strict=True))
