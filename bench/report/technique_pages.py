"""What stands in the pages about each machine and each technique: tables and cards."""

import re
from pathlib import Path

from bench.analysis.rows import Row, rows_of, speed_of
from bench.catalogue import published, without_effect_on_gpus
from bench.common import REFERENCE, short_name
from bench.measure.journal import read_journal
from bench.report import prediction_tables
from bench.report.prediction_tables import Expected
from bench.report.tables import (
    INTERVAL,
    Column,
    Table,
    bold,
    fmt,
    markdown,
    num_col,
    rows_in,
    text_col,
    within_01,
)
from patches import stack

CODE = 14  # lines of a patch that its card shows


def machines(first: Path) -> list[Path]:
    """The folders of the machines that were measured, `first` before the others."""
    return [first, *sorted({path.parent for path in REFERENCE.glob("*/*.jsonl")} - {first})]


def has_gpu(row: Row) -> bool:
    return row.measured.machine["gpus"] > 0


# ---- A line for each machine -------------------------------------------------------------------


def ends_of(folder: Path) -> tuple[Row, Row] | None:
    """Returns 00 and the ladder's last script; where no ladder with a baseline was measured, 00 and
    01 by themselves."""
    rows = [row for row in rows_in(folder, "ladder") if row.tok_per_sec and row.run.processes == 1]
    if not rows or rows[0].run.number != 0:
        rows = [row for row in rows_in(folder, "stages")
                if row.tok_per_sec and row.run.stage in ("00", "01")]
    return (rows[0], rows[-1]) if rows and rows[-1].factor_baseline else None


def name_of(folder: Path, first: Row, last: Row) -> str:
    """Returns a machine's name with links, its cores, its model, and how much was measured."""
    machine, gpu = first.measured.machine, has_gpu(first)
    name = f"1 × {short_name(machine)}" if gpu else (
        f"{short_name(machine)}, {machine['threads']} cores")
    name += f", `{first.record.config['model']}`"
    whole = max({*range(1, len(stack.load()))} - (without_effect_on_gpus() if gpu else set()))
    if last.run.number not in (None, whole):
        name += f", {last.run.number} of {whole} techniques"
    if first.rounds == last.rounds == 1:
        name += ", one run of each"
    where = f"../results/reference/{folder.name}"
    name += f": [findings]({where}/README.md)"
    return name + (f", [all tables]({where}/report.md)" if (folder / "report.md").exists() else "")


def results(first: Path) -> str:
    """Both ends of every machine's ladder, those with a GPU first, for a page in docs/."""
    lines = []
    for folder in machines(first):
        if ends := ends_of(folder):
            plain, fast = ends
            effect = fast.difference(speed_of, fast.baseline)
            lines.append(dict(
                machine=name_of(folder, plain, fast), gpu=has_gpu(plain), plain=plain.tok_per_sec,
                fast=fast.tok_per_sec, factor=f"{fast.factor_baseline:.1f}×",
                interval="{:.1f}–{:.1f}".format(*effect.interval) if effect else ""))
    return markdown(Table([
        text_col("machine", "machine"), num_col("baseline, tok/sec", "plain", ",.0f"),
        num_col("optimized, tok/sec", "fast", ",.0f"), num_col("speedup", "factor"),
        num_col("95 %", "interval")],
        sorted(lines, key=lambda line: not line["gpu"])))


# ---- A line for each technique -----------------------------------------------------------------


def index(first: Path) -> str:
    """The same rows for the page with the cards: what was measured on a GPU, what was predicted for
    an H100, and when to use each."""
    predicted = {row.run.script: row.factor for row in prediction_tables.ladder()
                 if not row.run.torchrun}
    ladders = [rows for folder in machines(first) if (rows := rows_in(folder, "ladder"))]
    ladder = next((rows for rows in ladders if has_gpu(rows[0])), [])
    measured = {row.run.name: bold(fmt(row.factor, ".2f"), row.significance)
                for row in one_step(ladder)}
    own = [Column(f"{short_name(ladder[0].measured.machine)}: ×",
                  lambda line: measured.get(line["patch"].name, ""))] if ladder else []
    *ladder_lines, ddp = steps()
    by_gain = sorted(ladder_lines, key=lambda line: -(line["factor"] or 0))
    return markdown(Table([
        text_col("technique", "link"), num_col("A100, published: ×", "factor", ".2f"), *own,
        Column("H100, predicted: ×", lambda line: fmt(predicted.get(line["patch"].name), ".2f")),
        text_col("loss", "loss"), text_col("use it when", "patch.fields.Use"),
        text_col("limits", "patch.fields.Limits")], [*by_gain, ddp]))


def steps() -> list[dict]:
    """Of each technique its patch, the title of its card with a link to it, its effect on the
    loss, the published figures `now`, and their factor over those before. DDP comes last."""
    lines, before = [], published().stages["00"]
    for place, patch in enumerate(stack.load(), 1):
        title, now = patch.fields["Technique"], patch.published
        if patch.name != "ddp":
            title = f"{place}. {title}"
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")  # as code hosts make it
        lines.append(dict(
            patch=patch, title=title, link=f"[{title}](#{anchor})", now=now,
            loss=patch.fields["Loss"].split()[0],
            factor=now and now.tok_per_sec / before.tok_per_sec))
        before = now or before
    return lines


