"""What results/reference/ stores of predictions: beside it what was measured, and what fits which
GPU (docs/gpus.md)."""

from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from bench.analysis.folders import rows_in
from bench.analysis.rows import Row
from bench.predict.batches import BATCH_OF
from bench.predict.forecast import speed_text
from bench.predict.prediction import Prediction, largest_that_fits
from bench.predict.shipped import (
    GPT2,
    TUNED_ON,
    in_place,
    kept_of,
    largest_that_surely_fits,
    prediction_of,
    program_of,
    published_others,
    scripts,
)
from gpt_speed.cards import BY_NAME, CARDS, Card
from gpt_speed.tables import Table, num_col, text_col

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
    "A10",
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

FLOAT32_WEIGHTS = "precision-autocast"  # 01 with bfloat16 by autocast, for long trainings
MEMORY_BATCHES = 8, 16, 32, 64, 128
AUTOCAST = "precision-autocast@13-loss-in-graph"  # ours that other people's programs resemble
LEAST_BATCH = 8  # of their figures


class Predicted(NamedTuple):
    """A measured figure, and what is predicted in its place."""

    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """By which share the prediction is too high."""
        return self.predicted / self.measured - 1


class ScriptLine(NamedTuple):
    """A script on a GPU, beside what is predicted of it."""

    label: str
    batch: int
    memory: Predicted  # GB
    speed: Predicted  # tok/sec


def gpu_line(row: Row) -> ScriptLine | None:
    """Returns a row with what is predicted of it; None where nothing is, or it isn't GPT-2 in one
    process."""
    if not row.record or row.run.processes > 1 or row.record.config["model"] != "gpt2":
        return None
    card, batch = BY_NAME.get(row.measured.machine["name"]), row.record.config["batch_size"]
    prediction = kept_of(row.run.stage or row.run.script, GPT2)
    if not card or not prediction or batch not in prediction.needs:
        return None
    speed = prediction.tok_per_sec(batch, card)
    if not speed or not row.tok_per_sec or not row.reserved_gb:
        return None
    memory = prediction.needs[batch].reserved / 1024
    return ScriptLine(
        row.label, batch, Predicted(row.reserved_gb, memory), Predicted(row.tok_per_sec, speed)
    )


def gpu_table(machine: Path) -> Table:
    """Returns what a machine's GPU has measured of GPT-2 with one process, beside what is
    predicted. Raises UserError, StackError."""
    rows = rows_in(machine, "stages") + rows_in(machine, "ladder")
    lines = [line for line in map(gpu_line, rows) if line]
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


@dataclass(frozen=True)
class OnCard:
    """One of the three scripts, as a card trains it, with GPT-2's size; by stored predictions."""

    stage: str
    card: Card
    most: int | None = None  # sequences in a batch; the published number if not given

    @cached_property
    def prediction(self) -> Prediction:
        """Raises UserError where it isn't stored, StackError."""
        run = in_place(scripts().stage(self.stage), self.card)
        return prediction_of(run.script, [*GPT2, *run.options])

    @property
    def largest(self) -> int:
        return largest_that_fits(self.prediction.needs, self.card.mib)

    @property
    def surely(self) -> int:
        """The largest batch that fits even where more is reserved, as by 01 on Windows."""
        if self.stage == "00":
            return self.largest
        return largest_that_surely_fits(self.prediction, self.card)

    @property
    def batch(self) -> int:
        """The published batch size, or the most allowed, or the largest that surely fits."""
        return min(self.surely, self.most or BATCH_OF[self.stage])

    @property
    def tok_per_sec(self) -> float | None:
        return self.prediction.tok_per_sec(self.batch, self.card)

    @property
    def speeds(self) -> tuple[float, float] | None:
        """The least and the most tok/sec to expect."""
        return self.prediction.speeds(self.batch, self.card)

    @property
    def minutes(self) -> float | None:
        """The minutes of the published epochs on the book, without compiling."""
        return self.prediction.minutes(self.batch, self.card)


class CardLine(NamedTuple):
    """What fits a GPU, and how fast 01 is there."""

    card: str
    gb: float
    baseline: int  # the largest batch of 00
    optimized: str  # that of 01; with a "?" one that fits unless more is reserved
    float32: str  # the same with float32 weights
    speed: str  # of 01, in thousands
    others: str  # of other people's programs
    tuned: str  # of those that the predictions were tuned on


