"""The tables of docs/gpus.md and docs/predictions.md: what is kept of predictions in
results/reference/, and beside it what others and this project's machines have measured."""

import json
from dataclasses import dataclass
from pathlib import Path

from bench.analysis.rows import ratio
from bench.cards import CARDS, card_of
from bench.catalogue import Run
from bench.common import REFERENCE, UserError
from bench.predict.batches import PUBLISHED
from bench.predict.store import NAME, Prediction, key_of, load
from bench.report.notes import today
from bench.report.tables import Table, num_col, rows_in, text_col

GPT2 = ["--model", "gpt2"]
WITHOUT_TENSOR_CORES = ["--dtype", "float32", "--no-compile"]  # 01, on a GPU before 7.0
LARGER = "gpt2-medium", "gpt2-large", "gpt2-xl"
PUBLISHED_ON = "A100 40 GB"  # probably: batch 32 was the largest that fitted


def kept_of(script: str | Path, options: list[str]) -> Prediction | None:
    """None where it isn't kept. Raises StackError."""
    return load(today(), script, options, REFERENCE)


def prediction_of(script: str | Path, options: list[str]) -> Prediction:
    """Raises UserError where it isn't kept, StackError."""
    known = kept_of(script, options)
    if not known:
        raise UserError(f"results/reference/{NAME} lacks {key_of(today(), script, options)}:"
                        " python measure.py predict --all --results-dir results/reference")
    return known


def wanted() -> list[tuple[str | Path, list[str]]]:
    """The scripts, each with its options, whose predictions the tables need, and the variants of 01
    that may be in them. Raises UserError, StackError."""
    scripts = today()
    *rungs, ddp = scripts.ladder(4)
    pairs = [(run.script, GPT2) for run in (*rungs, ddp)]
    pairs += [(run.script, ["--model", "cpu-demo"]) for run in rungs]
    for model in ("gpt2", *LARGER):
        size = ["--model", model]
        pairs += [(run.script, size) for run in (rungs[0], rungs[-1], ddp) if model != "gpt2"]
        pairs += [(scripts.float16(scripts.stage(stage)).script, size) for stage in ("01", "02")]
        pairs.append((scripts.stage("01").script, [*size, *WITHOUT_TENSOR_CORES]))
    pairs += [(source["script"], [*GPT2, *source["options"]])
              for source in published_others()["sources"].values()]
    pairs += [(run.script, [*GPT2, *run.options]) for run in alternatives()]
    # For bench.predict.batches on a GPU without bfloat16 units.
    pairs.append((PUBLISHED["32"], [*GPT2, "--dtype", "float32"]))
    return pairs


def alternatives() -> list[Run]:
    """The variants of 01, on any card."""
    return today().variants(today().stage("01"), dict(gpus=1))[1:]


def published_others() -> dict:
    return json.loads((REFERENCE / "published-others.json").read_text(encoding="utf-8"))


# ---- On an H100 --------------------------------------------------------------------------------


@dataclass
class Expected:
    """A run on an H100, and the one that it is compared to: its figures have the names of Row's."""

    run: Run
    batch: int
    prediction: Prediction
    reference: "Expected | None"

    label = property(lambda row: row.run.label)
    tok_per_sec = property(lambda row: row.prediction.tok_per_sec(row.batch, CARDS["H100"]))
    reserved_gb = property(lambda row: row.prediction.needs[row.batch].reserved / 1024)
    factor = property(
        lambda row: row.reference and ratio(row.tok_per_sec, row.reference.tok_per_sec))
    memory_factor = property(
        lambda row: row.reference and ratio(row.reserved_gb, row.reference.reserved_gb))


def ladder() -> list[Expected]:
    """Every rung at its published batch size, over the one before; the last one is 02. Raises
    UserError, StackError."""
    rows: list[Expected] = []
    for place, run in enumerate(today().ladder(4)):
        rows.append(Expected(run, 8 if place < 10 else 32, prediction_of(run.script, GPT2),
                             rows[-1] if rows else None))
    return rows


def expected() -> list[Expected]:
    """What every rung on one GPU, over the one before, and each variant that can be traced, over
    01, should bring on an H100. Raises UserError."""
    rungs = [rung for rung in ladder() if not rung.run.torchrun]
    return rungs + [Expected(run.replace(label=f"`{run.label}`"), 32, known, rungs[-1])
                    for run in alternatives()
                    if (known := kept_of(run.script, [*GPT2, *run.options]))]


# ---- Tables ------------------------------------------------------------------------------------


def beside(measured: float, predicted: float, **about) -> dict:
    """A row of a table of measured, or published, figures and predicted ones."""
    return about | dict(measured=measured, predicted=predicted, error=predicted / measured - 1)


def gpu_table(machine: Path) -> Table:
    """What a machine's GPU has measured of GPT-2 with one process, beside what is predicted. Raises
    UserError, StackError."""
    lines = []
    rows = [row for study in ("stages", "ladder") for row in rows_in(machine, study)
            if row.record and row.run.processes == 1]
    for row in sorted(rows, key=lambda row: str(row.run.stage or f"00 {row.run.number:02}")):
        card, batch = card_of(row.measured.machine["name"]), row.record.config["batch_size"]
        known = kept_of(row.run.stage or row.run.script, GPT2)
        if not (card and known and batch in known.needs and row.record.config["model"] == "gpt2"):
            continue  # nothing is predicted of it
        if speed := known.tok_per_sec(batch, CARDS[card]):
            lines.append(dict(
                label=row.label, batch=batch, speed=beside(row.tok_per_sec, speed),
                memory=beside(row.reserved_gb, known.needs[batch].reserved / 1024)))
    return Table([
        text_col("script", "label"), num_col("batch", "batch"),
        num_col("tok/sec, measured", "speed.measured", ",.0f"),
        num_col("predicted", "speed.predicted", ",.0f"), num_col("error", "speed.error", "+.0%"),
        num_col("GB, measured", "memory.measured", ".2f"),
        num_col("predicted", "memory.predicted", ".2f"), num_col("error", "memory.error", "+.1%")],
        lines)