# ---- Cards -------------------------------------------------------------------------------------


def cards(first: Path, study: str, unchanged: bool = True) -> str:
    """A card for each technique of the study ladder, with its code, or for each variant that leaves
    the loss `unchanged` or doesn't: its header, and what it gains: published, measured on each
    machine, and predicted."""
    gains = gains_of(first, study)
    if study == "ladder":
        texts = []
        for step in steps():
            patch, now, own = step["patch"], step["now"], gains.get(step["patch"].name, {})
            if now:
                gpus = f"{now.gpus} A100s" if now.gpus > 1 else "A100"
                own = {"": [f"{gpus}, published: {step['factor']:.2f}× the speed,"
                            f" {now.reserved_gb:.2f} GB", *own.get("", [])]}
            texts.append(f"{card(patch, step['title'], own)}\n\n{folded(patch)}")
    else:
        variants = stack.load_variants()
        texts = [card(patch, patch.fields["Technique"], gains.get(patch.name, {}), variants)
                 for patch in variants if (patch.fields["Loss"] == "unchanged") == unchanged]
    return "\n\n".join(texts) + "\n"


def gains_of(first: Path, study: str) -> dict[str, dict[str, list[str]]]:
    """By the name of a patch, then by the options that it was measured with: its gain on each
    machine and the predicted one, those on GPUs first."""
    within = {folder: of_as_many(ladder) for folder in machines(first)
              if study == "ladder" and (ladder := rows_in(folder, study))}
    own = [row for folder in machines(first) for row in one_step(all_rows_in(folder, study))
           if "--model" not in row.measured.options]
    rows: list[Row | Expected] = [*filter(has_gpu, own), *prediction_tables.expected()]
    rows += [row for row in own if not has_gpu(row)]
    gains: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        if not row.factor:
            continue
        name, options, in_01 = str(row.run.script), "", ""
        if study == "variants":
            options = row.label.strip("`").removeprefix(name).strip(", ")
        text = f"predicted for an H100: {row.factor:.2f}× the speed"
        if isinstance(row, Row):
            interval = INTERVAL.cell(row)
            text = (f"{short_name(row.measured.machine)}: {row.factor:.2f}×"
                    + (f" ({interval})" if interval else "") + " the speed")
            in_01 = within.get(row.measured.folder, {}).get(name, "").strip("*")
        if row.memory_factor:
            text += f", {row.memory_factor:.2f}× the memory"
        if in_01[:1].isdigit():
            text += f" (within 01: {in_01}×)"
        gains.setdefault(name, {}).setdefault(options, []).append(text)
    return gains


def card(patch, title: str, gains: dict[str, list[str]], variants=()) -> str:
    """A patch's header with its gains, by the options that they were measured with. `variants` are
    those that may exclude it."""
    fields = patch.fields
    excluded = sorted({*fields.get("Excludes", "").split(", "), *(
        other.name for other in variants
        if patch.name in other.fields.get("Excludes", "").split(", "))} - {""})
    shown = fields | {"Use it when": fields.get("Use"), "Excludes": ", ".join(excluded)}
    lines = ["; ".join(f"{name.lower()}: {shown[name]}" for name in names if shown.get(name))
             for names in (("Use it when", "Limits"), ("Loss", "Hardware", "Needs", "Excludes"))]
    for options, texts in gains.items():
        lines.append((f"`{options}`: " if options else "") + "; ".join(texts))
    added = sum(len(new) - len(old) for _, old, _, new in patch.hunks)
    sources = ", ".join(f"<{source}>" for source in fields["Source"].split(", "))
    lines.append(f"[`{patch.name}`](../{patch.file}), {added:+} lines; source: {sources}")
    prose = [" ".join(part.split()) for part in patch.header.decode().split("\n\n")[1:]]
    return "\n\n".join([f"## {title[0].upper()}{title[1:]}", *filter(None, prose),
                        "- " + "\n- ".join(filter(None, lines))])


def all_rows_in(folder: Path, study: str) -> list[Row]:
    """Returns a machine's newest measurement, and what only its further sessions have."""
    rows = rows_in(folder, study)
    for path in sorted(folder.glob(f"{study}-*.jsonl")):
        for measured in reversed(read_journal(path)):
            names = {row.run.name for row in rows}
            rows += [row for row in rows_of(measured) if row.run.name not in names]
    return rows


def one_step(rows: list[Row]) -> list[Row]:
    """Without those whose factor is that of several techniques."""
    return [row for row in rows if len(row.techniques) < 2]


def of_as_many(ladder: list[Row]) -> dict[str, str]:
    """What each technique brings within 01, where that was measured with all of the ladder's."""
    texts = within_01(ladder[0].measured.folder)
    rungs = {row.run.name for row in ladder if row.run.number and row.run.processes == 1}
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
    more = [f"  … {rest} lines more"] if rest else []
    return "\n".join(["<details><summary>its code</summary>", "", "```diff", *lines[:CODE], *more,
                      "```", "</details>"])
