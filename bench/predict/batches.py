"""Which batch sizes fit this machine's GPU, by prediction, if the published ones don't."""

import sys
from typing import NamedTuple

from bench import processes
from bench.catalogue import FLOAT16, in_float16
from bench.common import has_option, trained_in
from bench.measure.plan import Setup
from bench.predict.store import fitting, predict, program_of
from gpt_speed.common import UserError

OF_00, OF_01 = "8", "32"  # the published batch sizes, as plans and journals have them
BATCH_OF = {"00": OF_00, "01": OF_01, "02": OF_01}
PUBLISHED = {OF_00: "0", OF_01: "10-batch-size"}  # the first script with each size
LOADED = 300  # MiB that kernels and libraries still take of what is free


class Fit(NamedTuple):
    """What fits a GPU."""

    batches: dict[str, int]  # in place of the published batch sizes; none where those fit
    note: str  # what people are told of it


def batches_that_fit(setup: Setup, composed: bool) -> dict[str, int]:
    """Returns the batch sizes that take the place of the published ones, by these, and tells people
    of them. `composed`: 01 is composed with precision-fp16 where the GPU needs it."""
    batches, note = fit_of(setup, composed)
    if note:
        print(note, file=sys.stderr, flush=True)
    return batches


def fit_of(setup: Setup, composed: bool) -> Fit:
    """Returns what fits this machine's GPU, by prediction. It isn't asked where there is no GPU, or
    where the options choose a batch size."""
    if setup.device != "cuda" or has_option("--batch-size", setup.options):
        return Fit({}, "")
    free = min(processes.ask_machine("free_memory"))
    try:
        batches = largest_batches(setup, free, composed)
    except UserError as error:
        return Fit({}, f"whether the published batch sizes fit isn't known: {error}")
    if all(batch == int(published) for published, batch in batches.items()):
        return Fit({}, "")
    changes = [f"{batch} in place of {published}" for published, batch in batches.items()]
    return Fit(
        batches,
        f"{free / 1024:.1f} GB of the GPU's memory can be used: by prediction, batch size"
        f" {', and '.join(changes)}",
    )


def largest_batches(setup: Setup, free: int, composed: bool) -> dict[str, int]:
    """Returns what fits `free` MiB by prediction, by the published batch sizes: for the smaller one
    the largest power of two, for the larger one four times that, or the largest that fits. Raises
    UserError."""
    batches = {}
    for size, (script, options) in scripts_to_fit(setup, composed).items():
        program = program_of(setup.scripts, script, options)
        needs = predict(program, setup.results, smallest=free - LOADED).needs
        batches[size] = min(int(size), fitting(needs, free, others=LOADED) or 1)
    batches[OF_01] = min(batches[OF_01], comparable_batch(batches[OF_00]))
    return batches


def comparable_batch(batch_of_00: int) -> int:
    """Returns the largest batch of 01 beside a batch of 00: four times it, as the published
    ones."""
    return 4 * batch_of_00


def scripts_to_fit(setup: Setup, composed: bool) -> dict[str, tuple[str, list[str]]]:
    """Returns by the published batch size the script that is predicted, with its options."""
    options, model = setup.options, []
    if not has_option("--model", options):
        model = ["--model", "gpt2"]
    # 00 has nothing to compile.
    of_00 = [word for word in options if word not in ("--compile", "--no-compile")]
    larger, dtype = larger_to_fit(setup, composed)
    return {
        OF_00: (PUBLISHED[OF_00], [*model, *of_00]),
        OF_01: (larger, [*model, *dtype, *options]),
    }


def larger_to_fit(setup: Setup, composed: bool) -> tuple[str, list[str]]:
    """Returns the script of the larger batch, and the options of the type that the machine trains
    it in."""
    if composed and in_float16(setup.machine, setup.options):
        return FLOAT16, []
    if trained_in(setup.machine) == "float32" and not has_option("--dtype", setup.options):
        return PUBLISHED[OF_01], ["--dtype", "float32"]
    return PUBLISHED[OF_01], []
