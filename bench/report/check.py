"""The tables of docs/gpus.md and docs/predictions.md: what is kept of predictions in
results/reference/, and beside it what others and this project's machines have measured."""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.catalogue import Run, published
from bench.common import REFERENCE, UserError, short_name
from bench.judge.rows import ratio
from bench.measure.lengths import PUBLISHED
from bench.predict.composed import composed
from bench.predict.speed import BANDWIDTH, CARDS, GB, KINDS, TERA, Card, card_of
from bench.predict.store import NAME, Prediction, kept, key_of
from bench.report.notes import today
from bench.report.tables import Table, found_in, number, rows_in, words

GPT2 = ["--model", "gpt2"]
WITHOUT_TENSOR_CORES = ["--dtype", "float32", "--no-compile"]  # 01, on a GPU before 7.0
LARGER = "gpt2-medium", "gpt2-large", "gpt2-xl"
PUBLISHED_ON = "A100 40 GB"  # probably: batch 32 was the largest that fitted
# The published clock ran on while, at each log line, eight workers started that load a batch of
# each text: the seconds of that, fitted. Lines came every 15 steps in 00, 10 in 01, 5 in 02.
PER_LINE = 0.4
# From rung 8 on the last line of an epoch is published, not the average, which has the start of the
# first workers and of CUDA in it: less, fitted to rungs 8 to 10. With DDP four processes start
# their workers at once, as long as PER_LINE.
LAST_LINE = 0.2
BY_HAND = "06-native-layers"  # the last rung with attention by hand


def kept_of(script: str | Path, options: list[str]) -> Prediction | None:
    """None where it isn't kept. Raises StackError."""
    return kept(today(), script, options, REFERENCE)


def prediction_of(script: str | Path, options: list[str]) -> Prediction:
    """Raises UserError where it isn't kept, StackError."""
    known = kept_of(script, options)
    if not known:
        raise UserError(f"results/reference/{NAME} lacks {key_of(today(), script, options)}:"
                        " python measure.py predict --all --results-dir results/reference")
    return known


def wanted() -> list[tuple[str | Path, list[str]]]:
    """The scripts, each with its options, whose predictions the tables need, and the variants of 01
    that may be in them. Raises UserError, StackError."""
    scripts = today()
    *rungs, ddp = scripts.rungs(4)
    pairs = [(run.script, GPT2) for run in (*rungs, ddp)]
    pairs += [(run.script, ["--model", "cpu-demo"]) for run in rungs]
    pairs += [(run.script, ["--model", model]) for model in LARGER
              for run in (rungs[0], rungs[-1], ddp)]
    pairs += [(scripts.float16(scripts.stage(stage)).script, ["--model", model])
              for model in ("gpt2", *LARGER) for stage in ("01", "02")]
    pairs += [(scripts.stage("01").script, ["--model", model, *WITHOUT_TENSOR_CORES])
              for model in ("gpt2", *LARGER)]
    pairs += [(source["script"], [*GPT2, *source["options"]])
              for source in published_others()["sources"].values()]
    pairs += [(run.script, [*GPT2, *run.options]) for run in alternatives()]
    # For bench.measure.lengths.fitting on a GPU without bfloat16 units.
    pairs.append((PUBLISHED["32"], [*GPT2, "--dtype", "float32"]))
    return pairs


def alternatives() -> list[Run]:
    """The variants of 01, on any card."""
    return today().variants(today().stage("01"), dict(gpus=1))[1:]


def published_others() -> dict:
    return json.loads((REFERENCE / "published-others.json").read_text(encoding="utf-8"))


# ---- Predicted beside measured -----------------------------------------------------------------


def beside(measured: float, predicted: float, **about) -> dict:
    """A row of a table of measured, or published, figures and predicted ones."""
    return about | dict(measured=measured, predicted=predicted, error=predicted / measured - 1)


@dataclass
class Expected:
    """A run on an H100, and the one that it is compared to: its figures have the names of Row's."""

    run: Run
    batch: int
    prediction: Prediction
    versus: "Expected | None"

    label = property(lambda row: row.run.label)
    tok_per_sec = property(lambda row: row.prediction.tok_per_sec(row.batch, CARDS["H100"]))
    reserved_gb = property(lambda row: row.prediction.needs[row.batch].reserved / 1024)
    factor = property(lambda row: row.versus and ratio(row.tok_per_sec, row.versus.tok_per_sec))
    memory_factor = property(
        lambda row: row.versus and ratio(row.reserved_gb, row.versus.reserved_gb))


def ladder() -> list[Expected]:
    """Every rung at its published batch size, over the one before; the last one is 02. Raises
    UserError, StackError."""
    rows: list[Expected] = []
    for place, run in enumerate(today().rungs(4)):
        rows.append(Expected(run, 8 if place < 10 else 32, prediction_of(run.script, GPT2),
                             rows[-1] if rows else None))
    return rows


