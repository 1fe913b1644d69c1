"""How long a number of tokens takes on GPUs that aren't there, what it costs, and what made others'
GPUs slower than that."""

import argparse
import json
import re
from pathlib import Path

from bench.cards import Card
from bench.common import UserError
from bench.predict.store import fitting, span
from bench.report.tables import Table, num_col, text_col

SUFFIXES = dict(k=1e3, m=1e6, b=1e9)


def tokens(text: str) -> float:
    """As an option: 10e9, 10B, 300m."""
    number, suffix = re.fullmatch(r"(.*?)([kmb]?)", text.strip().lower()).groups()
    return positive(number, text) * SUFFIXES.get(suffix, 1)


def prices(text: str) -> list[float]:
    """As an option: of a GPU per hour, or of several."""
    return [positive(each, text) for each in text.split(",")]


def positive(number: str, text: str) -> float:
    try:
        value = float(number)
    except ValueError:
        value = 0
    if not 0 < value < 1e18:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a number above 0")
    return value


def costs_table(runs: list, known: dict, cards: dict[str, Card], there, args) -> Table:
    """A row for each card and script that fits it: at which batch, how fast, and, if asked for, how
    long args.tokens take, and what they cost. Raises UserError."""
    prices = args.price or [None]
    if len(prices) not in (1, len(cards)):
        raise UserError(f"--price: {len(prices)} prices for {len(cards)} GPUs,"
                        f" {', '.join(cards)}", 2)
    rows = []
    for (name, card), price in zip(cards.items(), prices * len(cards), strict=False):
        for run in runs:
            prediction, gpus = known[there(run, name).name], run.processes
            batch = fitting(prediction.needs, card.mib, args.batch_size)
            row = dict(name=name, label=run.label, batch=batch or "none")
            rows.append(row)
            speeds = batch and card.bandwidth and prediction.speeds(batch, card, gpus)
            if speeds:
                row |= figures_of(speeds, gpus, args.tokens, price)
    columns = [text_col("card", "name"), text_col("script", "label"), num_col("batch", "batch"),
               num_col("tok/sec, thousands", "speed"), num_col("hours", "hours"),
               num_col("cost", "cost")]
    what = f"{args.tokens:,.0f} tokens" if args.tokens else "Speed"
    money = " and ".join(f"{price:g}" for price in args.price or ())
    return Table(columns, rows, f"{what}, on all GPUs of a script" + (
        f", at {money} per GPU and hour" if money else "") + ":")


def figures_of(speeds: tuple[float, float], gpus: int, count: float | None, price: float | None,
               ) -> dict[str, str]:
    """The speed of so many GPUs; where asked for, the hours for `count` tokens, and what they cost
    at a price per GPU and hour."""
    figures = dict(speed=span(*(speed / 1000 for speed in speeds)))
    if count:
        hours = [count / speed / 3600 for speed in reversed(speeds)]
        figures["hours"] = span(*hours)
        if price:
            figures["cost"] = span(*(hour * gpus * price for hour in hours))
    return figures


def why_slow(cards: dict[str, Card]) -> list[str]:
    """What people found where such a card was slower than predicted, a line for each cause."""
    causes = json.loads(Path(__file__).with_name("slow.json").read_text(encoding="utf-8"))["causes"]
    lines: dict[str, None] = {}  # in order
    for name, card in cards.items():
        limit = f" below the {card.power} W of {name}" if card.power and len(cards) <= 4 else ""
        for cause in causes:
            if re.search(cause["on"], name):
                lines[f"- {cause['cause'].format(power=limit)}: {cause['effect']}"
                      f" ({cause['source']}). Check: {cause['check']}"] = None
    return ["What slowed such GPUs down elsewhere:", *lines, ""]
