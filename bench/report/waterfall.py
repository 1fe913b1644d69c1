"""Pictures of a ladder: how many times as fast as the baseline each script is, and what its
technique gains, by the mean factors of its table."""

from bench.analysis.folders import rows_in
from bench.analysis.rows import Row, printed
from bench.common import REFERENCE
from bench.report.notes import WIDE_MARK
from bench.report.pictures import MEMORY, OWN, colour_legend, colour_of, lay_rows, rows_of_panels
from bench.report.tables import marked
from gpt_speed.tables import fmt

BEFORE = "#DCE5EC"  # what is gained already
LOSS = dict(facecolor="white", hatch="/////", linewidth=0)  # of what a row is slower by
LETTERS = 40  # of an error that fit next to a bar


def draw(rows: list[Row], title: str, colours: list[str]):
    """Returns a figure, its subfigure and its panel of speedups: for each row with a speedup a bar
    from the baseline, the first row, on, its gain in the row's colour; at the right its memory."""
    figure, [(subfigure, axes, memory)] = rows_of_panels(
        [title], [1.5 + 0.37 * max(4, len(rows))], [9, 2]
    )
    draw_speedups(axes, rows, colours)
    draw_memory(memory, rows)
    return figure, subfigure, axes


def draw_speedups(axes, rows: list[Row], colours: list[str]) -> None:
    """Draws what each row gained, from where the one before it had come to."""
    lay_rows(axes, len(rows))
    totals = {row.run.name: row.factor_baseline for row in rows if row.speeds}
    totals[rows[0].run.name] = 1.0
    low = min(total for total in totals.values() if total)
    for place, (row, colour) in enumerate(zip(rows, colours, strict=True)):
        start, end = ends_of(row, totals) or (low, low)
        axes.barh(place, start - low, 0.56, low, color=BEFORE)
        style = LOSS | dict(edgecolor=colour) if is_slower(row) else dict(color=colour)
        axes.barh(place, end - start, 0.56, start, **style)
        annotate(axes, place, end, row)
    axes.set_yticks(range(len(rows)), list(map(name_of, rows)))
    axes.set_xscale("log", base=2)
    axes.set_xlim(left=low)
    axes.xaxis.set_major_formatter("{x:g}×")
    axes.set_xlabel(heading_of(rows))


def is_slower(row: Row) -> bool:
    """Returns whether a row's factor is below 1 as it is printed."""
    return bool(row.factor) and round(row.factor, 2) < 1


def annotate(axes, place: int, end: float, row: Row) -> None:
    """Writes at the end of a bar what it says: a gain in bold, all else in plain black."""
    style = dict(color="black")
    if row.factor:
        style = dict(color=OWN, fontweight="bold")
    axes.annotate(
        label_of(row), (end, place), (8, 0), va="center", textcoords="offset points", **style
    )


def heading_of(rows: list[Row]) -> str:
    """Returns what the panel of speedups shows."""
    heading = "throughput relative to the baseline (log scale); labels: gain of each step"
    if any(map(is_slower, rows)):
        heading += "\nhatched: lost"
    if any(row.speedup().is_wide for row in rows):
        heading += f"\n{WIDE_MARK}: wide interval"
    return heading


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


def label_of(row: Row) -> str:
    """Returns what stands at a row's bar: its gain, its speed where it has none, or its error."""
    if row.error:
        return row.error[:LETTERS]
    if row.factor:
        return marked(f"{row.factor:.2f}×", row.speedup().is_wide)
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
    """Draws a machine's ladder."""
    rows = printed(rows)
    figure, subfigure, _ = draw(rows, title, list(map(colour_of, rows)))
    colour_legend(subfigure)
    return figure


def readme_picture():
    """Draws the H100's ladder, and the published A100's as circles."""
    rows = printed(row for row in rows_in(REFERENCE / "nvidia-h100", "ladder") if row.trainings)
    figure, subfigure, axes = draw(rows, "", [OWN] * len(rows))
    title = readme_title(rows[0], rows[-1])
    subfigure.suptitle(title, x=0.01, ha="left", fontsize=15, fontweight="bold")
    mark_published(axes, rows)
    axes.set_xlim(right=20)  # for the labels at the longest bars
    return figure


def readme_title(first: Row, last: Row) -> str:
    """Returns what the H100's ladder gains, in two lines."""
    return (
        f"One H100: {last.factor_baseline:.0f} times the training throughput of GPT-2 124M\n"
        f"{first.tok_per_sec:,.0f} → {last.tok_per_sec:,.0f} tokens per second,"
        f" {first.reserved_gb:.1f} → {last.reserved_gb:.1f} GB"
    )


def mark_published(axes, rows: list[Row]) -> None:
    """Draws circles, below each bar's middle, where the published A100 has come to."""
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
