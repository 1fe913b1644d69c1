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
from dataclasses import dataclass, field
from enum import StrEnum, auto
from functools import cached_property
from itertools import accumulate
from math import ceil
from pathlib import Path
from statistics import quantiles
from typing import NamedTuple

from bench.common import other_text
from gpt_speed.cards import PEAK_FLOPS

WARM_UP = 2  # steps that a median leaves out
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
    TOO_LARGE = auto()  # for the text; or by signal 9, as Linux ends a program for want of RAM
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

    def __str__(self) -> str:
        return f"failed: {self.text}" if self.failed else self.text


COMPLETE = Outcome()
TOO_LARGE = Status.OUT_OF_MEMORY, Status.TOO_LARGE


class Point(NamedTuple):
    """A log line: the validation loss after so many tokens and seconds of training."""

    tokens: int
    seconds: float
    val_loss: float


@dataclass(frozen=True)
class Record:
    """A run's events. `end` is empty for a run that was killed."""

    name: str  # of its file
    start: dict
    logs: list[dict]
    end: dict
    gradients: list[dict] = field(default_factory=list)  # see bench/measure/gradients.py

    stage = property(lambda self: self.start["stage"])
    config = property(lambda self: self.start["config"])
    environment = property(lambda self: self.start["environment"])
    status = property(lambda self: self.end.get("status", "killed"))  # as schema 3 has it
    # What it was trained on, where that isn't the book in GPT-2's tokens; else "".
    text = property(lambda self: other_text(self.start.get("data")))
    tokens_per_step = property(lambda self: tokens_per_step(self.config, self.config["world_size"]))
    first_step_seconds = property(lambda self: self.logs[0]["seconds"][0] if self.logs else None)

    @property
    def outcome(self) -> Outcome:
        """Complete is a run with a speed."""
        reason = self.end.get("error") or "no reason given"
        if self.status == "out_of_memory":
            return Outcome(Status.OUT_OF_MEMORY, reason)
        if self.status != "complete":
            return Outcome(
                Status.FAILED, reason if self.status == "failed" else f"{self.status}: {reason}"
            )
        if self.tok_per_sec and self.first_step_seconds:
            return COMPLETE
        return Outcome(Status.FAILED, "too short for a speed: raise --max-tokens")

    @cached_property
    def quartiles(self) -> tuple[float, ...] | None:
        """The first quartile, the median and the third of the speeds of single steps, tok/sec; None
        where there are too few. Among several ranks a step after an evaluation doesn't count."""
        if rewritten := self.end.get("quartiles_tok_per_sec"):
            return tuple(map(float, rewritten))
        first = 0 if self.config["world_size"] == 1 else 1
        seconds = [
            second for log in self.logs for second in log["seconds"][first:] or log["seconds"]
        ]
        rates = [self.tokens_per_step / second for second in seconds[WARM_UP:]]
        if len(rates) < 3 or not self.end:
            return None
        return tuple(quantiles(rates, n=4, method="inclusive"))

    # The median over single steps, or the average of a run too short for a median.
    tok_per_sec = property(
        lambda self: self.quartiles[1] if self.quartiles else self.end.get("avg_tok_per_sec")
    )
    # The seconds, compilation above all, that the first step takes more than a median one.
    first_step_excess = property(
        lambda self: self.first_step_seconds - self.tokens_per_step / self.tok_per_sec
    )

    @property
    def device_name(self) -> str:
        gpu = self.environment["gpu"] if self.config["device"] != "cpu" else None
        return " ".join((gpu or self.environment["cpu"] or self.config["device"]).split())

    @property
    def precision(self) -> str | None:
        """What matrices were multiplied in: a type, or TF32."""
        dtype = self.config.get("autocast") or self.config.get("dtype")
        if dtype == "float32" and self.config["device"] == "cuda":
            return "float32" if self.config.get("matmul_precision") == "highest" else "TF32"
        return dtype

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization, of the datasheet's bf16 rate; None if unknown."""
        peak = PEAK_FLOPS.get(self.environment["gpu"])
        if not peak or not self.tok_per_sec or self.config["device"] != "cuda":
            return None
        return self.tok_per_sec / peak * self.config["flops_per_token"] / self.config["world_size"]

    @cached_property
    def steady(self) -> list[Point]:
        """The log lines with a validation loss, as if the first step had taken as long as a median
        one: first_step_excess is the rest of it."""
        totals = accumulate(sum(log["seconds"]) for log in self.logs)
        return [
            Point(log["tokens"], total - self.first_step_excess, log["val_loss"])
            for log, total in zip(self.logs, totals, strict=True)
            if log["val_loss"] is not None
        ]

    # In all, of which the first step counts as long as a median one.
    train_seconds = property(
        lambda self: sum(sum(log["seconds"]) for log in self.logs) - self.first_step_excess
    )
    lowest_val_loss = property(
        lambda self: min((point.val_loss for point in self.steady), default=None)
    )

    def val_loss_after(self, tokens: int | None) -> float | None:
        """Returns the validation loss after so many tokens per process, in whole steps, or the last
        one; None without a log line there."""
        if tokens is None:
            return self.logs[-1]["val_loss"] if self.logs else None
        at = comparison_point(tokens * self.config["world_size"], self.tokens_per_step)
        return next((log["val_loss"] for log in self.logs if log["tokens"] == at), None)

    def reached(self, target: float) -> tuple[float, float] | None:
        """Returns (tokens, seconds of training) after which the validation loss has fallen to
        `target`, by a straight line between the log lines around it; None where it never does."""
        points = self.steady
        for before, point in zip(points[:1] + points, points, strict=False):
            if point.val_loss <= target:
                share = (
                    0
                    if before is point
                    else ((before.val_loss - target) / (before.val_loss - point.val_loss))
                )
                return (
                    before.tokens + share * (point.tokens - before.tokens),
                    before.seconds + share * (point.seconds - before.seconds),
                )
        return None

    def loss_at(self, seconds: float) -> float | None:
        """Returns the validation loss after so many seconds of training, by a straight line between
        the log lines around it; after the last line its own, before the first None."""
        import numpy  # here, since most commands don't need it

        points = self.steady
        if not points or seconds < points[0].seconds:
            return None
        return float(
            numpy.interp(
                seconds, [point.seconds for point in points], [point.val_loss for point in points]
            )
        )


