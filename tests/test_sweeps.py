"""bench/sweeps.py: how large a batch, a model and a context a machine carries."""

import pytest
from made_up import CPU, MACHINE, PEAK, make_plan, make_state, write_record
from synthetic import rows_of

from bench import lengths, plans, runner, statistics, sweeps, tables


@pytest.fixture(autouse=True)
def build(tmp_path, monkeypatch):
    monkeypatch.setattr(plans, "BUILD", tmp_path / "build")


def test_plans():
    plan = sweeps.sweep(MACHINE, "batch")
    assert plan.path.name == "sweep-batch.json" and plan.memory_limit_gb is None
    assert plan.tokens == plans.TOKENS["cuda"] and plan.seconds == 10
    assert [run.label for run in plan.runs[:3]] == ["batch 1", "batch 2", "batch 4"]
    assert plan.runs[2].options == ("--batch-size", "4")
    assert [run.after for run in plan.runs[:2]] == [None, plan.runs[0].name]
    assert len({run.name for run in plan.runs}) == len(plan.runs)
    contexts = sweeps.sweep(MACHINE, "context", "00")
    assert contexts.path.name == "sweep-context-00.json"
    ends = contexts.runs[0], contexts.runs[-1]
    assert ends[0].script.name == "00_orig.py" and ends[0].name.startswith("00_orig-context-256")
    assert [run.label for run in ends] == ["context 256, batch 128", "context 16384, batch 2"]
    assert [run.options for run in ends] == [
        ("--context-length", "256", "--batch-size", "128"),
        ("--context-length", "16384", "--batch-size", "2")]
    search = sweeps.sweep(CPU, "model", options=["--dropout", "0.1"])
    assert search.path.name == "sweep-model-batch.json" and search.memory_limit_gb > 0
    assert search.options == [*plans.MODEL_OPTIONS["cpu"], "--dropout", "0.1"]
    assert (search.tokens, search.seconds, search.min_steps) == (1, 0, 6)
    assert "--no-compile" not in sweeps.sweep(CPU, "model", "00").options
    before = {run.label: run.after for run in search.runs}
    assert before["cpu-demo, batch 1"] is None
    assert before["cpu-demo, batch 4"] == "01_opt_single_gpu-cpu-demo-batch-1"
    # A model is tried only where the smaller one's smallest batch fits.
    assert before["gpt2, batch 1"] == "01_opt_single_gpu-cpu-demo-batch-1"
    assert before["gpt2-medium, batch 1"] == "01_opt_single_gpu-gpt2-batch-1"
    with pytest.raises(plans.UserError, match="--batch-size is set by the sweep itself"):
        sweeps.sweep(CPU, "context", options=["--batch-size=4"])
    with pytest.raises(plans.UserError, match="no stage '02'"):
        sweeps.sweep(CPU, "batch", "02")


def test_each_model_at_its_best_batch():
    rows = [dict(name=f"{model}-{size}", label=f"{model}, batch {size}", error=error,
                 options=["--batch-size", str(size)], tok_per_sec=speed)
            for model, size, speed, error in (
                ("cpu-demo", 1, 100.0, None), ("cpu-demo", 2, 150.0, None),
                ("cpu-demo", 4, 140.0, None), ("gpt2", 1, 20.0, None), ("gpt2", 2, None, "failed"),
                ("gpt2-medium", 1, None, "failed: out of memory"))]
    plan = sweeps.models(CPU, rows)
    assert [run.label for run in plan.runs] == [
        "cpu-demo, batch 2", "gpt2, batch 1", "gpt2-medium, batch 1"]
    assert plan.runs[0].options == ("--batch-size", "2")
    assert [run.error for run in plan.runs] == [None, None, "failed: out of memory"]
    with pytest.raises(plans.UserError, match="no search of gpt2-medium"):
        sweeps.models(CPU, rows[:-1])


