"""From a journal's Measurement to rows: medians over the rounds, speedups, significance."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from statistics import median
from typing import NamedTuple, overload

from bench.analysis.stats import SIGNIFICANT, Estimate, Family, Values, logs_of, mean_ratio
from bench.analysis.training import Training
from bench.catalogue import Run, technique_names, without_effect_on_gpus
from bench.measure.measurement import Measurement
from bench.measure.plan import Plan
from bench.measure.records import Outcome, Record, Result

WIDE = 1.4  # the upper end of an interval over the lower: then one run distorts the mean
UNSTEADY = 1.1  # times its median time that a row's slowest run took, on a GPU


def known_values(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def median_known(values: Iterable[float | None]) -> float | None:
    """Returns the median of the values that are known; None where it is infinite."""
    middle = median(known_values(values) or [math.inf])
    if math.isinf(middle):
        return None
    return middle


def ratio(a: float | None, b: float | None) -> float | None:
    if a and b:
        return a / b
    return None


def subtract(a: float | None, b: float | None) -> float | None:
    if a is None or b is None:
        return None
    return a - b


class TrainedRun(NamedTuple):
    """A run that came to a speed."""

    round: int
    seed: int
    training: Training


class Goal(NamedTuple):
    """A validation loss to come to, and whether the first step's compilation counts."""

    loss: float
    with_first_step: bool = False


class Arrival(NamedTuple):
    """How the run of a round came to a loss, or that it never did."""

    round: int
    tokens: float  # infinite where it missed the loss
    training: float  # seconds; where it missed the loss, those of all its training
    compilation: float  # seconds that its first step takes beyond a median one, had it to compile
    missed: bool

    def at_least(self, with_first_step: bool) -> float:
        """Returns the seconds to the loss, or, where it missed that, to its end: a bound."""
        if with_first_step:
            return self.training + self.compilation
        return self.training

    def after(self, with_first_step: bool) -> float:
        """Returns the seconds to the loss; infinity where it missed that."""
        if self.missed:
            return math.inf
        return self.at_least(with_first_step)

    def rate(self, with_first_step: bool) -> float | None:
        """Returns how often in a second a run would come to the loss, one that missed it as if it
        had come there at its end; None where that took no time."""
        seconds = self.at_least(with_first_step)
        if seconds <= 0:
            return None
        return 1 / seconds


