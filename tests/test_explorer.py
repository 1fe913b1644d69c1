"""docs/explorer.html: what it looks up, what it shows of that, and that it is fit to be read. That
its figures are those of today's predictions, tests/test_page.py holds as of the other pages."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from browser import needs_browser, seen_in_browser
from conftest import ROOT
from made_up import cells_of

import measure
from bench.commands import make_parser
from bench.predict.speed import CARDS
from bench.report import check, readme
from bench.studies import all_studies
from patches import stack

PAGE = readme.EXPLORER.read_text(encoding="utf-8")
DATA = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', PAGE,
                            re.DOTALL)[1])
(CODE,) = re.findall(r"<script>\n(.*?)</script>", PAGE, re.DOTALL)
# Options of `predict`, and which scripts of the page, by its names, show the rows of its table.
CASES = [
    (dict(gpu="A100 80 GB", batch=8), "--rungs 0,5,9,14", {
        "00": "0 baseline", "05-bfloat16": "5 bfloat16",
        "09-padded-vocabulary": "9 padded vocabulary", "14-chunked-head": "14 chunked head"}),
    (dict(gpu="T4", batch=16), "", {
        "01": "01 with precision-fp16", "02": "02, 4 ranks with precision-fp16"}),
    (dict(gpu="H100", batch=64), "--variants optimizer-muon,memory-checkpoint", {
        "01": "01", "02": "02, 4 ranks", "optimizer-muon": "optimizer-muon",
        "memory-checkpoint": "memory-checkpoint"}),
    (dict(gpu="RTX 4090", batch=2, model="gpt2-xl"), "", {"01": "01"}),
]
# In the page itself: each choice by its address, then what a reader does with it.
LOOK = """<script>
const wait = () => new Promise(done => setTimeout(done, 100));
function broken(text) {  // its words of which a line ends in the middle
  return [...text.data.matchAll(/[\\w.]+/g)].filter(word => {
    const range = document.createRange();
    range.setStart(text, word.index);
    range.setEnd(text, word.index + word[0].length);
    return range.getClientRects().length > 1;
  }).map(word => word[0]);
}
addEventListener("load", async () => {
  const seen = [], main = document.querySelector("main");
  for (const address of ADDRESSES) {
    location.hash = address;
    await wait();
    seen.push({range: main.querySelector(".big").firstChild.data, text: main.innerText,
               answer: document.getElementById("answer").textContent,
               tops: [...main.querySelectorAll("div > .chart")].map(
                 each => each.getBoundingClientRect().top),
               broken: [...main.querySelectorAll(".chart th a")].flatMap(
                 each => broken(each.firstChild)),
               width: innerWidth, beyond: document.documentElement.scrollWidth
                 - document.documentElement.clientWidth});
  }
  field("gpu").value = "L4";
  field("gpu").dispatchEvent(new Event("input", {bubbles: true}));
  seen.push(location.hash);
  main.querySelector(".chart a").focus();
  main.querySelector(".chart a").click();
  await wait();
  seen.push(location.hash, document.activeElement.textContent);
  seen.push([...form.elements].every(each => each.labels.length === 1));
  parent.postMessage(JSON.stringify(seen), "*");
});
</script>
"""
FRAME = """<!DOCTYPE html><iframe src="copy.html" style="width: WIDTHpx; height: 844px"></iframe>
<script>addEventListener("message", event => document.body.textContent = "seen " + event.data)
</script>"""


def test_it_is_one_short_file():
    assert len(PAGE.encode()) < 2_000_000
    assert len(CODE.splitlines()) <= 210
    assert not re.search(r'src=|url\(|@import|fetch\(|import\(|<link|https?://', PAGE.replace(
        json.dumps(DATA["sources"], separators=(",", ":")), ""))


def test_each_gpu_is_there():
    """With a choice for each script that is kept; what doesn't fit has no speed."""
    assert set(DATA["gpus"]) == {name for name, card in CARDS.items() if card.capability >= 7}
    card, needs = DATA["gpus"]["RTX 4090"], DATA["scripts"]["00"]["needs"]["gpt2"]
    assert {4, 8} <= set(map(int, needs)) and needs["4"][1] < card["room"] < needs["8"][1]
    assert max(map(int, card["speeds"]["00"]["gpt2"])) == 4
    known = check.prediction_of("01", check.GPT2)
    assert card["speeds"]["01"]["gpt2"]["32"][1] == known.speed_range(32, CARDS["RTX 4090"])
    assert DATA["gpus"]["T4"]["instead"]["01"] == "precision-fp16"
    assert DATA["gpus"]["T4"]["speeds"]["05-bfloat16"]["gpt2"]["8"] == [0, "not in bfloat16", 0]
    assert {"optimizer-muon", "10-batch-size", "02"} < set(DATA["scripts"])
    assert sum(map(len, DATA["measured"].values())) == len(check.published_others()["rows"])
    assert set(DATA["sources"]) >= {row[0] for rows in DATA["measured"].values() for row in rows}


