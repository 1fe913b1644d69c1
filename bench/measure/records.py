"""Read what a run leaves: a file of JSON objects, one per line.

Events of schema 3, in their order; GB are 1024³ bytes, null stands for what isn't known or finite:

    start  schema, stage, time, config (all settings; parameters, flops_per_token, world_size, dtype
           of the weights, matmul_precision), data (what prepare.py told), environment (torch, cpu,
           gpu, threads), source_sha256
    log    epoch, step, tokens, train_loss, val_loss, step_tok_per_sec, avg_tok_per_sec, and the
           seconds of each step since the line before
    epoch  epoch, reserved_gb, peak_reserved_gb, sample
    end    status, error, avg_tok_per_sec, attention_backend, reserved_gb, peak_reserved_gb; a
           killed run has none

Variants add to it: `checkpoint` (step, seconds), `checkpoint_failed` (folder, error) and `resume`
(step, tokens, folder, record, ranks, earlier_ranks, train_seconds) by checkpoint-resume,
`expert_shares` of a log by model-mixture. Where `start` has `rewritten_from`, `seconds` may be
means, and `end` has `quartiles_tok_per_sec` of the steps.
"""

import json
import math
from dataclasses import dataclass
from enum import StrEnum, auto
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import quantiles
from typing import NamedTuple

from bench.cards import PEAK_FLOPS
from bench.common import lines_of, other_text

WARM_UP = 2  # steps that a median leaves out
EVENTS = {"start", "log", "epoch", "end", "checkpoint", "checkpoint_failed", "resume"}


# ---- How a run ended ---------------------------------------------------------------------------


class Status(StrEnum):
    """How a run ended, or why there was none."""

    COMPLETE = auto()
    FAILED = auto()
    OUT_OF_MEMORY = auto()
    KILLED = auto()  # by signal 9: so Linux ends a program when the RAM runs out
    TEXT_TOO_SHORT = auto()  # for one batch
    HUNG = auto()
    NOT_TRIED = auto()  # since a smaller run tells that it would fail
    CANNOT_RUN = auto()  # on this machine, or since its patches conflict


@dataclass(frozen=True)
class Outcome:
    """Code decides by `status`; the text, one line, tells people why there are no figures."""

    status: Status = Status.COMPLETE
    text: str = ""

    @property
    def complete(self) -> bool:
        return self.status is Status.COMPLETE

    @property
    def is_too_large(self) -> bool:
        """Whether the run needs more memory, or more text, than there is."""
        return self.status in (Status.OUT_OF_MEMORY, Status.KILLED, Status.TEXT_TOO_SHORT)

    @property
    def failed(self) -> bool:
        """Whether the run was tried, and left no figures."""
        return self.status not in (Status.COMPLETE, Status.NOT_TRIED, Status.CANNOT_RUN)

    def __str__(self) -> str:
        return "failed: " * self.failed + self.text


COMPLETE = Outcome()


# ---- Its record --------------------------------------------------------------------------------


class RecordError(Exception):
    """A record that can't be read; the message names the line."""


class Point(NamedTuple):
    """A log line: losses after this many training tokens and seconds of training."""

    tokens: int
    seconds: float
    train_loss: float | None
    val_loss: float | None


