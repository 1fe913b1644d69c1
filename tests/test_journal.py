"""bench/measure/records.py and journal.py: what a run leaves is read back, whatever a crash leaves
of it."""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, environment, write_tokens
from made_up import (
    CPU,
    MACHINE,
    measured_of,
    plan_of,
    record_events,
    write_journal,
    write_record,
)

from bench.analysis.training import Training
from bench.measure.journal import append, newest, read_journal
from bench.measure.lock import locked, measuring
from bench.measure.measurement import data_of
from bench.measure.plan import Growth
from bench.measure.records import (
    COMPLETE,
    Outcome,
    RecordError,
    Result,
    Status,
    make_record,
    read_record,
)
from gpt_speed import children
from gpt_speed.common import UserError

GPU = "NVIDIA A100-SXM4-80GB"


def record_of(events=None, **settings):
    return make_record("a.jsonl", events or record_events("00_orig", **settings))


def training_of(events=None, **settings):
    return Training(record_of(events, **settings))


def logs_of(events: list[dict]) -> list[dict]:
    return [event for event in events if event["event"] == "log"]


def test_record(tmp_path):
    record = read_record(write_record(tmp_path, "00_orig"))
    assert (record.run_name, record.outcome) == ("00_orig", COMPLETE)
    training = Training(record)
    assert (training.tok_per_sec, record.device_name, training.mfu) == (100.0, "Some CPU", None)
    assert training_of(steps=4, start=dict(data=None)).tok_per_sec == 90


def test_losses_and_times():
    """A step of 1,024 tokens takes 10.24 s, the first one 10; log lines after 1, 4 and 8 steps."""
    training = training_of()
    points = [(1024, 10.24, 10.0), (4096, 40.96, 8.0), (8192, 81.92, 7.0)]
    assert training.points == [pytest.approx(point) for point in points]
    assert training.first_step_excess == pytest.approx(-0.24)
    losses = {1000: 10.0, 1024: 10.0, 4096: 8.0, 4097: None, None: 7.0}
    assert {tokens: training.record.val_loss_after(tokens) for tokens in losses} == losses
    # The first step counts as long as the others.
    assert training.reached(9.0) == pytest.approx((2560, 25.6))
    assert training.reached(11.0) == pytest.approx((1024, 10.24))
    assert training.reached(6.9) is None
    # The lines are after 10.24, 40.96 and 81.92 s; before the first one nothing is known.
    assert [training.loss_at(seconds) for seconds in (10.0, 10.24, 25.6, 40.96, 100.0)] == [
        None,
        *map(pytest.approx, (10.0, 9.0, 8.0, 7.0)),
    ]


@pytest.mark.parametrize(
    ("losses", "lowest", "last", "tokens"),
    [
        ((10.0, 6.0, 6.5), 6.0, 6.5, 1024 + 3072 / 4),
        ((10.0, None, 7.0), 7.0, 7.0, 1024 + 7168 / 3),  # not finite: by the lines around it
    ],
)
def test_other_losses(losses, lowest, last, tokens):
    events = record_events("a")
    for log, loss in zip(logs_of(events), losses, strict=True):
        log["val_loss"] = loss
    training = training_of(events)
    assert (training.lowest_val_loss, training.record.val_loss_after(None)) == (lowest, last)
    assert training.reached(9.0)[0] == pytest.approx(tokens)


def test_quartiles():
    """Of single steps, without the two of warm-up; too few steps have none."""
    events = record_events("a")
    logs_of(events)[1]["seconds"] = [999.0, 1024 / 10, 1024 / 20]
    logs_of(events)[2]["seconds"] = [1024 / rate for rate in (30, 40, 60, 50)]
    assert training_of(events).quartiles == pytest.approx((22.5, 35.0, 47.5))
    assert training_of(steps=4).quartiles is None


def test_several_processes():
    """They see as many times the tokens, and have as many times the peak."""
    record = record_of(speed=31_200.0, gpu=GPU, config=dict(world_size=4), tokens=16_384)
    assert (record.device_name, record.tokens_per_step) == (GPU, 4096)
    assert record.val_loss_after(4000) == 8
    assert Training(record).mfu == pytest.approx(0.1 / 4)


