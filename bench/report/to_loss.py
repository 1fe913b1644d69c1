"""Times to a loss: the cells of their tables, and what docs/time-to-loss.md shows, the validation
loss over the seconds of training and a table for each target."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bench.analysis.figures import Goal
from bench.analysis.folders import newest_in, rows_in
from bench.analysis.rows import Row, Speedup
from bench.analysis.training import Training
from bench.analysis.tuning import EPOCH_LOSS, is_tuned, setting_of
from bench.analysis.values import median_known, ratio, subtract
from bench.common import REFERENCE, relative
from bench.machine import short_name
from bench.report.pictures import COLOURS, DARK, LIGHT, Palette, load_pyplot, rows_of_panels
from bench.report.tables import RUN, SPEED, bold, interval_text, picture_name, spread
from gpt_speed.common import UserError
from gpt_speed.tables import Column, Table, fmt, num_col, text_col

MACHINE = REFERENCE / "nvidia-h200"
PICTURES = {"loss-over-seconds.png": LIGHT, "loss-over-seconds-dark.png": DARK}  # in docs/
LAST_LOSS = 0.15  # below the target, where the picture ends
TOP, HIGH = 7.5, 7.0  # losses: where it begins, and below which the labels stand
SECONDS = 0.1, 80  # the ends of its axis, and its ticks
TICKS = 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50
WORDS = {  # for readers who don't know the patches and their options
    "optimizer-muon": "Muon",
    "optimizer-adafactor": "Adafactor",
    "compile-blocks": "regional compilation",
    "model-modern": "modern model",
    "model-tied-head": "tied head",
    "--polar-express": "Polar Express",
    "--normuon": "NorMuon",
}


def lowest_loss(row: Row) -> str:
    return row.error or fmt(row.lowest_val_loss, ".4f")


LOWEST_LOSS = Column("lowest val loss", lowest_loss)


# ---- The table of one target -------------------------------------------------------------------


@dataclass(frozen=True)
class TimeCells:
    """The text of a row's cells in the table of one target."""

    target: float
    searched: Sequence[Row] = ()  # of the machine's search, which may know warm starts

    def seconds(self, row: Row) -> str:
        """Returns the seconds of training and of compiling with an empty cache."""
        seconds = row.seconds_to(self.target, with_first_step=True)
        return row.error or fmt(seconds, ",.1f") or "not reached"

    def range(self, row: Row) -> str:
        """Returns the range of the seconds, up to "not reached" where a run missed the target."""
        arrivals = row.arrivals(self.target)
        if all(arrival.missed for arrival in arrivals):
            return ""
        times = [arrival.after(with_first_step=True) for arrival in arrivals]
        return spread(times, ",.1f").replace("inf", "not reached")

    def first_step(self, row: Row) -> str:
        """Returns the seconds that the first step takes beyond a median one."""
        with_first = row.seconds_to(self.target, with_first_step=True)
        extra = subtract(with_first, row.seconds_to(self.target))
        if extra is None:
            return ""
        return f"{max(0.0, extra):.1f}"  # it may be shorter than a median step

    def again_seconds(self, row: Row) -> float | None:
        """Returns the seconds of a second start, which finds the compiler's cache; None where none
        was measured."""
        seconds, excess = row.seconds_to(self.target), warm_excess(row, self.searched)
        if seconds is None or excess is None:
            return None
        return seconds + max(0.0, excess)

    def again(self, row: Row) -> str:
        return fmt(self.again_seconds(row), ",.1f")

    def again_factor(self, row: Row) -> str:
        """Returns times as fast as 00's second start; "" for 00 itself. Not tested: there may be
        one such start of each."""
        if row.run.stage == "00" or not row.reference:
            return ""
        return fmt(ratio(self.again_seconds(row.reference), self.again_seconds(row)), ".1f", "×")

    def factor(self, row: Row) -> str:
        """Returns the speedup with compilation, as who waits for it counts; bold where it is
        significant."""
        speedup = row.speedup(Goal(self.target, with_first_step=True))
        return bold(factor_or_bound(speedup), speedup.significance)

    def factor_without_compiling(self, row: Row) -> str:
        speedup = row.speedup(Goal(self.target))
        return bold(factor_or_bound(speedup), speedup.significance)

    def interval(self, row: Row) -> str:
        return interval_text(row.speedup(Goal(self.target, with_first_step=True)).interval)

    def tokens(self, row: Row) -> str:
        return fmt(row.tokens_to(self.target), ",.0f")


