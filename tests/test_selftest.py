"""bench/known_step.py and bench/studies/selftest.py: are the numbers right?"""

import json
import random

import pytest
from conftest import ROOT, run_python, write_tokens
from made_up import plan_of, setup_of, write_journal

from bench.common import UserError
from bench.studies import selftest
from bench.studies.selftest import CASES, Selftest, noise_in, rule_table


@pytest.mark.parametrize("case", ["first step", "log line"])
def test_a_step_of_known_cost(tmp_path, case):
    """What takes as long as the whole training beside it is left out of all figures. (How exact
    they are is measured by the command: another test may run beside this one.)"""
    data = write_tokens(tmp_path / "data", vocabulary=50257)
    told = run_python("-m", "bench.known_step", ROOT / "00_orig.py", case, data, "cpu", cwd=ROOT)
    assert told.returncode == 0, told.stderr
    figures = json.loads(told.stdout)
    for name in ("average", "median"):
        reported, true = figures[name]
        assert 0.9 * true < reported < 1.5 * true
    reported, true = figures["memory"]
    assert reported == pytest.approx(true, rel=0.02)


def answer(tmp_path, monkeypatch, **figures) -> str:
    def ask(*command):
        asked.append(command[3])
        return json.dumps(dict(average=[1.0, 1.0], median=[1.0, 1.0], memory=[5, 5]) | figures)

    asked = []
    monkeypatch.setattr(selftest.processes, "ask", ask)
    monkeypatch.setattr(selftest.processes, "prepare_tokens", lambda folder: None)
    monkeypatch.setattr(selftest, "BUILD", tmp_path)
    monkeypatch.setattr(selftest, "TABLES", 50)
    text = Selftest().answer(setup_of(tmp_path / "results"))
    assert sorted(set(asked)) == sorted(CASES)
    return text


def test_answer(tmp_path, monkeypatch):
    assert "no noise to simulate" in answer(tmp_path, monkeypatch)
    with pytest.raises(UserError, match="(?s)00, nothing slow: median off by [+]6.00%"):
        answer(tmp_path, monkeypatch, median=[1.06, 1.0])
    answer(tmp_path, monkeypatch, median=[1.04, 1.0])
    with pytest.raises(UserError, match="memory off by -3.00%"):
        answer(tmp_path, monkeypatch, memory=[97, 100])


def test_the_rule_by_recorded_noise(tmp_path, monkeypatch):
    """Little noise finds what much noise hides, and neither makes many false verdicts."""
    monkeypatch.setattr(selftest, "TABLES", 200)
    draw, names = random.Random(0), [f"run-{k}" for k in range(10)]
    for folder, size in (("quiet", 0.02), ("loud", 0.15)):
        write_journal(tmp_path / folder, "ladder", plan_of(*names), [
            dict(name=name, round=number, speed=100.0 * (1 + size * draw.gauss(0, 1)))
            for number in range(1, 5) for name in names])
        recorded = noise_in(tmp_path / folder)
        assert [[len(piece) for piece in rounds] for rounds in recorded] == [[10] * 4]
        four, _, eight = rule_table(recorded).rows
        assert four[1] < 0.12 and eight[1] < 0.12
        assert (four[2] > 0.99) if folder == "quiet" else (four[2] < 0.5 and eight[2] > four[2])
