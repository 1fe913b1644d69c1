"""The tables of docs/fits.md, docs/gpus.md and docs/predictions.md: what is kept of predictions in
results/reference/, and beside it what others and this project's machines have measured."""

import json
import re
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.catalogue import EPOCHS, FLOAT16, Run, Scripts, published
from bench.common import REFERENCE, UserError, short_name
from bench.measure.lengths import PUBLISHED
from bench.predict.speed import BANDWIDTH, CARDS, GB, KINDS, RANGE, TERA, Card
from bench.predict.store import NAME, Prediction, earlier, kept, key_of, largest
from bench.report.tables import Column, Table, cell, found_in, markdown
from patches import stack

GPT2 = ["--model", "gpt2"]
LARGER = "gpt2-medium", "gpt2-large", "gpt2-xl"
WELL_KNOWN = "RTX 3060", "RTX 4090", "A100 80 GB", "H100"
PUBLISHED_ON = "A100 40 GB"  # probably: batch 32 was the largest that fitted
# The published clock ran on while, at each log line, eight workers started that load a batch of
# each text: the seconds of that, fitted. Lines came every 15 steps in 00, 10 in 01, 5 in 02.
PER_LINE = 0.4


used: list[tuple[str | Path, list[str], Prediction]] = []  # by the table that is being made


def prediction_of(scripts: Scripts, script: str | Path, options: list[str]) -> Prediction:
    """Raises UserError where it isn't kept."""
    known = kept(scripts, script, options, REFERENCE)
    if not known:
        raise UserError(f"results/reference/{NAME} lacks {key_of(scripts, script, options)}:"
                        " python measure.py predict --all --results-dir results/reference")
    used.append((script, options, known))
    return known


def wanted(scripts: Scripts) -> list[tuple[str | Path, list[str]]]:
    """The scripts, each with its options, whose predictions the tables need, and the variants of 01
    that may be in them. Raises UserError, StackError."""
    *rungs, ddp = scripts.rungs(4)
    pairs = [(run.script, GPT2) for run in (*rungs, ddp)]
    pairs += [(run.script, ["--model", "cpu-demo"]) for run in rungs]
    pairs += [(run.script, ["--model", model]) for model in LARGER
              for run in (rungs[0], rungs[-1], ddp)]
    pairs += [(scripts.float16(scripts.stage(stage)).script, ["--model", model])
              for model in ("gpt2", *LARGER) for stage in ("01", "02")]
    pairs += [(source["script"], [*GPT2, *source["options"]])
              for source in published_others()["sources"].values()]
    pairs += [(run.script, [*GPT2, *run.options]) for run in alternatives(scripts)]
    # For bench.measure.lengths.fitting on a GPU without bfloat16 units.
    pairs.append((PUBLISHED["32"], [*GPT2, "--dtype", "float32"]))
    return pairs


def alternatives(scripts: Scripts) -> list[Run]:
    """The variants of 01, on any card."""
    return scripts.variants(scripts.stage("01"), dict(gpus=1))[1:]


def published_others() -> dict:
    return json.loads((REFERENCE / "published-others.json").read_text(encoding="utf-8"))


def ladder(scripts: Scripts) -> list[tuple[int, Run, int, Prediction]]:
    """(number, rung, published batch size, its prediction) of each rung."""
    return [(number, run, 8 if number < 10 else 32, prediction_of(scripts, run.script, GPT2))
            for number, run in enumerate(scripts.rungs(4))]


def memory_table() -> Table:
    """Each rung's published memory beside the predicted one. Raises UserError, StackError."""
    theirs, rows, ours = published().reserved_gb, [], []
    before: Prediction = None  # of the rung before
    for number, run, batch, known in ladder(Scripts()):
        ours.append(known.needs[batch].reserved / 1024)
        if run.torchrun:  # 02 is the last rung with DDP, the published program rung 10 with it
            added = median(known.needs[size].reserved - before.needs[size].reserved
                           for size in known.needs if size >= batch)
            rows.append(("10, with DDP", 32, theirs["ddp"], ours[10] + added / 1024))
        elif run.script in theirs:
            rows.append((run.label, batch, theirs[str(run.script)], ours[number]))
        before = known
    return Table([
        Column("rung", lambda row: row[0], True), Column("batch", lambda row: str(row[1])),
        Column("published", lambda row: f"{row[2]:.2f}"),
        Column("predicted", lambda row: f"{row[3]:.2f}"),
        Column("error", lambda row: f"{row[3] / row[2] - 1:+.1%}")], rows)


