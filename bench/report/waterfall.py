"""Pictures of a ladder: how many times as fast as the baseline each script is, and what its
technique gains. Bars and labels of a picture are of one statistic."""

from collections.abc import Callable

from bench.analysis.folders import rows_in
from bench.analysis.rows import Row
from bench.common import REFERENCE
from bench.report.pictures import MEMORY, OWN, colour_legend, colour_of, lay_rows, rows_of_panels
from gpt_speed.tables import fmt

BEFORE = "#DCE5EC"  # what is gained already
LETTERS = 40  # of an error that fit next to a bar


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
    draw_speedups(axes, rows, speedup, colour)
    draw_memory(memory, rows)
    return figure, subfigure, axes


def draw_speedups(axes, rows: list[Row], speedup: Callable, colour: Callable[[Row], str]) -> None:
    """Draws what each row gained, from where the one before it had come to."""
    lay_rows(axes, len(rows))
    totals = {row.run.name: speedup(row, rows[0]) for row in rows if row.speeds}
    low = min(total for total in totals.values() if total)
    for place, row in enumerate(rows):
        start, end = ends_of(row, totals) or (low, low)
        axes.barh(place, start - low, 0.56, low, color=BEFORE)
        axes.barh(place, end - start, 0.56, start, color=colour(row))
        axes.annotate(
            label_of(row, speedup),
            (end, place),
            (8, 0),
            va="center",
            textcoords="offset points",
            color=OWN if row.factor else "black",
            fontweight="bold" if row.factor else "normal",
        )
    axes.set_yticks(range(len(rows)), list(map(name_of, rows)))
    axes.set_xscale("log", base=2)
    axes.set_xlim(left=low)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}×")
    axes.set_xlabel("throughput relative to the baseline (log scale); labels: gain of each step")


def ends_of(row: Row, totals: dict[str, float | None]) -> tuple[float, float] | None:
    """Returns where a row's gain begins and ends, times the baseline; None without a gain, or where
    it shares no round with the baseline."""
    if not row.factor or not totals[row.run.name]:
        return None
    low, high = sorted((totals[row.reference.run.name], totals[row.run.name]))
    return low, high


def name_of(row: Row) -> str:
    """Returns what a row adds, and its number."""
    name = row.technique
    if row.run.processes > 1:
        name += f" × {row.run.processes}"
    if len(row.techniques) > 1:
        name = f"techniques {row.techniques[0]} to"
    return f"{name} {row.run.number:\u2007>2}"  # the filling is as wide as a figure


def label_of(row: Row, speedup: Callable) -> str:
    """Returns what stands at a row's bar: its gain, its speed where it has none, or its error."""
    if row.error:
        return row.error[:LETTERS]
    if row.factor:
        return f"{speedup(row, row.reference):.2f}×"
    return f"{fmt(row.tok_per_sec, ',.0f')} tok/sec"


def draw_memory(axes, rows: list[Row]) -> None:
    """Draws the memory that each row reserved."""
    lay_rows(axes, len(rows))
    sizes = [row.reserved_gb or 0 for row in rows]
    bars = axes.barh(range(len(rows)), sizes, 0.56, color=MEMORY)
    axes.bar_label(bars, [f"{size:.1f}" if size else "" for size in sizes], padding=4)
    axes.set_xlim(0, 1.5 * max(sizes) or 1)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_xlabel("memory, GB")


def machine_picture(title: str, rows: list[Row]):
    """Draws a machine's ladder by the mean factors of its table."""
    figure, subfigure, _ = draw(rows, title, by_means, colour_of)
    colour_legend(subfigure)
    return figure


def readme_picture():
    """Draws the H100's ladder by medians, and the published A100's as circles."""
    rows = [row for row in rows_in(REFERENCE / "nvidia-h100", "ladder") if row.trainings]
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
