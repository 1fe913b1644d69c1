"""The command `gpt-speed`: it starts somebody's script with that script's own Python, so that only
the standard library is needed here."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from gpt_speed import children
from gpt_speed.audit import render
from gpt_speed.audit.audit import audit_of
from gpt_speed.cards import CARDS, named
from gpt_speed.common import UserError, exit_code_of, reason_of
from gpt_speed.gains import Session, reference_sessions
from gpt_speed.gradients import render as gradients_render
from gpt_speed.gradients.run import gradients
from gpt_speed.interpreter import usable_python
from gpt_speed.tables import Table, markdown, num_col, text_col

LONGEST = 10**9  # minutes
AUDIT = """\
Lists which of 15 speedups your PyTorch training script lacks, with the lines of
your code, and how much faster each may make it.

Your script runs twice, unchanged, as if you had started it yourself. The first
run is timed, for at most 24 updates or some 20 seconds. The second one is recorded,
for at most 5 updates, which take longer and need more memory. Each run ends there,
without what your script does after its training. An audit takes twice the time
until your script's first update, and mostly less than a minute more.

What your script writes in these steps stays, such as logs and checkpoints, and
overwrites what it always overwrites. So give it another output folder, by an
option of its own. The audit itself writes one file, the report audit-NAME.md in
the current folder, over an older one of that name."""
AUDIT_EXAMPLES = """\
examples:
  gpt-speed audit train.py --batch_size=8 --out_dir=/tmp/out
  gpt-speed audit --python ENV/bin/python -m package.train --config small
  gpt-speed audit --gpu "RTX 4090,H100" train.py
  torchrun --nproc_per_node=4 -m gpt_speed audit train.py

exit codes: 0 done, 1 the script failed, 2 wrong usage, 3 no training step seen"""
GRADIENTS = """\
Checks whether your script, compiled, computes the gradients that you wrote.

Your script runs until its first update, two to ten times, unchanged and from the
same seeds: first uncompiled, then compiled. The gradients of each parameter are
compared, and count as wrong if rounding doesn't explain the difference. Then it
tries the known workarounds. Dropout and backward passes of your own are checked
with numeric derivatives. On two cores all this mostly takes a minute or two.

No run comes to its first update, so nothing is trained. But what your script
writes before that stays, and overwrites what it always overwrites: give it
another output folder, by an option of its own. The check itself writes no file."""
GRADIENTS_EXAMPLES = """\
examples:
  gpt-speed gradients train.py --compile=True --out_dir=/tmp/out
  gpt-speed gradients --python ENV/bin/python -m package.train --config small

exit codes: 0 no wrong gradient found, 1 the script failed, 2 wrong usage,
3 no update seen, 4 a gradient is wrong"""


def minutes(text: str) -> float:
    """An option's type for argparse."""
    value = float(text)
    if not 0 < value < LONGEST:
        raise argparse.ArgumentTypeError(f"{text} is out of range")
    return value


# ---- What all commands that start a script have


def add_script(parser: argparse.ArgumentParser, python: str = "") -> None:
    """Adds what all commands have that start a script; `python` is the one of add_python."""
    parser.usage = "%(prog)s [options] SCRIPT|-m MODULE [ITS ARGUMENTS]"
    add_command(parser)
    add_python(parser, python)
    parser.add_argument(
        "--json",
        action="store_true",
        help="print nothing but JSON, as schema.json in the package describes it",
    )
    parser.add_argument(
        "--minutes",
        type=minutes,
        default=10,
        metavar="N",
        help="give up if one run of the script takes longer than N minutes (default: 10)",
    )


def add_command(parser: argparse.ArgumentParser) -> None:
    """Adds the script, or else the module, with its arguments: see command_of."""
    parser.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="MODULE",
        help="run a module, as `python -m MODULE` does, in place of a script; what follows are its"
        " arguments",
    )
    parser.add_argument(
        "script",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT",
        help="your training script and its arguments, as you type them behind `python`",
    )


def add_python(parser: argparse.ArgumentParser, python: str) -> None:
    """Adds the option for the Python that runs the script. Its default is `python`, the one that
    runs this program, or where that is "" the Python of the activated environment."""
    default = "that of the activated environment"
    if python:
        default = "the one that runs this"
    parser.add_argument(
        "--python",
        default=python,
        metavar="FILE",
        help="run your script with this Python, 3.10 or newer, which has PyTorch 2.4 or newer"
        f" (default: {default})",
    )


