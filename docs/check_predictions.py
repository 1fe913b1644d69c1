"""Compare predicted speeds with those that other people have measured with their own programs.

    python docs/check_predictions.py    # prints tables of docs/, and draws docs/predictions.png

results/reference/published-others.json has the measured speeds. A program of others is predicted
from the stored work of the script of ours that is most like it; RULES count what differs. Their
bytes are those of GPT-2 124M with 1,024 tokens, counted for each kernel that reads or writes a
number of a matrix; nothing in them is fitted to a speed. The constants of gpt_speed/speed.py
were chosen by the figures of TUNED_ON, and some figures led to a later change of the model, as
their field `used` says: judge by the others, the checks. Of a vocabulary that isn't padded a source
says `unaligned_head` unless PyTorch 2.5 or newer compiled it with its loss, since that pads it.
"""

import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from statistics import mean, median

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.catalogue import published  # noqa: E402
from bench.common import write_whole  # noqa: E402
from bench.predict.prediction import Prediction  # noqa: E402
from bench.predict.shipped import (  # noqa: E402
    GPT2,
    TUNED_ON,
    options_of,
    prediction_of,
    program_of,
    published_others,
    scripts,
)
from bench.report.pictures import (  # noqa: E402
    DARK,
    LIGHT,
    Palette,
    load_pyplot,
    picture_bytes,
    rows_of_panels,
)
from gpt_speed.cards import CARDS  # noqa: E402
from gpt_speed.speed import LEAST_BATCH, Work, is_compiled, is_inside, margin  # noqa: E402
from gpt_speed.tables import Table, markdown, num_col, text_col  # noqa: E402

PICTURES = {"predictions.png": LIGHT, "predictions-dark.png": DARK}
NEAR = 0.2  # an error up to which a prediction counts as near
SHARE = 0.95  # of the other programs' figures that lie in the range which they give a program
TOKENS = 1024  # of a sequence, of the scripts that rules but the optimizer's are for
SCORES = 12 * 12 * 1024  # attention scores for each token: layers, heads, tokens
HIDDEN = 25 * 768  # numbers for each token that dropout passes over: the embedding's, 2 of a layer
# Weights with one matrix for embedding and head, of those with two.
TIED, TIED_MEDIUM = 124.5 / 163.0, 354.9 / 406.4

Step = list[Work]
Rule = Callable[[Step, int], Step]  # from a step and its batch size


def beside(measured: float, predicted: float, **about) -> dict:
    """Returns a row of a table of measured, or published, figures and predicted ones."""
    return about | dict(measured=measured, predicted=predicted, error=predicted / measured - 1)


def scaled(kind: str, size: float, kernels: float = 1) -> Rule:
    """Scales the bytes and the number of the kernels of a kind that aren't matmuls."""
    return lambda step, _: [
        work._replace(size=work.size * size, kernels=work.kernels * kernels)
        if work.kind == kind and not work.flops
        else work
        for work in step
    ]


def in_precision(precision: str) -> Rule:
    """Takes four bytes a number where the script has bfloat16's two."""
    return lambda step, _: [
        work._replace(size=2 * work.size, precision=work.precision and precision) for work in step
    ]


def without_dropout(step: Step, batch: int) -> Step:
    return [
        work._replace(size=work.size - batch * TOKENS * HIDDEN * 10, kernels=work.kernels - 50)
        if work.kind == "rest"
        else work
        for work in step
    ]


def attention_by_hand(step: Step, batch: int) -> Step:
    """Takes the matmuls of attention from the last script that has it by hand."""
    by_hand = [
        work
        for work in prediction_of("06-native-layers", GPT2).steps[batch]
        if work.kind == "attention" and work.precision
    ]
    return [
        *(work for work in step if work.kind != "attention"),
        *by_hand,
        Work("attention", "", True, 24, 0, batch * TOKENS * SCORES * 10),
    ]


