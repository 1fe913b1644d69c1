"""Prints where the start of a script goes, in seconds: from `python` to its first line of losses.

    python docs/starts.py 01_opt_single_gpu.py --model cpu-demo    # what follows goes to the script

It adds the parts up by wrapping functions of the script, and by what PyTorch notes of its compiler.
For a cold start let TORCHINDUCTOR_CACHE_DIR name a new folder; the next one is warm. Linux only.
"""

import importlib.util
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

# By the script's functions, the part that their time belongs to.
PARTS = {
    "configure": "settings, device",
    "load_data": "tokens, tokenizer",
    "GPTModel": "initial weights",
    "can_compile": "the probe can_compile",
    "compute_loss": "first step",
    "backward_and_update": "first step",
    "evaluate": "first evaluation",
}
# By the names in PyTorch's own notes, what is part of what: each but the last contains the next.
NESTED = {
    "_compile.compile_inner": "Dynamo",
    "OutputGraph.call_user_compiler": "AOTAutograd, caches",
    "compile_fx_inner": "Inductor",
    "async_compile.wait": "waiting for C++ or Triton",
}


class FirstLine(BaseException):
    """Ends the script at its first line of losses."""


def seconds_since_start() -> float:
    """Returns how long this process has existed."""
    ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    uptime = Path("/proc/uptime").read_text().split()[0]
    return float(uptime) - int(ticks) / os.sysconf("SC_CLK_TCK")


def timed(function, part: str, seconds: dict[str, float]):
    """Returns a function that adds the time it takes to a part."""

    def stand_in(*args, **options):
        began = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            seconds[part] += time.perf_counter() - began

    return stand_in


def compiler_seconds() -> dict[str, float]:
    """Returns what PyTorch has noted of its compiler so far, by the parts of NESTED."""
    from torch._dynamo.utils import compilation_time_metrics

    sums = [sum(compilation_time_metrics.get(name, ())) for name in NESTED]
    inner = [*sums[1:], 0]
    return {
        part: outer - within
        for part, outer, within in zip(NESTED.values(), sums, inner, strict=True)
    }


def first_line(*_) -> None:
    raise FirstLine


def raise_it(error: BaseException, config) -> None:
    raise error


def main(path: str, *options: str) -> None:
    seconds: dict[str, float] = defaultdict(float)
    seconds["python"] = seconds_since_start()
    spec = importlib.util.spec_from_file_location("script", path)
    script = sys.modules["script"] = importlib.util.module_from_spec(spec)
    timed(spec.loader.exec_module, "imports", seconds)(script)
    for name in PARTS.keys() & vars(script).keys():
        setattr(script, name, timed(getattr(script, name), PARTS[name], seconds))
    probe = getattr(script, "can_compile", None)
    before: dict[str, float] = {}

    def can_compile(*args):
        answer = probe(*args)
        before.update(compiler_seconds())
        return answer

    if probe:
        script.can_compile = can_compile
    script.Run.log, script.explain = first_line, raise_it
    sys.argv = [path, *options]
    try:
        script.main()
    except FirstLine:
        pass
    total = seconds_since_start()
    compiler = {}
    if before:
        compiler = {part: spent - before[part] for part, spent in compiler_seconds().items()}
    seconds["first step"] -= sum(compiler.values())
    rest = total - sum(seconds.values()) - sum(compiler.values())
    for part, spent in (seconds | compiler | {"rest": rest, "all": total}).items():
        print(f"{part:28}{spent:6.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
