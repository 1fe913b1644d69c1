"""What README claims of the machines in results/reference, as numbers."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path

from bench.analysis.folders import has_gpu, rows_in
from bench.analysis.rows import Row, known_values, printed, ratio
from bench.analysis.stats import mean_ratio
from bench.analysis.totals import optimized_in, totals_in
from bench.catalogue import effect_on_loss, without_effect_on_gpus
from patches import stack

# In README techniques that gain less share a line, if they change neither memory nor the loss.
SMALL_GAIN = 1.015

# Technique 15 has no row in the H100's ladder. steps.json has its step together with fast math,
# and whole scripts with both and with neither.
ALLOCATOR = 15
WITH_FAST_MATH = "fast math, expandable segments"
BEFORE_ALLOCATOR = "01 without fast math and expandable segments"
PUBLISHED = "published 01"


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

    @property
    def over_nanogpt(self) -> float | None:
        return self.speedup("01", over="nanoGPT")

    @property
    def nanogpt(self) -> float | None:
        """How many times as fast as 01 nanoGPT's step was."""
        return self.speedup("nanoGPT")

    @property
    def over_published(self) -> float | None:
        """How many times as fast as the published optimized script's step 01's was."""
        return self.speedup("01", over=PUBLISHED)

    @property
    def step_gb(self) -> dict[str, float]:
        """What single steps reserved, by the change; nothing was evaluated."""
        return {record["name"]: record["gb"] for record in self.records if "gb" in record}

    @property
    def script_gb(self) -> dict[str, float]:
        """What whole scripts reserved."""
        return {
            record["script"]: record["reserved_gb"]
            for record in self.records
            if record.get("event") == "end"
        }


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
        figure that isn't there raises KeyError, or OSError."""
        self.h100, self.h200 = reference / "nvidia-h100", reference / "nvidia-h200"
        self.reference = reference

    @cached_property
    def ladder(self) -> dict[int, Row]:
        """The scripts with a speed on the H100, by the numbers of their techniques."""
        rows = rows_in(self.h100, "ladder")
        return {row.run.number: row for row in rows if row.speeds and row.run.number is not None}

    @property
    def baseline(self) -> Row:
        return self.ladder[0]

    @property
    def optimized(self) -> Row:
        return self.ladder[max(self.ladder, default=0)]

    @property
    def after_8(self) -> Row:
        """The script that compiles, with the published batch size of 00."""
        return self.ladder[8]

    @property
    def at_batch_8(self) -> float | None:
        """How many times as fast as the baseline the last script with its batch size is; of
        medians, since one run was slow."""
        return ratio(self.ladder[9].tok_per_sec, self.baseline.tok_per_sec)

    @property
    def after_10(self) -> Row:
        """The script with all published techniques."""
        return self.ladder[10]

    @property
    def interval(self) -> tuple[float, float] | None:
        """That of how many times as fast as the baseline the optimized script is."""
        return self.optimized.speedup_over(self.baseline).interval

    @property
    def factor_after_8(self) -> float | None:
        return self.optimized.speedup_over(self.after_8).factor

    @property
    def gains_after_10(self) -> list[float]:
        """What techniques 11 to 15 gain in percent: over the published optimized script's step, and
        in the ladder."""
        factors = [self.steps.over_published, self.optimized.speedup_over(self.after_10).factor]
        return [100 * (factor - 1) for factor in known_values(factors)]

    @property
    def nanogpt_speedup(self) -> float | None:
        """How many times as fast as the baseline nanoGPT is: a ratio of another day, times the
        ladder's."""
        return product(self.optimized.factor_baseline, self.steps.nanogpt)

    @property
    def autocast_over_nanogpt(self) -> float | None:
        """How many times as fast as nanoGPT 01 is with float32 weights, by ratios of two days."""
        return product(self.variants["precision-autocast"].factor, self.steps.over_nanogpt)

    @cached_property
    def variants(self) -> dict[str, Row]:
        """The H100's variants of 01, by their labels."""
        return {row.label: row for row in rows_in(self.h100, "variants")}

    @cached_property
    def steps(self) -> Steps:
        text = (self.h100 / "steps.json").read_text(encoding="utf-8")
        return Steps(json.loads(text))

    @cached_property
    def epoch(self) -> dict[str | None, Row]:
        """One epoch at default settings on the H200, by the script: "00" or "01"."""
        return {row.run.stage: row for row in rows_in(self.h200, "stages")}

    @cached_property
    def tuned(self) -> dict[str | None, Row]:
        """The same, tuned for the loss of that epoch."""
        return {row.run.stage: row for row in rows_in(self.h200, "time-to-loss")}

    @property
    def target(self) -> float:
        """The loss of one epoch that scripts were tuned for."""
        (target,) = self.tuned["00"].plan.targets.values()
        return target

    @property
    def seconds(self) -> dict[str | None, float | None]:
        """The seconds of training in which "00" and "01" come to that loss."""
        return {script: row.seconds_to(self.target) for script, row in self.tuned.items()}

    @property
    def seconds_compiling(self) -> dict[str | None, float | None]:
        """The same, with the first step, which compiles."""
        return {
            script: row.seconds_to(self.target, with_first_step=True)
            for script, row in self.tuned.items()
        }

    @cached_property
    def cpus(self) -> list[Row]:
        """The optimized script on each CPU."""
        return [row for row in optimized_in(self.reference) if not has_gpu(row)]

    @property
    def cpu_parameters(self) -> list[int]:
        return [row.record.config["parameters"] for row in self.cpus if row.record]

    @property
    def cpu_speedups(self) -> dict[str, list[float]]:
        """How many times as fast as 00 it was in each measurement, by the machine's folder."""
        folders = [row.measured.folder for row in self.cpus]
        return {folder.name: totals_in(folder) for folder in folders}

    def contributions(self) -> list[Contribution]:
        """Returns what each technique contributes on the H100, the most first; techniques that gain
        little share a line, and those for CPUs are last."""
        measured = list(contributions_of(self.ladder.values()))
        lines = [*small_ones_joined(measured), *self.contributions_beside_ladder()]
        return sorted(lines, key=attrgetter("rank"))

    def contributions_beside_ladder(self) -> Iterator[Contribution]:
        """Yields the techniques without a row in the ladder: 15, and those for CPUs."""
        if ALLOCATOR not in self.ladder:
            yield self.allocator_settings()
        for number in sorted(without_effect_on_gpus() - self.ladder.keys()):
            yield Contribution((number,))

    def allocator_settings(self) -> Contribution:
        """Returns what technique 15 gained: at most as much as it did with fast math."""
        return Contribution(
            (ALLOCATOR,),
            self.steps.speedup(WITH_FAST_MATH),
            self.steps.script_gb["01"] / self.steps.script_gb[BEFORE_ALLOCATOR],
            at_most=True,
        )


def product(one: float | None, other: float | None) -> float | None:
    """Returns None where one of them isn't known."""
    if one is None or other is None:
        return None
    return one * other


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
