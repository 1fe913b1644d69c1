"""The watched step on GPUs that aren't there, by bench.predict's model of time and memory."""

from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from bench.audit.step import Step
from bench.predict.allocator import WORKSPACE, Need, need
from bench.predict.speed import CARDS, Work, lacking, range_of, seconds
from bench.predict.store import OTHERS
from bench.report.tables import Column, Table, markdown


class Price(NamedTuple):
    card: str
    low: float | None  # tokens (samples, where there are none) per second; None: lacks units for it
    high: float | None
    lacks: str | None  # the precision for which it has no units
    reserved: int | None  # MiB; None: can't be told
    fits: bool | None


def prices(step: Step, each_step: int, cards: Sequence[str]) -> list[Price]:
    """On each card, for so many tokens or samples in a step."""
    work, found = work_of(step), []
    reserved = None if is_compiled(step) else memory_of(step)
    for name in cards:
        card, times = CARDS[name], seconds(work, CARDS[name])
        expected = each_step / sum(times.values()) if times else None
        share = range_of(card, is_compiled(step), times)
        low, high = (expected and expected * (1 + sign * share) for sign in (-1, 1))
        found.append(Price(name, low, high, None if times else lacking(work, card),
                           reserved and reserved.reserved,
                           reserved and reserved.least <= card.mib - OTHERS))
    return found


def is_compiled(step: Step) -> bool:
    return any(op.compiled for op in step.ops)


def work_of(step: Step) -> list[Work]:
    """That of each kernel. Where PyTorch's optimizers aren't told how, they work on all tensors at
    once on a GPU, and on one after the other on a CPU."""
    alone = sum(each["tensors"] for each in step.facts["optimizers"] if each["own"]
                and None in each["foreach"] and not any(each["fused"])) or 1
    found = []
    for op, kind in step.kinds.items():
        if op.kernel and op.device == step.device:
            precision, is_aligned, flops, size = op.kernel
            kernels = 1 / alone if kind == "optimizer" and step.device == "cpu" else 1
            found.append(Work(kind, step.precision(precision), is_aligned, kernels, flops, size))
    return found


def memory_of(step: Step) -> Need:
    """What the step makes and releases, beside what was there before it."""
    sizes = [each for each in step.facts["storages"] if each >= 0]
    there = [number for number in range(len(sizes)) if number in step.older]
    made = [number for number in range(len(sizes)) if number not in step.older]
    places = {number: place for place, number in enumerate([*there, "workspace", *made], 1)}
    numbers = count()
    return need([*(sizes[number] for number in there), WORKSPACE, *(
        each if each >= 0 else -places[-1 - each] for each in step.facts["storages"]
        if each < 0 or next(numbers) not in step.older)])


def text(found: list[Price], step: Step, unit: str) -> str:
    """A table, and what to know of it, in Markdown."""
    types: Counter = Counter()
    for each in work_of(step):
        types[each.precision] += int(each.flops)
    note = ("Predicted from the operators of the watched step, products in"
            f" {types.most_common(1)[0][0]}.")
    if step.device == "cpu":
        note += (" That step ran on a CPU; a script that uses another data type on a GPU has"
                 " another speed there.")
    if is_compiled(step):
        note += " Compiled parts are counted uncompiled: faster there, their memory unknown."

    def speed(row: Price) -> str:
        if not row.low:
            return f"no {row.lacks}"
        return f"at least {rounded(row.low)}" if is_compiled(step) else (
            f"{rounded(row.low)}–{rounded(row.high)}")

    def memory(row: Price) -> str:
        return "can't tell" if row.reserved is None else "doesn't fit: " * (not row.fits) + (
            f"{row.reserved / 1024:.1f} of {CARDS[row.card].mib / 1024:.0f}")

    table = markdown(Table([
        Column("GPU", lambda row: row.card, True), Column(f"{unit}/sec", speed),
        Column("memory, GB", memory)], found, "On GPUs that aren't here, predicted:"))
    return f"{table}\n{note} How far to trust it: docs/predictions.md\n"


def rounded(value: float) -> str:
    """To three digits, from 10 on."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 10 else f"{value:.1f}"
