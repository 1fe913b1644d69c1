"""A child of bench.predict.tracing: it loads PyTorch once, and answers each line of its input,

    {"script": "00_orig.py", "options": [], "batch": 8}                            its trace
    {"script": "00_orig.py", "options": [], "device": "cpu", "dtype": "float32"}   its fingerprints

with one line: {"told": what bench.predict.trace or operators tells} or {"error": "a line"}.
"""

import contextlib
import gc
import io
import json
import sys
import warnings
from pathlib import Path

import torch

from bench.common import load_script
from bench.predict import operators, pytorch, trace
from bench.processes import error_line

PYTORCH = "2.13"  # whose compiler and optimizers bench.predict knows from within


def answer(request: dict) -> dict:
    traced_by = ".".join(torch.__version__.split(".")[:2])
    if "batch" in request and traced_by != PYTORCH:
        return dict(error=f"predictions can be made anew with PyTorch {PYTORCH}, not with"
                          f" {traced_by}; stored ones work with any")
    script, said = Path(request.pop("script")), io.StringIO()
    pytorch.reset()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            if "batch" not in request:
                return dict(told=operators.fingerprint(script, **request))
            with trace.in_place_of_pytorch():
                return dict(told=trace.trace(load_script(script), **request))
    except SystemExit:  # an option that the script doesn't take
        return dict(error=error_line(said.getvalue()))
    except Exception as error:
        error = getattr(error, "inner_exception", error)  # of the compiler's
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return dict(error=lines[0])


def main() -> None:
    pytorch.begin_ranks()
    warnings.simplefilter("ignore")
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
