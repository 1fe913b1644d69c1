"""bench/analysis/stats.py: estimates, significance, and how often that is wrong."""

import math
import random
from statistics import variance

import pytest
from scipy import stats

from bench.analysis.stats import LEVEL, PRIOR, Estimate, estimates, significant


def test_interval_and_p_value():
    """As published tables of Student's t distribution have them."""
    for degrees, quantile in ((1, 12.706), (3, 3.182), (10, 2.228), (1e9, 1.960)):
        assert Estimate(1.0, 0.1, degrees).interval == pytest.approx(
            (math.exp(1 - 0.1 * quantile), math.exp(1 + 0.1 * quantile)), rel=1e-3)
        assert Estimate(-quantile, 1.0, degrees).p_value == pytest.approx(0.05, rel=1e-3)


def test_a_difference_is_welchs_test():
    one, two = [1.0, 1.2, 0.9, 1.4], [2.0, 2.6, 1.9, 3.1, 2.2]
    both = [Estimate(sum(values) / len(values), math.sqrt(variance(values) / len(values)),
                     len(values) - 1) for values in (one, two)]
    expected = stats.ttest_ind(one, two, equal_var=False)
    assert both[0].minus(both[1]).p_value == pytest.approx(expected.pvalue)
    assert both[0].minus(both[1]).degrees == pytest.approx(expected.df)


def test_estimates_by_hand():
    """Three rows with two runs of the first one in each of two rounds."""
    rows = {"a": {1: [0.0, 0.2], 2: [1.0, 1.0]}, "b": {1: [5.0], 2: [5.8]},
            "c": {1: [7.0], 2: [8.2]}}
    # Less their means the rows have ∓0.45, ∓0.4 and ∓0.6; the median, ∓0.45, is the rounds' own.
    rest = {"a": [0.45, 0.65, 0.55, 0.55], "b": [5.45, 5.35], "c": [7.45, 7.75]}
    own = {name: variance(values) * 3 / 2 for name, values in rest.items()}
    usual = sorted((own["a"] / (1 - 2 / 27)**3, own["b"] / (7 / 9)**3, own["c"] / (7 / 9)**3))[1]
    for name, values in rest.items():
        degrees = len(values) - 1
        pooled = (degrees * own[name] + PRIOR * usual) / (degrees + PRIOR)
        assert estimates(rows)[name] == pytest.approx(
            (sum(values) / len(values), math.sqrt(pooled / len(values)), degrees + PRIOR))


def test_one_slow_run_is_in_its_own_row_alone():
    """All others lose nothing of their certainty."""
    draw = random.Random(0)
    rows = {name: {number: [place + draw.gauss(0, 0.01)] for number in range(6)}
            for place, name in enumerate("abcde")}
    before = estimates(rows)
    rows["c"][3][0] -= 1
    after = estimates(rows)
    assert after["c"].error > 10 * before["c"].error
    assert all(after[name].error < 2 * before[name].error for name in "abde")


def table(rows: int, rounds: int, noise=lambda: 0.0) -> dict:
    return {f"{row}": {number: [row + noise()] for number in range(rounds)} for row in range(rows)}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rows", [
    {}, table(1, 6), table(5, 6), table(5, 1), table(5, 1, random.Random(0).random),
    table(2, 6, random.Random(0).random), {"a": {1: [0.1]}, "b": {2: [0.2]}, "c": {1: [0.7]}}],
    ids=["nothing", "a row", "no spread", "a round", "a round with noise", "two rows",
         "no round in common"])
def test_too_little_to_tell(rows):
    """No estimate, no division by zero, no NaN."""
    assert estimates(rows) == {} and significant(estimates(rows)) == set()


def test_rounds_that_not_all_rows_have_do_not_count():
    rows = table(4, 3, random.Random(0).random)
    more = rows | {"1": rows["1"] | {number: [99.0] for number in range(3, 9)}}
    assert estimates(more) == estimates(rows) != {}


def test_a_row_without_spread_among_others():
    """It has the usual noise of the others; where that is none, it isn't compared."""
    rows = table(5, 4, random.Random(0).random) | {"5": dict.fromkeys(range(4), [3.0])}
    assert estimates(rows)["5"].error > 0
    noisy = table(5, 4) | {"5": {number: [number**2.0] for number in range(4)}}
    assert estimates(noisy).keys() == {"5"}


def test_holm():
    """The least likely one against all, the next against the rest; a change below 1 % is none."""
    def column(*shares):
        return {str(k): Estimate(stats.t.isf(share * LEVEL / 2, 9), 1.0, 9)
                for k, share in enumerate(shares)}

    assert significant(column(0.2, 0.4, 0.9, 0.9)) == {"0"}
    assert significant(column(0.24, 0.32, 0.48, 0.98)) == {"0", "1", "2", "3"}
    assert significant(column(0.26, 0.32, 0.48, 0.98)) == set()
    assert significant({"a": Estimate(0.009, 1e-6, 9)}) == set()
    assert significant({"a": Estimate(-0.011, 1e-6, 9)}) == {"a"}


@pytest.mark.slow
@pytest.mark.parametrize("slow", [0, 0.05], ids=["gaussian", "slow outliers"])
@pytest.mark.parametrize(("rounds", "ladder", "gains"), [(6, True, (0.7, 0.35)),
                                                         (4, False, (0.6, 0.4))],
                         ids=["ladder", "variants"])
def test_how_often_it_is_wrong(rounds, ladder, gains, slow):
    """At most 5 % of the tables in which nothing differs hold a false claim: a ladder of 15 rows,
    and 15 variants. The noise of each row is 1 to 8 % of its speed; this share of the runs has 0.6
    of its speed. And of rows that are faster by 15 % it finds many."""
    draw, tables = random.Random(1), 3000
    false = gained = 0
    for _ in range(tables):
        rows = {}
        rounds_own = [draw.gauss(0, 0.05) for _ in range(rounds)]
        for row in range(15 if ladder else 16):
            noise, runs = draw.uniform(0.01, 0.08), 1 if row else 2 if ladder else 3
            rows[row] = {
                number: [own + draw.gauss(0, noise) + math.log(0.6) * (draw.random() < slow)
                         for _ in range(runs)] for number, own in enumerate(rounds_own)}
        for gain in (0, math.log(1.15)):
            faster = {row: {number: [log + gain for log in logs] for number, logs in runs.items()}
                      for row, runs in rows.items() if row == 7 or ladder and row > 7}
            means = estimates(rows | faster)
            claims = significant({row: means[row].minus(means[row - 1 if ladder else 0])
                                  for row in means if row})
            false += bool(claims) and not gain
            gained += 7 in claims and gain > 0
    assert false / tables <= 0.05
    assert gained / tables >= gains[bool(slow)]
