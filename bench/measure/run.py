"""Measures a study round by round, each run in a fresh process; its journal keeps what is done."""

import os
import shlex
import time
import zlib
from collections.abc import Generator
from dataclasses import fields, replace
from pathlib import Path

from bench import common, processes
from bench.common import BUILD, ELSEWHERE, relative
from bench.measure import sizing
from bench.measure.child import command_of, printed, run_job
from bench.measure.journal import Measurement, Result, append, data_of, journal_of, read_journal
from bench.measure.plan import Job, Measurable, Plan, Setup
from bench.measure.records import DOES_NOT_FIT, Status
from bench.measure.sizing import Length, in_words
from gpt_speed.common import UserError, counted, listed

# Fields in which a plan may differ from the one that it continues.
MAY_DIFFER = {"runs", "rounds", "kind", "growth", "batches", "order"}


def run_study(
    study: Measurable,
    setup: Setup,
    rounds: int | None = None,
    resume: bool | None = False,
    deadline: float | None = None,
) -> tuple[bool, list[Measurement]]:
    """Returns (whether it came to its end, what is measured of each of its plans).

    With `resume` the newest measurement of each plan continues, with None only where there is one;
    else a new one begins. No run is started that by estimate would end after `deadline`, in seconds
    of time.monotonic(). A run that fails isn't repeated in later rounds; a later `resume` tries it
    again. Raises UserError, StackError, OSError.
    """
    runners: dict[str, Runner] = {}
    plans, first = study.plans(setup), None
    plan = next(plans, None)
    while plan:
        if plan.kind not in runners:
            runners[plan.kind] = Runner(study, plan, setup, resume, first)
        runner = runners[plan.kind]
        if not runner.run(plan, rounds, deadline):
            break
        first = first or runner.measurement
        plan = next_plan(plans, runner.measurement)
    return plan is None, [runner.measurement for runner in runners.values()]


def next_plan(plans: Generator[Plan, Measurement, None], measurement: Measurement) -> Plan | None:
    """Returns the study's next plan, which may depend on what was measured of the one before; None
    after the last one."""
    try:
        return plans.send(measurement)
    except StopIteration:
        return None


def earlier_measurement(
    study: Measurable,
    plan: Plan,
    setup: Setup,
    first: Measurement | None,
    required: bool | None,
) -> Measurement | None:
    """Returns what this plan continues with: the newest measurement of its kind, unless that is
    older than the `first` of the study, on which it depends. Raises UserError where none is there
    but it is `required`, or where it was measured in another way."""
    path = journal_of(setup.results, study.name)
    newest = newest_of_kind(plan.kind, path)
    if required and not newest and not first:
        raise UserError(f"nothing to resume in {relative(path)}", 2)
    if not newest or first and newest.time < first.time:
        return None
    if different := newest.differs_from(setup) or other_settings(newest.plan, plan):
        instead = "without --resume a new one begins" if required else ELSEWHERE
        raise UserError(f"can't resume {relative(path)}: it was measured {different}; {instead}", 2)
    return newest


def newest_of_kind(kind: str, path: Path) -> Measurement | None:
    same_kind = [measurement for measurement in read_journal(path) if measurement.kind == kind]
    return same_kind[-1] if same_kind else None


def other_settings(earlier: Plan, plan: Plan) -> str | None:
    """Returns the first field in which a plan differs from an earlier one, though it mustn't; None
    if there is none."""
    names = [field.name for field in fields(plan) if field.name not in MAY_DIFFER]
    others = [name for name in names if getattr(earlier, name) != getattr(plan, name)]
    return f"with other settings: {others[0]}" if others else None


