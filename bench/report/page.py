"""A machine's page with all that the studies have measured: results/report.md, and report.html, one
file that opens in any browser."""

import importlib.util
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from bench.analysis.folders import newest_in
from bench.common import write_whole
from bench.measure.look import read_look
from bench.report.machine_section import headline, machine_section
from bench.report.notes import provenance
from bench.report.pictures import draw_all
from bench.report.showable import Showable, text_of
from bench.report.tables import picture_name

PAGE = "report.md"
NOT_FINISHED = "Not finished: "  # begins a page's line on a study that isn't


def write_page(studies: Mapping[str, Showable], results: Path, missing: dict[str, str]) -> str:
    """Writes the page of a folder, the same as HTML, and the pictures. `missing`: the studies that
    aren't finished, and why. Returns the page's head. Raises OSError."""
    pictures = draw_all(studies, results)
    for file, content in pictures.items():
        write_whole(results / file, content)
    shown = [study for study in studies.values() if study.position]
    look = read_look(results)
    head = page_head(shown, results, look["machine"]["name"], missing)
    page = [
        head,
        f"## This machine\n\n{machine_section(look)}",
        *(part for study in shown for part in section_of(study, results, pictures.keys())),
    ]
    write_whole(results / PAGE, "\n".join(page) + "\n")
    if not write_html(results / PAGE):
        print("no report.html beside report.md: pip install -r requirements-extras.txt")
    return head


def page_head(
    studies: Sequence[Showable], results: Path, machine: str, missing: dict[str, str]
) -> str:
    """Returns what stands above the sections: the finding, when it was measured, and what isn't
    finished."""
    everything = [rows.measured for study in studies for rows in newest_in(results, study.name)]
    lines = [
        f"# GPT training on {machine}\n",
        headline(results),
        f"\n{provenance(everything)} tok/sec excludes evaluation.",
        *(f"\n{NOT_FINISHED}{name}: {why}" for name, why in missing.items()),
    ]
    return "\n".join(lines) + "\n"


def has_page(results: Path) -> bool:
    """Returns whether a folder holds a page of its own."""
    page = results / PAGE
    return page.is_file() and not page.is_symlink()


def is_finished(results: Path) -> bool:
    """Returns whether the page of a folder says nothing of unfinished studies."""
    text = (results / PAGE).read_text(encoding="utf-8", errors="replace")
    return not any(line.startswith(NOT_FINISHED) for line in text.splitlines())


def section_of(study: Showable, results: Path, pictures: Collection[str]) -> list[str]:
    """Returns a study's heading, tables and pictures; nothing of one that isn't measured, unless
    a report should have it."""
    parts = []
    for rows in newest_in(results, study.name):
        parts.append(text_of(study, rows))
        name = picture_name(study.name, rows.measured.kind)
        if f"{name}.png" in pictures:
            parts.append(f"![{name}]({name}.png)\n")
    if not parts and not study.report_options:
        return []
    return [f"\n## {study.title}\n", "\n".join(parts) or "Not measured yet.\n"]


def write_html(page: Path) -> Path | None:
    """Writes `page`, a report.md, next to it as .html, with its pictures inside; returns None
    without the package markdown."""
    path = page.with_suffix(".html")
    if not importlib.util.find_spec("markdown"):
        path.unlink(missing_ok=True)  # of an older page
        return None
    from bench.report.html_page import page_of  # which loads it

    write_whole(path, page_of(page.read_text(encoding="utf-8"), page.parent))
    return path
