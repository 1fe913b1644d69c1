"""From a journal's Measurement to rows: medians over the rounds, speedups, significance."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from bench.analysis.stats import Estimate, Family, Values, logs_of, mean_ratio
from bench.analysis.training import Training
from bench.catalogue import Run, technique_names, without_effect_on_gpus
from bench.measure.journal import Measurement, Result
from bench.measure.plan import Plan
from bench.measure.records import Outcome, Record

WIDE = 1.4  # the upper end of an interval over the lower: then one run distorts the mean
UNSTEADY = 1.1  # times its median time that a row's slowest run took, on a GPU


def median_known(values: Iterable[float | None]) -> float | None:
    """Returns the median of the values that are known; None where it is infinite."""
    middle = median([value for value in values if value is not None] or [math.inf])
    return None if math.isinf(middle) else middle


def ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def difference(a: float | None, b: float | None) -> float | None:
    return None if None in (a, b) else a - b


class Figures:
    """What the results of a run come to: medians over the rounds, None for what isn't known."""

    def __init__(self, results: Iterable[Result], plan: Plan):
        results = sorted(results, key=lambda result: result.round)
        complete = [result for result in results if result.record]
        self.plan = plan
        self.failures = [result.outcome for result in results if not result.outcome.complete]
        # Every run tells speed and memory, those with the seed of their round the rest.
        self.runs = [(result.round, Training(result.record)) for result in complete]
        self.by_round: dict[int, Training] = {
            result.round: training
            for result, (_, training) in zip(complete, self.runs, strict=True)
            if result.seed == plan.seed_of(result.round)
        }
        self.losses_by_seed = {
            result.seed: result.record.val_loss_after(plan.loss_tokens) for result in complete
        }

    @cached_property
    def trainings(self) -> list[Training]:
        """One of each round."""
        return list(self.by_round.values())

    @property
    def training(self) -> Training | None:
        """Round 1's, which compiles."""
        return self.trainings[0] if self.trainings else None

    @property
    def record(self) -> Record | None:
        return self.training.record if self.training else None

    @property
    def rounds(self) -> int:
        return len(self.trainings)

    @cached_property
    def speeds(self) -> list[float]:
        """The tok/sec of each run, of all its processes together."""
        return [training.tok_per_sec for _, training in self.runs]

    @property
    def slowdown(self) -> float | None:
        """How many times its median time the slowest run took."""
        return self.tok_per_sec / min(self.speeds) if self.speeds else None

    @cached_property
    def memories(self) -> Values:
        """The reserved GB of each run, with its round."""
        return [(number, training.record.end["reserved_gb"]) for number, training in self.runs]

    @cached_property
    def tok_per_sec(self) -> float | None:
        return median_known(self.speeds)

    @cached_property
    def reserved_gb(self) -> float | None:
        return median_known(memory for _, memory in self.memories)

    @cached_property
    def mfu(self) -> float | None:
        return median_known(training.mfu for training in self.trainings)

    @cached_property
    def val_loss(self) -> float | None:
        """The loss that rows are compared by, after the same tokens."""
        return median_known(
            training.record.val_loss_after(self.plan.loss_tokens) for training in self.trainings
        )

    @cached_property
    def lowest_val_loss(self) -> float | None:
        return median_known(training.lowest_val_loss for training in self.trainings)

    @property
    def seed_noise(self) -> float | None:
        """The range of its losses over several seeds; None without."""
        losses = self.losses_by_seed.values()
        return max(losses) - min(losses) if len(losses) > 1 and None not in losses else None

    # ---- Time to a loss

    @cached_property
    def excesses(self) -> dict[int, float]:
        """What the first step of each round takes beyond a median one, compilation above all."""
        return {number: training.first_step_excess for number, training in self.by_round.items()}

    @property
    def cold_excesses(self) -> dict[int, float]:
        """Those of the rounds that had to compile."""
        cold = self.plan.cold_rounds
        return {number: rest for number, rest in self.excesses.items() if number <= cold}

    @property
    def warm_excess(self) -> float | None:
        """What the first step takes beyond a median one, where it was compiled before."""
        cold = self.plan.cold_rounds
        return median_known(rest for number, rest in self.excesses.items() if number > cold)

    def times_to(
        self, target: float, with_first_step: bool = False, missed_at_end: bool = False
    ) -> list[tuple[float, float]]:
        """Returns (tokens, seconds of training) of each round; of a run that missed the target
        infinite, or the seconds of all its training. With what the first step takes beyond a median
        one, compilation above all, if asked: of a round that found it compiled already, the median
        of those that didn't."""
        times = []
        for number, training in self.by_round.items():
            at_end = training.train_seconds if missed_at_end else math.inf
            tokens, seconds = training.reached(target) or (math.inf, at_end)
            rest = self.compilation(number) if with_first_step else 0
            times.append((tokens, seconds + rest))
        return times

    def compilation(self, number: int) -> float:
        """Returns what the first step of a round would take beyond a median one, had it to compile:
        its own figure, or the median of the rounds that did."""
        cold = self.cold_excesses
        return cold[number] if number in cold else median_known((cold or self.excesses).values())

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
        return median_known(training.loss_at(seconds) for training in self.trainings)

    def values(self, target: float | None = None, with_first_step: bool = False) -> Values:
        """Returns what is compared: the speed of each run, or with a target how often in a second
        it would come to that loss; one that missed it as if it had come there at its end."""
        if target is None:
            return [(number, training.tok_per_sec) for number, training in self.runs]
        times = self.times_to(target, with_first_step, missed_at_end=True)
        return [
            (number, 1 / seconds if seconds > 0 else None)
            for number, (_, seconds) in zip(self.by_round, times, strict=True)
        ]


