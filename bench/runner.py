"""Run a plan round by round, each run in a fresh process; what is done is saved after each run."""

import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench import lengths, processes, statistics, tables
from bench.files import ROOT, relative, write_whole
from bench.lengths import Length, in_words, seconds_left
from bench.plans import BUILD, SCRATCH, SEED, Plan, Run, UserError
from bench.records import RecordError
from bench.states import SCHEMA, earlier_state

DEFAULTS = dict(first_seed=SEED, new_seeds=False, targets={})  # states of before lack them
MACHINE = ("name", "device", "gpus", "torch")  # what has to be the same for a plan to go on
HANG_SECONDS = 300  # and five times the estimate: a run that takes longer hangs, and is ended


@dataclass(frozen=True)
class Job:
    """A run in a round, with a seed."""

    run: Run
    round: int
    seed: int = SEED

    @property
    def key(self) -> tuple[str, int, int]:
        return self.run.name, self.round, self.seed


# ---- One run -----------------------------------------------------------------------------------


def command_of(job: Job, plan: Plan, length: Length) -> list:
    run, launcher = job.run, []
    if run.mbit:
        launcher = ["-m", "bench.hosts", "--mbit", f"{run.mbit:g}"]
    elif run.torchrun:
        launcher = ["-m", "torch.distributed.run", "--standalone",
                    f"--nproc_per_node={run.processes}"]
    return [
        sys.executable, *launcher, run.script, "--name", run.name,
        "--device", plan.machine["device"], "--data", plan.data,
        "--results-dir", plan.path.parent, "--seed", job.seed,
        *length.options, *plan.options, *run.options,
    ]


def run_job(job: Job, plan: Plan, length: Length) -> dict:
    """Runs it; returns its result for the state file."""
    # torch.compile keeps what it made, here by script and options, so that plans share it.
    cache = BUILD / "compiler-cache" / "-".join([sha256(job.run.script)[:16], *job.run.options])
    environment = dict(TORCHINDUCTOR_CACHE_DIR=str(cache), TRITON_CACHE_DIR=str(cache / "triton"))
    if job.run.mbit:
        environment["PYTHONPATH"] = str(ROOT)  # for the module that makes the hosts
    if job.run.processes > 1:
        environment["OMP_NUM_THREADS"] = "1"  # as torchrun would set it, and say so
    if job.round <= plan.cold_rounds and job.seed == plan.seed_of(job.round):
        shutil.rmtree(cache, ignore_errors=True)
    began = time.perf_counter()
    timeout = HANG_SECONDS + 5 * length.seconds
    try:
        BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as scratch:
            command = [scratch if part == SCRATCH else part
                       for part in command_of(job, plan, length)]
            code, out, err = processes.run_child(command, timeout=timeout, cores=job.run.cores,
                                                 **environment)
    except subprocess.TimeoutExpired:
        code, out, err = 1, "", f"error: ended after {timeout:.0f} s: it hung, or is far too slow"
    seconds = time.perf_counter() - began
    record = re.search(r"^Record: .*?([^/\\\n]+\.jsonl)$", out, re.MULTILINE)
    error = None
    if record:
        try:
            statistics.measured_record(plan.path.with_name(record[1]))
        except RecordError as reason:
            error = str(reason)
    if not error and code:
        error = processes.error_line(err) if code > 0 else f"ended by signal {-code}"
    rank = re.search(r"^error: (rank \d+: .+)", err, re.MULTILINE)
    if error and rank:  # why the other ranks, and so the record, came to no end
        error = rank[1]
    if not record and not error:
        error = "it left no record"
    return dict(name=job.run.name, round=job.round, seed=job.seed,
                record=record[1] if record else None, error=error, seconds=seconds)


# ---- The state of a plan -----------------------------------------------------------------------


