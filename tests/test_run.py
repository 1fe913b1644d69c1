"""bench/measure/run.py, lengths.py, bench/processes.py: what runs, how, and how long; with made-up
runs in place of real ones."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, TINY, environment, run_python
from made_up import (
    CPU,
    FLOAT32,
    MACHINE,
    PEAK,
    Children,
    plan_of,
    setup_of,
    write_journal,
    write_record,
)

from bench import common, processes
from bench.analysis.rows import rows_of
from bench.catalogue import Run
from bench.common import ELSEWHERE, UserError, sha256
from bench.measure import lengths, run
from bench.measure.estimates import in_words, seconds_left, time_left, within_memory
from bench.measure.journal import data_of, journal_of, read_journal
from bench.measure.plan import SCRATCH, Job
from bench.studies import Study


class Toy(Study):
    """A study of the plans that it is made with."""

    name = "toy"

    def __init__(self, *plans, collected=None):
        self.made_with, self.collected = plans, collected

    def plans(self, setup):
        for plan in self.made_with:  # noqa: UP028 (a tuple takes no rows)
            yield plan

    def collect(self, setup, folder):
        if self.collected:
            raise self.collected


class Place:
    """A folder to measure in."""

    def __init__(self, folder: Path, monkeypatch):
        self.folder, self.setup = folder, setup_of(folder / "results")
        self.path = journal_of(self.setup.results, "toy")
        self.children = Children(monkeypatch, folder / "build")
        self.setup.data = folder / "data"
        self.setup.data.mkdir()
        self.meta = self.setup.data / "meta.json"
        self.meta.write_text('{"tokens": {"train": 4096}}')

    def plan(self, *names, **settings):
        """Each run has a script of its own, NAME.py."""
        plan = plan_of(*names, **settings)
        for place, each in enumerate(plan.runs):
            script = self.folder / f"{each.name}.py"
            script.exists() or script.write_text(each.name)
            plan.runs[place] = each.but(script=script)
        return plan

    def events(self, kind: str) -> list[dict]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def run(self, *what, rounds=1, resume=False, deadline=None):
        """Measures plans, or a study. Returns what this start ran: names, rounds and seeds."""
        study = what[0] if isinstance(what[0], Study) else Toy(*what)
        before = len(self.events("run"))
        self.finished, self.measured = run.run_study(
            study, self.setup, rounds, resume, deadline and time.monotonic() + deadline)
        return [(event["name"], event["round"], event["seed"])
                for event in self.events("run")[before:]]

    def one(self, what):
        """The only result of a measurement in a journal of its own."""
        self.path.unlink(missing_ok=True)
        self.run(what)
        (result,) = self.measured[0].results
        assert read_journal(self.path)[0].results == [result]  # the journal says the same
        return result


@pytest.fixture
def place(tmp_path, monkeypatch):
    return Place(tmp_path, monkeypatch)


@pytest.fixture
def plan(place):
    return place.plan("a", "b", seed_noise=True)


ROUND = [("a", 1, 123), ("a", 1, 124), ("b", 1, 123)]
NEXT = [("a", 2, 123), ("a", 2, 125), ("b", 2, 123)]


# ---- What runs


def test_the_order_of_the_runs(monkeypatch, place):
    """Drawn anew for each pair of rounds, of which the second has it backwards; the journal keeps
    the seed, so that a resumed measurement goes on in it."""
    monkeypatch.setattr("bench.measure.run.order_of", lambda id: 7)
    plan = place.plan(*"abcdef", seed_noise=2)
    ran = place.run(plan, rounds=4)
    rounds = [[(name, seed) for name, number, seed in ran if number == k] for k in range(1, 5)]
    assert [sorted(each) for each in rounds] == [sorted([
        *((name, 123) for name in "abcdef"), ("a", 124 + 2 * k), ("a", 125 + 2 * k)])
        for k in range(4)]
    names = [[name for name, _ in each] for each in rounds]
    assert names[1] == names[0][::-1] and names[3] == names[2][::-1]
    assert names[0] != names[2] and sorted(names[0]) != names[0]
    assert place.measured[0].plan.order == 7
    lines = place.path.read_text().splitlines(keepends=True)
    starts = [number for number, line in enumerate(lines) if line.startswith('{"event": "run"')]
    place.path.write_text("".join(lines[:starts[-3]]))
    assert place.run(plan, rounds=4, resume=True) == ran[-3:]


def test_runs_that_depend_on_smaller_ones_keep_their_order(monkeypatch, place):
    monkeypatch.setattr("bench.measure.run.order_of", lambda id: 7)
    plan = place.plan(*"abcdef")
    plan.runs = [each.but(after=before) for before, each in zip([None, *"abcde"], plan.runs,
                                                                 strict=True)]
    assert [name for name, *_ in place.run(plan, rounds=2)] == [*"abcdef"] * 2


def test_rounds_that_are_added(place, plan):
    """The journal tells how many were planned, but for the single first round of a report."""
    for rounds, planned in ((1, None), (3, None), (3, None), (5, 3), (6, 3)):
        place.run(plan, rounds=rounds, resume=rounds > 1)
        assert [each.planned for each in (*place.measured, *read_journal(place.path))] == [
            planned] * 2


@pytest.mark.parametrize("done, rounds, planned", [(2, 5, None), (5, 3, None), (5, 5, 3)])
def test_more_rounds_of_an_interrupted_study(place, plan, done, rounds, planned):
    """Who asks for them in its second round may have seen factors, in the first one none."""
    place.run(plan, rounds=3)
    lines = place.path.read_text().splitlines(keepends=True)
    ends = [number for number, line in enumerate(lines, 1) if '"event": "ran"' in line]
    place.path.write_text("".join(lines[:ends[done - 1]]))
    assert place.run(plan, rounds=rounds, resume=True)
    assert place.measured[0].planned == planned


def test_a_journal_of_two_stages_goes_on(place, plan):
    """In older ones some of the runs went on after the rounds of all."""
    ran = place.run(plan, rounds=2)
    text = place.path.read_text()
    place.path.write_text(text.replace(
        '"rounds": 2', '"rounds": 5, "whole_rounds": 2, "close": ["b"], "looks": 2'))
    (read,) = read_journal(place.path)
    assert (read.plan.rounds, read.is_finished, len(read.results)) == (2, True, len(ran))
    assert len(place.run(plan, rounds=3, resume=True)) == len(ran) // 2


def test_rounds(place, plan, capsys):
    place.children.does["b"] = dict(speed=200)
    assert place.run(plan, rounds=2) == ROUND + NEXT and place.finished
    (kept,) = read_journal(place.path)
    assert kept.results == place.measured[0].results and kept.plan.rounds == 2
    assert kept.results[2].record.tok_per_sec == 200
    assert (kept.matmul_peak, kept.machine, kept.data) == (PEAK, CPU, data_of(place.setup.data))
    assert {event["matmul_rate"] for event in place.events("ran")} == {4e12}
    assert place.children.asked == ["matmul_rate"] * 6  # the peak was known
    assert "round 1: a, seed 124: 100 tok/sec, val loss 8.000, 0 s; 0 s left" in (
        capsys.readouterr().out)
    assert len(place.run(place.plan("a", rounds=3), rounds=2)) == 3  # the plan's own come first
    for seed_noise in (0, 1):  # a new seed in each round is one already
        assert place.run(place.plan("a", new_seeds=True, first_seed=7, seed_noise=seed_noise),
                         rounds=2) == [("a", 1, 7), ("a", 2, 8)]


def test_a_failed_run_is_not_repeated_until_it_is_resumed(place, plan, capsys):
    place.children.does["b"] = dict(status="failed", error="it broke")
    assert place.run(plan, rounds=2) == ROUND + NEXT[:2] and place.finished
    assert run.failed(place.measured[0])
    assert "b: failed: it broke; " in capsys.readouterr().out
    assert place.run(plan, rounds=2, resume=True) == [ROUND[2]]  # it fails again
    place.children.does.clear()
    assert place.run(plan, rounds=2, resume=True) == [ROUND[2], NEXT[2]]
    assert not run.failed(place.measured[0])
    assert place.run(plan, rounds=2, resume=True) == []


def test_resume_repeats_what_is_missing_or_changed(place, plan, capsys):
    place.run(plan, rounds=1)
    assert place.run(plan, rounds=2, resume=True) == NEXT
    assert "measured again" not in capsys.readouterr().out
    (place.folder / "b.py").write_text("another script")
    run.dry_run(Toy(plan), place.setup, 2, resume=True)
    assert "measured again, since script or options have changed: b\n" in capsys.readouterr().out
    assert place.run(plan, rounds=2, resume=True) == [ROUND[2], NEXT[2]]
    assert "measured again, since script or options have changed: b\n" in capsys.readouterr().out
    assert {(event["name"], event["source_sha256"]) for event in place.events("run")} == {
        (name, sha256(text)) for name, text in (
            ("a", b"a"), ("b", b"b"), ("b", b"another script"))}
    more = place.plan("a", "b", "c", seed_noise=True)
    assert place.run(more, rounds=1, resume=True) == [("c", 1, 123)]
    assert len({event["id"] for event in place.events("study")}) == 1
    (kept,) = read_journal(place.path)
    assert [result.key for result in kept.results if result.record] == [
        *ROUND[:2], *NEXT[:2], ROUND[2], NEXT[2], ("c", 1, 123)]


def test_the_commit_is_that_of_the_last_start_that_measured(place, plan, monkeypatch):
    place.run(plan, rounds=1)
    monkeypatch.setattr(processes, "git_commit", lambda: ("fedcba", True))
    place.run(plan, rounds=1, resume=True)  # nothing is left to measure
    (found,) = read_journal(place.path)
    assert (found.commit, found.edited) == ("0123456789abcdef", False)
    place.run(plan, rounds=2, resume=True)
    (found,) = read_journal(place.path)
    assert (found.commit, found.edited) == ("fedcba", True)


def test_git_commit(tmp_path, monkeypatch):
    """What results/ holds is no edit; no clone has no commit."""
    monkeypatch.setattr(processes, "ROOT", tmp_path)
    assert processes.git_commit() == (None, None)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "results").mkdir()
    files = [tmp_path / "results" / "x.jsonl", tmp_path / "a.patch"]
    for path in files:
        path.write_text("")
    for command in (["init"], ["add", "."], ["commit", "-m", "first"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True, capture_output=True)
    files[0].write_text("more")
    commit, edited = processes.git_commit()
    assert len(commit) == 40 and edited is False
    files[1].write_text("more")
    assert processes.git_commit() == (commit, True)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert processes.git_commit() == (None, None)


def test_a_run_that_left_the_plan_fails_nothing(place):
    place.children.does["b"] = dict(status="failed", error="it broke")
    place.run(place.plan("a", "b"))
    assert place.run(place.plan("a"), resume=True) == []
    assert not run.failed(place.measured[0])


def test_a_run_that_cannot_run(place, plan):
    plan.runs[1] = plan.runs[1].but(error="conflict: here", script="no such script")
    assert place.run(plan) == ROUND[:2] and not run.failed(place.measured[0])
    plan.runs = [plan.runs[1]]
    assert place.run(plan) == [] and read_journal(place.path)[-1].has_figures


def test_deadline(place, plan):
    assert place.run(plan, deadline=5) == []  # the first one is thought to take 13 s
    assert not place.finished
    assert place.run(plan, resume=True, deadline=60) == ROUND and place.finished
    assert place.run(plan, rounds=2, resume=True, deadline=5) == NEXT  # by round 1 they take none


def meta(text):
    return lambda place: place.meta.write_text(text)


def setup(**changes):
    return lambda place: vars(place.setup).update(changes)


@pytest.mark.parametrize(("change", "resume", "says"), [
    (setup(options=["--dropout"]), True, "with other options behind --"),
    (setup(options=["--dropout"]), None, "with other options behind --"),
    (setup(machine=MACHINE), True, "on another machine, or with another PyTorch"),
    (setup(machine=CPU | dict(torch="2.0")), True, "on another machine, or with another PyTorch"),
    (meta('{"tokens": {"train": 9}}'), True, "with other tokens"),
    (dict(tokens=1), True, "with other --max-tokens"),
    (dict(seconds=1.0), True, "with other --seconds"),
    (dict(targets={"best": 1.0}), True, "with other targets"),
    (dict(seed_noise=False), True, "with other seed_noise"),
    (lambda place: setattr(place.children, "refuses", "unrecognized: --x"), True, "unrecognized"),
    *((meta(text), False, "meta.json is damaged")
      for text in ("", "[]", '{"tokens": {"train": "x"}}', '{"tokens": {}}')),
])
def test_what_is_refused_leaves_what_was_there(place, plan, change, resume, says):
    place.run(plan)
    before = place.path.read_bytes()
    if callable(change):
        change(place)
    else:
        plan = place.plan("a", "b", **dict(seed_noise=True) | change)
    with pytest.raises(UserError, match=says) as error:
        place.run(plan, rounds=2, resume=resume)
    if "other " in says:
        assert str(error.value).startswith("can't resume ") and error.value.code == 2
        anew = "without --resume a new one begins" if resume else ELSEWHERE  # None: of a report
        assert str(error.value).endswith(f"toy.jsonl: it was measured {says}; {anew}")
    assert place.path.read_bytes() == before


def test_resumed_without_its_tokens(place, plan, monkeypatch):
    """They are prepared again; where they come out as others, that is told."""
    place.run(plan)
    before, tokens = place.path.read_bytes(), place.meta.read_text()
    made = iter(['{"tokens": {"train": 9}}', tokens])
    monkeypatch.setattr(processes, "ask", lambda *_, **__: place.meta.write_text(next(made)))
    place.meta.unlink()
    with pytest.raises(UserError, match="has other tokens than were measured so far"):
        place.run(plan, rounds=2, resume=True)
    assert place.path.read_bytes() == before
    place.meta.unlink()
    assert place.run(plan, rounds=2, resume=True) == NEXT


def test_resumed_after_an_interruption_before_its_first_run(place, plan, monkeypatch):
    place.run(plan)
    place.setup.matmul_peak, ask = None, processes.ask_machine

    def interrupted(question):
        raise processes.Interrupted(2)

    monkeypatch.setattr(processes, "ask_machine", interrupted)
    monkeypatch.setattr(os, "getpid", lambda: 7)  # another process
    with pytest.raises(processes.Interrupted):
        place.run(plan)
    monkeypatch.setattr(processes, "ask_machine", ask)
    assert place.run(plan, resume=True) == ROUND  # not the older one
    assert place.measured[0].matmul_peak == PEAK


def test_nothing_to_resume(place, plan):
    with pytest.raises(UserError, match="nothing to resume in .*toy.jsonl") as error:
        place.run(plan, resume=True)
    assert error.value.code == 2 and not place.path.exists()
    assert place.run(plan, resume=None) == ROUND  # as a report does
    assert place.run(plan, resume=None) == []


def test_a_new_start_is_another_measurement(place, plan):
    write_journal(place.setup.results, "toy", plan, [dict(name="a")])
    assert place.run(plan) == ROUND
    first, second = read_journal(place.path)
    assert first.id != second.id and len(second.results) == 3
    assert place.run(plan, rounds=2, resume=True) == NEXT
    assert read_journal(place.path)[1].id == second.id


# ---- Plans that depend on others


class Dependent(Toy):
    """First a and b, then the faster one alone, and beside it the other."""

    def plans(self, setup):
        rows = rows_of((yield self.made_with[0]))
        best, other = sorted(rows, key=lambda row: -row.tok_per_sec)
        plan = self.made_with[1]
        a_and_b = {each.name: each for each in plan.runs}
        plan.runs = [a_and_b[best.run.name].but(compared_to=None)]
        (row,) = rows_of((yield plan))
        assert row.rounds == 2
        plan.runs.append(a_and_b[other.run.name].but(compared_to=None))
        yield plan


def test_a_plan_may_depend_on_the_rows_of_the_one_before(place):
    def study():
        return Dependent(place.plan("a", "b", kind="first", rounds=1), place.plan("a", "b"))

    place.children.does["b"] = dict(speed=200)
    whole = [("a", 1, 123), ("b", 1, 123), ("b", 1, 123), ("b", 2, 123), ("a", 1, 123),
             ("a", 2, 123)]
    assert place.run(study(), rounds=2) == whole
    assert [(each.kind, len(each.results)) for each in place.measured] == [("first", 2), ("", 4)]
    assert [(each.kind, each.results) for each in read_journal(place.path)] == [
        (each.kind, each.results) for each in place.measured]
    for place.children.stop_at in (2, 3, 5):
        place.path.unlink()
        place.children.calls.clear()
        with pytest.raises(processes.Interrupted):
            place.run(study(), rounds=2)
        assert place.run(study(), rounds=2, resume=True) == whole[
            place.children.stop_at - 1 :]


def test_what_depends_on_an_older_plan_begins_anew(place, capsys):
    first, second = place.plan("a", "b", kind="first", rounds=1), place.plan("a", "b")
    data = data_of(place.setup.data)
    write_journal(place.setup.results, "toy", second, id="1", data=data)
    write_journal(place.setup.results, "toy", first, id="2", data=data)
    place.run(Dependent(first, second), rounds=2, resume=True)
    assert place.measured[0].id == "2" and place.measured[1].id not in "12"
    assert "is older than the measurement on which they depend" in capsys.readouterr().out


# ---- Until nothing more fits


def sizes(place, **settings):
    plan = place.plan("a", "b", "c", until_full=True, **settings)
    plan.runs = [each.but(after=each.compared_to, growth=4) for each in plan.runs]
    return plan


@pytest.mark.parametrize(("does", "fits"), [
    (dict(status="out_of_memory", error="out of memory: lower it"), False),
    (lambda *_: (1, "", "error: rank 1: out of memory: lower it"), False),  # before its record
    (lambda *_: (1, "", "error: the text is too short: 9 windows"), False),
    (lambda *_: (-9, "", ""), False), (lambda *_: (-11, "", ""), True),
    (dict(status="failed", error="it broke"), True)])
def test_larger_ones_are_not_tried(place, does, fits):
    """That a run doesn't fit is a finding; another failure is tried again by a resume."""
    plan = sizes(place)
    place.children.does["b"] = does
    assert place.run(plan, rounds=2) == [("a", 1, 123), ("b", 1, 123), ("a", 2, 123)]
    assert run.failed(place.measured[0]) is fits
    *_, last = rows_of(place.measured[0])
    assert last.error == "not tried, since b failed"
    place.children.does.clear()
    assert place.run(plan, rounds=2, resume=True) == (
        [("b", 1, 123), ("c", 1, 123), ("b", 2, 123), ("c", 2, 123)] if fits else [])


