"""Says what this machine is and lacks, without PyTorch."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from bench.common import ROOT
from bench.machine import Machine

# PyTorch's builds for NVIDIA GPUs: the CUDA that the driver has to support, the oldest compute
# capability that the build has kernels for, and the one from which on it has none.
# https://github.com/pytorch/pytorch/blob/main/RELEASE.md#pytorch-cuda-support-matrix
BUILDS = {"cu130": (13_000, 7.5, 99), "cu126": (12_000, 0, 10)}
COMPILERS = {  # what torch.compile needs
    "cuda": "Triton, which PyTorch brings along on Linux (on Windows: `pip install"
    " triton-windows`), and a C compiler",
    "cpu": "a C++ compiler (`apt install g++`, `xcode-select --install`, or on Windows Visual"
    " Studio's Build Tools), and PyTorch in a path without spaces",
}
SMI_FIELDS = {"name": r"[^,\[\]]+", "driver_version": r"\d[\d.]*", "compute_cap": r"\d+\.\d+"}
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")  # a container sees that of its host
NO_ACCESS = (
    "access to the NVIDIA GPU whose driver is loaded: `nvidia-smi` says why there is none; a"
    " container is started with --gpus all"
)


@dataclass(frozen=True)
class Build:
    """What a PyTorch was built for."""

    version: str
    cuda: str | None  # its version; None of a build for CPUs or for AMD's GPUs
    kernels: list[str] = field(default_factory=list)  # as ["sm_80", "sm_90"], for the GPU it found


@dataclass(frozen=True)
class Gpu:
    """A GPU that PyTorch finds."""

    name: str
    capability: str  # its compute capability, such as "8.0"


def gpu_needs(build: Build, gpu: Gpu | None, error: str) -> str | None:
    """Returns what is missing before PyTorch computes on the NVIDIA GPU that is here, in one line;
    None where there is no GPU, or nothing is missing. `gpu` is the one that PyTorch finds, if any;
    `error` is why it doesn't start CUDA."""
    if gpu:
        return kernels_needed(build, gpu)
    gpus = nvidia_smi("name,driver_version")
    if not gpus and NVIDIA_DRIVER.exists():
        return NO_ACCESS
    if not gpus:
        return None
    name, _, driver = gpus[0].rpartition(", ")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden in ("", "-1"):
        return f"a visible GPU: CUDA_VISIBLE_DEVICES={hidden} hides the {name}"
    too_old = re.search(r"driver .* too old \(found version (\d+)\)", error)
    if too_old:
        needing = f"PyTorch {build.version}, built for CUDA {build.cuda}"
        return newer_driver(name, driver, needing, too_old[1])
    command = install(smi_capability())
    if not build.cuda and command:
        return f"PyTorch for NVIDIA GPUs, since {build.version} can't use the {name}: {command}"
    return f"what keeps PyTorch {build.version} from the {name}: {error}"


def kernels_needed(build: Build, gpu: Gpu) -> str | None:
    """Returns which kernels PyTorch lacks for a GPU that it can use; None if it has them."""
    if has_kernels(float(gpu.capability), build.kernels):
        return None
    command = install(float(gpu.capability)) or "no build of it does"
    return (
        f"kernels for the {gpu.name}, compute capability {gpu.capability}, which PyTorch"
        f" {build.version} doesn't have: {command}"
    )


def newer_driver(name: str, driver: str, needing: str, supported: str) -> str:
    """Returns that a GPU needs a newer driver, or another build of PyTorch, one for a CUDA that the
    driver supports: "12020" is 12.2."""
    need = f"a newer driver for the {name}: {driver} is too old for {needing}"
    command = install(smi_capability(), int(supported))
    if command:
        need += f"; or, for this driver, {command}"
    return need


def smi_capability() -> float:
    """Returns the compute capability of the first GPU, by its driver; 0 where that doesn't tell."""
    return float(next(iter(nvidia_smi("compute_cap")), 0))


def has_kernels(capability: float, kernels: list[str]) -> bool:
    """Returns whether a build of PyTorch has kernels for a GPU: compiled for the same major
    version, or as code for any later GPU (PTX). A build for AMD's GPUs names them in another way,
    and isn't judged."""
    matches = [re.match(r"(sm|compute)_(\d+)", name) for name in kernels]
    built = [(match[1] == "compute", int(match[2]) / 10) for match in matches if match]
    if not built:
        return True
    return any(can_run(capability, built_for, is_ptx) for is_ptx, built_for in built)


def can_run(capability: float, built_for: float, is_ptx: bool) -> bool:
    """Returns whether a GPU runs a kernel that was built for this compute capability."""
    if built_for > capability:
        return False
    return is_ptx or int(built_for) == int(capability)


def install(capability: float, driver: int = 99_999) -> str | None:
    """Returns the command for a build with kernels for a GPU, whose driver supports such a CUDA;
    None where there is none."""
    builds = [
        name
        for name, (cuda, oldest, too_new) in BUILDS.items()
        if driver >= cuda and oldest <= capability < too_new
    ]
    if not builds:
        return None
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    (pinned,) = re.findall(r"^#gpu (torch==.*)$", text, re.MULTILINE)
    return (
        f"`pip install --force-reinstall {pinned} --index-url"
        f" https://download.pytorch.org/whl/{builds[0]}`"
    )


def nvidia_smi(fields: str) -> list[str]:
    """Returns a line for each GPU, with these fields as nvidia-smi tells them to programs; none
    where it isn't there or fails. A line in another form is left out: nvidia-smi may print "[N/A]"
    or an error's text and exit with 0."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    form = ", ".join(SMI_FIELDS[name] for name in fields.split(","))
    return [line for line in answer.stdout.splitlines() if re.fullmatch(form, line)]


def missing_here(machine: Machine, compile_fails: str | None) -> list[str]:
    """Returns how to get each thing that is missing; `compile_fails` is why torch.compile does."""
    missing = []
    gpu_needs = machine.get("gpu_needs")
    if gpu_needs:
        missing.append(gpu_needs)
    elif not machine["gpus"]:
        missing.append("an NVIDIA GPU: without one the small model `cpu-demo` runs")
    if compile_fails:
        how = COMPILERS[machine["device"]]
        missing.append(f"torch.compile, which needs {how} ({compile_fails})")
    if not shutil.which("git"):
        missing.append("git, which leave-one-out and patches/stack.py need: `apt install git`")
    return missing