@dataclass(frozen=True)
class Record:
    """A run's events. `end` is empty for a run that was killed before it could write one."""

    name: str  # of its file
    start: dict
    logs: list[dict]
    end: dict
    curve: list[Point]
    first_step_seconds: float | None
    # Of the speed of single steps, tok/sec: the first quartile, the median, the third; None where
    # there are too few.
    quartiles: tuple[float, ...] | None
    val_loss: float | None  # the last one

    stage = property(lambda self: self.start["stage"])
    config = property(lambda self: self.start["config"])
    environment = property(lambda self: self.start["environment"])
    # complete, interrupted, out_of_memory, diverged, failed; killed where there is no end.
    status = property(lambda self: self.end.get("status", "killed"))
    # What it was trained on, where that isn't the book in GPT-2's tokens; else "".
    text = property(lambda self: other_text(self.start.get("data")))
    # Whether the script can compile the model, and didn't.
    uncompiled = property(lambda self: self.config.get("compile") is False)
    speed_is_average = property(lambda self: self.quartiles is None)
    tokens_per_step = property(
        lambda self: tokens_per_step(self.config, self.config["world_size"]))

    @property
    def outcome(self) -> Outcome:
        """Complete is a run with a speed, and with what every table needs."""
        if not self.end:
            return Outcome(Status.FAILED, "killed: its record has no end")
        if self.status != "complete":
            reason = (self.end["error"] or "no reason given").removeprefix("out of memory: ")
            if self.status == "failed":
                return Outcome(Status.FAILED, reason)
            kind = Status.OUT_OF_MEMORY if self.status == "out_of_memory" else Status.FAILED
            return Outcome(kind, f"{self.status.replace('_', ' ')}: {reason}")
        if not self.tok_per_sec:
            return Outcome(Status.FAILED, "too short for a speed: raise --max-tokens")
        needed = dict(flops_per_token=self.config.get("flops_per_token"),
                      first_step_seconds=self.first_step_seconds,
                      reserved_gb=self.end["reserved_gb"] or 0)  # it isn't known everywhere
        wrong = [f"{name} is {value!r}" for name, value in needed.items()
                 if not isinstance(value, int | float)]
        if wrong:
            return Outcome(Status.FAILED, f"its record can't be read: {wrong[0]}")
        return COMPLETE

    @property
    def tok_per_sec(self) -> float | None:
        """The median over single steps, or the average of a run too short for a median."""
        return self.quartiles[1] if self.quartiles else self.end.get("avg_tok_per_sec")

    @property
    def steps(self) -> int:
        """That were timed."""
        return sum(len(log["seconds"]) for log in self.logs)

    @property
    def first_step_excess(self) -> float:
        """The seconds, compilation above all, that the first step takes more than a median one."""
        return self.first_step_seconds - self.tokens_per_step / self.tok_per_sec

    @property
    def steps_per_epoch(self) -> int | None:
        """Whole batches of an epoch; None where the record doesn't tell its text's tokens."""
        try:
            windows = (self.start["data"]["tokens"]["train"] - 1) // self.config["context_length"]
            batch, ranks = self.config["batch_size"], self.config["world_size"]
            return windows_per_epoch(windows, batch, ranks) // (batch * ranks)
        except (LookupError, TypeError, ZeroDivisionError):
            return None

    @property
    def device_name(self) -> str:
        gpu = self.environment["gpu"] if self.config["device"] != "cpu" else None
        return " ".join((gpu or self.environment["cpu"] or self.config["device"]).split())

    @property
    def precision(self) -> str | None:
        """What matrices were multiplied in; None for a record of before `dtype` was kept."""
        dtype = self.config.get("autocast") or self.config.get("dtype")
        if dtype == "float32" and self.config["device"] == "cuda":
            return "float32" if self.config["matmul_precision"] == "highest" else "TF32"
        return dtype

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: the share of the datasheet's bf16 rate; None if unknown."""
        peak = PEAK_FLOPS.get(self.environment["gpu"])
        if not peak or not self.tok_per_sec or self.config["device"] != "cuda":
            return None
        flops = self.tok_per_sec * self.config["flops_per_token"]
        return flops / (peak * self.config["world_size"])

    @property
    def lowest_val_loss(self) -> float | None:
        return min((point.val_loss for point in self.curve if point.val_loss is not None),
                   default=None)

    def val_loss_after(self, tokens: int | None) -> float | None:
        """The validation loss after `tokens` training tokens per process, rounded up to whole
        steps; None without a log line there. For None the last one."""
        if tokens is None:
            return self.val_loss
        at = comparison_point(tokens * self.config["world_size"], self.tokens_per_step)
        return next((point.val_loss for point in self.curve if point.tokens == at), None)

    @property
    def steady(self) -> list[Point]:
        """The log lines with a validation loss, as if the first step had taken as long as a median
        one: first_step_excess is the rest of it."""
        return [point._replace(seconds=point.seconds - self.first_step_excess)
                for point in self.curve if point.val_loss is not None]

    def reached(self, target: float) -> tuple[float, float] | None:
        """(tokens, seconds of training) after which the validation loss has fallen to `target`, by
        a straight line between the log lines around it; None where it never does."""
        points = self.steady
        for before, point in zip(points[:1] + points, points, strict=False):
            if point.val_loss <= target:
                share = 0 if before is point else (
                    (before.val_loss - target) / (before.val_loss - point.val_loss))
                return (before.tokens + share * (point.tokens - before.tokens),
                        before.seconds + share * (point.seconds - before.seconds))
        return None

    @property
    def train_seconds(self) -> float:
        """In all, of which the first step counts as long as a median one."""
        return self.curve[-1].seconds - self.first_step_excess

    def loss_at(self, seconds: float) -> float | None:
        """The validation loss after so many seconds of training, by a straight line between the log
        lines around it; the last one, where it ended before; None before the first line."""
        points = self.steady
        for before, point in pairwise(points):
            if before.seconds <= seconds <= point.seconds:
                share = (seconds - before.seconds) / (point.seconds - before.seconds)
                return before.val_loss + share * (point.val_loss - before.val_loss)
        return points[-1].val_loss if points and points[-1].seconds <= seconds else None


