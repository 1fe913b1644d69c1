"""What stands in the pages about each machine and each technique: tables and cards."""

import math
import re
from pathlib import Path
from typing import NamedTuple

from bench.catalogue import published
from bench.common import REFERENCE, short_name
from bench.judge.rows import Row, ratio
from bench.report import check
from bench.report.tables import Column, Table, bold, cell, found_in, markdown, within_01
from patches import stack


def machines(first: Path) -> list[Path]:
    """The folders of the machines that were measured, `first` before the others."""
    return [first, *(path.parent for path in sorted(REFERENCE.glob("*/ladder.jsonl"))
                     if path.parent != first)]


def ladder_of(machine: Path) -> tuple:
    """(its newest measurement, rows by the run's name); (None, {}) without one."""
    measured, rows = next(iter(found_in(machine, "ladder")), (None, []))
    return measured, {row.run.name: row for row in rows}


# ---- A line for each machine -------------------------------------------------------------------


class Result(NamedTuple):
    machine: str
    baseline: float | None  # tok/sec of 00
    optimized: float | None  # of 01, or of 02
    factor: float | None
    time: str = "–"  # how many times as fast it is to the same loss


def results(first: Path, pages: str) -> str:
    """00 and 01 of every machine, the published ones first; `pages` is where results/ lies, seen
    from the page."""
    stages, source = published().stages, published().address
    plain, fast, many = (stages[name] for name in ("00", "01", "02"))
    lines = [Result(f"1 × A100, [published]({source}), techniques 1 to 10",
                    plain.tok_per_sec, fast.tok_per_sec, fast.tok_per_sec / plain.tok_per_sec),
             Result(f"{many.gpus} × A100, published", None, many.tok_per_sec,
                    many.tok_per_sec / plain.tok_per_sec)]
    techniques = sum(patch.name != "ddp" for patch in stack.load())
    for folder in machines(first):
        measured, rows = ladder_of(folder)
        if not measured:
            continue
        known = [row for row in rows.values() if row.tok_per_sec and row.run.processes == 1]
        plain, fast = rows.get(Path(stack.FIRST).stem), known[-1] if known else None
        if not plain or not fast or not fast.factor_baseline:
            continue
        number = fast.run.rung
        so_far = f", {number} of {techniques} techniques" * (number < techniques)
        machine = measured.machine
        model = {row.record.config["model"] for row in rows.values() if row.record}
        cores = "" if machine["gpus"] else f", {machine['threads']} cores"
        where = f"{pages}/reference/{folder.name}"
        lines.append(Result(
            f"{short_name(machine)}{cores}, `{'`, `'.join(sorted(model))}`{so_far}:"
            f" [findings]({where}/README.md), [all tables]({where}/report.md)",
            plain.tok_per_sec, fast.tok_per_sec, fast.factor_baseline, times_to_loss(folder)))
    return markdown(Table([
        Column("machine", lambda line: line.machine, True),
        Column("00, tok/sec", lambda line: cell(line.baseline, ",.0f")),
        Column("all techniques, tok/sec", lambda line: cell(line.optimized, ",.0f")),
        Column("speed", lambda line: f"**{line.factor:.1f}×**"),
        Column("to the same loss", lambda line: line.time, True)], lines))


def times_to_loss(machine: Path) -> str:
    """How many times as fast as 00 others are to the first target: 01, both at their defaults;
    after a search also 01 and the fastest script, over 00, all at their best settings, and the
    last one with compilation."""
    for measured, rows in found_in(machine, "time-to-loss"):
        if measured.kind:
            continue
        target = next(iter(measured.plan.targets.values()))
        times = {row.label: row.seconds_to(target) for row in rows}
        tuned = [row for row in rows if row.run.rate]
        best = {row.run.stage: row.seconds_to(target) for row in tuned}
        compiled = {row.run.stage: row.seconds_to(target, True) for row in tuned}
        fastest = min(best, key=lambda stage: best[stage] or math.inf, default=None)
        parts = [("01 at its defaults", ratio(times.get("00"), times.get("01"))),
                 ("over 00 at its best: 01", ratio(best.get("00"), best.get("01")))]
        if fastest not in ("00", "01", None):
            parts.append((f"`{fastest}`", ratio(best["00"], best[fastest])))
        told = "; ".join(f"{name} {factor:.1f}×" for name, factor in parts if factor)
        if fastest not in ("00", None) and (whole := ratio(compiled["00"], compiled[fastest])):
            told += f", {whole:.1f}× with its compilation"
        seeds = min(row.rounds for row in rows)
        return f"{told} ({seeds} seed{'s' * (seeds != 1)})" if told else "–"
    return "–"


# ---- A line for each technique -----------------------------------------------------------------


class Technique(NamedTuple):
    number: str
    link: str
    loss: str
    published: stack.Published | None
    published_factor: float | None  # over the one before it
    measured: list[Row | None]  # by each machine
    in_01: list[str]  # what it brings within 01, by each machine


