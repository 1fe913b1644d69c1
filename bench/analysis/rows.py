"""From a journal's Measurement to rows: medians over the rounds, speedups, significance."""

import math
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

from bench.analysis.stats import Column, Estimate, Values, logs_of, mean_ratio
from bench.catalogue import Run, technique_names, without_effect_on_gpus
from bench.measure.records import Outcome, Record


def median_known(values: Iterable[float | None]) -> float | None:
    """Returns the median of the values that are known; None where it is infinite."""
    middle = median([value for value in values if value is not None] or [math.inf])
    return None if math.isinf(middle) else middle


def ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def difference(a: float | None, b: float | None) -> float | None:
    return None if None in (a, b) else a - b


class Speedup(NamedTuple):
    """How many times as fast as another row a row is, or comes to a loss."""

    factor: float | None = None  # a mean over the rounds; None where one of the rows has no figures
    sign: str = ""  # "> " or "< " where a run missed the loss, so that the factor is a bound
    estimate: Estimate | None = None  # of the factor's logarithm; None where it isn't tested
    # "faster", "slower", "no significant change" or "not tested"; None without a reference.
    significance: str | None = None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The factor's 95 % confidence interval."""
        return self.estimate.interval if self.estimate else None


class Row:
    """A run of a plan, by its complete records: medians over the rounds, None for what isn't known.

    Speedups and differences are over the run that it is compared to, or where that has no figures,
    over the one that *that* is compared to, and so on: `reference`. Those named `..._baseline` are
    over the first run of the plan. Where the run is a script without a technique (`run.ablated`),
    speedup and significance are the technique's: of the script with it over the one without.
    """

    def __init__(self, run: Run, measured, rows: "Rows"):
        self.measured, self.plan, self.rows = measured, measured.plan, rows
        self.run, self.label = run, run.label
        self.technique = technique_names().get(run.ablated or str(run.script), run.technique)
        results = sorted(
            (result for result in measured.results if result.name == run.name),
            key=lambda result: result.round,
        )
        # Why it has no figures, or fewer; None: it isn't known yet, or there is no reason.
        self.outcome: Outcome | None = next(
            (result.outcome for result in results if not result.outcome.complete), None
        )
        if run.error or not results:
            self.outcome = measured.skipped().get(run.name)
        complete = [result for result in results if result.record]
        # Every run tells speed and memory, those with the seed of their round the rest.
        self.runs = [(result.round, result.record) for result in complete]
        self.by_round: dict[int, Record] = {
            result.round: result.record
            for result in complete
            if result.seed == self.plan.seed_of(result.round)
        }
        self.records = list(self.by_round.values())
        self.record = self.records[0] if self.records else None  # round 1's, which compiles
        self.rounds = len(self.records)
        self.losses_by_seed = {
            result.seed: result.record.val_loss_after(self.plan.loss_tokens) for result in complete
        }
        self.speeds = [record.tok_per_sec for _, record in self.runs]  # of all processes together
        self.memories = [(number, record.end["reserved_gb"]) for number, record in self.runs]
        self.baseline = next(iter(rows.values()), None)
        before = rows.get(run.compared_to)
        self.reference: Row | None = before if not before or before.speeds else before.reference
        self.error = str(self.outcome) if self.outcome else None
        self.tok_per_sec = median_known(self.speeds)
        self.reserved_gb = median_known(memory for _, memory in self.memories)
        self.lowest_val_loss = median_known(record.lowest_val_loss for record in self.records)
        self.mfu = median_known(record.mfu for record in self.records)
        self.val_loss = median_known(
            record.val_loss_after(self.plan.loss_tokens) for record in self.records
        )

    @property
    def share_of_peak(self) -> float | None:
        """Of this machine's own rate of matmuls, in the precision of the run. Each GPU has that
        rate; the ranks of a CPU share it."""
        if not self.record:
            return None
        units = self.run.processes if self.measured.machine["gpus"] else 1
        flops = self.tok_per_sec * self.record.config["flops_per_token"] / units
        precision, peak = self.record.precision, self.measured.peak
        if precision == "TF32" and precision not in peak:
            precision = "float32"
        return ratio(flops, peak.get(precision))

    # ---- Compared

    @property
    def techniques(self) -> list[int]:
        """The numbers of the techniques that its factor is of: more than one in a ladder where the
        row before it was left out or failed; none where there is no factor, or no ladder."""
        if self.run.number is None or not self.reference or not self.speeds:
            return []
        numbers = range(self.reference.run.number + 1, self.run.number + 1)
        idle = without_effect_on_gpus() if self.measured.machine["gpus"] else set()
        return [number for number in numbers if number == self.run.number or number not in idle]

    def values(self, target: float | None = None, with_first_step: bool = False) -> Values:
        """Returns what is compared: the speed of each run, or with a target how often in a second
        it would come to that loss; one that missed it as if it had come there at its end."""
        if target is None:
            return [(number, record.tok_per_sec) for number, record in self.runs]
        times = self.times_to(target, with_first_step, missed_at_end=True)
        return [
            (number, 1 / seconds if seconds > 0 else None)
            for number, (_, seconds) in zip(self.by_round, times, strict=True)
        ]

    def pair(self, other: "Row | None") -> tuple[str, str] | None:
        """Returns the names of two rows, of which the first one is the faster by its speedup over
        another row; None where there is no figure."""
        if not other or not self.speeds:
            return None
        names = self.run.name, other.run.name
        return names[::-1] if self.run.ablated else names

    def speedup(
        self, target: float | None = None, with_first_step: bool = False, over: "Row | None" = None
    ) -> Speedup:
        """Returns how many times as fast as its reference, or as the row `over`, it is or comes to
        a target. Significance is of the speedup over the reference, by the whole table."""
        pair = self.pair(over or self.reference)
        if not pair:
            return Speedup()
        column = self.rows.column(target, with_first_step)
        significance = column.significance(self.run.name)
        if estimate := column.difference(*pair):
            return Speedup(estimate.factor, "", estimate, significance)
        rows = [self.rows[name] for name in pair]
        missed = [row.missed(target) for row in rows]
        factor = (
            None
            if all(missed)
            else mean_ratio(*(row.values(target, with_first_step) for row in rows))
        )
        sign = "< " if missed[0] else "> " if missed[1] else ""
        return Speedup(factor, sign, None, significance)

    factor = property(lambda row: row.speedup().factor)
    interval = property(lambda row: row.speedup().interval)
    significance = property(lambda row: row.speedup().significance)
    factor_baseline = property(lambda row: row.speedup(over=row.baseline).factor)
    memory_factor = property(  # it isn't tested
        lambda row: row.reference and mean_ratio(row.memories, row.reference.memories)
    )
    loss_difference = property(
        lambda row: row.reference and difference(row.val_loss, row.reference.val_loss)
    )
    published_factor = property(
        lambda row: row.reference and ratio(row.run.published, row.reference.run.published)
    )
    published_factor_baseline = property(
        lambda row: row.baseline and ratio(row.run.published, row.baseline.run.published)
    )

    @property
    def seed_noise(self) -> float | None:
        """The range of its losses over several seeds; None without."""
        losses = self.losses_by_seed.values()
        return max(losses) - min(losses) if len(losses) > 1 and None not in losses else None

    # ---- Time to a loss

    def times_to(
        self,
        target: float,
        with_first_step: bool = False,
        missed_at_end: bool = False,
    ) -> list[tuple[float, float]]:
        """Returns (tokens, seconds of training) of each round; of a run that missed the target
        infinite, or the seconds of all its training. With what the first step takes beyond a median
        one, compilation above all, if asked: of a round that found it compiled already, the median
        of those that didn't."""
        excess = {number: record.first_step_excess for number, record in self.by_round.items()}
        cold = {number: rest for number, rest in excess.items() if number <= self.plan.cold_rounds}
        usual, times = median_known((cold or excess).values()), []
        for number, record in self.by_round.items():
            tokens, seconds = record.reached(target) or (
                math.inf,
                record.train_seconds if missed_at_end else math.inf,
            )
            rest = cold.get(number, usual) if with_first_step else 0
            times.append((tokens, seconds + rest))
        return times

    @property
    def warm_excess(self) -> float | None:
        """What the first step takes beyond a median one, where it was compiled before."""
        return median_known(
            record.first_step_excess
            for number, record in self.by_round.items()
            if number > self.plan.cold_rounds
        )

    def missed(self, target: float | None) -> bool:
        """Returns whether a run never came to a target."""
        return target is not None and any(math.isinf(tokens) for tokens, _ in self.times_to(target))

    def tokens_to(self, target: float) -> float | None:
        """Returns the median, of which a run that missed the target counts as the slowest."""
        return median_known(tokens for tokens, _ in self.times_to(target))

    def seconds_to(self, target: float, with_first_step: bool = False) -> float | None:
        """Returns the median, as tokens_to()."""
        return median_known(seconds for _, seconds in self.times_to(target, with_first_step))

    def loss_at(self, seconds: float) -> float | None:
        """Returns the median validation loss after this many seconds of training."""
        return median_known(record.loss_at(seconds) for record in self.records)


class Rows(dict[str, Row]):
    """The rows of a table by their names, and its columns of speedups."""

    def __init__(self):
        self.columns: dict[tuple[float | None, bool], Column] = {}

    def column(self, target: float | None = None, with_first_step: bool = False) -> Column:
        """Returns what Row.values with these arguments come to. Rows with a failed run, or with one
        that missed its target, aren't tested: the others alone would flatter them."""
        key = target, with_first_step
        if key not in self.columns:
            logs = {
                name: logs_of(row.values(*key))
                for name, row in self.items()
                if row.speeds and not row.outcome and not row.missed(target)
            }
            pairs = {name: row.pair(row.reference) for name, row in self.items() if row.reference}
            self.columns[key] = Column(logs, pairs, pooled=target is None)
        return self.columns[key]


def rows_of(measured) -> list[Row]:
    """Returns a row for each run of a plan."""
    rows = Rows()
    for run in measured.plan.runs:
        rows[run.name] = Row(run, measured, rows)
    return list(rows.values())
