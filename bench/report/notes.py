"""What is said below a table: on which machine, how and how often it was measured. What its words
mean says docs/methodology.md."""

import shlex
from collections.abc import Iterable

from bench.analysis.rows import Row
from bench.common import listed
from bench.measure.journal import Measured

MARKS = {"uncompiled": r"\* not compiled: there is no compiler, or it was turned off.",
         "speed_is_average": "† too few steps for a median: the average of the run."}


def provenance(measured: Iterable[Measured]) -> str:
    """Returns when, at which commits and with which PyTorch a page's figures were measured, from
    the first measurement to the last; "" without any."""
    ordered = sorted(measured, key=lambda measurement: measurement.time)
    if not ordered:
        return ""
    moments = []
    for measurement in ordered:
        time, commit = measurement.time, measurement.commit
        moments.append(f"{time[:4]}-{time[4:6]}-{time[6:8]}" + (f" at {commit[:7]}" if commit else "")
                       + (" with edited files" if measurement.edited else ""))
    first, last = moments[0], moments[-1]
    when = f"on {first}" if first == last else f"from {first} to {last}"
    versions = dict.fromkeys(measurement.machine["torch"] for measurement in ordered)
    return f"Measured {when} with PyTorch {listed(versions)}."


def one_reference(rows: list[Row]) -> bool:
    """Returns whether every row is compared to the first one."""
    return all(row.factor == row.factor_baseline for row in rows)


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def rounds_note(measured, rows: list[Row]) -> str:
    """Returns how often rows were run, and how often that was planned before some rounds were added:
    "6 rounds (4 planned, 2 added)"."""
    rounds, planned = max((row.rounds for row in rows), default=0), measured.planned
    if not planned or rounds <= planned:
        return counted(rounds, "round")
    return f"{counted(rounds, 'round')} ({planned} planned, {rounds - planned} added)"


def machine_note(measured, rows: list[Row]) -> str:
    """Returns what was measured on, with which seeds, options, batch sizes and text, and in float32
    where it is that."""
    plan, machine = measured.plan, measured.machine
    last_seed = plan.first_seed + max((row.rounds for row in rows), default=0) - 1
    several = plan.new_seeds and last_seed > plan.first_seed
    parts = [f"seeds {plan.first_seed} to {last_seed}" if several else f"seed {plan.first_seed}",
             rounds_note(measured, rows)]
    if options := [*plan.options, *measured.options]:
        parts.append(f"options `{shlex.join(options)}`")
    parts += [f"batch size {batch} in place of {published}"
              for published, batch in plan.batches.items()]
    if measured.text:
        parts.append(f"text: {measured.text}")
    text = f"{machine['name']}, PyTorch {machine['torch']}; {', '.join(parts)}."
    reasons = {float32_reason(row.record) for row in rows if row.record} - {None}
    if not reasons:
        return text
    published = any(row.run.published for row in rows)
    return (f"{text} From technique 5 on all is trained in **float32** ({listed(sorted(reasons))})"
            + ("; the published figures, from there on, are in bfloat16." if published else "."))


def float32_reason(record) -> str | None:
    """Returns why a script that trains in bfloat16 where it can trained in float32; None if it
    didn't."""
    reason = record.config.get("dtype_reason")  # of technique 5 and later
    by_choice = record.config.get("autocast")  # only the weights are in float32
    return reason if record.config.get("dtype") == "float32" and not by_choice else None


def peaks(matmul_peak: dict[str, float]) -> str:
    rates = ", ".join(f"{name} {flops / 1e12:,.2f}" for name, flops in matmul_peak.items())
    return f"{rates} TFLOP/s"


def peak_note(measured) -> str:
    return f"Matmul throughput (matmul peak): {peaks(measured.peak)}."


def speedup_note(rows: list[Row]) -> str:
    """Returns what the speedups of a table are over, by which rounds rows are compared, and which
    aren't tested."""
    if any(row.run.ablated for row in rows):
        text = "Speedups are of the script with the technique over the one without it"
    else:
        text = "Speedups are over " + (
            "the first row" if one_reference(rows) else "the row above, or the nearest with numbers")
    column = rows[0].rows.column()
    if column.differences and len(column.rounds) < max(row.rounds for row in rows):
        text += f", by the {counted(len(column.rounds), 'round')} that all rows have"
    failed = [f"`{row.label}`" for row in rows if row.speeds and row.outcome]
    return f"{text}." + (
        f" Not tested, since a run failed: {', '.join(failed)}." if failed else "")


def full_notes(measured, rows: list[Row]) -> list[str]:
    """Returns what stands below a bench.report.tables.full_table."""
    plan, noise = measured.plan, rows[0].seed_noise
    length = (f"{plan.tokens:,} tokens" if plan.tokens else
              counted(plan.epochs, "epoch") if plan.epochs else "The scripts' own length")
    if plan.seconds:
        length += f", or about {plan.seconds:g} s of training if that is longer,"
    notes = [speedup_note(rows), "docs/methodology.md says what the columns mean."]
    if noise is not None:
        seeds = len(rows[0].losses_by_seed)
        notes.append(f"Over {seeds} seeds the first row's losses vary by {noise:.4f}.")
    notes += [text for name, text in MARKS.items() if any(getattr(row, name) for row in rows)]
    return [f"{machine_note(measured, rows)} {length} per run. {peak_note(measured)}",
            " ".join(notes)]