RULES: dict[str, list[Rule]] = {
    "unaligned head": [
        lambda step, _: [  # a vocabulary that isn't padded
            work._replace(is_aligned=work.is_aligned and work.kind != "head") for work in step
        ]
    ],
    "float32": [in_precision("float32")],
    "TF32": [in_precision("TF32")],
    # Of script 6, in bfloat16: attention by hand passes over its scores with 36 bytes each, 10 of
    # them for dropout (read, write, and the mask, forward and backward); theirs copies them before
    # it fills in the mask, and its gradients, too: 8 more.
    "no dropout": [scaled("attention", 34 / 36), without_dropout],
    # Of script 6 without dropout: LayerNorm, softmax, the loss and the sums of the residual stream
    # are in float32, and numbers are cast between. For each score 68 bytes, not 34; for each logit
    # 36, not 12; for each number of a layer's width 227, not 143, and 8 more casts.
    "autocast": [
        scaled("attention", 68 / 34, 12 / 8),
        scaled("loss", 3, 1.5),
        scaled("rest", 227 / 143, 1.5),
        scaled("optimizer", 2),
    ],
    "attention by hand": [attention_by_hand],
    "foreach": [scaled("optimizer", 3, 4)],  # as script 0's is of script 3's
    "tied head": [scaled("optimizer", TIED)],
    "tied head, gpt2-medium": [scaled("optimizer", TIED_MEDIUM)],
}


def compose(prediction: Prediction, names: list[str]) -> Prediction:
    """Applies the rules of these names, one after the other."""
    steps = prediction.steps
    for rule in chain.from_iterable(RULES[name] for name in names):
        steps = {batch: rule(step, batch) for batch, step in steps.items()}
    return prediction._replace(steps=steps)


def compared() -> list[dict]:
    """Returns each measured speed with what is predicted(), but those of which the GPU, the
    precision or the batch isn't known. Raises UserError, StackError."""
    others, predictions = published_others(), {}
    for name, source in others["sources"].items():
        prediction = prediction_of(source["script"], options_of(source))
        predictions[name] = compose(prediction, source.get("composed", []))
        if source["unaligned_head"]:
            predictions[name] = compose(predictions[name], ["unaligned head"])
    return [
        row | predicted(row, predictions[row["source"]])
        for row in others["rows"]
        if "unsure" not in row
    ]


def predicted(row: dict, prediction: Prediction) -> dict:
    """Returns what is predicted of a measured speed, whose steps may have several batches, and in
    which `group` it is: a "check"; "used" for a change of the model or "tuned" by; or "outside" of
    the model."""
    card, batch = CARDS[row["card"]], row["batch"]
    times, compiled = prediction.seconds(batch, card), is_compiled(prediction.steps[8])
    # Instead of an update, which passes 7 times over the weights, gradients are added: 3 times.
    saved = times["optimizer"] * 4 / 7 * (1 - 1 / row["micro_batches"])
    tok_per_sec = batch * prediction.context_length / (sum(times.values()) - saved)
    program = program_of(row)
    group = "tuned" if program in TUNED_ON else "used" if "used" in row else "check"
    return dict(
        predicted=tok_per_sec,
        error=tok_per_sec / row["tok_per_sec"] - 1,
        margin=margin(card, compiled, times),
        is_compiled=compiled,
        program=program,
        group=group if is_inside(card, batch) else "outside",
    )


def deviation(row: dict) -> float:
    """Returns how far a measured speed is from the predicted one, as a share of that, as a range's
    margin is."""
    return abs(row["tok_per_sec"] / row["predicted"] - 1)


def range_by(rows: list[dict], is_compiled: bool, without: str = "") -> float:
    """Returns the margin that holds SHARE of the checks, compiled or not, of all programs but one;
    that of all is what gpt_speed/speed.py has, or less."""
    return float(
        np.quantile(
            [
                deviation(row)
                for row in rows
                if row["group"] == "check"
                and row["program"] != without
                and row["is_compiled"] == is_compiled
            ],
            SHARE,
        )
    )


def inside_others_range(row: dict, rows: list[dict]) -> bool:
    """Returns whether a speed lies in the range by all other programs."""
    return deviation(row) <= range_by(rows, row["is_compiled"], without=row["program"])


def chosen(rows: list[dict], **fields) -> list[dict]:
    """Returns the rows whose fields have these values."""
    return [row for row in rows if fields.items() <= row.items()]


