"""docs/check_predictions.py: the predictions of other people's programs."""

import pytest
from conftest import ROOT, load

from bench.predict.speed import Work
from bench.report.prediction_tables import prediction_of
from bench.report.tables import markdown

script = load(ROOT / "docs" / "check_predictions.py")


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return script.compared()


def test_held_out_figures_come_first(rows):
    """The goal for programs that nothing was tuned on: median error 10 %, 80 % within 20 %."""
    held_out, *kinds, tuned = script.accuracy_table(rows).rows
    assert (held_out["count"], tuned["count"]) == (32, 40)
    assert sum(kind["count"] for kind in kinds) == 32
    for line in (held_out, tuned):
        assert line["median"] < 0.1 and line["near"] >= 0.8 and line["inside"] >= 0.9
    assert [len({row[name] for row in rows}) for name in ("program", "card")] == [6, 26]


def test_the_published_memory():
    errors = {row["label"]: row["error"] for row in script.memory_table().rows}
    assert len(errors) == 12
    for label, error in errors.items():
        assert abs(error) < (0.06 if label.startswith("8 ") else 0.01), label


def test_pages_have_the_tables(rows):
    for page, table in (("predictions", script.accuracy_table(rows)),
                        ("gpus", script.memory_table()), ("techniques", script.where_table())):
        assert markdown(table) in (ROOT / "docs" / f"{page}.md").read_text()


def test_rules_count_what_differs():
    """Two bytes more for a number in float32; what a compiled step doesn't move; a vocabulary that
    isn't padded."""
    by_hand = prediction_of("06-native-layers", script.GPT2)

    def step(known, kind: str, products: bool) -> Work:
        (work,) = (work for work in known.works[16]["step"]
                   if work.kind == kind and bool(work.flops) is products)
        return work

    def composed(known, *names):
        return script.compose(known, names, by_hand)

    wide, dry = composed(by_hand, "TF32"), composed(by_hand, "no dropout")
    assert step(wide, "products", True).precision == "TF32"
    assert step(wide, "rest", False).size == 2 * step(by_hand, "rest", False).size
    for kind in ("attention", "rest"):
        assert 0.8 < step(dry, kind, False).size / step(by_hand, kind, False).size < 1
    cast = composed(by_hand, "no dropout", "autocast")
    assert step(dry, "rest", False).size < step(cast, "rest", False).size < step(
        composed(dry, "TF32"), "rest", False).size
    assert not step(composed(by_hand, "unaligned head"), "head", True).is_aligned
    own = prediction_of("precision-autocast@13-loss-in-graph", [*script.GPT2, "--dropout", "0"])
    other = composed(own, "attention by hand")
    assert step(other, "attention", True) == step(by_hand, "attention", True)
    assert step(other, "attention", False).size < 0.5 * step(by_hand, "attention", False).size
    assert step(composed(own, "foreach"), "optimizer", False).size == 3 * step(
        own, "optimizer", False).size
