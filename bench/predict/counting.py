"""What a kernel does, by its operator's schema: floating-point operations, bytes read and written.

bench.predict.trace counts what a script does on tensors without storage, bench/audit/watch.py what
somebody's script really does. The latter runs in that script's process and loads this file by its
path: nothing of this repository is imported here.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

# Operators that read, or in their backward pass write, one element or row for each index.
ONE_OF_A_ROW = ("embedding", "gather", "index", "index_select", "nll_loss_backward",
                "nll_loss_forward")
aten = torch.ops.aten


class Kernel(NamedTuple):
    precision: str  # the type of the products, "" where it has none
    is_aligned: bool  # whether their matrices are
    flops: int
    size: int  # bytes read and written
    tensors: list  # that it reads or makes


def bytes_of(*tensors: torch.Tensor) -> int:
    """Counts what is read or written: each element once, however often it is broadcast."""
    return sum(math.prod(size for size, stride in zip(each.shape, each.stride(), strict=True)
                         if stride) * each.itemsize for each in tensors)


def is_aligned(matrix: torch.Tensor) -> bool:
    """Whether its rows (or columns, where it is transposed) fill blocks of 16 bytes."""
    sizes = [size for size, stride in zip(matrix.shape, matrix.stride(), strict=True)
             if stride == 1]
    return all(size * matrix.itemsize % 16 == 0 for size in sizes)


def flops_of(func, args: tuple, kwargs: dict, result) -> int:
    """As PyTorch counts them, which knows no attention on a CPU."""
    packet = getattr(func, "_overloadpacket", func)
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        return sdpa_flop_count(*(each.shape for each in args[:3]))
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return sdpa_backward_flop_count(*(each.shape for each in args[:4]))
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=result)) if formula else 0


def kernel_of(func, args: tuple, kwargs: dict, result, ours: Callable) -> Kernel | None:
    """What an operator does to the tensors that are `ours`, by what its schema says that it reads
    and writes. None: views, and tensors that stay empty, need no kernel."""
    schema = func._schema
    name = schema.name.partition("::")[2]
    given = dict(zip((each.name for each in schema.arguments), args, strict=False)) | kwargs

    def tensors(only_written: bool) -> list:
        return [x for each in schema.arguments if each.name in given
                and (not only_written or each.name != "grads"  # which fused updates only read
                     and each.alias_info and each.alias_info.is_write)
                for x in tree_iter(given[each.name]) if ours(x)]

    read, written, made = tensors(False), tensors(True), [x for x in tree_iter(result) if ours(x)]
    keys = {each.untyped_storage()._cdata for each in read}
    new = [each for each in made if each.untyped_storage()._cdata not in keys]
    if not new and not written or name.startswith(("empty", "new_empty")):
        return None
    if name.startswith("new_") or name.endswith("_like"):
        size = bytes_of(*new)
    elif name in ONE_OF_A_ROW:
        size = bytes_of(*new) * (1 if "backward" in name else 2)
    elif "out" in kwargs or name in ("copy_", "zero_", "fill_"):  # written, but not read
        size = bytes_of(*read)
    else:
        size = bytes_of(*read, *written, *new)
    flops, precision, aligned = flops_of(func, args, kwargs, result), "", True
    if flops:
        precision = str(read[0].dtype).removeprefix("torch.")
        if "attention" not in name:
            aligned = all(map(is_aligned, [*read, *new]))
        elif given.get("is_causal"):
            flops //= 2  # the fused kernel leaves out what the mask hides
    return Kernel(precision, aligned, flops, size, [*read, *made])
