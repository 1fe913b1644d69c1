"""Measure a study round by round, each run in a fresh process; its journal keeps what is done.

A `study` is one of bench/studies/, above this room.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path

from bench import processes
from bench.catalogue import Run
from bench.common import BUILD, ELSEWHERE, ROOT, UserError, make_writable, relative, write_whole
from bench.measure import lengths
from bench.measure.journal import (
    Measured,
    Result,
    append,
    data_of,
    journal_of,
    make_result,
    newest,
    read_journal,
    sha256,
)
from bench.measure.lengths import Length, in_words, seconds_left
from bench.measure.plan import SCRATCH, Plan, Setup
from bench.predict.fingerprint import fingerprints, of_run

HANG_SECONDS = 300  # and five times the estimate: a run that takes longer hangs, and is ended
# Fields of a plan that goes on.
MAY_DIFFER = {"runs", "rounds", "kind", "memory_limit_gb", "within", "batches"}
HALVED = "-halved"  # in the id of what was begun anew, since memory had run out
OPTION_OF = {"tokens": "--max-tokens", "seconds": "--seconds"}


@dataclass(frozen=True)
class Job:
    """A run in a round, with a seed."""

    run: Run
    round: int
    seed: int

    @property
    def key(self) -> tuple[str, int, int]:
        return self.run.name, self.round, self.seed


# ---- A study -----------------------------------------------------------------------------------


def see_build() -> None:
    """Raises UserError where the folder for what is made on the way can't be written; says where a
    path keeps torch.compile from working."""
    make_writable(BUILD, "scripts and what they compile are kept there; measure in a copy of this"
                         " repository where you may write")
    for folder in map(str, (BUILD, tempfile.gettempdir())):
        if " " in folder:
            print(f"torch.compile doesn't work on a CPU with a space in the path {folder}",
                  file=sys.stderr)


def run_study(
    study, setup: Setup, rounds: int | None = None, resume: bool | None = False,
    deadline: float | None = None,
) -> tuple[bool, list[Measured]]:
    """(whether it came to its end, what is measured of each of its plans).

    With `resume` the newest measurement of each plan goes on, with None only where there is one;
    else a new one begins. No run is started that by estimate would end after `deadline`, in seconds
    of time.monotonic(). A run that fails isn't repeated in later rounds; a later `resume` tries it
    again. Where a GPU's memory runs out, all of it begins once more at half the batch size. Raises
    UserError, StackError, OSError.
    """
    try:
        return run_plans(study, setup, rounds, resume, deadline)
    except OutOfMemory as error:
        print(f"{error}: starting again at half the batch size", flush=True)
        setup.halved = True
        return run_plans(study, setup, rounds, False, deadline)


class OutOfMemory(Exception):
    """A run whose batch size may be halved didn't fit."""


def run_plans(
    study, setup: Setup, rounds: int | None, resume: bool | None, deadline: float | None,
) -> tuple[bool, list[Measured]]:
    """As run_study. Raises OutOfMemory as well."""
    begun: dict[str, Measurement] = {}  # by their kinds
    plans, measured = study.plans(setup), None
    finished = True
    while finished:
        try:
            plan = plans.send(measured)
        except StopIteration:
            break
        if plan.kind not in begun:
            earlier = None
            if resume is not False:
                first = next(iter(begun.values()), None)
                earlier = earlier_measurement(study, plan, setup, first, required=resume)
            begun[plan.kind] = Measurement(study, plan, setup, earlier)
        one = begun[plan.kind]
        plan = lengths.fit(plan, setup, one.batches())
        finished = one.run(plan, plan.rounds or rounds or study.rounds[setup.device], deadline)
        measured = one.measured
    return finished, [each.measured for each in begun.values()]


