"""The Python that runs somebody's script, and what it says of the machine."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from gpt_speed import children
from gpt_speed.cards import PEAK_FLOPS
from gpt_speed.common import UserError, reason_of

MACHINE = Path(__file__).with_name("machine.py")
PATIENCE = 300  # seconds until PyTorch is imported


def usable_python(named: str) -> str:
    """Returns the Python that runs the script, by the name that --python gave it, if any. Raises
    UserError where it can't be used."""
    python = named or usual_python()
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
    """Returns what machine.py says when this Python runs it; with `rates` also those of matmuls,
    where no datasheet has them. Raises UserError."""
    order = json.dumps(dict(rates=rates, known=[*PEAK_FLOPS]))
    output = printed_by([python, MACHINE, order], environment)
    *_, answer = ["", *output.splitlines()]  # what PyTorch warns of may come first
    try:
        return dict(json.loads(answer))
    except (ValueError, TypeError):  # whatever was run, it wasn't machine.py
        raise UserError(f"{python} is no Python", 2)


def printed_by(command: list, environment: dict[str, str] | None) -> str:
    """Returns what a Python, the first word of the command, prints. Raises UserError where it
    fails."""
    python, *_ = command
    try:
        code, out, err = children.run_child(command, timeout=PATIENCE, environment=environment)
    except OSError as error:
        raise UserError(f"{python} can't be started: {reason_of(error)}", 2)
    except subprocess.TimeoutExpired:
        raise UserError(f"{python} doesn't answer within {PATIENCE} s", 2)
    if code:
        reason = [children.ending(code), *err.strip().splitlines()][-1]
        raise UserError(f"{python} can't run PyTorch: {reason}", 2)
    return out
