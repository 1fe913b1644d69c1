"""measure.py: the command, with real runs on tiny data."""

import json
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT, environment, run_python, write_tokens
from made_up import CPU

import measure
from bench import plans, processes

# Batches of 4 windows, and of 8 from the rung "batch size" on.
TINY = "--model cpu-demo --context-length 16 --eval-windows 2".split()


@pytest.fixture
def tree(tmp_path) -> SimpleNamespace:
    """A copy of the repository, and commands there."""
    folder = tmp_path / "tree"
    (folder / "results" / "reference").mkdir(parents=True)
    for script in (*ROOT.glob("0?_*.py"), ROOT / "measure.py"):
        shutil.copy(script, folder)
    for part in ("patches", "bench"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    baseline = dict(baseline=dict(tok_per_sec=12_525, reserved_gb=26.2617))
    (folder / "results/reference/published-a100.json").write_text(json.dumps(baseline))
    data = write_tokens(tmp_path / "data", train=16 * 6 + 1)  # 6 windows: a batch of 4, none of 8
    # One thread: more only get in each other's way at this size.
    env = environment(OMP_NUM_THREADS="1")

    def command(name, *options) -> list[str]:
        options = [name, "--max-tokens", 128, "--data", data, *options]
        return [sys.executable, "measure.py", *map(str, options)]

    def run(name, *options, code=0):
        result = run_python(*command(name, *options)[1:], cwd=folder, env=env)
        assert result.returncode == code, result.stderr
        assert "Traceback" not in result.stderr
        return result

    def state(name) -> dict:
        return json.loads((folder / "results" / name / f"{name}.json").read_text())

    return SimpleNamespace(folder=folder, command=command, run=run, state=state, env=env)


def test_ladder(tree):
    """Interrupted, taken up, with a run that fails."""
    options = ("--rungs", "0,1,10", "--rounds", "1")
    child = subprocess.Popen(tree.command("ladder", *options, "--", *TINY), cwd=tree.folder,
                             env=tree.env, text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE)
    while "round 1: 00_orig: " not in child.stdout.readline():
        assert child.poll() is None, child.stderr.read()
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=120)
    assert child.returncode == 130
    assert "interrupted: python measure.py ladder --resume --max-tokens 128 " in err
    (first,) = tree.state("ladder")["results"]
    assert (first["name"], first["round"], first["seed"]) == ("00_orig", 1, 123)

    result = tree.run("ladder", *options, "--resume", "--", *TINY, code=1)  # the failed run
    state = tree.state("ladder")
    assert state["results"][0] == first
    assert [(run["name"], run["seed"]) for run in state["results"][1:]] == [
        ("00_orig", 124), ("01-causal-mask", 123), ("10-batch-size", 123),
    ]
    base, mask, batch = state["rows"]
    assert mask["tok_per_sec"] > 0
    assert mask["loss_difference"] == pytest.approx(0, abs=1e-4)
    assert (mask["within_seed_noise"], mask["verdict"]) == (True, "no verdict")
    assert "the text is too short" in batch["error"]
    assert set(state["matmul_peak"]) == {"float32", "bfloat16"}
    table = (tree.folder / "results" / "ladder" / "ladder.md").read_text(encoding="utf-8")
    assert table in result.stdout
    assert "failed: the text is too short" in table


def test_leave_one_out(tree):
    result = tree.run("leave-one-out", "--rungs", "1,12", "--rounds", "1", "--",
                      *TINY, "--batch-size", "2", "--no-compile")
    state = tree.state("leave-one-out")
    assert len(state["results"]) == 3
    whole, first, last = state["rows"]
    assert first["error"].startswith("conflict: ") and first["tok_per_sec"] is None
    assert last["factor_technique"] > 0 and last["uncompiled"] is True
    table = tree.folder / "results" / "leave-one-out" / "leave-one-out.md"
    assert table.read_text(encoding="utf-8") in result.stdout


def test_time_to_loss(tree):
    result = tree.run("time-to-loss", "--rounds", "1", "--", *TINY, "--batch-size", "2")
    target, state = tree.state("target"), tree.state("time-to-loss")
    assert [(run["name"], run["seed"]) for run in target["results"]] == [
        ("00_orig-batch-2-rate-0.0005", 1), ("00_orig-batch-2-rate-0.0005", 2)]
    assert state["plan"]["targets"] == {"published": target["rows"][0]["lowest_val_loss"]}
    assert state["plan"]["tokens"] == 3 * 128
    assert [(run["name"], run["seed"], run["error"]) for run in state["results"]] == [
        ("00_orig", 123, None), ("01_opt_single_gpu", 123, None)]
    assert all(row["time_to"]["published"]["seconds"] for row in state["rows"])  # it learns
    table = tree.folder / "results" / "time-to-loss" / "time-to-loss.md"
    assert table.read_text(encoding="utf-8") in result.stdout


# What can't work is refused before anything runs


@pytest.mark.parametrize(("argv", "says"), [
    ([], "COMMAND"), (["climb"], "climb"), (["stages", "--rungs", "1"], "--rungs"),
    (["ladder", "--rounds", "0"], "0 is out of range"), (["ladder", "--rounds", "x"], "whole"),
    (["ladder", "--seconds", "-1"], "-1"), (["ladder", "--seconds", "inf"], "out of range"),
    (["ladder", "--max"], "--max"),
])
def test_bad_settings(argv, says, capsys):
    with pytest.raises(SystemExit) as error:
        measure.parse_arguments(argv)
    assert error.value.code == 2
    assert says in capsys.readouterr().err


def test_settings():
    args, options = measure.parse_arguments(["ladder", "--rungs", "0,5-8", "--", "--model", "gpt2"])
    assert (args.rungs, options) == ("0,5-8", ["--model", "gpt2"])
    assert (args.rounds, args.max_tokens, args.seconds, args.resume) == (4, None, None, False)


def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys):
    published = tmp_path / "published.json"
    published.write_text('{"baseline": {"tok_per_sec": 12525}}')
    monkeypatch.setattr(plans, "PUBLISHED", published)
    monkeypatch.setattr(plans, "BUILD", tmp_path / "build")
    monkeypatch.setattr(processes, "ask_machine", lambda question: CPU)
    monkeypatch.setattr(processes, "on_signals", lambda handler: None)
    monkeypatch.setattr(measure.sys.stdout, "reconfigure", lambda **how: None, raising=False)
    results = ["--results-dir", str(tmp_path)]
    for argv, says in (
        (["ladder", "--rungs", "0,8", "--", *TINY, "--no-compile"], "00_orig: unrecognized"),
        (["ladder", "--rungs", "0,1", "--", "--dropout", "x"], "00_orig: argument --dropout"),
        (["ladder", "--rungs", "1", "--", "stray"], "01-causal-mask: unrecognized arguments: str"),
        (["ladder", "--", "--seed", "1"], "--seed is set by measure.py"),
        (["stages", "--", "-h"], "-h is set by measure.py"),
        (["ladder", "--rungs", "99"], "--rungs 99"),
        (["leave-one-out", "--rungs", ""], "--rungs"),
    ):
        monkeypatch.setattr(sys, "argv", ["measure.py", argv[0], *results, *argv[1:]])
        assert measure.main() == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and says in line
    assert [path.name for path in tmp_path.iterdir()] == ["published.json", "build"]
