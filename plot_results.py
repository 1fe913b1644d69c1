"""Draw and tabulate the speed, memory and losses of the three stages.

    python plot_results.py               # results/ -> speed.png, losses.png, ladder.png, summary.md
    python plot_results.py --format svg  # the pictures as SVG
    python plot_results.py --help        # every setting

It reads the records in results/ and in the folders of results/reference/, and takes the latest
complete run of each stage for each group: a device, a model and a context length; those of the
reference are groups of their own. The published A100 figures, from
results/reference/published-a100.json, stand beside them. ladder.png shows the ladder in results/,
or else the reference's latest.

tok/sec is the median over the steps of a run, or the average of a run too short for a median. It
counts the tokens of all processes together; reserved memory is that of one process.
"""

import argparse
import json
import math
import os
import re
import sys
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path

import matplotlib

HERE = Path(__file__).resolve().parent
PUBLISHED = HERE / "results" / "reference" / "published-a100.json"

# Stage: its label and colour (Okabe and Ito's, which colour-blind readers tell apart).
STAGES = {
    "00_orig": ("00 original", "#E69F00"),
    "01_opt_single_gpu": ("01 optimized", "#0072B2"),
    "02_opt_multi_gpu_ddp": ("02 DDP", "#009E73"),
}

# The fields read from each event, and their types; "?" marks one that may be null.
NUMBER = (int, float)
FIELDS = {
    "start": {
        "schema": int, "stage": str, "time": str, "config.model": str,
        "config.context_length": int, "config.world_size": int, "config.device": str,
        "environment.gpu?": str, "environment.cpu?": str,
    },
    "log": {"tokens": int, "train_seconds": NUMBER, "train_loss?": NUMBER, "val_loss?": NUMBER},
    "end": {
        "status": str, "avg_tok_per_sec?": NUMBER, "median_step_tok_per_sec?": NUMBER,
        "p25_step_tok_per_sec?": NUMBER, "p75_step_tok_per_sec?": NUMBER,
        "reserved_gb?": NUMBER, "mfu?": NUMBER, "val_loss?": NUMBER,
    },
}


@dataclass
class Run:
    stage: str
    group: tuple[str, str, int]  # device, model, context length
    world_size: int
    tok_per_sec: float
    reserved_gb: float | None
    p25: float | None = None
    p75: float | None = None
    mfu: float | None = None
    val_loss: float | None = None
    began: tuple = ()
    log: list = field(default_factory=list)

    @property
    def label(self) -> str:
        processes = f" × {self.world_size}" if self.stage.startswith("02") else ""
        return STAGES[self.stage][0] + processes


def check(event: dict) -> None:
    """Raise an error unless `event` has the fields that FIELDS asks for."""
    for pattern, kind in FIELDS.get(event["event"], {}).items():
        name, value = pattern.rstrip("?"), event
        for key in name.split("."):
            if not isinstance(value, dict) or key not in value:
                raise ValueError(f"no field {name}")
            value = value[key]
        if value is None and pattern != name:
            continue
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"field {name} is not of the right type")
        if kind is not str and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"field {name} is out of range")
    if event.get("schema", 1) != 1:
        raise ValueError(f"schema {event['schema']} is unknown")


def read_record(path: Path) -> dict[str, list[dict]]:
    """The events of a record by their names; a ValueError names the first line that is damaged."""
    events = {"start": [], "log": [], "end": []}
    for number, line in enumerate(path.read_bytes().removesuffix(b"\n").split(b"\n"), 1):
        try:
            event = json.loads(line.decode())
            if not isinstance(event, dict) or not isinstance(event.get("event"), str):
                raise TypeError("no field event")
            if number == 1 and event["event"] != "start":
                raise ValueError("the first event is not start")
            check(event)
        except UnicodeDecodeError:
            raise ValueError(f"line {number}: not UTF-8") from None
        except (json.JSONDecodeError, RecursionError):
            raise ValueError(f"line {number}: not JSON, or cut off") from None
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(f"line {number}: {error}") from None
        events.setdefault(event["event"], []).append(event)
    return events


