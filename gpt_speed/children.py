"""Child processes of the tools: they end with the tool, and a signal reaches them once."""

import ctypes
import json
import math
import os
import secrets
import select
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from gpt_speed.common import listed

HOME = Path(__file__).resolve().parents[1]  # the folder that this package lies in

# Seconds from SIGTERM to SIGKILL: torchrun gives its ranks 30, of which an audit may be one.
GRACE = 20 if "TORCHELASTIC_RUN_ID" in os.environ else 40
HELD_SECONDS = 5  # in which the output ends of a child that has ended, unless it is held open
STDIN_SECONDS = 5  # in which a pipe at stdin is read
STDIN_BYTES = 2**20  # of it, about
MARKS = "GPT_SPEED_MARKS"  # the variable that holds marks: see run_child
ENDING = {number for number in signal.Signals if number.name in ("SIGINT", "SIGTERM", "SIGHUP")}
prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


class Interrupted(BaseException):
    """Ctrl-C, SIGTERM or SIGHUP. No Exception, so that nothing on its way swallows it."""

    can_resume = False  # whether what was interrupted can be continued


def on_signals(handler) -> None:
    """Sets the handler of the signals that end a program; SIGHUP stays ignored under `nohup`."""
    for number in ENDING:
        if number.name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def interrupt(signum, frame) -> None:
    """A signal handler. Raises Interrupted."""
    raise Interrupted(signum)


