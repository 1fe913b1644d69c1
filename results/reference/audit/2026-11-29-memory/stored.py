"""Counts the bytes of the tensors that autograd stores for a script's last backward pass, each
storage once; of the audit nothing is used.

    python stored.py models.py vit --batch_size 16 --steps 2
"""

import runpy
import sys

import torch

stored: list[torch.Tensor] = []
counts: list[int] = []
backward = torch.autograd.backward


def keep(tensor: torch.Tensor) -> torch.Tensor:
    """Is called for each tensor that a backward pass will need."""
    stored.append(tensor.detach())
    return stored[-1]


def count_first(*args, **kwargs) -> None:
    """Replaces torch.autograd.backward: counts what is stored before it is used."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in stored}
    counts.append(sum(storage.nbytes() for storage in storages.values()))
    stored.clear()
    del storages
    backward(*args, **kwargs)


torch.autograd.backward = count_first
with torch.autograd.graph.saved_tensors_hooks(keep, torch.Tensor.detach):
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
print(counts[-1])