def read_runs(folder: Path) -> list[Run]:
    """The latest complete run of each stage and group, sorted by group, then stage."""
    latest, left_out = {}, 0
    for path in sorted([*folder.glob("*.jsonl"), *folder.glob("reference/*/*.jsonl")]):
        try:
            events = read_record(path)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            print(f"skipped: {relative(path)}, {reason}", file=sys.stderr)
            continue
        start, end = events["start"][0], (events["end"] or [{}])[-1]
        if start["stage"] not in STAGES:
            continue
        tok_per_sec = end.get("median_step_tok_per_sec") or end.get("avg_tok_per_sec")
        if end.get("status") != "complete" or not tok_per_sec:
            left_out += 1
            continue
        config, environment = start["config"], start["environment"]
        gpu = environment["gpu"] if config["device"] != "cpu" else None
        device = " ".join((gpu or environment["cpu"] or config["device"]).split())
        if path.parent != folder:
            device += " (reference)"
        run = Run(
            start["stage"], (device, config["model"], config["context_length"]),
            config["world_size"], tok_per_sec, end["reserved_gb"],
            p25=end["p25_step_tok_per_sec"], p75=end["p75_step_tok_per_sec"],
            mfu=end["mfu"], val_loss=end["val_loss"], log=events["log"],
            # The digits alone: 20260131T235959Z and 2026-01-31T23:59:59Z are the same time.
            began=(re.sub(r"\D", "", start["time"])[:14], path.name),
        )
        key = run.group, run.stage
        if key not in latest or latest[key].began < run.began:
            latest[key] = run
    if left_out:
        runs, verb = ("run", "is") if left_out == 1 else ("runs", "are")
        print(f"{left_out} {runs} that did not complete {verb} left out")
    return [latest[key] for key in sorted(latest)]


def read_published() -> tuple[list[Run], str]:
    """The published figures in the form of runs, and a line that names their source."""
    data = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    rows = {row["id"]: row for row in data["techniques"]}
    group = f"{data['gpu']} (published)", data["model"], int(data["context_length"])
    runs = []
    for stage in STAGES:
        row = rows[data["stages"][stage]]
        speed, memory = float(row["tok_per_sec"]), float(row["reserved_gb"])
        runs.append(Run(stage, group, int(row["world_size"]), speed, memory))
    source = f"{data['gpu']}, PyTorch {data['pytorch']}, {title(group, device=False)}"
    return runs, f"Published figures: {source}, {runs[-1].label}; <{data['source']}>"


def by_group(runs: list[Run]) -> dict[tuple, list[Run]]:
    return {group: list(members) for group, members in groupby(runs, lambda run: run.group)}


def factor(run: Run, runs: list[Run]) -> float | None:
    """How many times as fast as stage 00 of its group `run` is; None without a 00."""
    speeds = [r.tok_per_sec for r in runs if (r.group, r.stage) == (run.group, "00_orig")]
    return run.tok_per_sec / speeds[0] if speeds else None


def title(group: tuple, device: bool = True) -> str:
    name, model, context = group
    name = name if len(name) <= 60 else name[:59] + "…"
    return f"{name}: " * device + f"{model}, context {context:,}"


def show(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)


def table(runs: list[Run], published: list[Run], source: str) -> str:
    """The figures as Markdown; without runs, the published ones alone."""
    heads = ["device", "model / context", "stage", "tok/sec", "factor over 00", "p25–p75"]
    heads += ["reserved GB", "MFU", "val loss", "published tok/sec", "published factor"]
    rows = [heads, [":--"] * 3 + ["--:"] * 8]
    for run in runs or published:
        device, model, context = run.group
        theirs = next(other for other in published if other.stage == run.stage)
        quartiles = None not in (run.p25, run.p75)
        rows.append([
            device, f"{model} / {context:,}", run.label, f"{run.tok_per_sec:,.0f}",
            show(factor(run, runs or published), ".2f"),
            f"{run.p25:,.0f}–{run.p75:,.0f}" if quartiles else "n/a",
            show(run.reserved_gb, ".2f"), show(run.mfu, ".1%"), show(run.val_loss, ".3f"),
            f"{theirs.tok_per_sec:,.0f}", show(factor(theirs, published), ".2f"),
        ])
    lines = ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]
    return "\n".join([*lines, "", source, ""])


