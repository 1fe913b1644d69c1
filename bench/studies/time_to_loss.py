"""Seconds of training until the validation loss has fallen to a target."""

import math
import textwrap

from bench.analysis.rows import Row, rate_to, rows_of
from bench.catalogue import Run
from bench.common import UserError
from bench.measure.plan import EVERY_ROUND, Setup
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
from bench.studies.times import speedup_of, time_notes, time_tables


class TimeToLoss(Study):
    """How long 00 and 01 train until their validation loss has fallen to the lowest of 00's default
    run; after a search also what it has found: each of its scripts at its best settings."""

    title = "The time to a loss"
    schedule = {20: 0}
    rounds = {"cuda": 3, "cpu": 3}
    tokens, has_seconds = None, False
    rounds_help = "how many seeds: 123, 124 and so on (default: {})"
    max_tokens_help = MAX_TOKENS_HELP
    rungs_help = "which rungs of the ladder (default: 00 and 01)"
    names_help = "variants to measure besides, at 01's settings; + joins several into one script"

    def options(self, parser):
        super().options(parser)
        parser.add_argument("--epoch", action="store_true", help=EPOCH_HELP + "; after `search"
                                                                               " --epoch`")

    def stages(self, setup: Setup) -> list[Run]:
        """Returns 00 and 01, or the rungs that are asked for."""
        scripts, rungs = setup.scripts, setup.args.rungs
        if rungs:
            return scripts.chosen(rungs, scripts.rungs()[:-1])
        return [scripts.stage("00"), scripts.stage("01")]

    def variants(self, setup: Setup) -> list[Run]:
        scripts, names = setup.scripts, setup.args.names
        if not names:
            return []
        return scripts.variants(scripts.stage("01"), setup.machine, names=names)[1:]

    def plans(self, setup):
        args = setup.args
        if args.epoch and (args.rungs or args.names):
            raise UserError("--epoch measures the scripts of `search --epoch`: it takes neither"
                            " --rungs nor --names", 2)
        runs, variants = self.stages(setup), self.variants(setup)
        found = read_search(setup)
        if args.epoch:
            first, *others = [point.run(setup) for point in found.points.values()]
            yield plan_of(setup, [first, *(run.but(compared_to=first.name) for run in others)],
                          "epoch", tokens=found.tokens, targets=found.targets,
                          cold_rounds=EVERY_ROUND)
            return
        if not found:
            (row,) = rows_of((yield plan_of(
                setup, [default_point(setup).run(setup)], "target", tokens=args.max_tokens,
                rounds=TUNING_ROUNDS, **TUNING)))
            found = Found({"published": row.lowest_val_loss}, {}, limit_of(row))
        first, last = runs[0].name, runs[-1].name
        runs = [runs[0].but(compared_to=None), *(run.but(compared_to=first) for run in runs[1:]),
                *(run.but(compared_to=last) for run in variants)]
        for stage, point in found.points.items():  # all at their best: over 00 at its best
            runs.append(point.run(setup).but(compared_to=first))
            if stage == "00":
                first = runs[-1].name
        yield plan_of(setup, runs, "variants" if variants else "", tokens=found.tokens,
                      targets=found.targets, cold_rounds=EVERY_ROUND)

    def later(self, setup, plan):
        if plan.kind != "target":
            return []
        return [(plan_of(setup, [*self.stages(setup), *self.variants(setup)], "",
                         tokens=LIMIT * (plan.tokens or tokens_of_default(setup))), 1)]

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
        compilation hatched, the slowest first; and the losses over time, of a median seed, of 00,
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
    stage = row.run.stage if row.run.rung is None else "01" if row.run.rung else "00"
    return COLOURS[stage if stage in ("00", "01") else "02"]


def title_of(measured, rows: list[Row], target: float) -> str:
    """Returns a title with the finding, where the noise among the seeds allows one; the rows are
    sorted."""
    title, rate = f"Seconds to a validation loss of {target:.2f}: {place_of(measured)}", rate_to(
        target, True)
    best = next((row for row in reversed(rows) if row.seconds_to(target, True)), None)
    if not best or best.significance_of(rate) != "faster":
        return title
    name = best.run.stage if best.run.rate else best.label.partition(" --")[0]
    times = best.factor_of(rate, best.versus)
    return f"{name}: {times:.1f} times as fast as {called(best.versus)}\n{title}"


def called(row: Row) -> str:
    """Returns its script, and its settings after ", "."""
    if row.run.rate:
        return row.label.replace(", rate ", ", learning rate ")
    script, dashes, options = row.label.partition(" --")
    return f"{script}, {dashes.strip()}{options or 'default settings'}"


def in_lines(row: Row) -> str:
    """Returns that in lines that leave room for a bar."""
    return "\n".join(line for part in called(row).replace("+", " + ").split(", ", 1)
                     for line in textwrap.wrap(part, 36, break_on_hyphens=False))


def draw_seconds(axes, rows: list[Row], target: float) -> None:
    """Draws a bar for each row, with its factor over the row that it is compared to."""
    compared = [row.versus.run.name for row in rows if row.versus]
    usual = max(compared, key=compared.count, default=None)

    def text(row: Row) -> str:
        own = row.seconds_to(target, True)
        if not own:
            return row.error or "not reached"
        factor = speedup_of(row, target, True)
        if not factor:
            return f"{own:,.1f} s"
        other = f" over {row.versus.label}" if row.versus.run.name != usual else ""
        return f"{own:,.1f} s, {factor}×{other}"

    draw_bars(axes, list(map(in_lines, rows)),
              [row.seconds_to(target) for row in rows], list(map(text, rows)),
              list(map(colour_of, rows)), 2.9,
              [[time for _, time in row.times_to(target) if time < math.inf] for row in rows],
              [row.seconds_to(target, True) or 0 for row in rows])
    axes.tick_params(axis="y", labelsize=9)
    axes.set_xlabel("seconds of training and compilation" + "".join(
        f"\n×: over {called(row)}" for row in rows if row.run.name == usual))


def draw_losses(axes, rows: list[Row], target: float) -> None:
    others = [row for row in rows if row.records and colour_of(row) == COLOURS["02"]]
    drawn = [row for row in rows if row.records and row not in others[:-1]]  # of them the fastest
    tuned = any(row.run.rate for row in drawn)
    for row in drawn:
        records = sorted(row.records, key=lambda record: (
            record.reached(target) or (math.inf, math.inf))[1])
        record = records[(len(records) - 1) // 2]
        points = [(point.seconds - record.first_step_excess, point.val_loss)
                  for point in record.curve if point.val_loss is not None]
        axes.plot(*zip(*points, strict=True), linewidth=1.6, color=colour_of(row),
                  linestyle="--" if tuned and not row.run.rate else "-")
    times = [seconds for row in rows for _, seconds in row.times_to(target) if seconds < math.inf]
    if times:
        axes.set_xlim(0, 1.05 * max(times))
    axes.set_ylim(target - 0.3, target + 3)
    axes.axhline(target, color="0.3", linewidth=1, linestyle=":")
    dashed = tuned and not all(row.run.rate for row in drawn)
    axes.set_xlabel("seconds of training,\nwithout compilation"
                    + ("\ndashed: default settings" if dashed else ""))
    axes.set_ylabel("validation loss, nats per token")
    thousands(axes.xaxis)
