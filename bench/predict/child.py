"""A child of bench.predict.tracing: it loads PyTorch once, and answers each line of its input,

    {"script": "00_orig.py", "options": [], "batch": 8}                            its trace
    {"script": "00_orig.py", "options": [], "device": "cpu", "dtype": "float32"}   its fingerprints

with one line: {"told": what bench.predict.trace or operators tells} or {"error": "a line"}. One
that is stuck ends itself, and tells where.
"""

import contextlib
import faulthandler
import gc
import io
import json
import sys
import warnings
from pathlib import Path

LIMITS = {"import": 240, "fingerprints": 240, "trace": 1800}  # seconds, of slow machines too
if __name__ == "__main__":
    faulthandler.dump_traceback_later(LIMITS["import"], exit=True)

import torch  # noqa: E402

from bench.common import load_script  # noqa: E402
from bench.predict import operators, pytorch, trace  # noqa: E402
from bench.processes import error_line  # noqa: E402

PYTORCH = "2.13"  # whose compiler and optimizers bench.predict knows from within


def answer(request: dict) -> dict:
    traced_by = ".".join(torch.__version__.split(".")[:2])
    if "batch" in request and traced_by != PYTORCH:
        return dict(error=f"predictions can be made again with PyTorch {PYTORCH}, not with"
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
    faulthandler.cancel_dump_traceback_later()
    for line in sys.stdin:
        request = json.loads(line)
        limit = LIMITS["trace" if "batch" in request else "fingerprints"]
        faulthandler.dump_traceback_later(limit, exit=True)
        told = answer(request)
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
