"""From a journal's Measured to rows: medians over the rounds, factors, verdicts."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from statistics import median

from bench.catalogue import Run
from bench.judge.noise import (
    ROUNDS_FOR_A_VERDICT,
    Comparisons,
    Estimate,
    level_of,
    nearest,
    significant,
    verdict,
)
from bench.measure.records import Kind, Outcome, Record


def middle(values: Iterable[float | None]) -> float | None:
    """The median of those that are known; None where it is infinite: never, as most often."""
    found = median([value for value in values if value is not None] or [math.inf])
    return None if math.isinf(found) else found


def ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def difference(a: float | None, b: float | None) -> float | None:
    return None if None in (a, b) else a - b


# What is compared: the values of a row, each with its round; None where it isn't known, 0 where a
# run never came there.
Figure = Callable[["Row"], list[tuple[int, float | None]]]


def speed_of(row: "Row") -> list[tuple[int, float | None]]:
    return [(number, record.tok_per_sec) for number, record in row.runs]


def memory_of(row: "Row") -> list[tuple[int, float | None]]:
    return [(number, record.end["reserved_gb"]) for number, record in row.runs]


@cache
def rate_to(target: float, with_first_step: bool = False) -> Figure:
    """How often in a second a row would come to a target; the larger, the sooner."""
    def rate(row: "Row") -> list[tuple[int, float | None]]:
        times = zip(row.by_round, row.times_to(target, with_first_step), strict=True)
        return [(number, 1 / seconds if seconds > 0 else None) for number, (_, seconds) in times]

    return rate


def median_of(figure: Callable[[Record], float | None]) -> property:
    """A figure of Row: the median over its records."""
    return property(lambda row: middle(map(figure, row.records)))


class Row:
    """A run of a plan, by its complete records: medians over the rounds, None for what isn't known.

    Factors and differences are over the run that it is compared to, or where that has no figures,
    over the one that *that* is compared to, and so on: `versus`. Those named `..._baseline` are
    over the first run of the plan. Where the run is a script without a technique (its field
    `without` is set), the verdict and `technique_factor` are the technique's.
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
            self.outcome = Outcome(Kind.CANNOT_RUN, run.error)
        elif not results:
            self.outcome = measured.why_not(run)
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

    tok_per_sec = property(lambda row: middle(row.speeds))
    reserved_gb = property(lambda row: middle(row.memories))
    lowest_val_loss = median_of(lambda record: record.lowest_val_loss)
    first_step_excess = median_of(lambda record: record.first_step_excess)
    mfu = median_of(lambda record: record.mfu)
    uncompiled = property(lambda row: any(record.uncompiled for record in row.records))
    val_loss = property(lambda row: middle(
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
        if precision == "TF32" and precision not in peak:  # which this GPU doesn't have
            precision = "float32"
        return ratio(flops, peak.get(precision))

    # ---- Compared

    @property
    def baseline(self) -> "Row | None":
        first = self.plan.runs[0].name
        return None if self.run.name == first else self.rows[first]

    @property
    def versus(self) -> "Row | None":
        name = self.run.compared_to
        while name and not self.rows[name].speeds:
            name = self.rows[name].run.compared_to
        return self.rows[name] if name else None

    factor = property(lambda row: row.factor_of(speed_of, row.versus))
    factor_baseline = property(lambda row: row.factor_of(speed_of, row.baseline))
    memory_factor = property(lambda row: row.factor_of(memory_of, row.versus))
    published_factor = property(lambda row: row.versus and ratio(
        row.run.published, row.versus.run.published))
    published_factor_baseline = property(lambda row: row.baseline and ratio(
        row.run.published, row.baseline.run.published))
    technique_factor = property(
        lambda row: ratio(1, row.factor) if row.run.without else None)
    loss_difference = property(
        lambda row: difference(row.val_loss, row.versus and row.versus.val_loss))
    loss_difference_baseline = property(
        lambda row: difference(row.val_loss, row.baseline and row.baseline.val_loss))

    def factor_of(self, figure: Figure, other: "Row | None") -> float | None:
        """The figure over that of `other`: the mean over the rounds; with a single round that both
        have what that tells. None as in difference()."""
        if estimate := other and self.difference(figure, other):
            return estimate.factor
        if not other or self.came_short(figure, other):
            return None
        both = {number for number, _ in figure(self)} & {number for number, _ in figure(other)}
        return ratio(*(middle(value for number, value in figure(each) if number in both)
                       for each in (self, other)))

    def came_short(self, figure: Figure, other: "Row") -> bool:
        """Whether a run of either never came to a target; the others alone would flatter it."""
        return any(value == 0 for each in (self, other) for _, value in figure(each))

    def difference(self, figure: Figure = speed_of, other: "Row | None" = None) -> Estimate | None:
        """The mean logarithm of the figure over that of `other`, else `versus`; None where one of
        them doesn't have it twice, or came_short()."""
        other = other or self.versus
        if not other or self.came_short(figure, other):
            return None
        return self.rows.compared(figure).difference(self.run.name, other.run.name)

    def interval(self, figure: Figure = speed_of) -> tuple[float, float] | None:
        """That in which the factor lies with a confidence of 95 %; of a row `without` a technique
        the technique's speedup."""
        found = self.difference(figure)
        if not found or found.rounds < 2:
            return None
        low, high = found.interval()
        return (1 / high, 1 / low) if self.run.without else (low, high)

    def least(self, figure: Figure = speed_of) -> float | None:
        """The smallest factor above 1 that would have had a verdict here; the truth, if it were
        that, is found half the time."""
        found = self.difference(figure)
        if not found or found.rounds < ROUNDS_FOR_A_VERDICT:
            return None
        return found.least(self.rows.level / max(1, len(self.rows.differences(figure))))

    def verdict_on(self, figure: Figure, *words: str) -> str | None:
        """Whether the figure is greater than that of `versus`, in `words`, else "faster" and
        "slower"; None where there is none to compare with."""
        if not self.versus or not self.speeds:
            return None
        found = self.rows.differences(figure).get(self.run.name)
        if not found:
            return "not tested"
        return verdict(found, self.run.name in self.rows.significant(figure), *words)

    verdict = property(lambda row: row.verdict_on(
        speed_of, *(("slower", "faster") if row.run.without else ())))
    memory_verdict = property(lambda row: row.verdict_on(memory_of, "more", "less"))

    @property
    def within_seed_noise(self) -> bool | None:
        noise, change = seed_noise(self.baseline or self), self.loss_difference_baseline
        return None if None in (change, noise) else abs(change) <= noise

    # ---- Time to a loss

    def times_to(self, target: float, with_first_step: bool = False,
                 ) -> list[tuple[float, float]]:
        """(tokens, seconds of training) of each round; infinite where it never came there. With
        the rest of the first step, compilation above all, if asked: of a round that found it
        compiled already the median of those that didn't."""
        excess = {number: record.first_step_excess for number, record in self.by_round.items()}
        cold = [rest for number, rest in excess.items() if number <= self.plan.cold_rounds]
        usual, found = middle(cold or excess.values()), []
        for number, record in self.by_round.items():
            tokens, seconds = record.reached(target) or (math.inf, math.inf)
            rest = excess[number] if number <= self.plan.cold_rounds else usual
            found.append((tokens, seconds + rest * with_first_step))
        return found

    def tokens_to(self, target: float) -> float | None:
        """As seconds_to()."""
        return middle(tokens for tokens, _ in self.times_to(target))

    def seconds_to(self, target: float, with_first_step: bool = False) -> float | None:
        """The median, of which a run that never came there counts as slower than all others."""
        return middle(seconds for _, seconds in self.times_to(target, with_first_step))

    def loss_at(self, seconds: float) -> float | None:
        """The median over the rounds of the validation loss after this many seconds of training."""
        return middle(record.loss_at(seconds) for record in self.records)


class Rows(dict[str, Row]):
    """Those of a table, by their names, and what is compared among them."""

    def __init__(self, measured):
        self.level = level_of(measured.plan.looks, measured.is_finished)
        self.whole_rounds = measured.plan.whole_rounds
        self.compared = cache(self.comparisons)
        self.differences = cache(self.differences_in)

    def comparisons(self, figure: Figure) -> Comparisons:
        """Of the logarithms."""
        return Comparisons(
            {name: [(number, math.log(value)) for number, value in figure(row) if value]
             for name, row in self.items()},
            {name: row.record and row.record.steps for name, row in self.items()},
            self.whole_rounds)

    def differences_in(self, figure: Figure) -> dict[str, Estimate]:
        """Of each row over what it is compared to, where both have rounds for a verdict."""
        found = {name: row.difference(figure) for name, row in self.items()}
        return {name: each for name, each in found.items()
                if each and each.rounds >= ROUNDS_FOR_A_VERDICT}

    def significant(self, figure: Figure) -> set[str]:
        """The names of those that differ significantly."""
        return significant(self.differences(figure), self.level)


def seed_noise(first: Row) -> float | None:
    """The range of the baseline's losses over several seeds."""
    losses = first.losses_by_seed.values()
    return max(losses) - min(losses) if len(losses) > 1 and None not in losses else None


def rows_of(measured) -> list[Row]:
    """A row for each run of a plan."""
    rows = Rows(measured)
    for run in measured.plan.runs:
        rows[run.name] = Row(run, measured, rows)
    return list(rows.values())


def closest(measured) -> list[str]:
    """The runs of a table that have more rounds after its whole ones: the rows nearest to
    significance by then, and what they are compared to."""
    plan = measured.plan
    early = replace(measured, results=[
        each for each in measured.results if each.round <= plan.whole_rounds])
    rows = rows_of(early)[0].rows
    names = set()
    for name in nearest(rows.differences(speed_of)):
        names |= {name, rows[name].versus.run.name}
    return [run.name for run in plan.runs if run.name in names]
