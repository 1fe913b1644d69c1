"""What stands in the pages about each machine and each technique: tables and cards."""

import re
from pathlib import Path
from typing import Any

from bench.catalogue import Scripts, published
from bench.common import REFERENCE, short_name
from bench.judge.rows import Row, rate_to
from bench.report import check, gpus
from bench.report.names import ADVICE, called
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

PREDICTED = "H100", "RTX 4090"  # the GPUs in README's first table


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


def headline(first: Path) -> str:
    """One number a cell: baseline and optimized script as published, as predicted for two GPUs, and
    as measured on each machine."""
    stages, source = published().stages, published().address
    plain, fast, many = (stages[name].tok_per_sec for name in ("00", "01", "02"))
    theirs, ours = f"[published]({source})", "[predicted](docs/predictions.md)"
    lines = [dict(hardware="1 × A100, techniques 1 to 10", source=theirs, plain=plain, fast=fast,
                  factor=fast / plain),
             dict(hardware=f"{stages['02'].gpus} × A100, DDP", source=theirs, fast=many,
                  factor=many / plain)]
    for name in PREDICTED:
        one, other = gpus.on_card(Scripts(), name, ("gpt2",))["speeds"]
        lines.append(dict(hardware=f"1 × {name}", source=ours, plain=rounded(one),
                          fast=rounded(other), factor=other / one))
    for end in both_ends(first):
        lines.append(end | dict(
            hardware=end["machine"],
            source=f"[measured](results/reference/{end['folder'].name}/README.md)"))
    return markdown(Table([
        words("hardware", "hardware"), words("source", "source"),
        number("baseline, tok/sec", "plain", ",.0f"),
        number("optimized, tok/sec", "fast", ",.0f"),
        Column("speedup", lambda line: f"**{line['factor']:.1f}×**")], lines))


def rounded(speed: float) -> float:
    """A prediction isn't known to more than three digits."""
    return float(f"{speed:.3g}")


def both_ends(first: Path) -> list[dict]:
    """What 00 and the ladder's last script make on each machine."""
    techniques, ends = sum(patch.name != "ddp" for patch in stack.load()), []
    for measured, rows in ladders(first):
        known = [row for row in rows.values() if row.tok_per_sec and row.run.processes == 1]
        if not known or known[0].run.rung != 0 or not known[-1].factor_baseline:
            continue
        last, machine, folder = known[-1], measured.machine, measured.folder
        so_far = f", {last.run.rung} of {techniques} techniques" * (last.run.rung < techniques)
        models = sorted({row.record.config["model"] for row in rows.values() if row.record})
        cores = "" if machine["gpus"] else f", {machine['threads']} cores"
        ends.append(dict(
            machine=f"{short_name(machine)}{cores}, `{'`, `'.join(models)}`{so_far}", folder=folder,
            name=short_name(machine), plain=known[0].tok_per_sec, fast=last.tok_per_sec,
            factor=last.factor_baseline))
    return ends


def results(first: Path) -> str:
    """Both ends of every machine's ladder, and the times to a loss, for a page in docs/."""
    lines = both_ends(first)
    for line in lines:
        where = f"../results/reference/{line['folder'].name}"
        line["machine"] += f": [findings]({where}/README.md), [all tables]({where}/report.md)"
        line["time"] = "; ".join(f"to {target:.2f}: {what} {factor}"
                                 for target, what, factor, _ in times_to_loss(line["folder"]))
    return markdown(Table([
        words("machine", "machine"), number("baseline, tok/sec", "plain", ",.0f"),
        number("optimized, tok/sec", "fast", ",.0f"),
        Column("speedup", lambda line: f"**{line['factor']:.1f}×**"),
        Column("to the same loss", lambda line: line["time"] or "–", True)], lines))


def to_loss(first: Path) -> str:
    """The speedups to a loss, compilation counted: a row for each script, a column for each of
    three machines at most."""
    ends = both_ends(first)[:3]
    lines: dict[tuple, dict] = {}
    for end in ends:
        for target, what, factor, seeds in times_to_loss(end["folder"]):
            end["seeds"] = min(seeds, end.get("seeds", seeds))
            line = lines.setdefault((what, f"{target:.2f}"), dict(what=what, to=f"{target:.2f}"))
            line[end["folder"].name] = factor
    return markdown(Table([
        words("script", "what"), number("to a loss of", "to"),
        *(number(f"{end['name']}, {end['seeds']} seed{'s' * (end['seeds'] != 1)}",
                 end["folder"].name) for end in ends if "seeds" in end)], list(lines.values())))


