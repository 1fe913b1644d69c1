"""The predictions that come with this repository, in results/reference/: of which scripts, and what
they tell."""

import json
from functools import cache
from pathlib import Path

from bench.catalogue import GPUS, Run, Scripts
from bench.common import REFERENCE
from bench.machine import Machine
from bench.predict.batches import OF_01, PUBLISHED
from bench.predict.prediction import Prediction, largest_that_fits
from bench.predict.program import key_of
from bench.predict.store import NAME, load_prediction
from gpt_speed.cards import Card
from gpt_speed.common import UserError
from gpt_speed.memory import OTHERS

GPT2 = ["--model", "gpt2"]
WITHOUT_TENSOR_CORES = ["--dtype", "float32", "--no-compile"]  # 01, on a GPU before 7.0
LARGER = "gpt2-medium", "gpt2-large", "gpt2-xl"
# On an H100 01 reserved 15% more than predicted without expandable segments, which Windows lacks;
# so a batch fits for sure only where it does with this many times its memory.
RESERVE = 1.15

scripts = cache(Scripts)  # in one process they are read once


def kept_of(script: str | Path, options: list[str]) -> Prediction | None:
    """Returns a stored prediction; None where there is none. Raises StackError."""
    return load_prediction(key_of(scripts(), script, options), REFERENCE)


def prediction_of(script: str | Path, options: list[str]) -> Prediction:
    """Raises UserError where it isn't stored, StackError."""
    prediction = kept_of(script, options)
    if prediction is None:
        raise UserError(
            f"results/reference/{NAME} lacks {key_of(scripts(), script, options)}:"
            " python measure.py predict --all --results-dir results/reference"
        )
    return prediction


def wanted() -> list[tuple[str | Path, list[str]]]:
    """Returns the scripts, each with its options, whose predictions the tables need, and the
    variants of 01 that may be in them. Raises UserError, StackError."""
    *ladder, ddp = scripts().ladder(GPUS)
    float16 = [Scripts.float16(scripts().stage(stage)) for stage in ("01", "02")]
    ends = ladder[0], ladder[-1], ddp, *float16
    pairs = [(run.script, ["--model", model]) for model in ("gpt2", "cpu-demo") for run in ladder]
    for model in ("gpt2", *LARGER):
        pairs += [(run.script, ["--model", model]) for run in ends]
        pairs.append(("01", ["--model", model, *WITHOUT_TENSOR_CORES]))
    pairs += [
        (source["script"], options_of(source)) for source in published_others()["sources"].values()
    ]
    pairs += [(run.script, [*GPT2, *run.options]) for run in variants()]
    # For bench.predict.batches on a GPU without bfloat16 units.
    return [*pairs, (PUBLISHED[OF_01], [*GPT2, "--dtype", "float32"])]


@cache
def variants() -> list[Run]:
    """Returns the variants of 01, and before each without dropout what it is compared to, on any
    card."""
    base = scripts().stage("01")
    return scripts().variants(base, Machine(gpus=1), scripts().variant_names(base))


# The programs by whose figures the constants of gpt_speed/speed.py were chosen.
TUNED_ON = "twenty cards", "gollem"


def published_others() -> dict:
    return json.loads((REFERENCE / "published-others.json").read_text(encoding="utf-8"))


def program_of(row: dict) -> str:
    """Returns the program that a published figure is of, without its step or settings."""
    return row["source"].partition(",")[0]


def options_of(source: dict) -> list[str]:
    """Returns with which options a script of ours is most like a program of others."""
    return ["--model", source.get("model", "gpt2"), *source["options"]]


def in_place(run: Run, card: Card) -> Run:
    """Returns what a card without bfloat16 units trains in place of 01 or 02; one before 7.0 has no
    tensor cores either, and none of the compiler's kernels."""
    if run.stage in (None, "00") or card.capability >= 8:
        return run
    if card.capability >= 7:
        return Scripts.float16(run)
    return run.replace(
        name=f"{run.name}-float32",
        label=f"{run.label} in float32, not compiled",
        options=(*run.options, *WITHOUT_TENSOR_CORES),
    )


def largest_that_surely_fits(prediction: Prediction, card: Card) -> int:
    """Returns the largest batch that fits a card even with RESERVE times its memory."""
    return largest_that_fits(prediction.needs, int((card.mib - OTHERS) / RESERVE), others=0)