@pytest.mark.parametrize(
    ("gpu", "config", "precision"),
    [
        (GPU, {}, "float32"),
        (GPU, dict(matmul_precision="high"), "TF32"),
        (None, dict(matmul_precision="high"), "float32"),  # a CPU has no TF32
        (GPU, dict(matmul_precision="high", dtype="bfloat16"), "bfloat16"),
        (GPU, dict(autocast="bfloat16"), "bfloat16"),
    ],
)
def test_precision(gpu, config, precision):
    assert record_of(gpu=gpu, config=config).precision == precision


def test_killed(tmp_path):
    path = write_record(tmp_path, "00_orig")
    path.write_bytes(path.read_bytes()[:-9])  # cut off within its last line
    record = read_record(path)
    assert (record.status, record.outcome.status) == ("killed", Status.FAILED)
    assert (Training(record).tok_per_sec, record.val_loss_after(4096)) == (None, 8.0)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda text: "", "it left no record"),
        (lambda text: "{\n" + text, "line 1"),
        (lambda text: "[]\n", "line 1"),
        (lambda text: "[" * 100_000 + "\n", "line 1"),
        (lambda text: text.replace('"schema": 3', '"schema": 2'), "schema 2"),
        (lambda text: text + text, "not a whole record"),
        (lambda text: text.replace('"config"', '"other"'), "line 1: no config"),
        (
            lambda text: text.replace('"flops_per_token": 1', '"flops_per_token": -1'),
            "line 1: flops",
        ),
        (lambda text: text.replace("10.24", "0"), "line 3: a step of 0 seconds"),
        (lambda text: text.replace("10.24", "1e999"), "line 3: a step of inf seconds"),
        (lambda text: text.replace("10.24", '"x"'), "line 3: a step of 'x' seconds"),
        (lambda text: text.replace("1.25", '"much"'), "line 6: reserved_gb is 'much'"),
        (lambda text: text.replace("1.25", "-3"), "line 6: reserved_gb is -3"),
        (lambda text: text.replace("1.25", "true"), "line 6: reserved_gb is True"),
        (
            lambda text: text.replace('"world_size": 1', '"world_size": 0'),
            "line 1: world_size is 0",
        ),
        (
            lambda text: text.replace('"batch_size": 4', '"batch_size": true'),
            "line 1: batch_size is T",
        ),
        (lambda text: text.replace("10.24", "true"), "line 3: a step of True seconds"),
    ],
)
def test_damaged(tmp_path, damage, says):
    path = write_record(tmp_path, "a")
    path.write_text(damage(path.read_text()))
    with pytest.raises(RecordError, match=says):
        read_record(path)


# ---- Journals


def keys(measured) -> list[tuple]:
    return [(result.name, result.round) for result in measured.results]


def test_round_trip(tmp_path):
    plan = plan_of(
        "a", "b", kind="k", rounds=2, targets={"best": 3.5}, growth=Growth(2, 8.0), new_seeds=True
    )
    plan.runs[1] = plan.runs[1].replace(
        options=("--batch-size", "4"), facts=dict(batch=4), error="no"
    )
    runs = [
        dict(name="a", speed=120.0, seconds=7.5),
        dict(name="a", round=2, error="out of memory", kind=Status.TOO_LARGE),
    ]  # not its words
    path = write_journal(tmp_path, "ladder", plan, runs, MACHINE, options=["--x", "y z"])
    (measured,) = read_journal(path)
    assert json.loads(json.dumps(measured.as_json())) == json.loads(path.read_text().split("\n")[0])
    assert (measured.plan, measured.folder, measured.machine) == (plan, tmp_path, MACHINE)
    good, bad = measured.results
    assert (good.key, good.seconds, good.outcome) == (("a", 1, 123), 7.5, COMPLETE)
    assert Training(good.record).tok_per_sec == 120
    assert (bad.key, bad.record) == (("a", 2, 124), None)
    assert bad.outcome == Outcome(Status.TOO_LARGE, "out of memory")
    assert read_journal(tmp_path / "none.jsonl") == []


