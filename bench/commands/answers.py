"""What `predict` prints of scripts on GPUs: which batch fits, how fast, how long, at what price."""

import json
from argparse import Namespace
from functools import partial
from pathlib import Path

from bench.cards import CARDS, Card
from bench.catalogue import EPOCHS, Run
from bench.common import BOOK_TOKENS
from bench.predict.speed import KINDS
from bench.predict.store import OTHERS, Prediction, fitting, span
from bench.report.tables import Column, Table, num_col, text_col


def row_of(gpu: str, card: Card, run: Run, prediction: Prediction, args: Namespace,
           price: float | None) -> dict:
    """Returns a script on a GPU, as a row of the tables, without what isn't known.

    The batch is args.batch_size, or the largest that fits. Times are of all GPUs of a script;
    shares are of a step's time.
    """
    batch, gpus = fitting(prediction.needs, card.mib, args.batch_size), run.processes
    size = batch or args.batch_size or min(prediction.needs)
    need, room = prediction.needs[size], card.mib - OTHERS
    memory = min(need.reserved, room) if batch else need.least
    row = dict(gpu=gpu, run=run, label=run.label, prediction=prediction, batch=size,
               memory=f"{memory / 1024:.1f} of {room / 1024:.1f}")
    if not batch or not card.bandwidth:
        return row | dict(speed="" if batch else "doesn't fit")
    row["speed"] = prediction.speed_range(batch, card)
    times, speeds = prediction.seconds(batch, card), prediction.speeds(batch, card, gpus)
    if times and speeds:
        row |= dict(
            speed_of_all=prediction.speed_range(batch, card, gpus) if gpus > 1 else "",
            mfu=prediction.mfu(batch, card), minutes=prediction.minutes(batch, card, gpus),
            shares={kind: seconds / sum(times.values()) for kind, seconds in times.items()})
        if args.tokens:
            hours = [args.tokens / speed / 3600 for speed in reversed(speeds)]
            row["hours"] = span(*hours)
            row["cost"] = span(*(gpus * price * hour for hour in hours)) if price else ""
    return row


def memory_table(rows: list[dict], args: Namespace) -> Table:
    """Returns what each script reserves at the published batch sizes and the one asked for."""
    def reserved(batch: int, row: dict) -> str:
        need = row["prediction"].needs.get(batch)
        return f"{need.reserved / 1024:.2f}" if need else ""

    columns = [Column(f"batch {batch}", partial(reserved, batch))
               for batch in sorted({8, 32, args.batch_size or 8})]
    return Table([text_col("script", "label"), *columns],
                 list({row["run"].name: row for row in rows}.values()),
                 f"Predicted reserved memory of {args.model}, GB (1024³ bytes) per GPU:")


def main_table(rows: list[dict], args: Namespace) -> Table:
    """Returns each script on each GPU: does it fit, how fast is it, and where does its time go."""
    gpus = list(dict.fromkeys(row["gpu"] for row in rows))
    columns = [text_col("script", "label"), text_col("card", "gpu"), num_col("batch", "batch"),
               num_col("GB", "memory"), num_col("tok/sec, thousands", "speed"),
               num_col("of all its GPUs", "speed_of_all"), num_col("MFU", "mfu", ".0%"),
               num_col(f"minutes of {EPOCHS} epochs", "minutes", ",.1f"),
               num_col("hours", "hours"), num_col("cost", "cost")]
    if len(gpus) == 1:
        columns += [num_col(kind, f"shares.{kind}", ".0%") for kind in KINDS]
    place = gpus[0] if len(gpus) == 1 else f"{len(gpus)} GPUs"
    batch = args.batch_size or "the largest power of two that fits"
    return Table(columns, rows, f"{args.model} on {place}; batch size: {batch}; epochs: of the"
                                f" book, {BOOK_TOKENS:,} tokens")


def notes(rows: list[dict]) -> list[str]:
    """Returns what to know of the tables, a line each."""
    lines = ["All numbers are predictions; how accurate they are: docs/predictions.md."
             f" {OTHERS / 1024:.1f} GB are left for driver and display. On an H100 01 reserved 15 %"
             " more than predicted: where less than that is left, take half the batch."]
    if any(row["run"].processes > 1 for row in rows):
        lines.append("On several GPUs communication takes no time here: a step takes longer.")
    return lines


def gpus_list() -> str:
    """Returns every GPU that is known, a line each, with its other names."""
    return "\n".join(f"{name} ({card.mib / 1024:.0f} GB): {', '.join(card.names)}"
                     for name, card in CARDS.items())


def why_slow() -> list[str]:
    """Returns what made GPUs slower elsewhere, a line for each cause."""
    causes = json.loads(Path(__file__).with_name("slow.json").read_text(encoding="utf-8"))
    return ["What slowed GPUs down elsewhere:", *(
        "- {cause}: {effect} ({source}). Check: {check}".format(**cause) for cause in causes), ""]
