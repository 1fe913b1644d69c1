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
from gpt_speed.gains import reference_sessions


class Audit(Command):
    """List which techniques your own training script lacks.

    Such as `measure.py audit train.py --batch 8`: how fast it is, which of the techniques it has,
    which it lacks and where, and what each gained elsewhere. It runs the script as it is, twice,
    for some steps; only run what you trust."""

    group = "start here"

    def options(self, parser: ArgumentParser) -> None:
        cli.add_audit(parser, python=sys.executable)

    def answer(self, setup: Setup) -> str:
        args = setup.args
        command = cli.command_of(args)
        if setup.options:  # those behind -- are the script's
            command += ["--", *setup.options]
        sessions = reference_sessions()
        if find_spec("scipy"):  # which an audited script's environment may lack
            sessions = [*ladder_sessions(setup.results), *sessions]
        with locked_for_audit():
            result = cli.audited(args, command, sessions)
        if result is None:
            return ""
        page = page_in(setup.results, render.page_name(result["command"], args.name))
        write_whole(page, render.page(result))
        pages = [page]
        html = write_html(page)
        if html:
            pages.append(html)
        if args.json:
            return json.dumps(result)
        return f"{render.screen(result)}\nThis report: {', '.join(map(relative, pages))}"


def page_in(results: Path, name: str) -> Path:
    """Returns the file of a page: in the folder of results, if one was named, else here."""
    if results == ROOT / "results":
        return Path.cwd() / name
    return results / name


def locked_for_audit() -> AbstractContextManager[None]:
    """Lets nothing be measured beside an audit. Of torchrun's ranks the first one of each machine
    locks for all; what the others have started isn't left over. Raises as `alone`."""
    if not os.environ.get("RANK"):
        return alone()
    if os.environ.get("LOCAL_RANK", "0") == "0":
        return clone_locked()
    return nullcontext()
