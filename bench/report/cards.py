"""What stands in the pages about each machine and each technique: tables and cards."""

import re
from pathlib import Path
from typing import Any

from bench.analysis.rows import Row, rate_to, speed_of
from bench.catalogue import published, without_effect_on_gpus
from bench.common import REFERENCE, short_name
from bench.report import check
from bench.report.names import ADVICE, called
from bench.report.tables import (
    INTERVAL,
    Column,
    Table,
    bold,
    cell,
    found_in,
    markdown,
    number,
    rows_in,
    within_01,
    words,
)
from patches import stack

CODE = 14  # lines of a patch that its card shows
BOTH_ENDS = [number("baseline, tok/sec", "plain", ",.0f"),
             number("optimized, tok/sec", "fast", ",.0f"),
             Column("speedup", lambda line: f"{line['factor']:.1f}×"),
             Column("95 %", lambda line: "{:.1f}–{:.1f}".format(*line["interval"])
                    if line.get("interval") else "")]


def machines(first: Path) -> list[Path]:
    """The folders of the machines that were measured, `first` before the others."""
    return [first, *sorted({path.parent for path in REFERENCE.glob("*/*.jsonl")} - {first})]


def ladders(first: Path) -> list[list[Row]]:
    """The rows of each machine that has a ladder, those with a GPU before the others."""
    found = filter(None, (rows_in(machine, "ladder") for machine in machines(first)))
    return sorted(found, key=lambda rows: not has_gpu(rows[0]))


def has_gpu(row: Row) -> bool:
    return row.measured.machine["gpus"] > 0


# ---- A line for each machine -------------------------------------------------------------------


def both_ends(first: Path) -> list[dict]:
    """What 00 and the ladder's last script make on each machine, those with a GPU before the
    others; where no ladder with a baseline was measured, 00 and 01 by themselves."""
    *patches, _ = stack.load()  # the last one is DDP's
    ends = []
    for folder in machines(first):
        known = [row for row in rows_in(folder, "ladder")
                 if row.tok_per_sec and row.run.processes == 1]
        if not known or known[0].run.rung != 0:
            known = [row for row in rows_in(folder, "stages")
                     if row.tok_per_sec and row.run.stage in ("00", "01")]
        if not known or not known[-1].factor_baseline:
            continue
        last, machine = known[-1], known[0].measured.machine
        gpu = machine["gpus"]
        between = last.difference(speed_of, last.baseline)
        idle = without_effect_on_gpus() if gpu else set()
        whole = max({*range(1, len(patches) + 1)} - idle)
        count = whole if last.run.rung is None else last.run.rung
        so_far = f", {count} of {whole} techniques" * (count < whole)
        so_far += ", one run of each" * (known[0].rounds == last.rounds == 1)
        models = sorted({row.record.config["model"] for row in known})
        cores = "" if gpu else f", {machine['threads']} cores"
        ends.append(dict(
            machine=f"{'1 × ' * bool(gpu)}{short_name(machine)}{cores},"
                    f" `{'`, `'.join(models)}`{so_far}", folder=folder,
            name=short_name(machine), plain=known[0].tok_per_sec, fast=last.tok_per_sec,
            gpu=gpu, factor=last.factor_baseline, interval=between and between.interval))
    return sorted(ends, key=lambda end: not end["gpu"])


def results(first: Path) -> str:
    """Both ends of every machine's ladder, and the times to a loss, for a page in docs/."""
    lines = both_ends(first)
    for line in lines:
        where = f"../results/reference/{line['folder'].name}"
        tables = f", [all tables]({where}/report.md)" * (line["folder"] / "report.md").exists()
        line["machine"] += f": [findings]({where}/README.md){tables}"
        line["time"] = "; ".join(f"to {target:.2f}: {what} {factor}"
                                 for target, what, factor, _ in times_to_loss(line["folder"]))
    return markdown(Table([
        words("machine", "machine"), *BOTH_ENDS,
        Column("to the same loss", lambda line: line["time"] or "–", True)], lines))


