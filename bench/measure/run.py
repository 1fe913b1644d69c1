"""Measures a study round by round, each run in a fresh process; its journal keeps what is done."""

import os
import shlex
import time
import zlib
from collections.abc import Generator, Sequence
from dataclasses import replace
from enum import Enum, auto
from pathlib import Path

from bench import processes
from bench.common import BUILD, ELSEWHERE, relative
from bench.machine import same_machine
from bench.measure import sizing
from bench.measure.journal import append, journal_of, read_journal
from bench.measure.launch import as_typed, command_of, run_job, source_of
from bench.measure.measurement import Measurement, data_of
from bench.measure.plan import Job, Measurable, Plan, Setup
from bench.measure.records import Result, Status
from bench.measure.sizing import Length, in_words
from gpt_speed import children
from gpt_speed.common import UserError, counted, listed

# Fields in which a plan may differ from the one that it continues.
MAY_DIFFER = {"runs", "rounds", "kind", "growth", "batches", "order"}


class Resume(Enum):
    """Whether a study continues the newest measurement of each of its plans."""

    NEVER = auto()  # a new one begins
    IF_ANY = auto()  # where there is none, a new one begins
    REQUIRED = auto()  # that there is none is an error


# What else can be done where a measurement can't be continued.
INSTEAD = {
    Resume.IF_ANY: ELSEWHERE,
    Resume.REQUIRED: "without --resume a new one begins",
}


def run_study(
    study: Measurable,
    setup: Setup,
    rounds: int | None = None,
    resume: Resume = Resume.NEVER,
    deadline: float | None = None,
) -> tuple[bool, list[Measurement]]:
    """Returns (whether it came to its end, what is measured of each of its plans).

    No run is started that by estimate would end after `deadline`, in seconds of time.monotonic().
    A run that fails isn't repeated in later rounds; when the study is resumed, it is tried again.
    Raises UserError, StackError, OSError, Interrupted.
    """
    runners: dict[str, Runner] = {}  # by the plan's kind
    plans = study.plans(setup)
    try:
        plan = next(plans, None)
        while plan:
            if plan.kind not in runners:
                before = [runner.measurement for runner in runners.values()]
                runners[plan.kind] = Runner(study, plan, setup, resume, before)
            runner = runners[plan.kind]
            if not runner.run(plan, rounds, deadline):
                break
            plan = next_plan(plans, runner.measurement)
    except children.Interrupted as interruption:
        interruption.can_resume = any(runner.has_begun for runner in runners.values())
        raise
    return plan is None, [runner.measurement for runner in runners.values()]


def next_plan(plans: Generator[Plan, Measurement, None], measurement: Measurement) -> Plan | None:
    """Returns the study's next plan, which may depend on what was measured of the one before; None
    after the last one."""
    try:
        return plans.send(measurement)
    except StopIteration:
        return None


def earlier_measurement(
    path: Path, plan: Plan, setup: Setup, resume: Resume, before: Sequence[Measurement]
) -> Measurement | None:
    """Returns the measurement that a plan continues; None where a new one begins.

    That is the newest of the plan's kind in the study's journal. Since a plan depends on those
    `before` it in the study, an older one than the first of these doesn't count.

    resume    the newest is                   then
    NEVER                                     a new one begins
    IF_ANY    not there                       a new one begins
    REQUIRED  not there                       UserError, unless only plans `before` it are there
    both      measured in another way         UserError
    both      measured in the same way        it is continued
    """
    if resume is Resume.NEVER:
        return None
    measured = read_journal(path)
    if before:
        measured = [entry for entry in measured if entry.time >= before[0].time]
    same_kind = [entry for entry in measured if entry.kind == plan.kind]
    if not same_kind:
        if resume is Resume.REQUIRED:
            check_may_begin(before, measured, path)
        return None
    earlier = same_kind[-1]
    difference = earlier.differs_from(setup) or other_settings(earlier.plan, plan)
    if difference:
        raise cannot_resume(path, difference, resume)
    return earlier


def check_may_begin(before: Sequence[Measurement], measured: list[Measurement], path: Path) -> None:
    """Raises UserError where a study that has to be resumed has nothing to resume. Where its
    journal only holds the plans before this one, it was interrupted there, and this one may
    begin."""
    if not measured:
        raise UserError(f"nothing to resume in {relative(path)}", 2)
    kinds_before = {measurement.kind for measurement in before}
    if any(measurement.kind not in kinds_before for measurement in measured):
        # As with other --names.
        raise cannot_resume(path, "with other options of the study", Resume.REQUIRED)


def cannot_resume(path: Path, difference: str, resume: Resume) -> UserError:
    reason = f"it was measured {difference}; {INSTEAD[resume]}"
    return UserError(f"can't resume {relative(path)}: {reason}", 2)