def swept(tmp_path, monkeypatch, memory: dict, limit: float | None = None) -> tuple[list, list]:
    """(the jobs that ran, the rows) of runs 1, 2, 4, 8 that take so many GB; None: out of it."""
    plan = make_plan(tmp_path, *memory)
    for before, run in zip([None, *plan.runs], plan.runs, strict=False):
        run.after, run.compared_to, run.label = before and before.name, None, f"batch {run.name}"
        run.growth = 2
    plan.memory_limit_gb, plan.until_full, ran = limit, True, []

    def run_job(job, plan, length):
        ran.append((job.run.name, job.round))
        if memory[job.run.name] is None:
            return dict(name=job.run.name, round=job.round, seed=job.seed, record=None,
                        error="out of memory: lower it", seconds=1.0)
        return write_record(plan.path.parent, job.run.name, job.round, 100.0,
                            reserved_gb=memory[job.run.name])

    monkeypatch.setattr(runner, "run_job", run_job)
    state = make_state(plan, [])
    every = {run.name: lengths.Length((), 1.0) for run in plan.runs}
    jobs = runner.make_jobs(plan, 2, [])
    jobs = [job for job in jobs if job.seed == plan.seed_of(job.round)]
    assert runner.run_jobs(jobs, plan, state, every, None)
    rows, _ = statistics.make_rows(plan, state, plan.path.parent)
    return ran, rows


def test_nothing_larger_than_what_does_not_fit(tmp_path, monkeypatch):
    ran, rows = swept(tmp_path, monkeypatch, {"1": 1.0, "2": 2.0, "4": None, "8": 1.0})
    assert ran == [("1", 1), ("2", 1), ("4", 1), ("1", 2), ("2", 2)]
    assert [row["error"] for row in rows] == [
        None, None, "failed: out of memory: lower it", "not tried, since batch 4 failed"]
    table = rows_of(tables.sweep_table(rows))
    assert [row[:2] for row in table] == [
        ["batch 1", "100"], ["batch 2", "100"], ["batch 4", "failed: out of memory: lower it"]]


def test_half_of_a_cpus_memory(tmp_path, monkeypatch):
    ran, rows = swept(tmp_path, monkeypatch, {"1": 1.0, "2": 2.5, "4": 5.0, "8": 10.0}, limit=6.0)
    assert [name for name, number in ran if number == 1] == ["1", "2", "4"]
    assert rows[3]["error"] == (
        "not tried: 2 times the 5.0 GB of batch 4 would be more than half of the RAM")
    assert len(rows_of(tables.sweep_table(rows))) == 4
    (tmp_path / "b").mkdir()
    ran, rows = swept(tmp_path / "b", monkeypatch, {"1": 4.0, "2": 1.0, "4": 1.0}, limit=6.0)
    assert ran == [("1", 1), ("1", 2)]
    assert rows[1]["error"] == rows[2]["error"]  # told once
    assert len(rows_of(tables.sweep_table(rows))) == 2


def test_what_does_not_fit_is_no_failure_and_stands(tmp_path):
    plan = make_plan(tmp_path, "a", "b", until_full=True)
    full = dict(name="b", round=1, seed=123, record=None, seconds=1.0,
                error="out of memory: lower --batch-size (CUDA out of memory)")
    assert not runner.failures(plan, dict(results=[full]))
    broken = full | dict(error="RuntimeError: something else")
    assert runner.failures(plan, dict(results=[broken]))
    for error in ("the text is too short: train.bin has 5 tokens", "ended by signal 9"):
        assert statistics.does_not_fit(error)
    assert not statistics.does_not_fit(None)


def test_enough_steps_for_a_median(tmp_path):
    plan = make_plan(tmp_path, "a", machine=CPU, min_steps=6, seconds=0.0)
    config = dict(batch_size=64, context_length=256, compile=False)
    length = lengths.length_of(plan.runs[0], plan, config, PEAK)
    assert length.options[:2] == ("--max-tokens", 6 * 64 * 256)
