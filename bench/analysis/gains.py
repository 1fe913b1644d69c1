"""What each technique and each variant gained, and where that was measured."""

import importlib.util
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from statistics import median

from bench.analysis.folders import every_row_in, has_gpu, machines, sessions_in
from bench.analysis.rows import Row
from bench.common import short_name, trained_in

TYPE = "bfloat16"  # in which a machine trains whose gains the techniques' page shows


@dataclass(frozen=True)
class Gain:
    """What a technique gains on a machine: times the speed and times the memory, over the script
    without it."""

    machine: str
    factor: float
    memory: float | None
    device: str = "cuda"  # or "cpu"
    source: str = "measured"  # or "predicted", or "published"
    significance: str | None = None
    interval: tuple[float, float] | None = None
    is_wide: bool = False  # the interval: the factor is marked, and not ranked
    together_with: tuple[int, ...] = ()  # the numbers of other techniques whose gain is in it

    @property
    def precision(self) -> float:
        """The lower end of the interval over the upper one; 0 without an interval."""
        return self.interval[0] / self.interval[1] if self.interval else 0.0


def best(gains: Iterable[Gain], prefer: Sequence[str] = ("measured", "predicted")) -> Gain | None:
    """Returns of several gains the one with the narrowest interval, of the source that is
    preferred; None without any."""
    gains = list(gains)
    for source in prefer:
        own = [gain for gain in gains if gain.source == source]
        if own:
            # Of equals the last one: machines are sorted by name.
            return max(reversed(own), key=attrgetter("precision"))
    return None


def gain_of(row: Row) -> Gain:
    """Returns what a row gained over its reference. Raises ValueError where it has no speedup."""
    comparison = row.speedup()
    if comparison.factor is None:
        raise ValueError(f"{row.label} has no speedup")
    return Gain(
        machine=re.sub("^(AMD|Intel) ", "", short_name(row.measured.machine)),
        factor=comparison.factor,
        memory=row.memory_factor,
        device=row.measured.machine["device"],
        significance=comparison.significance,
        interval=comparison.interval,
        is_wide=comparison.is_wide,
    )


def is_comparable(row: Row) -> bool:
    """Returns whether a row has a speedup, with the model that its machine trains by default."""
    return bool(row.factor) and "--model" not in row.measured.options


# ---- On the reference machines


def technique_gains() -> dict[str, list[Gain]]:
    """Returns by the names of their patches what techniques gained on each machine that trains in
    bfloat16, those with a GPU first."""
    gains: dict[str, list[Gain]] = {}
    for row in sorted(technique_rows(), key=has_gpu, reverse=True):
        for part in (*row.joined, row):  # which have one gain together
            others = tuple(other for other in row.techniques if other != part.run.number)
            gain = replace(gain_of(row), together_with=others)
            gains.setdefault(str(part.run.script), []).append(gain)
    return gains


def technique_rows() -> list[Row]:
    """Returns the rows of the ladders in bfloat16 whose gain is that of one step."""
    return [
        row
        for folder in machines()
        for row in every_row_in(folder, "ladder")
        if trained_in(row.measured.machine) == TYPE and is_comparable(row) and is_of_one_step(row)
    ]


def is_of_one_step(row: Row) -> bool:
    """Returns whether a gain is that of one technique, or of those that are printed as one."""
    return len(row.techniques) < 2 or bool(row.joined)


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
    machine: dict
    gains: dict[str, float]  # times the speed, by the names of patches

    def likeness_to(self, machine: dict) -> tuple[bool, bool]:
        """Returns whether it is of a machine that trains in the same type, and of the same name:
        the greater, the more similar."""
        same_type = trained_in(self.machine) == trained_in(machine)
        return same_type, self.machine["name"] == machine["name"]

    def place_for(self, machine: dict) -> str:
        """Returns in words where it was measured, for a reader with such a machine."""
        place = f"measured on {short_name(self.machine)}"
        if all(self.likeness_to(machine)):
            return place
        return f"{place}, another machine than this one, in {trained_in(self.machine)}"


def gains_of(machine: dict, device: str, results: Path) -> tuple[dict[str, float], str]:
    """Returns the speedup of each technique on the ladder of this machine, or else of the most
    similar one, by its patch, as the median of its sessions; of other machines where that one has
    none; and in words where it was measured. Without SciPy, as an audited script's environment may
    be, there are none."""
    sessions = sessions_for(machine, device, results) if importlib.util.find_spec("scipy") else []
    if not sessions:
        return {}, ""
    nearest = nearest_to(machine, sessions)
    gains, of_any_machine = medians(nearest), medians(sessions)
    where = nearest[0].place_for(machine)
    elsewhere = [f"#{int(patch[:2])}" for patch in of_any_machine if patch not in gains]
    if elsewhere:
        where += f"; {', '.join(elsewhere)} on others"
    return of_any_machine | gains, where


def sessions_for(machine: dict, device: str, results: Path) -> list[Session]:
    """Returns the ladders of a folder and of the reference machines that tell of a machine."""
    sessions = [
        Session(folder, measured.machine, gains_in(rows))
        for folder in (results, *machines())
        for measured, rows in sessions_in(folder, "ladder")
        if is_alike(measured.machine, machine, device)
    ]
    return [session for session in sessions if session.gains]


def is_alike(other: dict, machine: dict, device: str) -> bool:
    """Returns whether what one machine gained tells of another: on the same device, of GPUs also in
    the same type."""
    if other["device"] != device:
        return False
    return device == "cpu" or trained_in(other) == trained_in(machine)


def gains_in(rows: list[Row]) -> dict[str, float]:
    """Returns what each technique gained in a ladder; nothing where its first script failed."""
    if not rows[0].speeds:
        return {}
    return {
        str(row.run.script): row.factor for row in rows if row.factor and len(row.techniques) < 2
    }


def nearest_to(machine: dict, sessions: list[Session]) -> list[Session]:
    """Returns the sessions of the most similar machine, in one folder."""

    def likeness(session: Session) -> tuple[bool, bool]:
        return session.likeness_to(machine)

    nearest = max(sessions, key=likeness)
    return [
        session
        for session in sessions
        if session.folder == nearest.folder and likeness(session) == likeness(nearest)
    ]


def medians(sessions: list[Session]) -> dict[str, float]:
    """Returns the median over the sessions of each technique's speedup."""
    gains: dict[str, list[float]] = {}
    for session in sessions:
        for patch, factor in session.gains.items():
            gains.setdefault(patch, []).append(factor)
    return {patch: median(factors) for patch, factors in gains.items()}
