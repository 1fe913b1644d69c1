"""What stands in the pages about each machine and each technique: tables and cards."""

import re
from pathlib import Path

from bench.analysis.rows import Row, rows_of
from bench.catalogue import published, without_effect_on_gpus
from bench.common import REFERENCE, short_name
from bench.measure.journal import read_journal
from bench.report import prediction_tables
from bench.report.tables import (
    INTERVAL,
    Column,
    Table,
    bold,
    fmt,
    lookup,
    markdown,
    num_col,
    rows_in,
    spread,
    text_col,
)
from patches import stack

# Of a patch's header, and what its card calls them.
FIELDS = {"Use": "use it when", "Limits": "limits", "Loss": "loss", "Hardware": "hardware",
          "Needs": "needs", "Excludes": "excludes"}


def machines() -> list[Path]:
    """Returns the folders of the machines that were measured."""
    return sorted({path.parent for path in REFERENCE.glob("*/*.jsonl")})


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
    parts = [f"1 × {short_name(machine)}" if gpu else
             f"{short_name(machine)}, {machine['threads']} cores",
             f"`{first.record.config['model']}`"]
    whole = max({*range(1, len(stack.load()))} - (without_effect_on_gpus() if gpu else set()))
    if last.run.number not in (None, whole):
        parts.append(f"{last.run.number} of {whole} techniques")
    if first.rounds == last.rounds == 1:
        parts.append("one run of each")
    pages = {"findings": "README.md", "all tables": "report.md"}
    links = [f"[{title}](../results/reference/{folder.name}/{page})"
             for title, page in pages.items() if (folder / page).exists()]
    return f"{', '.join(parts)}: {', '.join(links)}"


def results() -> str:
    """Returns both ends of every machine's ladder, those with a GPU first, for a page in docs/."""
    ends = [(folder, *rows) for folder in machines() if (rows := ends_of(folder))]
    return markdown(Table([
        Column("machine", lambda line: name_of(*line), True),
        Column("baseline, tok/sec", lambda line: fmt(line[1].tok_per_sec, ",.0f")),
        Column("optimized, tok/sec", lambda line: fmt(line[2].tok_per_sec, ",.0f")),
        Column("speedup", lambda line: f"{line[2].factor_baseline:.1f}×"),
        Column("95 %", lambda line: spread(line[2].speedup(over=line[1]).interval, ".1f"))],
        sorted(ends, key=lambda line: not has_gpu(line[1]))))


# ---- A line for each technique -----------------------------------------------------------------


def index() -> str:
    """Returns a table for the page with the cards: what each technique gained, the most on a GPU
    first, and what it costs."""
    *lines, ddp = techniques()
    gpu, *_, cpu, _ = lines[0]["gains"]
    lines.sort(key=lambda line: -(lookup(line, f"gains.{gpu}.factor") or 0))
    return markdown(Table([
        text_col("technique", "link"), num_col(f"{gpu}: × speed", f"gains.{gpu}.speed"),
        num_col(f"{gpu}: × memory", f"gains.{gpu}.memory", ".2f"),
        num_col("A100: × speed", "factor", ".2f"), num_col(f"{cpu}: × speed", f"gains.{cpu}.speed"),
        Column("loss", lambda line: line["patch"].fields["Loss"].split()[0], True),
        text_col("limits", "patch.fields.Limits")], [*lines, ddp]))


def techniques() -> list[dict]:
    """Returns of each technique its patch, the title of its card, a link to that, its published
    factor, and its gains by machine, those on GPUs first. DDP comes last."""
    rows = [row for folder in machines() for row in single_technique(every_row_in(folder, "ladder"))
            if row.factor and "--model" not in row.measured.options]
    rows.sort(key=has_gpu, reverse=True)
    lines, before = [], published().stages["00"]
    for number, patch in enumerate(stack.load(), 1):
        title, now = patch.fields["Technique"], patch.published
        if patch.name != "ddp":
            title = f"{number}. {title}"
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")  # as code hosts make it
        gains = {re.sub("^(AMD|Intel) ", "", short_name(row.measured.machine)): dict(
            factor=row.factor, speed=bold(f"{row.factor:.2f}", row.significance),
            memory=row.memory_factor) for row in rows if str(row.run.script) == patch.name}
        factor = now and now.tok_per_sec / before.tok_per_sec
        if now:
            gpus = f"{now.gpus} A100s" if now.gpus > 1 else "A100"
            gains[f"{gpus} (published)"] = dict(
                speed=f"{factor:.2f}", memory=now.reserved_gb / before.reserved_gb)
        lines.append(dict(patch=patch, title=title, link=f"[{title}](#{anchor})", factor=factor,
                          gains=gains))
        before = now or before
    return lines