class Row(Figures):
    """A run of a plan: its figures, and how they compare to those of other runs.

    Speedups and differences are over the run that it is compared to, or where that has no figures,
    over the one that *that* is compared to, and so on: `reference`. Those named `..._baseline` are
    over the first run of the plan. Where the run is a script without a technique (`run.ablated`),
    speedup and significance are the technique's: of the script with it over the one without.
    """

    def __init__(self, run: Run, measured: Measurement, rows: "Rows"):
        """Takes the table, with the rows before it; the others follow."""
        super().__init__(
            (result for result in measured.results if result.name == run.name), measured.plan
        )
        self.run, self.measured, self.rows = run, measured, rows
        self.baseline: Row | None = next(iter(rows.values()), None)

    @property
    def label(self) -> str:
        return self.run.label

    @property
    def technique(self) -> str:
        return technique_names().get(self.run.ablated or str(self.run.script), self.run.technique)

    @cached_property
    def outcome(self) -> Outcome | None:
        """Why it has no figures, or fewer; None: it isn't known yet, or there is no reason."""
        if self.failures and not self.run.error:
            return self.failures[0]
        if self.runs and not self.run.error:
            return None
        return self.measured.skipped().get(self.run.name)

    @property
    def error(self) -> str | None:
        return str(self.outcome) if self.outcome else None

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

    @cached_property
    def reference(self) -> "Row | None":
        """The row that it is compared to: the nearest with figures that is printed on its own."""
        if self.joined_with:
            return None
        row = self.rows.get(self.run.compared_to)
        while row and (not row.speeds or row.joined_with):
            row = row.rows.get(row.run.compared_to)
        return row

    @cached_property
    def joined_with(self) -> "Row | None":
        """The next technique's row, with which it is printed as one: where a run on a GPU was much
        slower than the others, the gains of the two can't be told apart. A CPU's noise is wider:
        there every row is printed."""
        on_gpu = self.measured.machine.get("gpus")
        if not on_gpu or not self.speeds or self.slowdown < UNSTEADY or not self.run.compared_to:
            return None
        return next((row for row in self.rows.values() if row.is_step_after(self)), None)

    def is_step_after(self, row: "Row") -> bool:
        """Returns whether it has figures, and its script is that of `row` with the techniques that
        follow in the series."""
        return (
            bool(self.speeds)
            and self.run.compared_to == row.run.name
            and is_step(self.run)
            and is_step(row.run)
        )

    @property
    def joined(self) -> "list[Row]":
        """The rows that are printed as one with it, whose gains are part of its own."""
        return [row for row in self.rows.values() if row.joined_with is self]

    @property
    def techniques(self) -> list[int]:
        """The numbers of the techniques that its factor is of: more than one in a ladder where the
        row before it was left out or failed; none where there is no factor, or no ladder."""
        if self.run.number is None or not self.reference or not self.speeds:
            return []
        numbers = range(self.reference.run.number + 1, self.run.number + 1)
        idle = without_effect_on_gpus() if self.measured.machine["gpus"] else set()
        return [number for number in numbers if number == self.run.number or number not in idle]

    def speedup(
        self, target: float | None = None, with_first_step: bool = False, over: "Row | None" = None
    ) -> "Comparison":
        """Returns how many times as fast as its reference, or as the row `over`, it is or comes to
        a target."""
        return Comparison(self, over or self.reference, target, with_first_step)

    @property
    def factor(self) -> float | None:
        return self.speedup().factor

    @property
    def interval(self) -> tuple[float, float] | None:
        return self.speedup().interval

    @property
    def significance(self) -> str | None:
        return self.speedup().significance

    @property
    def factor_baseline(self) -> float | None:
        return self.speedup(over=self.baseline).factor

    @property
    def memory_factor(self) -> float | None:
        """How many times the memory of its reference; it isn't tested."""
        return mean_ratio(self.memories, self.reference.memories) if self.reference else None

    @property
    def loss_difference(self) -> float | None:
        return difference(self.val_loss, self.reference.val_loss) if self.reference else None

    @property
    def published_factor(self) -> float | None:
        return published_ratio(self, self.reference)

    @property
    def published_factor_baseline(self) -> float | None:
        return published_ratio(self, self.baseline)


