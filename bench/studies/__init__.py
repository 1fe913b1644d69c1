"""Studies, one in each file: by being there it is a subcommand of measure.py, a part of the report,
a picture of plot_results.py, and a table that a marker in a page asks for."""

import argparse
import sys
from collections.abc import Generator
from dataclasses import replace

from bench.analysis.rows import Rows
from bench.analysis.training import Training
from bench.common import relative
from bench.measure.journal import journal_of
from bench.measure.measurement import Measurement
from bench.measure.plan import STEPS, TOKENS, EqualSteps, Measurable, Plan, Setup
from bench.measure.records import Record
from bench.measure.run import Resume, dry_run, run_study
from bench.predict.batches import batches_that_fit
from bench.report.showable import Showable, text_of
from bench.subcommands import Subcommand, all_in
from gpt_speed.tables import fmt

BEHIND = 1000  # every position
Plans = Generator[Plan, Measurement, None]  # what is measured; a plan comes back with its results


class Study(Subcommand, Measurable, Showable):
    """One measurement: how it is started, measured and shown."""

    group = "benchmarks"
    needs_machine = True

    tokens: dict[str, int] | None = TOKENS  # of a run, per process; None: of the whole script

    def measures(self, args: argparse.Namespace) -> bool:
        return not args.dry_run

    def run(self, setup: Setup) -> int:
        """Measures it and prints its tables, or only what a dry run prints; returns the exit code:
        1 if a run failed. Raises UserError, StackError, OSError."""
        args, resume = setup.args, Resume.REQUIRED
        if setup.machine.get("gpu_needs"):
            print(f"missing: {setup.machine['gpu_needs']}", file=sys.stderr)
        if not args.resume:
            resume = Resume.NEVER
            setup = replace(setup, batches=batches_that_fit(setup, composed=False))
        if args.dry_run:
            dry_run(self, setup, args.rounds, resume)
            return 0
        _, measurements = run_study(self, setup, args.rounds, resume)
        for measured in measurements:
            print(f"\n{text_of(self, Rows(measured))}")
        print(relative(journal_of(setup.results, self.name)))
        return int(any(map(self.has_failed, measurements)))

    def arguments(self, line: str) -> dict:
        """Returns its own options, as they are behind its name on a command line."""
        parser = argparse.ArgumentParser()
        self.options(parser)
        return vars(parser.parse_args(line.split()))

    def length(self, setup: Setup) -> EqualSteps:
        """Returns how long a run trains, by the options and the device."""
        if not self.tokens:
            raise ValueError(f"{self.name} trains whole scripts")
        if setup.args.max_tokens:
            return EqualSteps(setup.args.max_tokens)
        return EqualSteps(self.tokens[setup.device], STEPS[setup.device])

    def has_failed(self, measured: Measurement) -> bool:
        """Returns whether a run failed that should not: then measure.py exits with 1."""
        return measured.has_failures

    def summary(self, record: Record, plan: Plan) -> str:
        loss = fmt(record.val_loss_after(plan.loss_tokens), ".3f") or "n/a"
        return f"{Training(record).tok_per_sec:,.0f} tok/sec, val loss {loss}"


def order_of(study: Study) -> tuple[int, str]:
    """Returns by what studies are sorted: their positions in a report, then those without one."""
    return study.position or BEHIND, study.name


def add_techniques(
    parser: argparse.ArgumentParser,
    help: str = "which techniques, by their numbers (default: all)",
) -> None:
    """Adds the option that Scripts.select takes."""
    parser.add_argument("--techniques", metavar="0,5-8", help=help)


def all_studies() -> dict[str, Study]:
    """Returns every study by its name, in the order of a report, the others behind."""
    studies = sorted(all_in(sys.modules[__name__], Study), key=order_of)
    return {study.name: study for study in studies}
