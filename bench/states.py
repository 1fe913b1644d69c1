"""The state file of a plan, such as ladder/ladder.json: its results and, at the end, its rows."""

import json
import sys
from pathlib import Path

from bench.files import REFERENCE, relative

SCHEMA = 2
RESULT = {"name", "round", "seed", "record", "error", "seconds"}


def read_state(path: Path) -> dict:
    """What a plan has measured so far. Raises ValueError, with the reason, for a bad file."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        if state["schema"] != SCHEMA:
            raise ValueError(f"schema {state['schema']} is not the present one, {SCHEMA}")
        str(state["time"]), dict(state["plan"]["machine"])
        if not all(isinstance(flops, float) for flops in dict(state["matmul_peak"]).values()):
            raise ValueError("matmul_peak holds something else than figures")
        for result in state["results"]:
            if not RESULT <= result.keys() or not isinstance(result["seconds"], int | float):
                raise ValueError("a result lacks a field")
            hash((result["name"], result["round"], result["seed"]))
        if not all(isinstance(row, dict) and row for row in state["rows"]):
            raise ValueError("a row has no figures")
        return state
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{relative(path)}: {error!r}")


def earlier_state(path: Path) -> dict:
    """What an earlier start has left, or {} where there is none that can be read."""
    try:
        return read_state(path)
    except ValueError:
        return {}


def finished(name: str, folder: Path) -> tuple[dict, Path] | None:
    """(the state of a finished plan called `name` in `folder`, the folder that it lies in); None
    without one. One that is damaged is named."""
    path = folder / name / f"{name}.json"
    if path.exists():
        try:
            state = read_state(path)
            if state["rows"]:  # they come at the end
                return state, path.parent
        except ValueError as error:
            print(f"skipped: {error}", file=sys.stderr)
    return None


def reference_machine() -> Path:
    """The first folder in results/reference/ with the ladder of a GPU, or else of a CPU."""
    ladders = sorted(REFERENCE.glob("*/ladder/ladder.json"))
    if not ladders:
        raise ValueError("no ladder in results/reference/")
    gpus = [path for path in ladders if read_state(path)["plan"]["machine"]["device"] != "cpu"]
    return (gpus or ladders)[0].parent.parent
