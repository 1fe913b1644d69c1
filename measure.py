"""Measure what each technique for fast training brings on this machine, and what it costs.

    python measure.py stages         # the three scripts: 00, 01 and 02
    python measure.py ladder         # 00, then one technique more at a time, up to 01
    python measure.py leave-one-out  # 01 without one technique at a time
    python measure.py variants       # 01, and alternatives to what it does
    python measure.py sweep batch    # what fits, and how fast; also `sweep model`, `sweep context`
    python measure.py --help         # every study
    python measure.py report         # all of it but the searches: one page
    python measure.py readme         # writes the tables of README.md anew

    python measure.py ladder --rungs 0,5-8       # some of them
    python measure.py ladder --rounds 1          # one round: figures, but no verdicts
    python measure.py ladder --resume            # go on after an interruption, or with more rounds
    python measure.py ladder --dry-run           # what would run, and about how long
    python measure.py ladder -- --model gpt2     # what follows -- goes to every script
    python measure.py ladder --help              # every setting

Each run is a fresh process with the same data and seed. A round runs every script once, so that a
machine that drifts hits all of them alike. results/NAME.jsonl, a study's journal, keeps all that
was measured; tables and pictures are made from it. A script is called faster than another only
after 4 rounds, and by more than noise makes (bench/judge/noise.py). The exit code is 1 if a run failed;
its row says why.
"""

import argparse
import math
import shlex
import sys
from pathlib import Path

from bench import processes
from bench.report import look, page, readme
from bench.common import ROOT, UserError, relative
from bench.measure.journal import journal_of, locked
from bench.judge.rows import rows_of
from bench.measure.run import dry_run, failed, run_study, see_build
from bench.catalogue import Scripts
from bench.study import Setup, Study, all_studies
from bench.report.tables import text_of
from patches.stack import StackError


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is out of range")
    return int(text)


def duration(text: str) -> float:
    if not 0 <= float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is out of range")
    return float(text)


positive.__name__, duration.__name__ = "whole number", "number"  # argparse: "invalid number value"


