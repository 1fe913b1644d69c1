"""Compare predicted speeds with those that other people have measured with their own programs.

    python docs/check_predictions.py    # prints tables of docs/, and draws docs/predictions.png

results/reference/published-others.json has the measured speeds. A program of others is predicted
from the stored work of the script of ours that is most like it; the rules below count what differs.
Their bytes are those of GPT-2 124M with 1,024 tokens, counted for each kernel that reads or writes
a number of a matrix; nothing in them is fitted to a speed. The constants of bench/predict/speed.py
and the ranges were chosen by the figures of one program, "twenty cards": judge by the others.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.cards import CARDS  # noqa: E402
from bench.catalogue import published  # noqa: E402
from bench.common import write_whole  # noqa: E402
from bench.predict.speed import KINDS, Work  # noqa: E402
from bench.predict.store import Prediction  # noqa: E402
from bench.report.pictures import NOISE, OWN, key, lay_rows, picture_bytes, rows_of_panels  # noqa: E402
from bench.report.prediction_tables import GPT2, beside, ladder, prediction_of, published_others  # noqa: E402
from bench.report.tables import Table, markdown, num_col, text_col  # noqa: E402

PICTURE = ROOT / "docs" / "predictions.png"
TUNED_ON = "twenty cards"
BY_HAND = "06-native-layers"  # the last script with attention by hand
HELD_OUT_COLOUR, TUNED_COLOUR = OWN, "0.6"

# ---- Programs of others, by what differs from ours ----------------------------------------------

SCORES = 12 * 12 * 1024  # attention scores for each token: layers, heads, tokens
HIDDEN = 25 * 768  # numbers for each token that dropout passes over: the embedding's, 2 of a layer
TIED = 124.5 / 163.0  # weights with one matrix for embedding and head, of those with two

Step = list[Work]
Rule = Callable[[Step, int], Step]  # from a step and its tokens


def scaled(kind: str, size: float, kernels: float = 1) -> Rule:
    """Scales the bytes and the number of the kernels of a kind that aren't products."""
    return lambda step, _: [
        work._replace(size=work.size * size, kernels=work.kernels * kernels)
        if work.kind == kind and not work.flops else work for work in step]


def without_dropout(step: Step, tokens: int) -> Step:
    """Of script 6, in bfloat16: attention by hand passes over its scores with 36 bytes each, 10 of
    them for dropout (read, write, and the mask, forward and backward); theirs copies them before
    it fills in the mask, and its gradients, too: 8 more."""
    return [work._replace(size=work.size - tokens * HIDDEN * 10, kernels=work.kernels - 50)
            if work.kind == "rest" else work
            for work in scaled("attention", 34 / 36)(step, tokens)]


def in_precision(precision: str) -> Rule:
    """Takes four bytes a number where the script has bfloat16's two."""
    return lambda step, _: [work._replace(
        size=2 * work.size, precision=work.precision and precision) for work in step]


def autocast(step: Step, tokens: int) -> Step:
    """Of script 6 without dropout: LayerNorm, softmax, the loss and the sums of the residual stream
    are in float32, and numbers are cast between. For each score 68 bytes, not 34; for each logit
    36, not 12; for each number of a layer's width 227, not 143, and 8 more casts."""
    for kind, size, kernels in (("attention", 68 / 34, 12 / 8), ("loss", 3, 1.5),
                                ("rest", 227 / 143, 1.5), ("optimizer", 2, 1)):
        step = scaled(kind, size, kernels)(step, tokens)
    return step


RULES: dict[str, Rule] = {
    "unaligned head": lambda step, _: [  # a vocabulary that isn't padded
        work._replace(is_aligned=work.is_aligned and work.kind != "head") for work in step],
    "no dropout": without_dropout, "float32": in_precision("float32"),
    "TF32": in_precision("TF32"), "autocast": autocast,
    "foreach": scaled("optimizer", 3, 4),  # as script 0's is of script 3's
    "tied head": scaled("optimizer", TIED),
}


def compose(known: Prediction, names: list[str], by_hand: Prediction) -> Prediction:
    """Applies the rules that `names` tell, one after the other. `by_hand` is script 6, whose
    attention "attention by hand" takes."""
    works = {}
    for batch, parts in known.works.items():
        step, tokens = parts["step"], batch * known.context_length
        for name in names:
            if name == "attention by hand":
                step = [work for work in step if work.kind != "attention"] + [
                    work for work in by_hand.works[batch]["step"]
                    if work.kind == "attention" and work.precision] + [
                    Work("attention", "", True, 24, 0, tokens * SCORES * 10)]
            else:
                step = RULES[name](step, tokens)
        works[batch] = parts | dict(step=step)
    return known._replace(works=works)


# ---- Predicted and measured ---------------------------------------------------------------------

def compared() -> list[dict]:
    """Returns each measured speed with `predicted`, `error` and the printed `range`, but those of
    which the GPU, the precision or the batch isn't known. Raises UserError, StackError."""
    by_hand, known = prediction_of(BY_HAND, GPT2), {}
    for name, source in published_others()["sources"].items():
        rules = source.get("composed", []) + ["unaligned head"] * source["unaligned_head"]
        known[name] = compose(prediction_of(source["script"], [*GPT2, *source["options"]]),
                              rules, by_hand)
    rows = []
    for row in published_others()["rows"]:
        if "unsure" not in row:
            prediction, card = known[row["source"]], CARDS[row["card"]]
            predicted = prediction.tok_per_sec(row["batch"], card, row["micro_batches"])
            rows.append(row | dict(
                program=row["source"].partition(",")[0], kind=card.kind, predicted=predicted,
                error=predicted / row["tok_per_sec"] - 1, is_compiled=prediction.is_compiled,
                range=prediction.range(row["batch"], card)))
    return rows


