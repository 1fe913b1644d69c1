"""The pictures: speed and losses of the three stages, the ladder, and the time to a loss."""

import io
import itertools
import math
import sys
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import ConnectionPatch
from matplotlib.ticker import LogLocator, MaxNLocator, StrMethodFormatter

from bench.records import Record
from bench.scaling import efficiency_of, predict, published_points
from bench.stages import CURVE, Run, by_group, factor, shorten
from bench.statistics import first_step_excess, records_of
from bench.tables import by_model, compile_cost, pays_from, show

# Okabe and Ito's colours, which colour-blind readers tell apart.
COLOURS = {"00_orig": "#E69F00", "01_opt_single_gpu": "#0072B2", "02_opt_multi_gpu_ddp": "#009E73"}
OWN, PUBLISHED, NOISE, ERROR = COLOURS["01_opt_single_gpu"], "0.75", "#F6DBA6", "#D55E00"
INCHES = 10  # of a picture's width, which READMEs show at about 900 pixels


def draw_all(
    runs: list[Run], published: list[Run], plans: dict[str, tuple[dict, Path] | None],
    form: str = "png",
) -> dict[str, bytes]:
    """{file name: picture} of what there is to draw; says what there isn't.

    `plans`: for each name in PLANS, its state and the folder of its records.
    """
    figures = {"speed": draw_speed([*runs, *published]), "losses": draw_losses(runs)}
    for name, found in plans.items():
        try:
            if found and found[0].get("rows"):
                figures[name] = PLANS[name](*found)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            print(f"skipped: {name}.json is damaged: {error!r}", file=sys.stderr)
    if not figures["losses"]:
        print(f"no losses to draw: no losses.{form}")
    pictures = {}
    for name, figure in figures.items():
        if figure:
            buffer = io.BytesIO()
            figure.savefig(buffer, format=form)
            pictures[f"{name}.{form}"] = buffer.getvalue()
    return pictures


def rows_of_panels(titles: list[str], inches: list[float], widths: list[int]):
    """(a figure, for each title a row of panels: its subfigure, then a panel for each width)."""
    # Names of devices may hold a $, which is not mathematics.
    plt.rcParams.update({"font.size": 11, "text.parse_math": False, "grid.color": "0.9",
                         "axes.spines.top": False, "axes.spines.right": False,
                         "axes.grid": True, "axes.axisbelow": True})
    figure = plt.figure(figsize=(INCHES, sum(inches)), dpi=150, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.06)
    rows = figure.subfigures(len(titles), 1, squeeze=False, height_ratios=inches)[:, 0]
    for row, text in zip(rows, titles, strict=True):
        row.suptitle(text, x=0.01, ha="left", fontsize=12, fontweight="bold")
    return figure, [
        (row, *row.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]) for row in rows]


def thousands(axis, count: int = 5) -> None:
    axis.set_major_locator(MaxNLocator(count, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))


