"""A child of bench.predict.tracing: it answers a file with a JSON list of requests,

    [{"script": "00_orig.py", "options": [], "batch": 8}, ...]

with a line, the list of {"trace": what bench.predict.trace tells} or {"error": "a line"}.
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
from bench.predict import pytorch, trace
from bench.processes import error_line

PYTORCH = "2.13"  # whose compiler and optimizers bench.predict knows from within


def answer(script: str, options: list[str], batch: int) -> dict:
    traced_by = ".".join(torch.__version__.split(".")[:2])
    if traced_by != PYTORCH:
        return dict(error=f"predictions can be made again with PyTorch {PYTORCH}, not with"
                          f" {traced_by}; stored ones work with any")
    said = io.StringIO()
    pytorch.reset()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            with trace.in_place_of_pytorch():
                return dict(trace=trace.trace(load_script(Path(script)), options, batch))
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
    requests = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps([answer(**request) for request in requests]))


if __name__ == "__main__":
    main()
