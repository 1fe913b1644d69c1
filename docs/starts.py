"""Measures where a script's start goes, in seconds: from `python` to its first line of losses.

    python docs/starts.py 01_opt_single_gpu.py --model cpu-demo    # what follows goes to the script

It adds a start up by the script's functions, and by what PyTorch notes of its compiler. For a cold
start let TORCHINDUCTOR_CACHE_DIR name a new folder; the next start is warm. Linux only.
"""

import importlib.util
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

# By the script's functions, the part of the start that their time belongs to.
PARTS = {
    "configure": "settings, device",
    "load_data": "tokens, tokenizer",
    "fit_to_hardware": "trial of the compiler",
    "GPTModel": "initial weights",
    "compute_loss": "first step",
    "backward_and_update": "first step",
    "evaluate": "first evaluation",
}


class FirstLine(BaseException):
    """Ends a script at its first line of losses."""


def seconds_since_start() -> float:
    """Returns how long this process has existed."""
    ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    uptime = Path("/proc/uptime").read_text().split()[0]
    return float(uptime) - int(ticks) / os.sysconf("SC_CLK_TCK")


def timed(function: Callable, part: str, seconds: dict[str, float]) -> Callable:
    """Returns a function that adds the time it takes to a part."""

    def stand_in(*arguments, **options):
        began = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            seconds[part] += time.perf_counter() - began

    return stand_in


def compiler_seconds() -> dict[str, float]:
    """Returns what PyTorch has noted of its compiler so far, by parts that don't overlap."""
    from torch._dynamo.utils import compilation_time_metrics

    def noted(name: str) -> float:
        return sum(compilation_time_metrics.get(name, ()))

    graphs = noted("OutputGraph.call_user_compiler")
    forward = noted("compile_fx.<locals>.fw_compiler_base")
    backward = noted("compile_fx.<locals>.bw_compiler")  # in the first backward pass
    programs = noted("async_compile.wait")
    return {
        "Dynamo": noted("_compile.compile_inner") - graphs,
        "AOTAutograd, caches": graphs - forward,
        "Inductor": forward + backward - programs,
        "C++ or Triton": programs,
    }


def load(path: str, seconds: dict[str, float]) -> ModuleType:
    """Returns a script as a module whose functions add their time to `seconds`."""
    spec = importlib.util.spec_from_file_location("script", path)
    assert spec and spec.loader
    script = sys.modules["script"] = importlib.util.module_from_spec(spec)
    timed(spec.loader.exec_module, "imports", seconds)(script)
    for name in PARTS.keys() & vars(script).keys():
        setattr(script, name, timed(getattr(script, name), PARTS[name], seconds))
    return script


def measure(path: str, options: list[str]) -> dict[str, float]:
    """Runs a script to its first line of losses. Returns the seconds of each part, and of `all`."""
    seconds: dict[str, float] = defaultdict(float, python=seconds_since_start())
    script = load(path, seconds)
    try_hardware, trial = getattr(script, "fit_to_hardware", None), {}

    def fit_to_hardware(config) -> None:
        try_hardware(config)
        trial.update(compiler_seconds())  # belong to the trial, not to the first step

    def first_line(*_) -> None:
        raise FirstLine

    def explain(error):
        raise error

    if try_hardware:
        script.fit_to_hardware = fit_to_hardware
    script.Run.log, script.explain = first_line, explain
    sys.argv = [path, *options]
    try:
        script.main()
    except FirstLine:
        pass
    total = seconds_since_start()
    if trial:
        parts = {part: spent - trial[part] for part, spent in compiler_seconds().items()}
        seconds["first step"] -= sum(parts.values())
        seconds |= parts
    return seconds | {"rest": total - sum(seconds.values()), "all": total}


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    for part, spent in measure(sys.argv[1], sys.argv[2:]).items():
        print(f"{part:28}{spent:6.2f}")
