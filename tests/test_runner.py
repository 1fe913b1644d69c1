"""bench/runner.py: how a plan runs, with made-up runs in place of real ones."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from conftest import ROOT, TINY, environment, run_python
from made_up import CPU, MACHINE, PEAK, make_plan, make_state, write_record

from bench import lengths, plans, processes, runner, states
from bench.plans import SEED, UserError


@pytest.fixture
def fake(monkeypatch):
    """Runs take a moment; `fake.fails` names those that fail; `fake.ran` lists what ran."""

    def run_job(job, plan, length):
        fake.ran.append(job.key)
        result = write_record(plan.path.parent, job.run.name, job.round, seed=job.seed)
        if job.run.name in fake.fails:
            result |= dict(record=None, error="failed: it broke")
        return result

    fake = SimpleNamespace(ran=[], fails=set(), run_job=run_job)
    monkeypatch.setattr(runner, "run_job", run_job)
    config = dict(batch_size=4, context_length=256, compile=False)
    monkeypatch.setattr(lengths, "configurations",
                        lambda plan: {run.name: config for run in plan.runs})
    monkeypatch.setattr(processes, "ask_machine", lambda question: PEAK)
    return fake


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "meta.json").write_text('{"tokens": {"train": 4096}}')
    return make_plan(tmp_path, "a", "b")


ROUND = [("a", 1, 123), ("a", 1, 124), ("b", 1, 123)]
NEXT = [("a", 2, 123), ("a", 2, 125), ("b", 2, 123)]


# What runs


def test_rounds(fake, plan, capsys):
    assert runner.run_plan(plan, 2)
    assert fake.ran == ROUND + NEXT
    state = states.earlier_state(plan.path)
    assert [(r["name"], r["round"], r["seed"]) for r in state["results"]] == fake.ran
    assert set(state) == {"schema", "time", "plan", "matmul_peak", "results", "rows", "seed_noise"}
    assert set(state["plan"]) == {
        "name", "machine", "rounds", "options", "tokens", "seconds", "epochs", "data", "scripts",
        "first_seed", "new_seeds", "log_tokens", "targets",
    }
    assert [row["factor"] for row in state["rows"]] == [None, 1.0]
    assert plan.path.with_suffix(".md").read_text().startswith("| run |")
    out = capsys.readouterr().out
    assert "round 1: a, seed 124: 100 tok/sec, val loss 8.000, 1 s; 4 s left" in out


def test_failed_and_lost_runs(fake, plan, capsys):
    """A run that fails isn't repeated in later rounds; a resume tries it, and lost ones, again."""
    fake.fails.add("b")
    assert runner.run_plan(plan, 2)
    assert fake.ran == [*ROUND, *NEXT[:2]]
    state = states.earlier_state(plan.path)
    assert state["rows"][1]["error"] == "failed: it broke"
    assert "b: failed: it broke; 2 s left" in capsys.readouterr().out
    (plan.path.parent / state["results"][0]["record"]).unlink()
    fake.fails.clear()
    fake.ran.clear()
    assert runner.run_plan(plan, 2, resume=True)
    assert fake.ran == [ROUND[0], ROUND[2], NEXT[2]]
    rows = states.earlier_state(plan.path)["rows"]
    assert [(row["rounds"], row["error"]) for row in rows] == [(2, None), (2, None)]
    fake.ran.clear()
    assert runner.run_plan(plan, 2, resume=True)
    assert fake.ran == []


def test_a_run_that_cannot_run(fake, plan):
    plan.runs[1].error = "conflict: here"
    assert runner.run_plan(plan, 1)
    assert fake.ran == ROUND[:2]
    assert states.earlier_state(plan.path)["rows"][1]["error"] == "conflict: here"


def test_deadline(fake, plan):
    """A run that wouldn't end in time isn't started; a later call goes on."""
    assert not runner.run_plan(plan, 1, deadline=time.monotonic() + 5)
    assert fake.ran == []  # the first one is thought to take more than 20 s
    assert runner.run_plan(plan, 1, resume=True, deadline=time.monotonic() + 60)
    assert fake.ran == ROUND
    assert not runner.run_plan(plan, 2, resume=True, deadline=time.monotonic() + 0.5)
    assert len(states.earlier_state(plan.path)["rows"]) == 2
    assert runner.run_plan(plan, 2, resume=True, deadline=time.monotonic() + 9)  # 1 s by round 1
    assert fake.ran == ROUND + NEXT


def test_interrupted(fake, plan, monkeypatch):
    def run_job(job, plan, length):
        if job.key == ROUND[1]:
            raise processes.Interrupted(signal.SIGINT)
        return fake.run_job(job, plan, length)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "run_job", run_job)
        with pytest.raises(processes.Interrupted):
            runner.run_plan(plan, 1)
    assert runner.run_plan(plan, 1, resume=True)
    assert fake.ran == ROUND


