"""peers/audit_changes.py: what an audit names is changed, and measured."""

import hashlib
import json
import math
from types import SimpleNamespace

import pytest
from conftest import ROOT, call_main, load

from bench.audit.signs import HAS, LACKS, Verdict
from bench.audit.tell import Finding, Findings
from bench.common import UserError

TRAIN = """
import sys
import torch

batch = int((["--batch=4"] + sys.argv[1:])[-1].removeprefix("--batch="))
model = torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64))
optimizer = torch.optim.AdamW(model.parameters(), fused=False)
for _ in range(200):
    ids = torch.randint(0, 64, (batch, 8))
    torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
FUSED = dict(name="fused", techniques=[3], replace={"train.py": [["fused=False", "fused=True"]]})
LARGER = dict(name="larger", techniques=[10], options=["--batch=8"], batch=2)
OWN_LOSS = dict(name="loss", techniques=[14], copy={"train.py": "ChunkedLoss"})


@pytest.fixture
def script():
    return load(ROOT / "peers" / "audit_changes.py")


@pytest.fixture
def project(tmp_path):
    """Its folder, its data, and its entry."""
    folder, data = tmp_path / "project", tmp_path / "data"
    folder.mkdir()
    data.mkdir()
    (folder / "train.py").write_text(TRAIN)
    for name in ("train.bin", "val.bin"):
        (data / name).write_bytes(b"1234")
    digest = hashlib.sha256(TRAIN.encode()).hexdigest()
    return folder, data, dict(repository="made-up", commit="0" * 40, sha256={"train.py": digest},
                              data="data/own", command=["train.py"],
                              changes=[FUSED, LARGER, OWN_LOSS])


def test_a_change_is_made_in_a_copy(script, project, tmp_path):
    folder, data, entry = project
    to = script.copied(folder, entry, data, tmp_path / "to", script.merged([FUSED, OWN_LOSS]))
    text = (to / "train.py").read_text()
    assert "fused=True" in text and "class ChunkedLoss(torch.autograd.Function)" in text
    assert (to / "data" / "own" / "train.bin").read_bytes() == b"1234"
    assert (folder / "train.py").read_text() == TRAIN


def test_another_version_is_refused(script, project, tmp_path):
    folder, data, entry = project
    with pytest.raises(UserError, match="hasn't once 'fused=None'"):
        change = dict(replace={"train.py": [["fused=None", ""]]})
        script.copied(folder, entry, data, tmp_path / "one", change)
    (folder / "train.py").write_text(TRAIN + "\n")
    with pytest.raises(UserError, match="train.py isn't that of made-up at 00000000"):
        script.copied(folder, entry, data, tmp_path / "two", {})


def audited(notes=()) -> Findings:
    """It lacks 3, has 14."""
    techniques = [Finding(3, "", Verdict(LACKS, "", "", 0.2), 1.2),
                  Finding(10, "", Verdict(LACKS, ""), 1.1),
                  Finding(14, "", Verdict(HAS, "", "", 0.5), None)]
    return Findings([], [], {}, techniques, "", [*notes], [], "")


def test_only_what_is_named_is_changed(script):
    reading = dict(name="reading", note="read back")
    changes = [FUSED, LARGER, OWN_LOSS, reading]
    assert script.named(changes, audited()) == [FUSED, LARGER]
    assert script.named(changes, audited(["2 values read back"])) == [FUSED, LARGER, reading]


def test_pairs_and_their_table(script, monkeypatch):
    """Each change runs beside the script as it is, before it and after it by turns."""
    times, order = {"": 1.0, "fused": 0.8, "larger": 0.9, "loss": 1.1}, []

    def seconds(folder, command, change, steps):
        order.append(change.get("name", ""))
        return times[order[-1]]

    monkeypatch.setattr(script, "seconds", seconds)
    changes = [FUSED, LARGER, OWN_LOSS]
    found = script.rounds([(each, None) for each in changes], None, [], 2, 1e9)
    assert order == ["", "fused", "", "larger", "loss", "", "larger", "", "fused", "loss", ""]
    assert found["loss"] == [pytest.approx(-math.log(1.1))] * 2
    lines = script.table(changes, audited(), found).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[2] == ["fused", "3", "1.25", "1.20", "1.25", "1.25–1.25", "2"]
    assert cells[3][2:5] == ["–", "1.10", "1.11"] and cells[4][2:5] == ["2.00", "–", "0.91"]


def test_a_change_that_fails(script, monkeypatch, capsys):
    """The others are measured."""
    def seconds(folder, command, change, steps):
        if change is LARGER:
            raise UserError("no memory")
        return 1.0

    monkeypatch.setattr(script, "seconds", seconds)
    found = script.rounds([(FUSED, None), (LARGER, None)], None, [], 2, 1e9)
    assert "larger: no memory" in capsys.readouterr().err
    text = script.table([FUSED, LARGER], audited(), found)
    assert "| failed |" in text and "1.00–1.00" in text


def test_tokens_count(script, monkeypatch):
    """A step of a larger batch counts as several; it makes fewer."""
    asked = {}

    def run(command, order, minutes, folder):
        asked.update(order, command=command)
        return dict(seconds=[2.0] * 5)

    monkeypatch.setattr(script, "run", SimpleNamespace(run=run))
    assert script.seconds(None, ["train.py"], LARGER, 24) == 1.0
    assert asked["steps"] == 12 and asked["command"] == ["train.py", "--batch=8"]


@pytest.mark.slow
def test_it_measures(project, tmp_path, forked_children):
    folder, data, entry = project
    own = tmp_path / "audit_changes.py"
    text = (ROOT / "peers" / "audit_changes.py").read_text(encoding="utf-8")
    own.write_text(text.replace("Path(__file__).resolve().parent.parent", f"Path({str(ROOT)!r})"),
                   encoding="utf-8")
    own.with_suffix(".json").write_text(json.dumps(entry))
    done = call_main(load(own), folder, "--data", data, "--pairs", 2, "--minutes", 1, variables={})
    assert not done.returncode, done.stderr
    assert "| fused | 3 | " in done.stdout and "| all of these | 3, 10" in done.stdout
