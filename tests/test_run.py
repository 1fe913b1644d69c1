"""bench/measure/, bench/processes.py, gpt_speed/children.py and measure.py: what runs, how, how
long and at which batch size, with made-up runs in place of real ones; one study of real runs."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from conftest import ROOT, environment, run_python, write_tokens
from conftest import TINY as TINY_OPTIONS
from made_up import (
    CPU,
    FLOAT32,
    MACHINE,
    PEAK,
    Children,
    Toy,
    copy_of_checkout,
    measured_with,
    plan_of,
    record_events,
    rows_of_text,
    setup_of,
    write_journal,
    write_record,
)

import measure
from bench import common, processes
from bench.analysis.rows import Rows
from bench.analysis.training import Training
from bench.catalogue import Run
from bench.commands.doctor import Doctor, Fits
from bench.common import ELSEWHERE, sha256
from bench.corpus import BOOK_TOKENS
from bench.measure import launch, run, sizing
from bench.measure.journal import journal_of, read_journal
from bench.measure.lock import locked
from bench.measure.measurement import data_of
from bench.measure.plan import SCRATCH, EqualSteps, Growth, Job, WholeScript
from bench.measure.records import Status
from bench.measure.run import Resume
from bench.measure.sizing import RATE_SECONDS, in_words, seconds_left
from bench.predict.batches import batches_that_fit
from bench.studies import Study, all_studies
from gpt_speed import children
from gpt_speed.common import UserError
from patches import stack

STUDIES = all_studies()
NEVER, IF_ANY, REQUIRED = Resume
TINY = "--model cpu-demo --context-length 16 --eval-windows 2".split()


class Place:
    """A folder to measure in."""

    def __init__(self, folder: Path, monkeypatch, machine: dict = CPU):
        self.folder, self.setup = folder, setup_of(folder / "results", machine)
        self.path = journal_of(self.setup.results, "toy")
        self.children = Children(monkeypatch, folder / "build", machine)
        self.setup.data = folder / "data"
        self.setup.data.mkdir()
        self.meta = self.setup.data / "meta.json"
        self.meta.write_text('{"tokens": {"train": 4096}}')

    def plan(self, *names, **settings):
        """Each run has a script of its own, NAME.py."""
        plan = plan_of(*names, **settings)
        for name in names:
            script = self.folder / f"{name}.py"
            script.exists() or script.write_text(name)
        plan.runs = [one.replace(script=self.folder / f"{one.name}.py") for one in plan.runs]
        return plan

    def events(self, kind: str) -> list[dict]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def run(self, *what, rounds=1, resume=NEVER, deadline=None):
        """Measures plans, or a study. Returns what this start ran: names, rounds and seeds."""
        study = what[0] if isinstance(what[0], Study) else Toy(*what)
        before = len(self.events("run"))
        self.finished, self.measured = run.run_study(
            study, self.setup, rounds, resume, deadline and time.monotonic() + deadline
        )
        return [
            (event["name"], event["round"], event["seed"]) for event in self.events("run")[before:]
        ]


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
    """Drawn anew for each pair of rounds, of which the second has it backwards; a resumed
    measurement goes on in it; sizes that grow keep their order."""
    monkeypatch.setattr("bench.measure.run.order_seed", lambda id: 7)
    plan = place.plan(*"abcdef", seed_noise=2)
    ran = place.run(plan, rounds=4)
    rounds = [[(name, seed) for name, number, seed in ran if number == k] for k in range(1, 5)]
    assert [sorted(jobs) for jobs in rounds] == [
        sorted([*((name, 123) for name in "abcdef"), ("a", 124 + 2 * k), ("a", 125 + 2 * k)])
        for k in range(4)
    ]
    names = [[name for name, _ in jobs] for jobs in rounds]
    assert names[1] == names[0][::-1] and names[3] == names[2][::-1]
    assert names[0] != names[2] and sorted(names[0]) != names[0]
    lines = place.path.read_text().splitlines(keepends=True)
    starts = [number for number, line in enumerate(lines) if line.startswith('{"event": "run"')]
    place.path.write_text("".join(lines[: starts[-3]]))
    assert place.run(plan, rounds=4, resume=REQUIRED) == ran[-3:]
    assert [name for name, *_ in place.run(sizes(place, "abcdef"), rounds=2)] == [*"abcdef"] * 2


def test_what_a_study_takes_is_written_with_the_journals_line(place):
    """Not before the seconds in which the matmul rate is measured: a SIGKILL then would leave the
    files of one run and the journal of another."""
    asked = []

    class Taking(Toy):
        def collect(self, setup, folder):
            asked.extend(place.children.asked)

    place.run(Taking(place.plan("a")))
    assert "matmul_rate" in asked


def test_how_fast_memory_is(place):
    """It is measured once, and only for a study that shows a limit."""

    class Limited(Toy):
        shows_limit = True

    place.run(place.plan("a"))
    assert "copy_rate" not in place.children.asked
    assert read_journal(place.path)[-1].copy_rate is None
    place.run(Limited(place.plan("b")))
    place.run(Limited(place.plan("b")), rounds=2, resume=REQUIRED)
    assert read_journal(place.path)[-1].copy_rate == 2e10
    assert place.children.asked.count("copy_rate") == 1


def test_rounds(place, plan, capsys):
    place.children.does["b"] = dict(speed=200)
    assert place.run(plan, rounds=2) == ROUND + NEXT and place.finished
    (kept,) = read_journal(place.path)
    assert kept.results == place.measured[0].results and kept.plan.rounds == 2
    assert Training(kept.results[2].record).tok_per_sec == 200
    assert (kept.matmul_peak, kept.machine, kept.data) == (PEAK, CPU, data_of(place.setup.data))
    assert {event["matmul_rate"] for event in place.events("ran")} == {4e12}
    assert "round 1: a, seed 124: 100 tok/sec, val loss 8.000" in capsys.readouterr().out
    assert len(place.run(place.plan("a", rounds=3), rounds=2)) == 3  # the plan's own come first
    assert place.run(place.plan("a", new_seeds=True, first_seed=7), rounds=2) == [
        ("a", 1, 7),
        ("a", 2, 8),
    ]


def test_a_failed_run_is_not_repeated_until_it_is_resumed(place, plan, capsys):
    place.children.does["b"] = dict(status="failed", error="it broke")
    assert place.run(plan, rounds=2) == ROUND + NEXT[:2] and place.finished
    assert place.measured[0].has_failures
    assert "b, seed 123: failed: it broke; " in capsys.readouterr().out
    assert place.run(plan, rounds=2, resume=REQUIRED) == [ROUND[2]]  # it fails again
    place.children.does.clear()
    assert place.run(plan, rounds=2, resume=REQUIRED) == [ROUND[2], NEXT[2]]
    assert not place.measured[0].has_failures
    assert place.run(plan, rounds=2, resume=REQUIRED) == []


def test_resume_repeats_what_is_missing_or_changed(place, plan, capsys):
    place.run(plan, rounds=1)
    assert place.run(plan, rounds=2, resume=REQUIRED) == NEXT
    assert "measured again" not in capsys.readouterr().out
    (place.folder / "b.py").write_text("another script")
    run.dry_run(Toy(plan), place.setup, 2, resume=REQUIRED)
    assert place.run(plan, rounds=2, resume=REQUIRED) == [ROUND[2], NEXT[2]]
    assert capsys.readouterr().out.count("changed since, so measured again: b\n") == 2
    assert {(event["name"], event["source_sha256"]) for event in place.events("run")} == {
        (name, sha256(text)) for name, text in (("a", b"a"), ("b", b"b"), ("b", b"another script"))
    }
    more = place.plan("a", "b", "c", seed_noise=True)
    assert place.run(more, rounds=1, resume=REQUIRED) == [("c", 1, 123)]
    assert len({event["id"] for event in place.events("study")}) == 1
    (kept,) = read_journal(place.path)
    assert [result.key for result in kept.results if result.record] == [
        *ROUND[:2],
        *NEXT[:2],
        ROUND[2],
        NEXT[2],
        ("c", 1, 123),
    ]


def test_resume_sees_what_else_a_run_reads(place):
    """As the script that gradients are compared to, the program that compares them, and what that
    imports."""
    driver, imported = place.folder / "driver.py", place.folder / "imported.py"

    class Driven(Toy):
        def driver(self, setup, run):
            return [driver, "--reference", driver]

        def imports(self, run):
            return [imported]

    for file in (driver, imported):
        file.write_text("one")
    study = Driven(place.plan("a"))
    assert place.run(study, rounds=1) == [("a", 1, 123)]
    assert place.run(study, rounds=1, resume=REQUIRED) == []
    for file in (driver, imported):
        file.write_text("another")
        assert place.run(study, rounds=1, resume=REQUIRED) == [("a", 1, 123)]
        assert place.run(study, rounds=1, resume=REQUIRED) == []


IMPORTED = """
import runpy, sys
from pathlib import Path
runpy.run_path(sys.argv[1])
files = [Path(module.__file__) for module in sys.modules.values() if getattr(module, "__file__", 0)]
own = [file for file in files if Path(sys.argv[2]) in file.parents and file.stem != "__init__"]
print(*sorted(own))
"""


def test_what_a_driver_imports_is_named():
    """Each of the repository's modules, so that an edit of one repeats the checks."""
    gradients = STUDIES["gradients"]
    driver, *_ = gradients.driver(setup_of(ROOT), Run("", ROOT / "00_orig.py"))
    loaded = run_python("-c", IMPORTED, driver, ROOT / "gpt_speed", fork=False)
    assert loaded.stdout.split() == sorted(map(str, gradients.imports(Run("", ""))))


