"""The study `export`: a CSV file and TensorBoard's, of made-up measurements."""

import csv

import pytest
from made_up import plan_of, setup_of, write_journal, write_record

from bench.common import UserError
from bench.studies.results import Export


def export(folder, **args) -> str:
    return Export().answer(setup_of(folder, **dict(csv=None, tensorboard=None) | args))


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    write_journal(folder, "ladder", plan_of("00_orig", "a, b"), [
        dict(name="00_orig", speed=1234.0), dict(name="a, b", speed=2468.0)])
    return folder


def test_csv(results, tmp_path):
    """A line for each run: figures as programs read them, text with its commas; of a script that
    was started by hand as well, and what isn't known is empty."""
    write_record(results, "00_orig", speed=50.0, config=dict(dropout=0.1))
    out = tmp_path / "tables" / "runs.csv"
    assert export(results, csv=out).startswith("3 runs in ")
    with open(out, newline="") as file:
        by_hand, first, second = csv.DictReader(file)
    assert [(line["study"], line["run"], float(line["tok_per_sec"]), line["round"]) for line in
            (first, second)] == [("ladder", "00_orig", 1234, "round-1-seed-123"),
                                 ("ladder", "a, b", 2468, "round-1-seed-123")]
    assert (by_hand["study"], by_hand["dropout"], first["dropout"]) == ("", "0.1", "")
    assert (first["seed"], first["status"], first["reserved_gb"]) == ("123", "complete", "1.25")
    assert float(second["train_seconds"]) > 10 and second["val_loss"] == "7.0"


def test_tensorboard(results, tmp_path):
    """Every run in a folder of its own, which a second export writes anew; a hostile name stays
    inside."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_record(results, "00_orig")
    write_journal(results, "stages", plan_of("../../x"), [dict(name="../../x")])
    out = tmp_path / "board"
    assert export(results, tensorboard=out) == export(results, tensorboard=out)
    files = sorted(out.rglob("events.*"))
    assert len(files) == 4 and not (tmp_path / "x").exists()
    (folder,) = [path.parent for path in files if path.parent.parent.name == "00_orig"]
    board = EventAccumulator(str(folder)).Reload()
    assert set(board.Tags()["scalars"]) == {"loss/train", "loss/validation"}
    points = board.Scalars("loss/validation")
    assert points[-1].step > points[0].step and points[-1].wall_time > points[0].wall_time


def test_what_can_not_be_exported(results, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="--csv FILE or --tensorboard DIR"):
        export(results)
    with pytest.raises(UserError, match="is not a folder"):
        export(tmp_path / "none", csv=tmp_path / "tables")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs the package tensorboard"):
        export(results, csv=tmp_path / "tables", tensorboard=tmp_path / "board")
    assert not (tmp_path / "tables").exists()
