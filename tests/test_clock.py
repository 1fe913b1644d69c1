"""How exact the clock and the memory figures are."""

import json

import pytest
from conftest import ROOT, run_python


@pytest.mark.slow
@pytest.mark.parametrize("case", ["first step", "log line", "sample and memory"])
def test_a_step_of_known_cost(case):
    """What takes as long as the whole training beside it is left out of all figures. (How exact
    they are is measured by the command: another test may run beside this one.)"""
    told = run_python("-m", "tests.known_step", ROOT / "00_orig.py", case, "cpu", cwd=ROOT)
    assert told.returncode == 0, told.stderr
    figures = json.loads(told.stdout)
    for name in ("average", "median"):
        reported, true = figures[name]
        assert 0.9 * true < reported < 1.5 * true
    reported, true = figures["memory"]
    assert reported == pytest.approx(true, rel=0.02)
