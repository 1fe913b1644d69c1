"""What a run's record comes to: its speed, and its loss over the time of its training."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from statistics import quantiles
from typing import NamedTuple

from bench.measure.records import Record
from gpt_speed.cards import PEAK_FLOPS

WARM_UP = 2  # steps that a median leaves out
LEAST_STEPS = 3  # that have quartiles


class LossPoint(NamedTuple):
    """A log line: the validation loss after so many tokens and seconds of training."""

    tokens: int
    seconds: float
    val_loss: float


@dataclass(frozen=True)
class Training:
    """The training that a record tells of."""

    record: Record

    # ---- Speed

    @cached_property
    def quartiles(self) -> tuple[float, ...] | None:
        """The first quartile, the median and the third of the speeds of single steps, tok/sec; None
        where there are too few."""
        stored = self.record.end.get("quartiles_tok_per_sec")
        if stored:
            return tuple(map(float, stored))
        steps = [second for log in self.record.logs for second in log["seconds"]]
        rates = [self.record.tokens_per_step / second for second in steps[WARM_UP:]]
        if len(rates) < LEAST_STEPS or not self.record.end:
            return None
        return tuple(quantiles(rates, n=4, method="inclusive"))

    @property
    def tok_per_sec(self) -> float | None:
        """The median over single steps, or the average of a run too short for a median."""
        if self.quartiles:
            return self.quartiles[1]
        return self.record.end.get("avg_tok_per_sec")

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization, of the datasheet's bf16 rate; None if unknown."""
        config = self.record.config
        peak = PEAK_FLOPS.get(self.record.environment["gpu"])
        if not peak or not self.tok_per_sec or config["device"] != "cuda":
            return None
        return self.tok_per_sec / peak * config["flops_per_token"] / config["world_size"]

    @property
    def first_step_excess(self) -> float:
        """The seconds, compilation above all, that the first step takes more than a median one.
        Raises ValueError for a run that isn't complete."""
        speed, first_step = self.tok_per_sec, self.record.first_step_seconds
        if not speed or first_step is None:
            raise ValueError(f"{self.record.name} has no speed")
        return first_step - self.record.tokens_per_step / speed

    @property
    def train_seconds(self) -> float:
        """All seconds of training, of which the first step counts as long as a median one."""
        return sum(sum(log["seconds"]) for log in self.record.logs) - self.first_step_excess

    # ---- Loss over time

    @cached_property
    def points(self) -> list[LossPoint]:
        """The log lines with a validation loss, as if the first step had taken as long as a median
        one: first_step_excess is the rest of it."""
        totals = accumulate(sum(log["seconds"]) for log in self.record.logs)
        return [
            LossPoint(log["tokens"], total - self.first_step_excess, log["val_loss"])
            for log, total in zip(self.record.logs, totals, strict=True)
            if log["val_loss"] is not None
        ]

    @property
    def lowest_val_loss(self) -> float | None:
        return min((point.val_loss for point in self.points), default=None)

    def reached(self, target: float) -> tuple[float, float] | None:
        """Returns (tokens, seconds of training) after which the validation loss has fallen to
        `target`, by a straight line between the log lines around it; None where it never does."""
        before = None
        for point in self.points:
            if point.val_loss <= target:
                if before is None:
                    return point.tokens, point.seconds
                return crossing(before, point, target)
            before = point
        return None

    def loss_at(self, seconds: float) -> float | None:
        """Returns the validation loss after so many seconds of training, by a straight line between
        the log lines around it; after the last line its own, before the first None."""
        import numpy  # here, since most commands don't need it

        if not self.points or seconds < self.points[0].seconds:
            return None
        _, times, losses = zip(*self.points, strict=True)
        return float(numpy.interp(seconds, times, losses))


def crossing(before: LossPoint, after: LossPoint, target: float) -> tuple[float, float]:
    """Returns (tokens, seconds) at which the line between two points crosses a loss."""
    share = (before.val_loss - target) / (before.val_loss - after.val_loss)
    return (
        before.tokens + share * (after.tokens - before.tokens),
        before.seconds + share * (after.seconds - before.seconds),
    )
