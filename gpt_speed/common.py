"""The error that a user can fix, how a program ends, and words that several texts use."""

import os
import sys
from collections.abc import Callable, Iterable

NO_READER = 128 + 13  # as a shell names the end by SIGPIPE, 13, of a program that it has started


class UserError(Exception):
    """An error that the user can fix, printed as one line; `code` is the exit code."""

    def __init__(self, text: str, code: int = 1):
        super().__init__(text)
        self.code = code


def exit_code_of(program: Callable[[], int], *errors: type[Exception]) -> int:
    """Runs a program; returns the exit code that it returns. A UserError, or one of the `errors`,
    is printed as a line. Where nobody reads the output any more, as behind `| head -1`, the program
    ends without a word."""
    in_one_line: tuple[type[Exception], ...] = (UserError, *errors)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # it may be closed
    sys.stdout.reconfigure(errors="replace")  # a terminal without × or Δ is no reason to stop
    try:
        try:
            return program()
        finally:
            sys.stdout.flush()  # here, where a pipe without a reader is expected
    except BrokenPipeError:
        return drop_output()
    except in_one_line as error:
        print(f"error: {error}", file=sys.stderr)
        if isinstance(error, OSError):  # such as a full disk, to which Python would write again
            drop_output()
        return getattr(error, "code", 1)


def drop_output() -> int:
    """Sends the rest of stdout nowhere, since nobody reads it: Python writes what it still holds
    when it ends. Returns the exit code for that."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    return NO_READER


def reason_of(error: OSError) -> str:
    """Returns what the system says of an error; what Python says where the system says nothing."""
    return error.strerror or str(error)


def script_name(command: list[str]) -> str:
    """Returns the script or the module of a command: a script, or "-m" and a module, with
    arguments."""
    if command[0] == "-m":
        return command[1]
    return command[0]


def listed(names: Iterable[str]) -> str:
    """Returns "a", "a and b", "a, b and c"."""
    *most, last = names
    if most:
        return f"{', '.join(most)} and {last}"
    return last


def counted(count: int, noun: str, plural: str = "s") -> str:
    """Returns "1 tensor" or "2,000 tensors"."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}{plural}"


def memory_text(used: float | None, total: float | None) -> str:
    """Writes numbers of bytes as "1.0 of 80.0 GB", with "?" where the system hides one."""
    sizes = ["?" if size is None else f"{size / 2**30:.1f}" for size in (used, total)]
    return " of ".join(sizes) + " GB"
