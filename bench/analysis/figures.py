"""`Figures`: what the results of one run come to, as medians over the rounds."""

import math
from collections.abc import Iterable
from functools import cached_property
from operator import attrgetter
from statistics import median
from typing import NamedTuple

from bench.analysis.stats import Values
from bench.analysis.training import Training
from bench.analysis.values import known_values, median_known
from bench.measure.plan import Plan
from bench.measure.records import Outcome, Record, Result


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

    def seconds_or_bound(self, with_first_step: bool) -> float:
        """Returns the seconds to the loss; where it missed that those to its end, a bound."""
        if with_first_step:
            return self.training + self.compilation
        return self.training

    def after(self, with_first_step: bool) -> float:
        """Returns the seconds to the loss; infinity where it missed that."""
        if self.missed:
            return math.inf
        return self.seconds_or_bound(with_first_step)

    def rate(self, with_first_step: bool) -> float | None:
        """Returns 1 over the seconds of seconds_or_bound(); None where there are none."""
        seconds = self.seconds_or_bound(with_first_step)
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
        """That of the first round that came to its end. Where round 1 failed, it may have found its
        graphs compiled."""
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
        """Returns the seconds beyond a median step that the first step of a round takes if it has
        to compile. Where it hadn't, that is the median of the rounds that had."""
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