def test_memory_limit(place):
    place.children.does |= dict(a=dict(reserved_gb=0.5), b=dict(reserved_gb=2.0))
    assert place.run(sizes(place, memory_limit_gb=4.0)) == [("a", 1, 123), ("b", 1, 123)]
    *_, last = rows_of(place.measured[0])
    assert last.error == "not tried: 4 times the 2.0 GB of b would be more than half of the RAM"
    assert not run.failed(place.measured[0])


# ---- By which command, and what a run leaves


def test_a_speed_by_hand_is_of_the_same_pytorch(tmp_path):
    """A record that doesn't name it tells none."""
    setup, configs = setup_of(tmp_path), {"a": dict(model="cpu-demo", context_length=256)}
    for torch, told in (("2.13", {"00_orig": 4096.0}), ("2.12", {}), (None, {})):
        environment = dict(gpu=None, cpu="Some CPU") | (dict(torch=torch) if torch else {})
        write_record(tmp_path, "00_orig", speed=4096.0, start=dict(environment=environment))
        assert lengths.speeds_by_hand(setup, configs) == told


def test_dry_run(place, plan, capsys):
    """Nothing is measured and no results are left, only the scripts, for the commands to be typed;
    without a journal there is no estimate. The command of each run is told once, and that of other
    seeds."""
    plan.runs[1] = plan.runs[1].but(script="made")
    place.setup.scripts.texts["made"] = b"made\n"
    before = sorted(place.folder.rglob("*"))
    run.dry_run(Toy(plan), place.setup, 3, resume=False)
    lines = capsys.readouterr().out.splitlines()
    (made,) = (path for path in place.folder.rglob("*") if path not in before and path.is_file())
    assert made.parent.parent == place.folder / "build" / "scripts" and f" {made.name} " in (
        lines[2].replace(os.sep, " ")) and not place.children.calls
    assert [line.partition(": python ")[0] for line in lines[:-1]] == ["3 rounds"] * 3
    assert all(" --max-tokens 4096 " in line for line in lines[:-1])
    assert [("--name a " in line, "--seed 123 " in line, "(then --seed 125, 126)" in line)
            for line in lines[:-1]] == [
        (True, True, False), (True, False, True), (False, True, False)]
    assert lines[-1] == "9 runs; no estimate yet: nothing is measured here"
    assert place.children.asked == []
    plan.seconds = 10
    run.dry_run(Toy(plan), place.setup, 2, resume=False)
    assert "; --max-tokens follows from a rate that isn't measured\n" in capsys.readouterr().out
    plan.seconds = 0
    stages = plan_of("a", tokens=9)  # another study's speed tells roughly
    write_journal(place.setup.results, "stages", stages, [dict(name="a", speed=4096.0)])
    run.dry_run(Toy(plan), place.setup, 2, resume=False)
    assert "6 runs, about 66 s (a rough estimate)\n" in capsys.readouterr().out  # of 10 + 1
    journal_of(place.setup.results, "stages").unlink()
    by_hand = write_record(place.setup.results, "00_orig", speed=4096.0)  # as make bench leaves it
    run.dry_run(Toy(plan), place.setup, 2, resume=False)
    assert "6 runs, about 66 s (a rough estimate)\n" in capsys.readouterr().out
    by_hand.unlink()
    with pytest.raises(UserError, match="nothing to resume"):
        run.dry_run(Toy(plan), place.setup, 2, resume=True)
    place.run(plan)
    made = Path(place.children.calls[-1].command[1])  # in a folder of its content
    assert made.read_text() == "made\n" and made.name == "b.py"
    assert made.parent.name == sha256(b"made\n")[:16]
    before = place.path.read_bytes()
    run.dry_run(Toy(plan), place.setup, 2, resume=True)
    assert capsys.readouterr().out.endswith("3 runs, about 0 s (by an earlier one)\n")
    (place.folder / "a.py").write_text("another script")
    run.dry_run(Toy(plan), place.setup, 1, resume=True)
    assert "\n2 runs, about " in capsys.readouterr().out  # both seeds of a
    assert place.path.read_bytes() == before


