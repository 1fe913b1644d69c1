"""A machine's page, with what is missing measured first; and the generated blocks of others."""

import sys
import time
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, field, replace

from bench.commands import Command
from bench.common import relative
from bench.measure.look import look_at
from bench.measure.plan import Setup
from bench.measure.run import Resume, run_study
from bench.predict.batches import batches_that_fit
from bench.processes import prepare_tokens
from bench.report.page import PAGE, write_page
from bench.report.readme import write_readme
from bench.studies import Study, add_techniques, all_studies
from bench.subcommands import above_0, positive
from gpt_speed.common import UserError
from patches.stack import StackError

PAGE_SECONDS = 20  # to draw and write the page at the end


class Report(Command):
    """Measure what fits into some minutes, and write results/report.md.

    All studies but search and time-to-loss. Run it again to continue."""

    group = "start here"
    needs_machine = True

    def options(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--minutes",
            type=above_0,
            default=25,
            metavar="N",
            help="stop before so many are over; run it again to continue (default: 25)",
        )
        parser.add_argument(
            "--studies",
            metavar="A,B",
            default="",
            help="some of the studies, such as stages,ladder (default: all)",
        )
        parser.add_argument(
            "--max-tokens",
            type=positive,
            metavar="N",
            help="training tokens of every run, for a trial",
        )
        add_techniques(parser, "which techniques, for ladder and leave-one-out (default: all)")

    def measures(self, args: Namespace) -> bool:
        return True

    def run(self, setup: Setup) -> int:
        """Returns the exit code: 1 if something failed."""
        return make_report(studies_to_measure(setup.args.studies), setup)


def studies_to_measure(names: str) -> list[Study]:
    """Returns the studies that "A,B" names, of those that a report measures; all for "". Raises
    UserError."""
    studies = {
        name: study
        for name, study in all_studies().items()
        if study.position and study.report_options
    }
    chosen = names.replace(",", " ").split() or [*studies]
    for name in chosen:
        if name not in studies:
            raise UserError(f"--studies: {name!r} is none of {', '.join(studies)}", 2)
    return [study for name, study in studies.items() if name in chosen]


def jobs_of(studies: list[Study], setup: Setup) -> list[tuple[Study, Setup]]:
    """Returns (study, the setup with its own options), as often as the report measures each."""
    return [
        (study, setup_for(study, line, setup)) for study in studies for line in study.report_options
    ]


def setup_for(study: Study, line: str, setup: Setup) -> Setup:
    """Returns the setup of a report with a study's own options, a line."""
    args = Namespace(**study.arguments(line) | vars(setup.args))
    return replace(setup, in_report=True, args=args)


@dataclass
class Progress:
    """How far a report has come."""

    unfinished: list[str]  # the names of studies, one as often as it has jobs
    refused: dict[str, str] = field(default_factory=dict)  # the studies that can't run, and why
    has_failed: bool = False  # whether a run has

    def missing(self) -> dict[str, str]:
        """Returns the studies that aren't finished, and why."""
        return {
            name: self.refused.get(name, "run it again to continue") for name in self.unfinished
        }


def make_report(studies: list[Study], setup: Setup) -> int:
    """Measures as far as the minutes reach, then writes the page; returns the exit code.
    Raises UserError where nothing can be measured."""
    began = time.monotonic()
    deadline = began + 60 * setup.args.minutes - PAGE_SECONDS
    jobs = jobs_of(studies, prepared(setup))
    progress = Progress([study.name for study, _ in jobs])
    try:
        measure_studies(jobs, progress, deadline)
    finally:
        head = write_page(all_studies(), setup.results, progress.missing())
    minutes = (time.monotonic() - began) / 60
    print(f"\n{head}\n{relative(setup.results / PAGE)}, after {minutes:.1f} minutes")
    return int(progress.has_failed or bool(progress.refused))


def prepared(setup: Setup) -> Setup:
    """Returns the setup with what all studies have alike: tokens, how fast matrices are multiplied
    here, and the batch sizes that fit. Prints what this machine lacks. Raises UserError."""
    prepare_tokens(setup.data)
    look = look_at(setup.results)
    for thing in look["missing"]:
        print(f"missing: {thing}")
    batches = batches_that_fit(setup, composed=False)
    return replace(setup, matmul_peak=look["matmul_peak"], batches=batches)


def measure_studies(jobs: list[tuple[Study, Setup]], progress: Progress, deadline: float) -> None:
    """Measures one study after the other until `deadline`, in seconds of time.monotonic(). One that
    can't run is named, and stops no other."""
    for study, setup in jobs:
        if time.monotonic() > deadline:
            return
        if study.name in progress.refused:
            continue
        print(f"--- {study.name}", flush=True)
        try:
            finished, measured = run_study(study, setup, resume=Resume.IF_ANY, deadline=deadline)
        except (UserError, StackError, OSError) as error:
            print(f"error: {study.name}: {error}", file=sys.stderr)
            progress.refused[study.name] = str(error)
            continue
        progress.has_failed |= any(map(study.has_failed, measured))
        if finished:
            progress.unfinished.remove(study.name)


class Readme(Command):
    """Write the generated tables and figures of README, docs and results/reference again.

    They are made from the patches and the journals in results/reference."""

    group = "maintenance"

    def answer(self, setup: Setup) -> str:
        changed = write_readme(all_studies())
        return f"README.md, docs/, results/: {'written' if changed else 'nothing to change'}"
