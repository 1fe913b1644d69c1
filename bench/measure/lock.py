"""Locks, so that no two measurements run at once or write into one folder."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from bench import common
from bench.common import relative
from gpt_speed import children
from gpt_speed.common import UserError, listed

PATIENCE = 30  # seconds: torchrun gives its ranks as many


@contextmanager
def locked(folder: Path, refusal: str = "") -> Iterator[None]:
    """Locks a folder until its end, or until the process ends in any way. Raises UserError, with
    the `refusal`, where another process has locked it; OSError where locking isn't possible."""
    from filelock import FileLock, Timeout  # which PyTorch brings along

    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", blocking=False):
            yield
    except Timeout:
        raise UserError(refusal or f"another measurement is running in {relative(folder)}")


def left_over() -> list[int]:
    """Returns what an earlier start has left and still runs after PATIENCE seconds, in which what
    was killed a moment ago comes to its end."""
    end = time.monotonic() + PATIENCE
    left = children.still_running()
    while left and time.monotonic() < end:
        time.sleep(0.2)
        left = children.still_running()
    return left


@contextmanager
def measuring(results: Path) -> Iterator[None]:
    """Lets nothing else be measured in this clone, nor into this folder of results. Raises
    UserError where something is, OSError where locking isn't possible."""
    lock: AbstractContextManager[None] = locked(results)
    if results.resolve() == common.BUILD.resolve():
        lock = nullcontext()  # `alone` locks that one
    with lock, alone():
        yield


def clone_locked() -> AbstractContextManager[None]:
    """Locks all of this clone's measurements: two at once would distort each other, and share the
    compiler's cache, which cold rounds empty. Raises UserError where another one runs, OSError
    where locking isn't possible."""
    refusal = "another measurement of this clone is running: two at once would distort each other"
    return locked(common.BUILD, refusal)


@contextmanager
def alone() -> Iterator[None]:
    """Lets nothing else be measured in this clone. Raises UserError where something is, or where
    processes of a measurement that was killed still run; OSError where locking isn't possible."""
    with clone_locked():
        left = left_over()
        if left:
            raise UserError(
                "what another start of this clone's tools has started still runs, and would"
                f" distort this one: process {listed(map(str, left))}"
            )
        yield
