"""Time to a loss, as `search` and `time-to-loss` measure it.

Tokens per second alone can be bought with training that learns less from each token. So, as in
AlgoPerf and MLPerf Training, whole runs are compared by the time to a target that is fixed before
they start: the lowest validation loss of 00 in its default run ("published"), that at the best
learning rate ("best"), and that of one epoch at the best settings for it ("epoch").
"""

import math
from typing import NamedTuple

from bench.catalogue import Run
from bench.common import UserError, relative
from bench.judge.noise import ROUNDS_FOR_A_VERDICT
from bench.judge.rows import Row, difference, rate_to, rows_of
from bench.measure.journal import journal_of, newest, read_journal
from bench.measure.lengths import configurations, fitting
from bench.measure.plan import Plan, Setup
from bench.report.notes import machine_note
from bench.report.tables import RUN, SPEED, Column, Table, bold, cell, number, spread, words

TUNING_SEED = 1  # and those after it; the reported times use study.SEED and those after
TUNING_ROUNDS = 2
RATES, SETTINGS = 4, 8  # how many are tried: of 00 for the target, then of each script
LIMIT = 3  # a run of this many times the tokens of 00's default run hasn't reached the target
# The search for the loss of an epoch, by halving: what share of it how many settings are tried for.
HALVING = {8: SETTINGS, 2: 2, 1: 1}
EPOCH_LIMIT = 2  # epochs without the target
EPOCH_LOG_TOKENS = {"cuda": 40_960, "cpu": 16_384}
EPOCH_HELP = ("for the loss that 00 has after an epoch of the text, at its best settings for that:"
              " hours on a CPU")
LOG_TOKENS = {"cuda": 40_960, "cpu": 4_096}  # from one log line to the next
TARGETS = {  # what they are
    "published": "the lowest validation loss of 00 in its default run",
    "best": "the lowest validation loss of 00 at its best learning rate",
    "epoch": "the lowest validation loss of 00 in one epoch of the text, at its best settings",
}
MAX_TOKENS_HELP = ("training tokens of the run that sets the target (default: 00's own length);"
                   f" the others have at most {LIMIT} times as many")


