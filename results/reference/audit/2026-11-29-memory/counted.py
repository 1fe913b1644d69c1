"""Counts the bytes of a script's step by PyTorch's own means; of the audit nothing is used.

    python counted.py models.py vit --batch_size 16 --steps 2

Prints two numbers. `stored` are the tensors that autograd keeps for the last backward pass, each
storage once. `peak` is the most that PyTorch's profiler sees allocated. Dropout keeps a mask of a
byte an element, as on a GPU.
"""

import json
import runpy
import sys
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

stored: list[torch.Tensor] = []
counts: list[int] = []
backward = torch.autograd.backward


def keep(tensor: torch.Tensor) -> torch.Tensor:
    """Is called for each tensor that a backward pass will need."""
    stored.append(tensor.detach())
    return stored[-1]


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
    """Replaces torch.nn.functional.dropout, whose masks on a CPU have the type of x."""
    return torch.native_dropout(x, p, True)[0] if training and p else x


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
    torch.nn.functional.dropout = dropout
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