def card_line(name: str) -> CardLine:
    card = CARDS[name]
    last = OnCard("01", card)
    fastest = fastest_of_others(name)
    tuned = {program: fastest[program] for program in TUNED_ON if program in fastest}
    others = {program: fastest[program] for program in fastest.keys() - tuned.keys()}
    return CardLine(
        card=name,
        gb=card.mib / 1024,
        baseline=OnCard("00", card).largest,
        optimized=largest_text(last.prediction, card),
        float32=largest_text(with_float32_weights(last), card),
        speed=speed_text(last.prediction, last.batch, card),
        others=others_text(others, last.speeds),
        tuned=others_text(tuned),
    )


def largest_text(prediction: Prediction, card: Card) -> str:
    """Writes the largest batch that surely fits a card, and the one that fits by prediction alone
    where that is larger: "32 (64?)"."""
    surely = largest_that_surely_fits(prediction, card)
    largest = largest_that_fits(prediction.needs, card.mib)
    if surely == largest:
        return str(surely)
    return f"{surely} ({largest}?)"


def with_float32_weights(last: OnCard) -> Prediction:
    """Returns the prediction of 01 with float32 weights, which it has anyway on a card without
    bfloat16 units. Raises UserError where it isn't stored, StackError."""
    if last.card.bfloat16:
        return prediction_of(FLOAT32_WEIGHTS, GPT2)
    return last.prediction


def fastest_of_others(name: str) -> dict[str, float]:
    """Returns by the names of other people's programs that resemble 01 the fastest figure of each
    on a card, in tok/sec."""
    published = published_others()
    fastest: dict[str, float] = {}
    for row in published["rows"]:
        source = published["sources"][row["source"]]
        if row["card"] == name and row["batch"] >= LEAST_BATCH and resembles_01(source, row):
            program = program_of(row)
            fastest[program] = max(row["tok_per_sec"], fastest.get(program, 0))
    return fastest


def others_text(speeds: dict[str, float], expected: tuple[float, float] | None = None) -> str:
    """Writes the speeds of programs in thousands of tok/sec, the slowest first, and which lie
    outside the range that is expected."""
    return ", ".join(
        f"{program} {speed / 1000:,.0f}{outside_text(speed, expected)}"
        for program, speed in sorted(speeds.items(), key=itemgetter(1))
    )


def outside_text(speed: float, expected: tuple[float, float] | None) -> str:
    if not expected or expected[0] <= speed <= expected[1]:
        return ""
    return " (below)" if speed < expected[0] else " (above)"


def resembles_01(source: dict, row: dict) -> bool:
    """Returns whether a figure is of GPT-2 124M, compiled, in bfloat16 by autocast, with
    FlashAttention, and nothing of it is assumed."""
    return (
        source["script"] == AUTOCAST
        and source["options"] == ["--dropout", "0"]
        and "model" not in source
        and "attention by hand" not in source.get("composed", [])
        and "unsure" not in row
    )


def gpus_table() -> Table:
    """Returns a row for each common GPU. Raises UserError, StackError."""
    return Table(
        [
            text_col("GPU", "card"),
            num_col("GB", "gb", ".0f"),
            num_col("largest batch of 01", "optimized"),
            num_col("with float32 weights", "float32"),
            num_col("of 00", "baseline"),
            num_col("thousand tok/sec of 01, predicted", "speed"),
            text_col("others, measured", "others"),
            text_col("tuned on", "tuned"),
        ],
        list(map(card_line, COMMON)),
    )


class MemoryLine(NamedTuple):
    """The GB that PyTorch reserves at a batch size, by prediction."""

    batch: int
    optimized: float
    float32: float
    baseline: float


def memory_table() -> Table:
    """Returns the memory of GPT-2 124M by the batch size, which is the same on every GPU with
    bfloat16 units. Raises UserError, StackError."""
    predictions = [prediction_of(script, GPT2) for script in ("01", FLOAT32_WEIGHTS, "00")]
    lines = [
        MemoryLine(batch, *(known.needs[batch].reserved / 1024 for known in predictions))
        for batch in MEMORY_BATCHES
    ]
    return Table(
        [
            num_col("batch", "batch"),
            num_col("GB of 01", "optimized", ".1f"),
            num_col("with float32 weights", "float32", ".1f"),
            num_col("of 00", "baseline", ".1f"),
        ],
        lines,
    )
