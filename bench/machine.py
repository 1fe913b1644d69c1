"""What this machine is, and what it could do at best.

    python -m bench.machine this_machine     # as JSON; in a process of its own, so that the one
    python -m bench.machine matmul_peak      # that asks never holds memory of the GPU
"""

import json
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

# Dense bf16 floating-point operations per second by NVIDIA's datasheets, by PyTorch's name of the
# GPU.
PEAK_FLOPS = {
    "NVIDIA A10G": 70e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
}
A100_FLOPS = PEAK_FLOPS["NVIDIA A100-SXM4-80GB"]  # the GPU of the published figures


def peak_flops(gpu: str | None) -> float | None:
    """The datasheet's bf16 floating-point operations per second; None for a GPU not listed."""
    return PEAK_FLOPS.get(gpu)


def this_machine() -> dict:
    """What a plan has to know of it. `device` is "cuda" or "cpu"; `driver` and `capability` (such
    as "8.0") are the GPU's, or None; `cuda` is the version that PyTorch was built with, or None."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cpu = cpu_name()
    gpu = torch.cuda.get_device_name(0) if gpus else None
    return dict(
        device="cuda" if gpus else "cpu", gpus=gpus, name=" ".join((gpu or cpu).split()),
        torch=torch.__version__, python=platform.python_version(),
        os=f"{platform.system()} {platform.machine()}", threads=torch.get_num_threads(), cpu=cpu,
        driver=driver_version() if gpus else None,
        capability="{}.{}".format(*torch.cuda.get_device_capability(0)) if gpus else None,
        cuda=torch.version.cuda,
    )


def cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.+)", path.read_text()) if path.exists() else None
    return model[1] if model else platform.processor() or platform.machine()


def driver_version() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True).stdout.split()[0]
    except (OSError, IndexError):  # there is no nvidia-smi, or it knows no driver
        return None


def matmul_peak() -> dict[str, float]:
    """Floating-point operations per second of a large matrix product, by precision."""
    import torch

    cuda = torch.cuda.is_available()
    device, size, products = ("cuda", 8192, 20) if cuda else ("cpu", 2048, 5)

    def now() -> object:
        if not cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    peak = {}
    for name, dtype, precision in (
        ("float32", torch.float32, "highest"), ("TF32", torch.float32, "high"),
        ("bfloat16", torch.bfloat16, "highest"),
    ):
        if name == "TF32" and not cuda:
            continue
        torch.set_float32_matmul_precision(precision)
        # Random numbers: products of equal ones take less power, and so a GPU clocks higher.
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        for _ in range(3):  # warm-up
            a @ b
        marks = [now()]
        for _ in range(products):
            a @ b
            marks.append(now())
        if cuda:
            torch.cuda.synchronize()
        seconds = [start.elapsed_time(end) / 1000 if cuda else end - start
                   for start, end in zip(marks, marks[1:], strict=False)]
        peak[name] = 2 * size**3 / median(seconds)
    return peak


if __name__ == "__main__":
    (question,) = sys.argv[1:]
    print(json.dumps({"this_machine": this_machine, "matmul_peak": matmul_peak}[question]()))
