"""The tables inside docs/ and the machines' own README.md, each between markers, and the picture of
README.md."""

import re
from functools import cache
from pathlib import Path

from bench.analysis.folders import newest_in
from bench.common import REFERENCE, ROOT, relative, write_whole
from bench.report import explorer, prediction_tables, technique_pages, waterfall
from bench.report.notes import provenance
from bench.report.pictures import picture_bytes
from bench.report.tables import excerpts_of
from gpt_speed.common import UserError
from gpt_speed.tables import markdown

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
# The machine whose tables stand in the pages, unless one says NAME@MACHINE.
SHOWN = REFERENCE / "amd-epyc-2-cores"

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
    """Returns a page with what stands between its markers written again, from a machine's folder.
    Raises UserError for a marker without its end or of an unknown table, StackError, OSError."""

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

    return BLOCK.sub(write, text)
