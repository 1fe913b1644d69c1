"""Seconds of training until the validation loss has fallen to a target."""

import math
from textwrap import fill

from bench.analysis.rows import Row, rows_of
from bench.common import UserError
from bench.measure.plan import EVERY_ROUND
from bench.report.pictures import COLOURS, draw_bars, key, keys, place_of, rows_of_panels, thousands
from bench.report.tables import markdown, rows_in
from bench.studies import Study
from bench.studies.search import (
    EPOCH_HELP,
    LIMIT,
    MAX_TOKENS_HELP,
    TUNING,
    TUNING_ROUNDS,
    Found,
    default_point,
    limit_of,
    plan_of,
    read_search,
    tokens_of_default,
)
from bench.studies.settings import speedup_of, time_notes, time_tables


class TimeToLoss(Study):
    """Measure the time to a loss, of 00, 01 and what a search found.

    The target is the lowest validation loss of 00's default run. After a search each of its scripts
    also runs at its best settings."""

    title = "The time to a loss"
    schedule = {20: 0}
    rounds = {"cuda": 3, "cpu": 3}
    tokens, has_seconds = None, False
    rounds_help = "how many seeds: 123, 124 and so on (default: {})"
    max_tokens_help = MAX_TOKENS_HELP
    names_help = "variants to measure besides, at 01's settings; + joins several into one script"

    def options(self, parser):
        super().options(parser)
        parser.add_argument("--epoch", action="store_true", help=EPOCH_HELP + "; after `search"
                                                                               " --epoch`")

    def runs(self, setup):
        """Returns 00, 01, and the variants that are asked for."""
        scripts, names = setup.scripts, setup.args.names
        first, last = scripts.stage("00"), scripts.stage("01").replace(compared_to="00_orig")
        if not names:
            return [first, last]
        return [first, last, *scripts.variants(last, setup.machine, names=names)[1:]]

    def plans(self, setup):
        args, runs = setup.args, self.runs(setup)
        if args.epoch and args.names:
            raise UserError("--epoch measures what `search --epoch` found: leave --names out", 2)
        found = read_search(setup)
        if not found:
            (row,) = rows_of((yield plan_of(
                setup, [default_point(setup).run(setup)], "target", tokens=args.max_tokens,
                rounds=TUNING_ROUNDS, **TUNING)))
            found = Found({"published": row.lowest_val_loss}, {}, limit_of(row))
        kind = "epoch" if args.epoch else "variants" if args.names else ""
        best = [point.run(setup) for point in found.points.values()]  # 00's is the first
        first = None if args.epoch else runs[0].name
        best = [run.replace(compared_to=best[0].name if place else first)
                for place, run in enumerate(best)]
        yield plan_of(setup, best if args.epoch else [*runs, *best], kind, tokens=found.tokens,
                      targets=found.targets, cold_rounds=EVERY_ROUND)

    def later(self, setup, plan):
        if plan.kind != "target":
            return []
        tokens = LIMIT * (plan.tokens or tokens_of_default(setup))
        return [(plan_of(setup, self.runs(setup), "", tokens=tokens), 1)]

    def tables(self, measured, rows):
        return time_tables(rows, measured.plan.targets)

    def notes(self, measured, rows):
        return time_notes(measured, rows)

    def extra(self, folder, found):
        """Returns, without a measurement, what the records of the three stages say."""
        rows = [] if found else rows_in(folder, "stages")
        if not rows or not rows[0].record or not rows[0].record.lowest_val_loss:
            return ""
        (table,) = time_tables(rows, {"published": rows[0].record.lowest_val_loss})
        return (f"From the records of the three stages. {markdown(table)}\n"
                "Not reached: not within the length of that run; `measure.py time-to-loss` trains"
                " for longer, and with several seeds.\n")

    def draw(self, measured, rows):
        """Draws the seconds to the target that settings were tuned for, or else to the only one,
        compilation hatched, the slowest first; and the losses over time, of the first seed, of 00,
        01 and the fastest script."""
        targets = measured.plan.targets
        if not targets:
            return None
        target = [*targets.values()][-1]
        rows = sorted(rows, key=lambda row: -(row.seconds_to(target, True) or math.inf))
        lines = max(in_lines(row).count("\n") + 1 for row in rows)
        figure, [(subfigure, bars, curves)] = rows_of_panels(
            [title_of(measured, rows, target)],
            [max(4.4, 2 + (0.1 + 0.16 * lines) * len(rows))], [3, 2])
        draw_seconds(bars, rows, target)
        draw_losses(curves, rows, target)
        subfigure.legend(handles=[
            *keys({label: COLOURS[stage] for stage, label in NAMES.items()}),
            key("compilation", color="0.6", marker="s", linestyle="", markerfacecolor="white")],
            loc="outside lower center", ncols=4, frameon=False)
        return figure


