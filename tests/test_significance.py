"""docs/significance.py and the page that it wrote: how often the rule of significance is wrong."""

import csv

import pytest
from conftest import ROOT, load

from bench.analysis.stats import POOLED_BASELINE_RUNS, POOLED_ROUNDS, POOLED_ROWS, Family

PROGRAM = load(ROOT / "docs" / "significance.py")
LINES = list(csv.DictReader(PROGRAM.FILE.read_text().splitlines()))


def of_size(line: dict[str, str]) -> tuple[int, int]:
    return int(line["rows"]), int(line["rounds"])


def test_the_file_has_every_size():
    sizes = {(rows, rounds) for rows in PROGRAM.ROWS for rounds in PROGRAM.ROUNDS}
    for form in (PROGRAM.PAIRED, PROGRAM.POOLED):
        assert {of_size(line) for line in LINES if line["form"] == form} == sizes


def test_the_page_is_made_of_the_file():
    assert PROGRAM.FILE.with_suffix(".md").read_text() == PROGRAM.page(LINES)
    assert PROGRAM.FILE.read_text() == PROGRAM.as_csv(LINES)


@pytest.mark.parametrize(
    "line", LINES, ids=lambda line: f"{line['rows']} {line['rounds']} {line['form']}"
)
def test_what_the_rule_uses_holds(line):
    """At most 5.5 % of its tables are false, at least 94 % of its intervals hold the truth. So does
    the paired form at every size."""
    rows, rounds = of_size(line)
    large = rows >= POOLED_ROWS and rounds >= POOLED_ROUNDS
    used = line["form"] == (PROGRAM.POOLED if large else PROGRAM.PAIRED)
    assert line["used"] == ("yes" if used else "no")
    if used or line["form"] == PROGRAM.PAIRED:
        assert max(PROGRAM.figures(line, PROGRAM.FALSE)) <= PROGRAM.MOST_FALSE
        assert min(PROGRAM.figures(line, PROGRAM.TRUE)) >= PROGRAM.LEAST_COVERAGE


@pytest.mark.parametrize(
    ("form", "rows", "rounds", "noise"),
    [
        (PROGRAM.PAIRED, 3, 2, "equal"),
        (PROGRAM.PAIRED, 3, 4, "noisy baseline"),
        (PROGRAM.PAIRED, 4, 3, "slow runs"),
        (PROGRAM.POOLED, 6, 3, "unequal"),
        (PROGRAM.POOLED, 8, 4, "noisy baseline"),
        (PROGRAM.POOLED, 16, 4, "heavy tails"),
    ],
)
def test_six_cells_again(form, rows, rounds, noise):
    """The file has what the program computes today, within what the random numbers may change."""
    (line,) = (one for one in LINES if of_size(one) == (rows, rounds) and one["form"] == form)
    stored = [float(line[f"{noise}: {kind}"]) for kind in (PROGRAM.FALSE, PROGRAM.TRUE)]
    assert PROGRAM.worst(form, rows, rounds, noise) == pytest.approx(tuple(stored), abs=0.7)


@pytest.mark.parametrize("layout", PROGRAM.LAYOUTS, ids=str)
@pytest.mark.parametrize(("rows", "rounds"), [(2, 2), (3, 2), (5, 6), (6, 2), (6, 3), (9, 4)])
def test_the_program_has_the_products_rule(rows, rounds, layout):
    """Of generated tables both find the same means, errors and claims."""
    claims = 0
    for noise in PROGRAM.NOISES:
        tables = PROGRAM.draw(rows, rounds, noise, layout, tables=20, gain=1.2)
        large = rows >= 6 and rounds >= 3 and rounds * layout.baseline_runs >= POOLED_BASELINE_RUNS
        form = PROGRAM.POOLED if large else PROGRAM.PAIRED
        estimates, level = PROGRAM.estimated(form, tables, layout)
        for number, (own, claimed) in enumerate(
            zip(zip(*estimates, strict=True), estimates.claims_TC(level), strict=True)
        ):
            logs = [tables.baseline_TKN[number].T, *tables.others_TRN[number][..., None]]
            family = Family(
                {str(row): dict(enumerate(values.tolist())) for row, values in enumerate(logs)},
                {
                    str(one): (str(one), str(other))
                    for one, other in zip(*layout.pairs(rows), strict=True)
                },
            )
            assert family.pooled == large
            for place, values in enumerate(zip(*own, strict=True), 1):
                assert family.differences[str(place)] == pytest.approx(values)
            assert family.significant == {
                str(place) for place, claim in enumerate(claimed, 1) if claim
            }
            claims += len(family.significant)
    assert claims or rounds == 2


@pytest.mark.parametrize("noise", PROGRAM.NOISES)
@pytest.mark.parametrize(("rows", "runs"), [(23, 6), (12, 4)])
def test_the_single_changes_of_the_h100(rows, runs, noise):
    """Its page pools the variances of two rounds, with many runs of the baseline in each."""
    false, coverage = PROGRAM.rates(PROGRAM.POOLED, rows, 2, noise, PROGRAM.Layout(True, runs))
    assert false <= PROGRAM.MOST_FALSE and coverage >= PROGRAM.LEAST_COVERAGE