def test_cut_off_by_a_crash(tmp_path, capsys):
    """At any byte of a run: it is lost, those before it and those added later are not."""
    path = write_journal(tmp_path, "x", plan_of("a", "b"), [dict(name="a")])
    before = path.read_bytes()
    _, *run_a = before.splitlines(keepends=True)
    run_b = [line.replace(b'"name": "a"', b'"name": "b"') for line in run_a]
    ends = itertools.accumulate(map(len, run_b))
    *sizes, only_its_end, _ = [0, *(end - less for end in ends for less in (99, 9, 1, 0))]
    for size in sizes:
        path.write_bytes(before + b"".join(run_b)[:size])
        assert keys(*read_journal(path)) == [("a", 1)], size
        assert capsys.readouterr().err == ""  # a crash is no damage
        append(path, *map(json.loads, run_b))
        assert keys(*read_journal(path)) == [("a", 1), ("b", 1)], size
        capsys.readouterr()
    path.write_bytes(before + b"".join(run_b)[:only_its_end])
    assert keys(*read_journal(path)) == [("a", 1), ("b", 1)]


@pytest.mark.parametrize(
    "damage", [b"", b"null", b"\xff", b"[" * 100_000, b'{"event": "run", "id": {}}']
)
@pytest.mark.parametrize("line", [0, 2, -1])  # of a run's: run, a log line, ran
def test_damage_in_the_middle(tmp_path, capsys, damage, line):
    """That run is lost, and the line is named."""
    path = write_journal(tmp_path, "x", plan_of(*"abc"), [dict(name=name) for name in "abc"])
    lines = path.read_bytes().splitlines()
    _, second, third = (number for number, text in enumerate(lines) if b'"event": "run"' in text)
    number = line + (second if line >= 0 else third)
    lines[number] = damage
    path.write_bytes(b"\n".join(lines) + b"\n")
    assert keys(*read_journal(path)) == [("a", 1), ("c", 1)]
    assert f"x.jsonl, line {number + 1}: " in capsys.readouterr().err


@pytest.mark.parametrize("damage", [{}, dict(plan=dict(runs=[{}])), dict(id=[])])
def test_resumed(tmp_path, capsys, damage):
    """A further line of the study: more rounds, another run. It is now the newest; a damaged one
    leaves what was there."""
    write_journal(tmp_path, "x", plan_of("a", rounds=1), [dict(name="a")])
    path = write_journal(tmp_path, "x", plan_of("a"), [dict(name="a")], id="2")
    more = measured_of("x", plan_of("a", "b", rounds=2), CPU | dict(threads=9))
    append(path, more.as_json() | damage)
    first, last = read_journal(path)
    assert keys(first) == keys(last) == [("a", 1)]
    if damage:
        assert (first.id, last.id) == ("1", "2") and first.plan.rounds == 1
        assert "x.jsonl, line " in capsys.readouterr().err
    else:
        assert (first.id, last.id, last.plan) == ("2", "1", more.plan)
        assert last.machine["threads"] == 9


def test_a_script_that_its_measurement_does_not_name(tmp_path, capsys):
    """As where the line is damaged that names it: a script that was edited between two starts."""
    path = write_journal(tmp_path, "x", plan_of("a"), [dict(name="a")])
    edited = path.read_bytes().replace(b'"source_sha256": "s"', b'"source_sha256": "edited"')
    _, *run = edited.splitlines(keepends=True)
    path.write_bytes(path.read_bytes() + b"".join(run))
    (found,) = read_journal(path)
    assert [result.source_sha256 for result in found.results] == ["s"]
    assert "another script than its measurement" in capsys.readouterr().err


def test_what_counts(tmp_path):
    """Of a run that was repeated the last one; nothing of another script than is named last."""
    runs = [
        dict(name="a", error="it broke"),
        dict(name="b"),
        dict(name="a", speed=50.0),
        dict(name="a", speed=60.0),
        dict(name="a", seed=124, speed=70.0),
    ]
    write_journal(tmp_path, "x", plan_of("a", "b"), runs)
    path = write_journal(tmp_path, "x", plan_of("a", "b"), sources=dict(a="s", b="changed"))
    (found,) = read_journal(path)
    assert [Training(result.record).tok_per_sec for result in found.results] == [60, 70]