def times_to_loss(machine: Path) -> list[tuple[float, str, str, str]]:
    """(target, script, how many times as fast as 00 it comes there, with an interval, of how many
    seeds), compilation counted: 01, both at their defaults, to the lowest loss of 00's default run;
    after a search also 01 and the fastest script, over 00, all at their best settings for the
    target that they were tuned for."""
    known = {measured.kind: (measured, rows)
             for measured, rows in found_in(machine, "time-to-loss")
             if measured.plan.targets and measured.is_finished}
    told = []
    for kind in ("" if "" in known else "variants", "epoch"):
        if kind not in known:
            continue
        measured, rows = known[kind]
        targets = measured.plan.targets
        first, last = next(iter(targets)), [*targets][-1]
        tuned = [row for row in rows if row.run.rate and not row.missed(targets[last])
                 and row.speedup_to(targets[last], True)]
        fastest = max(tuned, key=lambda row: row.speedup_to(targets[last], True)[1], default=None)
        planned = f" ({measured.planned} planned)" if measured.planned else ""
        lines = [(first, row, "01 at its defaults") for row in rows
                 if row.run.stage == "01" and not row.run.rate]
        lines += [(last, row, f"`{row.run.stage}` at its best") for row in tuned
                  if row is fastest or row.run.stage == "01"]
        for name, row, what in lines:
            rate = rate_to(targets[name], True)
            if speedup := row.speedup_to(targets[name], True):
                interval = row.interval(rate)
                within = " ({:.1f}–{:.1f})".format(*interval) if interval else ""
                factor = bold("{}{:.1f}×".format(*speedup), row.significance_of(rate)) + within
                told.append((targets[name], what + ", one epoch" * (name == "epoch"), factor,
                             f"{row.rounds}{planned}"))
    return told


# ---- A line for each technique -----------------------------------------------------------------


def index(first: Path) -> str:
    """The same rows for the page with the cards: what was measured on a GPU, what was predicted for
    an H100, and when to use each."""
    predicted = {row.run.script: row.factor for row in check.ladder() if not row.run.torchrun}
    ladder = next((rows for rows in ladders(first) if has_gpu(rows[0])), [])
    measured = {row.run.name: bold(cell(row.factor, ".2f"), row.significance)
                for row in one_step(ladder)}
    lines = [line | dict(measured=measured.get(line["patch"].name),
                         predicted=predicted.get(line["patch"].name),
                         advice=ADVICE.get(line["patch"].name)) for line in by_gain()]
    own = [number(f"{short_name(ladder[0].measured.machine)}: ×", "measured")] if ladder else []
    return markdown(Table([
        words("technique", "link"), number("A100, published: ×", "factor", ".2f"), *own,
        number("H100, predicted: ×", "predicted", ".2f"), words("loss", "loss"),
        words("use it when", "advice.use"), words("limits", "advice.limits")], lines))


def steps() -> list[dict]:
    """Of each technique its patch, the title of its card with a link to it, its effect on the
    loss, the published figures `now`, and their factor over those before. DDP comes last."""
    found, before = [], published().stages["00"]
    for place, patch in enumerate(stack.load(), 1):
        title, now = called(patch.name, patch.fields["Technique"]), patch.published
        if patch.name != "ddp":
            title = f"{place}. {title}"
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")  # as code hosts make it
        found.append(dict(
            patch=patch, title=title, link=f"[{title}](#{anchor})", now=now,
            loss=patch.fields["Loss"].split()[0],
            factor=now and now.tok_per_sec / before.tok_per_sec))
        before = now or before
    return found


def by_gain() -> list[dict]:
    """steps(), the largest published gain first, those without a figure after them."""
    *ladder, ddp = steps()
    return [*sorted(ladder, key=lambda line: -(line["factor"] or 0)), ddp]


# ---- Cards -------------------------------------------------------------------------------------


