"""What stands in the pages about each machine and each technique: tables and cards."""

import math
import re
from pathlib import Path

from bench.analysis.rows import Row, rows_of
from bench.catalogue import published
from bench.common import REFERENCE, short_name, trained_in
from bench.measure.journal import read_journal
from bench.report import prediction_tables
from bench.report.machine_section import all_factors
from bench.report.notes import SINGLE_RUNS
from bench.report.pictures import place_of
from bench.report.tables import bold, rows_in, spread
from gpt_speed.tables import Column, Table, fmt, markdown, num_col, text_col
from patches import stack

# What variants are for: the beginnings of their names, in order; "" of all that are left.
PURPOSES = {
    "Less memory": (
        "memory-checkpoint",
        "step",
        "memory",
        "optimizer-in",
        "optimizer-ada",
        "head-cce",
        "head-liger",
        "head-pytorch",
    ),
    "Fewer tokens to a loss": ("optimizer-muon", "schedule"),
    "Precision": ("precision",),
    "Several GPUs": ("parallel-zero1", "parallel", "ddp", "timeout"),
    "Model": ("init", "model"),
    "Speed and compilation": (
        "head-sampled",
        "dropout",
        "attention",
        "compile",
        "embedding",
        "optimizer",
        "gc",
    ),
    "Data and debugging": ("",),
}
WIDE = 1.4  # the upper end of an interval over the lower: then one run distorts the mean


def machines() -> list[Path]:
    """Returns the folders of the machines that were measured."""
    return sorted({path.parent for path in REFERENCE.glob("*/*.jsonl")})


def has_gpu(row: Row) -> bool:
    return row.measured.machine["gpus"] > 0


def optimized_on(folder: Path) -> Row | None:
    """Returns the last script of a machine's ladder; where none that begins with 00 was measured,
    01 by itself."""
    for study in ("ladder", "stages"):
        rows = [row for row in rows_in(folder, study) if row.speeds and not row.run.torchrun]
        if rows and not rows[0].run.number and rows[-1].factor_baseline:
            return rows[-1]
    return None


def results() -> str:
    """Returns both ends of every machine's ladder, those with a GPU first, for a page in docs/."""
    rows = sorted(filter(None, map(optimized_on, machines())), key=has_gpu, reverse=True)
    return markdown(
        Table(
            [
                Column(
                    "machine",
                    lambda row: (
                        f"[{place_of(row.measured)}](../results/reference/"
                        f"{row.measured.folder.name}/README.md)"
                    ),
                    True,
                ),
                num_col("baseline, tok/sec", "baseline.tok_per_sec", ",.0f"),
                num_col("optimized, tok/sec", "tok_per_sec", ",.0f"),
                Column("speedup", lambda row: f"{row.factor_baseline:.1f}×"),
                Column("95 %", interval_over_baseline),
                Column("over all measurements", lambda row: factors_text(row.measured.folder)),
            ],
            rows,
        )
    )


def interval_over_baseline(row: Row) -> str:
    interval = row.speedup(over=row.baseline).interval
    if not interval and row.rounds == 1:
        return SINGLE_RUNS
    return spread(interval, ".1f")


def factors_text(folder: Path) -> str:
    """Returns the range of a machine's speedups, and of how many measurements; "" of one."""
    factors = all_factors(folder)
    return f"{spread(factors, '.2f')} ({len(factors)})" if len(factors) > 1 else ""


def index() -> str:
    """Returns a table for the page with the cards: what each technique gained, the most on a GPU
    first, and what it costs."""
    *lines, ddp = techniques()
    gpu, *_, cpu, _ = lines[0]["gains"]
    lines.sort(key=lambda line: -line["gains"][gpu]["factor"] if gpu in line["gains"] else 0)
    return markdown(
        Table(
            [
                text_col("technique", "link"),
                num_col(f"{gpu}: × speed", f"gains.{gpu}.speed"),
                num_col(f"{gpu}: × memory", f"gains.{gpu}.memory", ".2f"),
                num_col("A100: × speed", "factor", ".2f"),
                num_col(f"{cpu}: × speed", f"gains.{cpu}.speed"),
                Column("loss", lambda line: line["patch"].fields["Loss"].split()[0], True),
                text_col("limits", "patch.fields.Limits"),
            ],
            [*lines, ddp],
        )
    )


def techniques() -> list[dict]:
    """Returns of each technique its patch, the title of its card, a link to that, its published
    factor, and its gains by machine, those on GPUs first. DDP comes last."""
    rows = [
        row
        for folder in machines()
        for row in every_row_in(folder, "ladder")
        if row.factor
        and len(row.techniques) < 2
        and "--model" not in row.measured.options
        and trained_in(row.measured.machine) == "bfloat16"
    ]
    rows.sort(key=has_gpu, reverse=True)
    lines, before = [], published()["00"]
    for number, patch in enumerate(stack.load(), 1):
        title, now = patch.fields["Technique"], patch.published
        if patch.name != "ddp":
            title = f"{number}. {title}"
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")  # as code hosts make it
        gains = {}
        for row in (row for row in rows if str(row.run.script) == patch.name):
            factor, mark = row.factor, ""
            if row.interval and row.interval[1] > WIDE * row.interval[0]:
                factor, mark = row.tok_per_sec / row.reference.tok_per_sec, "†"
            gains[re.sub("^(AMD|Intel) ", "", short_name(row.measured.machine))] = dict(
                factor=factor,
                memory=row.memory_factor,
                speed=bold(f"{factor:.2f}", row.significance) + mark,
            )
        factor = now and now.tok_per_sec / before.tok_per_sec
        if now:
            gpus = f"{now.gpus} A100s" if now.gpus > 1 else "A100"
            gains[f"{gpus} (published)"] = dict(
                speed=f"{factor:.2f}", memory=now.reserved_gb / before.reserved_gb
            )
        lines.append(
            dict(patch=patch, title=title, link=f"[{title}](#{anchor})", factor=factor, gains=gains)
        )
        before = now or before
    return lines