def rows_of_panels(titles: list[str], inches: list[float], widths: list[int]):
    """A figure with a row of two panels for each title, and for each row (row, left, right)."""
    from matplotlib import pyplot as plt  # only now: main() has selected the backend

    # Names of devices may hold a $, which is not mathematics.
    plt.rcParams.update({"font.size": 11, "text.parse_math": False, "grid.color": "0.9"})
    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    plt.rcParams.update({"axes.grid": True, "axes.axisbelow": True})
    figure = plt.figure(figsize=(10, sum(inches)), dpi=150, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.06)
    rows = figure.subfigures(len(titles), 1, squeeze=False, height_ratios=inches)[:, 0]
    for row, text in zip(rows, titles, strict=True):
        row.suptitle(text, x=0.01, ha="left", fontsize=12, fontweight="bold")
    return figure, [(row, *row.subplots(1, 2, width_ratios=widths)) for row in rows]


def thousands(axis) -> None:
    axis.set_major_locator(matplotlib.ticker.MaxNLocator(5, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.10g}"))


def draw_speed(runs: list[Run], published: list[Run]):
    """Bars of tok/sec and of reserved memory; every group has scales of its own."""
    groups = by_group([*runs, *published])
    inches = [1.0 + 0.45 * len(members) for members in groups.values()]
    figure, rows = rows_of_panels([title(group) for group in groups], inches, [5, 3])
    for members, (_, speed, memory) in zip(groups.values(), rows, strict=True):
        speeds, speed_texts, memories, memory_texts = [], [], [], []
        for run in members:
            times = None if run.stage == "00_orig" else factor(run, members)
            note = "" if times is None else f"  ({times:.2f}×)"
            speeds.append(run.tok_per_sec)
            speed_texts.append(f"{run.tok_per_sec:,.0f}{note}")
            memories.append(run.reserved_gb or 0)
            memory_texts.append(show(run.reserved_gb, ".2f"))
        places, colours = range(len(members)), [STAGES[run.stage][1] for run in members]
        for axes, values, texts, room in (
            (speed, speeds, speed_texts, 1.5), (memory, memories, memory_texts, 1.3)
        ):
            axes.bar_label(axes.barh(places, values, 0.7, color=colours), texts, padding=4)
            axes.set_xlim(0, room * max(values) or 1)  # the texts need room right of the bars
            axes.set_ylim(len(members) - 0.5, -0.5)  # 00 at the top
            axes.grid(visible=False, axis="y")
            axes.tick_params(axis="y", length=0)
            thousands(axes.xaxis)
        speed.set_yticks(places, [run.label for run in members])
        speed.set_xlabel("speed, tok/sec (all processes)")
        memory.set_yticks([])
        memory.set_xlabel("reserved memory, GB (per process)")
        if not any(memories):
            memory.set_xticks([])  # there is no scale to show
    return figure


def draw_losses(runs: list[Run]):
    """Losses over tokens and over time, or None if no run logged any."""
    runs = [run for run in runs if run.log]
    groups = by_group(runs)
    if not groups:
        return None
    titles = [title(group) for group in groups]
    if len(groups) > 3:
        latest = max(runs, key=lambda run: run.began).group
        titles = [f"{title(latest)} (latest of {len(groups)} groups)"]
        groups = {latest: groups[latest]}
    figure, rows = rows_of_panels(titles, [4.0] * len(titles), [1, 1])
    for members, (row, *panels) in zip(groups.values(), rows, strict=True):
        keys = []
        for i, run in enumerate(members):
            # The first line is the widest: where losses coincide, every colour still shows.
            wider = len(members) - 1 - i
            style = {"color": STAGES[run.stage][1], "linewidth": 1.5 + wider}
            keys.append({"label": run.label, "color": style["color"], "linewidth": 5})
            if len(run.log) < 20:  # few points; a single one has no line to be seen by
                style |= {"marker": "o", "markersize": 4 + 1.5 * wider}
            for axes, unit in zip(panels, ("tokens", "train_seconds"), strict=True):
                x = [line[unit] for line in run.log]
                for loss, dash, fill in (
                    ("val_loss", "-", style["color"]), ("train_loss", "--", "white")
                ):
                    y = [math.nan if line[loss] is None else line[loss] for line in run.log]
                    axes.plot(x, y, dash, markerfacecolor=fill, **style)
        for axes, label in zip(panels, ("training tokens", "training time, s"), strict=True):
            axes.set_xlabel(label)
            axes.set_xlim(left=0)
            axes.set_ylabel("loss, nats per token")
            thousands(axes.xaxis)
        keys += [{"label": "validation", "color": "0.3"}]
        keys += [{"label": "training", "color": "0.3", "linestyle": "--"}]
        handles = [matplotlib.lines.Line2D([], [], **key) for key in keys]
        row.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False)
    return figure


