"""What is generated inside README, docs/ and the machines' pages: tables between markers, figures
in sentences, and README's picture.

In a sentence a figure's name stands behind it, where a reader doesn't see it:
`14<!--h100-speedup--> times`. FIGURES has the names.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from bench.analysis.claims import Claims, Contribution
from bench.analysis.folders import has_gpu, machines, newest_in
from bench.analysis.gains import ladder_sessions
from bench.analysis.rows import Row, known_values
from bench.analysis.totals import optimized_in, rounds_of_both
from bench.analysis.tuning import DEFAULT_LOSS, EPOCH_LOSS
from bench.catalogue import effect_on_loss
from bench.common import REFERENCE, ROOT, relative, short_name, write_whole
from bench.predict.batches import comparable_batch
from bench.report import (
    explorer,
    prediction_tables,
    technique_pages,
    to_loss,
    variant_pages,
    waterfall,
)
from bench.report.notes import SINGLE_RUNS, provenance
from bench.report.pictures import picture_bytes
from bench.report.prediction_tables import OnCard
from bench.report.tables import excerpts_of, range_text, spread
from bench.report.technique_pages import link_to, title_of
from gpt_speed import gains
from gpt_speed.cards import CARDS
from gpt_speed.common import UserError
from gpt_speed.tables import Column, Table, markdown, num_col, text_col
from patches import stack

EXPLORER = ROOT / "docs" / "explorer.html"
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    EXPLORER,
    *sorted(REFERENCE.glob("*/README.md")),
    *sorted(REFERENCE.glob("*/gradients.md")),
]
PICTURES = ROOT / "docs"
BLOCK = re.compile(
    r"(?P<opening>"
    r"<!-- (?P<name>[\w.-]+)(?:@(?P<machine>[^\s:]+))?: written by measure\.py readme -->\n"
    r")"
    r"(?:(?!<!--).)*"  # what stands there
    r"(?P<end><!-- end -->)?",
    re.DOTALL,
)
FIGURE = re.compile(r"([\d.,–]*\d)?<!--([\w-]+)-->")  # the figure, its name
# The machine whose tables stand in the pages, unless one says NAME@MACHINE.
SHOWN = REFERENCE / "amd-epyc-2-cores"

EFFECTS = {  # on the loss, in plainer words than a patch's header
    "05-bfloat16": "small updates are lost; see below",
    "09-padded-vocabulary": "other initial weights",
    "10-batch-size": "fewer, larger steps",
}

Value = float | None | Sequence[float | None]


class Figure(NamedTuple):
    """A figure of README's sentences: what it is of, and how it is written."""

    value: Callable[[Claims], Value]  # of several values the range is written
    form: str = ".2f"
    unit: float = 1.0


