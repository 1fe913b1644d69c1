"""Significance: is one row of a table faster than another, or is it noise?

docs/methodology.md has the rule on one page, docs/significance.md how often it is wrong. All values
are logarithms, so the difference of two means is the logarithm of a speedup.
"""

import math
from collections.abc import Sequence
from statistics import fmean, median, stdev, variance
from typing import NamedTuple

LEVEL = 0.05  # at most so many tables in which nothing differs hold a claim (Holm's method)
POOLED_LEVEL = 0.04  # where variances are pooled: the noisiest rows' errors shrink
LEAST = math.log(1.01)  # a smaller change isn't significant, however certain it is
SIGNIFICANT = "faster", "slower"  # what Family.significance says of a claim
ROUNDS = 2  # in one round nobody can tell what is noise
LEAST_ERROR = 1e-9  # a standard error below it is rounding: the values have no spread

# A table whose variances are pooled has at least so many rows, rounds, and runs of its baseline. In
# smaller ones that makes too many false claims (docs/significance.md).
POOLED_ROWS, POOLED_ROUNDS, POOLED_BASELINE_RUNS = 6, 3, 4
PRIOR = 1  # degrees of freedom as which the usual variance of the table's rows counts

Values = Sequence[tuple[int, float | None]]  # of a row's runs, each with its round; None: not known
Logs = dict[int, list[float]]  # their logarithms, by the round


class Estimate(NamedTuple):
    """A row's mean logarithm, or the difference between the means of two rows."""

    mean: float
    error: float  # the standard error
    degrees: float  # of freedom, of the error

    def minus(self, other: "Estimate") -> "Estimate":
        """Returns the difference by Welch's test; the degrees are Satterthwaite's."""
        one, two = self.error**2, other.error**2
        degrees = (one + two) ** 2 / (one**2 / self.degrees + two**2 / other.degrees)
        return Estimate(self.mean - other.mean, math.sqrt(one + two), degrees)

    @property
    def factor(self) -> float:
        return math.exp(self.mean)

    @property
    def interval(self) -> tuple[float, float]:
        """The factor's 95% confidence interval."""
        from scipy.special import stdtrit  # here, since most commands don't need it

        reach = self.error * float(stdtrit(self.degrees, 0.975))
        return math.exp(self.mean - reach), math.exp(self.mean + reach)

    @property
    def p_value(self) -> float:
        from scipy.special import stdtr

        return 2 * float(stdtr(self.degrees, -abs(self.mean) / self.error))


class Family:
    """The speedups of a table, tested as a whole: a family of hypotheses.

    In a large table the rows share what they tell of the noise; in a small one each comparison
    stands alone."""

    def __init__(
        self, rows: dict[str, Logs], pairs: dict[str, tuple[str, str]], pooled: bool = True
    ):
        """Takes the rows' logarithms, the baseline's first, and by names of rows the two that each
        compares; `pooled`: variances may be pooled, if the table is large enough."""
        self.rows = in_rounds_of_all({name: logs for name, logs in rows.items() if logs})
        self.pooled = pooled and is_large(self.rows)
        self.means = {}
        level = LEVEL
        if self.pooled:
            self.means = pooled_means(self.rows)
            level = POOLED_LEVEL
        self.differences = self.differences_of(pairs)
        self.significant = significant(self.differences, level)

    def differences_of(self, pairs: dict[str, tuple[str, str]]) -> dict[str, Estimate]:
        """Returns the differences of pairs that can be estimated, by the names of their rows."""
        differences = {
            name: self.difference(*pair) for name, pair in pairs.items() if name in self.rows
        }
        return {name: estimate for name, estimate in differences.items() if estimate}

    def difference(self, one: str, other: str) -> Estimate | None:
        """Returns by how much one row's mean is above the other's; None where that can't be
        estimated."""
        if self.pooled:
            if one not in self.means or other not in self.means:
                return None
            return self.means[one].minus(self.means[other])
        if one not in self.rows or other not in self.rows:
            return None
        return paired_difference(self.rows[one], self.rows[other])

    def significance(self, name: str) -> str:
        if name not in self.differences:
            return "not tested"
        if name not in self.significant:
            return "no significant change"
        if self.differences[name].mean > 0:
            return "faster"
        return "slower"


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
    return math.exp(
        fmean(fmean(logs[number]) for number in rounds)
        - fmean(fmean(others[number]) for number in rounds)
    )