def lay_rows(axes, count: int) -> None:
    """A row of the panel for each of `count` things, the first at the top."""
    axes.set_ylim(count - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_yticks([])


def room_for(texts: list[str], ends: list[float], inches: float) -> float:
    """The end of an axis of about so many inches on which each text fits right of its bar's end."""
    shares = [min(0.9, (0.15 + 0.078 * len(text)) / inches) for text in texts]  # 10-point letters
    return max(end / (1 - share) for end, share in zip(ends, shares, strict=True)) or 1


def draw_speed(runs: list[Run]):
    """Bars of tok/sec and of reserved memory; every group has scales of its own."""
    groups = by_group(runs)
    inches = [1.0 + 0.45 * len(members) for members in groups.values()]
    figure, rows = rows_of_panels([group.title for group in groups], inches, [5, 3])
    for members, (_, speed, memory) in zip(groups.values(), rows, strict=True):
        places, colours = range(len(members)), [COLOURS[run.stage] for run in members]
        speeds = [run.tok_per_sec for run in members]
        memories = [run.reserved_gb for run in members]
        factors = [None if run.stage == "00_orig" else factor(run, members) for run in members]
        notes = [f"{value:,.0f}" + (f"  ({times:.2f}×)" if times else "")
                 for value, times in zip(speeds, factors, strict=True)]
        for axes, values, texts, width in (
            (speed, speeds, notes, 5.0),
            (memory, [gb or 0 for gb in memories], [show(gb, ".2f") for gb in memories], 3.0),
        ):
            lay_rows(axes, len(members))
            bars = axes.barh(places, values, 0.7, color=colours)
            axes.bar_label(bars, texts, padding=4, fontsize=10)
            axes.set_xlim(0, room_for(texts, values, width))
            thousands(axes.xaxis)
        speed.set_yticks(places, [run.label for run in members])
        speed.set_xlabel("speed, tok/sec (all processes)")
        memory.set_xlabel("reserved memory, GB (per process)")
        if not any(memories):
            memory.set_xticks([])  # there is no scale to show
    return figure


def draw_losses(runs: list[Run]):
    """Losses over tokens and over time, or None if no run logged any."""
    groups = by_group([run for run in runs if run.curve])
    if not groups:
        return None
    titles = [group.title for group in groups]
    if len(groups) > 3:
        latest = max((run for run in runs if run.curve), key=lambda run: run.began).group
        titles = [f"{latest.title} (latest of {len(groups)} groups)"]
        groups = {latest: groups[latest]}
    figure, rows = rows_of_panels(titles, [4.0] * len(titles), [1, 1])
    for members, (row, *panels) in zip(groups.values(), rows, strict=True):
        keys = []
        for i, run in enumerate(members):
            # The first line is the widest: where losses coincide, every colour still shows.
            wider = len(members) - 1 - i
            style = {"color": COLOURS[run.stage], "linewidth": 1.5 + wider}
            keys.append({"label": run.label, "color": style["color"], "linewidth": 5})
            if len(run.curve) < 20:  # few points; a single one has no line to be seen by
                style |= {"marker": "o", "markersize": 4 + 1.5 * wider}
            line = dict(zip(CURVE, zip(*run.curve, strict=True), strict=True))
            for axes, unit in zip(panels, ("tokens", "train_seconds"), strict=True):
                axes.plot(line[unit], line["val_loss"], "-", **style)
                axes.plot(line[unit], line["train_loss"], "--", markerfacecolor="white", **style)
        for axes, label in zip(panels, ("training tokens", "training time, s"), strict=True):
            axes.set_xlabel(label)
            axes.set_xlim(left=0)
            axes.set_ylabel("loss, nats per token")
            thousands(axes.xaxis)
        keys += [{"label": "validation", "color": "0.3"}]
        keys += [{"label": "training", "color": "0.3", "linestyle": "--"}]
        handles = [Line2D([], [], **key) for key in keys]
        row.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False)
    return figure


def draw_ladder(ladder: dict):
    """Three panels with a row for each rung: tok/sec, factors over the baseline, and losses."""
    rows = ladder["rows"]
    figure, [(subfigure, *panels)] = rows_of_panels(
        [f"The ladder on {shorten(ladder['plan']['machine']['name'], 70)}"],
        [1.3 + 0.36 * len(rows)], [30, 16, 13],
    )
    for axes in panels:
        lay_rows(axes, len(rows))
    speed, factors, losses = panels
    draw_rung_speeds(speed, rows)
    draw_rung_factors(factors, rows)
    draw_rung_losses(losses, [row["val_loss"] for row in rows], ladder["seed_noise"])
    keys = [
        Line2D([], [], color=PUBLISHED, linewidth=8, label="published, A100"),
        Line2D([], [], color=OWN, marker="o", linestyle="", label="this machine"),
    ]
    if ladder["seed_noise"]:
        keys.append(Line2D([], [], color=NOISE, linewidth=8, label="seed noise"))
    subfigure.legend(handles=keys, loc="outside lower right", ncols=3, frameon=False)
    return figure