def tokens_per_step(config: dict, processes: int) -> int:
    return config["batch_size"] * config["context_length"] * processes


def windows_per_epoch(windows: int, batch_size: int, ranks: int) -> int:
    """Those of the text; among several ranks as often as it takes to 8 steps, as 02 does."""
    passes = math.ceil(8 * batch_size * ranks / windows) if ranks > 1 else 1
    return passes * windows


def comparison_point(tokens: int, per_step: int) -> int:
    """The tokens after the first step that reaches `tokens`: where a run's loss is read."""
    return math.ceil(tokens / per_step) * per_step


def read_record(path: Path) -> Record:
    """The record at `path`. A last line that was cut off belongs to a killed run and is dropped.

    Raises RecordError for anything else that isn't a record, OSError where it can't be read.
    """
    events = []
    for number, line in enumerate(lines_of(path)[:-1], 1):  # each ends with \n
        try:
            events.append(json.loads(line))
            if events[-1]["event"] not in EVENTS:
                raise ValueError(f"no such event: {events[-1]['event']!r}")
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise RecordError(f"line {number}: not an event of a record ({error!r})")
    return make_record(path.name, events)


def make_record(name: str, events: list[dict]) -> Record:
    """A record from its events. Raises RecordError for a damaged one."""
    def named(name: str) -> list[dict]:
        return [event for event in events if event["event"] == name]

    try:
        (start,), logs, end = named("start"), named("log"), dict(*named("end"))
        if start["schema"] != 3:
            raise RecordError(f"line 1: schema {start['schema']} is unknown")
        seconds = [second for log in logs for second in log["seconds"]]
        steady = seconds if start["config"]["world_size"] == 1 else [  # as 02 counts
            second for log in logs for second in log["seconds"][1:] or log["seconds"]]
        sums = accumulate(sum(log["seconds"]) for log in logs)
        per_step = tokens_per_step(start["config"], start["config"]["world_size"])
        rates = [per_step / second for second in steady[WARM_UP:]]
        quartiles = end.get("quartiles_tok_per_sec") or (
            quantiles(rates, n=4, method="inclusive") if len(rates) > 2 and end else None)
        val_loss = logs[-1]["val_loss"] if logs and end else None
        earlier = dict(*named("resume")).get("train_seconds", 0)  # of a run that was continued
        curve = [Point(log["tokens"], total + earlier, log["train_loss"], log["val_loss"])
                 for log, total in zip(logs, sums, strict=True)]
        record = Record(name, start, logs, end, curve,
                        seconds[0] if seconds else None,
                        tuple(map(float, quartiles)) if quartiles else None, val_loss)
        if not isinstance(record.stage, str):
            raise TypeError(f"the stage is {record.stage!r}")
        # What every reader needs, asked for once.
        record.device_name, record.precision, record.mfu, record.outcome  # noqa: B018
        end and (end["reserved_gb"], end["attention_backend"])  # noqa: B018
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise RecordError(f"not a whole record: {error!r}")
    return record
