"""When a difference is significant: docs/methodology.md has it on one page.

The figures of a table are logarithms, so that differences are factors. What all runs of a round
have in common is taken out; the mean of a row's figures has the standard error of what is left,
and two rows are compared by Welch's test. A few rounds tell a row's noise badly. So its variance
is pooled with that of the table's other rows with as many steps, which count as PRIOR degrees of
freedom: a moderated t-test (Smyth 2004, doi.org/10.2202/1544-6115.1027). A difference is called
faster or slower by Holm's method (1979), which keeps the share of tables with any false verdict
below a level, however many rows they have.
"""

import math
from collections import Counter
from collections.abc import Hashable
from functools import cache
from statistics import NormalDist, fmean, median
from typing import NamedTuple

ROUNDS_FOR_A_VERDICT = 3
PRIOR = 3  # degrees of freedom of the other rows' noise; the more, the worse if rows differ in it
# The share of tables, if nothing differs, that may hold a false verdict: at the planned end; and
# at all further looks, after more rounds or before the end, together: a half, a quarter, ...
AT_THE_END, LATER = 0.04, 0.01
NEAREST = 5  # one comparison in this many has more rounds
LEAST = math.log(1.01)  # a smaller change is none, however sure
TINY = 1e-9  # of an error, for figures without noise
STEPS = 100  # of a sum in place of an integral: within 0.1 % of it for 4 degrees, 0.5 % for 100

Values = list[tuple[int, float]]  # a round's number, and a logarithm


class Estimate(NamedTuple):
    """Of a mean of logarithms, or of a difference between two."""

    mean: float
    error: float  # the standard error
    degrees: float  # of freedom, of the error
    rounds: int  # of the row with fewer

    def minus(self, other: "Estimate") -> "Estimate":
        """By Welch's test, with Satterthwaite's degrees of freedom."""
        one, two = self.error**2, other.error**2
        spread = one**2 / self.degrees + two**2 / other.degrees
        return Estimate(self.mean - other.mean, math.sqrt(one + two), (one + two)**2 / spread,
                        min(self.rounds, other.rounds))

    @property
    def factor(self) -> float:
        return math.exp(self.mean)

    def interval(self, share: float = 0.95) -> tuple[float, float]:
        """That of the factor, with so much confidence."""
        reach = quantile((1 + share) / 2, self.degrees) * self.error
        return math.exp(self.mean - reach), math.exp(self.mean + reach)

    @property
    def chance(self) -> float:
        """That noise alone makes so large a difference, in either direction."""
        return 2 * beyond(abs(self.mean) / self.error, self.degrees)

    def least(self, chance: float) -> float:
        """The smallest factor above 1 that noise makes more rarely than so."""
        return math.exp(max(LEAST, quantile(1 - chance / 2, self.degrees) * self.error))


def estimates(rows: dict[str, Values], alike: dict[str, Hashable]) -> dict[str, Estimate]:
    """The mean of each row that has two values or more; `alike` tells which rows have noise of one
    kind. Rounds with a single row tell nothing of differences, and are left out."""
    while True:  # without a row, a round of two has one
        in_round = Counter(number for values in rows.values() for number in dict(values))
        shared = {name: [value for value in values if in_round[value[0]] > 1]
                  for name, values in rows.items()}
        shared = {name: values for name, values in shared.items() if len(values) > 1}
        if shared == rows:
            break
        rows = shared
    means, common = means_of(rows)
    variances, degrees = {}, {}
    for name, values in rows.items():
        # With the rows' median, a residual loses about the share that it has in it.
        kept = [1 - 1 / in_round[number] for number, _ in values]
        left = [(value - common[number] - means[name])**2 for number, value in values]
        variances[name] = sum(map(float.__truediv__, left, kept)) / (len(values) - 1)
        degrees[name] = (len(values) - 1) * fmean(kept)
    found = {}
    for name, values in rows.items():
        # The median of a chi-squared distribution is lower than its mean, by Wilson and Hilferty.
        others = [variances[other] / (1 - 2 / 9 / degrees[other])**3 if degrees[other] > 0.5 else
                  variances[other] for other in rows
                  if other != name and alike[other] == alike[name]]
        weight = PRIOR if len(others) > 1 else 0  # of two rows each has the residuals of the other
        total = degrees[name] + weight
        pooled = (degrees[name] * variances[name] + weight * median(others or [0])) / total
        found[name] = Estimate(means[name], max(TINY, math.sqrt(pooled / len(values))), total,
                               len(dict(values)))
    return found


