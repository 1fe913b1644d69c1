"""Measure a study round by round, each run in a fresh process; its journal keeps what is done.

A `study` is one of bench/studies/, above this room.
"""

import os
import shlex
import time
import zlib
from dataclasses import fields, replace

from bench import common, processes
from bench.common import BUILD, ELSEWHERE, relative
from bench.measure import sizing
from bench.measure.child import command_of, printed, run_job
from bench.measure.journal import Measured, Result, append, data_of, journal_of, read_journal
from bench.measure.plan import Job, Plan, Setup
from bench.measure.records import TOO_LARGE, Status
from bench.measure.sizing import in_words
from gpt_speed.common import UserError, listed

# Fields in which a plan may differ from the one that it continues.
MAY_DIFFER = {"runs", "rounds", "kind", "memory_limit_gb", "batches", "order"}


def run_study(
    study,
    setup: Setup,
    rounds: int | None = None,
    resume: bool | None = False,
    deadline: float | None = None,
) -> tuple[bool, list[Measured]]:
    """Returns (whether it came to its end, what is measured of each of its plans).

    With `resume` the newest measurement of each plan continues, with None only where there is one;
    else a new one begins. No run is started that by estimate would end after `deadline`, in seconds
    of time.monotonic(). A run that fails isn't repeated in later rounds; a later `resume` tries it
    again. Raises UserError, StackError, OSError.
    """
    by_kind: dict[str, Measurement] = {}
    plans, measured, finished = study.plans(setup), None, True
    while finished:
        try:
            plan = plans.send(measured)
        except StopIteration:
            break
        if plan.kind not in by_kind:
            first = next((one.measured for one in by_kind.values()), None)
            by_kind[plan.kind] = Measurement(study, plan, setup, resume, first)
        measurement = by_kind[plan.kind]
        finished = measurement.run(plan, rounds, deadline)
        measured = measurement.measured
    return finished, [measurement.measured for measurement in by_kind.values()]


def earlier_measurement(
    study, plan: Plan, setup: Setup, first: Measured | None, required: bool | None
) -> Measured | None:
    """Returns what this plan continues with: the newest measurement of its kind, unless that is
    older than the `first` of the study, on which it depends. Raises UserError where none is there
    but it is `required`, or where it was measured in another way."""
    path = journal_of(setup.results, study.name)
    earlier = next(
        (measured for measured in reversed(read_journal(path)) if measured.kind == plan.kind), None
    )
    if required and not earlier and not first:
        raise UserError(f"nothing to resume in {relative(path)}", 2)
    if not earlier or first and earlier.time < first.time:
        return None
    others = [
        field.name
        for field in fields(plan)
        if field.name not in MAY_DIFFER
        and getattr(earlier.plan, field.name) != getattr(plan, field.name)
    ]
    different = earlier.differs_from(setup) or others and f"with other settings: {others[0]}"
    if different:
        instead = "without --resume a new one begins" if required else ELSEWHERE
        raise UserError(f"can't resume {relative(path)}: it was measured {different}; {instead}", 2)
    return earlier


def failed(measured: Measured) -> bool:
    """Returns whether a run failed; a size that doesn't fit hasn't, where sizes grow."""
    return not all(has_answer(result, measured.plan) for result in measured.results)


def has_answer(result: Result, plan: Plan) -> bool:
    """Returns whether a result is what its run was for: figures, or that it doesn't fit."""
    return result.outcome.complete or plan.stop_at_oom and result.outcome.status in TOO_LARGE


