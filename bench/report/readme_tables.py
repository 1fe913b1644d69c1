"""README's tables, and its picture with what that shows in words."""

import re
from typing import NamedTuple

from bench.analysis.claims import Claims, Contribution
from bench.analysis.folders import has_gpu
from bench.analysis.rows import Row
from bench.analysis.totals import optimized_in, rounds_of_both
from bench.common import REFERENCE
from bench.machine import short_name
from bench.predict.batches import comparable_batch
from bench.report import waterfall
from bench.report.notes import SINGLE_RUNS
from bench.report.prediction_tables import OnCard
from bench.report.tables import spread
from bench.report.technique_pages import effect_in_words, link_to, title_of
from gpt_speed.cards import CARDS
from gpt_speed.tables import Column, Table, num_col, text_col

PREDICTED = "RTX 4090"  # the GPU whose line in the table of hardware is predicted


class HardwareLine(NamedTuple):
    """A line of the table of hardware, as it is written."""

    hardware: str
    baseline: str  # tok/sec
    optimized: str
    speedup: str
    source: str


def hardware_table() -> Table:
    """Returns a line for each GPU that was measured, and for one that is predicted."""
    rows = [row for row in optimized_in(REFERENCE) if has_gpu(row)]
    lines = [*map(measured_line, rows), predicted_line(PREDICTED)]
    return Table(
        [
            text_col("hardware", "hardware"),
            num_col("baseline, tok/sec", "baseline"),
            num_col("optimized, tok/sec", "optimized"),
            num_col("speedup", "speedup"),
            text_col("source", "source"),
        ],
        lines,
    )


def measured_line(row: Row) -> HardwareLine:
    """Returns the ends of a machine's ladder, and on how much they rest."""
    folder = row.measured.folder.name
    source = f"[measured](results/reference/{folder}/README.md)"
    if row.plan.length.tokens and row.record:
        source += f" over {row.record.logs[-1]['step'] + 1} steps"
    if rounds_of_both(row) == 1:
        source += f", {SINGLE_RUNS}"
    return HardwareLine(
        hardware=f"{row.run.processes} × {short_name(row.measured.machine)}",
        baseline=f"{row.table[0].tok_per_sec:,.0f}",
        optimized=f"{row.tok_per_sec:,.0f}",
        speedup=f"**{row.factor_baseline:.1f}×**",
        source=source,
    )


def predicted_line(name: str) -> HardwareLine:
    """Returns what is predicted for a card, at the batch sizes that `make bench` takes there.
    Raises UserError where that isn't stored, StackError."""
    first, last = benched(name)
    return HardwareLine(
        hardware=f"1 × {name}",
        baseline=in_thousands(first.speeds),
        optimized=in_thousands(last.speeds),
        speedup=speedup_range(first.speeds, last.speeds),
        source=f"[predicted](docs/gpus.md), batch {first.batch} → {last.batch}",
    )


def speedup_range(first: tuple[float, float] | None, last: tuple[float, float] | None) -> str:
    """Writes the least and the largest speedup that two predicted ranges allow; "" without them."""
    if not first or not last:
        return ""
    return f"{last[0] / first[1]:.0f}–{last[1] / first[0]:.0f}×"


def benched(name: str) -> tuple[OnCard, OnCard]:
    """Returns 00 and 01 as `make bench` trains them on a card."""
    first = OnCard("00", CARDS[name])
    return first, OnCard("01", CARDS[name], most=comparable_batch(first.batch))


def bench_minutes() -> float | None:
    """Returns the minutes of training that `make bench` takes on the GPU that is predicted: 00, 01,
    and 02."""
    first, last = benched(PREDICTED)
    if first.minutes is None or last.minutes is None:
        return None
    return first.minutes + 2 * last.minutes


def in_thousands(speeds: tuple[float, float] | None) -> str:
    """Writes a predicted range, such as "13,000–22,000"; "" without one."""
    return spread([round(speed, -3) for speed in speeds or ()])


def contributions_table() -> Table:
    """Returns what each technique contributes on the H100, and what is left of it elsewhere."""
    return Table(
        [
            Column("technique", technique_cell, True),
            Column("speed, H100", speed_cell),
            num_col("memory, H100", "memory", ".2f", "×"),
            Column("still gains in a compiled bfloat16 script", still_gains_cell, True),
            Column("effect on the loss", effect_cell, True),
        ],
        Claims(REFERENCE).contributions(),
    )


def technique_cell(line: Contribution) -> str:
    """Returns the numbers and names of techniques, linked to their cards."""
    titles = map(title_of, line.patches, line.numbers)
    return ", ".join(link_to(title, "docs/techniques.md") for title in titles)


def speed_cell(line: Contribution) -> str:
    """Returns the speedup, or that it is a CPU's alone."""
    if line.speed is None:
        return "CPUs only"
    if line.at_most:
        return f"≤ {line.speed:.2f}×"
    return f"{line.speed:.2f}×"


def still_gains_cell(line: Contribution) -> str:
    """Returns whether a technique helps a script that has bfloat16 and torch.compile; of several,
    each one's answer without its reason."""
    answers = [patch.fields["Compiled"] for patch in line.patches]
    if len(answers) == 1:
        return answers[0]
    return "; ".join(
        f"{number}: {re.split('[,:]', answer)[0]}"
        for number, answer in zip(line.numbers, answers, strict=True)
    )


def effect_cell(line: Contribution) -> str:
    """Returns what the techniques do to the loss."""
    return "; ".join(dict.fromkeys(map(effect_in_words, line.patches)))


def picture_lines() -> str:
    """Returns README's picture, a light and a dark one, with what it shows in words."""
    claims = Claims(REFERENCE)
    last = claims.optimized
    words = (
        "Training throughput on one H100 after each technique, relative to the baseline: it ends"
        f" at {last.factor_baseline:.1f} times, in {last.reserved_gb:.1f} GB; on another day"
        f" technique 15 saved memory down to {claims.steps.script_gb['01']:.1f} GB"
    )
    light, dark = (f"docs/{name}" for name in waterfall.README_PICTURES)
    return (
        "<picture>\n"
        f'  <source media="(prefers-color-scheme: dark)" srcset="{dark}">\n'
        f'  <img alt="{words}" src="{light}" width="830">\n'
        "</picture>"
    )