class Figures:
    """What the results of a run come to: medians over the rounds, None for what isn't known."""

    def __init__(self, results: Iterable[Result], plan: Plan):
        self.results = sorted(results, key=attrgetter("round"))
        self.plan = plan

    @property
    def failures(self) -> list[Outcome]:
        return [result.outcome for result in self.results if not result.outcome.complete]

    @cached_property
    def trained(self) -> list[TrainedRun]:
        """Every complete run, which tells speed and memory."""
        return [
            TrainedRun(result.round, result.seed, Training(result.record))
            for result in self.results
            if result.record
        ]

    @cached_property
    def by_round(self) -> dict[int, Training]:
        """The run of each round that has the round's seed: it tells losses and times, too."""
        return {
            run.round: run.training
            for run in self.trained
            if run.seed == self.plan.seed_of(run.round)
        }

    @cached_property
    def losses_by_seed(self) -> dict[int, float | None]:
        tokens = self.plan.loss_tokens
        return {run.seed: run.training.record.val_loss_after(tokens) for run in self.trained}

    @property
    def trainings(self) -> list[Training]:
        """One of each round."""
        return list(self.by_round.values())

    @property
    def training(self) -> Training | None:
        """That of the first round that came to its end; it compiled, unless round 1 failed."""
        if not self.trainings:
            return None
        return self.trainings[0]

    @property
    def record(self) -> Record | None:
        if not self.training:
            return None
        return self.training.record

    @property
    def rounds(self) -> int:
        return len(self.trainings)

    @cached_property
    def speeds(self) -> list[float]:
        """The tok/sec of each run, of all its processes together."""
        return known_values(run.training.tok_per_sec for run in self.trained)

    @property
    def slowdown(self) -> float | None:
        """How many times its median time the slowest run took."""
        if not self.speeds:
            return None
        return median(self.speeds) / min(self.speeds)

    @cached_property
    def memories(self) -> Values:
        """The reserved GB of each run, with its round."""
        return [(run.round, run.training.record.end["reserved_gb"]) for run in self.trained]

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
        losses = known_values(self.losses_by_seed.values())
        if len(losses) < 2 or len(losses) < len(self.losses_by_seed):
            return None
        return max(losses) - min(losses)

    # ---- Time to a loss

    @cached_property
    def excesses(self) -> dict[int, float]:
        """What the first step of each round takes beyond a median one, compilation above all."""
        return {number: training.first_step_excess for number, training in self.by_round.items()}

    @cached_property
    def compiling_rounds(self) -> set[int]:
        """The rounds that had to compile, by the plan, or since the cache was gone."""
        by_plan = {number for number in self.by_round if number <= self.plan.cold_rounds}
        without_cache = {result.round for result in self.results if result.compiled is False}
        return by_plan | without_cache

    @property
    def warm_excess(self) -> float | None:
        """What the first step takes beyond a median one, where it was compiled before."""
        return median_known(
            excess
            for number, excess in self.excesses.items()
            if number not in self.compiling_rounds
        )

    @property
    def warm_first_step_seconds(self) -> float | None:
        """The median first step of the rounds that found it compiled."""
        return median_known(
            training.record.first_step_seconds
            for number, training in self.by_round.items()
            if number not in self.compiling_rounds
        )

    def compilation(self, number: int) -> float:
        """Returns what the first step of a round would take beyond a median one, had it to compile:
        its own figure, or the median of the rounds that did."""
        if number in self.compiling_rounds:
            return self.excesses[number]
        compiling = [self.excesses[other] for other in self.excesses.keys() & self.compiling_rounds]
        return median(compiling or self.excesses.values())

    def arrivals(self, target: float) -> list[Arrival]:
        """Returns how the run of each round came to a loss, or that it never did."""
        arrivals = []
        for number, training in self.by_round.items():
            reached = training.reached(target)
            tokens, seconds = math.inf, training.train_seconds
            if reached:
                tokens, seconds = reached
            arrivals.append(
                Arrival(number, tokens, seconds, self.compilation(number), missed=not reached)
            )
        return arrivals

    def tokens_to(self, target: float) -> float | None:
        """Returns the median, of which a run that missed the target counts as the slowest."""
        return median_known(arrival.tokens for arrival in self.arrivals(target))

    def seconds_to(self, target: float, with_first_step: bool = False) -> float | None:
        """Returns the median, as tokens_to()."""
        return median_known(arrival.after(with_first_step) for arrival in self.arrivals(target))

    def loss_at(self, seconds: float) -> float | None:
        """Returns the median validation loss after this many seconds of training."""
        return median_known(training.loss_at(seconds) for training in self.trainings)

    # ---- What rows are compared by

    def values(self, goal: Goal | None) -> Values:
        """Returns the speed of each run, or its rate of coming to a goal, with its round."""
        if goal is None:
            return [(run.round, run.training.tok_per_sec) for run in self.trained]
        return [
            (arrival.round, arrival.rate(goal.with_first_step))
            for arrival in self.arrivals(goal.loss)
        ]

    def missed(self, goal: Goal | None) -> bool:
        """Returns whether a run never came to a goal."""
        return goal is not None and any(arrival.missed for arrival in self.arrivals(goal.loss))


