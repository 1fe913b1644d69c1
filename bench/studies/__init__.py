"""Studies. What one is: its runs, how they are measured, and how their results are shown.

Each file in bench/studies/ holds one. By being there it is a subcommand of measure.py, a
part of the report, a picture of plot_results.py, and a table that a marker in a page asks for.
"""

import argparse
import sys
from collections.abc import Generator
from pathlib import Path

from bench.catalogue import Run
from bench.measure.journal import Measured
from bench.measure.plan import STEPS, TOKENS, Plan, Setup
from bench.report.tables import Table, picture_name
from bench.subcommands import Subcommand, all_in


class Study(Subcommand):
    """One measurement."""

    group = "benchmarks"

    title = ""  # its heading on a machine's page
    # At which places of a report it is measured, and for how many rounds (None: as many as it has);
    # 0 rounds: it is only shown. Without a place it isn't part of a report.
    schedule: dict[int, int | None] = {}
    # The options with which a report measures it, each set once; and those that it has besides,
    # with their defaults.
    in_report: tuple[dict, ...] = ({},)
    defaults: dict = {}
    rounds: dict[str, int] = {"cuda": 4, "cpu": 4}
    tokens: dict[str, int] | None = TOKENS  # None: whole scripts
    has_seconds = True  # whether it has the option --seconds
    # Of --max-tokens and --rounds, with their defaults filled in, --techniques and --names; "": it
    # has no such option.
    max_tokens_help = ("training tokens, per process, after which losses are compared (default:"
                       " {cuda:,} on a GPU, {cpu:,} on a CPU)")
    rounds_help = "how often each script runs (default: {}; intervals need 2)"
    techniques_help = names_help = ""
    environment: dict[str, str] = {}  # of its runs
    composed = False  # whether 01 is composed with precision-fp16 where the GPU needs it
    failures_count = True  # whether a run that fails makes the command fail

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Adds the study's own command-line options."""
        if self.techniques_help:
            parser.add_argument("--techniques", metavar="0,5-8", help=self.techniques_help)
        if self.names_help:
            parser.add_argument("--names", metavar="A,B+C", help=self.names_help)

    def runs(self, setup: Setup) -> list[Run]:
        """Returns what is compared, the baseline first. Raises UserError, StackError."""
        raise NotImplementedError

    def plans(self, setup: Setup) -> Generator[Plan, Measured, None]:
        """Yields what to measure: one plan of its runs, unless a study has others. A plan that was
        measured comes back with its results, on which the next one may depend. Raises as `runs`."""
        yield Plan(self.runs(setup), **self.length(setup))

    def later(self, setup: Setup, plan: Plan) -> list[tuple[Plan, int]]:
        """Returns what follows a plan, for an estimate: plans as long as those to come, whose runs
        may depend on its results, and how often there is one like each. Raises as `runs`."""
        return []

    def length(self, setup: Setup) -> dict:
        """Returns how long a run trains, by the options and the device, as fields of Plan."""
        tokens, seconds = setup.args.max_tokens, getattr(setup.args, "seconds", None) or 0
        return dict(tokens=tokens or self.tokens[setup.device], equal_steps=True,
                    min_steps=1 if tokens else STEPS[setup.device], seconds=seconds)

    def collect(self, setup: Setup, folder: Path) -> None:
        """Takes what a run has left in `folder` next to its record. Raises ValueError where it
        isn't there."""

    def tables(self, measured, rows: list) -> list[Table] | None:
        """Returns what a report shows of a plan that was measured; None: the full_table of
        bench.report.tables."""

    def notes(self, measured, rows: list) -> list[str] | None:
        """Returns paragraphs below its tables; None: bench.report.notes.full_notes."""

    def excerpts(self, measured, rows: list) -> dict[str, list[Table]] | None:
        """Returns the tables that a marker `<!-- NAME: ... -->` in a page asks for, by NAME; None:
        those of `tables`, or else the short_table, by the study's name and the kind."""

    def extra(self, folder: Path, found: list[tuple]) -> str:
        """Returns what a page shows next to the tables, from the folder of the results; `found` are
        (measurement, rows), the newest of each kind."""
        return ""

    def draw(self, measured, rows: list):
        """Draws a plan that was measured, as a matplotlib figure; None without one."""

    def pictures(self, folder: Path, found: list[tuple]) -> dict:
        """Returns all its pictures: {name: figure}."""
        drawn = {picture_name(self.name, measured.kind): self.draw(measured, rows)
                 for measured, rows in found}
        return {name: figure for name, figure in drawn.items() if figure}

    def result(self, measured, rows: list) -> str:
        """Returns what measure.py prints below the tables."""
        return ""


def all_studies() -> dict[str, Study]:
    """Returns every study by its name, in the order of a report, the others behind."""
    studies = all_in(sys.modules[__name__], Study)
    studies.sort(key=lambda study: (min(study.schedule, default=1000), study.name))
    return {study.name: study for study in studies}
