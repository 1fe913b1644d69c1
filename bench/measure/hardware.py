"""Says what PyTorch tells of this machine, and how fast it multiplies matrices.

    python -m bench.measure.hardware QUESTION  # one of ANSWERS, as JSON

It runs in a process of its own, so that the one that asks never holds memory of the GPU. Nothing
here multiplies in bfloat16 on a machine whose scripts train in float32.
"""

import json
import os
import platform
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils import collect_env

from bench.common import ROOT
from bench.machine import Machine
from bench.measure import environment
from gpt_speed import machine
from gpt_speed.script import load_script
from patches import stack


def available_cores() -> int | None:
    """Returns on how many cores this process may run; None where the system doesn't tell."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def this_machine() -> Machine:
    """Returns what a study has to know of it."""
    os.environ["LC_ALL"] = "C"  # so that the system's description isn't translated
    cpu = machine.cpu_name(collect_env.get_cpu_info(collect_env.run) or "")
    gpu, build = first_gpu(), torch_build()
    device, name, driver, capability = "cpu", cpu.partition(" (family ")[0], None, None
    if gpu:
        device, name, driver, capability = "cuda", gpu.name, driver_version(), gpu.capability
    dtype, dtype_reason = best_dtype()
    ram = machine.ram_bytes()
    return Machine(
        device=device,
        gpus=gpu_count(),
        name=" ".join(name.split()),
        cpu=cpu,
        torch=build.version,
        python=platform.python_version(),
        os=f"{platform.system()} {platform.machine()}",
        threads=torch.get_num_threads(),
        cores=available_cores(),  # which OMP_NUM_THREADS doesn't change
        compiles=compile_error() is None,
        driver=driver,
        capability=capability,
        cuda=build.cuda,
        ram_gb=ram / 1024**3 if ram else None,
        dtype=dtype,
        dtype_reason=dtype_reason,
        gpu_needs=environment.gpu_needs(build, gpu, cuda_error()),
    )


def first_gpu() -> environment.Gpu | None:
    """Returns the first GPU that PyTorch can use; None where there is none."""
    if not gpu_count():
        return None
    capability = "{}.{}".format(*torch.cuda.get_device_capability(0))
    return environment.Gpu(torch.cuda.get_device_name(0), capability)


def driver_version() -> str | None:
    """Returns the version of NVIDIA's driver; None where that doesn't tell."""
    return next(iter(environment.nvidia_smi("driver_version")), None)


def torch_build() -> environment.Build:
    """Returns what this PyTorch was built for; its kernels only where there is a GPU for them."""
    kernels: list[str] = []
    if gpu_count():
        kernels = torch.cuda.get_arch_list()
    return environment.Build(torch.__version__, torch.version.cuda, kernels)


def gpu_count() -> int:
    """Returns how many GPUs PyTorch can use. CUDA is started first: before that PyTorch takes the
    count of NVIDIA's library, which is wrong where the driver is too old for this PyTorch, or where
    GPUs are cut up (MIG)."""
    if cuda_error():
        return 0
    return torch.cuda.device_count()


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


def training_device() -> torch.device:
    """Returns the device that scripts train on here."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def plus_1_if_compiled(x: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return x + 1
    return x


@cache
def compile_error() -> str | None:
    """Returns why torch.compile doesn't work here, in one line; None if it does."""
    try:
        zeros = torch.zeros(8, device=training_device())
        answer = torch.compile(plus_1_if_compiled)(zeros)
    except Exception as error:
        return " ".join(str(error).split("\n")[:2])
    if answer[0] == 1:
        return None
    return "it is switched off, as by TORCH_COMPILE_DISABLE"


def look() -> dict:
    """Returns all that a report says of this machine, and for each thing that is missing how to
    get it; `memory_gb` is that of the GPU, or the RAM."""
    here, compile_fails = this_machine(), compile_error()
    memory_gb = here["ram_gb"]
    if here["gpus"]:
        memory_gb = torch.cuda.get_device_properties(0).total_memory / 1024**3
    return dict(
        machine=here,
        memory_gb=memory_gb,
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
        if torch.cuda.get_device_properties(gpu).is_integrated:  # it shares the host's
            free = 3 * free // 4
        sizes.append(free)
    return sizes


def best_dtype() -> tuple[str, str]:
    """Returns the type that the optimized scripts train in here, and why: 01 itself decides."""
    return load_script(ROOT / stack.LAST).best_dtype(training_device())


def matmul_peak() -> dict[str, float]:
    """Returns how fast matrices are multiplied here, by precision: see gpt_speed.machine."""
    return machine.matmul_peak(best_dtype()[0])


def copy_rate() -> float:
    """Returns how fast memory is read and written here, in bytes per second."""
    return machine.copy_rate()


def matmul_rate() -> float:
    """Returns the rate in the type trained in, measured for a moment: it tells whether the machine
    is as fast as before."""
    return machine.product_rate(best_dtype()[0], minimum=0.2)


ANSWERS: dict[str, Callable[[], Any]] = {  # by the question
    "this_machine": this_machine,
    "look": look,
    "compile_error": compile_error,
    "copy_rate": copy_rate,
    "free_memory": free_memory,
    "matmul_peak": matmul_peak,
    "matmul_rate": matmul_rate,
    "rank_count": rank_count,
}


if __name__ == "__main__":
    print(json.dumps(ANSWERS[sys.argv[1]]()))
