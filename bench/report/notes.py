"""What is said below a table: on which machine, how and how often it was measured. What its words
mean says docs/methodology.md."""

import shlex
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter

from bench.analysis.rows import WIDE, Row, Rows, printed
from bench.catalogue import technique_number
from bench.measure.measurement import Measurement
from bench.measure.records import Record
from gpt_speed.common import counted, listed

BFLOAT16 = "05-bfloat16"
OWN_LENGTH = "The scripts' own length"
SINGLE_RUNS = "single runs, no significance"
WIDE_MARK = "†"
WIDE_LEGEND = f"{WIDE_MARK}: the 95% interval's upper end is over {WIDE} times its lower one."


def provenance(measured: Iterable[Measurement]) -> str:
    """Returns when, at which commits and with which PyTorch a page's figures were measured, from
    the first measurement to the last; "" without any."""
    ordered = sorted(measured, key=attrgetter("time"))
    if not ordered:
        return ""
    first, last = moment_of(ordered[0]), moment_of(ordered[-1])
    when = f"from {first} to {last}"
    if first == last:
        when = f"on {first}"
    versions = dict.fromkeys(chain.from_iterable(map(torch_versions, ordered)))
    return f"Measured {when} with PyTorch {listed(versions)}."


def torch_versions(measured: Measurement) -> list[str]:
    """Returns the PyTorch of its runs; several where they ran in environments of their own."""
    own = [run.facts["torch"] for run in measured.plan.runs if run.python]
    return list(dict.fromkeys(own)) or [measured.machine["torch"]]


def moment_of(measured: Measurement) -> str:
    time, commit = measured.time, measured.commit
    date = f"{time[:4]}-{time[4:6]}-{time[6:8]}"
    if commit:
        return f"{date} at {commit[:7]}{commit[40:]}"  # a + of edited files is kept
    return date


def one_reference(rows: Sequence[Row]) -> bool:
    """Returns whether every row with figures is compared to the first one, if that has any."""
    shown = [row for row in printed(rows) if row.speeds]
    return all(row.reference is with_figures(row.baseline) for row in shown)


def with_figures(row: Row | None) -> Row | None:
    """Returns a row, or None where it has nothing to compare to."""
    if row and row.speeds:
        return row
    return None


def rounds_note(rows: Rows) -> str:
    """Returns over how many rounds rows are compared, such as "4 rounds (2 planned, 2 added)"."""
    most = max((row.rounds for row in rows), default=0)
    planned = rows.measured.planned
    rounds, details = compared_rounds(rows, most), []
    if planned and rounds > planned:
        details += [f"{planned} planned", f"{rounds - planned} added"]
    if most > rounds:
        details.append(f"some rows {most}, which count in medians alone")
    details += [
        f"{row.rounds} of `{row.label}`, to which others are compared"
        for row in references(rows)
        if row.rounds < rounds
    ]
    note = counted(rounds, "round")
    if details:
        note += f" ({', '.join(details)})"
    return note


def references(rows: Rows) -> list[Row]:
    """Returns the rows that others without a failure are compared to."""
    return list(dict.fromkeys(row.reference for row in rows if row.reference and not row.outcome))


def compared_rounds(rows: Rows, most: int) -> int:
    """Returns in how many rounds all rows without a failure have a run; `most` without any."""
    rounds = [row.by_round.keys() for row in rows if row.by_round and not row.outcome]
    if rounds:
        return len(set.intersection(*map(set, rounds)))
    return most


def machine_note(rows: Rows) -> str:
    """Returns on what was measured, and how: seeds, rounds, options, batch sizes, text, float32."""
    measured = rows.measured
    how = [seeds_note(rows), rounds_note(rows), *settings_notes(measured)]
    note = f"{measured.machine['name']}, PyTorch {listed(torch_versions(measured))};"
    return f"{note} {', '.join(how)}.{float32_note(rows)}"


def settings_notes(measured: Measurement) -> list[str]:
    """Returns what all runs of a measurement had in another way than the scripts have it."""
    batches = measured.plan.batches.items()
    notes = [f"batch size {batch} in place of {published}" for published, batch in batches]
    if measured.options:
        notes.insert(0, f"options `{shlex.join(measured.options)}`")
    if measured.text:
        notes.append(f"text: {measured.text}")
    return notes


