"""Read what a run leaves: one .jsonl file, one JSON object per line.

Events of schema 2, in their order; GB are 1024³ bytes, null stands for what isn't known or finite:

    start  schema, stage, time, config (all settings; parameters, flops_per_token, world_size, dtype
           and matmul_precision), data (what prepare.py told), environment, source_sha256
    log    epoch, step, tokens, train_loss, val_loss, step_tok_per_sec, avg_tok_per_sec, and the
           seconds of each step since the line before
    epoch  epoch, allocated_gb, reserved_gb, peak_allocated_gb, peak_reserved_gb, sample
    end    status, error, avg_tok_per_sec, median_step_tok_per_sec, attention_backend, the four
           figures of memory; a killed run has none

Variants add to it: `checkpoint` (step, seconds), `checkpoint_failed` (folder, error) and `resume`
(step, tokens, folder, record, ranks, earlier_ranks, train_seconds) by checkpoint-resume,
`expert_shares` of a log by model-mixture. Schema 1, of older records, had the sums and quartiles
that add_figures() computes instead of each step's seconds.
"""

import json
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from bench.machine import peak_flops


class RecordError(Exception):
    """A record that can't be used; the message names the line."""


@dataclass(frozen=True)
class Record:
    """A run's events. `end` is empty for a run that was killed before it could write one."""

    path: Path
    start: dict
    logs: list[dict]
    epochs: list[dict]
    end: dict
    checkpoints: list[dict]  # each with its step and the seconds that training waited for it
    resume: dict  # of a run that went on from a checkpoint, else empty

    @property
    def stage(self) -> str:
        return self.start["stage"]

    @property
    def config(self) -> dict:
        return self.start["config"]

    @property
    def status(self) -> str:
        """complete, interrupted, out_of_memory, diverged, failed; killed where there is no end."""
        return self.end.get("status", "killed")

    @property
    def error(self) -> str | None:
        """Why the run isn't complete, in one line; None for a complete one."""
        if self.status == "complete":
            return None
        if not self.end:
            return "killed: its record has no end"
        reason = (self.end["error"] or "no reason given").removeprefix("out of memory: ")
        return f"{self.status.replace('_', ' ')}: {reason}"

    @property
    def tok_per_sec(self) -> float | None:
        """The median over single steps, or the average of a run too short for a median."""
        return self.end.get("median_step_tok_per_sec") or self.end.get("avg_tok_per_sec")

    @property
    def speed_is_average(self) -> bool:
        return self.end.get("median_step_tok_per_sec") is None

    @property
    def device_name(self) -> str:
        environment = self.start["environment"]
        gpu = environment["gpu"] if self.config["device"] != "cpu" else None
        return " ".join((gpu or environment["cpu"] or self.config["device"]).split())

    @property
    def precision(self) -> str | None:
        """What matrices were multiplied in; None for a record of before `dtype` was kept."""
        dtype = self.config.get("autocast") or self.config.get("dtype")
        if dtype == "float32" and self.config["device"] == "cuda":
            return "float32" if self.config["matmul_precision"] == "highest" else "TF32"
        return dtype

    @property
    def uncompiled(self) -> bool:
        """Whether the script can compile the model, and didn't."""
        return self.config.get("compile") is False

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: the share of the datasheet's bf16 rate; None if unknown."""
        peak = peak_flops(self.start["environment"]["gpu"])
        if not peak or not self.tok_per_sec or self.config["device"] != "cuda":
            return None
        flops = self.tok_per_sec * self.config["flops_per_token"]
        return flops / (peak * self.config["world_size"])

    def val_loss_at(self, tokens: int) -> float | None:
        """The validation loss of the log line at `tokens` training tokens; None without one."""
        return next((log["val_loss"] for log in self.logs if log["tokens"] == tokens), None)


def read_record(path: Path) -> Record:
    """The record at `path`. A last line that was cut off belongs to a killed run and is dropped.

    Raises RecordError for anything else that isn't a record, OSError where it can't be read.
    """
    events = {name: [] for name in ("start", "log", "epoch", "end", "checkpoint",
                                    "checkpoint_failed", "resume")}
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):  # each whole line ends with \n
        try:
            event = json.loads(line)
            events[event["event"]].append(event)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise RecordError(f"line {number}: not an event of a record ({error!r})")
    try:
        (start,) = events["start"]
        if start["schema"] not in (1, 2):
            raise RecordError(f"line 1: schema {start['schema']} is unknown")
        if start["schema"] == 2:
            add_figures(start, events["log"], *events["end"])
        resume = dict(*events["resume"])
        for log in events["log"] if resume else []:  # which count from where it went on
            log["train_seconds"] += resume["train_seconds"]
        record = Record(path, start, events["log"], events["epoch"], dict(*events["end"]),
                        events["checkpoint"], resume)
        # What every reader needs, asked for once.
        record.stage, record.device_name, record.precision, record.mfu, record.error  # noqa: B018
        [(log["tokens"], log["train_seconds"], log["val_loss"]) for log in record.logs]
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise RecordError(f"not a whole record: {error!r}")
    return record


def add_figures(start: dict, logs: list[dict], end: dict | None = None) -> None:
    """Adds what schema 1 held to the events of schema 2, which have the seconds of every step: the
    seconds of training at each line, the first step's, quartiles of the speed, and the last loss.
    """
    config, sums = start["config"], accumulate(sum(log["seconds"]) for log in logs)
    for log, total in zip(logs, sums, strict=True):
        log["train_seconds"] = total
    if end is not None:
        seconds = [second for log in logs for second in log["seconds"]]
        tokens = config["batch_size"] * config["context_length"] * config["world_size"]
        rates = [tokens / second for second in seconds[2:]]  # two steps are for warm-up
        p25, median, p75 = np.percentile(rates, [25, 50, 75]) if len(rates) >= 3 else [None] * 3
        end |= dict(
            p25_step_tok_per_sec=p25, p75_step_tok_per_sec=p75, train_seconds=sum(seconds),
            first_step_seconds=seconds[0] if seconds else None,
            val_loss=logs[-1]["val_loss"] if logs else None,
        )