def command_of(args: argparse.Namespace) -> list[str]:
    """Returns the script, or "-m" and a module, with arguments. Raises UserError."""
    if args.module:
        return ["-m", *args.module]
    if not args.script:
        raise UserError("which script? Name it last, with its arguments, as behind `python`", 2)
    script = Path(args.script[0])
    if not script.exists():
        raise UserError(f"no script {script}", 2)
    if script.suffix == ".ipynb":
        raise UserError(f"{script} is a notebook: jupyter nbconvert --to script {script}", 2)
    return args.script


# ---- The audit


def add_audit(parser: argparse.ArgumentParser, python: str = "") -> None:
    parser.add_argument(
        "--name",
        default="",
        help="write the report to audit-NAME.md (default: the script's name)",
    )
    parser.add_argument(
        "--gpu",
        metavar="NAMES",
        default="",
        help="also predict your script's speed and memory on other GPUs, such as"
        " 'RTX 4090,H100'; `gpt-speed gpus` lists them",
    )
    parser.add_argument(
        "--batch-option",
        metavar="NAME",
        default="",
        help="with --gpu, also predict the memory at twice the batch size: NAME is your script's"
        " own option for the batch size, such as batch_size. The script runs a third time",
    )
    add_script(parser, python)


def audited(
    args: argparse.Namespace, command: list[str], sessions: Iterable[Session]
) -> dict | None:
    """Returns an audit of a command by its options; None in a rank of torchrun that isn't the
    first. Raises UserError."""
    cards: list[str] = []
    if args.gpu:
        cards = named(args.gpu)
    return audit_of(command, sessions, args.python, args.minutes, cards, args.batch_option)


def run_audit(args: argparse.Namespace) -> int:
    """Prints an audit, and writes its page; returns the exit code."""
    result = audited(args, command_of(args), reference_sessions())
    if result is None:
        return 0
    page = Path(render.page_name(result["command"], args.name))
    try:
        page.write_text(render.page(result), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{page} can't be written: {reason_of(error)}")
    if args.json:
        print(json.dumps(result))
    else:
        print(f"{render.screen(result)}\nThis report: {page}")
    return 0


# ---- Gradients


def run_gradients(args: argparse.Namespace) -> int:
    """Prints whether a script's gradients are right; returns the exit code."""
    answer = gradients(command_of(args), usable_python(args.python), args.minutes)
    if args.json:
        print(json.dumps(gradients_render.as_json(answer)))
    else:
        print(gradients_render.screen(answer), end="")
    if not answer.wrong:
        return 0
    return 4


# ---- The cards


def run_gpus(args: argparse.Namespace) -> int:
    """Prints the cards that --gpu knows."""
    rows = [card._asdict() | dict(card=name, gib=card.mib / 1024) for name, card in CARDS.items()]
    columns = [
        text_col("GPU", "card"),
        num_col("GiB", "gib", ".0f"),
        num_col("GB/s", "bandwidth", ",.0f"),
        num_col("TFLOP/s in bfloat16", "bfloat16", ",.0f"),
        num_col("in float16", "float16", ",.0f"),
    ]
    print(markdown(Table(columns, rows)), end="")
    return 0


class Command(NamedTuple):
    summary: str  # in --help
    run: Callable[[argparse.Namespace], int]  # returns the exit code
    add_options: Callable[[argparse.ArgumentParser], None] | None = None
    description: str = ""  # in its own --help, before the options
    examples: str = ""  # behind them


COMMANDS = {
    "audit": Command(
        "list which speedups a training script lacks", run_audit, add_audit, AUDIT, AUDIT_EXAMPLES
    ),
    "gradients": Command(
        "check whether compiling changed a script's gradients",
        run_gradients,
        add_script,
        GRADIENTS,
        GRADIENTS_EXAMPLES,
    ),
    "gpus": Command("list the GPUs that `audit --gpu` knows", run_gpus),
}


def parse(words: list[str] | None) -> argparse.Namespace:
    """Reads a command line: `words`, or else that of this process."""
    parser = argparse.ArgumentParser(
        prog="gpt-speed", description="What makes your PyTorch training faster.", allow_abbrev=False
    )
    parsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = parsers.add_parser(
            name,
            help=command.summary,
            description=command.description or command.summary,
            epilog=command.examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if command.add_options:
            command.add_options(subparser)
        subparser.set_defaults(run=command.run)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Runs the command that `words` name, or else this process's command line; returns its exit
    code: see docs/audit.md."""
    return exit_code_of(partial(run_command, words), OSError)


def run_command(words: list[str] | None) -> int:
    """Runs a command; returns its exit code. Raises UserError."""
    args = parse(words)
    children.on_signals(children.interrupt)
    try:
        return args.run(args)
    except children.Interrupted as interruption:
        print("interrupted", file=sys.stderr)
        return 128 + int(interruption.args[0])
