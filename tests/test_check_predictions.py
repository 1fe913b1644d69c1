"""docs/check_predictions.py: the predictions of other people's programs."""

import pytest
from conftest import ROOT, load

from bench.cards import CARDS
from bench.predict.speed import Work
from bench.report.prediction_tables import prediction_of
from bench.report.tables import markdown

script = load(ROOT / "docs" / "check_predictions.py")


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return script.compared()


def test_held_out_figures_come_first(rows):
    held_out, *parts, tuned = script.accuracy_table(rows).rows
    assert (held_out["count"], tuned["count"]) == (32, 40)
    assert sum(part["count"] for part in parts) == 32
    for line in (held_out, tuned):
        assert line["median"] < 0.1 and line["near"] >= 0.8 and line["inside"] >= 0.9
    assert len({row["card"] for row in rows}) == 26


def test_the_published_memory():
    errors = {row["label"]: row["error"] for row in script.memory_table().rows}
    assert len(errors) == 9
    for label, error in errors.items():
        assert abs(error) < (0.06 if label.startswith("8 ") else 0.01), label


def test_pages_have_the_tables(rows):
    def text_of(page: str) -> str:
        return (ROOT / "docs" / f"{page}.md").read_text()

    assert markdown(script.accuracy_table(rows)) in text_of("predictions")
    assert markdown(script.memory_table()) in text_of("predictions")
    times = prediction_of("01", script.GPT2).seconds(32, CARDS["H100"])
    for kind, seconds in times.items():  # where a step of 01 goes
        without = sum(times.values()) / (sum(times.values()) - seconds)
        assert not seconds or (f"| {kind} | {1000 * seconds:.1f} | {without:.2f} |"
                               in text_of("predictions")), kind


def test_rules_count_what_differs():
    by_hand = prediction_of("06-native-layers", script.GPT2)

    def work(kind: str, is_matmul: bool, *rules: str) -> Work:
        (work,) = (work for work in script.compose(by_hand, rules).steps[16]
                   if work.kind == kind and bool(work.flops) is is_matmul)
        return work

    def size(kind: str, *rules: str) -> float:
        return work(kind, False, *rules).size

    assert work("products", True, "TF32").precision == "TF32"
    assert size("rest", "TF32") == 2 * size("rest")
    for kind in ("attention", "rest"):
        assert 0.8 < size(kind, "no dropout") / size(kind) < 1
    assert size("rest", "no dropout") < size("rest", "no dropout", "autocast") < size(
        "rest", "no dropout", "TF32")
    assert size("optimizer", "foreach") == 3 * size("optimizer")
    assert size("attention", "attention by hand") < 0.5 * size("attention")
    assert not work("head", True, "unaligned head").is_aligned