FIGURES = {
    "parameters-millions": Figure(lambda claims: claims.parameters, ".0f", unit=1e6),
    "cpu-parameters-millions": Figure(lambda claims: claims.cpu_parameters, ".0f", unit=1e6),
    "xeon-speedup": Figure(lambda claims: claims.speedups_on("intel-xeon-amx-2-cores"), ".1f"),
    "epyc-speedup": Figure(lambda claims: claims.speedups_on("amd-epyc-2-cores"), ".1f"),
    "avx2-speedup": Figure(lambda claims: claims.speedups_on("amd-epyc-avx2-2-cores"), ".1f"),
    # The H100's ladder.
    "h100-technique-8": Figure(lambda claims: claims.compiled_script.tok_per_sec, ",.0f"),
    "h100-optimized": Figure(lambda claims: claims.optimized.tok_per_sec, ",.0f"),
    "h100-optimized-thousands": Figure(
        lambda claims: claims.optimized.tok_per_sec, ".0f", unit=1e3
    ),
    "h100-mfu": Figure(lambda claims: claims.optimized.mfu, ".0f", unit=0.01),
    "h100-speedup": Figure(lambda claims: claims.optimized.factor_baseline, ".1f"),
    "h100-at-batch-8": Figure(lambda claims: claims.speedup_at_batch_8, ".1f"),
    "h100-speedup-interval": Figure(
        lambda claims: claims.speedup_over(claims.baseline).interval, ".1f"
    ),
    "h100-after-8": Figure(
        lambda claims: claims.speedup_over(claims.compiled_script).factor, ".1f"
    ),
    "h100-11-to-15": Figure(lambda claims: claims.percent_over_published, ".0f"),
    "h100-memory-over-published": Figure(lambda claims: claims.memory_over_published, ".1f"),
    # Single steps and whole scripts of another day.
    "h100-gb": Figure(lambda claims: claims.steps.script_gb["01"], ".1f"),
    "over-nanogpt": Figure(lambda claims: claims.steps.over_nanogpt),
    "step-gb": Figure(lambda claims: claims.steps.step_gb["01"], ".0f"),
    "nanogpt-gb": Figure(lambda claims: claims.steps.step_gb["nanoGPT"], ".0f"),
    # Its variants.
    "autocast": Figure(lambda claims: claims.autocast_variant.factor),
    "autocast-gb": Figure(lambda claims: claims.autocast_variant.reserved_gb, ".0f"),
    "autocast-over-nanogpt": Figure(lambda claims: claims.autocast_over_nanogpt),
    # The H200: one epoch, and the time to its loss.
    "epoch-loss-00": Figure(lambda claims: claims.loss_of_epoch("00")),
    "epoch-loss-01": Figure(lambda claims: claims.loss_of_epoch("01")),
    "target": Figure(lambda claims: claims.target),
    "seconds-00": Figure(lambda claims: claims.seconds_to_target("00"), ".1f"),
    "seconds-01": Figure(lambda claims: claims.seconds_to_target("01"), ".1f"),
    "seconds-00-compiling": Figure(
        lambda claims: claims.seconds_to_target("00", compiling=True), ".1f"
    ),
    "seconds-01-compiling": Figure(
        lambda claims: claims.seconds_to_target("01", compiling=True), ".1f"
    ),
    # Predicted.
    "bench-minutes": Figure(lambda _: bench_minutes("RTX 4090"), ".0f"),
}


def write_readme(studies: dict) -> bool:
    """Writes the pages' tables, pictures in docs/ and the gains that audits tell again; returns
    whether that changed a page. Raises what update does."""
    before = {page: page.read_bytes() for page in PAGES}
    after = {page: update(text.decode(), SHOWN, studies).encode() for page, text in before.items()}
    before[gains.FILE], after[gains.FILE] = gains.FILE.read_bytes(), gains_json().encode()
    for page, text in after.items():
        write_whole(page, text)
    for name, palette in waterfall.README_PICTURES.items():
        figure = waterfall.readme_picture(Claims(REFERENCE), palette)
        write_whole(PICTURES / name, picture_bytes(figure))
    for name, palette in to_loss.PICTURES.items():
        write_whole(PICTURES / name, picture_bytes(to_loss.loss_over_seconds(palette)))
    return after != before


def gains_json() -> str:
    """Returns the content of gains.json: the techniques' names, and what they gained on the
    reference machines."""
    sessions = [
        asdict(session)
        | dict(gains={patch: round(gain, 3) for patch, gain in session.gains.items()})
        for session in ladder_sessions(*machines())
    ]
    content = dict(
        about="Written by `measure.py readme` from results/reference, for audits.",
        techniques={patch.name: patch.fields["Technique"] for patch in stack.load()},
        sessions=sessions,
    )
    return json.dumps(content, indent=1) + "\n"


def update(text: str, machine: Path, studies: dict) -> str:
    """Returns a page with what stands between its markers written again, from a machine's folder,
    and the figures of its sentences. Raises UserError for a marker without its end, its figure, or
    of an unknown name, StackError, OSError."""
    tables_in = cache(partial(tables_of_studies, studies))

    def write(block: re.Match) -> str:
        if not block["end"]:
            raise UserError(f"{block['opening'].strip()} has no <!-- end -->")
        name, folder = block["name"], machine
        if block["machine"]:
            folder = REFERENCE / block["machine"]
        content = block_text(name, folder) if name in BLOCKS else tables_in(folder).get(name, "")
        if not content.strip():
            raise UserError(f"there is no table {name} in {relative(folder)}")
        if not content.startswith("|"):  # as tables do, which need no space around them
            content = f"\n{content}\n"
        return f"{block['opening']}{content}{block['end']}"

    return with_figures(BLOCK.sub(write, text))


