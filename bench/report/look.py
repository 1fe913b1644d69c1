"""What this machine is, and what a page says of it: what works on it, and how it did.

results/machine.json keeps for a report all that bench.measure.rates.look told.
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
from bench.report.names import credited
from bench.report.notes import counted, peaks
from bench.report.tables import Column, Table, cell, markdown, number, rows_in


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
        machine_section(look), first_line(look)
        return look
    except DAMAGE:
        return {}


def machine_section(look: dict) -> str:
    m = look["machine"]
    device = f"{m['gpus']} × {m['name']}, host {m['cpu']}" if m["gpus"] else f"No GPU; {m['cpu']}"
    gpu = (f", CUDA {m['cuda']}, driver {m['driver']}, compute capability {m['capability']}"
           if m["gpus"] else "")
    lines = [
        f"{device}. PyTorch {m['torch']}, Python {m['python']}, {m['os']}, {m['threads']} threads"
        f"{gpu}.",
        f"Matmul throughput: {peaks(look['matmul_peak'])}. Copy within memory:"
        f" {look['bandwidth'] / 1e9:,.0f} GB/s (10⁹ bytes, read and written). Memory:"
        f" {cell(look['memory_gb'], '.1f') or 'n/a'} GB.",
        "torch.compile " + (f"doesn't work: {look['compile_error']}" if look["compile_error"]
                            else "works."),
        *(f"Missing: {thing}." for thing in look["missing"]),
        f"Which attention kernels run with which dropout ({trained_in(m)}, causal), which one"
        " PyTorch chooses, and the dropout that each really applies; 01 turns cuDNN's"
        " off:",
        markdown(Table([
            number("dropout", "dropout", "g"),
            Column("kernel", lambda row: row["backend"].replace("_", " "), True),
            Column("runs", lambda row: "yes" if row["runs"] else "no"),
            Column("PyTorch's choice", lambda row: "←" if row["chosen"] else "", True),
            number("ms, forward and backward", "milliseconds", ".2f"),
            number("real dropout", "real_dropout", ".3f")], look["attention"])),
    ]
    return "\n\n".join(lines)


def first_line(look: dict) -> str:
    here = look["machine"]
    dtype = trained_in(here)
    reason = f" ({here['dtype_reason']})" if "dtype_reason" in here else ""
    return (f"**{here['name']}**, PyTorch {here['torch']}:"
            f" {look['matmul_peak'][dtype] / 1e12:,.2f} TFLOP/s in {dtype} matmuls, the"
            f" type that the optimized scripts train in here{reason}"
            + ("." if here["gpus"] else "; no GPU, so the small model `cpu-demo` is trained."))


def summary(results: Path, look: dict) -> list[str]:
    """What this machine gives, and where it differs from the published table, in five lines."""
    lines = [first_line(look)]
    stages, ladder = ([row for row in rows_in(results, name) if row.records]
                      for name in ("stages", "ladder"))
    plain, fast = ({row.run.stage: row for row in stages}.get(stage) for stage in ("00", "01"))
    if plain and fast:
        lines.append(
            f"{fast.label} trains **{fast.tok_per_sec:,.0f} tok/sec,"
            f" {fast.factor_baseline:.2f} times** 00's {plain.tok_per_sec:,.0f} (published, on an"
            f" A100: {fast.run.published:,.0f}, {fast.published_factor_baseline:.2f} times), with"
            f" {cell(fast.reserved_gb, '.2f') or 'n/a'} GB instead of"
            f" {cell(plain.reserved_gb, '.2f') or 'n/a'}; {min(plain.rounds, fast.rounds)} run(s)"
            " each.")
        if fast.share_of_peak:
            lines.append(f"{fast.label} reaches {fast.share_of_peak:.0%} of this machine's own"
                         f" matmul throughput, 00 {plain.share_of_peak or 0:.0%} (of that in"
                         " its precision).")
    rungs = [row for row in ladder if row.factor]
    if rungs:
        judged = any(row.significance != "not tested" for row in rungs)
        best = sorted((row for row in rungs if row.significance == "faster" or not judged),
                      key=lambda row: -row.factor)
        told = ", ".join(f"{credited(row, row.technique)} {row.factor:.2f}×" for row in best[:4])
        lines.append(
            ("Significantly faster" if judged else
             "The largest speedups, not tested for significance yet,")
            + f" in the ladder ({counted(min(row.rounds for row in rungs), 'round')}):"
            f" {told or 'none'}.")
    published = [row for row in rungs if row.published_factor]
    if published:
        lines.append("More than a fifth off the published speedup: " + (", ".join(
            f"{credited(row, row.technique)} {row.factor:.2f}× ({row.published_factor:.2f}×)"
            for row in published
            if not 0.8 < row.factor / row.published_factor < 1.25) or "none") + ".")
    return lines
