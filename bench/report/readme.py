"""The tables inside README.md and docs/: each stands between markers, and a command writes it."""

import re
from functools import cache
from pathlib import Path

from bench.common import REFERENCE, ROOT, UserError, relative, write_whole
from bench.predict.fingerprint import keep_used
from bench.report import cards, check
from bench.report.pictures import NOISE, OWN, key, lay_rows, picture_bytes, rows_of_panels
from bench.report.tables import (
    Column,
    Table,
    cell,
    excerpts_of,
    found_in,
    markdown,
    used,
    versions_note,
)
from patches import stack

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(  # opening, name of the table, @ its machine, what stands there, end
    r"(<!-- ([\w-]+)(?:@([^\s:]+))?: written by measure\.py readme -->\n)((?:(?!<!--).)*)"
    r"(<!-- end -->)?", re.DOTALL)
# The machine whose tables stand in the pages, unless one says NAME@MACHINE; what is a line or a
# column for each has all.
SHOWN = REFERENCE / "amd-epyc-2-cores"
# What the guide "Methods and tools for efficient training on a single GPU" says of each method: its
# name, whether it is faster, whether it saves memory; then the rungs, variants and compiler's modes
# that show it.
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


def write_readme(studies: dict) -> bool:
    """Writes the pages' tables anew, and keeps the fingerprints of the scripts that they are of;
    returns whether that changed a page. Raises what update does."""
    before = {page: page.read_bytes() for page in PAGES}
    after = {page: update(text.decode(), SHOWN, studies).encode() for page, text in before.items()}
    for page, text in after.items():
        write_whole(page, text)
        if page.name == "predictions.md":
            write_whole(page.with_suffix(".png"), picture_bytes(draw_predictions(), "png"))
    keep_used()
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


def update(text: str, machine: Path, studies: dict) -> str:
    """`text` with what stands between its markers written anew, from a machine's folder. Raises
    UserError for a marker without its end or of an unknown table, StackError, OSError."""
    variants = {same: [patch for patch in stack.load_variants()
                       if (patch.fields["Loss"] == "unchanged") == same] for same in (True, False)}
    own = {
        "techniques": cards.techniques, "guide": guide_table, "sample": sample,
        "headline": lambda machine: cards.results(machine, "results"),
        "machines": lambda machine: cards.results(machine, "../results"),
        "technique-cards": lambda machine: cards.cards(machine, stack.load(), "ladder"),
        "variant-cards": lambda machine: cards.cards(machine, variants[True], "variants"),
        "variant-cards-loss": lambda machine: cards.cards(machine, variants[False], "variants"),
    } | {name: lambda _, name=name: check.table(name) for name in check.TABLES}

    @cache
    def tables_of(folder: Path) -> dict[str, str]:
        tables = {}
        for study in studies.values():
            tables |= study.fixed()
            for measured, _ in found_in(folder, study.name):
                tables |= excerpts_of(study, measured)
        return tables

    def write(block: re.Match) -> str:
        opening, name, other, _, end = block.groups()
        if not end:
            raise UserError(f"{opening.strip()} has no <!-- end -->")
        if other and name in check.TABLES:
            raise UserError(f"the table {name} is of predictions: leave @{other} out")
        folder = REFERENCE / other if other else machine
        if not folder.is_dir():
            raise UserError(f"there is no folder {relative(folder)}")
        if name in own:
            used.clear()
            table = own[name](folder)
            table += versions_note(used) if name not in check.TABLES else ""
        else:
            table = tables_of(folder).get(name)
        if table is None:
            raise UserError(f"there is no table {name} in {relative(folder)}")
        return opening + (table if table.startswith("|") else f"\n{table}\n") + end

    return BLOCK.sub(write, text)


def sample(machine: Path) -> str:
    """What a run of 01 printed, by its record."""
    record = next(row.records[-1] for _, rows in found_in(machine, "stages") for row in rows
                  if row.run.stage == "01" and row.records)
    losses = [f"Ep {log['epoch']}, Step {log['step']:06d}, Train: {log['train_loss']:.3f}, "
              f"Val: {log['val_loss']:.3f}, Step tok/sec: {log['step_tok_per_sec']:.0f}, "
              f"Avg tok/sec: {log['avg_tok_per_sec'] or 0:.0f}\n" for log in record.logs]
    return (f"```\n{''.join(losses)}Reserved memory: {record.end['reserved_gb']:.4f} GB\n"
            f"Median step tok/sec: {record.tok_per_sec:.0f}\n```\n")


def guide_table(machine: Path) -> str:
    """The guide's claims, and beside them the factors of this machine."""
    shown = {"batch": {}}  # by the technique, variant or mode: {label: row}
    for study in ("ladder", "variants", "compile-modes", "sweep"):
        for measured, rows in found_in(machine, study):
            for row in rows:
                name = row.run.mode or str(row.run.script)
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
