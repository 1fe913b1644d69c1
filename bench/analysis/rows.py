"""From a journal's Measured to rows: medians over the rounds, factors, significance."""

import math
from collections.abc import Callable, Iterable
from functools import cache
from statistics import fmean, median
from typing import NamedTuple

from bench.analysis.stats import Estimate, Logs, common_rounds, estimates, significant
from bench.catalogue import Run, without_effect_on_gpus
from bench.measure.records import Outcome, Record, Status


def median_known(values: Iterable[float | None]) -> float | None:
    """The median of those that are known; None where it is infinite: never, as most often."""
    usual = median([value for value in values if value is not None] or [math.inf])
    return None if math.isinf(usual) else usual


def ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def difference(a: float | None, b: float | None) -> float | None:
    return None if None in (a, b) else a - b


# What is compared: the values of a row, each with its round; None where it isn't known, 0 where a
# run missed its target.
Figure = Callable[["Row"], list[tuple[int, float | None]]]


def speed_of(row: "Row") -> list[tuple[int, float | None]]:
    return [(number, record.tok_per_sec) for number, record in row.runs]


def memory_of(row: "Row") -> list[tuple[int, float | None]]:
    return [(number, record.end["reserved_gb"]) for number, record in row.runs]


@cache
def rate_to(target: float, with_first_step: bool = False, bound: bool = False) -> Figure:
    """How often in a second a row would come to a target; the larger, the sooner. As a `bound` a
    run that missed it counts as if it had come there at its end."""
    return lambda row: [
        (number, 1 / seconds if seconds > 0 else None) for number, (_, seconds) in zip(
            row.by_round, row.times_to(target, with_first_step, bound), strict=True)]


def median_of(figure: Callable[[Record], float | None]) -> property:
    """A figure of Row: the median over its records."""
    return property(lambda row: median_known(map(figure, row.records)))