def time_columns(target: float, rows: Sequence[Row]) -> list[Column]:
    """Returns the columns of one target's table. *again* is only there after warm rounds."""
    cells = TimeCells(target)
    columns = [
        RUN,
        SPEED,
        num_col("× tok/sec", "factor", ".2f"),
        Column("tokens", cells.tokens),
        Column("seconds", cells.seconds),
        Column("range", cells.range),
        Column("× to the loss", cells.factor),
        Column("95%", cells.interval),
        Column("first step, extra s", cells.first_step),
    ]
    if any(row.warm_excess is not None for row in rows):
        columns.append(Column("again, s", cells.again))
    return [
        *columns,
        Column("× not counting compiling", cells.factor_without_compiling),
        text_col("compared to", "reference.label"),
    ]


def warm_excess(row: Row, searched: Sequence[Row]) -> float | None:
    """Returns what the first step of a second start takes beyond a median one; None where none was
    measured. Where all rounds of the row compiled, the search before them may have run the same
    script with the same settings several times: all but the first of these found it compiled."""
    if row.warm_excess is not None or not row.record:
        return row.warm_excess
    name, source = row.run.name, row.record.start.get("source_sha256")
    records = [other.record for other in searched if other.record and other.run.name == name]
    same = [record for record in records if record.start.get("source_sha256") == source]
    same.sort(key=lambda record: record.start["time"])
    return median_known(Training(record).first_step_excess for record in same[1:])


def factor_or_bound(speedup: Speedup) -> str:
    """Returns "1.23", or a bound such as "> 1.23"; "" where it isn't known."""
    if not speedup.factor:
        return ""
    return f"{speedup.sign}{speedup.factor:.2f}"


# ---- docs/time-to-loss.md ----------------------------------------------------------------------


def tuned_rows(kind: str, machine: Path) -> list[Row]:
    """Returns the scripts with settings of a search in a machine's newest measurement of a kind.
    Raises UserError where it has none."""
    for rows in newest_in(machine, "time-to-loss"):
        if rows.measured.kind == kind:
            return [row for row in rows if is_tuned(row.run)]
    raise UserError(f"there is no {picture_name('time-to-loss', kind)} in {relative(machine)}")


def target_table(kind: str, target_name: str, machine: Path) -> Table:
    """Returns a machine's times to a target in its measurement of a kind, of the scripts at their
    best settings. Raises UserError where it has none."""
    rows = tuned_rows(kind, machine)
    target = rows[0].plan.targets[target_name]
    cells = TimeCells(target, rows_in(machine, "search"))
    columns = [
        Column("script", script_in_words, True),
        num_col("batch", "run.facts.batch"),
        num_col("learning rate", "run.facts.rate", "g"),
        SPEED,
        Column("cold start, s", cells.seconds),
        Column("× 00 (95%)", partial(speedup_with_interval, goal=Goal(target, True))),
        Column(warm_heading(rows), cells.again),
        Column("× 00", cells.again_factor),
        Column("training alone, × 00 (95%)", partial(speedup_with_interval, goal=Goal(target))),
    ]
    return Table(columns, rows)


def warm_heading(rows: Sequence[Row]) -> str:
    """Returns the heading of the seconds of a warm start, which is computed where only the search
    had warm starts."""
    if any(row.warm_excess is not None for row in rows):
        return "warm start, s"
    return "warm start, s (computed)"


def script_in_words(row: Row) -> str:
    """Returns a row's script, without its batch and learning rate."""
    script, *options = setting_of(row.run).script.split(" --")
    parts = [*script.split("+"), *(f"--{option}" for option in options)]
    return ", ".join(WORDS.get(part, part) for part in parts)


def settings_in_words(row: Row) -> str:
    """Returns a row's script and its settings."""
    setting = setting_of(row.run)
    return f"{script_in_words(row)}, batch {setting.batch}, learning rate {setting.rate:g}"


def speedup_with_interval(row: Row, goal: Goal) -> str:
    """Returns times as fast as 00 at its best settings, bold where that is significant, and its
    interval; "" for 00 itself."""
    speedup = row.speedup(goal)
    if row.run.stage == "00" or not speedup.factor:
        return ""
    form = ".1f"
    if speedup.factor < 2:
        form = ".2f"
    factor = bold(f"{speedup.sign}{speedup.factor:{form}}×", speedup.significance)
    interval = spread(speedup.interval, form)
    if not interval:  # of a bound
        return factor
    return f"{factor} ({interval})"


