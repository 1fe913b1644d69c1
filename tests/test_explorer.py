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
from made_up import cells_of

import measure
from bench.cards import CARDS
from bench.cli import make_parser
from bench.report import html_page, prediction_tables, readme
from bench.report.html_page import write_html
from patches import stack

EXPLORER = readme.EXPLORER.read_text(encoding="utf-8")
DATA = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', EXPLORER,
                            re.DOTALL)[1])
BROWSER = next(filter(None, map(shutil.which, (
    "chromium", "chromium-browser", "google-chrome", "chrome"))), None)
needs_browser = pytest.mark.skipif(not BROWSER, reason="needs a Chromium")
# Options of `predict`, and which scripts of the page, by its names, show the rows of its table.
CASES = [
    (dict(gpu="A100 80 GB", batch=8), "--techniques 0,9", {
        "00": "0 baseline", "09-padded-vocabulary": "9 padded vocabulary"}),
    (dict(gpu="T4", batch=16), "", {
        "01": "01 with precision-fp16", "02": "02, 4 ranks with precision-fp16"}),
    (dict(gpu="H100", batch=64), "--variants optimizer-muon", {
        "01": "01", "02": "02, 4 ranks", "optimizer-muon": "optimizer-muon"}),
    (dict(gpu="RTX 4090", batch=2, model="gpt2-xl"), "", {"01": "01"}),
]
# In the page itself: each choice by its address, then what a reader does with it.
LOOK = """<script>
const wait = () => new Promise(done => setTimeout(done, 100));
addEventListener("load", async () => {
  const seen = [], main = document.querySelector("main");
  for (const address of ADDRESSES) {
    location.hash = address;
    await wait();
    seen.push({range: main.querySelector(".big").firstChild.data, text: main.innerText,
               answer: document.getElementById("answer").textContent,
               beyond: document.documentElement.scrollWidth
                 - document.documentElement.clientWidth});
  }
  field("gpu").value = "L4";
  field("gpu").dispatchEvent(new Event("input", {bubbles: true}));
  seen.push(location.hash);
  main.querySelector(".chart a").click();
  await wait();
  seen.push(location.hash);
  parent.postMessage(JSON.stringify(seen), "*");
});
</script>
"""
FRAME = """<!DOCTYPE html><iframe src="copy.html" style="width: 390px; height: 844px"></iframe>
<script>addEventListener("message", event => document.body.textContent = "seen " + event.data)
</script>"""


def seen_in_browser(page: Path, *options: str) -> str:
    """The page as it stands after its scripts, which write nothing on the console."""
    run = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         f"--user-data-dir={page.parent / 'profile'}", "--enable-logging=stderr", *options,
         "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=300)
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
    known = prediction_tables.prediction_of("01", prediction_tables.GPT2)
    assert card["speeds"]["01"]["gpt2"]["32"][1] == known.speed_range(32, CARDS["RTX 4090"])
    assert DATA["gpus"]["T4"]["speeds"]["05-bfloat16"]["gpt2"]["8"] == [0, "not in bfloat16", 0]
    parser = make_parser()
    for name, script in DATA["scripts"].items():
        *before, last = (shlex.split(line) for line in script["commands"])
        for words in before:
            assert words[:2] == ["python", "patches/stack.py"]
            if words[2] == "write":
                assert f"build/stages/{stack.file_of(words[3])}" in last, name
            else:
                assert words[3] in {patch.name for patch in stack.load_variants()}, name
        assert before or (ROOT / last[-1]).exists(), name
        words = [*shlex.split(script["predict"])[2:], "--gpu", "T4"]
        assert parser.parse_args(words).command == "predict"


