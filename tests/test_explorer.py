"""docs/explorer.html and a machine's report.html: what they hold, and what a browser shows of it.
That the explorer's figures are today's predictions, test_report.py holds as of the other pages."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from bench.cli import make_parser
from bench.report import readme
from bench.report.page import write_html
from gpt_speed.cards import CARDS
from patches import stack

EXPLORER = readme.EXPLORER.read_text(encoding="utf-8")
DATA = json.loads(
    re.search(r'<script type="application/json" id="data">(.*?)</script>', EXPLORER, re.DOTALL)[1]
)
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
needs_browser = pytest.mark.skipif(not BROWSER, reason="needs a Chromium")


def seen_in_browser(page: str, folder: Path, *options: str) -> str:
    """The page as it stands after its scripts, which write nothing on the console."""
    run = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            f"--user-data-dir={folder / 'profile'}",
            "--enable-logging=stderr",
            *options,
            "--dump-dom",
            page,
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "CONSOLE" not in run.stderr
    return run.stdout


def test_the_explorers_data():
    """It loads nothing; what doesn't fit a GPU has no speed; the commands that it shows are there,
    and `predict` takes its options."""
    assert not re.search(r"src=|url\(|@import|fetch\(|<link", EXPLORER)
    assert set(DATA["gpus"]) == {name for name, card in CARDS.items() if card.capability >= 7}
    card, needs = DATA["gpus"]["RTX 4090"], DATA["scripts"]["00"]["needs"]["gpt2"]
    assert needs["4"][1] < card["room"] < needs["8"][1]
    assert max(map(int, card["speeds"]["00"]["gpt2"])) == 4
    assert DATA["gpus"]["T4"]["speeds"]["05-bfloat16"]["gpt2"]["8"] == [0, "not in bfloat16", 0]
    assert DATA["gpus"]["MI300X"]["speeds"]["01"]["gpt2"]["32"] == [0, "unchecked", 0]
    assert DATA["gpus"]["RTX 3080"]["speeds"]["00"]["gpt2"]["2"] == [0, "unchecked", 0]
    assert [name for name, gpu in DATA["gpus"].items() if not gpu["nvidia"]] == [
        "MI300X",
        "MI325X",
        "MI355X",
    ]
    names, parser = {patch.name for patch in stack.load_variants()}, make_parser()
    for script in DATA["scripts"].values():
        *before, last = (shlex.split(line) for line in script["commands"])
        for _, tool, command, name, *_ in before:
            assert tool == "patches/stack.py" and (
                command == "write"
                and f"build/stages/{stack.file_of(name)}" in last
                or command == "compose"
                and name in names
            ), name
        assert before or (ROOT / last[-1]).exists(), last
        words = [*shlex.split(script["predict"])[2:], "--gpu", "T4"]
        assert parser.parse_args(words).command == "predict"
        assert f'"{script["kind"]}"' in EXPLORER.partition("<!-- end -->")[2]  # in the list


@needs_browser
@pytest.mark.parametrize(
    ("address", "answer"),
    [
        (
            "gpu=RTX 4090&batch=8&script=00",
            "RTX 4090, gpt2, 00, the baseline: doesn't fit at batch 8.",
        ),
        (
            "gpu=L4&with=H100&price=1&price2=2.5&tokens=2",
            "2 billion tokens take {}–{} hours and cost",
        ),
        (
            "gpu=none&model=x&script=&batch=3",
            "RTX 4090, gpt2, 01, all 15 techniques: fits at batch 32",
        ),
    ],
)
def test_the_explorer_in_a_browser(tmp_path, address, answer):
    """An address is a choice, of which what there isn't is left out; the console stays empty."""
    speeds = DATA["gpus"]["H100"]["speeds"]["01"]["gpt2"]["32"][1].split("–")
    hours = sorted(1e9 * 2 / 3600 / (1000 * float(speed)) for speed in speeds)
    page = f"{readme.EXPLORER.as_uri()}#{address.replace(' ', '%20')}"
    text = seen_in_browser(page, tmp_path, "--virtual-time-budget=5000")
    assert answer.format(*(f"{end:.3g}" for end in hours)) in text


# ---- A machine's page as HTML ------------------------------------------------------------------

PAGE = """# GPT training on <b>Some</b> & GPU

1. **Fast** and `1 < 2`, [x](javascript:alert).

## The three stages

![speed](speed.png)
![gone](gone.png)

## The ladder: one at a time

| run | tok/sec | significance |
| :-- | --: | --: |
| b | 900 | slower |
| c | 20,000 | faster |
| a | 1,200 | baseline |
"""


@pytest.fixture
def page(tmp_path):
    (tmp_path / "speed.png").write_bytes(b"\x89PNG picture")
    (tmp_path / "report.md").write_text(PAGE)
    return tmp_path / "report.md"


def test_report_html(page, monkeypatch):
    """One file with the pictures that are there; no name is HTML; none without markdown."""
    pytest.importorskip("markdown")
    text = write_html(page).read_text()
    assert 'src="data:image/png;base64,iVBORyBwaWN0dXJl"' in text and 'src="gone.png"' in text
    assert not re.search(r'(src|href)="https?:|javascript:', text)
    assert "&lt;b&gt;Some&lt;/b&gt; &amp; GPU" in text and "<b>" not in text
    assert re.findall(r"<details( open)?>\s*<summary>(.*?)</summary>", text) == [
        ("", "The three stages"),
        (" open", "The ladder: one at a time"),
    ]
    monkeypatch.setitem(sys.modules, "markdown", None)
    assert write_html(page) is None and not page.with_suffix(".html").exists()


@needs_browser
def test_report_html_in_a_browser(page):
    """What is significant is marked, and a click on a heading sorts by its figures."""
    pytest.importorskip("markdown")
    clicked = page.with_name("clicked.html")
    clicked.write_text(
        write_html(page)
        .read_text()
        .replace("</body>", "<script>document.querySelectorAll('th')[1].click()</script></body>")
    )
    seen = seen_in_browser(clicked.as_uri(), page.parent)
    assert re.findall(r'<td[^>]*class="(\w+)"', seen) == ["slower", "faster"]
    assert re.findall(r"<td[^>]*>([abc])</td>", seen.partition("<tbody>")[2]) == ["b", "a", "c"]