def earlier_measurement(study, plan: Plan, setup: Setup, first: "Measurement | None",
                        required: bool | None) -> Measured | None:
    """What this plan goes on with: the newest measurement of its kind, unless that is older than
    the study's `first` plan, on which it depends. Raises UserError where none is there but it is
    `required`, or where it was measured in another way."""
    path = journal_of(setup.results, study.name)
    found = [each for each in read_journal(path) if each.kind == plan.kind]
    if not found or first and found[-1].time < first.measured.time:
        if required and not first:
            raise UserError(f"nothing to resume in {relative(path)}", 2)
        if found:
            print(f"{relative(path)}: what it holds of these runs is older than the measurement on"
                  " which they depend; they begin anew", flush=True)
        return None
    earlier = found[-1]
    if plan.within or earlier.plan.within:  # they were as many as fitted
        plan.epochs = earlier.plan.epochs
    different = earlier.differs_from(setup) or next(
        (f"with other {OPTION_OF.get(each.name, each.name)}" for each in fields(plan)
         if each.name not in MAY_DIFFER
         and getattr(earlier.plan, each.name) != getattr(plan, each.name)), None)
    if different:
        anew = "without --resume a new one begins" if required else ELSEWHERE
        raise UserError(f"can't resume {relative(path)}: it was measured {different}; {anew}", 2)
    return earlier


def does_not_fit(error: str | None) -> bool:
    """Whether a run's error tells that it is too large: for the memory, or for the text."""
    return bool(re.search("out of memory|text is too short|ended by signal 9", error or ""))


def failed(measured: Measured) -> bool:
    """Whether a run failed; where a plan goes on until nothing more fits, in another way."""
    names = {run.name for run in measured.plan.runs}
    return any(result.error and not (measured.plan.until_full and does_not_fit(result.error))
               for result in measured.results if result.name in names)


# ---- A plan ------------------------------------------------------------------------------------