@pytest.mark.parametrize("name", DATA["scripts"])
def test_what_to_type(name):
    """Its commands are there, and `predict` takes its options."""
    *before, last = (shlex.split(line) for line in DATA["scripts"][name]["commands"])
    for words in before:
        assert words[:2] == ["python", "patches/stack.py"]
        if words[2] == "write":
            assert f"build/stages/{stack.file_of(words[3])}" in last
        else:
            assert words[2] == "compose" and words[-2:] == ["--out", "my.py"] and "my.py" in last
            assert words[3] in {patch.name for patch in stack.load_variants()}
    assert before or (ROOT / last[-1]).exists()
    assert ("--nproc_per_node=4" in last) is (DATA["scripts"][name]["gpus"] == 4)
    words = shlex.split(DATA["scripts"][name]["predict"])
    assert make_parser(all_studies()).parse_args([*words[2:], "--gpu", "T4"]).command == "predict"


def luminance(colour: str) -> float:
    """WCAG 2's, of #rgb or #rrggbb."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[place:place + 2], 16) / 255 for place in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
              for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast():
    """Of text at least 4.5, of bars 3, as WCAG 2.2 has it; in both colour schemes."""
    schemes = re.findall(r":root \{(.*?)\}", PAGE, re.DOTALL)
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--(\w+): (#\w+);", scheme))
        for back in ("page", "card", "track"):
            for text in ("text", "soft", "speed", "bad", "good"):
                assert contrast(colours[text], colours[back]) >= 4.5, (text, back)
        for bar in ("speed", "memory", "bad"):
            assert contrast(colours[bar], colours["track"]) >= 3, bar


def seen_at(width: int, addresses: list[str], folder: Path) -> list:
    """What LOOK sees of the page in a window of a width."""
    (folder / "frame.html").write_text(FRAME.replace("WIDTH", str(width)))
    (folder / "copy.html").write_text(PAGE.replace(
        "</body>", LOOK.replace("ADDRESSES", json.dumps(addresses)) + "</body>"))
    text, console = seen_in_browser(folder / "frame.html", "--virtual-time-budget=20000")
    assert console == []
    return json.loads(re.search("seen (.*?)</body>", text, re.DOTALL)[1].replace(
        "&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))


@needs_browser
def test_two_gpus_side_by_side(tmp_path):
    """Their ladders start at the same height, though what is above them differs."""
    both, *_ = seen_at(1300, ["gpu=T4&with=H100&price=1"], tmp_path)
    left, right = both["tops"]
    assert left == right


@needs_browser
def test_in_a_browser(tmp_path, monkeypatch, capsys):
    """Its figures are those that `predict` prints; it is as wide as a phone; an address is a
    choice, and a choice an address; the console stays empty."""
    wanted, addresses = [], []
    for choice, options, rows in CASES:
        gpu, batch, model = choice["gpu"], choice["batch"], choice.get("model", "gpt2")
        monkeypatch.setattr(sys, "argv", [
            "measure.py", "predict", "--gpu", f"4x{gpu}", "--batch-size", str(batch), "--model",
            model, *options.split(), "--results-dir", str(tmp_path)])
        assert measure.main() == 0
        tables = capsys.readouterr().out.split("\n\n")
        reserved, where = (next(cells_of(text) for text in tables if f"| {heading} " in text)
                           for heading in ("batch 8", "tok/sec, thousands"))
        for script, label in rows.items():
            addresses.append(f"gpu={gpu}&batch={batch}&model={model}&script={script}&tokens=1")
            row = where[label]
            wanted.append((row.get("of all its GPUs") or row["tok/sec, thousands"],
                           f"{reserved[label][f'batch {batch}']} GB reserved",
                           f"MFU {row['MFU'].rstrip('%')} %"))
    assert len(wanted) >= 10
    addresses += ["gpu=RTX 4090&batch=8&script=00", "gpu=L4&with=H100&price=1&price2=2.5&tokens=2",
                  "gpu=none&model=x&script=&batch=3", "gpu=L4&tokens=-3&price=1",
                  "gpu=L4&script=memory-budget --memory-budget 0"]
    *seen, typed, clicked, focused, labelled = seen_at(390, addresses, tmp_path)
    for (speed, *texts), page in zip(wanted, seen, strict=False):
        assert page["range"] == speed and all(text in page["text"] for text in texts)
    assert {(page["width"], page["beyond"]) for page in seen} == {(390, 0)}
    assert not {word for page in seen for word in page["broken"]}
    refused, both, odd, negative, explained = seen[len(wanted):]
    assert "doesn't fit at batch 8" in refused["answer"] and "needs 26.25" in refused["text"]
    assert "--variants memory-checkpoint" in refused["text"]
    low, high = sorted(1e9 * 2 / 3600 / (1000 * float(end)) for end in DATA["gpus"]["H100"][
        "speeds"]["01"]["gpt2"]["32"][1].split("–"))
    assert f"2 billion tokens take {low:.3g}–{high:.3g} hours and cost {2.5 * low:.3g}–" \
        f"{2.5 * high:.3g}." in both["answer"] and "H100 over L4: " in both["answer"]
    assert odd["answer"].startswith("RTX 4090, gpt2, 01, all 15 techniques: fits at batch 32")
    assert "Tokens to train on, in billions: this has to be a number above 0" in negative["answer"]
    assert "type a price" not in negative["text"] and "20.96 GB reserved" in explained["text"]
    assert DATA["about"]["memory-budget"] in explained["text"]
    assert "gpu=L4" in typed and "script=00" in clicked and focused == "00, the baseline"
    assert labelled
