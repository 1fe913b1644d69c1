"""The study `compare`: two ladders side by side."""

import json
from argparse import Namespace

import pytest
from made_up import CPU, MACHINE, plan_of, rows_of_text, setup_of, write_journal

from bench.common import UserError
from bench.studies import all_studies
from bench.studies.results import Compare, Pair, judged, ladder_in


def ladder(folder, speeds: dict[str, list[float]], machine=CPU) -> None:
    folder.mkdir()
    plan = plan_of(*speeds)
    write_journal(folder, "ladder", plan, [
        dict(name=name, round=number, speed=speed) for name, known in speeds.items()
        for number, speed in enumerate(known, 1)], machine)


def answer(tmp_path, one: str, other: str) -> str:
    setup = setup_of(tmp_path)
    setup.args = Namespace(A=str(tmp_path / one), B=str(tmp_path / other))
    return Compare().answer(setup)


def test_two_machines(tmp_path):
    """b brings more in A; c isn't told apart; what differs between them is listed."""
    first = [100.0, 101.0, 102.0, 103.0]
    ladder(tmp_path / "one", {"a": first, "b": [201.0, 202.0, 202.0, 207.0],
                              "c": [speed + 110 for speed in first]})
    ladder(tmp_path / "other", {"a": first, "b": [151.0, 151.0, 152.0, 155.0],
                                "c": [160.0, 150.0, 155.0, 170.0]}, CPU | dict(name="Other CPU"))
    text = answer(tmp_path, "one", "other")
    machines, techniques = text.split("What each technique")
    assert ["name", "Some CPU", "Other CPU"] in rows_of_text(machines)
    assert ["a, tok/sec", "102", "102"] in rows_of_text(machines)
    assert not any(line[0] == "torch" for line in rows_of_text(machines))
    (_, b, c) = rows_of_text(techniques)
    assert (b[1], b[3], b[5]) == ("2.00", "1.50", "more in A")
    for interval, factor in ((b[2], 2), (b[4], 1.5)):
        low, high = map(float, interval.split("–"))
        assert low <= factor <= high
    assert c[-1] == "not significant"


def test_a_journal_without_one_checksum(tmp_path):
    """Its runs of that script are lost, the others are compared; the commits differ."""
    speeds = {"a": [100.0], "b": [200.0], "c": [300.0]}
    for name in ("one", "other"):
        ladder(tmp_path / name, speeds)
    path = tmp_path / "one" / "ladder.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert any(line.get("sources", {}).pop("c", None) for line in lines)
    lines[0]["commit"] = "0123456789"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    machines, techniques = answer(tmp_path, "one", "other").split("What each technique")
    assert ["measured at commit", "0123456", ""] in rows_of_text(machines)
    assert [row[1] for row in rows_of_text(techniques)] == ["", "2.00", ""]


def test_every_row_says_why_it_has_no_difference(tmp_path):
    """But for a first row in both. No figure is written as None, nor with all its digits."""
    speeds = [100.0, 101.0, 102.0]
    ladder(tmp_path / "one", dict.fromkeys("abcd", speeds), CPU | dict(ram_gb=125.86690902709961))
    ladder(tmp_path / "other", {"b": speeds, "c": speeds, "d": []}, MACHINE | dict(threads=3))
    text = answer(tmp_path, "one", "other")
    machines, techniques = map(rows_of_text, text.split("What each technique"))
    assert [line[-1] for line in techniques] == [
        "the first one in B", "not significant", "no figures in B"]
    assert ["ram_gb", "125.9", "64.0"] in machines and ["capability", "", "8.0"] in machines
    assert "None" not in text
    assert not any(one == other for name, one, other in machines if name in CPU)


def test_too_few_rounds_are_not_tested(tmp_path):
    for name, speed in (("one", 200.0), ("other", 300.0)):
        ladder(tmp_path / name, {"a": [100.0], "b": [speed]})
    (_, rows), (_, others) = (ladder_in(str(tmp_path / name)) for name in ("one", "other"))
    (pair,) = judged([Pair(rows[1], others[1])])
    assert pair.difference == "not tested"


def test_only_what_is_comparable(tmp_path):
    """A factor over another rung, since one failed, isn't compared; other options
    are refused."""
    speeds = [100.0, 101.0, 102.0, 103.0]
    ladder(tmp_path / "one", {"a": speeds, "b": speeds, "c": [2 * speed for speed in speeds]})
    ladder(tmp_path / "other", {"a": speeds, "c": [4 * speed for speed in speeds[:3]]})
    (_, rows), (_, others) = (ladder_in(str(tmp_path / name)) for name in ("one", "other"))
    (pair,) = judged([Pair(rows[2], others[1])])
    assert pair.difference == "over b in A, over a in B" and not pair.comparable
    with pytest.raises(UserError, match=r"before it \(c: over b in A, over a in B\)$"):
        answer(tmp_path, "one", "other")
    (tmp_path / "third").mkdir()
    write_journal(tmp_path / "third", "ladder", plan_of("a", "b"), [
        dict(name="a"), dict(name="b")], options=["--dropout", "0"])
    with pytest.raises(UserError, match="different options: none; --dropout 0"):
        answer(tmp_path, "one", "third")


def test_what_can_not_be_compared(tmp_path):
    ladder(tmp_path / "one", {"a": [1.0], "b": [2.0]})
    ladder(tmp_path / "other", {"c": [1.0], "d": [2.0]})
    with pytest.raises(UserError, match="no technique in common"):
        answer(tmp_path, "one", "other")
    with pytest.raises(UserError, match="nowhere: no ladder there; .* those of amd-epyc-2-cores"):
        answer(tmp_path, "one", "nowhere")
    assert "compare" in all_studies()