def clock_table() -> Table:
    """Each rung's published time per step beside the predicted one, by the published clock and of
    training alone; and what each technique brings by both. Raises UserError, StackError."""
    card, rows = CARDS[PUBLISHED_ON], []
    for number, run, batch, known in ladder(Scripts()):
        ddp = run.torchrun  # the published one is rung 10 with it
        if run.published is None:
            continue
        prediction = rows[-1]["prediction"] if ddp else known
        alone = sum(prediction.seconds(batch, card).values())
        evaluation = sum(prediction.seconds(8, card, "evaluation").values()) * batch / 8
        steps = 5 if ddp else 10 if number == 10 else 15
        tokens = batch * prediction.context_length
        row: dict[str, Any] = dict(
            label="10, with DDP" if ddp else run.label, batch=batch, steps=steps,
            evaluation=evaluation, alone=alone, clock=alone + (evaluation + PER_LINE) / steps,
            published=tokens * run.processes / run.published, prediction=prediction)
        if rows and not ddp:
            before = rows[-1]
            row["factor"] = before["alone"] / before["batch"] * batch / alone
            row["theirs"] = before["published"] / before["batch"] * batch / row["published"]
        rows.append(row)

    def milliseconds(heading: str, name: str) -> Column:
        return Column(heading, lambda row: f"{1000 * row[name]:,.0f}")

    return Table([
        Column("rung", lambda row: row["label"], True),
        Column("batch", lambda row: str(row["batch"])),
        milliseconds("training alone, predicted", "alone"),
        milliseconds("by the published clock, predicted", "clock"),
        milliseconds("published", "published"),
        Column("error", lambda row: f"{row['clock'] / row['published'] - 1:+.0%}"),
        Column("left per log line, s", lambda row: "{:.2f}".format(
            (row["published"] - row["alone"]) * row["steps"] - row["evaluation"])),
        Column("× published", lambda row: cell(row.get("theirs"), ".2f")),
        Column("× training alone, predicted", lambda row: cell(row.get("factor"), ".2f"))], rows)


def others() -> list[dict]:
    """What others have measured, with `predicted` tok/sec and, in MiB, memory. Most of theirs keep
    the logits of the whole batch, so the variant of 01 is taken back to rung 13. Raises
    UserError."""
    data, scripts, rows = published_others(), Scripts(), []
    for row in data["rows"]:
        source = data["sources"][row["source"]]
        known = prediction_of(scripts, source["script"], [*GPT2, *source["options"]])
        need = known.needs.get(row["batch"])
        if source["unaligned_head"]:  # as our script's isn't
            known = known._replace(works={
                batch: {part: {name + " unaligned" * name.startswith("head "): figures
                               for name, figures in work.items()} for part, work in each.items()}
                for batch, each in known.works.items()})
        rows.append(row | dict(
            predicted_mib=need and need.reserved,
            predicted=known.tok_per_sec(row["batch"], CARDS[row["card"]], row["micro_batches"])))
    return rows


def off(row: dict) -> float:
    return row["predicted"] / row["tok_per_sec"] - 1


def others_table() -> Table:
    """Their tok/sec beside the predicted one."""
    return Table([
        Column("measured by", lambda row: row["source"], True),
        Column("card", lambda row: row["card"], True),
        Column("batch", lambda row: str(row["batch"])),
        Column("measured", lambda row: f"{row['tok_per_sec']:,}"),
        Column("predicted", lambda row: f"{row['predicted']:,.0f}"),
        Column("error", lambda row: f"{off(row):+.0%}")], others())


def others_memory_table() -> Table:
    """Their memory, as nvidia-smi tells it, beside the predicted one; the least of all cards. Below
    16 windows ours is set by its evaluation, in float32."""
    least = {}
    for row in others():
        if row.get("mib") and row["batch"] >= 16:
            least[row["batch"]] = min(least.get(row["batch"], row), row, key=lambda x: x["mib"])

    def logits(row: dict) -> float:  # two copies in bfloat16
        return 2 * row["batch"] * 1024 * 50_304 * 2 / 1024**2

    def gb(heading: str, value) -> Column:
        return Column(heading, lambda row: f"{value(row) / 1024:.2f}")

    return Table([
        Column("batch", lambda row: str(row["batch"])),
        gb("reserved, predicted", lambda row: row["predicted_mib"]),
        gb("and twice the logits", lambda row: row["predicted_mib"] + logits(row)),
        gb("in use there", lambda row: row["mib"]),
        Column("error", lambda row:
               f"{(row['predicted_mib'] + logits(row)) / row['mib'] - 1:+.1%}")],
        [least[batch] for batch in sorted(least)])


def summary_of_others() -> str:
    """One line: how far off the predictions were."""
    known = others()
    first = [abs(off(row)) for row in known if row["source"] == "twenty cards"]
    rest = [abs(off(row)) for row in known if row["source"] != "twenty cards"]
    cards = {row["card"] for row in known if row["source"] == "twenty cards"}
    inside = sum(abs(1 / (1 + off(row)) - 1) <= RANGE
                 for row in known if row["source"] == "twenty cards")
    return (f"{len(cards)} cards, one program: {inside} of {len(first)} figures lie in the printed"
            f" range of {RANGE:.0%} either way; median error {median(first):.0%} (of what was"
            f" measured), worst {max(first):.0%}."
            f" Other programs: median {median(rest):.0%}, worst {max(rest):.0%}.")