class Measurement:
    """Measures the plans of one kind, of which a later one may have more runs."""

    def __init__(
        self, study, plan: Plan, setup: Setup, resume: bool | None, first: Measured | None = None
    ):
        self.study, self.setup = study, setup
        self.path = journal_of(setup.results, study.name)
        self.measured = (
            None
            if resume is False
            else earlier_measurement(study, plan, setup, first, required=resume)
        )
        if self.measured:
            self.measured.retry = {
                result.key for result in self.measured.results if not has_answer(result, plan)
            }
        else:
            now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
            id = f"{now}-{os.getpid()}-{plan.kind}".rstrip("-")
            # Another order of runs in each measurement; but sizes grow.
            order = None if plan.stop_at_oom else zlib.crc32(id.encode())
            plan = replace(plan, order=order, batches=setup.batches)
            self.measured = Measured(
                id,
                study.name,
                plan.kind,
                now,
                setup.machine,
                setup.matmul_peak,
                None,
                {},
                list(setup.options),
                plan,
                folder=setup.results,
            )

    def run(self, plan: Plan, rounds: int | None, deadline: float | None) -> bool:
        """Runs what is left of this many rounds; returns whether it came to their end. `plan` may
        have other runs than before: their results come to those of the earlier ones."""
        self.take(plan, rounds)
        self.begin()
        later = 0.0  # seconds of the study's later plans
        if self.configs:
            _, later = sizing.estimate_later(
                self.study, self.setup, plan, rounds, self.measured.matmul_peak
            )
        measured = self.measured
        while job := next(iter(measured.jobs_left()), None):
            seconds = sizing.seconds_left([job], measured.results, self.lengths)
            if deadline is not None and time.monotonic() + seconds > deadline:
                return False
            result = run_job(job, measured, self.study, self.setup, self.lengths[job.run.name])
            measured.add(result)
            left = sizing.seconds_left(measured.jobs_left(), measured.results, self.lengths, later)
            print(f"{self.describe(job, result)}; about {in_words(left)} left", flush=True)
        return True

    def take(self, plan: Plan, rounds: int | None) -> None:
        """Makes `plan` what is measured, with the order and batch sizes of before; results of runs
        that have changed since are dropped. Raises UserError, also for options that a script
        refuses, StackError, OSError."""
        earlier, setup = self.measured, self.setup
        plan = replace(
            sizing.fit(plan, setup, earlier.plan.batches),
            order=earlier.plan.order,
            rounds=plan.rounds or rounds or self.study.rounds[setup.device],
        )
        able = [run for run in plan.runs if not run.error]
        sources = {run.name: common.sha256(setup.scripts.text(run.script)) for run in able}
        self.measured = measured = replace(earlier, plan=plan, sources=earlier.sources | sources)
        measured.resume(earlier)
        if lost := {result.name for result in earlier.results} - {
            result.name for result in measured.results
        }:
            print(f"changed since, so measured again: {listed(sorted(lost))}", flush=True)
        self.configs = sizing.configurations(able, setup) if measured.jobs_left() else {}

    def begin(self) -> None:
        """Finds out all that has to be known before the first run; the journal then has this plan.
        Raises UserError."""
        measured, setup = self.measured, self.setup
        if self.configs:
            measured.commit = processes.git_commit()
        processes.prepare_tokens(setup.data)
        if measured.differs_from(setup):  # the tokens alone can, and only if they were lost
            raise UserError(f"{relative(setup.data)} has other tokens than were measured so far")
        measured.data = data_of(setup.data)
        if not measured.matmul_peak:
            print("Measuring this machine's matmul throughput", flush=True)
            measured.matmul_peak = processes.ask_machine("matmul_peak")
        append(self.path, measured.as_json())
        self.lengths = sizing.lengths_of(measured.plan, setup, self.configs, measured.matmul_peak)

    def describe(self, job: Job, result: Result) -> str:
        """Returns what a run brought; where a GPU's memory ran out, also what to type."""
        plan, name, text = self.measured.plan, job.run.name, str(result.outcome)
        if result.record:
            text = f"{self.study.summary(result.record, plan)}, {result.seconds:.0f} s"
        hint = ""
        out_of_memory = result.outcome.status is Status.OUT_OF_MEMORY
        if out_of_memory and self.setup.device == "cuda" and not plan.stop_at_oom:
            batch = self.configs[name]["batch_size"]
            options = shlex.join([*self.setup.options, "--batch-size", str(max(1, batch // 2))])
            hint = (
                f"{name} doesn't fit at batch {batch}; all runs at half of it:"
                f" python measure.py {self.study.name} -- {options}\n"
            )
        return f"{hint}round {job.round}: {name}, seed {job.seed}: {text}"


def dry_run(study, setup: Setup, rounds: int | None, resume: bool) -> None:
    """Prints the commands that the study's first plan would run, and how long the whole study would
    take, by what is measured already; it measures nothing, and leaves no results, only the scripts,
    so that the commands can be typed. Raises as run_study."""
    first = next(study.plans(setup))
    measurement = Measurement(study, first, setup, resume)
    measurement.take(first, rounds)
    plan, jobs = measurement.measured.plan, measurement.measured.jobs_left()
    peak = next(
        (
            measured.matmul_peak
            for path in sorted(setup.results.glob("*.jsonl"))
            for measured in reversed(read_journal(path))
            if common.same_machine(measured.machine, setup.machine)
        ),
        {},
    )
    lengths = sizing.lengths_of(plan, setup, measurement.configs, peak)
    for run in plan.runs:
        own = [job for job in jobs if job.run.name == run.name]
        if run.error:
            print(f"not run: {run.label}: {run.error}")
        elif own:
            command = command_of(study, own[0], setup, lengths[run.name], BUILD / "scratch")
            print(f"{len(own)} run{'s' if len(own) > 1 else ''}: {printed(command)}")
    later, seconds = sizing.estimate_later(study, setup, first, rounds, peak)
    left = sizing.seconds_left(jobs, measurement.measured.results, lengths, seconds)
    print(f"{len(jobs) + later} runs, {f'about {in_words(left)}' if peak else 'no estimate yet'}")
