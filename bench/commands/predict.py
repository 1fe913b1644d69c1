"""Scripts on GPUs that aren't there: does it fit, how fast is it, how long does it take?"""

import argparse
import json
import re
from pathlib import Path

from bench.cards import CARDS, Card, named
from bench.catalogue import EPOCHS, Run, without_doubles
from bench.common import BOOK_TOKENS, UserError, has_option
from bench.measure.plan import Setup
from bench.predict.speed import KINDS
from bench.predict.store import (
    OTHERS,
    Prediction,
    changed,
    fitting,
    predict,
    predict_all,
    span,
)
from bench.report.gpus import in_place
from bench.report.prediction_tables import wanted
from bench.report.tables import Table, markdown, num_col, text_col
from bench.subcommands import Command, above_0, positive
from patches import stack

GPUS = 4  # of 02, as it was published
NOTE = ("All numbers are predictions; how accurate they are: docs/predictions.md."
        f" {OTHERS / 1024:.1f} GB are left for driver and display. On an H100 01 reserved 15 % more"
        " than predicted: where less than that is left, take half the batch.")
NO_COMMUNICATION = "On several GPUs communication takes no time here: a step takes longer."
COUNT = r"(?:^|,) *(\d+) *[xX×] *"  # before the name of a GPU


def tokens(text: str) -> float:
    """Reads an option such as 10e9, 10B or 300m. Raises ValueError."""
    factor = dict(k=1e3, m=1e6, b=1e9).get(text[-1:].lower())
    return factor * above_0(text[:-1]) if factor else above_0(text)


def numbers(text: str) -> list[float]:
    """Reads an option such as 2.7 or 2.7,1.7. Raises ValueError."""
    return [above_0(number) for number in text.split(",")]


class Predict(Command):
    """Predict memory, the largest batch and tok/sec on any GPU."""

    group = "start here"

    def options(self, parser):
        parser.add_argument("--gpu", metavar="NAME", default="all",
                            help="names, or parts of them: 4090 or H100,H200; 8xH100 adds 02 on"
                                 " eight of them; list prints all (default: all)")
        parser.add_argument("--memory", metavar="GB[,GB/S,TFLOPS]", type=numbers,
                            help="a GPU of your own instead, by its memory, and for its speed also"
                                 " by bandwidth and dense bfloat16 rate: 48,696,150")
        parser.add_argument("--model", metavar="NAME", default="gpt2",
                            help="--model of the scripts (default: %(default)s)")
        parser.add_argument("--batch-size", metavar="N", type=positive,
                            help="predict this batch size, per GPU (default: the largest)")
        parser.add_argument("--techniques", metavar="0,5-8",
                            help="the scripts after these techniques, instead of 00 and 01")
        parser.add_argument("--variants", metavar="A,B+C",
                            help="variants besides, each with its measured options or with others:"
                                 " \"step-accumulation --micro-batches 8\"; + joins several")
        parser.add_argument("--tokens", metavar="N", type=tokens,
                            help="how long it takes to train on this many: 10e9, 10B, 300M")
        parser.add_argument("--price", metavar="PER_HOUR", type=numbers,
                            help="of one GPU, in any currency: what those tokens cost; of several"
                                 " GPUs one each: 2.7,1.7")
        parser.add_argument("--why", action="store_true",
                            help="also print what made GPUs slower elsewhere")
        parser.add_argument("--retrace", action="store_true", help="ignore stored predictions")
        parser.add_argument("--all", action="store_true",
                            help="trace all that the pages need where it is missing or the code has"
                                 " changed, with --retrace in any case, into --results-dir")

    def answer(self, setup):
        args = setup.args
        if any(has_option(name, setup.options) for name in ("--batch-size", "--model")):
            raise UserError("--batch-size and --model go before --", 2)
        if args.gpu.strip().lower() == "list":
            return "\n".join(f"{name} ({card.mib / 1024:.0f} GB): {', '.join(card.names)}"
                             for name, card in CARDS.items())
        cards, gpus = cards_of(args)
        smallest = min(card.mib for card in cards.values()) - OTHERS
        if args.all:
            return predict_all(setup.scripts, wanted(), setup.results, smallest, args.retrace)
        runs = runs_of(setup, gpus)
        rows = rows_of(setup, cards, runs, smallest)
        edited = changed(setup.scripts, {
            row["run"].script: row["prediction"] for row in rows}.items())
        return "\n".join([
            markdown(main_table(rows, args)),
            *(why_slow() if args.why else []), NOTE,
            *([NO_COMMUNICATION] if any(run.processes > 1 for run in runs) else []),
            *([f"{edited} --retrace traces it."] if edited else [])])


