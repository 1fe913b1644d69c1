"""The watched step's speed on other GPUs."""

from collections.abc import Sequence

from gpt_speed.audit.step import Step
from gpt_speed.cards import CARDS
from gpt_speed.speed import UNCHECKED, Work, margin, missing_precision, seconds
from gpt_speed.tables import Table, markdown, text_col


def prices(step: Step, count: int, cards: Sequence[str]) -> list[dict]:
    """Predicts the throughput of each card, from `low` to `high` and as text, with `count` tokens
    in a step; None where the card has no units for a type of the script, or is an AMD."""
    work, rows = work_of(step), []
    for name in cards:
        times, low, high = seconds(work, CARDS[name]), None, None
        if times and CARDS[name].is_amd:
            text = UNCHECKED
        elif times:
            error = margin(CARDS[name], step.is_compiled, times)
            low, high = (count / sum(times.values()) * share for share in (1 - error, 1 + error))
            text = (
                f"at least {rounded(low)}"
                if step.is_compiled
                else (f"{rounded(low)}–{rounded(high)}")
            )
        else:
            text = f"no {missing_precision(work, CARDS[name])}"
        rows.append(dict(card=name, low=low, high=high, speed=text))
    return rows


def rounded(speed: float) -> str:
    """Writes three digits, from 10 on."""
    return f"{float(f'{speed:.3g}'):,.0f}" if speed >= 10 else f"{speed:.1f}"


def work_of(step: Step) -> list[Work]:
    """Returns the work of each kernel. An optimizer of PyTorch that isn't fused updates one tensor
    after the other on a CPU, but all at once on a GPU."""
    tensors = (
        sum(
            optimizer["tensors"]
            for optimizer in step.facts["optimizers"]
            if optimizer["own"] and not optimizer["fused"]
        )
        or 1
    )
    work = []
    for op, kind in step.kinds.items():
        if op.kernel and op.device == step.device:
            precision, is_aligned, flops, size = op.kernel
            kernels = 1 / tensors if kind == "optimizer" and step.device == "cpu" else 1
            work.append(Work(kind, step.precision(precision), is_aligned, kernels, flops, size))
    return work


def prices_text(rows: list[dict], step: Step, unit: str) -> str:
    """Writes the prices as a table in Markdown, with what to know of it."""
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
        " compiled parts are counted uncompiled. How far to trust it: docs/predictions.md\n"
    )
