"""How long a number of tokens takes on GPUs that aren't there, what it costs, and what made others'
GPUs slower than that."""

import argparse
import json
import re
from functools import cache, partial
from pathlib import Path

from bench.common import UserError
from bench.predict.speed import FILE, Card
from bench.predict.store import fitting, span
from bench.report.tables import Column, Table

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
    each_price = args.price or [None]
    if len(each_price) not in (1, len(cards)):
        raise UserError(f"--price: {len(each_price)} prices for {len(cards)} GPUs,"
                        f" {', '.join(cards)}", 2)
    rows: list[dict] = []
    for (name, card), price in zip(cards.items(), each_price * len(cards), strict=False):
        for place, run in enumerate(runs):
            prediction = known[there(run, name).name]
            batch = fitting(prediction.needs, card.mib, args.batch_size)
            rows.append(dict(name=name, run=run, place=place, batch=batch, price=price, speeds=(
                prediction.speeds(batch, card, run.processes)
                if batch and card.bandwidth else None)))
    first = {row["place"]: row["speeds"] for row in reversed(rows)}  # of the first card

    def hours(row: dict, count: float) -> tuple[float, float]:
        low, high = row["speeds"]
        return count / high / 3600, count / low / 3600

    def times(row: dict) -> str:
        one = first[row["place"]]
        return f"{sum(row['speeds']) / sum(one):.2f}" if row["speeds"] and one else ""

    def of_speed(write, row: dict) -> str:
        return write(row) if row["speeds"] else ""

    def cost(row: dict) -> str:
        return span(*(each * row["run"].processes * row["price"]
                      for each in hours(row, args.tokens)))

    def per_money(row: dict) -> str:
        low, high = row["speeds"]
        return span(*(each * 3600 / 1e6 / (row["run"].processes * row["price"])
                      for each in (low, high)))

    columns = [Column("card", lambda row: row["name"], True),
               Column("script", lambda row: row["run"].label, True),
               Column("batch", lambda row: str(row["batch"] or "none")),
               Column("tok/sec, thousands", partial(of_speed, lambda row: span(
                   *(each / 1000 for each in row["speeds"]))))]
    if len(cards) > 1:
        columns.append(Column(f"× {next(iter(cards))}", times))
    if args.tokens:
        columns.append(Column("hours", partial(of_speed, lambda row: span(
            *hours(row, args.tokens)))))
    if args.tokens and args.price:
        columns.append(Column("cost", partial(of_speed, cost)))
    if args.price:
        columns.append(Column("million tokens per unit of money", partial(of_speed, per_money)))
    what = f"{args.tokens:,.0f} tokens" if args.tokens else "Speed"
    money = " and ".join(f"{price:g}" for price in each_price) if args.price else ""
    return Table(columns, rows, f"{what}, on all GPUs of a script" + (
        f", at {money} per GPU and hour" if money else "") + ":")


# ---- Why slow ------------------------------------------------------------------------------------


@cache
def causes() -> list[dict]:
    return json.loads(Path(FILE).with_name("slow.json").read_text(encoding="utf-8"))["causes"]


def why_slow(cards: dict[str, Card]) -> list[str]:
    """What people found where such a card was slower than predicted, a line each."""
    lines: dict[str, None] = {}  # each once
    for name, card in cards.items():
        for each in causes():
            if re.search(each["on"], name):
                limit = f" below the {card.power} W of {name}" if card.power else ""
                lines[f"- {each['cause'].format(power=limit)}: {each['effect']}"
                      f" ({each['source']}). Check: {each['check']}"] = None
    return [f"Why slow? What people found where a GPU like {' or '.join(cards)} trained slower:",
            *lines, ""]