def cards_of(args: argparse.Namespace) -> tuple[dict[str, Card], int]:
    """Returns the GPUs that are asked for, by their names, and how many 02 has (0: it isn't asked
    for). Raises UserError."""
    counts = set(re.findall(COUNT, args.gpu))
    names = re.sub(COUNT, ",", args.gpu).strip(", ")
    if len(counts) > 1 or "0" in counts:
        raise UserError(f"{args.gpu}: how many GPUs? One number for all of them, from 1", 2)
    gpus = int(max(counts, default=0))
    if args.memory:
        if len(args.memory) not in (1, 3) or names.lower() not in ("", "all"):
            raise UserError("--memory GB or GB,GB/S,TFLOPS describes a GPU of your own: --gpu may"
                            " only give their number, 4x", 2)
        memory, bandwidth, rate = (*args.memory, 0, 0)[:3]
        return {f"{memory:g} GB": Card(
            int(1024 * memory), 8.0, bandwidth, None, rate / 2, rate, rate, 0.8 * rate, None,
            is_measured=False, held=1)}, gpus
    chosen = named(names) if names.lower() != "all" else [
        name for name, card in CARDS.items() if card.capability >= 7]  # as 01 needs
    return {name: CARDS[name] for name in chosen}, gpus


def runs_of(setup: Setup, gpus: int) -> list[Run]:
    """Returns the scripts that are asked for, 02 on so many. Raises UserError, StackError."""
    scripts, args, gpus_of_02 = setup.scripts, setup.args, gpus or GPUS
    runs = [scripts.stage(name, gpus_of_02) for name in ("00", "01", "02")[:3 if gpus else 2]]
    if args.techniques:
        runs = scripts.select(args.techniques, scripts.ladder(gpus_of_02))
    of_02 = {patch.name for patch in stack.load_variants() if patch.base == Path(stack.DDP).stem}
    for text in filter(str.strip, (args.variants or "").split(",")):
        first = re.split(r"[+\s]", text.strip())[0]
        base = scripts.stage("02" if first in of_02 else "01", gpus_of_02)
        runs += scripts.variants(base, dict(gpus=gpus_of_02), names=text)[1:]
    return without_doubles(runs)


def rows_of(setup: Setup, cards: dict[str, Card], runs: list[Run], smallest: int) -> list[dict]:
    """Predicts each script on each GPU. Raises UserError, StackError."""
    args, rows, predictions = setup.args, [], {}
    options = ["--model", args.model, *setup.options]
    prices = args.price or [None]
    if len(prices) not in (1, len(cards)):
        raise UserError(f"--price: {len(prices)} prices for {len(cards)} GPUs,"
                        f" {', '.join(cards)}", 2)
    for (name, card), price in zip(cards.items(), prices * len(cards), strict=False):
        for asked in runs:
            run = asked
            if not has_option("--dtype", setup.options):
                run = in_place(setup.scripts, asked, card)
            if run.name not in predictions:
                predictions[run.name] = predict(
                    setup.scripts, run.script, [*options, *run.options], setup.results, smallest,
                    args.batch_size, args.retrace)
            rows.append(row_of(name, card, run, predictions[run.name], args, price))
    return rows


def row_of(gpu: str, card: Card, run: Run, prediction: Prediction, args: argparse.Namespace,
           price: float | None) -> dict:
    """Returns a script on a GPU, as a row, without what isn't known. Times are of all its GPUs."""
    batch, gpus = fitting(prediction.needs, card.mib, args.batch_size), run.processes
    size = batch or args.batch_size or min(prediction.needs)
    need, room = prediction.needs[size], card.mib - OTHERS
    memory = min(need.reserved, room) if batch else need.least
    row = dict(gpu=gpu, run=run, label=run.label, prediction=prediction, batch=size,
               memory=f"{memory / 1024:.2f} of {room / 1024:.2f}")
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


def main_table(rows: list[dict], args: argparse.Namespace) -> Table:
    """Returns each script on each GPU: does it fit, how fast is it, where does time go?"""
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


def why_slow() -> list[str]:
    """Returns what made GPUs slower elsewhere, a line for each cause."""
    causes = json.loads(Path(__file__).with_name("slow.json").read_text(encoding="utf-8"))
    return ["What slowed GPUs down elsewhere:", *(
        "- {cause}: {effect} ({source}). Check: {check}".format(**cause) for cause in causes), ""]
