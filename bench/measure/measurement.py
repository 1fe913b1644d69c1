"""`Measurement`: a plan, and what has been measured of it so far."""

import hashlib
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path

from bench.catalogue import Run
from bench.common import relative, sha256
from bench.corpus import tokens_in
from bench.machine import Machine, machine_difference, trained_in
from bench.measure.plan import Job, Plan, Setup
from bench.measure.records import Outcome, Result
from bench.measure.skips import skipped
from gpt_speed.common import UserError

# The fields of a measurement's `study` line beside its plan, and their types.
HEADER = dict(
    id=str,
    study=str,
    kind=str,
    time=str,
    machine=dict,
    matmul_peak=dict,
    data=str | None,
    sources=dict,
    options=list,
    commit=str | None,
)


@dataclass
class Measurement:
    """A plan, and what has been measured of it so far; where that was, and of which inputs."""

    plan: Plan
    results: list[Result] = field(default_factory=list)
    id: str = ""
    study: str = ""
    kind: str = ""  # of the plan
    time: str = ""  # when it began, such as "20261129T035406Z"
    machine: Machine = field(default_factory=Machine)
    # Floating-point operations per second, by precision.
    matmul_peak: dict[str, float] = field(default_factory=dict)
    copy_rate: float | None = None  # bytes per second that a copy reads and writes
    data: str | None = None  # the SHA-256 of meta.json
    sources: dict[str, str] = field(default_factory=dict)  # the SHA-256 of each run's script
    options: list[str] = field(default_factory=list)
    commit: str | None = None  # at the last start that measured
    lengths: dict[str, str] = field(default_factory=dict)  # options by which each run ends
    folder: Path = Path()  # in which the journal lies
    planned_rounds: int | None = None  # where more were added after some had results
    retry: set[tuple] = field(default_factory=set)  # keys of results that are to be tried again
    # How each run runs, or ran last, by its name: also of runs that the plan doesn't have any more.
    ways: dict[str, tuple] = field(init=False)

    def __post_init__(self):
        self.ways = {run.name: how_it_runs(run) for run in self.plan.runs}

    def take_over(self, earlier: "Measurement") -> set[str]:
        """Takes over from an earlier start those of its results that still count, and how many
        rounds it had planned. Returns the names of the runs whose results don't count any more."""
        self.ways = earlier.ways | self.ways
        self.results = [result for result in earlier.results if self.continues(earlier, result)]
        self.drop(self.names_of_another_length())
        self.planned_rounds = earlier.planned_rounds
        if self.planned_rounds is None and self.adds_rounds_to(earlier):
            self.planned_rounds = earlier.plan.rounds
        return earlier.names_with_results() - self.names_with_results()

    def continues(self, earlier: "Measurement", result: Result) -> bool:
        """Returns whether a result of an earlier start is of the same script, run in the same
        way."""
        is_run_alike = self.ways.get(result.name) == earlier.ways.get(result.name)
        return is_run_alike and self.is_of_this_script(result)

    def adds_rounds_to(self, earlier: "Measurement") -> bool:
        """Returns whether rounds are added to an earlier start whose speedups could be seen, which
        takes two rounds with results."""
        planned, now = earlier.plan.rounds or 1, self.plan.rounds or 1
        could_be_seen = any(result.round > 1 for result in earlier.results)
        return could_be_seen and 1 < planned < now

    def is_of_this_script(self, result: Result) -> bool:
        return result.source_sha256 == self.sources.get(result.name)

    def names_of_another_length(self) -> set[str]:
        """Returns the runs whose results were longer or shorter than they would be now."""
        return {
            result.name
            for result in self.results
            if result.length and result.length != self.lengths.get(result.name, result.length)
        }

    def names_with_results(self) -> set[str]:
        return {result.name for result in self.results}

    @property
    def has_failures(self) -> bool:
        """Whether a run failed. A size that doesn't fit hasn't, where sizes grow."""
        return any(self.is_failure(result) for result in self.results)

    def is_failure(self, result: Result) -> bool:
        """Returns whether a result isn't what its run was for: figures, or, where sizes grow, that
        this one doesn't fit."""
        if self.plan.growth and result.outcome.does_not_fit:
            return False
        return not result.outcome.complete

    def mark_failures(self) -> None:
        """Marks runs that failed to be tried again; until then their results stay."""
        self.retry = {result.key for result in self.results if self.is_failure(result)}

    def drop(self, names: Container[str]) -> None:
        """Drops the results of these runs, which are to be measured again."""
        self.results = [result for result in self.results if result.name not in names]

    def add(self, result: Result) -> None:
        """Adds a result; a run that is tried again replaces the earlier one."""
        self.results = [other for other in self.results if other.key != result.key] + [result]
        self.retry.discard(result.key)

    def differs_from(self, setup: Setup) -> str | None:
        """Returns what of a setup is so different that figures of both can't be compared; None for
        nothing."""
        different = machine_difference(self.machine, setup.machine)
        if different:
            return f"on another machine or PyTorch ({different})"
        if self.options != setup.options:
            return "with other options behind --"
        if self.has_other_tokens(setup):
            return "with other tokens"
        return None

    def has_other_tokens(self, setup: Setup) -> bool:
        """Returns whether the tokens aren't those measured so far; where there are none yet, they
        are no others."""
        today = data_of(setup.data)
        return bool(self.data and today and self.data != today)

    def check_tokens(self, setup: Setup) -> None:
        """Raises UserError where other tokens have taken the place of those measured so far."""
        if self.has_other_tokens(setup):
            raise UserError(f"{relative(setup.data)} has other tokens than were measured so far")

    @property
    def text(self) -> str:
        """What was trained on, where that isn't the book in GPT-2's tokens; else ""."""
        return next((result.record.text for result in self.results if result.record), "")

    @property
    def peak(self) -> dict[str, float]:
        """The matmul_peak, corrected on a CPU, which may have been slow when that was measured: if
        the rate in the type that is trained in was higher after a quarter of the runs, it is the
        one that all of these reached."""
        rates = sorted(result.matmul_rate for result in self.results if result.matmul_rate)
        dtype = trained_in(self.machine)
        if self.machine["gpus"] or not rates or dtype not in self.matmul_peak:
            return self.matmul_peak
        of_best_quarter = rates[3 * len(rates) // 4]
        return self.matmul_peak | {dtype: max(self.matmul_peak[dtype], of_best_quarter)}

    def jobs_left(self) -> list[Job]:
        """Returns what is left to run, without runs that failed or aren't tried."""
        answers = [result for result in self.results if result.key not in self.retry]
        done = {result.key for result in answers}
        ended = {result.name for result in answers if not result.outcome.complete}
        ended |= self.skipped().keys()
        return [
            job for job in self.plan.jobs() if job.key not in done and job.run.name not in ended
        ]

    def skipped(self) -> dict[str, Outcome]:
        """Returns why runs aren't tried, by their names."""
        return skipped(self.plan, self.results)

    def as_json(self) -> dict:
        """Returns its `study` line."""
        header = {name: getattr(self, name) for name in [*HEADER, "copy_rate"]}
        return dict(event="study", **header, lengths=self.lengths, plan=self.plan.as_json())


def how_it_runs(run: Run) -> tuple:
    """Returns what besides its script makes a run's results those of another one."""
    return run.options, run.variables, run.processes, run.torchrun, run.facts


def digest_of(file: Path) -> str:
    """Returns a file's SHA-256; it may be larger than memory."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def data_of(folder: Path) -> str | None:
    """Returns the SHA-256 of the tokens' meta.json, which has theirs; None where there are none.
    Raises UserError where it isn't theirs."""
    data = tokens_in(folder)
    if data is None:
        return None
    for part, digest in data.get("sha256", {}).items():
        file = folder / f"{part}.bin"
        if not file.exists() or digest_of(file) != digest:
            raise UserError(f"{relative(file)} isn't what meta.json says: run data/prepare.py")
    return sha256((folder / "meta.json").read_bytes())
