"""The command `gpt-speed`: it starts somebody's script with that script's own Python, so that only
the standard library is needed here."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from gpt_speed import children
from gpt_speed.audit import render
from gpt_speed.audit.audit import audit_of
from gpt_speed.cards import CARDS, named
from gpt_speed.common import UserError
from gpt_speed.gains import Session, reference_sessions
from gpt_speed.gradients import render as gradients_render
from gpt_speed.gradients.run import gradients
from gpt_speed.interpreter import usable_python
from gpt_speed.tables import Table, markdown, num_col, text_col

LONGEST = 10**9  # minutes


def minutes(text: str) -> float:
    """An option's type for argparse."""
    value = float(text)
    if not 0 < value < LONGEST:
        raise argparse.ArgumentTypeError(f"{text} is out of range")
    return value


# ---- What all commands that start a script have


def add_script(parser: argparse.ArgumentParser, python: str = "") -> None:
    """Adds the options that name a script and the Python that runs it; by default that is `python`,
    or for "" the activated environment's."""
    parser.usage = "%(prog)s [options] SCRIPT|-m MODULE [ITS ARGUMENTS]"
    parser.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="MODULE",
        help="as `python -m MODULE`, in place of a SCRIPT",
    )
    default = "the activated environment's"
    if python:
        default = "the one that runs this"
    parser.add_argument(
        "--python",
        default=python,
        metavar="FILE",
        help=f"that runs your script, from 3.10 on, with PyTorch from 2.4 on (default: {default})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--minutes",
        type=minutes,
        default=10,
        metavar="N",
        help="time limit of each run of the script (default: 10)",
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


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
        help="of the page audit-NAME.md, which lands in the current folder (default: the script's)",
    )
    parser.add_argument(
        "--gpu",
        metavar="NAMES",
        default="",
        help='GPUs that aren\'t here, such as "RTX 4090,H100": its speed there, and the memory that'
        " it needs, predicted",
    )
    parser.add_argument(
        "--batch-option",
        metavar="NAME",
        default="",
        help="of the script's options the one for the batch size, such as batch_size: the script"
        " runs once more with twice of it, and --gpu tells the memory at both",
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
        raise UserError(f"{page} can't be written: {error.strerror}")
    if args.json:
        print(json.dumps(result))
    else:
        print(f"{render.screen(result)}{page}")
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


COMMANDS = {
    "audit": Command("list which speedups a training script lacks", run_audit, add_audit),
    "gradients": Command("check that a script's gradients are right", run_gradients, add_script),
    "gpus": Command("list the GPUs that --gpu knows", run_gpus),
}


def parse(words: list[str] | None) -> argparse.Namespace:
    """Reads a command line: `words`, or else that of this process."""
    parser = argparse.ArgumentParser(
        prog="gpt-speed", description="What makes your PyTorch training faster.", allow_abbrev=False
    )
    parsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        own = parsers.add_parser(
            name, help=command.summary, description=command.summary, allow_abbrev=False
        )
        if command.add_options:
            command.add_options(own)
        own.set_defaults(run=command.run)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Runs a command; returns its exit code: see docs/audit.md."""
    args = parse(words)
    children.on_signals(children.interrupt)
    try:
        return args.run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except children.Interrupted as stop:
        print("interrupted", file=sys.stderr)
        return 128 + int(stop.args[0])


if __name__ == "__main__":
    sys.exit(main())