def draw_rung_speeds(axes, rows: list[dict]) -> None:
    labels, ends, texts = [], [], []
    for place, row in enumerate(rows):
        number, _, name = row["label"].partition(" ")
        processes = f" × {row['processes']}" * (row["processes"] > 1)
        labels.append(f"{name}{processes} {number:\u2007>2}")  # a space as wide as a figure
        text, end = row["error"] or "", 0
        if row["tok_per_sec"]:
            value, low, end = row["tok_per_sec"], min(row["speeds"]), max(row["speeds"])
            axes.barh(place, value, 0.7, color=COLOURS.get(row["name"], OWN))
            if row["rounds"] > 1:
                axes.errorbar(value, place, xerr=[[value - low], [end - value]], color="0.1",
                              elinewidth=1.2, capsize=3)
            notes = [(row["factor_baseline"], ".2f", "×"), (row["reserved_gb"], ".2f", " GB")]
            notes = ", ".join(format(x, form) + unit for x, form, unit in notes if x is not None)
            text = f"{value:,.0f}" + f"  ({notes})" * bool(notes) + ", failed" * bool(text)
        axes.annotate(shorten(text, 40), (end, place), (6, 0), textcoords="offset points",
                      va="center", fontsize=10, color=ERROR if row["error"] else "0.1")
        ends.append(end)
        texts.append(text)
    axes.set_yticks(range(len(rows)), labels)
    axes.set_xlim(0, room_for(texts, ends, 3.6))
    rounds = max(row["rounds"] for row in rows)
    axes.set_xlabel("tok/sec" + f", median and range of {rounds} rounds" * (rounds > 1))
    thousands(axes.xaxis)


def draw_rung_factors(axes, rows: list[dict]) -> None:
    baseline = rows[0]["name"]  # its factors over itself are null

    def factor_of(row: dict, name: str) -> float | None:
        return row[name] or (1 if row["name"] == baseline and row["tok_per_sec"] else None)

    known = [1]
    for place, row in enumerate(rows):
        theirs, ours = (factor_of(row, name)
                        for name in ("published_factor_baseline", "factor_baseline"))
        known += filter(None, (theirs, ours))
        if theirs:
            axes.barh(place, theirs - 1, 0.7, left=1, color=PUBLISHED)
            axes.annotate(f"{theirs:.2f}×", (max(theirs, ours or 1), place), (8, 0), va="center",
                          textcoords="offset points", fontsize=10, color="0.4")
        if ours:
            axes.plot(ours, place, "o", color=OWN, markersize=6)
    axes.set_xscale("log", base=2)
    axes.axvline(1, color="0.5", linewidth=1)
    axes.set_xlim(0.8 * min(known), 1.2 * max(known) ** 1.4)  # room for the figures at the right
    axes.xaxis.set_major_locator(LogLocator(4, numticks=7))
    axes.xaxis.set_minor_locator(LogLocator(2, numticks=13))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}×"))
    axes.xaxis.set_minor_formatter("")
    axes.set_xlabel("factor over the baseline")


def draw_rung_losses(axes, losses: list[float | None], noise: float | None) -> None:
    """A point for each rung; one far off the baseline stands at the edge, with its figure."""
    baseline = losses[0]
    reach = 4 * noise if noise and baseline is not None else math.inf
    for place, loss in enumerate(losses):
        if loss is None:
            continue
        if reach == math.inf or abs(loss - baseline) <= reach:
            axes.plot(loss, place, "o", color=OWN, markersize=5)
            continue
        edge, marker, side, inwards = (
            (baseline + reach, ">", "right", -6) if loss > baseline
            else (baseline - reach, "<", "left", 6))
        axes.plot(edge, place, marker, color=OWN, markersize=6)
        axes.annotate(f"{loss:.2f}", (edge, place), (inwards, 0), textcoords="offset points",
                      va="center", ha=side, fontsize=10)
    if reach != math.inf:
        axes.axvspan(baseline - noise, baseline + noise, color=NOISE, linewidth=0, zorder=0)
        axes.set_xlim(baseline - 1.2 * reach, baseline + 1.2 * reach)
    axes.xaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))
    axes.margins(x=0.15)
    axes.set_xlabel("validation loss, nats")


