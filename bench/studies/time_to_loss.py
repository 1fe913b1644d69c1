"""Seconds of training until the validation loss has fallen to a target."""

import math
from textwrap import fill

from bench.analysis.rows import Row, difference, rows_of
from bench.common import UserError
from bench.report.notes import machine_note
from bench.report.pictures import (
    COLOURS,
    add_legend,
    draw_bars,
    key,
    place_of,
    rows_of_panels,
    thousands,
)
from bench.report.tables import RUN, SPEED, Column, Table, bold, fmt, num_col, spread, text_col
from bench.studies import Study, search

TARGETS = {  # what they are
    "published": "the lowest validation loss of 00 in its default run",
    "best": "the lowest validation loss of 00 at its best learning rate",
    "epoch": "the lowest validation loss of 00 in one epoch of the text, at its best settings",
}
COLD_ROUNDS = 2  # later ones tell how long a second start takes
SCRIPTS = {"00": "00, baseline", "01": "01, optimized", "02": "01 with variants"}


class TimeToLoss(Study):
    """Measure the time to a loss, of 00, 01 and what a search found.

    The target is the lowest validation loss of 00's default run, of which --max-tokens is the
    length. After a search each of its scripts also runs at its best settings. Each round has a new
    seed. From the third round on, scripts find the compiler's cache warm."""

    title = "The time to a loss"
    place = 20
    in_report = ()  # it takes hours, and is only shown
    rounds = {"cuda": 3, "cpu": 3}
    tokens = None

    def options(self, parser):
        parser.add_argument("--names", metavar="A,B+C", help="variants to measure besides, at 01's"
                                                             " settings; + joins several")
        parser.add_argument("--epoch", action="store_true",
                            help="to the target of `search --epoch`, at the settings that it found")

    def runs(self, setup):
        """Returns 00, 01, and the variants that are asked for."""
        scripts, names = setup.scripts, setup.args.names
        first, last = scripts.stage("00"), scripts.stage("01").replace(compared_to="00_orig")
        others = scripts.variants(last, setup.machine, names=names)[1:] if names else []
        return [first, last, *others]

    def plans(self, setup):
        args, runs = setup.args, self.runs(setup)
        if args.epoch and args.names:
            raise UserError("--epoch measures what `search --epoch` found: leave --names out", 2)
        points, length = search.read_search(setup)
        if not points and args.epoch:
            raise UserError("there is no whole search for an epoch: python measure.py search"
                            " --epoch")
        if not points:
            run = search.default_point(setup).run(setup)
            (row,) = rows_of((yield search.plan_of(
                setup, [run], "target", tokens=args.max_tokens, rounds=2, **search.TUNING)))
            length = dict(targets={"published": row.lowest_val_loss}, tokens=search.limit_of(row))
        default = None if args.epoch else runs[0].name
        best = [point.run(setup) for point in points]  # 00's is the first
        best = [run.replace(compared_to=best[0].name if place else default)
                for place, run in enumerate(best)]
        yield search.plan_of(setup, best if args.epoch else [*runs, *best],
                      "epoch" if args.epoch else "variants" if args.names else "",
                      cold_rounds=COLD_ROUNDS, **length)

    def later(self, setup, plan):
        if plan.kind != "target":
            return []
        tokens = search.LIMIT * search.phases_of(setup, ())[0].tokens
        return [(search.plan_of(setup, self.runs(setup), "", tokens=tokens), 1)]

    def tables(self, measured, rows):
        return time_tables(rows, measured.plan.targets)

    def notes(self, measured, rows):
        how = "Medians over the seeds."
        if measured.plan.targets:
            how += (" Seconds of training, and of compilation with an empty cache, to the target."
                    " Speedups are the means of the seeds' ratios, with their 95 % intervals; bold:"
                    " significant over the whole table. A run that hasn't reached the target after"
                    f" {measured.plan.tokens:,} tokens ends; its speedup is a bound, and not"
                    " tested.")
            if any(row.warm_excess is not None for row in rows):
                how += " *Again*: a second start, which finds the compiler's cache."
        return [machine_note(measured, rows), how]

    def picture(self, measured, rows):
        """Draws the seconds to the last target, the one that settings were tuned for, compilation
        hatched, the slowest first; and the losses of 00, 01 and the fastest script over time."""
        if not measured.plan.targets:
            return None
        target = [*measured.plan.targets.values()][-1]
        rows = sorted(rows, key=lambda row: -(row.seconds_to(target, True) or math.inf))
        figure, [(subfigure, bars, curves)] = rows_of_panels(
            [title_of(rows, target) + place_of(measured)],
            [max(4.4, 2 + 0.5 * len(rows))], [3, 2])
        draw_seconds(bars, rows, target)
        draw_losses(curves, rows, target)
        add_legend(subfigure, {label: COLOURS[stage] for stage, label in SCRIPTS.items()}, key(
            "compilation", color="0.6", marker="s", linestyle="", markerfacecolor="white"))
        return figure


