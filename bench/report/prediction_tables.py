"""What results/reference/ stores of predictions: beside it what was measured, and what fits which
GPU (docs/gpus.md)."""

import json
from functools import cache
from pathlib import Path

from bench.catalogue import EPOCHS, Run, Scripts
from bench.common import REFERENCE
from bench.predict.batches import PUBLISHED
from bench.predict.store import NAME, OTHERS, Prediction, fitting, key_of, load
from bench.report.tables import rows_in
from gpt_speed.cards import BY_NAME, CARDS, Card
from gpt_speed.common import UserError
from gpt_speed.tables import Table, num_col, text_col

GPT2 = ["--model", "gpt2"]
GPUS = 4  # of 02, as it was published
WITHOUT_TENSOR_CORES = ["--dtype", "float32", "--no-compile"]  # 01, on a GPU before 7.0
LARGER = "gpt2-medium", "gpt2-large", "gpt2-xl"
# The GPUs of docs/gpus.md, by memory; the explorer has all. No AMD: that is outside the model.
COMMON = (
    "RTX 4060",
    "RTX 3080",
    "RTX 3060",
    "RTX 4070",
    "T4",
    "P100",
    "V100",
    "RTX 4060 Ti 16 GB",
    "RTX 4080",
    "L4",
    "A10G",
    "RTX 3090",
    "RTX 4090",
    "RTX 5090",
    "A100 40 GB",
    "L40S",
    "A100 80 GB",
    "H100",
    "GB10",
    "H200",
    "B200",
)
# On an H100 01 reserved 15 % more than predicted without expandable segments, which Windows lacks;
# so a batch fits for sure only where it does with this many times its memory.
RESERVE = 1.15

scripts = cache(Scripts)  # in one process they are read once


def kept_of(script: str | Path, options: list[str]) -> Prediction | None:
    """Returns a stored prediction; None where there is none. Raises StackError."""
    return load(scripts(), script, options, REFERENCE)


def prediction_of(script: str | Path, options: list[str]) -> Prediction:
    """Raises UserError where it isn't stored, StackError."""
    if prediction := kept_of(script, options):
        return prediction
    raise UserError(
        f"results/reference/{NAME} lacks {key_of(scripts(), script, options)}:"
        " python measure.py predict --all --results-dir results/reference"
    )


def wanted() -> list[tuple[str | Path, list[str]]]:
    """Returns the scripts, each with its options, whose predictions the tables need, and the
    variants of 01 that may be in them. Raises UserError, StackError."""
    *ladder, ddp = scripts().ladder(GPUS)
    float16 = [scripts().float16(scripts().stage(stage)) for stage in ("01", "02")]
    pairs = [(run.script, ["--model", model]) for model in ("gpt2", "cpu-demo") for run in ladder]
    for model in ("gpt2", *LARGER):
        ends = ladder[0], ladder[-1], ddp, *float16
        pairs += [(run.script, ["--model", model]) for run in ends]
        pairs.append(("01", ["--model", model, *WITHOUT_TENSOR_CORES]))
    pairs += [
        (source["script"], options_of(source)) for source in published_others()["sources"].values()
    ]
    pairs += [(run.script, [*GPT2, *run.options]) for run in variants()]
    # For bench.predict.batches on a GPU without bfloat16 units.
    return [*pairs, (PUBLISHED["32"], [*GPT2, "--dtype", "float32"])]


def variants() -> list[Run]:
    """Returns the variants of 01, and before each without dropout what it is compared to, on any
    card."""
    return scripts().variants(scripts().stage("01"), dict(gpus=1))[1:]


def published_others() -> dict:
    return json.loads((REFERENCE / "published-others.json").read_text(encoding="utf-8"))


def options_of(source: dict) -> list[str]:
    """Returns with which options a script of ours is most like a program of others."""
    return ["--model", source.get("model", "gpt2"), *source["options"]]


