"""Searches the batch size and learning rate with which a script comes to a loss first.

Tokens per second alone can be bought with training that learns less from each token. So,
as in AlgoPerf and MLPerf Training, whole runs are compared by the time to a target that is
fixed before they start: what 00 comes to in an epoch of the text, at its best settings.
"""

import math
from argparse import SUPPRESS
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bench.analysis.rows import Row, rows_of
from bench.catalogue import Run
from bench.common import relative
from bench.measure.journal import Measurement, journal_of, newest, read_journal
from bench.measure.plan import Plan, Setup
from bench.measure.sizing import configurations, tokens_per_epoch
from bench.report.notes import machine_note
from bench.report.tables import RUN, SPEED
from bench.studies import Study
from gpt_speed.common import UserError
from gpt_speed.tables import Column, Table, fmt

# Fields of a Plan whose runs choose settings; reported times have other seeds.
TUNING: dict = dict(first_seed=1, cold_rounds=0)
TARGET = "the lowest validation loss of 00 in one epoch of the text, at its best settings"
LIMIT = 2  # epochs without the target, after which a run is ended
LOG_TOKENS = {"cuda": 40_960, "cpu": 16_384}  # from one log line to the next
LOWEST_LOSS = Column("lowest val loss", lambda row: row.error or fmt(row.lowest_val_loss, ".4f"))


@dataclass(frozen=True)
class Part:
    """A part of a search."""

    divisor: int  # each setting trains for 1/divisor of an epoch
    count: int  # settings of each script

    @property
    def kind(self) -> str:
        """Its plan's kind."""
        return f"epoch-{self.divisor}" if self.divisor > 1 else "epoch"


# The parts by the device, in their order.
# An eighth of the book's epoch would be 0.2 seconds on a GPU, seven steps, which tell nothing.
HALVING = {"cuda": [Part(2, 8), Part(1, 1)], "cpu": [Part(8, 8), Part(2, 2), Part(1, 1)]}


