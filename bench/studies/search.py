"""Time to a loss: the best batch size and learning rate of 00, of 01, and of variants for it.

Tokens per second alone can be bought with training that learns less from each token. So, as in
AlgoPerf and MLPerf Training, whole runs are compared by the time to a target that is fixed before
they start: the lowest validation loss of 00 in its default run ("published"), that at the best
learning rate ("best"), and that of one epoch at the best settings for it ("epoch").
"""

from collections import Counter
from functools import partial
from typing import NamedTuple

from bench.analysis.rows import Row, rows_of
from bench.catalogue import EPOCHS, Run, without_doubles
from bench.common import UserError, relative
from bench.measure.journal import Measured, journal_of, newest, read_journal
from bench.measure.plan import Plan, Setup
from bench.measure.sizing import DEMO_TOKENS, configurations, tokens_per_epoch
from bench.report.tables import RUN, SPEED, Column, Table, fmt
from bench.studies import Study
from bench.studies.settings import (
    Point,
    costs_of,
    losses_in_time,
    point_of,
    time_notes,
    time_tables,
)

# What chooses settings has this seed and those after; the reported times have plan.SEED and after.
TUNING: dict = dict(first_seed=1, cold_rounds=0)
TUNING_ROUNDS = 2
RATES, SETTINGS = 4, 8  # how many are tried: of 00 for the target, then of each script
LIMIT = 3  # a run of this many times the tokens of 00's default run hasn't reached the target
# The search for the loss of an epoch, by halving: what share of it how many settings are tried for.
# An eighth of the book's would be 0.2 seconds on a GPU, seven steps, which tell nothing.
HALVING = {"cuda": {2: SETTINGS, 1: 1}, "cpu": {8: SETTINGS, 2: 2, 1: 1}}
EPOCH_LIMIT = 2  # epochs without the target
EPOCH_LOG_TOKENS = {"cuda": 40_960, "cpu": 16_384}
EPOCH_HELP = ("for the loss that 00 has after an epoch of the text, at its best settings for that:"
              " hours on a CPU")
LOG_TOKENS = {"cuda": 40_960, "cpu": 4_096}  # from one log line to the next
MAX_TOKENS_HELP = ("training tokens of the run that sets the target (default: 00's own length);"
                   f" the others have at most {LIMIT} times as many")


# ---- What was found ----------------------------------------------------------------------------


def epoch_table(kind: str, rows: list[Row]) -> Table:
    """Returns what the settings of a stage of the search for an epoch came to."""
    losses = {point: loss for stage in dict.fromkeys(row.run.stage for row in rows)
              for point, loss in losses_in_time(rows, stage).items()}
    share = kind.partition("-")[2]
    return Table([
        RUN, SPEED,
        Column("lowest val loss", lambda row: row.error or fmt(row.lowest_val_loss, ".4f")),
        Column("loss in equal time", lambda row: fmt(losses[point_of(row)], ".4f"))],
        rows, f"{f'1/{share}' if share else 'All'} of an epoch. Loss in equal time: at the moment"
        " when the script's fastest setting had finished; the settings best in this column go on.")


def default_point(setup: Setup) -> Point:
    """Returns the published settings of 00, or what the options say."""
    run = setup.scripts.stage("00")
    config = configurations([run], Plan([]), setup)[run.name]
    size = config["batch_size"]
    return Point("00", setup.batches.get(str(size), size), config["learning_rate"])


def plan_of(setup: Setup, runs: list[Run], kind: str, **settings) -> Plan:
    """Returns a plan of whole runs with a new seed in each round."""
    log_tokens = (EPOCH_LOG_TOKENS if kind.startswith("epoch") else LOG_TOKENS)[setup.device]
    return Plan(runs, kind, full_length=True, new_seeds=True, log_tokens=log_tokens, **settings)


def tokens_of_default(setup: Setup) -> int:
    """Returns about how many 00's default run trains."""
    return EPOCHS * tokens_per_epoch(setup.data) if setup.machine["gpus"] else DEMO_TOKENS


def tokens_of_epoch(setup: Setup) -> int:
    return setup.args.max_tokens or tokens_per_epoch(setup.data)


def limit_of(row: Row) -> int:
    """Returns the tokens after which a run is ended, by the row of 00's default run. Raises
    UserError where that came to no end."""
    if not row.record or row.lowest_val_loss is None:
        raise UserError(f"00's default run didn't finish, so there is no target: {row.error}")
    return LIMIT * row.record.logs[-1]["tokens"]


class Found(NamedTuple):
    """What a search has found."""

    targets: dict[str, float]
    points: dict[str, Point]  # at which each script reaches the second target soonest
    tokens: int  # after which a run is ended


