"""Asks bench.predict.trace, in children that load PyTorch once and answer many requests."""

import json
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from bench import processes
from bench.common import UserError


class Child:
    """A process that traces one script after the other. It is started by the first request, and
    ends with this process, when its input does."""

    process = None

    def __init__(self) -> None:
        self.lock = Lock()

    def answer(self, request: dict) -> dict:
        """Of bench.predict.trace. Raises UserError where the child breaks."""
        with self.lock:
            processes.raise_pending()  # an interrupt has ended the child: no other one
            if self.process is None or self.process.poll() is not None:
                self.start()
            try:
                print(json.dumps(request), file=self.process.stdin, flush=True)
                return json.loads(self.process.stdout.readline())
            except (OSError, ValueError):
                code = self.process.wait()
                self.errors.seek(0)
                told = processes.error_line(self.errors.read() or f"ended by {code}")
                raise UserError(f"what it takes can't be predicted: {told}")
            except BaseException:  # such as Ctrl-C: what it would answer is for nobody
                self.process.terminate()
                raise

    def start(self) -> None:
        self.errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self.process = processes.start(
            [sys.executable, "-m", "bench.predict.trace"], self.errors,
            OMP_NUM_THREADS="1",  # it computes nothing
            PYTHONUTF8="1")  # PyTorch reads its own files by the locale


CHILDREN = Child(), Child()


def ask(text: bytes, options: list[str], batches: Sequence[int]) -> dict[int, dict]:
    """What bench.predict.trace.trace tells, by the batch size. Raises UserError."""
    found = ask_each(text, options, batches)
    for each in found.values():
        if isinstance(each, UserError):
            raise each
    return found


def ask_each(text: bytes, options: list[str], batches: Sequence[int]) -> dict:
    """As ask(), with the error in place of a trace that a script doesn't let be made. Raises
    UserError where a child breaks."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(CHILDREN)) as pool:
        script = Path(folder, "script.py")
        script.write_bytes(text)

        def one(batch: int) -> dict | UserError:
            # One batch size always goes to the same child, which keeps its compiled programs.
            child = CHILDREN[batch.bit_length() % len(CHILDREN)]
            told = child.answer(dict(script=str(script), options=options, batch=batch))
            if "trace" in told:
                return told["trace"]
            return UserError(f"what it takes can't be predicted: {told['error']}")

        return dict(zip(batches, pool.map(one, batches), strict=True))
