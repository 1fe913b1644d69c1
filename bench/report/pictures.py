"""Pictures: their style, and what several studies draw. matplotlib is loaded only by what draws."""

import io
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

from bench.analysis.folders import newest_in
from bench.analysis.rows import Row, Rows
from bench.catalogue import Run
from bench.common import shorten
from bench.machine import short_name
from bench.report.notes import WIDE_MARK
from bench.report.showable import Showable
from bench.report.tables import factor_text, picture_name

# Hues that colour-blind readers tell apart (Okabe and Ito's), of luminances that differ in grey.
COLOURS = {"00": "#F2B84B", "01": "#00548C", "02": "#1FA77E"}
OTHER = COLOURS["02"]  # of what isn't one of the three scripts
# Of speedups, by their significance.
FASTER, SLOWER, UNSURE = COLOURS["01"], "#E8803A", "#BCC6CF"
MEMORY = "#8D9BA6"
BEFORE = "#DCE5EC"  # what is gained already
INCHES = 10  # of a picture's width, which READMEs show at about 880 pixels
WIDE_NOTE = f"; {WIDE_MARK}: wide interval, not ranked"
LETTERS = 96  # of a title that fit into it


def load_pyplot():
    """Returns matplotlib.pyplot, which draws into files whatever backend MPLBACKEND names. Raises
    ImportError or OSError where it can't be loaded."""
    os.environ["MPLBACKEND"] = "Agg"
    from matplotlib import pyplot

    return pyplot


@dataclass(frozen=True)
class Palette:
    """The colours of a ladder's picture."""

    gain: str
    before: str
    memory: str
    style: dict[str, str]  # of the rest, as matplotlib names it


LIGHT = Palette(FASTER, BEFORE, MEMORY, {"grid.color": "0.9"})
# For pages with GitHub's dark background.
PAPER, INK = "#0D1117", "#E6EDF3"
DARK = Palette(
    "#58A6E0",
    "#263442",
    "#6E7C88",
    {
        "grid.color": "#2A313A",
        **dict.fromkeys(("figure.facecolor", "axes.facecolor"), PAPER),
        **dict.fromkeys(
            ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
        ),
    },
)


def rows_of_panels(
    titles: list[str], inches: list[float], widths: list[int], palette: Palette = LIGHT
):
    """Returns a figure, and for each title a row: its subfigure, and a panel for each width."""
    plt = load_pyplot()
    # Names of devices may hold a $, which is not mathematics.
    plt.rcParams.update(
        {
            "font.size": 11,
            "text.parse_math": False,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            **palette.style,
        }
    )
    figure = plt.figure(figsize=(INCHES, sum(inches)), dpi=150)
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.06)
    rows = figure.subfigures(len(titles), 1, squeeze=False, height_ratios=inches)[:, 0]
    for row, text in zip(rows, titles, strict=True):
        text = "\n".join(fill(line, LETTERS) for line in text.splitlines())
        row.suptitle(text, x=0.01, ha="left", fontsize=12, fontweight="bold")
    return figure, [
        (row, *row.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]) for row in rows
    ]


