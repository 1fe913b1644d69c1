"""bench/commands/results.py: `compare` of two ladders, `pack` of a folder."""

import errno
import os
from argparse import Namespace
from contextlib import redirect_stdout
from io import StringIO

import pytest
from conftest import ROOT
from made_up import (
    CPU,
    MACHINE,
    complete_results,
    measure_again,
    plan_of,
    rounds_of,
    rows_of_text,
    setup_of,
    write_journal,
)

from bench.commands import Command
from bench.commands import results as module
from bench.commands.results import Compare, Pack, what_is_missing
from gpt_speed.common import UserError

SPEEDS = [100.0, 101.0, 102.0, 103.0]


def ladder(folder, speeds: dict[str, list[float]], machine=CPU, **header) -> None:
    folder.mkdir()
    runs = [run for name, own in speeds.items() for run in rounds_of(name, *own)]
    write_journal(folder, "ladder", plan_of(*speeds), runs, machine, **header)


def answer(tmp_path, other: str = "other") -> tuple[list[str], list]:
    """What is said of the two folders, and the table's rows."""
    setup = setup_of(tmp_path)
    setup.args = Namespace(A=str(tmp_path / "one"), B=str(tmp_path / other))
    *folders, _, table = Compare().answer(setup).split("\n\n")
    return folders, rows_of_text(table)


def test_two_machines(tmp_path):
    """b gains more in A; c isn't told apart; what each was measured on is said."""
    ladder(
        tmp_path / "one",
        {"a": SPEEDS, "b": [201.0, 202.0, 202.0, 207.0], "c": [speed + 110 for speed in SPEEDS]},
        commit="0123456789",
    )
    ladder(
        tmp_path / "other",
        {"a": SPEEDS, "b": [151.0, 151.0, 152.0, 155.0], "c": [160.0, 150.0, 155.0, 170.0]},
        CPU | dict(name="Other CPU"),
    )
    folders, (b, c) = answer(tmp_path)
    assert "Some CPU, PyTorch" in folders[0] and "at 0123456 with" in folders[0]
    assert "Other CPU, PyTorch" in folders[1] and "4 rounds" in folders[1]
    assert folders[1].endswith(" a: 102 tok/sec.")
    assert (b[1], b[3], b[5]) == ("2.00", "1.50", "larger in A")
    assert c[-1] == "not significant"


def test_only_what_is_comparable(tmp_path):
    """Techniques with figures, after the same one in both; without spread there is no test."""
    ladder(tmp_path / "one", dict.fromkeys("abcd", SPEEDS))
    ladder(tmp_path / "other", {"b": SPEEDS, "c": SPEEDS, "d": []}, MACHINE)
    _, (c,) = answer(tmp_path)
    assert (c[0], c[-1]) == ("c", "not tested")


def test_a_ladder_whose_first_script_failed(tmp_path):
    """It has no speed to be told; why not is."""
    rest = [run for name in "bc" for run in rounds_of(name, *SPEEDS)]
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        runs = [dict(name="a", error="it broke"), *rest]
        write_journal(tmp_path / name, "ladder", plan_of("a", "b", "c"), runs)
    folders, (c,) = answer(tmp_path)
    assert all(folder.endswith(" a: failed: it broke.") for folder in folders) and c[0] == "c"


@pytest.mark.parametrize(
    ("other", "speeds", "options", "says"),
    [
        ("another before it", dict(a=SPEEDS, c=SPEEDS), [], "no technique in common"),
        ("options", dict(a=SPEEDS, b=SPEEDS), ["--dropout", "0"], "different options: .*--dropout"),
        ("nowhere", None, [], "nowhere: no ladder there; there are amd-epyc-2-cores"),
    ],
)
def test_what_is_not_comparable(tmp_path, other, speeds, options, says):
    ladder(tmp_path / "one", dict.fromkeys("abc", SPEEDS))
    if speeds:
        ladder(tmp_path / other, speeds, options=options)
    with pytest.raises(UserError, match=says):
        answer(tmp_path, other)


def test_a_command_without_an_answer_prints_nothing(capsys):
    """As an audit in torchrun's further ranks."""

    class Silent(Command):
        def answer(self, setup):
            return ""

    assert Silent().run(setup_of(ROOT)) == 0
    assert capsys.readouterr() == ("", "")


