"""The tables of docs/gpus.md: what fits each GPU and how fast, and what older ones lack."""


from bench.cards import CARDS, Card
from bench.catalogue import EPOCHS, FLOAT16, Run, Scripts
from bench.predict.store import OTHERS, fitting
from bench.report import prediction_tables
from bench.report.notes import today
from bench.report.prediction_tables import LARGER, prediction_of
from bench.report.tables import Table, num_col, text_col

# 01 reserved 13.64 GB on an H100 where 11.90 were predicted; so a batch fits for sure only where it
# does with this many times its predicted memory.
RESERVE = 1.15


def by_memory() -> list[tuple[str, Card]]:
    """(name, GPU), the smallest first."""
    return sorted(CARDS.items(), key=lambda item: (item[1].mib, item[1].capability))


def in_place(scripts: Scripts, run: Run, card: Card) -> Run:
    """What a card without bfloat16 units trains in place of 01 or 02; one before 7.0 has no tensor
    cores either, and none of the compiler's kernels."""
    if run.stage in (None, "00") or card.capability >= 8:
        return run
    if card.capability >= 7:
        return scripts.float16(run)
    return run.replace(name=f"{run.name}-float32", label=f"{run.label} in float32, not compiled",
                   options=(*run.options, *prediction_tables.WITHOUT_TENSOR_CORES))


def on_card(name: str, card: Card) -> dict:
    """What fits a GPU, how fast 00 and 01 are there, and how to begin."""
    row = dict(card=name if card.is_checked else f"{name} °", gb=card.mib / 1024,
               capability=card.capability)
    minutes = []
    for stage, models, most, room in (
            ("00", ["gpt2"], 8, card.mib),
            ("01", ["gpt2", *LARGER], 32, int((card.mib - OTHERS) / RESERVE) + OTHERS)):
        run = in_place(today(), today().stage(stage), card)
        for model in models:
            needs = prediction_of(run.script, ["--model", model, *run.options]).needs
            sure, perhaps = fitting(needs, room), fitting(needs, card.mib)
            row[f"{stage}, {model}"] = f"{sure or '–'}" + (
                f" ({perhaps}?)" if perhaps > sure else "")
            if model == "gpt2":
                fits = sure
        known = prediction_of(run.script, [*prediction_tables.GPT2, *run.options])
        batch = min(most, fits)
        row[stage] = known.speed_range(batch, card) if batch else "–"
        minutes.append(f"{known.minutes(batch, card):,.1f}" if batch else "–")
    return row | dict(minutes=" / ".join(minutes), begin=begin(card, fits))


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
    columns = [text_col("GPU", "card"), num_col("GB", "gb", ".0f"),
               num_col("compute capability", "capability", ".1f")]
    columns += [num_col(f"largest batch of {key}", key)
                for key in ("00, gpt2", *(f"01, {model}" for model in ("gpt2", *LARGER)))]
    columns += [num_col(f"thousand tok/sec of {stage}", stage) for stage in ("00", "01")]
    columns += [
        num_col(f"minutes of {EPOCHS} epochs, 00 / 01", "minutes"), text_col("begin with", "begin")]
    return Table(columns, [on_card(name, card) for name, card in by_memory()])