def accuracy_table(rows: list[dict]) -> Table:
    """Makes a line for the checks, for the compiled ones among them and the others; for figures
    that aren't checks; and for the last batch, as it was predicted before it changed the model."""
    checks, last = chosen(rows, group="check"), [row for row in rows if "first" in row]
    programs = len({row["program"] for row in checks})
    groups = {
        f"**checks: {programs} programs**": checks,
        "of these, compiled": chosen(checks, is_compiled=True),
        "of these, not compiled": chosen(checks, is_compiled=False),
        "of these, found last": chosen(last, group="check"),
        "*used* for a change": chosen(rows, group="used"),
        **{f"tuned on: *{name}*": chosen(rows, group="tuned", program=name) for name in TUNED_ON},
        f"outside: batches below {LEAST_BATCH}, AMD": chosen(rows, group="outside"),
    }
    lines = [accuracy(label, group, rows) for label, group in groups.items()]
    before = as_first_predicted(rows)
    lines.append(accuracy(f"the last {len(before)}, as first predicted", before, rows))
    return Table(
        [
            text_col("figures of", "label"),
            num_col("figures", "count"),
            num_col("median error", "median", ".0%"),
            num_col("within 20%", "near", ".0%"),
            num_col("in the printed range", "inside", ".0%"),
            num_col("in the range by all other programs", "left_out", ".0%"),
        ],
        lines,
    )


def as_first_predicted(rows: list[dict]) -> list[dict]:
    """Returns the last batch of figures, as they were predicted before they changed the model."""
    return [
        row | row["first"] | dict(error=row["first"]["predicted"] / row["tok_per_sec"] - 1)
        for row in rows
        if "first" in row
    ]


def accuracy(label: str, group: list[dict], rows: list[dict]) -> dict:
    """Returns a line of accuracy_table, without what its figures have no range for."""
    groups, inside, left_out = {row["group"] for row in group}, None, None
    if groups != {"outside"}:
        inside = mean(deviation(row) <= row["margin"] for row in group)
    if groups == {"check"}:
        left_out = mean(inside_others_range(row, rows) for row in group)
    return dict(
        label=label,
        count=len(group),
        inside=inside,
        left_out=left_out,
        median=median(abs(row["error"]) for row in group),
        near=mean(abs(row["error"]) <= NEAR for row in group),
    )


def program_table(rows: list[dict]) -> Table:
    """Makes a line for each program with checks, or with figures of the last batch, and one for all
    of them: how many were near when they were first predicted, and how many checks are today."""
    before, checks = as_first_predicted(rows), chosen(rows, group="check")
    names = list(dict.fromkeys(row["program"] for row in (*before, *checks)))
    lines = [
        program_line(name, chosen(before, program=name), chosen(checks, program=name))
        for name in names
    ]
    lines.sort(key=lambda line: (-line["count"], line["program"]))
    lines.append(program_line("**all**", before, checks))
    return Table(
        [
            text_col("program", "program"),
            num_col(f"of the last {len(before)}, within 20% at first", "first"),
            num_col("errors", "first_errors"),
            num_col("of the checks, within 20% today", "checks"),
            num_col("errors", "check_errors"),
        ],
        lines,
    )


def program_line(name: str, before: list[dict], checks: list[dict]) -> dict:
    return dict(
        program=name,
        count=len(before),
        first=near_text(before),
        first_errors=errors_text(before),
        checks=near_text(checks),
        check_errors=errors_text(checks),
    )


def near_text(group: list[dict]) -> str:
    """Returns "7 of 9"; "" without figures."""
    if not group:
        return ""
    return f"{sum(abs(row['error']) <= NEAR for row in group)} of {len(group)}"


def errors_text(group: list[dict]) -> str:
    """Returns the least and the greatest error, once where they are written alike."""
    errors = sorted(row["error"] for row in group)
    return " to ".join(dict.fromkeys(f"{error:+.0%}" for error in (*errors[:1], *errors[-1:])))


