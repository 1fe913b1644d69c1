"""What a run of each of the three scripts prints and leaves."""

import hashlib
import os
import re
import shutil
from collections import Counter
from dataclasses import fields
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import (
    ONE_RANK,
    ROOT,
    STAGES,
    Bench,
    call_main,
    environment,
    run_python,
    write_tokens,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.analysis.training import Training
from bench.measure.records import read_record

LINE = re.compile(
    r"Ep (\d+), Step (\d{6}), Train: (\d+\.\d{3}), Val: (\d+\.\d{3}),"
    r" Step tok/sec: (\d+), Avg tok/sec: (\d+)"
)
START = {"event", "schema", "stage", "time", "config", "data", "environment", "source_sha256"}
EPOCH = {"event", "epoch", "reserved_gb", "peak_reserved_gb", "sample"}
END = {
    "event",
    "status",
    "error",
    "avg_tok_per_sec",
    "reserved_gb",
    "peak_reserved_gb",
    "attention_backend",
}
LOG = {
    "event",
    "epoch",
    "step",
    "tokens",
    "train_loss",
    "val_loss",
    "step_tok_per_sec",
    "avg_tok_per_sec",
    "seconds",
}


@pytest.fixture(
    scope="module", params=[*STAGES[:2], pytest.param(STAGES[2], marks=pytest.mark.slow)]
)
def done(request, tmp_path_factory, stages) -> SimpleNamespace:
    """A run of each script that has come to its end, after 6 steps; of 02 one with two ranks, whose
    limit counts the tokens of both."""
    stage, bench = request.param, Bench(tmp_path_factory.mktemp("run"), stages)
    if stage == STAGES[2]:
        ranks, source = 2, bench.program(stage)
        result = bench.run(stage, "--max-tokens", 330, "--eval-freq", 2)
    else:
        ranks, source = 1, ROOT / f"{stage}.py"
        result = bench.main(stage, "--max-steps", 6, "--eval-freq", 2)
    assert result.returncode == 0, result.stderr
    start, *logs, epoch, end = bench.record()  # one record, whatever the number of ranks
    return SimpleNamespace(
        stage=stage,
        is_optimized=stage != STAGES[0],
        ranks=ranks,
        tokens_per_step=2 * 16 * ranks,
        source=source,
        bench=bench,
        out=result.stdout,
        err=result.stderr,
        start=start,
        config=start["config"],
        logs=logs,
        seconds=[log["seconds"] for log in logs],
        epoch=epoch,
        end=end,
    )


@pytest.mark.parametrize(
    "form",
    [
        r"^PyTorch version: \S+$",
        r"^Device: cpu \(.+\)$",
        rf"^CUDA version: {re.escape(torch.version.cuda or 'n/a')}$",
        r"^Model: cpu-demo, [\d,]+ parameters$",
        r"^Record: .+\.jsonl$",
        r"^\d+ steps per epoch, 6 in all$",
        r"^Every effort moves you",
        r"^Reserved memory: \d+\.\d{4} GB$",
    ],
)
def test_a_run_prints_once(done, form):
    assert len(re.findall(form, done.out, re.MULTILINE)) == 1


def test_no_compile_is_silent(done):
    assert "torch.compile" not in done.out + done.err


def test_a_line_of_figures_has_the_published_form(done):
    lines = LINE.findall(done.out)
    assert len(lines) == done.out.count("Step tok/sec: ") == len(done.logs)
    for line, log in zip(lines, done.logs, strict=True):
        assert line == (
            str(log["epoch"]),
            f"{log['step']:06d}",
            f"{log['train_loss']:.3f}",
            f"{log['val_loss']:.3f}",
            f"{log['step_tok_per_sec']:.0f}",
            f"{log['avg_tok_per_sec'] or 0:.0f}",
        )


def test_lines_are_eval_freq_steps_apart(done):
    """And one is at the end. The tokens are those of all ranks."""
    assert [log["step"] for log in done.logs] == [0, 2, 4, 5]
    assert [log["tokens"] for log in done.logs] == [
        steps * done.tokens_per_step for steps in (1, 3, 5, 6)
    ]
    assert [len(seconds) for seconds in done.seconds] == [1, 2, 2, 1]
    assert min(min(seconds) for seconds in done.seconds) > 0


def test_the_average_leaves_out_the_first_step(done):
    (_, *counted) = [second for interval in done.seconds for second in interval]
    average = done.tokens_per_step * len(counted) / sum(counted)
    assert done.logs[-1]["avg_tok_per_sec"] == pytest.approx(average)
    assert done.end["avg_tok_per_sec"] == done.logs[-1]["avg_tok_per_sec"]


def test_the_median_leaves_out_two_steps_of_warm_up(done):
    seconds = [second for interval in done.seconds for second in interval]
    rates = [done.tokens_per_step / second for second in seconds[2:]]
    assert done.out.rstrip().endswith(f"\nMedian step tok/sec: {np.median(rates):.0f}")


def test_every_event_has_its_fields(done):
    assert done.start.keys() == START
    assert all(log.keys() == LOG and log["event"] == "log" for log in done.logs)
    assert done.epoch.keys() == EPOCH
    assert done.end.keys() == END


def test_the_start_says_what_was_run_on_what(done):
    start, environment = done.start, done.start["environment"]
    assert (start["schema"], start["stage"]) == (3, done.stage)
    assert start["source_sha256"] == hashlib.sha256(done.source.read_bytes()).hexdigest()
    assert (start["data"]["corpus"], start["data"]["tokenizer"]) == ("alphabet", "bytes")
    assert environment.keys() == {"torch", "cpu", "threads", "gpu"}
    assert environment["torch"] == torch.__version__
    # torchrun gives each rank one thread, and 02 its share of the cores.
    assert environment["threads"] == (max(1, os.cpu_count() // 2) if done.ranks == 2 else 1)


def test_no_path_of_this_machine_is_recorded(done):
    assert str(done.bench.folder) not in str(done.start)


def test_the_start_has_all_settings(done):
    settings = {setting.name for setting in fields(done.bench.stages[done.stage].Config)}
    of_the_model = {"parameters", "flops_per_token", "world_size", "dtype", "matmul_precision"}
    assert done.config.keys() == (settings | of_the_model) - {"data", "results_dir"}
    expected = dict(
        model="cpu-demo",
        name=done.stage,
        device="cpu",
        world_size=done.ranks,
        batch_size=2,
        context_length=16,
        eval_freq=2,
        eval_windows=2,
        dtype="float32",
    )
    if done.is_optimized:
        expected |= dict(vocab_size=50_304, matmul_precision="high")
        expected |= dict(compile=False, dtype_reason="by --dtype")
    else:
        expected |= dict(vocab_size=50_257, matmul_precision="highest")
    assert done.config | expected == done.config


def test_an_epoch_has_a_sample_and_the_memory_that_is_printed(done):
    assert done.epoch["sample"].startswith("Every effort moves you")
    assert f"Reserved memory: {done.epoch['reserved_gb']:.4f} GB" in done.out


def test_the_end_says_how_it_came(done):
    assert (done.end["status"], done.end["error"]) == ("complete", None)
    kernel = "flash_attention" if done.is_optimized else "manual"
    assert done.end["attention_backend"] == kernel


class HandClock(SimpleNamespace):
    """Stands in for the module `time`, and moves only when it is told to."""

    def __init__(self):
        super().__init__(now=100.0)

    def __getattr__(self, name):
        return getattr(__import__("time"), name)

    def perf_counter(self):
        return self.now

    def during(self, function, seconds):
        """`function`, which takes the next of `seconds`."""

        def slow(*arguments):
            self.now += next(seconds)
            return function(*arguments)

        return slow


@pytest.mark.parametrize(
    "stage",
    [pytest.param(stage, marks=[pytest.mark.slow] * (stage != STAGES[1])) for stage in STAGES],
)
def test_figures_are_exact_and_of_training_alone(stage, bench, monkeypatch):
    """Two epochs of eight steps of 1 to 16 seconds, between evaluations and samples of an hour."""
    script, clock = bench.stages[stage], HandClock()
    monkeypatch.setattr(script, "time", clock)
    for name, seconds in (
        ("compute_loss", range(1, 17)),
        ("evaluate", [3600] * 10),
        ("sample", [3600] * 2),
    ):
        function = clock.during(getattr(script, name), iter(seconds))
        monkeypatch.setattr(script, name, function)
    result = bench.main(stage, "--batch-size", 15, "--epochs", 2, "--eval-freq", 5)
    assert result.returncode == 0, result.stderr
    logs = [event for event in bench.record() if event["event"] == "log"]
    (path,) = bench.results.iterdir()
    record = read_record(path)  # as the tools see it
    # 124 windows make 8 steps an epoch. A line after step 0, every 5 steps, and at an epoch's end.
    assert [(log["epoch"], log["step"]) for log in logs] == [
        (1, 0),
        (1, 5),
        (1, 7),
        (2, 10),
        (2, 15),
    ]
    assert result.stdout.count("Every effort moves you") == 2
    tokens = 15 * 16
    assert [log["seconds"] for log in logs] == [
        [1],
        [2, 3, 4, 5, 6],
        [7, 8],
        [9, 10, 11],
        [12, 13, 14, 15, 16],
    ]
    assert [log["step_tok_per_sec"] for log in logs] == pytest.approx(
        [tokens, 5 * tokens / 20, 2 * tokens / 15, 3 * tokens / 30, 5 * tokens / 70]
    )
    assert [log["avg_tok_per_sec"] or 0 for log in logs] == pytest.approx(
        [0, 5 * tokens / 20, 7 * tokens / 35, 10 * tokens / 65, 15 * tokens / 135]
    )
    assert record.first_step_seconds == 1
    assert clock.now == 100 + 136 + 12 * 3600  # two evaluations a line, a sample an epoch
    low, middle, high = np.percentile([tokens / seconds for seconds in range(3, 17)], [25, 50, 75])
    assert Training(record).quartiles == pytest.approx((low, middle, high))
    assert f"Median step tok/sec: {middle:.0f}\n" in result.stdout


@pytest.mark.slow
def test_ranks_agree(bench):
    """None compiles where one can't; memory is that of the rank with the most, unlike rank 0."""
    script = bench.program("02_opt_multi_gpu_ddp")
    stand_ins = (
        "def can_compile(config):\n    return dist.get_rank() == 0\n\n\n"
        "def memory_gb(device):\n"
        '    rank = int(os.environ["RANK"])\n'
        "    return dict(reserved_gb=None if rank else 2.0, peak_reserved_gb=3.0 + rank)\n\n\n"
    )
    script.write_text(script.read_text().replace("class Run:", f"{stand_ins}class Run:"))
    result = run_python(
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        script,
        *bench.options("02_opt_multi_gpu_ddp", "--max-steps", 2, "--compile"),
    )
    assert result.returncode == 0, result.stderr
    start, *_, epoch, end = bench.record()
    assert start["config"]["compile"] is False
    assert "Training without torch.compile, which doesn't work on another rank\n" in result.stdout
    for event in (epoch, end):
        assert (event["reserved_gb"], event["peak_reserved_gb"]) == (2.0, 4.0)


def test_a_step_takes_what_it_takes_the_mean_rank(bench, monkeypatch):
    script, rows = bench.stages["02_opt_multi_gpu_ddp"], []
    monkeypatch.setattr(script, "sum_over_ranks", lambda mine: [a + 3 for a in mine])
    run = script.Run()
    run.config = script.Config(batch_size=2, context_length=16, world_size=2)
    run.write = lambda event, **figures: rows.append(figures)
    monkeypatch.setattr(script, "dist", mock.Mock(get_world_size=lambda: 2))
    run.log(1, 1, script.mean_over_ranks([1.0, 5.0, 3.0]), 2.0, 2.0)
    assert rows[0]["seconds"] == [2.0, 4.0, 3.0]
    assert run.seconds == [2.0, 4.0, 3.0]
    assert rows[0]["tokens"] == 128 and rows[0]["step_tok_per_sec"] == 64 / 3


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="Apple's GPU would be taken")
def test_without_options(bench, monkeypatch):
    """Where there is no GPU it trains the small model, and says so."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, value in ONE_RANK.items():
        monkeypatch.setenv(name, value)
    for stage in STAGES:
        script = bench.stages[stage]
        config = script.configure({})
        demo = dict(
            model="cpu-demo",
            layers=4,
            heads=4,
            width=256,
            context_length=256,
            dropout=0.0,
            batch_size=2 if stage == "00_orig" else 8,
            eval_windows=16,
            max_tokens=40_960,
            max_steps=None,
            epochs=15,
            device=torch.device("cpu"),
        )
        assert vars(config) | demo == vars(config)
    folders = ["--data", bench.data, "--results-dir", bench.results]
    result = call_main(bench.stages["00_orig"], *folders, "--max-steps", 1, "--context-length", 8)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(
        "No NVIDIA GPU: training the small cpu-demo model (--model gpt2 for GPT-2 124M)\n"
    )
    assert bench.record()[0]["config"]["max_tokens"] is None  # the user has said how long


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables",
    [dict(TORCH_COMPILE_DISABLE="1"), dict(TORCHDYNAMO_SUPPRESS_ERRORS="1", CXX="/none")],
)
def test_without_a_compiler(bench, tmp_path, variables):
    """The record never says that a run was compiled which wasn't."""
    env = environment(TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"), **variables)
    result = bench.run("01_opt_single_gpu", "--compile", "--max-steps", 1, env=env)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Training without torch.compile; ") == 1
    start, *_, end = bench.record()
    assert (start["config"]["compile"], end["status"]) == (False, "complete")


@pytest.mark.parametrize(("options", "compiled"), [([], False), (["--compile"], True)])
def test_mps_is_not_compiled_for_by_default(stages, monkeypatch, capsys, options, compiled):
    """Where PyTorch's compiled GPT gives NaN."""
    script, ones = stages["01_opt_single_gpu"], torch.ones
    monkeypatch.setattr(torch, "ones", lambda *size, device: ones(*size))
    config = script.configure(script.read_options(["--device", "mps", *options]))
    assert config.compile is compiled
    assert capsys.readouterr().out.count("Training without torch.compile") == (not compiled)


@pytest.fixture
def copy(bench):
    """A function: a script beside data/prepare.py in a folder without tokens."""

    def copy(stage: str):
        (bench.folder / "data").rename(bench.folder / "unused")
        (bench.folder / "data").mkdir()
        shutil.copy(ROOT / "data" / "prepare.py", bench.folder / "data")
        return bench.program(stage)

    return copy


@pytest.mark.slow
@pytest.mark.parametrize("stage", [STAGES[0], STAGES[2]])
def test_the_first_command(copy, tmp_path, stage):
    """Without tokens in its default folder a script makes them; of several ranks, one does."""
    script = copy(stage)
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    launcher, off = (ranks, ["--no-compile"]) if stage == STAGES[2] else ([], [])
    result = run_python(
        *launcher, script, "--device", "cpu", "--max-steps", 1, "--eval-windows", 1, *off
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(f"No tokens in {tmp_path}/data: running data/prepare.py\n") == 1
    assert result.stdout.count("the tokens are bytes") == 1  # it ran once, without a network
    assert len([*(tmp_path / "results").iterdir()]) == 1


def test_the_first_command_where_no_text_can_be_had(copy, tmp_path):
    script, folder = copy("00_orig"), tmp_path / "data"
    (folder / "prepare.py").write_text("import sys; sys.exit('error: no text')")
    result = run_python(script)
    assert result.returncode == 1
    says = f"error: no tokens in {folder}: run `python data/prepare.py --out {folder}`"
    assert result.stderr.splitlines() == ["error: no text", says]
    (folder / "prepare.py").unlink()  # copied without it
    assert run_python(script).stderr.splitlines() == [says]


def test_of_several_machines_each_prepares_what_it_lacks(bench, tmp_path, monkeypatch):
    """Rank 0 first; after a barrier the first rank of each machine that still sees no tokens."""
    script, order, home = bench.stages["02_opt_multi_gpu_ddp"], [], tmp_path / "home"
    monkeypatch.setattr(script, "HERE", home)
    monkeypatch.setattr(script.Config, "data", str(home / "data"))
    monkeypatch.setattr(script.subprocess, "run", lambda command: order.append("prepare"))
    (home / "data").mkdir(parents=True)
    (home / "data" / "prepare.py").touch()
    for rank, local_rank, expected in (
        (0, 0, ["prepare", "barrier", "barrier"]),
        (1, 1, ["barrier", "barrier"]),
        (4, 0, ["barrier", "prepare", "barrier"]),
    ):
        ranks = SimpleNamespace(
            barrier=lambda: order.append("barrier"), get_rank=lambda rank=rank: rank
        )
        monkeypatch.setattr(script, "dist", ranks)
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        config = script.Config(data=script.Config.data)
        script.prepare_data_on_machines(config)
        assert order == expected
        with pytest.raises(script.UserError, match="no tokens in"):
            script.load_data(config)
        order.clear()
    write_tokens(home / "data")  # a disk that all share: rank 4 doesn't prepare again
    config.context_length = 16
    script.prepare_data_on_machines(config)
    script.load_data(config)
    assert order == ["barrier", "barrier"]


# Windows and ranks, by property: for every length of text, context, batch and world.

SIZES = dict(tokens=st.integers(2, 600), context=st.integers(1, 40))
QUICK = settings(max_examples=150, deadline=None, derandomize=True)


@QUICK
@given(**SIZES)
def test_windows(stages, tokens, context):
    """They cover the text from its first token on without a gap or an overlap, and what is left
    over is shorter than one; each target is the next token."""
    text = np.arange(tokens, dtype="<u2")
    windows = stages["00_orig"].TokenWindows(text, context)
    pairs = [windows[i] for i in range(len(windows))]
    covered = [token for x_T, _ in pairs for token in x_T.tolist()]
    assert covered == list(range(len(windows) * context))
    assert all((y_T - x_T).tolist() == [1] * context for x_T, y_T in pairs)
    assert tokens - 1 - len(covered) < context


def steps_of(script, windows, batch: int, seed: int, rank: int = 0, ranks: int = 1) -> list:
    """The first token of each window in each batch of a rank, as train() orders them."""
    steps = []
    config = SimpleNamespace(
        batch_size=batch,
        world_size=ranks,
        compile=False,
        seed=seed,
        epochs=1,
        max_tokens=None,
        max_steps=None,
        tokens_per_step=1,
        eval_freq=10**6,
        target_loss=0,
        device=torch.device("cpu"),
    )
    replaced = dict(
        evaluate=lambda *_: 1.0,
        sample=lambda *_: "",
        make_optimizer=mock.Mock(),
        now=lambda _: 0.0,
        prepare_model=lambda model, config: model,
        backward_and_update=lambda *_: None,
        compute_loss=lambda model, x_BT, y_BT: steps.append(x_BT[:, 0].tolist()),
    )
    run, ranks_meet = mock.Mock(), mock.Mock()
    if hasattr(script, "dist"):
        replaced["dist"] = mock.Mock(barrier=ranks_meet, get_rank=lambda: rank)
        replaced["mean_over_ranks"] = lambda seconds: seconds
    with mock.patch.multiple(script, **replaced):
        script.train(
            None,
            SimpleNamespace(train=windows, val=windows, tokenizer=None),
            config,
            run,
        )
    if hasattr(script, "dist"):  # then ranks start the clock together, also after each evaluation
        assert ranks_meet.call_count == 1 + run.log.call_count
    return steps


@QUICK
@given(**SIZES, batch=st.integers(1, 9), seed=st.integers(0, 2**31), ranks=st.integers(1, 6))
def test_ranks(stages, tokens, context, batch, seed, ranks):
    """No rank sees another's window, unless an epoch passes over a short text more often so that it
    has 8 steps; and each step's windows are those of one process with all ranks' batches."""
    script = stages["02_opt_multi_gpu_ddp"]
    windows = script.TokenWindows(np.arange(tokens, dtype="<u2"), context)
    if len(windows) < batch:  # the script refuses so short a text
        return
    by_rank = [steps_of(script, windows, batch, seed, rank, ranks) for rank in range(ranks)]
    steps = [sorted(sum(parts, [])) for parts in zip(*by_rank, strict=True)]
    alone = steps_of(script, windows, batch * ranks, seed)
    assert len(steps) >= 8 and steps == [sorted(step) for step in alone]
    times = Counter(sum(steps, []))
    passes = -(-8 * batch * ranks // len(windows))
    assert max(times.values()) <= passes and set(times) <= set(
        range(0, len(windows) * context, context)
    )
    # The first steps that are of one pass alone have no window twice.
    first = len(windows) // (batch * ranks)
    assert all(len({*step}) == batch * ranks for step in steps[:first])
