"""A machine's page as one HTML file that opens in any browser, made from report.md."""

import base64
import html
import importlib.util
import re
from pathlib import Path

from bench.common import write_whole

OPEN = "The ladder"  # how the title of the section begins that is open at first
STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --good: #0072B2; --bad: #D55E00; }
@media (prefers-color-scheme: dark) { :root { --good: #56B4E9; --bad: #FF9A4D; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; }
summary { font-size: 1.1rem; font-weight: 600; padding: .5rem 0; cursor: pointer; }
details { border-top: 1px solid var(--line); }
img { max-width: 100%; background: white; border-radius: 4px; }
.table { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { cursor: pointer; background: var(--soft); }
code { background: var(--soft); padding: 0 .2em; overflow-wrap: anywhere; }
.faster, .less { color: var(--good); font-weight: 600; }
.slower, .more { color: var(--bad); font-weight: 600; }
@media print { body { max-width: none; font-size: 11px; } summary { cursor: auto; } }
"""
SCRIPT = """
const figure = text => parseFloat(text.replace(/[,%*]/g, ""));
document.querySelectorAll("th").forEach(head => head.addEventListener("click", () => {
  const body = head.closest("table").tBodies[0], place = head.cellIndex;
  const turn = head.dataset.turn = head.dataset.turn === "1" ? "-1" : "1";
  [...body.rows].sort((one, other) => {
    const [a, b] = [one, other].map(row => row.cells[place].textContent);
    const [x, y] = [a, b].map(figure);
    return turn * (isNaN(x) || isNaN(y) ? isNaN(x) - isNaN(y) || a.localeCompare(b) : x - y);
  }).forEach(row => body.append(row));
}));
const verdicts = ["faster", "slower", "less", "more"];
document.querySelectorAll("td").forEach(cell => {
  if (verdicts.includes(cell.textContent)) cell.className = cell.textContent;
});
addEventListener("beforeprint", () =>
  document.querySelectorAll("details").forEach(each => each.open = true));
"""


def write_html(page: Path) -> Path | None:
    """Writes `page`, a report.md, beside it as .html, with its pictures inside; None without the
    package markdown."""
    path = page.with_suffix(".html")
    if not importlib.util.find_spec("markdown"):
        path.unlink(missing_ok=True)  # of an older page
        return None
    import markdown

    converter = markdown.Markdown(extensions=["tables", "fenced_code", "sane_lists"])
    converter.preprocessors.deregister("html_block")  # a machine's name is no HTML
    converter.inlinePatterns.deregister("html")

    def converted(text: str) -> str:
        text = converter.reset().convert(text)
        text = re.sub(r'(href|src)="(?!https?:|[\w.-]+")[^"]*"', "", text)  # such as javascript:
        text = re.sub(r"(?s)<table>.*?</table>", r'<div class="table">\g<0></div>', text)
        return re.sub(r'(?<=src=")[\w.-]+\.png', lambda name: embedded(page, name[0]), text)

    head, *sections = re.split(r"(?m)^## ", page.read_text(encoding="utf-8"))
    parts = [converted(head)]
    for section in sections:
        title, _, text = section.partition("\n")
        opened = " open" * title.startswith(OPEN)
        parts.append(f"<details{opened}><summary>{html.escape(title)}</summary>\n"
                     f"{converted(text)}\n</details>")
    title = html.escape(head.partition("\n")[0].removeprefix("# "))
    write_whole(path, "\n".join([
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{STYLE}</style></head>\n<body>", *parts,
        f"<script>{SCRIPT}</script>\n</body></html>\n"]))
    return path


def embedded(page: Path, name: str) -> str:
    """The picture `name` beside the page, as an address that holds it."""
    path = page.with_name(name)
    if not path.is_file():
        return name
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
