"""The search for the batch size and learning rate with which a script comes to a loss first.

Tokens per second alone can be bought with training that learns less from each token. So, as in
AlgoPerf and MLPerf Training, whole runs are compared by the time to a target that is fixed before
they start; time_to_loss.py has the targets.
"""

import math
from collections import Counter
from functools import partial
from typing import NamedTuple

from bench.analysis.rows import Row, rows_of
from bench.catalogue import EPOCHS, Run
from bench.common import UserError, relative
from bench.measure.journal import Measured, journal_of, newest, read_journal
from bench.measure.plan import Plan, Setup
from bench.measure.sizing import DEMO_TOKENS, configurations, tokens_per_epoch
from bench.report.notes import machine_note
from bench.report.tables import RUN, SPEED, Column, Table, fmt
from bench.studies import Study

# What chooses settings has this seed and those after; the reported times have plan.SEED and after.
TUNING: dict = dict(first_seed=1, cold_rounds=0)
RATES, SETTINGS = 4, 8  # how many are tried: of 00 for the target, then of each script
LIMIT = 3  # a run of this many times the tokens of 00's default run hasn't reached the target
# The search for the loss of an epoch, by halving: what share of it how many settings are tried for.
# An eighth of the book's would be 0.2 seconds on a GPU, seven steps, which tell nothing.
HALVING = {"cuda": {2: SETTINGS, 1: 1}, "cpu": {8: SETTINGS, 2: 2, 1: 1}}
EPOCH_LIMIT = 2  # epochs without the target
LOG_TOKENS = {"cuda": 40_960, "cpu": 4_096}  # from one log line to the next
EPOCH_LOG_TOKENS = {"cuda": 40_960, "cpu": 16_384}
LOWEST_LOSS = Column("lowest val loss", lambda row: row.error or fmt(row.lowest_val_loss, ".4f"))


