"""Counts what a script's step takes in memory on a CPU, by PyTorch's own means; of the audit
nothing is used.

    python counted.py models.py vit --batch_size 16 --steps 2

Prints JSON, in bytes. `stored` is what autograd keeps for the last backward pass, each storage
once, without parameters. `peak` is the most that PyTorch's profiler sees allocated. Dropout keeps
a mask of a byte per element, and attention what a GPU's kernels keep.
"""

import json
import runpy
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

stored: list[torch.Tensor] = []
counts: list[int] = []
backward = torch.autograd.backward


def keep(tensor: torch.Tensor) -> torch.Tensor:
    """Is called for each tensor that a backward pass will need."""
    base = tensor if tensor._base is None else tensor._base
    if not isinstance(base, nn.Parameter):
        stored.append(tensor.detach())
    return tensor.detach()


def count_first(*args, **kwargs) -> None:
    """Replaces torch.autograd.backward: counts what is stored before it is used."""
    sizes = {}
    for tensor in stored:
        storage = tensor.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
    counts.append(sum(sizes.values()))
    stored.clear()
    backward(*args, **kwargs)


def dropout(x, p=0.5, training=True, inplace=False):
    """Replaces F.dropout, whose masks on a CPU have the type of x."""
    return torch.native_dropout(x, p, True)[0] if training and p else x


class Attention(torch.autograd.Function):
    """Takes the memory of a GPU's kernel, and returns zeros: it keeps what it reads, its result,
    and a float32 for each query."""

    @staticmethod
    def forward(ctx, query, key, value, mask):
        B, H, T, _ = query.shape
        result = query.new_zeros(B, T, H, value.shape[-1]).transpose(1, 2)
        sums = query.new_zeros(B, H, T, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, result, sums)
        return result

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, mask, *_ = ctx.saved_tensors
        of_mask = None
        if ctx.needs_input_grad[3]:  # the kernel makes it for each score
            scores = query.new_zeros(*query.shape[:3], key.shape[2])
            of_mask = scores.sum_to_size(mask.shape)
        return *map(torch.zeros_like, (query, key, value)), of_mask


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **_):
    """Replaces F.scaled_dot_product_attention."""
    return Attention.apply(query, key, value, attn_mask)


def peak(trace: Path) -> int:
    """Returns the most bytes that the events of a profile add up to."""
    events = json.loads(trace.read_text())["traceEvents"]
    allocations = [event for event in events if event["name"] == "[memory]"]
    most = total = 0
    for event in sorted(allocations, key=lambda event: event["ts"]):
        total += event["args"]["Bytes"]
        most = max(most, total)
    return most


def main() -> None:
    del sys.argv[0]
    F.dropout, F.scaled_dot_product_attention = dropout, attention
    torch.autograd.backward = count_first
    with torch.autograd.graph.saved_tensors_hooks(keep, torch.Tensor.detach):
        runpy.run_path(sys.argv[0], run_name="__main__")
    torch.autograd.backward = backward
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        runpy.run_path(sys.argv[0], run_name="__main__")
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        print(json.dumps(dict(stored=counts[-1], peak=peak(trace))))


if __name__ == "__main__":
    main()