def times_to_loss(machine: Path) -> list[tuple[float, str, str, int]]:
    """(target, script, how many times as fast as 00 it comes there, with an interval, of how many
    seeds), compilation counted: 01, both at their defaults, to the lowest loss of 00's default run;
    after a search also 01 and the fastest script, over 00, all at their best settings for the
    target that they were tuned for."""
    told = []
    for measured, rows in sorted(found_in(machine, "time-to-loss"), key=lambda pair: pair[0].kind):
        targets = measured.plan.targets
        if not targets or measured.kind not in ("", "epoch"):
            continue
        first, last = next(iter(targets)), [*targets][-1]
        rate = rate_to(targets[last], True)
        tuned = [row for row in rows if row.run.rate and row.factor_of(rate, row.versus)]
        fastest = max(tuned, key=lambda row: row.factor_of(rate, row.versus), default=None)
        lines = [(first, row, "01 at its defaults") for row in rows
                 if row.run.stage == "01" and not row.run.rate]
        lines += [(last, row, f"`{row.run.stage}` at its best") for row in tuned
                  if row is fastest or row.run.stage == "01"]
        for name, row, what in lines:
            rate = rate_to(targets[name], True)
            if factor := row.factor_of(rate, row.versus):
                interval = row.interval(rate)  # of two seeds or more
                within = " ({:.1f}–{:.1f})".format(*interval) if interval else ""
                told.append((targets[name], what + ", one epoch" * (name == "epoch"),
                             f"{factor:.1f}×{within}", row.rounds))
    return told


# ---- A line for each technique -----------------------------------------------------------------


def techniques(first: Path, page: str = "docs/techniques.md") -> str:
    """A row for each technique, the largest published gain first: what it does to the loss, and its
    speedup over the technique before it, published and on three machines at most; `page` has the
    cards."""
    found, rows = ladders(first)[:3], []
    for place, patch, figures, factor in steps():
        row: dict[str, Any] = dict(
            technique=f"[{title(place, patch)}]({page}#{anchor(title(place, patch))})"
            + f", on {figures.gpus if figures else 1} GPUs" * (patch.name == "ddp"),
            loss=patch.fields["Loss"].split()[0], factor=factor)
        for measured, ladder in found:
            own = ladder.get(patch.name)
            row[measured.folder.name] = own and bold(cell(own.factor, ".2f"), own.verdict)
        rows.append(row)
    return markdown(Table([
        words("technique", "technique"), words("loss", "loss"),
        number("A100, published: ×", "factor", ".2f"),
        *(number(f"{short_name(measured.machine)}: ×", measured.folder.name)
          for measured, _ in found)], by_gain(rows)))


def index(first: Path) -> str:
    """The same rows for the page with the cards: what is expected of an H100, and when to use each.
    """
    predicted = {row.run.script: row.factor for row in check.ladder() if not row.run.torchrun}
    rows = [dict(technique=f"[{title(place, patch)}](#{anchor(title(place, patch))})",
                 loss=patch.fields["Loss"].split()[0], factor=factor,
                 predicted=predicted.get(patch.name), advice=ADVICE.get(patch.name))
            for place, patch, _, factor in steps()]
    return markdown(Table([
        words("technique", "technique"), number("A100, published: ×", "factor", ".2f"),
        number("H100, predicted: ×", "predicted", ".2f"), words("loss", "loss"),
        words("use it when", "advice.use"), words("it doesn't help", "advice.not_for")],
        by_gain(rows)))


def steps() -> list[tuple]:
    """(its number, its patch, the published figures, their factor over the figures before) of each
    technique; DDP's come last."""
    found, before = [], published().stages["00"]
    for place, patch in enumerate(stack.load(), 1):
        figures = patch.published
        found.append((place, patch, figures, figures and figures.tok_per_sec / before.tok_per_sec))
        before = figures or before
    return found


def by_gain(rows: list[dict]) -> list[dict]:
    """Those of the ladder by their published gain, the ones without a figure after them."""
    return [*sorted(rows[:-1], key=lambda row: -(row["factor"] or 0)), rows[-1]]


