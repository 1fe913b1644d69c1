"""A machine's page, results/report.md and report.html, with all that the studies have measured."""

from pathlib import Path

from bench.common import write_whole
from bench.report.html_page import write_html
from bench.report.machine_section import machine_section, read_look, summary
from bench.report.notes import provenance
from bench.report.pictures import draw_all
from bench.report.tables import found_in, text_of


def write_page(studies: dict, results: Path, missing: dict[str, str]) -> Path:
    """Writes report.md, report.html and the pictures. `missing`: the studies that aren't finished,
    and why. Raises OSError."""
    look, pictures = read_look(results), draw_all(studies, results)
    shown = [study for study in studies.values() if study.place]
    measured = [measured for study in shown for measured, _ in found_in(results, study.name)]
    page = [f"# GPT training on {look['machine']['name']}\n",
            *(f"{place}. {line}" for place, line in enumerate(summary(results, look), 1)),
            f"\n{provenance(measured)} tok/sec excludes evaluation.",
            *(f"\nNot finished: {name}: {why}" for name, why in missing.items()),
            f"\n## This machine\n\n{machine_section(look)}"]
    for study in shown:
        parts = [text_of(study, measured) for measured, _ in found_in(results, study.name)]
        for file, picture in pictures.get(study.name, {}).items():
            write_whole(results / file, picture)
            parts.append(f"![{file.removesuffix('.png')}]({file})\n")
        if parts or study.in_report:
            page += [f"\n## {study.title}\n", "\n".join(parts) or "Not measured yet.\n"]
    write_whole(results / "report.md", "\n".join(page) + "\n")
    if not write_html(results / "report.md"):
        print("no report.html beside report.md: pip install -r requirements-extras.txt")
    return results / "report.md"
