"""One technique more at a time."""

from bench.judge.rows import Row
from bench.measure.plan import EVERY_ROUND
from bench.report.pictures import (
    ERROR,
    OWN,
    PUBLISHED,
    UNSURE,
    draw_bars,
    key,
    lay_rows,
    place_of,
    rows_of_panels,
    shorten,
)
from bench.report.tables import Column, Table, bold, cell, number, spread, within_01
from bench.studies import Study


class Ladder(Study):
    """00, then one technique more at a time, up to 01; on several GPUs also 02."""

    title = "The ladder: one technique more at a time"
    schedule = {30: 1, 50: None}
    rounds = {"cuda": 4, "cpu": 6}  # 4 rounds miss gains of 15 % in a CPU's noise
    settings = dict(seed_noise=1, cold_rounds=EVERY_ROUND)
    two_stages = True

    def options(self, parser):
        parser.add_argument("--rungs", metavar="0,5-8",
                            help="which techniques, by their numbers (default: all)")

    def runs(self, setup):
        gpus = setup.machine["gpus"]
        runs = setup.scripts.rungs(gpus)[: None if gpus > 1 else -1]
        runs = setup.scripts.chosen(setup.args.rungs, runs)
        return [run.but(compared_to=before and before.name)
                for before, run in zip([None, *runs], runs, strict=False)]

    def excerpts(self, measured, rows):
        def speed(row: Row) -> str:
            values = spread(row.speeds)
            return cell(row.tok_per_sec, ",.0f") + f" ({values})" * bool(values)

        in_01 = within_01(measured.folder)
        return {"ladder": [Table([
            Column("#", lambda row: str(row.run.rung)),
            Column("technique", lambda row: row.technique, True),
            Column("tok/sec (range)", speed),
            number("× before", "factor", ".2f"),
            number("A100", "published_factor", ".2f"),
            number("× baseline", "factor_baseline", ".2f"),
            Column("× in 01", lambda row: in_01.get(row.run.name, "")),
            number("GB", "reserved_gb", ".2f"),
            number("val loss", "val_loss", ".3f"),
            Column("verdict", lambda row: row.error or bold(row.verdict or "", row.verdict), True),
        ], rows)]}

    def draw(self, measured, rows):
        """Three panels with a row for each rung: tok/sec, the factor over the baseline beside the
        published one, and memory. What is faster or slower has a colour of its own."""
        figure, [(subfigure, *panels)] = rows_of_panels(
            [finding(measured, rows)], [1.3 + 0.36 * len(rows)], [30, 17, 13])
        speed, factors, memory = panels
        draw_speeds(speed, rows)
        lay_rows(factors, len(rows))
        draw_factors(factors, rows)
        draw_bars(memory, [""] * len(rows), [row.reserved_gb for row in rows],
                  [cell(row.reserved_gb, ".2f") for row in rows], [UNSURE] * len(rows), 1.6)
        memory.set_xlabel("reserved memory, GB")
        subfigure.legend(handles=[
            key(label, color=colour, linewidth=8) for label, colour in (
                ("faster", OWN), ("slower", ERROR),
                ("no measurable change", UNSURE), ("published, A100", PUBLISHED))
            ] + [key("this machine", color=OWN, marker="o", linestyle="")],
            loc="outside lower right", ncols=5, frameon=False, fontsize=10)
        return figure


def finding(measured, rows: list[Row]) -> str:
    """A title: what is faster. Without verdicts it claims nothing."""
    sure = sorted((row for row in rows if row.verdict == "faster"), key=lambda row: -row.factor)
    if not sure:
        return f"The ladder on {place_of(measured)}"
    names = [f"{row.label.partition(' ')[2]} {row.factor:.2f}×" for row in sure]
    rest = f" and {len(names) - 3} more" * (len(names) > 3)
    return f"Measurably faster: {', '.join(names[:3])}{rest}\n{place_of(measured)}"


def draw_speeds(axes, rows: list[Row]) -> None:
    def text(row: Row) -> str:
        if not row.tok_per_sec:
            return shorten(row.error or "", 40)
        factor = cell(row.factor, ".2f")
        return (f"{row.tok_per_sec:,.0f}" + f"  ({factor}×)" * bool(factor)
                + ", failed" * bool(row.error))

    names = []
    for row in rows:
        number, _, name = row.label.partition(" ")
        processes = f" × {row.run.processes}" * (row.run.processes > 1)
        names.append(f"{name}{processes} {number:\u2007>2}")  # a space as wide as a figure
    colours = [{"faster": OWN, "slower": ERROR}.get(row.verdict, UNSURE) for row in rows]
    draw_bars(axes, names, [row.tok_per_sec for row in rows], list(map(text, rows)), colours, 3.6,
              [row.speeds for row in rows])
    rounds = max(row.rounds for row in rows)
    axes.set_xlabel("tok/sec" + f", median and range of {rounds} rounds" * (rounds > 1)
                    + "\n(× the row above)")


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
    axes.set_xlabel("factor over the baseline\n(log scale)")