class Measurement:
    """One plan of a study, as far as it is measured."""

    def __init__(self, study, plan: Plan, setup: Setup, earlier: Measured | None):
        self.study, self.setup = study, setup
        self.path = journal_of(setup.results, study.name)
        self.tried: set[tuple] = set()  # since this start: the keys of jobs
        self.repeats = True  # whether a disturbed run is repeated
        now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        again = HALVED * setup.halved
        self.measured = earlier or Measured(
            f"{now}-{os.getpid()}{again}-{plan.kind}".rstrip("-"), study.name, plan.kind, now,
            setup.machine, setup.matmul_peak or {}, None, {}, list(setup.options), plan,
            folder=setup.results)

    def batches(self) -> dict[str, int]:
        """What takes the place of the published batch sizes: as in what is measured so far, even
        where other sizes would fit now."""
        measured = self.measured
        if measured.results or measured.plan.batches:  # it has begun
            return measured.plan.batches
        return lengths.fitting(self.setup, lengths.fast_of(measured.plan))

    def run(self, plan: Plan, rounds: int, deadline: float | None) -> bool:
        """Runs what is left of so many rounds; returns whether it came to their end. `plan` may
        have other runs than before: their results come to those of the earlier ones."""
        measured, setup = self.measured, self.setup
        able, scripts = self.take(plan, rounds)
        jobs = self.jobs(rounds)
        # Before anything is written: wrong options are told here.
        configs = lengths.configurations(able, plan, setup) if jobs else {}
        if jobs:
            self.trace(able, plan, scripts)
        processes.prepare_tokens(setup.data)
        if measured.differs_from(setup):  # the tokens alone can, and only if they were lost
            raise UserError(f"{relative(setup.data)} has other tokens than were measured so far")
        measured.data = data_of(setup.data)
        if not measured.matmul_peak:
            append(self.path, measured.as_json())  # from here on, --resume goes on with this one
            print("Measuring this machine's matrix products", flush=True)
            measured.matmul_peak = processes.ask_machine("matmul_peak")
        if plan.within and not plan.epochs:
            plan.epochs = lengths.epochs_within(plan, setup, measured.matmul_peak, configs)
            measured.plan.epochs = plan.epochs
        append(self.path, measured.as_json())
        speeds = lengths.speeds_here(measured.study, plan, setup)
        times = {run.name: lengths.length_of(run, plan, setup, configs[run.name],
                                             measured.matmul_peak, speeds)
                 for run in able if run.name in configs}
        for i, job in enumerate(jobs):
            processes.raise_pending()
            if job.run.name in self.out_of_reach():
                continue
            seconds = seconds_left([job], measured.results, times)
            if deadline is not None and time.monotonic() + seconds > deadline:
                return False
            result = self.run_job(job, *scripts[job.run.name], times[job.run.name])
            measured.add(result)
            if self.repeats and result in measured.disturbed and not result.error and not (
                    deadline is not None and time.monotonic() + seconds > deadline):
                print(f"round {job.round}: {job.run.name}: the machine was slower than before:"
                      " once more", flush=True)
                again = self.run_job(job, *scripts[job.run.name], times[job.run.name],
                                     repeats_disturbed=True)
                measured.add(again)
                self.repeats = again not in measured.disturbed  # or else it stays that slow
                result = result if again.error else again
            if self.may_halve(job.run) and re.search("out of memory", result.error or ""):
                raise OutOfMemory(f"{job.run.name}: {result.error}")
            beyond = self.out_of_reach()
            later = [job for job in jobs[i + 1 :] if job.run.name not in beyond]
            if plan.until_full:  # how large it gets isn't known
                tried = {each.name for each in measured.results}
                later = [job for job in later if job.run.after in tried | {None}]
            left = in_words(seconds_left(later, measured.results, times))
            left += " or more" * any(run.after for run in plan.runs)
            seed = f", seed {job.seed}" if job.seed != plan.first_seed else ""
            print(f"round {job.round}: {job.run.name}{seed}: {told(result, plan)}; {left} left",
                  flush=True)
        return True

    def take(self, plan: Plan, rounds: int) -> tuple[list[Run], dict[str, tuple[Path, bytes]]]:
        """(the runs of a plan that can run, the script of each by its name); results of runs
        whose training step, options or cores have changed since are dropped. Only scripts that are
        other files than was measured are traced for it. Raises UserError, StackError, OSError."""
        able, measured = [run for run in plan.runs if not run.error], self.measured
        scripts = {run.name: script_of(run, self.setup) for run in able}

        def how(run: Run) -> tuple:
            return run.options, run.processes, run.cores, run.torchrun

        before = {run.name: how(run) for run in measured.plan.runs}
        changed = {run.name for run in plan.runs if before.get(run.name, how(run)) != how(run)}
        measured.plan = replace(plan, rounds=rounds)
        measured.sources |= {name: sha256(text) for name, (_, text) in scripts.items()}
        doubtful = {each.name for each in measured.results
                    if each.source_sha256 != measured.sources.get(each.name)}
        self.trace([run for run in able if run.name in doubtful], plan, scripts)
        kept = [each for each in measured.results
                if measured.stands(each) and each.name not in changed]
        if len(kept) < len(measured.results):
            dropped = len(measured.results) - len(kept)
            print(f"{dropped} of {len(measured.results)} runs are measured anew: their scripts'"
                  " training steps or options have changed since", flush=True)
        measured.results = kept
        return able, scripts

    def trace(self, runs: list[Run], plan: Plan, scripts: dict[str, tuple[Path, bytes]]) -> None:
        """Notes the training steps of runs. Raises UserError."""
        setup = self.setup
        found = fingerprints([of_run(scripts[run.name][1], run, plan, setup.options, setup.machine)
                              for run in runs])
        self.measured.steps |= {run.name: each and each.step
                                for run, each in zip(runs, found, strict=True)}

    def jobs(self, rounds: int) -> list[Job]:
        """What there is to run, in order, less what stands."""
        plan, jobs = self.measured.plan, []
        for number in range(1, rounds + 1):
            for run in plan.runs:
                if not run.error:
                    jobs.append(Job(run, number, plan.seed_of(number)))
                    if plan.seed_noise and run is plan.runs[0]:
                        jobs.append(Job(run, number, plan.first_seed + number))
        done = {result.key for result in self.measured.results
                if not result.error or plan.until_full and does_not_fit(result.error)}
        return [job for job in jobs if job.key not in done]

    def may_halve(self, run: Run) -> bool:
        """Whether a run on a GPU has a batch size of ours, or its script's own, above 1."""
        setup, plan = self.setup, self.measured.plan
        chosen = "--batch-size" in run.options and not plan.batches
        halved = setup.halved or HALVED in self.measured.id  # by an earlier start
        return (setup.device == "cuda" and not halved and not plan.until_full
                and self.study.failures_count and not chosen
                and not lengths.option_of("--batch-size", [*plan.options, *setup.options])
                and set(plan.batches.values()) != {1})

    def out_of_reach(self) -> set[str]:
        """The names of the runs that failed, and of those that aren't tried for it."""
        names = {result.name for result in self.measured.results if result.error
                 and (result.key in self.tried
                      or self.measured.plan.until_full and does_not_fit(result.error))}
        for run in self.measured.plan.runs:  # the smaller ones come first
            if run.after in names or self.measured.why_not(run):
                names.add(run.name)
        return names

    def run_job(self, job: Job, script: Path, text: bytes, length: Length, **also) -> Result:
        """Runs it, and adds it to the journal, its `run` line with what stands in `also`."""
        run, setup, plan = job.run, self.setup, self.measured.plan
        if script != run.script:  # not in place
            write_whole(script, text)
        # torch.compile keeps what it made, here by script and options, so that studies share it.
        cache = BUILD / "compiler-cache" / "-".join([sha256(text)[:16], *run.options])
        environment: dict = dict(TORCHINDUCTOR_CACHE_DIR=str(cache),
                                 TRITON_CACHE_DIR=str(cache / "triton"))
        environment |= self.study.environment
        if "mbit" in run.tags:
            environment["PYTHONPATH"] = str(ROOT)  # for the module that makes the hosts
        if run.processes > 1:
            environment["OMP_NUM_THREADS"] = "1"  # as torchrun would set it, and say so
        cold = job.round <= plan.cold_rounds and job.seed == plan.seed_of(job.round)
        if cold:
            shutil.rmtree(cache, ignore_errors=True)
        self.tried.add(job.key)
        BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD, ignore_cleanup_errors=True) as name:
            folder = Path(name)
            command = command_of(job, plan, setup, script, length, folder)
            start = dict(event="run", id=self.measured.id, name=run.name, round=job.round,
                         seed=job.seed, cache="cold" if cold else "warm", command=printed(command),
                         source_sha256=self.measured.sources[run.name],
                         step=self.measured.steps.get(run.name), **also)
            append(self.path, start)
            began, timeout = time.perf_counter(), HANG_SECONDS + 5 * length.seconds
            hung = None
            try:
                code, _, err = processes.run_child(command, timeout=timeout, cores=run.cores,
                                                   **environment)
            except subprocess.TimeoutExpired:
                code, err = 1, ""
                hung = f"ended after {timeout:.0f} s: it hung, or is far too slow"
            ran = dict(event="ran", seconds=time.perf_counter() - began, exit=code, error=None)
            lines, events = read_child(folder / "results")
            error = hung or (make_result(start, events, ran).error if events else None)
            if code and (not error or error.startswith("killed")):
                error = processes.error_line(err) if code > 0 else f"ended by signal {-code}"
            rank = re.search(r"^error: (rank \d+: .+)", err, re.MULTILINE)
            if error and rank:  # why the other ranks, and so the record, came to no end
                error = rank[1]
            if not error and not events:
                error = "it left no record"
            if not error:
                try:
                    self.study.collect(setup, folder / "results")
                except ValueError as reason:
                    error = str(reason)
        ran |= dict(error=error, load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
                    matmul_rate=None)
        try:
            ran["matmul_rate"] = processes.ask_machine("matmul_rate")
        except UserError as reason:
            print(f"the rate of matrix products isn't known: {reason}", file=sys.stderr)
        finally:  # also when it is interrupted here
            append(self.path, lines, ran)
        return make_result(start, events, ran)


