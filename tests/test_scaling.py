"""bench/studies/scaling.py: the plan, the table, the picture."""

import pytest
from made_up import (
    CPU,
    MACHINE,
    cells_of,
    measured_with,
    plan_of,
    record_events,
    rounds_of,
    setup_of,
    write_journal,
)

from bench.analysis.rows import rows_of
from bench.common import UserError
from bench.measure.journal import journal_of, read_journal
from bench.report.tables import text_of
from bench.studies.scaling import Scaling, numbers, published_efficiency


def test_published_efficiency():
    gpus, efficiency = published_efficiency()
    assert (gpus, round(efficiency, 3)) == (4, 0.737)


def test_plan_on_a_cpu(tmp_path):
    """Each process has as many cores at every size."""
    plan = next(Scaling().plans(setup_of(tmp_path, sizes="4,1,2")))
    assert [(run.label, run.processes, run.cores) for run in plan.runs] == [
        ("01", 1, 1), ("02, 1 process", 1, 1), ("02, 2 processes", 2, 2), ("02, 4 processes", 4, 4)]
    assert [run.error for run in plan.runs] == [None] * 3 + ["needs 4 cores"]
    assert {run.torchrun for run in plan.runs[1:]} == {True}


def test_plan_on_gpus(tmp_path):
    plan = next(Scaling().plans(setup_of(tmp_path, MACHINE | dict(gpus=2), sizes="1,2,4")))
    assert [run.cores for run in plan.runs] == [None] * 4
    assert plan.runs[-1].error == "needs 4 GPUs"


@pytest.mark.parametrize("text", ["", "a", "1,,2", "0,1", "-1", "1.5"])
def test_bad_numbers(text):
    with pytest.raises(UserError):
        numbers(text)


def test_an_efficiency_has_its_interval(tmp_path):
    """By the t-test of pairs: 0.5 times exp(±3.18 × 0.0953 / √3), for three degrees of freedom."""
    plan = plan_of("01", "four")
    plan.runs[1] = plan.runs[1].but(processes=4)
    runs = [*rounds_of("01", *4 * [1000.0]), *rounds_of("four", *2 * [2200.0, 2000 / 1.1])]
    write_journal(tmp_path, "scaling", plan, runs)
    cells = cells_of(text_of(Scaling(), read_journal(journal_of(tmp_path, "scaling"))[-1]))
    assert (cells["four"]["efficiency"], cells["four"]["95 %"]) == ("50.0%", "42%–60%")
    assert cells["01"]["95 %"] == ""


def test_table_and_picture():
    plan = plan_of("01", "two")
    plan.runs[1] = plan.runs[1].but(processes=2)
    measured = measured_with(plan, {
        name: record_events(name, speed, config=dict(batch_size=8))
        for name, speed in {"01": 2048.0, "two": 3686.4}.items()}, CPU)
    cells = cells_of(text_of(Scaling(), measured))
    assert cells["two"] == {
        "run": "two", "tok/sec": "3,686", "per process": "1,843", "efficiency": "90.0%",
        "GB per process": "1.25", "val loss": "8.0000"}
    figure = Scaling().draw(measured, rows := rows_of(measured))
    (axes,) = figure.axes
    assert [line.get_ydata()[-1] for line in axes.lines[1:]] == pytest.approx([90, 73.7], abs=0.1)
    assert Scaling().draw(measured, rows[:1]) is None  # nothing to compare
