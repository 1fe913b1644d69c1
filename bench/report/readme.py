"""What is generated inside README, docs/ and the machines' pages: tables between markers, figures
in sentences, and README's picture.

In a sentence a figure's name stands behind it, where a reader doesn't see it:
`14<!--h100-speedup--> times`. `figures_of` has the names.
"""

import re
from functools import cache
from pathlib import Path

from bench.analysis.claims import WITH_FAST_MATH, Claims, Contribution
from bench.analysis.folders import has_gpu, newest_in
from bench.analysis.rows import Row
from bench.analysis.totals import optimized_on, rounds_of_both, totals_in
from bench.catalogue import published
from bench.common import REFERENCE, ROOT, relative, short_name, write_whole
from bench.predict.reference import GPT2, prediction_of
from bench.predict.store import fitting
from bench.report import explorer, prediction_tables, technique_pages, waterfall
from bench.report.notes import SINGLE_RUNS, provenance
from bench.report.pictures import picture_bytes
from bench.report.tables import excerpts_of, spread
from gpt_speed.cards import CARDS
from gpt_speed.common import UserError
from gpt_speed.tables import Column, Table, fmt, markdown, num_col, text_col
from patches import stack

EXPLORER = ROOT / "docs" / "explorer.html"
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    EXPLORER,
    *sorted(REFERENCE.glob("*/README.md")),
]
PICTURE = ROOT / "docs" / "speedup.png"
BLOCK = re.compile(  # opening, name of the table, @ its machine, what stands there, end
    r"(<!-- ([\w-]+)(?:@([^\s:]+))?: written by measure\.py readme -->\n)((?:(?!<!--).)*)"
    r"(<!-- end -->)?",
    re.DOTALL,
)
FIGURE = re.compile(r"([\d.,–]*\d)?<!--([\w-]+)-->")  # the figure, its name
# The machine whose tables stand in the pages, unless one says NAME@MACHINE.
SHOWN = REFERENCE / "amd-epyc-2-cores"

CUDA_GRAPHS = "--batch-size 4, reduce-overhead"  # in the H100's steps.json
EFFECTS = {  # on the loss, in plainer words than a patch's header
    "05-bfloat16": "small updates are lost; see below",
    "09-padded-vocabulary": "other initial weights",
    "10-batch-size": "fewer, larger steps",
}

BLOCKS = {  # from a machine's folder, by their markers' names
    "measured": lambda machine: provenance(  # when, and at which commits
        measured
        for path in machine.glob("**/*.jsonl")
        for measured, _ in newest_in(path.parent, path.stem)
    ),
    "own-gpu": lambda machine: markdown(prediction_tables.gpu_table(machine)),
    "machines": lambda _: technique_pages.results(),
    "technique-index": lambda _: technique_pages.index(),
    "technique-cards": lambda _: technique_pages.technique_cards(),
    "variant-cards": lambda _: technique_pages.variant_cards(),
    "gpus": lambda _: markdown(prediction_tables.gpus_table()),
    "explorer": lambda _: explorer.data_block(),
    "hardware": lambda _: markdown(hardware_table(REFERENCE)),
    "contributions": lambda _: markdown(contributions_table(REFERENCE)),
    "speedup-picture": lambda _: picture_line(REFERENCE),
}


def write_readme(studies: dict) -> bool:
    """Writes the pages' tables and README's picture again; returns whether that changed a page.
    Raises what update does."""
    before = {page: page.read_bytes() for page in PAGES}
    after = {page: update(text.decode(), SHOWN, studies).encode() for page, text in before.items()}
    for page, text in after.items():
        write_whole(page, text)
    write_whole(PICTURE, picture_bytes(waterfall.readme_picture()))
    return after != before


def update(text: str, machine: Path, studies: dict) -> str:
    """Returns a page with what stands between its markers written again, from a machine's folder,
    and the figures of its sentences. Raises UserError for a marker without its end, its figure, or
    of an unknown name, StackError, OSError."""

    @cache
    def of_studies(folder: Path) -> dict[str, str]:
        return {
            name: table
            for study in studies.values()
            for measured, _ in newest_in(folder, study.name)
            for name, table in excerpts_of(study, measured).items()
        }

    def write(block: re.Match) -> str:
        opening, name, other, _, end = block.groups()
        folder = REFERENCE / other if other else machine
        if not end:
            raise UserError(f"{opening.strip()} has no <!-- end -->")
        table = BLOCKS[name](folder) if name in BLOCKS else of_studies(folder).get(name)
        if not table or not table.strip():
            raise UserError(f"there is no table {name} in {relative(folder)}")
        return opening + (table if table.startswith("|") else f"\n{table}\n") + end

    return with_figures(BLOCK.sub(write, text))


# ---- README's figures and tables ---------------------------------------------------------------