def test_resume_needs_the_same_plan(fake, plan):
    with pytest.raises(UserError, match="nothing to resume"):
        runner.run_plan(plan, 1, resume=True)
    runner.run_plan(plan, 1)
    for field, value, says in (
        ("options", ["--dropout", "0"], "other options"), ("tokens", 1, "other tokens"),
        ("seconds", 1.0, "other seconds"), ("machine", CPU, "other machine"),
        ("runs", plan.runs[:1], "other scripts"),
    ):
        earlier = getattr(plan, field)
        setattr(plan, field, value)
        with pytest.raises(UserError, match=f"can't resume .*{says}"):
            runner.run_plan(plan, 1, resume=True)
        setattr(plan, field, earlier)
    (plan.data / "meta.json").write_text('{"tokens": {"train": 9}}')
    with pytest.raises(UserError, match="other data"):
        runner.run_plan(plan, 1, resume=True)


def test_a_new_start_puts_the_earlier_one_aside(fake, plan):
    runner.run_plan(plan, 1)
    earlier = plan.path.read_text()
    runner.run_plan(plan, 1)
    aside = sorted(path for path in plan.path.parent.glob("plan-*") if path.suffix != ".jsonl")
    assert [path.name[len("plan-20260101T000000Z"):] for path in aside] == [".json", ".md"]
    assert aside[0].read_text() == earlier


def test_damaged_tokens_leave_what_was_there(fake, plan):
    assert runner.run_plan(plan, 1)
    for text in ("", "[]", '{"tokens": {"train": "x"}}'):
        (plan.data / "meta.json").write_text(text)
        with pytest.raises(UserError, match="meta.json is damaged"):
            runner.run_plan(plan, 1)
    assert len(states.earlier_state(plan.path)["results"]) == len(ROUND)


def test_a_record_without_a_figure_is_measured_again(fake, plan):
    assert runner.run_plan(plan, 1)
    path = plan.path.with_name(states.earlier_state(plan.path)["results"][2]["record"])
    path.write_text(path.read_text().replace("first_step_seconds", "seconds"))
    fake.ran.clear()
    assert runner.run_plan(plan, 1, resume=True) and fake.ran == ROUND[2:]


def test_damaged_states(tmp_path):
    plan = make_plan(tmp_path, "a")
    plan.path.parent.mkdir()
    result = write_record(tmp_path, "a")
    good = make_state(plan, [result])
    for text, whole in (
        ("{", False), ("[]", False), ('{"plan": 1, "results": 2, "matmul_peak": 3}', False),
        (json.dumps(good | dict(results=[{}])), False), (json.dumps(good | dict(schema=1)), False),
        (json.dumps(good), True),
    ):
        plan.path.write_text(text)
        assert bool(states.earlier_state(plan.path)) is whole, text


def test_dry_run(fake, plan, capsys):
    runner.dry_run(plan, 2)
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 7 and "6 runs, about" in out and "a rough estimate" in out
    assert not plan.path.exists() and fake.ran == []
    runner.run_plan(plan, 1)
    runner.dry_run(plan, 2, resume=True)
    assert "3 runs, about 3 s (by the one before it)" in capsys.readouterr().out


# How long, and by which command