def read_ladder(folder: Path) -> dict | None:
    """The latest finished ladder of ladder.py, or None; one that is damaged is named."""
    ladders = []
    for places in ("ladder/ladder.json", "reference/*/ladder/ladder.json"):
        for path in sorted(folder.glob(places)):
            try:
                ladder = json.loads(path.read_text(encoding="utf-8"))
                if places.startswith("reference"):
                    ladder["plan"]["machine"]["name"] += " (reference)"
                if ladder["rows"]:
                    ladders.append((str(ladder["time"]), str(path), ladder))
            except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
                print(f"skipped: {relative(path)}, {error!r}", file=sys.stderr)
        if ladders:
            break
    return max(ladders, key=lambda ladder: ladder[:2])[-1] if ladders else None


def ladder_label(row: dict) -> str:
    """05-bfloat16 as "5 bfloat16"."""
    name = {0: "baseline"}.get(row["rung"]) or re.sub(r"^\d+-", "", row["name"]).replace("-", " ")
    return f"{STAGES['02_opt_multi_gpu_ddp'][0][3:] if '_ddp' in name else name} {row['rung']:>2}"


def draw_ladder(ladder: dict):
    """Three panels with a row for each rung: tok/sec, factors over the baseline, and losses."""
    from matplotlib import pyplot as plt  # only now: main() has selected the backend

    rows, places = ladder["rows"], range(len(ladder["rows"]))
    machine, rounds = ladder["plan"]["machine"]["name"], max(len(row["speeds"]) for row in rows)
    machine = machine if len(machine) <= 60 else machine[:59] + "…"
    figure, [(row_figure, *_)] = rows_of_panels(
        [f"The ladder on {machine}: median and range of {rounds} round{'s' * (rounds != 1)}"],
        [1.3 + 0.36 * len(rows)], [1, 1],
    )
    for axes in row_figure.axes:
        axes.remove()
    speed, factors, losses = row_figure.subplots(1, 3, width_ratios=[6, 3, 2])
    for axes in (speed, factors, losses):
        axes.set_ylim(len(rows) - 0.5, -0.5)  # the baseline at the top
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.set_yticks([])
    speed.set_yticks(places, [ladder_label(row) for row in rows])

    highest = max([high for row in rows for high in row["speeds"]], default=1)
    own = STAGES["01_opt_single_gpu"][1]
    for place, row in zip(places, rows, strict=True):
        text, right, style = "", 0, {"color": "0.1"}
        if row["tok_per_sec"]:
            value, low, right = row["tok_per_sec"], min(row["speeds"]), max(row["speeds"])
            stage = {0: "00_orig"}.get(row["rung"], row["name"])
            colour = STAGES.get(stage, (None, own))[1]
            speed.barh(place, value, 0.7, color=colour)
            speed.errorbar(value, place, xerr=[[value - low], [right - value]], color="0.1",
                           elinewidth=1.2, capsize=3)
            notes = [(row["factor_baseline"], ".2f", "×"), (row["reserved_gb"], ".2f", " GB")]
            notes = ", ".join(format(x, form) + unit for x, form, unit in notes if x is not None)
            text = f"{value:,.0f}" + f"  ({notes})" * bool(notes)
        if row["error"]:
            reason = row["error"] if len(row["error"]) <= 40 else row["error"][:39] + "…"
            text, style = f"{text}  {reason}".strip(), {"color": "#D55E00"}
        speed.annotate(text, (right, place), (6, 0), textcoords="offset points", va="center",
                       fontsize=10, **style)
    speed.set_xlim(0, 1.75 * highest)  # the texts need room right of the bars
    speed.set_xlabel("speed, tok/sec (all processes)")
    thousands(speed.xaxis)

    published = [row["published_factor_baseline"] or (1 if row["rung"] == 0 else None)
                 for row in rows]
    measured = [row["factor_baseline"] or (1 if row["rung"] == 0 and row["tok_per_sec"] else None)
                for row in rows]
    known = [value for value in (*published, *measured) if value]
    for place, theirs, ours in zip(places, published, measured, strict=True):
        if theirs:
            factors.barh(place, theirs - 1, 0.7, left=1, color="0.75")
            factors.annotate(f"{theirs:.2f}×", (max(theirs, ours or 1), place), (6, 0),
                             textcoords="offset points", va="center", fontsize=10, color="0.4")
        if ours:
            factors.plot(ours, place, "o", color=own, markersize=6)
    factors.set_xscale("log", base=2)
    factors.axvline(1, color="0.5", linewidth=1)
    factors.set_xlim(0.8 * min(known, default=1), 3.4 * max(known, default=1))
    factors.xaxis.set_major_locator(matplotlib.ticker.LogLocator(2, numticks=7))
    factors.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:g}×"))
    factors.set_xlabel("factor over the baseline")

    baseline = next((row["val_loss"] for row in rows if row["rung"] == 0), None)
    noise = ladder["seed_noise"]
    if None not in (baseline, noise):
        losses.axvspan(baseline - noise, baseline + noise, color="#E69F00", alpha=0.3, linewidth=0)
    lost = [math.nan if row["val_loss"] is None else row["val_loss"] for row in rows]
    losses.plot(lost, places, "o", color=own, markersize=5)
    losses.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(3, steps=[1, 2, 5, 10]))
    losses.margins(x=0.15)
    losses.set_xlabel("validation loss")
    keys = [
        plt.Line2D([], [], color="0.75", linewidth=8, label="published, A100"),
        plt.Line2D([], [], color=own, marker="o", linestyle="", label="this machine"),
        plt.Line2D([], [], color="#E69F00", alpha=0.3, linewidth=8, label="seed noise"),
    ]
    row_figure.legend(handles=keys, loc="outside lower right", ncols=3, frameon=False)
    return figure