def new_measurement(study: Measurable, plan: Plan, setup: Setup) -> Measurement:
    """Returns a measurement without results. Each has another order of its runs; but sizes grow."""
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    id = f"{now}-{os.getpid()}-{plan.kind}".rstrip("-")
    order = None if plan.growth else zlib.crc32(id.encode())
    return Measurement(
        id=id,
        study=study.name,
        kind=plan.kind,
        time=now,
        machine=setup.machine,
        matmul_peak=setup.matmul_peak,
        data=None,
        sources={},
        options=list(setup.options),
        plan=replace(plan, order=order, batches=setup.batches),
        folder=setup.results,
    )


def failed(measurement: Measurement) -> bool:
    """Returns whether a run failed; a size that doesn't fit hasn't, where sizes grow."""
    return not all(has_answer(result, measurement.plan) for result in measurement.results)


def has_answer(result: Result, plan: Plan) -> bool:
    """Returns whether a result is what its run was for: figures, or that it doesn't fit."""
    is_too_large = plan.growth is not None and result.outcome.status in DOES_NOT_FIT
    return result.outcome.complete or is_too_large


class Runner:
    """Measures the plans of one kind, of which a later one may have more runs."""

    def __init__(
        self,
        study: Measurable,
        plan: Plan,
        setup: Setup,
        resume: bool | None,
        first: Measurement | None = None,
    ):
        self.study, self.setup = study, setup
        self.path = journal_of(setup.results, study.name)
        self.configs: dict[str, dict] = {}  # of each run, if some are left
        self.lengths: dict[str, Length] = {}
        earlier = None
        if resume is not False:
            earlier = earlier_measurement(study, plan, setup, first, required=resume)
        if earlier:
            earlier.retry = {
                result.key for result in earlier.results if not has_answer(result, plan)
            }
        self.measurement = earlier or new_measurement(study, plan, setup)

    def run(self, plan: Plan, rounds: int | None, deadline: float | None) -> bool:
        """Runs what is left of this many rounds; returns whether it came to their end. `plan` may
        have other runs than before: their results come to those of the earlier ones."""
        self.take(plan, rounds)
        self.begin()
        later = 0.0  # seconds of the study's later plans
        if self.configs:
            _, later = sizing.estimate_later(
                self.study, self.setup, plan, rounds, self.measurement.matmul_peak
            )
        measurement = self.measurement
        while jobs := measurement.jobs_left():
            job = jobs[0]
            seconds = sizing.seconds_left([job], measurement.results, self.lengths)
            if deadline is not None and time.monotonic() + seconds > deadline:
                return False
            result = run_job(job, measurement, self.study, self.setup, self.lengths[job.run.name])
            measurement.add(result)
            left = sizing.seconds_left(
                measurement.jobs_left(), measurement.results, self.lengths, later
            )
            print(f"{self.describe(job, result)}; about {in_words(left)} left", flush=True)
        return True

    def take(self, plan: Plan, rounds: int | None) -> None:
        """Makes `plan` what is measured, with the order and batch sizes of before; results of runs
        that have changed since are dropped. Raises UserError, also for options that a script
        refuses, StackError, OSError."""
        earlier, setup = self.measurement, self.setup
        plan = replace(
            sizing.fit(plan, setup, earlier.plan.batches),
            order=earlier.plan.order,
            rounds=plan.rounds or rounds or self.study.rounds[setup.device],
        )
        able = [run for run in plan.runs if not run.error]
        sources = {run.name: common.sha256(setup.scripts.text(run.script)) for run in able}
        measurement = replace(earlier, plan=plan, sources=earlier.sources | sources)
        measurement.resume(earlier)
        dropped = {result.name for result in earlier.results} - {
            result.name for result in measurement.results
        }
        if dropped:
            print(f"changed since, so measured again: {listed(sorted(dropped))}", flush=True)
        self.measurement = measurement
        self.configs = sizing.configurations(able, setup) if measurement.jobs_left() else {}

    def begin(self) -> None:
        """Finds out all that has to be known before the first run; the journal then has this plan.
        Raises UserError."""
        measurement, setup = self.measurement, self.setup
        if self.configs:
            measurement.commit = processes.git_commit()
        if self.study.reads_tokens:
            processes.prepare_tokens(setup.data)
            measurement.check_tokens(setup)  # they may have been lost, and made anew
            measurement.data = data_of(setup.data)
        if not measurement.matmul_peak:
            print("Measuring this machine's matmul throughput", flush=True)
            measurement.matmul_peak = processes.ask_machine("matmul_peak")
        append(self.path, measurement.as_json())
        setup.args.resume = True  # what is interrupted from now on can be continued
        self.lengths = sizing.lengths_of(
            measurement.plan, setup, self.configs, measurement.matmul_peak
        )
        drop_other_lengths(measurement, self.lengths)

    def describe(self, job: Job, result: Result) -> str:
        """Returns what a run brought; where a GPU's memory ran out, also what to type."""
        plan, answer = self.measurement.plan, str(result.outcome)
        if result.record:
            answer = f"{self.study.summary(result.record, plan)}, {result.seconds:.0f} s"
        line = f"round {job.round}: {job.run.name}, seed {job.seed}: {answer}"
        out_of_memory = result.outcome.status is Status.OUT_OF_MEMORY
        if out_of_memory and self.setup.device == "cuda" and not plan.growth:
            return f"{self.smaller_batch(job.run.name)}\n{line}"
        return line

    def smaller_batch(self, name: str) -> str:
        """Returns the command that measures all runs at half the batch size of one."""
        batch = self.configs[name]["batch_size"]
        options = shlex.join([*self.setup.options, "--batch-size", str(max(1, batch // 2))])
        return (
            f"{name} doesn't fit at batch {batch}; all runs at half of it:"
            f" python measure.py {self.study.name} -- {options}"
        )


def drop_other_lengths(measurement: Measurement, lengths: dict[str, Length]) -> None:
    """Drops the results of runs that were longer or shorter than they would be now: all runs of a
    plan are as long, so that another one among them may change that. Says which."""
    now = {name: shlex.join(map(str, length.options)) for name, length in lengths.items()}
    other = {
        result.name
        for result in measurement.results
        if result.command and now.get(result.name, "") not in result.command
    }
    if other:
        print(f"of another length, so measured again: {listed(sorted(other))}", flush=True)
    measurement.drop(other)


def dry_run(study: Measurable, setup: Setup, rounds: int | None, resume: bool) -> None:
    """Prints the commands that the study's first plan would run, and how long the whole study would
    take, by what is measured already; it measures nothing, and leaves no results, only the scripts,
    so that the commands can be typed. Raises as run_study."""
    first = next(study.plans(setup))
    runner = Runner(study, first, setup, resume)
    runner.take(first, rounds)
    measurement, peak = runner.measurement, peak_of_before(setup)
    lengths = sizing.lengths_of(measurement.plan, setup, runner.configs, peak)
    drop_other_lengths(measurement, lengths)
    jobs = measurement.jobs_left()
    for run in measurement.plan.runs:
        own = [job for job in jobs if job.run.name == run.name]
        if run.error:
            print(f"not run: {run.label}: {run.error}")
        elif own:
            command = command_of(study, own[0], setup, lengths[run.name], BUILD / "scratch")
            print(f"{counted(len(own), 'run')}: {printed(command)}")
    later, seconds = sizing.estimate_later(study, setup, first, rounds, peak)
    left = sizing.seconds_left(jobs, measurement.results, lengths, seconds)
    print(f"{len(jobs) + later} runs, {f'about {in_words(left)}' if peak else 'no estimate yet'}")


def peak_of_before(setup: Setup) -> dict[str, float]:
    """Returns this machine's matmul throughput, if an earlier measurement has it; else {}."""
    for path in sorted(setup.results.glob("*.jsonl")):
        for measurement in reversed(read_journal(path)):
            if common.same_machine(measurement.machine, setup.machine):
                return measurement.matmul_peak
    return {}
