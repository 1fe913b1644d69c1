"""What a page says of its machine, from results/machine.json, and how it did."""

import json
import sys
from pathlib import Path

from bench import common, processes
from bench.analysis.rows import Row
from bench.common import difference, has_option, read_kept, relative, trained_in, write_whole
from bench.report.notes import SINGLE_RUNS, peak_note
from bench.report.tables import found_in, rows_in, spread
from gpt_speed.common import UserError, counted
from gpt_speed.tables import fmt

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
        raise UserError(
            f"{relative(results)} holds the report of another machine or PyTorch"
            f" ({different}); {common.ELSEWHERE}"
        )
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
        gpu = (
            f", CUDA {machine['cuda']}, driver {machine['driver']}, compute capability"
            f" {machine['capability']}"
        )
    return "\n\n".join(
        [
            f"{device}. PyTorch {machine['torch']}, Python {machine['python']}, {machine['os']},"
            f" {machine['threads']} threads{gpu}. 01 and 02 train in {trained_in(machine)}.",
            f"{peak_note(look['matmul_peak'])}"
            f" Memory: {fmt(look['memory_gb'], '.1f') or 'n/a'} GB.",
            f"torch.compile doesn't work: {error}" if error else "torch.compile works.",
            *(f"Missing: {thing}." for thing in look["missing"]),
        ]
    )


def headline(results: Path) -> str:
    """Returns how many times as fast as 00 01 is, or as its first script the ladder's last,
    with the range over all measurements; "" without any. A whole ladder counts where it has more
    rounds."""
    stages = {row.run.stage: row for row in rows_in(results, "stages") if row.records}
    last = last_of_ladder(results)
    runs = min(stages["00"].rounds, stages["01"].rounds) if stages.keys() >= {"00", "01"} else 0
    if last and (not runs or is_whole(last) and runs < min(last.rounds, last.baseline.rounds)):
        text = ladder_headline(last)
    elif runs:
        text = stages_headline(stages["00"], stages["01"], runs)
    else:
        return ""
    if len(factors := all_factors(results)) > 1:
        text += (
            f" In the {len(factors)} measurements of this folder 01 is"
            f" {spread(factors, '.2f')} times as fast as 00."
        )
    return text


def last_of_ladder(results: Path) -> Row | None:
    rows = [row for row in rows_in(results, "ladder") if row.factor_baseline]
    return rows[-1] if rows else None


def is_whole(row: Row) -> bool:
    """Returns whether a row is of a ladder's script beyond the published techniques, as 01 is."""
    return bool(row.run.number) and not row.run.published and not row.run.torchrun


def ladder_headline(row: Row) -> str:
    interval = spread(row.speedup(over=row.baseline).interval, ".1f")
    certainty = f" (95 %: {interval})" if interval else ""
    return (
        f"{row.label} trains **{row.tok_per_sec:,.0f} tok/sec,"
        f" {row.factor_baseline:.1f} times** {row.baseline.label}'s"
        f" {row.baseline.tok_per_sec:,.0f}{certainty};"
        f" {runs_text(min(row.rounds, row.baseline.rounds))}."
    )


def stages_headline(plain: Row, fast: Row, runs: int) -> str:
    return (
        f"{fast.label} trains **{fast.tok_per_sec:,.0f} tok/sec,"
        f" {fast.factor_baseline:.2f} times** 00's {plain.tok_per_sec:,.0f} (published, on an"
        f" A100: {fast.published_factor_baseline:.2f} times); {runs_text(runs)}."
    )


def runs_text(runs: int) -> str:
    """Returns on how many runs of each script a speedup rests."""
    return SINGLE_RUNS if runs == 1 else f"{counted(runs, 'run')} each"


def all_factors(results: Path) -> list[float]:
    """Returns how many times as fast as 00 01 was in each measurement of a folder that has both."""
    factors = [
        factor_of(rows)
        for study in ("ladder", "stages", "time-to-loss")
        for path in sorted(results.glob(f"{study}*.jsonl"))
        for _, rows in found_in(results, path.stem)
    ]
    return [factor for factor in factors if factor]


def factor_of(rows: list[Row]) -> float | None:
    """Returns how many times as fast as 00 01 is, both at their own settings, or the last script of
    a whole ladder; None where one is missing."""
    own = [row for row in rows if not has_option("--batch-size", row.run.options)]
    base = rows[0].run
    if rows[0] not in own or base.stage != "00" and base.number != 0:
        return None
    ends = [row for row in own if row.run.stage == "01" or is_whole(row)]
    return ends[-1].factor_baseline if ends else None
