"""bench/studies/scaling.py: the plan, and the model of what a link costs."""

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
    shown,
    write_journal,
)

from bench.analysis.rows import rows_of
from bench.common import UserError
from bench.measure.journal import journal_of, read_journal
from bench.report.tables import text_of
from bench.studies import scaling
from bench.studies.scaling import Load, Scaling, efficiency, load_of, numbers


def test_the_model_counts_the_bytes_of_the_gradients(stages):
    """Those of the script itself: 02's, with its padded vocabulary."""
    script = stages["02_opt_multi_gpu_ddp"]
    config = script.Config(**script.MODELS["cpu-demo"])
    model = script.GPTModel(config)
    sizes = {name: script.Config(**changes) for name, changes in script.MODELS.items()}
    assert scaling.MODELS == {
        name: (size.layers, size.width, size.context_length) for name, size in sizes.items()}
    load = load_of("cpu-demo")
    assert load.total == 2 * sum(p.numel() for p in model.parameters())
    assert load.last == 2 * model.token_embedding.weight.numel()
    flops = script.count_parameters(model, config)["flops_per_token"]
    assert 6 * sum(scaling.products("cpu-demo")) == flops
    assert load.overlap == pytest.approx(2 / 3 * (1 - 6 * model.head.weight.numel() / flops))
    assert load_of("gpt2", 4, tied=True).total / 4 == pytest.approx(124.4e6, rel=0.002)


@pytest.mark.parametrize(("processes", "link", "expected"), [
    (1, 1, 1),
    (2, 1e6, 1 / 1.0004),  # of 1,000 bytes each of two sends 1,000, 400 of them at the end
    (2, 1000, 1 / 1.5),  # 1 s, of which half passes beside the backward pass
    (2, 2000, 1 / 1.2),  # 0.5 s: only the last 400 bytes are left
    (4, 1000, 1 / 2),  # of 1,000 bytes each of four sends 1,500
])
def test_efficiency(processes, link, expected):
    assert efficiency(processes, 1.0, Load(1000, 400, 0.5), link) == pytest.approx(expected)


def test_predictions():
    models = ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"]
    for model in models:
        shares = {gpus: scaling.predicted_for(model, gpus) for gpus in (2, 4, 8, 16, 32, 64)}
        assert 0.5 < min(shares.values()) and max(shares.values()) < 1
        assert shares[16] < shares[8]  # over the slower link
    assert scaling.step_seconds("gpt2") == pytest.approx(
        32 * 1024 * 0.855e9 / (0.4 * 989e12), rel=0.01)
    text = Scaling().fixed()["predictions"]
    assert list(cells_of(text)) == models and "%" in text


def test_published_points():
    ours, other, *hosts = scaling.published_points()
    assert ours.measured == pytest.approx(419_259 / 4 / 142_156)
    assert other.measured == pytest.approx(0.924, abs=0.001)
    assert all(point.predicted > point.measured for point in (ours, other, *hosts))
    assert [round(point.measured, 2) for point in hosts] == [0.97, 0.90]
    cells = cells_of(Scaling().fixed()["points"])
    assert cells["4 × A100, the published 02"]["efficiency"] == "73.7%" and len(cells) == 4


def test_plan_on_a_cpu(tmp_path):
    """Each process has as many cores at every size."""
    plan = next(Scaling().plans(setup_of(tmp_path, sizes="4,1,2", links="400,100")))
    assert [(run.label, run.processes, run.cores, run.mbit) for run in plan.runs] == [
        ("01", 1, 1, None), ("02, 1 process", 1, 1, None), ("02, 2 processes", 2, 2, None),
        ("02, 4 processes", 4, 4, None), ("02, 2 hosts, 400 Mbit/s", 2, 2, 400),
        ("02, 2 hosts, 100 Mbit/s", 2, 2, 100)]
    assert [run.error for run in plan.runs] == [None] * 3 + ["needs 4 cores"] + [None] * 2
    assert {run.torchrun for run in plan.runs[1:]} == {True}


def test_plan_on_gpus(tmp_path):
    plan = next(Scaling().plans(setup_of(tmp_path, MACHINE | dict(gpus=2), sizes="1,2,4")))
    assert [run.cores for run in plan.runs] == [None] * 4
    assert plan.runs[-1].error == "needs 4 GPUs"
    with pytest.raises(UserError, match="--links needs a machine without a GPU"):
        next(Scaling().plans(setup_of(tmp_path, MACHINE, links="100")))


@pytest.mark.parametrize(("text", "kind"), [
    *((text, int) for text in ("", "a", "1,,2", "0,1", "-1", "1.5")),
    *((text, float) for text in ("0.5", "5,nan", "nan", "200,inf"))])
def test_bad_numbers(text, kind):
    with pytest.raises(UserError):
        numbers(text, kind)


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
    plan = plan_of("01", "two", "slow", "strange")
    for place, mbit in ((1, None), (2, 400.0), (3, 100.0)):
        plan.runs[place] = plan.runs[place].but(processes=2, mbit=mbit)
    speeds = {"01": 2048.0, "two": 3686.4, "slow": 2048.0, "strange": 1024.0}
    config = dict(batch_size=8)  # 2,048 tokens per step, so 1 s of 01
    measured = measured_with(plan, {
        name: record_events(name, speed, config=config | (
            dict(model="no-such") if name == "strange" else {})) for name, speed in speeds.items()},
        CPU)
    cells = cells_of(text := text_of(Scaling(), measured))
    predicted = 0.9 * efficiency(2, 1.0, load_of("cpu-demo"), 50e6)
    assert cells["two"] == {
        "run": "two", "tok/sec": "3,686", "per process": "1,843", "efficiency": "90.0%",
        "predicted": "", "GB per process": "1.25", "val loss": "8.0000"}
    assert (cells["slow"]["efficiency"], cells["slow"]["predicted"]) == (
        "50.0%", f"{predicted:.1%}")
    assert cells["strange"]["predicted"] == ""  # of no known size
    assert "Each process has 1 of the 2 cores at every size." in text
    assert "Two hosts are network namespaces" in text
    alone = measured_with(plan, {"01": record_events("01", 2048.0, config=config)}, CPU)
    assert "Each process has 1 of the 2 cores" in text_of(Scaling(), alone)  # as was planned
    figure = Scaling().draw(measured, rows := rows_of(measured))
    assert {"two: 90% efficient (weak scaling)\nSome CPU, 2 cores", "this machine", "predicted",
            "400"} <= set(shown(figure))
    sizes, links = figure.axes
    assert [line.get_ydata()[-1] for line in sizes.lines[1:]] == pytest.approx([90, 73.7], abs=0.1)
    assert links.lines[2].get_ydata()[0] == pytest.approx(100 * predicted)
    assert Scaling().draw(measured, rows[:1]) is None  # nothing to compare
