"""What is measured: the runs that are compared, how each of them runs, and where."""

import argparse
import random
from collections.abc import Generator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.catalogue import Run, Scripts
from bench.common import BUILD, sha256, write_whole
from bench.machine import Machine

if TYPE_CHECKING:
    from bench.measure.measurement import Measurement
    from bench.measure.records import Record

SEED = 123
# Losses are compared after this many training tokens per process; 393,216 are one epoch of the full
# experiment at batch size 32.
TOKENS = {"cuda": 393_216, "cpu": 16_384}
SCRATCH = "{scratch}"  # in a run's options: a new folder, removed after the run
# All runs of a table are timed over equally many steps, whatever their batch, since noise is pooled
# among rows of equal steps: at least over these.
STEPS = {"cuda": 48, "cpu": 32}
# As cold_rounds of a Plan: so one lucky compilation isn't in all figures of a row.
EVERY_ROUND = 10**6


@dataclass(frozen=True)
class Job:
    """A run in a round, with a seed."""

    run: Run
    round: int
    seed: int

    @property
    def key(self) -> tuple[str, int, int]:
        return self.run.name, self.round, self.seed


@dataclass(frozen=True)
class Growth:
    """How sizes grow from run to run. A size that doesn't fit is no failure, but no larger one is
    tried after it."""

    memory: float  # a run takes about so many times the memory of the run before it
    limit_gb: float | None = None  # a run that would take more by this estimate isn't tried


@dataclass(frozen=True)
class EqualSteps:
    """How runs end that are compared step by step: all train for equally many steps."""

    # Of each process, at least; losses are compared after them (None: at the end of each run).
    tokens: int | None = None
    min_steps: int = 1  # where these tokens are fewer

    @property
    def loss_tokens(self) -> int | None:
        """After how many tokens losses are compared; None: at the end of each run."""
        return self.tokens


@dataclass(frozen=True)
class WholeScript:
    """How runs end that are compared as a whole: where their scripts do, unless what follows ends
    them before."""

    epochs: int | None = None  # None: as many as the script has
    tokens: int | None = None  # of each process, in all
    # Validation losses, by what they are in words. The lowest one ends a run.
    targets: dict[str, float] = field(default_factory=dict)
    log_tokens: int | None = None  # from one log line to the next; None: as the script has it

    @property
    def loss_tokens(self) -> int | None:
        """After how many tokens losses are compared; None: at the end of each run."""
        if self.targets:
            return None
        return self.tokens


PlanLength = EqualSteps | WholeScript


@dataclass
class Plan:
    """Runs that are compared, the baseline first, and how each of them runs."""

    runs: list[Run]
    kind: str = ""  # what sets it apart in its study, such as "gpt2-medium"
    length: PlanLength = EqualSteps()
    rounds: int | None = None  # None: as many as the study has
    seed_noise: int = 0  # further runs of the baseline in each round, with seeds of their own
    order: int | None = None  # seed of the order of runs in each round; None: as they stand here
    cold_rounds: int = 1  # so many rounds compile again: their first step tells how long that takes
    first_seed: int = SEED
    new_seeds: bool = False  # round k has the seed first_seed + k - 1; else all have first_seed
    growth: Growth | None = None  # where sizes grow until one doesn't fit
    # The batch sizes that take the place of published ones, where those don't fit the GPU.
    batches: dict[int, int] = field(default_factory=dict)

    def seed_of(self, number: int) -> int:
        """Returns the seed of all runs in round `number`, which counts from 1."""
        if self.new_seeds:
            return self.first_seed + number - 1
        return self.first_seed

    def noise_seeds(self, number: int) -> range:
        """Returns the further seeds of the baseline in a round; each round has others."""
        first = self.first_seed + 1 + (number - 1) * self.seed_noise
        return range(first, first + self.seed_noise)

    def jobs(self) -> list[Job]:
        """Returns every run of every round, in the order in which they run."""
        rounds = range(1, (self.rounds or 1) + 1)
        return [job for number in rounds for job in self.in_order(number, self.jobs_of(number))]

    def jobs_of(self, number: int) -> list[Job]:
        """Returns each run of a round, the baseline with further seeds, too."""
        jobs = []
        for run in self.runnable:
            jobs.append(Job(run, number, self.seed_of(number)))
            if run is self.runs[0]:
                jobs += [Job(run, number, seed) for seed in self.noise_seeds(number)]
        return jobs

    def in_order(self, number: int, jobs: list[Job]) -> list[Job]:
        """Returns the jobs of round `number` in the order in which they run. Of each two rounds the
        second has the order of the first backwards, so that a drift of the machine affects all runs
        alike."""
        if self.order is None:
            return jobs
        is_second, first = number % 2 == 0, number  # of the two rounds that share an order
        if is_second:
            first = number - 1
        random.Random(f"{self.order} {first}").shuffle(jobs)
        if is_second:
            jobs.reverse()
        return jobs

    @property
    def runnable(self) -> list[Run]:
        """The runs that this machine can run."""
        return [run for run in self.runs if not run.error]

    @property
    def loss_tokens(self) -> int | None:
        """After how many tokens losses are compared; None: at the end of each run."""
        return self.length.loss_tokens

    @property
    def targets(self) -> dict[str, float]:
        """The validation losses that its runs are timed to; {}: none."""
        if isinstance(self.length, WholeScript):
            return self.length.targets
        return {}

    def as_json(self) -> dict:
        """Returns it for a journal, with the names of the scripts."""
        plan = asdict(self)
        del plan["length"]
        return plan | length_as_json(self.length) | dict(runs=[*map(run_as_json, self.runs)])

    @classmethod
    def from_json(cls, plan: dict) -> "Plan":
        """Returns the plan of a journal. Raises one of common.DAMAGE for something else."""
        others = {name: value for name, value in plan.items() if name not in LENGTH_FIELDS}
        runs = [Run(**run) for run in plan["runs"]]
        runs = [run.replace(options=tuple(run.options)) for run in runs]
        growth = None
        if plan["growth"]:
            growth = Growth(**plan["growth"])
        # JSON has the names of fields as texts.
        batches = {int(size): batch for size, batch in plan["batches"].items()}
        length = length_from_json(plan)
        return cls(**others | dict(runs=runs, growth=growth, batches=batches, length=length))


