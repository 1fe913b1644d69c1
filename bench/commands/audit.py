"""What somebody's own training script lacks."""

import argparse
import json
import os
import sys
from pathlib import Path

from bench.audit import render
from bench.audit.run import audit, machine_of
from bench.cards import named
from bench.common import ROOT, UserError, relative
from bench.subcommands import Command, above_0


class Audit(Command):
    """List which techniques your own training script lacks.

    Such as `measure.py audit train.py --batch 8`: how fast it is, which of the techniques it has,
    which it lacks and where, and what each gained elsewhere. It runs the script as it is, twice,
    for some steps; only run what you trust."""

    group = "start here"
    def options(self, parser):
        parser.usage = "measure.py audit [options] SCRIPT|-m MODULE [ITS ARGUMENTS]"
        parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, default=[],
                            metavar="MODULE", help="as `python -m MODULE`, in place of a SCRIPT")
        parser.add_argument("--json", action="store_true", help="print JSON")
        parser.add_argument("--name", default="", help="of the page audit-NAME.md, which lands in"
                            " the current folder or in --results-dir (default: the script's)")
        parser.add_argument("--python", default=sys.executable, metavar="FILE", help="that runs"
                            " your script, from 3.10 on with PyTorch from 2.4 on (default: the one"
                            " that runs the audit)")
        parser.add_argument("--gpu", metavar="NAMES", default="", help="GPUs that aren't here, such"
                            " as \"RTX 4090,H100\": its tok/sec there, predicted")
        parser.add_argument("--minutes", type=above_0, default=10, metavar="N",
                            help="time limit per run, of two (default: 10)")
        parser.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    def answer(self, setup):
        args = setup.args
        command = ["-m", *args.module] if args.module else [*args.script]
        command += ["--", *setup.options] if setup.options else []
        if not command:
            raise UserError("which script? python measure.py audit SCRIPT [ITS ARGUMENTS]", 2)
        if not args.module and not Path(command[0]).exists():
            raise UserError(f"no script {command[0]}", 2)
        cards = named(args.gpu) if args.gpu else []
        folder = Path.cwd() if setup.results == ROOT / "results" else setup.results
        timed, watched = audit(command, args.minutes, args.python)
        if int(os.environ.get("RANK", 0)):
            return ""
        result = render.audit_of(command, timed, watched, machine_of(timed), setup.results, cards)
        pages = render.write_page(result, args.name, folder)
        if args.json:
            return json.dumps(result)
        return render.text(result) + ", ".join(map(relative, pages))
