"""How often the rule of verdicts is wrong, and what it finds, by the noise of recorded journals.

Tables are made up in which no row differs, or one is faster, from what recorded ones left as noise:
for each run of a row one of that row's own residuals, times a normal number, so that rows keep
unequal noise, and it has longer tails than was recorded. On top come errors that rounds alone don't
average out. Each table is measured and judged as real ones are: by Plan.jobs, in two stages.
"""

import math
import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from bench.analysis.rows import rows_of
from bench.analysis.stats import Comparisons, Estimate, Values, level_of, nearest, significant
from bench.catalogue import Run
from bench.measure.journal import JOURNAL, Measured, newest, read_journal
from bench.measure.plan import WHOLE_ROUNDS, Plan

ROWS, ROUNDS = 6, WHOLE_ROUNDS  # of a journal whose noise is taken: at least
GAIN = 0.15
EXTENSIONS = 3  # how often a user who wants a verdict adds as many rounds as were planned


class Recorded(NamedTuple):
    """The noise of one measurement."""

    name: str
    residuals: list[list[float]]  # of each row
    steps: list[int]  # of each row's runs
    one_reference: bool  # whether all rows are compared to the first one, or each to the one before


class Errors(NamedTuple):
    """What rounds alone don't average out, as shares of a speed."""

    first_slot: float = 0  # by which the first run of a round is slower
    drift: float = 0  # by which the machine gets faster from the first run to the last
    compilation: float = 0  # the standard deviation between compilations of one script


CASES = {
    "noise alone": Errors(),
    "the first run of a round 3 % slower": Errors(first_slot=0.03),
    "a drift of 10 % per session": Errors(drift=0.1),
    "1 % between compilations": Errors(compilation=0.01),
}


def recorded_in(folder: Path) -> list[Recorded]:
    """The noise of every table in a folder that has rows and rounds enough."""
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        with open(path, "rb") as file:
            is_journal = file.read(len(JOURNAL)) == JOURNAL
        for measured in newest(read_journal(path)) if is_journal else ():
            found += [noise_of(measured)] if not measured.plan.targets else []
    return [each for each in found if each]


def noise_of(measured: Measured) -> Recorded | None:
    rows = [row for row in rows_of(measured) if row.record]
    numbers = sorted(set.intersection(*(set(row.by_round) for row in rows))) if rows else []
    if len(rows) < ROWS or len(numbers) < ROUNDS:
        return None
    logs = [[math.log(row.by_round[number].tok_per_sec) for number in numbers] for row in rows]
    left = [[value - fmean(row) for value in row] for row in logs]
    common = list(map(median, zip(*left, strict=True)))
    wider = math.sqrt(len(numbers) / (len(numbers) - 1) * len(rows) / (len(rows) - 1))
    left = [[(one - other) * wider for one, other in zip(row, common, strict=True)] for row in left]
    return Recorded(f"{measured.study} {measured.kind}".strip(), left,
                    [row.record.steps for row in rows],
                    all(row.versus in (None, rows[0]) for row in rows))


def plan_of(recorded: Recorded, rounds: int, draw: random.Random) -> Plan:
    """Such a table, to be measured as studies measure one."""
    runs = [Run(str(k), str(k), compared_to=None if not k else str(
        0 if recorded.one_reference else k - 1)) for k in range(len(recorded.steps))]
    return Plan(runs, rounds=rounds, order=draw.getrandbits(32), whole_rounds=WHOLE_ROUNDS,
                seed_noise=2 if recorded.one_reference else 1)


class Table:
    """A made-up measurement that continues as long as one wants."""

    def __init__(self, recorded: Recorded, errors: Errors, plan: Plan, draw: random.Random,
                 gains: dict[str, float]):
        self.recorded, self.errors, self.plan, self.draw = recorded, errors, plan, draw
        self.gains, self.done, self.round = gains, 0, 0
        self.values: dict[str, Values] = {run.name: [] for run in plan.runs}
        self.planned = len(plan.runs) * plan.rounds

    def measure(self) -> dict[str, Estimate]:
        """Runs what is left of the plan: (all comparisons)."""
        for job in self.plan.jobs()[self.done:]:
            first, self.round = job.round != self.round, job.round
            noise = self.draw.choice(self.recorded.residuals[int(job.run.name)])
            value = (self.gains.get(job.run.name, 0) + noise * self.draw.gauss(0, 1)
                     - first * self.errors.first_slot
                     + self.errors.drift * self.done / self.planned
                     + self.errors.compilation * self.draw.gauss(0, 1))
            self.values[job.run.name].append((job.round, value))
            self.done += 1
        compared = Comparisons(self.values, {
            str(k): steps for k, steps in enumerate(self.recorded.steps)}, self.plan.whole_rounds)
        return {run.name: compared.difference(run.name, run.compared_to)
                for run in self.plan.runs if run.compared_to}

    def verdicts(self, looks: int = 1) -> dict[str, float]:
        """The mean log factor of each comparison with a verdict, after both stages."""
        if self.plan.close is None:
            chosen = nearest(self.measure())
            names = {*chosen, *(run.compared_to for run in self.plan.runs if run.name in chosen)}
            self.plan = replace(self.plan, close=[
                run.name for run in self.plan.runs if run.name in names])
        found = self.measure()
        return {name: found[name].mean for name in significant(found, level_of(looks, True))}


class Shares(NamedTuple):
    """Of tables made of one measurement's noise."""

    name: str
    false: dict[str, float]  # those that hold a verdict though nothing differs, by the case
    found: float  # those that find that one row is faster by GAIN


def judge(recorded: Recorded, rounds: int, tables: int, seed: int = 1) -> Shares:
    """Of as many tables for each case, with so many rounds."""
    false = {case: share(recorded, rounds, tables, seed, errors)
             for case, errors in CASES.items()}
    false["rounds added until one is significant"] = share(
        recorded, rounds, tables, seed, extensions=EXTENSIONS)
    return Shares(recorded.name, false, share(recorded, rounds, tables, seed, gain=GAIN))


def share(recorded: Recorded, rounds: int, tables: int, seed: int,
          errors: Errors = CASES["noise alone"], extensions: int = 0, gain: float = 0) -> float:
    """The share of tables that hold a verdict though nothing differs; with `extensions` those whose
    user continues, if there is none, so often. With a `gain` the share that finds that one row,
    another in each table, is faster by it."""
    draw, held = random.Random(seed), 0
    for _ in range(tables):
        count = len(recorded.steps)
        place = draw.randrange(1, count) if gain else count
        faster = [place] if recorded.one_reference else range(place, count)
        table = Table(recorded, errors, plan_of(recorded, rounds, draw), draw,
                      {str(k): math.log(1 + gain) for k in faster})
        for looks in range(1, extensions + 2):
            table.plan = replace(table.plan, rounds=looks * rounds)
            found = table.verdicts(looks)
            if found.get(str(place), 0) > 0 if gain else found:
                held += 1
                break
    return held / tables