def in_rounds_of_all(rows: dict[str, Logs]) -> dict[str, Logs]:
    """Returns the rows without the rounds that another row lacks."""
    if not rows:
        return {}
    rounds = sorted(set.intersection(*map(set, rows.values())))
    return {name: {number: logs[number] for number in rounds} for name, logs in rows.items()}


def is_large(rows: dict[str, Logs]) -> bool:
    """Returns whether a table, its baseline first, is one in which pooling variances holds."""
    baseline = next(iter(rows.values()), {})
    return (
        len(rows) >= POOLED_ROWS
        and len(baseline) >= POOLED_ROUNDS
        and sum(map(len, baseline.values())) >= POOLED_BASELINE_RUNS
    )


def paired_difference(one: Logs, other: Logs) -> Estimate | None:
    """Returns the mean difference of two rows over the same rounds, by the paired t-test; None for
    fewer than ROUNDS rounds, or for differences without spread."""
    differences = [fmean(logs) - fmean(other[number]) for number, logs in one.items()]
    if len(differences) < ROUNDS:
        return None
    error = stdev(differences) / math.sqrt(len(differences))
    degrees = len(differences) - 1
    if error <= LEAST_ERROR:
        return None
    return Estimate(fmean(differences), error, degrees)


def pooled_means(rows: dict[str, Logs]) -> dict[str, Estimate]:
    """Returns the mean of each row, without what shifts a whole round; none of a row without
    spread. The rows, the baseline first, have the same rounds.

    The few runs of a row say little of its variance, so it is averaged with the usual one of the
    table. The baseline keeps its own: it is in many comparisons, which would all be wrong."""
    shifts = round_shifts(rows)
    values = {name: without_shifts(logs, shifts) for name, logs in rows.items()}
    # The shifts, which are medians, took about this share of each row's own noise along.
    taken = 1 / len(rows)
    variances = {name: variance(logs) / (1 - taken) for name, logs in values.items()}
    usual = median(unbiased_median(variances[name], len(logs) - 1) for name, logs in values.items())
    baseline = next(iter(rows))
    priors = dict.fromkeys(rows, PRIOR) | {baseline: 0}
    means = {
        name: mean_of_row(logs, variances[name], usual, priors[name])
        for name, logs in values.items()
    }
    return {name: estimate for name, estimate in means.items() if estimate.error > LEAST_ERROR}


def mean_of_row(values: list[float], own: float, usual: float, prior: int) -> Estimate:
    """Returns the mean of a row's values, whose `own` variance is averaged with the `usual` one;
    that counts as `prior` degrees of freedom."""
    degrees = len(values) - 1
    pooled = (degrees * own + prior * usual) / (degrees + prior)
    return Estimate(fmean(values), math.sqrt(pooled / len(values)), degrees + prior)


def round_shifts(rows: dict[str, Logs]) -> list[float]:
    """Returns by how much each round as a whole is above the others: the median of what the rows
    show, which one slow run doesn't move."""
    centred = []
    for logs in rows.values():
        means = [fmean(values) for values in logs.values()]
        centred.append([mean - fmean(means) for mean in means])
    return list(map(median, zip(*centred, strict=True)))


def without_shifts(logs: Logs, shifts: list[float]) -> list[float]:
    """Returns the logarithms of a row's runs, each less the shift of its round."""
    return [
        log - shift for values, shift in zip(logs.values(), shifts, strict=True) for log in values
    ]


def unbiased_median(variance: float, degrees: int) -> float:
    """Returns a variance as large as its mean would be, where it is taken for its median: that of a
    chi-squared distribution is lower, by Wilson and Hilferty."""
    return variance / (1 - 2 / 9 / degrees) ** 3


def significant(differences: dict[str, Estimate], level: float) -> set[str]:
    """Returns the names of the significant ones of a column, by Holm's method."""
    names: set[str] = set()
    p_values = {name: difference.p_value for name, difference in differences.items()}
    for name in sorted(p_values, key=p_values.__getitem__):
        if p_values[name] > level / (len(p_values) - len(names)):
            break
        names.add(name)
    return {name for name in names if abs(differences[name].mean) >= LEAST}
