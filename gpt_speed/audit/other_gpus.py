"""The watched step's speed on other GPUs."""

from collections.abc import Sequence

from gpt_speed.audit.step import Step
from gpt_speed.cards import CARDS, Card
from gpt_speed.speed import UNCHECKED, Work, margin, missing_precision, seconds
from gpt_speed.tables import Table, markdown, text_col


def speeds_on(cards: Sequence[str], step: Step, count: int) -> list[dict]:
    """Predicts the throughput of each card, from `low` to `high` and as a text `speed`, with
    `count` tokens in a step; `low` and `high` are None where the card has no units for a type of
    the script, or is an AMD."""
    work = work_of(step)
    return [dict(card=card, **speed_on(CARDS[card], work, step, count)) for card in cards]


def speed_on(card: Card, work: list[Work], step: Step, count: int) -> dict:
    """Predicts the throughput of one card; see speeds_on."""
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


def speeds_text(rows: list[dict], step: Step, unit: str) -> str:
    """Writes the speeds, in a unit a second, as a table in Markdown, with what to know of it."""
    table = markdown(
        Table(
            [text_col("GPU", "card"), text_col(f"{unit}/sec", "speed")],
            rows,
            "On GPUs that aren't here, predicted:",
        )
    )
    precision = step.precision(step.type)
    return (
        f"{table}\nPredicted from the operators of the watched step, matmuls in {precision};"
        " compiled parts are counted uncompiled. How far to trust it: docs/predictions.md of"
        " gpt-speed\n"
    )
