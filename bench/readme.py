"""The tables inside README.md and docs/: each stands between markers, and a command writes it."""

import re
from pathlib import Path
from typing import NamedTuple

from bench import check
from bench.common import REFERENCE, ROOT, UserError, relative, write_whole
from bench.pictures import NOISE, OWN, key, lay_rows, picture_bytes, rows_of_panels
from bench.rows import Row
from bench.scripts import published
from bench.study import Column, Table, all_studies
from bench.tables import bold, cell, excerpts_of, found_in, markdown
from patches import stack

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(  # opening, name of the table, what stands there, end
    r"(<!-- ([\w-]+): written by measure\.py readme -->\n)((?:(?!<!--).)*)(<!-- end -->)?",
    re.DOTALL)
# What the guide "Methods and tools for efficient training on a single GPU" says of each method: its
# name, whether it is faster, whether it saves memory; then the rungs, variants and compiler's modes
# that show it.
SHOWN = REFERENCE / "amd-epyc-2-cores"  # whose figures stand in the tables
GUIDE = (
    ("batch size", "yes", "yes", ["batch", "09-padded-vocabulary"]),
    ("gradient accumulation", "no", "yes", ["step-accumulation"]),
    ("gradient checkpointing", "no", "yes", ["memory-checkpoint", "memory-selective"]),
    ("mixed precision", "yes", "depends", ["05-bfloat16", "precision-autocast", "precision-fp16"]),
    ("optimizers", "yes", "yes",
     ["optimizer-adafactor", "optimizer-adamw-8bit", "optimizer-muon", "optimizer-foreach"]),
    ("data preloading", "yes", "no", ["data-workers", "data-on-device"]),
    ("torch.compile", "yes", "no", ["08-torch-compile", "default", "max-autotune"]),
    ("scaled dot product attention", "yes", "yes", ["07-flash-attention"]),
)


def write_readme() -> bool:
    """Writes the pages' tables anew; returns whether that changed one. Raises what update does."""
    before = {page: page.read_bytes() for page in PAGES}
    after = {page: update(text.decode(), SHOWN).encode()
             for page, text in before.items()}
    for page, text in after.items():
        write_whole(page, text)
        if page.name == "predictions.md":
            write_whole(page.with_suffix(".png"), picture_bytes(draw_predictions(), "png"))
    return after != before


def draw_predictions():
    """Predicted over measured tok/sec, for what others have measured, with the range."""
    found = check.summary_of_others().split(" (")[0]
    figure, [(subfigure, axes)] = rows_of_panels(
        [f"Predicted over measured speed: {found}"], [5], [1])
    rows = sorted(check.others(), key=lambda row: row["tok_per_sec"])
    axes.axvspan(1 / (1 + check.RANGE), 1 / (1 - check.RANGE), color=NOISE, zorder=0)
    axes.axvline(1, color="0.5", linewidth=1)
    lay_rows(axes, len(rows))
    for place, row in enumerate(rows):
        axes.plot(1 + check.off(row), place, "o",
                  color=OWN if row["source"] == "twenty cards" else "0.55")
    axes.set_yticks(range(len(rows)), [
        f"{row['card']}, batch {row['batch']}: {row['tok_per_sec']:,}" for row in rows], fontsize=8)
    axes.set_xlabel("tok/sec, predicted over measured; in the band the printed range is right")
    subfigure.legend(handles=[
        key("one program, PyTorch 2.8", color=OWN, marker="o", linestyle=""),
        key("other programs", color="0.55", marker="o", linestyle="")],
        loc="outside lower center", ncols=2, frameon=False)
    return figure


def update(text: str, machine: Path) -> str:
    """`text` with what stands between its markers written anew, from a machine's folder. Raises
    UserError for a marker without its end or of an unknown table, StackError, OSError."""
    own, tables = {
        "techniques": techniques_table, "guide": guide_table, "sample": sample,
        "technique-cards": lambda machine: cards(machine, stack.load(), "ladder"),
        "variant-cards": lambda machine: cards(machine, stack.load_variants(), "variants"),
    }, {}
    for study in all_studies().values():
        tables |= study.fixed()
        for measured, _ in found_in(machine, study.name):
            tables |= excerpts_of(study, measured)

    def write(block: re.Match) -> str:
        opening, name, _, end = block.groups()
        if not end:
            raise UserError(f"{opening.strip()} has no <!-- end -->")
        if name in check.TABLES:
            tables[name] = check.TABLES[name]()
        if name in own:
            tables[name] = own[name](machine)
        if name not in tables:
            raise UserError(f"there is no table {name} in {relative(machine)}")
        table = tables[name]
        return opening + (table if table.startswith("|") else f"\n{table}\n") + end

    return BLOCK.sub(write, text)


