"""What each technique brought over the one before it: on our ladder, or predicted."""

from itertools import pairwise
from pathlib import Path

from bench.catalogue import Scripts
from bench.common import REFERENCE, short_name, trained_in
from bench.predict.speed import CARDS, card_of
from bench.predict.store import load
from bench.report.tables import found_in


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
    for rung, run in enumerate(scripts.rungs()):
        prediction = load(scripts, run.script, ["--model", "gpt2"], REFERENCE)
        speeds[str(run.script)] = prediction and prediction.tok_per_sec(
            8 if rung < 10 else 32, CARDS[card])  # as the published experiment
    return {after: speeds[after] / speeds[before] for before, after in pairwise(speeds)
            if speeds[before] and speeds[after]}
