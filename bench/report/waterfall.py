"""The ladder as a waterfall: of each step only what it gains has a bar, from median to median."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from bench.analysis.rows import Row
from bench.common import REFERENCE, short_name
from bench.report import cards
from bench.report.names import called
from bench.report.pictures import (
    ERROR,
    OWN,
    UNSURE,
    keys,
    lay_rows,
    room_for,
    rows_of_panels,
    shorten,
)
from bench.report.tables import cell

CLEAR = 1.1  # the factor from which a published step, which has no interval, is drawn as a gain


class Step(NamedTuple):
    """From one script to the next."""

    speed: float | None = None
    before: float | None = None
    colour: str = UNSURE
    text: str = ""
    range: Sequence[float] = ()


def measured_steps(rows: list[Row]) -> list[Step]:
    """Of a machine's ladder."""
    found, before = [], None
    for row in rows:
        colour = {"faster": OWN, "slower": ERROR}.get(row.significance, UNSURE)
        text = (shorten(row.error, 40) if row.error else f"{row.factor:.2f}×" if row.factor else
                cell(row.tok_per_sec, ",.0f"))
        found.append(Step(row.tok_per_sec, before, colour, text, row.speeds))
        before = row.tok_per_sec or before
    return found


def published_steps(names: list[str]) -> list[Step]:
    """Of the scripts with these names in the ladder: the baseline, then each with its patch's."""
    plain = cards.published().stages["00"].tok_per_sec
    found = {step["patch"].name: Step(
        step["now"].tok_per_sec, step["now"].tok_per_sec / step["factor"],
        OWN if step["factor"] >= CLEAR else UNSURE, f"{step['factor']:.2f}×")
        for step in cards.steps() if step["now"] and step["now"].gpus == 1}
    return [Step(plain, text=f"{plain:,.0f}"), *(found.get(name, Step()) for name in names[1:])]


def draw(axes, steps: list[Step], inches: float) -> None:
    """A bar from the speed before each step to that after it, on a log scale."""
    from matplotlib.ticker import LogLocator

    lay_rows(axes, len(steps))
    axes.set_xscale("log")
    low = min(step.speed for step in steps if step.speed)
    last = max(place for place, step in enumerate(steps) if step.speed)
    texts, ends = [], []
    for place, step in enumerate(steps):
        if not step.speed:
            axes.annotate(step.text, (low, place), va="center", fontsize=9)
            continue
        before = step.before or step.speed
        axes.plot([before, step.speed], [place] * 2, color=step.colour, linewidth=11,
                  solid_capstyle="butt")
        axes.plot([step.speed] * 2, [place - 0.4, place + (1.4 if place < last else 0.4)],
                  color="0.45", linewidth=0.8)
        if len(step.range) > 1:
            axes.plot([min(step.range), max(step.range)], [place] * 2, "-", color="0.1",
                      linewidth=1)
        end = max(before, step.speed, *step.range)
        texts.append(step.text)
        ends.append(math.log(end / low) + 0.02)
        axes.annotate(step.text, (end, place), (5, 0), textcoords="offset points", va="center",
                      fontsize=10)
    axes.set_xlim(low / 1.08, low * math.exp(max(0.1, room_for(texts, ends, inches))))
    axes.xaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_xlabel("thousand tok/sec, log scale"
                    + "\nbars: medians, ×: means\nthin lines: range of the runs" * any(
                        len(step.range) > 1 for step in steps))


def panels(title: str, names: list[str], columns: list[tuple[str, list[Step]]]):
    """A figure with a waterfall in each column, below its heading."""
    figure, [(subfigure, *axes)] = rows_of_panels(
        [title], [1.8 + 0.3 * len(names)], [1] * len(columns))
    inches = 7.6 / len(columns)
    for place, (each, (heading, steps)) in enumerate(zip(axes, columns, strict=True)):
        draw(each, steps, inches)
        known = [step.speed for step in steps if step.speed]
        each.set_title(f"{heading}\n{known[0]:,.0f} → {known[-1]:,.0f} tok/sec", loc="left",
                       fontsize=11)
        if not place:
            each.set_yticks(range(len(names)), names)
    subfigure.legend(handles=keys({
        f"gain (measured: significant; published: {CLEAR}× or more)": OWN,
        "significant loss": ERROR, "no clear change": UNSURE}),
        loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    return figure


def names_of(rows: list[Row]) -> list[str]:
    """As they stand at the left: each technique's name and number."""
    names = []
    for row in rows:
        number, _, name = row.label.partition(" ")
        processes = f" × {row.run.processes}" * (row.run.processes > 1)
        name = called(row.run.name, name)
        names.append(f"{name}{processes} {number:\u2007>2}")  # a space as wide as a figure
    return names


def readme_picture():
    """The published ladder, and next to it those of the first machine of either kind, with a GPU
    and without, that have one from the baseline on."""
    ladders = [[row for row in rows if row.run.processes == 1]
               for rows in cards.ladders(REFERENCE / "amd-epyc-2-cores") if rows[0].tok_per_sec]
    ladders = [next(rows for rows in ladders if cards.has_gpu(rows[0]) == kind)
               for kind in (True, False)]
    longest = max(ladders, key=len)
    scripts = [row.run.name for row in longest]
    theirs = published_steps(scripts)
    known = [(float(step.text[:-1]), name) for step, name in zip(theirs, scripts, strict=True)
             if step.before]
    best = [f"{called(name, name)} {factor:.2f}×" for factor, name in sorted(known)[:-4:-1]]
    whole = [step.speed for step in theirs if step.speed]
    columns = [("GPT-2 124M, A100, published", theirs)]
    for rows in ladders:
        models = {row.record.config["model"] for row in rows if row.record}
        steps = dict(zip((row.run.name for row in rows), measured_steps(rows), strict=True))
        columns.append((f"{', '.join(models)}, {short_name(rows[0].measured.machine)}",
                        [steps.get(name, Step()) for name in scripts]))
    return panels(f"On one A100 (published): {whole[-1] / whole[0]:.1f} times as fast, most of it"
                  f" by {', '.join(best)}", names_of(longest), columns)
