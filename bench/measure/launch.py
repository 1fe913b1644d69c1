"""One run of a study, in a process of its own; what it leaves goes into the journal."""

import json
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from bench import processes
from bench.catalogue import Run
from bench.common import BUILD, relative, remove_built, sha256
from bench.measure.journal import append, journal_of, make_result
from bench.measure.measurement import Measurement
from bench.measure.plan import SCRATCH, Job, Measurable, Setup
from bench.measure.records import (
    Outcome,
    RecordError,
    Result,
    Status,
    make_record,
    read_events,
)
from bench.measure.sizing import Length
from gpt_speed import children
from gpt_speed.common import UserError

HANG_SECONDS = 600  # and five times the estimate; then a run is ended
KILLED = -9  # the exit code of a process that SIGKILL has ended
VMSTAT = Path("/proc/vmstat")  # Linux's counters
# What scripts say where they end before their record begins, or in one rank of several.
STATUS_OF = {"out of memory": Status.OUT_OF_MEMORY, "text is too short": Status.TOO_LARGE}


def command_of(
    study: Measurable, job: Job, setup: Setup, length: Length, scratch: Path
) -> list[Any]:
    """Returns the command line of a run, whose record goes to a folder in `scratch`."""
    run = job.run
    of_every_run = {
        "--name": run.name,
        "--device": setup.device,
        "--data": setup.data,
        "--results-dir": scratch / "results",
        "--seed": job.seed,
    }
    return [
        run.python or sys.executable,
        *launcher_of(run),
        *study.driver(setup, run),
        setup.write_script(run),
        *chain.from_iterable(of_every_run.items()),
        *length.options,
        *setup.options,
        *(scratch if option == SCRATCH else option for option in run.options),
    ]


def launcher_of(run: Run) -> list[str]:
    """Returns what stands before the script of a run that torchrun starts; else nothing."""
    if not run.torchrun:
        return []
    return [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "127.0.0.1",
        f"--nproc_per_node={run.processes}",
    ]


def as_typed(command: list, run: Run, python: str | Path = "python") -> str:
    """Returns the command of a run as a user would type it, who calls its Python so."""
    variables = [f"{name}={value}" for name, value in run.variables.items()]
    return shlex.join([*variables, *map(relative, [python, *command[1:]])])


@dataclass(frozen=True)
class Ended:
    """How the process of a run ended."""

    code: int | None  # None: it was killed, since it took too long
    err: str  # what it wrote to stderr, or why it was killed
    seconds: float
    # How many programs, of any user, Linux has ended meanwhile for want of RAM; None: not known.
    out_of_ram: int | None = None


def run_job(
    job: Job, measurement: Measurement, study: Measurable, setup: Setup, length: Length
) -> Result:
    """Runs it, and adds it to the journal. Raises UserError, OSError, Interrupted."""
    journal = journal_of(setup.results, study.name)
    cache = compiler_cache(job, measurement)
    if job.round <= measurement.plan.cold_rounds:
        remove_built(cache)
    with scratch_folder() as scratch:
        command = command_of(study, job, setup, length, scratch)
        begin = begin_event(job, measurement, command, cache)
        append(journal, begin)
        environment = cache_variables(cache) | study.variables | job.run.variables
        timeout = HANG_SECONDS + 5 * length.seconds
        ended = run_until(timeout, command, study.cores(job.run), environment)
        check_inputs(job.run, measurement, study, setup)
        rate = None
        try:
            rate = matmul_rate()
        finally:  # so that an interrupt meanwhile doesn't cost the run that has ended
            # What the study takes is of the journal's newest run: both are written at once.
            events, outcome = take_results(scratch / "results", ended, study, setup)
            end = end_event(ended, outcome, rate)
            append(journal, *events, end)
    return make_result(begin, events, end)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Gives a new folder in build/, and removes it at the end."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD, ignore_cleanup_errors=True) as name:
        yield Path(name)


def take_results(
    folder: Path, ended: Ended, study: Measurable, setup: Setup
) -> tuple[list[dict], Outcome]:
    """Returns the events of a run's record in its folder, and how the run ended; lets the study
    take what else a complete one left there."""
    events = read_child(folder)
    outcome = outcome_of(ended, events)
    if outcome.complete:
        try:
            study.collect(setup, folder)
        except ValueError as reason:
            outcome = Outcome(Status.FAILED, str(reason))
    return events, outcome


