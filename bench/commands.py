"""The commands of measure.py: one measures a study, one all of a machine's report."""

import argparse
import shlex
import sys
import time
from pathlib import Path

from bench.analysis.rows import rows_of
from bench.catalogue import Scripts
from bench.common import ROOT, UserError, listed, make_writable, relative
from bench.measure.journal import OTHER_RESULTS, journal_of, locked
from bench.measure.plan import Setup
from bench.measure.run import dry_run, failed, run_study, see_build
from bench.report import look, readme
from bench.report.page import write_page
from bench.report.tables import text_of
from bench.studies import Study, duration, positive, positive_duration
from patches.stack import StackError

PAGE_SECONDS = 20  # to draw and write the page at the end


def make_parser(studies: dict[str, Study]) -> argparse.ArgumentParser:
    """One command for each study, then `report` and `readme`."""
    parser = argparse.ArgumentParser(
        description="Measure what each technique for fast training brings on this machine, and what"
                    " it costs.", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    folders = argparse.ArgumentParser(add_help=False)
    folders.add_argument("--data", type=Path, default=ROOT / "data", metavar="DIR",
                         help="folder of the tokens (default: data/ next to this script)")
    folders.add_argument("--results-dir", type=Path, default=ROOT / "results", metavar="DIR",
                         help="folder of the results (default: results/ next to this script)")

    def command(name: str, text: str, function, parents=(folders,)):
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False,
                                  parents=parents, epilog="What follows -- goes to every script.")
        sub.set_defaults(function=function)
        return sub

    for study in studies.values():
        sub = command(study.name, study.help, measure)
        study.options(sub)
        if not study.runs_scripts:
            continue
        gpu, cpu = study.rounds["cuda"], study.rounds["cpu"]
        rounds = str(gpu) if gpu == cpu else f"{gpu} on a GPU, {cpu} on a CPU"
        sub.add_argument("--rounds", type=positive, metavar="N",
                         help=study.rounds_help.format(rounds))
        if study.max_tokens_help:
            sub.add_argument("--max-tokens", type=positive, metavar="N",
                             help=study.max_tokens_help.format(**study.tokens or {}))
        if study.has_seconds:
            sub.add_argument("--seconds", type=duration, metavar="N",
                             help="make all runs longer, so that the fastest trains for about N"
                                  " seconds (default: 0, as long as --max-tokens says)")
        sub.add_argument("--resume", action="store_true",
                         help="go on where the last start stopped, and try again what failed")
        sub.add_argument("--dry-run", action="store_true",
                         help="only list what would run first, and about how long it takes")
    sub = command("report", "a page about this machine, results/report.md: all of these but search"
                            " and time-to-loss", report)
    sub.add_argument("--minutes", type=positive_duration, default=25, metavar="N",
                     help="stop before this many are over; run it again to continue (default: 25)")
    sub.add_argument("--pieces", metavar="A,B", default="", help="some of the studies, such as"
                     " stages,ladder,profile (default: all)")
    sub.add_argument("--max-tokens", type=positive, metavar="N",
                     help="training tokens of every run, for a trial")
    sub.add_argument("--rungs", metavar="0,5-8",
                     help="which techniques, for ladder and leave-one-out (default: all)")
    command("readme", "write the tables of README.md, docs/ and the machines' READMEs again, from"
                      " the patches and results/reference/",
            lambda args, options, studies: print(
                "README.md, docs/, results/reference/*/README.md: " + (
                    "written" if readme.write_readme(studies) else "nothing to change")), ())
    return parser


def measure(args: argparse.Namespace, options: list[str], studies: dict[str, Study]) -> int:
    """Measures a study; returns the exit code. Raises UserError, StackError, OSError."""
    study = studies[args.command]
    if study.runs_scripts and not args.dry_run:
        make_writable(args.results_dir, OTHER_RESULTS)
    machine = look.this_machine() if study.of_this_machine else {}
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
    pieces = [name for name, study in studies.items() if study.schedule]
    chosen = args.pieces.replace(",", " ").split() or pieces
    for name in chosen:
        if name not in pieces:
            raise UserError(f"--pieces: {name!r} is none of {', '.join(pieces)}", 2)
    make_writable(args.results_dir, OTHER_RESULTS)
    parser, machine, jobs = make_parser(studies), look.this_machine(), []
    places = sorted((place, name) for name in chosen for place in studies[name].schedule)
    for place, piece in places:
        study, rounds = studies[piece], studies[piece].schedule[place]
        for line in study.in_report if rounds != 0 else ():
            own = parser.parse_args([piece, *line.split()])
            own.max_tokens = args.max_tokens
            if "rungs" in own:
                own.rungs = args.rungs
            jobs.append((study, rounds, Setup(machine, Scripts(), args.data, args.results_dir, own,
                                              options, in_report=True)))
    if not jobs:
        raise UserError(f"--pieces: no report measures {', '.join(chosen)}", 2)
    command = ["python", "measure.py", "report"]
    for option in ("pieces", "max_tokens", "rungs"):
        if value := getattr(args, option):
            command += [f"--{option.replace('_', '-')}", str(value)]
    command += ["--", *options] if options else []
    with locked(args.results_dir):
        see_build()
        return make_report(studies, jobs, args.minutes, shlex.join(command))


def make_report(studies: dict[str, Study], jobs: list[tuple[Study, int | None, Setup]],
                minutes: float, command: str) -> int:
    """Measures each study for this many rounds, as far as the minutes reach, and writes the page in
    any case. Returns the exit code: 1 if something failed. Raises UserError where nothing can be
    measured."""
    began, setup = time.monotonic(), jobs[0][2]
    deadline = began + 60 * minutes - PAGE_SECONDS
    peak = look.look_at(studies, setup.data, setup.results)["matmul_peak"]
    missing, refused, failures = [study.name for study, *_ in jobs], {}, False
    try:
        for study, rounds, setup in jobs:
            if time.monotonic() > deadline:
                break
            if study.name in refused:
                continue
            print(f"--- {study.name}", flush=True)
            setup.matmul_peak = peak
            try:
                finished, measured = run_study(study, setup, rounds, None, deadline)
                failures |= study.failures_count and any(map(failed, measured))
                if finished:
                    missing.remove(study.name)
            except (UserError, StackError, OSError) as error:
                print(f"error: {study.name}: {error}", file=sys.stderr)
                refused[study.name], failures = str(error), True
    finally:
        path = write_page(studies, setup.results, command,
                          {name: refused.get(name, "") for name in missing})
    if unfinished := [name for name in dict.fromkeys(missing) if name not in refused]:
        print(f"\nThe time, {minutes:g} minutes, is over. Not finished: {listed(unfinished)};"
              " run it again to continue")
    head = path.read_text(encoding="utf-8").partition("## ")[0]
    print(f"\n{head}{relative(path)}, after {(time.monotonic() - began) / 60:.1f} minutes")
    return int(failures)
