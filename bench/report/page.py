"""A machine's page with all that the studies have measured: results/report.md, and report.html, one
file that opens in any browser."""

import base64
import re
from collections.abc import Collection
from pathlib import Path
from string import Template

from bench.analysis.folders import newest_in
from bench.common import write_whole
from bench.measure.machine import read_look
from bench.report.machine_section import headline, machine_section
from bench.report.notes import provenance
from bench.report.pictures import draw_all
from bench.report.tables import picture_name, text_of

OPEN = "<details><summary>The ladder"  # the section that is open at first
PICTURE = r'(?<=src=")[\w.-]+\.png'
SECTION = r"(?s)<h2>(.*?)</h2>(.*?)(?=<h2>|\Z)"
FRAME = Path(__file__).with_name("report.html")  # the style, and what sorts tables


def write_page(studies: dict, results: Path, missing: dict[str, str]) -> Path:
    """Writes report.md, report.html and the pictures. `missing`: the studies that aren't finished,
    and why. Raises OSError."""
    pictures = draw_all(studies, results)
    for file, content in pictures.items():
        write_whole(results / file, content)
    shown = [study for study in studies.values() if study.position]
    page = [
        *head_of(shown, results, missing),
        *(part for study in shown for part in section_of(study, results, pictures.keys())),
    ]
    write_whole(results / "report.md", "\n".join(page) + "\n")
    if not write_html(results / "report.md"):
        print("no report.html beside report.md: pip install -r requirements-extras.txt")
    return results / "report.md"


def head_of(studies: list, results: Path, missing: dict[str, str]) -> list[str]:
    """Returns what stands above the studies: the finding, when it was measured, the machine."""
    look = read_look(results)
    everything = [one for study in studies for one, _ in newest_in(results, study.name)]
    return [
        f"# GPT training on {look['machine']['name']}\n",
        headline(results),
        f"\n{provenance(everything)} tok/sec excludes evaluation.",
        *(f"\nNot finished: {name}: {why}" for name, why in missing.items()),
        f"\n## This machine\n\n{machine_section(look)}",
    ]


def section_of(study, results: Path, pictures: Collection[str]) -> list[str]:
    """Returns a study's heading, tables and pictures; nothing of one that isn't measured, unless
    a report should have it."""
    parts = []
    for measured, _ in newest_in(results, study.name):
        parts.append(text_of(study, measured))
        name = picture_name(study.name, measured.kind)
        if f"{name}.png" in pictures:
            parts.append(f"![{name}]({name}.png)\n")
    if not parts and not study.report_options:
        return []
    return [f"\n## {study.title}\n", "\n".join(parts) or "Not measured yet.\n"]


def write_html(page: Path) -> Path | None:
    """Writes `page`, a report.md, next to it as .html, with its pictures inside; returns None
    without the package markdown."""
    path = page.with_suffix(".html")
    try:
        body = html_of(page.read_text(encoding="utf-8"))
    except ImportError:
        path.unlink(missing_ok=True)  # of an older page
        return None
    title = re.sub("<.*?>", "", body.partition("\n")[0])
    body = re.sub(PICTURE, lambda name: embedded(page.with_name(name[0])), body)
    body = re.sub(SECTION, r"<details><summary>\1</summary>\2</details>\n", body)
    body = body.replace(OPEN, OPEN.replace("details", "details open"))
    frame = Template(FRAME.read_text(encoding="utf-8"))
    write_whole(path, frame.substitute(title=title, body=body))
    return path


def html_of(text: str) -> str:
    """Returns Markdown as HTML, with no link but to the web and to a file next to it, and every
    table in an element that scrolls. Raises ImportError without the package markdown."""
    import markdown

    converter = markdown.Markdown(extensions=["tables", "fenced_code", "sane_lists"])
    converter.preprocessors.deregister("html_block")  # a machine's name is no HTML
    converter.inlinePatterns.deregister("html")
    html = converter.convert(text)
    html = re.sub(r'(href|src)="(?!https?:|[\w.-]+")[^"]*"', "", html)  # such as javascript:
    return re.sub(r"(?s)<table>.*?</table>", r'<div class="table">\g<0></div>', html)


def embedded(picture: Path) -> str:
    """Returns a picture as an address that holds it; its name where it isn't there."""
    if not picture.is_file():
        return picture.name
    return "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()
