"""What a page says of its machine, from results/machine.json, and how it did."""

from pathlib import Path

from bench.analysis.rows import Row
from bench.analysis.totals import headline_row, rounds_of_both, totals_in
from bench.machine import trained_in
from bench.report.notes import SINGLE_RUNS, peak_note
from bench.report.tables import spread
from gpt_speed.common import counted
from gpt_speed.tables import fmt


def machine_section(look: dict) -> str:
    machine, error = look["machine"], look["compile_error"]
    device, gpu = f"No GPU, so the small model `cpu-demo` is trained; {machine['cpu']}", ""
    if machine["gpus"]:
        device = f"{machine['gpus']} × {machine['name']}, host {machine['cpu']}"
        names = dict(cuda="CUDA", driver="driver", capability="compute capability")
        gpu = "".join(f", {name} {machine[key]}" for key, name in names.items() if machine[key])
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
    with the range over all measurements; "" without any."""
    row, totals = headline_row(results), totals_in(results)
    if not row:
        return ""
    text = f"{speedup_text(row)}; {runs_text(row)}."
    if len(totals) > 1:
        text += (
            f" In the {len(totals)} measurements of this folder 01 is"
            f" {spread(totals, '.2f')} times as fast as 00."
        )
    return text


def speedup_text(row: Row) -> str:
    """Returns how fast a row is beside its baseline, with the interval for a ladder and the
    published speedup for the three scripts, where those are known."""
    if row.measured.study == "ladder":
        form, aside = ".1f", interval_aside(row)
    else:
        form, aside = ".2f", published_aside(row)
    text = (
        f"{row.label} trains **{row.tok_per_sec:,.0f} tok/sec,"
        f" {row.factor_baseline:{form}} times** {row.table[0].label}'s"
        f" {row.table[0].tok_per_sec:,.0f}"
    )
    if aside:
        text += f" ({aside})"
    return text


def interval_aside(row: Row) -> str:
    interval = spread(row.speedup_over(row.baseline).interval, ".1f")
    if not interval:
        return ""
    return f"95%: {interval}"


def published_aside(row: Row) -> str:
    speedup = fmt(row.published_factor_baseline, ".2f")
    if not speedup:
        return ""
    return f"published, on an A100: {speedup} times"


def runs_text(row: Row) -> str:
    """Returns on how many runs of each script a speedup over the baseline rests."""
    runs = rounds_of_both(row)
    if runs == 1:
        return SINGLE_RUNS
    return f"{counted(runs, 'run')} each"