def accuracy(rows: list[dict]) -> dict:
    """Returns how many figures there are, their median error, and the shares of them within 20 %
    and within the printed range."""
    errors = [abs(row["error"]) for row in rows]
    return dict(count=len(rows), median=median(errors), near=mean(error <= 0.2 for error in errors),
                inside=mean(abs(1 / (1 + row["error"]) - 1) <= row["range"] for row in rows))


def accuracy_table(rows: list[dict]) -> Table:
    """Makes a line for the held-out figures, for each kind of GPU and script among them, and for
    those that constants were tuned on."""
    held_out = [row for row in rows if row["program"] != TUNED_ON]
    lines = [dict(label="**held out: 5 programs**") | accuracy(held_out)]
    for compiled in (True, False):
        for kind in dict.fromkeys(row["kind"] for row in held_out):
            if some := [row for row in held_out
                        if (row["kind"], row["is_compiled"]) == (kind, compiled)]:
                label = f"{kind}, {'compiled' if compiled else 'not compiled'}"
                lines.append(dict(label=label) | accuracy(some))
    tuned = [row for row in rows if row["program"] == TUNED_ON]
    lines.append(dict(label=f"tuned on: *{TUNED_ON}*, compiled") | accuracy(tuned))
    return Table([text_col("figures of", "label"), num_col("figures", "count"),
                  num_col("median error", "median", ".0%"), num_col("within 20 %", "near", ".0%"),
                  num_col("in the printed range", "inside", ".0%")], lines)


def memory_table() -> Table:
    """Makes a line for each script of the published ladder: its memory, and what is predicted."""
    theirs = published().reserved_gb
    *rungs, ddp = ladder()
    lines = [beside(theirs[rung.run.script], rung.reserved_gb, label=rung.run.label,
                    batch=rung.batch)
             for rung in rungs if rung.run.script in theirs]
    # 02 is the last rung with DDP, the published program rung 10 with it.
    added = median(need.reserved - rungs[-1].prediction.needs[size].reserved
                   for size, need in ddp.prediction.needs.items() if size >= ddp.batch)
    lines.append(beside(theirs["ddp"], rungs[10].reserved_gb + added / 1024, label="10, with DDP",
                        batch=ddp.batch))
    return Table([text_col("rung", "label"), num_col("batch", "batch"),
                  num_col("published", "measured", ".2f"), num_col("predicted", "predicted", ".2f"),
                  num_col("error", "error", "+.1%")], lines)


def where_table() -> Table:
    """Makes a line for each kind of work: its milliseconds in a step of 01 on three GPUs."""
    columns, rows = [text_col("", "kind")], {kind: {} for kind in KINDS}
    known = prediction_of("01", GPT2)
    for name in ("A100 80 GB", "H100", "H200"):
        times = known.seconds(32, CARDS[name])
        whole = sum(times.values())
        columns += [num_col(f"{name}, ms", f"{name}.ms", ".1f"),
                    num_col("× speed without", f"{name}.without", ".2f")]
        for kind, seconds in times.items():
            rows[kind][name] = dict(ms=1000 * seconds, without=whole / (whole - seconds))
    return Table(columns, [dict(kind=kind) | row for kind, row in rows.items()
                           if any(each["ms"] for each in row.values())])


def picture(rows: list[dict]):
    """Draws predicted over measured tok/sec for each figure, with the printed range."""
    near = accuracy([row for row in rows if row["program"] != TUNED_ON])["near"]
    rows = sorted(rows, key=lambda row: (row["program"] == TUNED_ON, row["tok_per_sec"]))
    figure, [(subfigure, axes)] = rows_of_panels(
        [f"{near:.0%} of the held-out speeds are predicted within 20 %"],
        [1.6 + 0.18 * len(rows)], [1])
    axes.axvline(1, color="0.5", linewidth=1)
    lay_rows(axes, len(rows))
    for place, row in enumerate(rows):
        share = 1 + row["error"]
        axes.plot([share * (1 - row["range"]), share * (1 + row["range"])], [place, place],
                  color=NOISE, linewidth=5, solid_capstyle="butt", zorder=0)
        axes.plot(share, place, "o", markersize=5,
                  color=TUNED_COLOUR if row["program"] == TUNED_ON else HELD_OUT_COLOUR)
    axes.set_yticks(range(len(rows)), [
        f"{row['card']}, batch {row['batch']}: {row['tok_per_sec']:,}" for row in rows], fontsize=9)
    axes.set_xlabel("predicted tok/sec divided by measured; bars: the printed range")
    subfigure.legend(handles=[
        key("held out", color=HELD_OUT_COLOUR, marker="o", linestyle=""),
        key("the program that constants were tuned on", color=TUNED_COLOUR, marker="o",
            linestyle="")], loc="outside lower center", ncols=2, frameon=False)
    return figure


def main() -> None:
    rows = compared()
    print(markdown(accuracy_table(rows), memory_table(), where_table()))
    for row in rows:
        print(f"{row['source']}, {row['card']}, batch {row['batch']}: {row['tok_per_sec']:,}"
              f" measured, {row['predicted']:,.0f} predicted ({row['error']:+.0%})")
    write_whole(PICTURE, picture_bytes(picture(rows), "png"))


if __name__ == "__main__":
    main()
