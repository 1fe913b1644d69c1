"""bench/convert.py: what older versions left, read as if it had been measured by this one."""

import json
import sys
from pathlib import Path

import pytest
from made_up import CPU, PEAK, write_record

from bench import convert
from bench.journal import read_journal
from bench.rows import rows_of, seed_noise
from bench.study import all_studies
from bench.tables import text_of

# What rows held beside their names; those of a run without records.
NO_FIGURES = dict(
    rounds=0, speeds=[], tok_per_sec=None, val_loss=None, losses={}, reserved_gb=None,
    share_of_peak=None, factor=None, factor_baseline=None, published_factor=None,
    loss_difference=None, within_seed_noise=None, verdict=None)


def row(name: str, label: str, **figures) -> dict:
    return dict(name=name, label=label, technique="some", loss="rounding", published=None,
                processes=1, error=None, options=[], compared_to=None) | figures


def write_old(results: Path, folder: str, rows: list[dict], runs: list[dict] = (), **plan) -> Path:
    """A plan's state file, with the records beside it."""
    path, found = results / folder, []
    path.mkdir(parents=True, exist_ok=True)
    for run in runs or [dict(name=rows[0]["name"])]:
        name, number, seed, error = (run.pop(key, default) for key, default in (
            ("name", None), ("round", 1), ("seed", 123), ("error", None)))
        record = write_record(path, name, f"2025010{number}T000{seed}Z", seed=seed, **run)
        found.append(dict(name=name, round=number, seed=seed, record=None if error else record.name,
                          error=error, seconds=1.5))
    noise = plan.pop("noise", None)
    plan = dict(name=path.name, machine=CPU, rounds=1, options=[], tokens=4096, seconds=0.0,
                epochs=None, first_seed=123, new_seeds=False, log_tokens=None, targets={}, data="d",
                scripts={run["name"]: "s" for run in found}) | plan
    path /= f"{path.name}.json"
    path.write_text(json.dumps(dict(
        schema=2, time="2025-01-02T03:04:05Z", plan=plan, matmul_peak=PEAK, results=found,
        rows=rows, seed_noise=noise), indent=1))
    return path


def write_ladder(results: Path) -> Path:
    rows = [
        row("00_orig", "0 baseline", published=100.0, **NO_FIGURES | dict(
            rounds=4, speeds=[100, 101, 102, 103], tok_per_sec=101.5, val_loss=8.0,
            losses={"123": 8.0, "124": 8.1875}, reserved_gb=1.25, share_of_peak=0.1015)),
        row("01-broken", "1 broken", published=200.0, compared_to="0 baseline",
            error="failed: out of memory: lower it", **NO_FIGURES | dict(published_factor=2.0)),
        row("02-fast", "2 fast", published=500.0, compared_to="0 baseline", **dict(
            rounds=4, speeds=[406.0] * 4, tok_per_sec=406.0, val_loss=8.25, losses={"123": 8.25},
            reserved_gb=1.25, share_of_peak=0.406, factor=4.0, factor_baseline=4.0,
            published_factor=5.0, loss_difference=0.25, within_seed_noise=False, verdict="faster")),
        row("03-absent", "3 absent", compared_to="2 fast", error="needs two or more GPUs",
            **NO_FIGURES),
    ]
    runs = [dict(name="00_orig", seed=124, loss=8.1875),
            dict(name="01-broken", error="out of memory: lower it")]
    for number in range(1, 5):
        runs += [dict(name="00_orig", round=number, speed=99.0 + number),
                 dict(name="02-fast", round=number, speed=406.0, loss=8.25)]
    return write_old(results, "ladder", rows, runs, rounds=4, seconds=10.0, noise=0.1875,
                     options=["--dropout", "0"])


@pytest.fixture
def run(monkeypatch, capsys):
    """`python -m bench.convert folder`: (exit code, what it prints, its errors)."""
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["convert", *map(str, arguments)])
        return convert.main(), *capsys.readouterr()

    return run