def begin_event(job: Job, measurement: Measurement, command: list, cache: Path) -> dict:
    """Returns the journal's line of a run that begins."""
    return dict(
        event="run",
        id=measurement.id,
        name=job.run.name,
        round=job.round,
        seed=job.seed,
        command=as_typed(command, job.run),
        source_sha256=measurement.sources[job.run.name],
        compiled=cache.exists(),
        length=measurement.lengths.get(job.run.name),
    )


def end_event(ended: Ended, outcome: Outcome, rate: float | None) -> dict:
    """Returns the journal's line of a run that has ended, with the matmul rate right after it."""
    return dict(
        event="ran",
        seconds=ended.seconds,
        outcome=outcome.status,
        error=outcome.text or None,
        matmul_rate=rate,
    )


def run_until(
    timeout: float, command: list, cores: int | None, environment: dict[str, Any]
) -> Ended:
    """Runs a command, and kills it if it takes more than `timeout` seconds."""
    began, before = time.perf_counter(), programs_out_of_ram()
    try:
        code, _, err = children.run_child(
            command, timeout=timeout, cores=cores, environment=environment
        )
    except subprocess.TimeoutExpired:
        code, err = None, f"ended after {timeout:.0f} s: it hung, or is far too slow"
    seconds, after = time.perf_counter() - began, programs_out_of_ram()
    if before is None or after is None:
        return Ended(code, err, seconds)
    return Ended(code, err, seconds, out_of_ram=after - before)


def programs_out_of_ram() -> int | None:
    """Returns how many programs Linux has ended for want of RAM since it was started; None where
    the system doesn't tell."""
    with suppress(OSError):
        count = re.search(r"^oom_kill (\d+)$", VMSTAT.read_text(), re.MULTILINE)
        if count:
            return int(count[1])
    return None


def source_of(run: Run, study: Measurable, setup: Setup) -> str:
    """Returns the SHA-256 of all code that a run's results come from: its script, the program that
    runs it, and the files of this repository that these import. Raises UserError, StackError,
    OSError."""
    script = sha256(setup.scripts.text(run.script))
    driver = [word_or_content(word) for word in study.driver(setup, run)]
    imports = [word_or_content(file) for file in study.imports(run)]
    if not driver and not imports:
        return script
    return sha256(json.dumps([script, driver, imports]).encode())


def word_or_content(word: Any) -> str:
    """Returns a word of a command line, or the SHA-256 of the file that it names."""
    if isinstance(word, Path):
        return sha256(word.read_bytes())
    return str(word)


def check_inputs(run: Run, measurement: Measurement, study: Measurable, setup: Setup) -> None:
    """Raises UserError where the tokens or the script were changed while a run read them, since
    what it has measured isn't known then."""
    measurement.check_tokens(setup)
    # Only a script that runs where it lies can change.
    if source_of(run, study, setup) != measurement.sources[run.name]:
        raise UserError(f"{relative(run.script)} was edited while it ran: --resume repeats it")


def matmul_rate() -> float | None:
    """Returns this machine's matmul throughput at this moment; None where it can't be measured, and
    prints why."""
    try:
        return processes.ask_machine("matmul_rate")
    except UserError as reason:
        print(f"the matmul throughput isn't known: {reason}", file=sys.stderr)
        return None


def compiler_cache(job: Job, measurement: Measurement) -> Path:
    """Returns the folder of what torch.compile keeps, one for each script, options and
    environment, so that studies share it."""
    key = [measurement.sources[job.run.name], job.run.options, measurement.options]
    if job.run.python:
        key.append(str(job.run.python))
    return BUILD / "compiler-cache" / sha256(json.dumps(key).encode())[:16]


def cache_variables(cache: Path) -> dict[str, str]:
    """Returns the variables by which PyTorch and Triton keep what they compile in a folder."""
    return dict(TORCHINDUCTOR_CACHE_DIR=str(cache), TRITON_CACHE_DIR=str(cache / "triton"))


def read_child(folder: Path) -> list[dict]:
    """Reads the events of a folder's one record; none where there is no whole one."""
    for path in folder.glob("*.jsonl"):
        with suppress(RecordError):
            return read_events(path)
    return []


