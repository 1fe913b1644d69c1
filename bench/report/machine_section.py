"""What this machine is, and what a page says of it: what works on it, and how it did.

results/machine.json keeps for a report all that bench.measure.hardware.look told.
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
from bench.measure.journal import data_of, journal_of, read_journal
from bench.report.notes import counted, peaks
from bench.report.tables import Column, Table, credited, fmt, markdown, num_col, rows_in


def this_machine() -> dict:
    """This machine, as rates.this_machine describes it. Raises UserError."""
    print("Looking at this machine", file=sys.stderr, flush=True)
    return processes.ask_machine("this_machine")


def look_at(studies: dict, data: Path, results: Path) -> dict:
    """What rates.look finds here; asked once for a folder of results. Raises UserError
    where that holds the report of another machine or text, or where there are no tokens."""
    processes.prepare_tokens(data)
    here, look = this_machine(), read_look(results)
    if look and not same_machine(look["machine"], here):
        raise UserError(f"{relative(results)} holds the report of another machine or PyTorch;"
                        f" {ELSEWHERE}")
    for path in (journal_of(results, name) for name, study in studies.items()
                 if study.schedule):
        for each in {each.kind: each for each in read_journal(path)}.values():  # the newest
            if each.data not in (None, data_of(data)):
                of = f" ({each.text})" * bool(each.text)
                raise UserError(f"{relative(path)} holds measurements with other tokens{of} than"
                                f" {relative(data)} has now; {ELSEWHERE}")
    if not look:
        look = processes.ask_machine("look")
        write_whole(results / "machine.json", json.dumps(look, indent=1))
    for thing in look["missing"]:
        print(f"missing: {thing}")
    return look


def read_look(results: Path) -> dict:
    """What an earlier start has found, or {} where there is nothing that a page can show."""
    look = read_kept(results / "machine.json")
    try:
        machine_section(look), first_line(look)  # noqa: B018 (all is there)
        return look
    except DAMAGE:
        return {}


def machine_section(look: dict) -> str:
    m, no_compiler = look["machine"], look["compile_error"]
    device, gpu = f"No GPU; {m['cpu']}", ""
    if m["gpus"]:
        device = f"{m['gpus']} × {m['name']}, host {m['cpu']}"
        gpu = f", CUDA {m['cuda']}, driver {m['driver']}, compute capability {m['capability']}"
    lines = [
        f"{device}. PyTorch {m['torch']}, Python {m['python']}, {m['os']}, {m['threads']} threads"
        f"{gpu}.",
        f"Matmul throughput: {peaks(look['matmul_peak'])}. Copy within memory:"
        f" {look['bandwidth'] / 1e9:,.0f} GB/s (10⁹ bytes, read and written). Memory:"
        f" {fmt(look['memory_gb'], '.1f') or 'n/a'} GB.",
        f"torch.compile doesn't work: {no_compiler}" if no_compiler else "torch.compile works."]
    lines += [f"Missing: {thing}." for thing in look["missing"]]
    if "attention" in look:  # an older look
        lines += [
            f"Attention kernels by dropout ({trained_in(m)}, causal), and what each really applies;"
            " 01 turns cuDNN's off:",
            markdown(Table([
                num_col("dropout", "dropout", "g"),
                Column("kernel", lambda row: row["backend"].replace("_", " "), True),
                Column("runs", lambda row: "yes" if row["runs"] else "no"),
                Column("PyTorch's choice", lambda row: "←" if row["chosen"] else "", True),
                num_col("ms, forward and backward", "milliseconds", ".2f"),
                num_col("real dropout", "real_dropout", ".3f")], look["attention"]))]
    return "\n\n".join(lines)


def first_line(look: dict) -> str:
    here = look["machine"]
    dtype = trained_in(here)
    reason = f" ({here['dtype_reason']})" if "dtype_reason" in here else ""
    model = "" if here["gpus"] else "; no GPU, so the small model `cpu-demo` is trained"
    return (f"**{here['name']}**, PyTorch {here['torch']}:"
            f" {look['matmul_peak'][dtype] / 1e12:,.2f} TFLOP/s in {dtype} matmuls, the"
            f" type that the optimized scripts train in here{reason}{model}.")


def summary(results: Path, look: dict) -> list[str]:
    """What this machine is and gives, in three lines."""
    lines = [first_line(look)]
    stages = {row.run.stage: row for row in rows_in(results, "stages") if row.records}
    plain, fast = stages.get("00"), stages.get("01")
    if plain and fast:
        lines.append(
            f"{fast.label} trains **{fast.tok_per_sec:,.0f} tok/sec,"
            f" {fast.factor_baseline:.2f} times** 00's {plain.tok_per_sec:,.0f} (published, on an"
            f" A100: {fast.published_factor_baseline:.2f} times), with"
            f" {fmt(fast.reserved_gb, '.2f') or 'n/a'} GB instead of"
            f" {fmt(plain.reserved_gb, '.2f') or 'n/a'};"
            f" {counted(min(plain.rounds, fast.rounds), 'run')} each.")
    steps = [row for row in rows_in(results, "ladder") if row.factor]
    if steps:
        judged = any(row.significance != "not tested" for row in steps)
        best = sorted((row for row in steps if row.significance == "faster" or not judged),
                      key=lambda row: -row.factor)
        names = ", ".join(f"{credited(row, row.technique)} {row.factor:.2f}×" for row in best[:4])
        lines.append(
            ("Significantly faster" if judged else
             "The largest speedups, not tested for significance yet,")
            + f" in the ladder ({counted(min(row.rounds for row in steps), 'round')}):"
            f" {names or 'none'}.")
    return lines
