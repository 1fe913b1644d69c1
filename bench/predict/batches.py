"""Which batch sizes fit this machine's GPU, by prediction, if the published ones don't."""

import sys
from pathlib import Path

from bench import processes
from bench.catalogue import FLOAT16
from bench.common import has_option, without_options
from bench.machine import in_float16, trained_in
from bench.measure.plan import Setup
from bench.predict.prediction import largest_that_fits
from bench.predict.program import Program, program_of
from bench.predict.store import Sizes, predict
from gpt_speed.common import UserError

OF_00, OF_01 = 8, 32  # the published batch sizes
BATCH_OF = {"00": OF_00, "01": OF_01, "02": OF_01}
PUBLISHED = {OF_00: "0", OF_01: "10-batch-size"}  # the first script with each size
NOT_OF_00 = {"--compile", "--no-compile", "--dtype"}  # options of 01 alone
LOADED = 300  # MiB that kernels and libraries still take of what is free


def batches_that_fit(setup: Setup, composed: bool) -> dict[int, int]:
    """Returns what takes the place of each published batch size on this machine's GPU, and tells
    people of it; nothing where those fit, or where the options choose a batch size. `composed`: 01
    is composed with precision-fp16 where the GPU needs it."""
    if setup.device != "cuda" or has_option("--batch-size", setup.options):
        return {}
    free = min(processes.ask_machine("free_memory"))
    try:
        batches = largest_batches(programs_by_batch(setup, composed), setup.results, free)
    except UserError as error:
        tell(f"whether the published batch sizes fit isn't known: {error}")
        return {}
    if all(batch == published for published, batch in batches.items()):
        return {}
    changes = [f"{batch} in place of {published}" for published, batch in batches.items()]
    tell(
        f"{free / 1024:.1f} GB of the GPU's memory can be used: by prediction, batch size"
        f" {', and '.join(changes)}"
    )
    return batches


def tell(note: str) -> None:
    print(note, file=sys.stderr, flush=True)


def largest_batches(programs: dict[int, Program], results: Path, free: int) -> dict[int, int]:
    """Returns what fits `free` MiB by prediction, by the published batch sizes: for the smaller one
    the largest power of two, for the larger one four times that, or the largest that fits. Raises
    UserError."""
    batches = {}
    for size, program in programs.items():
        needs = predict(program, results, Sizes(card=free - LOADED)).needs
        batches[size] = min(size, largest_that_fits(needs, free, others=LOADED) or 1)
    batches[OF_01] = min(batches[OF_01], comparable_batch(batches[OF_00]))
    return batches


def comparable_batch(batch_of_00: int) -> int:
    """Returns the largest batch of 01 beside a batch of 00: four times it, as the published
    ones."""
    return 4 * batch_of_00


def programs_by_batch(setup: Setup, composed: bool) -> dict[int, Program]:
    """Returns by the published batch size the script that is predicted, with its options. Raises
    StackError, OSError."""
    options, model = setup.options, []
    if not has_option("--model", options):
        model = ["--model", "gpt2"]
    of_00 = without_options(NOT_OF_00, options)
    script, dtype = script_of_larger_batch(setup, composed)
    return {
        OF_00: program_of(setup.scripts, PUBLISHED[OF_00], [*model, *of_00]),
        OF_01: program_of(setup.scripts, script, [*model, *dtype, *options]),
    }


def script_of_larger_batch(setup: Setup, composed: bool) -> tuple[str, list[str]]:
    """Returns the script of the larger batch, and the options of the type that the machine trains
    it in."""
    if composed and in_float16(setup.machine, setup.options):
        return FLOAT16, []
    if trained_in(setup.machine) == "float32" and not has_option("--dtype", setup.options):
        return PUBLISHED[OF_01], ["--dtype", "float32"]
    return PUBLISHED[OF_01], []