def write(path: Path, save) -> None:
    """Call `save` with a temporary path and rename it: `path` is never half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save(temporary)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def relative(path: Path) -> str:
    try:
        return os.path.relpath(path)
    except ValueError:  # another drive of a Windows machine
        return str(path)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=HERE / "results", metavar="DIR",
                        help="folder of the records (default: results beside this script)")
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="folder for the pictures and summary.md (default: that of --results)")
    parser.add_argument("--format", choices=("png", "svg", "pdf"), default="png",
                        help="of the pictures (default: png)")
    parser.add_argument("--show", action="store_true", help="also open the pictures in windows")
    args = parser.parse_args()
    out = args.out or args.results
    sys.stdout.reconfigure(errors="replace")  # a terminal without × or – is no reason to stop
    if not args.show:
        matplotlib.use("Agg")  # draws without a display

    try:
        published, source = read_published()
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        print(f"error: {relative(PUBLISHED)}: {error!r}", file=sys.stderr)
        return 1
    if not args.results.is_dir():
        print(f"error: {args.results} is not a folder", file=sys.stderr)
        return 1
    runs = read_runs(args.results)
    if not runs:
        print("no complete runs: the published figures alone")
    text = table(runs, published, source)
    saves = {f"speed.{args.format}": draw_speed(runs, published).savefig}
    losses = draw_losses(runs)
    if losses:
        saves[f"losses.{args.format}"] = losses.savefig
    else:
        print(f"no losses to draw: no losses.{args.format}")
    ladder = read_ladder(args.results)
    if ladder:
        try:
            saves[f"ladder.{args.format}"] = draw_ladder(ladder).savefig
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            print(f"skipped: ladder.json is damaged: {error!r}", file=sys.stderr)
    print(f"\n{text}")

    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, save in saves.items():
            write(out / name, partial(save, format=args.format))
        write(out / "summary.md", lambda path: path.write_bytes(text.encode()))
    except OSError as error:
        print(f"error: cannot write to {out}: {error.strerror or error}", file=sys.stderr)
        return 1
    for name in (*saves, "summary.md"):
        print(relative(out / name))
    if args.show:
        from matplotlib import pyplot as plt

        plt.show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
