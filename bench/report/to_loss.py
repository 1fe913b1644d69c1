"""Times to a loss: the cells of their tables, and what docs/time-to-loss.md shows, the validation
loss over the seconds of training and a table for each target."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.analysis.folders import newest_in
from bench.analysis.rows import Comparison, Goal, Row, subtract
from bench.analysis.tuning import EPOCH_LOSS, is_tuned, setting_of
from bench.common import REFERENCE, relative, short_name
from bench.report.pictures import COLOURS, DARK, LIGHT, Palette, load_pyplot, rows_of_panels
from bench.report.tables import RUN, SPEED, bold, picture_name, spread
from gpt_speed.common import UserError, listed
from gpt_speed.tables import Column, Table, fmt, num_col, text_col

MACHINE = REFERENCE / "nvidia-h200"
CURVES = {  # the scripts of the picture, as a search names them, and as its legend does
    "00": "00, baseline",
    "01": "01, optimized",
    "optimizer-muon+compile-blocks": "Muon, regional compilation",
}
PICTURES = {"loss-over-seconds.png": LIGHT, "loss-over-seconds-dark.png": DARK}  # in docs/
LAST_LOSS = 0.15  # below the target, where a curve ends
WORDS = {  # for readers who don't know the patches and their options
    "optimizer-muon": "Muon",
    "optimizer-adafactor": "Adafactor",
    "compile-blocks": "regional compilation",
    "model-modern": "modern model",
    "model-tied-head": "tied head",
    "--polar-express": "Polar Express",
    "--normuon": "NorMuon",
}
LOWEST_LOSS = Column("lowest val loss", lambda row: row.error or fmt(row.lowest_val_loss, ".4f"))


# ---- The table of one target -------------------------------------------------------------------


@dataclass(frozen=True)
class TimeCells:
    """The text of a row's cells in the table of one target."""

    target: float

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

    def again(self, row: Row) -> str:
        """Returns the seconds of a second start, which finds the compiler's cache; "" where none
        was measured."""
        seconds = row.seconds_to(self.target)
        if seconds is None or row.warm_excess is None:
            return ""
        return f"{seconds + max(0.0, row.warm_excess):,.1f}"

    def factor(self, row: Row) -> str:
        """Returns the speedup with compilation, as who waits for it counts."""
        return self.tested_speedup(row, with_first_step=True)

    def factor_without_compiling(self, row: Row) -> str:
        return self.tested_speedup(row, with_first_step=False)

    def tested_speedup(self, row: Row, with_first_step: bool) -> str:
        """Returns a speedup, bold where it is significant."""
        text = speedup_to_loss(row, self.target, with_first_step)
        return bold(text, row.speedup(self.target, with_first_step).significance)

    def interval(self, row: Row) -> str:
        return spread(row.speedup(self.target, with_first_step=True).interval, ".2f")

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


def speedup_to_loss(row: Row, target: float, with_first_step: bool) -> str:
    """Returns "1.23", or a bound such as "> 1.23"; "" where it isn't known."""
    speedup = row.speedup(target, with_first_step)
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


def table_of(kind: str, target_name: str, machine: Path) -> Table:
    """Returns a machine's times to a target in its measurement of a kind, of the scripts at their
    best settings. Raises UserError where it has none."""
    rows = tuned_rows(kind, machine)
    target = rows[0].plan.targets[target_name]
    cells = TimeCells(target)
    columns = [
        Column("script, its best settings", in_words, True),
        SPEED,
        Column("seconds", cells.seconds),
        Column("again, s", cells.again),
        Column("× to the loss (95%)", partial(speedup, target=target, with_first_step=True)),
        Column("compiling excluded", partial(speedup, target=target, with_first_step=False)),
    ]
    return Table(columns, rows)


def in_words(row: Row) -> str:
    """Returns a row's script and settings."""
    setting = setting_of(row.run)
    script, *options = setting.script.split(" --")
    parts = [*script.split("+"), *(f"--{option}" for option in options)]
    words = [WORDS.get(part, part) for part in parts]
    return f"{', '.join(words)}, batch {setting.batch}, learning rate {setting.rate:g}"


def speedup(row: Row, target: float, with_first_step: bool) -> str:
    """Returns times as fast as 00 at its best settings, bold where that is significant, and its
    interval; "" for 00 itself."""
    gain = row.speedup(target, with_first_step)
    if row.run.stage == "00" or not gain.factor:
        return ""
    form = ".2f" if gain.factor < 1 else ".1f"
    return f"{bold(f'{gain.factor:{form}}×', gain.significance)} ({spread(gain.interval, form)})"


def loss_over_seconds(palette: Palette = LIGHT):
    """Draws the H200's runs to the loss of one epoch, a line for each seed: once without and once
    with the seconds of compiling. Raises UserError where a script of CURVES wasn't measured."""
    measured = [row for row in tuned_rows("epoch", MACHINE) if row.speeds]
    rows = {setting_of(row.run).script: row for row in measured}
    missing = CURVES.keys() - rows.keys()
    if missing:
        raise UserError(f"no times to a loss of {listed(sorted(missing))} in {relative(MACHINE)}")
    optimized = rows["01"]
    target, machine = optimized.plan.targets[EPOCH_LOSS], optimized.measured.machine
    title = f"{finding(optimized, rows['00'], target)}\n{short_name(machine)}, a line for each seed"
    colours = [COLOURS["00"], palette.gain, COLOURS["02"]]
    with load_pyplot().rc_context():
        figure, [(subfigure, training, compiling)] = rows_of_panels([title], [4.2], [1, 1], palette)
        for axes, with_first_step in ((training, False), (compiling, True)):
            for (script, label), colour in zip(CURVES.items(), colours, strict=True):
                draw_curves(axes, rows[script], label, colour, with_first_step)
            mark_target(axes, target, palette)
        training.set_ylabel("validation loss")
        training.set_xlabel("seconds of training, compiling excluded")
        compiling.set_xlabel("seconds, compiling with an empty cache included")
        lines = training.get_legend_handles_labels()
        subfigure.legend(*lines, loc="outside lower center", ncols=len(lines[0]), frameon=False)
    return figure


def mark_target(axes, target: float, palette: Palette) -> None:
    """Draws a line at the target, and ends the panel just below it."""
    style = dict(color=palette.memory, linewidth=1, linestyle="--")
    axes.axhline(target, label=f"target: {target:.2f}", **style)
    axes.set_ylim(target - LAST_LOSS, 7.5)
    axes.set_xlim(left=0)


def finding(row: Row, over: Row, target: float) -> str:
    """Returns how many times as fast as another script one trains to a loss, in a line."""
    without, included = (
        Comparison(row, over, Goal(target, compiling)).factor for compiling in (False, True)
    )
    return (
        f"To a loss of {target:.2f}, {row.run.stage} is {without:.1f} times as fast as"
        f" {over.run.stage} once compiled; compiling included, {included:.2f} times"
    )


def draw_curves(axes, row: Row, label: str, colour: str, with_first_step: bool) -> None:
    """Draws a row's runs; the first carries the label."""
    for training in row.trainings:
        delay = training.first_step_excess if with_first_step else 0
        seconds = [point.seconds + delay for point in training.points]
        losses = [point.val_loss for point in training.points]
        axes.plot(seconds, losses, color=colour, linewidth=1.3, label=label)
        label = "_"  # one line of the legend
