"""bench/report/html_page.py: report.md as one HTML file."""

import re

import pytest
from browser import needs_browser, seen_in_browser

from bench.report import html_page
from bench.report.html_page import write_html

PAGE = """# GPT training on <b>Some</b> & GPU

1. **Fast** and `1 < 2`, [x](javascript:alert).

## The three stages

![speed](speed.png)
![gone](gone.png)

## The ladder: one at a time

| run | tok/sec | verdict |
| :-- | --: | --: |
| a | 1,200 | baseline |
| b | 900 | slower |
| c | 20,000 | faster |
"""


@pytest.fixture
def page(tmp_path):
    pytest.importorskip("markdown")
    (tmp_path / "speed.png").write_bytes(b"\x89PNG picture")
    (tmp_path / "report.md").write_text(PAGE)
    return write_html(tmp_path / "report.md")


def test_it_is_one_file(page):
    """With the pictures inside; what isn't there keeps its name, and no name is taken for HTML."""
    text = page.read_text()
    assert page.name == "report.html"
    assert 'src="data:image/png;base64,iVBORyBwaWN0dXJl"' in text and 'src="gone.png"' in text
    assert not re.search(r'(src|href)="https?:', text)
    assert "&lt;b&gt;Some&lt;/b&gt; &amp; GPU" in text and "<b>" not in text
    assert "javascript:" not in text
    assert "<code>1 &lt; 2</code>" in text
    assert [title for title in re.findall("<details( open)?><summary>(.*?)</summary>", text)] == [
        ("", "The three stages"), (" open", "The ladder: one at a time")]


def test_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(html_page.importlib.util, "find_spec", lambda _: None)
    (tmp_path / "report.md").write_text(PAGE)
    assert write_html(tmp_path / "report.md") is None
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]


@needs_browser
def test_in_a_browser(page, tmp_path):
    """Verdicts are marked, and a click on a heading sorts by its figures."""
    clicked = tmp_path / "clicked.html"
    clicked.write_text(page.read_text().replace(
        "</body>", "<script>document.querySelectorAll('th')[1].click()</script></body>"))
    seen, _ = seen_in_browser(clicked)
    assert re.findall(r'<td[^>]*class="(\w+)"', seen) == ["slower", "faster"]
    body = seen.partition("<tbody>")[2]
    assert re.findall(r"<td[^>]*>([abc])</td>", body) == ["b", "a", "c"]
