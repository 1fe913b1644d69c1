"""Measure a study round by round, each run in a fresh process; its journal keeps what is done.

A `study` is one of bench/studies/, above this room.
"""

import os
import shlex
import sys
import tempfile
import time
import zlib
from dataclasses import fields, replace

from bench import processes
from bench.catalogue import Run
from bench.common import (
    BUILD,
    ELSEWHERE,
    UserError,
    listed,
    make_writable,
    relative,
    same_machine,
    sha256,
)
from bench.measure import sizing
from bench.measure.child import command_of, printed, run_job
from bench.measure.journal import (
    Measured,
    Result,
    append,
    data_of,
    journal_of,
    read_journal,
)
from bench.measure.plan import Job, Plan, Setup
from bench.measure.records import Status
from bench.measure.sizing import Length

# Fields of a plan that continues.
MAY_DIFFER = {"runs", "rounds", "kind", "memory_limit_gb", "batches", "order"}
OPTION_OF = {"tokens": "--max-tokens", "seconds": "--seconds"}


# ---- A study -----------------------------------------------------------------------------------


def see_build() -> None:
    """Raises UserError where build/ can't be written; names a path that stops torch.compile."""
    make_writable(BUILD, "scripts and what they compile are kept there; measure in a copy of this"
                         " repository where you may write")
    if " " in f"{BUILD}{tempfile.gettempdir()}":
        print("torch.compile doesn't work on a CPU with a space in the path"
              f" {BUILD} or {tempfile.gettempdir()}", file=sys.stderr)


def run_study(
    study, setup: Setup, rounds: int | None = None, resume: bool | None = False,
    deadline: float | None = None,
) -> tuple[bool, list[Measured]]:
    """(whether it came to its end, what is measured of each of its plans).

    With `resume` the newest measurement of each plan continues, with None only where there is one;
    else a new one begins. No run is started that by estimate would end after `deadline`, in seconds
    of time.monotonic(). A run that fails isn't repeated in later rounds; a later `resume` tries it
    again. Raises UserError, StackError, OSError.
    """
    begun: dict[str, Measurement] = {}  # by their kinds
    plans, measured = study.plans(setup), None
    finished = True
    while finished:
        try:
            plan = plans.send(measured)
        except StopIteration:
            break
        if plan.kind not in begun:
            first = next(iter(begun.values()), None)
            earlier = None if resume is False else earlier_measurement(
                study, plan, setup, first, required=resume)
            begun[plan.kind] = Measurement(study, plan, setup, earlier)
        one = begun[plan.kind]
        finished = one.run(plan, rounds, deadline)
        measured = one.measured
    return finished, [each.measured for each in begun.values()]


def earlier_measurement(study, plan: Plan, setup: Setup, first: "Measurement | None",
                        required: bool | None) -> Measured | None:
    """What this plan continues with: the newest measurement of its kind, unless that is older than
    the study's `first` plan, on which it depends. Raises UserError where none is there but it is
    `required`, or where it was measured in another way."""
    path = journal_of(setup.results, study.name)
    found = [each for each in read_journal(path) if each.kind == plan.kind]
    if not found or first and found[-1].time < first.measured.time:
        if required and not first:
            raise UserError(f"nothing to resume in {relative(path)}", 2)
        if found:
            print(f"{relative(path)}: what it holds of these runs is older than the measurement on"
                  " which they depend; they start again", flush=True)
        return None
    earlier = found[-1]
    different = earlier.differs_from(setup) or next(
        (f"with other {OPTION_OF.get(each.name, each.name)}" for each in fields(plan)
         if each.name not in MAY_DIFFER
         and getattr(earlier.plan, each.name) != getattr(plan, each.name)), None)
    if different:
        anew = "without --resume a new one begins" if required else ELSEWHERE
        raise UserError(f"can't resume {relative(path)}: it was measured {different}; {anew}", 2)
    return earlier


def failed(measured: Measured) -> bool:
    """Whether a run failed; where a plan continues until nothing more fits, in another way."""
    names = {run.name for run in measured.plan.runs}
    return any(not answered(result, measured.plan) for result in measured.results
               if result.name in names)


def answered(result: Result, plan: Plan) -> bool:
    """Whether a result is what its run was for: figures, or that it doesn't fit."""
    outcome = result.outcome
    return outcome.complete or plan.stop_at_oom and outcome.is_too_large


