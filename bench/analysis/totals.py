"""How many times as fast as 00 the optimized program is: both ends of what was measured."""

from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

from bench.analysis.folders import machines, rows_in
from bench.analysis.rows import Row, Rows
from bench.catalogue import last_published_technique
from bench.measure.journal import read_journal
from bench.measure.measurement import Measurement
from bench.options import has_option


def is_plain(row: Row) -> bool:
    """Returns whether a row is that of 00, alone or at the beginning of a ladder."""
    return row.run.stage == "00" or row.run.number == 0


def is_optimized(row: Row) -> bool:
    """Returns whether a row is that of 01, alone or as a ladder's script with more techniques than
    the published ones."""
    if row.run.number is None or row.run.torchrun:
        return row.run.stage == "01"
    return row.run.number > last_published_technique()


def last_with_total(rows: Sequence[Row]) -> Row | None:
    """Returns the last row that has a speedup over the first one; None without any."""
    return next((row for row in reversed(rows) if row.factor_baseline), None)


def rounds_of_both(row: Row) -> int:
    """Returns how many rounds a row and its baseline have, at least."""
    if not row.baseline:
        return row.rounds
    return min(row.rounds, row.baseline.rounds)


def headline_row(results: Path) -> Row | None:
    """Returns the row whose speedup over its baseline stands for a folder: 01 of the study
    `stages`, or the ladder's last script, if it is 01 too and has more rounds; None without
    either."""
    ladder = last_with_total(rows_in(results, "ladder"))
    alone = last_with_total([row for row in rows_in(results, "stages") if is_optimized(row)])
    if not ladder or not alone:
        return ladder or alone
    if is_optimized(ladder) and rounds_of_both(ladder) > rounds_of_both(alone):
        return ladder
    return alone


def optimized_on(folder: Path) -> Row | None:
    """Returns the last script of a machine's ladder; where none that begins with 00 was measured,
    01 by itself."""
    for study in ("ladder", "stages"):
        rows = [row for row in rows_in(folder, study) if row.speeds and not row.run.torchrun]
        if rows and is_plain(rows[0]) and rows[-1].factor_baseline:
            return rows[-1]
    return None


def optimized_in(reference: Path) -> list[Row]:
    """Returns the optimized script of each machine that has measured it and the baseline."""
    rows = [optimized_on(folder) for folder in machines(reference)]
    return [row for row in rows if row]


def totals_in(results: Path) -> list[float]:
    """Returns how many times as fast as 00 01 was in each measurement of a folder that has both,
    not only in the newest: of the model that was measured last."""
    measurements = [
        measured
        for study in ("ladder", "stages", "time-to-loss")
        for path in sorted(results.glob(f"{study}*.jsonl"))
        for measured in read_journal(path)
    ]
    if not measurements:
        return []
    models = models_of(max(measurements, key=attrgetter("time")))
    totals = [
        total_of(Rows(measured)) for measured in measurements if models_of(measured) == models
    ]
    return [total for total in totals if total]


def models_of(measured: Measurement) -> set[str]:
    """Returns which models a measurement trained."""
    return {result.record.config["model"] for result in measured.results if result.record}


def total_of(rows: Rows) -> float | None:
    """Returns how many times as fast as 00 01 is, both at their own settings, or a ladder's last
    script where that is 01, too; None where one is missing."""
    at_own_batch = [row for row in rows if not has_option("--batch-size", row.run.options)]
    if rows[0] not in at_own_batch or not is_plain(rows[0]):
        return None
    optimized = [row for row in at_own_batch if is_optimized(row)]
    if not optimized:
        return None
    return optimized[-1].factor_baseline