def with_figures(text: str) -> str:
    """Returns a page with each named figure of its sentences written again. Raises UserError."""
    figures = figures_of(REFERENCE) if FIGURE.search(text) else {}

    def write(mark: re.Match) -> str:
        figure, name = mark.groups()
        if not figure:
            raise UserError(f"no figure stands before <!--{name}-->")
        if name not in figures:
            raise UserError(f"there is no figure {name} in bench/report/readme.py")
        return f"{figures[name]}<!--{name}-->"

    return FIGURE.sub(write, text)


def figures_of(reference: Path) -> dict[str, str]:
    """Returns the figures of README's sentences, by their names."""
    claims = Claims(reference)
    h100, steps, variants = claims.ladder, claims.steps, claims.variants
    before, after = claims.tuned["00"], claims.tuned["01"]
    cpus = [row for row in optimized_in(reference) if not has_gpu(row)]
    on_cpus = [factor for row in cpus for factor in totals_in(row.measured.folder)]
    slower = [variants[name].factor for name in ("head-liger", "optimizer-muon")]
    return {
        "techniques": f"{len(stack.load()) - 1}",  # DDP is a script of its own
        "parameters-millions": millions(claims.baseline),
        "cpu-parameters-millions": millions(cpus[0].baseline),
        "cpu-speedups": spread(on_cpus, ".1f"),
        # The H100's ladder.
        "h100-baseline": f"{claims.baseline.tok_per_sec:,.0f}",
        "h100-technique-8": f"{h100[8].tok_per_sec:,.0f}",
        "h100-optimized": f"{claims.optimized.tok_per_sec:,.0f}",
        "h100-mfu": f"{100 * claims.optimized.mfu:.0f}",
        "h100-speedup": f"{claims.optimized.factor_baseline:.0f}",
        "h100-after-8": f"{claims.optimized.speedup_over(h100[8]).factor:.1f}",
        "h100-9-and-10": f"{h100[10].speedup_over(h100[8]).factor:.2f}",
        # Its single steps and whole scripts of another day.
        "h100-since": f"{steps.speedup(WITH_FAST_MATH):.2f}",
        "h100-gb": f"{steps.script_gb['01']:.1f}",
        "over-nanogpt": f"{steps.speedup('01', over='nanoGPT'):.2f}",
        "step-gb": f"{steps.step_gb['01']:.1f}",
        "nanogpt-gb": f"{steps.step_gb['nanoGPT']:.1f}",
        "without-dropout": f"{steps.speedup('--dropout 0'):.2f}",
        "dropout-from-bytes": f"{steps.speedup('dropout from bytes'):.2f}",
        "cuda-graphs": f"{steps.speedup(CUDA_GRAPHS, over='--batch-size 4'):.1f}",
        # Its variants.
        "autocast": f"{variants['precision-autocast'].factor:.2f}",
        "autocast-gb": f"{variants['precision-autocast'].reserved_gb:.0f}",
        "autocast-memory": f"{variants['precision-autocast'].memory_factor:.2f}",
        "float8": f"{variants['precision-float8'].factor:.2f}",
        "liger-and-muon": one_or_range(slower),
        # The H200: one epoch, and the time to its loss.
        "epoch-loss-00": f"{claims.epoch['00'].val_loss:.2f}",
        "epoch-loss-01": f"{claims.epoch['01'].val_loss:.2f}",
        "target": f"{claims.target:.2f}",
        "seconds-00": f"{before.seconds_to(claims.target):.1f}",
        "seconds-01": f"{after.seconds_to(claims.target):.1f}",
        "seconds-00-compiling": f"{before.seconds_to(claims.target, True):.1f}",
        "seconds-01-compiling": f"{after.seconds_to(claims.target, True):.1f}",
    }


def millions(row: Row) -> str:
    """Writes how many parameters a script's model has."""
    return f"{row.record.config['parameters'] / 1e6:.0f}"


def one_or_range(values: list[float]) -> str:
    """Writes one factor for values that round to the same, else their range."""
    return "–".join(sorted({f"{value:.2f}" for value in values}))


def optimized_in(reference: Path) -> list[Row]:
    """Returns the optimized script of each machine that has measured it and the baseline."""
    folders = sorted({path.parent for path in reference.glob("*/*.jsonl")})
    return [row for folder in folders if (row := optimized_on(folder))]


def hardware_table(reference: Path) -> Table:
    """Returns a line for each GPU that was measured, one that is predicted, and the published."""
    rows = [row for row in optimized_in(reference) if has_gpu(row)]
    lines = [*map(measured_line, rows), predicted_line("RTX 4090"), published_line()]
    return Table(
        [
            text_col("hardware", "hardware"),
            num_col("baseline, tok/s", "baseline"),
            num_col("optimized, tok/s", "optimized"),
            num_col("speedup", "speedup"),
            text_col("source", "source"),
        ],
        lines,
    )