def outcome_of(ended: Ended, events: list[dict]) -> Outcome:
    """Returns how a run ended, by the first of RULES that tells."""
    for rule in RULES:
        outcome = rule(ended, events)
        if outcome:
            return outcome
    return by_error_line(processes.error_line(ended.err))


def if_killed_for_its_time(ended: Ended, events: list[dict]) -> Outcome | None:
    if ended.code is None:
        return Outcome(Status.FAILED, ended.err)
    return None


def if_a_rank_failed_first(ended: Ended, events: list[dict]) -> Outcome | None:
    """Tells by torchrun, unless a rank has named its error; where a rank was killed, the others'
    errors follow from that."""
    failures = rank_failures(ended.err)
    killed = [failure for failure in failures if failure.code == KILLED]
    if not failures or (processes.ERROR.search(ended.err) and not killed):
        return None
    first = (killed or failures)[0]
    return by_exit_code(first.code, ended, f"rank {first.rank}: ")


def if_it_ended_by_itself(ended: Ended, events: list[dict]) -> Outcome | None:
    if ended.code == 0:
        return recorded_outcome(events)
    return None


def if_a_rank_named_its_error(ended: Ended, events: list[dict]) -> Outcome | None:
    """Tells before the record, which may be that of a rank that waited for this one."""
    rank_error = re.search(r"^error: (rank \d+: .+)", ended.err, re.MULTILINE)
    if rank_error:
        return by_error_line(rank_error[1])
    return None


def if_the_record_has_its_error(ended: Ended, events: list[dict]) -> Outcome | None:
    recorded = recorded_outcome(events)
    has_end = any(event["event"] == "end" for event in events)
    if has_end and not recorded.complete:
        return recorded
    return None


def if_a_signal_ended_it(ended: Ended, events: list[dict]) -> Outcome | None:
    if ended.code is not None and ended.code < 0:
        return by_exit_code(ended.code, ended)
    return None


RULES = (  # each tells how a run ended, or returns None
    if_killed_for_its_time,
    if_a_rank_failed_first,
    if_it_ended_by_itself,
    if_a_rank_named_its_error,
    if_the_record_has_its_error,
    if_a_signal_ended_it,
)


def recorded_outcome(events: list[dict]) -> Outcome:
    """Returns how a run ended by its record, if that is whole."""
    try:
        return make_record("", events).outcome
    except RecordError as reason:
        return Outcome(Status.FAILED, str(reason))


def by_error_line(line: str) -> Outcome:
    """Returns how a process ended that wrote such a line."""
    for words, status in STATUS_OF.items():
        if words in line:
            return Outcome(status, line)
    return Outcome(Status.FAILED, line)


class RankFailure(NamedTuple):
    """How a rank ended, by torchrun's report."""

    rank: str
    code: int
    pid: str


def rank_failures(err: str) -> list[RankFailure]:
    """Returns the ranks that torchrun says failed, the first failure first, without those that it
    ended itself because of another one."""
    report = re.findall(r"rank +: (\d+) .*\n +exitcode +: (-?\d+) \(pid: (\d+)\)", err)
    failures = [RankFailure(rank, int(code), pid) for rank, code, pid in report]
    killed_by_torchrun = re.findall(r"Unable to shutdown process (\d+)", err)
    return [
        failure
        for failure in reversed(failures)  # the report has the first one last
        if failure.code != -signal.SIGTERM and failure.pid not in killed_by_torchrun
    ]


def by_exit_code(code: int, ended: Ended, who: str = "") -> Outcome:
    """Returns how a process ended, maybe a rank, by its exit code. Signal 9 says that it was too
    large only where Linux has ended a program for want of RAM meanwhile."""
    if code != KILLED:
        return Outcome(Status.FAILED, who + children.ending(code))
    if ended.out_of_ram is None:
        reason = "for want of RAM, or by a user, a scheduler or a time limit"
        return Outcome(Status.FAILED, f"{who}ended by signal 9, {reason}")
    if ended.out_of_ram:
        reason = "when Linux ended a program for want of RAM"
        return Outcome(Status.TOO_LARGE, f"{who}ended by signal 9, {reason}")
    reason = "by a user, a scheduler or a time limit: it wasn't for want of RAM"
    return Outcome(Status.FAILED, f"{who}ended by signal 9, {reason}")
