"""`Machine`: what a study has to know of the machine that it is measured on, and what that machine
can do."""

import importlib.util
import re
from typing import Any, TypedDict

from bench.options import has_option
from gpt_speed.common import UserError

# What a short name of a machine leaves out of the name that the machine gives itself.
LEFT_OUT = (
    r"\((R|TM)\)",
    r"( CPU)? @.*$",  # the clock rate
    r" Processor$",
    r"^NVIDIA (GeForce )?",
    r" \d+GB HBM\w+$",
    r" \d+GB(?= PCIe$)",
    r"-\d+GB$",
)
LATER_FACTS = {"compiles", "cores"}  # of a Machine, which older journals lack


class Machine(TypedDict, total=False):
    """What a study has to know of a machine, by bench.measure.hardware.this_machine. Journals keep
    it; older ones lack some of it."""

    device: str  # "cuda" or "cpu"
    gpus: int  # that PyTorch can use
    name: str  # of the GPU, or else of the CPU
    cpu: str
    torch: str  # its version
    python: str
    os: str
    threads: int  # of PyTorch on the CPU
    cores: int | None  # that a process may run on
    compiles: bool  # whether torch.compile works
    driver: str | None  # the GPU's
    capability: str | None  # the GPU's compute capability, such as "8.0"
    cuda: str | None  # the version that PyTorch was built with
    ram_gb: float | None  # of the host, GB of 1024³ bytes
    dtype: str  # that the optimized scripts train in here, "bfloat16" or "float32"
    dtype_reason: str
    gpu_needs: str | None  # what is missing before PyTorch computes on the GPU


def release(version: str) -> tuple[int, ...]:
    """Returns what PyTorch's versions are ordered by: (2, 13) for "2.13.0a0+git1234"."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def short_name(machine: Machine) -> str:
    """Returns a machine's name as pictures show it: "H100", "T4 (float32)"."""
    name = machine["name"]
    for part in LEFT_OUT:
        name = re.sub(part, "", name, flags=re.IGNORECASE)
    if trained_in(machine) != "bfloat16":
        name += f" ({trained_in(machine)})"
    return name


def trained_in(machine: Machine) -> str:
    """Returns the type that the optimized scripts train in there, bfloat16 or float32."""
    # Older journals don't tell; their machines had bfloat16 units.
    return machine.get("dtype", "bfloat16")


def machine_difference(one: Machine, other: Machine) -> str | None:
    """Returns, with both values, what keeps figures of one machine from standing for the other's;
    None where nothing does."""
    facts, facts_here = facts_to_compare(one), facts_to_compare(other)
    for name, value in facts.items():
        here = facts_here.get(name)
        is_unknown = name in LATER_FACTS and None in (value, here)
        if value != here and not is_unknown:
            return f"{name}: {value}, here: {here}"
    return None


def facts_to_compare(machine: Machine) -> dict[str, Any]:
    """Returns the facts in which two machines have to be alike. The host of a GPU isn't among
    them."""
    names = ["name", "device", "gpus", "torch"]
    if machine.get("device") == "cpu":
        # One name may stand for several generations, which `cpu` tells apart; and a process may
        # have been given fewer cores.
        names += ["cpu", "threads", "cores"]
    facts: dict[str, Any] = {name: machine.get(name) for name in [*names, "compiles"]}
    return facts | dict(dtype=trained_in(machine))


def same_machine(one: Machine, other: Machine) -> bool:
    return machine_difference(one, other) is None


def in_float16(machine: Machine, options: list[str]) -> bool:
    """Returns whether 01 and 02 shall be composed with precision-fp16: on a GPU whose tensor cores
    don't multiply bfloat16, unless `options` choose the type."""
    return (
        machine["gpus"] > 0
        and 7 <= float(machine.get("capability") or 0) < 8
        and not has_option("--dtype", options)
    )


def lacking(needs: str, machine: Machine) -> str | None:
    """Returns the first thing that a variant needs and this machine lacks, as a row says it. Raises
    UserError for a need that isn't known."""
    for need in filter(None, needs.split(", ")):
        if not has(machine, need):
            return f"needs {need}"
    return None


def has(machine: Machine, need: str) -> bool:
    """Returns whether a machine has what a patch's header says that a variant needs, such as
    "package bitsandbytes" or "compute capability 8.9". Raises UserError for a need that isn't
    known."""
    match need.split():
        case ["package", name]:
            return importlib.util.find_spec(name) is not None
        case ["an", "NVIDIA", "GPU"]:
            return machine["gpus"] > 0 and not is_amd(machine)
        case ["bfloat16", "units"]:
            return trained_in(machine) != "float32"
        case ["compute", "capability", least]:
            return has_capability(machine, float(least))
    raise UserError(f"no rule in bench/machine.py says which machine has {need!r}")


def is_amd(machine: Machine) -> bool:
    """Returns whether its GPUs are AMD's, for which PyTorch has no version of CUDA."""
    return machine["gpus"] > 0 and machine.get("cuda", "") is None


def has_capability(machine: Machine, least: float) -> bool:
    """Returns whether a GPU has at least this compute capability. A CPU has none, and variants may
    emulate there; AMD counts in another way."""
    capability = machine.get("capability")
    if not capability:
        return True
    return not is_amd(machine) and float(capability) >= least