def draw_time_to_loss(state: dict, folder: Path):
    """Losses over time, with the targets; and the factors in tok/sec and in time to the target."""
    rows, targets = state["rows"], state["plan"]["targets"]
    figure, [(subfigure, curves, bars)] = rows_of_panels(
        [f"Time to a loss on {shorten(state['plan']['machine']['name'], 60)}"],
        [max(4.2, 1.6 + 0.5 * len(rows))], [1, 1],
    )
    tuned = [row for row in rows if "--learning-rate" in row["options"]]  # at the best settings
    variants = [row for row in rows if row["name"].startswith("variant-")]
    last = rows[len(rows) - len(tuned) - len(variants) - 1]  # of the rungs
    shown = [rows[0], *([last] if last is not rows[0] else []), *variants, *tuned]
    keys = []
    for row in shown:
        colour = COLOURS["00_orig"] if "00_orig" in row["name"] else OWN
        if row in variants:
            colour = plt.get_cmap("Dark2").colors[variants.index(row) % 8]
        style = {"color": colour, "linestyle": "--" if tuned and row not in tuned else "-"}
        drawn = [draw_curve(curves, record, style) for record in records_of(row, state, folder)]
        if drawn:
            keys.append(Line2D([], [], linewidth=2, label=row["label"], **style))
    times = [time for row in shown for target in row["time_to"].values()
             for time in target["all_seconds"] if time]
    if times:
        curves.set_xlim(0, 1.05 * max(times))
    low = min(targets.values())
    curves.set_ylim(low - 0.3, low + 3)
    for loss, side in zip(sorted(targets.values()), ("top", "bottom"), strict=False):
        curves.axhline(loss, color="0.3", linewidth=1, linestyle=":")
        curves.annotate(f"{loss:.3f}", (1, loss), (4, 0), xycoords=("axes fraction", "data"),
                        textcoords="offset points", va=side, fontsize=9)
    curves.set_xlabel("training time, s")
    curves.set_ylabel("validation loss, nats per token")
    thousands(curves.xaxis)
    name, loss = next(iter(targets.items()))
    draw_time_factors(bars, rows, name)
    bars.set_xlabel(f"factor over {rows[0]['label']}; the loss is {loss:.3f}")
    keys += [Line2D([], [], color=PUBLISHED, linewidth=8, label="tok/sec"),
             Line2D([], [], color=OWN, linewidth=8, label="time to the loss")]
    subfigure.legend(handles=keys, loc="outside lower center", ncols=3, frameon=False)
    return figure


def draw_curve(axes, record: Record, style: dict) -> None:
    excess = first_step_excess(record)
    points = [(log["train_seconds"] - excess, log["val_loss"]) for log in record.logs]
    axes.plot(*zip(*points, strict=True), linewidth=1.3, **style)


def draw_time_factors(axes, rows: list[dict], target: str) -> None:
    """A pair of bars for each row, over the first one: how many times as many tok/sec, and how many
    times as fast to the target."""
    lay_rows(axes, len(rows))
    ends, texts = [], []
    for place, row in enumerate(rows):
        first = row is rows[0] and row["tok_per_sec"]
        speed = 1 if first else row["factor_baseline"]
        time = row["time_to"][target]
        factor = 1 if first and time["seconds"] else time.get("factor_baseline_seconds")
        for value, shift, colour in ((speed, -0.2, PUBLISHED), (factor, 0.2, OWN)):
            text = f"{value:.2f}×" if value else row["error"] or "not reached"
            axes.barh(place + shift, value or 0, 0.38, color=colour)
            axes.annotate(shorten(text, 24), (value or 0, place + shift), (4, 0), va="center",
                          textcoords="offset points", fontsize=9)
            ends.append(value or 0)
            texts.append(shorten(text, 24))
    axes.set_yticks(range(len(rows)), [row["label"].replace(", ", "\n", 1) for row in rows])
    axes.set_xlim(0, room_for(texts, ends, 3.4))
    axes.axvline(1, color="0.5", linewidth=1)


