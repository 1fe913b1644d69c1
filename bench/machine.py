"""What this machine is, and what it could do at best.

    python -m bench.machine this_machine     # as JSON; in a process of its own, so that the one
    python -m bench.machine matmul_peak      # that asks never holds memory of the GPU
    python -m bench.machine look             # what a report says of it
    python -m bench.machine large_loss       # whether cross entropy takes very large batches
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import warnings
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
        os=f"{platform.system()} {platform.machine()}", threads=torch.get_num_threads(),
        cpu=" ".join([cpu, *cpu_generation()]),
        driver=driver_version() if gpus else None,
        capability="{}.{}".format(*torch.cuda.get_device_capability(0)) if gpus else None,
        cuda=torch.version.cuda,
    )


def cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.+)", path.read_text()) if path.exists() else None
    return model[1] if model else platform.processor() or platform.machine()


def cpu_generation() -> list[str]:
    """Such as ["(family 25, model 17)"]: on a rented machine one name may stand for several."""
    path = Path("/proc/cpuinfo")
    numbers = re.search(r"cpu family\s*: (\d+)\nmodel\s*: (\d+)\n",
                        path.read_text() if path.exists() else "")
    return [f"(family {numbers[1]}, model {numbers[2]})"] if numbers else []


def driver_version() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):  # no nvidia-smi, or it knows none
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
        seconds, began = [], time.perf_counter()
        while time.perf_counter() - began < 1:  # until clock rate and power are those of long work
            marks = [now()]
            for _ in range(products):
                a @ b
                marks.append(now())
            if cuda:
                torch.cuda.synchronize()
            seconds += [start.elapsed_time(end) / 1000 if cuda else end - start
                        for start, end in zip(marks, marks[1:], strict=False)]
        peak[name] = 2 * size**3 / median(seconds[len(seconds) // 2 :])
    return peak


def bandwidth() -> float:
    """Bytes per second, read and written, of a large copy within the device's memory."""
    import torch

    cuda = torch.cuda.is_available()
    source = torch.ones(2**28 if cuda else 2**26, device="cuda" if cuda else "cpu")
    target, seconds = torch.empty_like(source), []
    for _ in range(8):
        began = time.perf_counter()
        target.copy_(source)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * source.nbytes / median(seconds[3:])


def attention_backends() -> list[dict]:
    """For dropout 0, 0.1 and 0.125 what PyTorch chooses for causal attention in bfloat16, and for
    each kernel whether it runs, on a GPU its milliseconds forward and backward at batch 8, and the
    dropout that it really applies."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    cuda = torch.cuda.is_available()
    device, shape = ("cuda", (8, 12, 1024, 64)) if cuda else ("cpu", (8, 8, 128, 64))

    def milliseconds(qkv, dropout: float) -> float:
        marks = []
        for _ in range(25):
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
            y = scaled_dot_product_attention(*qkv, dropout_p=dropout, is_causal=True)
            torch.autograd.grad(y, qkv, y)
        torch.cuda.synchronize()
        return median(a.elapsed_time(b) for a, b in zip(marks[5:], marks[6:], strict=False))

    rows = []
    for dropout in (0.0, 0.1, 0.125):
        qkv = [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
               for _ in range(3)]
        choice = SDPBackend(torch._fused_sdp_choice(*qkv, dropout_p=dropout, is_causal=True))
        for name in ("MATH", "EFFICIENT_ATTENTION", "FLASH_ATTENTION", "CUDNN_ATTENTION"):
            backend = getattr(SDPBackend, name)
            row = dict(dropout=dropout, backend=name.lower(), chosen=backend == choice, runs=False,
                       milliseconds=None, real_dropout=None)
            try:
                with warnings.catch_warnings(), sdpa_kernel(backend):
                    warnings.simplefilter("ignore")  # they say why a kernel isn't available
                    row |= dict(real_dropout=real_dropout(qkv[0].detach(), dropout),
                                milliseconds=milliseconds(qkv, dropout) if cuda else None)
                row["runs"] = True
            except RuntimeError:  # this kernel can't
                pass
            rows.append(row)
    return rows


def real_dropout(like, dropout: float) -> float:
    """The share of the attention weights that are really zeroed, from the spread of the results.

    With equal scores, and values 1 and -1 in turn, a result is the mean of T numbers that are 0 or
    ±1 / (1 - p): around 0, with the variance p / (1 - p) / T.
    """
    import torch

    zeros, values = torch.zeros_like(like), torch.ones_like(like)
    values[..., 1::2, :] = -1
    y = torch.nn.functional.scaled_dot_product_attention(zeros, zeros, values, dropout_p=dropout)
    odds = y[..., 0].float().square().mean().item() * like.shape[2]
    return odds / (1 + odds)


def compile_error() -> str | None:
    """Why torch.compile doesn't work here, in one line; None if it does."""
    import torch

    try:
        x = torch.ones(8, device="cuda" if torch.cuda.is_available() else "cpu")
        torch.compile(lambda x: 2 * x + 1)(x)
    except Exception as error:
        return " ".join(str(error).split("\n")[:2])
    return None


