"""What a script's process is like: its memory, its compiler, its optimizers."""

import contextlib
import ctypes
import inspect
import os
import sys
from pathlib import Path

import torch

from gpt_speed.pytorch import compiler_counts, graph_count, memory_budget


def process_facts() -> dict:
    """Returns what the report says of the process."""
    facts = dict(
        torch=torch.__version__,
        graphs=graph_count(),
        breaks=compiler_counts("graph_break"),
        budget=memory_budget(),
        tf32=uses_tf32(),
        huge_pages=has_huge_pages(),
    )
    if torch.cuda.is_initialized():
        return facts | gpu_facts()
    return facts | cpu_facts()


def gpu_facts() -> dict:
    """Returns how the script uses the GPU's memory."""
    segments = torch.cuda.memory_snapshot()
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return dict(
        device="cuda",
        memory=torch.cuda.max_memory_reserved(),
        memory_total=torch.cuda.mem_get_info()[1],
        kept=any(segment.get("is_expandable") for segment in segments),
        shares_memory=bool(getattr(gpu, "is_integrated", False)),
    )


def cpu_facts() -> dict:
    """Returns how the script uses memory on a CPU."""
    return dict(
        device="cpu",
        memory=peak_memory(),
        memory_total=None,
        kept=keeps_memory(),
        shares_memory=False,
    )


def peak_memory() -> int | None:
    """Returns the most bytes that this process had in memory; None on Windows."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak
    return 1024 * peak


def keeps_memory() -> bool | None:
    """Tells whether glibc takes large pieces from what it keeps; None for another malloc."""
    with contextlib.suppress(OSError):
        library, maps = ctypes.CDLL("libc.so.6"), Path("/proc/self/maps").read_text()
        library.malloc.restype = ctypes.c_void_p
        is_glibc = not any(name in maps for name in ("jemalloc", "tcmalloc", "mimalloc"))
        # More than lies free between pieces in use.
        if is_glibc and (block := library.malloc(ctypes.c_size_t(2**30))):
            is_mapped = ctypes.c_size_t.from_address(block - 8).value & 2  # a flag of malloc.c
            library.free(ctypes.c_void_p(block))
            return not is_mapped
    return None


def has_huge_pages() -> bool | None:
    """Tells whether the script has them; None where the system doesn't give any."""
    setting = "[never]"
    with contextlib.suppress(OSError):
        setting = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    if "[never]" in setting:
        return None
    return "[always]" in setting or os.environ.get("THP_MEM_ALLOC_ENABLE") == "1"


def uses_tf32() -> bool:
    """Tells whether float32 matmuls on a GPU are in TF32."""
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):
        return matmul.fp32_precision == "tf32"
    return matmul.allow_tf32  # before PyTorch 2.9


def optimizer_facts(optimizer: torch.optim.Optimizer, place: str) -> dict:
    """Returns an optimizer's class, whether it is PyTorch's `own`, `accepts` to be fused, and is,
    whether it may update all tensors at once (`foreach`), how many it updates (those without a
    gradient it skips), and the script's line that made it."""
    optimizer_class, groups = type(optimizer), optimizer.param_groups
    tensors = [tensor for group in groups for tensor in group["params"]]
    updated = [tensor for tensor in tensors if tensor.grad is not None]
    return dict(
        name=optimizer_class.__name__,
        own=optimizer_class.__module__.startswith("torch.optim"),
        accepts="fused" in inspect.signature(optimizer_class.__init__).parameters,
        fused=all(group.get("fused") for group in groups),
        foreach=all(group.get("foreach", False) is not False for group in groups),
        tensors=len(updated or tensors),
        place=place,
    )