def make_parser(studies: dict[str, Study]) -> argparse.ArgumentParser:
    """One command for each study, then `report` and `readme`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    folders = argparse.ArgumentParser(add_help=False)
    folders.add_argument("--data", type=Path, default=ROOT / "data", metavar="DIR",
                         help="folder of the tokens (default: data/ beside this script)")
    folders.add_argument("--results-dir", type=Path, default=ROOT / "results", metavar="DIR",
                         help="folder of the results (default: results/ beside this script)")

    def command(name: str, text: str, arguments: str = "", parents=(folders,)):
        return commands.add_parser(
            name, help=text, description=text, allow_abbrev=False, parents=parents,
            usage=" ".join(["measure.py", name, *arguments.split(), "[options]",
                            "[-- options of the scripts]"]))

    for study in studies.values():
        sub = command(study.name, study.help, study.arguments)
        sub.set_defaults(function=measure)
        study.options(sub)
        if not study.runs_scripts:
            continue
        gpu, cpu = study.rounds.values()
        rounds = str(gpu) if gpu == cpu else f"{gpu} on a GPU, {cpu} on a CPU"
        sub.add_argument("--rounds", type=positive, metavar="N",
                         help=study.rounds_help.format(rounds))
        if study.max_tokens_help:
            sub.add_argument("--max-tokens", type=positive, metavar="N",
                             help=study.max_tokens_help.format(**study.tokens or {}))
        if study.seconds:
            sub.add_argument("--seconds", type=duration, metavar="N",
                             help="train for about N seconds where --max-tokens takes less, so that"
                                  " the speed is a steady one (default: 10 on a GPU, 0 on a CPU)")
        sub.add_argument("--resume", action="store_true",
                         help="go on where the last start stopped, and try again what failed")
        sub.add_argument("--dry-run", action="store_true",
                         help="only tell what would run first, and about how long")
    sub = command("report", "a page about this machine, results/report.md: all of these but search"
                            " and time-to-loss")
    sub.add_argument("--minutes", type=duration, default=25, metavar="N",
                     help="stop before so many are over; started again, it goes on (default: 25)")
    sub.add_argument("--pieces", metavar="A,B", default="", help="some of the studies, such as"
                     " stages,ladder,profile (default: all)")
    sub.add_argument("--max-tokens", type=positive, metavar="N",
                     help="training tokens of every run, for a trial")
    sub.add_argument("--rungs", metavar="0,5-8",
                     help="which techniques, for ladder and leave-one-out (default: all)")
    sub.set_defaults(function=report)
    sub = command("readme", "write the tables of README.md and docs/ anew, from the patches and"
                            " results/reference/", parents=())
    sub.set_defaults(function=lambda *_: print(
        "README.md, docs/: " + ("written" if readme.write_readme() else "nothing to change")))
    return parser


def measure(args: argparse.Namespace, options: list[str], studies: dict[str, Study]) -> int:
    """Measures a study; returns the exit code. Raises UserError, StackError, OSError."""
    study = studies[args.command]
    machine = look.machine_in(args.results_dir) if study.of_this_machine else {}
    setup = Setup(machine, Scripts(), args.data, args.results_dir, args, options)
    if not study.runs_scripts:
        print(study.answer(setup))
        return 0
    if machine.get("gpu_needs"):
        print(f"missing: {machine['gpu_needs']}", file=sys.stderr)
    if args.dry_run:
        dry_run(study, setup, args.rounds, args.resume)
        return 0
    with locked(setup.results):
        see_build()
        _, plans = run_study(study, setup, args.rounds, args.resume)
    for measured in plans:
        print(f"\n{text_of(study, measured)}{study.result(measured, rows_of(measured))}")
    print(relative(journal_of(setup.results, study.name)))
    return int(study.failures_count and any(map(failed, plans)))


def report(args: argparse.Namespace, options: list[str], studies: dict[str, Study]) -> int:
    """Measures what the page lacks, and writes it; returns the exit code. Raises as measure."""
    chosen = args.pieces.replace(",", " ").split() or list(studies)
    for name in chosen:
        if name not in studies:
            raise UserError(f"--pieces: {name!r} is none of {', '.join(studies)}", 2)
    places = sorted((place, name) for name in chosen for place in studies[name].schedule)
    parser, machine, jobs = make_parser(studies), look.machine_in(args.results_dir), []
    for place, name in places:
        rounds = studies[name].schedule[place]
        for line in studies[name].in_report if rounds != 0 else ():
            own = parser.parse_args([name, *line.split()])
            own.max_tokens = args.max_tokens
            if "rungs" in own:
                own.rungs = args.rungs
            jobs.append((studies[name], rounds, Setup(
                machine, Scripts(), args.data, args.results_dir, own, options,
                minutes=args.minutes)))
    if not jobs:
        raise UserError(f"--pieces: no report measures {', '.join(chosen)}", 2)
    command = "python measure.py report"
    command += f' --pieces "{args.pieces}"' if args.pieces else ""
    command += f" --max-tokens {args.max_tokens}" if args.max_tokens else ""
    command += f" --rungs {args.rungs}" if args.rungs else ""
    command += f" -- {shlex.join(options)}" if options else ""
    with locked(args.results_dir):
        see_build()
        return page.make_report(jobs, args.minutes, command)


def main() -> int:
    sys.stdout.reconfigure(errors="replace")  # a terminal without × or Δ is no reason to stop
    studies, argv = all_studies(), sys.argv[1:]
    cut = argv.index("--") if "--" in argv else len(argv)
    args = make_parser(studies).parse_args(argv[:cut])
    processes.on_signals(processes.interrupt)
    try:
        return args.function(args, argv[cut + 1 :], studies) or 0
    except (UserError, StackError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "code", 1)
    except processes.Interrupted as error:
        # A report always goes on; what runs no scripts begins anew.
        runs_scripts = args.command in studies and studies[args.command].runs_scripts
        resume, goes_on = ["--resume"] * runs_scripts, runs_scripts or args.command == "report"
        again = [argv[0], *resume, *(option for option in argv[1:] if option != "--resume")]
        print(f"interrupted: python measure.py {shlex.join(again)}"
              f" {'goes on from here' if goes_on else 'begins anew'}", file=sys.stderr)
        return 128 + error.args[0]


if __name__ == "__main__":
    sys.exit(main())