def block_text(name: str, machine: Path) -> str:
    """Returns what stands between markers of a name in BLOCKS for a machine."""
    content = BLOCKS[name](machine)
    if isinstance(content, Table):
        return markdown(content)
    return content


def tables_of_studies(studies: dict, folder: Path) -> dict[str, str]:
    """Returns the tables of what a folder's studies measured last, by the names in markers."""
    return {
        name: table
        for study in studies.values()
        for rows in newest_in(folder, study.name)
        for name, table in excerpts_of(study, rows).items()
    }


def measured_when(machine: Path) -> str:
    """Returns when, and at which commits, a machine's journals were measured."""
    return provenance(
        rows.measured
        for path in machine.glob("**/*.jsonl")
        for rows in newest_in(path.parent, path.stem)
    )


# ---- README's figures and tables ---------------------------------------------------------------


def with_figures(text: str) -> str:
    """Returns a page with each named figure of its sentences written again. Raises UserError."""
    claims = Claims(REFERENCE)

    def write(mark: re.Match) -> str:
        figure, name = mark.groups()
        if not figure:
            raise UserError(f"no figure stands before <!--{name}-->")
        return f"{figure_text(name, claims)}<!--{name}-->"

    return FIGURE.sub(write, text)


def figure_text(name: str, claims: Claims) -> str:
    """Writes a figure of README's sentences. Raises UserError for one of an unknown name, or whose
    journal lacks it."""
    if name not in FIGURES:
        raise UserError(f"there is no figure {name} in bench/report/readme.py")
    figure = FIGURES[name]
    try:
        value = figure.value(claims)
    except KeyError as error:
        raise UserError(f"the figure {name}: no row {error} in {relative(claims.folder)}")
    except OSError as error:
        raise UserError(f"the figure {name}: {error}")
    values = value if isinstance(value, Sequence) else [value]
    numbers = known_values(values)
    if not numbers or len(numbers) < len(values):
        raise UserError(f"the figure {name} isn't known from {relative(claims.folder)}")
    return range_text([number / figure.unit for number in numbers], figure.form)


def hardware_table() -> Table:
    """Returns a line for each GPU that was measured, and for one that is predicted."""
    rows = [row for row in optimized_in(REFERENCE) if has_gpu(row)]
    lines = [*map(measured_line, rows), predicted_line("RTX 4090")]
    return Table(
        [
            text_col("hardware", "hardware"),
            num_col("baseline, tok/sec", "baseline"),
            num_col("optimized, tok/sec", "optimized"),
            num_col("speedup", "speedup"),
            text_col("source", "source"),
        ],
        lines,
    )


def measured_line(row: Row) -> dict[str, str]:
    """Returns the ends of a machine's ladder, and on how much they rest."""
    folder = row.measured.folder.name
    source = f"[measured](results/reference/{folder}/README.md)"
    if row.plan.tokens and row.record:
        source += f" over {row.record.logs[-1]['step'] + 1} steps"
    if rounds_of_both(row) == 1:
        source += f", {SINGLE_RUNS}"
    return dict(
        hardware=f"{row.run.processes} × {short_name(row.measured.machine)}",
        baseline=f"{row.table[0].tok_per_sec:,.0f}",
        optimized=f"{row.tok_per_sec:,.0f}",
        speedup=f"**{row.factor_baseline:.1f}×**",
        source=source,
    )


def predicted_line(name: str) -> dict[str, str]:
    """Returns what is predicted for a card, at the batch sizes that `make bench` takes there.
    Raises UserError where that isn't stored, StackError."""
    first, last = benched(name)
    factors = spread(quotients(last.speeds, first.speeds), ".1f")
    return dict(
        hardware=f"1 × {name}",
        baseline=in_thousands(first.speeds),
        optimized=in_thousands(last.speeds),
        speedup=f"{factors}×" if factors else "",
        source=f"[predicted](docs/gpus.md), batch {first.batch} → {last.batch}",
    )


def benched(name: str) -> tuple[OnCard, OnCard]:
    """Returns 00 and 01 as `make bench` trains them on a card."""
    first = OnCard("00", CARDS[name])
    return first, OnCard("01", CARDS[name], most=comparable_batch(first.batch))


