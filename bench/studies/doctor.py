"""What works on this machine, what is missing, and what to type next."""

import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from bench import processes
from bench.catalogue import EPOCHS, in_float16
from bench.common import REFERENCE, ROOT, UserError, other_text, relative, tokens_in, trained_in
from bench.measure.lengths import FLOAT32_FACTOR, fast_here, fitting, options_of_type
from bench.measure.machine import compiler_folder, missing_here
from bench.predict.speed import CARDS, card_of
from bench.predict.store import load
from bench.studies import Study


class Doctor(Study):
    """One screen about this machine: GPU, free memory, the type that it trains in, compiler,
    tokens, the batch size that fits, what is missing with the line that gets it, and the next
    command."""

    runs_scripts = False

    def answer(self, setup):
        machine, compile_fails = setup.machine, None
        # PyTorch tells why, or finds one all the same. Triton is for GPUs of 7.0 and later.
        unfit = machine["gpus"] and (machine.get("gpu_needs") or float(machine["capability"]) < 7)
        if unfit or not has_compiler(machine["gpus"]):
            compile_fails = processes.ask_machine("compile_error")
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
            batches = fitting(setup, fast_here(setup))
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


def has_compiler(gpu: bool) -> bool:
    """Returns whether what torch.compile starts is here, finds Python's headers, and has folders:
    for a GPU Triton and a C compiler, else a C++ compiler with OpenMP. A trial of torch.compile
    itself takes many seconds; False: only that can tell."""
    compiler = os.environ.get("CC", "gcc") if gpu else os.environ.get("CXX", "g++")
    torch, headers = importlib.util.find_spec("torch"), sysconfig.get_paths()["include"]
    if not shutil.which(compiler) or not torch or " " in f"{torch.origin}{headers}" or (
            gpu and not importlib.util.find_spec("triton")) or compiler_folder(gpu):
        return False
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.c" if gpu else "probe.cpp")
        source.write_text("#include <Python.h>\n" + ("" if gpu else "#include <omp.h>\n"))
        flags = [] if gpu else ["-fopenmp", "-std=c++20"]
        return subprocess.run(
            [compiler, *flags, "-shared", "-fPIC", f"-I{headers}", source, "-o", f"{source}.so"],
            capture_output=True).returncode == 0


def expected(setup, batch: int) -> list[tuple[str, str]]:
    """Returns a line of what 01 should do on this card, if it is a known one."""
    name = card_of(setup.machine["name"])
    run = setup.scripts.here("01", setup.machine, setup.options)
    options = ["--model", "gpt2", *options_of_type(setup, run.script)]
    prediction = load(setup.scripts, run.script, options, REFERENCE)
    if not name or not prediction:
        return []
    card = CARDS[name]
    return [("expected", f"{run.label} at batch {batch}: {prediction.speed_range(batch, card)}"
                         f" thousand tok/sec on each GPU, {EPOCHS} epochs in"
                         f" {prediction.minutes(batch, card) or 0:,.1f} minutes, by prediction"
                         " (docs/predictions.md)")]
