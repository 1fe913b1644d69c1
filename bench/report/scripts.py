"""The latest run of each of the three scripts, started by hand or by measure.py: a table and a
picture, with the published figures."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

from bench.analysis.training import Training
from bench.analysis.values import ratio
from bench.catalogue import FLOAT16, STAGES, published, published_source
from bench.common import shorten
from bench.measure.journal import journal_of, read_journal
from bench.measure.records import Record, loose_records
from bench.report.notes import float32_reason
from bench.report.pictures import COLOURS, Bar, draw_bars, rows_of_panels
from bench.report.tables import speed_and_factor, spread
from gpt_speed.common import counted
from gpt_speed.tables import Column, Table, fmt, num_col, text_col

NAMES = {"00": "00 original", "01": "01 optimized", "02": "02 DDP"}
# Their stages and names, by what a record says of its script.
SCRIPTS = {Path(STAGES[stage]).stem: (stage, name) for stage, name in NAMES.items()}
SCRIPTS |= {
    f"{script}-{FLOAT16}": (stage, f"{name} with {FLOAT16}")
    for script, (stage, name) in SCRIPTS.items()
}


@dataclass(frozen=True)
class ScriptFigures:
    """What one run of a script came to, or what is published of it."""

    stage: str
    label: str
    device: str
    model: str  # and its context length; the text, if it is another one
    tok_per_sec: float | None  # of all processes
    factor: float | None  # times the speed of 00; None of 00, and where they can't be compared
    reserved_gb: float | None
    quartiles: tuple[float, ...] | None = None  # of tok/sec: the first, the median and the third
    mfu: float | None = None
    val_loss: float | None = None  # at the end


class ScriptRun(NamedTuple):
    """A run of one of the three scripts, in the study's journal or started by hand."""

    script: str  # its name in SCRIPTS
    time: str  # when it began, or where a journal doesn't tell, when the run before it did
    name: str  # of its record
    record: Record | None  # None: it left none

    @property
    def is_complete(self) -> bool:
        return self.record is not None and self.record.outcome.complete


def script_runs(folder: Path) -> list[ScriptRun]:
    """Returns the runs of the three scripts whose results lie in a folder, the oldest first. Names
    damaged records."""
    runs = [*runs_by_hand(folder), *runs_of_study(folder)]
    return sorted([run for run in runs if run.script in SCRIPTS], key=attrgetter("time", "name"))


def runs_by_hand(folder: Path) -> list[ScriptRun]:
    return [
        ScriptRun(record.run_name, time_of(record), record.name, record)
        for record in loose_records(folder)
    ]


def runs_of_study(folder: Path) -> list[ScriptRun]:
    runs = []
    for measured in read_journal(journal_of(folder, "stages")):
        time = measured.time
        for result in measured.results:
            if result.record:
                time = time_of(result.record)
            runs.append(ScriptRun(result.name, time, result.name, result.record))
    return runs


def time_of(record: Record) -> str:
    """Returns when a run began; "" where its record doesn't tell."""
    return str(record.start.get("time", ""))


def left_out(runs: Sequence[ScriptRun]) -> int:
    """Returns how many runs did not complete since the last one of their script that did; `runs`
    are sorted, the oldest first."""
    incomplete: Counter[str] = Counter()
    for run in runs:
        if run.is_complete:
            incomplete[run.script] = 0
        else:
            incomplete[run.script] += 1
    return incomplete.total()


def latest_runs(runs: Sequence[ScriptRun]) -> list[list[ScriptFigures]]:
    """Returns the figures of the latest complete run of each script, by device, model, context
    length and text; `runs` are sorted, the oldest first."""
    groups: dict[tuple, dict[str, Record]] = {}
    for run in runs:
        if run.record and run.is_complete:
            group = group_of(run.record)
            stage, _ = SCRIPTS[run.script]
            groups.setdefault(group, {})[stage] = run.record
    return [side_by_side(scripts) for _, scripts in sorted(groups.items())]


def group_of(record: Record) -> tuple[str, str, int, str]:
    """Returns what runs have in common that stand side by side."""
    config = record.config
    return record.device_name, config["model"], config["context_length"], record.text


def tokens_of(record: Record) -> int:
    if not record.logs:
        return 0
    return record.logs[-1]["tokens"]


def published_scripts() -> list[ScriptFigures]:
    """Returns the published figures. Raises UserError, StackError."""
    source, figures = published_source(), published()
    first = figures["00"].tok_per_sec
    factors = {stage: figures[stage].tok_per_sec / first for stage in STAGES if stage != "00"}
    return [
        ScriptFigures(
            stage,
            label=with_ranks(NAMES[stage], stage, figures[stage].gpus),
            device=f"{source['gpu']} (published)",
            model=model_text(source["model"], source["context_length"]),
            tok_per_sec=figures[stage].tok_per_sec,
            factor=factors.get(stage),
            reserved_gb=figures[stage].reserved_gb,
        )
        for stage in STAGES
    ]