def tokens_per_step(config: dict, processes: int) -> int:
    return config["batch_size"] * config["context_length"] * processes


def comparison_point(tokens: int, per_step: int) -> int:
    """Returns the tokens after the first step that reaches `tokens`."""
    return ceil(tokens / per_step) * per_step


def check_fields(event: dict, types: dict) -> None:
    """Raises RecordError for a field that is missing, or not of its type or range."""
    for name, kind in types.items():
        if name not in event:
            raise RecordError(f"no {name}")
        value = event[name]
        if isinstance(kind, dict):
            check_type(name, value, dict)
            check_fields(value, kind)
        else:
            check_type(name, value, kind)


def check_type(name: str, value, kind) -> None:
    """Raises RecordError for a value of another type, or for a number out of range."""
    least = 1 if name in AT_LEAST_1 else 0
    in_range = not isinstance(value, NUMBER) or is_number(value, least)
    if not isinstance(value, kind) or not in_range:
        raise RecordError(f"{name} is {value!r}")


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
    """Raises RecordError where a log line has no steps, or one that took no time."""
    if not seconds:
        raise RecordError("a log line without steps")
    for second in seconds:
        if not is_number(second, 0) or second == 0:
            raise RecordError(f"a step of {second!r} seconds")


def read_record(path: Path) -> Record:
    """Reads a record. Raises RecordError for another file, OSError."""
    return make_record(path.name, read_events(path))


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
    end = ends[0] if ends else {}
    return Record(name, starts[0], by_kind.get("log", []), end, by_kind.get("gradients", []))
