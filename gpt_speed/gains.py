"""What the techniques gained on our model, by gains.json, and what to expect in another script."""

import json
from collections.abc import Iterable, Set
from dataclasses import dataclass
from operator import attrgetter, methodcaller
from pathlib import Path
from statistics import median

FILE = Path(__file__).with_name("gains.json")  # which `measure.py readme` writes
# The share of the step that each technique changes on our model before it is applied, as an audit
# of the ladder's scripts (cpu-demo) shows it on two cores of an AMD EPYC with bfloat16.
OUR_SHARES = {
    "01-causal-mask": 0.006,
    "03-fused-adamw": 0.137,
    "06-native-layers": 0.094,
    "07-flash-attention": 0.077,
    "09-padded-vocabulary": 0.644,
    "11-merged-qkv": 0.024,
    "12-huge-pages": 0.661,
    "13-loss-in-graph": 0.802,
    "14-chunked-head": 0.9,
    "15-kept-memory": 0.215,
}
# Bounds of what is expected, since OUR_SHARES are of one machine: a technique adds at most as much
# time as what it changes took, and leaves at least a twentieth of the step.
MOST_ADDED, LEAST_LEFT = 1.0, 0.05


@dataclass(frozen=True)
class Session:
    """What the techniques gained in one measurement of them all, one after another."""

    name: str  # of the machine, as PyTorch or the system has it
    short_name: str
    device: str  # "cuda" or "cpu"
    dtype: str  # in which its optimized scripts train
    folder: str  # of its results
    gains: dict[str, float]  # times the speed, by the names of patches

    def likeness(self, machine: dict) -> tuple[bool, bool]:
        """Returns a greater value, the more similar its machine is to another one."""
        return self.dtype == machine["dtype"], self.name == machine["name"]

    def tells_of(self, machine: dict) -> bool:
        """Returns whether another machine may have the same gains: one that has the same kind of
        device and, if that is a GPU, trains in the same type."""
        if self.device != machine["device"]:
            return False
        return self.device == "cpu" or self.dtype == machine["dtype"]


def technique_names() -> dict[str, str]:
    """Returns the techniques' names by their patches, in the order of their numbers."""
    return json.loads(FILE.read_text(encoding="utf-8"))["techniques"]


def reference_sessions() -> list[Session]:
    """Returns what was measured on the reference machines."""
    sessions = json.loads(FILE.read_text(encoding="utf-8"))["sessions"]
    return [Session(**session) for session in sessions]


def gains_on(machine: dict, sessions: Iterable[Session]) -> tuple[dict[str, float], str]:
    """Returns the speedup of each technique on the most similar machine, by its patch, as the
    median of that one's sessions; on other machines where it has none; and in words where it was
    measured. A machine has a `device`, a `name` and the `dtype` that it trains in best."""
    alike = [session for session in sessions if session.tells_of(machine)]
    if not alike:
        return {}, ""
    nearest = max(alike, key=methodcaller("likeness", machine))
    machine_of = attrgetter("folder", "name", "dtype")
    own = [session for session in alike if machine_of(session) == machine_of(nearest)]
    gains, all_gains = medians(own), medians(alike)
    where = where_measured(nearest, machine, all_gains.keys() - gains.keys())
    return all_gains | gains, where


def where_measured(nearest: Session, machine: dict, elsewhere: Set[str]) -> str:
    """Says on what machine gains were measured, and those of which patches `elsewhere`."""
    text = f"measured on {nearest.short_name}"
    if not all(nearest.likeness(machine)):
        text += f", another machine than this one, in {nearest.dtype}"
    numbers = [f"#{n}" for n, patch in enumerate(technique_names(), 1) if patch in elsewhere]
    if numbers:
        text += f"; {', '.join(numbers)} on other machines"
    return text


def medians(sessions: list[Session]) -> dict[str, float]:
    """Returns the median over the sessions of each technique's speedup."""
    patches = dict.fromkeys(patch for session in sessions for patch in session.gains)
    return {
        patch: median(session.gains[patch] for session in sessions if patch in session.gains)
        for patch in patches
    }


def expected(technique: str, share: float | None, gain: float | None) -> float | None:
    """Returns the speedup to expect where a technique changes another share of the step than on
    our model, and saves the same part of it, which may be more than all: see checks.Finding.beside.
    What changes the whole step, or a share that isn't known, gains as on our model."""
    if not gain or share is None or technique not in OUR_SHARES:
        return gain
    saved = max(-MOST_ADDED, (1 - 1 / gain) / OUR_SHARES[technique])  # of what it changes
    return 1 / max(LEAST_LEFT, 1 - share * saved)
