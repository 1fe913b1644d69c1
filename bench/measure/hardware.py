"""Says what PyTorch tells of this machine, and how fast it multiplies matrices.

Nothing here multiplies in bfloat16 on a machine whose scripts train in float32.
"""

import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from statistics import median
from types import ModuleType

import torch
from torch.utils import collect_env
from torch.utils.benchmark import Timer

from bench.common import ROOT, load_script
from bench.measure import environment
from patches import stack


def available_cores() -> int | None:
    """Returns on how many cores this process may run; None where the system doesn't tell."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def this_machine() -> dict:
    """Returns what a study has to know of it. `device` is "cuda" or "cpu"; `driver` and
    `capability`, such as "8.0", are the GPU's, or None; `cuda` is the version that PyTorch was
    built with, or None; `ram_gb` is the host's memory in GB (1024³ bytes), or None; `dtype` is the
    type that the optimized scripts train in here, "bfloat16" or "float32", with its reason."""
    os.environ["LC_ALL"] = "C"  # so that the system's description isn't translated
    gpus = gpu_count()
    cpu = environment.cpu_name(collect_env.get_cpu_info(collect_env.run) or "")
    gpu = torch.cuda.get_device_name(0) if gpus else None
    capability = "{}.{}".format(*torch.cuda.get_device_capability(0)) if gpus else None
    dtype, dtype_reason = best_dtype()
    return dict(
        device="cuda" if gpus else "cpu",
        gpus=gpus,
        name=" ".join((gpu or cpu.partition(" (family ")[0]).split()),
        cpu=cpu,
        torch=torch.__version__,
        python=platform.python_version(),
        os=f"{platform.system()} {platform.machine()}",
        threads=torch.get_num_threads(),
        cores=available_cores(),  # which OMP_NUM_THREADS doesn't change
        compiles=compile_error() is None,
        driver=next(iter(environment.nvidia_smi("driver_version")), None) if gpus else None,
        capability=capability,
        cuda=torch.version.cuda,
        ram_gb=environment.ram_gb(),
        dtype=dtype,
        dtype_reason=dtype_reason,
        gpu_needs=environment.gpu_needs(
            torch.__version__,
            torch.version.cuda,
            gpu,
            capability,
            torch.cuda.get_arch_list() if gpus else [],
            cuda_error(),
        ),
    )


def gpu_count() -> int:
    """Returns how many GPUs PyTorch can use. Before CUDA has started it takes the count of NVIDIA's
    library, which has all GPUs where the driver is too old for this PyTorch, and whole ones where
    they are cut up (MIG)."""
    return 0 if cuda_error() else torch.cuda.device_count()


def cuda_error() -> str:
    """Returns why CUDA doesn't start, in PyTorch's words; "" where it does."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).split("\n")[0]
    return ""


def rank_count() -> int:
    """Returns how many processes `make bench` gives 02: one for each GPU, two without."""
    return gpu_count() or 2


@cache
def compile_error() -> str | None:
    """Returns why torch.compile doesn't work here, in one line; None if it does."""
    try:
        x = torch.ones(8, device="cuda" if torch.cuda.is_available() else "cpu")
        compiled = torch.compile(lambda x: x + torch.compiler.is_compiling())(x)
    except Exception as error:
        return " ".join(str(error).split("\n")[:2])
    return None if compiled[0] == 2 else "it is switched off, as by TORCH_COMPILE_DISABLE"


def look() -> dict:
    """Returns all that a report says of this machine, and for each thing that is missing how to
    get it; `memory_gb` is that of the GPU, or the RAM."""
    here, compile_fails = this_machine(), compile_error()
    memory = here["ram_gb"]
    if here["gpus"]:
        memory = torch.cuda.get_device_properties(0).total_memory / 1024**3
    return dict(
        machine=here,
        memory_gb=memory,
        matmul_peak=matmul_peak(),
        compile_error=compile_fails,
        missing=environment.missing_here(here, compile_fails),
    )


def free_memory() -> list[int]:
    """Returns the MiB of each GPU that a program can take, next to the driver and all other
    programs. Of a GPU that shares the host's memory a quarter of what is free stays free: where
    that runs out, the host hangs (https://github.com/pytorch/pytorch/issues/174358)."""
    sizes = []
    for gpu in range(gpu_count()):
        free = torch.cuda.mem_get_info(gpu)[0] // 2**20
        is_shared = torch.cuda.get_device_properties(gpu).is_integrated
        sizes.append(3 * free // 4 if is_shared else free)
    return sizes


def best_dtype() -> tuple[str, str]:
    """Returns the type that the optimized scripts train in here, and why: 01 itself decides."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with placeholders("numpy", "tiktoken"):  # an audit runs where these aren't
        script = load_script(ROOT / stack.LAST)
    return script.best_dtype(device)


class Placeholder(ModuleType):
    """Stands for a module that isn't installed, while a script is loaded that only names it."""

    def __getattr__(self, name: str) -> type:
        return object  # for annotations


@contextmanager
def placeholders(*names: str) -> Iterator[None]:
    """Lets those of these modules that aren't installed be imported."""
    absent = [name for name in names if not importlib.util.find_spec(name)]
    sys.modules |= {name: Placeholder(name) for name in absent}
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


def product_rate(dtype: str, minimum: float = 1) -> float:
    """Returns the floating-point operations per second of a large matmul, repeated for `minimum`
    seconds: by the median of the second half, when clock rate and power are those of long work."""
    device, size = ("cuda", 8192) if torch.cuda.is_available() else ("cpu", 2048)
    torch.set_float32_matmul_precision("high" if dtype == "TF32" else "highest")
    stored = torch.float32 if dtype == "TF32" else getattr(torch, dtype)
    # Random numbers: products of equal ones take less power, and so a GPU clocks higher.
    a, b = (torch.randn(size, size, device=device).to(stored) for _ in range(2))
    timer = Timer("a @ b", globals=dict(a=a, b=b), num_threads=torch.get_num_threads())
    times = timer.blocked_autorange(min_run_time=minimum).times
    return 2 * size**3 / median(times[len(times) // 2 :])


def matmul_peak() -> dict[str, float]:
    """Returns the rates by precision; in float16 where a GPU has units for that and none for
    bfloat16."""
    gpu = torch.cuda.is_available()
    has = dict(
        float32=True,
        TF32=gpu and torch.cuda.is_tf32_supported(),
        float16=gpu and (7, 0) <= torch.cuda.get_device_capability() < (8, 0),
        bfloat16=best_dtype()[0] == "bfloat16",
    )
    return {name: product_rate(name) for name in has if has[name]}


def matmul_rate() -> float:
    """Returns that of the type trained in, for a moment: whether the machine is as fast as
    before."""
    return product_rate(best_dtype()[0], minimum=0.2)
