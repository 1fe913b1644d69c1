"""bench/scaling.py: the plan, and the model of what a link costs."""

import pytest
from made_up import CPU, MACHINE, make_plan, make_state, write_record

from bench import plans, scaling, statistics, tables
from bench.hosts import NoHosts, two_hosts
from bench.runner import Job, command_of
from bench.scaling import Load, efficiency, load_of, numbers


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
    _, flops = script.count_parameters(model, config)
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
    rows = scaling.predictions()
    assert [row["model"] for row in rows] == ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"]
    for row in rows:
        shares = list(row["efficiency"].values())
        assert 0.5 < min(shares) and max(shares) < 1
        assert row["efficiency"][16] < row["efficiency"][8]  # over the slower link
    assert rows[0]["step"] == pytest.approx(32 * 1024 * 0.855e9 / (0.4 * 989e12), rel=0.01)


def test_published_points():
    ours, other, *hosts = scaling.published_points()
    assert ours["measured"] == pytest.approx(419_259 / 4 / 142_156)
    assert other["measured"] == pytest.approx(0.924, abs=0.001)
    assert all(point["predicted"] > point["measured"] for point in (ours, other, *hosts))
    assert [round(point["measured"], 2) for point in hosts] == [0.97, 0.90]


def test_plan_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(plans, "BUILD", tmp_path)
    plan = scaling.scaling(CPU, "4,1,2", links="400,100")
    assert [(run.label, run.processes, run.cores, run.mbit) for run in plan.runs] == [
        ("01", 1, 1, None), ("02, 1 process", 1, 1, None), ("02, 2 processes", 2, 2, None),
        ("02, 4 processes", 4, 4, None), ("02, 2 hosts, 400 Mbit/s", 2, 2, 400),
        ("02, 2 hosts, 100 Mbit/s", 2, 2, 100)]
    assert [run.error for run in plan.runs] == [None] * 3 + ["needs 4 cores"] + [None] * 2
    length = type("Length", (), {"options": ("--max-tokens", 9)})
    assert "torch.distributed.run" in command_of(Job(plan.runs[2], 1), plan, length)
    command = command_of(Job(plan.runs[-1], 1), plan, length)
    assert command[1:5] == ["-m", "bench.hosts", "--mbit", "100"]


def test_plan_on_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(plans, "BUILD", tmp_path)
    plan = scaling.scaling(MACHINE | dict(gpus=2))
    assert [run.cores for run in plan.runs] == [None] * 4
    assert plan.runs[-1].error == "needs 4 GPUs"
    with pytest.raises(plans.UserError, match="--links needs a machine without a GPU"):
        scaling.scaling(MACHINE, links="100")


@pytest.mark.parametrize("text", ["", "a", "1,,2", "0,1", "-1", "1.5"])
def test_bad_numbers(text):
    with pytest.raises(plans.UserError):
        numbers(text, 1)


def test_no_hosts_without_the_program(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NoHosts, match="there is no program ip"), two_hosts():
        pass


def rows_of(plan, results) -> dict:
    """The plan's state with its rows."""
    state = make_state(plan, results)
    state["rows"], _ = statistics.make_rows(plan, state, plan.path.parent)
    return state


def test_table(tmp_path):
    plan = make_plan(tmp_path, "01", "two", "slow", machine=CPU)
    plan.name = "scaling"
    for run, (processes, mbit) in zip(plan.runs, [(1, None), (2, None), (2, 400)], strict=True):
        run.processes, run.mbit = processes, mbit
    config = dict(batch_size=8)  # 2,048 tokens per step, so 1 s of 01
    state = rows_of(plan, [
        write_record(plan.path.parent, "01", speed=2048.0, config=config),
        write_record(plan.path.parent, "two", speed=3686.4, config=config),
        write_record(plan.path.parent, "slow", speed=2048.0, config=config)])
    predicted = 0.9 * efficiency(2, 1.0, load_of("cpu-demo"), 50e6)
    table = tables.plan_table(state)
    assert "| two | 3,686 | 1,843 | 90.0% |  | 1.00 | 8.0000 |" in table
    assert f"| slow | 2,048 | 1,024 | 50.0% | {predicted:.1%} | 1.00 | 8.0000 |" in table
    assert "Each process has 1 of the 2 cores at every size." in table


def test_what_a_checkpoint_costs(tmp_path):
    plan = make_plan(tmp_path, "01", "saved", machine=CPU)
    plan.name, plan.runs[1].options = "checkpoints", ("--checkpoint-every", "4")
    folder, config = plan.path.parent, dict(batch_size=8)
    results = [write_record(folder, "01", config=config, avg_tok_per_sec=2048.0),
               write_record(folder, "saved", config=config, avg_tok_per_sec=1024.0)]
    path = folder / results[1]["record"]
    lines = path.read_text().splitlines()
    for seconds in (1.0, 2.0, 9.0):
        lines.insert(-1, f'{{"event": "checkpoint", "step": 4, "seconds": {seconds}}}')
    path.write_text("\n".join(lines) + "\n")
    table = tables.plan_table(rows_of(plan, results))
    # 2 s of waiting and 4 s of slower steps; a step takes 1 s without checkpoints.
    shares = " | ".join(f"{6 / (6 + steps):.1%}" for steps in (10, 50, 200))
    assert f"| 2.00 | 4.00 | {shares} |" in table
