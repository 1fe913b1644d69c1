"""What a page says of its machine, from results/machine.json, and how it did."""

import json
import sys
from pathlib import Path

from bench import common, processes
from bench.common import UserError, difference, read_kept, relative, trained_in, write_whole
from bench.report.notes import counted, peak_note
from bench.report.tables import fmt, rows_in

FIELDS = {"machine", "matmul_peak", "memory_gb", "compile_error", "missing"}


def this_machine() -> dict:
    """Returns this machine, as bench.measure.hardware.this_machine does. Raises UserError."""
    print("Looking at this machine", file=sys.stderr, flush=True)
    return processes.ask_machine("this_machine")


def look_at(data: Path, results: Path) -> dict:
    """Returns what bench.measure.hardware.look finds here; asked once for a folder of results.
    Raises UserError where that holds another machine's report, or where there are no tokens."""
    processes.prepare_tokens(data)
    here, look = this_machine(), read_look(results)
    if look and (different := difference(look["machine"], here)):
        raise UserError(f"{relative(results)} holds the report of another machine or PyTorch"
                        f" ({different}); {common.ELSEWHERE}")
    if not look:
        look = processes.ask_machine("look")
        write_whole(results / "machine.json", json.dumps(look, indent=1))
    for thing in look["missing"]:
        print(f"missing: {thing}")
    return look


def read_look(results: Path) -> dict:
    """Returns what an earlier start has found; {} without it, or in an older form."""
    look = read_kept(results / "machine.json")
    return look if FIELDS <= look.keys() else {}


def machine_section(look: dict) -> str:
    machine, error = look["machine"], look["compile_error"]
    device, gpu = f"No GPU, so the small model `cpu-demo` is trained; {machine['cpu']}", ""
    if machine["gpus"]:
        device = f"{machine['gpus']} × {machine['name']}, host {machine['cpu']}"
        gpu = (f", CUDA {machine['cuda']}, driver {machine['driver']}, compute capability"
               f" {machine['capability']}")
    return "\n\n".join([
        f"{device}. PyTorch {machine['torch']}, Python {machine['python']}, {machine['os']},"
        f" {machine['threads']} threads{gpu}. 01 and 02 train in {trained_in(machine)}.",
        f"{peak_note(look['matmul_peak'])} Memory: {fmt(look['memory_gb'], '.1f') or 'n/a'} GB.",
        f"torch.compile doesn't work: {error}" if error else "torch.compile works.",
        *(f"Missing: {thing}." for thing in look["missing"])])


def headline(results: Path) -> str:
    """Returns how many times as fast as 00 01 is, or as its first script the ladder's last; ""
    where neither was measured."""
    stages = {row.run.stage: row for row in rows_in(results, "stages") if row.records}
    if not stages.keys() >= {"00", "01"}:
        ladder = [row for row in rows_in(results, "ladder") if row.factor_baseline]
        return (f"{ladder[-1].label} trains **{ladder[-1].factor_baseline:.2f} times** as fast as"
                f" {ladder[-1].baseline.label}.") if ladder else ""
    plain, fast = stages["00"], stages["01"]
    return (f"{fast.label} trains **{fast.tok_per_sec:,.0f} tok/sec,"
            f" {fast.factor_baseline:.2f} times** 00's {plain.tok_per_sec:,.0f} (published, on an"
            f" A100: {fast.published_factor_baseline:.2f} times);"
            f" {counted(min(plain.rounds, fast.rounds), 'run')} each.")