class Point(NamedTuple):
    """The settings that a search varies."""

    stage: str  # "00", "01", or variants of 01: "optimizer-muon+model-tied-head"
    batch: int
    rate: float

    def around(self) -> list["Point"]:
        """Half and twice the batch size, and half and twice the learning rate."""
        batches = [size for size in (self.batch // 2, self.batch * 2) if size]
        return [*(self._replace(batch=size) for size in batches), *self.other_rates()]

    def other_rates(self) -> list["Point"]:
        return [self._replace(rate=rate) for rate in (self.rate / 2, self.rate * 2)]

    def run(self, setup: Setup) -> Run:
        """The script with these settings."""
        found = setup.scripts.find(self.stage, setup.machine)
        return found.but(
            name=f"{found.name}-batch-{self.batch}-rate-{self.rate:g}", published=None,
            label=f"{found.label}, batch {self.batch}, rate {self.rate:g}", **self._asdict(),
            compared_to=None, options=(*found.options, "--batch-size", str(self.batch),
                                       "--learning-rate", f"{self.rate:g}"))


def point_of(row: Row) -> Point:
    return Point(*(getattr(row.run, name) for name in Point._fields))


def costs_of(rows: list[Row], stage: str, target: float = -math.inf,
             ) -> dict[Point, tuple[float, float]]:
    """A script's settings, each with the seconds to a loss of `target` and the lowest loss. The
    best ones are the lowest: what never comes to the target is judged by its loss."""
    return {point_of(row): (math.inf, math.inf) if row.error else (
                row.seconds_to(target) or math.inf, row.lowest_val_loss or math.inf)
            for row in rows if row.run.stage == stage}


def losses_in_time(rows: list[Row], stage: str) -> dict[Point, tuple[float]]:
    """A script's settings, each with the loss after as many seconds as the fastest of them took for
    all of its tokens."""
    rows = [row for row in rows if row.run.stage == stage]
    seconds = min((record.train_seconds for row in rows for record in row.records), default=0)
    losses = {point_of(row): None if row.error else row.loss_at(seconds) for row in rows}
    return {point: (math.inf if loss is None else loss,) for point, loss in losses.items()}


def default_point(setup: Setup) -> Point:
    """The published settings of 00, or what the options say."""
    run = setup.scripts.stage("00")
    config = configurations([run], Plan([]), setup)[run.name]
    size = config["batch_size"]
    return Point("00", fitting(setup).get(str(size), size), config["learning_rate"])


def plan_of(setup: Setup, runs: list[Run], kind: str, **settings) -> Plan:
    """Whole runs with a new seed in each round."""
    log_tokens = (EPOCH_LOG_TOKENS if kind.startswith("epoch") else LOG_TOKENS)[setup.device]
    return Plan(runs, kind, whole=True, new_seeds=True, log_tokens=log_tokens, **settings)


def limit_of(row: Row) -> int:
    """The tokens after which a run is ended, by the row of 00's default run. Raises UserError where
    that came to no end."""
    if not row.record or row.lowest_val_loss is None:
        raise UserError(f"00's default run didn't finish, so there is no target: {row.error}")
    return LIMIT * row.record.logs[-1]["tokens"]


class Search(NamedTuple):
    """What a search has found."""

    targets: dict[str, float]
    points: dict[str, Point]  # at which each script reaches the second target soonest
    tokens: int  # after which a run is ended


def read_search_of_epoch(setup: Setup) -> Search:
    """What a search for the loss of an epoch has found. Raises UserError where there is none, or it
    was measured in another way, OSError."""
    path = journal_of(setup.results, "search")
    found = [each for each in newest(read_journal(path)) if each.kind == "epoch"]
    rows = rows_of(found[0]) if found and found[0].is_finished else []
    if not rows or rows[0].run.stage != "00" or rows[0].lowest_val_loss is None:
        raise UserError(f"{relative(path)} has no whole search for an epoch: python measure.py"
                        " search --epoch")
    if different := found[0].differs_from(setup):
        raise UserError(f"{relative(path)} was measured {different}: search again, or use another"
                        " --results-dir")
    return Search({"epoch": rows[0].lowest_val_loss},
                  {row.run.stage: point_of(row) for row in rows if not row.error},
                  EPOCH_LIMIT * found[0].plan.tokens)


def read_search(setup: Setup) -> Search | None:
    """What a search has found, if it came to its end. Raises UserError where it was measured in
    another way, OSError."""
    path = journal_of(setup.results, "search")
    found = {each.kind: each for each in newest(read_journal(path))}
    if not {"target", ""} <= found.keys() or found[""].time < found["target"].time:
        return None
    rows, best = rows_of(found["target"]), found[""].plan.targets["best"]
    points = soonest(found[""], best)
    if not points or best != min(costs_of(rows, "00").values())[1]:
        print(f"{relative(path)}: the search isn't finished; --resume continues it")
        return None
    different = found[""].differs_from(setup)
    if setup.args.max_tokens not in (None, found["target"].plan.tokens) and not setup.args.epoch:
        different = "with other --max-tokens"
    if different:
        raise UserError(f"{relative(path)} was measured {different}: search again, or use another"
                        " --results-dir")
    return Search({"published": rows[0].lowest_val_loss, "best": best}, points, limit_of(rows[0]))


def soonest(measured, target: float) -> dict[str, Point]:
    """The settings with which each script reaches the target first; none as long as the search
    continues."""
    points, rows = {}, rows_of(measured)
    ran = [row for row in rows if row.error or row.rounds == measured.plan.rounds]
    for stage in dict.fromkeys(row.run.stage for row in rows):
        costs = costs_of(ran, stage, target)
        if len(costs) < SETTINGS:
            return {}
        points[stage] = min(costs, key=costs.get)  # of equals the one that was measured first
    return points if len(points) > 1 else {}


# ---- What is shown -----------------------------------------------------------------------------


def time_tables(rows: list[Row], targets: dict[str, float]) -> list[Table]:
    """How long each run took to each target; without targets, what the runs set as one."""
    if not targets:
        def lowest(row: Row) -> str:
            return row.error or cell(row.lowest_val_loss, ".4f") or "n/a"

        return [Table([RUN, Column("lowest val loss", lowest), SPEED], rows)]
    return [Table(time_columns(target), rows, f"Target {target:.4f}, {TARGETS[name]}:",
                  every_column=True)
            for name, target in targets.items()]


def time_columns(target: float) -> list[Column]:
    """The main factor counts compilation, as who waits for it does."""
    def seconds(row: Row) -> str:
        return row.error or cell(row.seconds_to(target, True), ",.1f") or "not reached"

    def spread_of(row: Row) -> str:
        times = [seconds for _, seconds in row.times_to(target, True)]
        low, high = min(times, default=math.inf), max(times, default=math.inf)
        if len(times) < 2 or low == math.inf:
            return ""
        return f"{low:,.1f}–" + ("not reached" if high == math.inf else f"{high:,.1f}")

    def factor(with_first_step: bool):
        rate = rate_to(target, with_first_step)
        return lambda row: bold(cell(row.factor_of(rate, row.versus), ".2f"), row.verdict_on(rate))

    return [
        RUN, SPEED, number("× tok/sec", "factor", ".2f"),
        Column("tokens", lambda row: cell(row.tokens_to(target), ",.0f")),
        Column("seconds", seconds), Column("range", spread_of), Column("× time", factor(True)),
        Column("95 %", lambda row: spread(list(row.interval(rate_to(target, True)) or ()), ".2f")),
        Column("of it compile, s", lambda row: cell(
            difference(row.seconds_to(target, True), row.seconds_to(target)), ".1f")),
        Column("× time, compiled", factor(False)), words("compared to", "versus.label"),
    ]


def time_notes(measured, rows: list[Row]) -> list[str]:
    """Below time_tables."""
    if not measured.plan.targets:
        return [machine_note(measured, rows), "Medians over the seeds. What is compared to the"
                " lowest of them is its time to it."]
    return [
        machine_note(measured, rows),
        "Seconds until the validation loss has fallen to the target, by a straight line between log"
        " lines: of training and of compilation with an empty cache; medians over the seeds, with"
        ' their range. "× time, compiled" is without compilation: there the first step counts as'
        " long as a median one.",
        'Speedups are over the row named in "compared to": the mean of the seeds\' ratios, with its'
        f" 95 % interval; bold: significant over the whole table ({ROUNDS_FOR_A_VERDICT} seeds"
        f" or more). A run that has trained on {measured.plan.tokens:,} tokens without coming to"
        " the target hasn't reached it, and has no speedup.",
    ]
