"""bench/judge/noise.py: verdicts, and how often they are wrong."""

import math
import random

import pytest

from bench.judge.noise import FALSE, Noise, log_ratios, noise_of, student, verdict, verdict_of_two


@pytest.mark.parametrize(("probability", "degrees", "quantile"), [  # of published tables
    (0.975, 3, 3.182), (0.975, 4, 2.776), (0.99, 4, 3.747), (0.995, 10, 3.169), (0.9995, 30, 3.646),
    (0.975, 1e9, 1.960)])
def test_student(probability, degrees, quantile):
    assert student(probability, degrees) == pytest.approx(quantile, rel=2e-3)


def test_noise_is_that_of_all_comparisons():
    """The median of their variances: one comparison with an outlier doesn't move it."""
    assert noise_of([[1.0], []]) is None
    quiet = [[0.0, 0.02, -0.02, 0.0]] * 6
    assert noise_of(quiet) == noise_of([*quiet, [0.0, 0.0, 0.0, -2.0]])._replace(
        degrees=18, comparisons=6)
    assert noise_of(quiet).deviation == pytest.approx(0.0183, abs=0.0001)
    assert log_ratios({1: 2.0, 2: 4.0, 4: 9.0}, {2: 2.0, 1: 1.0}) == [math.log(2)] * 2


def test_verdict():
    noise = Noise(0.1, 40, 14)
    least = noise.least(4)
    assert least == pytest.approx(0.1 / 2 * student(1 - FALSE / 28, 40))
    assert verdict([1.1 * least] * 4, noise) == "faster"
    assert verdict([-1.1 * least] * 4, noise) == "slower"
    assert verdict([0.9 * least] * 4, noise) == "no measurable change"
    assert verdict([0.9 * least] * 8, noise) == "faster"  # more rounds tell more
    assert verdict([9.0] * 3, noise) == verdict([9.0] * 4, None) == "no verdict"
    assert verdict([0.009] * 4, Noise(0.0, 3, 1)) == "no measurable change"  # however sure
    assert verdict([0.011] * 4, Noise(0.0, 3, 1)) == "faster"
    assert verdict([0.0, 0.0, 0.0, -0.8], Noise(0.001, 40, 14)) == "no measurable change"  # outlier


def test_two_tables():
    small, large = Noise(0.01, 40, 14), Noise(0.2, 40, 14)
    one, other = [0.7, 0.71, 0.69, 0.7], [0.5, 0.5, 0.51, 0.49]
    assert verdict_of_two(one, other, small, small) == "faster"
    assert verdict_of_two(other, one, small, small) == "slower"
    assert verdict_of_two(one, other, small, large) == "no measurable change"
    assert verdict_of_two(one[:3], other, small, small) == "no verdict"
    assert verdict_of_two(one, one, Noise(0.0, 3, 1), Noise(0.0, 3, 1)) == "no measurable change"


def test_how_often_a_table_is_wrong():
    """Of tables in which nothing differs few hold a verdict; and a gain of four standard errors
    above the threshold is found."""
    draw = random.Random(0)

    def wrong(shift: float) -> int:
        count = 0
        for _ in range(400):
            tables = [[draw.gauss(shift * (k == 0), 0.07) for _ in range(4)] for k in range(14)]
            noise = noise_of(tables)
            count += any(verdict(ratios, noise) != "no measurable change" for ratios in tables)
        return count

    assert wrong(0.0) / 400 < 0.05
    assert wrong(0.25) > 390
