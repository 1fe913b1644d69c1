"""The tables of README.md: each stands between two markers and is written by a command."""

import json
import re
from pathlib import Path

from bench.files import ROOT, write_whole
from bench.stages import PUBLISHED, read_published, read_runs, table
from bench.states import read_state, reference_machine
from bench.statistics import ratio
from bench.tables import (
    blank,
    by_model,
    checkpoint_table,
    compile_table,
    markdown,
    model_table,
    points_table,
    predictions_table,
    scaling_table,
    sweep_table,
    time_tables,
)
from patches import stack

README = ROOT / "README.md"
BLOCK = re.compile(  # opening, name of the table, what stands there, end
    r"(<!-- (\w+): written by measure\.py readme -->\n)((?:(?!<!--).)*)(<!-- end -->)?", re.DOTALL
)


def write_readme() -> bool:
    """Writes README.md's tables anew; returns whether that changed it. Raises what update does."""
    before = README.read_bytes()
    after = update(before.decode()).encode()
    if after != before:
        write_whole(README, after)
    return after != before


def update(text: str) -> str:
    """`text` with what stands between its markers written anew.

    Raises ValueError for a marker without its end or of an unknown table, and StackError, OSError,
    ValueError, LookupError or TypeError where what a table is made from can't be read.
    """
    tables = {
        "techniques": techniques_table,
        "ladder": lambda: ladder_table(reference_machine()),
        "stages": lambda: stages_table(reference_machine()),
        "variants": lambda: alternatives_table(reference_machine(), "variants"),
        "model": lambda: models_table(reference_machine()),
        "compiler": lambda: compile_table(
            read_state(reference_machine() / "compile-modes" / "compile-modes.json")),
        "sharded": lambda: alternatives_table(reference_machine(), "sharded"),
        "medium": lambda: alternatives_table(reference_machine(), "sharded-gpt2-medium"),
        "trainer": lambda: alternatives_table(reference_machine(), "trainer"),
        "guide": lambda: guide_table(reference_machine()),
        "time": lambda: time_to_loss_tables(reference_machine(), "time-to-loss"),
        "alternatives": lambda: time_to_loss_tables(
            reference_machine(), "time-to-loss-variants"),
        "batches": lambda: sweep_of(reference_machine(), "batch"),
        "models": lambda: sweep_of(reference_machine(), "model"),
        "contexts": lambda: sweep_of(reference_machine(), "context"),
        "scaling": lambda: scaling_table(rows_of(reference_machine(), "scaling")),
        "predictions": predictions_table,
        "points": points_table,
        "checkpoints": lambda: checkpoint_table(rows_of(reference_machine(), "checkpoints")),
    }

    def write(block: re.Match) -> str:
        opening, name, _, end = block.groups()
        if name not in tables or not end:
            raise ValueError(f"README.md: no such table, or no <!-- end -->: {opening.strip()}")
        return opening + tables[name]() + end

    return BLOCK.sub(write, text)


def techniques_table() -> str:
    """What each technique is, what it does to the loss, and its published figures."""
    patches = stack.load()
    baseline = json.loads(PUBLISHED.read_text(encoding="utf-8"))["baseline"]
    rows = [dict(number=0, technique=f"baseline, [`{stack.FIRST}`]({stack.FIRST})", loss="",
                 speed=baseline["tok_per_sec"], memory=baseline["reserved_gb"])]
    for number, patch in enumerate(patches, 1):
        speed, memory, gpus = patch.published or (None, None, 1)
        link = f"[{patch.fields['Technique']}](patches/{patch.name}.patch)"
        rows.append(dict(
            number=number if patch is not patches[-1] else "",  # ddp.patch is none of the series
            technique=link + f", on {gpus} GPUs" * (gpus > 1),
            loss=patch.fields["Loss"].split()[0], speed=speed, memory=memory,
        ))
    columns = {
        "#": lambda row: str(row["number"]),
        "technique": lambda row: row["technique"],
        "loss": lambda row: row["loss"],
        "published tok/sec": lambda row: blank(row["speed"], ",.0f"),
        "GB": lambda row: blank(row["memory"], ".2f"),
    }
    return markdown(columns, rows, {"technique", "loss"})