def test_what_the_trainer_imports_is_named(place):
    """Its tokens, its evaluation and its clock are those of 00."""
    variants = STUDIES["variants"]
    place.setup.args.group, place.setup.args.names = "trainer", None
    (plan,) = variants.plans(place.setup)
    assert len(plan.runs) > 1
    for one in plan.runs:
        imports = []
        if one.script == ROOT / "peers" / "hf_trainer.py":
            imports = [ROOT / "00_orig.py"]
        assert variants.imports(one) == imports


def test_resume_knows_how_a_run_ran_that_was_left_out_since(place):
    """Though the plan in between doesn't name it: on other cores it is another one."""

    def on(cores: int, *names: str):
        plan = place.plan(*names)
        plan.runs = [one.replace(facts=dict(cores=cores)) for one in plan.runs]
        return plan

    assert len(place.run(on(1, "a", "b"))) == 2
    assert place.run(on(2, "a"), resume=REQUIRED) == [("a", 1, 123)]
    assert place.run(on(2, "a", "b"), resume=REQUIRED) == [("b", 1, 123)]
    assert (
        place.run(on(2, "b"), resume=REQUIRED) == place.run(on(2, "a", "b"), resume=REQUIRED) == []
    )
    assert {len(measured.results) for measured in read_journal(place.path)} == {2}


@pytest.fixture
def smaller_b(place, monkeypatch):
    """Gives b a smaller batch than a; all runs of a plan have as many steps, so that b makes a
    longer."""
    batches = dict(a=4, b=1)
    monkeypatch.setattr(
        sizing,
        "configurations",
        lambda runs, setup: {
            run.name: dict(model="cpu-demo", batch_size=batches[run.name], context_length=256)
            for run in runs
        },
    )


@pytest.mark.usefixtures("smaller_b")
def test_runs_of_another_length_are_measured_again(place):
    assert place.run(place.plan("a")) == [("a", 1, 123)]
    assert place.run(place.plan("a", "b"), resume=REQUIRED) == [("a", 1, 123), ("b", 1, 123)]
    assert place.run(place.plan("a", "b"), resume=REQUIRED) == []


@pytest.mark.usefixtures("smaller_b")
def test_runs_of_another_length_do_not_come_back_from_the_journal(place):
    """Pages read it, also where the second start ended before it measured again."""
    place.run(place.plan("a"), rounds=2)
    place.run(place.plan("a", "b"), resume=REQUIRED, deadline=0)
    (kept,) = read_journal(place.path)
    assert kept.results == []
    place.run(place.plan("a", "b"), rounds=1, resume=REQUIRED)
    (kept,) = read_journal(place.path)
    assert [result.key for result in kept.results] == [("a", 1, 123), ("b", 1, 123)]


def test_a_round_that_found_no_compilation_is_cold(place):
    """Though the plan has it warm: somebody removed build/compiler-cache in between."""

    def compile(command, environment):
        Path(environment["TORCHINDUCTOR_CACHE_DIR"]).mkdir(parents=True, exist_ok=True)
        return child(speed=100)(command, environment)

    place.children.does["a"] = compile
    place.run(place.plan("a"), rounds=2)
    assert Rows(place.measured[0])[0].compiling_rounds == {1}
    shutil.rmtree(place.folder / "build" / "compiler-cache")
    place.run(place.plan("a"), rounds=3, resume=REQUIRED)
    assert Rows(place.measured[0])[0].compiling_rounds == {1, 3}
    (kept,) = read_journal(place.path)
    assert [result.compiled for result in kept.results] == [False, True, False]


def test_a_run_that_cannot_run(place, plan):
    plan.runs[1] = plan.runs[1].replace(error="conflict: here", script="no such script")
    assert place.run(plan) == ROUND[:2] and not place.measured[0].has_failures


def test_deadline(place, plan):
    assert place.run(plan, deadline=14) == []  # the first one is thought to take 10 + 5 s
    assert not place.finished
    assert place.run(plan, resume=REQUIRED, deadline=60) == ROUND and place.finished
    # By round 1 they take none, but for the 5 s.
    assert place.run(plan, rounds=2, resume=REQUIRED, deadline=14) == NEXT


def meta(text):
    return lambda place: place.meta.write_text(text)


def setup(**changes):
    return lambda place: vars(place.setup).update(changes)


def on_another(**machine):
    return setup(machine=CPU | machine)


def refuse_option(place):
    place.children.refuses = "unrecognized: --x"


@pytest.mark.parametrize(
    ("change", "resume", "says"),
    [
        (setup(options=["--dropout"]), REQUIRED, "with other options behind --"),
        (setup(options=["--dropout"]), IF_ANY, "with other options behind --"),
        (on_another(torch="2.0"), REQUIRED, r"machine or PyTorch \(torch: 2.13, here: 2.0\)"),
        (on_another(threads=1), REQUIRED, r"machine or PyTorch \(threads: 2, here: 1\)"),
        (on_another(cpu="Other"), REQUIRED, r"machine or PyTorch \(cpu: Some CPU, here: Other\)"),
        (meta('{"tokens": {"train": 9}}'), REQUIRED, "with other tokens"),
        (on_another(compiles=False), REQUIRED, "compiles: True, here: False"),
        (dict(tokens=1), REQUIRED, "with other settings: tokens"),
        (dict(targets={"best": 1.0}), REQUIRED, "with other settings: targets"),
        (dict(full_length=True), REQUIRED, "with other settings: full_length"),
        (refuse_option, REQUIRED, "unrecognized"),
        (meta(""), NEVER, "meta.json is damaged"),
        (meta('{"tokens": {"train": "x"}}'), NEVER, "meta.json is damaged"),
    ],
    ids=[
        "options",
        "options in a report",
        "torch",
        "threads",
        "cpu",
        "tokens",
        "compiler",
        "length",
        "targets",
        "whole scripts",
        "an unknown option",
        "empty meta.json",
        "damaged meta.json",
    ],
)
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
        assert error.value.code == 2
        assert str(error.value).endswith(ELSEWHERE) is (resume is IF_ANY)  # of a report
    assert place.path.read_bytes() == before


def test_runs_of_other_epochs_are_refused(place):
    """As of a report on a GPU, which trains for one: longer runs aren't lost to it."""
    place.run(place.plan("a", full_length=True), rounds=2)
    shorter = place.plan("a", full_length=True, epochs=1)
    with pytest.raises(UserError, match="with other settings: epochs"):
        place.run(shorter, resume=IF_ANY)
    (kept,) = read_journal(place.path)
    assert len(kept.results) == 2