def uncrossed(rows: list[dict], points: list[tuple[float, float]]) -> list[dict]:
    """The rows in the order, from below, of names in a column right of their points (in a panel of
    size 1) whose lines are shortest in all: those don't cross."""
    order, count = list(range(len(rows))), max(1, len(rows) - 1)

    def length(place: int, i: int) -> float:
        x, y = points[i]
        return math.hypot(1.06 - x, place / count - y)

    better = True
    while better:
        better = False
        for a, b in itertools.combinations(range(len(rows)), 2):
            i, j = order[a], order[b]
            if length(a, j) + length(b, i) < length(a, i) + length(b, j) - 1e-9:
                order[a], order[b], better = j, i, True
    return [rows[i] for i in order]


def draw_variants(state: dict):
    """Speed over memory, both as factors over the first row, with a name for each point."""
    base, *rows = by_model(state)[0]
    rows = [row for row in rows if row["factor"] and row["memory_factor"]]
    rows.sort(key=lambda row: row["memory_factor"])
    if not rows:
        return None
    figure, [(_, points, names)] = rows_of_panels(
        [f"Alternatives to {base['label']} on {shorten(state['plan']['machine']['name'], 60)}"],
        [max(4.0, 1.0 + 0.24 * len(rows))], [3, 2],
    )
    points.axhline(1, color="0.5", linewidth=1)
    points.axvline(1, color="0.5", linewidth=1)
    points.plot(1, 1, "s", color=COLOURS["00_orig"], markersize=8, clip_on=False, zorder=3)
    for row in rows:
        points.plot(row["factor"], row["memory_factor"], "o", color=OWN, markersize=5)
    points.set_xlabel(f"speed, factor over {base['label']}")
    points.set_ylabel(f"memory, factor over {base['label']}")
    points.margins(0.08)
    # The names stand in a column beside it, each with a line to its point: many lie close together.
    (left, right), (low, high) = points.get_xlim(), points.get_ylim()
    rows = uncrossed(rows, [((row["factor"] - left) / (right - left),
                             (row["memory_factor"] - low) / (high - low)) for row in rows])
    names.axis("off")
    names.set(xlim=(0, 1), xticks=[], yticks=[])
    names.set_ylim(-0.5, len(rows) - 0.5)
    for place, row in enumerate(rows):
        names.annotate(shorten(row["label"], 48), (0.08, place), va="center", fontsize=9,
                       annotation_clip=False)
        line = ConnectionPatch(
            (row["factor"], row["memory_factor"]), (0.06, place), "data", "data", axesA=points,
            axesB=names, color="0.7", linewidth=0.6, zorder=1,
        )
        figure.add_artist(line)
    return figure


def draw_compile_modes(state: dict):
    """Total seconds over steps: how long each mode compiles, and where its line crosses others."""
    rows = [row for row in state["rows"] if compile_cost(row)]
    costs = [compile_cost(row) for row in rows]
    crossings = [pays_from(one, other) for one in costs for other in costs if one is not other]
    last = 1.5 * max([step for step in crossings if step and step < 10_000], default=100)
    figure, [(subfigure, axes)] = rows_of_panels(
        [f"Compiling and training on {shorten(state['plan']['machine']['name'], 70)}"], [4.6], [1])
    colours = plt.get_cmap("tab10").colors
    styles = "-", "--", "-.", ":"
    for place, (row, (once, step)) in enumerate(zip(rows, costs, strict=True)):
        axes.plot([0, last], [once, once + last * step], styles[place % 4], linewidth=2,
                  color="0.2" if place == 0 else colours[(place - 1) % 10],
                  label=f"{row['label']}: {once:,.1f} s + {step:,.3f} s per step")
    axes.set(xlim=(0, last), ylim=(0, None), xlabel="steps", ylabel="total, s")
    thousands(axes.xaxis)
    subfigure.legend(loc="outside right center", frameon=False)
    return figure


