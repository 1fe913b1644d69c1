"""What a run prints and leaves, in all three stages."""

import hashlib
import math
import re
from pathlib import Path

import pytest
from conftest import ROOT, STAGES, environment, run_python

LINE = re.compile(
    r"Ep (\d+), Step (\d{6}), Train: (\d+\.\d{3}), Val: (\d+\.\d{3}),"
    r" Step tok/sec: (\d+), Avg tok/sec: (\d+)"
)
END = {
    "event", "status", "error", "avg_tok_per_sec", "median_step_tok_per_sec",
    "p25_step_tok_per_sec", "p75_step_tok_per_sec", "first_step_seconds", "train_seconds",
    "wall_seconds", "reserved_gb", "peak_reserved_gb", "val_loss", "mfu", "attention_backend",
}


def options(stage: str, *more) -> list:
    return [*more, *(["--no-compile"] if stage != "00_orig" else [])]


@pytest.mark.parametrize("stage", STAGES)
def test_output_and_record(stage, bench):
    result = bench.run(stage, *options(stage, "--max-steps", 6, "--eval-freq", 2))
    assert result.returncode == 0, result.stderr
    ranks = 2 if stage.startswith("02") else 1
    out = result.stdout
    for form in (r"^PyTorch version: \S+$", r"^Device: cpu \(.+\)$", r"^CUDA version: n/a$",
                 r"^Allocated memory: \d+\.\d{4} GB$", r"^Reserved memory: \d+\.\d{4} GB$",
                 r"^Every effort moves you", r"^Median step tok/sec: \d+, MFU: n/a$"):
        assert len(re.findall(form, out, re.M)) == 1, form
    lines = LINE.findall(out)
    assert len(lines) == out.count("Step tok/sec: ") == 4  # nothing but the published form

    start, *logs, epoch, end = bench.record()  # one record, whatever the number of ranks
    assert [log["event"] for log in logs] == ["log"] * 4
    assert [log["step"] for log in logs] == [0, 2, 4, 5]
    assert [log["tokens"] for log in logs] == [(log["step"] + 1) * 2 * 16 * ranks for log in logs]
    for line, log in zip(lines, logs, strict=True):
        assert line == (
            str(log["epoch"]), f"{log['step']:06d}", f"{log['train_loss']:.3f}",
            f"{log['val_loss']:.3f}", f"{log['step_tok_per_sec']:.0f}",
            f"{log['avg_tok_per_sec'] or 0:.0f}",
        )
    seconds = [log["train_seconds"] for log in logs]
    assert seconds == sorted(seconds) and seconds[-1] == end["train_seconds"] < end["wall_seconds"]
    if ranks == 1:  # the average leaves out the first interval, and only that
        expected = (logs[-1]["tokens"] - logs[0]["tokens"]) / (seconds[-1] - seconds[0])
        assert math.isclose(logs[-1]["avg_tok_per_sec"], expected)
        assert math.isclose(end["first_step_seconds"], seconds[0])

    source = ROOT / f"{stage}.py"
    assert start["event"] == "start" and start["schema"] == 1 and start["stage"] == stage
    assert start["source_sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert start["config"]["world_size"] == ranks and start["config"]["batch_size"] == 2
    assert start["config"]["vocab_size"] == (50_257 if stage == "00_orig" else 50_304)
    assert start["data"]["corpus"] == "alphabet" and start["data"]["tokenizer"] == "bytes"
    assert {"torch", "python", "os", "cpu", "threads", "gpu", "driver", "capability"} == set(
        start["environment"]
    )
    assert not any(Path(argument).is_absolute() for argument in start["argv"])
    assert end.keys() == END and end["status"] == "complete" and end["error"] is None
    assert end["avg_tok_per_sec"] == logs[-1]["avg_tok_per_sec"]
    assert end["p25_step_tok_per_sec"] <= end["median_step_tok_per_sec"]
    assert end["median_step_tok_per_sec"] <= end["p75_step_tok_per_sec"]
    assert end["val_loss"] == logs[-1]["val_loss"] and end["mfu"] is None
    assert end["attention_backend"] == ("manual" if stage == "00_orig" else "flash_attention")
    assert f"Reserved memory: {epoch['reserved_gb']:.4f} GB" in out


def test_steps_and_epochs(bench):
    """After step 0, every eval_freq steps and the last of each epoch; the first limit ends it."""
    result = bench.run("00_orig", "--batch-size", 25, "--epochs", 2, "--eval-freq", 3)
    logs = [event for event in bench.record() if event["event"] == "log"]
    # 124 windows make 4 steps an epoch.
    assert [(log["epoch"], log["step"]) for log in logs] == [(1, 0), (1, 3), (2, 6), (2, 7)]
    assert result.stdout.count("Every effort moves you") == 2
    assert bench.record()[-1]["median_step_tok_per_sec"] is not None


def test_max_tokens_counts_all_ranks(bench):
    bench.run("02_opt_multi_gpu_ddp", "--no-compile", "--max-tokens", 130)
    assert [e["tokens"] for e in bench.record() if e["event"] == "log"] == [64, 192]
    assert bench.record()[-1]["median_step_tok_per_sec"] is None  # fewer than three steps


SLOW_EVALUATION = """
import sys, time
sys.path.insert(0, {tests!r})
from conftest import load
from pathlib import Path
script = load(Path(sys.argv[1]))
evaluate = script.evaluate
script.evaluate = lambda *arguments: (time.sleep(0.5), evaluate(*arguments))[1]
sys.argv = sys.argv[1:]
sys.exit(script.main())
"""


@pytest.mark.parametrize("stage", ["00_orig", "01_opt_single_gpu"])
def test_clock_stands_during_evaluation(stage, bench):
    command = bench.command(stage, *options(stage, "--max-steps", 4, "--eval-freq", 1))
    result = run_python("-c", SLOW_EVALUATION.format(tests=str(ROOT / "tests")), *command)
    assert result.returncode == 0, result.stderr
    end = bench.record()[-1]
    assert end["train_seconds"] <= end["wall_seconds"] - 4 * 2 * 0.5


def test_compiled_run(bench):
    """With a compiler it compiles; without one it says what is missing and trains all the same."""
    result = bench.run("01_opt_single_gpu", "--max-steps", 2)
    assert result.returncode == 0, result.stderr
    said = "Training without torch.compile: it needs" in result.stdout
    assert bench.record()[0]["config"]["compile"] is not said


def test_without_a_compiler(bench, tmp_path):
    env = environment(CXX=str(tmp_path / "none"), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    result = bench.run("01_opt_single_gpu", "--max-steps", 2, env=env)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Training without torch.compile: it needs a C++ compiler") == 1
    assert bench.record()[0]["config"]["compile"] is False
    assert bench.record()[-1]["status"] == "complete"


def test_no_compile_is_silent(bench):
    result = bench.run("01_opt_single_gpu", "--no-compile", "--max-steps", 1)
    assert "torch.compile" not in result.stdout + result.stderr
    assert bench.record()[0]["config"]["compile"] is False


def test_names_and_settings_reach_the_record(bench):
    bench.run("00_orig", "--name", "rung", "--max-steps", 1, "--seed", 5, "--learning-rate", 0.01,
              "--weight-decay", 0, "--dropout", 0.5, "--epochs", 3, cwd=bench.data)
    start = bench.record()[0]
    given = dict(seed=5, learning_rate=0.01, weight_decay=0, dropout=0.5, epochs=3, max_steps=1)
    assert start["stage"] == "rung" and start["config"] | given == start["config"]
    (path,) = bench.results.iterdir()
    assert re.fullmatch(r"rung-cpu-\d{8}T\d{6}Z-\d+\.jsonl", path.name)


@pytest.mark.parametrize("stage", STAGES)
def test_help_explains_every_option(stage):
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node=1"] if stage[1] == "2" else []
    out = run_python(*launcher, ROOT / f"{stage}.py", "--help").stdout
    for option in ("data", "model", "context-length", "batch-size", "epochs", "max-steps",
                   "max-tokens", "eval-freq", "eval-windows", "learning-rate", "weight-decay",
                   "dropout", "seed", "device", "results-dir", "name"):
        assert re.search(rf"^  --{option} \S+\s+\S", out, re.M), option
    assert ("--no-compile" in out) is (stage != "00_orig")


def test_same_seed_same_losses(bench, tmp_path):
    losses = []
    for seed in (1, 1, 2):
        bench.results = tmp_path / str(len(losses))
        bench.run("00_orig", "--max-steps", 2, "--seed", seed)
        losses.append(bench.record()[-1]["val_loss"])
    assert losses[0] == losses[1] != losses[2]