def quotients(
    speeds: tuple[float, float] | None, others: tuple[float, float] | None
) -> tuple[float, ...]:
    """Returns the least and the most times that one predicted speed may be another; () where one
    isn't predicted."""
    if not speeds or not others:
        return ()
    return speeds[0] / others[1], speeds[1] / others[0]


def bench_minutes(name: str) -> float | None:
    """Returns the minutes of training that `make bench` takes on a card: 00, 01, and 02."""
    first, last = benched(name)
    if first.minutes is None or last.minutes is None:
        return None
    return first.minutes + 2 * last.minutes


def in_thousands(speeds: tuple[float, float] | None) -> str:
    """Writes a predicted range, such as "13,000–22,000"; "" without one."""
    return spread([round(speed, -3) for speed in speeds or ()])


def contributions_table() -> Table:
    """Returns what each technique contributes on the H100, beside the published A100."""
    return Table(
        [
            Column("technique", technique_cell, True),
            Column("speed, H100", speed_cell),
            num_col("memory, H100", "memory", ".2f", "×"),
            num_col("speed, A100", "published", ".2f", "×"),
            Column("effect on the loss", effect_cell, True),
        ],
        Claims(REFERENCE).contributions(),
    )


def technique_cell(line: Contribution) -> str:
    """Returns the numbers and names of techniques, linked to their cards."""
    titles = map(title_of, line.patches, line.numbers)
    return ", ".join(link_to(title, "docs/techniques.md") for title in titles)


def speed_cell(line: Contribution) -> str:
    """Returns the speedup, or that it is a CPU's alone."""
    if line.speed is None:
        return "CPUs only"
    sign = "≤ " if line.at_most else ""
    return f"{sign}{line.speed:.2f}×"


def effect_cell(line: Contribution) -> str:
    """Returns what the techniques do to the loss, in the words of their headers where EFFECTS has
    no plainer ones."""
    effects = [EFFECTS.get(patch.name, effect_on_loss(patch)) for patch in line.patches]
    return "; ".join(dict.fromkeys(effects))


def picture_lines() -> str:
    """Returns README's picture, a light and a dark one, with what it shows in words."""
    claims = Claims(REFERENCE)
    first, last = claims.baseline, claims.optimized
    words = (
        "Training throughput on one H100 after each technique, relative to the baseline: it ends"
        f" at {last.factor_baseline:.1f} times, nanoGPT at {claims.nanogpt_speedup:.1f}."
        f" Memory falls from {first.reserved_gb:.1f} to {claims.steps.script_gb['01']:.1f} GB"
    )
    light, dark = (f"{PICTURES.name}/{name}" for name in waterfall.README_PICTURES)
    return (
        "<picture>\n"
        f'  <source media="(prefers-color-scheme: dark)" srcset="{dark}">\n'
        f'  <img alt="{words}" src="{light}" width="830">\n'
        "</picture>"
    )


def anywhere(write: Callable[[], Table | str]) -> Callable[[Path], Table | str]:
    """Returns what writes the same for every machine."""
    return lambda machine: write()


# What writes between markers, by their names, from the folder of the machine whose page it is. The
# names of other markers are those of studies' tables.
BLOCKS: dict[str, Callable[[Path], Table | str]] = {
    "machines": anywhere(technique_pages.results),
    "technique-index": anywhere(technique_pages.index),
    "technique-cards": anywhere(technique_pages.technique_cards),
    "variant-cards": anywhere(variant_pages.variant_cards),
    "variants-on-gpu": anywhere(variant_pages.measured_on_gpu),
    "gpus": anywhere(prediction_tables.gpus_table),
    "explorer": anywhere(explorer.data_block),
    "hardware": anywhere(hardware_table),
    "contributions": anywhere(contributions_table),
    "speedup-picture": anywhere(picture_lines),
    "measured": measured_when,
    "own-gpu": prediction_tables.gpu_table,
    "to-loss": partial(to_loss.table_of, "", DEFAULT_LOSS),
    "to-loss-epoch": partial(to_loss.table_of, "epoch", EPOCH_LOSS),
}
