"""bench/statistics.py and bench/tables.py: rows, verdicts and tables, from made-up records."""

import pytest
from made_up import make_plan, make_state, write_record

from bench import statistics, tables


@pytest.mark.parametrize(("new", "old", "says"), [
    ([11, 12, 13, 14], [7, 8, 9, 10], "faster"),
    ([7, 8, 9, 10], [11, 12, 13, 14], "slower"),
    ([10, 12, 13, 14], [7, 8, 9, 10], "no measurable change"),
    ([8, 8, 8, 8], [7, 9, 7, 9], "no measurable change"),
    ([50, 50, 50], [1, 1, 1, 1], "no verdict"),
    ([50, 50, 50, 50], [1, 1, 1], "no verdict"),
])
def test_verdict(new, old, says):
    assert statistics.verdict(new, old) == says


def rows_of(plan, results):
    """(rows, seed noise, table)"""
    state = make_state(plan, results)
    state["rows"], state["seed_noise"] = statistics.make_rows(plan, state, plan.path.parent)
    return state["rows"], state["seed_noise"], tables.plan_table(state)


def test_rows(tmp_path):
    plan = make_plan(tmp_path, "00_orig", "01-cores", "02-bfloat16", "03-broken", "04-last",
                     options=["--dropout", "0"])
    for run, published in zip(plan.runs, [100, 200, 500, 500, None], strict=True):
        run.published = published
    folder, results = plan.path.parent, []
    gpu = "NVIDIA H100 80GB HBM3"
    bf16 = dict(dtype="bfloat16", compile=False)
    for number in range(1, 5):
        loss = 8.25 - number / 16
        results += [
            write_record(folder, "00_orig", number, 50.0, seed=123 + number, loss=loss),
            write_record(folder, "00_orig", number, 99.0 + number),
            write_record(folder, "01-cores", number, 102.0 + number, loss=8.25),
            write_record(folder, "02-bfloat16", number, 800.0, loss=7.5, gpu=gpu, config=bf16),
        ]
    results += [dict(name="03-broken", round=1, seed=123, record=None, seconds=1.0,
                     error="out of memory: lower --batch-size")]
    results += [write_record(folder, "04-last", 1, None, config=dict(dtype=None))]
    rows, noise, text = rows_of(plan, results)
    base, cores, bf16, broken, last = rows
    assert noise == 8.1875 - 8.0  # over five seeds
    assert (base["tok_per_sec"], base["speeds"]) == (101.5, [100, 101, 102, 103])
    assert (base["verdict"], base["factor"], base["factor_baseline"]) == (None,) * 3
    assert base["within_seed_noise"] is None
    assert base["losses"][124] == 8.1875 and base["val_loss"] == 8.0  # not that of the end
    assert base["first_step_seconds"] == 10.0  # of the first round, not the median
    assert (base["precision"], base["share_of_peak"]) == ("float32", pytest.approx(0.1015))
    assert cores["verdict"] == "no measurable change"  # 103 is in both ranges
    assert (cores["within_seed_noise"], cores["uncompiled"]) == (False, False)
    assert bf16["factor"] == pytest.approx(800 / 104.5)
    assert bf16["factor_baseline"] == pytest.approx(800 / 101.5)
    assert (bf16["published_factor"], bf16["published_factor_baseline"]) == (2.5, 5.0)
    assert (bf16["loss_difference"], bf16["loss_difference_baseline"]) == (-0.75, -0.5)
    assert bf16["share_of_peak"] == pytest.approx(0.2)
    assert bf16["mfu"] == pytest.approx(800e9 / 989e12)
    assert (bf16["verdict"], bf16["uncompiled"]) == ("faster", True)
    assert (broken["tok_per_sec"], broken["verdict"]) == (None, None)
    assert broken["error"] == "failed: out of memory: lower --batch-size"
    assert last["factor"] == pytest.approx(5 / 800)  # over the nearest that has figures
    assert last["published_factor_baseline"] is None
    assert (last["precision"], last["share_of_peak"]) == (None, None)  # an old record
    assert (last["verdict"], last["speed_is_average"]) == ("no verdict", True)

    lines = text.splitlines()
    assert len({line.count(" | ") for line in lines[:7]}) == 1
    assert "7.66 (2.50) | 7.88 (5.00)" in lines[4]
    assert "failed: out of memory" in lines[5]
    assert "the first row's losses over 5 seeds, 0.1875" in text
    assert "without torch.compile" in text and "`--dropout 0`" in text
    assert "technique's factor" not in text


