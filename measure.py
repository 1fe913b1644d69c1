"""Measure what each technique for fast training brings on this machine, and what it costs.

    python measure.py stages         # the three scripts: 00, 01 and 02
    python measure.py ladder         # 00, then one technique more at a time, up to 01
    python measure.py leave-one-out  # 01 without one technique at a time

    python measure.py ladder --rungs 0,5-8       # some of them
    python measure.py ladder --rounds 1          # one round: figures, but no verdicts
    python measure.py ladder --resume            # go on after an interruption, or with more rounds
    python measure.py ladder --dry-run           # what would run, and about how long
    python measure.py ladder -- --model gpt2     # what follows -- goes to every script
    python measure.py ladder --help              # every setting

Each run is a fresh process with the same data and seed. A round runs every script once, so that a
machine that drifts hits all of them alike. results/NAME/ keeps the record of each run, NAME.json
(the results so far and, at the end, the rows) and NAME.md (the rows as a table). A script is called
faster than another only after 4 rounds whose ranges don't overlap. The exit code is 1 if a run
failed; its row says why.
"""

import argparse
import math
import shlex
import sys
from pathlib import Path

from bench import plans, runner
from bench.files import ROOT, relative
from patches.stack import StackError


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is out of range")
    return int(text)


def duration(text: str) -> float:
    if not 0 <= float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is out of range")
    return float(text)


positive.__name__, duration.__name__ = "whole number", "number"


def common_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--rounds", type=positive, default=4, metavar="N",
                        help="how often each script runs; a verdict needs 4 (default: 4)")
    parser.add_argument("--max-tokens", type=positive, metavar="N",
                        help="training tokens, per process, after which losses are compared"
                             " (default: 393,216 on a GPU, 16,384 on a CPU)")
    parser.add_argument("--seconds", type=duration, metavar="N",
                        help="train for about N seconds where --max-tokens takes less, so that the"
                             " speed is a steady one (default: 10 on a GPU, 0 on a CPU)")
    parser.add_argument("--resume", action="store_true",
                        help="go on where the last start stopped; runs that failed are tried again")
    parser.add_argument("--dry-run", action="store_true",
                        help="only tell what would run, and about how long")
    parser.add_argument("--data", type=Path, default=ROOT / "data", metavar="DIR",
                        help="folder of the tokens (default: data/ beside this script)")
    parser.add_argument("--results-dir", type=Path, default=ROOT / "results", metavar="DIR",
                        help="folder of the results (default: results/ beside this script)")
    return parser


def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(the settings, the options behind --)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    common = common_options()
    for name, make, text in (
        ("stages", plans.stages, "the three scripts: 00, 01 and 02"),
        ("ladder", plans.ladder, "00, then one technique more at a time, up to 01; on several GPUs"
                                 " also 02"),
        ("leave-one-out", plans.leave_one_out, "01 without one technique at a time: what each is"
                                               " still worth beside all the others"),
    ):
        sub = commands.add_parser(
            name, help=text, description=text, parents=[common], allow_abbrev=False,
            usage=f"measure.py {name} [options] [-- options of the scripts]",
        )
        sub.set_defaults(make=make)
        if make is not plans.stages:
            sub.add_argument("--rungs", metavar="0,5-8",
                             help="which techniques, by their numbers (default: all)")
    cut = argv.index("--") if "--" in argv else len(argv)
    return parser.parse_args(argv[:cut]), argv[cut + 1 :]


def measure(args: argparse.Namespace, options: list[str]) -> int:
    """Does what the options say; returns the exit code. Raises UserError, StackError, OSError."""
    choice = {"rungs": args.rungs} if "rungs" in args else {}
    plan = args.make(
        runner.ask_machine("this_machine"), **choice, tokens=args.max_tokens, seconds=args.seconds,
        options=options, data=args.data, results=args.results_dir,
    )
    if args.dry_run:
        runner.dry_run(plan, args.rounds, args.resume)
        return 0
    runner.run_plan(plan, args.rounds, args.resume)
    table = plan.path.with_suffix(".md")
    print(f"\n{table.read_text(encoding='utf-8')}\n{relative(table)}\n{relative(plan.path)}")
    return 1 if any(result["error"] for result in runner.read_state(plan.path)["results"]) else 0


def main() -> int:
    sys.stdout.reconfigure(errors="replace")  # a terminal without × or Δ is no reason to stop
    args, options = parse_arguments(sys.argv[1:])
    runner.on_signals(runner.interrupt)
    try:
        return measure(args, options)
    except (plans.UserError, StackError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "code", 1)
    except runner.Interrupted as error:
        command, *others = sys.argv[1:]
        again = [command, "--resume", *(option for option in others if option != "--resume")]
        print(f"interrupted: python measure.py {shlex.join(again)} goes on from here",
              file=sys.stderr)
        return 128 + error.args[0]


if __name__ == "__main__":
    sys.exit(main())