class Row:
    """A run of a plan, by its complete records: medians over the rounds, None for what isn't known.

    Factors and differences are over the run that it is compared to, or where that has no figures,
    over the one that *that* is compared to, and so on: `versus`. Those named `..._baseline` are
    over the first run of the plan. Where the run is a script without a technique (its field
    `without` is set), the significance and `technique_factor` are the technique's.
    """

    def __init__(self, run: Run, measured, rows: "Rows"):
        self.measured, self.plan, self.rows = measured, measured.plan, rows
        self.run, self.label, self.technique = run, run.label, run.technique
        results = sorted((result for result in measured.results if result.name == run.name),
                         key=lambda result: result.round)
        # Why it has no figures, or fewer; None: it isn't known yet, or there is no reason.
        self.outcome: Outcome | None = next(
            (result.outcome for result in results if not result.outcome.complete), None)
        if run.error:
            self.outcome = Outcome(Status.CANNOT_RUN, run.error)
        elif not results:
            self.outcome = measured.skip_reason(run)
        complete = [result for result in results if result.record]
        # Every run tells the speed, those with the seed of their round the rest.
        self.runs = [(result.round, result.record) for result in complete]
        self.by_round: dict[int, Record] = {
            result.round: result.record for result in complete
            if result.seed == self.plan.seed_of(result.round)}
        self.records = list(self.by_round.values())
        self.record = self.records[0] if self.records else None  # round 1's, which compiles
        self.rounds = len(self.records)
        self.losses_by_seed = {
            result.seed: result.record.val_loss_after(self.plan.loss_tokens) for result in complete}
        self.speeds = [speed for _, speed in speed_of(self)]  # tok/sec of all processes together
        self.memories = [memory for _, memory in memory_of(self)]  # GB of one

    # ---- The run's own figures

    error = property(lambda row: row.outcome and str(row.outcome))

    tok_per_sec = property(lambda row: median_known(row.speeds))
    reserved_gb = property(lambda row: median_known(row.memories))
    lowest_val_loss = median_of(lambda record: record.lowest_val_loss)
    first_step_excess = median_of(lambda record: record.first_step_excess)
    mfu = median_of(lambda record: record.mfu)
    uncompiled = property(lambda row: any(record.uncompiled for record in row.records))
    val_loss = property(lambda row: median_known(
        record.val_loss_after(row.plan.loss_tokens) for record in row.records))
    speed_is_average = property(lambda row: any(record.speed_is_average for record in row.records))

    @property
    def seconds_per_step(self) -> float | None:
        return self.record.tokens_per_step / self.tok_per_sec if self.record else None

    @property
    def share_of_peak(self) -> float | None:
        """Of this machine's own rate of matmuls, in the precision of the run."""
        if not self.record:
            return None
        flops = self.tok_per_sec * self.record.config["flops_per_token"] / self.run.processes
        precision, peak = self.record.precision, self.measured.peak
        lacks_tf32 = precision == "TF32" and precision not in peak
        return ratio(flops, peak.get("float32" if lacks_tf32 else precision))

    # ---- Compared

    @property
    def baseline(self) -> "Row | None":
        first = self.plan.runs[0].name
        return None if self.run.name == first else self.rows[first]

    @property
    def reference(self) -> "Row | None":
        name = self.run.compared_to
        while name and not self.rows[name].speeds:
            name = self.rows[name].run.compared_to
        return self.rows[name] if name else None

    @property
    def techniques(self) -> list[int]:
        """The numbers of the techniques that its factor is of: more than one in a ladder where the
        row before it was left out or failed; none where there is no factor, or no ladder."""
        if self.run.number is None or not self.reference or not self.speeds:
            return []
        numbers = range(self.reference.run.number + 1, self.run.number + 1)
        idle = without_effect_on_gpus() if self.measured.machine["gpus"] else set()
        return [number for number in numbers if number == self.run.number or number not in idle]

    factor = property(lambda row: row.factor_of(speed_of, row.reference))
    factor_baseline = property(lambda row: row.factor_of(speed_of, row.baseline))
    memory_factor = property(lambda row: row.mean_ratio(memory_of, row.reference))  # isn't tested
    published_factor = property(lambda row: row.published_over(row.reference))
    published_factor_baseline = property(lambda row: row.published_over(row.baseline))
    technique_factor = property(lambda row: ratio(1, row.factor) if row.run.ablated else None)
    loss_difference = property(lambda row: row.loss_over(row.reference))
    loss_difference_baseline = property(lambda row: row.loss_over(row.baseline))

    def published_over(self, other: "Row | None") -> float | None:
        return ratio(self.run.published, other.run.published) if other else None

    def loss_over(self, other: "Row | None") -> float | None:
        return difference(self.val_loss, other.val_loss) if other else None

    def factor_of(self, figure: Figure, other: "Row | None") -> float | None:
        """The figure over that of `other`, by the test's rounds where both are in the test."""
        effect = other and self.difference(figure, other)
        return effect.factor if effect else self.mean_ratio(figure, other)

    def mean_ratio(self, figure: Figure, other: "Row | None") -> float | None:
        """The geometric mean of the figure over that of `other`, over the rounds that both have;
        None where there is none, or where a run missed its target."""
        rows = [logs_of(figure(row)) for row in (self, other)] if other else []
        rounds = common_rounds(rows) if None not in rows else []
        if not rounds:
            return None
        one, two = (fmean(fmean(logs[number]) for number in rounds) for logs in rows)
        return math.exp(one - two)

    def difference(self, figure: Figure = speed_of, other: "Row | None" = None) -> Estimate | None:
        """The mean logarithm of the figure over that of `other`, else `versus`; None where one of
        them isn't in the test."""
        other, means = other or self.reference, self.rows.judged(figure).means
        if not other or not {self.run.name, other.run.name} <= means.keys():
            return None
        return means[self.run.name].minus(means[other.run.name])

    def interval(self, figure: Figure = speed_of) -> tuple[float, float] | None:
        """The factor's 95 % confidence interval; of a row `without` a technique that of the
        technique's speedup."""
        effect = self.difference(figure)
        if not effect:
            return None
        low, high = effect.interval
        return (1 / high, 1 / low) if self.run.ablated else (low, high)

    def significance_of(self, figure: Figure) -> str | None:
        """Whether the figure is significantly greater than that of `versus` ("faster"), or smaller;
        None where there is none to compare with."""
        if not self.reference or not self.speeds:
            return None
        column, name = self.rows.judged(figure), self.run.name
        if name not in column.differences:
            return "not tested"
        if name not in column.significant:
            return "no significant change"
        greater = column.differences[name].mean > 0
        return "faster" if greater != bool(self.run.ablated) else "slower"

    significance = property(lambda row: row.significance_of(speed_of))

    @property
    def within_seed_noise(self) -> bool | None:
        noise, change = seed_noise(self.baseline or self), self.loss_difference_baseline
        return None if None in (change, noise) else abs(change) <= noise

    # ---- Time to a loss

    def first_steps(self) -> dict[int, float]:
        """The seconds of each round's first step beyond a median one, compilation above all; of a
        round that found it compiled already the median of those that didn't."""
        excess = {number: record.first_step_excess for number, record in self.by_round.items()}
        cold = {number: rest for number, rest in excess.items() if number <= self.plan.cold_rounds}
        usual = median_known((cold or excess).values())
        return {number: cold.get(number, usual) for number in excess}

    def times_to(self, target: float, with_first_step: bool = False, bound: bool = False,
                 ) -> list[tuple[float, float]]:
        """(tokens, seconds of training) of each round, with the rest of the first step if asked;
        infinite where it never came there, or as a `bound` the seconds of all its training."""
        times, rests = [], self.first_steps() if with_first_step else {}
        for number, record in self.by_round.items():
            tokens, seconds = record.reached(target) or (
                math.inf, record.train_seconds if bound else math.inf)
            times.append((tokens, seconds + rests.get(number, 0)))
        return times

    def missed(self, target: float) -> bool:
        """Whether a run never came to a target."""
        return any(math.isinf(tokens) for tokens, _ in self.times_to(target))

    def speedup_to(self, target: float, with_first_step: bool = False) -> tuple[str, float] | None:
        """(sign, how many times as fast as `versus` it comes to a target), by pairs of runs with
        one seed. Where runs of one of the two missed it, the factor is a bound, by how long they
        trained: the sign is ">" if they are those of `versus`, "<" if its own. None where both
        have such runs."""
        if not self.reference:
            return None
        own, theirs = self.missed(target), self.reference.missed(target)
        if not own and not theirs:
            sign, factor = "", self.factor_of(rate_to(target, with_first_step), self.reference)
        else:
            bound = rate_to(target, with_first_step, bound=True)
            sign, factor = "> " if theirs else "< ", self.mean_ratio(bound, self.reference)
        return (sign, factor) if factor and not (own and theirs) else None

    def tokens_to(self, target: float) -> float | None:
        """As seconds_to()."""
        return median_known(tokens for tokens, _ in self.times_to(target))

    def seconds_to(self, target: float, with_first_step: bool = False) -> float | None:
        """The median, of which a run that never came there counts as slower than all others."""
        return median_known(seconds for _, seconds in self.times_to(target, with_first_step))

    def loss_at(self, seconds: float) -> float | None:
        """The median over the rounds of the validation loss after this many seconds of training."""
        return median_known(record.loss_at(seconds) for record in self.records)


