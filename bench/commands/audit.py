"""What somebody's own training script lacks."""

import json
import os
import sys
from argparse import ArgumentParser
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path

from bench.analysis.gains import ladder_sessions
from bench.commands import Command
from bench.common import ROOT, relative, write_whole
from bench.measure.lock import alone, clone_locked
from bench.measure.plan import Setup
from bench.report.page import write_html
from gpt_speed import cli
from gpt_speed.audit import render
from gpt_speed.gains import Session, reference_sessions


class Audit(Command):
    """List which techniques your own training script lacks.

    Such as `measure.py audit train.py --batch 8`: how fast it is, which of the techniques it has,
    which it lacks and where, and what each gained elsewhere. It runs the script as it is, twice,
    for some steps; only run what you trust."""

    group = "start here"

    def options(self, parser: ArgumentParser) -> None:
        cli.add_audit(parser, python=sys.executable)

    def answer(self, setup: Setup) -> str:
        command, sessions = command_of(setup), sessions_beside(setup.results)
        with locked_for_audit():
            result = cli.audited(setup.args, command, sessions)
        if result is None:  # in a rank of torchrun that isn't the first
            return ""
        name = render.page_name(result["command"], setup.args.name)
        pages = write_pages(result, page_in(setup.results, name))
        if setup.args.json:
            return json.dumps(result)
        return f"{render.screen(result)}\nThis report: {', '.join(map(relative, pages))}"


def command_of(setup: Setup) -> list[str]:
    """Returns the script with its arguments, those behind -- last. Raises UserError."""
    command = cli.command_of(setup.args)
    if setup.options:
        return [*command, "--", *setup.options]
    return command


def sessions_beside(results: Path) -> list[Session]:
    """Returns what the techniques gained in a folder of results, where that can be told, and on the
    reference machines."""
    if not find_spec("scipy"):  # which an audited script's environment may lack
        return reference_sessions()
    return [*ladder_sessions(results), *reference_sessions()]


def write_pages(result: dict, page: Path) -> list[Path]:
    """Writes an audit's page, and the same as HTML where that can be made; returns the files."""
    write_whole(page, render.page(result))
    return [path for path in (page, write_html(page)) if path]


def page_in(results: Path, name: str) -> Path:
    """Returns the file of a page: in the current folder, unless another folder of results than this
    clone's own was asked for."""
    if results == ROOT / "results":
        return Path.cwd() / name
    return results / name


def locked_for_audit() -> AbstractContextManager[None]:
    """Lets nothing be measured beside an audit. Of torchrun's ranks the first one of each machine
    locks for all of them, and doesn't take the others for processes that were left over. Raises
    UserError, OSError."""
    if not os.environ.get("RANK"):
        return alone()
    if os.environ.get("LOCAL_RANK", "0") == "0":
        return clone_locked()
    return nullcontext()
