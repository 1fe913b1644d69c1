"""Tables in Markdown: how a cell is written, the columns that studies share, and their notes."""

import math
import shlex
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from bench.catalogue import Scripts
from bench.judge.noise import ROUNDS_FOR_A_VERDICT
from bench.judge.rows import Row, difference, memory_of, noise_among, ratio, rows_of, seed_noise
from bench.measure.journal import Measured, journal_of, newest, read_journal, sha256
from bench.measure.plan import SEED
from bench.measure.records import Record
from bench.predict import fingerprint
from bench.predict.speed import PEAK_FLOPS, card_of
from patches.stack import StackError


class Column(NamedTuple):
    """`cell` gives a row's text; "" where there is nothing to show."""

    heading: str
    cell: Callable[..., str]  # of a row: a bench.judge.rows.Row, or what else the table is of
    left: bool = False  # set to the left, as text is


class Table(NamedTuple):
    columns: list[Column]
    rows: list
    caption: str = ""
    missing: str = ""  # what stands in an empty cell
    every_column: bool = False  # also those without a figure


def picture_name(study: str, kind: str) -> str:
    return f"{study}-{kind}" if kind else study


TARGETS = {  # what the targets of a time to a loss are
    "published": "the lowest validation loss of 00 in its default run",
    "best": "the lowest validation loss of 00 at its best learning rate",
}


def cell(value: float | None, form: str) -> str:
    """A figure, or nothing where there is none."""
    return "" if value is None else format(value, form)


def spread(values: list[float], form: str = ",.0f") -> str:
    """From the least to the most; nothing for a single one."""
    return f"{min(values):{form}}–{max(values):{form}}" if len(values) > 1 else ""


def number(heading: str, name: str, form: str) -> Column:
    """A column of a figure of Row."""
    return Column(heading, lambda row: cell(getattr(row, name), form))


def bold(text: str, verdict: str | None) -> str:
    """In bold if it is measurable."""
    return f"**{text}**" if text and verdict in ("faster", "slower", "more", "less") else text


RUN = Column("run", lambda row: row.label, True)
CODE = Column("run", lambda row: f"`{row.label}`", True)
SPEED = number("tok/sec", "tok_per_sec", ",.0f")
SPEED_OR_ERROR = Column("tok/sec", lambda row: row.error or SPEED.cell(row))
RANGE = Column("range", lambda row: spread(row.speeds))
FACTOR = Column("× speed", lambda row: row.error or bold(cell(row.factor, ".2f"), row.verdict))
GB = number("GB", "reserved_gb", ".2f")
MEMORY_FACTOR = Column("× memory", lambda row: bold(cell(row.memory_factor, ".2f"),
                                                    row.memory_verdict))
LOSS = number("val loss", "val_loss", ".4f")
EXPECTED_LOSS = Column("expected effect on the loss", lambda row: row.run.loss or "", True)


def markdown(table: Table) -> str:
    """A column without a figure on this machine is left out, unless the table wants every one."""
    columns, lines = [], []
    for column in table.columns:
        cells = [column.cell(row) for row in table.rows]
        if any(cells) or table.every_column:
            columns.append([column.heading, ":--" if column.left else "--:", *cells])
    for line in zip(*columns, strict=True):
        cells = [(text or table.missing).replace("|", r"\|") for text in line]
        lines.append("| " + " | ".join(cells) + " |\n")
    return (f"{table.caption}\n\n" if table.caption else "") + "".join(lines)


used: list[Measured] = []  # what found_in() has given, for who tells of which version it is


def found_in(folder: Path, study: str) -> list[tuple[Measured, list[Row]]]:
    """The newest measurement of each kind of a study, with its rows."""
    found = newest(read_journal(journal_of(folder, study)))
    used.extend(found)
    return [(each, rows_of(each)) for each in found]


def within_01(folder: Path) -> dict[str, str]:
    """What leave-one-out says that each technique brings within 01, by the name of its rung; or why
    it couldn't be left out ("conflict", "failed")."""
    return {row.run.without: row.error.partition(":")[0] if row.error else
            bold(cell(row.technique_factor, ".2f"), row.verdict)
            for measured, rows in found_in(folder, "leave-one-out") if not measured.kind
            for row in rows if row.run.without}


def tables_of(study, measured, rows: list[Row]) -> list[Table]:
    """What a report shows of a plan that was measured."""
    own = study.tables(measured, rows)
    return [full_table(rows)] if own is None else own


