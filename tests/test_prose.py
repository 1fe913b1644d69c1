"""tests/prose.py, which make lint runs."""

import pytest

pytest.importorskip("proselint")

from prose import lint  # noqa: E402


def test_coined_words_are_flagged():
    """In prose alone, with the line."""
    code = "```\nproved\n```\n`verdict`\n[a page](anew.md)\n"
    table = "<!-- ladder: written by measure.py readme -->\n| verdict |\n<!-- end -->\n"
    assert lint("page.md", code + table) == []
    assert lint("page.md", f"{code}It was\nproved.\n") == [
        "page.md:7: 'proved': the field says significant"]


def test_proselint_is_asked():
    (line,) = lint("page.md", "One sentence.\nThe the other one.\n")
    assert line.startswith("page.md:2: ")