def float32_note(rows: Rows) -> str:
    """Returns from which technique on all is trained in float32, and why; "" where it isn't."""
    reasons = {float32_reason(row.record) for row in rows if row.record} - {None}
    if not reasons:
        return ""
    first, why = technique_number(BFLOAT16), listed(sorted(filter(None, reasons)))
    return f" From technique {first} on all is trained in **float32** ({why})."


def seeds_note(rows: Rows) -> str:
    """Returns which seeds the rounds had."""
    plan = rows.measured.plan
    seeds = sorted({plan.seed_of(number) for row in rows for number in row.by_round})
    if not seeds:
        return f"seed {plan.first_seed}"
    first, last = seeds[0], seeds[-1]
    if first == last:
        return f"seed {first}"
    if len(seeds) == last - first + 1:
        return f"seeds {first} to {last}"
    return f"seeds {listed(map(str, seeds))}"


def float32_reason(record: Record) -> str | None:
    """Returns why a script trained in float32 that trains in bfloat16 where it can, or None."""
    reason = record.config.get("dtype_reason")  # of BFLOAT16 and later techniques
    by_choice = record.config.get("autocast")  # only the weights are in float32
    if record.config.get("dtype") == "float32" and not by_choice:
        return reason
    return None


def peak_note(matmul_peak: dict[str, float]) -> str:
    rates = ", ".join(f"{name} {flops / 1e12:,.2f}" for name, flops in matmul_peak.items())
    return f"Matmul throughput (matmul peak): {rates} TFLOP/s."


def speedup_note(rows: Sequence[Row], over: str = "") -> str:
    """Returns what the speedups of a table are over, by default in reference_in_words, and which
    rows aren't compiled."""
    over = over or reference_in_words(rows)
    note = f"Speedups are {over}; docs/methodology.md says what else the columns mean."
    note += joined_note(rows)
    if any(row.speedup().is_wide for row in rows):
        note += f" {WIDE_LEGEND}"
    labels = [f"`{row.label}`" for row in rows if is_uncompiled(row)]
    if labels:
        note += f" Not compiled, for lack of a compiler or by choice: {', '.join(labels)}."
    return note


def reference_in_words(rows: Sequence[Row]) -> str:
    """Returns what the rows of a table are compared to."""
    if any(row.run.ablated for row in rows):
        return "of the script with the technique over the one without it"
    if one_reference(rows):
        return "over the first row"
    return "over the row above, or the nearest with numbers"


def joined_note(rows: Sequence[Row]) -> str:
    """Returns why techniques share a row; "" where none does."""
    return "".join(
        f" A run of `{row.label}` took {row.slowdown:.2f} times its median time, so its gain stands"
        f" together with that of `{row.joined_with.label}`."
        for row in rows
        if row.joined_with
    )


def is_uncompiled(row: Row) -> bool:
    """Returns whether a script ran uncompiled that is compiled where it can be."""
    return row.record is not None and row.record.config.get("compile") is False


def full_notes(rows: Rows, length: str | None = None) -> list[str]:
    """Returns what stands below a bench.report.tables.full_table; `length`, if it isn't the
    plan's, is that of a run."""
    noise, peak = rows[0].seed_noise, peak_note(rows.measured.peak)
    length = length or plan_length(rows)
    speedups = speedup_note(rows)
    if noise is not None:
        seeds = len(rows[0].losses_by_seed)
        speedups += f" Over {seeds} seeds the first row's losses vary by {noise:.4f}."
    how = f"{machine_note(rows)} {length}. {peak}"
    return [how, speedups]


def plan_length(rows: Rows) -> str:
    """Returns how many tokens each process of a run has trained on. A plan's tokens may be fewer
    than its least number of steps have; then losses are those after the plan's."""
    tokens = rows.measured.plan.tokens
    if not tokens:
        return f"{OWN_LENGTH} per run"
    records = [(row.record, row.run.processes) for row in rows if row.record]
    lengths = {record.logs[-1]["tokens"] // processes for record, processes in records} or {tokens}
    least, most = min(lengths), max(lengths)
    if least == most:
        return f"{most:,} tokens per run"
    return f"{least:,} to {most:,} tokens per run; losses are those after {tokens:,}"
