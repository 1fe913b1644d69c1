"""From a journal's Measurement to rows: figures, speedups over other rows, significance."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

from bench.analysis.figures import Figures, Goal
from bench.analysis.stats import SIGNIFICANT, Estimate, Family, logs_of, mean_ratio
from bench.analysis.values import ratio, subtract
from bench.catalogue import Run, technique_names, without_effect_on_gpus
from bench.measure.measurement import Measurement
from bench.measure.records import Outcome

WIDE = 1.4  # the upper end of an interval over the lower: then one run distorts the mean
UNSTEADY = 1.1  # times its median time that a row's slowest run took, on a GPU


class Row(Figures):
    """A run of a plan: its figures, and how they compare to those of other runs.

    Speedups and differences are over its `reference`; those named `..._baseline` are over the first
    row. Where the run is a script without a technique (`run.ablated`), speedup and significance are
    the technique's: of the script with it over the one without.
    """

    def __init__(self, run: Run, table: "Rows"):
        """Takes the table that the row is of, which knows the other rows."""
        measured = table.measured
        results = [result for result in measured.results if result.name == run.name]
        super().__init__(results, measured.plan)
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
        """The share of this machine's own rate of matmuls that it reaches, in its precision. Each
        GPU has that rate; the ranks of a CPU share it."""
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
        """The next technique's row, if the two are printed as one: where a run of this one was much
        slower than the others, their gains can't be told apart."""
        if not self.is_unsteady or not self.is_step or not self.run.compared_to:
            return None
        return self.table.next_steps.get(self.run.name)

    @property
    def joined(self) -> "list[Row]":
        """The rows that are printed as one with this one, and whose gains are part of its own."""
        return [row for row in self.table if row.joined_with is self]

    @cached_property
    def reference(self) -> "Row | None":
        """The row that this one is compared to: from `before` backwards the first that has figures
        and is printed on its own. None where this row is printed as one with the next."""
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
        """The numbers of the techniques whose gains are in its factor: in a ladder its own, and
        those between its reference and itself; [] without a factor or a ladder."""
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
    doesn't; its own is the last. On a GPU those that only speed up a CPU are left out. Scripts
    outside the series have none."""
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

    @cached_property
    def next_steps(self) -> dict[str, Row]:
        """The row of the next technique that has figures, by the name of the row before it."""
        steps: dict[str, Row] = {}
        for row in self:
            if row.run.compared_to and row.is_step and row.speeds:
                steps.setdefault(row.run.compared_to, row)
        return steps

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