def test_several_ranks(tmp_path):
    """The loss after as many tokens on each, and the share of all GPUs' peak."""
    plan = make_plan(tmp_path, "00_orig", "02", tokens=1000)
    plan.runs[1].processes = 4
    config = dict(world_size=4)
    results = [write_record(plan.path.parent, name, config=config) for name in ("00_orig", "02")]
    (_, row), _, text = rows_of(plan, results)
    assert row["val_loss"] == 8.0  # at 4,096, of steps of 4,096 tokens
    assert row["share_of_peak"] == pytest.approx(100e9 / 4 / 1e12)
    assert "on each GPU" in text


def test_without_a_baseline(tmp_path):
    plan = make_plan(tmp_path, "00_orig", "01-cores", "02-bfloat16")
    folder = plan.path.parent
    results = [write_record(folder, name) for name in ("01-cores", "02-bfloat16")]
    (base, cores, bf16), noise, text = rows_of(plan, results)
    assert (noise, base["tok_per_sec"], cores["factor"]) == (None, None, None)
    assert (bf16["factor"], bf16["factor_baseline"], bf16["within_seed_noise"]) == (1, None, None)
    (folder / results[0]["record"]).unlink()
    (_, cores, bf16), _, _ = rows_of(plan, results)
    assert (cores["rounds"], bf16["factor"]) == (0, None)
    rows_of(plan, [])  # and with nothing at all


def test_leave_one_out(tmp_path):
    plan = make_plan(tmp_path, "01", "without-a", "without-b")
    for run in plan.runs[1:]:
        run.compared_to, run.without_technique = "01", True
    plan.runs[2].error = "conflict: 1 place(s)"
    results = [write_record(plan.path.parent, name, number, speed) for number in range(1, 5)
               for name, speed in (("01", 800.0), ("without-a", 400.0))]
    rows, _, text = rows_of(plan, results)
    assert (rows[1]["factor"], rows[1]["factor_technique"]) == (0.5, 2.0)
    assert rows[1]["verdict"] == "faster"  # with the technique
    assert (rows[0]["verdict"], rows[2]["factor_technique"]) == (None, None)
    lines = text.splitlines()
    assert len({line.count(" | ") for line in lines[:5]}) == 1
    assert "| technique's factor |" in lines[0] and "| factor" not in lines[0]
    assert "| conflict: 1 place(s) |" in text


def test_markdown():
    columns = {"a|b": lambda row: row["text"], "n": lambda row: tables.show(row["n"], ".1f")}
    rows = [dict(text="x | y", n=2), dict(text="", n=None)]
    assert tables.markdown(columns, rows, ["a|b"]) == (
        "| a\\|b | n |\n| :-- | --: |\n| x \\| y | 2.0 |\n|  | n/a |\n"
    )


@pytest.mark.parametrize(("new", "old", "says"), [
    ([2, 2, 2, 2], [3, 3, 3, 3], "less"), ([3, 3, 3, 3], [2, 2, 2, 2], "more"),
    ([2, 3, 2, 3], [3, 3, 3, 3], "no measurable change"), ([2, 2], [3, 3], "no verdict"),
    ([None, 2, 2, 2], [3, 3, 3, 3], "no verdict"),
])
def test_memory_verdict(new, old, says):
    assert statistics.memory_verdict(new, old) == says


def test_alternatives_have_a_memory_verdict(tmp_path):
    plan = make_plan(tmp_path, "base", "other")
    results = [write_record(plan.path.parent, name, number, reserved_gb=gb)
               for name, gb in (("base", 2.0), ("other", 1.0)) for number in range(1, 5)]
    rows, _, text = rows_of(plan, results)
    assert (rows[1]["memory_factor"], rows[1]["memory_verdict"]) == (0.5, "less")
    assert rows[0]["memory_factor"] is None
    assert "| less |" in text and "| 0.50 |" in text
