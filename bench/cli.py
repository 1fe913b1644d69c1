"""measure.py's command line: a subcommand for each study and each command."""

import argparse
import sys
from pathlib import Path

from bench import commands
from bench.catalogue import Scripts
from bench.common import ROOT, relative
from bench.measure import machine
from bench.measure.journal import journal_of, measuring
from bench.measure.plan import Setup
from bench.measure.run import dry_run, run_study
from bench.predict.batches import batches_that_fit
from bench.report.tables import text_of
from bench.studies import Study, all_studies
from bench.subcommands import GROUPS, Command, Subcommand, all_in, positive
from gpt_speed.common import UserError

EXAMPLES = """examples:
  python measure.py doctor                        what works here, and what is missing
  python measure.py predict --gpu "RTX 4090"      will it fit, and how fast is it?
  python measure.py audit train.py                your own script: which techniques it lacks
  python measure.py ladder --techniques 0,5-8     some of the techniques
  python measure.py ladder --resume               continue, or add rounds
  python measure.py ladder --dry-run              what would run, and about how long
  python measure.py ladder -- --model gpt2        what follows -- goes to every script
"""
RENAMED = {"--rungs": "--techniques", "--anew": "--retrace", "--pieces": "--studies"}


def parse(words: list[str]) -> argparse.Namespace:
    """Returns what a command line asks for. Raises UserError for an option's former name."""
    for option in (word.partition("=")[0] for word in words):
        if option in RENAMED and words[0] != "audit":  # an audited script has its own options
            raise UserError(f"{option} is called {RENAMED[option]} now", 2)
    return make_parser().parse_args(words)


def make_parser() -> argparse.ArgumentParser:
    """Returns a parser with a subcommand for each study and each command."""
    subcommands: list[Subcommand] = [*all_studies().values(), *all_in(commands, Command)]
    listing = ""
    for group in GROUPS:
        titles = [
            f"  {one.name:<16}{(one.__doc__ or ' ').splitlines()[0].rstrip('.')}\n"
            for one in subcommands
            if one.group == group
        ]
        listing += f"{group}:\n{''.join(titles)}"
    parser = argparse.ArgumentParser(
        description="Benchmark speed techniques for GPT training.",
        allow_abbrev=False,
        usage="measure.py COMMAND ...",
        epilog=f"{listing}\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parsers = parser.add_subparsers(
        required=True,
        metavar="COMMAND",
        dest="command",
        prog="measure.py",
        help="one of those below; COMMAND --help explains it",
    )
    for subcommand in subcommands:
        own = parsers.add_parser(
            subcommand.name,
            description=" ".join((subcommand.__doc__ or "").split()),
            allow_abbrev=False,
            epilog="What follows -- goes to every script.",
        )
        own.set_defaults(subcommand=subcommand)
        for option, what in (("--data", "tokens"), ("--results-dir", "results")):
            folder = option.strip("-").removesuffix("-dir")
            own.add_argument(
                option,
                type=Path,
                default=ROOT / folder,
                metavar="DIR",
                help=f"folder of the {what} (default: {folder}/ next to this script)",
            )
        subcommand.options(own)
        if isinstance(subcommand, Study):
            add_measuring_options(own, subcommand)
    return parser


def add_measuring_options(parser: argparse.ArgumentParser, study: Study) -> None:
    by_device = "{cuda:,} on a GPU, {cpu:,} on a CPU"
    rounds = by_device.format(**study.rounds)
    tokens = by_device.format(**study.tokens) if study.tokens else "the scripts' own length"
    parser.add_argument(
        "--rounds",
        type=positive,
        metavar="N",
        help=f"how often each script runs (default: {rounds}; intervals need 2)",
    )
    parser.add_argument(
        "--max-tokens",
        type=positive,
        metavar="N",
        help=f"training tokens of each run, per process (default: {tokens})",
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue the last measurement, and retry what failed"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="only print what would run, and about how long it takes",
    )


def run(args: argparse.Namespace, options: list[str]) -> int:
    """Runs a subcommand; returns its exit code. Raises UserError, StackError, OSError."""
    subcommand = args.subcommand
    is_study = isinstance(subcommand, Study)
    here = machine.this_machine() if is_study or subcommand.needs_machine else {}
    setup = Setup(here, Scripts(), args.data, args.results_dir, args, options)
    return measure(subcommand, setup) if is_study else subcommand.run(setup)


def measure(study: Study, setup: Setup) -> int:
    """Measures a study; returns the exit code: 1 if a run failed. Raises as `run`."""
    args = setup.args
    if setup.machine.get("gpu_needs"):
        print(f"missing: {setup.machine['gpu_needs']}", file=sys.stderr)
    if not args.resume:
        setup.batches = batches_that_fit(setup, composed=False)
    if args.dry_run:
        dry_run(study, setup, args.rounds, args.resume)
        return 0
    with measuring(setup.results):
        _, plans = run_study(study, setup, args.rounds, args.resume)
    for measured in plans:
        print(f"\n{text_of(study, measured)}")
    print(relative(journal_of(setup.results, study.name)))
    return int(any(map(study.failed, plans)))