class Comparisons:
    """Any two rows of a table. The first `whole` of its rounds ran all rows (None: all did), the
    later ones a few. The later rounds tell how these few differ from each other; how far they are
    from the rest, the whole rounds alone tell. Else a slow first run, which in a round of three
    rows is often the same one's, would count against those that ran on."""

    def __init__(self, rows: dict[str, Values], alike: dict[str, Hashable], whole: int | None):
        early = {name: [value for value in values if whole is None or value[0] <= whole]
                 for name, values in rows.items()}
        self.means = estimates(early, alike)
        self.longer = {name for name in self.means if len(early[name]) < len(rows[name])}
        self.level_error = 0.0  # of what those that ran on have in common, next to the rest
        if self.longer:
            every = estimates(rows, alike)
            levels, weights = [], []  # a mean of some values less that of all, and 1 / its variance
            for name in self.longer:
                levels.append(self.means[name].mean - every[name].mean)
                share = len(rows[name]) / len(early[name])
                weights.append(1 / (every[name].error**2 * (share - 1)))
            level = sum(map(float.__mul__, levels, weights)) / sum(weights)
            self.means |= {
                name: every[name]._replace(mean=every[name].mean + level) for name in self.longer}
            self.level_error = sum(weights)**-0.5

    def difference(self, name: str, other: str) -> Estimate | None:
        """The first one's mean less the other's; None where one of them isn't known."""
        if not {name, other} <= self.means.keys():
            return None
        found = self.means[name].minus(self.means[other])
        if (name in self.longer) == (other in self.longer):
            return found
        return found._replace(error=math.hypot(found.error, self.level_error))


def means_of(rows: dict[str, Values]) -> tuple[dict[str, float], dict[int, float]]:
    """(each row's mean, what the values of each round have in common): the one less the other, by
    turns. That of a round is the median over the rows, which one contended run doesn't move."""
    numbers = {number for values in rows.values() for number, _ in values}
    common = dict.fromkeys(numbers, 0.0)
    for _ in range(4):
        means = {name: fmean(value - common[number] for number, value in values)
                 for name, values in rows.items()}
        in_round: dict[int, dict[str, list[float]]] = {number: {} for number in numbers}
        for name, values in rows.items():
            for number, value in values:
                in_round[number].setdefault(name, []).append(value - means[name])
        common = {number: median(map(fmean, left.values())) for number, left in in_round.items()}
    return {name: fmean(value - common[number] for number, value in values)
            for name, values in rows.items()}, common


def level_of(looks: int, finished: bool) -> float:
    """The share of tables that may hold a false verdict, at look number `looks` at this one. Who
    looks before the end, or adds rounds, pays for it."""
    paid = looks - finished
    return LATER / 2**paid if paid else AT_THE_END


def significant(differences: dict[str, Estimate], level: float) -> set[str]:
    """Those that are significant, by Holm's method."""
    found: set[str] = set()
    chances = {name: difference.chance for name, difference in differences.items()}
    for name in sorted(chances, key=chances.__getitem__):
        if chances[name] > level / (len(chances) - len(found)):
            break
        found.add(name)
    return {name for name in found if abs(differences[name].mean) >= LEAST}


def nearest(differences: dict[str, Estimate]) -> list[str]:
    """The comparisons that more rounds may decide: of those that aren't certain yet the least
    likely to be noise, one of all in NEAREST."""
    certain = significant(differences, LATER / 2)
    uncertain = sorted(differences.keys() - certain, key=lambda name: differences[name].chance)
    return uncertain[:math.ceil(len(differences) / NEAREST)]


def verdict(difference: Estimate, is_significant: bool, greater: str = "faster",
            smaller: str = "slower", neither: str = "no significant change") -> str:
    """What a table says of a difference."""
    return neither if not is_significant else greater if difference.mean > 0 else smaller


# ---- Student's t distribution --------------------------------------------------------------------


def beyond(t: float, degrees: float) -> float:
    """The chance of more than `t` >= 0. With tan(angle) = √degrees / t the density is that of
    sin(angle)^(degrees - 1), which is summed up in small steps."""
    if degrees > 100:  # Abramowitz and Stegun, 26.7.8
        return NormalDist().cdf(-t * (1 - 0.25 / degrees) / math.sqrt(1 + t * t / 2 / degrees))
    step = math.atan2(math.sqrt(degrees), t) / STEPS
    area = step * sum(math.sin(step * (k + 0.5))**(degrees - 1) for k in range(STEPS))
    return area * math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(
        math.pi)


@cache
def quantile(probability: float, degrees: float) -> float:
    """Above which a value is with a chance of 1 - probability < 1/2, by halving."""
    low, high = 0.0, 1.0
    while beyond(high, degrees) > 1 - probability:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if beyond(middle, degrees) > 1 - probability else (low, middle)
    return high