def gains() -> list[tuple[Run, float, float]]:
    """Returns (run, times the speed of 01 on an H100, times its memory) of each variant whose
    prediction is stored; both over what it is compared to. Raises UserError, StackError."""
    card, lines = CARDS["H100"], []
    bases = {run.name: run for run in (scripts().stage("01"), *variants())}
    for run in variants():
        if prediction := kept_of(run.script, [*GPT2, *run.options]):
            reference = bases[run.compared_to]
            base = prediction_of(reference.script, [*GPT2, *reference.options])
            speed = prediction.tok_per_sec(32, card) / base.tok_per_sec(32, card)
            memory = prediction.needs[32].reserved / base.needs[32].reserved
            lines.append((run, speed, memory))
    return lines


def beside(measured: float, predicted: float, **about) -> dict:
    """Returns a row of a table of measured, or published, figures and predicted ones."""
    return about | dict(measured=measured, predicted=predicted, error=predicted / measured - 1)


def gpu_table(machine: Path) -> Table:
    """Returns what a machine's GPU has measured of GPT-2 with one process, beside what is
    predicted. Raises UserError, StackError."""
    lines = []
    for row in rows_in(machine, "stages") + rows_in(machine, "ladder"):
        if not row.record or row.run.processes > 1 or row.record.config["model"] != "gpt2":
            continue
        card = BY_NAME.get(row.measured.machine["name"])
        batch = row.record.config["batch_size"]
        prediction = kept_of(row.run.stage or row.run.script, GPT2)
        if not card or not prediction or batch not in prediction.needs:
            continue
        memory = prediction.needs[batch].reserved / 1024
        lines.append(
            dict(
                label=row.label,
                batch=batch,
                memory=beside(row.reserved_gb, memory),
                speed=beside(row.tok_per_sec, prediction.tok_per_sec(batch, card)),
            )
        )
    return Table(
        [
            text_col("script", "label"),
            num_col("batch", "batch"),
            num_col("tok/sec, measured", "speed.measured", ",.0f"),
            num_col("predicted", "speed.predicted", ",.0f"),
            num_col("error", "speed.error", "+.0%"),
            num_col("GB, measured", "memory.measured", ".2f"),
            num_col("predicted", "memory.predicted", ".2f"),
            num_col("error", "memory.error", "+.1%"),
        ],
        lines,
    )


def in_place(scripts: Scripts, run: Run, card: Card) -> Run:
    """Returns what a card without bfloat16 units trains in place of 01 or 02; one before 7.0 has no
    tensor cores either, and none of the compiler's kernels."""
    if run.stage in (None, "00") or card.capability >= 8:
        return run
    if card.capability >= 7:
        return scripts.float16(run)
    return run.replace(
        name=f"{run.name}-float32",
        label=f"{run.label} in float32, not compiled",
        options=(*run.options, *WITHOUT_TENSOR_CORES),
    )


def gpu_row(name: str) -> dict:
    """Returns what fits a GPU, and how fast 01 is there."""
    card = CARDS[name]
    run = in_place(scripts(), scripts().stage("01"), card)
    prediction = prediction_of(run.script, [*GPT2, *run.options])
    sure = fitting(prediction.needs, int((card.mib - OTHERS) / RESERVE), others=0)
    largest, batch = fitting(prediction.needs, card.mib), min(32, sure)
    return dict(
        card=name,
        gb=card.mib / 1024,
        baseline=fitting(prediction_of("00", GPT2).needs, card.mib),
        optimized=str(sure) if sure == largest else f"{sure} ({largest}?)",
        speed=prediction.speed_range(batch, card),
        minutes=prediction.minutes(batch, card),
    )


def gpus_table() -> Table:
    """Returns a row for each common GPU. Raises UserError, StackError."""
    return Table(
        [
            text_col("GPU", "card"),
            num_col("GB", "gb", ".0f"),
            num_col("largest batch of 00", "baseline"),
            num_col("of 01", "optimized"),
            num_col("thousand tok/sec of 01", "speed"),
            num_col(f"minutes of {EPOCHS} epochs", "minutes", ".1f"),
        ],
        list(map(gpu_row, COMMON)),
    )
