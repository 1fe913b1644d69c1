"""Reads what a run leaves: its record, a file of JSON objects, one per line.

Events of schema 3, in their order; GB are 1024³ bytes, null stands for what isn't known or finite:

    start  schema, stage, time, config (all settings; parameters, flops_per_token, world_size, dtype
           of the weights, matmul_precision), data (meta.json), environment (torch, cpu, gpu,
           threads), source_sha256
    log    epoch, step, tokens, train_loss, val_loss, step_tok_per_sec, avg_tok_per_sec, and the
           seconds of each step since the line before
    epoch  epoch, reserved_gb, peak_reserved_gb, sample
    end    status (complete, interrupted, out_of_memory, diverged, failed), error, avg_tok_per_sec,
           attention_backend, reserved_gb, peak_reserved_gb; a killed run has none

Variants add others, which aren't read here, and the study `gradients` its own
(bench/measure/gradients.py). In the oldest records, whose scripts timed no single steps, `seconds`
are means and `end` has the `quartiles_tok_per_sec` of the steps.
"""

import json
import sys
from dataclasses import dataclass, field
from enum import StrEnum, auto
from math import ceil
from pathlib import Path

from bench.common import relative
from bench.corpus import other_text

NUMBER = int | float
LARGEST = 1e18  # what a number has to be below
AT_LEAST_1 = "batch_size", "context_length", "world_size"
# The fields that are read of some events, and their types.
FIELDS: dict[str, dict] = {
    "start": dict(
        schema=int,
        stage=str,
        environment=dict(gpu=str | None, cpu=str | None),
        config=dict(
            model=str,
            batch_size=int,
            context_length=int,
            world_size=int,
            device=str,
            dtype=str | None,
            flops_per_token=NUMBER,
        ),
    ),
    "log": dict(tokens=int, train_loss=NUMBER | None, val_loss=NUMBER | None, seconds=list),
    "end": dict(
        status=str, error=str | None, avg_tok_per_sec=NUMBER | None, reserved_gb=NUMBER | None
    ),
}


class RecordError(ValueError):
    """A record, or a line of a journal, is missing something or damaged."""


class Status(StrEnum):
    """How a run ended, or why there was none."""

    COMPLETE = auto()
    FAILED = auto()
    OUT_OF_MEMORY = auto()
    TOO_LARGE = auto()  # for the text; or for the RAM, so that Linux has ended it
    NOT_TRIED = auto()  # since it can't run, or since a smaller run shows that it would fail


@dataclass(frozen=True)
class Outcome:
    """Code decides by `status`; the text tells people why there are no figures."""

    status: Status = Status.COMPLETE
    text: str = ""

    @property
    def complete(self) -> bool:
        return self.status is Status.COMPLETE

    @property
    def failed(self) -> bool:
        """Whether the run was tried, and left no figures."""
        return self.status not in (Status.COMPLETE, Status.NOT_TRIED)

    @property
    def does_not_fit(self) -> bool:
        """Whether the run was too large for the memory or the text."""
        return self.status in (Status.OUT_OF_MEMORY, Status.TOO_LARGE)

    def __str__(self) -> str:
        return f"failed: {self.text}" if self.failed else self.text


COMPLETE = Outcome()


@dataclass(frozen=True)
class Record:
    """A run's events. `end` is empty for a run that was killed."""

    name: str  # of its file
    start: dict
    logs: list[dict]
    end: dict
    gradients: list[dict] = field(default_factory=list)  # see bench/measure/gradients.py

    @property
    def run_name(self) -> str:
        """The name of its run, such as "00_orig": schema 3 calls it the stage."""
        return self.start["stage"]

    @property
    def config(self) -> dict:
        return self.start["config"]

    @property
    def environment(self) -> dict:
        return self.start["environment"]

    @property
    def status(self) -> str:
        """As schema 3 has it, or "killed"."""
        return self.end.get("status", "killed")

    @property
    def text(self) -> str:
        """What it was trained on, where that isn't the book in GPT-2's tokens; else ""."""
        return other_text(self.start.get("data"))

    @property
    def tokens_per_step(self) -> int:
        return tokens_per_step(self.config, self.config["world_size"])

    @property
    def first_step_seconds(self) -> float | None:
        return self.logs[0]["seconds"][0] if self.logs else None

    @property
    def outcome(self) -> Outcome:
        """Complete is a run with a speed."""
        reason = self.end.get("error") or "no reason given"
        if self.status == "out_of_memory":
            return Outcome(Status.OUT_OF_MEMORY, reason)
        if self.status == "failed":
            return Outcome(Status.FAILED, reason)
        if self.status != "complete":
            return Outcome(Status.FAILED, f"{self.status}: {reason}")
        if self.end["avg_tok_per_sec"] and self.first_step_seconds:
            return COMPLETE
        return Outcome(Status.FAILED, "too short for a speed: raise --max-tokens")

    @property
    def device_name(self) -> str:
        device = self.config["device"]
        name = None
        if device != "cpu":
            name = self.environment["gpu"]
        name = name or self.environment["cpu"] or device
        return " ".join(name.split())

    @property
    def precision(self) -> str | None:
        """What matrices were multiplied in: a type, or TF32."""
        dtype = self.config.get("autocast") or self.config.get("dtype")
        if dtype != "float32" or self.config["device"] != "cuda":
            return dtype
        if self.config.get("matmul_precision") == "highest":
            return "float32"
        return "TF32"

    def val_loss_after(self, tokens: int | None) -> float | None:
        """Returns the validation loss after so many tokens per process, in whole steps, or the last
        one; None without a log line there."""
        if tokens is None:
            return self.logs[-1]["val_loss"] if self.logs else None
        at = comparison_point(tokens * self.config["world_size"], self.tokens_per_step)
        return next((log["val_loss"] for log in self.logs if log["tokens"] == at), None)


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
    length: str | None = None  # the options by which it ended; older journals lack it
    compiled: bool | None = None  # whether an earlier round's compilation was there, if known

    @property
    def key(self) -> tuple[str, int, int]:
        return self.name, self.round, self.seed


