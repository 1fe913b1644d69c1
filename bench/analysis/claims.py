"""What README claims of the machines in results/reference, as numbers."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from statistics import median

from bench.analysis.folders import has_gpu, rows_in
from bench.analysis.rows import Comparison, Row, known_values, printed, ratio
from bench.analysis.stats import mean_ratio
from bench.analysis.totals import optimized_in, totals_in
from bench.analysis.tuning import EPOCH_LOSS
from bench.catalogue import (
    effect_on_loss,
    last_published_technique,
    technique_names,
    technique_number,
    without_effect_on_gpus,
)
from gpt_speed.common import UserError
from patches import stack

# In README techniques that gain less share a line, if they change neither memory nor the loss.
SMALL_GAIN = 1.015

COMPILE = "08-torch-compile"
LAST_AT_BATCH_8 = "09-padded-vocabulary"  # the last technique with the batch size of 00
OTHER_DAY = "ladder-2026-11-26"  # one long run of some techniques
# This technique has no row in the H100's ladder. steps.json has its step together with fast math,
# and whole scripts with both and with neither.
ALLOCATOR = "15-kept-memory"
WITH_FAST_MATH = "fast math, expandable segments"
BEFORE_ALLOCATOR = "01 without fast math and expandable segments"
PUBLISHED = "published 01"


class MissingRow(KeyError):
    """What a figure is of wasn't measured."""


class ByName(dict):
    """Rows or figures by their names. Raises MissingRow for a name that isn't there."""

    def __missing__(self, name: str | None):
        raise MissingRow(name)


@dataclass(frozen=True)
class Steps:
    """The records of a steps.json: single steps of 01 with changes, and whole scripts.

    The sessions, `start`, differ in speed, so changes are compared within them.
    """

    records: list[dict]

    def speeds(self, name: str) -> list[tuple[int, float]]:
        """Returns (session, tok/sec) of each time that a change was measured."""
        return [
            (record["start"], record["tok_s"])
            for record in self.records
            if record.get("name") == name and "tok_s" in record
        ]

    def speedup(self, name: str, over: str = "01") -> float | None:
        """Returns the geometric mean over the sessions of both; None without."""
        return mean_ratio(self.speeds(name), self.speeds(over))

    def sessions(self, name: str) -> list[list[float]]:
        """Returns the speeds of a change in each session that has it."""
        by_start: dict[int, list[float]] = {}
        for start, speed in self.speeds(name):
            by_start.setdefault(start, []).append(speed)
        return [*by_start.values()]

    @property
    def over_published(self) -> float | None:
        """How many times as fast as the published optimized script's step 01's was."""
        return self.speedup("01", over=PUBLISHED)

    @property
    def step_gb(self) -> dict[str, float]:
        """What single steps reserved, by the change; nothing was evaluated."""
        return ByName((record["name"], record["gb"]) for record in self.records if "gb" in record)

    @property
    def script_gb(self) -> dict[str, float]:
        """What whole scripts reserved."""
        return ByName(
            (record["script"], record["reserved_gb"])
            for record in self.records
            if record.get("event") == "end"
        )


@dataclass(frozen=True)
class Contribution:
    """What a technique gained on top of all before it, or several did together."""

    numbers: tuple[int, ...]
    speed: float | None = None  # times as fast; None of a technique for CPUs
    memory: float | None = None  # times the memory
    published: float | None = None  # times as fast on the published A100
    at_most: bool = False  # whether `speed` is an upper bound

    @property
    def patches(self) -> list[stack.Patch]:
        every = stack.load()
        return [every[number - 1] for number in self.numbers]

    @property
    def is_small(self) -> bool:
        """Whether it gains little, and changes neither memory nor the loss."""
        if self.speed is None or self.memory is None:
            return False
        unchanged = all(effect_on_loss(patch) == "unchanged" for patch in self.patches)
        return unchanged and self.speed < SMALL_GAIN and round(self.memory, 2) == 1

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """The order in which lines are listed: the most first, then bounds, then for CPUs."""
        return self.speed is None, self.at_most, -(self.speed or 0)