def text_of(study, measured) -> str:
    """All tables of a plan that was measured, and what has to be said of them."""
    rows = rows_of(measured)
    notes = study.notes(measured, rows)
    text = "\n".join(map(markdown, tables_of(study, measured, rows)))
    notes = full_notes(measured, rows) if notes is None else notes
    return text + "".join(f"\n{note}\n" for note in notes) + versions_note([measured])


def excerpts_of(study, measured) -> dict[str, str]:
    """What the markers of a page ask for, by their names."""
    rows = rows_of(measured)
    found = study.excerpts(measured, rows) or {
        picture_name(study.name, measured.kind):
        study.tables(measured, rows) or [short_table(rows)]}
    note = versions_note([measured])
    return {name: "\n".join(map(markdown, tables)) + note for name, tables in found.items()}


def full_table(rows: list[Row]) -> Table:
    """Every column that a study of techniques or alternatives may have."""
    def factor(ours: str, theirs: str):
        def cell_of(row: Row) -> str:
            figure, published = cell(getattr(row, ours), ".2f"), getattr(row, theirs)
            return f"{figure or 'n/a'} ({published:.2f})" if published else figure

        return cell_of

    def technique(row: Row) -> str:
        return row.technique + r" \*" * row.uncompiled + " †" * row.speed_is_average

    def outcome(row: Row) -> str:
        return row.error or row.verdict or ("baseline" if row is rows[0] else "")

    published = " (A100)" if any(row.published_factor_baseline for row in rows) else ""
    without = any(row.run.without for row in rows)
    factors = [Column(f"factor{published}", factor("factor", "published_factor"))]
    if without:  # whose factor is the inverse of the other
        factors = [number("technique's factor", "technique_factor", ".2f")]
    baseline, memory = [], []
    if not one_reference(rows):
        baseline = [Column(f"over the baseline{published}",
                           factor("factor_baseline", "published_factor_baseline")),
                    number("Δ loss, baseline", "loss_difference_baseline", "+.4f")]
    elif not without:  # alternatives
        memory = [number("× GB", "memory_factor", ".2f"),
                  Column("memory", lambda row: row.memory_verdict or "", True)]
    columns = [
        RUN, Column("technique", technique, True), SPEED, RANGE, *factors, *baseline[:1],
        number("reserved GB", "reserved_gb", ".2f"), *memory[:1],
        Column("first step s", lambda row: cell(row.record and row.record.first_step_seconds,
                                                ".1f")),
        LOSS, number("Δ loss", "loss_difference", "+.4f"), *baseline[1:],
        Column("within seed noise",
               lambda row: {None: "", True: "yes", False: "no"}[row.within_seed_noise]),
        EXPECTED_LOSS, number("of matmul peak", "share_of_peak", ".1%"),
        number("MFU", "mfu", ".1%"),
        Column("attention", lambda row: (row.record and row.record.end["attention_backend"]) or "",
               True),
        Column("verdict", outcome, True),
        *memory[1:],
    ]
    return Table(columns, rows, missing="n/a")


def short_table(rows: list[Row]) -> Table:
    """The columns of alternatives that a page for readers has."""
    return Table([
        CODE, SPEED, FACTOR, GB, MEMORY_FACTOR,
        Column("first step, s", lambda row: cell(row.record and row.record.first_step_seconds,
                                                 ".1f")),
        number("Δ loss", "loss_difference", "+.3f"), EXPECTED_LOSS], rows)


def one_reference(rows: list[Row]) -> bool:
    """Whether every row is compared to the first one."""
    return all(row.factor == row.factor_baseline for row in rows)


def time_tables(rows: list[Row], targets: dict[str, float]) -> list[Table]:
    """How long each run took to each target; without targets, what the runs set as one."""
    if not targets:
        def lowest(row: Row) -> str:
            return row.error or cell(row.lowest_val_loss, ".4f") or "n/a"

        return [Table([RUN, Column("lowest val loss", lowest), SPEED], rows)]
    return [Table(time_columns(target), rows, f"Target {target:.4f}, {TARGETS[name]}:",
                  every_column=True)
            for name, target in targets.items()]


