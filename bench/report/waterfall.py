"""Pictures of a ladder: how many times as fast as the baseline each script is, and what its
technique gains, by the mean factors of its table."""

from dataclasses import dataclass, replace

from bench.analysis.claims import ALLOCATOR, Claims
from bench.analysis.rows import Row, Rows, printed
from bench.catalogue import technique_number, without_effect_on_gpus
from bench.report.notes import WIDE_MARK
from bench.report.pictures import (
    DARK,
    LIGHT,
    Palette,
    colour_legend,
    lay_rows,
    load_pyplot,
    rows_of_panels,
    significance_colour,
)
from bench.report.tables import marked
from gpt_speed.common import listed
from gpt_speed.tables import fmt
from patches import stack

LETTERS = 40  # of an error that fit next to a bar


@dataclass(frozen=True)
class Rung:
    """A row of a ladder's picture; speeds are times the baseline's."""

    name: str
    label: str  # stands at the bar's end: a gain, a speed, or an error
    colour: str
    factor: float | None  # its gain, which the label is then
    is_significant: bool  # whether that is more than noise
    ends: tuple[float, float] | None  # where its gain begins and ends; None without
    gb: float | None


def rungs_of(rows: list[Row], colours: list[str]) -> list[Rung]:
    """Returns a rung for each row, whose gains have these colours. The baseline is the first."""
    totals = {row.run.name: row.factor_baseline for row in rows if row.speeds}
    totals[rows[0].run.name] = 1.0
    return [
        Rung(
            rung_name(row),
            bar_label(row),
            colour,
            row.factor,
            row.speedup().is_significant,
            ends_of(row, totals),
            row.reserved_gb,
        )
        for row, colour in zip(rows, colours, strict=True)
    ]


def draw_rungs(rungs: list[Rung], title: str, heading: str, palette: Palette = LIGHT):
    """Returns a figure, its subfigure and its panel of speedups: for each rung a bar from the
    baseline on, its gain in its colour; at the right its memory."""
    figure, [(subfigure, axes, memory)] = rows_of_panels(
        [title], [1.5 + 0.37 * max(4, len(rungs))], [9, 2], palette
    )
    draw_speedups(axes, rungs, palette)
    axes.set_xlabel(heading)
    draw_memory(memory, rungs, palette)
    return figure, subfigure, axes


def draw_speedups(axes, rungs: list[Rung], palette: Palette) -> None:
    """Draws what each technique gained, from where the one before it had come to; hatched: lost."""
    lay_rows(axes, len(rungs))
    low = min([1.0, *(min(rung.ends) for rung in rungs if rung.ends)])
    for place, rung in enumerate(rungs):
        start, end = rung.ends or (low, low)
        axes.barh(place, start - low, 0.56, low, color=palette.before)
        if is_loss(rung.factor):
            style = dict(facecolor="none", edgecolor=rung.colour, hatch="/////", linewidth=0)
        else:
            style = dict(color=rung.colour)
        axes.barh(place, end - start, 0.56, start, **style)
        annotate(axes, place, end, rung, palette)
    axes.set_yticks(range(len(rungs)), [rung.name for rung in rungs])
    axes.set_xscale("log", base=2)
    axes.set_xlim(left=low)
    axes.xaxis.set_major_formatter("{x:g}×")


def is_loss(factor: float | None) -> bool:
    """Returns whether a factor is below 1 as it is printed."""
    return factor is not None and round(factor, 2) < 1


def annotate(axes, place: int, end: float, rung: Rung, palette: Palette) -> None:
    """Writes at the end of a bar what it says: a significant gain in bold and colour, all else
    plainly; on the paper's colour, so that no line runs through it."""
    style: dict[str, str] = {}
    if rung.is_significant:
        style = dict(color=rung.colour, fontweight="bold")
    axes.annotate(
        rung.label,
        (end, place),
        (8, 0),
        va="center",
        textcoords="offset points",
        bbox=dict(facecolor=axes.get_facecolor(), edgecolor="none", pad=1),
        **style,
    )


def heading_of(rows: list[Row]) -> str:
    """Returns what the panel of speedups shows."""
    heading = "throughput relative to the baseline (log scale); labels: gain of each step"
    if any(is_loss(row.factor) for row in rows):
        heading += "\nhatched: lost"
    if any(row.speedup().is_wide for row in rows):
        heading += f"\n{WIDE_MARK}: wide interval"
    return heading


def ends_of(row: Row, totals: dict[str, float | None]) -> tuple[float, float] | None:
    """Returns where a row's gain begins and ends, times the baseline; None without a gain, or where
    it shares no round with the baseline."""
    if not row.factor or not row.reference:
        return None
    start, end = totals[row.reference.run.name], totals[row.run.name]
    if not start or not end:
        return None
    return min(start, end), max(start, end)


