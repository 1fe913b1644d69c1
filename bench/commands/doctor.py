"""What works on this machine, what is missing, what to type next; what make starts."""

import sys
from argparse import ArgumentParser
from pathlib import Path

from bench import processes
from bench.catalogue import STAGES, Run
from bench.commands import Command
from bench.common import BUILD, relative, write_whole
from bench.corpus import other_text, tokens_in
from bench.machine import release, trained_in
from bench.measure.environment import missing_here
from bench.measure.plan import Setup
from bench.predict.batches import BATCH_OF, Fit, batches_that_fit, fit_here
from gpt_speed.common import UserError

REPEATS_MASKS = 2, 13  # the first such release of PyTorch, with dropout on a GPU: docs/upstream.md


class Doctor(Command):
    """Check this machine: what works, what is missing, what to type next."""

    group = "start here"
    needs_machine = True

    def answer(self, setup: Setup) -> str:
        machine, compile_error = setup.machine, processes.ask_machine("compile_error")
        following = "stages"
        if any(setup.results.glob("*.jsonl")):
            following = "report"
        lines = [
            ("PyTorch", f"{machine['torch']}, Python {machine['python']}, {machine['os']}"),
            ("CPU", f"{machine['cpu']}, {machine['threads']} threads"),
            ("trains in", f"{trained_in(machine)}: {machine['dtype_reason']}"),
            ("torch.compile", "doesn't work" if compile_error else "works"),
            ("tokens", tokens_line(setup.data)),
        ]
        if machine["gpus"]:
            lines += gpu_lines(setup)
        lines += [("missing", thing) for thing in missing_here(machine, compile_error)]
        lines.append(("next", f"python measure.py {following}"))
        return "\n".join(f"{name:15}{text}" for name, text in lines)


def gpu_lines(setup: Setup) -> list[tuple[str, str]]:
    """Returns which GPUs there are, and the batch sizes that fit them, unless the options choose
    one."""
    machine, fit = setup.machine, fit_here(setup, composed=True)
    gpus = (
        f"{machine['gpus']} × {machine['name']}, compute capability {machine['capability']},"
        f" driver {machine['driver'] or 'unknown'}"
    )
    lines = [("GPU", gpus)]
    if fit:
        lines.append(("batch size", batch_sizes(fit)))
    if release(machine["torch"]) >= REPEATS_MASKS:
        lines.append(
            ("dropout", "compiled, its masks are reported to repeat; PyTorch 2.11 is right")
        )
    return lines


def batch_sizes(fit: Fit) -> str:
    if fit.unknown:
        return f"not known: {fit.unknown}"
    return ", ".join(fit.changes_in_words) or "8 and 32, as published"


def tokens_line(data: Path) -> str:
    """Returns how many tokens are there to train on, and of which text."""
    try:
        meta = tokens_in(data)
    except UserError as error:
        return str(error)
    if not meta:
        return f"none yet in {relative(data)}: the scripts make them"
    line = f"{relative(data)}: {meta['tokens']['train']:,} to train on"
    if other_text(meta):
        line += f" ({other_text(meta)})"
    return line


class Fits(Command):
    """Print the script and batch size that fit this GPU, for make.

    On a GPU without units for bfloat16 01 and 02 are composed with precision-fp16, in build/."""

    group = "maintenance"
    needs_machine = True

    def options(self, parser: ArgumentParser) -> None:
        parser.add_argument("stage", choices=list(STAGES), help="which of the three scripts")

    def answer(self, setup: Setup) -> str:
        stage, machine = setup.args.stage, setup.machine
        if machine.get("gpu_needs") and stage == "00":  # the first that make asks for
            print(f"missing: {machine['gpu_needs']}", file=sys.stderr)
        batches = batches_that_fit(setup, composed=True)
        words = script_words(stage, setup)
        if batches:
            words += ["--batch-size", batches[BATCH_OF[stage]]]
        return " ".join(map(relative, words))


def script_words(stage: str, setup: Setup) -> list:
    """Returns the file of a script with its options; where it is composed for this machine, it is
    written first, and told where tokens and results are."""
    run = setup.scripts.for_machine(stage, setup.machine, setup.options)
    if run.script == stage:
        return [STAGES[stage]]
    return [write_composed(run, setup), "--data", setup.data, "--results-dir", setup.results]


def write_composed(run: Run, setup: Setup) -> Path:
    """Writes a composed script to build/, and says so; returns its file."""
    path = BUILD / f"{run.name}.py"
    write_whole(path, setup.scripts.text(run.script))
    reason = setup.machine["dtype_reason"].partition(";")[0]
    print(f"{run.label}, as {relative(path)}: {reason}", file=sys.stderr)
    return path
