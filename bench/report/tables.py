"""The columns that studies share, and the tables of a folder of results."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from bench.analysis.rows import Row, rows_of
from bench.measure.journal import Measurement, journal_of, newest, read_journal
from bench.report.notes import one_reference, rounds_note
from gpt_speed.tables import Column, Table, fmt, markdown, num_col, text_col


def credited(row, name: str) -> str:
    """Returns what a row's factor is of: this technique, or several by their numbers."""
    numbers = row.techniques
    return name if len(numbers) < 2 else f"techniques {numbers[0]} to {numbers[-1]}"


def picture_name(study: str, kind: str) -> str:
    return f"{study}-{kind}" if kind else study


# ---- Cells and columns -------------------------------------------------------------------------


def spread(values: Sequence[float] | None, form: str = ",.0f") -> str:
    """Returns the least and the greatest of several values; "" for one or none."""
    return f"{min(values):{form}}–{max(values):{form}}" if values and len(values) > 1 else ""


def bold(text: str, significance: str | None) -> str:
    return f"**{text}**" if text and significance in ("faster", "slower") else text


RUN = text_col("run", "label")
SPEED = num_col("tok/sec", "tok_per_sec", ",.0f")
SPEED_OR_ERROR = Column("tok/sec", lambda row: row.error or SPEED.cell(row))
INTERVAL = Column("95 %", lambda row: spread(row.interval, ".2f"))
RANGE = Column("range", lambda row: spread(row.speeds))
GB = num_col("GB", "reserved_gb", ".2f")
LOSS = num_col("val loss", "val_loss", ".4f")
EXPECTED_LOSS = text_col("expected effect on the loss", "run.loss")


# ---- What was measured -------------------------------------------------------------------------


def found_in(folder: Path, study: str) -> list[tuple[Measurement, list[Row]]]:
    """Returns the newest measurement of each kind of a study, with its rows. Raises OSError."""
    path = journal_of(folder, study)
    return measured_in(path, path.stat().st_mtime_ns if path.exists() else None)


@lru_cache
def measured_in(path: Path, changed: int | None) -> list[tuple[Measurement, list[Row]]]:
    """Reads a journal once for each time that it was `changed`."""
    return [(measured, rows_of(measured)) for measured in newest(read_journal(path))]


def rows_in(folder: Path, study: str) -> list[Row]:
    return [row for _, rows in found_in(folder, study) for row in rows]


def text_of(study, measured) -> str:
    """All tables of a plan that was measured, and what has to be said of them."""
    rows = rows_of(measured)
    notes = "".join(f"\n{note}\n" for note in study.notes(measured, rows))
    return markdown(*study.tables(measured, rows)) + notes


def excerpts_of(study, measured) -> dict[str, str]:
    """What the markers of a page ask for, by their names."""
    rows = rows_of(measured)
    added = f"\n{rounds_note(measured, rows)}.\n" if measured.planned else ""
    return {
        name: markdown(*tables) + added for name, tables in study.excerpts(measured, rows).items()
    }


def full_table(rows: list[Row]) -> Table:
    """Returns every column that a study of techniques or alternatives may have."""
    over_baseline = num_col("over the baseline", "factor_baseline", ".2f")
    return Table(
        [
            RUN,
            Column("technique", lambda row: credited(row, row.technique), True),
            SPEED,
            RANGE,
            num_col("speedup", "factor", ".2f"),
            INTERVAL,
            num_col("speedup, A100", "published_factor", ".2f"),
            *([] if one_reference(rows) else [over_baseline]),
            num_col("reserved GB", "reserved_gb", ".2f"),
            num_col("× GB", "memory_factor", ".2f"),
            num_col("first step s", "record.first_step_seconds", ".1f"),
            LOSS,
            num_col("Δ loss", "loss_difference", "+.4f"),
            EXPECTED_LOSS,
            num_col("of matmul peak", "share_of_peak", ".1%"),
            num_col("MFU", "mfu", ".1%"),
            Column(
                "significance",
                lambda row: row.error or row.significance or ("baseline" if row is rows[0] else ""),
                True,
            ),
        ],
        rows,
        missing="n/a",
    )


def short_table(rows: list[Row]) -> Table:
    """Returns the columns of alternatives that a page for readers has; above them a line with those
    that the machine couldn't run."""
    left_out = ", ".join(f"`{row.label}` ({row.run.error})" for row in rows if row.run.error)
    return Table(
        [
            Column("run", lambda row: f"`{row.label}`", True),
            SPEED,
            Column(
                "× speed", lambda row: row.error or bold(fmt(row.factor, ".2f"), row.significance)
            ),
            INTERVAL,
            GB,
            num_col("× memory", "memory_factor", ".2f"),
            num_col("first step, s", "record.first_step_seconds", ".1f"),
            num_col("Δ loss", "loss_difference", "+.3f"),
            EXPECTED_LOSS,
        ],
        [row for row in rows if not row.run.error],
        f"Not run here: {left_out}." if left_out else "",
    )
