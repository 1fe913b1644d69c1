"""A study's journal, results/STUDY.jsonl: every run as it came, only ever appended to.

One JSON object per line, each with its `event`:

    study  id, study, kind, time, machine, matmul_peak, data (the SHA-256 of meta.json), sources
           (that of each run's script, with what else it reads), options (behind --), commit,
           copy_rate (bytes per second that a copy reads and writes; older journals lack it),
           lengths (the options by which each run ends), and plan: every run, and how long and how
           often it runs
    run    id, name, round, seed, command, source_sha256, compiled (whether what an earlier round
           has compiled was there), length (the options by which it ends)
    ...    the lines of the run's own record: see bench.measure.records
    ran    seconds of wall time, outcome (a Status of bench.measure.records), error (its text, or
           null) and matmul_rate (in the type that the machine trains in, right after the run)

A measurement that is resumed has a further `study` line with its id; the last one counts, and a run
whose script had another SHA-256 than it names, or that ended by other options, doesn't. Of a run
that was tried again the last one counts. What a crash has cut off, a line or the end of a run, is
as if that run had not been.
"""

import json
import os
import sys
from pathlib import Path

from bench import common
from bench.common import relative
from bench.measure import records
from bench.measure.measurement import HEADER, Measurement
from bench.measure.plan import Plan
from bench.measure.records import NUMBER, Outcome, RecordError, Result, Status

FIELDS = records.FIELDS | {
    "study": HEADER | dict(plan=dict),
    "run": dict(id=str, name=str, round=int, seed=int, source_sha256=str),
    "ran": dict(seconds=NUMBER, outcome=str, error=str | None, matmul_rate=NUMBER | None),
}


def journal_of(results: Path, study: str) -> Path:
    return results / f"{study}.jsonl"


def read_journal(path: Path) -> list[Measurement]:
    """Reads every measurement in a journal, the oldest first; none where there is no journal. Names
    damaged lines. Raises OSError."""
    if not path.exists():
        return []
    reader, lines = JournalReader(path.parent), path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            reader.take(records.parse_event(line, FIELDS))
        except common.DAMAGE as error:
            reader.run = None  # it is as if it had not been
            if number < len(lines):  # the last one is empty, or cut off
                reason = repr(error)
                if isinstance(error, RecordError):
                    reason = str(error)
                print(f"skipped: {relative(path)}, line {number}: {reason}", file=sys.stderr)
    return list(reader.by_id.values())


class JournalReader:
    """Puts measurements together from the lines of a journal."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.by_id: dict[str, Measurement] = {}
        self.run: dict | None = None  # the line of the run that has begun
        self.events: list[dict] = []  # of its record

    def take(self, event: dict) -> None:
        """Takes the next line. Raises one of common.DAMAGE where it doesn't fit."""
        match event["event"]:
            case "study":
                self.begin(event)
            case "run":
                self.run, self.events = None, []
                if event["id"] in self.by_id:
                    self.run = event
            case "ran" if self.run:
                self.add(make_result(self.run, self.events, event), self.by_id[self.run["id"]])
                self.run = None
            case _:
                self.events.append(event)

    def add(self, result: Result, measurement: Measurement) -> None:
        """Adds a result. Raises ValueError where it is another script's, since the `study` line
        that names that one is damaged."""
        if not measurement.is_of_this_script(result):
            raise ValueError(f"{result.name} had another script than its measurement")
        measurement.add(result)

    def begin(self, event: dict) -> None:
        """Begins a measurement, or continues the one with its id, which then comes last."""
        measurement = Measurement(
            **{name: event[name] for name in HEADER},
            lengths=event.get("lengths", {}),  # which older journals lack, as the next
            copy_rate=event.get("copy_rate"),
            folder=self.folder,
            plan=Plan.from_json(event["plan"]),
        )
        earlier = self.by_id.pop(measurement.id, None)
        if earlier:
            measurement.take_over(earlier)
        self.by_id[measurement.id], self.run = measurement, None


def make_result(run: dict, events: list[dict], ran: dict) -> Result:
    """Returns the result that a run's lines tell. Raises ValueError."""
    outcome, record = Outcome(Status(ran["outcome"]), ran["error"] or ""), None
    if outcome.complete:
        record = records.make_record(run["name"], events)
    return Result(
        name=run["name"],
        round=run["round"],
        seed=run["seed"],
        source_sha256=run["source_sha256"],
        seconds=ran["seconds"],
        outcome=outcome,
        record=record,
        matmul_rate=ran["matmul_rate"],
        length=run.get("length"),
        compiled=run.get("compiled"),
    )


def newest(measurements: list[Measurement]) -> list[Measurement]:
    """Returns of each kind the newest measurement that has figures, or else the newest that tells
    why there are none; in the order of their first ones."""
    by_kind: dict[str, Measurement] = {}
    for measurement in measurements:
        best = by_kind.setdefault(measurement.kind, measurement)
        if what_it_tells(measurement) >= what_it_tells(best):
            by_kind[measurement.kind] = measurement
    return [best for best in by_kind.values() if what_it_tells(best)]


def what_it_tells(measurement: Measurement) -> int:
    """Returns 2 for figures, 1 for other results, 0 for none. That no run can run is a finding as
    well."""
    if any(result.outcome.complete for result in measurement.results):
        return 2
    if all(run.error for run in measurement.plan.runs):
        return 2
    if measurement.results:
        return 1
    return 0


def append(path: Path, *events: dict) -> None:
    """Adds events at the end of a journal."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # a crash has cut the last line off
                file.write(b"\n")
        file.write("".join(json.dumps(event) + "\n" for event in events).encode())
        file.flush()
        os.fsync(file.fileno())
