"""When a difference is more than noise.

Each round runs every script once, so two scripts are compared round by round: by the logarithms of
their ratios. Noise is much alike for all scripts of a table, so all of them together tell how large
it is: the median of their variances, which one disturbed run doesn't move. Where a script's own is
larger, that counts. A script is called faster where noise alone makes so large a mean ratio,
anywhere in the table, in fewer than 1 of 20 tables: Student's t-test with Bonferroni's correction.
`measure.py selftest` checks that against recorded noise.
"""

import math
from collections.abc import Collection
from statistics import NormalDist, mean, median, stdev, variance
from typing import NamedTuple

ROUNDS_FOR_A_VERDICT = 4
# A false verdict is allowed in this share of the tables in which nothing differs. Recorded noise
# has longer tails than Student's test expects: with it up to 1 table in 25 holds one.
FALSE = 0.02
LEAST = math.log(1.01)  # a smaller change is none, however sure


class Noise(NamedTuple):
    """Of the comparisons of one table."""

    deviation: float  # of a round's log ratio
    degrees: int  # of freedom
    comparisons: int

    def wider(self, ratios: list[float]) -> "Noise":
        """For a comparison whose own noise is larger, as after one disturbed run: that."""
        return self._replace(deviation=max(self.deviation, stdev(ratios)))

    def least(self, rounds: int) -> float:
        """The mean log ratio from which on a comparison over so many rounds is no noise."""
        return least(self.deviation / math.sqrt(rounds), self.degrees, self.comparisons)


def least(error: float, degrees: float, comparisons: int) -> float:
    """The least mean that is no noise, by the standard error of such means."""
    return max(LEAST, error * student(1 - FALSE / 2 / comparisons, degrees))


def log_ratios(new: dict[int, float], old: dict[int, float]) -> list[float]:
    """Of the rounds that both have, by their numbers."""
    return [math.log(value / old[number]) for number, value in new.items() if number in old]


def noise_of(comparisons: Collection[list[float]]) -> Noise | None:
    """By the log ratios of each comparison; None where no comparison has two rounds."""
    known = [ratios for ratios in comparisons if len(ratios) > 1]
    if not known:
        return None
    # The median of a chi-squared distribution is lower than its mean, by Wilson and Hilferty.
    variances = [variance(ratios) / (1 - 2 / 9 / (len(ratios) - 1)) ** 3 for ratios in known]
    degrees = sum(len(ratios) - 1 for ratios in known)
    return Noise(math.sqrt(median(variances)), degrees, len(known))


def verdict(ratios: list[float], noise: Noise | None) -> str:
    if len(ratios) < ROUNDS_FOR_A_VERDICT or not noise:
        return "no verdict"
    change = mean(ratios)
    if abs(change) < noise.wider(ratios).least(len(ratios)):
        return "no measurable change"
    return "faster" if change > 0 else "slower"


def verdict_of_two(one: list[float], other: list[float], noise: Noise | None,
                   theirs: Noise | None) -> str:
    """Whether the log ratios in one table are greater ("faster") than those in another, by Welch's
    test."""
    if min(len(one), len(other)) < ROUNDS_FOR_A_VERDICT or not noise or not theirs:
        return "no verdict"
    noise, theirs = noise.wider(one), theirs.wider(other)
    variances = noise.deviation**2 / len(one), theirs.deviation**2 / len(other)
    spread = variances[0]**2 / noise.degrees + variances[1]**2 / theirs.degrees
    degrees = sum(variances)**2 / spread if spread else noise.degrees
    change = mean(one) - mean(other)
    if abs(change) < least(math.sqrt(sum(variances)), degrees, noise.comparisons):
        return "no measurable change"
    return "faster" if change > 0 else "slower"


def student(probability: float, degrees: float) -> float:
    """The quantile of Student's t distribution, by the expansion in Abramowitz and Stegun, 26.7.5:
    within 1 % for 4 degrees of freedom and probabilities up to 0.99, better for more degrees."""
    x, n = NormalDist().inv_cdf(probability), degrees
    return (x + (x**3 + x) / (4 * n) + (5 * x**5 + 16 * x**3 + 3 * x) / (96 * n**2)
            + (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / (384 * n**3)
            + (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / (92160 * n**4))