class Row(Figures):
    """A run of a plan: its figures, and how they compare to those of other runs.

    Speedups and differences are over the run that it is compared to, or where that has no figures,
    over the one that *that* is compared to, and so on: `reference`. Those named `..._baseline` are
    over the first run of the plan. Where the run is a script without a technique (`run.ablated`),
    speedup and significance are the technique's: of the script with it over the one without.
    """

    def __init__(self, run: Run, table: "Rows"):
        """Takes the table that the row is of, which knows the other rows."""
        measured = table.measured
        own = [result for result in measured.results if result.name == run.name]
        super().__init__(own, measured.plan)
        self.run = run  # as planned
        self.measured = measured
        self.table = table
        self.speedups: dict[Goal | None, Speedup] = {}  # those that were asked for

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
        if self.trained and not self.run.error:
            return None
        return self.measured.skipped().get(self.run.name)

    @property
    def error(self) -> str | None:
        if not self.outcome:
            return None
        return str(self.outcome)

    @property
    def share_of_peak(self) -> float | None:
        """Of this machine's own rate of matmuls, in the precision of the run. Each GPU has that
        rate; the ranks of a CPU share it."""
        if not self.record:
            return None
        units = 1
        if self.measured.machine["gpus"]:
            units = self.run.processes
        flops = self.tok_per_sec * self.record.config["flops_per_token"] / units
        return ratio(flops, peak_at(self.record.precision, self.measured.peak))

    # ---- Compared

    @property
    def baseline(self) -> "Row | None":
        """The first row; None of that row itself."""
        if self.table[0] is self:
            return None
        return self.table[0]

    @cached_property
    def joined_with(self) -> "Row | None":
        """The next technique's row where this one is printed as one with it: where a run was much
        slower than the others, the gains of the two can't be told apart."""
        if not self.is_unsteady or not self.is_step or not self.run.compared_to:
            return None
        later = [row for row in self.table if row.before is self and row.is_step and row.speeds]
        return next(iter(later), None)

    @property
    def joined(self) -> "list[Row]":
        """The rows that are printed as one with it, whose gains are part of its own."""
        return [row for row in self.table if row.joined_with is self]

    @cached_property
    def reference(self) -> "Row | None":
        """The row that it is compared to: the nearest with figures that is printed on its own. None
        where this row is printed as one with the next."""
        if self.joined_with:
            return None
        reference = self.before
        while reference and (not reference.speeds or reference.joined_with):
            reference = reference.before
        return reference

    @property
    def before(self) -> "Row | None":
        """The row that the plan compares it to."""
        if not self.run.compared_to:
            return None
        return self.table.by_name.get(self.run.compared_to)

    @property
    def is_step(self) -> bool:
        """Whether it is a script of the series, in one process."""
        return self.run.number is not None and self.run.stage is None and not self.run.torchrun

    @property
    def is_unsteady(self) -> bool:
        """Whether a run on a GPU was much slower than the others. A CPU's noise is wider."""
        if not self.measured.machine.get("gpus") or self.slowdown is None:
            return False
        return self.slowdown >= UNSTEADY

    @property
    def techniques(self) -> list[int]:
        """The numbers of the techniques that its factor is of: more than one in a ladder where the
        row before it was left out or failed; none where there is no factor, or no ladder."""
        if not self.reference or not self.speeds:
            return []
        return techniques_between(
            self.reference.run, self.run, on_gpu=bool(self.measured.machine["gpus"])
        )

    def speedup(self, goal: Goal | None = None) -> "Speedup":
        """Returns how many times as fast as its reference it is, or comes to a goal."""
        if goal not in self.speedups:
            self.speedups[goal] = Speedup(self, self.reference, goal)
        return self.speedups[goal]

    def speedup_over(self, other: "Row | None") -> "Comparison":
        """Returns how many times as fast as another row it is."""
        return Comparison(self, other)

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
        return self.speedup_over(self.baseline).factor

    @property
    def memory_factor(self) -> float | None:
        """How many times the memory of its reference; it isn't tested."""
        if not self.reference:
            return None
        return mean_ratio(self.memories, self.reference.memories)

    @property
    def loss_difference(self) -> float | None:
        if not self.reference:
            return None
        return subtract(self.val_loss, self.reference.val_loss)

    @property
    def published_factor(self) -> float | None:
        return published_ratio(self, self.reference)

    @property
    def published_factor_baseline(self) -> float | None:
        return published_ratio(self, self.baseline)


def peak_at(precision: str | None, peak: dict[str, float]) -> float | None:
    """Returns a machine's rate of matmuls in a precision; None where it wasn't measured. Without a
    rate of its own TF32 is float32."""
    if precision == "TF32" and "TF32" not in peak:
        return peak.get("float32")
    if not precision:
        return None
    return peak.get(precision)


