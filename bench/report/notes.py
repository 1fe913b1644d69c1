"""What is said below a table: on which machine, how and how often it was measured, what its words
mean."""

import shlex
from collections.abc import Iterable
from functools import cache

from bench.analysis.rows import Row, seed_noise, speed_of
from bench.analysis.stats import ROUNDS, ROWS
from bench.catalogue import Scripts
from bench.common import listed
from bench.measure.journal import Measured
from bench.measure.plan import SEED
from bench.measure.records import Record
from bench.predict.speed import PEAK_FLOPS, card_of

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
    return f"{count} {noun}{'s' * (count != 1)}"


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
    return text + f", text: {measured.text}" * bool(measured.text)


def machine_note(measured, rows: list[Row]) -> str:
    """What was measured on, with which seeds and options, and in float32 where it is that."""
    rounds, first, machine = rounds_of(rows), measured.plan.first_seed, measured.machine
    seeds = f"seed {first}"
    if measured.plan.new_seeds and rounds > 1:
        seeds = f"seeds {first} to {first + rounds - 1}"
    seeds += f", {rounds_note(measured, rows)}"
    return (f"{machine['name']}, PyTorch {machine['torch']}; {seeds}{options_note(measured)}."
            + type_note(rows))


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
    published = "; the published figures, from there on, are in bfloat16"
    return (f" From technique 5 on all is trained in **float32** ({'; '.join(sorted(reasons))})"
            + published * any(row.run.published for row in rows) + ".")


def peaks(matmul_peak: dict[str, float]) -> str:
    rates = ", ".join(f"{name} {flops / 1e12:,.2f}" for name, flops in matmul_peak.items())
    return f"{rates} TFLOP/s"


def peak_note(measured) -> str:
    return f"Matmul throughput (matmul peak): {peaks(measured.peak)}."


def mfu_notes(records: Iterable[Record]) -> list[str]:
    """Why GPUs have no MFU, and what gives it."""
    gpus = {str(record.environment["gpu"]) for record in records
            if record.config["device"] == "cuda"} - PEAK_FLOPS.keys()
    return [f"No MFU of the {gpu}: " + (
        "it has no bfloat16 units, and MFU is a share of their rate." if card_of(gpu) else
        "its rate isn't known. An entry with this name in bench/predict/gpus.json,"
        " with its datasheet's dense bfloat16 rate, gives it.") for gpu in sorted(gpus)]


def significance_note(rows: list[Row]) -> str:
    """What "faster" means in a table, and which rows aren't tested."""
    column = rows[0].rows.judged(speed_of)
    failed = [f"`{row.label}`" for row in rows if row.speeds and row.outcome]
    named = f" Not tested, since one of its runs failed: {', '.join(failed)}." if failed else ""
    if not column.differences:
        return (f'"faster" and "slower" need {ROUNDS} rounds of {ROWS} rows, with some spread.'
                f"{named}")
    text = '"faster" and "slower": significant over the whole table (docs/methodology.md).'
    if len(column.rounds) < rounds_of(rows):
        text += (f" Rows are compared by the {counted(len(column.rounds), 'round')} that all have;"
                 " medians are of all.")
    missed = [row.least() for row in rows if row.least() and row.run.name not in column.significant]
    if missed:
        text += (" The minimum detectable effect of the other rows, which is found half the"
                 f" time, is a speedup of {min(missed):.2f} (in the row with the least noise) to"
                 f" {max(missed):.2f}.")
    return text + named


def design_note(measured, rows: list[Row]) -> list[str]:
    """What the test can't account for, by the way in which this was measured."""
    if not rows[0].rows.judged(speed_of).differences:
        return []
    plan, steps = measured.plan, {row.record.steps for row in rows if row.record}
    reasons = []
    if plan.order is None:
        reasons.append("all rounds had one order, so the speedups contain effects of the place in"
                       " it and of a machine that drifts")
    if rounds_of(rows) > plan.cold_rounds and any(
            row.record and row.record.config.get("compile") for row in rows):
        reasons.append("each script was compiled once, so one compilation's luck is in all its"
                       " rounds")
    if len(steps) > 1:
        reasons.append(f"runs were timed over {min(steps)} to {max(steps)} steps")
    return [f"What the test can't account for here: {'; '.join(reasons)}."] if reasons else []


def factor_note(rows: list[Row]) -> str:
    """What the factors of a table are over."""
    if any(row.run.without for row in rows):
        return ("The technique's speedup is the speed with it over the speed without it; \"faster\""
                " means that the script is faster with it.")
    text = ("The speedup is over the first row." if one_reference(rows) and len(rows) > 2 else
            "The speedup is over the row above, or over the nearest one that has numbers; the"
            " baseline is the first row.")
    return text + " The published speedups, from an A100, are in brackets." * any(
        row.published_factor for row in rows)


def full_notes(measured, rows: list[Row]) -> list[str]:
    """Below a bench.report.tables.full_table."""
    plan, machine = measured.plan, measured.machine
    length = (f"{plan.tokens:,} tokens per run" if plan.tokens else
              f"{plan.epochs} epoch{'s' * (plan.epochs > 1)} per run" if plan.epochs else
              "the scripts' own length")
    length += (f" or about {plan.seconds:g} s of training, whichever is longer"
               * bool(plan.seconds))
    when = f"after {plan.tokens:,} training tokens" if plan.tokens else "at the end of the run"
    noise = seed_noise(rows[0])
    no_tf32 = machine["device"] == "cuda" and measured.peak and "TF32" not in measured.peak
    factors = any(row.factor or row.run.without for row in rows)
    return [
        f"{machine['name']}, PyTorch {machine['torch']}. {length}, {rounds_note(measured, rows)},"
        f" seed {SEED}{options_note(measured)}. {peak_note(measured)}{type_note(rows)}",
        "tok/sec is the median over the rounds of each run's median step; the range is from the"
        f" slowest round to the fastest. {significance_note(rows)}",
        f"val loss is the validation loss {when}.",
        *([factor_note(rows)] if factors else []),
        *([f"Seed noise is the range of the first row's losses over"
           f" {len(rows[0].losses_by_seed)} seeds, {noise:.4f}."] if noise is not None else []),
        *design_note(measured, rows),
        *mfu_notes(row.record for row in rows if row.record),
        *["02 trains as many tokens on each GPU; its loss is the one after them, and its memory"
          " that of rank 0."] * any(row.run.processes > 1 for row in rows),
        *["This GPU has no TF32: float32 matmuls are really computed in float32, and"
          " technique 2 changes nothing."] * bool(no_tf32),
        *[r"\* without torch.compile: it found no compiler, or was told not to use it."] * any(
            row.uncompiled for row in rows),
        *["† too few steps for a median: the average of the run."] * any(
            row.speed_is_average for row in rows),
    ]
