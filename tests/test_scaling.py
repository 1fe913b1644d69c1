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
    """That of the speedup, divided by the processes."""
    plan = plan_of("01", "two", "four")
    plan.runs[1:] = [run.but(processes=count, compared_to="01")
                     for run, count in zip(plan.runs[1:], (2, 4), strict=True)]
    runs = [*rounds_of("01", *2 * [990.0, 1010.0]), *rounds_of("two", *4 * [1500.0]),
            *rounds_of("four", *2 * [2200.0, 2000 / 1.1])]
    write_journal(tmp_path, "scaling", plan, runs)
    (measured,) = read_journal(journal_of(tmp_path, "scaling"))
    cells = cells_of(text_of(Scaling(), measured))
    low, high = (each / 4 for each in rows_of(measured)[2].interval())
    assert (cells["four"]["efficiency"], cells["four"]["95 %"]) == (
        "50.0%", f"{low:.0%}–{high:.0%}")
    assert 0.4 < low < 0.48 < 0.52 < high < 0.6
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
