"""How often a table holds a false claim, and how often it finds a true one, by simulation.

    python docs/significance.py    # writes significance.csv and .md beside it; takes some minutes

The rule is that of bench/analysis/stats.py, here for many tables at once, as arrays;
tests/test_significance.py shows that both come to the same. Shapes: T tables, R rows, N rounds,
K runs of the baseline in a round, C comparisons.
"""

import csv
import io
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.special import stdtr, stdtrit

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.analysis.stats import (  # noqa: E402
    LEAST,
    LEVEL,
    POOLED_BASELINE_RUNS,
    POOLED_LEVEL,
    POOLED_ROUNDS,
    POOLED_ROWS,
    PRIOR,
)
from gpt_speed.tables import Column, Table, markdown  # noqa: E402

TABLES = 10_000  # of a cell
ROWS, ROUNDS = (3, 4, 6, 8, 16, 32), (2, 3, 4, 5, 6)
NOISE = 0.02  # standard deviation of a run's logarithm
ROUND_NOISE = 0.05  # the same of what shifts a whole round
SPREAD = 6  # by how much the noise of rows differs, where it does
SLOW, SLOW_SHARE = 0.6, 0.05  # the speed of a slow run, and how many are slow
NOISES = ("equal", "unequal", "noisy baseline", "heavy tails", "slow runs")
GAINS = (1.05, 1.2, 2.0)  # that one row has
MOST_FALSE, LEAST_COVERAGE = 5.5, 94.0  # in percent

FALSE, TRUE = "false tables", "true intervals"  # of what the file has a column for each noise
FILE = ROOT / "docs" / "significance.csv"
PAIRED, POOLED, FEW_RUNS = "paired", "pooled", "pooled, 2 or 3 runs of the baseline"

INTRODUCTION = f"""# How often a bold row is wrong

**If nothing differs, at most {MOST_FALSE}% of tables hold a bold row, and at least
{LEAST_COVERAGE:.0f}% of the 95% intervals contain the truth**, whatever the noise. That is so for
each form of [the rule](methodology.md#significance): *paired* in small tables and for times to a
loss, *pooled* in tables of speeds with at least {POOLED_ROWS} rows, {POOLED_ROUNDS} rounds, and
{POOLED_BASELINE_RUNS} runs of the baseline.

`python docs/significance.py` simulated {TABLES:,} tables for each of five kinds of noise and five
layouts:

- **equal**: the noise of each run is {NOISE:.0%} of its speed (standard deviation).
- **unequal**: each row has its own noise, between {NOISE:.0%} and {SPREAD * NOISE:.0%}.
- **noisy baseline**: {SPREAD * NOISE:.0%} for the baseline, {NOISE:.0%} for all others.
- **heavy tails**: Student's t distribution with 3 degrees of freedom.
- **slow runs**: one run in {1 / SLOW_SHARE:.0f} has {SLOW} of its speed.

The layouts: every row over the one above it, with one or two runs of the baseline in a round; every
row over the baseline, with one, two, or three. The table has the worst of all. Its last columns say
how many tables, in percent, find the one row that gains so much, with equal noise.
[`significance.csv`](significance.csv) has each kind of noise, and the forms that the rule doesn't
use.
"""


