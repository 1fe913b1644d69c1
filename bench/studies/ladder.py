"""One technique more at a time."""

import math

from bench.pictures import (
    COLOURS,
    NOISE,
    OWN,
    PUBLISHED,
    draw_bars,
    key,
    lay_rows,
    place_of,
    rows_of_panels,
    shorten,
)
from bench.rows import Row, seed_noise
from bench.study import Column, Plan, Study, Table
from bench.tables import bold, cell, found_in, number, spread


class Ladder(Study):
    """00, then one technique more at a time, up to 01; on several GPUs also 02."""

    title = "The ladder: one technique more at a time"
    schedule = {30: 1, 50: None}

    def options(self, parser):
        parser.add_argument("--rungs", metavar="0,5-8",
                            help="which techniques, by their numbers (default: all)")

    def plans(self, setup):
        gpus = setup.machine["gpus"]
        runs = setup.scripts.rungs(gpus)[: None if gpus > 1 else -1]
        runs = setup.scripts.chosen(setup.args.rungs, runs)
        for k in range(1, len(runs)):
            runs[k] = runs[k].but(compared_to=runs[k - 1].name)
        yield Plan(runs, seed_noise=True, **self.length(setup))

    def excerpts(self, measured, rows):
        def speed(row: Row) -> str:
            values = spread(row.speeds)
            return cell(row.tok_per_sec, ",.0f") + f" ({values})" * bool(values)

        left_out = {row.tags.get("without"): row
                    for _, found in found_in(measured.folder, "leave-one-out") for row in found}

        def in_01(row: Row) -> str:
            without = left_out.get(row.run.name)
            if not without or without.error:
                return without.error.partition(":")[0] if without else ""  # "conflict", "failed"
            return bold(cell(without.technique_factor, ".2f"), without.verdict)

        return {"ladder": [Table([
            Column("#", lambda row: str(row.tags["rung"])),
            Column("technique", lambda row: row.technique, True),
            Column("tok/sec (range)", speed),
            number("× before", "factor", ".2f"),
            number("A100", "published_factor", ".2f"),
            number("× baseline", "factor_baseline", ".2f"),
            Column("× in 01", in_01),
            number("GB", "reserved_gb", ".2f"),
            number("val loss", "val_loss", ".3f"),
            Column("verdict", lambda row: row.error or bold(row.verdict or "", row.verdict), True),
        ], rows)]}

    def draw(self, measured, rows):
        """Three panels with a row for each rung: tok/sec, factors over the baseline, and losses."""
        figure, [(subfigure, *panels)] = rows_of_panels(
            [f"The ladder on {place_of(measured)}"],
            [1.3 + 0.36 * len(rows)], [30, 16, 13],
        )
        speed, factors, losses = panels
        lay_rows(factors, len(rows))
        lay_rows(losses, len(rows))
        noise = seed_noise(rows[0])
        draw_speeds(speed, rows)
        draw_factors(factors, rows)
        draw_losses(losses, [row.val_loss for row in rows], noise)
        keys = [key("published, A100", color=PUBLISHED, linewidth=8),
                key("this machine", color=OWN, marker="o", linestyle="")]
        if noise:
            keys.append(key("seed noise", color=NOISE, linewidth=8))
        subfigure.legend(handles=keys, loc="outside lower right", ncols=3, frameon=False)
        return figure


def draw_speeds(axes, rows: list[Row]) -> None:
    def text(row: Row) -> str:
        if not row.tok_per_sec:
            return shorten(row.error or "", 40)
        notes = [(row.factor_baseline, "×"), (row.reserved_gb, " GB")]
        notes = ", ".join(f"{x:.2f}{unit}" for x, unit in notes if x is not None)
        return f"{row.tok_per_sec:,.0f}" + f"  ({notes})" * bool(notes) + ", failed" * bool(
            row.error)

    names = []
    for row in rows:
        number, _, name = row.label.partition(" ")
        processes = f" × {row.run.processes}" * (row.run.processes > 1)
        names.append(f"{name}{processes} {number:\u2007>2}")  # a space as wide as a figure
    colours = [COLOURS["00" if row.tags["rung"] == 0 else "02" if row.run.torchrun else "01"]
               for row in rows]
    draw_bars(axes, names, [row.tok_per_sec for row in rows], list(map(text, rows)), colours, 3.6,
              [row.speeds for row in rows])
    rounds = max(row.rounds for row in rows)
    axes.set_xlabel("tok/sec" + f", median and range of {rounds} rounds" * (rounds > 1))


def draw_factors(axes, rows: list[Row]) -> None:
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    known = [1]
    for place, row in enumerate(rows):
        ours, theirs = row.factor_baseline, row.published_factor_baseline
        if not place:  # it has no factor over itself
            ours, theirs = row.tok_per_sec and 1, None
        known += filter(None, (theirs, ours))
        if theirs:
            axes.barh(place, theirs - 1, 0.7, left=1, color=PUBLISHED)
            axes.annotate(f"{theirs:.2f}×", (max(theirs, ours or 1), place), (8, 0), va="center",
                          textcoords="offset points", fontsize=10, color="0.4")
        if ours:
            axes.plot(ours, place, "o", color=OWN, markersize=6)
    axes.set_xscale("log", base=2)
    axes.axvline(1, color="0.5", linewidth=1)
    axes.set_xlim(0.8 * min(known), 1.2 * max(known) ** 1.45)  # room for the figures at the right
    axes.xaxis.set_major_locator(LogLocator(4, numticks=7))
    axes.xaxis.set_minor_locator(LogLocator(2, numticks=13))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}×"))
    axes.xaxis.set_minor_formatter("")
    axes.set_xlabel("factor over the baseline")


def draw_losses(axes, losses: list[float | None], noise: float | None) -> None:
    """A point for each rung; one far off the baseline stands at the edge, with its figure."""
    from matplotlib.ticker import MaxNLocator

    baseline = losses[0]
    reach = 4 * noise if noise and baseline is not None else math.inf
    for place, loss in enumerate(losses):
        if loss is None:
            continue
        if reach == math.inf or abs(loss - baseline) <= reach:
            axes.plot(loss, place, "o", color=OWN, markersize=5)
            continue
        edge, marker, side, inwards = (
            (baseline + reach, ">", "right", -6) if loss > baseline
            else (baseline - reach, "<", "left", 6))
        axes.plot(edge, place, marker, color=OWN, markersize=6)
        axes.annotate(f"{loss:.2f}", (edge, place), (inwards, 0), textcoords="offset points",
                      va="center", ha=side, fontsize=10)
    if reach != math.inf:
        axes.axvspan(baseline - noise, baseline + noise, color=NOISE, linewidth=0, zorder=0)
        axes.set_xlim(baseline - 1.2 * reach, baseline + 1.2 * reach)
    axes.xaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))
    axes.margins(x=0.15)
    axes.set_xlabel("validation loss, nats")