def ladder_table(machine: Path) -> str:
    """The ladder of a folder, and what each technique is worth in 01 by its leave-one-out."""
    rows = read_state(machine / "ladder" / "ladder.json")["rows"]
    path = machine / "leave-one-out" / "leave-one-out.json"
    left_out = {row["name"]: row for row in read_state(path)["rows"]} if path.exists() else {}

    def speed(row: dict) -> str:
        if not row["tok_per_sec"]:
            return ""
        spread = f" ({min(row['speeds']):,.0f}–{max(row['speeds']):,.0f})"
        return f"{row['tok_per_sec']:,.0f}" + spread * (row["rounds"] > 1)

    def in_01(row: dict) -> str:
        without = left_out.get(f"without-{row['name']}")
        if not without:
            return ""
        if without["error"]:
            return without["error"].partition(":")[0]  # "conflict", or "failed"
        return bold(blank(without["factor_technique"], ".2f"), without["verdict"])

    def bold(text: str, verdict: str | None) -> str:
        return f"**{text}**" if verdict in ("faster", "slower") else text

    columns = {
        "#": lambda row: row["label"].partition(" ")[0],
        "technique": lambda row: row["technique"],
        "tok/sec (range)": speed,
        "× before": lambda row: blank(row["factor"], ".2f"),
        "A100": lambda row: blank(row["published_factor"], ".2f"),
        "× baseline": lambda row: blank(row["factor_baseline"], ".2f"),
        "× in 01": in_01,
        "GB": lambda row: blank(row["reserved_gb"], ".2f"),
        "val loss": lambda row: blank(row["val_loss"], ".3f"),
        "verdict": lambda row: row["error"] or bold(row["verdict"] or "", row["verdict"]),
    }
    if not left_out:
        del columns["× in 01"]
    return markdown(columns, rows, {"technique", "verdict"})


def sweep_of(machine: Path, kind: str) -> str:
    return sweep_table(read_state(machine / f"sweep-{kind}" / f"sweep-{kind}.json")["rows"])


def time_to_loss_tables(machine: Path, plan: str) -> str:
    """How long the runs of a plan take to each target."""
    state = read_state(machine / plan / f"{plan}.json")
    return "\n" + time_tables(state["rows"], state["plan"]["targets"]) + "\n"


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


def rows_of(machine: Path, name: str) -> list[dict]:
    """The rows of a plan that a machine's folder holds; none where it wasn't measured."""
    path = machine / name / f"{name}.json"
    return read_state(path)["rows"] if path.exists() else []


def guide_table(machine: Path) -> str:
    """The guide's claims, and beside them the factors of this machine."""
    ladder = rows_of(machine, "ladder")
    found = {row["name"]: [(row, before)] for row, before in zip(ladder[1:], ladder, strict=False)}
    medium = rows_of(machine, "sharded-gpt2-medium")  # where sharding shows
    for plan in ("variants", "sharded-gpt2-medium" if medium else "sharded", "compile-modes"):
        for row in (rows := rows_of(machine, plan))[1:]:
            found.setdefault(row["label"].split()[0], []).append((row, rows[0]))
    batches = [row for row in rows_of(machine, "sweep-batch") if row["tok_per_sec"]]
    if batches:
        best = max(batches, key=lambda row: row["tok_per_sec"])
        found["batch"] = [(best | dict(
            label=f"{best['label']} over {batches[0]['label']}",
            factor=ratio(best["tok_per_sec"], batches[0]["tok_per_sec"])), batches[0])]
    else:
        found["batch"] = found.get("10-batch-size", [])
    lines = []
    for method, faster, smaller, names in GUIDE:
        for row, before in (pair for name in names for pair in found.get(name, [])):
            lines.append(dict(method=method, faster=faster, smaller=smaller, row=row,
                              memory=ratio(row["reserved_gb"], before["reserved_gb"])))
            method, faster, smaller = "", "", ""
    return markdown({
        "method": lambda line: line["method"],
        "faster?": lambda line: line["faster"],
        "saves memory?": lambda line: line["smaller"],
        "measured as": lambda line: f"`{line['row']['label']}`",
        "× speed": lambda line: line["row"]["error"] or blank(line["row"]["factor"], ".2f"),
        "× memory": lambda line: blank(line["memory"], ".2f"),
    }, lines, {"method", "faster?", "saves memory?", "measured as"})


def alternatives_table(machine: Path, plan: str) -> str:
    """The rows of a plan of alternatives, compared to its first one; of those that train the same
    model."""
    rows, _ = by_model(read_state(machine / plan / f"{plan}.json"))

    def bold(text: str, verdict: str | None) -> str:
        return f"**{text}**" if verdict in ("faster", "slower", "less", "more") else text

    return markdown({
        "run": lambda row: f"`{row['label']}`",
        "tok/sec": lambda row: blank(row["tok_per_sec"], ",.0f"),
        "× speed": lambda row: row["error"] or bold(blank(row["factor"], ".2f"), row["verdict"]),
        "GB": lambda row: blank(row["reserved_gb"], ".2f"),
        "× memory": lambda row: bold(blank(row["memory_factor"], ".2f"), row["memory_verdict"]),
        "first step, s": lambda row: blank(row["first_step_seconds"], ".1f"),
        "Δ loss": lambda row: blank(row["loss_difference"], "+.3f"),
        "loss by the patch": lambda row: row["loss"] or "",
    }, rows, {"run", "loss by the patch"})


def models_table(machine: Path) -> str:
    """01, and the variants that train another model."""
    state = read_state(machine / "variants" / "variants.json")
    return model_table([state["rows"][0], *by_model(state)[1]])


def stages_table(machine: Path) -> str:
    published, _ = read_published(stack.load())
    return table(read_runs(machine), published)
