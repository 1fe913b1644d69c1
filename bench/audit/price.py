"""The watched step's speed on other GPUs, and what each technique gained on our model."""

from collections.abc import Sequence
from pathlib import Path

from bench.audit.step import Step
from bench.cards import CARDS
from bench.common import REFERENCE, short_name, trained_in
from bench.predict.speed import Work, margin, missing_precision, seconds
from bench.report.tables import Table, found_in, markdown, text_col

# The share of the step that each technique changes on our model before it is applied, as an audit
# of the ladder's scripts (cpu-demo) shows it on the CPU of results/reference/amd-epyc-2-cores.
OUR_SHARES = {
    "01-causal-mask": 0.006, "03-fused-adamw": 0.109, "06-native-layers": 0.094,
    "07-flash-attention": 0.077, "09-padded-vocabulary": 0.644, "11-merged-qkv": 0.024,
    "13-loss-in-graph": 0.802, "14-chunked-head": 0.9}


def prices(step: Step, count: int, cards: Sequence[str]) -> list[dict]:
    """Predicts the throughput of each card, from `low` to `high` and as text, with `count` tokens
    in a step; None where the card has no units for a type of the script."""
    work, rows = work_of(step), []
    for name in cards:
        times, low, high = seconds(work, CARDS[name]), None, None
        if times:
            error = margin(CARDS[name], step.is_compiled, times)
            low, high = (count / sum(times.values()) * share for share in (1 - error, 1 + error))
            text = f"at least {rounded(low)}" if step.is_compiled else (
                f"{rounded(low)}–{rounded(high)}")
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
    tensors = sum(optimizer["tensors"] for optimizer in step.facts["optimizers"]
                  if optimizer["own"] and not optimizer["fused"]) or 1
    work = []
    for op, kind in step.kinds.items():
        if op.kernel and op.device == step.device:
            precision, is_aligned, flops, size = op.kernel
            kernels = 1 / tensors if kind == "optimizer" and step.device == "cpu" else 1
            work.append(Work(kind, step.precision(precision), is_aligned, kernels, flops, size))
    return work


def prices_text(rows: list[dict], step: Step, unit: str) -> str:
    """Writes the prices as a table in Markdown, with what to know of it."""
    table = markdown(Table([text_col("GPU", "card"), text_col(f"{unit}/sec", "speed")], rows,
                           "On GPUs that aren't here, predicted:"))
    precision = step.precision(step.type)
    return (f"{table}\nPredicted from the operators of the watched step, matmuls in {precision};"
            " compiled parts are counted uncompiled. How far to trust it: docs/predictions.md\n")


def gains_of(machine: dict, device: str, results: Path) -> tuple[dict[str, float], str]:
    """Returns the speedup of each technique on the ladder of this machine, or else of the most
    similar one, by its patch; and in words where it was measured."""
    best: tuple = ((), {}, "")  # how similar the machine is, and what is returned
    for folder in (results, *(path.parent for path in sorted(REFERENCE.glob("*/ladder.jsonl")))):
        for measured, rows in found_in(folder, "ladder"):
            other, where = measured.machine, f"measured on {short_name(measured.machine)}"
            similar = trained_in(other) == trained_in(machine), other["name"] == machine["name"]
            if not all(similar):
                where += f", another machine than this one, in {trained_in(other)}"
            gains = {str(row.run.script): row.factor for row in rows
                     if row.factor and len(row.techniques) < 2}
            if gains and other["device"] == device and rows[0].tok_per_sec and (
                    similar[0] or device == "cpu") and similar > best[0]:
                best = similar, gains, where
    return best[1:]


def expected(technique: str, share: float, gain: float | None) -> float | None:
    """Returns the speedup to expect where a technique changes another share of the step than on
    our model, and saves the same part of it. What changes the whole step gains as on our model."""
    if not gain or not share or technique not in OUR_SHARES:
        return gain
    saved = (1 - 1 / gain) / OUR_SHARES[technique]
    return 1 / max(0.05, 1 - share * max(-1.0, min(1.0, saved)))