def techniques(first: Path) -> str:
    """What each technique is, what it does to the loss, and what it brought over the one before it:
    published, and on each machine."""
    ladders = [ladder for ladder in map(ladder_of, machines(first)) if ladder[0]]
    left_out = [of_as_many(measured.folder, rows) for measured, rows in ladders]
    baseline, before, rows = published().stages["00"], None, []
    for number, patch in enumerate([None, *stack.load()]):
        figures = patch.published if patch else baseline
        ddp = bool(patch) and patch.name == "ddp"
        link = f"baseline, [`{stack.FIRST}`]({stack.FIRST})" if not patch else (
            f"[{patch.fields['Technique']}](patches/{patch.name}.patch)"
            + f", on {figures.gpus if figures else 1} GPUs" * ddp)
        name = Path(stack.file_of(patch.name) if patch else stack.FIRST).stem
        rows.append(Technique(
            "" if ddp else str(number), link, patch.fields["Loss"].split()[0] if patch else "",
            figures, figures and before and figures.tok_per_sec / before.tok_per_sec,
            [ladder.get(name) for _, ladder in ladders],
            [texts.get(name, "") for texts in left_out]))
        before = figures or before

    def columns_of(place: int, machine: dict) -> list[Column]:
        """Its factors; and the memory of a GPU (a CPU's is that of all the process)."""
        def factor(row: Technique) -> str:
            own = row.measured[place]
            return bold(cell(own.factor, ".2f"), own.verdict) if own else ""

        def memory(row: Technique) -> str:
            own = row.measured[place]
            return cell(own.reserved_gb, ".2f") if own else ""

        name = short_name(machine)
        columns = [Column(f"{name}: ×", factor),
                   Column(f"{name}: × within 01", lambda row: row.in_01[place]),
                   Column(f"{name}: GB", memory)]
        return columns if machine["gpus"] else columns[:2]

    return markdown(Table([
        Column("#", lambda row: row.number), Column("technique", lambda row: row.link, True),
        Column("loss", lambda row: row.loss, True),
        Column("published tok/sec", lambda row: cell(
            row.published and row.published.tok_per_sec, ",.0f")),
        Column("×", lambda row: cell(row.published_factor, ".2f")),
        Column("GB", lambda row: cell(row.published and row.published.reserved_gb, ".2f")),
        *(column for place, (measured, _) in enumerate(ladders)
          for column in columns_of(place, measured.machine))], rows))


def of_as_many(folder: Path, ladder: dict[str, Row]) -> dict[str, str]:
    """What each technique brings within 01, where that was measured with all of the ladder's."""
    texts = within_01(folder)
    rungs = {name for name, row in ladder.items() if row.run.rung and row.run.processes == 1}
    return texts if texts.keys() == rungs else {}


# ---- Cards -------------------------------------------------------------------------------------


def cards(first: Path, patches: list[stack.Patch], study: str) -> str:
    """A card for each technique, or variant: its header, and what it brings: published, measured on
    each machine by `study`, and predicted."""
    found = [pair for folder in machines(first) for pair in found_in(folder, study)]
    texts, expected = [], check.expected()
    for number, patch in enumerate(patches, 1):
        heading = patch.fields["Technique"]
        if study == "ladder" and patch.name != "ddp":
            heading = f"{number}. {heading}"
        prose = patch.header.decode().split("\n\n")[1:]
        lines = sum(len(new) - len(old) for _, old, _, new in patch.hunks)
        sources = ", ".join(f"<{each}>" for each in patch.fields["Source"].split(", "))
        facts = [f"[`{patch.name}`](../{patch.file}): {lines:+} lines",
                 "; ".join(f"{name.lower()}: {patch.fields[name]}" for name in (
                     "Loss", "Hardware", "Needs", "Excludes") if name in patch.fields),
                 f"source: {sources}"]
        if patch.published:
            facts.append(f"published: {patch.published.tok_per_sec:,.0f} tok/sec,"
                         f" {patch.published.reserved_gb:.2f} GB")
        facts += [brings(short_name(measured.machine), row.label, row.factor, row.memory_factor)
                  for measured, rows in found for row in rows
                  if row.factor and patch.name == row.run.script]
        facts += [brings("predicted for an H100", row.label,
                         row.tok_per_sec / row.versus.tok_per_sec,
                         row.gigabytes / row.versus.gigabytes)
                  for row in expected if row.script == patch.name and row.versus]
        texts.append("\n\n".join([f"## {heading[0].upper()}{heading[1:]}",
                                  *(" ".join(part.split()) for part in prose if part.strip()),
                                  "- " + "\n- ".join(facts)]))
    return "\n\n".join(texts) + "\n"


def brings(where: str, label: str, speed: float, memory: float) -> str:
    """A card's line; of a variant that has options it names them."""
    options = " ".join(re.findall(r"--[^`]+", label))
    return (f"{where}{f', `{options}`' * bool(options)}: {speed:.2f} times the speed,"
            f" {memory:.2f} times the memory")
