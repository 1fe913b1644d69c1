"""The command `gpt-speed`: it starts somebody's script with that script's own Python, so that only
the standard library is needed here."""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from gpt_speed import children
from gpt_speed.audit import render
from gpt_speed.audit.other_gpus import LargerBatch
from gpt_speed.audit.run import audit, watch
from gpt_speed.audit.step import Step
from gpt_speed.cards import CARDS, PEAK_FLOPS, named
from gpt_speed.common import UserError, script_name
from gpt_speed.gains import Session, gains_on, reference_sessions, technique_names
from gpt_speed.gradients import render as gradients_render
from gpt_speed.gradients.run import gradients
from gpt_speed.tables import Table, markdown, num_col, text_col

MACHINE = Path(__file__).with_name("machine.py")
LONGEST = 10**9  # minutes
PATIENCE = 300  # seconds until PyTorch is imported


def minutes(text: str) -> float:
    """An option's type for argparse."""
    value = float(text)
    if not 0 < value < LONGEST:
        raise argparse.ArgumentTypeError(f"{text} is out of range")
    return value


# ---- What all commands that start a script have


def add_script(parser: argparse.ArgumentParser, python: str = "") -> None:
    """Adds the script, with its arguments, and who runs it: `python`, "" for that of its folder."""
    parser.usage = "%(prog)s [options] SCRIPT|-m MODULE [ITS ARGUMENTS]"
    parser.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="MODULE",
        help="as `python -m MODULE`, in place of a SCRIPT",
    )
    default = "the one that runs this" if python else "the activated environment's"
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


def python_of(args: argparse.Namespace) -> str:
    """Returns the Python that runs the script, by --python if that is given. Raises UserError where
    it can't be used."""
    python = args.python or usual_python()
    problem = ask_machine(python, rates=False).get("error")
    if problem:
        raise UserError(f"{python} {problem}; --python names another one", 2)
    return python


def usual_python() -> str:
    """Returns the Python of an activated environment, or this one if it has PyTorch, or the one on
    PATH."""
    environment = os.environ.get("VIRTUAL_ENV")
    if environment and os.name == "nt":
        return str(Path(environment, "Scripts", "python.exe"))
    if environment:
        return str(Path(environment, "bin", "python"))
    if find_spec("torch"):
        return sys.executable
    return shutil.which("python") or shutil.which("python3") or sys.executable


def ask_machine(python: str, rates: bool, environment: dict[str, str] | None = None) -> dict:
    """Returns what machine.py says there; `rates`: also of matmuls, where no datasheet tells them.
    Raises UserError."""
    order = dict(rates=rates, known=[*PEAK_FLOPS])
    command = [python, MACHINE, json.dumps(order)]
    try:
        code, out, err = children.run_child(command, timeout=PATIENCE, environment=environment)
    except OSError as error:
        raise UserError(f"{python} can't be started: {error.strerror}", 2)
    except subprocess.TimeoutExpired:
        raise UserError(f"{python} doesn't answer within {PATIENCE} s", 2)
    if code:
        reason = [children.ending(code), *err.strip().splitlines()][-1]
        raise UserError(f"{python} can't run PyTorch: {reason}", 2)
    return json.loads(out.splitlines()[-1])


# ---- The audit


def add_audit(parser: argparse.ArgumentParser, python: str = "") -> None:
    """Adds the options of an audit."""
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
    cards = []
    if args.gpu:
        cards = named(args.gpu)
    doubled = None
    if args.batch_option:
        doubled = with_twice_the_batch(command, args.batch_option, bool(cards))
    python = python_of(args)
    timed, watched = audit(command, args.minutes, python)
    if int(os.environ.get("RANK") or 0):
        return None
    machine, larger = machine_of(python, timed), None
    if doubled:
        watched_again = watch(doubled.command, timed, args.minutes, python)
        larger = LargerBatch(doubled.batch, Step(watched_again | machine | undisturbed(timed)))
    return result_of(command, timed, watched, machine, sessions, cards, larger)


class Doubled(NamedTuple):
    """A command with twice the batch size."""

    command: list[str]
    batch: int


def with_twice_the_batch(command: list[str], option: str, has_cards: bool) -> Doubled:
    """Returns a command with twice the value of the option for the batch size, by its name without
    dashes. Raises UserError."""
    if not has_cards:
        raise UserError("--batch-option is for --gpu, which tells the memory at two batch sizes", 2)
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise UserError("--batch-option is for one process: leave out torchrun", 2)
    name = option.lstrip("-")
    for index, word in enumerate(command):
        key, sign, value = word.partition("=")
        if key.lstrip("-") != name:
            continue
        if not sign:
            value = "".join(command[index + 1 : index + 2])
        if value.isdecimal():
            batch = 2 * int(value)
            words = [f"{key}={batch}"] if sign else [key, str(batch)]
            return Doubled([*command[:index], *words, *command[index + len(words) :]], batch)
    raise UserError(f"--batch-option {option}: the script's command has no {name} with a number", 2)


def result_of(
    command: list[str],
    timed: dict,
    watched: dict,
    machine: dict,
    sessions: Iterable[Session],
    cards: Iterable[str] = (),
    larger: LargerBatch | None = None,
) -> dict:
    """Returns an audit, with what the techniques gained in the sessions on our model."""
    step = Step(watched | machine | undisturbed(timed))
    gains, gains_from = gains_on(machine | dict(device=step.device), sessions)
    names = technique_names()
    return render.audit_of(
        command, step, timed, machine, names, gains, gains_from, [*cards], larger
    )


def undisturbed(timed: dict) -> dict:
    """Returns the shares of the time that watching would change."""
    return {name: timed[name] for name in ("system", "updating")}


def machine_of(python: str, timed: dict) -> dict:
    """Describes the device that a script trained on, with its memory in bytes (None where the
    system hides it) and, without a datasheet, the FLOP/s of its matmuls."""
    hidden = {}
    if timed["device"] != "cuda":
        hidden["CUDA_VISIBLE_DEVICES"] = ""
    machine = ask_machine(python, rates=True, environment=hidden)
    return machine | dict(memory_total=timed["memory_total"] or machine["memory_total"])


def page_name(command: list[str], name: str) -> str:
    """Returns the name of an audit's page."""
    return f"audit-{name or title_of(command)}.md"


def page_of(result: dict) -> str:
    """Returns the text of an audit's page."""
    return f"# Audit of {title_of(result['command'])}\n\n{render.screen(result)}"


def title_of(command: list[str]) -> str:
    """Returns the name of a module, or of a script without its folder and its suffix."""
    name = script_name(command)
    if command[0] == "-m":
        return name
    return Path(name).stem


def run_audit(args: argparse.Namespace) -> int:
    """Prints an audit, and writes its page; returns the exit code."""
    result = audited(args, command_of(args), reference_sessions())
    if result is None:
        return 0
    page = Path(page_name(result["command"], args.name))
    try:
        page.write_text(page_of(result), encoding="utf-8")
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
    answer = gradients(command_of(args), python_of(args), args.minutes)
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


def parse(words: list[str]) -> argparse.Namespace:
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
    args = parse(sys.argv[1:] if words is None else words)
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
