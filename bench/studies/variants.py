"""01 and its alternatives, one at a time: by default those of 01, or those of one group."""

import math
import re

from bench.analysis.rows import Row, ratio
from bench.catalogue import Run, lacking
from bench.common import ROOT, UserError, trained_in
from bench.measure.plan import EVERY_ROUND, Plan, Setup
from bench.report.notes import full_notes
from bench.report.pictures import draw_alternatives
from bench.report.tables import (
    GB,
    LOSS,
    SPEED,
    Column,
    Table,
    fmt,
    full_table,
    lookup,
    markdown,
    num_col,
    short_table,
    text_col,
)
from bench.studies import Study
from patches import stack

PARAMETERS = "record.config.parameters"
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
    schedule = {70: None}
    in_report = {}, *(dict(group=group) for group in GROUPS)
    defaults = dict(group=None, names=None)
    names_help = ("which variants (default: all but those of the compiler's modes and of"
                  " checkpoints); + joins several into one script")
    model_columns = [
        Column("another model", lambda row: f"`{row.label}`", True),
        num_col("parameters", PARAMETERS, ","), SPEED,
        Column("× speed", lambda row: row.error or fmt(row.factor, ".2f")), GB,
        num_col("× memory", "memory_factor", ".2f"), LOSS,
        num_col("Δ loss", "loss_difference", "+.4f"),
        Column("experts' shares of the tokens", lambda row: shares(row)),
    ]
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
        super().options(parser)

    def plans(self, setup):
        if setup.args.group and setup.args.names:
            raise UserError("--names and a group choose different variants: give one of them", 2)
        yield Plan(self.runs(setup), setup.args.group or "", seed_noise=2, cold_rounds=EVERY_ROUND,
                   **self.length(setup))

    def runs(self, setup):
        scripts, machine, group = setup.scripts, setup.machine, setup.args.group
        if group == TRAINER:
            return trainer_runs(setup)
        base = scripts.stage("02", machine["gpus"] or 2) if group in OF_02 else scripts.stage("01")
        return scripts.variants(base, machine, group, setup.args.names)

    def tables(self, measured, rows):
        if measured.kind == COMPILE:
            return [Table(self.compile_columns, rows)]
        return [full_table(same_model(rows))]

    def notes(self, measured, rows):
        same, table = same_model(rows), self.of_another_model(rows)
        other_models = [markdown(table).rstrip("\n")] if len(table.rows) > 1 else []
        return full_notes(measured, same) + other_models

    def excerpts(self, measured, rows):
        if measured.kind == COMPILE:
            return None
        name = f"variants-{measured.kind}" if measured.kind else "variants"
        return {name: [short_table(same_model(rows))],
                f"{name}-model": [self.of_another_model(rows)]}

    def of_another_model(self, rows: list[Row]) -> Table:
        """Next to that of the first row; they take as much compute for each token."""
        same = same_model(rows)
        return Table(self.model_columns, [rows[0], *(row for row in rows if row not in same)])

    def draw(self, measured, rows):
        """Draws those of 01 and the sharded ones; of other groups the table is enough."""
        if measured.kind and not measured.kind.startswith("parallel"):
            return None
        present = {patch.name for patch in stack.load_variants()}  # an old journal may have others
        return draw_alternatives(measured, rows[0], [
            row for row in same_model(rows)[1:] if {*row.run.script.split("+")} <= present])


def same_model(rows: list[Row]) -> list[Row]:
    """Returns those that train the model of the first one, or of which that isn't known."""
    first = lookup(rows[0], PARAMETERS)
    return [row for row in rows if None in (first, own := lookup(row, PARAMETERS)) or own == first]


def shares(row: Row) -> str:
    """Returns the least and the greatest share of the tokens that an expert has, if there are
    experts."""
    log = row.record.logs[-1] if row.record and row.record.logs else {}
    of_experts = [share for layer in log.get("expert_shares") or [] for share in layer]
    return f"{min(of_experts):.0%}–{max(of_experts):.0%}" if of_experts else ""


# ---- The compiler's modes -----------------------------------------------------------------------

def uncompiled(row: Row) -> Row | None:
    """Returns the table's row that isn't compiled."""
    return next((other for other in row.rows.values() if "--no-compile" in other.run.options), None)


def total_seconds(row: Row | None) -> float | None:
    """Returns the seconds of EPOCHS epochs: compiling, and all steps."""
    steps = row.record.steps_per_epoch if row and row.record else None
    return row.first_step_excess + EPOCHS * steps * row.seconds_per_step if steps else None


def beats_from(row: Row, other: Row | None) -> str:
    """Returns the step from which on a run is ahead of another one, if it ever is."""
    if other in (row, None) or not row.record or not other.record:
        return ""
    step = pays_from((row.first_step_excess, row.seconds_per_step),
                     (other.first_step_excess, other.seconds_per_step))
    return "never" if math.isinf(step) else f"{step:,.0f}"


def pays_from(cost: tuple[float, float], other: tuple[float, float]) -> float:
    """Returns the step from which on a run is ahead of another one, infinite where it never is.
    Each cost is (the seconds that its first step takes more, the seconds of a step)."""
    (once, step), (other_once, other_step) = cost, other
    if step >= other_step:
        return 0 if once < other_once and step == other_step else math.inf
    return max(0, math.ceil((once - other_once) / (other_step - step)))


# ---- Hugging Face's Trainer ---------------------------------------------------------------------

def trainer_runs(setup: Setup) -> list[Run]:
    """Returns 01, and the same training by Trainer (peers/hf_trainer.py), from its defaults to its
    fastest settings."""
    machine = setup.machine
    base = setup.scripts.stage("01").replace(published=None)
    batch = ("--per_device_train_batch_size", "32" if machine["gpus"] else "8")  # as 01
    tf32 = ("--tf32", "True") if float(machine.get("capability") or 0) >= 8 else ()
    mixed, fastest = ("--bf16", *tf32), ("--dtype", trained_in(machine), "--torch_compile")
    settings = [(), mixed, (*mixed, "--torch_compile"), fastest]
    if not machine["gpus"]:
        settings.append((*fastest, "--huge_pages"))
    runs = [base]
    for options in settings:
        needs = "package transformers, package accelerate"
        needs += ", bfloat16 units" if "--bf16" in options else ""
        runs.append(base.replace(
            name="-".join(["trainer", *re.findall(r"\w+", " ".join(options))]),
            label=" ".join(["Trainer", *options]), script=PEER,
            technique="Hugging Face's Trainer", loss="changes", options=batch + options,
            compared_to=base.name, stage=None, error=lacking(needs, machine)))
    return runs