@dataclass(frozen=True)
class Curves:
    """The lines of a script in the picture, one for each seed: its validation loss over seconds."""

    label: str
    row: Row
    colour: str
    style: str
    compiling: float | None  # seconds before the training; None: each run's own

    def delay(self, training: Training) -> float:
        if self.compiling is None:
            return training.first_step_excess
        return self.compiling

    def seconds_to(self, target: float) -> float | None:
        """Returns the median over the seeds."""
        return median_known(
            arrival.after(with_first_step=False) + self.delay(self.row.by_round[arrival.round])
            for arrival in self.row.arrivals(target)
        )

    def draw(self, axes, target: float) -> None:
        """Draws the lines, with their label beside them and a dot where they reach the target."""
        style = dict(color=self.colour, linestyle=self.style, linewidth=1.3)
        places: list[tuple[float, float]] = []
        label = self.label
        for training in self.row.trainings:
            seconds = [point.seconds + self.delay(training) for point in training.points]
            losses = [point.val_loss for point in training.points]
            axes.plot(seconds, losses, label=label, **style)
            label = "_"  # the first stands for all
            places += [place for place in zip(seconds, losses, strict=True) if place[1] < HIGH][:1]
        arrival = self.seconds_to(target)
        axes.plot(arrival, target, "o", color=self.colour)
        axes.annotate(
            f"{self.label}\n{fmt(arrival, '.1f')} s",
            max(places),
            (6, 8),
            textcoords="offset points",
        )


def loss_over_seconds(palette: Palette = LIGHT):
    """Draws the H200's runs of 00 and 01 to the loss of one epoch: those of 01 without the seconds
    of compiling, and with those of a warm and of a cold start. Raises UserError where one of them
    wasn't measured."""
    baseline, optimized = map(epoch_row, ("00", "01"))
    target = optimized.plan.targets[EPOCH_LOSS]
    warm = warm_excess(optimized, rows_in(MACHINE, "search"))
    if warm is None:
        raise UserError(f"no warm start of 01 in {relative(MACHINE)}")
    curves = [
        Curves("00", baseline, COLOURS["00"], "-", None),
        Curves("01, training alone", optimized, palette.gain, ":", 0.0),
        Curves("01, warm start", optimized, palette.gain, "--", warm),
        Curves("01, cold start", optimized, palette.gain, "-", None),
    ]
    of_00 = replace(curves[0], compiling=0.0)  # training alone, as 01's
    trained_00, trained, after_warm, after_cold = (
        fmt(group.seconds_to(target), ".1f") for group in (of_00, *curves[1:])
    )
    title = (
        f"01 trains to a loss of {target:.2f} in {trained} s, 00 in {trained_00} s.\n"
        f"But 01 compiles first: {after_cold} s with a cold cache, {after_warm} s, computed, with a"
        " warm one"
    )
    with load_pyplot().rc_context():
        figure, [(_, axes)] = rows_of_panels([title], [4.4], [1], palette)
        scale_axes(axes, target)
        for group in curves:
            group.draw(axes, target)
        mark_target(axes, target, palette)
        axes.set_xlabel(f"seconds ({short_name(optimized.measured.machine)}, a line for each seed)")
    return figure


def epoch_row(script: str) -> Row:
    """Returns a script's row in the H200's times to the loss of one epoch. Raises UserError where
    it wasn't measured."""
    for row in tuned_rows("epoch", MACHINE):
        if row.speeds and setting_of(row.run).script == script:
            return row
    raise UserError(f"no time to a loss of {script} in {relative(MACHINE)}")


def scale_axes(axes, target: float) -> None:
    axes.set_ylim(target - LAST_LOSS, TOP)
    axes.set_ylabel("validation loss")
    axes.set_xscale("log")
    axes.set_xlim(SECONDS)
    axes.minorticks_off()
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])


def mark_target(axes, target: float, palette: Palette) -> None:
    axes.axhline(target, color=palette.memory, linewidth=1, linestyle="--")
    place = SECONDS[0], target
    axes.annotate(f"target: {target:.2f}", place, (6, 4), textcoords="offset points")
