"""Which batch sizes fit this machine's GPU, by prediction, if the published ones don't."""

import sys

from bench import processes
from bench.catalogue import FLOAT16, in_float16
from bench.common import has_option, trained_in
from bench.measure.plan import Setup
from bench.predict.store import fitting, predict
from gpt_speed.common import UserError

PUBLISHED = {"8": "0", "32": "10-batch-size"}  # the first script with each size
LOADED = 300  # MiB that kernels and libraries still take of what is free


def batches_that_fit(setup: Setup, composed: bool) -> dict[str, int]:
    """Returns the batch sizes that take the place of the published ones, by these, and prints them:
    for the smaller one the largest power of two that fits, for the larger one four times that, or
    the largest that fits. Returns nothing where the published ones fit, where the options choose
    one, or without a GPU. `composed`: 01 is composed with precision-fp16 where the GPU needs it."""
    if setup.device != "cuda" or has_option("--batch-size", setup.options):
        return {}
    fast = FLOAT16 if composed and in_float16(setup.machine, setup.options) else PUBLISHED["32"]
    free = min(processes.ask_machine("free_memory"))
    model = [] if has_option("--model", setup.options) else ["--model", "gpt2"]
    batches = {}
    try:
        for batch, script in (PUBLISHED | {"32": fast}).items():
            options = setup.options
            if batch == "8":  # 00 has nothing to compile
                options = [word for word in options if word not in ("--compile", "--no-compile")]
            elif (
                script != FLOAT16
                and trained_in(setup.machine) == "float32"
                and not has_option("--dtype", options)
            ):
                options = ["--dtype", "float32", *options]
            needs = predict(
                setup.scripts, script, [*model, *options], setup.results, free - LOADED
            ).needs
            batches[batch] = min(int(batch), fitting(needs, free, others=LOADED) or 1)
    except UserError as error:
        print(f"whether the published batch sizes fit isn't known: {error}", file=sys.stderr)
        return {}
    batches["32"] = min(batches["32"], 4 * batches["8"])
    if batches == {"8": 8, "32": 32}:
        return {}
    print(
        f"{free / 1024:.1f} GB of the GPU's memory can be used: by prediction, batch size"
        f" {batches['8']} in place of 8, and {batches['32']} in place of 32",
        file=sys.stderr,
        flush=True,
    )
    return batches
