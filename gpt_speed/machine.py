"""Says on what machine a script trains, by the PyTorch of the script's own environment.

    python gpt_speed/machine.py '{"rates": true, "known": ["NVIDIA A100-SXM4-40GB"]}'  # as JSON

With `rates` it also says how fast matrices are multiplied, unless the device is one of those whose
rates are known.

PyTorch is only imported there, from 2.4 and Python 3.10 on, and nothing of this repository.
"""

from __future__ import annotations  # an older Python reads this file, too, and is told so

import json
import os
import platform
import re
import sys
from contextlib import suppress
from pathlib import Path
from statistics import median

OLDEST_PYTHON, OLDEST_TORCH = (3, 10), (2, 4)


def cpu_name(text: str) -> str:
    """Returns the CPU's name from the system's own description. On a rented machine one may stand
    for several generations, so that " (family 25, model 17)" follows where that is told."""
    fields = dict(re.findall(r"^\s*([\w ]+?)\s*[:=]\s*(.+?)\s*$", text, re.MULTILINE))
    name = fields.get("Model name") or fields.get("Name")  # Linux, Windows
    if not name and text.strip() and platform.system() == "Darwin":  # it tells the name alone
        name = text.strip().splitlines()[0]
    name = name or platform.processor() or platform.machine()
    if {"CPU family", "Model"} <= fields.keys():
        name += f" (family {fields['CPU family']}, model {fields['Model']})"
    return name


def ram_bytes(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int | None:
    """Returns the bytes of the machine's RAM, or of as much of it as a container may use; None
    where it isn't known."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", ()):
        return None
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # "max" is no limit
        size = min(size, int(limit.read_text()))
    return size


def dtype_here() -> str:
    """Returns the type in which the techniques' scripts would train here: bfloat16 where there are
    units for it."""
    import torch

    if torch.cuda.is_available():
        if torch.cuda.get_device_capability() >= (8, 0):
            return "bfloat16"
        return "float32"
    units: dict = getattr(torch.cpu, "get_capabilities", dict)()  # older PyTorch lacks it
    has_units = any(map(units.get, ("amx_bf16", "avx512_bf16", "bf16")))
    if has_units:
        return "bfloat16"
    return "float32"


def product_rate(dtype: str, minimum: float = 1) -> float:
    """Returns the floating-point operations per second of a large matmul, repeated for `minimum`
    seconds: by the median of the second half, when clock rate and power are those of long work."""
    import torch
    from torch.utils.benchmark import Timer

    device, size = "cpu", 2048
    if torch.cuda.is_available():
        device, size = "cuda", 8192
    stored, precision = getattr(torch, dtype, torch.float32), "highest"
    if dtype == "TF32":  # which is how float32 is multiplied
        precision = "high"
    torch.set_float32_matmul_precision(precision)
    # Random numbers: products of equal ones take less power, and so a GPU clocks higher.
    a, b = (torch.randn(size, size, device=device).to(stored) for _ in range(2))
    timer = Timer("a @ b", globals=dict(a=a, b=b), num_threads=torch.get_num_threads())
    times = timer.blocked_autorange(min_run_time=minimum).times
    return 2 * size**3 / median(times[len(times) // 2 :])


def matmul_peak(dtype: str) -> dict[str, float]:
    """Returns the rates by precision, where scripts train in `dtype`: in bfloat16 only if that is
    it; in float16 where a GPU has units for that and none for bfloat16."""
    import torch

    precisions = ["float32"]
    if torch.cuda.is_available() and not torch.version.hip:
        precisions += beside_float32(torch.cuda.get_device_capability())
    if dtype == "bfloat16":
        precisions.append("bfloat16")
    return {precision: product_rate(precision) for precision in precisions}


def beside_float32(capability: tuple[int, int]) -> list[str]:
    """Returns in what other precision tensor cores multiply float32's matrices, by the compute
    capability; PyTorch's own answer, is_tf32_supported(), is newer than the oldest PyTorch here."""
    if capability >= (8, 0):
        return ["TF32"]
    if capability >= (7, 0):
        return ["float16"]
    return []


def copy_rate() -> float:
    """Returns the bytes per second that a copy reads and writes, of more than any cache holds,
    repeated for a second: the median."""
    import torch
    from torch.utils.benchmark import Timer

    device = "cpu"
    if torch.cuda.is_available():
        device = "cuda"
    source = torch.ones(2**28, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    timer = Timer(
        "target.copy_(source)",
        globals=dict(target=target, source=source),
        num_threads=torch.get_num_threads(),
    )
    return 2 * len(source) / timer.blocked_autorange(min_run_time=1).median


def machine_facts() -> dict:
    """Returns what an audit has to know: the `name` of the device, "cuda" or "cpu", its compute
    `capability` or None, the type `dtype` that it trains in best, and the bytes of its memory."""
    import torch
    from torch.utils import collect_env

    os.environ["LC_ALL"] = "C"  # so that the system's description isn't translated
    facts = dict(torch=torch.__version__, dtype=dtype_here())
    if torch.cuda.is_available():
        return facts | dict(
            device="cuda",
            name=torch.cuda.get_device_name(0),
            capability="{}.{}".format(*torch.cuda.get_device_capability(0)),
            memory_total=torch.cuda.get_device_properties(0).total_memory,
        )
    name, _, _ = cpu_name(collect_env.get_cpu_info(collect_env.run) or "").partition(" (family ")
    return facts | dict(
        device="cpu",
        name=" ".join(name.split()),
        capability=None,
        memory_total=ram_bytes(),
    )


def unsupported() -> str:
    """Returns why a script can't be run in this environment; "" where it can."""
    if sys.version_info < OLDEST_PYTHON:
        return f"is Python {platform.python_version()}: it takes 3.10 or newer"
    try:
        import torch
    except ImportError as error:
        return f"has no PyTorch ({error})"
    version = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    if version < OLDEST_TORCH:
        return f"has PyTorch {torch.__version__}: it takes 2.4 or newer"
    return ""


def main() -> None:
    problem = unsupported()
    if problem:
        print(json.dumps(dict(error=problem)))
        return
    facts, order = machine_facts(), json.loads(sys.argv[1])
    if order["rates"] and facts["name"] not in order["known"]:
        facts["rates"] = matmul_peak(facts["dtype"])
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
