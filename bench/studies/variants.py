"""01 and its alternatives, one at a time: by default those of 01, or those of one group."""

import math
import re

from bench.analysis.rows import Row, ratio
from bench.catalogue import Run, lacking
from bench.common import ROOT, UserError, trained_in
from bench.measure.plan import EVERY_ROUND, Plan, Setup
from bench.report.pictures import draw_alternatives
from bench.report.tables import (
    GB,
    LOSS,
    Column,
    Table,
    fmt,
    full_table,
    num_col,
    picture_name,
    short_table,
    text_col,
)
from bench.studies import Study

COMPILE, TRAINER = "compile", "trainer"  # groups of their own table, and of other people's program
OF_02 = ("ddp", "parallel")  # groups of 02's variants
GROUPS = (COMPILE, "checkpoint", *OF_02, TRAINER)
PEER = ROOT / "peers" / "hf_trainer.py"
EPOCHS = 5  # of which the group of the compiler's modes tells the total time


class Variants(Study):
    """Compare 01 with its alternatives, one variant at a time.

    Each is a patch in patches/variants. With a GROUP: the compiler's modes, checkpoints, DDP's
    switches and sharding (both on 02), or Hugging Face's Trainer."""

    title = "01 with one alternative at a time"
    place = 70
    in_report = "", *GROUPS
    compile_columns = [
        text_col("mode or backend", "label"), num_col("compiling, s", "first_step_excess", ".1f"),
        num_col("s/step", "seconds_per_step", ".3f"),
        Column("× speed", lambda row: row.error or fmt(row.factor, ".2f")),
        Column(f"{EPOCHS} epochs, s", lambda row: fmt(total_seconds(row), ",.0f")),
        Column("× over no compiler", lambda row: fmt(
            ratio(total_seconds(uncompiled(row)), total_seconds(row)), ".2f")),
        Column("beats no compiler from step", lambda row: beats_from(row, uncompiled(row))),
        GB, LOSS]

    def options(self, parser):
        parser.add_argument("group", nargs="?", choices=GROUPS, metavar="GROUP",
                            help=f"only this group: {', '.join(GROUPS)}")
        parser.add_argument("--names", metavar="A,B+C",
                            help="which variants (default: all but the compiler's modes and"
                                 " checkpoints); + joins several into one script")

    def plans(self, setup):
        scripts, machine, group = setup.scripts, setup.machine, setup.args.group
        if group and setup.args.names:
            raise UserError("--names and a group choose different variants: give one of them", 2)
        if group == TRAINER:
            runs = trainer_runs(setup)
        else:
            base = (scripts.stage("02", machine["gpus"] or 2) if group in OF_02 else
                    scripts.stage("01"))
            runs = scripts.variants(base, machine, group, setup.args.names)
        yield Plan(runs, group or "", seed_noise=2, cold_rounds=EVERY_ROUND, **self.length(setup))

    def tables(self, measured, rows):
        if measured.kind == COMPILE:
            return [Table(self.compile_columns, rows)]
        return [full_table(rows)]

    def excerpts(self, measured, rows):
        if measured.kind == COMPILE:
            return super().excerpts(measured, rows)
        return {picture_name(self.name, measured.kind): [short_table(rows)]}

    def picture(self, measured, rows):
        """Draws variants of 01 and the sharded ones; of other groups the table is enough."""
        if measured.kind and not measured.kind.startswith("parallel"):
            return None
        return draw_alternatives(measured, rows[0], rows[1:])


def uncompiled(row: Row) -> Row | None:
    """Returns the table's row that isn't compiled."""
    return next((other for other in row.rows.values() if "--no-compile" in other.run.options), None)


def total_seconds(row: Row | None) -> float | None:
    """Returns the seconds of EPOCHS epochs: compiling, and all steps."""
    steps = row.record.steps_per_epoch if row and row.record else None
    return row.first_step_excess + EPOCHS * steps * row.seconds_per_step if steps else None


def beats_from(row: Row, other: Row | None) -> str:
    """Returns the step from which on a run is ahead of another one, or "never"."""
    if other in (row, None) or not row.record or not other.record:
        return ""
    saved = other.seconds_per_step - row.seconds_per_step  # in each step
    spent = row.first_step_excess - other.first_step_excess
    return f"{max(0, math.ceil(spent / saved)):,}" if saved > 0 else "never"


def trainer_runs(setup: Setup) -> list[Run]:
    """Returns 01, and the same training by Trainer (peers/hf_trainer.py), from its defaults to its
    fastest settings."""
    machine = setup.machine
    base = setup.scripts.stage("01").replace(published=None)
    batch = ("--per_device_train_batch_size", "32" if machine["gpus"] else "8")  # as 01
    tf32 = ("--tf32", "True") if float(machine.get("capability") or 0) >= 8 else ()
    mixed, fastest = ("--bf16", *tf32), ("--dtype", trained_in(machine), "--torch_compile")
    settings = [(), mixed, (*mixed, "--torch_compile"), fastest]
    settings += [] if machine["gpus"] else [(*fastest, "--huge_pages")]
    runs, needs = [base], "package transformers, package accelerate"
    for options in settings:
        runs.append(base.replace(
            name="-".join(["trainer", *re.findall(r"\w+", " ".join(options))]),
            label=" ".join(["Trainer", *options]), script=PEER,
            technique="Hugging Face's Trainer", loss="changes", options=batch + options,
            compared_to=base.name, stage=None,
            error=lacking(needs + (", bfloat16 units" if "--bf16" in options else ""), machine)))
    return runs
