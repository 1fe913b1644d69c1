"""What is said below a table: on which machine, how and how often it was measured. What its words
mean says docs/methodology.md."""

import shlex
from collections.abc import Iterable
from functools import cache

from bench.analysis.rows import Row, seed_noise, speed_of
from bench.analysis.stats import ROUNDS, ROWS
from bench.catalogue import Scripts
from bench.common import listed
from bench.measure.journal import Measured

today = cache(Scripts)  # in one process they are read once


def provenance(measured: Iterable[Measured]) -> str:
    """When, at which commit and with which PyTorch a page's figures were measured; of several
    measurements the first and the last. "" without any."""
    def moment(one: Measured) -> str:
        commit = f" at {one.commit[:7]}" if one.commit else ""
        edited = " with edited files" if one.edited else ""
        return f"{one.time[:4]}-{one.time[4:6]}-{one.time[6:8]}{commit}{edited}"

    ordered = sorted(measured, key=lambda one: one.time)
    if not ordered:
        return ""
    first, last = moment(ordered[0]), moment(ordered[-1])
    when = f"on {first}" if first == last else f"from {first} to {last}"
    versions = dict.fromkeys(one.machine["torch"] for one in ordered)
    return f"Measured {when} with PyTorch {listed(versions)}."


def one_reference(rows: list[Row]) -> bool:
    """Whether every row is compared to the first one."""
    return all(row.factor == row.factor_baseline for row in rows)


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def rounds_of(rows: list[Row]) -> int:
    return max((row.rounds for row in rows), default=0)


def rounds_note(measured, rows: list[Row]) -> str:
    """How often the rows were run, and whether rounds were added: "6 rounds (4 planned, 2 added)".
    """
    rounds, planned = rounds_of(rows), measured.planned
    if not planned or rounds <= planned:
        return counted(rounds, "round")
    return f"{counted(rounds, 'round')} ({planned} planned, {rounds - planned} added)"


def options_note(measured) -> str:
    options = [*measured.plan.options, *measured.options]
    text = f", options `{shlex.join(options)}`" if options else ""
    for published, batch in measured.plan.batches.items():
        text += f", batch size {batch} in place of {published}"
    return text + (f", text: {measured.text}" if measured.text else "")


def machine_note(measured, rows: list[Row]) -> str:
    """What was measured on, with which seeds and options, and in float32 where it is that."""
    rounds, first, machine = rounds_of(rows), measured.plan.first_seed, measured.machine
    seeds = f"seed {first}"
    if measured.plan.new_seeds and rounds > 1:
        seeds = f"seeds {first} to {first + rounds - 1}"
    return (f"{machine['name']}, PyTorch {machine['torch']}; {seeds},"
            f" {rounds_note(measured, rows)}{options_note(measured)}.{type_note(rows)}")


def float32_reason(record) -> str | None:
    """Why a script that trains in bfloat16 where it can trained in float32; None if it didn't."""
    reason = record.config.get("dtype_reason")  # of technique 5 and later
    by_choice = record.config.get("autocast")  # only the weights are in float32
    return reason if record.config.get("dtype") == "float32" and not by_choice else None


def type_note(rows: list[Row]) -> str:
    """Where rows aren't in the type of the published figures, and of other machines'; else ""."""
    reasons = {float32_reason(row.record) for row in rows if row.record} - {None}
    if not reasons:
        return ""
    published = any(row.run.published for row in rows)
    return (f" From technique 5 on all is trained in **float32** ({'; '.join(sorted(reasons))})"
            + ("; the published figures, from there on, are in bfloat16." if published else "."))


def peaks(matmul_peak: dict[str, float]) -> str:
    rates = ", ".join(f"{name} {flops / 1e12:,.2f}" for name, flops in matmul_peak.items())
    return f"{rates} TFLOP/s"


def peak_note(measured) -> str:
    return f"Matmul throughput (matmul peak): {peaks(measured.peak)}."


def significance_note(rows: list[Row]) -> str:
    """What "faster" means in a table, and which rows aren't tested."""
    column = rows[0].rows.judged(speed_of)
    failed = [f"`{row.label}`" for row in rows if row.speeds and row.outcome]
    text = ('"faster" and "slower": significant over the whole table (docs/methodology.md).'
            if column.differences else
            f'"faster" and "slower" need {ROUNDS} rounds of {ROWS} rows, with some spread.')
    if column.differences and len(column.rounds) < rounds_of(rows):
        text += (f" Rows are compared by the {counted(len(column.rounds), 'round')} that all have;"
                 " medians are of all.")
    return text + (f" Not tested, since one of its runs failed: {', '.join(failed)}."
                   if failed else "")


def factor_note(rows: list[Row]) -> str:
    """What the factors of a table are over."""
    if any(row.run.ablated for row in rows):
        return "Speedups are of the script with the technique over the one without it."
    return "Speedups are over " + (
        "the first row." if one_reference(rows) else "the row above, or the nearest with numbers.")


def full_notes(measured, rows: list[Row]) -> list[str]:
    """Below a bench.report.tables.full_table."""
    plan, noise = measured.plan, seed_noise(rows[0])
    length = (f"{plan.tokens:,} tokens" if plan.tokens else
              counted(plan.epochs, "epoch") if plan.epochs else "The scripts' own length")
    if plan.seconds:
        length += f", or about {plan.seconds:g} s of training if that is longer,"
    losses = "val loss is the validation loss " + (
        f"after {plan.tokens:,} training tokens" if plan.tokens else "at the end of a run")
    if noise is not None:
        losses += f"; over {len(rows[0].losses_by_seed)} seeds the first row's vary by {noise:.4f}"
    marks = []
    if any(row.uncompiled for row in rows):
        marks.append(r"\* not compiled: there is no compiler, or it was turned off.")
    if any(row.speed_is_average for row in rows):
        marks.append("† too few steps for a median: the average of the run.")
    return [
        f"{machine_note(measured, rows)} {length} per run. {peak_note(measured)}",
        "tok/sec is the median over the rounds of each run's median step; the range is from the"
        f" slowest round to the fastest. {significance_note(rows)}",
        " ".join([f"{losses}.", *([factor_note(rows)] if len(rows) > 1 else []), *marks]),
    ]
