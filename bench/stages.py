"""The three stages side by side: the latest run of each, and the published figures."""

import json
import math
import re
import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from bench.files import REFERENCE, relative
from bench.records import Record, RecordError, read_record
from bench.tables import markdown, show

STAGES = {
    "00_orig": "00 original",
    "01_opt_single_gpu": "01 optimized",
    "02_opt_multi_gpu_ddp": "02 DDP",
}
PUBLISHED = REFERENCE / "published-a100.json"
CURVE = ("tokens", "train_seconds", "train_loss", "val_loss")  # what a log line gives to draw


class Group(NamedTuple):
    """Runs with all of this in common may be compared."""

    device: str
    model: str
    context_length: int

    @property
    def title(self) -> str:
        return f"{shorten(self.device, 60)}: {self.model}, context {self.context_length:,}"


@dataclass(frozen=True)
class Run:
    """The figures of one stage on one device, measured or published."""

    stage: str
    group: Group
    world_size: int
    tok_per_sec: float  # of all processes together; the median over the steps
    reserved_gb: float | None  # of one process
    p25: float | None = None
    p75: float | None = None
    mfu: float | None = None
    val_loss: float | None = None
    began: tuple[str, str] = ("", "")  # time and file name
    curve: tuple[tuple, ...] = ()  # for each log line the figures of CURVE, NaN for null

    @property
    def label(self) -> str:
        processes = f" × {self.world_size}" if self.stage.startswith("02") else ""
        return STAGES[self.stage] + processes


def shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def run_of(record: Record) -> Run:
    """The run of a complete record.

    Raises LookupError, TypeError or ValueError where a figure is missing or isn't one.
    """
    config, end = record.config, record.end
    group = Group(record.device_name, config["model"], int(config["context_length"]))
    names = ("reserved_gb", "p25_step_tok_per_sec", "p75_step_tok_per_sec")
    figures = [record.tok_per_sec, *(end[name] for name in names), record.mfu, end["val_loss"]]
    if not all(figure is None or 0 <= figure < 1e15 for figure in figures):
        raise ValueError("a figure is out of range")
    hash(group)
    curve = tuple(tuple(math.nan if log[name] is None else float(log[name]) for name in CURVE)
                  for log in record.logs)
    began = re.sub("[-:]", "", record.start["time"]), record.path.name  # schema 1 had them
    return Run(record.stage, group, int(config["world_size"]), *figures, began, curve)


def read_runs(folder: Path) -> list[Run]:
    """The latest complete run of each stage and group, sorted by group, then stage.

    Says which records are damaged, and how many runs did not complete.
    """
    latest, left_out = {}, 0
    for place in ("", "stages/"):
        for path in sorted(folder.glob(f"{place}*.jsonl")):
            try:
                record = read_record(path)
                if record.stage not in STAGES:
                    continue
                if record.status != "complete" or not record.tok_per_sec:
                    left_out += 1
                    continue
                run = run_of(record)
            except (OSError, RecordError, LookupError, ArithmeticError, TypeError,
                    ValueError) as error:
                reason = error if isinstance(error, RecordError) else repr(error)
                print(f"skipped: {relative(path)}, {reason}", file=sys.stderr)
                continue
            key = run.group, run.stage
            if key not in latest or latest[key].began < run.began:
                latest[key] = run
    if left_out:
        runs, verb = ("run", "is") if left_out == 1 else ("runs", "are")
        print(f"{left_out} {runs} that did not complete {verb} left out")
    return [latest[key] for key in sorted(latest)]


def read_published(patches: list) -> tuple[list[Run], str]:
    """(the published figures as runs, a line that names their source), by the patches of
    stack.load(). Raises OSError, LookupError, TypeError or ValueError where one is missing."""
    data = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    group = Group(f"{data['gpu']} (published)", data["model"], int(data["context_length"]))
    baseline = float(data["baseline"]["tok_per_sec"]), float(data["baseline"]["reserved_gb"]), 1
    *series, ddp = (patch.published for patch in patches)
    figures = baseline, [theirs for theirs in series if theirs][-1], ddp
    runs = [Run(stage, group, gpus, tok_per_sec, reserved_gb)
            for stage, (tok_per_sec, reserved_gb, gpus) in zip(STAGES, figures, strict=True)]
    source = (f"Published figures: {data['gpu']}, PyTorch {data['pytorch']}, {group.model},"
              f" context {group.context_length:,}, {runs[-1].label}; <{data['source']}>")
    return runs, source


def by_group(runs: list[Run]) -> dict[Group, list[Run]]:
    return {group: list(members) for group, members in groupby(runs, lambda run: run.group)}


def factor(run: Run, runs: list[Run]) -> float | None:
    """How many times as fast as stage 00 of its group `run` is; None without a 00."""
    speeds = [r.tok_per_sec for r in runs if (r.group, r.stage) == (run.group, "00_orig")]
    return run.tok_per_sec / speeds[0] if speeds else None


def table(runs: list[Run], published: list[Run]) -> str:
    """The figures as Markdown; without runs, the published ones alone."""
    runs, theirs = runs or published, {run.stage: run for run in published}
    columns = {
        "device": lambda run: run.group.device,
        "model / context": lambda run: f"{run.group.model} / {run.group.context_length:,}",
        "stage": lambda run: run.label,
        "tok/sec": lambda run: f"{run.tok_per_sec:,.0f}",
        "factor over 00": lambda run: show(factor(run, runs), ".2f"),
        "p25–p75": lambda run: ("n/a" if None in (run.p25, run.p75)
                                else f"{run.p25:,.0f}–{run.p75:,.0f}"),
        "reserved GB": lambda run: show(run.reserved_gb, ".2f"),
        "MFU": lambda run: show(run.mfu, ".1%"),
        "val loss": lambda run: show(run.val_loss, ".3f"),
        "published tok/sec": lambda run: f"{theirs[run.stage].tok_per_sec:,.0f}",
        "published factor": lambda run: show(factor(theirs[run.stage], published), ".2f"),
    }
    return markdown(columns, runs, {"device", "model / context", "stage"})
