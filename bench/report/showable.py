"""`Showable`, how a study is shown, and the texts of its tables."""

from bench.analysis.rows import Rows
from bench.report.notes import WIDE_LEGEND, WIDE_MARK, full_notes, rounds_note
from bench.report.tables import full_table, picture_name
from gpt_speed.tables import Table, markdown


class Showable:
    """How a study is shown: by default with every column that techniques or alternatives have.
    bench.measure.plan.Measurable is how it is measured."""

    title = ""  # its heading on a machine's page
    position: int | None = None  # in a report, if it is part of one
    report_options: tuple[str, ...] = ("",)  # its own, each time that a report measures it

    @property
    def name(self) -> str:
        raise NotImplementedError

    def tables(self, rows: Rows) -> list[Table]:
        """Returns what a report shows of a plan that was measured."""
        return [full_table(rows)]

    def notes(self, rows: Rows) -> list[str]:
        """Returns the paragraphs below its tables."""
        return full_notes(rows)

    def excerpts(self, rows: Rows) -> dict[str, list[Table]]:
        """Returns the tables that a marker `<!-- NAME: ... -->` in a page asks for, by NAME."""
        return {picture_name(self.name, rows.measured.kind): self.tables(rows)}

    def picture(self, rows: Rows):
        """Returns a matplotlib figure of a plan that was measured; None: it has no picture."""


def text_of(study: Showable, rows: Rows) -> str:
    """Returns all tables of a plan that was measured, and what has to be said of them."""
    notes = "".join(f"\n{note}\n" for note in study.notes(rows))
    return markdown(*study.tables(rows)) + notes


def excerpts_of(study: Showable, rows: Rows) -> dict[str, str]:
    """Returns the tables that the markers of a page ask for, by their names."""
    added = ""
    if rows.measured.planned_rounds:
        added = f"\n{rounds_note(rows)}.\n"
    return {
        name: with_legend(markdown(*tables)) + added
        for name, tables in study.excerpts(rows).items()
    }


def with_legend(tables: str) -> str:
    """Returns tables with what the mark in them says."""
    if WIDE_MARK in tables:
        return f"{tables}\n{WIDE_LEGEND}\n"
    return tables