def test_tokens_that_change_while_it_measures(place, plan):
    """What was trained on them is no result; with those of before it goes on."""
    tokens = place.meta.read_text()

    def change(command, environment):
        place.meta.write_text('{"tokens": {"train": 9}}')
        return child(speed=100)(command, environment)

    place.children.does["b"] = change
    with pytest.raises(UserError, match="data has other tokens than were measured so far$"):
        place.run(plan, rounds=2)
    place.children.does.clear()
    place.meta.write_text(tokens)
    assert place.run(plan, rounds=2, resume=REQUIRED) == [ROUND[2], *NEXT]


def test_a_script_that_is_edited_while_it_runs(place, plan):
    def edit(command, environment):
        (place.folder / "b.py").write_text("another script")
        return child(speed=100)(command, environment)

    place.children.does["b"] = edit
    with pytest.raises(UserError, match="b.py was edited"):
        place.run(plan)
    assert place.run(plan, resume=REQUIRED) == ROUND[2:]
    assert {result.key for result in place.measured[0].results} == set(ROUND)


def test_nothing_to_resume(place, plan):
    """A new start is another measurement; a report resumes where it can."""
    with pytest.raises(UserError, match="nothing to resume in .*toy.jsonl") as error:
        place.run(plan, resume=REQUIRED)
    assert error.value.code == 2 and not place.path.exists()
    write_journal(place.setup.results, "toy", plan, [dict(name="a")])
    assert place.run(plan) == ROUND
    assert [len(measured.results) for measured in read_journal(place.path)] == [1, 3]
    assert place.run(plan, resume=IF_ANY) == []
    place.path.unlink()
    assert place.run(plan, resume=IF_ANY) == ROUND


class Dependent(Toy):
    """First a and b, then the faster one alone, and beside it the other."""

    def plans(self, setup):
        first, plan = self.made_with
        rows = Rows((yield first))
        best, other = sorted(rows, key=lambda row: -row.tok_per_sec)
        a_and_b = {run.name: run.replace(compared_to=None) for run in plan.runs}
        plan.runs = [a_and_b[best.run.name]]
        (row,) = Rows((yield plan))
        assert row.rounds == 2
        plan.runs.append(a_and_b[other.run.name])
        yield plan


@pytest.fixture
def dependent(place) -> Dependent:
    """A study of three plans, of which b is the faster run."""
    place.children.does["b"] = dict(speed=200)
    return Dependent(place.plan("a", "b", kind="first", rounds=1), place.plan("a", "b"))


OF_ALL_PLANS = [
    ("a", 1, 123),
    ("b", 1, 123),
    ("b", 1, 123),
    ("b", 2, 123),
    ("a", 1, 123),
    ("a", 2, 123),
]


def test_a_plan_may_depend_on_the_rows_of_the_one_before(place, dependent):
    assert place.run(dependent, rounds=2) == OF_ALL_PLANS
    assert [(measured.kind, measured.results) for measured in read_journal(place.path)] == [
        (measured.kind, measured.results) for measured in place.measured
    ]


@pytest.mark.parametrize("stop_at", [2, 3, 5])
def test_a_study_of_several_plans_goes_on_where_it_was_interrupted(place, dependent, stop_at):
    place.children.stop_at = stop_at
    again = deepcopy(dependent)  # its plans get their runs one after the other
    with pytest.raises(children.Interrupted):
        place.run(dependent, rounds=2)
    assert place.run(again, rounds=2, resume=REQUIRED) == OF_ALL_PLANS[stop_at - 1 :]


def test_a_plan_that_is_older_than_the_one_before_starts_again(place, dependent):
    first, second = dependent.made_with
    for plan, id in ((second, "1"), (first, "2")):
        write_journal(place.setup.results, "toy", plan, id=id, data=data_of(place.setup.data))
    place.run(dependent, rounds=2, resume=REQUIRED)
    assert place.measured[0].id == "2" and place.measured[1].id not in "12"


def test_what_followed_a_plan_with_other_options_is_not_begun_anew(place):
    """As time-to-loss with --names, resumed without them, which has another kind of second plan; a
    third kind, and what was interrupted before the second began, go on."""
    target, plain, named, last = (
        place.plan("a", kind=kind, rounds=1) for kind in ("target", "", "named", "last")
    )
    place.run(target, named)
    with pytest.raises(UserError, match="with other options of the study; without --resume"):
        place.run(target, plain, resume=REQUIRED)
    assert {measured.kind for measured in read_journal(place.path)} == {"target", "named"}
    assert place.run(target, named, last, resume=REQUIRED) == [("a", 1, 123)]
    place.path.unlink()
    place.run(target)
    assert place.run(target, plain, resume=REQUIRED) == [("a", 1, 123)]


def sizes(place, names="abc", **settings):
    return place.plan(*names, **dict(growth=Growth(2)) | settings)


@pytest.mark.parametrize(
    ("does", "fails"),
    [
        (dict(status="out_of_memory", error="out of memory: lower it"), False),
        (lambda *_: (1, "", "error: rank 1: out of memory: lower it"), False),  # before its record
        (lambda *_: (1, "", "error: the text is too short: 9 windows"), False),
        (lambda *_: (-9, "", ""), True),  # Linux has ended nothing for want of RAM
        (lambda *_: (-11, "", ""), True),
    ],
)
def test_larger_ones_are_not_tried(place, does, fails):
    """That a run doesn't fit is a finding; another failure is tried again by a resume."""
    plan = sizes(place)
    place.children.does["b"] = does
    assert place.run(plan, rounds=2) == [("a", 1, 123), ("b", 1, 123), ("a", 2, 123)]
    assert place.measured[0].has_failures is fails
    assert Rows(place.measured[0])[2].outcome.status is Status.NOT_TRIED
    assert (
        place.run(plan, rounds=2, resume=REQUIRED, deadline=1e-9) == []
    )  # no time to try it again
    assert place.measured[0].has_failures is fails
    place.children.does.clear()
    assert place.run(plan, rounds=2, resume=REQUIRED) == (
        [("b", 1, 123), ("c", 1, 123), ("b", 2, 123), ("c", 2, 123)] if fails else []
    )


# ---- By which command, and what a run leaves


def test_dry_run(place, plan, capsys):
    """Nothing is measured and no results are left, only the scripts, for the commands to be typed;
    where no rate of this machine is known there is no estimate."""
    plan.runs[1] = plan.runs[1].replace(script="made")
    plan.runs.append(plan.runs[1].replace(name="c", error="needs a thing"))
    place.setup.scripts.patched["made"] = b"made\n"
    run.dry_run(Toy(plan), place.setup, 3, resume=NEVER)
    first, second, *rest = capsys.readouterr().out.splitlines()
    assert not place.children.calls and not place.children.asked and not place.path.exists()
    assert first.startswith("6 runs: python ") and " --max-tokens 4096 " in first
    assert "--name a " in first and "--seed 123 " in first
    script = Path(second.split()[3])
    assert script.read_text() == "made\n" and script.parent.name == sha256(b"made\n")[:16]
    assert rest == ["not run: b: needs a thing", "9 runs, no estimate yet"]
    with pytest.raises(UserError, match="nothing to resume"):
        run.dry_run(Toy(plan), place.setup, 2, resume=REQUIRED)
    place.run(plan)
    before = place.path.read_bytes()
    run.dry_run(Toy(plan), place.setup, 2, resume=REQUIRED)
    assert capsys.readouterr().out.endswith("3 runs, about 15 s\n")  # 0 by the first round
    assert place.path.read_bytes() == before


def test_a_dry_run_knows_the_machine_from_a_finished_measurement(place, plan, capsys):
    """A later one that was interrupted may not have its rate yet."""
    write_journal(place.setup.results, "stages", plan_of("a"))
    write_journal(place.setup.results, "stages", plan_of("a"), id="2", matmul_peak={})
    assert run.peak_of_before(place.setup) == PEAK
    run.dry_run(Toy(plan), place.setup, 2, resume=NEVER)
    assert "no estimate" not in capsys.readouterr().out


