"""Studies. What one is: its runs, how they are measured, and how their results are shown.

Each file in bench/studies/ holds one or more. By being there each is a subcommand of measure.py, a
part of the report, a picture of plot_results.py, and a table that a marker in a page asks for.
"""

import argparse
import importlib
import math
import pkgutil
import re
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

from bench.catalogue import Run
from bench.judge.rows import closest
from bench.measure.journal import Measured
from bench.measure.plan import STEPS, TOKENS, WHOLE_ROUNDS, Plan, Setup
from bench.report.tables import Column, Table, picture_name


class Study:
    """One measurement. The first paragraph of its docstring is its help text."""

    title = ""  # its heading on a machine's page
    # At which places of a report it is measured, and for how many rounds (None: as many as it has);
    # 0 rounds: it is only shown. Without a place it isn't part of a report.
    schedule: dict[int, int | None] = {}
    in_report: tuple[str, ...] = ("",)  # the command lines by which a report measures it
    rounds: dict[str, int] = {"cuda": 4, "cpu": 4}
    tokens: dict[str, int] | None = TOKENS  # None: whole scripts
    has_seconds = True  # whether it has the option --seconds
    # Of --max-tokens ("": no such option) and --rounds, with their defaults filled in.
    max_tokens_help = ("training tokens, per process, after which losses are compared (default:"
                       " {cuda:,} on a GPU, {cpu:,} on a CPU)")
    rungs_help = names_help = ""  # of --rungs and --names ("": no such option)
    arguments = ""  # of its command line, those that are no options
    environment: dict[str, str] = {}  # of its runs
    runs_scripts = True  # else it has an `answer` instead of plans
    of_this_machine = True  # else it isn't told what this machine is
    failures_count = True  # whether a run that fails makes the command fail
    rounds_help = "how often each script runs (default: {}; significance needs 3)"
    settings: dict = {}  # fields of its Plan
    two_stages = False  # see in_two_stages
    columns: list[Column] = []  # in a report (none: those of bench.report.tables.full_table)
    short: list[Column] = []  # in a page for readers (none: as in a report, or else short_table)

    @property
    def name(self) -> str:
        """Of its command and journal: that of its class, CompileModes as compile-modes."""
        return re.sub(r"\B(?=[A-Z])", "-", type(self).__name__).lower()

    @property
    def help(self) -> str:
        return " ".join((type(self).__doc__ or "").split("\n\n")[0].split()).rstrip(".")

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Adds the study's own command-line options."""
        if self.rungs_help:
            parser.add_argument("--rungs", metavar="0,5-8", help=self.rungs_help)
        if self.names_help:
            parser.add_argument("--names", metavar="A,B+C", help=self.names_help)

    def runs(self, setup: Setup) -> list[Run]:
        """What is compared, the baseline first. Raises UserError, StackError."""
        raise NotImplementedError

    def plans(self, setup: Setup) -> Generator[Plan, Measured, None]:
        """What to measure: one plan of its runs, unless a study has others. A plan that was
        measured comes back with its results, on which the next one may depend. Raises as `runs`."""
        plan = Plan(self.runs(setup), **self.settings, **self.length(setup))
        if self.two_stages:
            yield from self.in_two_stages(plan)
        else:
            yield plan

    def in_two_stages(self, plan: Plan) -> Generator[Plan, Measured, None]:
        """The plan's whole rounds, then as many runs as the other rounds have, of those rows whose
        verdicts are open: for `plans`."""
        plan = replace(plan, whole_rounds=WHOLE_ROUNDS)
        measured = yield plan
        yield replace(plan, close=closest(measured))

    def answer(self, setup: Setup) -> str:
        """What a study that runs no scripts prints. Raises as `runs`."""
        raise NotImplementedError

    def length(self, setup: Setup) -> dict:
        """How long a run trains, by the options and the device, as fields of Plan."""
        tokens, seconds = setup.args.max_tokens, getattr(setup.args, "seconds", None) or 0
        return dict(tokens=tokens or self.tokens[setup.device], equal_steps=True,
                    min_steps=1 if tokens else STEPS[setup.device], seconds=seconds)

    def collect(self, setup: Setup, folder: Path) -> None:
        """Takes what a run has left in `folder` next to its record. Raises ValueError where it
        isn't there."""

    def tables(self, measured, rows: list) -> list[Table] | None:
        """What a report shows of a plan that was measured; None: bench.report.tables.full_table."""
        return [Table(self.columns, rows)] if self.columns else None

    def notes(self, measured, rows: list) -> list[str] | None:
        """Paragraphs below its tables; None: bench.report.notes.full_notes."""

    def excerpts(self, measured, rows: list) -> dict[str, list[Table]] | None:
        """The tables that a marker `<!-- NAME: ... -->` in a page asks for, by NAME; None: those of
        `tables`, or else bench.report.tables.short_table, by the study's name and the kind."""
        name = picture_name(self.name, measured.kind)
        return {name: [Table(self.short, rows)]} if self.short else None

    def fixed(self) -> dict[str, str]:
        """The tables, as text, that need no measurement, by the NAME of their marker."""
        return {}

    def extra(self, folder: Path, found: list[tuple]) -> str:
        """What a page shows next to the tables, from the folder of the results; `found` are
        (measurement, rows), the newest of each kind."""
        return ""

    def draw(self, measured, rows: list):
        """The picture of a plan that was measured, a matplotlib figure; None without one."""

    def pictures(self, folder: Path, found: list[tuple]) -> dict:
        """All its pictures: {name: figure}."""
        drawn = {picture_name(self.name, each.kind): self.draw(each, rows) for each, rows in found}
        return {name: figure for name, figure in drawn.items() if figure}

    def summary(self, folder: Path) -> str:
        """A table for plot_results.py to print and keep."""
        return ""

    def result(self, measured, rows: list) -> str:
        """What measure.py prints below the tables."""
        return ""


def positive(text: str) -> int:
    """As an option."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is out of range")
    return int(text)


def duration(text: str) -> float:
    """As an option: minutes or seconds."""
    if not 0 <= float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is out of range")
    return float(text)


positive.__name__, duration.__name__ = "whole number", "number"  # argparse: "invalid number value"


def all_studies() -> dict[str, Study]:
    """Every study by its name, in the order of a report, the others behind."""
    found = []
    for module in pkgutil.iter_modules(__path__):
        loaded = vars(importlib.import_module(f"bench.studies.{module.name}"))
        found += [kind() for kind in loaded.values()
                  if isinstance(kind, type) and issubclass(kind, Study)
                  and kind.__module__ == f"bench.studies.{module.name}"]
    found.sort(key=lambda study: (min(study.schedule, default=1000), study.name))
    return {study.name: study for study in found}
