"""Asks bench.predict.child, in two processes."""

import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from bench import processes
from bench.common import UserError


class Stuck(UserError):
    """A child didn't answer in time."""


class Child:
    """A process that traces one script after the other. It is started by the first request, and
    ends with this process, when its input does."""

    process = None

    def __init__(self) -> None:
        self.lock = Lock()

    def answer(self, request: dict) -> dict:
        """Raises UserError where the child breaks. One that is stuck, which a new one may not be,
        is asked once more."""
        with self.lock:
            try:
                return self.one_answer(request)
            except Stuck as error:
                print(f"A trace {error}: made once more", file=sys.stderr, flush=True)
                return self.one_answer(request)

    def one_answer(self, request: dict) -> dict:
        processes.raise_pending()  # an interrupt has ended the child: no other one
        if self.process is None or self.process.poll() is not None:
            self.start()
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
            return json.loads(self.process.stdout.readline())
        except (OSError, ValueError):
            self.process.kill()  # it may have told something else than an answer
            code = self.process.wait()
            self.errors.seek(0)
            raise broken(self.errors.read() or f"ended by {code}")
        except BaseException:  # such as Ctrl-C: what it would answer is for nobody
            self.process.terminate()
            raise

    def start(self) -> None:
        try:  # PyTorch makes it while it is imported, or ends the child
            os.makedirs(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or ".", exist_ok=True)
        except OSError as error:
            raise UserError(f"what it takes can't be predicted: {error} (see"
                            " TORCHINDUCTOR_CACHE_DIR)")
        self.errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self.process = processes.start(
            [sys.executable, "-m", "bench.predict.child"], self.errors,
            OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="",  # it computes nothing
            PYTHONUTF8="1")  # PyTorch reads its own files by the locale

    def end(self) -> None:
        with self.lock:
            if self.process:
                self.process.stdin.close()
                self.process.wait()
                self.process = None


CHILDREN = Child(), Child()


def end() -> None:
    """So that no child is there during a measurement."""
    for child in CHILDREN:
        child.end()


def broken(errors: str) -> UserError:
    """Why a child broke, by what it wrote: Stuck tells the places of its calls, the innermost
    first."""
    places = re.findall(r'File ".*?([^/"]+)", line (\d+) in', errors)
    if errors.startswith("Timeout (") and places:
        return Stuck("was stuck at " + " < ".join(":".join(place) for place in places[:8]))
    return UserError(f"what it takes can't be predicted: {processes.error_line(errors)}")


def answers(asked: Sequence[tuple[int, bytes, dict]]) -> list[dict]:
    """What bench.predict.child answers to each request about a script's text; those with an even
    number go to one child. Raises UserError where a child breaks."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(CHILDREN)) as pool:
        def one(place: int) -> dict:
            number, text, request = asked[place]
            script = Path(folder, f"{place}.py")
            script.write_bytes(text)
            return CHILDREN[number % len(CHILDREN)].answer(request | dict(script=str(script)))

        try:
            return list(pool.map(one, range(len(asked))))
        except UserError:
            raise
        except BaseException:  # such as Ctrl-C: the pool would wait for what children answer
            processes.end_children()
            raise


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
    # One batch size always goes to the same child, which keeps its compiled programs.
    told = answers([(batch.bit_length(), text, dict(options=options, batch=batch))
                    for batch in batches])
    return {batch: each["told"] if "told" in each else UserError(
        f"what it takes can't be predicted: {each['error']}")
        for batch, each in zip(batches, told, strict=True)}
