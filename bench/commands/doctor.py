"""What works on this machine, what is missing, what to type next; what make starts."""

import os
import sys
from pathlib import Path

from bench import processes
from bench.cards import card_of
from bench.catalogue import STAGES, in_float16
from bench.common import BUILD, UserError, other_text, relative, tokens_in, trained_in, write_whole
from bench.measure.environment import missing_here
from bench.measure.sizing import FLOAT32_FACTOR
from bench.predict.batches import batches_that_fit
from bench.subcommands import Command


class Doctor(Command):
    """Check this machine: what works, what is missing, what to type next."""

    group = "start here"
    needs_machine = True

    def answer(self, setup):
        machine, compile_error = setup.machine, processes.ask_machine("compile_error")
        lines = [("PyTorch", f"{machine['torch']}, Python {machine['python']}, {machine['os']}"),
                 ("CPU", f"{machine['cpu']}, {machine['threads']} threads"),
                 ("trains in", type_of(machine)),
                 ("torch.compile", "doesn't work" if compile_error else "works"),
                 ("tokens", tokens_line(setup.data))]
        if machine["gpus"]:
            lines += gpu_lines(machine, batches_that_fit(setup, composed=True))
        lines += [("missing", thing) for thing in missing_here(machine, compile_error)]
        begun = any(setup.results.glob("*.jsonl"))
        lines.append(("next", f"python measure.py {'report' if begun else 'stages'}"))
        return "\n".join(f"{name:15}{text}" for name, text in lines)


def type_of(machine: dict) -> str:
    """Returns the type that the optimized scripts train in here, and why."""
    text = f"{trained_in(machine)}: {machine['dtype_reason']}"
    if trained_in(machine) == "float32" and not machine["gpus"]:
        text += f"; expect 01 to be about {FLOAT32_FACTOR} times as fast as 00"
    if in_float16(machine, []):
        text += "; make bench and stages do so by themselves"
    return text


def tokens_line(data: Path) -> str:
    """Returns how many tokens are there to train on, and of which text."""
    try:
        meta = tokens_in(data)
    except UserError as error:
        return str(error)
    if not meta:
        return f"none yet in {relative(data)}: the scripts make them"
    text = f" ({other_text(meta)})" if other_text(meta) else ""
    return f"{relative(data)}: {meta['tokens']['train']:,} to train on{text}"


def gpu_lines(machine: dict, batches: dict[str, int]) -> list[tuple[str, str]]:
    """Returns what the GPUs are, what is free, and which batch sizes fit."""
    free = processes.ask_machine("free_memory")
    sizes = ", ".join(f"{batch} in place of {usual}" for usual, batch in batches.items())
    card = card_of(machine["name"])
    return [("GPU", f"{machine['gpus']} × {machine['name']}, compute capability"
                    f" {machine['capability']}, driver {machine['driver'] or 'unknown'}"),
            ("free memory", ", ".join(f"{mib / 1024:.1f} GB" for mib in free)),
            ("batch size", sizes or "8 and 32, as published"),
            *([("expected", f'python measure.py predict --gpu "{card}"')] if card else [])]


class Fits(Command):
    """Print the script and batch size that fit this GPU, for make.

    On a GPU without units for bfloat16 01 and 02 are composed with precision-fp16, in build/."""

    group = "maintenance"
    needs_machine = True

    def options(self, parser):
        parser.add_argument("stage", choices=list(STAGES), help="which of the three scripts")

    def answer(self, setup):
        stage, machine = setup.args.stage, setup.machine
        if machine.get("gpu_needs") and stage == "00":
            print(f"missing: {machine['gpu_needs']}", file=sys.stderr)
        load, cores = getattr(os, "getloadavg", lambda: [0])()[0], os.cpu_count() or 1
        if load > 0.75 * cores and stage == "00":
            print(f"Other programs run (load {load:.1f} on {cores} cores): the speeds will be lower"
                  " than this machine's, and their factors wrong", file=sys.stderr)
        batch = batches_that_fit(setup, composed=True).get("8" if stage == "00" else "32")
        words = [STAGES[stage]]
        if in_float16(machine, setup.options) and stage != "00":
            run = setup.scripts.for_machine(stage, machine, setup.options)
            path = BUILD / f"{run.name}.py"
            write_whole(path, setup.scripts.text(run.script))
            words = [relative(path), "--data", relative(setup.data),
                     "--results-dir", relative(setup.results)]
            print(f"{run.label}, as {words[0]}: {machine['dtype_reason'].partition(';')[0]}",
                  file=sys.stderr)
        return " ".join([*words, *([f"--batch-size {batch}"] if batch else [])])