def memory_table() -> Table:
    """Makes a line for each script of the published ladder: its memory, and what is predicted."""
    published_gb, lines = {name: run.reserved_gb for name, run in published().items()}, []
    *runs, ddp = scripts().ladder(4)
    needs = [prediction_of(run.script, GPT2).needs for run in (*runs, ddp)]
    for run, need in zip(runs, needs, strict=False):
        if run.script in published_gb and run.number not in (2, 3, 4):  # these have the memory of 1
            batch = 8 if run.number < 10 else 32
            lines.append(
                beside(
                    published_gb[run.script],
                    need[batch].reserved / 1024,
                    label=run.label,
                    batch=batch,
                )
            )
    # 02 is the last script with DDP, the published program the one after technique 10 with it.
    added = median(
        need.reserved - needs[-2][batch].reserved
        for batch, need in needs[-1].items()
        if batch >= 32
    )
    lines.append(
        beside(
            published_gb["ddp"],
            (needs[10][32].reserved + added) / 1024,
            label="10, with DDP",
            batch=32,
        )
    )
    return Table(
        [
            text_col("script", "label"),
            num_col("batch", "batch"),
            num_col("published", "measured", ".2f"),
            num_col("predicted", "predicted", ".2f"),
            num_col("error", "error", "+.1%"),
        ],
        lines,
    )


def picture(rows: list[dict], palette: Palette = LIGHT):
    """Draws predicted over measured tok/sec: the last batch as first predicted, and names each
    program's worst on a GPU where the error is above NEAR; the earlier checks, and hollow what the
    model was tuned on."""
    last = as_first_predicted(rows)
    others = [row for row in rows if "first" not in row]
    checks = chosen(others, group="check")
    hollow = dict(color=palette.memory, markersize=4, markerfacecolor="none")
    small = dict(color=palette.memory, markersize=3)
    newest = dict(color=palette.gain, markersize=6)
    near = sum(abs(row["error"]) <= NEAR for row in last)
    title = f"{near} of the last {len(last)} figures were within 20% when we first predicted them"
    with load_pyplot().rc_context():
        figure, [(_, axes)] = rows_of_panels([title], [6.5], [1], palette)
        draw_scales(axes, palette)
        for label, group, style in (
            ("tuned on, as predicted today", chosen(others, group="tuned"), hollow),
            ("earlier checks, as predicted today", checks, small),
            (f"the last {len(last)}, as first predicted", last, newest),
        ):
            points = [(row["tok_per_sec"], row["predicted"]) for row in group]
            axes.plot(*zip(*points, strict=True), "o", label=label, **style)
        name_misses(axes, last)
        axes.legend(loc="lower right", frameon=False)
    return figure


def draw_scales(axes, palette: Palette) -> None:
    """Draws the same logarithmic scale for both speeds, and where they are equal or near."""
    ends = np.array([6e3, 1.2e6])
    axes.set(
        xscale="log",
        yscale="log",
        xlim=ends,
        ylim=ends,
        xlabel="measured by others, tok/sec",
        ylabel="predicted, tok/sec",
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.0f}")
    low, high = (1 - NEAR) * ends, (1 + NEAR) * ends
    axes.fill_between(ends, low, high, color=palette.before, label="±20%")
    axes.plot(ends, ends, color=palette.memory, linewidth=1)


def name_misses(axes, rows: list[dict]) -> None:
    """Writes the error of each program's worst prediction on a GPU where that is above NEAR."""
    worst = {
        (row["program"], row["card"]): row
        for row in sorted(rows, key=lambda row: abs(row["error"]))
        if abs(row["error"]) > NEAR
    }
    for (_, card), row in worst.items():
        place, side = ((-8, 4), "right") if row["error"] > 0 else ((8, -10), "left")
        axes.annotate(
            f"{card}: {row['error']:+.0%}",
            (row["tok_per_sec"], row["predicted"]),
            place,
            textcoords="offset points",
            ha=side,
            fontsize=10,
        )


def main() -> None:
    rows = compared()
    print(markdown(program_table(rows), accuracy_table(rows), memory_table()))
    for row in rows:
        print(
            f"{row['source']}, {row['card']}, batch {row['batch']}: {row['tok_per_sec']:,}"
            f" measured, {row['predicted']:,.0f} predicted ({row['error']:+.0%}, {row['group']})"
        )
    for name, palette in PICTURES.items():
        write_whole(ROOT / "docs" / name, picture_bytes(picture(rows, palette)))


if __name__ == "__main__":
    main()
