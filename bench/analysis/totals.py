"""How many times as fast as 00 the optimized program is: both ends of what was measured."""

from pathlib import Path

from bench.analysis.folders import machines, rows_in, sessions_in
from bench.analysis.rows import Row
from bench.common import has_option


def is_whole(row: Row) -> bool:
    """Returns whether a row is of a ladder's script beyond the published techniques, as 01 is."""
    return bool(row.run.number) and not row.run.published and not row.run.torchrun


def last_of_ladder(results: Path) -> Row | None:
    """Returns the last row of a ladder that has a speedup over its first."""
    rows = [row for row in rows_in(results, "ladder") if row.factor_baseline]
    return rows[-1] if rows else None


def rounds_of_both(row: Row) -> int:
    """Returns how many rounds a row and its baseline have, at least."""
    return min(row.rounds, row.baseline.rounds) if row.baseline else row.rounds


def best_total(results: Path) -> Row | None:
    """Returns the row whose speedup over its baseline stands for a folder: 01 beside 00, or the
    last script of a ladder, where that is whole and has more rounds; None without any."""
    stages = {row.run.stage: row for row in rows_in(results, "stages") if row.trainings}
    last = last_of_ladder(results)
    if not stages.keys() >= {"00", "01"}:
        return last
    fast = stages["01"]
    if last and is_whole(last) and rounds_of_both(last) > rounds_of_both(fast):
        return last
    return fast


def optimized_on(folder: Path) -> Row | None:
    """Returns the last script of a machine's ladder; where none that begins with 00 was measured,
    01 by itself."""
    for study in ("ladder", "stages"):
        rows = [row for row in rows_in(folder, study) if row.speeds and not row.run.torchrun]
        if rows and not rows[0].run.number and rows[-1].factor_baseline:
            return rows[-1]
    return None


def optimized_in(reference: Path) -> list[Row]:
    """Returns the optimized script of each machine that has measured it and the baseline."""
    rows = [optimized_on(folder) for folder in machines(reference)]
    return [row for row in rows if row]


def totals_in(results: Path) -> list[float]:
    """Returns how many times as fast as 00 01 was in each measurement of a folder that has both."""
    totals = [
        total_of(rows)
        for study in ("ladder", "stages", "time-to-loss")
        for _, rows in sessions_in(results, study)
    ]
    return [total for total in totals if total]


def total_of(rows: list[Row]) -> float | None:
    """Returns how many times as fast as 00 01 is, both at their own settings, or the last script of
    a whole ladder; None where one is missing."""
    own = [row for row in rows if not has_option("--batch-size", row.run.options)]
    if rows[0] not in own or not is_plain(rows[0]):
        return None
    optimized = [row for row in own if row.run.stage == "01" or is_whole(row)]
    return optimized[-1].factor_baseline if optimized else None


def is_plain(row: Row) -> bool:
    """Returns whether a row is that of 00, alone or at the beginning of a ladder."""
    return row.run.stage == "00" or row.run.number == 0
