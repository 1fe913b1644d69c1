"""A machine's page, results/report.md and report.html, with all that the studies have measured."""

from pathlib import Path

from bench.common import DAMAGE, write_whole
from bench.report.html_page import write_html
from bench.report.machine_section import first_line, machine_section, read_look, summary
from bench.report.notes import provenance
from bench.report.pictures import draw_all
from bench.report.tables import found_in, text_of

NOTHING = "Not measured yet.\n"


def write_page(studies: dict, results: Path, command: str, missing: dict[str, str]) -> Path:
    """Writes report.md, report.html and the pictures. `missing`: what isn't finished, with why it
    was refused, or ""."""
    look, pictures = read_look(results), draw_all(studies, results)
    for own in pictures.values():
        for file, picture in own.items():
            write_whole(results / file, picture)
    shown = [study for study in studies.values() if study.schedule]
    try:
        findings = summary(results, look)
        measured = [measured for study in shown for measured, _ in found_in(results, study.name)]
        texts = {measurement.text for measurement in measured} - {""}
    except (OSError, *DAMAGE) as error:
        findings = [first_line(look), f"What is left in the folder is damaged: {error!r}"]
        measured, texts = [], set()
    page = [f"# GPT training on {look['machine']['name']}\n",
            *(f"{place}. {line}" for place, line in enumerate(findings, 1)),
            f"\n{provenance(measured)} Made by `{command}`. tok/sec excludes evaluation."]
    if texts:
        page.append(f"\nNot trained on the book in GPT-2's tokens: {'; '.join(sorted(texts))}.")
    if unfinished := [name for name, why in missing.items() if not why]:
        page.append(f"\nNot finished: {', '.join(unfinished)}; run it again to continue with them.")
    page += [f"\nNot finished: {name}: {why}" for name, why in missing.items() if why]
    page.append(f"\n## This machine\n\n{machine_section(look)}")
    for study in shown:
        text = section(study, results, list(pictures.get(study.name, ())))
        if not text and 0 in study.schedule.values():
            continue  # it isn't measured, and a report doesn't
        page.append(f"\n## {study.title}\n\n{text or NOTHING}")
    write_whole(results / "report.md", "\n".join(page) + "\n")
    if not write_html(results / "report.md"):
        print("no report.html beside report.md: pip install -r requirements-extras.txt")
    return results / "report.md"


def section(study, results: Path, pictures: list[str]) -> str:
    """Returns the tables of a study and its pictures; "" where nothing is measured."""
    try:
        return "\n".join([
            *(text_of(study, measured) for measured, _ in found_in(results, study.name)),
            *(f"![{file.removesuffix('.png')}]({file})\n" for file in pictures)])
    except (OSError, *DAMAGE) as error:
        return f"What is left of it in the folder is damaged: {error!r}\n"
