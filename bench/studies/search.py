"""The best batch size and learning rate of 00, of 01, and of variants."""

from functools import partial

from bench.catalogue import Run
from bench.common import UserError
from bench.judge.rows import rows_of
from bench.measure.lengths import tokens_per_epoch
from bench.measure.plan import Setup
from bench.report.tables import Column, Table, cell
from bench.studies import Study
from bench.studies.times import (
    EPOCH_HELP,
    HALVING,
    MAX_TOKENS_HELP,
    RATES,
    SETTINGS,
    TUNING_ROUNDS,
    TUNING_SEED,
    Point,
    costs_of,
    default_point,
    limit_of,
    losses_in_time,
    plan_of,
    point_of,
    read_search,
    soonest,
    time_notes,
    time_tables,
)


def next_points(costs: dict[Point, tuple], neighbours, count: int) -> list[Point]:
    """What to try after these, of `count` in all: around the best that has untried neighbours."""
    for best in sorted(costs, key=costs.get):
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
        rows = rows_of((yield plan_of(setup, list(runs.values()), first_seed=TUNING_SEED,
                                      cold_rounds=0, **settings)))
        new = [point for start in starts for point in next_points(
            costs(rows, start.stage), neighbours, count)]
    return rows


def in_one_epoch(setup: Setup, start: Point, scripts: tuple[str, ...]):
    """Yields plans by which each script has the same chance: settings around its best ones for an
    eighth of an epoch, the best of them for a half, the best of those for all of it. What 00 comes
    to there is the target. They begin where an earlier search for the early target ended."""
    early = read_search(setup)
    starts = early.points if early else {}
    epoch = setup.args.max_tokens or tokens_per_epoch(setup.data)
    runs: dict[Point, Run] = {}
    settings = dict(kind=f"epoch-{max(HALVING)}", rounds=1, tokens=epoch // max(HALVING))
    count, *later = HALVING.values()
    rows = yield from tried_around(setup, runs, [starts.get("00", start)], Point.around, count,
                                   losses_in_time, **settings)
    costs = losses_in_time(rows, "00")
    best = min(costs, key=costs.get)
    rows = yield from tried_around(
        setup, runs, [starts.get(name, best._replace(stage=name)) for name in scripts],
        Point.around, count, losses_in_time, **settings)
    for share, count in zip([*HALVING][1:], later, strict=True):
        chosen = []
        for stage in ("00", *scripts):
            costs = losses_in_time(rows, stage)
            chosen += sorted(costs, key=costs.get)[:count]
        rows = rows_of((yield plan_of(
            setup, [point.run(setup) for point in chosen], f"epoch-{share}" if share > 1 else
            "epoch", first_seed=TUNING_SEED, cold_rounds=0, rounds=1, tokens=epoch // share)))


class Search(Study):
    """Finds 00's best learning rate, whose lowest validation loss is the target; then the batch
    size and learning rate with which 00, 01 and variants reach it soonest, each by trying equally
    many settings."""

    rounds = {"cuda": TUNING_ROUNDS, "cpu": TUNING_ROUNDS}
    tokens = seconds = None
    rounds_help = "how many seeds: 1, 2 and so on (default: {}); the first sets the target"
    max_tokens_help = MAX_TOKENS_HELP
    failures_count = False  # settings with which training fails are part of a search

    def options(self, parser):
        parser.add_argument("--names", metavar="A,B+C",
                            help="variants to search for besides; + joins several into one script")
        parser.add_argument("--epoch", action="store_true", help=EPOCH_HELP + ", by halving")

    def plans(self, setup):
        names = [name.strip() for name in (setup.args.names or "").split(",") if name.strip()]
        for name in names:  # wrong ones are told before anything runs
            if error := setup.scripts.find(name, setup.machine).error:
                raise UserError(f"{name}: {error}")
        start, scripts = default_point(setup), ("01", *names)
        if setup.args.epoch:
            yield from in_one_epoch(setup, start, scripts)
            return
        runs: dict[Point, Run] = {}
        explore = partial(tried_around, setup, runs)
        # The target is of one seed, so that more seeds can be added to a search later on.
        rows = yield from explore([start], Point.other_rates, RATES, costs_of, kind="target",
                                  rounds=1, tokens=setup.args.max_tokens)
        losses = costs_of(rows, "00")
        best = min(losses, key=losses.get)
        target, settings = losses[best][1], dict(kind="", tokens=limit_of(rows[0]))
        settings["targets"] = {"best": target}
        print(f"targets: {losses[start][1]:.4f}, and {target:.4f} at learning rate {best.rate:g}",
              flush=True)
        runs.clear()
        soonest_to = partial(costs_of, target=target)
        # The best settings of 00 are a better start than the published ones, for all.
        rows = yield from explore([best], Point.around, SETTINGS, soonest_to, **settings)
        costs = soonest_to(rows, "00")
        best = min(costs, key=costs.get)
        yield from explore([best._replace(stage=name) for name in scripts],
                           Point.around, SETTINGS, soonest_to, **settings)

    def tables(self, measured, rows):
        return time_tables(rows, measured.plan.targets)

    def excerpts(self, measured, rows):
        """What was found, and how much each setting matters."""
        if measured.kind:
            return None
        target = measured.plan.targets["best"]
        costs = {point_of(row): row.seconds_to(target) for row in rows}

        def at(name: str, factor: float) -> Column:
            def seconds(point: Point) -> str:
                other = point._replace(**{name: getattr(point, name) * factor})
                return cell(costs[other], ".1f") or "not reached" if other in costs else ""

            return Column(f"{name} × {factor:g}", seconds)

        return {"search": [Table([
            Column("script", lambda point: f"`{point.stage}`", True),
            Column("batch", lambda point: str(point.batch)),
            Column("learning rate", lambda point: f"{point.rate:g}"),
            Column("seconds", lambda point: cell(costs[point], ".1f")),
            at("batch", 0.5), at("batch", 2), at("rate", 0.5), at("rate", 2)],
            list(soonest(measured, target).values()),
            f"Seconds to a validation loss of {target:.4f} at the best settings found, and with one"
            " of them changed:")]}

    def notes(self, measured, rows):
        return time_notes(measured, rows)

    def result(self, measured, rows):
        if measured.kind == "epoch":
            return f"the target: {rows[0].lowest_val_loss:.4f}\n"
        if measured.kind:
            return ""
        points = soonest(measured, measured.plan.targets["best"])
        if not points:
            raise UserError("the search isn't finished")
        target = measured.plan.targets["best"]
        reached = {point_of(row) for row in rows if row.seconds_to(target)}
        return "".join(f"{stage}: --batch-size {point.batch} --learning-rate {point.rate:g}"
                       + ", the nearest to the target" * (point not in reached) + "\n"
                       for stage, point in points.items())