# ---- A plan ------------------------------------------------------------------------------------


class Measurement:
    """One plan of a study, as far as it is measured."""

    def __init__(self, study, plan: Plan, setup: Setup, earlier: Measured | None):
        self.study, self.setup = study, setup
        self.path = journal_of(setup.results, study.name)
        self.jobs: list[Job] = []  # what is left to run, in order
        self.configs: dict[str, dict] = {}  # by the names of runs
        self.lengths: dict[str, Length] = {}
        self.failed: set[str] = set()  # runs that did so since this start
        self.ahead = 0.0  # seconds of the study's later plans, by estimate
        now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self.measured = earlier or Measured(
            f"{now}-{os.getpid()}-{plan.kind}".rstrip("-"), study.name, plan.kind, now,
            setup.machine, setup.matmul_peak or {}, None, {}, list(setup.options), plan,
            folder=setup.results)

    def run(self, plan: Plan, rounds: int | None, deadline: float | None) -> bool:
        """Runs what is left of this many rounds; returns whether it came to their end. `plan` may
        have other runs than before: their results come to those of the earlier ones."""
        self.take(plan, rounds)
        self.begin()
        if self.jobs:
            _, self.ahead = sizing.seconds_of_later(
                self.study, self.setup, plan, rounds, self.measured.matmul_peak)
        while job := self.next_job(deadline):
            processes.raise_pending()
            result = run_job(job, self.measured, self.study, self.setup,
                             self.lengths[job.run.name])
            self.measured.add(result)
            self.print_progress(job, result)
        return not self.within_reach()

    # ---- What there is to run

    def take(self, plan: Plan, rounds: int | None) -> None:
        """Makes `plan` what is measured, with the batch sizes that fit, and looks what is left of
        it. Results of runs whose script, options or cores have changed since are dropped. Raises
        UserError, also for options that a script refuses, StackError, OSError."""
        measured, setup, before = self.measured, self.setup, self.measured.plan
        # As in what is measured so far, even where other batch sizes would fit now.
        keep = measured.results or before.batches
        plan = sizing.fit(plan, setup, before.batches if keep else setup.batches)
        able = [run for run in plan.runs if not run.error]
        rounds = plan.rounds or rounds or self.study.rounds[setup.device]
        order = before.order
        if not measured.results and not any(run.requires for run in plan.runs):
            order = order_of(measured.id)
        measured.planned = measured.rounds_before(rounds)
        measured.plan = replace(plan, rounds=rounds, order=order)
        measured.sources |= {run.name: sha256(setup.scripts.text(run.script)) for run in able}
        ways = {run.name: how_it_runs(run) for run in before.runs}
        changed = {run.name for run in plan.runs
                   if ways.get(run.name, how_it_runs(run)) != how_it_runs(run)}
        changed |= {result.name for result in measured.results if not measured.is_current(result)}
        if again := [run.name for run in plan.runs if run.name in changed]:
            print(f"changed since, so measured again: {listed(again)}", flush=True)
        measured.results = [result for result in measured.results if result.name not in changed]
        done = {result.key: result for result in measured.results if answered(result, plan)}
        self.failed |= {result.name for result in done.values() if not result.outcome.complete}
        self.jobs = [job for job in measured.plan.jobs() if job.key not in done]
        self.configs = sizing.configurations(able, plan, setup) if self.jobs else {}

    def begin(self) -> None:
        """All that has to be known before the first run; the journal then has this plan. Raises
        UserError."""
        measured, setup, plan = self.measured, self.setup, self.measured.plan
        if self.jobs:
            measured.commit, measured.edited = processes.git_commit()
        processes.prepare_tokens(setup.data)
        if measured.differs_from(setup):  # the tokens alone can, and only if they were lost
            raise UserError(f"{relative(setup.data)} has other tokens than were measured so far")
        measured.data = data_of(setup.data)
        if not measured.matmul_peak:
            append(self.path, measured.as_json())  # from here on, --resume continues with this one
            print("Measuring this machine's matmul throughput", flush=True)
            measured.matmul_peak = processes.ask_machine("matmul_peak")
        peak = measured.matmul_peak
        append(self.path, measured.as_json())
        self.lengths = sizing.lengths_of(plan, setup, self.configs, peak)

    # ---- One run after the other

    def next_job(self, deadline: float | None) -> Job | None:
        """Takes the first of those within reach; None where none is, or where by estimate it would
        end after the deadline."""
        left = self.within_reach()
        seconds = sizing.seconds_left(left[:1], self.measured.results, self.lengths)
        if not left or deadline is not None and time.monotonic() + seconds > deadline:
            return None
        self.jobs.remove(left[0])
        return left[0]

    def print_progress(self, job: Job, result: Result) -> None:
        """Prints what a run brought, and how long the others will take; where a GPU's memory ran
        out, what to type."""
        plan, outcome, name = self.measured.plan, result.outcome, job.run.name
        text = str(outcome)
        if outcome.complete:
            loss = result.record.val_loss_after(plan.loss_tokens)
            text = (f"{result.record.tok_per_sec:,.0f} tok/sec, val loss"
                    f" {'n/a' if loss is None else f'{loss:.3f}'}, {result.seconds:.0f} s")
        else:
            self.failed.add(name)
        if (outcome.status is Status.OUT_OF_MEMORY and self.setup.device == "cuda"
                and not plan.stop_at_oom):
            batch = self.configs[name]["batch_size"]
            options = shlex.join([*self.setup.options, "--batch-size", str(max(1, batch // 2))])
            print(f"{name} doesn't fit at batch {batch}; all runs at half of it:"
                  f" python measure.py {self.study.name} -- {options}", flush=True)
        seed = f", seed {job.seed}" if job.seed != plan.first_seed else ""
        left = sizing.time_left(self.within_reach(), plan, self.measured.results, self.lengths,
                                 self.ahead)
        print(f"round {job.round}: {name}{seed}: {text}; {left} left", flush=True)

    def within_reach(self) -> list[Job]:
        """What is left, without runs that failed, and those that aren't tried for it."""
        measured = self.measured
        beyond = self.failed | {run.name for run in measured.plan.runs if measured.skip_reason(run)}
        return [job for job in self.jobs if job.run.name not in beyond]


def how_it_runs(run: Run) -> tuple:
    """What besides its script makes a run's results those of another one."""
    return run.options, run.processes, run.cores, run.torchrun


def order_of(id: str) -> int:
    """The seed of the order of a measurement's runs: another one in each."""
    return zlib.crc32(id.encode())


def dry_run(study, setup: Setup, rounds: int | None, resume: bool) -> None:
    """Prints the commands that the study's first plan would run, and how long the whole study would
    take, by what is measured already; it measures nothing, and leaves no results, only the scripts,
    so that the commands can be typed. Raises as run_study."""
    first = next(study.plans(setup))
    earlier = earlier_measurement(study, first, setup, None, required=True) if resume else None
    here = [measured for path in sorted(setup.results.glob("*.jsonl"))
            for measured in read_journal(path) if same_machine(measured.machine, setup.machine)]
    peak = here[-1].matmul_peak if here else {}
    results = next((measured.results for measured in reversed(here)
                    if (measured.study, measured.kind) == (study.name, first.kind)), [])
    one = Measurement(study, first, setup, earlier)
    one.take(first, rounds)
    plan, jobs = one.measured.plan, one.within_reach()
    expected = sizing.lengths_of(plan, setup, one.configs, peak)
    for run in plan.runs:
        if own := [job for job in jobs if job.run.name == run.name]:
            command = command_of(own[0], plan, setup, expected[run.name], BUILD / "scratch")
            seeds = sorted({job.seed for job in own} - {own[0].seed})
            others = f" (then --seed {', '.join(map(str, seeds))})" if seeds else ""
            print(f"{len(own)} run{'s' if len(own) > 1 else ''}: {printed(command)}{others}")
        if run.error:
            print(f"not run: {run.label}: {run.error}")
    later, seconds = sizing.seconds_of_later(study, setup, first, rounds, peak)
    count = f"{len(sizing.within_memory(jobs, results, plan)) + later} runs"
    if later:
        count += f" ({later} of them with settings that follow from results)"
    left = "no estimate yet: nothing is measured here"
    if peak:
        source = "by an earlier one" if results else "a rough estimate"
        left = f"{sizing.time_left(jobs, plan, results, expected, seconds)} ({source})"
    print(f"{count}, {left}")
