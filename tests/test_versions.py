"""bench/studies/versions.py: runs in several environments, and which environments it refuses."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT
from made_up import CPU, Children, cells_of, setup_of

from bench import processes
from bench.analysis.folders import newest_in
from bench.analysis.rows import Rows
from bench.measure.journal import journal_of
from bench.measure.run import Resume, run_study
from bench.report.notes import provenance
from bench.report.showable import text_of
from bench.studies import all_studies, gradients, versions
from gpt_speed.common import UserError
from gpt_speed.tables import markdown

STUDY = all_studies()["versions"]
OLD, NEW = "2.11.0+cu130", "2.15.0"


@pytest.fixture(autouse=True)
def forget():
    """What environments have answered in another test."""
    versions.environment_of.cache_clear()


def make_python(folder: Path, *lines: str) -> Path:
    """An environment, whose Python is a shell script."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    python.chmod(0o755)
    return python


def answering(folder: Path, torch: str, **facts) -> Path:
    """An environment that says which PyTorch it has."""
    make_python(folder, f"echo '{json.dumps(CPU | dict(torch=torch) | facts)}'")
    return folder


@pytest.fixture
def two(tmp_path) -> list[str]:
    folders = [answering(tmp_path / name, torch) for name, torch in (("old", OLD), ("new", NEW))]
    return [str(folder) for folder in folders]


@pytest.fixture
def measure(tmp_path, monkeypatch, two):
    """Measures in some environments, with made-up children, in a folder."""
    # Before nothing answers but made-up children.
    environments = versions.environments_of(two, "cpu")
    children = Children(monkeypatch, tmp_path / "build")
    monkeypatch.setattr(
        versions, "environments_of", lambda names, device: environments[: len(names)]
    )

    def measure(names=two, rounds=2, resume=Resume.NEVER):
        setup = setup_of(tmp_path / "results", python=names)
        setup.data.mkdir(parents=True, exist_ok=True)
        (setup.data / "meta.json").write_text('{"tokens": {"train": 4096}}')
        run_study(STUDY, setup, rounds, resume)
        return {rows.measured.kind: rows for rows in newest_in(setup.results, "versions")}

    measure.children, measure.environments = children, environments
    return measure


def test_each_run_has_its_environment(measure, two):
    plans = measure()
    pythons = [call.command[0] for call in measure.children.calls]
    assert set(pythons) == {f"{folder}/bin/python" for folder in two}
    checks = [call for call in measure.children.calls if "--reference" in call.command]
    assert len(checks) == 2 and measure.children.calls[:2] == checks
    assert {call.cores for call in checks} == {1}
    assert {call.cores for call in measure.children.calls[2:]} == {None}
    rows = plans[""]
    assert [row.run.compared_to for row in rows] == [None, rows[0].run.name, None, rows[2].run.name]
    assert [row.rounds for row in rows] == [2] * 4
    assert [row.rounds for row in plans[versions.CHECK]] == [1] * 2


def test_each_environment_has_a_compiler_cache(measure):
    """Of the checks, too."""
    measure()
    caches = {
        (call.command[0], call.environment["TORCHINDUCTOR_CACHE_DIR"])
        for call in measure.children.calls
        if "01_opt_single_gpu" in call.command[call.command.index("--name") + 1]
    }
    assert len({cache for _, cache in caches}) == len(caches) == 4


def test_tables(measure):
    for rows in measure().values():
        text = text_of(STUDY, rows)
        assert all(row.label in text for row in rows)
        assert f"PyTorch {OLD} and {NEW}" in text
        assert "row above" not in text  # of three environments it is another script's
        assert provenance([rows.measured]).endswith(f"with PyTorch {OLD} and {NEW}.")


def test_gradients_stand_beside_the_speed_of_01(measure):
    rows = measure()[""]
    cells = cells_of(markdown(*STUDY.tables(rows)))
    assert [cells[row.label]["gradients"] for row in rows] == ["", "", "right", "right"]


def test_a_first_step_cold_and_again(measure):
    """Cold it is that of the round that compiles."""
    measured = measure(rounds=3)[""].measured
    measured.results = [replace(one, compiled=one.round > 1) for one in measured.results]
    rows = Rows(measured)
    for row in rows:
        for number, training in row.by_round.items():
            training.record.logs[0]["seconds"][0] = 10 / number
    cells = cells_of(markdown(*STUDY.tables(rows)))[rows[0].label]
    assert cells["first step s"] == "10.0"
    assert cells["again"] == "4.2"  # the median of 5 and 3.3