def time_columns(target: float) -> list[Column]:
    def seconds(row: Row) -> str:
        return row.error or cell(row.seconds_to(target), ",.1f") or "not reached"

    def spread_of(row: Row) -> str:
        times = [seconds for _, seconds in row.times_to(target)]
        low, high = min(times, default=math.inf), max(times, default=math.inf)
        if len(times) < 2 or low == math.inf:
            return ""
        return f"{low:,.1f}–" + ("not reached" if high == math.inf else f"{high:,.1f}")

    def factor(with_first_step: bool):
        def cell_of(row: Row) -> str:
            theirs = row.versus.seconds_to(target, with_first_step) if row.versus else None
            text = cell(ratio(theirs, row.seconds_to(target, with_first_step)), ".2f")
            verdict = row.time_verdict(target) if row.versus and not with_first_step else None
            return bold(text, verdict)

        return cell_of

    return [
        RUN, SPEED, Column("× tok/sec", lambda row: cell(row.factor, ".2f")),
        Column("tokens", lambda row: cell(row.tokens_to(target), ",.0f")),
        Column("seconds", seconds), Column("range", spread_of), Column("× time", factor(False)),
        Column("compile, s", lambda row: cell(
            difference(row.seconds_to(target, True), row.seconds_to(target)), ".1f")),
        Column("× time incl. compile", factor(True)),
        Column("compared to", lambda row: row.versus.label if row.versus else "", True),
    ]


# ---- Of which version of the scripts -----------------------------------------------------------


today = cache(Scripts)  # in one process they are read once


def versions(measured: Iterable[Measured]) -> dict[bool | None, list[str]]:
    """The script of each result, by whether it has the same training step today; None where that
    isn't known. Scripts that aren't ours are left out. Raises UserError, StackError, OSError."""
    asked, found = [], {True: [], False: [], None: []}
    for each in measured:
        runs = {run.name: run for run in each.plan.runs if run.script}
        for result in each.results:
            try:
                run = runs[result.name]
                text, name = today().text(str(run.script)), today().canonical(str(run.script))
            except (KeyError, StackError):  # of a peer, or it is gone
                continue
            if sha256(text) == result.source_sha256:
                found[True].append(name)
            else:
                asked.append((name, fingerprint.of_run(
                    text, run, each.plan, each.options, each.machine), result.step))
    fingerprint.learn([(request, step) for _, request, step in asked])
    for name, request, step in asked:
        found[fingerprint.same(request, step, "step")].append(name)
    return found


def versions_note(measured: Iterable[Measured]) -> str:
    """A line, with a blank one before it, where figures are of another version of a script than
    today's, or may be."""
    found = {same: list(dict.fromkeys(names)) for same, names in versions(measured).items()}
    count = len({name for names in found.values() for name in names})
    told = [f"{words} version of " + (
        ", ".join(found[same]) if len(found[same]) < 5 else
        f"{len(found[same])} of {count} scripts")
        for same, words in ((False, "an earlier"), (None, "an unknown")) if found[same]]
    return f"\nMeasured with {'; with '.join(told)}.\n" if told else ""


# ---- Notes -------------------------------------------------------------------------------------


def rounds_of(rows: list[Row]) -> int:
    return max((row.rounds for row in rows), default=0)


def options_note(measured) -> str:
    options = [*measured.plan.options, *measured.options]
    text = f", options `{shlex.join(options)}`" if options else ""
    for published, batch in measured.plan.batches.items():
        text += f", batch size {batch} in place of {published}"
    return text + f", text: {measured.text}" * bool(measured.text)


def machine_note(measured, rows: list[Row]) -> str:
    """What was measured on, with which seeds and options, and in float32 where it is that."""
    rounds, first = rounds_of(rows), measured.plan.first_seed
    seeds = f"seed {first}, {rounds} round{'s' * (rounds != 1)}"
    if measured.plan.new_seeds:
        seeds = f"seeds {first} to {first + rounds - 1}" if rounds > 1 else f"seed {first}"
    machine = measured.machine
    text = f"{machine['name']}, PyTorch {machine['torch']}; {seeds}{options_note(measured)}."
    return text + type_note(rows)


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
            + published * any(row.published for row in rows) + ".")


def peaks(matmul_peak: dict[str, float]) -> str:
    rates = ", ".join(f"{name} {flops / 1e12:,.2f}" for name, flops in matmul_peak.items())
    return f"{rates} TFLOP/s"


def mfu_notes(records: Iterable[Record]) -> list[str]:
    """Why GPUs have no MFU, and what gives it."""
    gpus = {str(record.environment["gpu"]) for record in records
            if record.config["device"] == "cuda"} - PEAK_FLOPS.keys()
    return [f"No MFU of the {gpu}: " + (
        "it has no bfloat16 units, whose rate MFU is a share of." if card_of(gpu) else
        "its rate isn't known. A line for this name in `PEAK_FLOPS` (bench/predict/speed.py),"
        " with its datasheet's dense bfloat16 rate, gives it.") for gpu in sorted(gpus)]


def peak_note(measured) -> str:
    return f"Matrix products (matmul peak): {peaks(measured.peak)}."


