"""The three scripts side by side, whether they were started by hand or by measure.py."""

from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

from bench.analysis.rows import ratio
from bench.analysis.training import Training
from bench.catalogue import (
    EPOCHS,
    FLOAT16,
    STAGES,
    Run,
    chained,
    in_float16,
    published,
    published_source,
)
from bench.common import ROOT
from bench.measure.journal import journal_of, read_journal
from bench.measure.plan import Plan, Setup
from bench.measure.records import Record, loose_records
from bench.predict.batches import batches_that_fit
from bench.report.notes import float32_reason, full_notes
from bench.report.pictures import COLOURS, Bar, draw_bars, rows_of_panels, shorten
from bench.report.tables import speed_and_factor, spread
from bench.studies import Study
from bench.subcommands import positive
from gpt_speed.common import counted
from gpt_speed.tables import Column, Table, fmt, num_col, text_col

EPOCHS_IN_REPORT = 1  # of each run on a GPU: a slow one has no more in some minutes
NAMES = {"00": "00 original", "01": "01 optimized", "02": "02 DDP"}
# The same by what a record says of its script.
LABELS = {Path(STAGES[stage]).stem: name for stage, name in NAMES.items()}
LABELS |= {f"{script}-{FLOAT16}": f"{name} with {FLOAT16}" for script, name in LABELS.items()}


@dataclass(frozen=True)
class ScriptFigures:
    """What one run of a script came to, or what is published of it."""

    stage: str
    label: str
    device: str
    setting: str  # the model and its context length; the text, if it is another one
    tok_per_sec: float | None  # of all processes
    factor: float | None  # times the speed of 00; None of 00, and where they can't be compared
    reserved_gb: float | None
    quartiles: tuple[float, ...] | None = None  # of tok/sec: the first, the median and the third
    mfu: float | None = None
    val_loss: float | None = None  # at the end


class Stages(Study):
    """Train the three scripts: 00, 01 and 02.

    02 has one process for each GPU, or two where there is no GPU. On a GPU without units for
    bfloat16 01 and 02 are composed with precision-fp16."""

    group = "start here"
    title = "The three stages"
    position = 10
    tokens = None

    def options(self, parser):
        parser.add_argument(
            "--epochs",
            type=positive,
            metavar="N",
            help=f"passes over the text on a GPU (default: the scripts' own {EPOCHS})",
        )

    def plans(self, setup):
        runs = chained([run_of(stage, setup) for stage in STAGES])
        tokens, epochs = setup.args.max_tokens, setup.args.epochs
        if setup.in_report and setup.machine["gpus"]:
            epochs = EPOCHS_IN_REPORT
        if tokens:
            epochs = None  # the tokens alone say how long a run is
        yield Plan(runs, full_length=True, tokens=tokens, epochs=epochs)

    def batches(self, setup):
        """Returns other batch sizes where scripts are composed, which need less memory."""
        if setup.batches and in_float16(setup.machine, setup.options):
            return batches_that_fit(setup, composed=True)
        return setup.batches

    def notes(self, measured, rows):
        epochs = measured.plan.epochs
        return full_notes(measured, rows, counted(epochs, "epoch") if epochs else None)

    def excerpts(self, measured, rows):
        return {"stages": [scripts_table(latest_runs(measured.folder))]}

    def picture(self, measured, rows):
        return draw_scripts(latest_runs(measured.folder))


def run_of(stage: str, setup: Setup) -> Run:
    """Returns one of the three scripts as this machine trains it: the file itself, edited or not,
    unless it is composed for this machine. Raises UserError, StackError."""
    run = setup.scripts.for_machine(stage, setup.machine, setup.options)
    if run.script != stage:
        return run
    return run.replace(script=ROOT / STAGES[stage])


def latest_runs(folder: Path) -> list[list[ScriptFigures]]:
    """Returns the figures of the latest complete run of each script, those of one setting
    together."""
    return latest_by_setting(complete_records(folder))


def complete_records(folder: Path) -> list[Record]:
    """Returns the records of complete runs, in the journal or started by hand. Prints how many runs
    did not complete."""
    journal = read_journal(journal_of(folder, "stages"))
    results = [result for measured in journal for result in measured.results]
    records = loose_records(folder) + [result.record for result in results if result.record]
    records = [record for record in records if record.run_name in LABELS]
    complete = [record for record in records if record.outcome.complete]
    without_record = sum(result.record is None for result in results)
    incomplete = without_record + len(records) - len(complete)
    if incomplete:
        print(f"{counted(incomplete, 'run')} that did not complete: left out")
    return complete