def test_a_dry_run_says_what_cannot_run(place, capsys):
    plan = place.plan("a", "b")
    plan.runs[1] = plan.runs[1].but(error="needs a thing")
    run.dry_run(Toy(plan), place.setup, 1, resume=False)
    told, *rest = capsys.readouterr().out.splitlines()
    assert told.startswith("1 round: python ")
    assert rest == ["not run: b: needs a thing",
                    "1 runs; no estimate yet: nothing is measured here"]


def child(code=0, err="", whole=True, hangs=False, **record):
    """What stands in for run_child; it leaves a record if `record` says something of it."""
    def run_child(command, environment):
        name, seed, folder = (command[command.index(option) + 1]
                              for option in ("--name", "--seed", "--results-dir"))
        if record:
            path = write_record(Path(folder), name, seed=int(seed), **record)
            if not whole:
                path.write_text("".join(path.read_text().splitlines(True)[:-1]) + '{"event": "en')
        if hangs:
            raise subprocess.TimeoutExpired(command, 1)
        return code, "", err

    return run_child


INTERRUPTED = dict(status="interrupted", error="interrupted by signal SIGTERM")


HUNG = "ended after 364 s: it hung, or is far too slow"


@pytest.mark.parametrize(("does", "error", "kind"), [
    (child(0), "it left no record", "failed"),
    (child(1, "error: no memory\nand more"), "no memory", "failed"),
    (child(1, "error: the text is too short: 1"), "the text is too short: 1", "text_too_short"),
    (child(1, "Traceback:\nZeroDivisionError: 1/0\n"), "ZeroDivisionError: 1/0", "failed"),
    (child(1, "error: it broke", speed=100), "it broke", "failed"),
    (child(-6), "ended by signal 6", "failed"),
    (child(-9, speed=100, whole=False), "ended by signal 9", "killed"),
    (child(1, "W: x\nerror: rank 3: no memory\n", speed=100, whole=False), "rank 3: no memory",
     "failed"),
    (child(1, "error: rank 0: no", status="failed", error="it broke"), "rank 0: no", "failed"),
    (child(1, "error: rank 0: out of memory: y", status="failed", error="it broke"),
     "rank 0: out of memory: y", "out_of_memory"),
    (child(1, "error: lower it", status="diverged", error="lower it"), "diverged: lower it",
     "failed"),
    (child(1, status="out_of_memory", error="out of memory: x"), "out of memory: x",
     "out_of_memory"),
    (child(hangs=True), HUNG, "hung"),
    (child(hangs=True, **INTERRUPTED), HUNG, "hung"),
    (dict(steps=4, avg_tok_per_sec=None), "too short for a speed: raise --max-tokens", "failed"),
    (dict(speed=100), "", "complete"),
])
def test_why_a_run_failed(place, capsys, does, error, kind):
    place.children.does["a"] = does
    result = place.one(place.plan("a"))
    assert (result.outcome.text, result.outcome.kind) == (error, kind)
    assert bool(result.record) is (kind == "complete")
    assert place.events("ran")[0]["outcome"] == kind
    assert capsys.readouterr().err == ""  # every line of the journal is whole