# ---- Cards -------------------------------------------------------------------------------------


def technique_cards() -> str:
    """Returns a card for each technique: what its header says first, a table, and its code."""
    texts = []
    for line in techniques():
        patch, fields = line["patch"], line["patch"].fields
        gains = "; ".join(f"{machine} {gain['speed']}×, {fmt(gain['memory'], '.2f')}×"
                          for machine, gain in line["gains"].items())
        links = re.sub(r"https?://([^/\s,]+)[^\s,]*", r"[\1](\g<0>)", fields["Source"])
        prose = " ".join(patch.header.decode().split("\n\n")[1].split())  # the rest is in the patch
        diff = stack.read(stack.ROOT / patch.file)[len(patch.header):].decode()
        texts.append(f"""## {line["title"]}
{prose}

| use it when | {fields.get("Use", "")} |
|:--|:--|
| speed, memory | {gains} |
| loss | {fields["Loss"]} |
| hardware | {fields["Hardware"]}. More: [patch](../{patch.file}), {links} |

<details><summary>Show the diff</summary>

```diff
{diff}```
</details>
""")
    return "\n".join(texts)


def variant_cards(unchanged: bool) -> str:
    """Returns a card for each variant that leaves the loss `unchanged`, or doesn't."""
    gains = gains_of("variants")
    texts = [card(patch, patch.fields["Technique"], gains.get(patch.name, {}))
             for patch in stack.load_variants()
             if (patch.fields["Loss"] == "unchanged") == unchanged]
    return "\n\n".join(texts) + "\n"


def card(patch, title: str, gains: dict[str, list[str]]) -> str:
    """Returns the first paragraph and the fields of a patch's header, and its gains by the options
    that they were measured with."""
    lines = ["; ".join(f"{label}: {patch.fields[name]}" for name, label in FIELDS.items()
                       if name in patch.fields)]
    lines += [(f"`{options}`: " if options else "") + "; ".join(texts)
              for options, texts in gains.items()]
    sources = ", ".join(f"<{source}>" for source in patch.fields["Source"].split(", "))
    lines.append(f"[`{patch.name}`](../{patch.file}); source: {sources}")
    prose = " ".join(patch.header.decode().split("\n\n")[1].split())  # the rest is in the patch
    return f"## {title[0].upper()}{title[1:]}\n\n{prose}\n\n- " + "\n- ".join(lines)


def gains_of(study: str) -> dict[str, dict[str, list[str]]]:
    """Returns by the name of a patch, then by the options that it was measured with, its gain on
    each machine and the predicted one, those on GPUs first."""
    measured = [row for folder in machines() for row in single_technique(
        every_row_in(folder, study)) if row.factor and "--model" not in row.measured.options]
    texts = [(row.run, measured_gain(row)) for row in measured if has_gpu(row)]
    texts += [(run, f"predicted for an H100: {speed:.2f}× the speed, {memory:.2f}× the memory")
              for run, speed, memory in prediction_tables.gains()]
    texts += [(row.run, measured_gain(row)) for row in measured if not has_gpu(row)]
    gains: dict[str, dict[str, list[str]]] = {}
    for run, text in texts:
        name, options = str(run.script), ""
        if study == "variants":
            options = run.label.removeprefix(name).strip(", ")
        gains.setdefault(name, {}).setdefault(options, []).append(text)
    return gains


def measured_gain(row: Row) -> str:
    interval = f" ({INTERVAL.cell(row)})" if row.interval else ""
    memory = f", {row.memory_factor:.2f}× the memory" if row.memory_factor else ""
    return f"{short_name(row.measured.machine)}: {row.factor:.2f}×{interval} the speed{memory}"


def every_row_in(folder: Path, study: str) -> list[Row]:
    """Returns a machine's newest measurement, and what only its further sessions have."""
    rows = rows_in(folder, study)
    for path in sorted(folder.glob(f"{study}-*.jsonl")):
        for measured in reversed(read_journal(path)):
            names = {row.run.name for row in rows}
            rows += [row for row in rows_of(measured) if row.run.name not in names]
    return rows


def single_technique(rows: list[Row]) -> list[Row]:
    """Returns the rows whose factor isn't that of several techniques."""
    return [row for row in rows if len(row.techniques) < 2]