def read_search(setup: Setup) -> Found | None:
    """Returns what a search has found; None where there is none, or it isn't at its end. With
    --epoch it is the one for that, which has to be there. Raises UserError where a search was
    measured in another way, OSError."""
    path = journal_of(setup.results, "search")
    by_kind = {measured.kind: measured for measured in newest(read_journal(path))}
    epoch = setup.args.epoch
    last = by_kind.get("epoch" if epoch else "")
    found = last and (of_epoch(last) if epoch else of_default(last, by_kind))
    if not found and epoch:
        raise UserError(f"{relative(path)} has no whole search for an epoch: python measure.py"
                        " search --epoch")
    if not found:
        return None
    different = last.differs_from(setup)
    if not epoch and setup.args.max_tokens not in (None, by_kind["target"].plan.tokens):
        different = "with other --max-tokens"
    if different:
        raise UserError(f"{relative(path)} was measured {different}: search again, or use another"
                        " --results-dir")
    return found


def of_epoch(last: Measured) -> Found | None:
    """Returns what came of the last stage of a search for an epoch."""
    rows = rows_of(last)
    if not last.is_finished or rows[0].run.stage != "00" or rows[0].lowest_val_loss is None:
        return None
    return Found({"epoch": rows[0].lowest_val_loss},
                 {row.run.stage: point_of(row) for row in rows if not row.error},
                 EPOCH_LIMIT * last.plan.tokens)


def of_default(last: Measured, by_kind: dict[str, Measured]) -> Found | None:
    """Returns what came of a search for the loss of 00's default run, if it is at its end, and of
    the target that is the newest."""
    if "target" not in by_kind or last.time < by_kind["target"].time:
        return None
    rows, best = rows_of(by_kind["target"]), last.plan.targets["best"]
    points = soonest(last, best)
    if not points or best != next(iter(costs_of(rows, "00").values()))[1]:
        print("the search isn't finished; `search --resume` continues it")
        return None
    return Found({"published": rows[0].lowest_val_loss, "best": best}, points, limit_of(rows[0]))


def soonest(measured, target: float) -> dict[str, Point]:
    """Returns the settings with which each script reaches the target first; none as long as the
    search continues."""
    points, rows = {}, rows_of(measured)
    ran = [row for row in rows if row.error or row.rounds == measured.plan.rounds]
    for stage in dict.fromkeys(row.run.stage for row in rows):
        costs = costs_of(ran, stage, target)
        if len(costs) < SETTINGS:
            return {}
        points[stage] = next(iter(costs))
    return points if len(points) > 1 else {}


# ---- To search ---------------------------------------------------------------------------------


def next_points(costs: dict[Point, tuple], neighbours, count: int) -> list[Point]:
    """Returns what to try next, of `count` in all: around the best with untried neighbours."""
    for best in costs:
        if new := [point for point in neighbours(best) if point not in costs]:
            return new[:count - len(costs)]
    return []


def tried_around(setup: Setup, runs: dict[Point, Run], starts: list[Point], neighbours,
                 count: int, costs, **settings):
    """Yields plans until `count` settings of each script were tried: those around its best ones, by
    their `costs`. Returns the rows. `runs` that came before stay in the plan."""
    new = starts
    while new:
        runs.update((point, point.run(setup)) for point in new)
        rows = rows_of((yield plan_of(setup, list(runs.values()), **TUNING, **settings)))
        new = [point for start in starts for point in next_points(
            costs(rows, start.stage), neighbours, count)]
    return rows


