"""Find the ladders that there are: the state files that a plan leaves, ladder/ladder.json."""

import json
import sys
from pathlib import Path

from bench.files import REFERENCE, relative

DAMAGE = (OSError, ValueError, LookupError, TypeError, RecursionError)  # what a bad file raises


def read_state(path: Path) -> dict:
    """What a plan has measured. Raises one of DAMAGE where it can't be read."""
    state = json.loads(path.read_text(encoding="utf-8"))
    if state["schema"] != 2:
        raise ValueError(f"schema {state['schema']} is not the present one, 2: measure it anew")
    return state


def latest_ladder(folder: Path) -> dict | None:
    """The finished ladder in `folder`, or else the latest of its reference; None without one.

    One that is damaged is named.
    """
    for place, note in (("", ""), ("reference/*/", " (reference)")):
        ladders = []
        for path in sorted(folder.glob(f"{place}ladder/ladder.json")):
            try:
                ladder = read_state(path)
                ladder["plan"]["machine"]["name"] += note
                if ladder["rows"]:  # they come at the end
                    ladders.append((ladder["time"], ladder))
            except DAMAGE as error:
                print(f"skipped: {relative(path)}, {error!r}", file=sys.stderr)
        if ladders:
            return max(ladders, key=lambda ladder: ladder[0])[1]
    return None


def reference_machine() -> Path:
    """The first folder in results/reference/ with the ladder of a GPU, or else of a CPU."""
    ladders = sorted(REFERENCE.glob("*/ladder/ladder.json"))
    if not ladders:
        raise ValueError("no ladder in results/reference/")
    gpus = [path for path in ladders if read_state(path)["plan"]["machine"]["device"] != "cpu"]
    return (gpus or ladders)[0].parent.parent
