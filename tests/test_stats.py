"""bench/analysis/stats.py: estimates, significance. test_significance.py: how often it is wrong."""

import math
import random
from itertools import pairwise
from statistics import variance

import pytest
from scipy import stats

from bench.analysis.stats import (
    LEVEL,
    PRIOR,
    Estimate,
    Family,
    in_rounds_of_all,
    paired_difference,
    pooled_means,
    significant,
)


def test_interval_and_p_value():
    """As published tables of Student's t distribution have them."""
    for degrees, quantile in ((1, 12.706), (3, 3.182), (10, 2.228), (1e9, 1.960)):
        assert Estimate(1.0, 0.1, degrees).interval == pytest.approx(
            (math.exp(1 - 0.1 * quantile), math.exp(1 + 0.1 * quantile)), rel=1e-3
        )
        assert Estimate(-quantile, 1.0, degrees).p_value == pytest.approx(0.05, rel=1e-3)


def test_a_difference_is_welchs_test():
    one, two = [1.0, 1.2, 0.9, 1.4], [2.0, 2.6, 1.9, 3.1, 2.2]
    both = [
        Estimate(
            sum(values) / len(values), math.sqrt(variance(values) / len(values)), len(values) - 1
        )
        for values in (one, two)
    ]
    expected = stats.ttest_ind(one, two, equal_var=False)
    assert both[0].minus(both[1]).p_value == pytest.approx(expected.pvalue)
    assert both[0].minus(both[1]).degrees == pytest.approx(expected.df)


def test_a_paired_difference_is_the_paired_t_test():
    """Of the rounds' means, where a row ran more than once in one."""
    one = {1: [1.0, 1.4], 2: [1.9], 3: [1.1]}
    other = {1: [1.5], 2: [1.6], 3: [1.2, 1.0]}
    expected = stats.ttest_rel([1.2, 1.9, 1.1], [1.5, 1.6, 1.1])
    estimate = paired_difference(one, other)
    assert estimate.p_value == pytest.approx(expected.pvalue)
    assert (estimate.mean, estimate.degrees) == (pytest.approx(0), expected.df)


def test_pooled_means_by_hand():
    """Three rows with two runs of the first one, the baseline, in each of two rounds."""
    rows = {
        "a": {1: [0.0, 0.2], 2: [1.0, 1.0]},
        "b": {1: [5.0], 2: [5.8]},
        "c": {1: [7.0], 2: [8.2]},
    }
    # Less their means the rows have ∓0.45, ∓0.4 and ∓0.6; the median, ∓0.45, is the rounds' own.
    rest = {"a": [0.45, 0.65, 0.55, 0.55], "b": [5.45, 5.35], "c": [7.45, 7.75]}
    own = {name: variance(values) * 3 / 2 for name, values in rest.items()}
    usual = sorted(
        (own["a"] / (1 - 2 / 27) ** 3, own["b"] / (7 / 9) ** 3, own["c"] / (7 / 9) ** 3)
    )[1]
    for name, values in rest.items():
        degrees, prior = len(values) - 1, 0 if name == "a" else PRIOR
        pooled = (degrees * own[name] + prior * usual) / (degrees + prior)
        assert pooled_means(rows)[name] == pytest.approx(
            (sum(values) / len(values), math.sqrt(pooled / len(values)), degrees + prior)
        )


def test_one_slow_run_is_in_its_own_row_alone():
    """All others lose nothing of their certainty."""
    draw = random.Random(0)
    rows = {
        name: {number: [place + draw.gauss(0, 0.01)] for number in range(6)}
        for place, name in enumerate("abcde")
    }
    before = pooled_means(rows)
    rows["c"][3][0] -= 1
    after = pooled_means(rows)
    assert after["c"].error > 10 * before["c"].error
    assert all(after[name].error < 2 * before[name].error for name in "abde")


def table(rows: int, rounds: int, noise=lambda: 0.0) -> dict:
    return {f"{row}": {number: [row + noise()] for number in range(rounds)} for row in range(rows)}


def chain(rows: dict) -> Family:
    """Each row over the one before it."""
    return Family(rows, {one: (one, other) for other, one in pairwise(rows)})


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "rows",
    [
        {},
        table(1, 6),
        table(5, 6),
        table(7, 6),
        table(5, 1),
        table(7, 1, random.Random(0).random),
        {"a": {1: [0.1]}, "b": {2: [0.2]}, "c": {1: [0.7]}},
    ],
    ids=[
        "nothing",
        "a row",
        "no spread",
        "no spread in a large table",
        "a round",
        "a round with noise",
        "no round in common",
    ],
)
def test_too_little_to_tell(rows):
    """No estimate, no division by zero, no NaN."""
    family = chain(rows)
    assert family.differences == {} and family.significant == set()


@pytest.mark.parametrize(
    ("rows", "rounds", "runs", "pooled"),
    [
        (2, 4, 1, False),
        (5, 6, 3, False),
        (6, 4, 1, True),
        (6, 2, 3, False),
        (6, 3, 1, False),
        (6, 3, 2, True),
    ],
)
def test_small_tables_are_paired(rows, rounds, runs, pooled):
    """Of fewer than six rows or three rounds, or whose baseline ran fewer than four times."""
    logs = table(rows, rounds, random.Random(0).random)
    logs["0"] = {number: values * runs for number, values in logs["0"].items()}
    family = chain(logs)
    assert family.pooled == pooled
    assert len(family.differences) == rows - 1
    assert (family.differences["1"] == paired_difference(logs["1"], logs["0"])) != pooled
    assert not Family(logs, {}, pooled=False).pooled


@pytest.mark.parametrize("rows", [4, 7])
def test_rounds_that_not_all_rows_have_do_not_count(rows):
    logs = table(rows, 4, random.Random(0).random)
    more = logs | {"1": logs["1"] | {number: [99.0] for number in range(4, 9)}}
    assert in_rounds_of_all(more) == logs
    assert chain(more).differences == chain(logs).differences != {}


def test_a_row_without_spread_among_others():
    """It has the usual noise of the others; where that is none, it isn't compared."""
    rows = table(5, 4, random.Random(0).random) | {"5": dict.fromkeys(range(4), [3.0])}
    assert pooled_means(rows)["5"].error > 0
    noisy = table(5, 4) | {"5": {number: [number**2.0] for number in range(4)}}
    assert pooled_means(noisy).keys() == {"5"}
    assert chain(noisy).differences == {}


def test_holm():
    """The least likely one against all, the next against the rest; a change below 1 % is none."""

    def family(*shares):
        return {
            str(k): Estimate(stats.t.isf(share * LEVEL / 2, 9), 1.0, 9)
            for k, share in enumerate(shares)
        }

    assert significant(family(0.2, 0.4, 0.9, 0.9), LEVEL) == {"0"}
    assert significant(family(0.24, 0.32, 0.48, 0.98), LEVEL) == {"0", "1", "2", "3"}
    assert significant(family(0.26, 0.32, 0.48, 0.98), LEVEL) == set()
    assert significant({"a": Estimate(0.009, 1e-6, 9)}, LEVEL) == set()
    assert significant({"a": Estimate(-0.011, 1e-6, 9)}, LEVEL) == {"a"}