def other_settings(earlier: Plan, plan: Plan) -> str | None:
    """Returns the first field in which a plan differs from an earlier one, though it mustn't; None
    if there is none."""
    settings = plan.as_json()
    for name, value in earlier.as_json().items():
        if name not in MAY_DIFFER and value != settings[name]:
            return f"with other settings: {name}"
    return None


def new_measurement(study: Measurable, plan: Plan, setup: Setup) -> Measurement:
    """Returns a measurement without results. Each has another order of its runs; but sizes grow."""
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    id = f"{now}-{os.getpid()}-{plan.kind}".rstrip("-")
    order = None
    if not plan.growth:
        order = order_seed(id)
    return Measurement(
        id=id,
        study=study.name,
        kind=plan.kind,
        time=now,
        machine=setup.machine,
        matmul_peak=setup.matmul_peak,
        options=list(setup.options),
        plan=replace(plan, order=order, batches=study.batches(setup)),
        folder=setup.results,
    )


def order_seed(id: str) -> int:
    return zlib.crc32(id.encode())


def say_again(names: set[str], why: str) -> None:
    """Prints which runs are measured again, if any are."""
    if names:
        print(f"{why}, so measured again: {listed(sorted(names))}", flush=True)


class Runner:
    """Measures the plans of one kind, of which a later one may have more runs."""

    def __init__(
        self,
        study: Measurable,
        plan: Plan,
        setup: Setup,
        resume: Resume,
        before: Sequence[Measurement] = (),
    ):
        self.study, self.setup = study, setup
        self.path = journal_of(setup.results, study.name)
        self.has_begun = False  # whether the journal has its measurement, to be resumed
        self.configs: dict[str, dict] = {}  # of each run, where any is left
        self.lengths: dict[str, Length] = {}  # of the same runs
        earlier = earlier_measurement(self.path, plan, setup, resume, before)
        if earlier:
            earlier.mark_failures()
        self.measurement = earlier or new_measurement(study, plan, setup)

    def run(self, plan: Plan, rounds: int | None, deadline: float | None) -> bool:
        """Runs what is left of this many rounds; returns whether it came to their end. `plan` may
        have other runs than before: their results come to those of the earlier ones."""
        self.prepare(plan, rounds)
        append(self.path, self.measurement.as_json())
        self.has_begun = True
        afterwards = self.seconds_of_later_plans(plan, rounds)
        jobs = self.measurement.jobs_left()
        while jobs:
            job = jobs[0]
            if deadline is not None and time.monotonic() + self.seconds_of([job]) > deadline:
                return False
            length = self.lengths[job.run.name]
            result = run_job(job, self.measurement, self.study, self.setup, length)
            self.measurement.add(result)
            jobs = self.measurement.jobs_left()
            left = self.seconds_of(jobs, afterwards)
            print(f"{self.describe(job, result)}; about {in_words(left)} left", flush=True)
        return True

    def prepare(self, plan: Plan, rounds: int | None) -> None:
        """Makes `plan` what is measured, and makes and measures what its first run needs: tokens,
        and the machine's matmul throughput. Raises UserError, StackError, OSError."""
        self.set_plan(plan, rounds)
        if self.has_jobs_left:
            self.measurement.commit = processes.git_commit()
        self.prepare_tokens()
        self.set_lengths(self.measure_peak())

    def foresee(self, plan: Plan, rounds: int | None, matmul_peak: dict[str, float]) -> None:
        """Does what `prepare` does, as far as nothing has to be measured or kept for it: for a dry
        run. Raises UserError, StackError, OSError."""
        self.set_plan(plan, rounds)
        self.set_lengths(matmul_peak)

    def set_plan(self, plan: Plan, rounds: int | None) -> None:
        """Makes `plan` what is measured; results of runs that have changed since are dropped.
        Raises UserError, also for options that a script refuses, StackError, OSError."""
        earlier = self.measurement
        plan = self.continued(plan, rounds)
        sources = earlier.sources | {
            run.name: source_of(run, self.study, self.setup) for run in plan.runnable
        }
        self.measurement = replace(earlier, plan=plan, sources=sources)
        say_again(self.measurement.take_over(earlier), "changed since")
        self.configs = {}
        if self.has_jobs_left:
            self.configs = sizing.configurations(plan.runnable, self.setup)

    @property
    def has_jobs_left(self) -> bool:
        return bool(self.measurement.jobs_left())

    def continued(self, plan: Plan, rounds: int | None) -> Plan:
        """Returns a plan with the order and batch sizes of the one before, and its rounds."""
        before = self.measurement.plan
        return replace(
            sizing.with_batches(plan, self.setup, before.batches),
            order=before.order,
            rounds=plan.rounds or rounds or self.study.rounds[self.setup.device],
        )

    def prepare_tokens(self) -> None:
        """Prepares the tokens of a study that reads any, and keeps which they are. Raises UserError
        where they were lost, and aren't the same when made anew."""
        if self.study.reads_tokens:
            processes.prepare_tokens(self.setup.data)
            self.measurement.check_tokens(self.setup)
            self.measurement.data = data_of(self.setup.data)

    def measure_peak(self) -> dict[str, float]:
        """Returns the machine's matmul throughput, which is measured once; for a study that shows
        a limit also how fast memory is."""
        if not self.measurement.matmul_peak:
            print("Measuring this machine's matmul throughput", flush=True)
            self.measurement.matmul_peak = processes.ask_machine("matmul_peak")
        if self.study.shows_limit and not self.measurement.copy_rate:
            self.measurement.copy_rate = processes.ask_machine("copy_rate")
        return self.measurement.matmul_peak

    def set_lengths(self, matmul_peak: dict[str, float]) -> None:
        """Finds out how long each run trains. Drops the results of runs that would be longer or
        shorter now, and says which: all runs of a plan are equally long, so a new one among them
        may make the others longer."""
        measurement = self.measurement
        self.lengths = sizing.lengths_of(measurement.plan, self.setup, self.configs, matmul_peak)
        measurement.lengths |= {
            name: shlex.join(map(str, length.options)) for name, length in self.lengths.items()
        }
        changed = measurement.names_of_another_length()
        say_again(changed, "of another length")
        measurement.drop(changed)

    def seconds_of(self, jobs: list[Job], afterwards: float = 0) -> float:
        """Returns about how many seconds some jobs take, with those of the plans `afterwards`."""
        return sizing.seconds_left(jobs, self.measurement.results, self.lengths, afterwards)

    def seconds_of_later_plans(self, plan: Plan, rounds: int | None) -> float:
        """Returns about how many seconds the plans take that follow this one; 0 where nothing of
        this one is left, since then the next plan comes at once."""
        if not self.has_jobs_left:
            return 0
        peak = self.measurement.matmul_peak
        _, seconds = sizing.estimate_later(self.study, self.setup, plan, rounds, peak)
        return seconds

    def print_commands(self) -> None:
        """Prints a command of each run that is left, how often it runs, and what can't run."""
        jobs = self.measurement.jobs_left()
        for run in self.measurement.plan.runs:
            jobs_of_run = [job for job in jobs if job.run.name == run.name]
            if run.error:
                print(f"not run: {run.label}: {run.error}")
            elif jobs_of_run:
                length, scratch = self.lengths[run.name], BUILD / "scratch"
                command = command_of(self.study, jobs_of_run[0], self.setup, length, scratch)
                typed = as_typed(command, run, run.python or "python")
                print(f"{counted(len(jobs_of_run), 'run')}: {typed}")

    def describe(self, job: Job, result: Result) -> str:
        """Returns what a run brought; where a GPU's memory ran out, also what to type."""
        plan, answer = self.measurement.plan, str(result.outcome)
        if result.record:
            answer = f"{self.study.summary(result.record, plan)}, {result.seconds:.0f} s"
        line = f"round {job.round}: {job.run.name}, seed {job.seed}: {answer}"
        out_of_memory = result.outcome.status is Status.OUT_OF_MEMORY
        batch = self.configs[job.run.name]["batch_size"]
        if out_of_memory and batch > 1 and self.setup.device == "cuda" and not plan.growth:
            return f"{self.smaller_batch(job.run.name, batch)}\n{line}"
        return line

    def smaller_batch(self, name: str, batch: int) -> str:
        """Returns the command that measures all runs at half the batch size of one."""
        options = shlex.join([*self.setup.options, "--batch-size", str(batch // 2)])
        return (
            f"{name} doesn't fit at batch {batch}; all runs at half of it:"
            f" python measure.py {self.study.name} -- {options}"
        )


def dry_run(study: Measurable, setup: Setup, rounds: int | None, resume: Resume) -> None:
    """Prints the commands that the study's first plan would run, and about how long the whole study
    would take. It measures nothing; only the scripts are written, so that the commands can be
    typed. Raises UserError, StackError, OSError."""
    first = next(study.plans(setup))
    peak = peak_of_before(setup)
    runner = Runner(study, first, setup, resume)
    runner.foresee(first, rounds, peak)
    runner.print_commands()
    jobs = runner.measurement.jobs_left()
    runs, seconds = sizing.estimate_later(study, setup, first, rounds, peak)
    estimate = "no estimate yet"
    if peak:
        estimate = f"about {in_words(runner.seconds_of(jobs, seconds))}"
    print(f"{len(jobs) + runs} runs, {estimate}")


def peak_of_before(setup: Setup) -> dict[str, float]:
    """Returns this machine's matmul throughput, if an earlier measurement has it; else {}."""
    for path in sorted(setup.results.glob("*.jsonl")):
        for measurement in reversed(read_journal(path)):
            if measurement.matmul_peak and same_machine(measurement.machine, setup.machine):
                return measurement.matmul_peak
    return {}