def test_what_a_study_collects(place):
    """Its error is that of a run which has none itself."""
    study = Toy(place.plan("a"), collected=ValueError("it left no trace"))
    assert place.one(study).outcome.text == "it left no trace"
    place.children.does["a"] = child(1, "error: it broke")
    assert place.one(study).outcome.text == "it broke"


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]


@pytest.mark.parametrize(("changes", "launcher", "variables"), [
    ({}, [], {}),
    (dict(torchrun=True), [*TORCHRUN, "--nproc_per_node=1"], {}),
    (dict(torchrun=True, processes=2, cores=2),
     [*TORCHRUN, "--nproc_per_node=2"], {"OMP_NUM_THREADS": "1"}),
])
def test_command(place, changes, launcher, variables):
    """A run's own options come last; its folders live as long as it does."""
    plan = place.plan("a", options=["--batch-size", "8"])
    plan.runs[0] = plan.runs[0].but(options=("--batch-size", "2", "--to", SCRATCH), **changes)
    place.setup.options.extend(["--dropout", "0"])
    folders = []

    def leave(command, environment):
        folders.append(Path(command[-1]))
        assert folders[0].is_dir()
        return child(speed=100)(command, environment)

    place.children.does["a"] = leave
    study = Toy(plan)
    study.environment = {"OWN": "1"}
    place.run(study)
    (call,) = place.children.calls
    assert call.command[1 : len(launcher) + 2] == [*launcher, str(place.folder / "a.py")]
    for option, value in (("--name", "a"), ("--device", "cpu"), ("--seed", "123"),
                          ("--data", place.setup.data), ("--results-dir", folders[0] / "results")):
        assert call.command[call.command.index(option) + 1] == str(value)
    assert call.command[-8:] == ["--batch-size", "8", "--dropout", "0", "--batch-size", "2",
                                 "--to", str(folders[0])]
    assert not folders[0].exists() and folders[0].parent == place.folder / "build"
    assert call.cores == changes.get("cores")
    caches = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
    assert {name: value for name, value in call.environment.items() if name not in caches} == (
        variables | {"OWN": "1"})
    (event,) = place.events("run")
    assert event["command"].startswith(" ".join(["python", *launcher]))
    assert event["command"].endswith(os.path.relpath(folders[0]))  # as a user would type it


