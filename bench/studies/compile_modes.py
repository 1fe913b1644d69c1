"""What each mode of the compiler costs at first and for each step."""

import math
from collections.abc import Callable

from bench.analysis.rows import Row, middle, ratio
from bench.catalogue import COMPILER
from bench.measure.plan import EVERY_ROUND, Plan
from bench.report.notes import machine_note
from bench.report.tables import GB, LOSS, Column, cell, number, spread
from bench.studies import Study

# Total seconds of 5 epochs with Adafactor, in a published study of the modes on one GPU.
STUDY_SECONDS = {"none": 1059.0, "default": 497.9, "reduce-overhead": 497.6, "max-autotune": 769.1}
EPOCHS = 5
BIG = 68  # multiprocessors from which on PyTorch tunes products (torch._inductor.utils.is_big_gpu)


def pays_from(cost: tuple[float, float], other: tuple[float, float]) -> float:
    """The step from which on a run is ahead of another one, each by (the seconds that its first
    step takes more, the seconds of a step); infinite where it never is."""
    (once, step), (other_once, other_step) = cost, other
    if step >= other_step:
        return 0 if once < other_once and step == other_step else math.inf
    return max(0, math.ceil((once - other_once) / (other_step - step)))


def ahead_of(mode: str) -> Callable:
    """A cell: the step from which on a row is ahead of that of a mode."""
    def cell_of(row: Row) -> str:
        other = next((each for each in row.rows.values() if each.run.mode == mode), row)
        if other is row or not row.record or not other.record:
            return ""
        step = pays_from(*((each.first_step_excess, each.seconds_per_step)
                           for each in (row, other)))
        return "never" if step == math.inf else f"{step:,}"

    return cell_of


def epochs_were_run(measured) -> bool:
    return measured.plan.epochs == EPOCHS and not measured.plan.tokens


def whole_run(row: Row) -> float | None:
    """Seconds of the epochs with compilation; where they weren't run, by the steps."""
    if epochs_were_run(row.measured):
        return middle(record.curve[-1].seconds for record in row.records if record.curve)
    steps = row.record and row.record.steps_per_epoch
    return row.first_step_excess + EPOCHS * steps * row.seconds_per_step if steps else None


def too_small(machine: dict) -> int | None:
    """The multiprocessors of a GPU on which max-autotune doesn't tune products; else None."""
    count = machine.get("multiprocessors") if machine.get("cuda") else None  # ROCm has another rule
    return count if count and count < BIG else None


def name_of_mode(row: Row) -> str:
    untuned = "max-autotune" in row.run.mode and too_small(row.measured.machine)
    return f"{row.label}, products not tuned" if untuned else row.label


class CompileModes(Study):
    """01 without torch.compile, and with each of its modes and backends, compiled again in each
    round."""

    title = "The compiler's modes: seconds to compile and per step"
    schedule = {80: None}
    rounds = {"cuda": 1, "cpu": 4}  # on a GPU they train 5 epochs, as the published study did
    has_seconds = False
    max_tokens_help = ("training tokens, per process, after which losses are compared (default: 5"
                       " epochs on a GPU, {cpu:,} on a CPU)")
    columns = [
        Column("mode or backend", name_of_mode, True),
        number("compiling, s", "first_step_excess", ".1f"),
        number("s/step", "seconds_per_step", ".3f"),
        Column("range", lambda row: spread([record.tokens_per_step / record.tok_per_sec
                                            for record in row.records], ".3f")),
        Column("× speed", lambda row: "torch.compile doesn't work here" if (
            row.uncompiled and row.baseline) else row.error or cell(row.factor, ".2f")),
        Column(f"{EPOCHS} epochs, s", lambda row: cell(whole_run(row), ",.0f")),
        Column("× over no compiler", lambda row: cell(
            ratio(whole_run(row.baseline or row), whole_run(row)), ".2f")),
        Column("study", lambda row: cell(ratio(
            STUDY_SECONDS["none"], STUDY_SECONDS.get(row.run.mode)), ".2f")),
        Column("beats no compiler from step", ahead_of("none")),
        Column("beats default from step", ahead_of("default")), GB, LOSS]

    def plans(self, setup):
        base, *rows = setup.scripts.variants(setup.scripts.stage("01"), setup.machine,
                                             names=COMPILER)
        (none,) = [run for run in rows if run.options == ("--no-compile",)]
        runs = [none.but(label="none", compared_to=None, mode="none")]
        for run in (base.but(options=("--compile-mode", "default"), script=none.script),
                    *(run for run in rows if run is not none)):
            mode = run.options[-1].removeprefix("--")
            runs.append(run.but(label=mode, mode=mode, compared_to=none.name, stage=None))
        length = self.length(setup)
        if setup.machine["gpus"]:
            length = dict(whole=True, epochs=EPOCHS, tokens=setup.args.max_tokens)
        yield Plan(runs, cold_rounds=EVERY_ROUND, **length)

    def notes(self, measured, rows):
        steps = next((row.record.steps_per_epoch for row in rows
                      if row.record and row.record.steps_per_epoch), None)
        count = cell(steps and EPOCHS * steps, ",") or "n/a"
        small = too_small(measured.machine)
        return [
            machine_note(measured, rows),
            *([f"This GPU has {small} multiprocessors. Below {BIG} PyTorch doesn't tune matmuls,"
               " and says so in its log only: max-autotune times only the fused kernels here."]
              if small else []),
            "Compiling is what the first step takes more than a median one, with an empty cache;"
            " medians over the rounds. (CUDA graphs are recorded in the second step, which is in no"
            " column but the sum, where that was measured.)",
            (f"The {EPOCHS} epochs were run: {count} steps." if epochs_were_run(measured) else
             f"{EPOCHS} epochs are compiling and the seconds of {count} steps.")
            + ' "× over no compiler" is over the run without the compiler; "study" is the same of a'
            " published study, on a GPU and with Adafactor."]
