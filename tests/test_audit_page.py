"""docs/audit.md: its figures are those of the logs in results/reference/audit."""

import re

import pytest
from conftest import ROOT, load

from gpt_speed.tables import markdown

CHECK = load(ROOT / "docs" / "check_audit.py")
PAGE = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8")


def test_verdicts_follow_from_the_logs():
    """Those that were written down after the audits do."""
    judged = [*CHECK.verdicts()]
    assert len(judged) == len({*judged}) == 150
    assert judged == CHECK.written_verdicts()


@pytest.mark.parametrize(
    ("state", "others", "outcome"),
    [
        ("missing", [""], "right"),
        ("has", ["has", "unknown"], "arguable"),
        ("unknown", ["has", "unknown"], "arguable"),
        ("unknown", [""], "unknown"),
        ("not in this model", ["has"], "wrong"),
    ],
)
def test_verdicts_are_judged_by_the_rule(state, others, outcome):
    assert CHECK.outcome_of(state, "missing", others) == outcome


@pytest.mark.parametrize("name", ["verdict_table", "measured_table"])
def test_the_page_has_the_tables(name):
    table = markdown(getattr(CHECK, name)())
    assert without_padding(table) in without_padding(PAGE)


def without_padding(text: str) -> str:
    return re.sub(" +", " ", text)


def test_the_page_counts_verdicts_as_the_table():
    varying = CHECK.verdict_table().rows[1]["counts"]
    counts = re.search(
        r"of (\d+) verdicts .*?(\d+) were right, (\d+) arguable, (\d+)\s+wrong, and (\d+) \*unk",
        PAGE,
        re.DOTALL,
    )
    assert [*map(int, counts.groups())] == [sum(varying.values()), *varying.values()]


def test_memory_is_near_what_others_measured():
    """Where all of it is translated, and nothing else lay on the GPU."""
    for row in CHECK.measured_table().rows:
        if row["kind"] != "allocated" or row["measured"] != 4371:
            assert abs(row["error"]) < 0.03, row


@pytest.mark.parametrize("kind", ["stored", "peak"])
def test_memory_grows_with_the_batch_as_counted_without_the_audit(kind):
    for row in CHECK.sample_table().rows:
        assert abs(row[kind]["error"]) < 0.05, row