@pytest.mark.parametrize(("settings", "files", "kept"), [
    # In order a, a with another seed, b; b has the script of a, but other options.
    (dict(), [1, 1, 1, 2, 3, 2], "cold cold cold warm warm warm"),
    (dict(cold_rounds=2), [1, 1, 1, 1, 1, 1], "cold cold cold cold cold cold"),
    (dict(cold_rounds=0), [1, 2, 1, 3, 4, 2], "warm warm warm warm warm warm"),
])
def test_compile_cache(place, plan, settings, files, kept):
    """The rounds that compile anew start with an empty one; other options have another one."""
    counts = []

    def compile(command, environment):
        cache = Path(environment["TORCHINDUCTOR_CACHE_DIR"])
        cache.mkdir(parents=True, exist_ok=True)
        (cache / str(len([*cache.iterdir()]))).touch()
        counts.append(len([*cache.iterdir()]))
        return child(speed=100)(command, environment)

    plan = place.plan("a", "b", seed_noise=True, **settings)
    plan.runs[1] = plan.runs[1].but(script=plan.runs[0].script, options=("--batch-size", "2"))
    place.children.does |= dict(a=compile, b=compile)
    place.run(plan, rounds=2)
    assert counts == files
    assert [event["cache"] for event in place.events("run")] == kept.split()


