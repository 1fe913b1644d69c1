"""How measure.py and plot_results.py end: with an exit code, and a line for an error."""

from collections.abc import Callable

from gpt_speed import common
from patches.stack import StackError


def exit_code_of(program: Callable[[], int]) -> int:
    """Runs a program; an error that a user can fix is a line. Returns the exit code."""
    return common.exit_code_of(program, StackError, OSError)