def test_no_path_of_an_environment_is_kept(measure, two, tmp_path):
    measure()
    kept = journal_of(tmp_path / "results", "versions").read_text()
    assert OLD in kept and "bin/python" not in kept


def test_resume_takes_a_further_environment(measure, two):
    measure(two[:1])
    before = len(measure.children.calls)
    plans = measure(two, resume=Resume.REQUIRED)
    again = measure.children.calls[before:]
    assert {call.command[0] for call in again} == {f"{two[1]}/bin/python"}
    assert [row.rounds for row in plans[""]] == [2] * 4


def test_an_edit_of_what_the_check_imports_repeats_the_check_alone(measure, monkeypatch, tmp_path):
    imported = tmp_path / "numeric.py"
    imported.write_text("")
    monkeypatch.setattr(gradients, "IMPORTED", [imported])
    measure()
    before = len(measure.children.calls)
    imported.write_text("# edited")
    measure(resume=Resume.REQUIRED)
    again = measure.children.calls[before:]
    assert len(again) == 2 and all("--reference" in call.command for call in again)


def test_a_check_that_is_repeated_leaves_the_trainings(measure, monkeypatch):
    """Though it comes to another verdict: at first it ran out of memory."""
    (check, _) = [
        run.name for run in versions.check_plan(setup_of(ROOT), measure.environments).runs
    ]
    measure.children.does[check] = dict(status="out_of_memory", error="out of memory: lower it")
    rows = measure()[""]
    assert "out of memory" in verdicts(rows)[0]
    del measure.children.does[check]
    before = len(measure.children.calls)
    rows = measure(resume=Resume.REQUIRED)[""]
    assert [name for name, _ in measure.children.ran[before:]] == [check]
    assert verdicts(rows) == ["right", "right"] and [row.rounds for row in rows] == [2] * 4


def verdicts(rows: Rows) -> list[str]:
    """What stands beside the speeds of 01."""
    cells = cells_of(markdown(*STUDY.tables(rows)))
    return [cells[row.label]["gradients"] for row in rows if row.run.stage == "01"]


def test_wrong_gradients_fail_it(measure):
    measured = measure()[versions.CHECK].measured
    assert not STUDY.has_failed(measured)
    (event,) = measured.results[0].record.gradients
    event["tensors"]["head.weight"] = [1.0, 0.0, 0.0]
    assert STUDY.has_failed(measured)


# ---- Environments


def test_an_environment_is_a_folder_or_a_python(tmp_path):
    folder = answering(tmp_path / "one", "2.13.0")
    python = folder / "bin" / "python"
    link = tmp_path / "link"
    link.symlink_to(python)  # as an environment's own Python is one
    assert versions.python_of(str(folder)) == versions.python_of(str(python)) == python
    assert versions.python_of(str(link)) == link
    assert versions.python_of(os.path.relpath(sys.executable)) == Path(sys.executable)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["exit 0"], "is no Python"),
        (["echo hello"], "is no Python"),
        (["echo \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1"], "named 'torch'"),
        (["echo error: needs Python 3.11 or newer >&2; exit 1"], "needs Python 3.11"),
        ([f"echo '{json.dumps(CPU | dict(torch='2.4.1+cu121'))}'"], "2.5 or newer"),
    ],
)
def test_an_environment_that_is_refused(tmp_path, lines, reason):
    make_python(tmp_path / "one", *lines)
    with pytest.raises(UserError, match=reason) as error:
        versions.environments_of([str(tmp_path / "one")], "cpu")
    assert error.value.code == 2 and "\n" not in str(error.value)


def test_no_python_there(tmp_path):
    for name in (tmp_path, tmp_path / "none", ""):
        with pytest.raises(UserError, match="no Python") as error:
            versions.environments_of([str(name)], "cpu")
        assert error.value.code == 2


def test_one_that_has_no_gpu_beside_one_that_has(two):
    with pytest.raises(UserError, match="trains on cpu"):
        versions.environments_of(two, "cuda")


def test_the_same_environment_twice(two):
    with pytest.raises(UserError, match="two environments") as error:
        versions.environments_of([*two, two[0]], "cpu")
    assert error.value.code == 2


def test_this_python_answers_for_itself():
    assert processes.ask_machine("rank_count", sys.executable) == processes.ask_machine(
        "rank_count"
    )
