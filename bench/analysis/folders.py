"""The rows of a folder of results, and of the folders of all machines."""

from functools import lru_cache
from pathlib import Path

from bench.analysis.rows import Row, Rows
from bench.common import REFERENCE
from bench.measure.journal import journal_of, newest, read_journal


def newest_in(folder: Path, study: str) -> list[Rows]:
    """Returns the rows of the newest measurement of each kind of a study. Raises OSError."""
    path = journal_of(folder, study)
    changed = 0
    if path.exists():
        changed = path.stat().st_mtime_ns
    return [*read_newest(path, changed)]


@lru_cache
def read_newest(journal: Path, changed: int) -> tuple[Rows, ...]:
    """Reads a journal once until it is `changed`: the report asks for it again and again."""
    return tuple(Rows(measured) for measured in newest(read_journal(journal)))


def rows_in(folder: Path, study: str) -> list[Row]:
    return [row for rows in newest_in(folder, study) for row in rows]


def every_row_in(folder: Path, study: str) -> list[Row]:
    """Returns a machine's newest rows of a study, and those that only further sessions have."""
    rows = rows_in(folder, study)
    for path in sorted(folder.glob(f"{study}-*.jsonl")):
        for measured in reversed(read_journal(path)):
            names = {row.run.name for row in rows}
            rows += [row for row in Rows(measured) if row.run.name not in names]
    return rows


def sessions_in(folder: Path, study: str) -> list[Rows]:
    """Returns the rows of the newest measurements in each of a study's journals in a folder:
    STUDY.jsonl, and those of further sessions, STUDY-DATE.jsonl."""
    return [
        session
        for path in sorted(folder.glob(f"{study}*.jsonl"))
        for session in newest_in(folder, path.stem)
    ]


def machines(reference: Path = REFERENCE) -> list[Path]:
    """Returns the folders of the machines that were measured."""
    return sorted({path.parent for path in reference.glob("*/*.jsonl")})


def has_gpu(row: Row) -> bool:
    return row.measured.machine["gpus"] > 0
