"""Time to loss: the seconds of training until the validation loss has fallen to a target.

Tokens per second alone can be bought with training that learns less from each token. So, as in
AlgoPerf and MLPerf Training, whole runs are compared by the time to a target that is fixed before
they start: the lowest validation loss of 00 in its default run ("published"), and that at the best
learning rate ("best"). `search` finds both, and the batch size and learning rate with which 00 and
01 reach the second one soonest, on some seeds; `time_to_loss` tells the time on others.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench import lengths, plans, runner, states
from bench.files import relative, write_whole
from bench.plans import Plan, Run, UserError
from bench.records import RecordError, read_record
from patches import stack

TUNING_SEED = 1  # and those after it; the times that are told come from plans.SEED and those after
TUNING_ROUNDS = 2
LIMIT = 3  # a run of so many times the tokens of 00's default run hasn't reached the target
LOG_TOKENS = {"cuda": 40_960, "cpu": 4_096}  # from one log line to the next
STAGES = {"00": Path(stack.FIRST).stem, "01": Path(stack.LAST).stem}

Point = tuple[int, float]  # batch size, learning rate


@dataclass
class Settings:
    """What all runs share. All state is in the folder `results`."""

    machine: dict
    data: Path
    results: Path
    options: list[str]  # for every script
    tokens: int | None = None  # of the run that sets the target (None: the script's own length)
    resume: bool = False  # whether earlier starts go on; else their files are put aside

    @property
    def best(self) -> Path:
        """What the search has found."""
        return self.results / "search" / "best.json"

    def plan(self, name: str, runs: list[Run], **settings) -> Plan:
        return Plan(
            name, runs, self.machine, options=self.options, data=self.data, results=self.results,
            seed_noise=False, whole=True, new_seeds=True,
            log_tokens=LOG_TOKENS[self.machine["device"]], **settings,
        )


@dataclass
class Series:
    """A plan that grows while it is measured: what comes next depends on what was found."""

    settings: Settings
    name: str
    rounds: int
    plan_settings: dict  # fields of Plan
    runs: dict[str, Run] = field(default_factory=dict)

    def measure(self, runs: list[Run]) -> dict[str, dict]:
        """Measures those that are new; returns the rows of all, by name. Raises UserError."""
        first = not self.runs
        self.runs |= {run.name: run for run in runs}
        plan = self.settings.plan(self.name, [*self.runs.values()], first_seed=TUNING_SEED,
                                  grows=True, cold_rounds=0, **self.plan_settings)
        resume = not first or self.settings.resume and plan.path.exists()
        runner.run_plan(plan, self.rounds, resume, retry=first)
        return {row["name"]: row for row in states.read_state(plan.path)["rows"]}


def at(stage: Run, point: Point) -> Run:
    """The script of `stage` with a batch size and a learning rate."""
    batch_size, rate = point
    return replace(
        stage, name=f"{stage.name}-batch-{batch_size}-rate-{rate:g}", published=None,
        label=f"{stage.label}, batch {batch_size}, rate {rate:g}", compared_to=None,
        options=("--batch-size", str(batch_size), "--learning-rate", f"{rate:g}"),
    )


def around(point: Point) -> list[Point]:
    """Half and twice the batch size, and half and twice the learning rate."""
    batch_size, rate = point
    batches = [size for size in (batch_size // 2, batch_size * 2) if size]
    return [(size, rate) for size in batches] + [(batch_size, rate / 2), (batch_size, rate * 2)]


def climb(start: Point, neighbours: Callable, measure: Callable) -> Point:
    """The point that none of its neighbours is better than; `measure` gives {point: cost} for
    points, the lower the better."""
    costs = measure([start])
    best = start
    while True:
        new = [point for point in neighbours(best) if point not in costs]
        if not new:
            return best
        costs |= measure(new)
        best = min(costs, key=costs.get)  # of equals the one that was measured first


# ---- What a user asks for ----------------------------------------------------------------------


def search(settings: Settings, rounds: int) -> dict:
    """Finds the targets, and the point at which each stage reaches the second one soonest; `rounds`
    is the number of tuning seeds. What it returns is left in best.json. Raises UserError."""
    stages = stages_of(settings.machine)
    published = points_of(settings, stages)
    settings.best.unlink(missing_ok=True)  # an earlier search's
    series = Series(settings, "target", rounds, dict(tokens=settings.tokens))

    def lowest(points: list[Point]) -> dict[Point, float]:
        rows = series.measure([at(stages["00"], point) for point in points])
        return {point: figure(rows[at(stages["00"], point).name]["lowest_val_loss"])
                for point in points}

    def other_rates(point: Point) -> list[Point]:
        return [(size, rate) for size, rate in around(point) if size == point[0]]

    best = climb(published["00"], other_rates, lowest)
    targets = {"published": lowest([published["00"]])[published["00"]],
               "best": lowest([best])[best]}
    if math.inf in targets.values():
        raise UserError(f"00 came to no end: see {relative(settings.results / 'target')}")
    print(f"targets: {targets['published']:.4f}, and {targets['best']:.4f} at learning rate"
          f" {best[1]:g}", flush=True)
    found = dict(targets=targets, points={}, options=settings.options)
    series = Series(settings, "search", rounds, dict(
        tokens=LIMIT * default_tokens(settings), targets={"best": targets["best"]}))
    for name, stage in stages.items():
        def seconds(points: list[Point], stage: Run = stage) -> dict[Point, float]:
            rows = series.measure([at(stage, point) for point in points])
            return {point: figure(rows[at(stage, point).name]["time_to"]["best"]["seconds"])
                    for point in points}

        # 00's best rate is a better start than the published one, for both.
        found["points"][name] = climb((published[name][0], best[1]), around, seconds)
    write_whole(settings.best, json.dumps(found, indent=1))
    return found


def time_to_loss(
    settings: Settings, rounds: int, rungs: str | None = None, names: str | None = None
) -> Plan:
    """Measures how long rungs of the ladder (None: 00 and 01) at their published settings, the
    variants `names`, and 00 and 01 at the settings that a search has found, take to the targets;
    `rounds` is the number of seeds. Returns the plan that was run. Raises UserError."""
    stages = stages_of(settings.machine)
    # Before anything runs: wrong names are told here.
    ladder = plans.ladder(settings.machine, rungs).runs if rungs else [*stages.values()]
    variants = plans.variants(settings.machine, names).runs[1:] if names else []
    found = read_best(settings)
    if not found:
        point = points_of(settings, stages)["00"]
        row = at(stages["00"], point).name
        rows = Series(settings, "target", TUNING_ROUNDS, dict(tokens=settings.tokens)).measure(
            [at(stages["00"], point)])
        found = dict(targets={"published": rows[row]["lowest_val_loss"]}, points={})
        if rows[row]["error"]:
            raise UserError(f"00 came to no end, so there is no target: {rows[row]['error']}")
    first = replace(ladder[0], compared_to=None)
    runs = [first, *(replace(run, compared_to=first.name) for run in ladder[1:])]
    runs += [replace(run, compared_to=ladder[-1].name) for run in variants]
    compared_to = first.name
    for name, point in found["points"].items():
        run = at(stages[name], point)
        runs.append(replace(run, compared_to=compared_to))
        compared_to = run.name  # 01 at its best to 00 at its best
    plan = settings.plan("time-to-loss" + "-variants" * bool(names), runs,
                         tokens=LIMIT * default_tokens(settings), targets=found["targets"])
    runner.run_plan(plan, rounds, settings.resume and plan.path.exists())
    return plan


# ---- What they need ----------------------------------------------------------------------------


def figure(value: float | None) -> float:
    """A missing one is worse than all others."""
    return math.inf if value is None else value


def stages_of(machine: dict) -> dict[str, Run]:
    """00 and 01, as the ladder's first and last rung on one device."""
    runs = plans.ladder(machine | {"gpus": min(1, machine["gpus"])}).runs
    return {name: replace(run, name=STAGES[name], label=name, compared_to=None)
            for name, run in zip(STAGES, (runs[0], runs[-1]), strict=True)}