def time_notes(measured, rows: list[Row]) -> list[str]:
    """Below time_tables."""
    if not measured.plan.targets:
        return [machine_note(measured, rows), "Medians over the seeds. What is compared to the"
                " lowest of them is its time to it."]
    disturbed = [disturbed_note(measured)] if measured.disturbed else []
    return [
        machine_note(measured, rows), *disturbed,
        "Seconds of training until the validation loss has fallen to the target, by a straight line"
        " between log lines; medians over the seeds, with their range. The first step counts as"
        " long as a median one; the rest of it, compilation with an empty cache above all, is"
        ' "compile, s" and is in "× time incl. compile".',
        '"× tok/sec" and "× time" are over the row named in "compared to"; bold: more than noise'
        f" (from {ROUNDS_FOR_A_VERDICT} seeds on). A run that has trained on"
        f" {measured.plan.tokens:,} tokens without coming to the target hasn't reached it.",
    ]


def disturbed_note(measured) -> str:
    runs = [f"{result.name} (round {result.round})" for result in measured.disturbed]
    return (f"**Disturbed**: right after {len(runs)} of {len(measured.results)} runs the machine's"
            " matrix products were slower, by a fifth or more, than after the best quarter:"
            f" {', '.join(runs[:6])}" + ", ..." * (len(runs) > 6) + ".")


def verdict_note(rows: list[Row], rounds: int) -> str:
    """What "faster" means in a table."""
    speed, memory = noise_among(rows), noise_among(rows, memory_of)
    if rounds < ROUNDS_FOR_A_VERDICT or not speed:
        return f'"faster" and "slower" need {ROUNDS_FOR_A_VERDICT} rounds.'
    text = ('"faster" and "slower" need a mean ratio over the rounds of at least'
            f" {math.exp(speed.least(rounds)):.2f}, or its inverse, and more for a row with more"
            " noise of its own: noise alone makes one such ratio in fewer than 1 of 20 tables.")
    if memory and any(row.memory_verdict for row in rows) and one_reference(rows):
        text += f' "less" and "more" memory need {math.exp(memory.least(rounds)):.2f}.'
    return text


def full_notes(measured, rows: list[Row]) -> list[str]:
    """Below a full_table."""
    plan, machine, rounds = measured.plan, measured.machine, rounds_of(rows)
    length = f"{plan.tokens:,} tokens per run" if plan.tokens else "the scripts' own length"
    if plan.epochs and not plan.tokens:
        length = f"{plan.epochs} epochs per run"
    if plan.seconds:
        length += f" or about {plan.seconds:g} s of training, whichever is longer"
    notes = [
        f"{machine['name']}, PyTorch {machine['torch']}. {length},"
        f" {rounds} round{'s' * (rounds != 1)}, seed {SEED}{options_note(measured)}."
        f" {peak_note(measured)}{type_note(rows)}",
        "tok/sec is the median over the rounds of each run's median step; the range is from the"
        f" slowest round to the fastest. {verdict_note(rows, rounds)}",
        f"val loss is the validation loss after {plan.tokens:,} training tokens."
        if plan.tokens else "val loss is the validation loss at the end of the run.",
    ]
    if any(row.run.without for row in rows):
        notes += ["The technique's factor is the speed with it over the speed without it;"
                  ' "faster" means that the script is faster with it.']
    elif any(row.factor for row in rows):
        published = any(row.published_factor for row in rows)
        first = one_reference(rows) and len(rows) > 2
        notes += [("The factor is over the first row." if first else
                   "The factor is over the row above, or the nearest one above that has figures;"
                   " the baseline is the first row.")
                  + " The published factors, from an A100, are in brackets." * published]
    noise = seed_noise(rows[0])
    if noise is not None:
        notes += [f"Seed noise is the range of the first row's losses over"
                  f" {len(rows[0].losses_by_seed)} seeds, {noise:.4f}."]
    notes += mfu_notes(row.record for row in rows if row.record)
    if measured.disturbed:
        notes += [disturbed_note(measured)]
    if any(row.run.processes > 1 for row in rows):
        notes += ["02 trains as many tokens on each GPU; its loss is the one after them, and its"
                  " memory that of rank 0."]
    if machine["device"] == "cuda" and measured.peak and "TF32" not in measured.peak:
        notes += ["This GPU has no TF32: products of float32 matrices are what their name says,"
                  " and technique 2 changes nothing."]
    if any(row.uncompiled for row in rows):
        notes += [r"\* without torch.compile: it found no compiler, or was told not to use it."]
    if any(row.speed_is_average for row in rows):
        notes += ["† too few steps for a median: the average of the run."]
    return notes