@contextmanager
def signals_held() -> Iterator[set]:
    """Lets signals wait until the context ends; yields the mask of before, which a child that is
    started meanwhile has to set."""
    if os.name != "posix":
        yield set()
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def prepare_child(cores: int | None, mask: set) -> None:
    """Is called in a child of a Unix before its program starts. Under Linux the child then ends if
    this process is killed, so that it doesn't run on during the next measurement, and runs on this
    many `cores`."""
    if prctl:
        prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if cores:
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def run_child(
    command: list,
    cwd: Path | None = None,
    timeout: float | None = None,
    cores: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[int, str, str]:
    """Runs a child, under Linux on this many `cores` (None: all), and adds variables to its
    environment. Returns its exit code, stdout and stderr. After `timeout` seconds it raises
    subprocess.TimeoutExpired.

    However this ends, the child has ended, too, and so has all that it started. That may have
    sessions of its own and outlive the child, as torchrun's ranks do: it is found by a mark in the
    environment, which it inherits."""
    mark, outer = secrets.token_hex(16), os.environ.get(MARKS, clone_mark())
    variables = os.environ | dict(environment or {}) | {MARKS: f"{outer} {mark}"}
    with ExitStack() as exits:
        exits.callback(kill_marked, mark)
        with signals_held() as mask:  # a signal that comes now is raised when the child is known
            child = start_child(command, cwd, variables, partial(prepare_child, cores, mask))
            exits.enter_context(ended_on_error(child, mark))
        out, err = output_of(child, mark, timeout)
    return child.returncode, out, err


@contextmanager
def ended_on_error(child: subprocess.Popen, mark: str) -> Iterator[None]:
    """Ends a child where the context ends by an error, a signal, or because its time is over."""
    try:
        yield
    except Interrupted:
        on_signals(signal.SIG_IGN)  # a second one mustn't cut the end short
        end_child(child, mark)
        raise
    except BaseException:
        end_child(child, mark)
        raise


class NoReport(Exception):
    """A child wrote no report; `ending` is how it ended, as "ended with code 1", or "" where its
    time was over."""

    def __init__(self, ending: str):
        super().__init__(ending)
        self.ending = ending


def report_of_child(
    command: list, report: Path, seconds: float, environment: Mapping[str, str]
) -> tuple[dict, str]:
    """Runs a child that writes a report as JSON, for so many seconds at most; returns the report
    and the child's stderr. Where it wrote none, prints its output and raises NoReport."""
    rewind_stdin()
    try:
        code, out, err = run_child(command, timeout=seconds, environment=environment)
        end = ending(code)
    except subprocess.TimeoutExpired as stuck:
        out, err = map(decoded, (stuck.stdout, stuck.stderr))
        end = ""
    if not report.exists():  # it may have written one before its time was over
        print(err or out, file=sys.stderr, end="")
        raise NoReport(end)
    return json.loads(report.read_text(encoding="utf-8")), err


def start_child(
    command: list, cwd: Path | None, variables: Mapping[str, str], prepare: Callable[[], None]
) -> subprocess.Popen:
    """Starts a child whose output is read here; `prepare` is called in a child of a Unix."""
    return subprocess.Popen(
        [str(part) for part in command],
        env=variables,
        cwd=cwd,
        text=True,
        encoding="utf-8",
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C comes here alone, and is passed on once
        preexec_fn=prepare if os.name == "posix" else None,
    )


def output_of(child: subprocess.Popen, mark: str, timeout: float | None) -> tuple[str, str]:
    """Returns a child's stdout and stderr. Its descendants may hold both open after its end, as
    ranks do when torchrun is killed: those that are found are killed then. Raises
    subprocess.TimeoutExpired."""
    if timeout is None:
        timeout = math.inf
    end = time.monotonic() + timeout
    while True:
        try:
            return child.communicate(timeout=max(0, min(1, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            if child.poll() is not None and prctl:
                kill_marked(mark)
                return output_until_now(child)
            if time.monotonic() >= end:
                raise


def output_until_now(child: subprocess.Popen) -> tuple[str, str]:
    """Returns stdout and stderr of a child that has ended, also where others hold them open."""
    try:
        return child.communicate(timeout=HELD_SECONDS)
    except subprocess.TimeoutExpired as held:
        return decoded(held.stdout), decoded(held.stderr)


def decoded(output: bytes | str | None) -> str:
    """Returns a child's output as text: on Linux, TimeoutExpired has it as bytes."""
    if isinstance(output, bytes):
        return output.decode(errors="replace")
    return output or ""


def ending(code: int) -> str:
    """Says how a process ended, by its exit code: the negative of a signal, if one ended it."""
    if code >= 0:
        return f"ended with code {code}"
    if code == -9:
        return "ended by signal 9, as Linux ends a program for want of RAM"
    return f"ended by signal {-code}"


def end_child(child: subprocess.Popen, mark: str) -> None:
    """Ends a child and its descendants by SIGTERM, which torchrun passes on; after GRACE seconds by
    SIGKILL, also those in sessions of their own, as ranks are."""
    if os.name != "posix":  # where terminate() kills the child alone
        subprocess.run(["taskkill", "/F", "/T", "/PID", str(child.pid)], capture_output=True)
        return
    family = []
    if not prctl:  # where kill_marked() doesn't find them
        family = descendants(child.pid)
    child.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            output_of(child, mark, GRACE)
    finally:
        kill(family)


def kill(family: list[int]) -> None:
    for pid in family:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def kill_marked(mark: str) -> None:
    """Kills, under Linux, what run_child has started with a mark, and says which processes can't be
    killed, as those that wait for a GPU's driver."""
    end = time.monotonic() + 5
    family = marked(mark)
    while family and time.monotonic() < end:
        kill(family)
        time.sleep(0.02)
        family = marked(mark)  # they may have started more
    if family:
        print(f"can't be killed: process {listed(map(str, family))}", file=sys.stderr)


def marked(mark: str) -> list[int]:
    """Returns the processes whose environment holds a mark; only Linux tells. Children inherit it,
    so that they are found even when the process that started them is gone."""
    family = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            environment = (folder / "environ").read_bytes()  # a zombie has none
            if os.fsencode(mark) in environment:
                family.append(int(folder.name))
    return family


def clone_mark() -> str:
    """Returns the mark of all that this clone's tools have started."""
    return f"gpt-speed in {HOME}:"


def still_running() -> list[int]:
    """Returns, under Linux, the processes that this clone's tools have left running, such as ranks
    whose launcher was killed; none within a process that the tools have started themselves."""
    if MARKS in os.environ:
        return []
    return marked(clone_mark())


def descendants(pid: int) -> list[int]:
    """Returns a process and its descendants by `ps`, which finds none whose parent has ended."""
    answer = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True)
    pairs = [[*map(int, line.split())] for line in answer.stdout.splitlines()]
    family = [pid]
    for parent in family:  # which grows
        family += [child for child, parent_of_child in pairs if parent_of_child == parent]
    return family


def keep_stdin() -> None:
    """Replaces a pipe at stdin by a file of what it holds, a MiB and some seconds of it at most, so
    that several children can read it."""
    try:
        is_pipe = os.name == "posix" and stat.S_ISFIFO(os.fstat(0).st_mode)
    except OSError:  # it is closed
        return
    if not is_pipe:
        return
    with tempfile.TemporaryFile() as kept:
        for part in parts_of_stdin():
            kept.write(part)
        if kept.tell():
            kept.flush()
            os.dup2(kept.fileno(), 0)


def parts_of_stdin() -> Iterator[bytes]:
    """Yields what a pipe at stdin holds: until its end, or until nothing came for a second, or
    until a MiB or STDIN_SECONDS are full."""
    end = time.monotonic() + STDIN_SECONDS
    size = 0
    while size < STDIN_BYTES and select.select([0], [], [], 1)[0]:
        part = os.read(0, 2**16)
        if not part:
            return
        yield part
        size += len(part)
        if time.monotonic() >= end:
            return


def rewind_stdin() -> None:
    """Lets the next child read stdin from its start, if that is a file."""
    with suppress(OSError):
        if stat.S_ISREG(os.fstat(0).st_mode):
            os.lseek(0, 0, os.SEEK_SET)
