"""What the watched step would take on GPUs that aren't there, and what each technique brought over
the one before it: on our ladder, or predicted."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from bench.audit.step import Step
from bench.cards import CARDS, card_of
from bench.catalogue import Scripts
from bench.common import REFERENCE, short_name, trained_in
from bench.predict.speed import Work, margin, missing_precision, seconds
from bench.predict.store import load
from bench.report.tables import Table, found_in, markdown, text_col


def prices(step: Step, count: int, cards: Sequence[str]) -> list[dict]:
    """Predicts the `low` and the `high` throughput of each card, with `count` tokens or samples in
    a step; None where it `lacks` units for a type."""
    work, rows = work_of(step), []
    for name in cards:
        times = seconds(work, CARDS[name])
        expected = count / sum(times.values()) if times else None
        share = margin(CARDS[name], is_compiled(step), times)
        low, high = (expected and expected * (1 + sign * share) for sign in (-1, 1))
        rows.append(dict(card=name, low=low, high=high,
                         lacks=missing_precision(work, CARDS[name])))
    return rows


def is_compiled(step: Step) -> bool:
    return any(op.compiled for op in step.ops)


def work_of(step: Step) -> list[Work]:
    """Returns the work of each kernel. Where PyTorch's optimizers aren't told how, they work on all
    tensors at once on a GPU, and on one after the other on a CPU."""
    alone = sum(each["tensors"] for each in step.facts["optimizers"] if each["own"]
                and None in each["foreach"] and not any(each["fused"])) or 1
    work = []
    for op, kind in step.kinds.items():
        if op.kernel and op.device == step.device:
            precision, is_aligned, flops, size = op.kernel
            kernels = 1 / alone if kind == "optimizer" and step.device == "cpu" else 1
            work.append(Work(kind, step.precision(precision), is_aligned, kernels, flops, size))
    return work


def text(rows: list[dict], step: Step, unit: str) -> str:
    """Writes a table, and what to know of it, in Markdown."""
    types: Counter = Counter()
    for work in work_of(step):
        types[work.precision] += int(work.flops)
    note = ("Predicted from the operators of the watched step, products in"
            f" {types.most_common(1)[0][0]}.")
    if step.device == "cpu":
        note += (" That step ran on a CPU; a script that uses another data type on a GPU has"
                 " another speed there.")
    if is_compiled(step):
        note += " Compiled parts are counted uncompiled: faster there."
    for row in rows:
        row["speed"] = f"no {row['lacks']}" if row["low"] is None else (
            f"at least {rounded(row['low'])}" if is_compiled(step) else
            f"{rounded(row['low'])}–{rounded(row['high'])}")
    table = markdown(Table([text_col("GPU", "card"), text_col(f"{unit}/sec", "speed")], rows,
                           "On GPUs that aren't here, predicted:"))
    return f"{table}\n{note} How far to trust it: docs/predictions.md\n"


def rounded(value: float) -> str:
    """Rounds to three digits, from 10 on."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 10 else f"{value:.1f}"


def gains_of(machine: dict, device: str, results: Path) -> tuple[dict[str, float], str]:
    """Times the speed, by the technique's patch, and where that is from: this machine's own ladder,
    one of the same kind of machine, a prediction for this GPU, or another machine's."""
    candidates: list[tuple] = []  # how near it is, then what is returned
    card = card_of(machine["name"]) if device == "cuda" else None
    if factors := predicted(card) if card else {}:
        candidates.append(((1,), factors, f"predicted for the {card}"))
    for folder in (results, *(path.parent for path in sorted(REFERENCE.glob("*/ladder.jsonl")))):
        for measured, rows in found_in(folder, "ladder"):
            other = measured.machine
            alike = trained_in(other) == trained_in(machine)
            same = alike and other["name"] == machine["name"]
            where = f"measured on {short_name(other)}" + (
                "" if same else f", another machine than this one, in {trained_in(other)}")
            factors = {str(row.run.script): row.factor for row in rows
                       if row.factor and len(row.techniques) < 2}
            if factors and other["device"] == device and rows[0].tok_per_sec and (
                    alike or device == "cpu"):  # a ladder from its start on
                candidates.append(((2 * same, folder == results, alike), factors, where))
    _, gains, where = max(candidates, key=lambda each: each[0], default=((), {}, ""))
    return gains, where


def predicted(card: str) -> dict[str, float]:
    """For a GPU."""
    scripts, speeds = Scripts(), {}
    for rung, run in enumerate(scripts.ladder()):
        prediction = load(scripts, run.script, ["--model", "gpt2"], REFERENCE)
        speeds[str(run.script)] = prediction and prediction.tok_per_sec(
            8 if rung < 10 else 32, CARDS[card])  # as the published experiment
    return {after: speeds[after] / speeds[before] for before, after in pairwise(speeds)
            if speeds[before] and speeds[after]}
