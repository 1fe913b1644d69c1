"""What a page says of its machine, from results/machine.json, and how it did."""

from pathlib import Path

from bench.analysis.rows import Row
from bench.analysis.totals import headline_row, rounds_of_both, totals_in
from bench.machine import Machine, trained_in
from bench.report.notes import SINGLE_RUNS, peak_note
from bench.report.tables import spread
from gpt_speed.common import counted
from gpt_speed.tables import fmt

# What is told of a GPU's machine, by the fields of Machine.
GPU_FACTS = dict(cuda="CUDA", driver="driver", capability="compute capability")


def machine_section(look: dict) -> str:
    """Returns the paragraphs on a machine, and on what is missing there."""
    machine, memory = look["machine"], fmt(look["memory_gb"], ".1f") or "n/a"
    compiler = "torch.compile works."
    if look["compile_error"]:
        compiler = f"torch.compile doesn't work: {look['compile_error']}"
    return "\n\n".join(
        [
            f"{device_text(machine)}. {', '.join(software_of(machine))}."
            f" 01 and 02 train in {trained_in(machine)}.",
            f"{peak_note(look['matmul_peak'])} Memory: {memory} GB.",
            compiler,
            *(f"Missing: {thing}." for thing in look["missing"]),
        ]
    )


def device_text(machine: Machine) -> str:
    if not machine["gpus"]:
        return f"No GPU, so the small model `cpu-demo` is trained; {machine['cpu']}"
    return f"{machine['gpus']} × {machine['name']}, host {machine['cpu']}"


def software_of(machine: Machine) -> list[str]:
    """Returns the versions on a machine, its threads, and of one with a GPU GPU_FACTS."""
    facts = [
        f"PyTorch {machine['torch']}",
        f"Python {machine['python']}",
        machine["os"],
        f"{machine['threads']} threads",
    ]
    if machine["gpus"]:
        own = {name: machine.get(field) for field, name in GPU_FACTS.items()}
        facts += [f"{name} {value}" for name, value in own.items() if value]
    return facts


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
    """Returns on how many runs a row's speed and its baseline's rest, and on how many rounds the
    speedup, which not every run has part in."""
    rounds = rounds_of_both(row)
    if rounds == 1:
        return SINGLE_RUNS
    runs = [len(figures.speeds) for figures in (row, row.baseline) if figures]
    if set(runs) == {rounds}:
        return f"{counted(rounds, 'run')} each"
    of_both = f"{runs[0]} runs each"
    if runs[0] != runs[-1]:
        of_both = f"{runs[0]} and {runs[-1]} runs"
    return f"medians of {of_both}, the speedup over {counted(rounds, 'round')}"
