"""01 and its alternatives, one at a time: by default those of 01, or those of one group."""

import re
from argparse import ArgumentParser
from pathlib import Path

from bench.analysis.rows import Rows
from bench.catalogue import STAGES, Run
from bench.common import ROOT
from bench.machine import Machine, lacking, trained_in
from bench.measure.plan import EVERY_ROUND, Plan, Setup
from bench.report.pictures import draw_alternatives
from bench.report.tables import picture_name, short_table
from bench.studies import Plans, Study
from gpt_speed.common import UserError
from gpt_speed.tables import Table

TRAINER = "trainer"  # the group of other people's program
OF_02 = ("ddp", "parallel")  # groups of 02's variants
GROUPS = ("compile", "checkpoint", *OF_02, TRAINER)
PEER = ROOT / "peers" / "hf_trainer.py"


class Variants(Study):
    """Compare 01 with its alternatives, one variant at a time.

    Each is a patch in patches/variants. With a GROUP: the compiler's modes, checkpoints, DDP's
    switches and sharding (both on 02), or Hugging Face's Trainer."""

    title = "01 with one alternative at a time"
    position = 70
    report_options = "", *GROUPS

    def options(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "group",
            nargs="?",
            choices=GROUPS,
            metavar="GROUP",
            help=f"only this group: {', '.join(GROUPS)}",
        )
        parser.add_argument(
            "--names",
            metavar="A,B+C",
            help="which variants (default: all but the compiler's modes and"
            " checkpoints); + joins several into one script",
        )

    def plans(self, setup: Setup) -> Plans:
        group, names = setup.args.group, setup.args.names
        if group and names:
            raise UserError("--names and a group choose different variants: give one of them", 2)
        if group == TRAINER:
            runs = trainer_runs(setup)
        else:
            runs = variant_runs(setup, group, names)
        yield Plan(
            runs, group or "", seed_noise=2, cold_rounds=EVERY_ROUND, length=self.length(setup)
        )

    def imports(self, run: Run) -> list[Path]:
        """Returns 00 for Trainer's runs, which read tokens, evaluate and measure by it."""
        if run.script != PEER:
            return []
        return [ROOT / STAGES["00"]]

    def excerpts(self, rows: Rows) -> dict[str, list[Table]]:
        return {picture_name(self.name, rows.measured.kind): [short_table(rows)]}

    def picture(self, rows: Rows):
        """Draws variants of 01 and the sharded ones; of other groups the table is enough."""
        if rows.measured.kind and not rows.measured.kind.startswith("parallel"):
            return None
        return draw_alternatives(rows)


def variant_runs(setup: Setup, group: str | None, names: str | None) -> list[Run]:
    """Returns 01 or 02 and its variants: those in "A,B+C", or those of a group. Raises UserError,
    StackError."""
    base = base_of(group, setup)
    if names is None:
        chosen = setup.scripts.variant_names(base, group)
    else:
        chosen = names.split(",")
    return setup.scripts.with_variants(base, setup.machine, chosen)


def base_of(group: str | None, setup: Setup) -> Run:
    """Returns the script whose variants a group has: 02 on all GPUs, or on two ranks of a CPU; else
    01."""
    if group in OF_02:
        return setup.scripts.stage("02", setup.machine["gpus"] or 2)
    return setup.scripts.stage("01")


def trainer_runs(setup: Setup) -> list[Run]:
    """Returns 01, and the same training by Trainer (peers/hf_trainer.py), from its defaults to its
    fastest settings."""
    base = setup.scripts.stage("01").replace(published=None)
    settings = trainer_settings(setup.machine)
    return [base, *(trainer_run(options, base, setup.machine) for options in settings)]


def trainer_settings(machine: Machine) -> list[tuple[str, ...]]:
    """Returns the options of each run of Trainer, its defaults first."""
    mixed: tuple[str, ...] = ("--bf16",)
    if float(machine.get("capability") or 0) >= 8:
        mixed = ("--bf16", "--tf32", "True")
    fastest = ("--dtype", trained_in(machine), "--torch_compile")
    settings = [(), mixed, (*mixed, "--torch_compile"), fastest]
    if not machine["gpus"]:
        settings.append((*fastest, "--huge_pages"))
    return settings


def trainer_run(options: tuple[str, ...], base: Run, machine: Machine) -> Run:
    """Returns the run of Trainer with such options, at 01's batch size, compared to 01."""
    batch = "8"
    if machine["gpus"]:
        batch = "32"
    needs = "package transformers, package accelerate"
    if "--bf16" in options:
        needs += ", bfloat16 units"
    return base.replace(
        name="-".join(["trainer", *re.findall(r"\w+", " ".join(options))]),
        label=" ".join(["Trainer", *options]),
        script=PEER,
        technique="Hugging Face's Trainer",
        loss="changes",
        options=("--per_device_train_batch_size", batch, *options),
        compared_to=base.name,
        stage=None,
        error=lacking(needs, machine),
    )
