"""The tables inside README.md and docs/: each stands between markers, and a command writes it."""

import re
from pathlib import Path

from bench import check
from bench.common import REFERENCE, ROOT, UserError, relative, write_whole
from bench.pictures import NOISE, OWN, key, lay_rows, picture_bytes, rows_of_panels
from bench.scripts import published
from bench.study import Column, Table, all_studies
from bench.tables import cell, excerpts_of, found_in, markdown
from patches import stack

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(  # opening, name of the table, what stands there, end
    r"(<!-- ([\w-]+): written by measure\.py readme -->\n)((?:(?!<!--).)*)(<!-- end -->)?",
    re.DOTALL)
# What the guide "Methods and tools for efficient training on a single GPU" says of each method: its
# name, whether it is faster, whether it saves memory; then the rungs, variants and compiler's modes
# that show it.
GUIDE = (
    ("batch size", "yes", "yes", ["batch", "09-padded-vocabulary"]),
    ("gradient accumulation", "no", "yes", ["step-accumulation"]),
    ("gradient checkpointing", "no", "yes", ["memory-checkpoint", "memory-selective"]),
    ("mixed precision", "yes", "(no)", ["05-bfloat16", "precision-autocast", "precision-fp16"]),
    ("choice of the optimizer", "yes", "yes",
     ["optimizer-adafactor", "optimizer-adamw-8bit", "optimizer-muon", "optimizer-foreach"]),
    ("data preloading", "yes", "no", ["data-workers", "data-on-device"]),
    ("ZeRO", "no", "yes", ["parallel-zero1", "parallel-sharded"]),
    ("torch.compile", "yes", "no", ["08-torch-compile", "default", "max-autotune"]),
)


def reference_machine() -> Path:
    """The first folder in results/reference/ with the ladder of a GPU, or else of a CPU. Raises
    UserError."""
    ladders = [(found_in(path.parent, "ladder")[0][0].machine["device"] == "cpu", path.parent)
               for path in sorted(REFERENCE.glob("*/ladder.jsonl"))
               if found_in(path.parent, "ladder")]
    if not ladders:
        raise UserError("no ladder in results/reference/")
    return min(ladders)[1]


def write_readme() -> bool:
    """Writes the pages' tables anew; returns whether that changed one. Raises what update does."""
    before = {page: page.read_bytes() for page in PAGES}
    after = {page: update(text.decode(), reference_machine()).encode()
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
    tables = {"techniques": techniques_table(), "guide": guide_table(machine)}
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
        if name not in tables:
            raise UserError(f"there is no table {name} in {relative(machine)}")
        table = tables[name]
        return opening + (table if table.startswith("|") else f"\n{table}\n") + end

    return BLOCK.sub(write, text)


def techniques_table() -> str:
    """What each technique is, what it does to the loss, and its published figures."""
    first = published().stages["00"]
    rows = [("0", f"baseline, [`{stack.FIRST}`]({stack.FIRST})", "", first)]
    for number, patch in enumerate(patches := stack.load(), 1):
        gpus = patch.published.gpus if patch.published else 1
        link = f"[{patch.fields['Technique']}](patches/{patch.name}.patch)"
        rows.append((str(number) if patch is not patches[-1] else "",  # ddp.patch has no number
                     link + f", on {gpus} GPUs" * (gpus > 1),
                     patch.fields["Loss"].split()[0], patch.published))
    return markdown(Table([
        Column("#", lambda row: row[0]), Column("technique", lambda row: row[1], True),
        Column("loss", lambda row: row[2], True),
        Column("published tok/sec", lambda row: cell(row[3] and row[3].tok_per_sec, ",.0f")),
        Column("GB", lambda row: cell(row[3] and row[3].reserved_gb, ".2f")),
    ], rows))


def guide_table(machine: Path) -> str:
    """The guide's claims, and beside them the factors of this machine."""
    shown = {"batch": {}}  # by the technique, variant or mode: {label: row}
    for study in ("ladder", "variants", "sharded", "compile-modes", "sweep"):
        for measured, rows in found_in(machine, study):
            for row in rows:
                name = row.tags.get("mode") or row.tags.get("variant") or row.run.name
                # A larger model's rows replace those of the same variants: sharding shows there.
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