def rung_name(row: Row) -> str:
    """Returns what a row adds, and its number."""
    name = row.technique
    if row.run.processes > 1:
        name += f" × {row.run.processes}"
    if len(row.techniques) > 1:
        name = f"techniques {row.techniques[0]} to"
    return f"{name} {row.run.number:\u2007>2}"  # the filling is as wide as a figure


def bar_label(row: Row) -> str:
    """Returns what stands at a row's bar: its gain, its speed where it has none, or its error."""
    if row.error:
        return row.error[:LETTERS]
    if row.factor:
        return marked(f"{row.factor:.2f}×", row.speedup().is_wide)
    return f"{fmt(row.tok_per_sec, ',.0f')} tok/sec"


def draw_memory(axes, rungs: list[Rung], palette: Palette) -> None:
    lay_rows(axes, len(rungs))
    sizes = [rung.gb or 0 for rung in rungs]
    bars = axes.barh(range(len(rungs)), sizes, 0.56, color=palette.memory)
    axes.bar_label(bars, [f"{size:.1f}" if size else "" for size in sizes], padding=4)
    axes.set_xlim(0, 1.5 * max(sizes) or 1)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_xlabel("memory, GB")


def machine_picture(title: str, rows: Rows):
    shown = printed(rows)
    rungs = rungs_of(shown, list(map(significance_colour, shown)))
    figure, subfigure, _ = draw_rungs(rungs, title, heading_of(shown))
    colour_legend(subfigure)
    return figure


# ---- README's picture --------------------------------------------------------------------------

README_PICTURES = {"speedup.png": LIGHT, "speedup-dark.png": DARK}  # in docs/


def readme_picture(claims: Claims, palette: Palette):
    """Draws the H100's ladder, and ALLOCATOR by another day's runs."""
    rows = printed(claims.ladder.values())
    rungs = [*readme_rungs(rows, palette), allocator_rung(claims, palette)]
    with load_pyplot().rc_context():
        heading = f"{heading_of(rows)}; bold: significant\n({absent_ones()})"
        figure, subfigure, axes = draw_rungs(rungs, "", heading, palette)
        subfigure.suptitle(readme_title(claims), x=0.01, ha="left", fontsize=15, fontweight="bold")
        axes.set_xlim(right=20)  # for the labels at the longest bars
    return figure


def readme_rungs(rows: list[Row], palette: Palette) -> list[Rung]:
    """Returns the ladder's rungs, with every technique's name where several share one."""
    rungs = []
    for row, rung in zip(rows, rungs_of(rows, [palette.memory] * len(rows)), strict=True):
        if rung.is_significant:
            rung = replace(rung, colour=palette.gain)
        if len(row.techniques) > 1:
            rung = replace(rung, name=names_of(row.techniques))
        rungs.append(rung)
    return rungs


def names_of(numbers: list[int]) -> str:
    """Returns what several techniques are called, and their numbers."""
    patches = stack.load()
    names = [patches[number - 1].fields["Technique"] for number in numbers]
    return f"{', '.join(names)} {'+'.join(map(str, numbers))}"


def allocator_rung(claims: Claims, palette: Palette) -> Rung:
    """Returns the rung of ALLOCATOR, which the ladder lacks: it lies where the ladder ends."""
    settings, end = claims.allocator_settings(), claims.optimized.factor_baseline or 1.0
    return Rung(
        names_of([*settings.numbers]),
        f"≤ {settings.speed:.2f}×",
        palette.gain,
        factor=None,
        is_significant=False,
        ends=(end, end),
        gb=claims.steps.script_gb["01"],
    )


def absent_ones() -> str:
    """Returns why techniques aren't rows of the H100's ladder."""
    for_cpus = listed(map(str, sorted(without_effect_on_gpus())))
    return f"{for_cpus} is for CPUs, {technique_number(ALLOCATOR)} was measured on another day"


def readme_title(claims: Claims) -> str:
    """Returns what the H100's ladder gains in speed, and by which batch sizes, in two lines."""
    first, last = claims.baseline, claims.optimized
    batches = " → ".join(
        str(row.record.config["batch_size"]) for row in (first, last) if row.record
    )
    return (
        f"GPT-2 124M on one H100: {last.factor_baseline:.1f} times a textbook's PyTorch script\n"
        f"{first.tok_per_sec:,.0f} → {last.tok_per_sec:,.0f} tok/sec, batch size {batches}"
    )
