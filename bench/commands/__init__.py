"""Commands that measure nothing: they answer from what is stored, look at this machine, or watch
somebody's script. Each is a subcommand of measure.py by being here."""

import sys

from bench.measure.plan import Setup
from bench.subcommands import Subcommand, all_in


class Command(Subcommand):
    """A subcommand that measures nothing."""

    needs_machine = False  # whether its setup has to describe this machine

    def run(self, setup: Setup) -> int:
        """Prints the answer; returns the exit code. Raises UserError, StackError, OSError."""
        print(self.answer(setup))
        return 0

    def answer(self, setup: Setup) -> str:
        """Returns what the command prints. Raises as `run`."""
        raise NotImplementedError


def all_commands() -> dict[str, Command]:
    """Returns every command by its name."""
    commands = all_in(sys.modules[__name__], Command)
    return {command.name: command for command in sorted(commands, key=lambda one: one.name)}
