"""What is generated inside README, docs/ and the machines' pages: tables between markers, figures
in sentences, and README's picture.

bench.report.sentences has the figures, and BLOCKS what writes between markers.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path

from bench.analysis.claims import Claims
from bench.analysis.folders import machines, newest_in
from bench.analysis.gains import ladder_sessions
from bench.analysis.tuning import DEFAULT_LOSS, EPOCH_LOSS
from bench.common import REFERENCE, ROOT, relative, write_whole
from bench.report import (
    explorer,
    prediction_tables,
    readme_tables,
    technique_pages,
    to_loss,
    variant_pages,
    waterfall,
)
from bench.report.notes import provenance
from bench.report.pictures import picture_bytes
from bench.report.sentences import with_figures
from bench.report.showable import Showable, excerpts_of
from gpt_speed import gains
from gpt_speed.common import UserError
from gpt_speed.tables import Table, markdown
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
TablesIn = Callable[[Path], Mapping[str, str]]  # see tables_of
# The machine whose tables stand in the pages, unless one says NAME@MACHINE.
SHOWN = REFERENCE / "amd-epyc-2-cores"


def write_readme(studies: Mapping[str, Showable]) -> bool:
    """Writes the pages' tables, pictures in docs/ and the gains that audits tell again; returns
    whether that changed a page. Raises what update does."""
    tables_in = tables_of(studies)
    before = {page: page.read_bytes() for page in PAGES}
    after = {
        page: update(text.decode(), SHOWN, tables_in).encode() for page, text in before.items()
    }
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


def update(text: str, machine: Path, tables_in: TablesIn) -> str:
    """Returns a page with what stands between its markers written again, from a machine's folder,
    and the figures of its sentences. Raises UserError for a marker without its end, its figure, or
    of an unknown name, StackError, OSError."""
    written = partial(block_again, machine=machine, tables_in=tables_in)
    return with_figures(BLOCK.sub(written, text))


def block_again(block: re.Match, machine: Path, tables_in: TablesIn) -> str:
    """Returns a block with its markers, and between them what stands there today. Raises UserError
    for a marker without its end, or of an unknown name."""
    if not block["end"]:
        raise UserError(f"{block['opening'].strip()} has no <!-- end -->")
    name, folder = block["name"], machine
    if block["machine"]:
        folder = REFERENCE / block["machine"]
    if name in BLOCKS or name in MACHINE_BLOCKS:
        content = block_text(name, folder)
    else:
        content = tables_in(folder).get(name, "")
    if not content.strip():
        raise UserError(f"there is no table {name} in {relative(folder)}")
    if not content.startswith("|"):  # as tables do, which need no space around them
        content = f"\n{content}\n"
    return f"{block['opening']}{content}{block['end']}"


def block_text(name: str, machine: Path) -> str:
    """Returns what stands between markers of a name in BLOCKS, or in MACHINE_BLOCKS for a
    machine."""
    if name in BLOCKS:
        return as_text(BLOCKS[name]())
    return as_text(MACHINE_BLOCKS[name](machine))


def as_text(content: Table | str) -> str:
    if isinstance(content, Table):
        return markdown(content)
    return content


def tables_of(studies: Mapping[str, Showable]) -> TablesIn:
    """Returns a function of a folder: the tables of what the studies measured there last, by the
    names in markers. It makes them once."""

    @cache
    def tables_in(folder: Path) -> dict[str, str]:
        return {
            name: table
            for study in studies.values()
            for rows in newest_in(folder, study.name)
            for name, table in excerpts_of(study, rows).items()
        }

    return tables_in


def measured_when(machine: Path) -> str:
    """Returns when, and at which commits, a machine's journals were measured."""
    return provenance(
        rows.measured
        for path in machine.glob("**/*.jsonl")
        for rows in newest_in(path.parent, path.stem)
    )


# What writes between markers, by their names. The names of other markers are those of studies'
# tables.
BLOCKS: dict[str, Callable[[], Table | str]] = {
    "machines": technique_pages.machines_table,
    "technique-index": technique_pages.index_table,
    "technique-cards": technique_pages.technique_cards,
    "variant-cards": variant_pages.variant_cards,
    "variant-tables": variant_pages.variant_tables,
    "variant-choice": variant_pages.variant_choice,
    "gpus": prediction_tables.gpus_table,
    "memory-by-batch": prediction_tables.memory_table,
    "explorer": explorer.data_block,
    "hardware": readme_tables.hardware_table,
    "contributions": readme_tables.contributions_table,
    "speedup-picture": readme_tables.picture_lines,
}
# And what does from the folder of the machine whose page it is, or that the marker names.
MACHINE_BLOCKS: dict[str, Callable[[Path], Table | str]] = {
    "measured": measured_when,
    "own-gpu": prediction_tables.gpu_table,
    "to-loss": partial(to_loss.target_table, "", DEFAULT_LOSS),
    "to-loss-epoch": partial(to_loss.target_table, "epoch", EPOCH_LOSS),
}