def techniques_between(before: Run, run: Run, on_gpu: bool) -> list[int]:
    """Returns the numbers of the techniques that a script has and one before it in the series
    doesn't, the last of which is its own; on a GPU without those that only speed up a CPU. None of
    scripts outside the series."""
    if before.number is None or run.number is None:
        return []
    others = set(range(before.number + 1, run.number))
    if on_gpu:
        others -= without_effect_on_gpus()
    return [*sorted(others), run.number]


def printed(rows: Iterable[Row]) -> list[Row]:
    """Returns the rows of a table that are printed on their own."""
    return [row for row in rows if not row.joined_with]


def published_ratio(row: Row, other: Row | None) -> float | None:
    """Returns the published speed of a row over another one's; None where one isn't known."""
    if not other:
        return None
    return ratio(row.run.published, other.run.published)


@dataclass(frozen=True, eq=False)
class Comparison:
    """How many times as fast as another row a row is, or comes to a goal."""

    row: Row
    over: Row | None
    goal: Goal | None = None

    @property
    def pair(self) -> tuple[Row, Row] | None:
        """Two rows, of which the first one is the faster by the factor; None without figures."""
        if not self.over or not self.row.speeds:
            return None
        if self.row.run.ablated:
            return (self.over, self.row)
        return (self.row, self.over)

    @property
    def family(self) -> Family:
        return self.row.table.family(self.goal)

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
        goal."""
        if self.estimate:
            return self.estimate.factor
        if not self.pair:
            return None
        one, other = self.pair
        if one.missed(self.goal) and other.missed(self.goal):
            return None
        return mean_ratio(one.values(self.goal), other.values(self.goal))

    @property
    def sign(self) -> str:
        """Marks a bound, "> " or "< ", as the factor is where a run missed the goal."""
        if not self.pair:
            return ""
        one, other = self.pair
        if one.missed(self.goal):
            return "< "
        if other.missed(self.goal):
            return "> "
        return ""

    @property
    def interval(self) -> tuple[float, float] | None:
        """The factor's 95% confidence interval."""
        if not self.estimate:
            return None
        return self.estimate.interval

    @property
    def is_wide(self) -> bool:
        """Whether the interval is so wide that one run distorts the mean."""
        if not self.interval:
            return False
        low, high = self.interval
        return high > WIDE * low


class Speedup(Comparison):
    """How many times as fast as its reference a row is: the one comparison of a row that is tested
    together with those of its table."""

    @property
    def significance(self) -> str | None:
        """By the whole table: "faster", "slower", "no significant change" or "not tested"; None
        without figures."""
        if not self.pair:
            return None
        return self.family.significance(self.row.run.name)

    @property
    def is_significant(self) -> bool:
        return self.significance in SIGNIFICANT


class Rows(Sequence[Row]):
    """The rows of a measurement, one for each run of its plan, and what is tested of them as a
    whole."""

    def __init__(self, measured: Measurement):
        self.measured = measured
        self.by_name = {run.name: Row(run, self) for run in measured.plan.runs}
        self.in_order = list(self.by_name.values())
        self.families: dict[Goal | None, Family] = {}

    @overload
    def __getitem__(self, place: int) -> Row: ...

    @overload
    def __getitem__(self, place: slice) -> list[Row]: ...

    def __getitem__(self, place):
        return self.in_order[place]

    def __len__(self) -> int:
        return len(self.in_order)

    def family(self, goal: Goal | None = None) -> Family:
        """Returns the speedups of the rows, or those of coming to a goal. Rows with a failed run,
        or with one that missed the goal, aren't tested: their other runs would flatter them."""
        if goal not in self.families:
            logs = {
                row.run.name: logs_of(row.values(goal))
                for row in self
                if row.speeds and not row.outcome and not row.missed(goal)
            }
            self.families[goal] = Family(logs, self.pairs(), pooled=goal is None)
        return self.families[goal]

    def pairs(self) -> dict[str, tuple[str, str]]:
        """Returns by the rows' names those of the two that each compares, where it has figures."""
        pairs = {}
        for row in self:
            pair = row.speedup().pair
            if pair:
                one, other = pair
                pairs[row.run.name] = one.run.name, other.run.name
        return pairs
