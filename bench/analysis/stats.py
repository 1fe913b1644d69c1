"""Significance: is one row of a table faster than another, or is it noise?

docs/methodology.md has the rule on one page. All values are logarithms, so the difference of two
means is the logarithm of a speedup. Simulated (tests/test_stats.py): of tables in which nothing
differs at most 5 % hold a false claim, for rows whose noise is 1 to 8 % of their speed.
"""

import math
from collections.abc import Collection
from statistics import fmean, median, variance
from typing import NamedTuple

LEVEL = 0.04  # of Holm's method: the noisiest rows' errors shrink, so 5 % here would be up to 5.4 %
PRIOR = 1  # degrees of freedom as which the usual variance of the table's rows counts
LEAST = math.log(1.01)  # a smaller change isn't significant, however certain it is
ROWS, ROUNDS = 3, 2  # of two rows, or in one round, nobody can tell whose noise it is
ROUNDING = 1e-9  # a standard error below it: the values have no spread

Logs = dict[int, list[float]]  # a row's runs, by their round


class Estimate(NamedTuple):
    """A row's mean logarithm, or the difference between the means of two rows."""

    mean: float
    error: float  # the standard error
    degrees: float  # of freedom, of the error

    def minus(self, other: "Estimate") -> "Estimate":
        """The difference by Welch's test, with Satterthwaite's degrees of freedom."""
        one, two = self.error**2, other.error**2
        degrees = (one + two)**2 / (one**2 / self.degrees + two**2 / other.degrees)
        return Estimate(self.mean - other.mean, math.sqrt(one + two), degrees)

    @property
    def factor(self) -> float:
        return math.exp(self.mean)

    @property
    def interval(self) -> tuple[float, float]:
        """The factor's 95 % confidence interval."""
        reach = self.reach(0.05)
        return math.exp(self.mean - reach), math.exp(self.mean + reach)

    @property
    def p_value(self) -> float:
        from scipy.special import stdtr  # here, since most commands don't need it

        return 2 * float(stdtr(self.degrees, -abs(self.mean) / self.error))

    def reach(self, p_value: float) -> float:
        """How far from 0 a mean with this error has this p-value."""
        from scipy.special import stdtrit

        return self.error * float(stdtrit(self.degrees, 1 - p_value / 2))


def common_rounds(rows: Collection[Logs]) -> list[int]:
    """The rounds that all rows have."""
    return sorted(set.intersection(*map(set, rows))) if rows else []


def estimates(rows: dict[str, Logs]) -> dict[str, Estimate]:
    """The mean of each row over the rounds that all have; none of a row without spread, and none at
    all of fewer than ROWS rows or ROUNDS rounds."""
    rounds = common_rounds(rows.values())
    if len(rows) < ROWS or len(rounds) < ROUNDS:
        return {}
    centred = []
    for logs in rows.values():
        own = [fmean(logs[number]) for number in rounds]
        centred.append([mean - fmean(own) for mean in own])
    # The median, which one slow run doesn't move.
    common = dict(zip(rounds, map(median, zip(*centred, strict=True)), strict=True))
    rest = {name: [log - common[number] for number in rounds for log in logs[number]]
            for name, logs in rows.items()}
    # The median contains about this share of each row's own noise.
    variances = {name: variance(values) / (1 - 1 / len(rows)) for name, values in rest.items()}
    # The median of a chi-squared distribution is lower than its mean, by Wilson and Hilferty.
    usual = median(variances[name] / (1 - 2 / 9 / (len(values) - 1))**3
                   for name, values in rest.items())
    means = {}
    for name, values in rest.items():
        degrees = len(values) - 1 + PRIOR
        pooled = ((len(values) - 1) * variances[name] + PRIOR * usual) / degrees
        means[name] = Estimate(fmean(values), math.sqrt(pooled / len(values)), degrees)
    return {name: estimate for name, estimate in means.items() if estimate.error > ROUNDING}


def significant(differences: dict[str, Estimate]) -> set[str]:
    """The names of those that are significant among all of a table's column, by Holm's method."""
    names: set[str] = set()
    p_values = {name: difference.p_value for name, difference in differences.items()}
    for name in sorted(p_values, key=p_values.__getitem__):
        if p_values[name] > LEVEL / (len(p_values) - len(names)):
            break
        names.add(name)
    return {name for name in names if abs(differences[name].mean) >= LEAST}