def lay_rows(axes, count: int) -> None:
    """Lays out a panel with a row for each of `count` things, the first at the top."""
    axes.set_ylim(count - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_yticks([])


def place_of(measured) -> str:
    """Returns the model if it is one, the machine, and another text than the book."""
    models = {result.record.config["model"] for result in measured.results if result.record}
    place = shorten(short_name(measured.machine), 60)
    if len(models) == 1:
        place = f"{models.pop()} on {place}"
    if not measured.machine["gpus"]:
        place += f", {measured.machine['threads']} cores"
    if measured.text:
        place += f"\ntext: {measured.text}"
    return place


def key(label: str, **style):
    from matplotlib.patches import Patch

    return Patch(label=label, **style)


def add_legend(subfigure, colours: dict[str, str], *more) -> None:
    """Adds a legend of colours, by their labels, and of more keys."""
    handles = [*(key(label, color=colour) for label, colour in colours.items()), *more]
    subfigure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def colour_legend(subfigure) -> None:
    """Adds a legend of the colours that significance_colour returns."""
    add_legend(
        subfigure,
        {"significantly faster": FASTER, "significantly slower": SLOWER, "not significant": UNSURE},
    )


def script_colour(run: Run) -> str:
    return COLOURS.get(run.stage or "", OTHER)


def significance_colour(row: Row) -> str:
    return dict(faster=FASTER, slower=SLOWER).get(row.significance or "", UNSURE)


def draw_all(studies: Mapping[str, Showable], results: Path) -> dict[str, bytes]:
    """Returns {file name: picture} of all that there is to draw; a line says where matplotlib can't
    be loaded."""
    try:
        pyplot = load_pyplot()
    except (ImportError, OSError) as error:
        print(f"there are no pictures: {error}", file=sys.stderr)
        return {}
    pictures = {}
    for name, study in studies.items():
        for rows in newest_in(results, name):
            figure = study.picture(rows)
            if figure:
                pictures[f"{picture_name(name, rows.measured.kind)}.png"] = picture_bytes(figure)
        pyplot.close("all")
    return pictures


def picture_bytes(figure) -> bytes:
    """Returns the PNG of a figure; with a palette, which makes it a third as large."""
    from PIL import Image  # which matplotlib brings along

    whole, small = io.BytesIO(), io.BytesIO()
    figure.savefig(whole)
    Image.open(whole).convert("RGB").quantize(128).save(small, "png", optimize=True)
    return small.getvalue()


@dataclass(frozen=True)
class Bar:
    """What a bar shows: a value with its name before it and a text at its end."""

    name: str
    value: float | None  # None: no bar, but the text
    text: str
    colour: str
    whisker: Sequence[float] = ()  # values whose range is drawn
    behind: float | None = None  # the end of a hatched bar behind it

    @property
    def end(self) -> float:
        """Where the text stands: after all that is drawn."""
        if len(self.whisker) > 1:
            return max(*self.whisker, self.behind or 0)
        return max(self.value or 0, self.behind or 0)


def draw_bars(axes, bars: Sequence[Bar]) -> None:
    """Draws bars, the first on top."""
    lay_rows(axes, len(bars))
    for place, bar in enumerate(bars):
        if bar.behind is not None:
            axes.barh(place, bar.behind, 0.7, color="white", edgecolor="0.6", hatch="///")
        axes.barh(place, bar.value or 0, 0.7, color=bar.colour)
        if len(bar.whisker) > 1:
            ends = min(bar.whisker), max(bar.whisker)
            axes.plot(ends, (place, place), "|-", color="0.1", linewidth=1.2)
        axes.annotate(
            bar.text,
            (bar.end, place),
            (6, 0),
            textcoords="offset points",
            va="center",
            fontsize=10,
        )
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars])
    axes.set_xlim(left=0)
    axes.xaxis.get_major_locator().set_params(nbins=5)
    axes.xaxis.set_major_formatter("{x:,.10g}")


def draw_alternatives(rows: Rows):
    """Draws speed and memory of each row as factors over the first one, the fastest first, and
    those too uncertain to rank last; of the speed with 95% intervals."""
    base, *others = rows
    shown = [row for row in others if row.factor and row.memory_factor]
    shown.sort(key=rank_of)
    if not shown:
        return None
    figure, [(subfigure, speed, memory)] = rows_of_panels(
        [f"{count_of_different(shown, base)}\n{place_of(rows.measured)}"],
        [1.8 + 0.36 * len(shown)],
        [1, 1],
    )
    draw_speed_factors(speed, shown)
    draw_memory_factors(memory, shown)
    colour_legend(subfigure)
    return figure


def count_of_different(rows: Sequence[Row], base: Row) -> str:
    """Returns how many variants are significantly faster, and how many slower, in a line."""
    faster, slower = (
        sum(row.significance == word for row in rows) for word in ("faster", "slower")
    )
    return f"{len(rows)} variants of {base.label}: {faster} significantly faster, {slower} slower"


def rank_of(row: Row) -> tuple[bool, float]:
    """Returns by what rows are sorted: the fastest first, those that aren't ranked last."""
    return row.speedup().is_wide, -(row.factor or 0)


def draw_speed_factors(axes, rows: list[Row]) -> None:
    """Draws times the speed of each row's reference, with its interval. The uncertain ones, if
    there are any, come last."""
    bars = [
        Bar(
            fill(row.label, 36, break_on_hyphens=False),
            row.factor,
            factor_text(row),
            significance_colour(row),
            whisker=row.interval or (),
        )
        for row in rows
    ]
    draw_bars(axes, bars)
    mark_no_change(axes)
    label = "× speed"
    if rows[-1].speedup().is_wide:
        label += WIDE_NOTE
    axes.set_xlabel(label)


def draw_memory_factors(axes, rows: list[Row]) -> None:
    """Draws times the memory of each row's reference."""
    factors = [row.memory_factor for row in rows]
    draw_bars(axes, [Bar("", factor, f"{factor:.2f}", MEMORY) for factor in factors])
    mark_no_change(axes)
    axes.set_xlabel("× memory, not tested")


def mark_no_change(axes) -> None:
    axes.axvline(1, color="0.7", linewidth=1, zorder=0)
