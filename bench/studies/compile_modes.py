"""What each mode of the compiler costs at first and for each step."""

import math

from bench.catalogue import COMPILER
from bench.judge.rows import Row, middle, ratio
from bench.measure.plan import EVERY_ROUND, STEPS, Plan
from bench.report.notes import machine_note
from bench.report.tables import GB, LOSS, Column, Table, cell, spread
from bench.studies import Study

# Total seconds of 5 epochs with Adafactor, in a published study of the modes on one GPU.
STUDY_SECONDS = {"none": 1059.0, "default": 497.9, "reduce-overhead": 497.6, "max-autotune": 769.1}
EPOCHS = 5
BIG = 68  # multiprocessors from which on PyTorch tunes products (torch._inductor.utils.is_big_gpu)


class CompileModes(Study):
    """01 without torch.compile, and with each of its modes and backends, compiled anew in each
    round."""

    title = "The compiler's modes: seconds to compile and per step"
    schedule = {80: None}
    rounds = {"cuda": 1, "cpu": 4}  # on a GPU they train 5 epochs, as the published study did
    seconds = None
    max_tokens_help = ("training tokens, per process, after which losses are compared (default: 5"
                       " epochs on a GPU, {cpu:,} on a CPU)")

    def plans(self, setup):
        base, *rows = setup.scripts.variants(setup.scripts.stage("01"), setup.machine,
                                             names=COMPILER)
        (none,) = [run for run in rows if run.options == ("--no-compile",)]
        modes = [base.but(options=("--compile-mode", "default"), script=none.script),
                 *(run for run in rows if run is not none)]
        runs = [none.but(label="none", compared_to=None, mode="none")]
        for run in modes:
            mode = run.options[-1].removeprefix("--")
            runs.append(run.but(label=mode, compared_to=none.name, mode=mode, stage=None))
        tokens = setup.args.max_tokens
        if setup.machine["gpus"]:
            yield Plan(runs, whole=True, epochs=EPOCHS, tokens=tokens, cold_rounds=EVERY_ROUND)
        else:
            yield Plan(runs, tokens=tokens or self.tokens["cpu"], cold_rounds=EVERY_ROUND,
                       min_steps=1 if tokens else STEPS["cpu"], equal_steps=True)

    def tables(self, measured, rows):
        """What each mode costs at first and for each step, and when it pays."""
        none, default = (next((cost(row) for row in rows if row.run.mode == mode), None)
                         for mode in ("none", "default"))
        trained = epochs_were_run(measured)

        def total(row: Row) -> float | None:
            """Seconds of 5 epochs with compilation; where they weren't run, by the steps."""
            if trained:
                return middle(record.curve[-1].seconds for record in row.records if record.curve)
            once, step = cost(row) or (None, None)
            steps = row.record and row.record.steps_per_epoch
            return once + EPOCHS * steps * step if step and steps else None

        def ahead(other):
            def cell_of(row: Row) -> str:
                step = pays_from(cost(row), other)
                if step is None or cost(row) == other:
                    return ""
                return "never" if step == math.inf else f"{step:,}"

            return cell_of

        def part(place: int, form: str):
            return lambda row: format(cost(row)[place], form) if cost(row) else ""

        def seconds(row: Row) -> list[float]:
            return [record.tokens_per_step / record.tok_per_sec for record in row.records]

        def outcome(row: Row) -> str:
            if row.uncompiled and row is not rows[0]:
                return "torch.compile doesn't work here"
            return row.error or cell(row.factor, ".2f")

        def mode(row: Row) -> str:
            untuned = "max-autotune" in row.run.mode and too_small(measured.machine)
            return f"{row.label}, products not tuned" if untuned else row.label

        return [Table([
            Column("mode or backend", mode, True),
            Column("compiling, s", part(0, ".1f")), Column("s/step", part(1, ".3f")),
            Column("range", lambda row: spread(seconds(row), ".3f")),
            Column("× speed", outcome),
            Column(f"{EPOCHS} epochs, s", lambda row: cell(total(row), ",.0f")),
            Column("× none", lambda row: cell(ratio(total(rows[0]), total(row)), ".2f")),
            Column("study", lambda row: cell(ratio(
                STUDY_SECONDS["none"], STUDY_SECONDS.get(row.run.mode)), ".2f")),
            Column("ahead of none from step", ahead(none)),
            Column("of default from step", ahead(default)), GB, LOSS,
        ], rows)]

    def notes(self, measured, rows):
        steps = next((row.record.steps_per_epoch for row in rows
                      if row.record and row.record.steps_per_epoch), None)
        count = cell(steps and EPOCHS * steps, ",") or "n/a"
        small = too_small(measured.machine)
        return [
            machine_note(measured, rows),
            *([f"This GPU has {small} multiprocessors. Below {BIG} PyTorch doesn't tune matrix"
               " products, and tells it in its log alone: max-autotune times only the fused kernels"
               " here."] if small else []),
            "Compiling is what the first step takes more than a median one, with an empty cache;"
            " medians over the rounds. (CUDA graphs are recorded in the second step, which is in no"
            " column but the sum, where that was measured.)",
            (f"The {EPOCHS} epochs were run: {count} steps." if epochs_were_run(measured) else
             f"{EPOCHS} epochs are compiling and the seconds of {count} steps.")
            + ' "× none" is over the run without the compiler; "study" is the same of a published'
            " study, on a GPU and with Adafactor.",
        ]


def too_small(machine: dict) -> int | None:
    """The multiprocessors of a GPU on which max-autotune doesn't tune products; else None."""
    count = machine.get("multiprocessors") if machine.get("cuda") else None  # ROCm has another rule
    return count if count and count < BIG else None


def epochs_were_run(measured) -> bool:
    return measured.plan.epochs == EPOCHS and not measured.plan.tokens


def cost(row: Row) -> tuple[float, float] | None:
    """(seconds that the first step takes more than a median one, seconds of a step)."""
    return (row.first_step_excess, row.seconds_per_step) if row.record else None


def pays_from(cost: tuple[float, float] | None, other: tuple[float, float] | None) -> float | None:
    """The step from which on a run with the one cost is ahead of one with the other; infinite
    where it never is, None where that isn't known."""
    if not cost or not other:
        return None
    (once, step), (other_once, other_step) = cost, other
    if step >= other_step:
        return 0 if once < other_once and step == other_step else math.inf
    return max(0, math.ceil((once - other_once) / (other_step - step)))
