"""Tables in Markdown, of any rows."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple


class Column(NamedTuple):
    heading: str
    cell: Callable[..., str]  # from a row to its text, "" where there is nothing to show
    left: bool = False  # set to the left, as text is


class Table(NamedTuple):
    columns: list[Column]
    rows: Sequence  # of what the columns' cells take
    caption: str = ""
    missing: str = ""  # what stands in an empty cell
    every_column: bool = False  # also those without a figure


def fmt(value: float | None, form: str, unit: str = "") -> str:
    """Writes a figure; "" for None."""
    if value is None:
        return ""
    return f"{format(value, form)}{unit}"


def lookup(row, name: str):
    """Returns a row's value by a name such as "record.mfu", of attributes or keys; None where one
    of them is None. Raises AttributeError or KeyError where there is none of that name."""
    for part in name.split("."):
        if row is None:
            return None
        if isinstance(row, dict):
            row = row[part]
        else:
            row = getattr(row, part)
    return row


def num_col(heading: str, name: str, form: str = "", unit: str = "") -> Column:
    """Returns a column of a figure, by its name in a row."""
    return value_col(heading, name, partial(fmt, form=form, unit=unit))


def text_col(heading: str, name: str) -> Column:
    """Returns a column of text, by its name in a row."""
    return value_col(heading, name, text_or_nothing, left=True)


def value_col(heading: str, name: str, write: Callable[..., str], left: bool = False) -> Column:
    """Returns a column of a value, by its name in a row, as `write` writes it."""

    def cell(row) -> str:
        return write(lookup(row, name))

    return Column(heading, cell, left)


def text_or_nothing(text: str | None) -> str:
    return text or ""


def markdown(*tables: Table) -> str:
    """Returns the text of tables."""
    return "\n".join(map(markdown_of, tables))


def markdown_of(table: Table) -> str:
    """Returns a table's text."""
    lines = []
    if table.caption:
        lines.append(f"{table.caption}\n")
    for line in zip(*shown_columns(table), strict=True):
        cells = [cell_text(cell or table.missing) for cell in line]
        lines.append(f"| {' | '.join(cells)} |")
    return "".join(f"{line}\n" for line in lines)


def shown_columns(table: Table) -> list[list[str]]:
    """Returns the text of each column from its heading down. One without a figure is left out,
    unless the table wants every one."""
    columns = []
    for column in table.columns:
        cells = [column.cell(row) for row in table.rows]
        if any(cells) or table.every_column:
            columns.append([column.heading, ":--" if column.left else "--:", *cells])
    return columns


def cell_text(text: str) -> str:
    """Returns a cell in one line; a text of a record's may hold anything."""
    return "".join(c if c.isprintable() else " " for c in text).replace("|", r"\|")