@pytest.mark.parametrize(("batch", "advice"), [(4, "--batch-size 2"), (1, None)])
def test_what_to_do_where_memory_runs_out(tmp_path, monkeypatch, capsys, batch, advice):
    """Nothing is smaller than one sequence."""
    place = Place(tmp_path, monkeypatch, MACHINE)
    monkeypatch.setattr(
        "bench.measure.sizing.configurations",
        lambda runs, setup: {
            name: config | dict(batch_size=batch)
            for name, config in place.children.configurations(runs, setup).items()
        },
    )
    place.children.does["a"] = dict(status="out_of_memory", error="out of memory: x")
    place.run(place.plan("a"))
    out = capsys.readouterr().out
    assert "out of memory: x" in out
    assert re.findall(r"--batch-size \d+", out) == ([advice] if advice else [])


def child(code=0, err="", whole=True, hangs=False, **record):
    """What stands in for run_child; it leaves a record if `record` says something of it."""

    def run_child(command, environment):
        name, seed, folder = (
            command[command.index(option) + 1] for option in ("--name", "--seed", "--results-dir")
        )
        if record:
            path = write_record(Path(folder), name, seed=int(seed), **record)
            if not whole:
                path.write_text("".join(path.read_text().splitlines(True)[:-1]) + '{"event": "en')
        if hangs:
            raise subprocess.TimeoutExpired(command, 1)
        return code, "", err

    return run_child


def torchrun_says(**codes: str) -> str:
    """The end of its stderr, by the exit code of each rank; the first one failed first."""
    parts = [
        f"""[{place}]:
  time      : 2026-11-28_20:57:49
  host      : localhost
  rank      : {rank[1:]} (local_rank: {rank[1:]})
  exitcode  : {code}
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 9586
"""
        for place, (rank, code) in enumerate(codes.items())
    ]
    return (
        f"{'=' * 54}\nscript.py FAILED\n{'-' * 54}\nFailures:\n{''.join(parts[1:])}{'-' * 54}\n"
        f"Root Cause (first observed failure):\n{parts[0]}{'=' * 54}\n"
    )


KILLED = "ended by signal 9, by a user, a scheduler or a time limit: it wasn't for want of RAM"
SHUT_DOWN = "W1 api.py:1047] Unable to shutdown process 51 via 15, forcefully exiting via 9\n"


@pytest.mark.parametrize(
    ("does", "error", "kind"),
    [
        (
            dict(status="out_of_memory", error="out of memory: x"),
            "out of memory: x",
            "out_of_memory",
        ),
        (dict(status="interrupted"), "interrupted: no reason given", "failed"),
        (child(0), "it left no record", "failed"),
        (child(1, "error: no memory\nand more"), "no memory", "failed"),
        (child(1, "error: the text is too short: 1"), "the text is too short: 1", "too_large"),
        (child(1, "Traceback:\nZeroDivisionError: 1/0\n"), "ZeroDivisionError: 1/0", "failed"),
        (child(1, "error: it broke", speed=100), "it broke", "failed"),
        (child(-6), "ended by signal 6", "failed"),
        (child(-9, speed=100, whole=False), KILLED, "failed"),
        (
            child(1, "error: rank 0: out of memory: y", status="failed", error="it broke"),
            "rank 0: out of memory: y",
            "out_of_memory",
        ),
        (
            child(1, "error: lower it", status="diverged", error="lower it"),
            "diverged: lower it",
            "failed",
        ),
        (
            child(hangs=True, status="interrupted", error="by a signal"),
            "ended after 651 s: it hung, or is far too slow",
            "failed",
        ),
        # Rank 1 was killed, so that rank 0 lost it.
        (
            child(1, torchrun_says(r1="-9 (pid: 52)", r0="-15 (pid: 51)")),
            f"rank 1: {KILLED}",
            "failed",
        ),
        (
            child(
                1,
                "error: rank 0: closed by peer\n"
                + torchrun_says(r0="1 (pid: 51)", r1="-9 (pid: 52)"),
                status="failed",
                error="closed by peer",
            ),
            f"rank 1: {KILLED}",
            "failed",
        ),
        (
            child(1, torchrun_says(r1="-11 (pid: 52)", r0="-15 (pid: 51)")),
            "rank 1: ended by signal 11",
            "failed",
        ),
        # Rank 1 failed; torchrun has killed rank 0, which waited for it.
        (
            child(
                1,
                "error: rank 1: it broke\n"
                + SHUT_DOWN
                + torchrun_says(r1="1 (pid: 52)", r0="-9 (pid: 51)"),
            ),
            "rank 1: it broke",
            "failed",
        ),
        (
            child(1, SHUT_DOWN + torchrun_says(r1="3 (pid: 52)", r0="-9 (pid: 51)")),
            "rank 1: ended with code 3",
            "failed",
        ),
        (
            dict(steps=4, avg_tok_per_sec=None),
            "too short for a speed: raise --max-tokens",
            "failed",
        ),
        (dict(speed=100), "", "complete"),
    ],
)
def test_why_a_run_failed(place, capsys, does, error, kind):
    place.children.does["a"] = does
    place.run(place.plan("a"))
    (result,) = place.measured[0].results
    assert read_journal(place.path)[0].results == [result]  # the journal says the same
    assert (result.outcome.text, result.outcome.status) == (error, kind)
    assert bool(result.record) is (kind == "complete")
    assert place.events("ran")[0]["outcome"] == kind
    assert capsys.readouterr().err == ""  # every line of the journal is whole


@pytest.mark.parametrize("err", ["", torchrun_says(r1="-9 (pid: 52)", r0="-15 (pid: 51)")])
@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [(1, 2, Status.TOO_LARGE), (1, 1, Status.FAILED), (None, None, Status.FAILED)],
)
def test_signal_9_is_want_of_ram_only_where_linux_counts_it(place, before, after, kind, err):
    """A user, a scheduler or a time limit may have sent it, too."""

    def killed(command, environment):
        place.children.out_of_ram = after
        return (1 if err else -9), "", err

    place.children.out_of_ram, place.children.does["a"] = before, killed
    place.run(place.plan("a"))
    (result,) = place.measured[0].results
    assert result.outcome.status is kind and "signal 9" in result.outcome.text


def test_linux_counts_programs_out_of_ram(tmp_path, monkeypatch):
    counters = tmp_path / "vmstat"
    monkeypatch.setattr(launch, "VMSTAT", counters)
    assert launch.programs_out_of_ram() is None
    counters.write_text("pgfault 12\noom_kill 3\noom_kill_other 4\n")
    assert launch.programs_out_of_ram() == 3


class Driven(Toy):
    """Its runs are started by a program with these words."""

    def __init__(self, words, imports=()):
        super().__init__()
        self.words, self.files = words, imports

    def driver(self, setup, run):
        return self.words

    def imports(self, run):
        return self.files


def test_the_source_of_a_run_is_a_list(place, tmp_path):
    """Other words, or the same ones cut elsewhere, are another source; a script alone is its own
    SHA-256."""
    script, other = tmp_path / "a.py", tmp_path / "b.py"
    script.write_text("a")
    other.write_text("b")
    run_of_file = Run("a", "a", script=script)
    lists = [
        (["ab", "c"],),
        (["a", "bc"],),
        (["abc"],),
        ([other],),
        ([], [other]),
        (["a"], [other]),
    ]
    sources = {launch.source_of(run_of_file, Driven(*parts), place.setup) for parts in lists}
    assert len(sources) == len(lists)
    alone = launch.source_of(run_of_file, Driven([]), place.setup)
    assert alone == sha256(b"a") and alone not in sources


TORCHRUN = [
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--local-addr",
    "127.0.0.1",
    "--nproc_per_node=2",
]


@pytest.mark.parametrize(
    ("changes", "launcher"), [({}, []), (dict(torchrun=True, processes=2), TORCHRUN)]
)
def test_command(place, changes, launcher):
    """A run's own options come last; its folders live as long as it does."""
    plan = place.plan("a")
    plan.runs[0] = plan.runs[0].replace(
        options=("--batch-size", "2", "--to", SCRATCH), variables={"ITS": "2"}, **changes
    )
    place.setup.options.extend(["--dropout", "0"])

    def leave(command, environment):
        assert Path(command[-1]).is_dir()
        return child(speed=100)(command, environment)

    place.children.does["a"] = leave
    study = Toy(plan)
    study.variables = {"OWN": "1"}
    study.cores = lambda run: 2 * run.processes
    place.run(study)
    (call,) = place.children.calls
    scratch = Path(call.command[-1])
    assert call.command[1 : len(launcher) + 2] == [*launcher, str(place.folder / "a.py")]
    for option, value in (
        ("--name", "a"),
        ("--device", "cpu"),
        ("--seed", "123"),
        ("--data", place.setup.data),
        ("--results-dir", scratch / "results"),
    ):
        assert call.command[call.command.index(option) + 1] == str(value)
    assert call.command[-6:-1] == ["--dropout", "0", "--batch-size", "2", "--to"]
    assert not scratch.exists() and scratch.parent == place.folder / "build"
    assert call.cores == 2 * plan.runs[0].processes
    assert (call.environment["OWN"], call.environment["ITS"]) == ("1", "2")
    (event,) = place.events("run")
    assert event["command"].startswith(" ".join(["ITS=2", "python", *launcher]))


