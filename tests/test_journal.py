"""bench/measure/journal.py: what is written is read back, whatever a crash leaves of it."""

import itertools
import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT
from made_up import CPU, MACHINE, PEAK, measured_of, plan_of, write_journal

from bench.common import UserError
from bench.measure.journal import append, locked, newest, read_journal
from bench.measure.records import COMPLETE, Kind, Outcome


def keys(measured) -> list[tuple]:
    return [(result.name, result.round) for result in measured.results]


def test_round_trip(tmp_path):
    plan = plan_of("a", "b", kind="k", rounds=2, options=["--dropout", "0"], targets={"best": 3.5},
                   memory_limit_gb=8.0, new_seeds=True)
    plan.runs[1] = plan.runs[1].but(options=("--batch-size", "4"), batch=4, error="no")
    runs = [dict(name="a", speed=120.0, seconds=7.5), dict(name="a", round=2, error="it broke")]
    path = write_journal(tmp_path, "ladder", plan, runs, MACHINE, options=["--x", "y z"])
    (found,) = read_journal(path)
    line = json.loads(path.read_bytes().splitlines()[0])
    assert json.loads(json.dumps(found.as_json())) == line
    assert found.plan == plan
    assert (found.study, found.kind, found.folder) == ("ladder", "k", tmp_path)
    assert (found.machine, found.matmul_peak, found.options) == (MACHINE, PEAK, ["--x", "y z"])
    good, bad = found.results
    assert (good.key, good.seconds, good.outcome) == (("a", 1, 123), 7.5, COMPLETE)
    assert good.record.tok_per_sec == 120
    assert (bad.key, bad.record) == (("a", 2, 124), None)
    assert bad.outcome == Outcome(Kind.FAILED, "it broke")
    assert read_journal(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize(("record", "says"), [
    (dict(status="diverged"), "diverged: "),
    (dict(steps=4, avg_tok_per_sec=None), "too short for a speed"),
    (dict(start=dict(stage="b")), "its record is that of another run"),
])
def test_a_record_without_figures_is_a_failed_run(tmp_path, record, says):
    path = write_journal(tmp_path, "x", plan_of("a"), [dict(name="a", **record)])
    (result,) = read_journal(path)[0].results
    assert result.record is None and result.outcome.text.startswith(says)


def test_an_outcome_is_kept_by_its_kind(tmp_path):
    """Whatever its words are; one that isn't known is no outcome."""
    path = write_journal(tmp_path, "x", plan_of("a"), [
        dict(name="a", error="out of memory", kind=Kind.HUNG)])
    (result,) = read_journal(path)[0].results
    assert result.outcome == Outcome(Kind.HUNG, "out of memory")
    path.write_text(path.read_text().replace('"hung"', '"odd"'))
    assert read_journal(path)[0].results == []


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
        capsys.readouterr()
        assert keys(*read_journal(path)) == [("a", 1)], size
        assert capsys.readouterr().err == ""  # a crash is no damage
        append(path, *run_b)
        assert keys(*read_journal(path)) == [("a", 1), ("b", 1)], size
    path.write_bytes(before + b"".join(run_b)[:only_its_end])
    assert keys(*read_journal(path)) == [("a", 1), ("b", 1)]


@pytest.mark.parametrize("damage", [b"", b"{", b"{}", b"[]", b"null", b"\xff", b"\0" * 9,
                                    b"[" * 100_000, b'{"event": "run", "id": {}}'])
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


def test_resumed(tmp_path):
    """A further line of the study: more rounds, another run. It is now the newest."""
    write_journal(tmp_path, "x", plan_of("a", rounds=1), [dict(name="a")])
    write_journal(tmp_path, "x", plan_of("a"), [dict(name="a")], id="2")
    path = write_journal(tmp_path, "x", plan_of("a", "b", rounds=2),
                         [dict(name="a", round=2), dict(name="b")], CPU | dict(threads=9))
    other, found = read_journal(path)
    assert (other.id, found.id, found.plan.rounds, found.machine["threads"]) == ("2", "1", 2, 9)
    assert [run.name for run in found.plan.runs] == ["a", "b"]
    assert keys(found) == [("a", 1), ("a", 2), ("b", 1)] and keys(other) == [("a", 1)]


@pytest.mark.parametrize("damage", [dict(plan=dict(runs=3)), dict(plan=dict(runs=[{}])),
                                    dict(id=[])])
def test_a_damaged_line_of_a_resumption_leaves_what_was_there(tmp_path, capsys, damage):
    plan = plan_of("a", rounds=1)
    path = write_journal(tmp_path, "x", plan, [dict(name="a")])
    append(path, measured_of("x", plan).as_json() | damage)
    (found,) = read_journal(path)
    assert found.plan == plan and keys(found) == [("a", 1)]
    assert "x.jsonl, line 10: " in capsys.readouterr().err


def test_the_clock_was_set_back(tmp_path):
    """What was measured last is the newest, whatever the clock said."""
    for id, time in (("1", "20260101T000000Z"), ("2", "19700101T000000Z")):
        path = write_journal(tmp_path, "x", plan_of("a"), [dict(name="a")], id=id, time=time)
    assert [each.id for each in newest(read_journal(path))] == ["2"]


def test_what_counts(tmp_path):
    """Of a run that was repeated the last one; nothing of another script than is named last."""
    runs = [dict(name="a", error="it broke"), dict(name="b"), dict(name="a", speed=50.0),
            dict(name="a", speed=60.0), dict(name="a", seed=124, speed=70.0)]
    write_journal(tmp_path, "x", plan_of("a", "b"), runs)
    path = write_journal(tmp_path, "x", plan_of("a", "b"), sources=dict(a="s", b="changed"))
    (found,) = read_journal(path)
    assert [result.record.tok_per_sec for result in found.results] == [60, 70]


def test_a_journal_of_before_commits_were_kept(tmp_path):
    path = write_journal(tmp_path, "x", plan_of("a"), [dict(name="a")])
    header, *rest = path.read_text().splitlines(keepends=True)
    header = json.loads(header)
    del header["commit"], header["edited"]
    path.write_text("".join([json.dumps(header) + "\n", *rest]))
    (found,) = read_journal(path)
    assert (found.commit, found.edited, len(found.results)) == (None, None, 1)


def test_newest(tmp_path):
    """Of each kind, the last one of which a run came to its end, or else the last that tells why
    none did."""
    for id, kind, error in (("1", "", None), ("2", "k", None), ("3", "", None),
                            ("4", "", "it broke"), ("5", "failed", "it broke")):
        path = write_journal(tmp_path, "x", plan_of("a", kind=kind),
                             [dict(name="a", error=error)], id=id)
    assert [each.id for each in newest(read_journal(path))] == ["3", "2", "5"]


@pytest.mark.parametrize(("errors", "results", "has"), [
    ([None, "can't"], [], False),
    (["can't", "can't"], [], True),  # a finding as well
    ([None, None], ["it broke"], False),
    ([None, None], ["it broke", None], True),
])
def test_has_figures(tmp_path, errors, results, has):
    plan = plan_of("a", "b")
    plan.runs = [run.but(error=error) for run, error in zip(plan.runs, errors, strict=True)]
    runs = [dict(name=name, error=error) for name, error in zip("ab", results, strict=False)]
    (found,) = read_journal(write_journal(tmp_path, "x", plan, runs))
    assert found.has_figures is has


HOLD = """
import pathlib, sys
from bench.measure.journal import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_measurement_at_a_time(tmp_path, monkeypatch):
    """A second one is refused, until the first one ends, even by SIGKILL."""
    folder = tmp_path / "new"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, folder], cwd=ROOT, text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="^another measurement is running in .*new$"):
            with locked(folder):
                pass
        with locked(tmp_path):  # another folder
            pass
        holder.kill()
    monkeypatch.setattr("fcntl.flock", lambda *_: os.readlink("."))  # EINVAL, as without locks
    with pytest.raises(OSError, match="Invalid argument"):
        with locked(folder):
            pass
    monkeypatch.undo()
    for _ in range(2):  # the second time, after an orderly end
        with locked(folder):
            pass
