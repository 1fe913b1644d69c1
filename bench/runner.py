"""Run a plan round by round, each run in a fresh process; what is done is saved after each run."""

import contextlib
import hashlib
import io
import json
import math
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench import statistics, tables
from bench.files import ROOT, relative, write_whole
from bench.machine import A100_FLOPS
from bench.plans import (
    BUILD,
    EPOCHS,
    SEED,
    Plan,
    Run,
    UserError,
    comparison_point,
    tokens_per_step,
)
from bench.records import RecordError
from bench.states import SCHEMA, earlier_state

# What the runner gives every script itself, so that runs can be compared.
OWN_OPTIONS = {
    "--data", "--results-dir", "--name", "--device", "--seed", "--max-tokens", "--max-steps",
    "--epochs", "--eval-freq", "--help", "-h",
}
MACHINE = ("name", "device", "gpus", "torch")  # what has to be the same for a plan to go on
HANG_SECONDS = 300  # and five times the estimate: a run that takes longer hangs, and is ended
COMPILE_SECONDS = 40  # of a script that compiles its model, in round 1: a rough estimate


@dataclass(frozen=True)
class Job:
    """A run in a round, with a seed."""

    run: Run
    round: int
    seed: int = SEED

    @property
    def key(self) -> tuple[str, int, int]:
        return self.run.name, self.round, self.seed


@dataclass(frozen=True)
class Length:
    """How long a run trains, as options, and a rough estimate of all the seconds it takes."""

    options: tuple
    seconds: float


class Interrupted(BaseException):
    """Ctrl-C, SIGTERM or SIGHUP. No Exception, so that nothing on its way swallows it."""


def on_signals(handler) -> None:
    """Sets the handler of what ends a program; but `nohup` goes on to protect from SIGHUP."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number and (name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN):
            signal.signal(number, handler)


def interrupt(signum, frame) -> None:
    """A signal handler. Raises Interrupted."""
    on_signals(signal.SIG_IGN)  # a second one mustn't cut the end short
    raise Interrupted(signum)


# ---- Child processes ---------------------------------------------------------------------------


def run_child(
    command: list, cwd: Path | None = None, timeout: float | None = None, **environment: str
) -> tuple[int, str, str]:
    """(exit code, stdout, stderr). The child ends with this process, unless that is killed.

    Raises subprocess.TimeoutExpired, with the child ended, after `timeout` seconds.
    """
    child = subprocess.Popen(
        [str(part) for part in command], env=os.environ | environment, cwd=cwd, text=True,
        encoding="utf-8", errors="replace", stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C comes here alone, and is passed on once
    )
    try:
        out, err = child.communicate(timeout=timeout)
    except BaseException:
        child.terminate()
        try:
            child.communicate(timeout=40)  # torchrun gives its ranks 30 seconds
        except subprocess.TimeoutExpired:
            child.kill()
        raise
    return child.returncode, out, err


def error_line(text: str) -> str:
    """The last line of `text` that tells an error, or else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no reason given"]
    told = [line for line in lines if re.match(r"([\w.-]+: )?error: ", line)] or lines
    return re.sub(r"^([\w.-]+: )?error: ", "", told[-1])


def ask(*command, **environment: str) -> str:
    """What Python prints for a script or module of this repository. Raises UserError."""
    code, out, err = run_child([sys.executable, *command], ROOT, **environment)
    if code:
        raise UserError(f"{shlex.join(map(relative_part, command))} failed: {error_line(err)}")
    return out


def ask_machine(question: str) -> dict:
    """The answer of bench.machine to "this_machine", "matmul_peak" or "look". Raises UserError."""
    return json.loads(ask("-m", "bench.machine", question).splitlines()[-1])


def prepare_tokens(folder: Path) -> None:
    """Runs data/prepare.py where `folder` holds no tokens. Raises UserError where that fails."""
    if not (folder / "meta.json").exists():  # written last
        print(f"No tokens in {relative(folder)}: running data/prepare.py", flush=True)
        ask(ROOT / "data" / "prepare.py", "--out", folder.resolve())


