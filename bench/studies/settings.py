"""The settings that a search varies, what they come to, and what is shown of the time to a loss."""

import math
from typing import NamedTuple

from bench.analysis.rows import Row, difference
from bench.catalogue import Run
from bench.measure.plan import Setup
from bench.report.notes import machine_note
from bench.report.tables import (
    RUN,
    SPEED,
    Column,
    Table,
    bold,
    fmt,
    num_col,
    spread,
    text_col,
)


class Point(NamedTuple):
    """The settings that a search varies."""

    stage: str  # "00", "01", or variants of 01: "optimizer-muon+model-tied-head"
    batch: int
    rate: float

    def around(self) -> list["Point"]:
        """Returns half and twice the batch size, and half and twice the learning rate."""
        batches = [size for size in (self.batch // 2, self.batch * 2) if size]
        return [*(self._replace(batch=size) for size in batches), *self.other_rates()]

    def other_rates(self) -> list["Point"]:
        return [self._replace(rate=rate) for rate in (self.rate / 2, self.rate * 2)]

    def run(self, setup: Setup) -> Run:
        """Returns the script with these settings."""
        run = setup.scripts.find(self.stage, setup.machine)
        return run.replace(
            name=f"{run.name}-batch-{self.batch}-rate-{self.rate:g}", published=None,
            label=f"{run.label}, batch {self.batch}, rate {self.rate:g}", **self._asdict(),
            compared_to=None, options=(*run.options, "--batch-size", str(self.batch),
                                       "--learning-rate", f"{self.rate:g}"))


def point_of(row: Row) -> Point:
    return Point(*(getattr(row.run, name) for name in Point._fields))


def costs_of(rows: list[Row], stage: str, target: float = -math.inf,
             ) -> dict[Point, tuple[float, float]]:
    """Returns a script's settings, each with the seconds to a loss of `target` and the lowest loss;
    the best first. What never comes to the target is judged by its loss."""
    return best_first({
        point_of(row): (math.inf, math.inf) if row.error else (
            row.seconds_to(target) or math.inf, row.lowest_val_loss or math.inf)
        for row in rows if row.run.stage == stage})


def losses_in_time(rows: list[Row], stage: str) -> dict[Point, float]:
    """Returns a script's settings, each with the loss after as many seconds as the fastest of them
    took for all of its tokens; the best first."""
    rows = [row for row in rows if row.run.stage == stage]
    seconds = min((record.train_seconds for row in rows for record in row.records), default=0)
    losses = {point_of(row): None if row.error else row.loss_at(seconds) for row in rows}
    return best_first({point: math.inf if loss is None else loss for point, loss in losses.items()})


def best_first(costs: dict) -> dict:
    """Returns them by their costs; of equals first the one that was measured first."""
    return {point: costs[point] for point in sorted(costs, key=costs.get)}


# ---- What is shown ---------------------------------------------------------------------------

TARGETS = {  # what they are
    "published": "the lowest validation loss of 00 in its default run",
    "best": "the lowest validation loss of 00 at its best learning rate",
    "epoch": "the lowest validation loss of 00 in one epoch of the text, at its best settings",
}


def time_tables(rows: list[Row], targets: dict[str, float]) -> list[Table]:
    """Returns how long each run took to each target; without targets, what they set as one."""
    if not targets:
        return [Table([RUN, Column("lowest val loss", lambda row: row.error or fmt(
            row.lowest_val_loss, ".4f") or "n/a"), SPEED], rows)]
    return [Table(time_columns(target), rows, f"Target {target:.4f}, {TARGETS[name]}:",
                  every_column=True)
            for name, target in targets.items()]


def time_columns(target: float) -> list[Column]:
    """Returns columns whose main factor counts compilation, as who waits for it does."""
    def seconds(row: Row) -> str:
        return row.error or fmt(row.seconds_to(target, True), ",.1f") or "not reached"

    def spread_of(row: Row) -> str:
        times = [seconds for _, seconds in row.times_to(target, True)]
        if not times or math.isinf(min(times)):
            return ""
        return spread(times, ",.1f").replace("inf", "not reached")

    def first_step(row: Row) -> str:
        extra = difference(row.seconds_to(target, True), row.seconds_to(target))
        return fmt(extra and max(0.0, extra), ".1f")  # it may be shorter than a median step

    def factor(with_first_step: bool):
        return lambda row: bold(speedup_of(row, target, with_first_step),
                                row.speedup(target, with_first_step).significance)

    return [
        RUN, SPEED, num_col("× tok/sec", "factor", ".2f"),
        Column("tokens", lambda row: fmt(row.tokens_to(target), ",.0f")),
        Column("seconds", seconds), Column("range", spread_of),
        Column("× to the loss", factor(True)),
        Column("95 %", lambda row: spread(row.speedup(target, True).interval, ".2f")),
        Column("first step, extra s", first_step),
        Column("× not counting compiling", factor(False)),
        text_col("compared to", "reference.label"),
    ]


def speedup_of(row: Row, target: float, with_first_step: bool) -> str:
    """Returns it as "1.23", or a bound as "> 1.23"; nothing where it isn't known."""
    speedup = row.speedup(target, with_first_step)
    return f"{speedup.sign}{speedup.factor:.2f}" if speedup.factor else ""


def time_notes(measured, rows: list[Row]) -> list[str]:
    """Returns what to know of time_tables."""
    if not measured.plan.targets:
        return [machine_note(measured, rows), "Medians over the seeds."]
    return [
        machine_note(measured, rows),
        "Seconds of training and of compilation with an empty cache until the validation loss has"
        " fallen to the target, by a straight line between log lines: medians over the seeds, with"
        ' their range. Speedups are over the row named in "compared to": the mean of the seeds\''
        " ratios, with its 95 % interval; bold: significant over the whole table. A run that has"
        f" trained on {measured.plan.tokens:,} tokens without coming to the target hasn't reached"
        " it; the speedup is then a bound (>, <), by how long it took, and isn't tested.",
    ]