def look() -> dict:
    """All that a report says of this machine, and for each thing that is missing how to get it."""
    import torch

    machine = this_machine()
    compile_fails = compile_error()
    missing = []
    if not machine["gpus"]:
        missing.append("an NVIDIA GPU: without one the small model `cpu-demo` runs")
    if compile_fails:
        how = ("Triton, which PyTorch brings along on Linux (on Windows: `pip install"
               " triton-windows`), and a C compiler" if machine["gpus"] else
               "a C++ compiler (`apt install g++`, `xcode-select --install`, or on Windows Visual"
               " Studio's Build Tools), and PyTorch in a path without spaces")
        missing.append(f"torch.compile, which needs {how} ({compile_fails})")
    if not shutil.which("git"):
        missing.append("git, which leave-one-out and patches/stack.py need: `apt install git`")
    if machine["gpus"] and not torch.cuda.is_bf16_supported(including_emulation=False):
        missing.append("bfloat16 in hardware: an NVIDIA GPU from Ampere on has it")
    return dict(
        machine=machine, memory_gb=memory_gb(), matmul_peak=matmul_peak(), bandwidth=bandwidth(),
        attention=attention_backends(), compile_error=compile_fails, missing=missing,
    )


def memory_gb() -> float | None:
    """GB (1024³ bytes) of the GPU, or of the machine's RAM; None where it isn't known."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory / 1024**3
    return ram_gb()


def ram_gb() -> float | None:
    """GB (1024³ bytes) of the machine's RAM; None where it isn't known."""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1024**3
    return None


def large_loss() -> str:
    """Whether cross entropy is right on logits of more than 2³¹ elements (batch 42 and up at
    context 1,024), which older CUDA kernels took for less. Needs 30 GB; asked in a process of its
    own, since an illegal memory access ends all use of the GPU."""
    import torch

    if not torch.cuda.is_available() or memory_gb() < 30:
        return "not tried"
    rows, ids = 42 * 1024, 50_304
    logits = torch.randn(rows, ids, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(ids, (rows,), device="cuda")
    torch.nn.functional.cross_entropy(logits, targets).backward()
    part = slice(rows - 1024, rows)  # the end lies behind the limit
    last = logits.detach()[part].clone().requires_grad_()
    torch.nn.functional.cross_entropy(last, targets[part]).backward()
    difference = (logits.grad[part] * (rows / 1024) - last.grad).abs().max().item()
    return "right" if difference < 1e-4 else f"wrong by {difference:.1e} in the gradient"


QUESTIONS = {"this_machine": this_machine, "matmul_peak": matmul_peak, "look": look,
             "large_loss": large_loss}

if __name__ == "__main__":
    (question,) = sys.argv[1:]
    print(json.dumps(QUESTIONS[question]()))
