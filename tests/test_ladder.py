"""ladder.py: its figures and verdicts, and ladders of a few rungs on tiny data."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, environment, load, run_python, write_tokens

ladder = load(ROOT / "ladder.py")

# Batches of 4 windows, and of 8 from the rung "batch size" on.
TINY = "--model cpu-demo --context-length 16 --eval-windows 2".split()


# Figures, from made-up records


def write_record(folder: Path, rung: str, round: int, speed, *, seed=123, loss=8.0, **end) -> dict:
    """Writes the record of a run; returns its entry in ladder.json."""
    folder.mkdir(exist_ok=True)
    start = dict(event="start", config=dict(flops_per_token=10**9, compile=False))
    end = dict(
        event="end", status="complete", error=None, avg_tok_per_sec=5.0,
        median_step_tok_per_sec=speed, reserved_gb=1.0, first_step_seconds=10.0 / round,
        val_loss=loss, mfu=None, attention_backend="manual",
    ) | end
    path = folder / f"{rung}-{round}-{seed}.jsonl"
    path.write_text(f"{json.dumps(start)}\n{json.dumps(end)}\n")
    return dict(name=rung, round=round, seed=seed, record=path.name, error=None, seconds=1.0)


def make_state(runs: list[dict], kind: str = "ladder") -> dict:
    machine = dict(device="cuda", name="Some | GPU", torch="2.13", gpus=1, threads=2)
    plan = dict(kind=kind, machine=machine, tokens=4096, options=["--dropout", "0"])
    return dict(plan=plan, ceiling=dict(float32=1e12, TF32=2e12, bfloat16=4e12), runs=runs)


@pytest.fixture
def rungs(tmp_path) -> list:
    script = tmp_path / "script.py"
    script.write_text("# has --no-compile")
    names = ["00_orig", "01-tensor-cores", "02-bfloat16", "03-broken", "04-last"]
    return [ladder.Rung(k, name, script, name, tuple(names[1 : k + 1]), "rounding", speed)
            for k, (name, speed) in enumerate(zip(names, [100, 200, 500, 500, None], strict=True))]


@pytest.mark.parametrize(("new", "old", "says"), [
    ([11, 12, 13, 14], [7, 8, 9, 10], "faster"),
    ([7, 8, 9, 10], [11, 12, 13, 14], "slower"),
    ([10, 12, 13, 14], [7, 8, 9, 10], "no measurable change"),
    ([8, 8, 8, 8], [7, 9, 7, 9], "no measurable change"),
    ([50, 50, 50], [1, 1, 1, 1], "no verdict"),
    ([50, 50, 50, 50], [1, 1, 1], "no verdict"),
])
def test_verdict(new, old, says):
    assert ladder.verdict(new, old) == says


def test_parse_rungs():
    assert ladder.parse_rungs("0,5-8", 13) == [0, 5, 6, 7, 8]
    assert ladder.parse_rungs(" 12, 3 - 3,12", 13) == [3, 12]
    for text in ("", "13", "5-", "8-5", "0,x", "0,5-13", "-1"):
        with pytest.raises(ladder.UserError, match="--rungs"):
            ladder.parse_rungs(text, 13)


def test_precision():
    patches = ("02-tensor-cores", "05-bfloat16")
    assert [ladder.precision(patches[:k], "cuda") for k in range(3)] == [
        "float32", "TF32", "bfloat16"
    ]
    assert ladder.precision(patches[:1], "cpu") == "float32"


def test_published_figures_and_headers():
    rungs = ladder.read_ladder(gpus=2)
    assert [rung.published for rung in rungs[:3]] == [12525, 12526, 27648]
    assert [rung.published for rung in rungs[10:]] == [142156, None, None, 419259]
    assert (rungs[-1].name, rungs[-1].processes) == ("02_opt_multi_gpu_ddp", 2)
    assert all(rung.technique and rung.technique != rung.name for rung in rungs)
    assert {rung.loss for rung in rungs[1:-1]} == {"unchanged", "rounding", "changes"}
    assert len(ladder.read_ladder(gpus=1)) == len(rungs) - 1


def test_rows(tmp_path, rungs):
    results = tmp_path / "results"
    runs = []
    for number in range(1, 5):
        loss = 8.25 - number / 16
        runs += [
            write_record(results, "00_orig", number, 50.0, seed=123 + number, loss=loss),
            write_record(results, "00_orig", number, 99.0 + number),
            write_record(results, "01-tensor-cores", number, 102.0 + number, loss=8.25),
            write_record(results, "02-bfloat16", number, 800.0, loss=7.5, mfu=0.5),
        ]
    failed = dict(status="out_of_memory", error="out of memory: lower --batch-size")
    runs += [write_record(results, "03-broken", 1, None, **failed)]
    runs += [write_record(results, "04-last", 1, None)]  # no median: the average
    state = make_state(runs)
    rows, noise = ladder.make_rows(rungs, state, results)
    base, cores, bf16, broken, last = rows
    assert noise == 8.1875 - 8.0  # over five seeds
    assert (base["tok_per_sec"], base["speeds"]) == (101.5, [100, 101, 102, 103])
    assert (base["verdict"], base["factor_before"], base["within_seed_noise"]) == (None,) * 3
    assert base["first_step_seconds"] == 10.0  # of the first round, not the median
    assert base["share_of_ceiling"] == pytest.approx(101.5 * 1e9 / 1e12)
    assert cores["verdict"] == "no measurable change"  # 103 is in both ranges
    assert cores["within_seed_noise"] is False
    assert cores["uncompiled"] is True
    assert bf16["factor_before"] == pytest.approx(800 / 104.5)
    assert bf16["factor_baseline"] == pytest.approx(800 / 101.5)
    assert (bf16["published_factor_before"], bf16["published_factor_baseline"]) == (2.5, 5.0)
    assert bf16["loss_difference_before"] == -0.75
    assert bf16["within_seed_noise"] is False
    assert bf16["share_of_ceiling"] == pytest.approx(0.2)
    assert bf16["verdict"] == "faster"
    assert (broken["tok_per_sec"], broken["verdict"]) == (None, None)
    assert broken["error"] == "failed: out of memory: lower --batch-size"
    assert last["factor_before"] == pytest.approx(5 / 800)  # over the nearest that ran
    assert last["published_factor_baseline"] is None
    assert (last["verdict"], last["average"]) == ("no verdict", True)

    text = ladder.table(state | dict(rows=rows, seed_noise=noise))
    lines = text.splitlines()
    assert {line.count(" | ") for line in lines[:7]} == {16}
    assert "7.66 (2.50) | 7.88 (5.00)" in lines[4]
    assert "failed: out of memory" in lines[5]
    assert "00_orig's losses over 5 seeds, 0.1875" in text
    assert "without torch.compile" in text


def test_rows_without_baseline_and_leave_one_out(tmp_path, rungs):
    results = tmp_path / "results"
    runs = [write_record(results, "02-bfloat16", 1, 800.0)]
    (row,), noise = ladder.make_rows(rungs[2:3], make_state(runs), results)
    assert (noise, row["factor_baseline"], row["within_seed_noise"]) == (None,) * 3

    runs = [write_record(results, name, number, speed) for number in range(1, 5)
            for name, speed in (("00_orig", 800.0), ("01-tensor-cores", 400.0))]
    rungs[2].error = "conflict: 1 place(s)"
    state = make_state(runs, "leave-one-out")
    rows, noise = ladder.make_rows(rungs[:3], state, results)
    assert rows[1]["factor_technique"] == 2.0
    assert rows[1]["verdict"] == "faster"
    text = ladder.table(state | dict(rows=rows, seed_noise=noise))
    assert len({line.count(" | ") for line in text.splitlines()[:5]}) == 1
    assert rows[0]["verdict"] is None
    assert "| conflict: 1 place(s) |" in text


def test_command(rungs, tmp_path):
    """02 runs by torchrun, over as many tokens a GPU as the others."""
    plan = make_state([])["plan"]
    for processes, tokens, launcher in ((1, "4096", False), (4, "16384", True)):
        rungs[1].processes = processes
        command = [*map(str, ladder.command_of(ladder.Job(rungs[1], 1), plan, tmp_path, tmp_path))]
        assert command[command.index("--max-tokens") + 1] == tokens
        assert ("--nproc_per_node=4" in command) is launcher
        assert command[-2:] == ["--dropout", "0"]


def test_earlier_states(tmp_path):
    """One that is damaged counts as none; a new ladder puts an old one aside."""
    path = tmp_path / "ladder.json"
    run = write_record(tmp_path / "records", "00_orig", 1, 100.0)
    for text, whole in (
        ("{", False), ("[]", False), ('{"plan": 1, "runs": 2, "ceiling": 3}', False),
        (json.dumps(dict(plan={}, ceiling={}, runs=[{}])), False),
        (json.dumps(dict(plan={}, ceiling={}, runs=[run])), True),
    ):
        path.write_text(text)
        assert bool(ladder.read_state(path)) is whole, text
    path.with_suffix(".md").write_text("table")
    ladder.keep(path)
    kept = sorted(file.name for file in tmp_path.glob("ladder*"))
    assert [len(name) for name in kept] == [len("ladder-20260101T000000Z.json"),
                                            len("ladder-20260101T000000Z.md")]


def test_time_left(rungs):
    jobs = ladder.make_jobs(rungs[:2], "ladder", 2)
    assert [job.key for job in jobs] == [
        ("00_orig", 1, 123), ("00_orig", 1, 124), ("01-tensor-cores", 1, 123),
        ("00_orig", 2, 123), ("00_orig", 2, 125), ("01-tensor-cores", 2, 123),
    ]
    runs = [dict(name="00_orig", seconds=second) for second in (10, 20, 90)]
    assert ladder.seconds_left(jobs, runs) == 6 * 20
    assert ladder.seconds_left(jobs, []) is None


# End to end, on a copy of the repository


@pytest.fixture
def tree(tmp_path) -> SimpleNamespace:
    folder = tmp_path / "tree"
    (folder / "results" / "reference").mkdir(parents=True)
    for script in (*ROOT.glob("0?_*.py"), ROOT / "ladder.py"):
        shutil.copy(script, folder)
    shutil.copytree(ROOT / "patches", folder / "patches",
                    ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ladder.PUBLISHED, folder / "results" / "reference")
    data = write_tokens(tmp_path / "data", train=16 * 6 + 1)  # 6 windows: a batch of 4, none of 8
    results = folder / "results" / "ladder"

    def command(*options) -> list:
        return ["ladder.py", "--max-tokens", 128, "--data", data, *options]

    def run(*options, code=0):
        # One thread: more only get in each other's way at this size.
        result = run_python(*command(*options), cwd=folder, env=environment(OMP_NUM_THREADS="1"))
        assert result.returncode == code, result.stderr
        assert "Traceback" not in result.stderr
        return result

    def records() -> list[str]:
        return sorted(path.name.split("-cpu-")[0] for path in results.glob("*.jsonl"))

    return SimpleNamespace(folder=folder, results=results, command=command, run=run,
                           records=records)


def test_ladder(tree):
    """Interrupted, taken up, with a rung that fails; then one more round."""
    # What can't work is refused before anything runs.
    for options, says in (
        (("--rungs", "0,8", "--", *TINY, "--no-compile"), "rung 0 (00_orig): unrecognized"),
        (("--rungs", "0,1", "--", "--dropout", "x"), "rung 0 (00_orig): argument --dropout"),
        (("--rungs", "1", "--", "stray"), "rung 1 (01-causal-mask): unrecognized arguments: stray"),
        (("--", "--seed", "1"), "--seed is set by the ladder"),
        (("--", "-h"), "-h is set by the ladder"),
        (("--rungs", "99"), "--rungs 99"),
        (("--rungs", ""), "--rungs"),
        (("--resume", "--rungs", "0"), "nothing to resume"),
    ):
        result = tree.run(*options, code=2)
        assert result.stderr.startswith("error: ") and says in result.stderr
        assert len(result.stderr.splitlines()) == 1
    result = tree.run("--rungs", "0,1,10", "--dry-run")
    assert result.stdout.count("00_orig.py") == 8
    assert result.stdout.count("10-batch-size.py") == 4
    assert "16 runs, about" in result.stdout and "a rough estimate" in result.stdout
    assert tree.records() == []
    assert not (tree.results / "ladder.json").exists()

    options = ("--rungs", "0,1,10", "--repeats", "1")
    child = subprocess.Popen(
        [sys.executable, *map(str, tree.command(*options, "--", *TINY))], cwd=tree.folder,
        env=environment(OMP_NUM_THREADS="1"), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )
    while "round 1: 00_orig: " not in child.stdout.readline():
        assert child.poll() is None, child.stderr.read()
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=120)
    assert child.returncode == 130
    (line,) = err.splitlines()
    assert line.startswith("interrupted: python ladder.py --resume --max-tokens 128 ")
    (first,) = json.loads((tree.results / "ladder.json").read_text())["runs"]
    assert (first["name"], first["round"], first["seed"]) == ("00_orig", 1, 123)

    result = tree.run(*options, "--resume", "--", *TINY, "--dropout", "0.5", code=2)
    assert "other options" in result.stderr
    result = tree.run(*options, "--resume", "--", *TINY, code=1)  # the failed rung
    state = json.loads((tree.results / "ladder.json").read_text())
    assert state["runs"][0] == first
    assert [(run["name"], run["seed"]) for run in state["runs"][1:]] == [
        ("00_orig", 124), ("01-causal-mask", 123), ("10-batch-size", 123),
    ]
    base, mask, batch = state["rows"]
    assert mask["tok_per_sec"] > 0
    assert mask["loss_difference_before"] == pytest.approx(0, abs=1e-4)
    assert mask["within_seed_noise"] is True
    assert mask["verdict"] == "no verdict"
    assert "the text is too short" in batch["error"]
    assert set(state["ceiling"]) == {"float32", "bfloat16"}
    text = (tree.results / "ladder.md").read_text(encoding="utf-8")
    assert text in result.stdout
    assert "failed: the text is too short" in text

    result = tree.run("--rungs", "0,1,10", "--repeats", "2", "--resume", "--dry-run", "--", *TINY)
    assert "5 runs, about" in result.stdout and "by the ladder before it" in result.stdout


def test_leave_one_out(tree):
    """The last technique leaves 01 as the stage before it; every merge is a script or a reason."""
    result = tree.run("--leave-one-out", "--rungs", "1,12", "--repeats", "1", "--",
                      *TINY, "--batch-size", "2", "--no-compile")
    results = tree.results.with_name("leave-one-out")
    state = json.loads((results / "leave-one-out.json").read_text())
    assert [run["round"] for run in state["runs"]] == [0, 1, 1, 1]
    _, first, last = state["rows"]
    assert first["error"].startswith("conflict: ") and first["tok_per_sec"] is None
    assert last["name"] == "without-12-huge-pages"
    assert last["factor_technique"] > 0
    build = tree.folder / "build"
    without = build / "leave-one-out" / "without-12-huge-pages.py"
    assert without.read_bytes() == (build / "ladder" / "11-merged-qkv.py").read_bytes()
    assert (results / "leave-one-out.md").read_text(encoding="utf-8") in result.stdout
    assert len(list(results.glob("without-12-*.jsonl"))) == 1  # the trial's record isn't here
