"""A study's journal, results/NAME.jsonl: its whole state, a file of JSON objects, one per line,
that is only ever appended to.

    study  id, study, kind, time, machine, matmul_peak, data and sources (SHA-256 of meta.json, and
           of each run's script), options (those behind --), commit (of git) and edited (whether
           its files had been edited; null: not known), and the plan: every run, and how long and
           often it runs
    run    id, name, round, seed, cache (cold or warm), command, source_sha256
    ...    the lines of the run's own record: see bench.measure.records
    ran    seconds of wall time, exit, outcome (a Kind of bench.measure.records), error (its text,
           or null), load (of the last minute) and matmul_rate (of a product in the type that the
           machine trains in), both right after the run

A measurement that is resumed has a further `study` line with its id; the last one counts, and a run
whose script had another SHA-256 than it names doesn't. Of a run that was tried again the last one
counts. What a crash has cut off, a line or the end of a run, is as if that run had not been.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.catalogue import Run
from bench.common import (
    DAMAGE,
    UserError,
    lines_of,
    make_writable,
    relative,
    same_machine,
    sha256,
    trained_in,
)
from bench.measure.plan import Plan, Setup
from bench.measure.records import (
    COMPLETE,
    EVENTS,
    Outcome,
    Record,
    RecordError,
    Status,
    make_record,
    read_record,
)

# The fields of events that are read here, and their types.
HEADER = dict(id=str, study=str, kind=str, time=str, machine=dict, matmul_peak=dict,
              data=str | None, sources=dict, options=list, commit=str | None, edited=bool | None)
RUN = dict(id=str, name=str, round=int, seed=int)
RAN = dict(seconds=float | int, error=str | None, matmul_rate=float | int | None)
OTHER_RESULTS = "choose another --results-dir"  # where that can't be written
JOURNAL = b'{"event": "study"'  # what a journal begins with


@dataclass(frozen=True)
class Result:
    """A run that came to an end, well or not."""

    name: str
    round: int
    seed: int
    source_sha256: str | None
    seconds: float
    outcome: Outcome
    record: Record | None  # only of a complete run
    matmul_rate: float | None = None  # of the machine, right after it

    @property
    def key(self) -> tuple[str, int, int]:
        return self.name, self.round, self.seed


@dataclass
class Measured:
    """A plan, and what has been measured of it so far."""

    id: str
    study: str
    kind: str
    time: str
    machine: dict  # see bench.measure.hardware.this_machine
    matmul_peak: dict[str, float]  # floating-point operations per second, by precision
    data: str | None  # the SHA-256 of meta.json
    sources: dict[str, str | None]  # the SHA-256 of each run's script
    options: list[str]
    plan: Plan
    commit: str | None = None  # as processes.git_commit(), at the last start that measured
    edited: bool | None = None
    results: list[Result] = field(default_factory=list)
    folder: Path = Path()  # in which the journal lies
    planned: int | None = None  # rounds, where more were added after some had results

    def add(self, result: Result) -> None:
        """Adds a result; a run that is tried again replaces the earlier one."""
        self.results = [other for other in self.results if other.key != result.key] + [result]

    def rounds_before(self, rounds: int | None) -> int | None:
        """How many rounds were planned, if there are `rounds` now and speedups could be seen before
        some of them were added; else None."""
        could_be_seen = any(result.round > 1 for result in self.results)
        added = could_be_seen and 1 < (self.plan.rounds or 1) < (rounds or 1)
        return self.planned or (self.plan.rounds if added else None)

    def is_current(self, result: Result) -> bool:
        """Whether a run is of the script that this measures."""
        return self.sources.get(result.name) == result.source_sha256

    def skip_reason(self, run: Run) -> Outcome | None:
        """Why a run isn't tried, by the results of the smaller ones before it; None: it is."""
        limit, reason = self.plan.memory_limit_gb, ""
        smaller = next((other for other in self.plan.runs if other.name == run.requires), None)
        if not smaller:
            return None
        results = [result for result in self.results if result.name == smaller.name]
        if not results:
            return self.skip_reason(smaller)
        if smaller.error or any(not result.outcome.complete for result in results):
            return Outcome(Status.NOT_TRIED, f"not tried, since {smaller.label} failed")
        memories = [result.record.end["reserved_gb"] for result in results]
        if limit and None in memories:
            reason = f"the memory of {smaller.label} isn't known"
        elif limit and run.memory_growth * max(memories) > limit:
            reason = (f"{run.memory_growth:g} times the {max(memories):.1f} GB of {smaller.label}"
                      " would be more than half of the RAM")
        return Outcome(Status.NOT_TRIED, f"not tried: {reason}") if reason else None

    def differs_from(self, setup: Setup) -> str | None:
        """What of a setup is so different that figures of both can't be compared; None: nothing.
        Tokens that aren't there yet differ from none."""
        if not same_machine(self.machine, setup.machine):
            return "on another machine, or with another PyTorch"
        if self.options != setup.options:
            return "with other options behind --"
        return None if None in (self.data, own := data_of(setup.data)) or self.data == own else (
            "with other tokens")

    def as_json(self) -> dict:
        """Its `study` line."""
        header = {name: getattr(self, name) for name in HEADER}
        return dict(event="study", **header, plan=self.plan.as_json())

    @property
    def text(self) -> str:
        """What was trained on, where that isn't the book in GPT-2's tokens; else ""."""
        return next((result.record.text for result in self.results if result.record), "")

    @property
    def peak(self) -> dict[str, float]:
        """As matmul_peak. On a CPU that moment may have been a slow one: there that of the type
        trained in is the rate after the best quarter of the runs, where that is higher."""
        rates = sorted(result.matmul_rate for result in self.results if result.matmul_rate)
        dtype = trained_in(self.machine)
        if self.machine["gpus"] or not rates or dtype not in self.matmul_peak:
            return self.matmul_peak
        usual = max(self.matmul_peak[dtype], rates[3 * len(rates) // 4])
        return self.matmul_peak | {dtype: usual}

    @property
    def is_finished(self) -> bool:
        """Whether all of the plan's rounds are measured, but for runs that failed."""
        failed = {result.name for result in self.results if not result.outcome.complete}
        done = {result.key for result in self.results}
        return all(job.key in done or job.run.name in failed for job in self.plan.jobs())

    @property
    def has_figures(self) -> bool:
        """Whether a run is complete, or none can run, which is a finding as well."""
        return (any(result.outcome.complete for result in self.results)
                or all(run.error for run in self.plan.runs))


def data_of(folder: Path) -> str | None:
    """What the tokens in a folder are known by; None where there are none."""
    meta = folder / "meta.json"
    return sha256(meta.read_bytes()) if meta.exists() else None


def journal_of(results: Path, study: str) -> Path:
    return results / f"{study}.jsonl"


def read_journal(path: Path) -> list[Measured]:
    """Every measurement in a journal, the oldest first; none where there is no journal. Damaged
    lines are named. Raises OSError."""
    found, run, lines = {}, None, lines_of(path) if path.exists() else [b""]
    for number, line in enumerate(lines, 1):
        cut = number == len(lines)  # every whole line ends with \n
        if cut and not line:
            break
        try:
            event = json.loads(line)
            kind = event["event"]
            if kind == "study":
                run, plan = None, Plan.from_json(event["plan"])
                measured = Measured(**fields_of(event, HEADER), plan=plan, folder=path.parent)
                if earlier := found.pop(measured.id, None):  # the newest comes last
                    measured.results = earlier.results
                    measured.planned = earlier.rounds_before(plan.rounds)
                found[measured.id] = measured
            elif kind == "run":
                found[fields_of(event, RUN)["id"]]  # noqa: B018 (its measurement is known)
                run = event, []
            elif kind == "ran":
                if run:
                    found[run[0]["id"]].add(make_result(*run, event))
                run = None
            elif kind in EVENTS and run:
                run[1].append(event)
        except DAMAGE as error:
            run = None  # it is as if it had not been
            if not cut:
                print(f"skipped: {relative(path)}, line {number}: {error!r}", file=sys.stderr)
    for measured in found.values():
        measured.results = list(filter(measured.is_current, measured.results))
    return list(found.values())


def fields_of(event: dict, types: dict) -> dict:
    """Raises KeyError, or TypeError for one of another type."""
    for name, kind in types.items():
        if not isinstance(event[name], kind):
            raise TypeError(f"{name} is {event[name]!r}")
    return {name: event[name] for name in types}


def make_result(run: dict, events: list[dict], ran: dict) -> Result:
    """From a run's lines. Raises KeyError, TypeError, ValueError."""
    seconds, error, rate = fields_of(ran, RAN).values()
    outcome, record = COMPLETE, None
    if error is not None:
        outcome = Outcome(Status(ran["outcome"]), error)
    else:
        try:
            record = make_record(run["name"], events)
            outcome = record.outcome
            if outcome.complete and (
                    (record.stage, record.config["seed"]) != (run["name"], run["seed"])):
                outcome = Outcome(Status.FAILED, "its record is that of another run")
        except RecordError as reason:
            outcome = Outcome(Status.FAILED, str(reason))
    return Result(run["name"], run["round"], run["seed"], run["source_sha256"], seconds, outcome,
                  record if outcome.complete else None, rate)


def newest(found: list[Measured]) -> list[Measured]:
    """Of each kind the newest measurement that has figures, or else the newest that tells why there
    are none; in the order of their first ones."""
    kinds: dict[str, Measured | None] = dict.fromkeys(measured.kind for measured in found)
    for measured in found:
        before = kinds[measured.kind]
        if measured.has_figures or measured.results and not (before and before.has_figures):
            kinds[measured.kind] = measured
    return [measured for measured in kinds.values() if measured]


def loose_records(folder: Path) -> list[Record]:
    """Those of scripts that were started by hand, each a file in the folder. A file is a journal if
    its first event is one's; damaged records are named."""
    records = []
    for path in sorted(folder.glob("*.jsonl")):
        try:
            with open(path, "rb") as file:
                if file.read(len(JOURNAL)) != JOURNAL:
                    records.append(read_record(path))
        except (OSError, RecordError) as error:
            print(f"skipped: {relative(path)}, {error}", file=sys.stderr)
    return records


def append(path: Path, *events: dict | bytes) -> None:
    """Adds events, or lines that hold some already, at the end of a journal."""
    lines = [event if isinstance(event, bytes) else json.dumps(event).encode() + b"\n"
             for event in events]
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # a crash has cut the last line off
                lines.insert(0, b"\n")
        file.write(b"".join(lines))
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def locked(results: Path) -> Iterator[None]:
    """Raises UserError where another measurement writes into this folder, or none can; OSError on
    a file system without locks. The lock ends with the process, however that ends."""
    from filelock import FileLock, Timeout  # which PyTorch brings along

    make_writable(results, OTHER_RESULTS)
    lock = FileLock(results / ".lock", blocking=False)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(f"another measurement is running in {relative(results)}")
    try:
        yield
    finally:
        lock.release()
