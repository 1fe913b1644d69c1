"""Pictures of a ladder: how many times as fast as the baseline each script is, and what its
technique gains. Bars and labels of a picture are of one statistic."""

from collections.abc import Callable

from bench.analysis.rows import Row
from bench.common import REFERENCE
from bench.report.pictures import MEMORY, OWN, colour_legend, colour_of, lay_rows, rows_of_panels
from bench.report.tables import rows_in
from gpt_speed.tables import fmt

BEFORE = "#DCE5EC"  # what is gained already


def by_means(row: Row, other: Row) -> float | None:
    return 1.0 if row is other else row.speedup(over=other).factor


def by_medians(row: Row, other: Row) -> float:
    return row.tok_per_sec / other.tok_per_sec


def draw(rows: list[Row], title: str, speedup: Callable, colour: Callable[[Row], str]):
    """Returns a figure, its subfigure and its panel of speedups: for each row with a `speedup` a
    bar from the baseline, the first row, on, its gain in colour; at the right its memory."""
    figure, [(subfigure, axes, memory)] = rows_of_panels(
        [title], [1.5 + 0.37 * max(4, len(rows))], [9, 2]
    )
    for panel in (axes, memory):
        lay_rows(panel, len(rows))
    totals = {row.run.name: speedup(row, rows[0]) for row in rows if row.speeds}
    low, names = min(total for total in totals.values() if total), []
    for place, row in enumerate(rows):
        name = row.technique + (f" × {row.run.processes}" if row.run.processes > 1 else "")
        if len(row.techniques) > 1:
            name = f"techniques {row.techniques[0]} to"
        names.append(f"{name} {row.run.number:\u2007>2}")  # the filling is as wide as a figure
        start = end = low
        if row.factor and totals[row.run.name]:  # else they share no round with the baseline
            start, end = sorted((totals[row.reference.run.name], totals[row.run.name]))
        axes.barh(place, start - low, 0.56, low, color=BEFORE)
        axes.barh(place, end - start, 0.56, start, color=colour(row))
        label = f"{fmt(row.tok_per_sec, ',.0f')} tok/sec"
        if row.factor:
            label = f"{speedup(row, row.reference):.2f}×"
        axes.annotate(
            str(row.error or label)[:40],
            (end, place),
            (8, 0),
            va="center",
            textcoords="offset points",
            color=OWN if row.factor else "black",
            fontweight="bold" if row.factor else "normal",
        )
    axes.set_yticks(range(len(rows)), names)
    axes.set_xscale("log", base=2)
    axes.set_xlim(left=low)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}×")
    axes.set_xlabel("throughput relative to the baseline (log scale); labels: gain of each step")
    sizes = [row.reserved_gb or 0 for row in rows]
    bars = memory.barh(range(len(rows)), sizes, 0.56, color=MEMORY)
    memory.bar_label(bars, [f"{size:.1f}" if size else "" for size in sizes], padding=4)
    memory.set_xlim(0, 1.5 * max(sizes) or 1)
    memory.set_xticks([])
    memory.spines["bottom"].set_visible(False)
    memory.set_xlabel("memory, GB")
    return figure, subfigure, axes


def machine_picture(title: str, rows: list[Row]):
    """Draws a machine's ladder by the mean factors of its table."""
    figure, subfigure, _ = draw(rows, title, by_means, colour_of)
    colour_legend(subfigure)
    return figure


def readme_picture():
    """Draws the H100's ladder by medians, and the published A100's as circles."""
    rows = [row for row in rows_in(REFERENCE / "nvidia-h100", "ladder") if row.records]
    first, last = rows[0], rows[-1]
    figure, subfigure, axes = draw(rows, "", by_medians, lambda _: OWN)
    subfigure.suptitle(
        f"One H100: {by_medians(last, first):.0f} times the training throughput of GPT-2 124M\n"
        f"{first.tok_per_sec:,.0f} → {last.tok_per_sec:,.0f} tokens per second,"
        f" {first.reserved_gb:.1f} → {last.reserved_gb:.1f} GB",
        x=0.01,
        ha="left",
        fontsize=15,
        fontweight="bold",
    )
    axes.plot(
        [row.published_factor_baseline for row in rows],
        [place + 0.33 for place in range(len(rows))],
        "o",
        color="white",
        markeredgecolor="0.2",
        markersize=5.5,
        clip_on=False,
        label="published, on an A100",
    )
    axes.legend(loc="upper right")
    axes.set_xlim(right=20)
    return figure
