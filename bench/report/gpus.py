"""The tables of docs/gpus.md: what fits each GPU and how fast, and what older ones lack."""

import re

from bench.catalogue import EPOCHS, FLOAT16, Run, Scripts
from bench.predict.speed import CARDS, Card
from bench.predict.store import OTHERS, largest
from bench.report import check
from bench.report.check import LARGER, prediction_of
from bench.report.notes import today
from bench.report.tables import Table, number, words
from patches import stack

# 01 reserved 13.64 GB on an H100 where 11.90 were predicted; so a batch fits for sure only where it
# does with this many times its predicted memory.
RESERVE = 1.15


def in_place(scripts: Scripts, run: Run, card: Card) -> Run:
    """What a card without bfloat16 units trains in place of 01 or 02; one before 7.0 has no tensor
    cores either, and none of the compiler's kernels."""
    if run.stage in (None, "00") or card.capability >= 8:
        return run
    if card.capability >= 7:
        return scripts.float16(run)
    return run.but(name=f"{run.name}-float32", label=f"{run.label} in float32, not compiled",
                   options=(*run.options, *check.WITHOUT_TENSOR_CORES))


def on_card(name: str, models: tuple[str, ...]) -> dict:
    """What fits a GPU, how fast 00 and 01 are there, and how to begin."""
    card, speeds, minutes, batches = CARDS[name], [], [], []
    row: dict = {}
    for stage, default in (("00", 8), ("01", 32)):
        run = in_place(today(), today().stage(stage), card)
        predicted = {model: prediction_of(run.script, ["--model", model, *run.options])
                     for model in (models if stage == "01" else models[:1])}
        room = card.mib if stage == "00" else int((card.mib - OTHERS) / RESERVE) + OTHERS
        sure = {model: largest(each.needs, room) for model, each in predicted.items()}
        for model, each in predicted.items():
            most = largest(each.needs, card.mib)
            row[f"{stage}, {model}"] = str(sure[model] or "–") + (
                f" ({most}?)" if most > sure[model] else "")
        known, batch = predicted["gpt2"], min(default, sure["gpt2"])
        batches.append(batch)
        speeds.append(batch and known.tok_per_sec(batch, card))
        row[stage] = known.speed_range(batch, card) if batch else "–"
        minutes.append(f"{known.minutes(batch, card):,.1f}" if batch else "–")
    return row | dict(card=name + " °" * (not card.is_checked), gb=card.mib / 1024, speeds=speeds,
                      batches=batches, capability=card.capability, minutes=" / ".join(minutes),
                      begin=begin(card, sure["gpt2"]))


def begin(card: Card, batch: int) -> str:
    """The commands to begin with on a GPU that 01 fits with a batch of this many sequences."""
    if not batch:
        return ""
    if card.capability < 7:
        return f"`make bench`; `python 01_opt_single_gpu.py --batch-size {batch}`"
    if not card.bfloat16:
        return (f"`make bench`; `python patches/stack.py compose {FLOAT16} --out my.py`,"
                f" `python my.py --batch-size {min(32, batch)}`")
    if batch >= 32:
        return "`make bench`; `python 01_opt_single_gpu.py`"
    return (f"`make bench`; `python patches/stack.py compose step-accumulation --out my.py`,"
            f" `python my.py --micro-batches {32 // batch}`")


def cards_table() -> Table:
    """A row for each GPU. Raises UserError, StackError."""
    models = "gpt2", *LARGER
    names = sorted(CARDS, key=lambda name: (CARDS[name].mib, CARDS[name].capability))
    columns = [words("GPU", "card"), number("GB", "gb", ".0f"),
               number("compute capability", "capability", ".1f")]
    columns += [number(f"largest batch of {key}", key)
                for key in ("00, gpt2", *(f"01, {model}" for model in models))]
    columns += [number(f"thousand tok/sec of {stage}", stage) for stage in ("00", "01")]
    columns += [
        number(f"minutes of {EPOCHS} epochs, 00 / 01", "minutes"), words("begin with", "begin")]
    return Table(columns, [on_card(name, models) for name in names])


def hardware_table() -> Table:
    """The techniques and variants that older GPUs don't have, by their headers. Raises
    StackError."""
    rows = []
    for patch in (*stack.load(), *stack.load_variants()):
        if needed := re.search(r"compute capability (\d+\.\d+)", patch.fields["Hardware"]):
            least = float(needed[1])
            rows.append(dict(
                link=f"[{patch.fields['Technique']}](../{patch.file})", least=least,
                lacking=", ".join(name for name, card in CARDS.items() if card.capability < least)
                or "(none of these)"))
    return Table([words("technique", "link"), number("from compute capability", "least", ".1f"),
                  words("not on", "lacking")], sorted(rows, key=lambda row: row["least"]))
