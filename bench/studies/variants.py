"""Alternatives to what 01 does."""

from bench.judge.rows import Row
from bench.measure.plan import EVERY_ROUND, Plan
from bench.report.notes import full_notes
from bench.report.pictures import draw_alternatives
from bench.report.tables import (
    GB,
    LOSS,
    SPEED,
    Column,
    Table,
    cell,
    full_table,
    markdown,
    number,
    short_table,
)
from bench.studies import Study


class Variants(Study):
    """01, and 01 with one variant at a time: each is a patch in patches/variants."""

    title = "01 with one alternative at a time"
    schedule = {70: None}

    def options(self, parser):
        parser.add_argument("--names", metavar="A,B+C",
                            help="which variants (default: all but those that compile-modes and"
                                 " checkpoints measure); + joins several into one script")

    def plans(self, setup):
        runs = setup.scripts.variants(setup.scripts.stage("01"), setup.machine,
                                      names=setup.args.names)
        yield from self.in_two_stages(Plan(runs, seed_noise=2, cold_rounds=EVERY_ROUND,
                                           **self.length(setup)))

    def tables(self, measured, rows):
        return [full_table(by_model(rows)[0])]

    def notes(self, measured, rows):
        same, others = by_model(rows)
        models = markdown(model_table([rows[0], *others])).rstrip("\n")
        return [*full_notes(measured, same), *([models] if others else [])]

    def excerpts(self, measured, rows):
        same, others = by_model(rows)
        return {"variants": [short_table(same)],
                "variants-model": [model_table([rows[0], *others])]}

    def draw(self, measured, rows):
        same, _ = by_model(rows)
        return draw_alternatives(measured, rows[0], same[1:])


def by_model(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """(the rows that train the model of the first one, those that train another)."""
    def parameters(row: Row) -> int | None:
        return row.record.config.get("parameters") if row.record else None

    other = [None not in (parameters(row), parameters(rows[0]))
             and parameters(row) != parameters(rows[0]) for row in rows]
    return ([row for row, differs in zip(rows, other, strict=True) if not differs],
            [row for row, differs in zip(rows, other, strict=True) if differs])


def model_table(rows: list[Row]) -> Table:
    """Another model beside that of the first row, at as much compute for each token."""
    def shares(row: Row) -> str:
        log = row.record.logs[-1] if row.record and row.record.logs else {}
        each = [share for layer in log.get("expert_shares") or [] for share in layer]
        return f"{min(each):.0%}–{max(each):.0%}" if each else ""

    return Table([
        Column("another model", lambda row: f"`{row.label}`", True),
        Column("parameters", lambda row: cell(row.record and row.record.config["parameters"], ",")),
        SPEED, Column("× speed", lambda row: row.error or cell(row.factor, ".2f")), GB,
        number("× memory", "memory_factor", ".2f"), LOSS,
        number("Δ loss", "loss_difference", "+.4f"),
        Column("experts' shares of the tokens", shares),
    ], rows)
