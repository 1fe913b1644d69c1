"""Tables in Markdown: their cells, the columns that studies share, and the tables of a folder of
results."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from bench.analysis.rows import Row, rows_of
from bench.measure.journal import Measured, journal_of, newest, read_journal
from bench.report.notes import one_reference, rounds_note


class Column(NamedTuple):
    heading: str
    cell: Callable[..., str]  # from a row to its text, "" where there is nothing to show
    left: bool = False  # set to the left, as text is


class Table(NamedTuple):
    columns: list[Column]
    rows: list  # of bench.analysis.rows.Row, or of what else the columns' cells take
    caption: str = ""
    missing: str = ""  # what stands in an empty cell
    every_column: bool = False  # also those without a figure


def credited(row, name: str) -> str:
    """Returns what a row's factor is of: this technique, or several by their numbers."""
    numbers = row.techniques
    return name if len(numbers) < 2 else f"techniques {numbers[0]} to {numbers[-1]}"


def picture_name(study: str, kind: str) -> str:
    return f"{study}-{kind}" if kind else study


# ---- Cells and columns -------------------------------------------------------------------------


def fmt(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def spread(values: Sequence[float] | None, form: str = ",.0f") -> str:
    """Returns the least and the greatest of several values; "" for one or none."""
    return f"{min(values):{form}}–{max(values):{form}}" if values and len(values) > 1 else ""


def bold(text: str, significance: str | None) -> str:
    return f"**{text}**" if text and significance in ("faster", "slower") else text


def lookup(row, name: str):
    """Returns a row's value by a name such as "record.mfu", of attributes or keys; None where one
    of them is None or there is no such key."""
    for part in name.split("."):
        row = row.get(part) if isinstance(row, dict) else row and getattr(row, part)
    return row


def num_col(heading: str, name: str, form: str = "") -> Column:
    """Returns a column of a figure, by its name in a row."""
    return Column(heading, lambda row: fmt(lookup(row, name), form))


def text_col(heading: str, name: str) -> Column:
    """Returns a column of text, by its name in a row."""
    return Column(heading, lambda row: lookup(row, name) or "", True)


RUN = text_col("run", "label")
SPEED = num_col("tok/sec", "tok_per_sec", ",.0f")
SPEED_OR_ERROR = Column("tok/sec", lambda row: row.error or SPEED.cell(row))
INTERVAL = Column("95 %", lambda row: spread(row.interval, ".2f"))
RANGE = Column("range", lambda row: spread(row.speeds))
GB = num_col("GB", "reserved_gb", ".2f")
LOSS = num_col("val loss", "val_loss", ".4f")
EXPECTED_LOSS = text_col("expected effect on the loss", "run.loss")


def markdown(*tables: Table) -> str:
    """Returns the tables' text. A column without a figure is left out, unless the table wants
    every one."""
    texts = []
    for table in tables:
        columns = []
        for column in table.columns:
            cells = [column.cell(row) for row in table.rows]
            if any(cells) or table.every_column:
                columns.append([column.heading, ":--" if column.left else "--:", *cells])
        lines = [" | ".join(cell_text(text or table.missing) for text in line)
                 for line in zip(*columns, strict=True)]
        caption = f"{table.caption}\n\n" if table.caption else ""
        texts.append(caption + "".join(f"| {line} |\n" for line in lines))
    return "\n".join(texts)


def cell_text(text: str) -> str:
    """Returns a cell in one line; a text of a record's may hold anything."""
    return "".join(c if c.isprintable() else " " for c in text).replace("|", r"\|")


# ---- What was measured -------------------------------------------------------------------------


def found_in(folder: Path, study: str) -> list[tuple[Measured, list[Row]]]:
    """Returns the newest measurement of each kind of a study, with its rows. Raises OSError."""
    path = journal_of(folder, study)
    return measured_in(path, path.stat().st_mtime_ns if path.exists() else None)


@lru_cache
def measured_in(path: Path, changed: int | None) -> list[tuple[Measured, list[Row]]]:
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
    return {name: markdown(*tables) + added
            for name, tables in study.excerpts(measured, rows).items()}


def full_table(rows: list[Row]) -> Table:
    """Returns every column that a study of techniques or alternatives may have."""
    over_baseline = num_col("over the baseline", "factor_baseline", ".2f")
    return Table([
        RUN, Column("technique", lambda row: credited(row, row.technique), True), SPEED, RANGE,
        num_col("speedup", "factor", ".2f"), INTERVAL,
        num_col("speedup, A100", "published_factor", ".2f"),
        *([] if one_reference(rows) else [over_baseline]),
        num_col("reserved GB", "reserved_gb", ".2f"),
        num_col("× GB", "memory_factor", ".2f"),
        num_col("first step s", "record.first_step_seconds", ".1f"),
        LOSS, num_col("Δ loss", "loss_difference", "+.4f"), EXPECTED_LOSS,
        num_col("of matmul peak", "share_of_peak", ".1%"),
        num_col("MFU", "mfu", ".1%"),
        Column("significance", lambda row: row.error or row.significance or (
            "baseline" if row is rows[0] else ""), True),
    ], rows, missing="n/a")


def short_table(rows: list[Row]) -> Table:
    """Returns the columns of alternatives that a page for readers has; above them a line with those
    that the machine couldn't run."""
    left_out = ", ".join(f"`{row.label}` ({row.run.error})" for row in rows if row.run.error)
    return Table([
        Column("run", lambda row: f"`{row.label}`", True), SPEED,
        Column("× speed", lambda row: row.error or bold(fmt(row.factor, ".2f"), row.significance)),
        INTERVAL, GB,
        num_col("× memory", "memory_factor", ".2f"),
        num_col("first step, s", "record.first_step_seconds", ".1f"),
        num_col("Δ loss", "loss_difference", "+.3f"), EXPECTED_LOSS],
        [row for row in rows if not row.run.error],
        f"Not run here: {left_out}." if left_out else "")