@pytest.mark.parametrize(
    ("cold_rounds", "files"),
    [
        # In order a, a with another seed, b; b has the script of a, but other options.
        (1, [1, 1, 1, 2, 3, 2]),
        (2, [1, 1, 1, 1, 1, 1]),
        (0, [1, 2, 1, 3, 4, 2]),
    ],
)
def test_compile_cache(place, cold_rounds, files):
    """The rounds that compile anew start with an empty one; other options have another one, and
    none leads out of build/."""
    counts = []

    def compile(command, environment):
        cache = Path(environment["TORCHINDUCTOR_CACHE_DIR"])
        assert cache.parent == place.folder / "build" / "compiler-cache"
        cache.mkdir(parents=True, exist_ok=True)
        (cache / str(len([*cache.iterdir()]))).touch()
        counts.append(len([*cache.iterdir()]))
        return child(speed=100)(command, environment)

    plan = place.plan("a", "b", seed_noise=True, cold_rounds=cold_rounds)
    plan.runs[1] = plan.runs[1].replace(
        script=plan.runs[0].script, options=("--weights", "../../../data", "x" * 300)
    )
    place.children.does |= dict(a=compile, b=compile)
    place.run(plan, rounds=2)
    assert counts == files and place.meta.exists()


@pytest.mark.parametrize("outside", ["", "x/../..", "link/below", "../buildings"])
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
    assert build.exists() and not (build / "x").exists()


# ---- How long


class Phases(Toy):
    """Runs like the first of its second plan follow three times, and its third plan once."""

    def later(self, setup, plan):
        first, second, third = self.made_with
        like = replace(second, runs=second.runs[:1])
        return [like, like, like, third] if plan is first else []


def test_an_estimate_is_of_the_whole_study(place, plan, capsys):
    """Of the plans that follow, too, whose runs may depend on the first one's results."""
    study = Phases(
        plan, place.plan("c", kind="next", tokens=8192), place.plan("d", kind="last", rounds=1)
    )
    write_journal(place.setup.results, "stages", plan_of("a"))
    run.dry_run(study, place.setup, 2, resume=NEVER)  # runs take 15 s, and little for their tokens
    assert capsys.readouterr().out.endswith("\n13 runs, about 3 min\n")


@pytest.mark.parametrize(
    ("limit", "memory", "names"),
    [
        (8.0, [], "abcde"),  # nothing is known of it yet
        (8.0, [1.0], "abcd"),
        (8.0, [1.0, 1.5, 2.0], "abcde"),
        (8.0, [1.0, 9.0], "ab"),
        (8.0, [None], "a"),
        (None, [1.0, 9.0], "abcde"),
    ],
)
def test_what_grows_is_tried_up_to_the_memory(place, limit, memory, names):
    plan = sizes(place, "abcde", growth=Growth(2, limit))
    measured = measured_with(
        plan,
        {
            run.name: record_events(run.name, reserved_gb=gb)
            for run, gb in zip(plan.runs, memory, strict=False)
        },
    )
    assert set("abcde") - measured.skipped().keys() == {*names}


def test_seconds_left(plan):
    jobs = [
        Job(run, number, seed)
        for name, number, seed in ROUND + NEXT
        for run in plan.runs
        if run.name == name
    ]
    estimates = {"a": sizing.Length((), 30), "b": sizing.Length((), 50)}
    results = [SimpleNamespace(name="a", seconds=seconds) for seconds in (10, 20, 90)]
    # b is estimated at 50 s, and a took 20 where 30 were estimated; so is what follows.
    assert seconds_left(jobs, results, estimates, 6000) == pytest.approx(
        4 * 20 + (2 * 50 + 6000) * 20 / 30 + 6 * RATE_SECONDS
    )
    assert seconds_left(jobs, [], estimates) == 4 * 30 + 2 * 50 + 6 * RATE_SECONDS
    assert [in_words(seconds) for seconds in (89, 150, 7200)] == ["89 s", "2 min", "2.0 h"]


def length(plan, per_step=1024, machine=MACHINE):
    """The options that say so, and the seconds; the machine is twice an A100."""
    (run,) = plan.runs
    config = sizing.GPT2 | dict(batch_size=per_step // run.processes // 1024)
    found = sizing.lengths_of(
        plan, setup_of(Path(), machine), {run.name: config}, dict(bfloat16=2 * 312e12)
    )[run.name]
    return dict(zip(found.options[::2], found.options[1::2], strict=True)), found.seconds


def plan_with(**changes):
    plan = plan_of("a", tokens=10_000)
    plan.runs = [plan.runs[0].replace(**changes)]
    return plan


def test_length():
    slow = plan_with(expected=500)
    assert length(slow)[0] == {
        "--max-tokens": 10 * 1024,
        "--eval-freq": 9,  # a line after 1, 10, 19 ... steps; 10 reach 10,000 tokens
        "--epochs": 10**6,
    }  # the tokens alone end the run
    assert length(slow)[1] == pytest.approx(40 + 10 * 1024 / 1000)
    assert length(slow, machine=CPU)[1] == pytest.approx(10 + 10 * 1024 / 1000)
    ranks = plan_with(expected=500, processes=4)
    options, _ = length(ranks, 4096)
    assert (options["--max-tokens"], options["--eval-freq"]) == (10 * 4096, 9)
    ranks.length = EqualSteps(10_000, min_steps=12)
    assert length(ranks, 4096)[0]["--max-tokens"] == 12 * 4096


def test_a_length_in_epochs():
    """Of the text; on a CPU a script ends by its own limit before."""
    whole = plan_with(expected=500)
    whole.length = WholeScript(epochs=2)
    options, seconds = length(whole)
    assert options == {"--epochs": 2}
    assert seconds == pytest.approx(40 + 2 * BOOK_TOKENS / 1000)
    assert length(whole, machine=CPU)[0] == {"--epochs": 2}


@pytest.mark.parametrize(
    ("machine", "times"), [(MACHINE, 4), (MACHINE | FLOAT32, 4), (CPU, 1), (CPU | FLOAT32, 1)]
)
def test_the_expected_speed_of_several_ranks(machine, times):
    """On GPUs each rank has a peak of its own, on a CPU all share one."""
    one, four = (
        sizing.expected_speed(run, PEAK, machine, sizing.GPT2)
        for run in (Run("a", "a", expected=500.0), Run("a", "a", expected=2000.0, processes=4))
    )
    assert four == pytest.approx(times * one)


def test_scripts_judge_their_options(tmp_path, monkeypatch, forked_children):
    """All in one process; what each trains per step comes back, and isn't asked twice."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("bench.measure.plan.BUILD", tmp_path / "build")
    runs = [
        Run("00", "00", "", ROOT / "00_orig.py"),
        Run("01", "01", "", ROOT / "01_opt_single_gpu.py", options=("--batch-size", "3")),
        Run("02", "02", "", ROOT / "02_opt_multi_gpu_ddp.py"),
        Run("made", "made", "", "01"),
    ]
    setup = setup_of(tmp_path, options=TINY_OPTIONS)
    configs = sizing.configurations(runs, setup)
    assert [config["batch_size"] for config in configs.values()] == [2, 3, 2, 2]
    assert {(config["context_length"], config["learning_rate"]) for config in configs.values()} == {
        (16, 5e-4)
    }
    monkeypatch.setattr(processes, "ask", None)
    assert sizing.configurations(runs, setup) == configs
    for option in ("--seed", "-h", "--eval-freq=3"):
        setup.options[:] = [option]
        with pytest.raises(UserError, match=f"^{option.split('=')[0]} is set by measure.py"):
            sizing.configurations(runs, setup)


# ---- Child processes


def test_a_child_does_not_outlive_the_tool(tmp_path):
    """And Ctrl-C reaches it once, as SIGTERM."""
    (tmp_path / "child.py").write_text(
        "import os, pathlib, signal, time\n"
        "def got(number, frame): print(number, file=open('got', 'a'))\n"
        "signal.signal(signal.SIGTERM, got); signal.signal(signal.SIGINT, got)\n"
        "pathlib.Path('pid').write_text(str(os.getpid()))\n"
        "while not os.path.exists('got'): time.sleep(0.02)\n"
        "time.sleep(0.3)\n"
    )
    code = (
        "import sys; from gpt_speed import children; children.on_signals(children.interrupt)\n"
        "children.run_child([sys.executable, 'child.py'])"
    )
    tool = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
        env=environment(PYTHONPATH=str(ROOT)),
        start_new_session=True,
    )
    pid, end = tmp_path / "pid", time.monotonic() + 60
    while not pid.exists() or not pid.read_text():
        assert time.monotonic() < end and tool.poll() is None
        time.sleep(0.02)
    for _ in range(2):  # who is impatient presses it again
        os.killpg(tool.pid, signal.SIGINT)
        time.sleep(0.1)
    assert tool.wait(30) != 0
    assert (tmp_path / "got").read_text().split() == [str(int(signal.SIGTERM))]
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells a process of its parent's end"
)
def test_a_script_that_ignores_sigterm_does_not_outlive_a_killed_tool(tmp_path):
    """As one that wants to write a checkpoint first."""
    (tmp_path / "rank.py").write_text(RANK)
    runs = "from gpt_speed import script; script.run_script(['rank.py'])"
    tool = "import sys; from gpt_speed import children; "
    tool += f"children.run_child([sys.executable, '-c', {runs!r}])"
    variables, pid = environment(PYTHONPATH=str(ROOT)), tmp_path / "rank"
    with subprocess.Popen([sys.executable, "-c", tool], cwd=tmp_path, env=variables) as process:
        wait_until(lambda: pid.exists() and pid.read_text())
        process.kill()
    wait_until(lambda: not is_running(int(pid.read_text())))


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_signal_while_a_child_starts(monkeypatch):
    """It comes when Popen has started it, but hasn't returned yet. The child gets its own."""
    start, started = subprocess.Popen, []

    def starts(*args, **how):
        started.append(start(*args, **how))
        # To this thread: another one, as pytest-xdist has, doesn't hold signals.
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", starts)
    handler = signal.signal(signal.SIGTERM, children.interrupt)
    try:
        monkeypatch.setattr(children, "on_signals", lambda handler: None)
        with pytest.raises(children.Interrupted):
            children.run_child(["sleep", "300"])
        assert started[0].returncode == -signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, handler)
        started[0].kill()


