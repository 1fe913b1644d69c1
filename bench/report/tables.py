"""The columns that studies share, and the tables of what was measured."""

from collections.abc import Iterable, Sequence
from functools import partial

from bench.analysis.rows import Row, printed
from bench.analysis.stats import SIGNIFICANT
from bench.report.notes import WIDE_MARK, one_reference
from gpt_speed.tables import Column, Table, fmt, num_col, text_col, value_col


def credited(row, name: str) -> str:
    """Returns what a row's factor is of: this technique, or several by their numbers."""
    numbers = row.techniques
    if len(numbers) < 2:
        return name
    return f"techniques {numbers[0]} to {numbers[-1]}"


def picture_name(study: str, kind: str) -> str:
    if kind:
        return f"{study}-{kind}"
    return study


# ---- Cells and columns -------------------------------------------------------------------------


def spread(values: Sequence[float] | None, form: str = ",.0f") -> str:
    """Returns the least and the greatest of several values; "" for one or none."""
    if not values or len(values) < 2:
        return ""
    return f"{min(values):{form}}–{max(values):{form}}"


def range_text(values: Iterable[float], form: str) -> str:
    """Returns the least and the greatest of several values, once where they are written alike; ""
    without any."""
    ordered = sorted(values)
    if not ordered:
        return ""
    least, greatest = format(ordered[0], form), format(ordered[-1], form)
    if least == greatest:
        return least
    return f"{least}–{greatest}"


def bold(text: str, significance: str | None) -> str:
    if text and significance in SIGNIFICANT:
        return f"**{text}**"
    return text


def marked(text: str, is_wide: bool) -> str:
    """Returns a factor, with a mark where its interval is so wide that it isn't ranked."""
    if text and is_wide:
        return f"{text}{WIDE_MARK}"
    return text


def factor_text(row: Row) -> str:
    """Returns times the speed of the row's reference, marked where that is uncertain."""
    return marked(fmt(row.factor, ".2f"), row.speedup().is_wide)


def speed_and_factor(tok_per_sec: float | None, factor: str) -> str:
    """Returns what stands at a bar: a speed, and times what it is if that is known."""
    speed = fmt(tok_per_sec, ",.0f")
    if not factor:
        return speed
    return f"{speed}  ({factor}×)"


def speed_or_error(row: Row) -> str:
    return row.error or SPEED.cell(row)


def factor_or_error(row: Row) -> str:
    """Returns times the speed, bold where that is significant."""
    return row.error or bold(factor_text(row), row.significance)


def credited_technique(row: Row) -> str:
    return credited(row, row.technique)


def as_code(text: str) -> str:
    return f"`{text}`"


RUN = text_col("run", "label")
SPEED = num_col("tok/sec", "tok_per_sec", ",.0f")
SPEED_OR_ERROR = Column("tok/sec", speed_or_error)
interval_text = partial(spread, form=".2f")
INTERVAL = value_col("95%", "interval", interval_text)
RANGE = value_col("range", "speeds", spread)
GB = num_col("GB", "reserved_gb", ".2f")
LOSS = num_col("val loss", "val_loss", ".4f")
EXPECTED_LOSS = text_col("expected effect on the loss", "run.loss")


# ---- Tables of a plan --------------------------------------------------------------------------


def significance_or_error(row: Row) -> str:
    """Returns whether a row's speedup is significant, or why it has none."""
    if row.baseline is None and not row.error:
        return "baseline"
    return row.error or row.significance or ""


def full_table(rows: Sequence[Row]) -> Table:
    """Returns every column that a study of techniques or alternatives may have."""
    over_baseline = [num_col("over the baseline", "factor_baseline", ".2f")]
    if one_reference(rows):  # the baseline: the column would repeat the speedups
        over_baseline = []
    return Table(
        [
            RUN,
            Column("technique", credited_technique, True),
            SPEED,
            RANGE,
            Column("speedup", factor_text),
            INTERVAL,
            num_col("speedup, A100", "published_factor", ".2f"),
            *over_baseline,
            num_col("reserved GB", "reserved_gb", ".2f"),
            num_col("× GB", "memory_factor", ".2f"),
            num_col("first step s", "record.first_step_seconds", ".1f"),
            LOSS,
            num_col("Δ loss", "loss_difference", "+.4f"),
            EXPECTED_LOSS,
            num_col("of matmul peak", "share_of_peak", ".1%"),
            num_col("MFU", "mfu", ".1%"),
            Column("significance", significance_or_error, True),
        ],
        printed(rows),
        missing="n/a",
    )


def short_table(rows: Sequence[Row]) -> Table:
    """Returns the columns of alternatives that a page for readers has; above them a line with those
    that the machine couldn't run."""
    left_out = [f"`{row.label}` ({row.run.error})" for row in rows if row.run.error]
    caption = ""
    if left_out:
        caption = f"Not run here: {', '.join(left_out)}."
    return Table(
        [
            value_col("run", "label", as_code, left=True),
            SPEED,
            Column("× speed", factor_or_error),
            INTERVAL,
            GB,
            num_col("× memory", "memory_factor", ".2f"),
            num_col("first step, s", "record.first_step_seconds", ".1f"),
            num_col("Δ loss", "loss_difference", "+.3f"),
            EXPECTED_LOSS,
        ],
        [row for row in rows if not row.run.error],
        caption,
    )
