"""A machine's page with all that the studies have measured: results/report.md, and report.html, one
file that opens in any browser."""

import base64
import re
from pathlib import Path
from string import Template

from bench.common import write_whole
from bench.report.machine_section import headline, machine_section, read_look
from bench.report.notes import provenance
from bench.report.pictures import draw_all
from bench.report.tables import found_in, picture_name, text_of

OPEN = "<details><summary>The ladder"  # the section that is open at first
FRAME = Path(__file__).with_name("report.html")  # the style, and what sorts tables


def write_page(studies: dict, results: Path, missing: dict[str, str]) -> Path:
    """Writes report.md, report.html and the pictures. `missing`: the studies that aren't finished,
    and why. Raises OSError."""
    look, pictures = read_look(results), draw_all(studies, results)
    for file, content in pictures.items():
        write_whole(results / file, content)
    shown = [study for study in studies.values() if study.position]
    everything = [one for study in shown for one, _ in found_in(results, study.name)]
    page = [
        f"# GPT training on {look['machine']['name']}\n",
        headline(results),
        f"\n{provenance(everything)} tok/sec excludes evaluation.",
        *(f"\nNot finished: {name}: {why}" for name, why in missing.items()),
        f"\n## This machine\n\n{machine_section(look)}",
    ]
    for study in shown:
        parts = []
        for measured, _ in found_in(results, study.name):
            parts.append(text_of(study, measured))
            name = picture_name(study.name, measured.kind)
            if f"{name}.png" in pictures:
                parts.append(f"![{name}]({name}.png)\n")
        if parts or study.report_options:
            page += [f"\n## {study.title}\n", "\n".join(parts) or "Not measured yet.\n"]
    write_whole(results / "report.md", "\n".join(page) + "\n")
    if not write_html(results / "report.md"):
        print("no report.html beside report.md: pip install -r requirements-extras.txt")
    return results / "report.md"


def write_html(page: Path) -> Path | None:
    """Writes `page`, a report.md, next to it as .html, with its pictures inside; returns None
    without the package markdown."""
    path = page.with_suffix(".html")
    try:
        import markdown
    except ImportError:
        path.unlink(missing_ok=True)  # of an older page
        return None

    def embedded(name: re.Match) -> str:
        file = page.with_name(name[0])
        if not file.is_file():
            return name[0]
        return "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode()

    converter = markdown.Markdown(extensions=["tables", "fenced_code", "sane_lists"])
    converter.preprocessors.deregister("html_block")  # a machine's name is no HTML
    converter.inlinePatterns.deregister("html")
    text = converter.convert(page.read_text(encoding="utf-8"))
    text = re.sub(r'(href|src)="(?!https?:|[\w.-]+")[^"]*"', "", text)  # such as javascript:
    text = re.sub(r"(?s)<table>.*?</table>", r'<div class="table">\g<0></div>', text)
    text = re.sub(r'(?<=src=")[\w.-]+\.png', embedded, text)
    text = re.sub(
        r"(?s)<h2>(.*?)</h2>(.*?)(?=<h2>|\Z)", r"<details><summary>\1</summary>\2</details>\n", text
    )
    write_whole(
        path,
        Template(FRAME.read_text(encoding="utf-8")).substitute(
            title=re.sub("<.*?>", "", text.partition("\n")[0]),
            body=text.replace(OPEN, OPEN.replace("details", "details open")),
        ),
    )
    return path
