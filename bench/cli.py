"""measure.py's command line: a subcommand for each study and each command."""

import argparse
import sys
from pathlib import Path

from bench.catalogue import Scripts
from bench.commands import Command, all_commands
from bench.common import ROOT, UserError, make_writable, relative
from bench.measure.journal import OTHER_RESULTS, journal_of, locked
from bench.measure.plan import Setup
from bench.measure.run import dry_run, run_study, see_build
from bench.predict.batches import batches_that_fit
from bench.report import machine_section
from bench.report.tables import text_of
from bench.studies import Study, all_studies
from bench.subcommands import GROUPS, Subcommand, duration, positive

EXAMPLES = """examples:
  python measure.py doctor                        what works here, and what is missing
  python measure.py predict --gpu "RTX 4090"      will it fit, and how fast is it?
  python measure.py audit train.py                your own script: which techniques it lacks
  python measure.py ladder --techniques 0,5-8     some of the techniques
  python measure.py ladder --resume               continue, or add rounds
  python measure.py ladder --dry-run              what would run, and about how long
  python measure.py ladder -- --model gpt2        what follows -- goes to every script
"""
RENAMED = {"--rungs": "--techniques", "--anew": "--retrace"}


def make_parser() -> argparse.ArgumentParser:
    """One subcommand for each study and each command, listed in groups."""
    subcommands: list[Subcommand] = [*all_studies().values(), *all_commands().values()]
    parser = argparse.ArgumentParser(
        description="Benchmark speed techniques for GPT training.", allow_abbrev=False,
        usage="measure.py COMMAND ...", epilog=f"{listing(subcommands)}\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parsers = parser.add_subparsers(required=True, metavar="COMMAND", dest="command",
                                    prog="measure.py",
                                    help="one of those below; COMMAND --help explains it")
    for subcommand in subcommands:
        own = parsers.add_parser(subcommand.name, description=subcommand.description,
                                 allow_abbrev=False,
                                 epilog="What follows -- goes to every script.")
        own.set_defaults(subcommand=subcommand)
        own.add_argument("--data", type=Path, default=ROOT / "data", metavar="DIR",
                         help="folder of the tokens (default: data/ next to this script)")
        own.add_argument("--results-dir", type=Path, default=ROOT / "results", metavar="DIR",
                         help="folder of the results (default: results/ next to this script)")
        subcommand.options(own)
        if isinstance(subcommand, Study):
            add_measuring_options(own, subcommand)
    return parser


def listing(subcommands: list[Subcommand]) -> str:
    """A line for each subcommand, in groups."""
    lines = []
    for group in GROUPS:
        lines.append(f"{group}:")
        lines += [f"  {one.name:<16}{one.help}" for one in subcommands if one.group == group]
    return "\n".join([*lines, ""])


def add_measuring_options(parser: argparse.ArgumentParser, study: Study) -> None:
    by_device = "{cuda:,} on a GPU, {cpu:,} on a CPU"
    rounds = by_device.format(**study.rounds)
    tokens = by_device.format(**study.tokens) if study.tokens else "the scripts' own length"
    parser.add_argument("--rounds", type=positive, metavar="N",
                        help=f"how often each script runs (default: {rounds}; intervals need 2)")
    parser.add_argument("--max-tokens", type=positive, metavar="N",
                        help=f"training tokens of each run, per process (default: {tokens})")
    if study.tokens:
        parser.add_argument("--seconds", type=duration, metavar="N",
                            help="make all runs longer, so that the fastest trains for about N"
                                 " seconds (default: 0, as long as --max-tokens says)")
    parser.add_argument("--resume", action="store_true",
                        help="continue the last measurement, and retry what failed")
    parser.add_argument("--dry-run", action="store_true",
                        help="only print what would run, and about how long it takes")


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(the arguments before --, the scripts' own options behind it). Raises UserError for an option
    that has another name now."""
    cut = argv.index("--") if "--" in argv else len(argv)
    for word in argv[:cut]:
        old = word.split("=")[0]
        if old in RENAMED and argv[0] != "audit":  # behind an audited script they are its own
            raise UserError(f"{old} is called {RENAMED[old]} now", 2)
    return make_parser().parse_args(argv[:cut]), argv[cut + 1:]


def run(args: argparse.Namespace, options: list[str]) -> int:
    """Runs the subcommand; returns the exit code. Raises UserError, StackError, OSError."""
    subcommand = args.subcommand
    if isinstance(subcommand, Command):
        machine = machine_section.this_machine() if subcommand.needs_machine else {}
        return subcommand.run(Setup(machine, Scripts(), args.data, args.results_dir, args, options))
    return measure(subcommand, args, options)


def measure(study: Study, args: argparse.Namespace, options: list[str]) -> int:
    """Measures a study; returns the exit code: 1 if a run failed. Raises as `run`."""
    if not args.dry_run:
        make_writable(args.results_dir, OTHER_RESULTS)
    machine = machine_section.this_machine()
    setup = Setup(machine, Scripts(), args.data, args.results_dir, args, options)
    if machine.get("gpu_needs"):
        print(f"missing: {machine['gpu_needs']}", file=sys.stderr)
    if not args.resume:
        setup.batches = batches_that_fit(setup, composed=False)
    if args.dry_run:
        dry_run(study, setup, args.rounds, args.resume)
        return 0
    with locked(setup.results):
        see_build()
        _, plans = run_study(study, setup, args.rounds, args.resume)
    for measured in plans:
        print(f"\n{text_of(study, measured)}")
    print(relative(journal_of(setup.results, study.name)))
    return int(any(map(study.failed, plans)))