def tokens_per_step(config: dict, processes: int) -> int:
    return config["batch_size"] * config["context_length"] * processes


def comparison_point(tokens: int, per_step: int) -> int:
    """Returns the tokens after the first step that reaches `tokens`."""
    return ceil(tokens / per_step) * per_step


def check_fields(event: dict, types: dict) -> None:
    """Raises RecordError for a field that is missing, or not of its type or range."""
    for name, type_ in types.items():
        if name not in event:
            raise RecordError(f"no {name}")
        if not is_right(name, event[name], type_):
            raise RecordError(f"{name} is {event[name]!r}")
        if isinstance(type_, dict):
            check_fields(event[name], type_)


def is_right(name: str, value, type_) -> bool:
    """Returns whether a field is of its type and, if it is a number, in range. A dict stands for
    an object with such fields, which aren't looked at here."""
    if isinstance(type_, dict):
        return isinstance(value, dict)
    if not isinstance(value, type_):
        return False
    if not isinstance(value, NUMBER):
        return True
    least = 1 if name in AT_LEAST_1 else 0
    return is_number(value, least)


def is_number(value, least: float) -> bool:
    """Returns whether a value of JSON is a number in range; true and false are none."""
    return isinstance(value, NUMBER) and not isinstance(value, bool) and least <= value < LARGEST


def parse_event(line: bytes, fields: dict[str, dict] = FIELDS) -> dict:
    """Returns a line's event, its `fields` checked. Raises ValueError, RecursionError."""
    event = json.loads(line)
    if not isinstance(event, dict):
        raise RecordError("not an event")
    check_fields(event, dict(event=str))
    check_fields(event, fields.get(event["event"], {}))
    if event["event"] == "log":
        check_seconds(event["seconds"])
    return event


def check_seconds(seconds: list) -> None:
    """Raises RecordError for a log line without steps, or with one that took no time."""
    if not seconds:
        raise RecordError("a log line without steps")
    for second in seconds:
        if not is_number(second, 0) or second == 0:
            raise RecordError(f"a step of {second!r} seconds")


def read_record(path: Path) -> Record:
    """Reads a record. Raises RecordError for another file, OSError."""
    return make_record(path.name, read_events(path))


def loose_records(folder: Path) -> list[Record]:
    """Reads the records of 00, 01 and 02 that were started by hand, each a file in the folder.
    Names damaged ones."""
    loose = []
    for path in sorted(folder.glob("0?_*.jsonl")):
        try:
            loose.append(read_record(path))
        except (OSError, RecordError) as error:
            print(f"skipped: {relative(path)}, {error}", file=sys.stderr)
    return loose


def read_events(path: Path) -> list[dict]:
    """Reads a record's events, but no line that was cut off. Raises as read_record."""
    events = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            events.append(parse_event(line))
        except (ValueError, RecursionError) as error:
            raise RecordError(f"line {number}: {error}")
    return events


def make_record(name: str, events: list[dict]) -> Record:
    """Returns the record of events. Raises RecordError for those of more than one run."""
    if not events:
        raise RecordError("it left no record")
    by_kind: dict[str, list[dict]] = {}
    for event in events:
        by_kind.setdefault(event["event"], []).append(event)
    starts, ends = by_kind.get("start", []), by_kind.get("end", [])
    if len(starts) != 1 or len(ends) > 1:
        raise RecordError("not a whole record")
    if starts[0]["schema"] != 3:
        raise RecordError(f"schema {starts[0]['schema']} is unknown")
    start, end = starts[0], next(iter(ends), {})
    return Record(name, start, by_kind.get("log", []), end, by_kind.get("gradients", []))