class Claims:
    """The rows and records that README's figures are of."""

    def __init__(self, reference: Path):
        """Takes a folder like results/reference, whose journals are read where they are needed. A
        figure that isn't there raises MissingRow, or OSError."""
        self.h100, self.h200 = reference / "nvidia-h100", reference / "nvidia-h200"
        self.folder = reference

    # ---- The H100's ladder, and what was measured there on other days

    @cached_property
    def ladder(self) -> dict[str, Row]:
        """The scripts with a speed, in their order: "00", then by the names of their patches."""
        rows = rows_in(self.h100, "ladder")
        own = [row for row in rows if row.speeds and row.run.number is not None]
        return by_script(own)

    @property
    def baseline(self) -> Row:
        return self.ladder["00"]

    @property
    def parameters(self) -> int | None:
        if not self.baseline.record:
            return None
        return self.baseline.record.config["parameters"]

    @property
    def optimized(self) -> Row:
        """The last script of the ladder."""
        if not self.ladder:
            raise MissingRow("00")
        return [*self.ladder.values()][-1]

    @property
    def compiled_script(self) -> Row:
        """The script that compiles, still with the published batch size of 00."""
        return self.ladder[COMPILE]

    @property
    def speedups_by_session(self) -> list[float | None]:
        """How many times as fast as the ladder's baseline 01 was: the ladder's last script, and the
        median step of 01 in each session of another day."""
        ladder = ratio(self.optimized.tok_per_sec, self.baseline.tok_per_sec)
        return [ladder, *self.speedups_of_steps]

    @property
    def speedups_of_steps(self) -> list[float | None]:
        """How many times as fast as the ladder's baseline the median step of 01 was in each session
        of single steps, which had no baseline."""
        sessions = [median(speeds) for speeds in self.steps.sessions("01")]
        return [ratio(speed, self.baseline.tok_per_sec) for speed in sessions]

    @property
    def speedups_at_batch_8(self) -> list[float | None]:
        """How many times as fast as the ladder's baseline the last script with its batch size is:
        the ladder's, and that of another day; of medians, since its runs vary."""
        other_day = by_script(rows_in(self.h100, OTHER_DAY))
        scripts = self.ladder[LAST_AT_BATCH_8], other_day[LAST_AT_BATCH_8]
        return [ratio(row.tok_per_sec, self.baseline.tok_per_sec) for row in scripts]

    @property
    def published_script(self) -> Row:
        """The script with all published techniques."""
        names = list(technique_names())
        return self.ladder[names[last_published_technique() - 1]]

    def speedup_over(self, other: Row) -> Comparison:
        """Returns how many times as fast as another script the optimized one is."""
        return self.optimized.speedup_over(other)

    @property
    def percent_over_published(self) -> list[float]:
        """By how many percent the optimized script is faster than the one with the published
        techniques: their steps, and in the ladder."""
        factors = [self.steps.over_published, self.speedup_over(self.published_script).factor]
        return [100 * (factor - 1) for factor in known_values(factors)]

    @property
    def memory_over_published(self) -> list[float]:
        """How many times the memory of the same scripts the optimized one needs."""
        steps, optimized = self.steps.step_gb, self.optimized.reserved_gb
        whole = ratio(optimized, self.published_script.reserved_gb)
        return known_values([steps["01"] / steps[PUBLISHED], whole])

    @property
    def autocast_variant(self) -> Row:
        """01 with float32 weights."""
        rows = [row for row in rows_in(self.h100, "variants") if not row.run.options]
        return by_script(rows)["precision-autocast"]

    @cached_property
    def steps(self) -> Steps:
        text = (self.h100 / "steps.json").read_text(encoding="utf-8")
        return Steps(json.loads(text))

    # ---- The H200: an epoch, and the time to its loss

    def loss_of_epoch(self, stage: str) -> float | None:
        """Returns the loss of "00" or "01" after one epoch at default settings."""
        return by_stage(rows_in(self.h200, "stages"))[stage].val_loss

    def tuned(self, stage: str) -> Row:
        """Returns "00" or "01" with the settings that are best for the loss of that epoch."""
        rows = [row for row in rows_in(self.h200, "time-to-loss") if EPOCH_LOSS in row.plan.targets]
        return by_stage(rows)[stage]

    @property
    def target(self) -> float:
        """The loss of one epoch that scripts were tuned for."""
        return self.tuned("00").plan.targets[EPOCH_LOSS]

    def seconds_to_target(self, stage: str, compiling: bool = False) -> float | None:
        """Returns the seconds of training, and of compiling before it, in which "00" or "01" comes
        to that loss."""
        return self.tuned(stage).seconds_to(self.target, with_first_step=compiling)

    # ---- CPUs

    @property
    def cpu_parameters(self) -> list[int]:
        """The sizes of the models that were trained on CPUs."""
        rows = [row for row in optimized_in(self.folder) if not has_gpu(row)]
        return [row.record.config["parameters"] for row in rows if row.record]

    def speedups_on(self, machine: str) -> list[float]:
        """Returns how many times as fast as 00 01 was in each measurement of a machine; of the H100
        also in those of single steps."""
        totals = totals_in(self.folder / machine)
        if machine == self.h100.name:
            totals += known_values(self.speedups_of_steps)
        return totals

    # ---- What each technique contributes on the H100

    def contributions(self) -> list[Contribution]:
        """Returns what each technique contributes on the H100, the most first; techniques that gain
        little share a line, and those for CPUs are last. Raises UserError where a technique had
        another number when it was measured."""
        for name, row in self.ladder.items():
            if row.run.number and row.run.number != technique_number(name):
                raise UserError(f"{name} was measured as technique {row.run.number}: measure again")
        measured = list(contributions_of(self.ladder.values()))
        lines = [*small_ones_joined(measured), *self.contributions_beside_ladder()]
        return sorted(lines, key=attrgetter("rank"))

    def contributions_beside_ladder(self) -> Iterator[Contribution]:
        """Yields the techniques without a row in the ladder: ALLOCATOR, and those for CPUs."""
        if ALLOCATOR not in self.ladder:
            yield self.allocator_settings()
        measured = {row.run.number for row in self.ladder.values()}
        for number in sorted(without_effect_on_gpus() - measured):
            yield Contribution((number,))

    def allocator_settings(self) -> Contribution:
        """Returns what ALLOCATOR gained: at most as much as it did with fast math."""
        return Contribution(
            (technique_number(ALLOCATOR),),
            self.steps.speedup(WITH_FAST_MATH),
            self.steps.script_gb["01"] / self.steps.script_gb[BEFORE_ALLOCATOR],
            at_most=True,
        )


def by_script(rows: Iterable[Row]) -> dict[str, Row]:
    return ByName((str(row.run.script), row) for row in rows)


def by_stage(rows: Iterable[Row]) -> dict[str | None, Row]:
    return ByName((row.run.stage, row) for row in rows)


def contributions_of(ladder: Iterable[Row]) -> Iterator[Contribution]:
    """Yields a line for each row of a ladder that is printed: one with a slow run shares its line
    with the next."""
    for row in printed(ladder):
        if row.techniques:
            yield Contribution(
                tuple(row.techniques), row.factor, row.memory_factor, row.published_factor
            )


def small_ones_joined(lines: list[Contribution]) -> list[Contribution]:
    """Returns the lines, of which those that gain little share one."""
    small = [line for line in lines if line.is_small]
    if not small:
        return lines
    return [*(line for line in lines if not line.is_small), shared_line(small)]


def shared_line(lines: list[Contribution]) -> Contribution:
    """Returns one line for several techniques, with the most that any of them gained."""
    return Contribution(
        tuple(number for line in lines for number in line.numbers),
        max(known_values(line.speed for line in lines), default=None),
        max(known_values(line.memory for line in lines), default=None),
        max(known_values(line.published for line in lines), default=None),
        at_most=True,
    )