def test_no_option_leads_out_of_the_compiler_cache(place):
    """A cold round removes the cache, whatever the options say."""
    precious = place.folder / "data" / "train.bin"
    precious.write_text("tokens")
    options = ("--weights", "../../../data"), ("--name", "x" * 300), ("--to", "/")
    caches = set()

    def compile(command, environment):
        cache = Path(environment["TORCHINDUCTOR_CACHE_DIR"])
        cache.mkdir(parents=True, exist_ok=True)
        caches.add(cache)
        return child(speed=100)(command, environment)

    plan = place.plan("a", "b", "c", cold_rounds=2)
    plan.runs = [each.but(script=plan.runs[0].script, options=own)
                 for each, own in zip(plan.runs, options, strict=True)]
    place.children.does |= dict.fromkeys("abc", compile)
    place.run(plan, rounds=2)
    assert precious.read_text() == "tokens" and len(caches) == 3
    assert {cache.parent for cache in caches} == {place.folder / "build" / "compiler-cache"}


@pytest.mark.parametrize("outside", [
    "", "..", "x/../..", "link", "link/below", "../buildings"])
def test_only_what_is_in_build_is_removed(tmp_path, monkeypatch, outside):
    build, elsewhere = tmp_path / "build", tmp_path / "elsewhere"
    for folder in (build / "x" / "below", elsewhere / "below", tmp_path / "buildings"):
        folder.mkdir(parents=True)
    (build / "link").symlink_to(elsewhere)
    monkeypatch.setattr(common, "BUILD", build)
    with pytest.raises(UserError, match="so it isn't removed"):
        common.remove_built(build / outside)
    assert (elsewhere / "below").exists() and (tmp_path / "buildings").exists()
    common.remove_built(build / "x")
    common.remove_built(build / "x")  # nor is it an error where there is none
    assert build.exists() and not (build / "x").exists()


# ---- How long


class Phases(Toy):
    """Runs like the first of its second plan follow three times, and its third plan once."""

    def later(self, setup, plan):
        first, second, third = self.made_with
        like = replace(second, runs=second.runs[:1])
        return [(like, 3), (third, 1)] if plan is first else []


def test_an_estimate_is_of_the_whole_study(place, plan, capsys):
    """Of the plans that follow, too, whose runs may depend on the first one's results."""
    study = Phases(plan, place.plan("c", kind="next", tokens=8192),
                   place.plan("d", kind="last", rounds=1))
    run.dry_run(study, place.setup, 2, resume=False)
    assert "\n13 runs (7 of them with settings that follow from results); no estimate yet" in (
        capsys.readouterr().out)
    write_journal(place.setup.results, "stages", plan_of("a"), [dict(name="a", speed=4096.0)])
    run.dry_run(study, place.setup, 2, resume=False)  # runs take 10 s, and 1 for 4,096 tokens
    seconds = 6 * 11 + 3 * 2 * 12 + 11
    assert f"results), at most {seconds / 60:.0f} min (a rough" in capsys.readouterr().out
    place.children.does["b"] = dict(speed=4096.0)
    place.run(study, rounds=2)
    left = [line.rpartition("; ")[2] for line in capsys.readouterr().out.splitlines()
            if line.startswith("round ")]
    assert [line.startswith("at most ") for line in left] == [True] * 6 + [False] * 3


@pytest.mark.parametrize(("limit", "memory", "sizes"), [
    (8.0, [], "abcde"),  # nothing is known of it yet
    (8.0, [1.0], "abcd"), (8.0, [1.0, 1.5], "abcd"), (8.0, [1.0, 1.5, 2.0], "abcde"),
    (8.0, [1.0, 9.0], "a"), (8.0, [None], "abcde"), (None, [1.0, 9.0], "abcde")])
def test_what_grows_is_estimated_up_to_the_memory(place, limit, memory, sizes):
    plan = place.plan(*"abcde", until_full=True, memory_limit_gb=limit)
    plan.runs = [each.but(after=before, growth=2) for before, each in
                 zip([None, *"abcd"], plan.runs, strict=True)]
    seconds = {name: 10.0 * 2**number for number, name in enumerate("abcde")}
    results = [SimpleNamespace(name=name, seconds=seconds[name], record=SimpleNamespace(
        end=dict(reserved_gb=gb))) for name, gb in zip("abcde", memory, strict=False)]
    jobs = [Job(each, 1, 123) for each in plan.runs]
    assert "".join(job.run.name for job in within_memory(jobs, results, plan)) == sizes
    expected = {name: lengths.Length((), each) for name, each in seconds.items()}
    left = in_words(sum(seconds[name] for name in sizes))
    assert time_left(jobs, SimpleNamespace(plan=plan, results=results), expected, 0) == (
        f"{left} or more" if limit else f"at most {left}")


