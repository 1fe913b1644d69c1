"""Seconds of training until the validation loss has fallen to a target."""

import math
from argparse import ArgumentParser
from collections.abc import Generator, Sequence
from functools import partial
from textwrap import fill

from bench.analysis.rows import Goal, Row, Rows
from bench.analysis.tuning import DEFAULT_LOSS, is_tuned
from bench.catalogue import EPOCHS, Run
from bench.measure.measurement import Measurement
from bench.measure.plan import Plan, Setup
from bench.measure.sizing import DEMO_TOKENS, tokens_per_epoch
from bench.report.notes import machine_note
from bench.report.pictures import (
    COLOURS,
    OTHER,
    Bar,
    add_legend,
    draw_bars,
    key,
    place_of,
    rows_of_panels,
    script_colour,
)
from bench.report.tables import RUN, SPEED
from bench.report.to_loss import LOWEST_LOSS, factor_or_bound, settings_in_words, time_columns
from bench.studies import Plans, Study, search
from gpt_speed.common import UserError
from gpt_speed.tables import Table, fmt

LIMIT = 3  # a run of so many times the tokens of 00's default run hasn't reached the target
LOG_TOKENS = {"cuda": 40_960, "cpu": 4_096}  # from one log line to the next, of such runs
COLD_ROUNDS = 2  # later ones tell how long a second start takes


class TimeToLoss(Study):
    """Measure the time to a loss, of 00, 01 and variants.

    The target is the lowest validation loss of 00's default run, of which --max-tokens is
    the length. Each round has a new seed. From the third round on, scripts find the
    compiler's cache warm."""

    title = "The time to a loss"
    position = 20
    report_options = ()  # it takes hours, and is only shown
    rounds = {"cuda": 3, "cpu": 3}
    tokens = None

    def options(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--names",
            metavar="A,B+C",
            help="variants to measure besides, at 01's settings; + joins several",
        )
        parser.add_argument(
            "--epoch",
            action="store_true",
            help="to the target of a search, at the settings best there",
        )

    def runs(self, setup: Setup) -> list[Run]:
        """Returns 00, 01, and the variants that are asked for."""
        scripts, names = setup.scripts, setup.args.names
        first, last = scripts.stage("00"), scripts.stage("01").replace(compared_to="00_orig")
        if not names:
            return [first, last]
        return [first, last, *scripts.variants(last, setup.machine, names=names.split(","))]

    def plans(self, setup: Setup) -> Plans:
        if setup.args.epoch:
            yield plan_after_search(setup)
            return
        runs = self.runs(setup)
        length = yield from self.target(setup, runs[0])
        kind = ""
        if setup.args.names:
            kind = "variants"
        yield plan_to_target(runs, kind, LOG_TOKENS[setup.device], length)

    def target(self, setup: Setup, base: Run) -> Generator[Plan, Measurement, dict]:
        """Yields the plan of 00's default run. Returns the loss that it comes to as the target, and
        the length of runs to it, as fields of Plan. Raises UserError where it failed."""
        log_tokens, tokens = LOG_TOKENS[setup.device], setup.args.max_tokens
        plan = search.whole_runs(
            [base], "target", tokens=tokens, log_tokens=log_tokens, rounds=2, **search.TUNING
        )
        measured = yield plan
        (row,) = Rows(measured)
        if not row.record or row.lowest_val_loss is None:
            raise UserError(f"there is no target, since 00's default run failed: {row.error}")
        return dict(
            targets={DEFAULT_LOSS: row.lowest_val_loss},
            tokens=LIMIT * row.record.logs[-1]["tokens"],
        )

    def later(self, setup: Setup, plan: Plan) -> list[Plan]:
        if plan.kind != "target":
            return []
        tokens = setup.args.max_tokens or tokens_of_default_run(setup)
        log_tokens = LOG_TOKENS[setup.device]
        return [
            search.whole_runs(self.runs(setup), "", log_tokens=log_tokens, tokens=LIMIT * tokens)
        ]

    def tables(self, rows: Rows) -> list[Table]:
        """Returns how long each run took to each target; without, the losses that set one."""
        if not rows.measured.plan.targets:
            return [Table([RUN, LOWEST_LOSS, SPEED], rows)]
        return [
            Table(
                time_columns(target, rows),
                rows,
                f"Target {target:.4f}, {what}:",
                every_column=True,
            )
            for what, target in rows.measured.plan.targets.items()
        ]

    def notes(self, rows: Rows) -> list[str]:
        how = "Medians over the seeds."
        if rows.measured.plan.targets:
            how += (
                " Seconds of training, and of compilation with an empty cache, to the target."
                " Speedups are the means of the seeds' ratios, with their 95% intervals; bold:"
                " significant over the whole table. A run that hasn't reached the target after"
                f" {rows.measured.plan.tokens:,} tokens ends; its speedup is a bound, and not"
                " tested."
            )
            if any(row.warm_excess is not None for row in rows):
                how += " *Again*: a second start, which finds the compiler's cache."
        return [machine_note(rows), how]

    def picture(self, rows: Rows):
        """Draws the speed, and the seconds to the last target, the one that settings were
        tuned for, compilation hatched: 00 on top, then the slowest first."""
        if not rows.measured.plan.targets:
            return None
        target = list(rows.measured.plan.targets.values())[-1]
        ordered = in_order(rows, target)
        title = title_with_finding(ordered, target) + place_of(rows.measured)
        figure, [(subfigure, speed, time)] = rows_of_panels([title], [2 + 0.5 * len(rows)], [2, 3])
        draw_speeds(speed, ordered)
        draw_times(time, ordered, target)
        add_legend(
            subfigure,
            {
                "00, baseline": COLOURS["00"],
                "01, optimized": COLOURS["01"],
                "01 with variants": OTHER,
            },
            key("compilation, warm-up", facecolor="white", edgecolor="0.6", hatch="///"),
        )
        return figure