# ---- How long each run trains ------------------------------------------------------------------


def read_configurations(requests: list) -> list[dict]:
    """For each [script, options]: its configuration, or {"error": why it has none}."""
    import torch

    answers = []
    for script, options in requests:
        messages = io.StringIO()
        try:
            with contextlib.redirect_stdout(messages), contextlib.redirect_stderr(messages):
                functions = runpy.run_path(script)
                args = functions["parse_arguments"](options)
                config = functions["configure"](args, torch.device(args.device))
            answers.append(dict(batch_size=config.batch_size, context_length=config.context_length,
                                compile=getattr(config, "compile", False)))
        except SystemExit:  # argparse has printed why
            answers.append({"error": error_line(messages.getvalue())})
        except Exception as error:
            answers.append({"error": f"{type(error).__name__}: {error}"})
    return answers


def configurations(plan: Plan) -> dict[str, dict]:
    """Batch size, context length and whether it compiles, of each run that can run, by its name.

    Each script's own parser judges the options. Raises UserError where one refuses them.
    """
    for option in plan.options:
        name = option.split("=")[0]
        if name in OWN_OPTIONS:
            raise UserError(f"{name} is set by measure.py itself, for every run alike", 2)
    runs = [run for run in plan.runs if not run.error]
    device = ["--device", plan.machine["device"]]
    requests = [[str(run.script), [*device, *plan.options, *run.options]] for run in runs]
    # RANK: for 02, as if torchrun had started it.
    answers = json.loads(ask("-m", "bench.runner", json.dumps(requests), RANK="0"))
    for run, answer in zip(runs, answers, strict=True):
        if "error" in answer:
            raise UserError(f"{run.name}: {answer['error']}", 2)
    return {run.name: answer for run, answer in zip(runs, answers, strict=True)}