def points_of(settings: Settings, stages: dict[str, Run]) -> dict[str, Point]:
    """The published batch size and learning rate of each, or what the options say."""
    configs = lengths.configurations(settings.plan("target", [*stages.values()]))
    return {name: (configs[run.name]["batch_size"], configs[run.name]["learning_rate"])
            for name, run in stages.items()}


def default_tokens(settings: Settings) -> int:
    """The training tokens of the run that sets the target."""
    path = settings.results / "target" / "target.json"
    try:
        records = [result["record"] for result in states.read_state(path)["results"]
                   if not result["error"]]
        return read_record(path.with_name(records[0])).logs[-1]["tokens"]
    except (OSError, ValueError, LookupError, TypeError, RecordError) as error:
        raise UserError(f"{relative(path)}: no run that set the target ({error!r}): search again")


def read_best(settings: Settings) -> dict:
    """What a search has found, or {} where there was none. Raises UserError for a damaged file."""
    if not settings.best.exists():
        return {}
    try:
        found = json.loads(settings.best.read_text(encoding="utf-8"))
        targets = {name: float(found["targets"][name]) for name in ("published", "best")}
        points = {name: (int(size), float(rate)) for name, (size, rate) in found["points"].items()
                  if name in STAGES}
        if found["options"] != settings.options:
            raise UserError(f"{relative(settings.best)} was found with other options: search again,"
                            " or use another --results-dir")
        return dict(targets=targets, points=points)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError,
            RecursionError) as error:
        raise UserError(f"{relative(settings.best)} is damaged ({error!r}): search again")
