"""What somebody's own training script lacks."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import processes
from bench.analysis.gains import gains_of
from bench.commands import Command
from bench.common import ROOT, relative, write_whole
from bench.report.page import write_html
from bench.subcommands import above_0
from gpt_speed.audit import render
from gpt_speed.audit.run import audit
from gpt_speed.audit.step import Step
from gpt_speed.cards import PEAK_FLOPS, named
from gpt_speed.common import UserError
from patches import stack


class Audit(Command):
    """List which techniques your own training script lacks.

    Such as `measure.py audit train.py --batch 8`: how fast it is, which of the techniques it has,
    which it lacks and where, and what each gained elsewhere. It runs the script as it is, twice,
    for some steps; only run what you trust."""

    group = "start here"

    def options(self, parser):
        parser.usage = "measure.py audit [options] SCRIPT|-m MODULE [ITS ARGUMENTS]"
        parser.add_argument(
            "-m",
            dest="module",
            nargs=argparse.REMAINDER,
            default=[],
            metavar="MODULE",
            help="as `python -m MODULE`, in place of a SCRIPT",
        )
        parser.add_argument("--json", action="store_true", help="print JSON")
        parser.add_argument(
            "--name",
            default="",
            help="of the page audit-NAME.md, which lands in"
            " the current folder or in --results-dir (default: the script's)",
        )
        parser.add_argument(
            "--python",
            default=sys.executable,
            metavar="FILE",
            help="that runs"
            " your script, from 3.10 on with PyTorch from 2.4 on (default: the one"
            " that runs the audit)",
        )
        parser.add_argument(
            "--gpu",
            metavar="NAMES",
            default="",
            help='GPUs that aren\'t here, such as "RTX 4090,H100": its tok/sec there, predicted',
        )
        parser.add_argument(
            "--minutes",
            type=above_0,
            default=10,
            metavar="N",
            help="time limit per run, of two (default: 10)",
        )
        parser.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    def answer(self, setup):
        args = setup.args
        command = command_of(args.module, args.script, setup.options)
        cards = named(args.gpu) if args.gpu else []
        timed, watched = audit(command, args.minutes, args.python)
        if int(os.environ.get("RANK", 0)):  # rank 0 answers for all
            return ""
        result = result_of(command, timed, watched, machine_of(timed), setup.results, cards)
        is_default = setup.results == ROOT / "results"
        pages = write_page(result, args.name, Path.cwd() if is_default else setup.results)
        if args.json:
            return json.dumps(result)
        return render.screen(result) + ", ".join(map(relative, pages))


def command_of(module: list[str], script: list[str], options: list[str]) -> list[str]:
    """Returns what Python shall run: a module or a script, with its arguments, and those behind --.
    Raises UserError where there is no such script."""
    command = ["-m", *module] if module else [*script]
    if options:
        command += ["--", *options]
    if not command:
        raise UserError("which script? python measure.py audit SCRIPT [ITS ARGUMENTS]", 2)
    if not module and not Path(command[0]).exists():
        raise UserError(f"no script {command[0]}", 2)
    return command


def result_of(
    command: list[str],
    timed: dict,
    watched: dict,
    machine: dict,
    results: Path,
    cards: Sequence[str] = (),
) -> dict:
    """Returns an audit with what the techniques gained on the ladder's machines."""
    step = Step(watched | machine | dict(system=timed["system"]))
    names = {patch.name: patch.fields["Technique"] for patch in stack.load()}
    gains, gains_from = gains_of(machine, step.device, results)
    return render.audit_of(command, step, timed, machine, names, gains, gains_from, cards)


def machine_of(timed: dict) -> dict:
    """Describes the device that a script trained on, with its memory in bytes (None where the
    system hides it) and, without a datasheet, the FLOP/s of its matmuls."""
    on_cpu = timed["device"] != "cuda"
    machine = processes.ask_machine("this_machine", without_gpus=on_cpu)
    if machine["name"] not in PEAK_FLOPS:
        machine["rates"] = processes.ask_machine("matmul_peak", without_gpus=on_cpu)
    ram = None if machine["ram_gb"] is None else machine["ram_gb"] * 2**30
    return machine | dict(torch=timed["torch"], memory_total=timed["memory_total"] or ram)


def write_page(result: dict, name: str, results: Path) -> list[Path]:
    """Writes audit-NAME.md, and .html if possible. Raises UserError."""
    script, *rest = result["command"]
    title = rest[0] if script == "-m" else Path(script).stem
    page = results / f"audit-{name or title}.md"
    write_whole(page, f"# Audit of {title}\n\n{render.screen(result)}")
    html = write_html(page)
    return [page, html] if html else [page]
