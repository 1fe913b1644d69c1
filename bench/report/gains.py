"""What each technique gained on our model."""

import importlib.util
from pathlib import Path
from statistics import median

from bench.common import REFERENCE, short_name, trained_in
from bench.report.tables import found_in


def gains_of(machine: dict, device: str, results: Path) -> tuple[dict[str, float], str]:
    """Returns the speedup of each technique on the ladder of this machine, or else of the most
    similar one, by its patch, as the median of its sessions; of other machines where that one has
    none; and in words where it was measured. Without SciPy, as an audited script's environment may
    be, there are none."""
    if not importlib.util.find_spec("scipy"):
        return {}, ""
    sessions = []  # (how similar the machine is, its folder, where in words, the speedups)
    for path in sorted(results.glob("ladder*.jsonl")) + sorted(REFERENCE.glob("*/ladder*.jsonl")):
        for measured, rows in found_in(path.parent, path.stem):
            other, where = measured.machine, f"measured on {short_name(measured.machine)}"
            similar = trained_in(other) == trained_in(machine), other["name"] == machine["name"]
            if not all(similar):
                where += f", another machine than this one, in {trained_in(other)}"
            gains = {
                str(row.run.script): row.factor
                for row in rows
                if row.factor and len(row.techniques) < 2
            }
            if (
                gains
                and other["device"] == device
                and rows[0].tok_per_sec
                and (similar[0] or device == "cpu")
            ):
                sessions.append((similar, path.parent, where, gains))
    if not sessions:
        return {}, ""
    similar, folder, where, _ = max(sessions, key=lambda session: session[0])
    nearest = medians([gains for *how, _, gains in sessions if how == [similar, folder]])
    others = medians([gains for *_, gains in sessions])
    if elsewhere := ", ".join(f"#{int(patch[:2])}" for patch in others if patch not in nearest):
        where += f"; {elsewhere} on others"
    return others | nearest, where


def medians(sessions: list[dict[str, float]]) -> dict[str, float]:
    """Returns the median over the sessions of each technique's speedup."""
    patches = dict.fromkeys(patch for gains in sessions for patch in gains)
    return {
        patch: median(gains[patch] for gains in sessions if patch in gains) for patch in patches
    }
