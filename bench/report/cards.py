"""What stands in the pages about each machine and each technique: tables and cards."""

import re
from pathlib import Path
from typing import Any

from bench.catalogue import published
from bench.common import REFERENCE, short_name
from bench.judge.rows import Row
from bench.report import check
from bench.report.tables import (
    Column,
    Table,
    bold,
    cell,
    found_in,
    markdown,
    number,
    within_01,
    words,
)
from patches import stack


def machines(first: Path) -> list[Path]:
    """The folders of the machines that were measured, `first` before the others."""
    return [first, *(path.parent for path in sorted(REFERENCE.glob("*/ladder.jsonl"))
                     if path.parent != first)]


def ladders(first: Path) -> list[tuple]:
    """(its newest measurement, rows by the run's name) of each machine that has a ladder."""
    found = [found_in(machine, "ladder") for machine in machines(first)]
    return [(measured, {row.run.name: row for row in rows})
            for (measured, rows), *_ in filter(None, found)]


# ---- A line for each machine -------------------------------------------------------------------


def results(first: Path, pages: str) -> str:
    """00 and 01 of every machine, the published ones first; `pages` is where results/ lies, seen
    from the page."""
    stages, source = published().stages, published().address
    plain, fast, many = (stages[name].tok_per_sec for name in ("00", "01", "02"))
    gpus, techniques = stages["02"].gpus, sum(patch.name != "ddp" for patch in stack.load())
    lines = [dict(machine=f"1 × A100, [published]({source}), techniques 1 to 10", plain=plain,
                  fast=fast, factor=fast / plain),
             dict(machine=f"{gpus} × A100, published", fast=many, factor=many / plain)]
    for measured, rows in ladders(first):
        known = [row for row in rows.values() if row.tok_per_sec and row.run.processes == 1]
        if not known or known[0].run.rung != 0 or not known[-1].factor_baseline:
            continue
        last, machine, folder = known[-1], measured.machine, measured.folder
        so_far = (f", {last.run.rung} of {techniques} techniques"
                  * (last.run.rung < techniques))
        models = sorted({row.record.config["model"] for row in rows.values() if row.record})
        cores = "" if machine["gpus"] else f", {machine['threads']} cores"
        where = f"{pages}/reference/{folder.name}"
        lines.append(dict(
            machine=f"{short_name(machine)}{cores}, `{'`, `'.join(models)}`{so_far}:"
                    f" [findings]({where}/README.md), [all tables]({where}/report.md)",
            plain=known[0].tok_per_sec, fast=last.tok_per_sec, factor=last.factor_baseline,
            time=times_to_loss(folder)))
    return markdown(Table([
        words("machine", "machine"), number("00, tok/sec", "plain", ",.0f"),
        number("all techniques, tok/sec", "fast", ",.0f"),
        Column("speed", lambda line: f"**{line['factor']:.1f}×**"),
        Column("to the same loss", lambda line: line.get("time", "–"), True)], lines))


def times_to_loss(machine: Path) -> str:
    """How many times as fast as 00, compilation counted, others come to a loss, with intervals: 01,
    both at their defaults, to the lowest of 00's default run; after a search also 01 and the
    fastest script, over 00, all at their best settings for the target that they were tuned for."""
    told = []
    for measured, rows in sorted(found_in(machine, "time-to-loss"), key=lambda pair: pair[0].kind):
        targets = measured.plan.targets
        if not targets or measured.kind not in ("", "epoch"):
            continue
        first, last = next(iter(targets)), [*targets][-1]
        tuned = [row for row in rows if row.run.rate and row.time_factor(targets[last], True)]
        fastest = max(tuned, key=lambda row: row.time_factor(targets[last], True), default=None)
        lines = [(first, row, "01 at its defaults") for row in rows
                 if row.run.stage == "01" and not row.run.rate]
        lines += [(last, row, f"`{row.run.stage}` at its best") for row in tuned
                  if row is fastest or row.run.stage == "01"]
        parts = {}
        for name, row, what in lines:
            if factor := row.time_factor(targets[name], True):
                interval = row.time_interval(targets[name], True)  # of two seeds or more
                within = " ({:.1f}–{:.1f})".format(*interval) if interval else ""
                parts.setdefault(name, []).append(f"{what} {factor:.1f}×{within}")
        seeds = min(row.rounds for row in rows)
        told += [f"to {targets[name]:.2f}{', of one epoch' * (name == 'epoch')}: {', '.join(each)};"
                 f" {seeds} seed{'s' * (seeds != 1)}" for name, each in parts.items()]
    return "; ".join(told) or "–"