class Layout(NamedTuple):
    """What the rows of a table are compared to, and how often its baseline runs in a round."""

    over_baseline: bool  # else each row over the one above it
    baseline_runs: int

    def pairs(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows that are compared, and what each is compared to."""
        compared = np.arange(1, rows)
        return compared, np.zeros_like(compared) if self.over_baseline else compared - 1


LAYOUTS = (Layout(False, 1), Layout(False, 2), Layout(True, 1), Layout(True, 2), Layout(True, 3))


class Tables(NamedTuple):
    """Logarithms of speeds."""

    baseline_TKN: np.ndarray
    others_TRN: np.ndarray

    @property
    def means_TRN(self) -> np.ndarray:
        """The mean of each row in each round, the baseline first."""
        return np.concatenate([self.baseline_TKN.mean(1, keepdims=True), self.others_TRN], axis=1)


class Estimates(NamedTuple):
    """As bench.analysis.stats.Estimate, of the comparisons of many tables."""

    mean_TC: np.ndarray
    error_TC: np.ndarray
    degrees_TC: np.ndarray

    @property
    def p_value_TC(self) -> np.ndarray:
        return 2 * stdtr(self.degrees_TC, -np.abs(self.mean_TC) / self.error_TC)

    @property
    def reach_TC(self) -> np.ndarray:
        """Half of the 95% interval."""
        return self.error_TC * stdtrit(self.degrees_TC, 0.975)

    def claims_TC(self, level: float) -> np.ndarray:
        """Returns what is significant by Holm's method."""
        order = self.p_value_TC.argsort(1)
        limits = level / np.arange(order.shape[1], 0, -1)
        passed = np.take_along_axis(self.p_value_TC, order, 1) <= limits
        claims = np.empty_like(passed)
        np.put_along_axis(claims, order, np.logical_and.accumulate(passed, 1), 1)
        return claims & (np.abs(self.mean_TC) >= LEAST)


def draw(
    rows: int, rounds: int, noise: str, layout: Layout, tables: int = TABLES, gain: float = 1.0
) -> Tables:
    """Returns tables of which only the last row has a gain, from a seed of their own."""
    runs = layout.baseline_runs
    shape = tables, runs + rows - 1, rounds
    random = np.random.default_rng([rows, rounds, *layout, NOISES.index(noise)])
    scale = np.ones((tables, shape[1], 1))
    if noise == "unequal":
        scale = SPREAD ** random.random(scale.shape)
        scale[:, :runs] = scale[:, :1]
    elif noise == "noisy baseline":
        scale[:, :runs] = SPREAD
    heavy = noise == "heavy tails"
    logs = NOISE * scale * (random.standard_t(3, shape) if heavy else random.normal(size=shape))
    if noise == "slow runs":
        logs += np.log(SLOW) * (random.random(shape) < SLOW_SHARE)
    logs += random.normal(scale=ROUND_NOISE, size=(tables, 1, rounds))
    logs[:, -1] += np.log(gain)
    return Tables(logs[:, :runs], logs[:, runs:])


def paired(tables: Tables, layout: Layout) -> Estimates:
    """Returns what stats.paired_difference does."""
    means_TRN = tables.means_TRN
    compared, references = layout.pairs(means_TRN.shape[1])
    difference_TCN = means_TRN[:, compared] - means_TRN[:, references]
    rounds, mean_TC = difference_TCN.shape[2], difference_TCN.mean(2)
    return Estimates(
        mean_TC, difference_TCN.std(2, ddof=1) / np.sqrt(rounds), np.full_like(mean_TC, rounds - 1)
    )


def pooled(tables: Tables, layout: Layout) -> Estimates:
    """Returns the differences of what stats.pooled_means does, by Welch's test."""
    means_TRN = tables.means_TRN
    count, rows, rounds = means_TRN.shape
    shift_TN = np.median(means_TRN - means_TRN.mean(2, keepdims=True), axis=1)
    mean_TR = (means_TRN - shift_TN[:, None]).mean(2)
    baseline = (tables.baseline_TKN - shift_TN[:, None]).reshape(count, -1)
    others = tables.others_TRN - shift_TN[:, None]
    variance_TR = np.concatenate([baseline.var(1, ddof=1)[:, None], others.var(2, ddof=1)], axis=1)
    variance_TR /= 1 - 1 / rows
    runs_R = np.full(rows, rounds)
    runs_R[0] = baseline.shape[1]
    usual_T = np.median(variance_TR / (1 - 2 / 9 / (runs_R - 1)) ** 3, axis=1)
    prior_R = np.full(rows, PRIOR)
    prior_R[0] = 0
    degrees_R = runs_R - 1 + prior_R
    square_TR = ((runs_R - 1) * variance_TR + prior_R * usual_T[:, None]) / degrees_R / runs_R
    one, other = layout.pairs(rows)
    one_TC, other_TC = square_TR[:, one], square_TR[:, other]
    degrees_TC = (one_TC + other_TC) ** 2 / (
        one_TC**2 / degrees_R[one] + other_TC**2 / degrees_R[other]
    )
    return Estimates(mean_TR[:, one] - mean_TR[:, other], np.sqrt(one_TC + other_TC), degrees_TC)


def rates(form: str, rows: int, rounds: int, noise: str, layout: Layout) -> tuple[float, float]:
    """Returns how many tables hold a false claim, and how many intervals the truth, in percent."""
    estimates, level = estimated(form, draw(rows, rounds, noise, layout), layout)
    false = estimates.claims_TC(level).any(1)
    covered = np.abs(estimates.mean_TC) <= estimates.reach_TC
    return 100 * false.mean(), 100 * covered.mean()


def power(form: str, rows: int, rounds: int, gain: float, layout: Layout) -> float:
    """Returns how many tables find a row that gains, in percent."""
    tables = draw(rows, rounds, "equal", layout, gain=gain)
    estimates, level = estimated(form, tables, layout)
    return 100 * estimates.claims_TC(level)[:, -1].mean()


def estimated(form: str, tables: Tables, layout: Layout) -> tuple[Estimates, float]:
    """Returns the estimates of a form, and the level of its test."""
    if form == PAIRED:
        return paired(tables, layout), LEVEL
    return pooled(tables, layout), POOLED_LEVEL


def layouts_of(form: str, rounds: int) -> list[Layout]:
    """Returns those in which the baseline has run as often as the form says."""
    if form == PAIRED:
        return [*LAYOUTS]
    return [
        layout
        for layout in LAYOUTS
        if (form == FEW_RUNS) == (rounds * layout.baseline_runs < POOLED_BASELINE_RUNS)
    ]


def worst(form: str, rows: int, rounds: int, noise: str) -> tuple[float, float]:
    """Returns the highest share of false tables, and the lowest coverage, of all layouts."""
    false, coverage = zip(
        *(rates(form, rows, rounds, noise, layout) for layout in layouts_of(form, rounds)),
        strict=True,
    )
    return max(false), min(coverage)


class Line(NamedTuple):
    """A line of the page."""

    form: str
    rows: int
    rounds: int

    @property
    def used(self) -> bool:
        """Whether the rule compares speeds in this form."""
        large = self.rows >= POOLED_ROWS and self.rounds >= POOLED_ROUNDS
        return self.form == (POOLED if large else PAIRED)

    def record(self) -> dict[str, str]:
        """Returns the line as the file has it, in percent."""
        record = dict(rows=str(self.rows), rounds=str(self.rounds), form=self.form)
        record["used"] = "yes" if self.used else "no"
        for noise in NOISES:
            false, coverage = worst(self.form, self.rows, self.rounds, noise)
            record |= {f"{noise}: {FALSE}": f"{false:.1f}", f"{noise}: {TRUE}": f"{coverage:.1f}"}
        for gain in GAINS:
            record[finds(gain)] = f"{self.power(gain):.0f}"
        return record

    def power(self, gain: float) -> float:
        return min(
            power(self.form, self.rows, self.rounds, gain, layout)
            for layout in layouts_of(self.form, self.rounds)
        )


def finds(gain: float) -> str:
    return f"finds +{gain - 1:.0%}"


def records() -> list[dict[str, str]]:
    """Returns all lines, of each size of a table in each form."""
    return [
        Line(form, rows, rounds).record()
        for rows in ROWS
        for rounds in ROUNDS
        for form in (PAIRED, FEW_RUNS, POOLED)
        if layouts_of(form, rounds)
    ]


def as_csv(lines: list[dict[str, str]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, lines[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def page(lines: list[dict[str, str]]) -> str:
    """Returns the page, with the lines that the rule uses."""
    columns = [
        Column("rows × rounds", lambda line: f"{line['rows']} × {line['rounds']}"),
        Column("form", lambda line: line["form"], True),
        Column("false tables, %", lambda line: str(max(figures(line, FALSE)))),
        Column("true intervals, %", lambda line: str(min(figures(line, TRUE)))),
        *(Column(finds(gain), lambda line, gain=gain: line[finds(gain)]) for gain in GAINS),
    ]
    used = [line for line in lines if line["used"] == "yes"]
    return f"{INTRODUCTION}\n{markdown(Table(columns, used))}"


def figures(line: dict[str, str], kind: str) -> list[float]:
    """Returns what a line has of each kind of noise."""
    return [float(line[f"{noise}: {kind}"]) for noise in NOISES]


def main() -> None:
    lines = records()
    FILE.write_text(as_csv(lines), encoding="utf-8")
    FILE.with_suffix(".md").write_text(page(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
