"""From a journal's Measured to rows: medians over the rounds, factors, verdicts."""

import math
from collections.abc import Callable, Iterable
from statistics import median

from bench.catalogue import Run
from bench.judge.noise import Noise, log_ratios, noise_of, verdict
from bench.measure.records import Record


def middle(values: Iterable[float | None]) -> float | None:
    """The median of those that are known."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def difference(a: float | None, b: float | None) -> float | None:
    return None if None in (a, b) else a - b


Figure = Callable[[Record], float | None]


def speed_of(record: Record) -> float | None:
    return record.tok_per_sec


def memory_of(record: Record) -> float | None:
    return record.end["reserved_gb"]


def median_of(figure: Figure) -> property:
    """A figure of Row: the median over its records."""
    return property(lambda row: middle(map(figure, row.records)))


def over(other: str, figure: str) -> property:
    """A figure of Row as a factor over that of another row: its `versus` or `baseline`."""
    return property(lambda row: getattr(row, other) and ratio(
        getattr(row, figure), getattr(getattr(row, other), figure)))


class Row:
    """A run of a plan, by its complete records: medians over the rounds, None for what isn't known.

    Factors and differences are over the run that it is compared to, or where that has no figures,
    over the one that *that* is compared to, and so on: `versus`. Those named `..._baseline` are
    over the first run of the plan. Where the run is a script without a technique (its field
    `without` is set), the verdict and `technique_factor` are the technique's.
    """

    def __init__(self, run: Run, measured, rows: dict[str, "Row"]):
        plan, self.measured = measured.plan, measured
        self.run, self.label, self.technique = run, run.label, run.technique
        self.published, self.peak = run.published, measured.peak
        self.loss_tokens, self.rows, self.first = plan.loss_tokens, rows, plan.runs[0].name
        results = sorted((result for result in measured.results if result.name == run.name),
                         key=lambda result: result.round)
        self.tried, self.error = bool(results), run.error
        failed = [result.error for result in results if result.error]
        if failed and not self.error:
            self.error = f"failed: {failed[0].removeprefix('failed: ')}"
        complete = [result for result in results if result.record]
        self.by_round: dict[int, Record] = {
            result.round: result.record for result in complete
            if result.seed == plan.seed_of(result.round)}
        self.records = list(self.by_round.values())
        self.record = self.records[0] if self.records else None  # round 1's, which compiles
        self.rounds = len(self.records)
        self.losses_by_seed = {
            result.seed: result.record.val_loss_after(self.loss_tokens) for result in complete}
        self.speeds = list(map(speed_of, self.records))  # tok/sec of all processes together
        self.memories = list(map(memory_of, self.records))  # GB of one

    # ---- The run's own figures

    tok_per_sec = median_of(speed_of)
    reserved_gb = median_of(memory_of)
    lowest_val_loss = median_of(lambda record: record.lowest_val_loss)
    first_step_excess = median_of(lambda record: record.first_step_excess)
    mfu = median_of(lambda record: record.mfu)
    uncompiled = property(lambda row: any(record.uncompiled for record in row.records))
    speed_is_average = property(lambda row: any(record.speed_is_average for record in row.records))

    @property
    def val_loss(self) -> float | None:
        return middle(record.val_loss_after(self.loss_tokens) for record in self.records)

    @property
    def seconds_per_step(self) -> float | None:
        return self.record.tokens_per_step / self.tok_per_sec if self.record else None

    @property
    def share_of_peak(self) -> float | None:
        """Of this machine's own rate of matrix products, in the precision of the run."""
        if not self.record:
            return None
        flops = self.tok_per_sec * self.record.config["flops_per_token"] / self.run.processes
        precision = self.record.precision
        if precision == "TF32" and precision not in self.peak:  # which this GPU doesn't have
            precision = "float32"
        return ratio(flops, self.peak.get(precision))

    # ---- Compared

    @property
    def baseline(self) -> "Row | None":
        return None if self.run.name == self.first else self.rows[self.first]

    @property
    def versus(self) -> "Row | None":
        name = self.run.compared_to
        while name and not self.rows[name].speeds:
            name = self.rows[name].run.compared_to
        return self.rows[name] if name else None

    factor = over("versus", "tok_per_sec")
    factor_baseline = over("baseline", "tok_per_sec")
    published_factor = over("versus", "published")
    published_factor_baseline = over("baseline", "published")
    memory_factor = over("versus", "reserved_gb")
    technique_factor = property(
        lambda row: ratio(1, row.factor) if row.run.without else None)
    loss_difference = property(
        lambda row: difference(row.val_loss, row.versus and row.versus.val_loss))
    loss_difference_baseline = property(
        lambda row: difference(row.val_loss, row.baseline and row.baseline.val_loss))

    def ratios(self, figure: Figure = speed_of) -> list[float]:
        """Logarithms of the figure over that of `versus`, round by round."""
        return log_ratios(*({number: value for number, record in row.by_round.items()
                             if (value := figure(record))} for row in (self, self.versus))) if (
            self.versus) else []

    @property
    def verdict(self) -> str | None:
        if not self.versus or not self.speeds:
            return None
        ratios = self.ratios()
        if self.run.without:
            ratios = [-ratio for ratio in ratios]
        return verdict(ratios, noise_among(self.rows.values()))

    @property
    def memory_verdict(self) -> str | None:
        if not self.versus or not self.speeds:
            return None
        text = verdict(self.ratios(memory_of), noise_among(self.rows.values(), memory_of))
        return {"faster": "more", "slower": "less"}.get(text, text)

    @property
    def within_seed_noise(self) -> bool | None:
        noise, change = seed_noise(self.rows[self.first]), self.loss_difference_baseline
        return None if None in (change, noise) else abs(change) <= noise

    # ---- Time to a loss

    def times_to(self, target: float) -> list[tuple[float, float]]:
        """(tokens, seconds of training) of each round; infinite where it never came there."""
        return [record.reached(target) or (math.inf, math.inf) for record in self.records]

    def time_verdict(self, target: float) -> str:
        """Whether it comes to the target sooner than `versus`, seed by seed; no verdict where one
        seed never came there, since the others alone would flatter it."""
        if not all(record.reached(target) for record in self.records):
            return "no verdict"

        def rate(record: Record) -> float | None:
            reached = record.reached(target)
            return 1 / reached[1] if reached and reached[1] > 0 else None

        return verdict(self.ratios(rate), noise_among(self.rows.values(), rate))

    def tokens_to(self, target: float) -> float | None:
        return known(median(tokens for tokens, _ in self.times_to(target) or NEVER))

    def seconds_to(self, target: float, with_first_step: bool = False) -> float | None:
        """The median, of which a run that never came there counts as slower than all others; with
        the rest of the first step, compilation above all, if asked."""
        seconds = median(seconds for _, seconds in self.times_to(target) or NEVER)
        if with_first_step and self.record:
            seconds += self.record.first_step_excess
        return known(seconds)


NEVER = [(math.inf, math.inf)]


def known(figure: float) -> float | None:
    return None if math.isinf(figure) else figure


def noise_among(rows: Iterable[Row], figure: Figure = speed_of) -> Noise | None:
    """Of all comparisons in a table."""
    return noise_of([row.ratios(figure) for row in rows])


def seed_noise(first: Row) -> float | None:
    """The range of the baseline's losses over several seeds."""
    losses = first.losses_by_seed.values()
    return max(losses) - min(losses) if len(losses) > 1 and None not in losses else None


def rows_of(measured) -> list[Row]:
    """A row for each run of a plan."""
    rows: dict[str, Row] = {}
    for run in measured.plan.runs:
        row = rows[run.name] = Row(run, measured, rows)
        if run.after and not row.tried and not row.error:
            smaller = rows[run.after]
            untried = (smaller.error or "").startswith("not tried")
            row.error = smaller.error if untried else measured.why_not(run)
    return list(rows.values())
