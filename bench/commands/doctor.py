"""What works on this machine, what is missing, and what to type next; what `make bench` starts."""

import io
import os
import sys
from contextlib import redirect_stderr
from pathlib import Path

from bench import processes
from bench.cards import CARDS, card_of
from bench.catalogue import EPOCHS, STAGES, in_float16
from bench.commands import Command
from bench.common import (
    BUILD,
    REFERENCE,
    ROOT,
    UserError,
    other_text,
    relative,
    tokens_in,
    trained_in,
    write_whole,
)
from bench.measure.environment import missing_here
from bench.measure.sizing import FLOAT32_FACTOR
from bench.predict.batches import batches_that_fit, options_of_type
from bench.predict.store import load


class Doctor(Command):
    """Check this machine: what works, what is missing, what to type next.

    One screen: GPU, free memory, the type that it trains in, compiler, tokens, the batch size that
    fits."""

    group = "start here"
    needs_machine = True

    def answer(self, setup):
        machine, compile_fails = setup.machine, processes.ask_machine("compile_error")
        missing = missing_here(machine, compile_fails)
        lines = [("PyTorch", f"{machine['torch']}, Python {machine['python']}, {machine['os']}"),
                 ("CPU", f"{machine['cpu']}, {machine['threads']} threads")]
        if machine["gpus"]:
            free = processes.ask_machine("free_memory")
            lines += [
                ("GPU", f"{machine['gpus']} × {machine['name']}, compute capability"
                        f" {machine['capability']}, driver {machine['driver'] or 'unknown'}"),
                ("free memory", ", ".join(f"{mib / 1024:.1f} GB" for mib in free))]
        lines += [("trains in", type_of(machine)),
                  ("torch.compile", "doesn't work" if compile_fails else "works")]
        lines.append(("tokens", tokens_line(setup.data)))
        batches: dict[str, int] = {}
        if machine["gpus"]:
            batches = batches_that_fit(setup, composed=True)
            lines.append(("batch size", ", ".join(
                f"{batch} in place of {theirs}" for theirs, batch in batches.items())
                or "8 and 32, as published"))
            if not compile_fails:
                lines += expected(setup, batches.get("32", 32))
        lines += [("missing", thing) for thing in missing]
        measured, has_make = any(setup.results.glob("*.jsonl")), (ROOT / ".venv").exists()
        first = f"python 00_orig.py --batch-size {batches['8']}" if batches else "python 00_orig.py"
        lines.append(("next", (  # elsewhere make would install another environment
            "make report" if has_make else "python measure.py report") if measured else (
            "make bench" if has_make else first)))
        return "\n".join(f"{name:15}{text}" for name, text in lines)


def tokens_line(data: Path) -> str:
    """Returns how many tokens are there to train on, and of which text."""
    try:
        known = tokens_in(data)
    except UserError as error:
        return str(error)
    if not known:
        return f"none yet in {relative(data)}: the scripts make them"
    text = f", of {other_text(known)}" if other_text(known) else ""
    return f"{known['tokens']['train']:,} to train on, in {relative(data)}{text}"


def type_of(machine: dict) -> str:
    """Returns the type that the optimized scripts train in here, and why."""
    text = f"{trained_in(machine)}: {machine['dtype_reason']}"
    if trained_in(machine) == "float32" and not machine["gpus"]:
        text += f"; 01 is about {FLOAT32_FACTOR} times 00 here"
    if in_float16(machine, []):
        text += "; make bench and stages do so by themselves"
    return text


def expected(setup, batch: int) -> list[tuple[str, str]]:
    """Returns a line of what 01 should do on this card, if it is a known one."""
    name = card_of(setup.machine["name"])
    run = setup.scripts.for_machine("01", setup.machine, setup.options)
    options = ["--model", "gpt2", *options_of_type(setup, run.script)]
    prediction = load(setup.scripts, run.script, options, REFERENCE)
    if not name or not prediction:
        return []
    card = CARDS[name]
    return [("expected", f"{run.label} at batch {batch}: {prediction.speed_range(batch, card)}"
                         f" thousand tok/sec on each GPU, {EPOCHS} epochs in"
                         f" {prediction.minutes(batch, card) or 0:,.1f} minutes, by prediction"
                         " (docs/predictions.md)")]


class Fits(Command):
    """Print the script and batch size that fit this GPU, for make.

    The batch size is an option where the script's own doesn't fit. On a GPU without units for
    bfloat16 01 and 02 are composed with precision-fp16, in build/."""

    group = "maintenance"
    needs_machine = True

    def options(self, parser):
        parser.add_argument("stage", choices=list(STAGES), help="which of the three scripts")

    def answer(self, setup):
        stage = setup.args.stage
        first = stage == "00"
        if first and setup.machine.get("gpu_needs"):
            print(f"missing: {setup.machine['gpu_needs']}", file=sys.stderr)
        load, cores = getattr(os, "getloadavg", lambda: [0])()[0], os.cpu_count() or 1
        if first and load > 0.75 * cores:
            print(f"Other programs run (load {load:.1f} on {cores} cores): the speeds will be lower"
                  " than this machine's, and their factors wrong", file=sys.stderr)
        with redirect_stderr(sys.stderr if first else io.StringIO()):  # what fits is told once
            batch = batches_that_fit(setup, composed=True).get("8" if first else "32")
        words = [STAGES[stage]]
        if in_float16(setup.machine, setup.options) and not first:
            run = setup.scripts.for_machine(stage, setup.machine, setup.options)
            path = BUILD / f"{run.name}.py"
            write_whole(path, setup.scripts.text(run.script))
            words = [relative(path), "--data", relative(setup.data),
                     "--results-dir", relative(setup.results)]
            reason = setup.machine["dtype_reason"].partition(";")[0]
            print(f"{run.label}, as {words[0]}: {reason}", file=sys.stderr, flush=True)
        return " ".join([*words, *([f"--batch-size {batch}"] if batch else [])])