@needs_browser
def test_the_explorer_in_a_browser(tmp_path, monkeypatch, capsys):
    """Its figures are those that `predict` prints; it is as wide as a phone; an address is a
    choice, and a choice an address; the console stays empty."""
    wanted, addresses = [], []
    for choice, options, rows in CASES:
        gpu, batch, model = choice["gpu"], choice["batch"], choice.get("model", "gpt2")
        monkeypatch.setattr(sys, "argv", [
            "measure.py", "predict", "--gpu", f"4x{gpu}", "--batch-size", str(batch), "--model",
            model, *options.split(), "--results-dir", str(tmp_path)])
        assert measure.main() == 0
        where = cells_of(capsys.readouterr().out.split("\n\n")[1])
        for script, label in rows.items():
            addresses.append(f"gpu={gpu}&batch={batch}&model={model}&script={script}&tokens=1")
            row = where[label]
            wanted.append((row.get("of all its GPUs") or row["tok/sec, thousands"],
                           f"{row['GB'].partition(' ')[0]} GB reserved",
                           f"MFU {row['MFU'].rstrip('%')} %"))
    addresses += ["gpu=RTX 4090&batch=8&script=00", "gpu=L4&with=H100&price=1&price2=2.5&tokens=2",
                  "gpu=none&model=x&script=&batch=3"]
    (tmp_path / "frame.html").write_text(FRAME)
    (tmp_path / "copy.html").write_text(EXPLORER.replace(
        "</body>", LOOK.replace("ADDRESSES", json.dumps(addresses)) + "</body>"))
    text = seen_in_browser(tmp_path / "frame.html", "--virtual-time-budget=20000")
    *seen, typed, clicked = json.loads(re.search("seen (.*?)</body>", text, re.DOTALL)[1].replace(
        "&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))
    for (speed, *texts), page in zip(wanted, seen, strict=False):
        assert page["range"] == speed and all(text in page["text"] for text in texts)
    assert {page["beyond"] for page in seen} == {0}
    refused, both, odd = seen[len(wanted):]
    assert "doesn't fit at batch 8" in refused["answer"] and "needs 26.25" in refused["text"]
    low, high = sorted(1e9 * 2 / 3600 / (1000 * float(end)) for end in DATA["gpus"]["H100"][
        "speeds"]["01"]["gpt2"]["32"][1].split("–"))
    assert (f"2 billion tokens take {low:.3g}–{high:.3g} hours and cost {2.5 * low:.3g}–"
            f"{2.5 * high:.3g}.") in both["answer"]
    assert odd["answer"].startswith("RTX 4090, gpt2, 01, all 15 techniques: fits at batch 32")
    assert "gpu=L4" in typed and "script=00" in clicked


# ---- A machine's page as HTML ------------------------------------------------------------------

PAGE = """# GPT training on <b>Some</b> & GPU

1. **Fast** and `1 < 2`, [x](javascript:alert).

## The three stages

![speed](speed.png)
![gone](gone.png)

## The ladder: one at a time

| run | tok/sec | significance |
| :-- | --: | --: |
| a | 1,200 | baseline |
| b | 900 | slower |
| c | 20,000 | faster |
"""


@pytest.fixture
def page(tmp_path):
    (tmp_path / "speed.png").write_bytes(b"\x89PNG picture")
    (tmp_path / "report.md").write_text(PAGE)
    return tmp_path / "report.md"


def test_report_html(page, monkeypatch):
    """One file, with the pictures inside; what isn't there keeps its name, and no name is taken for
    HTML. There is none without the package markdown."""
    pytest.importorskip("markdown")
    text = write_html(page).read_text()
    assert 'src="data:image/png;base64,iVBORyBwaWN0dXJl"' in text and 'src="gone.png"' in text
    assert not re.search(r'(src|href)="https?:|javascript:', text)
    assert "&lt;b&gt;Some&lt;/b&gt; &amp; GPU" in text and "<b>" not in text
    assert re.findall("<details( open)?><summary>(.*?)</summary>", text) == [
        ("", "The three stages"), (" open", "The ladder: one at a time")]
    monkeypatch.setattr(html_page.importlib.util, "find_spec", lambda _: None)
    assert write_html(page) is None and not page.with_suffix(".html").exists()


@needs_browser
def test_report_html_in_a_browser(page):
    """What is significant is marked, and a click on a heading sorts by its figures."""
    pytest.importorskip("markdown")
    clicked = page.with_name("clicked.html")
    clicked.write_text(write_html(page).read_text().replace(
        "</body>", "<script>document.querySelectorAll('th')[1].click()</script></body>"))
    seen = seen_in_browser(clicked)
    assert re.findall(r'<td[^>]*class="(\w+)"', seen) == ["slower", "faster"]
    assert re.findall(r"<td[^>]*>([abc])</td>", seen.partition("<tbody>")[2]) == ["b", "a", "c"]