def where_table() -> Table:
    """Where a step of 01 goes on three cards, in milliseconds. Raises UserError, StackError."""
    scripts, names = Scripts(), ("A100 80 GB", "H100", "H200")
    known = prediction_of(scripts, scripts.stage("01").script, GPT2)
    times = {name: known.seconds(32, CARDS[name]) for name in names}
    columns = [Column("", lambda kind: kind, True)]
    for name in names:
        columns += [
            Column(f"{name}, ms", partial(milliseconds, times[name])),
            Column("× speed without", partial(speed_without, times[name]))]
    return Table(columns, [kind for kind in KINDS if any(each[kind] for each in times.values())])


def milliseconds(times: dict[str, float], kind: str) -> str:
    return f"{1000 * times[kind]:.1f}"


def speed_without(times: dict[str, float], kind: str) -> str:
    whole = sum(times.values())
    return f"{whole / (whole - times[kind]):.2f}"


class Expected(NamedTuple):
    """What a rung, over the one before, or a variant, over 01, should bring on an H100."""

    script: str | Path
    label: str
    batch: int
    prediction: Prediction
    versus: "Expected | None"

    @property
    def tok_per_sec(self) -> float:
        return self.prediction.tok_per_sec(self.batch, CARDS["H100"])

    @property
    def gigabytes(self) -> float:
        return self.prediction.needs[self.batch].reserved / 1024


def expected() -> list[Expected]:
    """Of every rung on one GPU, and of each variant that can be traced. Raises UserError."""
    scripts, rows, before = Scripts(), [], None
    for _, run, batch, known in ladder(scripts):
        if not run.torchrun:
            before = Expected(run.script, run.label, batch, known, before)
            rows.append(before)
    for run in alternatives(scripts):
        known = kept(scripts, run.script, [*GPT2, *run.options], REFERENCE)
        if known:  # else it can't be traced
            used.append((run.script, [*GPT2, *run.options], known))
            rows.append(Expected(run.script, f"`{run.label}`", 32, known, before))
    return rows


def expected_table() -> Table:
    """A row for each of them. Raises UserError, StackError."""
    def factor(name: str):
        return lambda row: row.versus and f"{getattr(row, name) / getattr(row.versus, name):.2f}"

    return Table([
        Column("run", lambda row: row.label, True), Column("batch", lambda row: str(row.batch)),
        Column("tok/sec", lambda row: f"{row.tok_per_sec:,.0f}"),
        Column("× speed", factor("tok_per_sec")),
        Column("GB", lambda row: f"{row.gigabytes:.2f}"),
        Column("× memory", factor("gigabytes"))], expected())


class OfCPU(Card):
    """A CPU as a card: whether matrices are aligned makes no difference."""

    def rate(self, precision: str, aligned: bool = True) -> float | None:
        return super().rate(precision) if self.bfloat16 or precision == "float32" else None


def cpu_tables() -> list[Table]:
    """For each committed machine without a GPU its measured ladder beside the predicted one."""
    tables, scripts = [], Scripts()
    for path in sorted(REFERENCE.glob("*/machine.json")):
        found = found_in(path.parent, "ladder")
        if not found or found[0][0].machine["device"] != "cpu":
            continue
        measured, rows = found[0]
        machine = json.loads(path.read_text(encoding="utf-8"))
        rates = {name: rate / TERA for name, rate in measured.peak.items()}
        bfloat16 = rates.get("bfloat16")  # None where it has no units for that
        # Measured on it; speed.seconds takes a share of the bandwidth, as of a datasheet's.
        card = OfCPU(0, 0, machine["bandwidth"] / GB / BANDWIDTH, rates["float32"], None,
                     bfloat16, bfloat16, bfloat16, bfloat16, ())
        lines = []
        for row in rows:
            if row.record and row.run.processes == 1:
                known = prediction_of(
                    scripts, str(row.run.rung), ["--model", "cpu-demo"])
                predicted = known.tok_per_sec(row.record.config["batch_size"], card)
                if predicted:  # in bfloat16, which a machine that trained in float32 lacks
                    lines.append((row, predicted, row.tok_per_sec))
        tables.append(Table([
            Column("rung", lambda line: line[0].label, True),
            Column("measured", lambda line: f"{line[2]:,.0f}"),
            Column("predicted", lambda line: f"{line[1]:,.0f}"),
            Column("error", lambda line: f"{line[1] / line[2] - 1:+.0%}")],
            lines, f"{short_name(measured.machine)}, {measured.machine['threads']} cores:"))
    return tables


