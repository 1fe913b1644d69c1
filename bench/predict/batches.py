"""Which batch sizes fit this machine's GPU, by prediction, if the published ones don't."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from bench import processes
from bench.catalogue import FLOAT16
from bench.machine import in_float16, trained_in
from bench.measure.plan import Setup
from bench.options import has_option, without_options
from bench.predict.prediction import largest_that_fits
from bench.predict.program import Program, program_of
from bench.predict.store import Sizes, predict
from gpt_speed.common import UserError

OF_00, OF_01 = 8, 32  # the published batch sizes
BATCH_OF = {"00": OF_00, "01": OF_01, "02": OF_01}
PUBLISHED = {OF_00: "0", OF_01: "10-batch-size"}  # the first script with each size
NOT_OF_00 = {"--compile", "--no-compile", "--dtype"}  # options of 01 alone
LOADED = 300  # MiB that kernels and libraries still take of what is free


@dataclass(frozen=True)
class Fit:
    """Which batch sizes fit this machine's GPU, by prediction."""

    free_mib: int  # memory that a program can take there
    largest: dict[int, int] = field(default_factory=dict)  # by the published size; 0: none fits
    unknown: str = ""  # why nothing can be predicted

    @property
    def changes(self) -> dict[int, int]:
        """What takes the place of each published size; nothing where all of them fit. A script of
        which not even one sequence fits is tried with one, since the prediction may be wrong."""
        if all(batch == published for published, batch in self.largest.items()):
            return {}
        return {published: batch or 1 for published, batch in self.largest.items()}

    @property
    def changes_in_words(self) -> list[str]:
        """Each of the changes, such as "4 in place of 8"."""
        words = []
        for published, batch in self.changes.items():
            change = f"{batch} in place of {published}"
            if batch > self.largest[published]:
                change += ", which doesn't fit either"
            words.append(change)
        return words

    @property
    def note(self) -> str:
        """What is said before scripts run; "" where they run as published."""
        if self.unknown:
            return f"whether the published batch sizes fit isn't known: {self.unknown}"
        if not self.changes:
            return ""
        return (
            f"{self.free_mib / 1024:.1f} GB of the GPU's memory can be used: by prediction, batch"
            f" size {', and '.join(self.changes_in_words)}"
        )


def batches_that_fit(setup: Setup, composed: bool) -> dict[int, int]:
    """Returns what takes the place of each published batch size on this machine, and prints why; {}
    where nothing does. `composed`: 01 is composed with precision-fp16 where the GPU needs it."""
    fit = fit_here(setup, composed)
    if not fit:
        return {}
    if fit.note:
        print(fit.note, file=sys.stderr, flush=True)
    return fit.changes


def fit_here(setup: Setup, composed: bool) -> Fit | None:
    """Returns what fits this machine's GPU; None on a CPU, or where the options choose a batch
    size."""
    if setup.device != "cuda" or has_option("--batch-size", setup.options):
        return None
    free = min(processes.ask_machine("free_memory"))  # of several GPUs, where there is least
    try:
        return Fit(free, largest_batches(programs_by_batch(setup, composed), setup.results, free))
    except UserError as error:
        return Fit(free, unknown=str(error))


def largest_batches(programs: dict[int, Program], results: Path, free: int) -> dict[int, int]:
    """Returns what fits `free` MiB by prediction, by the published batch size: that one, or else
    the largest power of two; 0 where not even one sequence fits. 01 has at most a
    comparable_batch(). Raises UserError."""
    batches = {}
    for size, program in programs.items():
        needs = predict(program, results, Sizes(card=free - LOADED)).needs
        batches[size] = min(size, largest_that_fits(needs, free, others=LOADED))
    batches[OF_01] = min(batches[OF_01], comparable_batch(batches[OF_00] or 1))
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
