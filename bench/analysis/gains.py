"""What each technique and each variant gained, and where that was measured."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from bench.analysis.folders import every_row_in, has_gpu, machines, sessions_in
from bench.analysis.rows import Row, Rows
from bench.analysis.stats import SIGNIFICANT, mean_ratio
from bench.catalogue import STAGES, Run
from bench.machine import short_name, trained_in
from gpt_speed.gains import Session

OWN_TABLE = "compile", "checkpoint", "trainer"  # groups of the study of variants
TYPE = "bfloat16"  # in which a machine trains whose gains the techniques' page shows


@dataclass(frozen=True)
class Gain:
    """What a technique gains on a machine: times the speed and times the memory, over the script
    without it."""

    machine: str  # its short name
    factor: float
    memory: float | None
    folder: str = ""  # in results/reference, of the machine; none of a published gain
    device: str = "cuda"  # or "cpu"
    source: str = "measured"  # or "step" (of steps.json), "predicted", "published"
    significance: str | None = None
    interval: tuple[float, float] | None = None
    is_wide: bool = False  # the interval: the factor is marked, and not ranked
    at_most: bool = False  # whether the factor is an upper bound
    together_with: tuple[int, ...] = ()  # the numbers of other techniques whose gain is in it

    @property
    def is_significant(self) -> bool:
        return self.significance in SIGNIFICANT

    @property
    def narrowness(self) -> float:
        """The lower end of the interval over the upper one; 0 without an interval."""
        if not self.interval:
            return 0.0
        return self.interval[0] / self.interval[1]


def best(
    gains: Iterable[Gain], prefer: Sequence[str] = ("measured", "step", "predicted")
) -> Gain | None:
    """Returns of several gains the one with the narrowest interval, of the source that is
    preferred; None without any."""
    gains = list(gains)
    for source in prefer:
        of_source = [gain for gain in gains if gain.source == source]
        # Of equals the last one: the gains are sorted by their machines' names.
        narrowest = max(reversed(of_source), key=attrgetter("narrowness"), default=None)
        if narrowest:
            return narrowest
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
        folder=row.measured.folder.name,
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
            gain = replace(gain_of(row), memory=own_memory(part), together_with=others)
            gains.setdefault(str(part.run.script), []).append(gain)
    return gains


def own_memory(row: Row) -> float | None:
    """Returns how many times the memory of the script before it a technique's script needs, also
    where two techniques have one gain in speed."""
    if not row.before:
        return None
    return mean_ratio(row.memories, row.before.memories)


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
    return [row for row in rows_of_variants() if is_certain(row)]


def unclear_variants() -> dict[tuple[str, str], frozenset[str]]:
    """Returns by the variant_key of each variant that was measured, but isn't among variant_rows,
    the folders of the machines where that is so."""
    unclear: dict[tuple[str, str], frozenset[str]] = {}
    for row in rows_of_variants():
        if not is_certain(row):
            key = variant_key(row.run)
            unclear[key] = unclear.get(key, frozenset()) | {row.measured.folder.name}
    return unclear


def variant_key(run: Run) -> tuple[str, str]:
    """Returns the script of a variant and its label, which has its options: what its runs on all
    machines have in common."""
    return str(run.script), run.label


def rows_of_variants() -> list[Row]:
    """Returns the rows of variants on each machine that have a speedup."""
    return [
        row
        for folder in machines()
        for row in every_row_in(folder, "variants")
        if is_comparable(row) and is_of_variant(row)
    ]


def is_of_variant(row: Row) -> bool:
    """Returns whether a row is that of a variant: neither the script that it is compared to, nor
    of a group that is compared in a table of its own."""
    return row.measured.kind not in OWN_TABLE and row.run.script not in STAGES


def is_certain(row: Row) -> bool:
    """Returns whether a speedup is significant, or is known well enough to be shown."""
    return row.speedup().is_significant or not row.speedup().is_wide


# ---- For audits


def ladder_sessions(*folders: Path) -> list[Session]:
    """Returns what the techniques gained in each ladder of these folders."""
    sessions = [
        Session(
            name=rows.measured.machine["name"],
            short_name=short_name(rows.measured.machine),
            device=rows.measured.machine["device"],
            dtype=trained_in(rows.measured.machine),
            folder=folder.name,
            gains=gains_in(rows),
        )
        for folder in folders
        for rows in sessions_in(folder, "ladder")
    ]
    return [session for session in sessions if session.gains]


def gains_in(rows: Rows) -> dict[str, float]:
    """Returns what each technique gained in a ladder; nothing where its first script failed."""
    if not rows[0].speeds:
        return {}
    return {
        str(row.run.script): row.factor
        for row in rows
        if row.factor and row.is_step and len(row.techniques) < 2  # 02 is none
    }