def is_step(run: Run) -> bool:
    """Returns whether a run is a script of the series, in one process."""
    return run.number is not None and run.stage is None and not run.torchrun


def printed(rows: Iterable[Row]) -> list[Row]:
    """Returns the rows of a table that are printed on their own."""
    return [row for row in rows if not row.joined_with]


def published_ratio(row: Row, other: Row | None) -> float | None:
    """Returns the published speed of a row over another one's; None where one isn't known."""
    return ratio(row.run.published, other.run.published) if other else None


@dataclass(frozen=True, eq=False)
class Comparison:
    """How many times as fast as another row a row is, or comes to a loss."""

    row: Row
    over: Row | None
    target: float | None = None
    with_first_step: bool = False

    @property
    def pair(self) -> tuple[Row, Row] | None:
        """Two rows, of which the first one is the faster by the factor; None without figures."""
        if not self.over or not self.row.speeds:
            return None
        return (self.over, self.row) if self.row.run.ablated else (self.row, self.over)

    @property
    def family(self) -> Family:
        return self.row.rows.family(self.target, self.with_first_step)

    @cached_property
    def estimate(self) -> Estimate | None:
        """The factor's logarithm; None where it isn't tested."""
        if not self.pair:
            return None
        one, other = self.pair
        return self.family.difference(one.run.name, other.run.name)

    @cached_property
    def factor(self) -> float | None:
        """The mean over the rounds; None where one of the rows has no figures, or both missed the
        target."""
        if self.estimate:
            return self.estimate.factor
        if not self.pair or all(row.missed(self.target) for row in self.pair):
            return None
        return mean_ratio(*(row.values(self.target, self.with_first_step) for row in self.pair))

    @property
    def sign(self) -> str:
        """Marks a bound, "> " or "< ", as the factor is where a run missed the target."""
        if not self.pair:
            return ""
        one, other = self.pair
        if one.missed(self.target):
            return "< "
        return "> " if other.missed(self.target) else ""

    @property
    def interval(self) -> tuple[float, float] | None:
        """The factor's 95 % confidence interval."""
        return self.estimate and self.estimate.interval

    @property
    def is_wide(self) -> bool:
        """Whether the interval is so wide that one run distorts the mean."""
        return bool(self.interval) and self.interval[1] > WIDE * self.interval[0]

    @property
    def significance(self) -> str | None:
        """Of the speedup over the row's reference, by the whole table: "faster", "slower", "no
        significant change" or "not tested"; None without figures."""
        return self.family.significance(self.row.run.name) if self.pair else None


class Rows(dict[str, Row]):
    """The rows of a table by their names, and what is tested as a whole."""

    def __init__(self):
        self.families: dict[tuple[float | None, bool], Family] = {}

    def family(self, target: float | None = None, with_first_step: bool = False) -> Family:
        """Returns the speedups of the rows' values() with these arguments. Rows with a failed run,
        or with one that missed its target, aren't tested: the others alone would flatter them."""
        key = target, with_first_step
        if key not in self.families:
            logs = {
                name: logs_of(row.values(*key))
                for name, row in self.items()
                if row.speeds and not row.outcome and not row.missed(target)
            }
            self.families[key] = Family(logs, self.pairs(), pooled=target is None)
        return self.families[key]

    def pairs(self) -> dict[str, tuple[str, str]]:
        """Returns by the rows' names those of the two that each compares, where it has figures."""
        pairs = {name: row.speedup().pair for name, row in self.items()}
        return {name: (pair[0].run.name, pair[1].run.name) for name, pair in pairs.items() if pair}


def rows_of(measured: Measurement) -> list[Row]:
    """Returns a row for each run of a plan."""
    rows = Rows()
    for run in measured.plan.runs:
        rows[run.name] = Row(run, measured, rows)
    return list(rows.values())