def memory_table() -> Table:
    """Each rung's published memory beside the predicted one. Raises UserError, StackError."""
    theirs = published().reserved_gb
    *rungs, ddp = ladder()
    rows = [beside(theirs[str(rung.run.script)], rung.reserved_gb, label=rung.label,
                   batch=rung.batch) for rung in rungs if rung.run.script in theirs]
    # 02 is the last rung with DDP, the published program rung 10 with it.
    added = median(need.reserved - rungs[-1].prediction.needs[size].reserved
                   for size, need in ddp.prediction.needs.items() if size >= ddp.batch)
    rows.append(beside(theirs["ddp"], rungs[10].reserved_gb + added / 1024, label="10, with DDP",
                       batch=ddp.batch))
    return Table([words("rung", "label"), number("batch", "batch"),
                  number("published", "measured", ".2f"), number("predicted", "predicted", ".2f"),
                  number("error", "error", "+.1%")], rows)


def clock_table() -> Table:
    """Each rung's published time per step beside the predicted one, by the published clock and of
    training alone; and what each technique brings by both. Raises UserError, StackError."""
    card, rows = CARDS[PUBLISHED_ON], []
    for place, rung in enumerate(ladder()):
        if rung.run.published is None:
            continue
        ddp, batch = rung.run.torchrun, rung.batch
        known = rows[-1]["known"] if ddp else rung.prediction  # theirs is rung 10 with it
        steps = 5 if ddp else 10 if batch == 32 else 15
        theirs = 1000 * batch * known.context_length * rung.run.processes / rung.run.published
        alone, evaluation = (1000 * sum(known.seconds(size, card, part).values())
                             for size, part in ((batch, "step"), (8, "evaluation")))
        evaluation *= batch / 8
        line = LAST_LINE if place >= 8 and not ddp else PER_LINE
        row = beside(theirs, alone + (evaluation + 1000 * line) / steps, batch=batch,
                     label="10, with DDP" if ddp else rung.label, known=known, alone=alone,
                     left=((theirs - alone) * steps - evaluation) / 1000)
        if rows and not ddp:
            row["factors"] = {name: rows[-1][name] / rows[-1]["batch"] * batch / row[name]
                              for name in ("measured", "alone")}
        rows.append(row)
    return Table([
        words("rung", "label"), number("batch", "batch"),
        number("training only, predicted", "alone", ",.0f"),
        number("by the published clock, predicted", "predicted", ",.0f"),
        number("published", "measured", ",.0f"), number("error", "error", "+.0%"),
        number("implied s per log line", "left", ".2f"),
        number("× published", "factors.measured", ".2f"),
        number("× training only, predicted", "factors.alone", ".2f")], rows)


def others_predictions() -> dict[str, Prediction]:
    """Of what others have measured, by the source: of a program like it. Most of theirs keep the
    logits of the whole batch, so the variant of 01 is taken back to rung 13. Raises UserError."""
    found, by_hand = {}, prediction_of(BY_HAND, GPT2)
    for name, source in published_others()["sources"].items():
        known = prediction_of(source["script"], [*GPT2, *source["options"]])
        names = source.get("composed", []) + ["unaligned head"] * source["unaligned_head"]
        found[name] = composed(known, names, by_hand)
    return found


def others(known: dict[str, Prediction] | None = None) -> list[dict]:
    """What others have measured, with `predicted` tok/sec and, in GB, memory, and the `range` that
    is printed with it. Raises UserError."""
    known, rows = known or others_predictions(), []
    for row in published_others()["rows"]:
        batch, card, prediction = row["batch"], CARDS[row["card"]], known[row["source"]]
        need = prediction.needs.get(batch)
        rows.append(row | beside(
            row["tok_per_sec"], prediction.tok_per_sec(batch, card, row["micro_batches"]),
            reserved_gb=need and need.reserved / 1024, program=row["source"].partition(",")[0],
            range=prediction.range(batch, card), kind=card.kind,
            is_compiled=prediction.is_compiled))
    return rows


def others_memory_table() -> Table:
    """Their memory, as nvidia-smi tells it, beside the predicted one; the least of all cards. Below
    16 windows ours is set by its evaluation, in float32."""
    rows = {}
    for row in sorted(others(), key=lambda row: (row["batch"], row.get("mib", 0))):
        if row.get("mib") and row["batch"] >= 16:
            logits = 2 * row["batch"] * 1024 * 50_304 * 2 / 1024**3  # two copies in bfloat16
            rows.setdefault(row["batch"], row | beside(
                row["mib"] / 1024, row["reserved_gb"] + logits))
    return Table([
        number("batch", "batch"), number("reserved, predicted", "reserved_gb", ".2f"),
        number("with twice the logits", "predicted", ".2f"),
        number("measured", "measured", ".2f"), number("error", "error", "+.1%")],
        list(rows.values()))


