"""What is read of PyTorch's own state, in the process of somebody's script, from PyTorch 2.4 on."""

import functools
import gc
import sys
from collections import Counter

import torch


def compiler_counts(group: str) -> Counter:
    """Returns what torch.compile has counted so far, of one of its groups of counters."""
    utils = sys.modules.get("torch._dynamo.utils")
    if not utils:
        return Counter()
    return utils.counters[group]


def graph_count() -> int:
    """Returns how many graphs torch.compile has made."""
    return compiler_counts("stats")["unique_graphs"]


def memory_budget() -> float:
    """Returns the share of activations that the compiler may keep for the backward pass."""
    config = sys.modules.get("torch._functorch.config")
    return getattr(config, "activation_memory_budget", 1.0)


@functools.cache
def type_name(dtype: torch.dtype) -> str:
    """Returns "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def living(kind: type) -> list:
    """Returns the tensors, or the modules, that exist in this process. `type` is asked, since a
    proxy's class may be computed."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]
