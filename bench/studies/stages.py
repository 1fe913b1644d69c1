"""The three scripts side by side, whether they were started by hand or by measure.py."""

from pathlib import Path
from textwrap import fill

from bench.analysis.rows import Row, rows_of
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
from bench.measure.journal import Measurement, journal_of, loose_records, read_journal
from bench.measure.plan import SEED, Plan, Setup
from bench.measure.records import COMPLETE, Record, Result
from bench.predict.batches import batches_that_fit
from bench.report.notes import float32_reason, full_notes
from bench.report.pictures import COLOURS, Bar, draw_bars, rows_of_panels, shorten
from bench.report.tables import spread
from bench.studies import Study
from bench.subcommands import positive
from gpt_speed.common import counted
from gpt_speed.tables import Column, Table, fmt, num_col, text_col
from patches.stack import Published

EPOCHS_IN_REPORT = 1  # of each run on a GPU: a slow one has no more in some minutes
NAMES = {"00": "00 original", "01": "01 optimized", "02": "02 DDP"}
# The same by what a record says of its script.
LABELS = {Path(STAGES[stage]).stem: name for stage, name in NAMES.items()}
LABELS |= {f"{script}-{FLOAT16}": f"{name} with {FLOAT16}" for script, name in LABELS.items()}


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


def latest_runs(folder: Path) -> list[Measurement]:
    """Returns the latest complete run of each script, those of one setting as one measurement."""
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


def latest_by_setting(records: list[Record]) -> list[Measurement]:
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


def published_runs() -> Measurement:
    """Returns the published figures as a measurement. Raises UserError, StackError."""
    source, figures = published_source(), published()
    records = {stage: published_record(stage, source, figures[stage]) for stage in STAGES}
    return side_by_side(records)


def published_record(stage: str, source: dict, figures: Published) -> Record:
    """Returns the published figures of a script as its record."""
    start = dict(
        stage=Path(STAGES[stage]).stem,
        environment=dict(gpu=f"{source['gpu']} (published)"),
        config=dict(
            model=source["model"],
            context_length=source["context_length"],
            device="cuda",
            world_size=figures.gpus,
        ),
    )
    end = dict(avg_tok_per_sec=figures.tok_per_sec, reserved_gb=figures.reserved_gb)
    return Record("published", start, [], end)


def side_by_side(records: dict[str, Record]) -> Measurement:
    """Returns one record of each script as a measurement, in which each is compared to 00, unless
    it ran in another way. Where they differ in length, and losses can't be compared, their labels
    have the tokens."""
    tokens = [tokens_of(record) for record in records.values()]
    differ = max(tokens) > 1.5 * min(tokens)
    base = records.get("00")
    runs, results = [], []
    for stage, record in sorted(records.items()):
        differences = differences_between(record, base) if base else []
        label = ", ".join([label_of(stage, record, with_tokens=differ), *differences])
        run = Run(stage, label, processes=record.config["world_size"])
        if base and stage != "00" and not differences:
            run = run.replace(compared_to="00")
        runs.append(run)
        results.append(result_of(stage, record))
    return Measurement(Plan(runs), results, study="stages")


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


def result_of(stage: str, record: Record) -> Result:
    """Returns a complete record as the result of a script's one round."""
    return Result(
        name=stage,
        round=1,
        seed=SEED,
        source_sha256=None,
        seconds=0,
        outcome=COMPLETE,
        record=record,
    )


def label_of(stage: str, record: Record, with_tokens: bool) -> str:
    """Returns a script's name, with how this run differs from others of it."""
    config = record.config
    name = LABELS[record.run_name]
    if stage == "02":
        name += f" × {config['world_size']}"
    parts = [name]
    if config.get("batch_size"):
        parts.append(f"batch {config['batch_size']}")
    if with_tokens:
        parts.append(f"{tokens_of(record):,} tokens")
    if float32_reason(record):
        parts.append("float32")
    return ", ".join(parts)


def setting_of(row: Row) -> str:
    config, text = row.record.config, row.record.text
    setting = f"{config['model']} / {config['context_length']:,}"
    if text:
        setting += f", {text}"
    return setting


def scripts_table(groups: list[Measurement]) -> Table:
    """Returns a row for each script of each group; without any, those of the published figures."""
    rows = [row for measured in groups or [published_runs()] for row in rows_of(measured)]
    return Table(
        [
            text_col("device", "record.device_name"),
            Column("model / context", setting_of, True),
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


def speedup_text(row: Row) -> str:
    if row.run.name == "00":
        return "1.00"
    return fmt(row.factor, ".2f")


def quartiles_text(row: Row) -> str:
    if not row.training.quartiles:
        return ""
    first, _, third = row.training.quartiles
    return spread([first, third])


def draw_scripts(groups: list[Measurement]):
    """Draws bars of tok/sec and of reserved memory, the published ones last; every group has scales
    of its own."""
    tables = [rows_of(measured) for measured in (*groups, published_runs())]
    figure, panels = rows_of_panels(
        [f"{shorten(rows[0].record.device_name, 60)}: {setting_of(rows[0])}" for rows in tables],
        [1.3 + 0.45 * len(rows) for rows in tables],
        [5, 3],
    )
    for rows, (_, speed, memory) in zip(tables, panels, strict=True):
        draw_group(speed, memory, rows)
    return figure


def draw_group(speed, memory, rows: list[Row]) -> None:
    """Draws the bars of one group into its two panels."""
    speeds, sizes = [], []
    for row in rows:
        colour, gb = COLOURS[row.run.name], row.reserved_gb
        speeds.append(Bar(fill(row.label, 26), row.tok_per_sec, speed_text(row), colour))
        sizes.append(Bar("", gb, fmt(gb, ".2f") or "n/a", colour))
    draw_bars(speed, speeds)
    draw_bars(memory, sizes)
    speed.set_xlabel("speed, tok/sec (all processes)")
    memory.set_xlabel("reserved memory, GB (per process)")


def speed_text(row: Row) -> str:
    speed = f"{row.tok_per_sec:,.0f}"
    if row.factor:
        speed += f"  ({row.factor:.2f}×)"
    return speed
