"""One run of a study: its script in a process of its own, and what that leaves, in the journal."""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import processes
from bench.common import BUILD, UserError, remove_built, sha256
from bench.measure.journal import Measured, Result, append, journal_of, make_result
from bench.measure.plan import SCRATCH, Job, Plan, Setup
from bench.measure.records import Outcome, Status
from bench.measure.sizing import Length

HANG_SECONDS = 300  # and five times the estimate: a run that takes longer hangs, and is ended


def command_of(job: Job, plan: Plan, setup: Setup, length: Length, scratch: Path) -> list:
    run, launcher = job.run, []
    if run.torchrun:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr",
                    "127.0.0.1", f"--nproc_per_node={run.processes}"]
    options = [scratch if part == SCRATCH else part for part in run.options]
    return [
        sys.executable, *launcher, setup.script(run), "--name", run.name, "--device", setup.device,
        "--data", setup.data, "--results-dir", scratch / "results", "--seed", job.seed,
        *length.options, *plan.options, *setup.options, *options,
    ]


def printed(command: list) -> str:
    """A command as a user would type it."""
    return shlex.join(["python", *map(processes.relative_part, command[1:])])


def run_job(job: Job, measured: Measured, study, setup: Setup, length: Length) -> Result:
    """Runs it, and adds it to the journal. Raises UserError, OSError, Interrupted."""
    run, plan, journal = job.run, measured.plan, journal_of(setup.results, study.name)
    # torch.compile keeps its results, here by script and options, so that studies share them.
    key = sha256(json.dumps([measured.sources[run.name], run.options]).encode())
    cache = BUILD / "compiler-cache" / key[:16]
    cold = job.round <= plan.cold_rounds
    if cold:
        remove_built(cache)
    environment = dict(TORCHINDUCTOR_CACHE_DIR=str(cache), TRITON_CACHE_DIR=str(cache / "triton"),
                       **study.environment)
    if run.processes > 1:
        environment["OMP_NUM_THREADS"] = "1"  # as torchrun would set it, and say so
    BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD, ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        command = command_of(job, plan, setup, length, scratch)
        start = dict(event="run", id=measured.id, name=run.name, round=job.round, seed=job.seed,
                     cache="cold" if cold else "warm", command=printed(command),
                     source_sha256=measured.sources[run.name])
        append(journal, start)
        began, timeout, hung = time.perf_counter(), HANG_SECONDS + 5 * length.seconds, None
        try:
            code, _, err = processes.run_child(command, timeout=timeout, cores=run.cores,
                                               **environment)
        except subprocess.TimeoutExpired:
            code, err, hung = 1, "", Outcome(
                Status.HUNG, f"ended after {timeout:.0f} s: it hung, or is far too slow")
        ran = dict(event="ran", seconds=time.perf_counter() - began, exit=code, error=None,
                   matmul_rate=None)
        lines, events = read_child(scratch / "results")
        outcome = hung or outcome_of(code, err, start, events, ran)
        if outcome.complete:
            try:
                study.collect(setup, scratch / "results")
            except ValueError as reason:
                outcome = Outcome(Status.FAILED, str(reason))
    ran |= dict(outcome=outcome.status, error=outcome.text or None,
                load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None)
    try:
        ran["matmul_rate"] = processes.ask_machine("matmul_rate")
    except UserError as reason:
        print(f"the matmul throughput isn't known: {reason}", file=sys.stderr)
    finally:  # also when it is interrupted here
        append(journal, lines, ran)
    return make_result(start, events, ran)


def outcome_of(code: int, err: str, start: dict, events: list[dict], ran: dict) -> Outcome:
    """By what its record tells; where that has no end, or is that of a whole run, by how the
    process ended."""
    outcome = make_result(start, events, ran).outcome if events else (
        Outcome(Status.FAILED, "it left no record"))
    ended = any(event.get("event") == "end" for event in events)
    if code and (outcome.complete or not ended):
        outcome = outcome_by_line(processes.error_line(err)) if code > 0 else Outcome(
            Status.KILLED if code == -9 else Status.FAILED, f"ended by signal {-code}")
    rank = re.search(r"^error: (rank \d+: .+)", err, re.MULTILINE)
    if rank and not outcome.complete:  # why the other ranks, and so the record, came to no end
        outcome = outcome_by_line(rank[1])
    return outcome


def outcome_by_line(line: str) -> Outcome:
    """By a script's last line. It has no other way to tell why it ended before its record began, or
    in which rank."""
    for words, kind in (("out of memory", Status.OUT_OF_MEMORY),
                        ("text is too short", Status.TEXT_TOO_SHORT)):
        if words in line:
            return Outcome(kind, line)
    return Outcome(Status.FAILED, line)


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
