"""What each technique brought over the one before it: on our ladder, or predicted."""

from pathlib import Path

from bench.catalogue import Scripts
from bench.common import REFERENCE, short_name, trained_in
from bench.predict.speed import CARDS, card_of
from bench.predict.store import kept
from bench.report.tables import found_in

BATCHES = 8, 32  # of the published experiment, before and from the technique 10 on


def gains_of(facts: dict, device: str, results: Path) -> tuple[dict[str, float], str]:
    """Times the speed, by the technique's patch, and where that is from: this machine's own ladder,
    one of the same kind of machine, a prediction for this GPU, or another machine's."""
    kind = "bfloat16" if facts["bfloat16"] else "float32"
    predictions = predicted(facts["name"]) if device == "cuda" else {}
    best = 1.0, predictions, f"predicted for the {card_of(facts['name'])}" if predictions else ""
    for folder in (results, *(path.parent for path in sorted(REFERENCE.glob("*/ladder.jsonl")))):
        for measured, rows in found_in(folder, "ladder"):
            machine = measured.machine
            alike = trained_in(machine) == kind
            same = machine["name"] == facts["name"] and alike
            rank = 2 * same + (folder == results) + (not predictions) * (1 + alike / 2)
            if machine["device"] != device or rank <= best[0] - (not best[1]):
                continue
            where = f"measured on {short_name(machine)}"
            if not same:
                where += f", another machine than this one, in {trained_in(machine)}"
            best = rank, {str(row.run.script): row.factor for row in rows if row.factor}, where
    return best[1:]


def predicted(name: str) -> dict[str, float]:
    """For a GPU by PyTorch's name of it; {} where it isn't known."""
    card, scripts, factors, before = card_of(name), Scripts(), {}, None
    for run in scripts.rungs() if card else []:
        known = kept(scripts, run.script, ["--model", "gpt2"], REFERENCE)
        speed = known and run.rung is not None and known.tok_per_sec(
            BATCHES[run.rung >= 10], CARDS[card])
        if speed and before:
            factors[str(run.script)] = speed / before
        before = speed
    return factors
