"""The study `identical`: a ladder without a technique."""

import pytest
from made_up import carry_out, setup_of, speeds_of

from bench.studies.comparisons import Identical


def test_every_run_is_the_same_script(tmp_path):
    setup = setup_of(tmp_path, max_tokens=1024, seconds=0.0)
    ((plan, rows),) = carry_out(Identical(), setup, speeds_of)
    assert len({run.name for run in plan.runs}) == 15
    assert len({run.script for run in plan.runs}) == 1
    assert [row.versus and row.versus.run.name for row in rows] == [
        None, *(run.name for run in plan.runs[:-1])]
    assert Identical().result(None, rows) == "14 false findings of 14\n"  # each is made faster


@pytest.mark.parametrize(("rounds", "says"), [(4, "2 false findings of 14\n"), (2, "")])
def test_false_verdicts_are_counted(tmp_path, rounds, says):
    def runs_of(plan) -> list[dict]:
        return [dict(name=run.name, round=number, speed=200.0 if place == 3 else 100.0 + number)
                for number in range(1, rounds + 1) for place, run in enumerate(plan.runs)]

    setup = setup_of(tmp_path, max_tokens=1024, seconds=0.0)
    ((_, rows),) = carry_out(Identical(), setup, runs_of)
    assert Identical().result(None, rows) == says
