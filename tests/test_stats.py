"""bench/analysis/stats.py: estimates, verdicts, and how often they are wrong."""

import math
import random

import pytest

from bench.analysis.stats import (
    AT_THE_END,
    LATER,
    Comparisons,
    Estimate,
    beyond,
    estimates,
    level_of,
    nearest,
    quantile,
    significant,
    verdict,
)


@pytest.mark.parametrize(("probability", "degrees", "expected"), [  # of published tables
    (0.975, 1, 12.706), (0.975, 3, 3.182), (0.99, 4, 3.747), (0.995, 10, 3.169),
    (0.9995, 30, 3.646), (0.9995, 120, 3.373), (0.975, 1e9, 1.960)])
def test_students_distribution(probability, degrees, expected):
    assert quantile(probability, degrees) == pytest.approx(expected, rel=1e-3)
    assert beyond(expected, degrees) == pytest.approx(1 - probability, rel=1e-2)


def test_of_two_rows_it_is_the_paired_test():
    """What both have in common in a round is taken out; nothing is pooled."""
    a, b = [1.0, 5.0, 3.0, 9.0], [1.5, 5.7, 3.4, 9.6]
    found = estimates({"a": [*enumerate(a)], "b": [*enumerate(b)]}, {"a": 8, "b": 8})
    both = found["b"].minus(found["a"])
    left = [two - one for one, two in zip(a, b, strict=True)]
    spread = math.sqrt(sum((each - 0.55)**2 for each in left) / 3)
    assert both == pytest.approx((0.55, spread / 2, 3, 4))


def test_noise_is_pooled_among_rows_of_equal_steps():
    """A row's own variance counts with its degrees, the median of the others' with three."""
    draw = random.Random(0)
    rows = {str(k): [(number, draw.gauss(0, 0.01 if k < 5 else 1)) for number in range(6)]
            for k in range(8)}
    alone = estimates(rows, dict.fromkeys(rows, 8) | {"7": 32})["7"]
    apart = estimates(rows, {name: 8 if int(name) < 5 else 32 for name in rows})
    mixed = estimates(rows, dict.fromkeys(rows, 8))
    assert alone.degrees + 3 == apart["7"].degrees == mixed["7"].degrees == 3 + 5 * 7 / 8
    assert apart["0"].error < 0.01 and apart["7"].error > 0.2
    assert mixed["7"].error < 0.8 * apart["7"].error
    assert apart["7"].error == pytest.approx(1 / math.sqrt(6), rel=0.5)


def test_what_rounds_have_in_common_is_no_noise():
    rows = {name: [(number, place + 9.0 * number) for number in range(4)]
            for place, name in enumerate("abc")}
    found = estimates(rows, dict.fromkeys(rows))
    assert [each.mean - found["a"].mean for each in found.values()] == pytest.approx([0, 1, 2])
    assert all(each.error < 1e-6 for each in found.values())
    # A row that lacks rounds, slow ones here, isn't the slower for it.
    rows["c"] = rows["c"][2:]
    found = estimates(rows, dict.fromkeys(rows))
    assert found["c"].minus(found["a"]).mean == pytest.approx(2)
    assert (found["c"].rounds, found["c"].minus(found["a"]).rounds) == (2, 2)


def test_a_round_with_one_row_tells_nothing():
    rows = {"a": [(1, 0.0), (2, 0.1), (3, 99.0)], "b": [(1, 0.0), (2, 0.0)], "c": [(4, 1.0)]}
    assert estimates(rows, dict.fromkeys(rows)).keys() == {"a", "b"}
    assert estimates(rows, dict.fromkeys(rows))["a"].rounds == 2


def test_rounds_of_some_rows_tell_how_these_differ_from_each_other():
    """Not how they differ from the rest: that in each later round one of two rows is slower, or
    both are, moves neither next to a row that stopped."""
    draw = random.Random(1)
    rows = {name: [(number, place + draw.gauss(0, 0.01)) for number in range(1, 4)]
            for place, name in enumerate("abcd")}
    before = Comparisons(rows, dict.fromkeys(rows), 3)
    later = {name: rows[name] + [
        (number, place - 9 - 0.3 * (number % 2 == place % 2)) for number in range(4, 10)]
        for place, name in ((2, "c"), (3, "d"))}
    after = Comparisons(rows | later, dict.fromkeys(rows), 3)
    assert after.difference("b", "a") == before.difference("b", "a")
    assert after.difference("d", "c").mean == pytest.approx(1, abs=0.03)
    assert (after.difference("d", "c").rounds, after.difference("c", "b").rounds) == (9, 3)
    every = Comparisons(rows | later, dict.fromkeys(rows), None)
    told = [abs(each.difference("c", "b").mean - 1) for each in (after, every)]
    assert told[0] < 0.04 < 0.06 < told[1]
    # Differences add up, and what they don't share with the rest makes them less certain.
    steps = [after.difference(*pair) for pair in ("ba", "cb", "dc")]
    assert after.difference("d", "a").mean == pytest.approx(sum(step.mean for step in steps))
    assert after.difference("c", "b").error > math.hypot(
        after.means["c"].error, after.means["b"].error)
    assert after.difference("a", "e") is None


def test_interval():
    half = quantile(0.975, 7) * 0.1
    assert Estimate(1.0, 0.1, 7, 4).interval() == pytest.approx(
        (math.exp(1 - half), math.exp(1 + half)))
    assert Estimate(half, 0.1, 7, 4).chance == pytest.approx(0.05, rel=1e-3)
    assert Estimate(0.0, 0.1, 7, 4).least(0.05) == pytest.approx(math.exp(half))


def test_holm():
    """The least likely one against all, the next against the rest; a change below 1 % is none."""
    def found(*chances):
        return {str(k): Estimate(quantile(1 - chance / 2, 9), 1.0, 9, 4)
                for k, chance in enumerate(chances)}

    assert significant(found(0.01, 0.02, 0.5, 0.5), 0.05) == {"0"}
    assert significant(found(0.012, 0.016, 0.024, 0.049), 0.05) == {"0", "1", "2", "3"}
    assert significant(found(0.013, 0.016, 0.024, 0.049), 0.05) == set()
    assert significant({"a": Estimate(0.009, 1e-9, 9, 4)}, 0.05) == set()
    assert significant({}, 0.05) == set()
    assert verdict(Estimate(-1.0, 0.1, 9, 4), True) == "slower"
    assert verdict(Estimate(1.0, 0.1, 9, 4), True) == "faster"
    assert verdict(Estimate(1.0, 0.1, 9, 4), False) == "no significant change"


def test_looks_cost():
    """All looks together, at the end and after more rounds, have 1 of 20 tables."""
    assert level_of(1, True) == AT_THE_END
    assert level_of(1, False) == level_of(2, True) == LATER / 2
    assert AT_THE_END + sum(level_of(looks, True) for looks in range(2, 50)) < 0.05


def test_nearest():
    """Of ten the two that are the most likely to be no noise, less what is certain."""
    differences = {str(k): Estimate(k / 10, 0.1, 9, 3) for k in range(9)}
    differences["sure"] = Estimate(9.0, 0.1, 9, 3)
    sure = significant(differences, LATER / 2)
    assert "sure" in sure and nearest(differences) == sorted(
        differences.keys() - sure, key=lambda name: -differences[name].mean)[:2]
