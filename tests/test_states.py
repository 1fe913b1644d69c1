"""bench/states.py: what a plan leaves."""

import pytest
from synthetic import ladder_state, write_state

from bench import states


def name_of(found: tuple) -> str:
    state, folder = found
    assert (folder / "ladder.json").exists()
    return state["plan"]["machine"]["name"]


def test_a_finished_plan(tmp_path, capsys):
    assert states.finished("ladder", tmp_path) is None
    write_state(tmp_path / "reference" / "a", ladder_state(name="of another machine"))
    write_state(tmp_path, ladder_state(name="unfinished", rows=[]))
    assert states.finished("ladder", tmp_path) is None
    write_state(tmp_path, ladder_state(name="own"))
    assert name_of(states.finished("ladder", tmp_path)) == "own"
    assert capsys.readouterr().err == ""


def test_damaged_ladders_are_named(tmp_path, capsys):
    for state in ([], {}, ladder_state(schema=1), ladder_state(plan=None)):
        path = write_state(tmp_path, state)
        assert states.finished("ladder", tmp_path) is None
    path.write_text("[" * 100_000)
    assert states.finished("ladder", tmp_path) is None
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 5 and all("ladder.json: " in line for line in said)
    assert "schema 1 is not the present one, 2" in said[2]


def test_reference_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(states, "REFERENCE", tmp_path)
    with pytest.raises(ValueError, match="no ladder"):
        states.reference_machine()
    for name, device in (("b-cpu", "cpu"), ("a-cpu", "cpu")):
        write_state(tmp_path / name, ladder_state(device))
    assert states.reference_machine().name == "a-cpu"
    for name, device in (("d-gpu", "cuda"), ("c-gpu", "cuda")):
        write_state(tmp_path / name, ladder_state(device))
    assert states.reference_machine().name == "c-gpu"