def length_of(run: Run, plan: Plan, config: dict, matmul_peak: dict) -> Length:
    """Long enough for the common token count, and for `plan.seconds` by the estimated speed; or,
    where the plan runs whole scripts, as long as they are."""
    gpus = plan.machine["gpus"]
    speed = expected_speed(run, matmul_peak)
    extra = COMPILE_SECONDS if gpus and config["compile"] else 0
    if plan.whole and plan.tokens:
        tokens = plan.tokens * run.processes
        return Length(("--max-tokens", tokens), 20 + extra + tokens / (speed if gpus else 1_500))
    if plan.whole:
        options = ("--epochs", plan.epochs) if plan.epochs else ()
        seconds = 20 + (plan.epochs or EPOCHS) * seconds_per_epoch(plan, speed)
        return Length(options, seconds + extra if gpus else 60)
    per_step = tokens_per_step(config, run.processes)
    compared_at = comparison_point(plan.tokens * run.processes, per_step)
    max_tokens = max(compared_at, math.ceil(plan.seconds * speed / per_step) * per_step)
    # Lines come after 1, 1 + eval_freq, 1 + 2 * eval_freq ... steps; so one is at the common count.
    eval_freq = max(1, compared_at // per_step - 1)
    options = ("--max-tokens", max_tokens, "--eval-freq", eval_freq)
    options += ("--epochs", 10**6)  # the tokens alone end the run
    return Length(options, 20 + extra + max_tokens / speed if gpus else 10 + max_tokens / 1_500)


def expected_speed(run: Run, matmul_peak: dict) -> float:
    """About how many tok/sec: as much faster than an A100 as matrix products are."""
    return (run.expected or 0) * matmul_peak.get("bfloat16", 0) / A100_FLOPS or 20_000


def seconds_per_epoch(plan: Plan, tok_per_sec: float) -> float:
    """A rough estimate, with the evaluations of an epoch and its sample."""
    meta = plan.data / "meta.json"
    tokens = json.loads(meta.read_bytes())["tokens"]["train"] if meta.exists() else 414_009
    return 1.3 * tokens / tok_per_sec + 1


def lengths_of(plan: Plan, configs: dict[str, dict], matmul_peak: dict) -> dict[str, Length]:
    """The length of each run that can run, by its name."""
    return {run.name: length_of(run, plan, configs[run.name], matmul_peak)
            for run in plan.runs if run.name in configs}


def seconds_left(jobs: list[Job], results: list[dict], lengths: dict[str, Length]) -> float:
    """By the median time of each run's results; for a run without any by its length's estimate,
    corrected by how far the others' were off."""
    times = {}
    for result in results:
        times.setdefault(result["name"], []).append(result["seconds"])
    off = [median(known) / lengths[name].seconds for name, known in times.items()
           if name in lengths]

    def seconds(job: Job) -> float:
        name = job.run.name
        if name in times:
            return median(times[name])
        return lengths[name].seconds * (median(off) if off else 1)

    return sum(map(seconds, jobs))


# ---- One run -----------------------------------------------------------------------------------


def command_of(job: Job, plan: Plan, length: Length) -> list:
    run = job.run
    launcher = ["-m", "torch.distributed.run", "--standalone",
                f"--nproc_per_node={run.processes}"] if run.torchrun else []
    return [
        sys.executable, *launcher, run.script, "--name", run.name,
        "--device", plan.machine["device"], "--data", plan.data,
        "--results-dir", plan.path.parent, "--seed", job.seed,
        *length.options, *plan.options, *run.options,
    ]


def run_job(job: Job, plan: Plan, length: Length) -> dict:
    """Runs it; returns its result for the state file."""
    # torch.compile keeps what it made, here by script, so that plans share it.
    cache = BUILD / "compiler-cache" / sha256(job.run.script)[:16]
    if plan.cold and (job.round, job.seed) == (1, SEED):
        shutil.rmtree(cache, ignore_errors=True)
    began = time.perf_counter()
    timeout = HANG_SECONDS + 5 * length.seconds
    try:
        code, out, err = run_child(
            command_of(job, plan, length), timeout=timeout,
            TORCHINDUCTOR_CACHE_DIR=str(cache), TRITON_CACHE_DIR=str(cache / "triton"),
        )
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
        error = error_line(err) if code > 0 else f"ended by signal {-code}"
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
            data=sha256(meta) if meta.exists() else None,
            scripts={run.name: sha256(run.script) for run in runs},
        ),
        matmul_peak={}, results=[], rows=[], seed_noise=None,
    )


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def save(state: dict, path: Path) -> None:
    write_whole(path, json.dumps(state, indent=1))


def resume_state(plan: Plan, rounds: int) -> dict:
    """The earlier state of the same plan, without the runs that have to be tried again.

    Raises UserError where there is none, or where it was measured in another way.
    """
    state, new = earlier_state(plan.path), new_state(plan, rounds)
    if not state:
        raise UserError(f"nothing to resume: {relative(plan.path)} is missing or damaged", 2)
    for name, value in new["plan"].items():
        earlier = state["plan"].get(name)
        same = earlier == value or name == "rounds"  # more rounds are welcome
        if name == "machine":
            same = isinstance(earlier, dict) and same_machine(earlier, value)
        if not same:
            raise UserError(f"can't resume {relative(plan.path)}: it was measured with other"
                            f" {name}; without --resume a new one begins", 2)

    def stands(result: dict) -> bool:
        try:
            statistics.measured_record(plan.path.parent / str(result["record"]))
            return not result["error"]
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
                jobs.append(Job(run, number))
                if plan.seed_noise and run is plan.runs[0]:
                    jobs.append(Job(run, number, SEED + number))
    done = {(result["name"], result["round"], result["seed"]) for result in results}
    return [job for job in jobs if job.key not in done]