class Point(NamedTuple):
    """A script with the settings that a search varies."""

    stage: str  # "00", "01", or variants of 01: "optimizer-muon+model-tied-head"
    batch: int
    rate: float

    def other_rates(self) -> list["Point"]:
        return [self._replace(rate=rate) for rate in (self.rate / 2, self.rate * 2)]

    def around(self) -> list["Point"]:
        """Returns half and twice the batch size, and half and twice the learning rate."""
        sizes = [self.batch // 2, self.batch * 2]
        return [*(self._replace(batch=size) for size in sizes if size), *self.other_rates()]

    def run(self, setup: Setup) -> Run:
        run = setup.scripts.find(self.stage, setup.machine)
        return run.replace(
            name=f"{run.name}-batch-{self.batch}-rate-{self.rate:g}", published=None,
            label=f"{run.label}, batch {self.batch}, rate {self.rate:g}", **self._asdict(),
            compared_to=None, options=(*run.options, "--batch-size", str(self.batch),
                                       "--learning-rate", f"{self.rate:g}"))


def point_of(row: Row) -> Point:
    return Point(row.run.stage, row.run.batch, row.run.rate)


def default_point(setup: Setup) -> Point:
    """Returns the published settings of 00, or what the options say."""
    run = setup.scripts.stage("00")
    config = configurations([run], setup)[run.name]
    size = config["batch_size"]
    return Point("00", setup.batches.get(str(size), size), config["learning_rate"])


def lowest_loss(row: Row) -> float:
    return row.lowest_val_loss or math.inf


def time_to(target: float, row: Row) -> tuple[float, float]:
    """Returns the seconds to a loss; the lowest loss decides among rows that never come to it."""
    return row.seconds_to(target) or math.inf, lowest_loss(row)


def loss_in_equal_time(row: Row) -> float:
    """Returns the loss after as many seconds as the fastest settings of the row's script took for
    all of their tokens."""
    alike = [other for other in row.rows.values() if other.run.stage == row.run.stage]
    seconds = min((record.train_seconds for other in alike for record in other.records), default=0)
    return math.inf if row.error else row.loss_at(seconds) or math.inf


def ranked(rows: list[Row], stage: str, cost) -> list[Row]:
    """Returns the rows of a script, that of the least cost first; those that failed are last."""
    return sorted((row for row in rows if row.run.stage == stage),
                  key=lambda row: (row.error is not None, cost(row)))


def read_search(setup: Setup) -> tuple[list[Point], dict]:
    """Returns the best settings of each script, 00's first, and the targets and the length of runs
    to them, as fields of Plan; nothing where there is no search, or it isn't at its end. With
    --epoch it is the search for that. Raises UserError where one was measured in another way,
    OSError."""
    path, epoch = journal_of(setup.results, "search"), setup.args.epoch
    by_kind = {measured.kind: measured for measured in newest(read_journal(path))}
    last, first = by_kind.get("epoch" if epoch else ""), by_kind.get("epoch" if epoch else "target")
    best = best_rows(last) if last and first else []
    if not best:
        return [], {}
    different = last.differs_from(setup)
    if not epoch and setup.args.max_tokens not in (None, first.plan.tokens):
        different = "with other --max-tokens"
    if different:
        raise UserError(f"{relative(path)} was measured {different}: search again, or use another"
                        " --results-dir")
    targets = {"epoch" if epoch else "published": lowest_loss(rows_of(first)[0])}
    length = dict(targets=targets | last.plan.targets,
                  tokens=EPOCH_LIMIT * last.plan.tokens if epoch else last.plan.tokens)
    return [point_of(row) for row in best], length


def best_rows(last: Measured) -> list[Row]:
    """Returns the best row of each script in the last phase of a search, 00's first; none before
    the search is at its end."""
    rows, targets = rows_of(last), last.plan.targets
    tried = Counter(row.run.stage for row in rows)
    cost, tries = partial(time_to, targets.get("best", 0)), SETTINGS if targets else 1
    best = [ranked(rows, stage, cost)[0] for stage in tried]
    all_tried = len(tried) > 1 and min(tried.values()) >= tries and last.is_finished
    if not all_tried or best[0].error:
        print("the search isn't finished; `search --resume` continues it")
        return []
    return [row for row in best if not row.error]


def limit_of(row: Row) -> int:
    """Returns the tokens after which a run is ended, by the row of 00's default run. Raises
    UserError where that came to no end."""
    if not row.record or row.lowest_val_loss is None:
        raise UserError(f"00's default run didn't finish, so there is no target: {row.error}")
    return LIMIT * row.record.logs[-1]["tokens"]


class Phase(NamedTuple):
    """A part of a search: the plans of one kind."""

    kind: str
    tokens: int  # of a run, about
    stages: tuple[str, ...]  # the scripts
    tries: int  # settings of each
    rounds: int | None = 1


def phases_of(setup: Setup, stages: tuple[str, ...]) -> list[Phase]:
    tokens, epoch = setup.args.max_tokens, tokens_per_epoch(setup.data)
    if setup.args.epoch:
        return [Phase(f"epoch-{share}" if share > 1 else "epoch", (tokens or epoch) // share,
                      stages, count) for share, count in HALVING[setup.device].items()]
    tokens = tokens or (EPOCHS * epoch if setup.machine["gpus"] else DEMO_TOKENS)
    # The target is of one seed, so that more seeds can be added to a search later on.
    return [Phase("target", tokens, ("00",), RATES),
            Phase("", LIMIT * tokens, stages, SETTINGS, rounds=None)]


def plan_of(setup: Setup, runs: list[Run], kind: str, **settings) -> Plan:
    """Returns a plan of whole runs with a new seed in each round."""
    log_tokens = (EPOCH_LOG_TOKENS if kind.startswith("epoch") else LOG_TOKENS)[setup.device]
    return Plan(runs, kind, full_length=True, new_seeds=True, log_tokens=log_tokens, **settings)


def explore(setup: Setup, phase: Phase, start: Point, cost, neighbours=Point.around, **settings):
    """Yields plans until as many settings of each script were tried as the phase says: from `start`
    on, those around the ones of the least cost. Returns the rows. 00 goes first: its best settings
    are a better start for the others than the published ones."""
    runs: dict[Point, Run] = {}
    for stages in phase.stages[:1], phase.stages[1:]:
        new = [start._replace(stage=stage) for stage in stages]
        while new:
            runs |= {point: point.run(setup) for point in new}
            rows = rows_of((yield plan_of(setup, [*runs.values()], phase.kind,
                                          rounds=phase.rounds, **TUNING, **settings)))
            new = [point for stage in stages for point in next_points(
                [point_of(row) for row in ranked(rows, stage, cost)], neighbours, phase.tries)]
        start = point_of(ranked(rows, "00", cost)[0])
    return rows


def next_points(tried: list[Point], neighbours, count: int) -> list[Point]:
    """Returns the untried neighbours of the best settings that have some, up to `count` settings in
    all; of those tried the best are the first."""
    for point in tried:
        if new := [other for other in neighbours(point) if other not in tried]:
            return new[:count - len(tried)]
    return []


class Search(Study):
    """Tune batch size and learning rate for the time to a loss.

    First it finds 00's best learning rate, whose lowest validation loss is the target (--max-tokens
    is the length of these runs); then the batch size and learning rate with which 00, 01 and
    variants reach it soonest, by trying equally many of each. Each round has a new seed."""

    rounds = {"cuda": 2, "cpu": 2}
    tokens = None

    def options(self, parser):
        parser.add_argument("--names", metavar="A,B+C", help="variants to search for besides; +"
                                                             " joins several into one script")
        parser.add_argument("--epoch", action="store_true",
                            help="for the loss that 00 has after an epoch of the text, at its best"
                                 " settings for that, by halving: hours on a CPU")

    def failed(self, measured):
        return False  # settings with which training fails are part of a search

    def stages(self, setup: Setup) -> tuple[str, ...]:
        """Returns 00, 01 and the variants that are asked for. Raises UserError for wrong ones."""
        names = filter(None, map(str.strip, (setup.args.names or "").split(",")))
        runs = [setup.scripts.find(name, setup.machine).replace(stage=name)
                for name in ("00", "01", *names)]
        for run in runs:
            if run.error:
                raise UserError(f"{run.stage}: {run.error}")
        return tuple(dict.fromkeys(run.stage for run in runs))

    def plans(self, setup):
        start, (first, *others) = default_point(setup), phases_of(setup, self.stages(setup))
        if not setup.args.epoch:
            rows = yield from explore(setup, first, start, lowest_loss, Point.other_rates,
                                      tokens=setup.args.max_tokens)
            limit, best = limit_of(rows[0]), ranked(rows, "00", lowest_loss)[0]
            target = lowest_loss(best)
            yield from explore(setup, others[0], point_of(best), partial(time_to, target),
                               tokens=limit, targets={"best": target})
            return
        rows = yield from explore(setup, first, start, loss_in_equal_time, tokens=first.tokens)
        for phase in others:
            runs = [point_of(row).run(setup) for stage in phase.stages
                    for row in ranked(rows, stage, loss_in_equal_time)[:phase.tries]]
            rows = rows_of((yield plan_of(setup, runs, phase.kind, rounds=phase.rounds,
                                          tokens=phase.tokens, **TUNING)))

    def later(self, setup, plan):
        """Returns for each script, in this phase and those after it, one run like its first, and
        how many settings are left to try."""
        phases, start = phases_of(setup, self.stages(setup)), default_point(setup)
        tried = Counter((plan.kind, run.stage) for run in plan.runs)
        place, plans = [phase.kind for phase in phases].index(plan.kind), []
        for phase in phases[place:]:
            for stage in phase.stages:
                run = start._replace(stage=stage).run(setup)
                first = plan_of(setup, [run], phase.kind, tokens=phase.tokens, rounds=phase.rounds)
                plans.append((first, phase.tries - tried[phase.kind, stage]))
        return [(first, left) for first, left in plans if left > 0]

    def tables(self, measured, rows):
        columns = [RUN, SPEED, LOWEST_LOSS]
        kind, _, share = measured.kind.partition("-")
        if kind != "epoch":
            columns += [Column(f"seconds to {target:.4f}", partial(seconds_to, target))
                        for target in measured.plan.targets.values()]
            return [Table(columns, rows)]
        columns.append(Column("loss in equal time", lambda row: f"{loss_in_equal_time(row):.4f}"))
        share = f"1/{share}" if share else "All"
        return [Table(columns, rows, f"{share} of an epoch. Loss in equal time: at the moment when"
                                     " the script's fastest setting had finished; the settings best"
                                     " in this column go on.")]

    def notes(self, measured, rows):
        notes = [machine_note(measured, rows), "Medians over the seeds; without compile time."]
        if measured.kind in ("", "epoch"):
            notes += [f"{row.run.stage}: --batch-size {row.run.batch} --learning-rate"
                      f" {row.run.rate:g}" for row in best_rows(measured)]
        return notes

    def excerpts(self, measured, rows):
        """Returns the best settings, and how much each of the two matters."""
        if measured.kind:
            return super().excerpts(measured, rows)
        target, by_point = measured.plan.targets["best"], {point_of(row): row for row in rows}

        def neighbour(name: str, factor: float, row: Row) -> str:
            point = point_of(row)._replace(**{name: getattr(row.run, name) * factor})
            return seconds_to(target, by_point[point]) if point in by_point else ""

        return {"search": [Table([
            Column("script", lambda row: f"`{row.run.stage}`", True),
            Column("batch", lambda row: str(row.run.batch)),
            Column("learning rate", lambda row: f"{row.run.rate:g}"),
            Column("seconds", partial(seconds_to, target)),
            *(Column(f"{name} × {factor:g}", partial(neighbour, name, factor))
              for name in ("batch", "rate") for factor in (0.5, 2))], best_rows(measured),
            f"Seconds of training, without compile time, to a validation loss of {target:.4f}: at"
            " the best settings found, and with one of them doubled or halved:")]}


def seconds_to(target: float, row: Row) -> str:
    return fmt(row.seconds_to(target), ".1f") or "not reached"
