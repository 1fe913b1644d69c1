"""One run of a study, in a process of its own; what it leaves goes into the journal."""

import json
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from bench import processes
from bench.common import BUILD, relative, remove_built, sha256
from bench.measure.journal import Measurement, Result, append, journal_of, make_result
from bench.measure.plan import SCRATCH, Job, Measurable, Setup
from bench.measure.records import COMPLETE, Outcome, RecordError, Status, make_record, read_events
from bench.measure.sizing import Length
from gpt_speed import children
from gpt_speed.common import UserError

HANG_SECONDS = 600  # and five times the estimate; then a run is ended
# What scripts say where they end before their record begins, or in one rank of several.
STATUS_OF = {"out of memory": Status.OUT_OF_MEMORY, "text is too short": Status.TOO_LARGE}


def command_of(
    study: Measurable, job: Job, setup: Setup, length: Length, scratch: Path
) -> list[Any]:
    """Returns the command line of a run, whose record goes to a folder in `scratch`."""
    run, launcher = job.run, []
    if run.torchrun:
        launcher = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--local-addr",
            "127.0.0.1",
            f"--nproc_per_node={run.processes}",
        ]
    own = {
        "--name": run.name,
        "--device": setup.device,
        "--data": setup.data,
        "--results-dir": scratch / "results",
        "--seed": job.seed,
    }
    return [
        sys.executable,
        *launcher,
        *study.driver(setup, run),
        setup.script(run),
        *chain.from_iterable(own.items()),
        *length.options,
        *setup.options,
        *(scratch if option == SCRATCH else option for option in run.options),
    ]


def printed(command: list) -> str:
    """Returns a command as a user would type it."""
    return shlex.join(["python", *map(relative, command[1:])])


def run_job(
    job: Job, measurement: Measurement, study: Measurable, setup: Setup, length: Length
) -> Result:
    """Runs it, and adds it to the journal. Raises UserError, OSError, Interrupted."""
    run, journal = job.run, journal_of(setup.results, study.name)
    source = measurement.sources[run.name]
    cold = job.round <= measurement.plan.cold_rounds
    environment = compiler_cache(source, run.options, cold) | study.environment
    BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD, ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        command = command_of(study, job, setup, length, scratch)
        start = dict(
            event="run",
            id=measurement.id,
            name=run.name,
            round=job.round,
            seed=job.seed,
            command=printed(command),
            source_sha256=source,
        )
        append(journal, start)
        timeout = HANG_SECONDS + 5 * length.seconds
        began = time.perf_counter()
        code, err = run_until(timeout, command, study.cores(run), environment)
        seconds = time.perf_counter() - began
        measurement.check_tokens(setup)  # else what this run trained on isn't known
        if sha256(setup.scripts.text(run.script)) != source:  # one that runs where it lies
            raise UserError(f"{relative(run.script)} was edited while it ran: --resume repeats it")
        events = read_child(scratch / "results")
        outcome = outcome_of(code, err, events)
        if outcome.complete:
            outcome = collected(study, setup, scratch / "results")
    ran = dict(
        event="ran",
        seconds=seconds,
        outcome=outcome.status,
        error=outcome.text or None,
        matmul_rate=None,
    )
    try:
        ran["matmul_rate"] = processes.ask_machine("matmul_rate")
    except UserError as reason:
        print(f"the matmul throughput isn't known: {reason}", file=sys.stderr)
    finally:  # also when it is interrupted here
        append(journal, *events, ran)
    return make_result(start, events, ran)


def run_until(
    timeout: float, command: list, cores: int | None, environment: dict[str, Any]
) -> tuple[int | None, str]:
    """Returns (the exit code, what it wrote to stderr) of a run; (None, why) if it was ended since
    it took `timeout` seconds."""
    try:
        code, _, err = children.run_child(command, timeout=timeout, cores=cores, **environment)
    except subprocess.TimeoutExpired:
        return None, f"ended after {timeout:.0f} s: it hung, or is far too slow"
    return code, err


def collected(study: Measurable, setup: Setup, folder: Path) -> Outcome:
    """Lets the study take what a complete run left; returns how that ended."""
    try:
        study.collect(setup, folder)
    except ValueError as reason:
        return Outcome(Status.FAILED, str(reason))
    return COMPLETE


def compiler_cache(source: str, options: tuple[str, ...], cold: bool) -> dict[str, str]:
    """Returns the variables that name the folder of what torch.compile keeps, one for each script
    and options, so that studies share it. Empties it for a `cold` run."""
    cache = BUILD / "compiler-cache" / sha256(json.dumps([source, options]).encode())[:16]
    if cold:
        remove_built(cache)
    return dict(TORCHINDUCTOR_CACHE_DIR=str(cache), TRITON_CACHE_DIR=str(cache / "triton"))


def read_child(folder: Path) -> list[dict]:
    """Reads the events of a folder's one record; none where there is no whole one."""
    for path in folder.glob("*.jsonl"):
        with suppress(RecordError):
            return read_events(path)
    return []


def outcome_of(code: int | None, err: str, events: list[dict]) -> Outcome:
    """Returns how a run ended: as its record says; where that has no end, or is that of a rank that
    waited for another one, by the exit codes and the line of the error."""
    if code is None:
        return Outcome(Status.FAILED, err)
    failure = first_failure(err)
    if failure and (failure.status is Status.TOO_LARGE or not processes.ERROR.search(err)):
        return failure  # the others' errors, if there are any, follow from it
    if code == 0:
        return recorded_outcome(events)
    if rank_error := re.search(r"^error: (rank \d+: .+)", err, re.MULTILINE):
        return by_error_line(rank_error[1])
    recorded = recorded_outcome(events)
    if has_end(events) and not recorded.complete:
        return recorded
    return by_exit_code("", code) if code < 0 else by_error_line(processes.error_line(err))


def recorded_outcome(events: list[dict]) -> Outcome:
    """Returns how a run ended by its record, if that is whole."""
    try:
        return make_record("", events).outcome
    except RecordError as reason:
        return Outcome(Status.FAILED, str(reason))


def has_end(events: list[dict]) -> bool:
    return any(event["event"] == "end" for event in events)


def by_error_line(line: str) -> Outcome:
    """Returns how a process ended that wrote such a line."""
    for words, status in STATUS_OF.items():
        if words in line:
            return Outcome(status, line)
    return Outcome(Status.FAILED, line)


def first_failure(err: str) -> Outcome | None:
    """Returns how the rank ended that torchrun says failed first, or one that Linux has killed,
    which it does for want of memory; None where torchrun says nothing."""
    failures = re.findall(r"rank +: (\d+) .*\n +exitcode +: (-?\d+) \(pid: (\d+)\)", err)
    by_torchrun = re.findall(r"Unable to shutdown process (\d+)", err)
    own = [
        (f"rank {rank}: ", int(code))
        for rank, code, pid in reversed(failures)
        if pid not in by_torchrun and int(code) != -signal.SIGTERM
    ]
    killed = [(rank, code) for rank, code in own if code == -signal.SIGKILL]
    return by_exit_code(*(killed or own)[0]) if own else None


def by_exit_code(who: str, code: int) -> Outcome:
    """Returns how a process ended, by its exit code."""
    status = Status.TOO_LARGE if code == -signal.SIGKILL else Status.FAILED
    return Outcome(status, who + children.ending(code))
