"""A page as HTML: Markdown's elements, changed before they become text. Importing this needs the
package markdown."""

import base64
import html
import re
from pathlib import Path
from string import Template
from xml.etree.ElementTree import Element

from markdown import Markdown
from markdown.treeprocessors import Treeprocessor

OPEN = "The ladder"  # what begins the heading of the section that is open at first
SAFE = re.compile(r"https?:.*|[\w.-]+")  # to the web, or to a file next to the page
FRAME = Path(__file__).with_name("report.html")  # the style, and what sorts tables
AFTER_INLINE = 15  # a priority: links and code are elements then, and nothing is laid out


class Page(Treeprocessor):
    """Makes a page of what Markdown became: a root whose children are headings, tables, lists."""

    def __init__(self, converter: Markdown, folder: Path):
        super().__init__(converter)
        self.folder = folder

    def run(self, root: Element) -> None:
        for element in root.iter():
            drop_unsafe_links(element)
            if element.tag == "img":
                embed(element, self.folder)
        root[:] = in_sections([in_scroller(element) for element in root])


def page_of(text: str, folder: Path) -> str:
    """Returns Markdown as a page of HTML, with the pictures of a folder inside."""
    converter = Markdown(extensions=["tables", "fenced_code", "sane_lists"], output_format="html")
    converter.preprocessors.deregister("html_block")  # a machine's name is no HTML
    converter.inlinePatterns.deregister("html")
    converter.treeprocessors.register(Page(converter, folder), "page", AFTER_INLINE)
    title = text.partition("\n")[0].removeprefix("# ")
    frame = Template(FRAME.read_text(encoding="utf-8"))
    return frame.substitute(title=html.escape(title), body=converter.convert(text))


def drop_unsafe_links(element: Element) -> None:
    """Removes an address that is neither of the web nor of a file next to the page, such as one
    that begins with javascript:."""
    for name in ("href", "src"):
        if not SAFE.fullmatch(element.get(name, "")):
            element.attrib.pop(name, None)


def embed(image: Element, folder: Path) -> None:
    """Puts a picture into its element, if it lies in the folder."""
    file = folder / image.get("src", "")
    if file.suffix == ".png" and file.is_file():
        content = base64.b64encode(file.read_bytes()).decode()
        image.set("src", f"data:image/png;base64,{content}")


def in_scroller(element: Element) -> Element:
    """Returns an element that scrolls, with a table in it; others as they are."""
    if element.tag != "table":
        return element
    scroller = Element("div", {"class": "table"})
    scroller.append(element)
    return scroller


def in_sections(elements: list[Element]) -> list[Element]:
    """Returns the elements, from each heading of the second level on in one that folds."""
    page: list[Element] = []
    for element in elements:
        if element.tag == "h2":
            page.append(folding(element))
        elif page and page[-1].tag == "details":
            page[-1].append(element)
        else:
            page.append(element)
    return page


def folding(heading: Element) -> Element:
    """Returns an element that folds, of which the heading alone stays in sight."""
    section = Element("details")
    if (heading.text or "").startswith(OPEN):
        section.set("open", "open")
    heading.tag = "summary"
    section.append(heading)
    return section