def length(plan, per_step=1024, peak=2 * 312e12, machine=MACHINE, folder=Path(), compile=False,
           speeds=None):
    """The options that say so, and the seconds; the machine is twice an A100."""
    (one,) = plan.runs
    config = dict(batch_size=per_step // one.processes, context_length=1, compile=compile)
    setup = setup_of(folder, machine)
    found = lengths.lengths_of(plan, setup, {one.name: config},
                               dict(bfloat16=peak) if peak else {}, speeds)[one.name]
    return dict(zip(found.options[::2], found.options[1::2], strict=True)), found.seconds


def plan_with(plan=None, **changes):
    plan = plan or plan_of("a", tokens=10_000, seconds=10)
    plan.runs = [plan.runs[0].but(**changes)]
    return plan


def test_length():
    options, seconds = length(plan_with(expected=12_000))
    assert options == {
        "--max-tokens": 235 * 1024,  # 10 s at 24,000, in whole steps
        "--eval-freq": 9,  # a line after 1, 10, 19 ... steps; 10 reach 10,000 tokens
        "--epochs": 10**6}  # the tokens alone end the run
    assert seconds == pytest.approx(20 + 235 * 1024 / 24_000)
    slow = plan_with(expected=500)  # so the common count takes longer
    assert length(slow)[0]["--max-tokens"] == 10 * 1024
    assert length(slow, compile=True)[1] == pytest.approx(20 + 40 + 10 * 1024 / 1000)
    assert length(slow, machine=CPU)[1] == pytest.approx(10 + 10 * 1024 / 1500)
    for speeds, known in ((dict(a=100, b=900), 100), (dict(b=200, c=400), 300)):  # or the middle
        assert length(slow, machine=CPU, speeds=speeds)[1] == pytest.approx(10 + 10 * 1024 / known)
        assert length(slow, speeds=speeds) == length(slow)  # a GPU's follow from its products
    ranks = plan_with(expected=500, processes=4)
    options, _ = length(ranks, 4096)
    assert (options["--max-tokens"], options["--eval-freq"]) == (10 * 4096, 9)
    assert length(ranks, 10**6)[0]["--eval-freq"] == 1
    ranks.seconds = 0
    assert length(ranks, 4096, peak=None)[0]["--max-tokens"] == 10 * 4096
    ranks.min_steps = 12
    assert length(ranks, 4096)[0]["--max-tokens"] == 12 * 4096


def test_whole_scripts_train_as_long_as_they_do_alone(tmp_path):
    """Or for fewer epochs, which an estimate for a GPU counts, or until a target."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/meta.json").write_text('{"tokens": {"train": 312000}}')
    how = dict(peak=312e12, folder=tmp_path)
    plan = plan_with(plan_of("a", tokens=None, whole=True), expected=31_200)
    assert length(plan, compile=True, **how) == ({}, 20 + 40 + 15 * 14)
    assert length(plan, machine=CPU, speeds=dict(a=4096))[1] == 20 + 10  # of cpu-demo's own limit
    plan.epochs = 2
    assert length(plan, **how) == ({"--epochs": 2}, 20 + 2 * 14)
    plan = plan_with(plan_of("a", whole=True, log_tokens=4096), expected=31_200, processes=4)
    assert length(plan, **how)[0] == {"--max-tokens": 4 * 4096, "--eval-freq": 4}
    plan.targets = dict(published=5.0, best=4.5)
    assert length(plan, **how)[0] == {"--max-tokens": 4 * 4096, "--eval-freq": 4,
                                      "--target-loss": 4.5, "--epochs": 10**6}


def test_time_left(plan):
    jobs = [Job(each, number, seed) for name, number, seed in ROUND + NEXT
            for each in plan.runs if each.name == name]
    estimates = {"a": lengths.Length((), 30), "b": lengths.Length((), 50)}
    results = [SimpleNamespace(name="a", seconds=seconds, record=None) for seconds in (10, 20, 90)]
    # b is estimated at 50 s, and a took 20 where 30 were estimated.
    assert seconds_left(jobs, results, estimates) == pytest.approx(
        4 * 20 + 2 * 50 * 20 / 30)
    assert seconds_left(jobs, [], estimates) == 4 * 30 + 2 * 50
    measured = SimpleNamespace(plan=plan, results=results)
    left = 4 * 20 + (2 * 50 + 6000) * 20 / 30  # what follows is corrected, too
    assert time_left(jobs, measured, estimates, 0) == "2 min"
    assert time_left(jobs, measured, estimates, 6000) == f"at most {left / 60:.0f} min"
    plan.targets = dict(best=5.0)  # which ends a run before its tokens
    assert time_left(jobs, measured, estimates, 0) == "at most 2 min"
    assert time_left([], measured, estimates, 0) == "0 s"
    assert [in_words(seconds) for seconds in (89, 150, 7200)] == ["89 s", "2 min", "2.0 h"]


def test_speeds_that_were_measured_here(tmp_path):
    """On this CPU with these options, of the newest runs; none on a GPU."""
    setup = setup_of(tmp_path, options=["--x"])
    plan = plan_of("a", "b", "c")
    for id, speed, machine, options in (
            ("1", 300.0, CPU, ["--x"]), ("2", 200.0, CPU, ["--x"]), ("3", 9.0, MACHINE, ["--x"]),
            ("4", 9.0, CPU | FLOAT32, ["--x"]), ("5", 9.0, CPU, [])):
        write_journal(tmp_path, "toy", plan, [
            dict(name="a", speed=speed), dict(name="c", error="failed: it broke")],
            machine, options=options, id=id)
    write_journal(tmp_path, "stages", plan, [dict(name=name, speed=100.0) for name in "ab"],
                  options=["--x"])
    def found(plan=plan, setup=setup, context=256):
        configs = dict(a=dict(model="cpu-demo", context_length=context))
        return lengths.speeds_here("toy", plan, setup, configs)

    assert found() == dict(a=200.0, b=100.0)
    assert found(plan_of("a", options=["--y"])) == {}
    assert found(setup=setup_of(tmp_path, MACHINE, ["--x"])) == {}
    folder = tmp_path / "by hand"
    other = dict(environment=dict(torch="2.0", gpu=None, cpu="Some CPU"))
    write_record(folder, "00_orig", speed=50.0)
    write_record(folder, "b", status="failed", error="it broke")
    write_record(folder, "c", start=other)
    by_hand = setup_of(folder, options=["--x"])
    assert found(setup=by_hand) == {"00_orig": 50.0} and found(setup=by_hand, context=16) == {}
    write_journal(folder, "toy", plan, [dict(name="a")], options=["--x"])
    assert found(setup=by_hand) == dict(a=100.0)  # what a study measured counts more


def test_the_rate_of_a_gpu_by_what_make_bench_left(tmp_path):
    """A dry run there expects of 01 what it did by hand, and of a run half as fast half of it."""
    setup, configs = setup_of(tmp_path, MACHINE), dict(a=dict(model="gpt2", context_length=1024))
    assert lengths.peak_by_hand(setup, configs) == {}
    (run_of_01,) = plan_with(expected=142_156.0).runs
    write_record(tmp_path, "01_opt_single_gpu", speed=71_078.0, gpu="A", config=dict(
        model="gpt2", context_length=1024))
    peak = lengths.peak_by_hand(setup, configs)
    assert lengths.expected_speed(run_of_01, peak, "bfloat16") == pytest.approx(71_078)
    half = run_of_01.but(expected=71_078.0)
    assert lengths.expected_speed(half, peak, "bfloat16") == pytest.approx(71_078 / 2)
    assert lengths.peak_by_hand(setup_of(tmp_path), configs) == {}  # of a CPU nothing is needed


def test_scripts_judge_their_options(tmp_path, monkeypatch, forked_children):
    """All in one process; what each trains per step comes back, and is kept."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(lengths, "BUILD", tmp_path / "build")
    monkeypatch.setattr("bench.measure.plan.BUILD", tmp_path / "build")
    plan = plan_of("00_orig", "01_opt_single_gpu", "02_opt_multi_gpu_ddp", options=TINY)
    runs = [each.but(script=ROOT / f"{each.name}.py") for each in plan.runs]
    runs[1] = runs[1].but(options=("--batch-size", "3"))
    runs[2] = runs[2].but(processes=2)
    runs.append(Run("made", "made", "", "01_opt_single_gpu"))  # of the catalogue
    setup = setup_of(tmp_path)
    expected = [dict(model="cpu-demo", batch_size=size, context_length=16, learning_rate=5e-4,
                     compile=compiles)
                for size, compiles in ((2, None), (3, True), (2, True), (2, True))]
    assert [*lengths.configurations(runs, plan, setup).values()] == expected
    ask, asked = processes.ask, []

    def counted(*command, **variables):
        asked.append([options for _, options in json.loads(command[-1])])
        return ask(*command, **variables)

    monkeypatch.setattr(processes, "ask", counted)
    assert [*lengths.configurations(runs, plan, setup).values()] == expected and not asked
    kept = tmp_path / "build" / "configurations.json"
    runs[1] = runs[1].but(options=("--batch-size", "4"))
    expected[1]["batch_size"] = 4
    assert [*lengths.configurations(runs, plan, setup).values()] == expected
    assert [len(scripts) for scripts in asked] == [1] and asked[0][0][-2:] == ["--batch-size", "4"]
    lengths.configurations(runs[:1], plan, setup_of(tmp_path, CPU | FLOAT32))  # another machine
    kept.write_text("{")
    assert [*lengths.configurations(runs[:1], plan, setup).values()] == expected[:1]
    assert len(asked) == 3
    setup.options.append("--no-compile")
    with pytest.raises(UserError, match="00_orig: unrecognized arguments: --no-compile"):
        lengths.configurations(runs[:1], plan, setup)
    for option in ("--seed", "-h", "--eval-freq=3"):
        setup.options[:] = [option]
        with pytest.raises(UserError, match=f"^{option.split('=')[0]} is set by measure.py"):
            lengths.configurations(runs, plan, setup)


# ---- Child processes


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
def test_a_share_of_the_cores():
    command = [sys.executable, "-c", "import os; print(len(os.sched_getaffinity(0)))"]
    cores = len(os.sched_getaffinity(0))
    assert processes.run_child(command, cores=1)[1].strip() == "1"
    assert len(os.sched_getaffinity(0)) == cores
    assert processes.run_child(command)[1].strip() == str(cores)


def wait_for(path: Path, process: subprocess.Popen | None = None) -> str:
    """The text of a file, as soon as there is one."""
    end = time.monotonic() + 60
    while not path.exists() or not path.read_text():
        assert time.monotonic() < end and (process is None or process.poll() is None)
        time.sleep(0.02)
    return path.read_text()


def test_a_child_that_hangs_is_ended(tmp_path):
    code = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(60)"
    with pytest.raises(subprocess.TimeoutExpired):
        processes.run_child([sys.executable, "-c", code], tmp_path, timeout=1)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_child_does_not_outlive_the_tool(tmp_path):
    """And Ctrl-C reaches it once, as SIGTERM."""
    (tmp_path / "child.py").write_text(
        "import os, pathlib, signal, time\n"
        "def got(number, frame): print(number, file=open('got', 'a'))\n"
        "signal.signal(signal.SIGTERM, got); signal.signal(signal.SIGINT, got)\n"
        "pathlib.Path('pid').write_text(str(os.getpid()))\n"
        "while not os.path.exists('got'): time.sleep(0.02)\n"
        "time.sleep(0.3)\n")
    code = ("import sys; from bench import processes; processes.on_signals(processes.interrupt)\n"
            "processes.run_child([sys.executable, 'child.py'])")
    tool = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.DEVNULL,
        env=environment(PYTHONPATH=str(ROOT)), start_new_session=True)
    pid = int(wait_for(tmp_path / "pid", tool))
    os.killpg(tool.pid, signal.SIGINT)
    assert tool.wait(30) != 0
    assert (tmp_path / "got").read_text().split() == [str(int(signal.SIGTERM))]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_nohup():
    """What ignores SIGHUP goes on to do so."""
    code = ("import signal; from bench import processes;"
            "signal.signal(signal.SIGHUP, signal.SIG_IGN);"
            "processes.on_signals(processes.interrupt);"
            "print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN,"
            " signal.getsignal(signal.SIGTERM) == processes.interrupt)")
    assert run_python("-c", code, cwd=ROOT).stdout == "True True\n"