# A child as torchrun: its rank has a session of its own and takes no notice of SIGTERM. It writes
# down its number, and sleeps.
RANK = """
import os, pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path("rank").write_text(str(os.getpid()))
time.sleep(300)
"""
LAUNCHER = """
import pathlib, subprocess, sys, time
rank = subprocess.Popen([sys.executable, "rank.py"], start_new_session=True)
while not pathlib.Path("rank").exists() or not pathlib.Path("rank").read_text():
    time.sleep(0.02)
print("started", flush=True)
if sys.argv[1] == "wait":
    rank.wait()
"""


def is_running(pid: int) -> bool:
    """Whether it is, and no zombie."""
    answer = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return answer.stdout.strip()[:1] not in ("", "Z")


@pytest.mark.parametrize(
    ("does", "linux"),
    [
        pytest.param("wait", True, id="it-hangs"),
        pytest.param("end", True, id="it-ends"),
        pytest.param("wait", False, id="on-another-unix"),
    ],
)
def test_a_rank_does_not_outlive_its_launcher(tmp_path, monkeypatch, does, linux):
    """Neither one that hangs, nor one whose launcher is gone; its output is that until then."""
    (tmp_path / "rank.py").write_text(RANK)
    monkeypatch.setattr(children, "GRACE", 0.2)
    if not linux:
        monkeypatch.setattr(children, "prctl", None)
    launcher = [sys.executable, "-c", LAUNCHER, does]
    if does == "end":
        assert children.run_child(launcher, tmp_path, timeout=60) == (0, "started\n", "")
    else:
        with pytest.raises(subprocess.TimeoutExpired):
            children.run_child(launcher, tmp_path, timeout=3)
    assert not is_running(int((tmp_path / "rank").read_text()))


def test_a_child_has_ended_though_its_output_is_held_open(monkeypatch):
    """By a process that isn't found as one of the child's, since its environment differs."""
    monkeypatch.setattr(children, "HELD_SECONDS", 0.2)
    program = (
        "import subprocess; holder = subprocess.Popen(['sleep', '300'], env={},"
        " start_new_session=True); print(holder.pid)"
    )
    code, out, _ = children.run_child([sys.executable, "-c", program], timeout=60)
    os.kill(int(out), signal.SIGKILL)
    assert code == 0


def test_a_question_has_a_time_limit():
    """A GPU that is stuck answers none."""
    with pytest.raises(UserError, match="time.sleep.* gave no answer within 0.5 s$"):
        processes.ask(["-c", "import time; time.sleep(300)"], seconds=0.5)


def test_a_question_that_a_signal_ended_says_so():
    """Also where something was written before that."""
    program = "import os, sys; print('a warning', file=sys.stderr, flush=True); os.abort()"
    with pytest.raises(UserError, match="failed: ended by signal 6$"):
        processes.ask(["-c", program])


def test_git_has_a_time_limit(tmp_path, monkeypatch):
    """As on a disk of a network that is gone."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 300\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(processes, "ROOT", tmp_path)
    monkeypatch.setattr(children, "run_child", partial(within, 0.5, children.run_child))
    with pytest.raises(UserError, match="^git rev-parse gave no answer within"):
        processes.git_commit()


def within(seconds, run_child, command, cwd=None, timeout=None, **how):
    """run_child(), of whose time limit no more than this much is waited."""
    assert timeout
    return run_child(command, cwd, min(timeout, seconds), **how)


# ---- The command line


@pytest.fixture
def main(place, monkeypatch, capsys):
    """measure.main() in this process, with made-up runs: (exit code, stdout, stderr)."""
    monkeypatch.setattr(children, "on_signals", lambda handler: None)

    def run(*argv):
        options = [str(part) for part in argv]
        if options and options[0] in STUDIES:
            options[1:1] = [
                "--data",
                str(place.setup.data),
                "--results-dir",
                str(place.setup.results),
            ]
        monkeypatch.setattr(sys, "argv", ["measure.py", *options])
        try:
            code = measure.main()
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    run.children, run.journal = place.children, journal_of(place.setup.results, "ladder")
    return run


@pytest.mark.parametrize("command", ["ladder", "report", "audit measure.py"])
def test_what_may_not_run_beside_a_measurement(main, place, monkeypatch, command):
    """It is refused before it asks for this machine, which takes seconds and a GPU's memory."""
    monkeypatch.setattr("bench.measure.look.describe_here", None)
    build = place.folder / "build"
    monkeypatch.setattr(common, "BUILD", build)
    with locked(build):
        code, _, err = main(*command.split())
    assert code == 1 and err.startswith("error: another measurement of this clone is running")


@pytest.mark.parametrize("command", [*STUDIES, "report"])
def test_help(main, command):
    code, out, _ = main(command, "--help")
    assert code == 0 and out.startswith(f"usage: measure.py {command} ")
    if command in STUDIES:
        assert all(option in out for option in ("--resume", "--dry-run", "--rounds", "--data"))
        assert not any(text in out for text in ("{}", "{cuda", "{cpu"))  # defaults are filled in


