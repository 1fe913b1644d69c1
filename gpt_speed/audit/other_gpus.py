"""The watched step's speed and memory on other GPUs."""

from collections.abc import Sequence
from typing import NamedTuple

from gpt_speed.audit.step import Step
from gpt_speed.audit.translate import ABOUT, AT_LEAST, AT_MOST, Translation, translated
from gpt_speed.cards import CARDS, Card
from gpt_speed.common import listed, memory_text
from gpt_speed.memory import MIB, OTHERS, DoesNotFit, Event, simulate, workspace
from gpt_speed.speed import UNCHECKED, Work, margin, missing_precision, seconds
from gpt_speed.tables import Column, Table, markdown, text_col


class OtherGpus(NamedTuple):
    """What an audit says of GPUs that aren't here."""

    rows: list[dict]  # of each card, as row_on returns it
    text: str  # in Markdown


def on_other_gpus(
    cards: Sequence[str], step: Step, tokens: int, larger: "LargerBatch | None" = None
) -> OtherGpus:
    """Predicts what a step takes on each card, with so many `tokens` in it (0: not known), and its
    memory at a larger batch size."""
    if not cards:
        return OtherGpus([], "")
    work, translation = work_of(step), translated(step)
    speeds = {name: speed_on(CARDS[name], work, step, tokens or 1) for name in cards}
    rows = [
        dict(card=name, **speeds[name], memory=memory_on(CARDS[name], translation))
        for name in cards
    ]
    if larger:
        on_gpu = translated(larger.step)
        for row in rows:
            row["larger"] = dict(batch=larger.batch, **memory_on(CARDS[row["card"]], on_gpu))
    return OtherGpus(rows, text_of(rows, step, translation, "tok" if tokens else "steps"))


class LargerBatch(NamedTuple):
    """The watched step at a larger batch size."""

    batch: int
    step: Step


def memory_on(card: Card, translation: Translation) -> dict:
    """Returns the bytes that PyTorch `reserved` on a card in steps like the watched one, and those
    of its tensors, `allocated`, at the peak; the `room` that there is; how to read it, as
    Translation.`bound`; whether it `fits` (None where that isn't known); and all that as a
    `text`."""
    room, bound = (card.mib - OTHERS) * MIB, translation.bound
    space = workspace(card.capability, card.is_amd)
    events = translation.memory.events(space, space)
    allocator = simulate(events)
    fits: bool | None = can_run(events, room)
    if bound == ABOUT or bound == (AT_LEAST if fits else AT_MOST):
        fits = None
    text = " ".join(filter(None, (bound, memory_text(allocator.reserved, room))))
    if fits is False:
        text += ": too much"
    return dict(
        reserved=allocator.reserved,
        allocated=allocator.peak_allocated,
        room=room,
        bound=bound,
        fits=fits,
        text=text,
    )


def can_run(events: list[Event], capacity: int) -> bool:
    """Tells whether a card with so many bytes has room for the events."""
    try:
        simulate(events, capacity)
    except DoesNotFit:
        return False
    return True


def speed_on(card: Card, work: list[Work], step: Step, count: int) -> dict:
    """Predicts the throughput of a card, from `low` to `high` and as a text `speed`, with `count`
    tokens in a step; `low` and `high` are None where the card has no units for a type of the
    script, or is an AMD."""
    times = seconds(work, card)
    if times is None:
        return dict(low=None, high=None, speed=f"no {missing_precision(work, card)}")
    if card.is_amd:
        return dict(low=None, high=None, speed=UNCHECKED)
    speed, error = count / sum(times.values()), margin(card, step.is_compiled, times)
    low, high = speed * (1 - error), speed * (1 + error)
    if step.is_compiled:  # what is watched runs uncompiled
        return dict(low=low, high=high, speed=f"at least {rounded(low)}")
    return dict(low=low, high=high, speed=f"{rounded(low)}–{rounded(high)}")


def rounded(speed: float) -> str:
    """Writes three digits, from 10 on."""
    return f"{float(f'{speed:.3g}'):,.0f}" if speed >= 10 else f"{speed:.1f}"


def work_of(step: Step) -> list[Work]:
    """Returns the work of each kernel."""
    work = []
    for op, kind in step.kinds.items():
        if op.kernel and op.device == step.device:
            precision, is_aligned, flops, size = op.kernel
            kernels = kernels_of_update(step) if kind == "optimizer" else 1
            work.append(Work(kind, step.precision(precision), is_aligned, kernels, flops, size))
    return work


def kernels_of_update(step: Step) -> float:
    """Returns how many kernels of a GPU stand for one operator of an update. An optimizer of
    PyTorch that isn't fused updates one tensor after the other on a CPU, but all at once on a
    GPU."""
    if step.device != "cpu":
        return 1
    one_by_one = [
        optimizer["tensors"]
        for optimizer in step.facts["optimizers"]
        if optimizer["own"] and not optimizer["fused"]
    ]
    return 1 / (sum(one_by_one) or 1)


def text_of(rows: list[dict], step: Step, translation: Translation, unit: str) -> str:
    """Writes what a step takes on the cards, its speed in a `unit` a second, as a table in
    Markdown, with what to know of it."""
    columns = [
        text_col("GPU", "card"),
        text_col(f"{unit}/sec", "speed"),
        Column("memory needed", lambda row: row["memory"]["text"], left=True),
    ]
    if "larger" in rows[0]:
        heading = f"at batch size {rows[0]['larger']['batch']:,}"
        columns.append(Column(heading, lambda row: row["larger"]["text"], left=True))
    table = markdown(Table(columns, rows, "On GPUs that aren't here, predicted:"))
    return (
        f"{table}\nSpeed: from the operators of the watched step, matmuls in"
        f" {step.precision(step.type)}; compiled parts are counted uncompiled. How far to trust"
        f" it: docs/predictions.md of gpt-speed\n\n{memory_notes(translation)}\n"
    )


def memory_notes(translation: Translation) -> str:
    """Tells what the memory is of, and what was translated to a GPU."""
    sentences = [
        "Memory: what PyTorch reserves in steps like the watched one, without evaluations; of each"
        f" GPU {OTHERS / 1024:.1f} GB are left for driver and display."
    ]
    if translation.changes:
        sentences.append(f"As on a GPU: {listed(translation.changes)}.")
    if translation.bounds:
        sentences.append(
            f'Not as on a GPU, so that it is "{translation.bound}": {listed(translation.bounds)}.'
        )
    return " ".join(sentences)
