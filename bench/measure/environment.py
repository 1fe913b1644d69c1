"""What this machine is and lacks, told without PyTorch.

    python -m bench.measure.environment QUESTION  # a function of bench.measure.hardware, as JSON:
                                                  # look, this_machine, matmul_peak, ...

Only those load PyTorch, in a process of its own, so that the one that asks never holds memory of
the GPU.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path


def nvidia_smi() -> tuple[str, str] | tuple[None, None]:
    """The name and the driver of the first NVIDIA GPU; None for both where nvidia-smi isn't there,
    or knows of none."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None, None
    # It may exit with 0 after an error, or print "[N/A]".
    first = re.match(r"([^,\[\]\n]+), (\d[\d.]*)$", answer.stdout, re.MULTILINE)
    return (first[1], first[2]) if first else (None, None)


def cpu_name(text: str) -> str:
    """The name from the system's own description, as PyTorch asks for it."""
    fields = dict(re.findall(r"^\s*([\w ]+?)\s*[:=]\s*(.+?)\s*$", text, re.MULTILINE))
    name = fields.get("Model name") or fields.get("Name")  # Linux, Windows
    if not name and platform.system() == "Darwin":  # it tells the name alone
        name = text.strip()
    return name or platform.processor() or platform.machine()


def missing_here(machine: dict, compile_fails: str | None) -> list[str]:
    """For each thing that is missing how to get it; `compile_fails` is why torch.compile does."""
    missing, gpu = [], machine["gpus"]
    if machine.get("gpu_needs"):
        missing.append(machine["gpu_needs"])
    elif not gpu:
        missing.append("an NVIDIA GPU: without one the small model `cpu-demo` runs")
    if compile_fails:
        how = ("Triton, which PyTorch brings along on Linux (on Windows: `pip install"
               " triton-windows`), and a C compiler" if gpu else
               "a C++ compiler (`apt install g++`, `xcode-select --install`, or on Windows Visual"
               " Studio's Build Tools), and PyTorch in a path without spaces")
        missing.append(f"torch.compile, which needs {how} ({compile_fails})")
    if not shutil.which("git"):
        missing.append("git, which leave-one-out and patches/stack.py need: `apt install git`")
    return missing


def ram_gb(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> float | None:
    """GB (1024³ bytes) of the machine's RAM, or of as much of it as a container may use; None where
    it isn't known."""
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # "max" is no limit
        size = min(size, int(limit.read_text()))
    return size / 1024**3


if __name__ == "__main__":
    from bench.measure import hardware

    print(json.dumps(getattr(hardware, sys.argv[1])()))
