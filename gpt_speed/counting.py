"""What a kernel does, by its operator's schema: floating-point operations, bytes read and written.

bench.predict.trace counts what a script does on tensors without storage, gpt_speed.audit.watch what
anyone's script really does, in that script's process.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from gpt_speed.pytorch import type_name

# Operators that read, or in their backward pass write, one element or row for each index.
ONE_OF_A_ROW = (
    "embedding",
    "gather",
    "index",
    "index_select",
    "nll_loss_backward",
    "nll_loss_forward",
)
FORMULAS = {str(operator): formula for operator, formula in flop_registry.items()}


class Kernel(NamedTuple):
    precision: str  # the type of its matmuls, "" where it has none
    is_aligned: bool  # whether their matrices are
    flops: int
    size: int  # bytes read and written
    tensors: list  # that it reads or makes


def leaves(value) -> Iterator:
    """Yields what is in lists, tuples and dictionaries, one within another: all that operators
    take and return. PyTorch's own tree_iter is ten times slower."""
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        for part in value:
            yield from leaves(part)
    else:
        yield value


def bytes_of(*tensors: torch.Tensor) -> int:
    """Counts each element once, however often it is broadcast."""
    return sum(
        math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)
        * x.itemsize
        for x in tensors
    )


def is_aligned(matrix: torch.Tensor) -> bool:
    """Tells whether its rows (its columns, if transposed) fill blocks of 16 bytes."""
    return all(
        size * matrix.itemsize % 16 == 0
        for size, stride in zip(matrix.shape, matrix.stride(), strict=True)
        if stride == 1
    )


def flops_of(func, args: tuple, kwargs: dict, result) -> int:
    """Counts as PyTorch does, and attention on a CPU, which it misses, as on a GPU."""
    operator = str(getattr(func, "_overloadpacket", func)).replace("_for_cpu", "")
    formula = FORMULAS.get(operator)
    if not formula:
        return 0
    return int(formula(*args, **kwargs, out_val=result))


class Access(NamedTuple):
    """The tensors that an operator reads and makes."""

    read: list  # all that it is passed
    written: list  # those of `read` that it changes
    outputs: list
    new: list  # outputs whose storage is none of `read`


def access_of(schema, values: dict, result, is_counted: Callable) -> Access:
    """Returns what an operator with a schema does to the tensors that are counted; `values` are
    its arguments by name."""

    def tensors_in(arguments) -> list:
        return [
            x for argument in arguments for x in leaves(values.get(argument.name)) if is_counted(x)
        ]

    def is_written(argument) -> bool:
        is_marked = argument.alias_info and argument.alias_info.is_write
        return is_marked and argument.name != "grads"  # which fused updates only read

    read = tensors_in(schema.arguments)
    outputs = [x for x in leaves(result) if is_counted(x)]
    storages = {x.untyped_storage()._cdata for x in read}
    new = [x for x in outputs if x.untyped_storage()._cdata not in storages]
    return Access(read, tensors_in(filter(is_written, schema.arguments)), outputs, new)


def bytes_moved(name: str, access: Access, has_out: bool) -> int:
    """Counts the bytes that an operator reads and writes; `has_out`: into an argument `out`."""
    if name.startswith("new_") or name.endswith("_like"):
        return bytes_of(*access.new)
    if name in ONE_OF_A_ROW:
        rows = bytes_of(*access.new)
        if "backward" in name:
            return rows
        return 2 * rows
    if has_out or name in ("copy_", "zero_", "fill_"):  # written, but not read
        return bytes_of(*access.read)
    return bytes_of(*access.read, *access.written, *access.new)


def kernel_of(func, args: tuple, kwargs: dict, result, is_counted: Callable) -> Kernel | None:
    """Returns what an operator does to the tensors that are counted, by what its schema says that
    it reads and writes; None where it needs no kernel: for views, and for tensors that stay
    empty."""
    schema = func._schema
    name = schema.name.partition("::")[2]
    values = dict(zip((argument.name for argument in schema.arguments), args, strict=False))
    values |= kwargs
    access = access_of(schema, values, result, is_counted)
    is_view = not access.new and not access.written
    if is_view or name.startswith(("empty", "new_empty")):
        return None
    size = bytes_moved(name, access, has_out="out" in kwargs)
    tensors = [*access.read, *access.outputs]
    flops = flops_of(func, args, kwargs, result)
    if not flops:
        return Kernel("", True, 0, size, tensors)
    precision = type_name(access.read[0].dtype)
    if "attention" not in name:
        is_all_aligned = all(map(is_aligned, [*access.read, *access.new]))
        return Kernel(precision, is_all_aligned, flops, size, tensors)
    if values.get("is_causal"):
        flops //= 2  # the fused kernel leaves out what the mask hides
    return Kernel(precision, True, flops, size, tensors)
