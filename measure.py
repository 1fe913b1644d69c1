"""Measure what each technique for fast training brings on this machine, and what it costs.

    python measure.py stages         # the three scripts: 00, 01 and 02
    python measure.py ladder         # 00, then one technique more at a time, up to 01
    python measure.py leave-one-out  # 01 without one technique at a time
    python measure.py variants       # 01, and alternatives to what it does
    python measure.py compile-modes  # each mode of torch.compile: seconds to compile, and per step
    python measure.py sharded        # 02, and 02 with its memory shared out over the ranks
    python measure.py trainer        # 01, and the same training by Hugging Face's Trainer
    python measure.py sweep batch    # what fits, and how fast; also `sweep model`, `sweep context`
    python measure.py ddp            # 02, and 02 with each of DDP's own switches
    python measure.py scaling 1,2,4  # 02 with so many processes
    python measure.py checkpoints    # 01 and 02, and what their checkpoints cost
    python measure.py search         # the best batch size and learning rate of 00 and of 01
    python measure.py time-to-loss   # seconds until the validation loss has fallen to a target
    python measure.py report         # all of it but the searches: one page
    python measure.py readme         # writes the tables of README.md anew

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
import inspect
import math
import shlex
import sys
from pathlib import Path

from bench import (
    plans,
    processes,
    readme,
    report,
    runner,
    scaling,
    states,
    sweeps,
    time_to_loss,
)
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


positive.__name__, duration.__name__ = "whole number", "number"  # argparse: "invalid number value"


def pieces(text: str) -> list[str]:
    names = text.replace(",", " ").split() or list(report.PIECES)
    for name in names:
        if name not in report.PIECES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(report.PIECES)}")
    return [name for name in report.PIECES if name in names]


def folders() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--data", type=Path, default=ROOT / "data", metavar="DIR",
                        help="folder of the tokens (default: data/ beside this script)")
    parser.add_argument("--results-dir", type=Path, default=ROOT / "results", metavar="DIR",
                        help="folder of the results (default: results/ beside this script)")
    return parser


def resuming() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--resume", action="store_true",
                        help="go on where the last start stopped; runs that failed are tried again")
    return parser


def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(the settings, the options behind --)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, make, text in (
        ("stages", plans.stages, "the three scripts: 00, 01 and 02"),
        ("ladder", plans.ladder, "00, then one technique more at a time, up to 01; on several GPUs"
                                 " also 02"),
        ("leave-one-out", plans.leave_one_out, "01 without one technique at a time: what each is"
                                               " still worth beside all the others"),
        ("variants", plans.variants, "01, and 01 with one variant at a time: each is a patch in"
                                     " patches/variants"),
        ("compile-modes", plans.compile_modes, "01 without torch.compile, and with each of its"
                                               " modes and backends, compiled anew in each round"),
        ("sharded", plans.sharded, "02, and 02 with optimizer state, gradients or weights shared"
                                   " out over the ranks"),
        ("trainer", plans.trainer, "01, and the same training by Hugging Face's Trainer"
                                   " (peers/hf_trainer.py)"),
        ("ddp", plans.ddp, "02, and 02 with each of DDP's own switches"),
        ("scaling", scaling.scaling, "02 with more and more processes, each with the same batch"),
        ("checkpoints", plans.checkpoints, "01 and 02, both with checkpoints, and with checkpoints"
                                           " written beside the training"),
    ):
        sub = commands.add_parser(
            name, help=text, description=text, parents=[resuming(), folders()],
            usage=f"measure.py {name} [options] [-- options of the scripts]", allow_abbrev=False,
        )
        sub.set_defaults(function=measure, make=make)
        sub.add_argument("--dry-run", action="store_true",
                         help="only tell what would run, and about how long")
        whole = make is plans.stages  # scripts at their full length
        sub.add_argument("--rounds", type=positive, default=1 if whole else 4, metavar="N",
                         help="how often each script runs (default: %(default)s; a verdict needs 4)"
                         )
        if whole:
            sub.add_argument("--max-tokens", type=positive, metavar="N",
                             help="training tokens of each run, per process (default: the scripts'"
                                  " own length)")
            sub.add_argument("--epochs", type=positive, metavar="N",
                             help="passes over the text on a GPU (default: the scripts' own 15)")
            continue
        sub.add_argument("--max-tokens", type=positive, metavar="N",
                         help="training tokens, per process, after which losses are compared"
                              + {plans.compile_modes: " (default: 5 epochs on a GPU, 16,384 on a"
                                                      " CPU)",
                                 plans.sharded: " (default: 393,216 on a GPU, 16,384 on a CPU; with"
                                                " --model 131,072 and 768)",
                                 }.get(make, " (default: 393,216 on a GPU, 16,384 on a CPU)"))
        if make is plans.compile_modes:
            continue
        sub.add_argument("--seconds", type=duration, metavar="N",
                         help="train for about N seconds where --max-tokens takes less, so that the"
                              " speed is a steady one (default: 10 on a GPU, 0 on a CPU)")
        if make is scaling.scaling:
            sub.add_argument("sizes", nargs="?", default="1,2,4", metavar="1,2,4",
                             help="how many processes (default: %(default)s)")
            sub.add_argument("--links", metavar="200,400",
                             help="Mbit/s: also on two hosts that send so much, made on this"
                                  " machine (Linux, root, no GPU)")
        if make is plans.variants:
            sub.add_argument("--names", metavar="A,B",
                             help="which variants (default: all but those that compile-modes and"
                                  " checkpoints measure)")
        if make is plans.sharded:
            sub.add_argument("--model", metavar="NAME",
                             help="another size, such as gpt2-medium, at a smaller batch; on a CPU"
                                  " also a short context and run, not compiled (default: the"
                                  " scripts' own)")
        if "rungs" in inspect.signature(make).parameters:
            sub.add_argument("--rungs", metavar="0,5-8",
                             help="which techniques, by their numbers (default: all)")
    text = "speed and memory over batch sizes, models or context lengths, up to what fits"
    sub = commands.add_parser(
        "sweep", help=text, description=text, parents=[resuming(), folders()],
        usage="measure.py sweep KIND [options] [-- options of the scripts]", allow_abbrev=False,
    )
    sub.set_defaults(function=sweep)
    sub.add_argument("kind", choices=sweeps.KINDS, metavar="KIND",
                     help=f"{', '.join(sweeps.KINDS[:-1])} or {sweeps.KINDS[-1]}")
    sub.add_argument("--stage", choices=sweeps.STAGES, default="01",
                     help="which script (default: 01)")
    sub.add_argument("--rounds", type=positive, default=3, metavar="N",
                     help="how often each size runs (default: %(default)s)")
    sub.add_argument("--max-tokens", type=positive, metavar="N",
                     help="training tokens of each run, at least six steps (default: six steps on a"
                          " CPU and for models; else 393,216, or for 10 seconds)")
    for name, function, seeds, text in (
        ("search", search, time_to_loss.TUNING_ROUNDS,
         "finds 00's best learning rate, whose lowest validation loss is the target; then the batch"
         " size and learning rate with which 00, and 01, reach it soonest"),
        ("time-to-loss", measure_time, 3,
         "how long 00 and 01 train until their validation loss has fallen to the lowest of 00's"
         " default run; after a search also at the settings that it has found"),
    ):
        sub = commands.add_parser(
            name, help=text, description=text, parents=[resuming(), folders()],
            usage=f"measure.py {name} [options] [-- options of the scripts]", allow_abbrev=False,
        )
        sub.set_defaults(function=function)
        sub.add_argument("--rounds", type=positive, default=seeds, metavar="N",
                         help="how many seeds (default: %(default)s): search uses 1, 2 and so on,"
                              " time-to-loss 123, 124 and so on")
        sub.add_argument("--max-tokens", type=positive, metavar="N",
                         help="training tokens of the run that sets the target (default: 00's own"
                              f" length); the others have at most {time_to_loss.LIMIT} times as"
                              " many")
    sub.add_argument("--rungs", metavar="0,5-8",
                     help="which rungs of the ladder (default: 00 and 01)")
    sub.add_argument("--names", metavar="A,B", help="variants to measure besides")
    text = ("a page about this machine, results/report.md: all of these but search and"
            " time-to-loss")
    sub = commands.add_parser("report", help=text, description=text, parents=[folders()],
                              usage="measure.py report [options] [-- options of the scripts]",
                              allow_abbrev=False)
    sub.add_argument("--minutes", type=duration, default=25, metavar="N",
                     help="stop before so many are over; started again, it goes on (default: 25)")
    sub.add_argument("--pieces", type=pieces, default=list(report.PIECES), metavar="A,B",
                     help=f"some of {', '.join(report.PIECES)} (default: all)")
    sub.add_argument("--max-tokens", type=positive, metavar="N",
                     help="training tokens of every run, for a trial")
    sub.add_argument("--rungs", metavar="0,5-8",
                     help="which techniques, for ladder and leave-one-out (default: all)")
    sub.set_defaults(function=write_report)
    text = "write the tables of README.md anew, from the patches and results/reference/"
    sub = commands.add_parser("readme", help=text, description=text, allow_abbrev=False)
    sub.set_defaults(function=write_readme)
    cut = argv.index("--") if "--" in argv else len(argv)
    return parser.parse_args(argv[:cut]), argv[cut + 1 :]


def measure(args: argparse.Namespace, options: list[str]) -> int:
    """Does what the options say; returns the exit code. Raises UserError, StackError, OSError."""
    own = {name: vars(args)[name] for name in ("rungs", "names", "model", "sizes", "links",
                                               "seconds", "epochs") if name in args}
    plan = args.make(
        processes.ask_machine("this_machine"), **own, tokens=args.max_tokens, options=options,
        data=args.data, results=args.results_dir,
    )
    if args.dry_run:
        runner.dry_run(plan, args.rounds, args.resume)
        return 0
    runner.run_plan(plan, args.rounds, args.resume)
    return tell(plan)


def sweep(args: argparse.Namespace, options: list[str]) -> int:
    """Sweeps over sizes; returns the exit code. Raises as measure."""
    settings = dict(stage=args.stage, tokens=args.max_tokens, options=options, data=args.data,
                    results=args.results_dir)
    machine = processes.ask_machine("this_machine")
    plan = sweeps.sweep(machine, args.kind, **settings)
    if args.kind != "model":
        runner.run_plan(plan, args.rounds, args.resume)
        return tell(plan)
    # First the search of each model's best batch size, then each model at its best.
    runner.run_plan(plan, 1, args.resume)
    search = states.read_state(plan.path)
    plan = sweeps.models(machine, search["rows"], **settings)
    later = states.earlier_state(plan.path).get("time", "") >= search["time"]  # than the search
    runner.run_plan(plan, args.rounds, args.resume and later)
    return tell(plan)


def tell(plan: plans.Plan) -> int:
    """Prints the table of a plan that was run; returns the exit code."""
    table = plan.path.with_suffix(".md")
    print(f"\n{table.read_text(encoding='utf-8')}\n{relative(table)}\n{relative(plan.path)}")
    return 1 if runner.failures(plan, states.earlier_state(plan.path)) else 0


def time_settings(args: argparse.Namespace, options: list[str]) -> time_to_loss.Settings:
    machine = processes.ask_machine("this_machine")
    return time_to_loss.Settings(machine, args.data, args.results_dir, options, args.max_tokens,
                                 args.resume)


def search(args: argparse.Namespace, options: list[str]) -> int:
    """Finds the best settings of 00 and 01; returns the exit code. Raises as measure.

    Settings with which training fails are part of a search, not its failure.
    """
    settings = time_settings(args, options)
    found = time_to_loss.search(settings, args.rounds)
    print(f"\n{(settings.results / 'search' / 'search.md').read_text(encoding='utf-8')}")
    for stage, (batch_size, rate) in found["points"].items():
        print(f"{stage}: --batch-size {batch_size} --learning-rate {rate:g}")
    print(relative(settings.best))
    return 0


def measure_time(args: argparse.Namespace, options: list[str]) -> int:
    """Measures the time to a loss; returns the exit code. Raises as measure."""
    settings = time_settings(args, options)
    return tell(time_to_loss.time_to_loss(settings, args.rounds, args.rungs, args.names))


def write_report(args: argparse.Namespace, options: list[str]) -> int:
    """Measures what the report lacks, and writes it; returns the exit code. Raises as measure."""
    settings = report.Report(args.results_dir, args.data, args.minutes, args.max_tokens,
                             args.rungs, options)
    return report.make_report(settings, args.pieces)


def write_readme(args: argparse.Namespace, options: list[str]) -> int:
    """Writes README.md's tables anew. Raises UserError where one can't be made."""
    try:
        print("README.md: " + ("written" if readme.write_readme() else "nothing to change"))
    except (ValueError, LookupError, TypeError) as error:
        raise plans.UserError(f"README.md's tables can't be made: {error}")
    return 0


def main() -> int:
    sys.stdout.reconfigure(errors="replace")  # a terminal without × or Δ is no reason to stop
    args, options = parse_arguments(sys.argv[1:])
    processes.on_signals(processes.interrupt)
    try:
        return args.function(args, options)
    except (plans.UserError, StackError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "code", 1)
    except processes.Interrupted as error:
        command, *others = sys.argv[1:]
        resume = ["--resume"] * (command != "report")  # which always goes on
        again = [command, *resume, *(option for option in others if option != "--resume")]
        print(f"interrupted: python measure.py {shlex.join(again)} goes on from here",
              file=sys.stderr)
        return 128 + error.args[0]


if __name__ == "__main__":
    sys.exit(main())