# ---- A line for each technique -----------------------------------------------------------------


def techniques(first: Path) -> str:
    """What each technique is, what it does to the loss, and what it brought over the one before it:
    published, and on each machine; of a GPU also its memory (a CPU's is that of all the process).
    """
    found, before, rows = ladders(first), None, []
    within = [of_as_many(measured.folder, ladder) for measured, ladder in found]
    for place, patch in enumerate([None, *stack.load()]):
        figures = patch.published if patch else published().stages["00"]
        ddp = bool(patch) and patch.name == "ddp"
        name = Path(stack.file_of(patch.name) if patch else stack.FIRST).stem
        row: dict[str, Any] = dict(
            number="" if ddp else str(place), figures=figures,
            technique=f"baseline, [`{stack.FIRST}`]({stack.FIRST})" if not patch else
            f"[{patch.fields['Technique']}](patches/{patch.name}.patch)"
            + f", on {figures.gpus if figures else 1} GPUs" * ddp,
            loss=patch and patch.fields["Loss"].split()[0],
            factor=figures and before and figures.tok_per_sec / before.tok_per_sec)
        for (measured, ladder), in_01 in zip(found, within, strict=True):
            own = ladder.get(name)
            row[measured.folder.name] = dict(
                row=own, within=in_01.get(name),
                factor=own and bold(cell(own.factor, ".2f"), own.verdict))
        rows.append(row)
        before = figures or before
    columns = [number("#", "number"), words("technique", "technique"), words("loss", "loss"),
               number("published tok/sec", "figures.tok_per_sec", ",.0f"),
               number("×", "factor", ".2f"), number("GB", "figures.reserved_gb", ".2f")]
    for measured, _ in found:
        name, key = short_name(measured.machine), measured.folder.name
        columns += [number(f"{name}: ×", f"{key}.factor"),
                    number(f"{name}: × within 01", f"{key}.within"),
                    *[number(f"{name}: GB", f"{key}.row.reserved_gb", ".2f")]
                    * bool(measured.machine["gpus"])]
    return markdown(Table(columns, rows))


def of_as_many(folder: Path, ladder: dict[str, Row]) -> dict[str, str]:
    """What each technique brings within 01, where that was measured with all of the ladder's."""
    texts = within_01(folder)
    rungs = {name for name, row in ladder.items() if row.run.rung and row.run.processes == 1}
    return texts if texts.keys() == rungs else {}


# ---- Cards -------------------------------------------------------------------------------------


def cards(first: Path, study: str, unchanged: bool = True) -> str:
    """A card for each technique of the study ladder, or for each variant that leaves the loss
    `unchanged` or doesn't: its header, and what it brings: published, measured on each machine, and
    predicted."""
    patches = stack.load() if study == "ladder" else [
        patch for patch in stack.load_variants()
        if (patch.fields["Loss"] == "unchanged") == unchanged]
    measured = [(short_name(each.machine), row) for folder in machines(first)
                for each, rows in found_in(folder, study) for row in rows]
    figures: list[tuple[str, Any]] = [
        *measured, *(("predicted for an H100", each) for each in check.expected())]
    texts = []
    for place, patch in enumerate(patches, 1):
        fields, heading = patch.fields, patch.fields["Technique"]
        if study == "ladder" and patch.name != "ddp":
            heading = f"{place}. {heading}"
        lines = sum(len(new) - len(old) for _, old, _, new in patch.hunks)
        facts = [f"[`{patch.name}`](../{patch.file}): {lines:+} lines",
                 "; ".join(f"{name.lower()}: {fields[name]}"
                           for name in ("Loss", "Hardware", "Needs", "Excludes") if name in fields),
                 "source: " + ", ".join(f"<{each}>" for each in fields["Source"].split(", "))]
        if patch.published:
            facts.append(f"published: {patch.published.tok_per_sec:,.0f} tok/sec,"
                         f" {patch.published.reserved_gb:.2f} GB")
        for where, row in figures:
            if row.factor and row.run.script == patch.name:
                options = " ".join(re.findall(r"--[^`]+", row.label))
                facts.append(f"{where}{f', `{options}`' * bool(options)}: {row.factor:.2f} times"
                             f" the speed, {row.memory_factor:.2f} times the memory")
        prose = [" ".join(part.split()) for part in patch.header.decode().split("\n\n")[1:]]
        texts.append("\n\n".join([f"## {heading[0].upper()}{heading[1:]}", *filter(None, prose),
                                  "- " + "\n- ".join(facts)]))
    return "\n\n".join(texts) + "\n"
