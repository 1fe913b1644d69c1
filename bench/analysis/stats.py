"""Significance: is one row of a table faster than another, or is it noise?

docs/methodology.md has the rule on one page. All values are logarithms, so the difference of two
means is the logarithm of a speedup. Simulated (tests/test_stats.py): of tables in which nothing
differs at most 5 % hold a false claim, for rows whose noise is 1 to 8 % of their speed.
"""

import math
from statistics import fmean, median, variance
from typing import NamedTuple

LEVEL = 0.04  # of Holm's method: the noisiest rows' errors shrink, so 5 % here would be up to 5.4 %
PRIOR = 1  # degrees of freedom as which the usual variance of the table's rows counts
LEAST = math.log(1.01)  # a smaller change isn't significant, however certain it is
ROWS, ROUNDS = 3, 2  # of two rows, or in one round, nobody can tell whose noise it is
ROUNDING = 1e-9  # a standard error below it: the values have no spread

Values = list[tuple[int, float | None]]  # of a row's runs, each with its round; None: not known
Logs = dict[int, list[float]]  # their logarithms, by the round


class Estimate(NamedTuple):
    """A row's mean logarithm, or the difference between the means of two rows."""

    mean: float
    error: float  # the standard error
    degrees: float  # of freedom, of the error

    def minus(self, other: "Estimate") -> "Estimate":
        """Returns the difference by Welch's test; the degrees are Satterthwaite's."""
        one, two = self.error**2, other.error**2
        degrees = (one + two)**2 / (one**2 / self.degrees + two**2 / other.degrees)
        return Estimate(self.mean - other.mean, math.sqrt(one + two), degrees)

    @property
    def factor(self) -> float:
        return math.exp(self.mean)

    @property
    def interval(self) -> tuple[float, float]:
        """The factor's 95 % confidence interval."""
        from scipy.special import stdtrit  # here, since most commands don't need it

        reach = self.error * float(stdtrit(self.degrees, 0.975))
        return math.exp(self.mean - reach), math.exp(self.mean + reach)

    @property
    def p_value(self) -> float:
        from scipy.special import stdtr

        return 2 * float(stdtr(self.degrees, -abs(self.mean) / self.error))


class Column:
    """A column of speedups, tested as a whole."""

    def __init__(self, rows: dict[str, Logs], pairs: dict[str, tuple[str, str]]):
        """Takes the rows' logarithms, and by names of rows the two that each compares."""
        self.means = estimates({name: logs for name, logs in rows.items() if logs})
        self.differences = {
            name: difference for name, pair in pairs.items()
            if pair and name in self.means and (difference := self.difference(*pair))}
        self.significant = significant(self.differences)

    def difference(self, one: str, other: str) -> Estimate | None:
        if not {one, other} <= self.means.keys():
            return None
        return self.means[one].minus(self.means[other])

    def significance(self, name: str) -> str:
        if name not in self.differences:
            return "not tested"
        if name not in self.significant:
            return "no significant change"
        return "faster" if self.differences[name].mean > 0 else "slower"


def logs_of(values: Values) -> Logs:
    """Returns the logarithms of the values that are known."""
    logs: Logs = {}
    for number, value in values:
        if value is not None:
            logs.setdefault(number, []).append(math.log(value))
    return logs


def mean_ratio(one: Values, other: Values) -> float | None:
    """Returns the geometric mean of the ratios in the rounds of both; None without."""
    logs, others = logs_of(one), logs_of(other)
    rounds = logs.keys() & others.keys()
    if not rounds:
        return None
    return math.exp(fmean(fmean(logs[number]) for number in rounds)
                    - fmean(fmean(others[number]) for number in rounds))


def estimates(rows: dict[str, Logs]) -> dict[str, Estimate]:
    """Returns the mean of each row over the rounds that all have; none of a row without spread, and
    none at all of fewer than ROWS rows or ROUNDS rounds."""
    if len(rows) < ROWS:
        return {}
    rounds = sorted(set.intersection(*map(set, rows.values())))
    if len(rounds) < ROUNDS:
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
    """Returns the names of the significant ones of a column, by Holm's method."""
    names: set[str] = set()
    p_values = {name: difference.p_value for name, difference in differences.items()}
    for name in sorted(p_values, key=p_values.__getitem__):
        if p_values[name] > LEVEL / (len(p_values) - len(names)):
            break
        names.add(name)
    return {name for name in names if abs(differences[name].mean) >= LEAST}
