"""What `predict` prints of scripts on GPUs: which batch fits, how fast, how long, at what price."""

import json
from argparse import Namespace
from functools import partial
from pathlib import Path

from bench.cards import CARDS, Card
from bench.catalogue import EPOCHS, Run
from bench.common import BOOK_TOKENS
from bench.predict.speed import KINDS
from bench.predict.store import OTHERS, Prediction, fitting, largest, span
from bench.report.tables import Column, Table, num_col, text_col

FEW = 4  # GPUs: of more the first line tells how many fit, not how fast each is


def row_of(gpu: str, card: Card, script: str, run: Run, prediction: Prediction, args: Namespace,
           price: float | None) -> dict:
    """Returns a script on a GPU, as a row of the tables, without what isn't known.

    `script` is the label of the one asked for, `run` what takes its place there, or the same. The
    batch is args.batch_size or the largest that fits, and 0 where it doesn't fit. Times are of all
    GPUs of a script; shares are of a step's time.
    """
    batch, gpus = fitting(prediction.needs, card.mib, args.batch_size), run.processes
    row = dict(gpu=gpu, card=card, script=script, run=run, label=run.label, prediction=prediction,
               batch=batch, size=batch or args.batch_size or "none", speed="doesn't fit")
    if batch:
        gb = min(prediction.needs[batch].reserved, card.mib - OTHERS) / 1024
        row |= dict(gb=gb, speed=prediction.speed_range(batch, card) if card.bandwidth else "")
    times = prediction.seconds(batch, card) if batch and card.bandwidth else None
    if times:
        low, high = prediction.speeds(batch, card, gpus)
        row |= dict(
            speed_of_all=prediction.speed_range(batch, card, gpus),
            mfu=prediction.mfu(batch, card), minutes=prediction.minutes(batch, card, gpus),
            shares={kind: seconds / sum(times.values()) for kind, seconds in times.items()})
        if args.tokens:
            hours = args.tokens / high / 3600, args.tokens / low / 3600
            row["hours"] = span(*hours)
            row["cost"] = span(*(gpus * price * hour for hour in hours)) if price else ""
    return row


def first_lines(rows: list[dict], args: Namespace) -> str:
    """Returns what one asks first, of the last script: does it fit, at which batch, how fast."""
    rows = [row for row in rows if row["script"] == rows[-1]["script"]]
    if len(rows) <= FEW:
        return "\n".join(sentence(row, args) for row in rows)
    at_batch = f" at batch {args.batch_size}" if args.batch_size else ""
    fit = sum(row["batch"] > 0 for row in rows)
    return f"{args.model}, {rows[0]['script']}: fits {fit} of {len(rows)} GPUs{at_batch}."


def sentence(row: dict, args: Namespace) -> str:
    needs, room = row["prediction"].needs, row["card"].mib - OTHERS
    batch = row["batch"] or args.batch_size or min(needs)
    text = (f"{row['gpu']}, {args.model}, {row['label']}:"
            f" {'fits' if row['batch'] else 'does not fit'} at batch {batch} (needs"
            f" {needs[batch].least / 1024:.2f} of {room / 1024:.2f} GB")
    most = largest(needs, row["card"].mib)
    text += f"; the largest that fits is {most})" if args.batch_size and most else ")"
    if "shares" in row:
        text += f", {row['speed_of_all']} thousand tok/sec"
    elif row["batch"] and row["speed"]:
        text += f", {row['speed']}"
    if "hours" in row:
        text += f"; {args.tokens:,.0f} tokens take {row['hours']} hours"
    return text + (f" and cost {row['cost']}." if row.get("cost") else ".")


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


def main_table(rows: list[dict]) -> Table:
    """Returns each script on each GPU: its batch, how fast it is, and where its time goes."""
    one_gpu = len({row["gpu"] for row in rows}) == 1
    of_all = any(row["run"].processes > 1 for row in rows)
    shares = [num_col(kind, f"shares.{kind}", ".0%") for kind in KINDS] if one_gpu else []
    return Table([
        text_col("script", "label"), *([] if one_gpu else [text_col("card", "gpu")]),
        num_col("batch", "size"), num_col("GB", "gb", ".1f"),
        num_col("tok/sec, thousands", "speed"),
        *([num_col("of all its GPUs", "speed_of_all")] if of_all else []),
        num_col("MFU", "mfu", ".0%"), num_col(f"minutes of {EPOCHS} epochs", "minutes", ",.1f"),
        num_col("hours", "hours"), num_col("cost", "cost"), *shares], rows,
        f"{rows[0]['gpu'] if one_gpu else 'Each GPU'} at --batch-size, or at the largest power of"
        f" two that fits; epochs of the book, {BOOK_TOKENS:,} tokens"
        f"{'; shares of step time' if one_gpu else ''}:")


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
