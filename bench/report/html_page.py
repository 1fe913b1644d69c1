"""A machine's page as one HTML file that opens in any browser, made from report.md."""

import base64
import re
from pathlib import Path
from string import Template

from bench.common import write_whole

OPEN = "The ladder"  # how the title of the section begins that is open at first
FRAME = Path(__file__).with_name("report.html")  # with the style, and what sorts the tables


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
    head, *sections = re.split(r"\n?<h2>", text)
    body = [head, *("<details{}><summary>{}</summary>{}\n</details>".format(
        " open" if section.startswith(OPEN) else "", *section.split("</h2>", 1))
        for section in sections)]
    title = re.sub("<.*?>", "", head.partition("\n")[0])
    write_whole(path, Template(FRAME.read_text(encoding="utf-8")).substitute(
        title=title, body="\n".join(body)))
    return path
