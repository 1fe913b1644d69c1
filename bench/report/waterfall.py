"""Pictures of a ladder: how many times as fast as the baseline each script is, and what its
technique gains. Bars and labels of a picture are of one statistic."""

import math
from itertools import pairwise
from typing import NamedTuple

from bench.analysis.rows import Row
from bench.common import REFERENCE
from bench.report.pictures import (
    ERROR,
    OWN,
    UNSURE,
    add_legend,
    colour_of,
    lay_rows,
    rows_of_panels,
    shorten,
)
from bench.report.tables import fmt, rows_in

BEFORE, MEMORY = "#DCE5EC", "#8D9BA6"  # what is gained already; memory
SHOWN = 0.02  # README's picture leaves out what changes neither speed nor memory by this share


class Step(NamedTuple):
    """A script of a ladder; its speedups are those over the baseline."""

    name: str  # of its technique
    before: float | None  # the speedup of the script that it is compared with
    after: float | None  # its own; None where it has no figure
    label: str  # what stands at the end of its bar
    memory_gb: float | None
    colour: str = OWN
    published: float | None = None  # speedup, drawn as a circle


def draw(steps: list[Step], title: str):
    """Returns a figure, its subfigure and its panel of speedups: for each step a bar from the
    baseline on, its gain in colour; at the right its memory."""
    figure, [(subfigure, axes, memory)] = rows_of_panels(
        [title], [1.5 + 0.37 * max(4, len(steps))], [9, 2])
    for panel in (axes, memory):
        lay_rows(panel, len(steps))
    axes.set_yticks(range(len(steps)), [step.name for step in steps])
    low = min([1.0, *(step.after for step in steps if step.after)])
    for place, step in enumerate(steps):
        start, end = sorted((step.before or low, step.after or low))
        axes.barh(place, start - low, 0.56, low, color=BEFORE)
        axes.barh(place, end - start, 0.56, start, color=step.colour)
        if step.published:  # below the bar, clear of its label
            axes.plot(step.published, place + 0.33, "o", color="white", markeredgecolor="0.2",
                      markersize=5.5)
        axes.annotate(step.label, (end, place), (8, 0), textcoords="offset points", va="center",
                      color=OWN if step.before else "black",
                      fontweight="bold" if step.before else "normal")
    axes.set_xscale("log", base=2)
    axes.set_xlim(left=low)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}×")
    axes.set_xlabel("throughput relative to the baseline (log scale); labels: gain of each step")
    sizes = [step.memory_gb or 0 for step in steps]
    bars = memory.barh(range(len(steps)), sizes, 0.56, color=MEMORY)
    memory.bar_label(bars, [f"{size:.1f}" if size else "" for size in sizes], padding=4)
    memory.set_xlim(0, 1.5 * max(sizes) or 1)
    memory.set_xticks([])
    memory.spines["bottom"].set_visible(False)
    memory.set_xlabel("memory, GB")
    return figure, subfigure, axes


def machine_picture(title: str, rows: list[Row]):
    """Draws a machine's ladder by the mean factors of its table; a row without a factor over the
    baseline has no bar."""
    steps = []
    for row in rows:
        name = row.technique + (f" × {row.run.processes}" if row.run.processes > 1 else "")
        if len(row.techniques) > 1:
            name = f"techniques {row.techniques[0]} to"
        number = row.label.partition(" ")[0]
        label = (shorten(row.error, 40) if row.error else f"{row.factor:.2f}×" if row.factor else
                 f"{fmt(row.tok_per_sec, ',.0f')} tok/sec")
        before = (row.reference.factor_baseline or 1.0) if row.reference else None
        steps.append(Step(  # before a number of one figure is a space as wide
            f"{name} {number:\u2007>2}", before if row.factor_baseline else None,
            row.factor_baseline, label, row.reserved_gb, colour_of(row)))
    figure, subfigure, _ = draw(steps, title)
    add_legend(subfigure, {
        "significant gain": OWN, "significant loss": ERROR, "not significant": UNSURE})
    return figure


def readme_picture():
    """Draws the H100's ladder by the medians of its rounds, and the published A100's as circles."""
    rows = [row for row in rows_in(REFERENCE / "nvidia-h100", "ladder") if row.records]
    first, last = rows[0], rows[-1]
    steps, left_out = [], []
    for before, row in pairwise(rows):
        gain = row.tok_per_sec / before.tok_per_sec
        if max(abs(gain - 1), 1 - row.reserved_gb / before.reserved_gb) < SHOWN:
            left_out.append((row.technique, gain))
            continue
        steps.append(Step(
            f"+ {row.technique}", before.tok_per_sec / first.tok_per_sec,
            row.tok_per_sec / first.tok_per_sec, f"{gain:.2f}×", row.reserved_gb,
            published=row.published_factor_baseline))
    names, gains = zip(*left_out, strict=True)
    whole = last.tok_per_sec / first.tok_per_sec
    figure, _, axes = draw([
        Step("baseline", None, 1.0, f"{first.tok_per_sec:,.0f} tok/s", first.reserved_gb), *steps,
        Step("all of them", 1.0, whole, f"{whole:.1f}×", last.reserved_gb)], "")
    figure.get_layout_engine().set(rect=(0, 0, 1, 0.89))
    for height, size, weight, text in (
            (0.95, 17, "bold", f"One H100: {whole:.0f} times the training throughput"),
            (0.905, 12, "normal", f"GPT-2 124M: {first.tok_per_sec:,.0f} → {last.tok_per_sec:,.0f}"
             f" tokens per second, {first.reserved_gb:.1f} → {last.reserved_gb:.1f} GB")):
        figure.text(0.012, height, text, fontsize=size, fontweight=weight, va="baseline")
    axes.set_xlim(1, 20)
    axes.set_xlabel(f"{axes.get_xlabel()}\nleft out: {', '.join(names)}; together"
                    f" {math.prod(gains):.2f}×")
    last_published = [step.published for step in steps if step.published][-1]
    axes.annotate(f"○ A100 (published), up to {last_published:.1f}×", (20, 0), ha="right",
                  va="center")
    return figure