def plan_after_search(setup: Setup) -> Plan:
    """Returns the plan of the runs to the target of a search, at the settings best there. Raises
    UserError, OSError as search.read_search."""
    if setup.args.names:
        raise UserError("--epoch measures what a search found: leave --names out", 2)
    settings, length = search.read_search(setup)
    first, *others = [search.run_at(setting, setup) for setting in settings]
    runs = [first, *(run.replace(compared_to=first.name) for run in others)]
    return plan_to_target(runs, "epoch", search.LOG_TOKENS[setup.device], length)


def plan_to_target(runs: list[Run], kind: str, log_tokens: int, length: dict) -> Plan:
    """Returns the plan of runs to a target; `length` has that, and when they end without it, as
    fields of Plan."""
    return search.whole_runs(runs, kind, log_tokens=log_tokens, cold_rounds=COLD_ROUNDS, **length)


def tokens_of_default_run(setup: Setup) -> int:
    """Returns how many tokens 00 trains on where no option says it, about."""
    if setup.machine["gpus"]:
        return EPOCHS * tokens_per_epoch(setup.data)
    return DEMO_TOKENS


def in_order(rows: Sequence[Row], target: float) -> list[Row]:
    """Returns 00 first, then the slowest to the target before the faster ones."""
    baseline = [row for row in rows if row.run.stage == "00"]
    others = [row for row in rows if row.run.stage != "00"]
    others.sort(key=partial(seconds_or_never, target=target), reverse=True)
    return baseline + others


def seconds_or_never(row: Row, target: float) -> float:
    """Returns the seconds to the target; infinity where the row hasn't reached it."""
    return row.seconds_to(target, with_first_step=True) or math.inf


def draw_speeds(axes, rows: list[Row]) -> None:
    bars = [
        Bar(
            fill(name_of_bar(row), 36, break_on_hyphens=False),
            row.tok_per_sec,
            fmt(row.tok_per_sec, ",.0f"),
            script_colour(row.run),
            whisker=row.speeds,
        )
        for row in rows
    ]
    draw_bars(axes, bars)
    axes.tick_params(axis="y", labelsize=9)
    axes.set_xlabel("tokens per second")
    axes.locator_params(axis="x", nbins=3)


def name_of_bar(row: Row) -> str:
    """Returns a script's name; with settings of a search, in words."""
    if is_tuned(row.run):
        return settings_in_words(row)
    return row.label.replace("+", " + ")


def draw_times(axes, rows: list[Row], target: float) -> None:
    bars = [
        Bar(
            "",
            row.seconds_to(target),
            time_text(row, target),
            script_colour(row.run),
            whisker=[arrival.training for arrival in row.arrivals(target) if not arrival.missed],
            behind=row.seconds_to(target, with_first_step=True) or 0,
        )
        for row in rows
    ]
    draw_bars(axes, bars)
    axes.set_xlabel("seconds of training and compilation\n×: the speedup in the table")


def title_with_finding(rows: list[Row], target: float) -> str:
    """Returns what a picture shows, and before it the finding: how soon the best script reaches the
    loss, or else 01, and 00, where they differ significantly."""
    title = f"Speed, and seconds to a validation loss of {target:.2f}: "
    best = min(rows, key=partial(seconds_or_never, target=target))
    optimized = [row for row in rows if row.run.stage == "01"]
    goal = Goal(target, with_first_step=True)
    speedups = [row.speedup(goal) for row in (best, *optimized)]
    speedup = next((speedup for speedup in speedups if speedup.is_significant), None)
    if not speedup or not speedup.over:
        return title
    one, other = (seconds_of(row, target) for row in (speedup.row, speedup.over))
    return f"{one} to the loss, {other}\n{title}"


def seconds_of(row: Row, target: float) -> str:
    """Returns "01 takes 27.0 s", of a script without its settings."""
    seconds = row.seconds_to(target, with_first_step=True)
    return f"{row.run.stage or row.run.script} takes {fmt(seconds, ',.1f')} s"


def time_text(row: Row, target: float) -> str:
    """Returns what stands at a bar: the seconds, and the speedup over the row's reference."""
    seconds = row.seconds_to(target, with_first_step=True)
    if not seconds:
        return row.error or "not reached"
    factor = factor_or_bound(row.speedup(Goal(target, with_first_step=True)))
    if factor:
        return f"{seconds:,.1f} s, {factor}×"
    return f"{seconds:,.1f} s"