# ---- Cards -------------------------------------------------------------------------------------


def technique_cards() -> str:
    """Returns a card for each technique: what its header says first, a table, and its code."""
    texts = []
    for line in techniques():
        patch, fields = line["patch"], line["patch"].fields
        gains = "; ".join(
            f"{machine} {gain['speed']}×, {fmt(gain['memory'], '.2f')}×"
            for machine, gain in line["gains"].items()
        )
        diff = stack.read(stack.ROOT / patch.file)[len(patch.header) :].decode()
        texts.append(f"""## {line["title"]}
{prose_of(patch)}

| use it when | {fields.get("Use", "")} |
|:--|:--|
| speed, memory | {gains} |
| loss | {fields["Loss"]} |
| hardware | {fields["Hardware"]}. More: {links_of(patch)} |

<details><summary>Show the diff</summary>

```diff
{diff}```
</details>
""")
    return "\n".join(texts)


def variant_cards() -> str:
    """Returns for each purpose a table of what its variants gain, and a card for each."""
    gains, rest, texts = variant_gains(), stack.load_variants(), []
    for purpose, beginnings in PURPOSES.items():
        own = list(
            dict.fromkeys(
                patch
                for beginning in beginnings
                for patch in rest
                if patch.name.startswith(beginning)
            )
        )
        rest = [patch for patch in rest if patch not in own]
        table = markdown(
            Table(
                [
                    text_col("variant", "link"),
                    num_col("speed, H100", "H100"),
                    num_col("speed, CPU", "CPU"),
                    num_col("memory", "memory"),
                ],
                [line for patch in own for _, line in sorted(gains.get(patch.name, {}).items())],
            )
        )
        texts += [f"## {purpose}", table.rstrip(), *map(variant_card, own)]
    return "\n\n".join(texts) + "\n"


def variant_card(patch) -> str:
    """Returns the first paragraph of a patch's header, what it needs or lacks, and its sources."""
    fields, title = patch.fields, patch.fields["Technique"]
    facts = {
        "Loss": fields["Loss"].split()[0],
        "Hardware": fields["Hardware"],
        "Package": "".join(re.findall(r"package ([\w-]+)", fields.get("Needs", ""))),
        "Limits": fields.get("Limits", ""),
    }
    return " ".join(
        [
            f"### `{patch.name}`\n\n**{title[0].upper()}{title[1:]}.**",
            re.sub(r"--[a-z][\w-]*(?: [\d.]*\d)?", r"`\g<0>`", prose_of(patch)),  # options as code
            *(
                f"*{name}*: {text}."
                for name, text in facts.items()
                if text not in ("unchanged", "any", "")
            ),
            links_of(patch),
        ]
    )


def prose_of(patch) -> str:
    """Returns the first paragraph of a patch's header, which says what a reader needs."""
    return " ".join(patch.header.decode().split("\n\n")[1].split())


def links_of(patch) -> str:
    """Returns links to a patch and to its sources."""
    sources = re.findall(r"https?://[^\s,]+", patch.fields["Source"])
    return ", ".join(
        [f"[patch](../{patch.file})", *(f"[{source_name(link)}]({link})" for link in sources)]
    )


def source_name(link: str) -> str:
    """Returns a paper's number, a repository's name, or else the host."""
    host, *path = link.split("/")[2:]
    if host == "arxiv.org":
        return f"arXiv:{path[-1]}"
    return path[1] if host == "github.com" else host


def variant_gains() -> dict[str, dict[str, dict]]:
    """Returns by variant and label, with a link: times the speed of 01, on the "CPU" with the
    narrowest interval and on an "H100", predicted where it wasn't measured; and times its memory,
    on the H100 or else on the CPU."""
    rows = [
        row
        for folder in machines()
        for row in every_row_in(folder, "variants")
        if row.factor
        and row.label.startswith(str(row.run.script))
        and "--model" not in row.measured.options
        and (
            row.significance in ("faster", "slower")
            or not row.interval
            or row.interval[1] < WIDE * row.interval[0]
        )
    ]
    rows.sort(
        key=lambda row: (  # the last figure of a cell stands
            has_gpu(row),
            -row.interval[1] / row.interval[0] if row.interval else -math.inf,
        )
    )
    figures = [
        (
            row.run,
            "H100" if has_gpu(row) else "CPU",
            bold(fmt(row.factor, ".2f"), row.significance),
            fmt(row.memory_factor, ".2f"),
        )
        for row in rows
    ]
    gpus_begin = sum(not has_gpu(row) for row in rows)
    figures[gpus_begin:gpus_begin] = [
        (run, "H100", f"*{speed:.2f}*", f"*{memory:.2f}*")
        for run, speed, memory in prediction_tables.gains()
    ]
    gains: dict[str, dict[str, dict]] = {}
    for run, column, speed, memory in figures:
        line = gains.setdefault(str(run.script), {}).setdefault(run.label, {})
        line |= {"link": f"[`{run.label}`](#{run.script})", column: speed, "memory": memory}
    return gains


def every_row_in(folder: Path, study: str) -> list[Row]:
    """Returns a machine's newest rows of a study, and those that only further sessions have."""
    rows = rows_in(folder, study)
    for path in sorted(folder.glob(f"{study}-*.jsonl")):
        for measured in reversed(read_journal(path)):
            names = {row.run.name for row in rows}
            rows += [row for row in rows_of(measured) if row.run.name not in names]
    return rows