@pytest.mark.parametrize(
    "command",
    [
        ["measure.py", "predict", "--gpu", "list", "--results-dir", "{folder}"],
        ["plot_results.py", "--results-dir", "{folder}"],
        ["-m", "gpt_speed", "gpus"],
        ["patches/stack.py", "list"],
        ["data/prepare.py", "README.md", "--out", "{folder}/data"],
    ],
)
def test_output_that_nobody_reads(command, tmp_path):
    """Such as `measure.py ... | head -1`: no traceback, and the code of a program that SIGPIPE has
    ended. Where stdout isn't buffered the first line fails, else what is left at the end."""
    for unbuffered in ("1", ""):
        reader, writer = os.pipe()
        os.close(reader)
        result = subprocess.run(
            [sys.executable, *(word.format(folder=tmp_path) for word in command)],
            cwd=ROOT,
            stdout=writer,
            stderr=subprocess.PIPE,
            env=environment(PYTHONUNBUFFERED=unbuffered),
        )
        os.close(writer)
        assert (result.returncode, result.stderr) == (141, b"")


@pytest.mark.parametrize("program", ["measure", "plot_results", "bench.measure.hardware"])
def test_an_older_python(program):
    """It is refused before what it lacks is imported."""
    code = f"import sys; sys.version_info = (3, 10, 13, 'final', 0); import {program}"
    result = run_python("-c", code, cwd=ROOT)
    assert result.returncode == 1 and result.stderr.startswith("error: needs Python 3.11 ")


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("", "COMMAND"),
        ("climb", "'climb'"),
        ("ladder --rounds 0", "--rounds: 0 is out of range"),
        ("ladder --round 1", "unrecognized arguments: --round 1"),
        ("report --minutes nan", "nan is out of range"),
        ("ladder --techniques 99", "--techniques 99: '99' isn't within 0-15"),
        ("variants --names nothing", "no variant 'nothing' of 01"),
        ("scaling 0,1", "argument 1,2,4: 0 is out of range"),
        ("sweep batch -- --batch-size 2", "--batch-size is set by the sweep itself"),
        ("report --studies doctor", "--studies: 'doctor' is none of gradients, stages, "),
        (
            "report --studies time-to-loss",
            "--studies: 'time-to-loss' is none of gradients, stages, ",
        ),
        ("ladder --resume --dry-run", "nothing to resume in "),
    ],
)
def test_what_is_refused(main, command, says):
    """In one line, and nothing has run."""
    code, out, err = main(*command.split())
    *_, line = err.splitlines()
    assert (code, out) == (2, "") and "error: " in line and says in line
    assert not main.children.ran and not main.journal.exists()


def test_what_the_scripts_refuse(main, monkeypatch, tmp_path):
    """With the real children, but for the machine."""
    monkeypatch.undo()
    monkeypatch.setattr(common, "BUILD", tmp_path / "build")  # other tests measure, too
    monkeypatch.setattr(children, "HOME", tmp_path)
    monkeypatch.setattr(children, "on_signals", lambda handler: None)
    monkeypatch.setattr(processes, "ask_machine", main.children.ask_machine)
    monkeypatch.setattr("bench.measure.look.describe_here", lambda: CPU)
    code, out, err = main("ladder", "--techniques", "0,8", "--", *TINY, "--no-compile")
    assert (code, out, err) == (2, "", "error: 00_orig: unrecognized arguments: --no-compile\n")
    assert not main.journal.exists()


def test_options_behind_the_dashes_go_to_every_script(main):
    options = ["--model", "gpt2", "--", "--seconds", "3"]
    code, out, err = main(
        "ladder", "--techniques", "0,2", "--rounds", "1", "--max-tokens", "2048", "--", *options
    )
    assert (code, err, len(main.children.calls)) == (0, "", 3)
    for call in main.children.calls:
        assert call.command[-5:] == options
        assert call.command[call.command.index("--max-tokens") + 1] == "2048"
    assert [row[0] for row in rows_of_text(out)] == ["0 baseline", "2 tensor cores"]
    (measured,) = read_journal(main.journal)
    assert measured.options == options


def test_an_interrupt_tells_how_to_go_on(main):
    """And the exit code tells of a failure."""
    main.children.stop_at = 2
    argv = "--techniques", "0", "--rounds", "1", "--", "--dropout", "0.2"
    code, _, err = main("ladder", *argv)
    assert code == 128 + signal.SIGTERM
    again = "--techniques 0 --rounds 1 -- --dropout 0.2\n"
    assert "python measure.py ladder --resume " in err and err.endswith(again)
    main.children.stop_at = 3
    assert main("ladder", "--resume", *argv)[2].count("--resume") == 1
    main.children.stop_at, does = None, main.children.does
    for does["00_orig"], code in ((dict(status="failed", error="it broke"), 1), ({}, 0)):
        assert main("ladder", "--resume", *argv)[0] == code


def test_what_was_interrupted_before_it_began_is_not_resumed(main, monkeypatch):
    """--resume would continue an earlier measurement."""

    def interrupted(question):
        raise children.Interrupted(signal.SIGINT)

    argv = "ladder", "--techniques", "0", "--rounds", "1"
    assert main(*argv)[0] == 0
    monkeypatch.setattr(processes, "ask_machine", interrupted)
    code, _, err = main(*argv)
    assert code == 128 + signal.SIGINT and "python measure.py ladder" in err
    assert "--resume" not in err


AT_ONCE = """
import sys
import measure
for command in (["--help"], ["ladder", "--help"], ["predict", "--techniques", "0"]):
    sys.argv[1:] = command
    try:
        assert measure.main() == 0
    except SystemExit as stop:
        assert stop.code == 0
    loaded = {"torch", "numpy", "matplotlib"} & sys.modules.keys()
    assert not loaded, (command, loaded)
"""