def cards(first: Path, study: str, unchanged: bool = True) -> str:
    """A card for each technique of the study ladder, with its code, or for each variant that leaves
    the loss `unchanged` or doesn't: its header, and what it gains: published, measured on each
    machine, and predicted."""
    ladder, known = study == "ladder", {step["patch"].name: step for step in steps()}
    variants = [] if ladder else stack.load_variants()
    patches = stack.load() if ladder else [
        patch for patch in variants if (patch.fields["Loss"] == "unchanged") == unchanged]
    within = {rows[0].measured.folder: of_as_many(rows)
              for rows in (ladders(first) if ladder else ())}
    figures: list[tuple[str, dict, Any]] = [
        (short_name(row.measured.machine), within.get(folder, {}), row)
        for folder in machines(first) for row in one_step(all_rows_in(folder, study))]
    figures = [*(each for each in figures if has_gpu(each[2])),
               *(("predicted for an H100", {}, each) for each in check.expected()),
               *(each for each in figures if not has_gpu(each[2]))]
    texts = []
    for patch in patches:
        fields, step = patch.fields, known.get(patch.name, {})
        heading = step.get("title", fields["Technique"])
        lines = sum(len(new) - len(old) for _, old, _, new in patch.hunks)
        told: dict[str, list[str]] = {}  # by the options that were measured
        if now := step.get("now"):
            gpus = f"{now.gpus} A100s" if now.gpus > 1 else "A100"
            told[""] = [f"{gpus}, published: {step['factor']:.2f}× the speed,"
                        f" {now.reserved_gb:.2f} GB"]
        for where, within_its_01, row in figures:
            if row.factor and row.run.script == patch.name:
                options = ("" if ladder else
                           row.label.strip("`").removeprefix(patch.name).strip(", "))
                in_01 = within_its_01.get(patch.name, "").strip("*")
                interval = INTERVAL.cell(row) if isinstance(row, Row) else ""  # of a measurement
                told.setdefault(options, []).append(
                    f"{where}: {row.factor:.2f}×{f' ({interval})' * bool(interval)} the speed"
                    + (f", {row.memory_factor:.2f}× the memory" if row.memory_factor else "")
                    + f" (within 01: {in_01}×)" * (in_01[:1].isdigit()))
        facts = [
            *(f"use it when: {each.use}; limits: {each.limits}"
              for each in [ADVICE.get(patch.name)] if each),
            "; ".join([*(f"{name.lower()}: {fields[name]}"
                         for name in ("Loss", "Hardware", "Needs") if name in fields),
                       *(f"excludes: {', '.join(names)}" for names in [excluded(patch, variants)]
                         if names)]),
            *(f"`{options}`: " * bool(options) + "; ".join(each)
              for options, each in told.items()),
            f"[`{patch.name}`](../{patch.file}), {lines:+} lines; source: "
            + ", ".join(f"<{each}>" for each in fields["Source"].split(", "))]
        prose = [" ".join(part.split()) for part in patch.header.decode().split("\n\n")[1:]]
        code = [folded(patch)] * ladder
        texts.append("\n\n".join([f"## {heading[0].upper()}{heading[1:]}", *filter(None, prose),
                                  "- " + "\n- ".join(facts), *code]))
    return "\n\n".join(texts) + "\n"


def all_rows_in(folder: Path, study: str) -> list[Row]:
    """A machine's newest measurement, and what only those in folders within its own have."""
    rows = rows_in(folder, study)
    for path in sorted(folder.glob(f"*/{study}.jsonl")):
        known = {row.run.name for row in rows}
        rows += [row for row in rows_in(path.parent, study) if row.run.name not in known]
    return rows


def one_step(rows: list[Row]) -> list[Row]:
    """Without those whose factor is that of several techniques."""
    return [row for row in rows if len(row.techniques) < 2]


def excluded(patch, variants: list) -> list[str]:
    """The variants that can't work with this one, whichever of the two headers says so."""
    def named(one) -> list[str]:
        return list(filter(None, one.fields.get("Excludes", "").split(", ")))

    return sorted({*named(patch), *(each.name for each in variants if patch.name in named(each))})


def of_as_many(ladder: list[Row]) -> dict[str, str]:
    """What each technique brings within 01, where that was measured with all of the ladder's."""
    texts = within_01(ladder[0].measured.folder)
    rungs = {row.run.name for row in ladder if row.run.rung and row.run.processes == 1}
    return texts if texts.keys() == rungs else {}


def folded(patch) -> str:
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
    rest = sum(line[0] != "@" for line in lines[CODE:])
    more = [f"  … {rest} lines more"] * bool(rest)
    return "\n".join(["<details><summary>its code</summary>", "", "```diff", *lines[:CODE], *more,
                      "```", "</details>"])
