"""What this machine is and lacks, without PyTorch.

    python -m bench.measure.environment QUESTION  # a function of bench.measure.hardware, as JSON:
                                                  # look, this_machine, matmul_peak, ...

Only those load PyTorch, in a process of its own, so that the one that asks never holds memory of
the GPU.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path


def gpu_needs(version: str, error: str) -> str | None:
    """Returns what is missing before this version of PyTorch computes on the NVIDIA GPU here, in
    one line, by the `error` that it gives; None where that is "", or without a GPU."""
    if not error:
        return None
    gpus = nvidia_smi()
    if not gpus:  # but a container sees the driver of its host
        return ("access to the NVIDIA GPU whose driver is loaded: `nvidia-smi` says why there is"
                " none; a container is started with --gpus all") if (
            Path("/proc/driver/nvidia/version").exists()) else None
    name, driver = gpus[0]
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden in ("", "-1"):
        return f"a visible GPU: CUDA_VISIBLE_DEVICES={hidden} hides the {name}"
    return (f"a PyTorch that works with the {name}, driver {driver}, as"
            f" docs/troubleshooting.md#which-pytorch says; this one, {version}: {error}")


def nvidia_smi() -> list[tuple[str, str]]:
    """Returns (name, version of the driver) of each GPU that nvidia-smi finds; nothing where it
    isn't there or fails. It may also exit with 0 and print "[N/A]" or an error's text."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return re.findall(r"^([^,\[\]\n]+), (\d[\d.]*)$", answer.stdout, re.MULTILINE)


def missing_here(machine: dict, compile_fails: str | None) -> list[str]:
    """Returns how to get each thing that is missing; `compile_fails` is why torch.compile does."""
    missing, gpu = [], machine["gpus"]
    if machine.get("gpu_needs"):
        missing.append(machine["gpu_needs"])
    elif not gpu:
        missing.append("an NVIDIA GPU: without one the small model `cpu-demo` runs")
    if compile_fails:
        needs = "Triton (on Windows: `pip install triton-windows`) and a C compiler" if gpu else (
            "a C++ compiler (`apt install g++`, `xcode-select --install`, or on Windows Visual"
            " Studio's Build Tools), and PyTorch in a path without spaces")
        missing.append(f"torch.compile, which needs {needs} ({compile_fails})")
    if not shutil.which("git"):
        missing.append("git, which leave-one-out and patches/stack.py need: `apt install git`")
    return missing


def ram_gb(limits: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Returns the GB (1024³ bytes) of the machine's RAM, or of as much of it as a container may
    use; None where it isn't known."""
    sizes = []
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of version 2 and 1
        with suppress(OSError, ValueError):  # "max" is no limit
            sizes.append(int((limits / name).read_text()))
    return min(sizes) / 1024**3 if sizes else None


if __name__ == "__main__":
    from bench.measure import hardware

    print(json.dumps(getattr(hardware, sys.argv[1])()))
