"""The settings that a search varies, and what they come to."""

import math
from typing import NamedTuple

from bench.analysis.rows import Row
from bench.catalogue import Run
from bench.measure.plan import Setup


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
        return run.but(
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