def draw_sweep(state: dict):
    """What a sweep over batch sizes, models or contexts shows, as far as its runs fit."""
    plan, rows = state["plan"], [row for row in state["rows"] if row["tok_per_sec"]]
    _, kind, *stage = plan["name"].split("-")
    machine = shorten(plan["machine"]["name"], 60)
    if not rows:
        return None
    title = {"batch": "Batch size", "model": "Model", "context": "Context length"}[kind]
    figure, [(_, *panels)] = rows_of_panels(
        [f"{title}: {stage[0] if stage else '01'} on {machine}"], [3.6],
        [1] if kind == "context" else [1, 1])
    places = range(len(rows))
    names = [row["label"].removeprefix(f"{kind} ").replace(", ", "\n") for row in rows]
    figures = {"speed, tok/sec": [row["tok_per_sec"] for row in rows],
               "reserved memory, GB": [row["reserved_gb"] or 0 for row in rows],
               "share of the product rate, %": [100 * (row["share_of_peak"] or 0) for row in rows]}
    shown = {"batch": ["speed, tok/sec", "reserved memory, GB"],
             "model": ["share of the product rate, %", "speed, tok/sec"],
             "context": ["speed, tok/sec"]}[kind]
    for axes, label in zip(panels, shown, strict=True):
        axes.plot(places, figures[label], "o-", color=OWN, linewidth=2)
        top = max(figures[label])
        if label.startswith("speed"):
            low, high = zip(*((min(row["speeds"]), max(row["speeds"])) for row in rows),
                            strict=True)
            axes.fill_between(places, low, high, color=OWN, alpha=0.2, linewidth=0)
            top = max(high)
        axes.set(ylim=(0, 1.08 * top or 1), ylabel=label,
                 xlabel="" if kind == "model" else title.lower())
        axes.set_xticks(places, names)
        thousands(axes.yaxis)
    return figure


def draw_scaling(state: dict):
    """Efficiency over processes, this machine's and that of the published A100s; and over the rate
    of the link between two hosts, where that was measured."""
    measured = [row for row in state["rows"] if row["tok_per_sec"]]
    linked = [row for row in measured if row["mbit"]]
    rows = [row for row in measured[1:] if not row["mbit"]]
    if not rows:
        return None
    first = measured[0]
    figure, [(subfigure, axes, *others)] = rows_of_panels(
        [f"Weak scaling on {shorten(state['plan']['machine']['name'], 70)}"], [3.9],
        [1, 1] if linked else [1])

    def percent(row: dict) -> float:
        return 100 * efficiency_of(row, first)

    counts = [row["processes"] for row in rows]
    axes.axhline(100, color="0.5", linewidth=1, linestyle="--", label="ideal")
    axes.plot(counts, [percent(row) for row in rows], "o-", color=OWN, linewidth=2,
              label="this machine")
    published, *_ = published_points()
    axes.plot([1, 4], [100, 100 * published["measured"]], "s:", color="0.5", linewidth=1.5,
              label=f"{published['label']} (its clock held evaluation too)")
    axes.set(xlabel="processes", ylabel="efficiency, %", ylim=(0, 112))
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({*counts, 1, 4}), sorted({*counts, 1, 4}))
    for axes in others:
        rates = [row["mbit"] for row in linked]
        axes.axhline(100, color="0.5", linewidth=1, linestyle="--")
        axes.plot(rates, [percent(row) for row in linked], "o-", color=OWN, linewidth=2)
        axes.plot(rates, [100 * predict(row, measured) for row in linked], "^--", color="0.2",
                  linewidth=1.5, label="by the model")
        axes.set(xlabel="Mbit/s between two hosts", ylim=(0, 112))
        axes.set_xscale("log", base=2)
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    subfigure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


PLANS = {  # how to draw a plan, by its name, from its state and the folder of its records
    "ladder": lambda state, folder: draw_ladder(state),
    "time-to-loss": draw_time_to_loss,
    "time-to-loss-variants": draw_time_to_loss,
    "variants": lambda state, folder: draw_variants(state),
    "compile-modes": lambda state, folder: draw_compile_modes(state),
    "sharded": lambda state, folder: draw_variants(state),
    "ddp": lambda state, folder: draw_variants(state),
    "scaling": lambda state, folder: draw_scaling(state),
    **{f"sweep-{kind}{stage}": lambda state, folder: draw_sweep(state)
       for kind in ("batch", "model", "context") for stage in ("", "-00")},
}
