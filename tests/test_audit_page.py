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


@pytest.mark.parametrize(
    "name", ["example_table", "verdict_table", "measured_table", "sample_table"]
)
def test_the_page_has_the_tables(name):
    table = markdown(getattr(CHECK, name)())
    assert without_padding(table) in without_padding(PAGE)


def without_padding(text: str) -> str:
    return re.sub(" +", " ", text)


def test_the_page_counts_verdicts_as_the_table():
    varying = CHECK.verdict_table().rows[1]["counts"]
    counts = re.search(
        r"(\d+) of the (\d+) verdicts .*? right, (\d+) arguable, (\d+) wrong, and (\d+) \*unk",
        " ".join(PAGE.split()),
    )
    right, total, *others = map(int, counts.groups())
    assert [right, *others] == [*varying.values()] and total == sum(varying.values())


def test_memory_is_near_what_others_measured():
    """Where all of it is translated, without what else lay on the GPU."""
    for row in CHECK.measured_table().rows:
        assert abs(row["error"]) < 0.03, row


def test_the_example_follows_its_audit():
    """The changes are those that the audit names first, in its order; the page has its table."""
    assert [*CHECK.expected_gains()][: len(CHECK.CHANGES)] == [*CHECK.CHANGES]
    assert len(CHECK.audit_table().splitlines()) > 4 and CHECK.audit_table() in PAGE


def test_each_change_of_the_example_has_four_rounds():
    numbers = [*CHECK.CHANGES]
    for count in range(len(numbers) + 1):
        assert len(CHECK.runs_with(numbers[:count]).milliseconds) >= 4


def test_what_the_page_says_of_autocast_alone():
    (gain,) = re.findall(r"Autocast\s+alone\s+gained\s+(\d\.\d\d)×", PAGE)
    ratio = CHECK.runs_with([]).middle / CHECK.runs_with([5]).middle
    assert float(gain) == pytest.approx(ratio, abs=0.005)


@pytest.mark.parametrize("kind", ["stored", "peak"])
def test_memory_grows_with_the_batch_as_counted_without_the_audit(kind):
    for row in CHECK.sample_table().rows:
        assert abs(row[kind]["error"]) < 0.05, row
