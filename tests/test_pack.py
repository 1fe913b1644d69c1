"""The study `pack`: from results/ to results/reference."""


import pytest
from made_up import complete_results, measure_again, setup_of

from bench.common import UserError
from bench.studies import results as module
from bench.studies.results import Pack, what_is_missing


@pytest.fixture
def results(tmp_path, monkeypatch):
    """What a machine has measured, complete."""
    monkeypatch.setattr(module, "REFERENCE", tmp_path / "reference")
    # The page is written anew.
    monkeypatch.setattr(module, "write_page", lambda studies, results, command, missing: (
        results / "page.png").write_text(command))
    folder = tmp_path / "results"
    complete_results(folder)
    (folder / "profile.trace.json").write_text("large")
    (folder / "00_orig-cpu-20260101T000000Z-1.jsonl").write_text("of a script by hand")
    (folder / "link.png").symlink_to("/etc/hostname")
    return folder


def packed(folder, name: str) -> str:
    setup = setup_of(folder)
    setup.args.name = name
    return Pack().answer(setup)


def test_a_complete_folder(results, tmp_path):
    """Journals, page and pictures are copied, nothing else; and nothing is overwritten."""
    assert " files in " in packed(results, "rtx-4090")
    assert sorted(path.name for path in (tmp_path / "reference").iterdir()) == ["rtx-4090"]
    assert sorted(path.name for path in (tmp_path / "reference" / "rtx-4090").iterdir()) == [
        "00_orig-cpu-20260101T000000Z-1.jsonl", "ladder.jsonl", "machine.json", "page.png",
        "report.md", "stages.jsonl"]
    with pytest.raises(UserError, match="exists: nothing is overwritten"):
        packed(results, "rtx-4090")
    for wrong in ("../x", "A", "a b", "", "/tmp/x", "a/b", "x.y"):
        with pytest.raises(UserError, match="isn't a name"):
            packed(results, wrong)


def test_what_is_missing_is_named(results):
    (results / "stages.jsonl").unlink()
    (results / "ladder.jsonl").unlink()
    measure_again(results, "ladder", 2)
    page = results / "report.md"
    page.write_text(page.read_text() + "\nNot finished: sweep; run it again to continue.\n")
    assert [line.partition(":")[0] for line in what_is_missing(results)] == [
        "the report isn't finished", "no stages", "ladder"]
    with pytest.raises(UserError, match="too few rounds of a, b: python measure.py ladder"):
        packed(results, "cpu")
    page.unlink()
    assert what_is_missing(results) == ["no report: make report"]


def test_failed_runs_are_refused(results):
    measure_again(results, "ladder", 4, error="ended by signal 9")
    (told,) = [line for line in what_is_missing(results) if line.startswith("ladder")][:1]
    assert told == "ladder: a, b failed"
    (results / "ladder.jsonl").unlink()
    measure_again(results, "ladder", 4)
    assert what_is_missing(results) == []