def test_length(tmp_path):
    def options(per_step, peak):
        config = dict(batch_size=per_step // run.processes, context_length=1, compile=False)
        given = lengths.length_of(run, plan, config, peak).options
        return dict(zip(given[::2], given[1::2], strict=True))

    plan = make_plan(tmp_path, "a", tokens=10_000, seconds=10)
    run = plan.runs[0]
    run.expected, peak = 12_000, dict(bfloat16=312e12 * 2)  # twice an A100
    length = options(1024, peak)
    assert length["--max-tokens"] == 235 * 1024  # 240,000, in whole steps
    assert length["--eval-freq"] == 9  # a line after 1, 10, 19 ... steps; 10 reach 10,000 tokens
    assert length["--epochs"] >= 1000  # the tokens alone end the run
    run.expected = 500  # so the common count takes longer
    assert options(1024, peak)["--max-tokens"] == 10 * 1024
    run.processes = 4
    length = options(4096, peak)
    assert (length["--max-tokens"], length["--eval-freq"]) == (10 * 4096, 9)
    assert options(10**6, peak)["--eval-freq"] == 1
    plan.seconds = 0
    assert options(4096, {})["--max-tokens"] == 10 * 4096


def test_whole_scripts_train_as_long_as_they_do_alone(tmp_path):
    """Or for fewer epochs, and on a GPU the estimate counts them."""
    plan = make_plan(tmp_path, "a", whole=True, tokens=None)
    plan.runs[0].expected, peak = 31_200, dict(bfloat16=312e12)
    (plan.data / "meta.json").write_text('{"tokens": {"train": 312000}}')
    config = dict(batch_size=4, context_length=256, compile=True)
    run = plan.runs[0]
    whole, short = (lengths.length_of(run, plan, config, peak) for plan.epochs in (None, 2))
    assert (whole.options, short.options) == ((), ("--epochs", 2))
    assert (whole.seconds, short.seconds) == (20 + 40 + 15 * 14, 20 + 40 + 2 * 14)
    plan.tokens, plan.runs[0].processes = 4096, 4
    assert lengths.length_of(plan.runs[0], plan, config, peak).options == ("--max-tokens", 4 * 4096)


def test_command(plan):
    """02 runs by torchrun, also with one process; a run's own options come last."""
    plan.options = ["--dropout", "0"]
    plan.runs[1].options = ("--batch-size", "2")
    length = lengths.Length(("--max-tokens", 8192, "--eval-freq", 7), 1.0)
    for torchrun in (False, True):
        plan.runs[1].torchrun = torchrun
        command = [*map(str, runner.command_of(runner.Job(plan.runs[1], 1, 124), plan, length))]
        assert ("--nproc_per_node=1" in command) is torchrun
        for option, value in (("--max-tokens", "8192"), ("--eval-freq", "7"), ("--seed", "124"),
                              ("--name", "b"), ("--device", "cuda")):
            assert command[command.index(option) + 1] == value
        assert command[-4:] == ["--dropout", "0", "--batch-size", "2"]


def test_time_left(plan):
    jobs = runner.make_jobs(plan, 2, [])
    assert [job.key for job in jobs] == ROUND + NEXT
    estimates = {"a": lengths.Length((), 30), "b": lengths.Length((), 50)}
    results = [dict(name="a", seconds=second) for second in (10, 20, 90)]
    # b is estimated at 50 s, and a took 20 where 30 were estimated.
    left = lengths.seconds_left(jobs, results, estimates)
    assert left == pytest.approx(4 * 20 + 2 * 50 * 20 / 30)
    assert lengths.seconds_left(jobs, [], estimates) == 4 * 30 + 2 * 50
    plan.seed_noise = False
    assert len(runner.make_jobs(plan, 2, [])) == 4


def test_options(tmp_path, monkeypatch):
    """Each script judges them itself, all in one process; what it trains per step comes back."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    plan = make_plan(tmp_path, "00_orig", "01_opt_single_gpu", "02_opt_multi_gpu_ddp", machine=CPU)
    for run in plan.runs:
        run.script = ROOT / f"{run.name}.py"
    plan.runs[2].processes = 2
    plan.options = TINY
    plan.runs[1].options = ("--batch-size", "3")
    assert [*lengths.configurations(plan).values()] == [
        dict(batch_size=size, context_length=16, learning_rate=5e-4, compile=compiles)
        for size, compiles in ((2, False), (3, True), (2, True))
    ]
    plan.options = [*TINY, "--no-compile"]
    with pytest.raises(UserError, match="00_orig: unrecognized arguments: --no-compile"):
        lengths.configurations(plan)
    for options in (["--seed", "1"], ["-h"], ["--eval-freq=3"]):
        plan.options = options
        with pytest.raises(UserError, match=f"{options[0].split('=')[0]} is set by measure.py"):
            lengths.configurations(plan)


# Child processes


def job_of(tmp_path, source: str, machine=MACHINE) -> dict:
    """The result of a script with this source."""
    plan = make_plan(tmp_path, "a", machine=machine)
    (tmp_path / "script.py").write_text(source)
    return runner.run_job(runner.Job(plan.runs[0], 1), plan, lengths.Length((), 1.0))


def test_why_a_run_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "BUILD", tmp_path / "build")
    told = "import sys; print('error: {}\\nand more', file=sys.stderr); sys.exit(1)"
    for source, says in (
        (told.format("no memory"), "no memory"),
        (told.format("rank 3: no memory"), "rank 3: no memory"),
        ("import os; os.abort()", f"ended by signal {signal.SIGABRT:d}"),
        ("pass", "it left no record"),
        ("print('Record: results/none.jsonl')", "its record can't be read: No such file"),
        ("1/0", "ZeroDivisionError"),
    ):
        assert says in job_of(tmp_path, source)["error"]
    result = write_record(tmp_path / "plan", "a", speed=None, avg_tok_per_sec=None)
    result = job_of(tmp_path, f"print('Record: somewhere/{result['record']}')")
    assert result["error"] == "too short for a speed: raise --max-tokens"
    result = write_record(tmp_path / "plan", "a", status="diverged", error="lower it")
    result = job_of(tmp_path, f"print('Record: {result['record']}')")
    assert result["error"] == "diverged: lower it"
    result = write_record(tmp_path / "plan", "a")
    result = job_of(tmp_path, f"print('Record: {result['record']}')")
    assert (result["error"], result["record"]) == (None, "a-cuda-1-123.jsonl")


def test_compile_cache(tmp_path, monkeypatch):
    """The rounds of a plan that compile anew start with an empty one. Scripts that are the same
    share theirs."""
    monkeypatch.setattr(runner, "BUILD", tmp_path)
    plan = make_plan(tmp_path, "a")
    (tmp_path / "script.py").write_text(
        "import os, pathlib\npath = pathlib.Path(os.environ['TORCHINDUCTOR_CACHE_DIR'])\n"
        "path.mkdir(parents=True, exist_ok=True)\n"
        "(path / str(len([*path.iterdir()]))).touch()\n"
    )
    for round, seed, plan.cold_rounds, files in (
        (1, SEED, 1, 1), (1, SEED + 1, 1, 2), (2, SEED, 1, 3), (1, SEED, 0, 4), (2, SEED, 2, 1),
        (2, SEED, 1, 2), (1, SEED, 1, 1),
    ):
        runner.run_job(runner.Job(plan.runs[0], round, seed), plan, lengths.Length((), 1.0))
        (cache,) = (tmp_path / "compiler-cache").iterdir()
        assert len([*cache.iterdir()]) == files


def test_a_scratch_folder_lives_as_long_as_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "BUILD", tmp_path / "build")
    plan = make_plan(tmp_path, "a")
    plan.runs[0].options = ("--folder", plans.SCRATCH)
    seen = tmp_path / "seen"
    (tmp_path / "script.py").write_text(
        f"import os, pathlib, sys\npathlib.Path({str(seen)!r}).write_text(sys.argv[-1])\n"
        "assert os.path.isdir(sys.argv[-1])\n")
    result = runner.run_job(runner.Job(plan.runs[0], 1), plan, lengths.Length((), 1.0))
    assert result["error"] == "it left no record"
    folder = seen.read_text()
    assert folder.startswith(str(tmp_path)) and not os.path.exists(folder)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
def test_a_share_of_the_cores():
    command = [sys.executable, "-c", "import os; print(len(os.sched_getaffinity(0)))"]
    cores = len(os.sched_getaffinity(0))
    assert processes.run_child(command, cores=1)[1].strip() == "1"
    assert len(os.sched_getaffinity(0)) == cores
    assert processes.run_child(command)[1].strip() == str(cores)


def test_a_run_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "BUILD", tmp_path)
    monkeypatch.setattr(runner, "HANG_SECONDS", 1)
    plan = make_plan(tmp_path, "a")
    (tmp_path / "script.py").write_text("import time; time.sleep(60)")
    result = runner.run_job(runner.Job(plan.runs[0], 1), plan, lengths.Length((), 0.0))
    assert result["error"] == "ended after 1 s: it hung, or is far too slow"


def test_a_child_does_not_outlive_the_tool(tmp_path):
    """And Ctrl-C reaches it once, as SIGTERM."""
    child = tmp_path / "child.py"
    child.write_text(
        "import os, pathlib, signal, sys, time\n"
        "def end(number, frame): print(number, file=open('got', 'a')); sys.exit()\n"
        "signal.signal(signal.SIGTERM, end); signal.signal(signal.SIGINT, end)\n"
        "pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(60)\n"
    )
    code = ("import sys; from bench import processes; processes.on_signals(processes.interrupt)\n"
            "processes.run_child([sys.executable, 'child.py'])")
    tool = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.DEVNULL,
        env=environment(PYTHONPATH=str(ROOT)), start_new_session=True,
    )
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert tool.poll() is None
        time.sleep(0.05)
    os.killpg(tool.pid, signal.SIGINT)
    assert tool.wait(30) != 0
    assert (tmp_path / "got").read_text().split() == [str(int(signal.SIGTERM))]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_nohup():
    """What ignores SIGHUP goes on to do so."""
    code = ("import signal; from bench import processes;"
            "signal.signal(signal.SIGHUP, signal.SIG_IGN);"
            "processes.on_signals(processes.interrupt);"
            "print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN,"
            " signal.getsignal(signal.SIGTERM) == processes.interrupt)")
    assert run_python("-c", code, cwd=ROOT).stdout == "True True\n"