def script_of(run: Run, setup: Setup) -> tuple[Path, bytes]:
    """(where a run's script lies or will lie, in a folder named by its content; its text). Raises
    StackError, OSError."""
    text = setup.scripts.text(run.script)
    if isinstance(run.script, Path):
        return run.script, text
    return BUILD / "scripts" / sha256(text)[:16] / f"{run.name}.py", text


def command_of(job: Job, plan: Plan, setup: Setup, script: Path, length: Length,
               scratch: Path) -> list:
    run, launcher = job.run, []
    if "mbit" in run.tags:
        launcher = ["-m", "bench.hosts", "--mbit", f"{run.tags['mbit']:g}"]
    elif run.torchrun:
        launcher = ["-m", "torch.distributed.run", "--standalone",
                    f"--nproc_per_node={run.processes}"]
    options = [scratch if part == SCRATCH else part for part in run.options]
    return [
        sys.executable, *launcher, script, "--name", run.name, "--device", setup.device,
        "--data", setup.data, "--results-dir", scratch / "results", "--seed", job.seed,
        *length.options, *plan.options, *setup.options, *options,
    ]


def printed(command: list) -> str:
    """A command as a user would type it."""
    return shlex.join(["python", *map(processes.relative_part, command[1:])])


def read_child(folder: Path) -> tuple[bytes, list[dict]]:
    """(the whole lines of the one record in a folder, its events); nothing without one."""
    lines, events = b"", []
    for path in folder.glob("*.jsonl"):
        for line in path.read_bytes().splitlines(keepends=True):
            try:
                events.append(dict(json.loads(line)))
                lines += line.rstrip(b"\n") + b"\n"
            except (ValueError, TypeError):  # cut off, with the run
                break
    return lines, events