def latest_by_setting(records: list[Record]) -> list[list[ScriptFigures]]:
    """Groups records by device, model, context length and text, and returns the latest of each
    script in each group."""
    groups: dict[tuple, dict[str, Record]] = {}
    for record in sorted(records, key=age_of):
        config = record.config
        group = record.device_name, config["model"], config["context_length"], record.text
        groups.setdefault(group, {})[record.run_name[:2]] = record
    return [side_by_side(scripts) for _, scripts in sorted(groups.items())]


def age_of(record: Record) -> tuple[str, str]:
    """Returns what sorts records, the oldest first."""
    return str(record.start.get("time", "")), record.name


def tokens_of(record: Record) -> int:
    return record.logs[-1]["tokens"] if record.logs else 0


def published_scripts() -> list[ScriptFigures]:
    """Returns the published figures. Raises UserError, StackError."""
    source, figures = published_source(), published()
    first = figures["00"].tok_per_sec
    return [
        ScriptFigures(
            stage,
            label=with_ranks(NAMES[stage], stage, figures[stage].gpus),
            device=f"{source['gpu']} (published)",
            setting=setting_of(source["model"], source["context_length"]),
            tok_per_sec=figures[stage].tok_per_sec,
            factor=None if stage == "00" else figures[stage].tok_per_sec / first,
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
    return [
        figures_of(stage, record, base, with_tokens=differ)
        for stage, record in sorted(records.items())
    ]


def figures_of(stage: str, record: Record, base: Record | None, with_tokens: bool) -> ScriptFigures:
    """Returns the figures of a complete record, compared to `base`, that of 00, unless it ran in
    another way."""
    training, config = Training(record), record.config
    differences, factor = [], None
    if base:
        differences = differences_between(record, base)
    if base and stage != "00" and not differences:
        factor = ratio(training.tok_per_sec, Training(base).tok_per_sec)
    return ScriptFigures(
        stage,
        label=", ".join([label_of(stage, record, with_tokens), *differences]),
        device=record.device_name,
        setting=setting_of(config["model"], config["context_length"], record.text),
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
    own, other = record.environment, base.environment
    words = {"torch": f"PyTorch {own.get('torch')}"}
    if record.config["device"] == "cpu" and record.config["world_size"] == 1:
        words["threads"] = counted(own.get("threads") or 0, "thread")
    # Older records don't tell their threads.
    known = [name for name in words if None not in (own.get(name), other.get(name))]
    return [words[name] for name in known if own[name] != other[name]]


def label_of(stage: str, record: Record, with_tokens: bool) -> str:
    """Returns a script's name, with how this run differs from others of it."""
    config = record.config
    parts = [with_ranks(LABELS[record.run_name], stage, config["world_size"])]
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


def setting_of(model: str, context_length: int, text: str = "") -> str:
    setting = f"{model} / {context_length:,}"
    if text:
        setting += f", {text}"
    return setting


def scripts_table(groups: list[list[ScriptFigures]]) -> Table:
    """Returns a row for each script of each group; without any, those of the published figures."""
    rows = [row for group in groups or [published_scripts()] for row in group]
    return Table(
        [
            text_col("device", "device"),
            text_col("model / context", "setting"),
            text_col("script", "label"),
            num_col("tok/sec", "tok_per_sec", ",.0f"),
            Column("speedup over 00", speedup_text),
            Column("p25–p75", quartiles_text),
            num_col("reserved GB", "reserved_gb", ".2f"),
            num_col("MFU", "mfu", ".1%"),
            num_col("val loss", "val_loss", ".3f"),
        ],
        rows,
        missing="n/a",
    )


def speedup_text(row: ScriptFigures) -> str:
    if row.stage == "00":
        return "1.00"
    return fmt(row.factor, ".2f")


def quartiles_text(row: ScriptFigures) -> str:
    if not row.quartiles:
        return ""
    first, _, third = row.quartiles
    return spread([first, third])


def draw_scripts(groups: list[list[ScriptFigures]]):
    """Draws bars of tok/sec and of reserved memory, the published ones last; every group has scales
    of its own."""
    tables = [*groups, published_scripts()]
    figure, panels = rows_of_panels(
        [f"{shorten(rows[0].device, 60)}: {rows[0].setting}" for rows in tables],
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