def title(place: int, patch) -> str:
    """The heading of a technique's card."""
    name = called(patch.name, patch.fields["Technique"])
    return name if patch.name == "ddp" else f"{place}. {name}"


def anchor(heading: str) -> str:
    """As code hosts make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def of_as_many(folder: Path, ladder: dict[str, Row]) -> dict[str, str]:
    """What each technique brings within 01, where that was measured with all of the ladder's."""
    texts = within_01(folder)
    rungs = {name for name, row in ladder.items() if row.run.rung and row.run.processes == 1}
    return texts if texts.keys() == rungs else {}


# ---- Cards -------------------------------------------------------------------------------------


def cards(first: Path, study: str, unchanged: bool = True) -> str:
    """A card for each technique of the study ladder, with its code, or for each variant that leaves
    the loss `unchanged` or doesn't: its header, and what it gains: published, measured on each
    machine, and predicted."""
    patches = stack.load() if study == "ladder" else [
        patch for patch in stack.load_variants()
        if (patch.fields["Loss"] == "unchanged") == unchanged]
    measured = [(short_name(each.machine), row) for folder in machines(first)
                for each, rows in found_in(folder, study) for row in rows]
    figures: list[tuple[str, Any]] = [
        *measured, *(("predicted for an H100", each) for each in check.expected())]
    within = {short_name(each.machine): of_as_many(each.folder, ladder)
              for each, ladder in ladders(first)} if study == "ladder" else {}
    gains = {patch.name: f"A100, published: {factor:.2f}× the speed, {now.reserved_gb:.2f} GB"
             for _, patch, now, factor in steps() if now}
    texts = []
    for place, patch in enumerate(patches, 1):
        fields = patch.fields
        heading = title(place, patch) if study == "ladder" else fields["Technique"]
        lines = sum(len(new) - len(old) for _, old, _, new in patch.hunks)
        told: dict[str, list[str]] = {}  # by the options that were measured
        if patch.name in gains:
            told[""] = [gains[patch.name]]
        for where, row in figures:
            if row.factor and row.run.script == patch.name:
                options = " ".join(re.findall(r"--[^`]+", row.label))
                in_01 = within.get(where, {}).get(patch.name, "").strip("*")
                told.setdefault(options, []).append(
                    f"{where}: {row.factor:.2f}× the speed, {row.memory_factor:.2f}× the memory"
                    + f" (within 01: {in_01}×)" * (in_01[:1].isdigit()))
        facts = [
            *(f"use it when: {each.use}; it doesn't help: {each.not_for}"
              for each in [ADVICE.get(patch.name)] if each),
            "; ".join(f"{name.lower()}: {fields[name]}"
                      for name in ("Loss", "Hardware", "Needs", "Excludes") if name in fields),
            *(f"`{options}`: " * bool(options) + "; ".join(each)
              for options, each in told.items()),
            f"[`{patch.name}`](../{patch.file}), {lines:+} lines; source: "
            + ", ".join(f"<{each}>" for each in fields["Source"].split(", "))]
        prose = [" ".join(part.split()) for part in patch.header.decode().split("\n\n")[1:]]
        code = [folded(patch)] * (study == "ladder")
        texts.append("\n\n".join([f"## {heading[0].upper()}{heading[1:]}", *filter(None, prose),
                                  "- " + "\n- ".join(facts), *code]))
    return "\n\n".join(texts) + "\n"


def folded(patch, most: int = 14) -> str:
    """The first lines that a patch changes, below the class or function that they are in, behind a
    line that unfolds them."""
    _, _, diff = stack.read(stack.ROOT / patch.file).decode().partition("\n@@")
    lines: list[str] = []
    for hunk in diff.split("\n@@"):
        head, *body = hunk.splitlines()
        changed = [line for line in body if line[:1] in "+-" and line[1:].strip()]
        place = f"@@ {head.rpartition('@@ ')[2]}"
        if "@@ " in head and place not in lines and changed[0][1] == " ":
            lines.append(place)
        lines += changed
    rest = sum(line[0] != "@" for line in lines[most:])
    more = [f"  … {rest} lines more"] * bool(rest)
    return "\n".join(["<details><summary>its code</summary>", "", "```diff", *lines[:most], *more,
                      "```", "</details>"])