def techniques_table(machine: Path) -> str:
    """What each technique is, what it does to the loss, and what it brought over the one before it:
    published, and on this machine."""
    measured, ladder = next(iter(found_in(machine, "ladder")), (None, []))
    here, before, rows = {row.run.name: row for row in ladder}, None, []
    first = published().stages["00"]
    for number, patch in enumerate([None, *stack.load()]):
        figures = patch.published if patch else first
        ddp = bool(patch) and patch.name == "ddp"
        link = f"baseline, [`{stack.FIRST}`]({stack.FIRST})" if not patch else (
            f"[{patch.fields['Technique']}](patches/{patch.name}.patch)"
            + f", on {figures.gpus if figures else 1} GPUs" * ddp)
        rows.append(Technique(
            "" if ddp else str(number), link, patch.fields["Loss"].split()[0] if patch else "",
            figures, figures and before and figures.tok_per_sec / before.tok_per_sec,
            here.get(Path(stack.file_of(patch.name) if patch else stack.FIRST).stem)))
        before = figures or before
    name = measured.machine["name"] if measured else ""
    return markdown(Table([
        Column("#", lambda row: row.number), Column("technique", lambda row: row.link, True),
        Column("loss", lambda row: row.loss, True),
        Column("published tok/sec", lambda row: cell(
            row.published and row.published.tok_per_sec, ",.0f")),
        Column("×", lambda row: cell(row.published_factor, ".2f")),
        Column("GB", lambda row: cell(row.published and row.published.reserved_gb, ".2f")),
        Column(f"{name}: ×", lambda row: row.measured and bold(
            cell(row.measured.factor, ".2f"), row.measured.verdict)),
        Column(f"{name}: GB", lambda row: cell(
            row.measured and row.measured.reserved_gb, ".2f")),
    ], rows))


class Technique(NamedTuple):
    number: str
    link: str
    loss: str
    published: stack.Published | None
    published_factor: float | None  # over the one before it
    measured: Row | None


def cards(machine: Path, patches: list[stack.Patch], study: str) -> str:
    """A card for each technique, or variant: its header, and what it brings: published, measured on
    this machine by the ladder, or by `variants`, and predicted."""
    measured, rows = next(iter(found_in(machine, study)), (None, []))
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
        facts += [brings(measured.machine["name"], row.label, row.factor, row.memory_factor)
                  for row in rows if row.run.script == patch.name and row.factor]
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


def sample(machine: Path) -> str:
    """What a run of 01 printed, by its record."""
    record = next(row.records[-1] for _, rows in found_in(machine, "stages") for row in rows
                  if row.tags.get("stage") == "01" and row.records)
    losses = [f"Ep {log['epoch']}, Step {log['step']:06d}, Train: {log['train_loss']:.3f}, "
              f"Val: {log['val_loss']:.3f}, Step tok/sec: {log['step_tok_per_sec']:.0f}, "
              f"Avg tok/sec: {log['avg_tok_per_sec'] or 0:.0f}\n" for log in record.logs]
    return (f"```\n{''.join(losses)}Reserved memory: {record.end['reserved_gb']:.4f} GB\n"
            f"Median step tok/sec: {record.end['median_step_tok_per_sec']:.0f}\n```\n")


def guide_table(machine: Path) -> str:
    """The guide's claims, and beside them the factors of this machine."""
    shown = {"batch": {}}  # by the technique, variant or mode: {label: row}
    for study in ("ladder", "variants", "compile-modes", "sweep"):
        for measured, rows in found_in(machine, study):
            for row in rows:
                name = row.tags.get("mode") or row.tags.get("variant") or row.run.name
                shown.setdefault(name, {})[row.label] = row
            if measured.kind == "batch":
                known = [row for row in rows if row.records]
                best = max(known, key=lambda row: row.tok_per_sec)
                best.run = best.run.but(compared_to=known[0].run.name)
                shown["batch"] = {f"{best.label} over {known[0].label}": best}
    shown["batch"] = shown["batch"] or shown.get("10-batch-size", {})
    lines = []
    for method, faster, smaller, names in GUIDE:
        for label, row in (pair for name in names for pair in shown.get(name, {}).items()):
            lines.append((method, faster, smaller, label, row))
            method, faster, smaller = "", "", ""
    return markdown(Table([
        Column("method", lambda line: line[0], True), Column("faster?", lambda line: line[1], True),
        Column("saves memory?", lambda line: line[2], True),
        Column("measured as", lambda line: f"`{line[3]}`", True),
        Column("× speed", lambda line: line[4].error or cell(line[4].factor, ".2f")),
        Column("× memory", lambda line: cell(line[4].memory_factor, ".2f")),
    ], lines))
