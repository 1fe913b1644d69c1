"""Asks bench.predict.trace, in one process for a script, what it does at several batch sizes."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench import processes
from bench.common import ROOT, UserError

SECONDS = 1800  # for one trace, on a slow machine too
REFUSED = "what it takes can't be predicted: "


def ask(text: bytes, options: list[str], batches: Sequence[int]) -> dict:
    """Returns what bench.predict.trace.trace() does, by the batch size, or the UserError in place
    of a trace that a script doesn't let be made. Raises UserError where the child breaks, or is
    stuck."""
    if not batches:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_bytes(text)
        requests = [dict(script=str(script), options=options, batch=batch) for batch in batches]
        try:
            code, out, err = processes.run_child(
                [sys.executable, "-m", "bench.predict.trace", json.dumps(requests)], ROOT,
                timeout=SECONDS * len(batches),
                OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="",  # it computes nothing
                PYTHONUTF8="1")  # PyTorch reads its own files by the locale
        except subprocess.TimeoutExpired as stuck:
            raise UserError(f"{REFUSED}no answer after {stuck.timeout:.0f} s")
    if code:
        raise UserError(REFUSED + processes.error_line(err))
    return {batch: answer["trace"] if "trace" in answer else UserError(REFUSED + answer["error"])
            for batch, answer in zip(batches, json.loads(out.splitlines()[-1]), strict=True)}