def in_one_epoch(setup: Setup, start: Point, scripts: tuple[str, ...]):
    """Yields plans by which each script has the same chance: settings around its best ones for a
    share of an epoch, the best of them for a larger one, the best of those for all of it. What 00
    comes to there is the target."""
    epoch = tokens_of_epoch(setup)
    runs: dict[Point, Run] = {}
    (first, count), *later = HALVING[setup.device].items()

    def explore(starts: list[Point]):
        return tried_around(setup, runs, starts, Point.around, count, losses_in_time,
                            kind=f"epoch-{first}", rounds=1, tokens=epoch // first)

    rows = yield from explore([start])
    best = next(iter(losses_in_time(rows, "00")))
    rows = yield from explore([best._replace(stage=name) for name in scripts])
    for share, count in later:
        chosen = [point for stage in ("00", *scripts)
                  for point in [*losses_in_time(rows, stage)][:count]]
        rows = rows_of((yield plan_of(
            setup, [point.run(setup) for point in chosen], f"epoch-{share}" if share > 1 else
            "epoch", **TUNING, rounds=1, tokens=epoch // share)))


class Search(Study):
    """Tune batch size and learning rate for the time to a loss.

    First it finds 00's best learning rate, whose lowest validation loss is the target; then the
    batch size and learning rate with which 00, 01 and variants reach it soonest, by trying equally
    many settings of each."""

    rounds = {"cuda": TUNING_ROUNDS, "cpu": TUNING_ROUNDS}
    tokens, has_seconds = None, False
    rounds_help = "how many seeds: 1, 2 and so on (default: {}); the first sets the target"
    max_tokens_help = MAX_TOKENS_HELP
    names_help = "variants to search for besides; + joins several into one script"
    failures_count = False  # settings with which training fails are part of a search

    def options(self, parser):
        super().options(parser)
        parser.add_argument("--epoch", action="store_true", help=EPOCH_HELP + ", by halving")

    def scripts(self, setup: Setup) -> tuple[str, ...]:
        """Returns 01 and the variants that are asked for. Raises UserError for wrong ones."""
        names = filter(None, map(str.strip, (setup.args.names or "").split(",")))
        runs = [setup.scripts.find(name, setup.machine).replace(stage=name)
                for name in ("00", "01", *names)]
        for run in runs:
            if run.error:
                raise UserError(f"{run.stage}: {run.error}")
        return tuple(run.stage for run in without_doubles(runs)[1:])

    def plans(self, setup):
        start, scripts = default_point(setup), self.scripts(setup)
        if setup.args.epoch:
            yield from in_one_epoch(setup, start, scripts)
            return
        runs: dict[Point, Run] = {}
        explore = partial(tried_around, setup, runs)
        # The target is of one seed, so that more seeds can be added to a search later on.
        rows = yield from explore([start], Point.other_rates, RATES, costs_of, kind="target",
                                  rounds=1, tokens=setup.args.max_tokens)
        losses = costs_of(rows, "00")
        best, (_, target) = next(iter(losses.items()))
        settings = dict(kind="", tokens=limit_of(rows[0]), targets={"best": target})
        print(f"targets: {losses[start][1]:.4f}, and {target:.4f} at learning rate {best.rate:g}",
              flush=True)
        runs.clear()
        soonest_to = partial(costs_of, target=target)
        # The best settings of 00 are a better start than the published ones, for all.
        rows = yield from explore([best], Point.around, SETTINGS, soonest_to, **settings)
        best = next(iter(soonest_to(rows, "00")))
        yield from explore([best._replace(stage=name) for name in scripts],
                           Point.around, SETTINGS, soonest_to, **settings)

    def later(self, setup, plan):
        """Returns for each script and length one run like its first, and how many settings are
        left to try."""
        stages, tried = ("00", *self.scripts(setup)), Counter(run.stage for run in plan.runs)
        left: list[tuple] = []  # (stage, settings, tokens, rounds)
        if setup.args.epoch:
            epoch, shares = tokens_of_epoch(setup), HALVING[setup.device]
            share = next(share for share in shares if epoch // share == plan.tokens)
            left = [(stage, shares[share] - tried[stage], plan.tokens, 1) for stage in stages]
            left += [(stage, count, epoch // smaller, 1) for smaller, count in shares.items()
                     if smaller < share for stage in stages]
        elif plan.kind == "target":
            tokens = plan.tokens or tokens_of_default(setup)
            left = [("00", RATES - tried["00"], tokens, 1),
                    *((stage, SETTINGS, LIMIT * tokens, None) for stage in stages)]
        else:
            left = [(stage, SETTINGS - tried[stage], plan.tokens, None) for stage in stages]
        start = default_point(setup)
        return [(plan_of(setup, [start._replace(stage=stage).run(setup)], plan.kind, tokens=tokens,
                         rounds=rounds), count)
                for stage, count, tokens, rounds in left if count > 0]

    def tables(self, measured, rows):
        if measured.kind.startswith("epoch"):
            return [epoch_table(measured.kind, rows)]
        return time_tables(rows, measured.plan.targets)

    def excerpts(self, measured, rows):
        """Returns what was found, and how much each setting matters."""
        if measured.kind:
            return None
        target = measured.plan.targets["best"]
        costs = {point_of(row): row.seconds_to(target) for row in rows}

        def at(name: str, factor: float) -> Column:
            def seconds(point: Point) -> str:
                other = point._replace(**{name: getattr(point, name) * factor})
                return fmt(costs[other], ".1f") or "not reached" if other in costs else ""

            return Column(f"{name} × {factor:g}", seconds)

        return {"search": [Table([
            Column("script", lambda point: f"`{point.stage}`", True),
            Column("batch", lambda point: str(point.batch)),
            Column("learning rate", lambda point: f"{point.rate:g}"),
            Column("seconds", lambda point: fmt(costs[point], ".1f")),
            at("batch", 0.5), at("batch", 2), at("rate", 0.5), at("rate", 2)],
            list(soonest(measured, target).values()),
            f"Seconds of training, without compile time, to a validation loss of {target:.4f}: at"
            " the best settings found, and with one of them doubled or halved:")]}

    def notes(self, measured, rows):
        return time_notes(measured, rows)

    def result(self, measured, rows):
        if measured.kind == "epoch":
            return f"the target: {rows[0].lowest_val_loss:.4f}\n"
        if measured.kind:
            return ""
        target = measured.plan.targets["best"]
        points = soonest(measured, target)
        if not points:
            raise UserError("the search isn't finished")
        missed = {point_of(row) for row in rows if not row.seconds_to(target)}
        return "".join(f"{stage}: --batch-size {point.batch} --learning-rate {point.rate:g}"
                       f"{', the nearest to the target' if point in missed else ''}\n"
                       for stage, point in points.items())
