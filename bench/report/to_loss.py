"""What docs/time-to-loss.md shows: the validation loss over the seconds of training, and a table
for each target."""

from functools import partial
from pathlib import Path

from bench.analysis.folders import newest_in
from bench.analysis.rows import Row
from bench.common import REFERENCE, short_name
from bench.report.pictures import COLOURS, rows_of_panels
from bench.report.tables import bold, spread
from gpt_speed.tables import Column, Table, fmt

MACHINE = REFERENCE / "nvidia-h200"
NAMES = {"00": "00, baseline", "01": "01, optimized"}
VARIANT = "Muon, regional compilation"  # the row of the picture's third curve
LAST_LOSS = 0.15  # below the target, where a curve ends
WORDS = {  # for readers who don't know the patches
    "optimizer-muon": "Muon",
    "optimizer-adafactor": "Adafactor",
    "compile-blocks": "regional compilation",
    "model-modern": "modern model",
    "model-tied-head": "tied head",
    " --polar-express --normuon": ", Polar Express, NorMuon",
    "+": ", ",
    ", rate ": ", learning rate ",
}


def loss_over_seconds():
    """Draws the H200's runs to the loss of one epoch, a line for each seed: once without and once
    with the seconds of compiling."""
    ((measured, rows),) = newest_in(MACHINE, "time-to-loss")
    (target,) = measured.plan.targets.values()
    shown = dict(zip((*NAMES.values(), VARIANT), rows, strict=False))
    title = f"{finding(rows[1], target)}\n{short_name(measured.machine)}, a line for each seed"
    figure, [(subfigure, training, compiling)] = rows_of_panels([title], [4.2], [1, 1])
    for axes, with_first_step in ((training, False), (compiling, True)):
        for (label, row), colour in zip(shown.items(), COLOURS.values(), strict=True):
            draw_curves(axes, row, label, colour, with_first_step)
        axes.axhline(target, color="0.4", linewidth=1, linestyle="--")
        axes.set_ylim(target - LAST_LOSS, 7.5)
        axes.set_xlim(left=0)
    training.set_ylabel("validation loss")
    training.set_xlabel("seconds of training, compiling excluded")
    compiling.set_xlabel("seconds, compiling with an empty cache included")
    lines = training.get_legend_handles_labels()
    subfigure.legend(*lines, loc="outside lower center", ncols=len(shown), frameon=False)
    return figure


def finding(row: Row, target: float) -> str:
    """Returns how many times as fast a row's script trains to a loss, in a line."""
    without, included = (row.speedup(target, compiling).factor for compiling in (False, True))
    return (
        f"{row.run.stage} is {without:.1f} times as fast to a loss of {target:.2f} as"
        f" {row.reference.run.stage}; compiling included, {included:.2f} times"
    )


def draw_curves(axes, row: Row, label: str, colour: str, with_first_step: bool):
    """Draws a row's runs; the first carries the label."""
    for training in row.trainings:
        delay = training.first_step_excess if with_first_step else 0
        seconds = [point.seconds + delay for point in training.points]
        losses = [point.val_loss for point in training.points]
        axes.plot(seconds, losses, color=colour, linewidth=1.3, label=label)
        label = "_"  # one line of the legend


# ---- Tables ------------------------------------------------------------------------------------


def table_of(kind: str, machine: Path) -> Table:
    """Returns a machine's times to the first target of its journal of such runs: of the scripts at
    their best settings. Raises StopIteration where it has none."""
    measured, rows = next(
        pair for pair in newest_in(machine, "time-to-loss") if pair[0].kind == kind
    )
    target = next(iter(measured.plan.targets.values()))
    columns = [
        Column("script, its best settings", label, True),
        Column("tok/sec", lambda row: fmt(row.tok_per_sec, ",.0f")),
        Column("seconds", partial(seconds, target=target)),
        Column("again, s", partial(again, target=target)),
        Column("× to the loss (95%)", partial(speedup, target=target, with_first_step=True)),
        Column("compiling excluded", partial(speedup, target=target, with_first_step=False)),
    ]
    return Table(columns, [row for row in rows if "batch" in row.label])


def label(row: Row) -> str:
    """Returns what a row is of, in words."""
    text = row.label
    for old, new in WORDS.items():
        text = text.replace(old, new)
    return text


def seconds(row: Row, target: float) -> str:
    """Returns the seconds of training and compiling with an empty cache."""
    return fmt(row.seconds_to(target, with_first_step=True), ",.1f")


def again(row: Row, target: float) -> str:
    """Returns the seconds of a second start, which finds the compiler's cache; "" where none was
    measured."""
    if row.warm_excess is None:
        return ""
    return fmt(row.seconds_to(target) + max(0.0, row.warm_excess), ",.1f")


def speedup(row: Row, target: float, with_first_step: bool) -> str:
    """Returns times as fast as 00 at its best settings, bold where that is significant, and its
    interval; "" for 00 itself."""
    gain = row.speedup(target, with_first_step)
    if row.run.stage == "00" or not gain.factor:
        return ""
    form = ".2f" if gain.factor < 1 else ".1f"
    return f"{bold(f'{gain.factor:{form}}×', gain.significance)} ({spread(gain.interval, form)})"