class Column(NamedTuple):
    """A column of factors, tested as a whole."""

    rounds: list[int]  # by which rows are compared
    means: dict[str, Estimate]  # of the rows in the test
    differences: dict[str, Estimate]  # of each of them over what it is compared to
    significant: set[str]


class Rows(dict[str, Row]):
    """Those of a table, by their names, and what is compared among them."""

    def __init__(self):
        self.judged = cache(self.judge)

    def judge(self, figure: Figure) -> Column:
        """Tests a column. Rows with a failed run, or with one that missed its target, aren't in the
        test: the others alone would flatter them."""
        rows = {name: logs for name, row in self.items() if row.speeds and not row.outcome
                and (logs := logs_of(figure(row)))}
        means, differences = estimates(rows), {}
        for name, mean in means.items():
            other = self[name].reference
            if other and other.run.name in means:
                differences[name] = mean.minus(means[other.run.name])
        return Column(common_rounds(rows.values()), means, differences, significant(differences))


def logs_of(values: list[tuple[int, float | None]]) -> Logs:
    """The logarithms, by their rounds; none where a run missed its target."""
    logs: Logs = {}
    for number, value in values:
        if value == 0:
            return {}
        if value is not None:
            logs.setdefault(number, []).append(math.log(value))
    return logs


def seed_noise(first: Row) -> float | None:
    """The range of the baseline's losses over several seeds."""
    losses = first.losses_by_seed.values()
    return max(losses) - min(losses) if len(losses) > 1 and None not in losses else None


def rows_of(measured) -> list[Row]:
    """A row for each run of a plan."""
    rows = Rows()
    for run in measured.plan.runs:
        rows[run.name] = Row(run, measured, rows)
    return list(rows.values())