def side_by_side(records: dict[str, Record]) -> list[ScriptFigures]:
    """Returns the figures of one record of each script. Where they differ in length, and losses
    can't be compared, their labels have the tokens."""
    tokens = [tokens_of(record) for record in records.values()]
    differ = max(tokens) > 1.5 * min(tokens)
    base = records.get("00")
    return [figures_of(records[stage], base, with_tokens=differ) for stage in sorted(records)]


def figures_of(record: Record, base: Record | None, with_tokens: bool) -> ScriptFigures:
    """Returns the figures of a complete record, compared to `base`, that of 00, unless it ran in
    another way."""
    training, config = Training(record), record.config
    stage, _ = SCRIPTS[record.run_name]
    differences = differences_between(record, base or record)
    factor = None
    if base and record is not base and not differences:
        factor = ratio(training.tok_per_sec, Training(base).tok_per_sec)
    return ScriptFigures(
        stage,
        label=", ".join([script_label(record, with_tokens), *differences]),
        device=record.device_name,
        model=model_text(config["model"], config["context_length"], record.text),
        tok_per_sec=training.tok_per_sec,
        factor=factor,
        reserved_gb=record.end["reserved_gb"],
        quartiles=training.quartiles,
        mfu=training.mfu,
        val_loss=record.val_loss_after(None),
    )


def differences_between(record: Record, base: Record) -> list[str]:
    """Returns what keeps a run from being compared to another one: its PyTorch and, on a CPU, its
    threads, of which each of several ranks has a share."""
    here, there = record.environment, base.environment
    words = {"torch": f"PyTorch {here.get('torch')}"}
    if record.config["device"] == "cpu" and record.config["world_size"] == 1:
        words["threads"] = counted(here.get("threads") or 0, "thread")
    # Older records don't tell their threads.
    in_both = [name for name in words if None not in (here.get(name), there.get(name))]
    return [words[name] for name in in_both if here[name] != there[name]]


def script_label(record: Record, with_tokens: bool) -> str:
    """Returns a script's name, with how this run differs from others of it."""
    stage, name = SCRIPTS[record.run_name]
    config = record.config
    parts = [with_ranks(name, stage, config["world_size"])]
    if config.get("batch_size"):
        parts.append(f"batch {config['batch_size']}")
    if with_tokens:
        parts.append(f"{tokens_of(record):,} tokens")
    if float32_reason(record):
        parts.append("float32")
    return ", ".join(parts)


def with_ranks(name: str, stage: str, ranks: int) -> str:
    """Returns a script's name, with the number of its ranks if it has any."""
    if stage == "02":
        return f"{name} × {ranks}"
    return name


def model_text(model: str, context_length: int, text: str = "") -> str:
    words = f"{model} / {context_length:,}"
    if text:
        words += f", {text}"
    return words


def scripts_table(groups: list[list[ScriptFigures]]) -> Table:
    """Returns a row for each script of each group; without any, those of the published figures."""
    rows = [row for group in groups or [published_scripts()] for row in group]
    return Table(
        [
            text_col("device", "device"),
            text_col("model / context", "model"),
            text_col("script", "label"),
            num_col("tok/sec", "tok_per_sec", ",.0f"),
            Column("speedup over 00", speedup_cell),
            Column("p25–p75", quartiles_cell),
            num_col("reserved GB", "reserved_gb", ".2f"),
            num_col("MFU", "mfu", ".1%"),
            num_col("val loss", "val_loss", ".3f"),
        ],
        rows,
        missing="n/a",
    )


def speedup_cell(row: ScriptFigures) -> str:
    if row.stage == "00":
        return "1.00"
    return fmt(row.factor, ".2f")


def quartiles_cell(row: ScriptFigures) -> str:
    if not row.quartiles:
        return ""
    first, _, third = row.quartiles
    return spread([first, third])


def draw_scripts(groups: list[list[ScriptFigures]]):
    """Draws bars of tok/sec and of reserved memory, the published ones last; every group has scales
    of its own."""
    tables = [*groups, published_scripts()]
    figure, panels = rows_of_panels(
        [f"{shorten(rows[0].device, 60)}: {rows[0].model}" for rows in tables],
        [1.3 + 0.45 * len(rows) for rows in tables],
        [5, 3],
    )
    for rows, (_, speed, memory) in zip(tables, panels, strict=True):
        draw_group(speed, memory, rows)
    return figure


def draw_group(speed, memory, rows: list[ScriptFigures]) -> None:
    """Draws the bars of one group into its two panels."""
    speeds, sizes = [], []
    for row in rows:
        colour, gb = COLOURS[row.stage], row.reserved_gb
        text = speed_and_factor(row.tok_per_sec, fmt(row.factor, ".2f"))
        speeds.append(Bar(fill(row.label, 26), row.tok_per_sec, text, colour))
        sizes.append(Bar("", gb, fmt(gb, ".2f") or "n/a", colour))
    draw_bars(speed, speeds)
    draw_bars(memory, sizes)
    speed.set_xlabel("speed, tok/sec (all processes)")
    memory.set_xlabel("reserved memory, GB (per process)")
