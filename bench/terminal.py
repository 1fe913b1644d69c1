"""How measure.py and plot_results.py run: what they print, and the exit code that they end with."""

import os
import sys
from collections.abc import Callable

from gpt_speed.common import UserError, drop_output
from patches.stack import StackError


def exit_code_of(program: Callable[[], int]) -> int:
    """Runs a program, and returns its exit code. An error that a user can fix becomes a line on
    stderr. Where nobody reads the output any more, as behind `| head -1`, the program ends without
    a word."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # it may be closed
    sys.stdout.reconfigure(errors="replace")  # a terminal without × or Δ is no reason to stop
    try:
        try:
            return program()
        finally:
            sys.stdout.flush()  # here, where a pipe without a reader is expected
    except BrokenPipeError:
        return drop_output()
    except (UserError, StackError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "code", 1)