def cards_table(short: bool = False) -> Table:
    """What fits each card, how fast 00 and 01 are there, and how to begin; `short`: of four cards,
    for gpt2. Raises UserError, StackError."""
    scripts = Scripts()

    def prediction(stage: str, model: str, card: str) -> Prediction:
        run = scripts.stage(stage)
        if stage == "01" and not CARDS[card].bfloat16:
            run = scripts.float16(run)
        return prediction_of(scripts, run.script, ["--model", model])

    def fits(stage: str, model: str, card: str) -> int:
        return largest(prediction(stage, model, card).needs, CARDS[card].mib)

    def batch_of(stage: str, card: str) -> int:
        return min({"00": 8, "01": 32}[stage], fits(stage, "gpt2", card))

    def speed(stage: str, card: str) -> str:
        batch = batch_of(stage, card)
        return prediction(stage, "gpt2", card).speed_range(batch, CARDS[card]) if batch else "–"

    def minutes(card: str) -> str:
        return " / ".join(f"{prediction(stage, 'gpt2', card).minutes(batch, CARDS[card]):,.1f}"
                          if (batch := batch_of(stage, card)) else "–" for stage in ("00", "01"))

    def factor(card: str) -> str:
        one, other = (batch_of(stage, card) and prediction(stage, "gpt2", card).tok_per_sec(
            batch_of(stage, card), CARDS[card]) for stage in ("00", "01"))
        return f"{other / one:.1f}" if one and other else "–"

    def begin(card: str) -> str:
        batch = fits("01", "gpt2", card)
        if not batch:
            return ""
        if not CARDS[card].bfloat16:
            return (f"`make bench`; `python patches/stack.py compose {FLOAT16} --out my.py`,"
                    f" `python my.py --batch-size {min(32, batch)}`")
        if batch >= 32:
            return "`make bench`; `python 01_opt_single_gpu.py`"
        return (f"`make bench`; 32 windows per update: compose `step-accumulation`,"
                f" `--micro-batches {32 // batch}`")

    def fitting(stage: str, model: str) -> Column:
        return Column(f"largest batch of {stage}, {model}",
                      lambda card: str(fits(stage, model, card) or "–"))

    def speeds(stage: str) -> Column:
        return Column(f"thousand tok/sec of {stage}", partial(speed, stage))

    cards = sorted(CARDS, key=lambda card: (CARDS[card].mib, CARDS[card].capability))
    names = [Column("card", lambda card: card, True),
             Column("GB", lambda card: f"{CARDS[card].mib / 1024:.0f}")]
    if short:
        return Table([*names, fitting("00", "gpt2"), fitting("01", "gpt2"), speeds("00"),
                      speeds("01"), Column("×", factor)],
                     [card for card in cards if card in WELL_KNOWN])
    return Table([
        *names, Column("compute capability", lambda card: f"{CARDS[card].capability:.1f}"),
        fitting("00", "gpt2"),
        *(fitting("01", model) for model in ("gpt2", *LARGER)),
        speeds("00"), speeds("01"),
        Column(f"minutes of {EPOCHS} epochs, 00 / 01", minutes),
        Column("begin with", begin, True)], cards)


def hardware_table() -> Table:
    """The techniques and variants that older cards don't have, by their headers. Raises
    StackError."""
    rows = []
    for patch in (*stack.load(), *stack.load_variants()):
        needed = re.search(r"compute capability (\d+\.\d+)", patch.fields["Hardware"])
        if needed:
            rows.append((f"[{patch.fields['Technique']}](../{patch.file})", float(needed[1])))
    return Table([
        Column("technique", lambda row: row[0], True),
        Column("from compute capability", lambda row: f"{row[1]:.1f}"),
        Column("not on", lambda row: ", ".join(
            card for card in CARDS if CARDS[card].capability < row[1]) or "(none of these)", True)],
        sorted(rows, key=lambda row: row[1]))


TABLES = {  # by the name of their marker
    "fits": lambda: markdown(memory_table()),
    "fits-others": lambda: markdown(others_memory_table()),
    "gpus": lambda: markdown(cards_table()),
    "gpus-short": lambda: markdown(cards_table(short=True)),
    "hardware": lambda: markdown(hardware_table()),
    "clock": lambda: markdown(clock_table()), "others": lambda: markdown(others_table()),
    "others-summary": summary_of_others, "where": lambda: markdown(where_table()),
    "expected": lambda: markdown(expected_table()),
    "cpus": lambda: "\n".join(map(markdown, cpu_tables())),
}


def table(name: str) -> str:
    """One of TABLES, with a line where a prediction in it is of an earlier version of its script.
    Raises as they do."""
    used.clear()
    text = TABLES[name]()
    line = earlier(Scripts(), used)
    return f"{text}\n{line}\n" if line else text