def measured_line(row: Row) -> dict[str, str]:
    """Returns the ends of a machine's ladder, and on how much they rest."""
    folder = row.measured.folder.name
    source = f"[measured](results/reference/{folder}/README.md)"
    if row.plan.tokens:
        source += f" over {row.record.logs[-1]['step'] + 1} steps"
    if rounds_of_both(row) == 1:
        source += f", {SINGLE_RUNS}"
    return dict(
        hardware=f"{row.run.processes} × {short_name(row.measured.machine)}",
        baseline=f"{row.baseline.tok_per_sec:,.0f}",
        optimized=f"{row.tok_per_sec:,.0f}",
        speedup=f"**{row.factor_baseline:.1f}×**",
        source=source,
    )


def predicted_line(name: str) -> dict[str, str]:
    """Returns what is predicted for a card, at the largest batches that fit up to the scripts'
    own. Raises UserError where that isn't stored, StackError."""
    card = CARDS[name]
    baseline, optimized = prediction_of("00", GPT2), prediction_of("01", GPT2)
    small = min(8, fitting(baseline.needs, card.mib))
    large = min(32, fitting(optimized.needs, card.mib))
    speedup = optimized.tok_per_sec(large, card) / baseline.tok_per_sec(small, card)
    return dict(
        hardware=f"1 × {name}",
        baseline=in_thousands(baseline.speeds(small, card)),
        optimized=in_thousands(optimized.speeds(large, card)),
        speedup=f"about {speedup:.1f}×",
        source=f"[predicted](docs/gpus.md), batch {small} → {large}",
    )


def in_thousands(speeds: tuple[float, float]) -> str:
    """Writes a predicted range, such as "13,000–22,000"."""
    return spread([round(speed, -3) for speed in speeds])


def published_line() -> dict[str, str]:
    """Returns the published ends of the ladder on one A100. Raises StackError."""
    first, last = published()["00"], published()["01"]
    numbers = [
        number
        for number, patch in enumerate(stack.load(), 1)
        if patch.published and patch.name != "ddp"
    ]
    return dict(
        hardware=f"{last.gpus} × A100",
        baseline=f"{first.tok_per_sec:,.0f}",
        optimized=f"{last.tok_per_sec:,.0f}",
        speedup=f"{last.tok_per_sec / first.tok_per_sec:.1f}×",
        source=f"published by S. Raschka: techniques {numbers[0]}–{numbers[-1]};"
        " some timings include evaluation",
    )


def contributions_table(reference: Path) -> Table:
    """Returns what each technique contributes on the H100, beside the published A100."""
    return Table(
        [
            Column("technique", technique_cell, True),
            Column("speed, H100", speed_cell),
            Column("memory, H100", lambda line: times(line.memory)),
            Column("speed, A100", lambda line: times(line.published)),
            Column("effect on the loss", effect_cell, True),
        ],
        Claims(reference).contributions(),
    )


def times(factor: float | None) -> str:
    """Writes a factor, such as "1.89×"; "" for none."""
    return fmt(factor, ".2f") + ("×" if factor else "")


def link_of(number: int) -> str:
    """Returns a technique's number and name, linked to its card."""
    title = f"{number}. {stack.load()[number - 1].fields['Technique']}"
    anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")  # as code hosts make it
    return f"[{title}](docs/techniques.md#{anchor})"


def technique_cell(line: Contribution) -> str:
    """Returns links to the cards."""
    return ", ".join(map(link_of, line.numbers))


def speed_cell(line: Contribution) -> str:
    """Returns the speedup, or that it is a CPU's alone."""
    if line.speed is None:
        return "CPUs only"
    return ("≤ " if line.at_most else "") + times(line.speed)


def effect_cell(line: Contribution) -> str:
    """Returns what the techniques do to the loss, in the words of their headers where EFFECTS has
    no plainer ones."""
    effects = [EFFECTS.get(patch.name, patch.fields["Loss"].split()[0]) for patch in line.patches]
    return "; ".join(dict.fromkeys(effects))


def picture_line(reference: Path) -> str:
    """Returns README's picture, with what it shows in words."""
    claims, theirs = Claims(reference), published()
    first, last = claims.baseline, claims.optimized
    published_speedup = theirs["01"].tok_per_sec / theirs["00"].tok_per_sec
    words = (
        "Training throughput on one H100 after each technique, relative to the baseline: it ends"
        f" at {last.factor_baseline:.1f} times. Circles: the published A100, which ends at"
        f" {published_speedup:.1f} times. Memory falls from {first.reserved_gb:.1f} to"
        f" {last.reserved_gb:.1f} GB, today {claims.steps.script_gb['01']:.1f}"
    )
    return f"![{words}]({PICTURE.relative_to(ROOT).as_posix()})"