def run_plan(
    plan: Plan, rounds: int = 4, resume: bool = False, deadline: float | None = None
) -> bool:
    """Runs what is left of `rounds` rounds; returns whether it came to their end.

    State and table are left at `plan.path` (see bench.states), the state after every run. With
    `resume` an earlier start of the same plan goes on; else its files are put aside. No run is
    started that by estimate would end after `deadline`, in seconds of time.monotonic(). A run that
    fails isn't repeated in later rounds; a later `resume` tries it again. Raises UserError.
    """
    prepare_tokens(plan.data)
    state = resume_state(plan, rounds) if resume else new_state(plan, rounds)
    # Before anything is written: wrong options are told here.
    configs = configurations(plan) if make_jobs(plan, rounds, state["results"]) else {}
    if not resume:
        put_aside(plan.path)
    save(state, plan.path)
    if not state["matmul_peak"]:
        print("Measuring this machine's matrix products", flush=True)
        state["matmul_peak"] = ask_machine("matmul_peak")
        save(state, plan.path)
    finished, jobs = True, make_jobs(plan, rounds, state["results"])
    if jobs:
        lengths = lengths_of(plan, configs, state["matmul_peak"])
        finished = run_jobs(jobs, plan, state, lengths, deadline)
    state["rows"], state["seed_noise"] = statistics.make_rows(plan, state, plan.path.parent)
    save(state, plan.path)
    write_whole(plan.path.with_suffix(".md"), tables.plan_table(state))
    return finished


def run_jobs(
    jobs: list[Job], plan: Plan, state: dict, lengths: dict[str, Length], deadline: float | None
) -> bool:
    """Runs them in order, each result into `state`; False where the deadline ended it."""
    failed = set()
    for i, job in enumerate(jobs):
        if job.run.name in failed:
            continue
        seconds = seconds_left([job], state["results"], lengths)
        if deadline is not None and time.monotonic() + seconds > deadline:
            return False
        result = run_job(job, plan, lengths[job.run.name])
        state["results"].append(result)
        save(state, plan.path)
        if result["error"]:
            failed.add(job.run.name)
        later = [job for job in jobs[i + 1 :] if job.run.name not in failed]
        left = in_words(seconds_left(later, state["results"], lengths))
        seed = f", seed {job.seed}" if job.seed != SEED else ""
        print(f"round {job.round}: {job.run.name}{seed}: {told(result, plan)}; {left} left",
              flush=True)
    return True


def told(result: dict, plan: Plan) -> str:
    if result["error"]:
        return f"failed: {result['error'].removeprefix('failed: ')}"
    record = statistics.measured_record(plan.path.with_name(result["record"]))
    loss = tables.show(statistics.val_loss(record, plan.tokens), ".3f")
    return f"{record.tok_per_sec:,.0f} tok/sec, val loss {loss}, {result['seconds']:.0f} s"


def dry_run(plan: Plan, rounds: int = 4, resume: bool = False) -> None:
    """Prints the commands that `run_plan` would run, and how long it would take."""
    configs = configurations(plan)
    earlier = earlier_state(plan.path)
    state = resume_state(plan, rounds) if resume else new_state(plan, rounds)
    peak = earlier.get("matmul_peak") or ask_machine("matmul_peak")
    lengths = lengths_of(plan, configs, peak)
    jobs = make_jobs(plan, rounds, state["results"])
    for job in jobs:
        _, *command = command_of(job, plan, lengths[job.run.name])
        print(f"round {job.round}: python {shlex.join(map(relative_part, command))}")
    results = earlier.get("results", [])
    source = "by the one before it" if results else "a rough estimate"
    print(f"{len(jobs)} runs, about {in_words(seconds_left(jobs, results, lengths))} ({source})")


def relative_part(part) -> str:
    """A part of a command, as a user would type it."""
    return relative(part) if isinstance(part, Path) else str(part)


def in_words(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


if __name__ == "__main__":
    print(json.dumps(read_configurations(json.loads(sys.argv[1]))))