# In a journal a plan has the fields of both lengths, and which of them is meant.
LENGTH_FIELDS = {"full_length", *asdict(EqualSteps()), *asdict(WholeScript())}


def length_as_json(length: PlanLength) -> dict:
    which = dict(full_length=isinstance(length, WholeScript))
    return asdict(EqualSteps()) | asdict(WholeScript()) | asdict(length) | which


def length_from_json(plan: dict) -> PlanLength:
    """Returns the length of a journal's plan, maybe an older one that lacks a field. Raises one of
    common.DAMAGE for something else."""
    kind: type[PlanLength] = EqualSteps
    if plan["full_length"]:
        kind = WholeScript
    names = [part.name for part in fields(kind)]
    return kind(**{name: plan[name] for name in names if name in plan})


def run_as_json(run: Run) -> dict:
    """Returns the fields of a run that aren't the defaults; files by their names."""
    default = asdict(Run("", ""))
    changed = {name: value for name, value in asdict(run).items() if value != default[name]}
    for name, value in changed.items():
        if isinstance(value, Path):
            changed[name] = value.name
    return changed


@dataclass
class Setup:
    """Where and how a study is measured."""

    machine: Machine
    scripts: Scripts
    data: Path
    results: Path
    args: argparse.Namespace  # the study's own options
    options: list[str] = field(default_factory=list)  # for every script
    matmul_peak: dict = field(default_factory=dict)  # as Measurement has it, where it is known
    in_report: bool = False  # where a GPU's whole scripts are shorter
    batches: dict[int, int] = field(default_factory=dict)  # as Plan has them
    configurations: dict[tuple, dict] = field(default_factory=dict)  # see sizing.configurations

    @property
    def device(self) -> str:
        return self.machine["device"]

    def write_script(self, run: Run) -> Path:
        """Writes a run's script into a folder of build/ that its content names, unless it is a file
        already; returns its file. Raises StackError, OSError, UserError."""
        if isinstance(run.script, Path):
            return run.script
        text = self.scripts.text(run.script)
        path = BUILD / "scripts" / sha256(text)[:16] / f"{run.name}.py"
        write_whole(path, text)
        return path


class Measurable:
    """How a study is measured; bench.studies.Study adds how it is started and shown."""

    rounds: dict[str, int] = {"cuda": 4, "cpu": 4}
    reads_tokens = True  # whether its runs train on the tokens in data/
    variables: dict[str, str] = {}  # of its runs' environment
    shows_limit = False  # then it measures how fast memory is, too

    @property
    def name(self) -> str:
        raise NotImplementedError

    def plans(self, setup: Setup) -> "Generator[Plan, Measurement, None]":
        """Yields what to measure. A plan that was measured comes back with its results, on which
        the next one may depend. Raises UserError, StackError."""
        raise NotImplementedError

    def later(self, setup: Setup, plan: Plan) -> list[Plan]:
        """Returns plans that take as long as those that will follow this one, to estimate the time:
        the real ones may depend on its results. Raises UserError, StackError."""
        return []

    def batches(self, setup: Setup) -> dict[int, int]:
        """Returns the batch sizes in place of published ones with which its runs fit."""
        return setup.batches

    def driver(self, setup: Setup, run: Run) -> list[Any]:
        """Returns what stands before the script on a run's command line: a program that runs it,
        and that program's arguments; none where the script is started itself."""
        return []

    def imports(self, run: Run) -> list[Path]:
        """Returns the files of this repository that a run's script or its driver imports, so that
        results change with them. 00, 01, 02 and variants import none."""
        return []

    def cores(self, run: Run) -> int | None:
        """Returns how many of a CPU's cores a run may use; None: all."""
        return None

    def collect(self, setup: Setup, folder: Path) -> None:
        """Takes what a run has left in `folder` next to its record. Raises ValueError where it
        isn't there."""

    def summary(self, record: "Record", plan: Plan) -> str:
        """Returns what a run came to, for the line that is printed after it."""
        raise NotImplementedError