def title_of(rows: list[Row], target: float) -> str:
    """Returns the finding, where it is significant, and what a picture shows; the rows are sorted,
    the slowest first."""
    title = f"Seconds to a validation loss of {target:.2f}: "
    best = next((row for row in reversed(rows) if row.seconds_to(target, True)), None)
    if not best or best.speedup(target, True).significance != "faster":
        return title
    name, factor = best.label.partition(" --")[0], best.speedup(target, True).factor
    return f"{name}: {factor:.1f} times as fast as {best.reference.label}\n{title}"


def time_tables(rows: list[Row], targets: dict[str, float]) -> list[Table]:
    """Returns how long each run took to each target; without targets the losses that set one."""
    if not targets:
        return [Table([RUN, search.LOWEST_LOSS, SPEED], rows)]
    return [Table(time_columns(target, rows), rows, f"Target {target:.4f}, {TARGETS[name]}:",
                  every_column=True)
            for name, target in targets.items()]


def time_columns(target: float, rows: list[Row]) -> list[Column]:
    """Returns columns whose main factor counts compilation, as who waits for it does."""
    def seconds(row: Row) -> str:
        return row.error or fmt(row.seconds_to(target, True), ",.1f") or "not reached"

    def spread_of(row: Row) -> str:
        times = [seconds for _, seconds in row.times_to(target, True)] or [math.inf]
        return spread(times, ",.1f").replace("inf", "not reached") if min(times) < math.inf else ""

    def first_step(row: Row) -> str:
        extra = difference(row.seconds_to(target, True), row.seconds_to(target))
        return fmt(extra and max(0.0, extra), ".1f")  # it may be shorter than a median step

    def again(row: Row) -> str:
        seconds, excess = row.seconds_to(target), row.warm_excess
        return "" if seconds is None or excess is None else f"{seconds + max(0.0, excess):,.1f}"

    def factor(row: Row, with_first_step: bool = True) -> str:
        significance = row.speedup(target, with_first_step).significance
        return bold(speedup_of(row, target, with_first_step), significance)

    return [
        RUN, SPEED, num_col("× tok/sec", "factor", ".2f"),
        Column("tokens", lambda row: fmt(row.tokens_to(target), ",.0f")),
        Column("seconds", seconds), Column("range", spread_of),
        Column("× to the loss", factor),
        Column("95 %", lambda row: spread(row.speedup(target, True).interval, ".2f")),
        Column("first step, extra s", first_step),
        *([Column("again, s", again)] if any(row.warm_excess is not None for row in rows) else []),
        Column("× not counting compiling", lambda row: factor(row, with_first_step=False)),
        text_col("compared to", "reference.label"),
    ]


def speedup_of(row: Row, target: float, with_first_step: bool) -> str:
    """Returns "1.23", or a bound such as "> 1.23"; "" where it isn't known."""
    speedup = row.speedup(target, with_first_step)
    return f"{speedup.sign}{speedup.factor:.2f}" if speedup.factor else ""


def colour_of(row: Row) -> str:
    return COLOURS[row.run.stage if row.run.stage in ("00", "01") else "02"]


def draw_seconds(axes, rows: list[Row], target: float) -> None:
    """Draws a bar for each row, with its speedup over the row that it is compared to."""
    def text(row: Row) -> str:
        seconds, factor = row.seconds_to(target, True), speedup_of(row, target, True)
        if not seconds:
            return row.error or "not reached"
        return f"{seconds:,.1f} s" + (f", {factor}×" if factor else "")

    labels = [fill(row.label.replace("+", " + "), 36, break_on_hyphens=False) for row in rows]
    draw_bars(axes, labels, [row.seconds_to(target) for row in rows],
              [text(row) for row in rows], [colour_of(row) for row in rows],
              [[time for _, time in row.times_to(target) if time < math.inf] for row in rows],
              [row.seconds_to(target, True) or 0 for row in rows])
    axes.tick_params(axis="y", labelsize=9)
    axes.set_xlabel("seconds of training and compilation\n×: the speedup in the table")


def draw_losses(axes, rows: list[Row], target: float) -> None:
    others = [row for row in rows if row.records and colour_of(row) == COLOURS["02"]]
    for row in rows:
        if not row.record or row in others[:-1]:  # of the others only the fastest
            continue
        points = [(point.seconds, point.val_loss) for point in row.record.steady]
        axes.plot(*zip(*points, strict=True), linewidth=1.6, color=colour_of(row),
                  linestyle="-" if row.run.rate else "--")
    times = [seconds for row in rows for _, seconds in row.times_to(target) if seconds < math.inf]
    axes.set_xlim(0, 1.05 * max(times) if times else None)
    axes.set_ylim(target - 0.3, target + 3)
    axes.axhline(target, color="0.3", linewidth=1, linestyle=":")
    axes.set_xlabel("seconds of training,\nwithout compilation\ndashed: default settings")
    axes.set_ylabel("validation loss, nats per token")
    thousands(axes.xaxis)