def new_state(plan: Plan, rounds: int) -> dict:
    meta = plan.data / "meta.json"
    runs = [run for run in plan.runs if not run.error]
    return dict(
        schema=SCHEMA, time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        plan=dict(
            name=plan.name, machine=plan.machine, rounds=rounds, options=plan.options,
            tokens=plan.tokens, seconds=plan.seconds, epochs=plan.epochs,
            first_seed=plan.first_seed, new_seeds=plan.new_seeds, log_tokens=plan.log_tokens,
            targets=plan.targets,
            data=sha256(meta) if meta.exists() else None,
            scripts={run.name: sha256(run.script) for run in runs},
        ),
        matmul_peak={}, results=[], rows=[], seed_noise=None,
    )


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def save(state: dict, path: Path) -> None:
    write_whole(path, json.dumps(state, indent=1))


def resume_state(plan: Plan, rounds: int, retry: bool = True) -> dict:
    """The earlier state of the same plan, without the runs that have to be tried again: those
    whose record is gone and, to `retry`, those that failed.

    Raises UserError where there is none, or where it was measured in another way.
    """
    state, new = earlier_state(plan.path), new_state(plan, rounds)
    if not state:
        raise UserError(f"nothing to resume: {relative(plan.path)} is missing or damaged", 2)
    for name, value in new["plan"].items():
        earlier = state["plan"].get(name, DEFAULTS.get(name))
        same = earlier == value or name == "rounds"  # more rounds are welcome
        if name == "machine":
            same = isinstance(earlier, dict) and same_machine(earlier, value)
        if name == "scripts" and plan.grows and isinstance(earlier, dict):
            new["plan"][name] = earlier | value
            same = all(earlier[run] == value[run] for run in earlier.keys() & value.keys())
        if not same:
            raise UserError(f"can't resume {relative(plan.path)}: it was measured with other"
                            f" {name}; without --resume a new one begins", 2)

    def stands(result: dict) -> bool:
        if result["error"]:
            return not retry or plan.until_full and statistics.does_not_fit(result["error"])
        try:
            statistics.measured_record(plan.path.parent / str(result["record"]))
            return True
        except RecordError:
            return False

    kept = {name: state[name] for name in ("time", "matmul_peak")}
    return new | kept | {"results": [*filter(stands, state["results"])]}


def same_machine(one: dict, other: dict) -> bool:
    """Whether figures of the one stand for the other; the rest may differ, as between hosts."""
    return all(one.get(name) == other.get(name) for name in MACHINE)


def put_aside(path: Path) -> None:
    """Renames an earlier state and its table by the time when they ended."""
    if path.exists():
        ended = time.strftime("-%Y%m%dT%H%M%SZ", time.gmtime(path.stat().st_mtime))
        for file in (path.with_suffix(".md"), path):
            if file.exists():
                file.replace(file.with_stem(file.stem + ended))


# ---- All runs ----------------------------------------------------------------------------------


def make_jobs(plan: Plan, rounds: int, results: list[dict]) -> list[Job]:
    """What there is to run, in order, less what `results` already hold."""
    jobs = []
    for number in range(1, rounds + 1):
        for run in plan.runs:
            if not run.error:
                jobs.append(Job(run, number, plan.seed_of(number)))
                if plan.seed_noise and run is plan.runs[0]:
                    jobs.append(Job(run, number, plan.first_seed + number))
    done = {(result["name"], result["round"], result["seed"]) for result in results}
    return [job for job in jobs if job.key not in done]


def run_plan(
    plan: Plan, rounds: int = 4, resume: bool = False, deadline: float | None = None,
    retry: bool = True,
) -> bool:
    """Runs what is left of `rounds` rounds; returns whether it came to their end.

    State and table are left at `plan.path` (see bench.states), the state after every run. With
    `resume` an earlier start of the same plan goes on; else its files are put aside. No run is
    started that by estimate would end after `deadline`, in seconds of time.monotonic(). A run that
    fails isn't repeated in later rounds; a later `resume` tries it again, unless `retry` is False.
    Raises UserError.
    """
    # Before anything is written: wrong options are told here.
    configs = {} if resume else lengths.configurations(plan)
    processes.prepare_tokens(plan.data)
    state = resume_state(plan, rounds, retry) if resume else new_state(plan, rounds)
    if not resume:
        put_aside(plan.path)
    save(state, plan.path)
    if not state["matmul_peak"]:
        print("Measuring this machine's matrix products", flush=True)
        state["matmul_peak"] = processes.ask_machine("matmul_peak")
        save(state, plan.path)
    finished, jobs = True, make_jobs(plan, rounds, state["results"])
    if jobs:
        configs = configs or lengths.configurations(plan)
        run_lengths = lengths.lengths_of(plan, configs, state["matmul_peak"])
        finished = run_jobs(jobs, plan, state, run_lengths, deadline)
    state["rows"], state["seed_noise"] = statistics.make_rows(plan, state, plan.path.parent)
    save(state, plan.path)
    write_whole(plan.path.with_suffix(".md"), tables.plan_table(state))
    return finished