def gpu_table(machine: Path) -> Table:
    """What a machine's GPU has measured of GPT-2 with one process, beside what is predicted. Raises
    UserError, StackError."""
    lines = []
    rows = [row for study in ("stages", "ladder") for row in rows_in(machine, study)
            if row.record and row.run.processes == 1]
    for row in sorted(rows, key=lambda row: str(row.run.stage or f"00 {row.run.rung:02}")):
        card, batch = card_of(row.measured.machine["name"]), row.record.config["batch_size"]
        known = kept_of(row.run.stage or row.run.script, GPT2)
        if not (card and known and batch in known.needs and row.record.config["model"] == "gpt2"):
            continue  # nothing is predicted of it
        if speed := known.tok_per_sec(batch, CARDS[card]):
            lines.append(dict(
                label=row.label, batch=batch, speed=beside(row.tok_per_sec, speed),
                memory=beside(row.reserved_gb, known.needs[batch].reserved / 1024)))
    return Table([words("script", "label"), number("batch", "batch"), *(
        number(heading, f"{figure}.{name}", form)
        for figure, unit, form, error in (("speed", "tok/sec", ",.0f", "+.0%"),
                                          ("memory", "GB", ".2f", "+.1%"))
        for heading, name, form in ((f"{unit}, measured", "measured", form),
                                    ("predicted", "predicted", form), ("error", "error", error))
    )], lines)


class OfCPU(Card):
    """A CPU as a card: whether matrices are aligned makes no difference."""

    def rate(self, precision: str, aligned: bool = True, padded: bool = True) -> float | None:
        known = self.bfloat16 or precision in ("float32", "TF32")
        return super().rate(precision) if known else None


def cpu_ladders() -> list[tuple[str, list[dict]]]:
    """(its name, its measured ladder beside the predicted one) of each committed machine without a
    GPU."""
    found = []
    for path in sorted(REFERENCE.glob("*/machine.json")):
        for measured, rows in found_in(path.parent, "ladder")[:1]:
            if measured.machine["device"] != "cpu":
                continue
            bandwidth = json.loads(path.read_text(encoding="utf-8"))["bandwidth"]
            float32, bfloat16 = (rate and rate / TERA for rate in map(
                measured.peak.get, ("float32", "bfloat16")))  # None where it has no units for that
            # Measured on it; speed.seconds takes a share of the bandwidth, as of a datasheet's.
            card = OfCPU(0, 0, bandwidth / GB / BANDWIDTH, float32, None,
                         bfloat16, bfloat16, bfloat16, bfloat16, ())
            lines = []
            for row in rows:
                if row.record and row.run.processes == 1:
                    known = prediction_of(str(row.run.rung), ["--model", "cpu-demo"])
                    predicted = known.tok_per_sec(row.record.config["batch_size"], card)
                    if predicted:  # in bfloat16, which a machine that trained in float32 lacks
                        lines.append(beside(row.tok_per_sec, predicted, label=row.label))
            found.append((
                f"{short_name(measured.machine)}, {measured.machine['threads']} cores", lines))
    return found


def cpu_table() -> Table:
    """cpu_ladders() side by side."""
    columns, rows = [words("rung", "label")], {}
    for place, (name, lines) in enumerate(cpu_ladders()):
        columns += [number(f"{name}: measured", f"{place}.measured", ",.0f"),
                    number("predicted", f"{place}.predicted", ",.0f"),
                    number("error", f"{place}.error", "+.0%")]
        for line in lines:
            rows.setdefault(line["label"], dict(label=line["label"]))[str(place)] = line
    return Table(columns, list(rows.values()))


# ---- What to expect ----------------------------------------------------------------------------


def expected() -> list[Expected]:
    """What every rung on one GPU, over the one before, and each variant that can be traced, over
    01, should bring on an H100. Raises UserError."""
    rungs = [rung for rung in ladder() if not rung.run.torchrun]
    found = [(run, kept_of(run.script, [*GPT2, *run.options])) for run in alternatives()]
    return rungs + [Expected(run.but(label=f"`{run.label}`"), 32, known, rungs[-1])
                    for run, known in found if known]  # the others can't be traced


def where_table() -> Table:
    """Where a step of 01 goes on three cards, in milliseconds. Raises UserError, StackError."""
    columns, rows = [words("", "kind")], {kind: {} for kind in KINDS}
    known = prediction_of("01", GPT2)
    for name in ("A100 80 GB", "H100", "H200"):
        times = known.seconds(32, CARDS[name])
        whole = sum(times.values())
        columns += [number(f"{name}, ms", f"{name}.ms", ".1f"),
                    number("× speed without", f"{name}.without", ".2f")]
        for kind, seconds in times.items():
            rows[kind][name] = dict(ms=1000 * seconds, without=whole / (whole - seconds))
    return Table(columns, [dict(kind=kind) | row for kind, row in rows.items()
                           if any(each["ms"] for each in row.values())])
