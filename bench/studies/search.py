"""The best batch size and learning rate of 00 and of 01."""

from bench.common import UserError
from bench.study import Study
from bench.tables import time_notes, time_tables
from bench.times import (
    MAX_TOKENS_HELP,
    TUNING_ROUNDS,
    TUNING_SEED,
    Point,
    cost,
    default_points,
    limit_of,
    plan_of,
    soonest,
    target_plan,
)


class Search(Study):
    """Finds 00's best learning rate, whose lowest validation loss is the target; then the batch
    size and learning rate with which 00, and 01, reach it soonest."""

    rounds = {"cuda": TUNING_ROUNDS, "cpu": TUNING_ROUNDS}
    tokens = seconds = None
    rounds_help = "how many seeds: 1, 2 and so on (default: {})"
    max_tokens_help = MAX_TOKENS_HELP
    failures_count = False  # settings with which training fails are part of a search

    def plans(self, setup):
        default, runs = default_points(setup), {}

        def climb(start: Point, neighbours, plan_of_runs, cost_of):
            """Yields plans until no neighbour is better; returns the rows. Runs that came before
            stay in the plan."""
            new = [start]
            while new:
                runs.update((point, point.run(setup)) for point in new)
                rows = yield plan_of_runs(list(runs.values()))
                costs = {point: cost_of(row) for point, row in zip(runs, rows, strict=True)
                         if point.stage == start.stage}
                new = [point for point in neighbours(min(costs, key=costs.get))
                       if point not in runs]
            return rows

        rows = yield from climb(default["00"], Point.other_rates,
                                lambda runs: target_plan(setup, runs),
                                lambda row: cost(row.lowest_val_loss))
        losses = {point: cost(row.lowest_val_loss) for point, row in zip(runs, rows, strict=True)}
        best, published = min(losses, key=losses.get), losses[default["00"]]
        tokens = limit_of(rows[0])
        print(f"targets: {published:.4f}, and {losses[best]:.4f} at learning rate {best.rate:g}",
              flush=True)
        runs.clear()
        for stage in ("00", "01"):
            # 00's best rate is a better start than the published one, for both.
            yield from climb(
                default[stage]._replace(rate=best.rate), Point.around,
                lambda runs: plan_of(setup, runs, "", tokens=tokens, first_seed=TUNING_SEED,
                                     cold_rounds=0, targets={"best": losses[best]}),
                lambda row: cost(row.seconds_to(losses[best])))

    def tables(self, measured, rows):
        return time_tables(rows, measured.plan.targets)

    def notes(self, measured, rows):
        return time_notes(measured, rows)

    def result(self, measured, rows):
        if measured.kind == "target":
            return ""
        points = {stage: soonest(rows, stage, measured.plan.targets["best"])
                  for stage in ("00", "01")}
        if None in points.values():
            raise UserError("the search didn't come to its end")
        return "".join(f"{stage}: --batch-size {point.batch} --learning-rate {point.rate:g}\n"
                       for stage, point in points.items())
