"""What fits, and how fast: speed and memory over batch sizes and context lengths."""

from argparse import ArgumentParser
from dataclasses import replace
from itertools import chain, pairwise

from bench.analysis.rows import Rows
from bench.catalogue import Run
from bench.machine import Machine
from bench.measure.plan import TOKENS, Growth, Plan, Setup
from bench.measure.records import Status
from bench.options import has_option
from bench.report.notes import machine_note, peak_note
from bench.report.tables import GB, RANGE, RUN, SPEED_OR_ERROR
from bench.studies import Plans, Study
from gpt_speed.common import UserError
from gpt_speed.tables import Table, num_col

BATCHES = [2**k for k in range(13)]
CONTEXTS = {"cuda": [2**k for k in range(8, 15)], "cpu": [2**k for k in range(6, 12)]}
CONTEXT_TOKENS = {"cuda": 32_768, "cpu": 2_048}  # of each batch in a sweep over contexts
MIN_STEPS = {"cuda": 24, "cpu": 6}  # of a run; two of them are warm-up
GROWTH = {"batch": 2, "context": 1}  # of a run's memory, from size to size; by its tokens
OPTION = {"batch": "--batch-size", "context": "--context-length"}


class Sweep(Study):
    """Measure speed and memory over batch sizes or context lengths.

    Sizes grow until one doesn't fit, or by estimate would take more than half of a CPU's RAM."""

    title = "What fits: batch, context"
    position = 140
    report_options = tuple(OPTION)
    rounds = {"cuda": 3, "cpu": 3}
    tokens = TOKENS | {"cpu": 1}

    def options(self, parser: ArgumentParser) -> None:
        parser.add_argument("what", choices=list(OPTION), metavar="KIND", help=" or ".join(OPTION))

    def plans(self, setup: Setup) -> Plans:
        what, device = setup.args.what, setup.device
        sizes = sizes_of(what, device)
        for name in sizes[0]:
            if has_option(OPTION[name], setup.options):
                raise UserError(f"{OPTION[name]} is set by the sweep itself", 2)
        script = setup.scripts.stage("01").replace(published=None)
        runs = [run_of_size(script, size) for size in sizes]
        growth = Growth(GROWTH[what], memory_limit(setup.machine))
        length = replace(self.length(setup), min_steps=MIN_STEPS[device])
        yield Plan(runs, what, length, cold_rounds=0, growth=growth)

    def tables(self, rows: Rows) -> list[Table]:
        """Returns speed and memory of each size that was tried, and of the first one that wasn't,
        unless the size before it says why."""
        tried = rows[:1]
        for before, row in pairwise(rows):
            is_tried = not row.outcome or row.outcome.status is not Status.NOT_TRIED
            if is_tried or not before.error:
                tried.append(row)
        return [
            Table(
                [
                    RUN,
                    SPEED_OR_ERROR,
                    RANGE,
                    GB._replace(heading="reserved GB"),
                    num_col("MFU", "mfu", ".1%"),
                    num_col("of matmul peak", "share_of_peak", ".1%"),
                ],
                tried,
            )
        ]

    def notes(self, rows: Rows) -> list[str]:
        return [
            f"{machine_note(rows)} {peak_note(rows.measured.peak)}",
            "tok/sec is the median over the rounds of each run's median step.",
        ]


def memory_limit(machine: Machine) -> float | None:
    """Returns the GB that a run may take by estimate: half of a CPU's RAM; None where that isn't
    known, and on a GPU, which says itself what doesn't fit."""
    if machine["device"] != "cpu" or not machine["ram_gb"]:
        return None
    return machine["ram_gb"] / 2


def sizes_of(what: str, device: str) -> list[dict[str, int]]:
    """Returns batch sizes; or context lengths, each with a batch size that keeps the tokens of a
    step."""
    if what == "batch":
        return [dict(batch=size) for size in BATCHES]
    return [
        dict(context=length, batch=CONTEXT_TOKENS[device] // length) for length in CONTEXTS[device]
    ]


def run_of_size(script: Run, size: dict[str, int]) -> Run:
    """Returns a script at a size, such as dict(context=256, batch=8)."""
    options = [(OPTION[name], str(value)) for name, value in size.items()]
    return script.replace(
        name="-".join([script.name, *(f"{name}-{value}" for name, value in size.items())]),
        label=", ".join(f"{name} {value}" for name, value in size.items()),
        options=tuple(chain.from_iterable(options)),
    )
