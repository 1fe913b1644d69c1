"""What each technique and each variant gained, and where that was measured."""

import importlib.util
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from bench.analysis.folders import every_row_in, has_gpu, machines, sessions_in
from bench.analysis.rows import Row
from bench.common import short_name, trained_in


@dataclass(frozen=True)
class Gain:
    """What a technique gains on a machine: times the speed and times the memory, over the script
    without it."""

    machine: str
    factor: float
    memory: float | None
    source: str = "measured"  # or "predicted", or "published"
    significance: str | None = None
    interval: tuple[float, float] | None = None
    by_medians: bool = False  # of the speeds, since one run distorts the mean

    @property
    def precision(self) -> float:
        """The lower end of the interval over the upper one; 0 without an interval."""
        return self.interval[0] / self.interval[1] if self.interval else 0.0


def best(gains: Iterable[Gain], prefer: Sequence[str] = ("measured", "predicted")) -> Gain | None:
    """Returns of several gains the one with the narrowest interval, of the source that is
    preferred; None without any."""
    gains = list(gains)
    for source in prefer:
        # The last one of equals: machines are sorted by name.
        if own := sorted(
            (gain for gain in gains if gain.source == source), key=lambda gain: gain.precision
        ):
            return own[-1]
    return None


def gain_of(row: Row) -> Gain:
    """Returns what a row gained over its reference."""
    comparison = row.speedup()
    return Gain(
        machine=re.sub("^(AMD|Intel) ", "", short_name(row.measured.machine)),
        factor=comparison.factor,
        memory=row.memory_factor,
        significance=comparison.significance,
        interval=comparison.interval,
    )


def without_distortion(row: Row) -> Gain:
    """Returns what a row gained: where one run distorts the mean, by medians."""
    gain = gain_of(row)
    if not row.speedup().is_wide:
        return gain
    return replace(gain, factor=row.tok_per_sec / row.reference.tok_per_sec, by_medians=True)


def is_comparable(row: Row) -> bool:
    """Returns whether a row has a speedup, with the model that its machine trains by default."""
    return bool(row.factor) and "--model" not in row.measured.options


# ---- On the reference machines


def technique_gains() -> dict[str, list[Gain]]:
    """Returns by the names of their patches what techniques gained on each machine that trains in
    bfloat16, those with a GPU first."""
    rows = [
        row
        for folder in machines()
        for row in every_row_in(folder, "ladder")
        if is_comparable(row)
        and len(row.techniques) < 2
        and trained_in(row.measured.machine) == "bfloat16"
    ]
    gains: dict[str, list[Gain]] = {}
    for row in sorted(rows, key=has_gpu, reverse=True):
        gains.setdefault(str(row.run.script), []).append(without_distortion(row))
    return gains


def variant_rows() -> list[Row]:
    """Returns what variants gained on each machine, but no row that has a wide interval and isn't
    significant."""
    return [
        row
        for folder in machines()
        for row in every_row_in(folder, "variants")
        if is_comparable(row) and row.label.startswith(str(row.run.script)) and is_certain(row)
    ]


def is_certain(row: Row) -> bool:
    """Returns whether a speedup is significant, or is known well enough to be shown."""
    return row.significance in ("faster", "slower") or not row.speedup().is_wide


# ---- On a machine like this one


@dataclass(frozen=True)
class Session:
    """What the techniques gained in one measurement of a ladder."""

    folder: Path
    same_type: bool  # as the machine that is asked for trains in
    same_name: bool
    where: str  # in words
    gains: dict[str, float]  # times the speed, by the names of patches

    @property
    def likeness(self) -> tuple[bool, bool]:
        """The greater, the more similar its machine is."""
        return self.same_type, self.same_name


def gains_of(machine: dict, device: str, results: Path) -> tuple[dict[str, float], str]:
    """Returns the speedup of each technique on the ladder of this machine, or else of the most
    similar one, by its patch, as the median of its sessions; of other machines where that one has
    none; and in words where it was measured. Without SciPy, as an audited script's environment may
    be, there are none."""
    if not importlib.util.find_spec("scipy"):
        return {}, ""
    sessions = sessions_like(machine, device, results)
    if not sessions:
        return {}, ""
    nearest = max(sessions, key=lambda session: session.likeness)
    own = [
        session.gains
        for session in sessions
        if (session.likeness, session.folder) == (nearest.likeness, nearest.folder)
    ]
    gains, others = medians(own), medians([session.gains for session in sessions])
    where = nearest.where
    if elsewhere := ", ".join(f"#{int(patch[:2])}" for patch in others if patch not in gains):
        where += f"; {elsewhere} on others"
    return others | gains, where


def sessions_like(machine: dict, device: str, results: Path) -> list[Session]:
    """Returns the ladders of a folder and of the reference machines that tell of a machine: those
    of its device, and of GPUs those that train in its type."""
    sessions = [
        session_of(folder, rows, machine)
        for folder in (results, *machines())
        for measured, rows in sessions_in(folder, "ladder")
        if measured.machine["device"] == device and rows[0].tok_per_sec
    ]
    if device != "cpu":
        sessions = [session for session in sessions if session.same_type]
    return [session for session in sessions if session.gains]


def session_of(folder: Path, rows: list[Row], machine: dict) -> Session:
    """Returns what a ladder's rows tell of a machine."""
    other = rows[0].measured.machine
    same_type = trained_in(other) == trained_in(machine)
    same_name = other["name"] == machine["name"]
    where = f"measured on {short_name(other)}"
    if not (same_type and same_name):
        where += f", another machine than this one, in {trained_in(other)}"
    gains = {
        str(row.run.script): row.factor for row in rows if row.factor and len(row.techniques) < 2
    }
    return Session(folder, same_type, same_name, where, gains)


def medians(sessions: list[dict[str, float]]) -> dict[str, float]:
    """Returns the median over the sessions of each technique's speedup."""
    patches = dict.fromkeys(patch for gains in sessions for patch in gains)
    return {
        patch: median(gains[patch] for gains in sessions if patch in gains) for patch in patches
    }
