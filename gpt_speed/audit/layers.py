"""The layer norms and GELUs of a watched step that consist of several operators."""

from collections.abc import Iterable, Iterator
from itertools import permutations
from typing import NamedTuple

from gpt_speed.audit.graph import Op, Tensor, walk

ROOTS = "rsqrt", "sqrt", "std"


class Layer(NamedTuple):
    """A norm or a GELU, by one of its operators."""

    name: str  # "norm" or "GELU"
    op: Op  # of a norm the multiplication by its weight or scale, of a GELU erf or tanh
    by_hand: bool  # not of one call of PyTorch's that runs as several operators


def layers_of(training: Iterable[Op]) -> Iterator[Layer]:
    """Yields the norms and GELUs among a step's operators that train, by their products."""
    for op in training:
        if op.base_name in ("mul", "div") and len(op.inputs) == 2:
            for factor, other in permutations(op.inputs):
                yield from layers_of_product(op, factor, other)


def layers_of_product(op: Op, factor: Tensor, other: Tensor) -> Iterator[Layer]:
    """Yields the layers that the product of two tensors ends:

    norm:  x ─┬─────────────────────> mul
              └─> mean ─> rsqrt ──────┘

    norm:  x ─> divided by its length ─> mul
           weight ───────────────────────┘

    GELU:  x ─┬───────────────> mul
              └─> erf ─> add ───┘
    """
    path = [*walk([factor], is_reduction)]
    is_wide = bool(other.shape) and other.shape[-1] > 1
    is_scaled = is_wide and is_root_of_mean(factor, path)
    if is_scaled or is_weight_of_unit(factor, other):
        is_one_call = is_scaled and any(maker.call == op.call for maker in path)
        yield Layer("norm", op, by_hand=not is_one_call)
    for gate in path:
        if is_gelu(gate, other):
            yield Layer("GELU", gate, by_hand=True)


def is_reduction(op: Op) -> bool:
    """Tells whether each number that an operator makes depends on many."""
    return op.is_matmul or op.name in ("mean", "var", "var_mean", "std")


def is_over_last(op: Op) -> bool:
    """Tells whether an operator reduces the last dimension of its input."""
    return op.scalars.get("dim") in ([-1], [len(op.inputs[0].shape) - 1])


def is_root_of_mean(factor: Tensor, path: list[Op]) -> bool:
    """Tells whether a factor, by the path of what makes it, is a root of activations that are
    reduced in their last dimension."""
    if factor.shape[-1:] != [1]:
        return False
    has_root = any(op.name in ROOTS or op.scalars.get("exponent") in (-0.5, 0.5) for op in path)
    return has_root and any(
        is_reduction(op) and is_over_last(op) and op.inputs[0].is_data() for op in path
    )


def is_weight_of_unit(factor: Tensor, x: Tensor) -> bool:
    """Tells whether a factor is a weight for activations of unit length."""
    return len(factor.shape) == 1 and not factor.is_data() and is_unit(x)


def is_unit(x: Tensor) -> bool:
    """Tells whether x is activations, divided by their length in the last dimension and scaled."""
    division = x.maker
    while division and division.name in ("mul", "_to_copy"):
        division = division.inputs[0].maker
    if division is None or division.name != "div":
        return False
    dividend, *divisors = division.inputs
    return any(
        op.name == "linalg_vector_norm" and is_over_last(op) and dividend.storage in op.reads
        for op in walk(divisors, is_reduction)
    )


def is_gelu(gate: Op, x: Tensor) -> bool:
    """Tells whether the product of x and what a gate leads to is a GELU: whether the gate is erf of
    x, or tanh of a cubic polynomial of x."""
    if gate.name not in ("erf", "tanh"):
        return False
    degrees = gate.inputs[0].degrees
    is_of_x = bool(degrees.keys() & x.degrees.keys())
    return is_of_x and (gate.name == "erf" or 3 in degrees.values())
