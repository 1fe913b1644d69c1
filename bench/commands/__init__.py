"""Commands that aren't studies: they answer from what is stored, look at this machine, watch
somebody's script, or measure studies for a page. Each is a subcommand of measure.py by being here.
"""

from bench.measure.plan import Setup
from bench.subcommands import Subcommand


class Command(Subcommand):
    """A subcommand that isn't a study."""

    def run(self, setup: Setup) -> int:
        """Prints the answer, if there is one; returns the exit code. Raises what
        bench.terminal.exit_code_of prints."""
        answer = self.answer(setup)
        if answer:
            print(answer)
        return 0

    def answer(self, setup: Setup) -> str:
        """Does what it is for, and returns what it prints. Raises as `run`."""
        raise NotImplementedError
