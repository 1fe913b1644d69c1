"""measure.py's command line: a subcommand for each study and each command."""

import argparse
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from bench import commands
from bench.catalogue import Scripts
from bench.commands import Command
from bench.common import ROOT
from bench.machine import Machine
from bench.measure import look
from bench.measure.lock import measuring
from bench.measure.plan import Setup
from bench.studies import Study, all_studies
from bench.subcommands import GROUPS, Subcommand, all_in, positive

EXAMPLES = """examples:
  python measure.py doctor                        what works here, and what is missing
  python measure.py predict --gpu "RTX 4090"      will it fit, and how fast is it?
  python measure.py audit train.py                your own script: which techniques it lacks
  python measure.py ladder --techniques 0,5-8     some of the techniques
  python measure.py ladder --resume               continue, or add rounds
  python measure.py ladder --dry-run              what would run, and about how long
  python measure.py ladder -- --model gpt2        what follows -- goes to every script
"""


def make_parser() -> argparse.ArgumentParser:
    """Returns a parser with a subcommand for each study and each command."""
    subcommands = [*all_studies().values(), *all_in(commands, Command)]
    listing = "".join(listing_of(group, subcommands) for group in GROUPS)
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
        subparser = parsers.add_parser(
            subcommand.name,
            description=" ".join((subcommand.__doc__ or "").split()),
            allow_abbrev=False,
            epilog="What follows -- goes to every script.",
        )
        add_options(subparser, subcommand)
    return parser


def listing_of(group: str, subcommands: Sequence[Subcommand]) -> str:
    """Returns the group's lines in --help: the name of each subcommand, and its first line."""
    lines = [f"{group}:"]
    for subcommand in subcommands:
        if subcommand.group == group:
            summary = (subcommand.__doc__ or " ").splitlines()[0].rstrip(".")
            lines.append(f"  {subcommand.name:<16}{summary}")
    return "\n".join(lines) + "\n"


def add_options(parser: argparse.ArgumentParser, subcommand: Subcommand) -> None:
    """Adds what all subcommands take, then the subcommand's own options."""
    parser.set_defaults(subcommand=subcommand)
    parser.add_argument(
        "--data",
        type=Path,
        default=ROOT / "data",
        metavar="DIR",
        help="folder of the tokens (default: data/ next to this script)",
    )
    parser.add_argument(
        "--results-dir",
        type=Path,
        default=ROOT / "results",
        metavar="DIR",
        help="folder of the results (default: results/ next to this script)",
    )
    subcommand.options(parser)
    if isinstance(subcommand, Study):
        add_measuring_options(parser, subcommand)


def add_measuring_options(parser: argparse.ArgumentParser, study: Study) -> None:
    """Adds how often and how long the runs of a study train, and how it is started."""
    rounds, tokens = by_device(study.rounds), "the scripts' own length"
    if study.tokens:
        tokens = by_device(study.tokens)
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


def by_device(numbers: dict[str, int]) -> str:
    return f"{numbers['cuda']:,} on a GPU, {numbers['cpu']:,} on a CPU"


def run(args: argparse.Namespace, options: list[str]) -> int:
    """Runs a subcommand; returns its exit code. Raises UserError, StackError, OSError."""
    subcommand, here = args.subcommand, Machine()
    lock: AbstractContextManager[None] = nullcontext()
    if subcommand.measures(args):
        lock = measuring(args.results_dir)
    with lock:
        if subcommand.needs_machine:
            here = look.describe_here()
        return subcommand.run(Setup(here, Scripts(), args.data, args.results_dir, args, options))