def test_runs_of_another_length():
    """An old line that doesn't tell its length may stay."""
    measured = measured_of("a", plan_of(*"abc"), lengths=dict.fromkeys("abc", "--max-tokens 409"))
    for name, length in dict(a="--max-tokens 409", b="--max-tokens 4096", c=None).items():
        measured.add(Result(name, 1, 1, "s", 1.0, COMPLETE, None, length=length))
    assert measured.names_of_another_length() == {"b"}


def test_newest(tmp_path):
    """Of each kind, the last one, whatever the clock said, of which a run came to its end, or else
    the last that tells why none did."""
    for id, kind, error in (
        ("1", "", None),
        ("2", "k", None),
        ("3", "", None),
        ("4", "", "it broke"),
        ("5", "failed", "it broke"),
    ):
        path = write_journal(
            tmp_path,
            "x",
            plan_of("a", kind=kind),
            [dict(name="a", error=error)],
            id=id,
            time="20260101T000000Z",
        )
    assert [each.id for each in newest(read_journal(path))] == ["3", "2", "5"]


HOLD = """
import pathlib, sys
from bench import common
from bench.measure.lock import {0}
from gpt_speed import children
common.BUILD = pathlib.Path("build").absolute()
children.HOME = common.BUILD.parent
with {0}(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def holding(lock: str, folder):
    """Another process, which holds a lock until this one kills it; its clone is folder's parent."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD.format(lock), folder],
        cwd=folder.parent,
        text=True,
        env=environment(PYTHONPATH=str(ROOT)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout.readline() == "held\n"
        yield holder
        holder.kill()


def test_one_writer_of_a_folder(tmp_path):
    """A second one is refused, until the first one ends, even by SIGKILL."""
    folder = tmp_path / "new"
    with holding("locked", folder) as holder:
        with pytest.raises(UserError, match="^another measurement is running in .*new$"):
            with locked(folder):
                pass
        with locked(tmp_path):  # another folder
            holder.kill()
    with locked(folder):
        pass


def test_one_measurement_at_a_time(tmp_path, monkeypatch):
    """Also in another folder of results."""
    monkeypatch.setattr("bench.common.BUILD", tmp_path / "build")
    monkeypatch.setattr(children, "HOME", tmp_path)
    with holding("measuring", tmp_path / "one"):
        with pytest.raises(UserError, match="^another measurement of this clone is running"):
            with measuring(tmp_path / "other"):
                pass
        with locked(tmp_path / "other"):  # nothing is measured
            pass
    with measuring(tmp_path / "other"):
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the environment of processes")
def test_the_folder_of_the_lock_may_have_the_results(tmp_path, monkeypatch):
    monkeypatch.setattr("bench.common.BUILD", tmp_path / "build")
    monkeypatch.setattr(children, "HOME", tmp_path)
    with measuring(tmp_path / "build"):
        pass


def test_what_a_killed_measurement_has_left_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr("bench.common.BUILD", tmp_path / "build")
    monkeypatch.setattr("bench.measure.lock.PATIENCE", 0.5)
    monkeypatch.setattr(children, "HOME", tmp_path)
    sleep = subprocess.Popen(
        ["sleep", "300"], env=os.environ | dict(GPT_SPEED_MARKS=f"{children.clone_mark()} x")
    )
    try:
        with pytest.raises(UserError, match=f"still runs, .*: process {sleep.pid}$"):
            with measuring(tmp_path):
                pass
    finally:
        sleep.kill()
        sleep.wait()
    with measuring(tmp_path):
        pass


def test_tokens_that_took_the_place_of_those_in_meta_json(tmp_path):
    data = write_tokens(tmp_path / "data")
    assert data_of(data) == data_of(shutil.copytree(data, tmp_path / "copy"))
    train = data / "train.bin"
    train.write_bytes(bytes(train.stat().st_size))
    with pytest.raises(UserError, match="train.bin isn't what meta.json says"):
        data_of(data)
    assert data_of(tmp_path / "none") is None
