"""What is said below a table: on which machine, how and how often it was measured. What its words
mean says docs/methodology.md."""

import shlex
from collections.abc import Iterable

from bench.analysis.rows import Row
from bench.measure.journal import Measurement
from gpt_speed.common import counted, listed

SINGLE_RUNS = "single runs, no significance"


def provenance(measured: Iterable[Measurement]) -> str:
    """Returns when, at which commits and with which PyTorch a page's figures were measured, from
    the first measurement to the last; "" without any."""
    ordered = sorted(measured, key=lambda measurement: measurement.time)
    if not ordered:
        return ""

    def moment(one: Measurement) -> str:
        commit = f" at {one.commit[:7]}{one.commit[40:]}" if one.commit else ""
        return f"{one.time[:4]}-{one.time[4:6]}-{one.time[6:8]}{commit}"

    first, last = moment(ordered[0]), moment(ordered[-1])
    when = f"on {first}" if first == last else f"from {first} to {last}"
    versions = dict.fromkeys(measurement.machine["torch"] for measurement in ordered)
    return f"Measured {when} with PyTorch {listed(versions)}."


def one_reference(rows: list[Row]) -> bool:
    """Returns whether every row is compared to the first one."""
    return all(row.factor == row.factor_baseline for row in rows)


def rounds_note(measured, rows: list[Row]) -> str:
    """Returns over how many rounds rows are compared, such as "4 rounds (2 planned, 2 added)"."""
    own = [set(row.by_round) for row in rows if row.by_round and not row.outcome]
    most = max((row.rounds for row in rows), default=0)
    rounds, details = len(set.intersection(*own)) if own else most, []
    if measured.planned and rounds > measured.planned:
        details += [f"{measured.planned} planned", f"{rounds - measured.planned} added"]
    if most > rounds:
        details.append(f"some rows {most}, which count in medians alone")
    return counted(rounds, "round") + (f" ({', '.join(details)})" if details else "")


def machine_note(measured, rows: list[Row]) -> str:
    """Returns on what was measured, and how: seeds, rounds, options, batch sizes, text, float32."""
    plan, machine, seed = measured.plan, measured.machine, measured.plan.first_seed
    last = seed + max((row.rounds for row in rows), default=0) - 1
    parts = [
        f"seeds {seed} to {last}" if plan.new_seeds and last > seed else f"seed {seed}",
        rounds_note(measured, rows),
    ]
    if measured.options:
        parts.append(f"options `{shlex.join(measured.options)}`")
    parts += [
        f"batch size {batch} in place of {published}" for published, batch in plan.batches.items()
    ]
    if measured.text:
        parts.append(f"text: {measured.text}")
    text = f"{machine['name']}, PyTorch {machine['torch']}; {', '.join(parts)}."
    reasons = {float32_reason(row.record) for row in rows if row.record} - {None}
    if reasons:
        text += f" From technique 5 on all is trained in **float32** ({listed(sorted(reasons))})."
    return text


def float32_reason(record) -> str | None:
    """Returns why a script trained in float32 that trains in bfloat16 where it can, or None."""
    reason = record.config.get("dtype_reason")  # of technique 5 and later
    by_choice = record.config.get("autocast")  # only the weights are in float32
    return reason if record.config.get("dtype") == "float32" and not by_choice else None


def peak_note(matmul_peak: dict[str, float]) -> str:
    rates = ", ".join(f"{name} {flops / 1e12:,.2f}" for name, flops in matmul_peak.items())
    return f"Matmul throughput (matmul peak): {rates} TFLOP/s."


def speedup_note(rows: list[Row]) -> str:
    """Returns what the speedups of a table are over, and which rows aren't compiled."""
    over = "over the row above, or the nearest with numbers"
    if any(row.run.ablated for row in rows):
        over = "of the script with the technique over the one without it"
    elif one_reference(rows):
        over = "over the first row"
    text = f"Speedups are {over}; docs/methodology.md says what else the columns mean."
    if labels := [
        f"`{row.label}`" for row in rows if row.record and row.record.config.get("compile") is False
    ]:
        text += f" Not compiled, for lack of a compiler or by choice: {', '.join(labels)}."
    return text


def full_notes(measured, rows: list[Row], length: str | None = None) -> list[str]:
    """Returns what stands below a bench.report.tables.full_table; `length`, if it isn't the
    plan's, is that of a run."""
    plan, noise = measured.plan, rows[0].seed_noise
    if not length:
        length = f"{plan.tokens:,} tokens" if plan.tokens else "The scripts' own length"
    text = speedup_note(rows)
    if noise is not None:
        seeds = len(rows[0].losses_by_seed)
        text += f" Over {seeds} seeds the first row's losses vary by {noise:.4f}."
    return [f"{machine_note(measured, rows)} {length} per run. {peak_note(measured.peak)}", text]