NAMES = {"00": "00, baseline", "01": "01, optimized", "02": "01 with options"}


def colour_of(row: Row) -> str:
    stage = row.run.stage if row.run.number is None else "01" if row.run.number else "00"
    return COLOURS[stage if stage in ("00", "01") else "02"]


def title_of(measured, rows: list[Row], target: float) -> str:
    """Returns a title with the finding, where the noise among the seeds allows one; the rows are
    sorted."""
    title = f"Seconds to a validation loss of {target:.2f}: {place_of(measured)}"
    best = next((row for row in reversed(rows) if row.seconds_to(target, True)), None)
    if not best or best.speedup(target, True).significance != "faster":
        return title
    name, times = best.label.partition(" --")[0], best.speedup(target, True).factor
    return f"{name}: {times:.1f} times as fast as {best.reference.label}\n{title}"


def in_lines(row: Row) -> str:
    """Returns its label in lines that leave room for a bar."""
    return fill(row.label.replace("+", " + "), 36, break_on_hyphens=False)


def draw_seconds(axes, rows: list[Row], target: float) -> None:
    """Draws a bar for each row, with its factor over the row that it is compared to."""
    compared = [row.reference.run.name for row in rows if row.reference]
    usual = max(compared, key=compared.count, default=None)

    def text(row: Row) -> str:
        own = row.seconds_to(target, True)
        if not own:
            return row.error or "not reached"
        factor = speedup_of(row, target, True)
        if not factor:
            return f"{own:,.1f} s"
        other = f" over {row.reference.label}" if row.reference.run.name != usual else ""
        return f"{own:,.1f} s, {factor}×{other}"

    draw_bars(axes, list(map(in_lines, rows)),
              [row.seconds_to(target) for row in rows], list(map(text, rows)),
              list(map(colour_of, rows)), 2.9,
              [[time for _, time in row.times_to(target) if time < math.inf] for row in rows],
              [row.seconds_to(target, True) or 0 for row in rows])
    axes.tick_params(axis="y", labelsize=9)
    axes.set_xlabel("seconds of training and compilation" + "".join(
        f"\n×: over {row.label}" for row in rows if row.run.name == usual))


def draw_losses(axes, rows: list[Row], target: float) -> None:
    others = [row for row in rows if row.records and colour_of(row) == COLOURS["02"]]
    for row in rows:
        if not row.record or row in others[:-1]:  # of the others only the fastest
            continue
        points = [(point.seconds - row.record.first_step_excess, point.val_loss)
                  for point in row.record.curve if point.val_loss is not None]
        axes.plot(*zip(*points, strict=True), linewidth=1.6, color=colour_of(row),
                  linestyle="-" if row.run.rate else "--")
    times = [seconds for row in rows for _, seconds in row.times_to(target) if seconds < math.inf]
    axes.set_xlim(0, 1.05 * max(times) if times else None)
    axes.set_ylim(target - 0.3, target + 3)
    axes.axhline(target, color="0.3", linewidth=1, linestyle=":")
    axes.set_xlabel("seconds of training,\nwithout compilation\ndashed: default settings")
    axes.set_ylabel("validation loss, nats per token")
    thousands(axes.xaxis)
