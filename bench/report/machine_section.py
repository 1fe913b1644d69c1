"""What a page says of its machine: what works on it, and how it did.

results/machine.json keeps for a report all that bench.measure.hardware.look answers.
"""

import json
import sys
from pathlib import Path

from bench import processes
from bench.common import (
    DAMAGE,
    ELSEWHERE,
    UserError,
    read_kept,
    relative,
    same_machine,
    trained_in,
    write_whole,
)
from bench.measure.journal import data_of, journal_of
from bench.report.notes import counted, peaks
from bench.report.tables import credited, fmt, found_in, rows_in


def this_machine() -> dict:
    """Returns this machine, as bench.measure.hardware.this_machine does. Raises UserError."""
    print("Looking at this machine", file=sys.stderr, flush=True)
    return processes.ask_machine("this_machine")


def look_at(studies: dict, data: Path, results: Path) -> dict:
    """Returns what bench.measure.hardware.look finds here; asked once for a folder of results.
    Raises UserError where that holds the report of another machine or text, or where there are no
    tokens."""
    processes.prepare_tokens(data)
    here, look = this_machine(), read_look(results)
    if look and not same_machine(look["machine"], here):
        raise UserError(f"{relative(results)} holds the report of another machine or PyTorch;"
                        f" {ELSEWHERE}")
    for name in [name for name, study in studies.items() if study.schedule]:
        for measured, _ in found_in(results, name):
            if measured.data not in (None, data_of(data)):
                text = f" ({measured.text})" if measured.text else ""
                raise UserError(f"{relative(journal_of(results, name))} holds measurements with"
                                f" other tokens{text} than {relative(data)} has now; {ELSEWHERE}")
    if not look:
        look = processes.ask_machine("look")
        write_whole(results / "machine.json", json.dumps(look, indent=1))
    for thing in look["missing"]:
        print(f"missing: {thing}")
    return look


def read_look(results: Path) -> dict:
    """Returns what an earlier start has found; {} where a page can't show it."""
    look = read_kept(results / "machine.json")
    try:
        return look if machine_section(look) and first_line(look) else {}
    except DAMAGE:
        return {}


def machine_section(look: dict) -> str:
    machine, error = look["machine"], look["compile_error"]
    device, gpu = f"No GPU; {machine['cpu']}", ""
    if machine["gpus"]:
        device = f"{machine['gpus']} × {machine['name']}, host {machine['cpu']}"
        gpu = (f", CUDA {machine['cuda']}, driver {machine['driver']}, compute capability"
               f" {machine['capability']}")
    return "\n\n".join([
        f"{device}. PyTorch {machine['torch']}, Python {machine['python']}, {machine['os']},"
        f" {machine['threads']} threads{gpu}.",
        f"Matmul throughput: {peaks(look['matmul_peak'])}. Memory:"
        f" {fmt(look['memory_gb'], '.1f') or 'n/a'} GB.",
        f"torch.compile doesn't work: {error}" if error else "torch.compile works.",
        *(f"Missing: {thing}." for thing in look["missing"])])


def first_line(look: dict) -> str:
    machine = look["machine"]
    dtype = trained_in(machine)
    reason = f" ({machine['dtype_reason']})" if "dtype_reason" in machine else ""
    model = "" if machine["gpus"] else "; no GPU, so the small model `cpu-demo` is trained"
    return (f"**{machine['name']}**, PyTorch {machine['torch']}:"
            f" {look['matmul_peak'][dtype] / 1e12:,.2f} TFLOP/s in {dtype} matmuls, the"
            f" type that the optimized scripts train in here{reason}{model}.")


def summary(results: Path, look: dict) -> list[str]:
    """Returns what this machine is and gives, in three lines."""
    lines = [first_line(look)]
    stages = {row.run.stage: row for row in rows_in(results, "stages") if row.records}
    if stages.keys() >= {"00", "01"}:
        plain, fast = stages["00"], stages["01"]
        lines.append(
            f"{fast.label} trains **{fast.tok_per_sec:,.0f} tok/sec,"
            f" {fast.factor_baseline:.2f} times** 00's {plain.tok_per_sec:,.0f} (published, on an"
            f" A100: {fast.published_factor_baseline:.2f} times);"
            f" {counted(min(plain.rounds, fast.rounds), 'run')} each.")
    rows = [row for row in rows_in(results, "ladder") if row.factor]
    if rows:
        tested = any(row.significance != "not tested" for row in rows)
        best = sorted((row for row in rows if row.significance == "faster" or not tested),
                      key=lambda row: -row.factor)
        names = ", ".join(f"{credited(row, row.technique)} {row.factor:.2f}×" for row in best[:4])
        what = "Significantly faster" if tested else "The largest speedups, not tested yet,"
        rounds = counted(min(row.rounds for row in rows), "round")
        lines.append(f"{what} in the ladder ({rounds}): {names or 'none'}.")
    return lines