def test_the_same_figures(run, tmp_path):
    old_rows = json.loads(write_ladder(tmp_path).read_text())["rows"]
    code, out, err = run(tmp_path)
    assert (code, err) == (0, "") and out.endswith("ladder.jsonl\n") and out.count("\n") == 1
    (found,) = read_journal(tmp_path / "ladder.jsonl")
    assert (found.study, found.kind, found.time) == ("ladder", "", "20250102T030405Z")
    assert (found.machine, found.matmul_peak, found.options) == (CPU, PEAK, ["--dropout", "0"])
    assert (found.plan.tokens, found.plan.seconds, found.plan.rounds) == (4096, 10, 4)
    assert found.plan.runs[1].error is None  # it may be tried again
    rows = rows_of(found)
    for new, old in zip(rows, old_rows, strict=True):
        for name in {"label", "technique", "published", "error", *NO_FIGURES} - {"losses"}:
            assert getattr(new, name) == old[name], (old["label"], name)
        assert {str(seed): loss for seed, loss in new.losses_by_seed.items()} == old["losses"]
    assert seed_noise(rows[0]) == 0.1875
    text = text_of(all_studies()["ladder"], found)
    assert "| 2 fast | some | 406 | 406–406 | 4.00 (5.00) |" in text
    assert "over 2 seeds, 0.1875" in text and "needs two or more GPUs |" in text


@pytest.mark.parametrize(("folder", "study", "kind", "row", "tags"), [
    ("ladder", "ladder", "", row("05-bfloat16", "5 bfloat16"), dict(rung=5)),
    ("stages", "stages", "", row("01_opt_single_gpu", "01"), dict(stage="01")),
    ("leave-one-out", "leave-one-out", "", row("without-05-bfloat16", "without 5 bfloat16"),
     dict(without="05-bfloat16")),
    ("variants", "variants", "", row("variant-step-accumulation-x-2", "step-accumulation --x 2"),
     dict(variant="step-accumulation")),
    ("compile-modes", "compile-modes", "", row("variant-compile-mode-no-compile", "none"),
     dict(mode="none", variant="compile-mode")),
    ("checkpoints", "checkpoints", "", row("02_opt_multi_gpu_ddp-async", "02, 2 ranks, async",
                                           options=["--checkpoint-every", "4"]),
     dict(every=4, saved="async", stage="02")),
    ("scaling", "scaling", "", row("02_opt_multi_gpu_ddp-400-mbit", "02, 2 hosts", mbit=400.0),
     dict(mbit=400.0, stage="02")),
    ("sweep-batch-00", "sweep", "batch-00", row("00_orig-batch-4", "batch 4", options=[
        "--batch-size", "4"]), dict(batch=4, stage="00")),
    ("sweep-model", "sweep", "model", row("01_opt_single_gpu-gpt2", "gpt2", options=[
        "--model", "gpt2", "--context-length", "128"]),
     dict(model="gpt2", context=128, stage="01")),
    ("sharded-gpt2-medium", "sharded", "gpt2-medium", row("02_opt_multi_gpu_ddp", "02"),
     dict(stage="02")),
    ("search", "search", "", row("00_orig-batch-2-rate-0.001", "00, batch 2", options=[
        "--batch-size", "2", "--learning-rate", "0.001"]), dict(batch=2, rate=0.001, stage="00")),
    ("target", "search", "target", row("00_orig", "00"), dict(stage="00")),
    ("time-to-loss-variants", "time-to-loss", "variants", row("00_orig", "0 x"), dict(rung=0)),
    ("time-to-loss-variants/target", "time-to-loss", "target", row("00_orig", "00"),
     dict(stage="00")),
])
def test_where_it_goes(run, tmp_path, folder, study, kind, row, tags):
    """The study, its kind, and what code decides by."""
    write_old(tmp_path, folder, [row])
    assert run(tmp_path)[0] == 0
    (found,) = read_journal(tmp_path / f"{study}.jsonl")
    assert (found.study, found.kind) == (study, kind)
    (new,) = rows_of(found)
    assert (new.tags, new.run.options, new.tok_per_sec) == (tags, tuple(row["options"]), 100)


def test_a_time_to_a_loss(run, tmp_path):
    """Whole runs with new seeds; what each is compared to was a label."""
    names = dict(a=None, b="label a", c="label b")
    write_old(tmp_path, "time-to-loss",
              [row(name, f"label {name}", compared_to=label) for name, label in names.items()],
              [dict(name=name, round=k, seed=122 + k) for name in names for k in (1, 2)],
              seconds=None, new_seeds=True, rounds=2, log_tokens=4096, targets=dict(published=8.5))
    assert run(tmp_path)[0] == 0
    (found,) = read_journal(tmp_path / "time-to-loss.jsonl")
    assert found.plan.whole and found.plan.targets == dict(published=8.5)
    a, b, c = rows_of(found)
    assert (a.rounds, a.tokens_to(8.5), b.versus, c.versus) == (2, 3328, a, b)