# ---- For results/reference


@pytest.fixture
def results(tmp_path, monkeypatch):
    """What a machine has measured, complete."""
    monkeypatch.setattr(module, "REFERENCE", tmp_path / "reference")
    module.REFERENCE.mkdir()
    folder = tmp_path / "results"
    complete_results(folder)
    (folder / "profile.trace.json").write_text("large")
    (folder / "00_orig-cpu-20260101T000000Z-1.jsonl").write_text("of a script by hand")
    (folder / "link.png").symlink_to("/etc/hostname")
    monkeypatch.setattr(
        module,
        "write_page",
        lambda studies, results, *_: (results / "page.png").write_text("drawn"),
    )
    return folder


def packed(folder, name: str) -> str:
    setup = setup_of(folder)
    setup.args.name = name
    output = StringIO()
    with redirect_stdout(output):
        assert Pack().run(setup) == 0
    return output.getvalue()


def test_a_complete_folder_is_packed(results, tmp_path):
    """Journals, page and pictures are copied; nothing is overwritten."""
    packed(results, "rtx-4090")
    assert sorted(path.name for path in (tmp_path / "reference" / "rtx-4090").iterdir()) == [
        "00_orig-cpu-20260101T000000Z-1.jsonl",
        "ladder.jsonl",
        "machine.json",
        "page.png",
        "report.md",
        "stages.jsonl",
    ]
    with pytest.raises(UserError, match="exists: nothing is overwritten"):
        packed(results, "rtx-4090")
    for wrong in ("../x", "A", "", "/tmp/x"):
        with pytest.raises(UserError, match="isn't a name"):
            packed(results, wrong)


@pytest.mark.parametrize(
    ("stages", "ladder", "first", "says"),
    [
        (4, 0, 0, ""),
        (0, 3, 0, ""),
        (1, 3, 0, ""),
        (3, 2, 0, "Only 3 rounds: "),
        (2, 4, 1, "Only 2 rounds: "),  # a ladder that begins with a later script
        (1, 0, 0, "Single runs, no significance: "),
    ],
)
def test_more_rounds_are_asked_for(results, stages, ladder, first, says):
    """Where neither study has enough of 00 and 01; such a folder is packed nevertheless."""
    for study, rounds in (("stages", stages), ("ladder", ladder)):
        (results / f"{study}.jsonl").unlink()
        if rounds:
            measure_again(results, study, rounds, 0 if study == "stages" else first)
    _, *asked, _ = packed(results, "cpu").splitlines()
    assert len(asked) == bool(says)
    assert not says or asked[0].startswith(says) and "python measure.py stages" in asked[0]


def test_a_full_disk_leaves_nothing_half_packed(results, monkeypatch):
    """Nor does Ctrl-C; the next try has the name."""
    copyfile, left = module.shutil.copyfile, [2]

    def full(source, target):
        left[0] -= 1
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return copyfile(source, target)

    monkeypatch.setattr(module.shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space left"):
        packed(results, "rtx-4090")
    assert not list(module.REFERENCE.iterdir())
    packed(results, "rtx-4090")
    assert [path.name for path in module.REFERENCE.iterdir()] == ["rtx-4090"]


def test_an_incomplete_folder_is_refused(results):
    """What is missing is named, and a run that failed."""
    (results / "stages.jsonl").unlink()
    (results / "ladder.jsonl").unlink()
    (results / "report.md").write_text("# GPT\n\nNot finished: sweep; run it again.\n")
    assert [line.partition(":")[0] for line in what_is_missing(results)] == [
        "the report isn't finished",
        "no figures of 00 and 01",
    ]
    with pytest.raises(UserError, match="isn't complete: .*; no figures of 00 and 01: python"):
        packed(results, "cpu")
    measure_again(results, "ladder", 4, error="ended by signal 9")
    assert "ladder: a, b failed" in what_is_missing(results)
    write_journal(results, "sweep", plan_of("a"), [dict(name="a")], CPU | dict(torch="2.0"))
    assert "sweep.jsonl was measured on another machine" in what_is_missing(results)[-1]
    (results / "report.md").unlink()
    assert what_is_missing(results) == ["no report: make report"]
