"""Which batch sizes fit this machine's GPU, by prediction, if the published ones don't."""

import sys

from bench import processes
from bench.catalogue import FLOAT16, in_float16
from bench.common import has_option, trained_in
from bench.measure.plan import Setup
from bench.predict.store import fitting, predict, program_of
from gpt_speed.common import UserError

PUBLISHED = {"8": "0", "32": "10-batch-size"}  # the first script with each size
LOADED = 300  # MiB that kernels and libraries still take of what is free


def batches_that_fit(setup: Setup, composed: bool) -> dict[str, int]:
    """Returns the batch sizes that take the place of the published ones, by these, and prints
    them. There are none where the published ones fit, where the options choose one, or
    without a GPU. `composed`: 01 is composed with precision-fp16 where the GPU needs it."""
    if setup.device != "cuda" or has_option("--batch-size", setup.options):
        return {}
    free = min(processes.ask_machine("free_memory"))
    try:
        batches = largest_batches(setup, free, composed)
    except UserError as error:
        print(f"whether the published batch sizes fit isn't known: {error}", file=sys.stderr)
        return {}
    if all(batches[size] == int(size) for size in PUBLISHED):
        return {}
    print(
        f"{free / 1024:.1f} GB of the GPU's memory can be used: by prediction, batch size"
        f" {batches['8']} in place of 8, and {batches['32']} in place of 32",
        file=sys.stderr,
        flush=True,
    )
    return batches


def largest_batches(setup: Setup, free: int, composed: bool) -> dict[str, int]:
    """Returns what fits `free` MiB by prediction, by the published batch sizes: for the smaller one
    the largest power of two, for the larger one four times that, or the largest that fits. Raises
    UserError."""
    batches = {}
    for size, (script, options) in scripts_to_fit(setup, composed).items():
        program = program_of(setup.scripts, script, options)
        needs = predict(program, setup.results, smallest=free - LOADED).needs
        batches[size] = min(int(size), fitting(needs, free, others=LOADED) or 1)
    batches["32"] = min(batches["32"], 4 * batches["8"])
    return batches


def scripts_to_fit(setup: Setup, composed: bool) -> dict[str, tuple[str, list[str]]]:
    """Returns by the published batch size the script that is predicted, with its options."""
    options = setup.options
    model = [] if has_option("--model", options) else ["--model", "gpt2"]
    # 00 has nothing to compile.
    of_00 = [word for word in options if word not in ("--compile", "--no-compile")]
    larger, dtype = PUBLISHED["32"], []
    if composed and in_float16(setup.machine, options):
        larger = FLOAT16
    elif trained_in(setup.machine) == "float32" and not has_option("--dtype", options):
        dtype = ["--dtype", "float32"]
    return {"8": (PUBLISHED["8"], [*model, *of_00]), "32": (larger, [*model, *dtype, *options])}
