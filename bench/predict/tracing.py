"""Asks bench.predict.child, a process of its own for each script."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench import processes
from bench.common import ROOT, UserError

SECONDS = 1800  # for one trace, on a slow machine too
REFUSED = "what it takes can't be predicted: "


def ask(text: bytes, options: list[str], batches: Sequence[int]) -> dict[int, dict]:
    """What bench.predict.trace.trace tells, by the batch size. Raises UserError."""
    traces = ask_each(text, options, batches)
    for trace in traces.values():
        if isinstance(trace, UserError):
            raise trace
    return traces


def ask_each(text: bytes, options: list[str], batches: Sequence[int]) -> dict:
    """As ask(), with the error in place of a trace that a script doesn't let be made. Raises
    UserError where the child breaks, or is stuck."""
    if not batches:
        return {}
    try:  # PyTorch makes it while it is imported, or ends the child
        os.makedirs(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or ".", exist_ok=True)
    except OSError as error:
        raise UserError(f"{REFUSED}{error} (see TORCHINDUCTOR_CACHE_DIR)")
    with tempfile.TemporaryDirectory() as folder:
        script, requests = Path(folder, "script.py"), Path(folder, "requests.json")
        script.write_bytes(text)
        requests.write_text(json.dumps(
            [dict(script=str(script), options=options, batch=batch) for batch in batches]))
        try:
            code, out, err = processes.run_child(
                [sys.executable, "-m", "bench.predict.child", requests], ROOT,
                timeout=SECONDS * len(batches),
                OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="",  # it computes nothing
                PYTHONUTF8="1")  # PyTorch reads its own files by the locale
        except subprocess.TimeoutExpired as stuck:
            raise UserError(f"{REFUSED}no answer after {stuck.timeout:.0f} s")
    if code:
        raise UserError(REFUSED + processes.error_line(err))
    return {batch: answer["trace"] if "trace" in answer else UserError(REFUSED + answer["error"])
            for batch, answer in zip(batches, json.loads(out.splitlines()[-1]), strict=True)}