def run_jobs(
    jobs: list[Job], plan: Plan, state: dict, run_lengths: dict[str, Length],
    deadline: float | None,
) -> bool:
    """Runs them in order, each result into `state`; False where the deadline ended it."""
    failed = out_of_reach(plan, state)
    for i, job in enumerate(jobs):
        if job.run.name in failed:
            continue
        seconds = seconds_left([job], state["results"], run_lengths)
        if deadline is not None and time.monotonic() + seconds > deadline:
            return False
        result = run_job(job, plan, run_lengths[job.run.name])
        state["results"].append(result)
        save(state, plan.path)
        failed = out_of_reach(plan, state)
        later = [job for job in jobs[i + 1 :] if job.run.name not in failed]
        if plan.until_full:  # how large it gets isn't known
            tried = {result["name"] for result in state["results"]}
            later = [job for job in later if job.run.after in tried | {None}]
        left = in_words(seconds_left(later, state["results"], run_lengths))
        left += " or more" * any(run.after for run in plan.runs)
        seed = f", seed {job.seed}" if job.seed != plan.first_seed else ""
        print(f"round {job.round}: {job.run.name}{seed}: {told(result, plan)}; {left} left",
              flush=True)
    return True


def out_of_reach(plan: Plan, state: dict) -> set[str]:
    """The names of the runs that failed, and of those that aren't tried for it."""
    names = {result["name"] for result in state["results"] if result["error"]}
    for run in plan.runs:  # the smaller ones come first
        if run.after and (run.after in names or statistics.blocked(run, plan, state)):
            names.add(run.name)
    return names


def failures(plan: Plan, state: dict) -> bool:
    """Whether a run failed; where a plan goes on until nothing more fits, in another way."""
    errors = [result["error"] for result in state["results"] if result["error"]]
    return any(not (plan.until_full and statistics.does_not_fit(error)) for error in errors)


def told(result: dict, plan: Plan) -> str:
    if result["error"]:
        return f"failed: {result['error'].removeprefix('failed: ')}"
    record = statistics.measured_record(plan.path.with_name(result["record"]))
    loss = tables.show(statistics.val_loss(record, plan.loss_tokens), ".3f")
    return f"{record.tok_per_sec:,.0f} tok/sec, val loss {loss}, {result['seconds']:.0f} s"


def dry_run(plan: Plan, rounds: int = 4, resume: bool = False) -> None:
    """Prints the commands that `run_plan` would run, and how long it would take."""
    configs = lengths.configurations(plan)
    earlier = earlier_state(plan.path)
    state = resume_state(plan, rounds) if resume else new_state(plan, rounds)
    peak = earlier.get("matmul_peak") or processes.ask_machine("matmul_peak")
    run_lengths = lengths.lengths_of(plan, configs, peak)
    jobs = make_jobs(plan, rounds, state["results"])
    for job in jobs:
        _, *command = command_of(job, plan, run_lengths[job.run.name])
        print(f"round {job.round}: python {shlex.join(map(processes.relative_part, command))}")
    results = earlier.get("results", [])
    source = "by the one before it" if results else "a rough estimate"
    seconds = seconds_left(jobs, results, run_lengths)
    print(f"{len(jobs)} runs, about {in_words(seconds)} ({source})")