class Point(NamedTuple):
    """A script with the settings that a search varies."""

    stage: str  # "00", "01", or variants of 01: "optimizer-muon+model-tied-head"
    batch: int
    rate: float

    def around(self) -> list["Point"]:
        """Returns half and twice the batch size, and half and twice the learning rate."""
        sizes = [size for size in (self.batch // 2, self.batch * 2) if size]
        return [
            *(self._replace(batch=size) for size in sizes),
            *(self._replace(rate=rate) for rate in (self.rate / 2, self.rate * 2)),
        ]

    def run(self, setup: Setup) -> Run:
        """Returns the run of the script with these settings."""
        run = setup.scripts.find(self.stage, setup.machine)
        return run.replace(
            name=f"{run.name}-batch-{self.batch}-rate-{self.rate:g}",
            published=None,
            label=f"{run.label}, batch {self.batch}, rate {self.rate:g}",
            facts=self._asdict(),
            compared_to=None,
            options=(
                *run.options,
                "--batch-size",
                str(self.batch),
                "--learning-rate",
                f"{self.rate:g}",
            ),
        )


def point_of(row: Row) -> Point:
    return Point(**row.run.facts)


def default_point(setup: Setup) -> Point:
    """Returns the published settings of 00, or what the options say."""
    run = setup.scripts.stage("00")
    config = configurations([run], setup)[run.name]
    size = config["batch_size"]
    return Point("00", setup.batches.get(size, size), config["learning_rate"])


def loss_in_equal_time(row: Row) -> float:
    """Returns the loss after as many seconds as the fastest settings of the row's script took
    for all of their tokens; infinity where the run failed."""
    if row.error:
        return math.inf
    alike = [other for other in row.table if point_of(other).stage == point_of(row).stage]
    times = [training.train_seconds for other in alike for training in other.trainings]
    return row.loss_at(min(times, default=0)) or math.inf


def ranked(rows: list[Row], stage: str) -> list[Point]:
    """Returns the settings of a script that were tried, the best first, failed ones last."""
    own = [row for row in rows if point_of(row).stage == stage]
    return [point_of(row) for row in sorted(own, key=loss_in_equal_time)]


def next_points(tried: list[Point], count: int) -> list[Point]:
    """Returns untried neighbours of the best settings that have some, up to `count` settings in
    all; of those `tried` the best are the first."""
    for point in tried:
        new = [other for other in point.around() if other not in tried]
        if new:
            return new[: count - len(tried)]
    return []


def plan_of(runs: list[Run], kind: str, **settings) -> Plan:
    """Returns a plan of whole runs with a new seed in each round."""
    return Plan(runs, kind, full_length=True, new_seeds=True, **settings)


def plan_of_part(part: Part, points: list[Point], setup: Setup) -> Plan:
    """Returns the plan of a part of a search with these settings."""
    return plan_of(
        [point.run(setup) for point in points],
        part.kind,
        tokens=(setup.args.max_tokens or tokens_per_epoch(setup.data)) // part.divisor,
        log_tokens=LOG_TOKENS[setup.device],
        **TUNING,
    )


def explore(
    setup: Setup, stages: tuple[str, ...], part: Part
) -> Generator[Plan, Measurement, list[Row]]:
    """Yields plans until the part's number of settings of each script were tried. Returns the rows.
    00, the first one, goes from its own settings on: the best of them are a better start for the
    others than the published ones."""
    first, *others = stages
    rows = yield from climb(setup, [default_point(setup)], part)
    best = ranked(rows, first)[0]
    return (yield from climb(setup, [best._replace(stage=stage) for stage in others], part, rows))


def climb(
    setup: Setup, starts: list[Point], part: Part, before: Sequence[Row] = ()
) -> Generator[Plan, Measurement, list[Row]]:
    """Yields plans with more and more settings, first the `starts`, one for each script, then those
    around the best ones, until the part's number was tried. What was tried `before` is in each
    plan, too. Returns the rows."""
    points, new = [point_of(row) for row in before], starts
    while new:
        points += new
        measured = yield plan_of_part(part, points, setup)
        rows = rows_of(measured)
        new = []
        for start in starts:
            new += next_points(ranked(rows, start.stage), part.count)
    return rows


def read_search(setup: Setup) -> tuple[list[Point], dict]:
    """Returns the best settings of each script, 00's first, and the target and the length of
    runs to it, as fields of Plan. Raises UserError where there is no whole search, or one
    that was measured in another way, OSError."""
    path = journal_of(setup.results, "search")
    by_kind = {part.kind: part for part in newest(read_journal(path))}
    last = by_kind.get("epoch")
    if not last or last.jobs_left() or rows_of(last)[0].error:
        raise UserError("there is no whole search: python measure.py search, or search --resume")
    rows = rows_of(last)
    different = last.differs_from(setup)
    if different:
        raise UserError(
            f"{relative(path)} was measured {different}: search again, or use another --results-dir"
        )
    points = [point_of(row) for row in rows if not row.error]
    targets = {TARGET: rows[0].lowest_val_loss}
    return points, dict(targets=targets, tokens=LIMIT * last.plan.tokens)


class Search(Study):
    """Tune batch size and learning rate for the loss of one epoch.

    By halving: eight settings of 00, 01 and each variant train for a part of an epoch of the
    text, or of --max-tokens, and the best to its end. The lowest validation loss of 00 there is
    the target of time-to-loss --epoch. It takes hours on a CPU."""

    rounds = {"cuda": 1, "cpu": 1}
    tokens = None

    def options(self, parser):
        parser.add_argument(
            "--names",
            metavar="A,B+C",
            help="variants to search for besides; + joins several into one script",
        )
        parser.add_argument("--epoch", action="store_true", help=SUPPRESS)  # what it always is

    def has_failed(self, measured):
        return False  # settings with which training fails are part of a search

    def stages(self, setup: Setup) -> tuple[str, ...]:
        """Returns 00, 01 and the variants asked for. Raises UserError for wrong ones."""
        names = filter(None, map(str.strip, (setup.args.names or "").split(",")))
        stages = tuple(dict.fromkeys(["00", "01", *names]))
        for stage in stages:
            error = setup.scripts.find(stage, setup.machine).error
            if error:
                raise UserError(f"{stage}: {error}")
        return stages

    def plans(self, setup):
        stages = self.stages(setup)
        first, *others = HALVING[setup.device]
        rows = yield from explore(setup, stages, first)
        for part in others:
            best = [point for stage in stages for point in ranked(rows, stage)[: part.count]]
            measured = yield plan_of_part(part, best, setup)
            rows = rows_of(measured)

    def later(self, setup, plan):
        """Returns a plan of one run, at the default settings, for each that is left to try of a
        script, in this part and those after it."""
        parts = HALVING[setup.device]
        kinds = [part.kind for part in parts]
        now, *after = parts[kinds.index(plan.kind) :]
        tried = Counter(run.facts["stage"] for run in plan.runs)
        plans = []
        for stage in self.stages(setup):
            default = default_point(setup)._replace(stage=stage)
            left = now.count - tried[stage]
            plans += [plan_of_part(now, [default], setup)] * left
            for part in after:
                plans += [plan_of_part(part, [default], setup)] * part.count
        return plans

    def tables(self, measured, rows):
        _, _, divisor = measured.kind.partition("-")
        share = f"1/{divisor}" if divisor else "All"
        caption = (
            f"{share} of an epoch. Loss in equal time: at the"
            " moment when the script's fastest setting had finished; the settings best"
            " in this column go on."
        )
        equal = Column("loss in equal time", lambda row: f"{loss_in_equal_time(row):.4f}")
        return [Table([RUN, SPEED, LOWEST_LOSS, equal], rows, caption)]

    def notes(self, measured, rows):
        notes = [machine_note(measured, rows), "Medians over the seeds; without compile time."]
        if measured.kind == "epoch":
            points = [point_of(row) for row in rows if not row.error]
            notes += [
                f"{point.stage}: --batch-size {point.batch} --learning-rate {point.rate:g}"
                for point in points
            ]
        return notes