@pytest.mark.parametrize(("folder", "versus"), [("ladder", "b"), ("ddp", "a")])
def test_the_oldest_states(run, tmp_path, folder, versus):
    """They lack the seeds, the targets, and what each run is compared to."""
    rows = [row(name, f"1 {name}") for name in "abc"]
    for each in rows:
        del each["compared_to"], each["options"]
    path = write_old(tmp_path, folder, rows, [dict(name=name) for name in "abc"])
    state = json.loads(path.read_text())
    for name in ("first_seed", "new_seeds", "log_tokens", "targets"):
        del state["plan"][name]
    path.write_text(json.dumps(state))
    assert run(tmp_path)[0] == 0
    *_, c = rows_of(*read_journal(tmp_path / f"{folder}.jsonl"))
    assert c.versus.run.name == versus


@pytest.mark.parametrize("damage", [
    lambda text: "", lambda text: text[:-9], lambda text: "[]", lambda text: "[" * 100_000,
    lambda text: text.replace('"results"', '"other"'), lambda text: text.replace('"seed"', '"x"'),
    lambda text: text.replace('"error": null', '"error": 3'),
    lambda text: json.dumps(json.loads(text) | dict(rows=[])),  # unfinished
])
def test_damaged_or_unfinished(run, tmp_path, damage):
    """It is told in one line, nothing is written of it, and the others are converted."""
    path = write_ladder(tmp_path)
    path.write_text(damage(path.read_text()))
    write_old(tmp_path, "stages", [row("a", "a")])
    code, _, err = run(tmp_path)
    assert code == 1 and "ladder.json: not converted: " in err and err.count("\n") == 1
    assert [path.name for path in tmp_path.glob("*.jsonl")] == ["stages.jsonl"]


def test_a_record_that_was_cut_off(run, tmp_path):
    """That run failed as it did, and those after it are read."""
    rows = [row("a", "a", error="failed: ended by signal 9"), row("b", "b")]
    path = write_old(tmp_path, "ddp", rows, [dict(name="a"), dict(name="b")])
    state = json.loads(path.read_text())
    state["results"][0]["error"] = "ended by signal 9"
    path.write_text(json.dumps(state))
    record = path.with_name(state["results"][0]["record"])
    record.write_bytes(record.read_bytes()[:-9])
    assert run(tmp_path)[0] == 0
    a, b = rows_of(*read_journal(tmp_path / "ddp.jsonl"))
    assert (a.tried, a.error, b.tok_per_sec) == (True, "failed: ended by signal 9", 100)


def test_again(run, tmp_path, capsys):
    """Nothing is doubled; what was damaged and isn't any more comes to the rest."""
    for folder in ("time-to-loss-variants/target", "time-to-loss-variants", "time-to-loss"):
        path = write_old(tmp_path, folder, [row("a", "a")])
    journal, text = tmp_path / "time-to-loss.jsonl", path.read_text()
    path.write_text(text[:-9])
    convert.tell_old_form(tmp_path)
    assert "(time-to-loss)" in capsys.readouterr().out
    assert run(tmp_path)[0] == 1
    assert [each.kind for each in read_journal(journal)] == ["variants", "target"]
    path.write_text(text)
    assert run(tmp_path)[0] == 0
    assert [each.kind for each in read_journal(journal)] == ["variants", "target", ""]
    whole = journal.read_bytes()
    convert.tell_old_form(tmp_path)
    assert run(tmp_path) == (0, "", "") and journal.read_bytes() == whole


def test_what_is_no_state_is_left_alone(run, tmp_path):
    write_old(tmp_path, "profile", [row("a", "a")])
    write_old(tmp_path, "ddp", [row("a", "a")]).rename(tmp_path / "ddp" / "ddp-2025.json")
    assert run(tmp_path) == (0, "", "") and not list(tmp_path.glob("*.jsonl"))


def test_usage(run):
    code, out, err = run("no folder")
    assert (code, out) == (2, "") and "python -m bench.convert results" in err
