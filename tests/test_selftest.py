"""bench/measure/known_step.py and bench/studies/selftest.py: are the numbers right?"""

import json
import random

import pytest
from conftest import ROOT, run_python
from made_up import plan_of, setup_of, write_journal

from bench.common import UserError
from bench.studies import selftest
from bench.studies.selftest import CASES, Selftest, noise_in, shares


@pytest.mark.parametrize("case", ["first step", "log line", "sample and memory"])
def test_a_step_of_known_cost(case):
    """What takes as long as the whole training beside it is left out of all figures. (How exact
    they are is measured by the command: another test may run beside this one.)"""
    told = run_python("-m", "bench.measure.known_step", ROOT / "00_orig.py", case, "cpu", cwd=ROOT)
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


def journal(folder, noise: dict[str, float], versus=None) -> None:
    """Four rounds of runs with so much noise each."""
    draw, plan = random.Random(0), plan_of(*noise)
    if versus:
        plan.runs = [run.but(compared_to=None if run is plan.runs[0] else versus)
                     for run in plan.runs]
    write_journal(folder, "ladder", plan, [
        dict(name=name, round=number, speed=100.0 * (1 + size * draw.gauss(0, 1)))
        for number in range(1, 5) for name, size in noise.items()])


@pytest.mark.parametrize("versus", [None, "run-0"])
def test_the_rule_by_recorded_noise(tmp_path, monkeypatch, versus):
    """Little noise finds what much noise hides; neither makes many false verdicts, nor does one
    run with more noise than the others."""
    monkeypatch.setattr(selftest, "TABLES", 300)
    names = [f"run-{k}" for k in range(10)]
    for kind, sizes in (("quiet", [0.02] * 10), ("loud", [0.15] * 10), ("one", [0.01] * 9 + [0.1])):
        journal(tmp_path / kind, dict(zip(names, sizes, strict=True)), versus)
        (recorded,) = noise_in(tmp_path / kind)
        assert len(recorded.rounds) == 4 and {len(log) for log in recorded.rounds} == {10}
        assert recorded.one_reference is bool(versus)
        (false, found), (_, more) = (shares([recorded], rounds) for rounds in (4, 8))
        assert false < 0.12
        assert more >= found and (found > 0.95 if kind == "quiet" else found < 0.9)


def test_a_rule_that_breaks_is_told(tmp_path, monkeypatch):
    journal(tmp_path / "results", {f"run-{k}": 0.05 for k in range(10)})
    monkeypatch.setattr(selftest, "FALSE_TABLES", 0.5)
    assert "| 4 |" in answer(tmp_path, monkeypatch)
    monkeypatch.setattr(selftest, "verdict", lambda *_: "faster")
    with pytest.raises(UserError, match="100% of the tables of 4 rounds hold a false verdict"):
        answer(tmp_path, monkeypatch)