def told(result: Result, plan: Plan) -> str:
    if result.error:
        return f"failed: {result.error.removeprefix('failed: ')}"
    loss = result.record.val_loss_after(plan.loss_tokens)
    text = "n/a" if loss is None else f"{loss:.3f}"
    return f"{result.record.tok_per_sec:,.0f} tok/sec, val loss {text}, {result.seconds:.0f} s"


def dry_run(study, setup: Setup, rounds: int | None, resume: bool) -> None:
    """Prints the commands that the study's first plan would run, and how long it would take, by
    what is measured already; it measures nothing, and leaves no results. Raises as run_study."""
    plan = next(study.plans(setup))
    rounds = plan.rounds or rounds or study.rounds[setup.device]
    earlier = earlier_measurement(study, plan, setup, None, required=True) if resume else None
    known = newest([each for each in read_journal(journal_of(setup.results, study.name))
                    if each.kind == plan.kind])
    results = known[0].results if known else []
    peak = known[0].matmul_peak if known else {}
    speeds = lengths.speeds_here(study.name, plan, setup)
    measurement = Measurement(study, plan, setup, earlier)
    plan = lengths.fit(plan, setup, measurement.batches())
    able, _ = measurement.take(plan, rounds)
    configs = lengths.configurations(able, plan, setup)
    times = {run.name: lengths.length_of(run, plan, setup, configs[run.name], peak, speeds)
             for run in able}
    beyond = measurement.out_of_reach()
    jobs = [job for job in measurement.jobs(rounds) if job.run.name not in beyond]
    for job in jobs:
        script, _ = script_of(job.run, setup)
        command = command_of(job, plan, setup, script, times[job.run.name], BUILD / "scratch")
        print(f"round {job.round}: {printed(command)}")
    for run in plan.runs:
        if run.error:
            print(f"not run: {run.label}: {run.error}")
    if known or speeds:
        source = "by an earlier one" if results else "a rough estimate"
        print(f"{len(jobs)} runs, about {in_words(seconds_left(jobs, results, times))} ({source})")
    else:
        rough = "; --max-tokens follows from a rate that isn't measured" * bool(plan.seconds)
        print(f"{len(jobs)} runs; no estimate yet: nothing is measured here{rough}")