def test_what_is_kept_is_answered_without_pytorch():
    result = run_python("-c", AT_ONCE, cwd=ROOT, fork=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_ladder(tmp_path, number, code):
    """Real runs, interrupted by Ctrl-C or killed with all children, taken up; one fails."""
    tree = copy_of_checkout(tmp_path / "tree", CPU)
    journal = tree / "results" / "ladder.jsonl"
    data = write_tokens(tmp_path / "data", train=16 * 6 + 1)  # 6 windows: a batch of 4, none of 8
    words = f"--techniques 0,3,10 --rounds 1 --max-tokens 128 --data {data} --".split()
    command = [*words, *TINY]  # whose batch grows with technique 10
    assert stopped_in_round_1(tree, command, number) == code
    wait_for_children(tree)
    (first,) = read_journal(journal)[0].results

    result = run_python("measure.py", "ladder", "--resume", *command, cwd=tree)
    assert result.returncode == 1  # of the failed run
    results = {result.key: result for result in read_journal(journal)[0].results}
    # A failed run is tried again, another one stands.
    assert first == results[first.key] or not first.outcome.complete
    check_ladder(results)
    left = {path.name for path in (tree / "build").iterdir()}
    left -= {".lock", "scripts", "compiler-cache"}
    assert not left or number == signal.SIGKILL  # which may leave a run's temporary folder


def stopped_in_round_1(tree: Path, command: list[str], number: int) -> int:
    """The exit code of a ladder that gets a signal after its first run."""
    with subprocess.Popen(
        [sys.executable, "measure.py", "ladder", *command],
        cwd=tree,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as child:
        while not child.stdout.readline().startswith("round 1: "):  # of a random order
            assert child.poll() is None, child.stderr.read()
        child.send_signal(number)
        _, err = child.communicate(timeout=120)
    print(err)
    return child.returncode


def wait_for_children(tree: Path) -> None:
    """Waits until no script of a checkout runs any more."""
    until = time.monotonic() + 60
    while subprocess.run(["pgrep", "-f", tree / "build"], capture_output=True).stdout:
        assert time.monotonic() < until, "a child outlived the measurement"
        time.sleep(0.2)


def check_ladder(results: dict) -> None:
    """Checks a ladder of 0, 3 and 10, by the runs' keys: the last one's batch is too large."""
    assert sorted(results) == [
        ("00_orig", 1, 123),
        ("00_orig", 1, 124),
        ("03-fused-adamw", 1, 123),
        ("10-batch-size", 1, 123),
    ]
    base, _, adam, batch = (results[key] for key in sorted(results))
    assert Training(adam.record).tok_per_sec > 0 and adam.record.logs[-1]["tokens"] == 128
    losses = [Training(result.record).lowest_val_loss for result in (adam, base)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert batch.outcome.status is Status.TOO_LARGE


# ---- The batch size that fits a GPU, by prediction before a study


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """A GPU with so much free memory; the scripts' own batch sizes are 8 and, of b, 32."""
    gpu = Place(tmp_path, monkeypatch, MACHINE)
    gpu.children.answers |= dict(free_memory=[24_100])
    monkeypatch.setattr(
        sizing,
        "configurations",
        lambda runs, setup: {
            each.name: dict(
                batch_size=32 if each.name == "b" else 8, context_length=256, compile=False
            )
            for each in runs
        },
    )
    return gpu


@pytest.mark.parametrize(
    ("free", "batches", "too_large"),
    [
        ([80_000], {}, 0),
        ([24_100], {8: 4, 32: 16}, 0),
        ([11_900], {8: 2, 32: 8}, 0),
        ([39_900, 11_900], {8: 2, 32: 8}, 0),  # the smaller one of two
        ([2_500], {8: 1, 32: 1}, 1),
        ([2_000], {8: 1, 32: 1}, 2),
    ],
)
def test_what_fits(gpu, free, batches, too_large, capsys):
    """By the committed predictions of 00 and of technique 10. A script of which not even one
    sequence fits is tried nevertheless, and a line says so."""
    gpu.children.answers["free_memory"] = free
    assert batches_that_fit(gpu.setup, composed=False) == batches
    text = capsys.readouterr().err
    assert text.count(" GB of the GPU's memory can be used: by prediction, ") == bool(batches)
    assert text.count("1 in place of ") == len(batches) * (1 in batches.values())
    assert text.count(", which doesn't fit either") == too_large


def test_a_study_fits_its_runs(gpu, capsys):
    """Resumed with the same batch sizes, though less is free then. A run that doesn't fit all the
    same has failed, the others go on, and a line says what to type."""

    def batches(*names, resume=NEVER, **settings) -> list[tuple]:
        """What a start runs: (name, batch size or None)."""
        gpu.children.calls.clear()
        gpu.setup.batches = batches_that_fit(gpu.setup, composed=False)
        gpu.run(gpu.plan(*names, **settings), resume=resume)
        options = [
            dict(zip(call.command, call.command[1:], strict=False)) for call in gpu.children.calls
        ]
        return [(words["--name"], words.get("--batch-size")) for words in options]

    assert batches("a", "b", rounds=1) == [("a", "4"), ("b", "16")]
    gpu.children.answers["free_memory"] = [7_700]
    assert batches("a", "b", rounds=2, resume=REQUIRED) == [("a", "4"), ("b", "16")]
    gpu.children.does["b"] = dict(status="out_of_memory", error="out of memory: lower it")
    assert batches("a", "b", rounds=2) == [("a", "1"), ("b", "4"), ("a", "1")]
    assert gpu.measured[0].has_failures
    assert "python measure.py toy -- --batch-size" in capsys.readouterr().out
    assert batches("a", growth=Growth(2)) == [("a", None)]


@pytest.mark.parametrize(
    ("old", "free", "batches"), [(False, 24_100, (4, 16)), (True, 14_900, (2, 8))]
)
def test_what_make_bench_asks(gpu, monkeypatch, tmp_path, capsys, old, free, batches):
    """On a GPU without bfloat16 units 01 and 02 are composed, in build/; as large as that script
    may be, by the committed prediction."""
    monkeypatch.setattr("bench.commands.doctor.BUILD", tmp_path / "build")
    gpu.children.answers["free_memory"] = [free]
    if old:
        gpu.setup.machine = gpu.setup.machine | FLOAT32 | dict(capability="7.5")
    for stage in ("00", "01", "02"):
        gpu.setup.args = SimpleNamespace(stage=stage)
        assert Fits().run(gpu.setup) == 0
        script, *words = shlex.split(capsys.readouterr().out)
        assert words[-2:] == ["--batch-size", str(batches[stage != "00"])]
        composed = old and stage != "00"
        assert script.endswith("-precision-fp16.py") is composed
        assert not composed or "GradScaler" in Path(script).read_text()


@pytest.mark.parametrize(("fails", "code", "started"), [("", 0, 3), ("01", 2, 2)])
def test_make_bench_starts_what_fits_answers(tmp_path, fails, code, started):
    """Here 000.py for 00; a script that fails ends it. A stub in place of Python."""
    calls, stub = tmp_path / "calls", tmp_path / "python"
    stub.write_text(f"""#!/bin/sh
        echo "$@" >> {calls}
        case "$*" in
            "measure.py fits 02"*) exit 1 ;;
            "measure.py fits 0"*) echo 0$3.py --batch-size 4 ;;
            "0$FAILS.py"*) exit 1 ;;
        esac
        """)
    stub.chmod(0o755)
    done = subprocess.run(
        ["make", "bench", f"PYTHON={stub}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | dict(MAKEFLAGS="", FAILS=fails),
    )
    text = calls.read_text()
    assert done.returncode == code, done.stderr
    assert sum(name in text for name in ("000.py", "001.py", "02_opt_multi_gpu_ddp.py")) == started
    assert ("plot_results.py" in text) is (code == 0)


@pytest.mark.parametrize(("torch", "warns"), [("2.11.0+cu130", False), ("2.13.0", True)])
def test_doctor_warns_of_compiled_dropout(gpu, torch, warns):
    gpu.setup.machine = gpu.setup.machine | dict(torch=torch)
    gpu.children.answers["compile_error"] = None
    assert ("\ndropout  " in Doctor().answer(gpu.setup)) is warns


@pytest.mark.parametrize(
    "machine",
    [dict(capability="7.5", name="Tesla T4") | FLOAT32, dict(name="NVIDIA GeForce RTX 3090")],
)
def test_doctor(gpu, machine):
    """One screen: what the machine is, what it trains in, what fits."""
    gpu.setup.machine = gpu.setup.machine | machine
    gpu.children.answers["compile_error"] = None
    lines = Doctor().answer(gpu.setup).splitlines()
    shown = {line[:15].strip(): line[15:] for line in lines}
    assert shown["batch size"] == "4 in place of 8, 16 in place of 32"
    assert gpu.setup.machine["capability"] in shown["GPU"]
    assert shown["trains in"].startswith(gpu.setup.machine["dtype"])
    assert "4,096 to train on" in shown["tokens"] and shown["torch.compile"] == "works"
    gpu.meta.write_text("[]")
    assert "meta.json is damaged (" in Doctor().answer(gpu.setup)
    assert len(lines) < 20


def test_doctor_claims_no_batch_size_that_is_not_known(gpu, monkeypatch, capsys):
    """Nothing is said of one that is chosen by an option."""

    def not_traced(*_, **__):
        raise UserError("this PyTorch traces nothing")

    monkeypatch.setattr("bench.predict.batches.predict", not_traced)
    gpu.children.answers["compile_error"] = None
    assert "\nbatch size     not known: this PyTorch traces nothing\n" in Doctor().answer(gpu.setup)
    assert batches_that_fit(gpu.setup, composed=False) == {}
    assert "isn't known: this PyTorch traces nothing" in capsys.readouterr().err
    gpu.setup.options = ["--batch-size", "2"]
    assert "\nbatch size" not in Doctor().answer(gpu.setup)


# ---- Tokens, files


def test_a_file_that_cannot_be_written_says_why(tmp_path, monkeypatch):
    """Also by an error that has no number."""
    monkeypatch.setattr(stack, "write_all", Mock(side_effect=OSError("the stream was cut")))
    with pytest.raises(UserError, match="can't be written: the stream was cut"):
        common.write_whole(tmp_path / "a", "text")


def test_what_is_trained_on_is_said(tmp_path, monkeypatch, capsys):
    """data/prepare.py may have taken another text than the book."""
    prepare = tmp_path / "data" / "prepare.py"
    prepare.parent.mkdir()
    prepare.write_text("print('no network: the text is another one')")
    monkeypatch.setattr(processes, "ROOT", tmp_path)
    processes.prepare_tokens(tmp_path / "none")
    assert "\nno network: the text is another one\n" in capsys.readouterr().out
