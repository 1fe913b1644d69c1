"""The studies that compare a base with alternatives: each declares its runs, columns and notes."""

import re
from collections.abc import Callable
from typing import NamedTuple

from bench.analysis.rows import Row, middle
from bench.catalogue import CHECKPOINTS, Run, lacking
from bench.common import ROOT, UserError, trained_in
from bench.measure.plan import EVERY_ROUND, SCRATCH, Plan, Setup
from bench.report.notes import full_notes, machine_note
from bench.report.pictures import draw_alternatives
from bench.report.tables import (
    GB,
    LOSS,
    RANGE,
    RUN,
    SPEED,
    SPEED_OR_ERROR,
    Column,
    Table,
    bold,
    cell,
    figure,
    full_table,
    markdown,
    number,
    short_table,
    words,
)
from bench.studies import Study
from patches import stack

PARAMETERS = "record.config.parameters"

# ---- 01 and its variants ------------------------------------------------------------------------


class Variants(Study):
    """01, and 01 with one variant at a time: each is a patch in patches/variants."""

    title = "01 with one alternative at a time"
    schedule = {70: None}
    settings = dict(seed_noise=2, cold_rounds=EVERY_ROUND)
    names_help = ("which variants (default: all but those that compile-modes and checkpoints"
                  " measure); + joins several into one script")
    model_columns = [
        Column("another model", lambda row: f"`{row.label}`", True),
        number("parameters", PARAMETERS, ","), SPEED,
        Column("× speed", lambda row: row.error or cell(row.factor, ".2f")), GB,
        number("× memory", "memory_factor", ".2f"), LOSS,
        number("Δ loss", "loss_difference", "+.4f"),
        Column("experts' shares of the tokens", lambda row: shares(row)),
    ]

    def runs(self, setup):
        return setup.scripts.variants(setup.scripts.stage("01"), setup.machine,
                                      names=setup.args.names)

    def tables(self, measured, rows):
        return [full_table(same_model(rows))]

    def notes(self, measured, rows):
        same, table = same_model(rows), self.of_another_model(rows)
        return full_notes(measured, same) + [markdown(table).rstrip("\n")] * (len(table.rows) > 1)

    def excerpts(self, measured, rows):
        return {"variants": [short_table(same_model(rows))],
                "variants-model": [self.of_another_model(rows)]}

    def of_another_model(self, rows: list[Row]) -> Table:
        """Next to that of the first row; they take as much compute for each token."""
        same = same_model(rows)
        return Table(self.model_columns, [rows[0], *(row for row in rows if row not in same)])

    def draw(self, measured, rows):
        there = {patch.name for patch in stack.load_variants()}  # an old journal may have others
        return draw_alternatives(measured, rows[0], [
            row for row in same_model(rows)[1:] if {*str(row.run.script).split("+")} <= there])


def same_model(rows: list[Row]) -> list[Row]:
    """Those that train the model of the first one, or of which that isn't known."""
    first = figure(rows[0], PARAMETERS)
    return [row for row in rows if None in (first, own := figure(row, PARAMETERS)) or own == first]


def shares(row: Row) -> str:
    """From the least to the most tokens that an expert has, where there are experts."""
    log = row.record.logs[-1] if row.record and row.record.logs else {}
    each = [share for layer in log.get("expert_shares") or [] for share in layer]
    return f"{min(each):.0%}–{max(each):.0%}" if each else ""


class Trainer(Study):
    """01, and the same training by Hugging Face's Trainer (peers/hf_trainer.py), from its defaults
    to its fastest settings."""

    title = "Hugging Face's Trainer"
    schedule = {130: None}

    def runs(self, setup):
        machine = setup.machine
        base = setup.scripts.stage("01").but(published=None)
        batch = ("--per_device_train_batch_size", "32" if machine["gpus"] else "8")  # as 01
        tf32 = ("--tf32", "True") if float(machine.get("capability") or 0) >= 8 else ()
        mixed, fastest = ("--bf16", *tf32), ("--dtype", trained_in(machine), "--torch_compile")
        settings = [(), mixed, (*mixed, "--torch_compile"), fastest]
        if not machine["gpus"]:
            settings.append((*fastest, "--huge_pages"))
        needs = "package transformers, package accelerate"
        return [base, *(base.but(
            name="-".join(["trainer", *re.findall(r"\w+", " ".join(options))]),
            label=" ".join(["Trainer", *options]), script=ROOT / "peers" / "hf_trainer.py",
            technique="Hugging Face's Trainer", loss="changes", options=batch + options,
            compared_to=base.name, stage=None,
            error=lacking(needs + ", bfloat16 units" * ("--bf16" in options), machine))
            for options in settings)]


class LeaveOneOut(Study):
    """01 without one technique at a time: what each is still worth next to all the others; with
    --names also of a script composed of variants, without one technique or variant at a time."""

    title = "01 without one technique at a time"
    schedule = {60: None}
    rungs_help = "which techniques, by their numbers (default: all)"
    names_help = "variants that the script has besides, joined by + (default: none)"
    short = [RUN, SPEED_OR_ERROR, RANGE,
             Column("technique's speedup",
                    lambda row: bold(cell(row.technique_factor, ".2f"), row.significance)),
             GB, number("Δ loss", "loss_difference", "+.3f")]

    def plans(self, setup):
        names = setup.args.names
        base = setup.scripts.find(names or "01", setup.machine)
        if base.error:
            raise UserError(f"{names}: {base.error}")
        base = base.but(published=None, loss=None, compared_to=None)
        runs = [base, *without_techniques(setup, base)]
        for part in base.script.split("+") if names else ():
            rest = "+".join(other for other in base.script.split("+") if other != part) or "01"
            runs.append(setup.scripts.find(rest, setup.machine).but(
                name=f"without-{part}", label=f"without {part}", published=None, loss=None,
                technique=setup.scripts.find(part, setup.machine).technique,
                compared_to=base.name, stage=None, without=part))
        yield Plan(runs, "variants" if names else "", seed_noise=2, cold_rounds=EVERY_ROUND,
                   **self.length(setup))


def without_techniques(setup: Setup, base: Run) -> list[Run]:
    """`base` without each of the chosen techniques that later ones don't build on."""
    runs = []
    for rung in setup.scripts.chosen(setup.args.rungs, setup.scripts.rungs()[:-1]):
        if rung.rung == 0:
            continue  # 00 has no technique; `base` runs in any case
        script, error = f"{base.script} without {rung.script}", None
        try:
            setup.scripts.text(script)
        except stack.Conflict:
            error = "conflict: later patches build on the lines that it changes"
        runs.append(base.but(
            name=f"without-{rung.name}", label=f"without {rung.label}", script=script, error=error,
            technique=rung.technique, loss=rung.loss, compared_to=base.name, stage=None,
            without=rung.name))
    return runs


# ---- 02 and its variants ------------------------------------------------------------------------


class Ddp(Study):
    """02, and 02 with each of DDP's own switches."""

    title = "DDP's own switches"
    schedule = {110: None}
    settings = dict(seed_noise=1)

    def runs(self, setup):
        return setup.scripts.variants_of_02(setup.machine, "ddp")


class Sharded(Study):
    """02, and 02 with optimizer state, gradients, weights (ZeRO) or Muon's matrices sharded."""

    title = "Sharded training (ZeRO, FSDP)"
    schedule = {90: None}
    in_report = "", "--model gpt2-medium"
    # How a larger model is run: 40 GB of a GPU, or a minute of two cores, are enough for it.
    # (Compiling gpt2-medium takes them three minutes.)
    model_options = {"cuda": "--batch-size 8",
                     "cpu": "--batch-size 1 --context-length 128 --eval-windows 2 --no-compile"}
    model_tokens = {"cuda": 131_072, "cpu": 768}

    def options(self, parser):
        parser.add_argument("--model", metavar="NAME",
                            help="another size, such as gpt2-medium, at a smaller batch; on a CPU"
                                 " also a short context and run, not compiled (default: the"
                                 " scripts' own)")

    def plans(self, setup):
        runs, length = self.runs(setup), self.length(setup)
        if model := setup.args.model:
            length["tokens"] = setup.args.max_tokens or self.model_tokens[setup.device]
            options = f"--model {model} {self.model_options[setup.device]}".split()
            yield Plan(runs, model, options=options, **length)
        else:
            yield Plan(runs, seed_noise=1, **length)

    def runs(self, setup):
        return setup.scripts.variants_of_02(setup.machine, "parallel")

    def draw(self, measured, rows):
        return draw_alternatives(measured, rows[0], rows[1:])


# ---- Checkpoints --------------------------------------------------------------------------------


class Saving(NamedTuple):
    """What checkpoints cost, in seconds."""

    waiting: float  # of training, for a save
    slower: float  # that the steps up to the next one take longer
    step: float  # without checkpoints

    def share(self, every: int) -> float:
        """Of the wall time, with a save every `every` steps."""
        price = self.waiting + max(0, self.slower)
        return price / (price + every * self.step)


def saving(column: str, figure: Callable[[Saving], float], form: str) -> Column:
    """A column of the rows that save."""
    def cell_of(row: Row) -> str:
        saves = [save["seconds"] for record in row.records for save in record.checkpoints]
        if not saves or not row.versus:
            return ""
        # By the average, since few of the steps may be slower.
        step, alone = (each.record.tokens_per_step / middle(
            record.end["avg_tok_per_sec"] for record in each.records)
            for each in (row, row.versus))
        slower = row.record.config["checkpoint_every"] * (step - alone)
        return format(figure(Saving(middle(saves), slower, alone)), form)

    return Column(column, cell_of)


class Checkpoints(Study):
    """01 and 02, with synchronous and with asynchronous checkpoints."""

    title = "What checkpoints cost"
    schedule = {120: None}
    tokens = {"cuda": 1_310_720, "cpu": 32_768}  # four saves or more
    every = {"cuda": 25, "cpu": 4}  # steps from one checkpoint to the next
    columns = [RUN, words("checkpoints", "technique"), SPEED_OR_ERROR, RANGE,
               saving("s per save", lambda cost: cost.waiting, ".2f"),
               saving("slower steps, s", lambda cost: cost.slower, ".2f"),
               saving("share, every 10", lambda cost: cost.share(10), ".1%"),
               saving("share, every 50", lambda cost: cost.share(50), ".1%"),
               saving("share, every 200", lambda cost: cost.share(200), ".1%"), GB, LOSS]

    def runs(self, setup):
        scripts, every = setup.scripts, str(self.every[setup.device])
        saved = ("--checkpoint-every", every, "--checkpoint-dir", SCRATCH)
        error = lacking("package safetensors", setup.machine)
        runs = []
        for stage in ("01", "02"):
            base = scripts.stage(stage, setup.machine["gpus"] or 2).but(
                published=None, technique="none are saved")
            runs += [base, *(base.but(
                name=f"{base.name}-{mode}", label=f"{base.label}, {mode}", error=error,
                script=f"{stage}+{CHECKPOINTS}", options=options, compared_to=base.name,
                technique=f"saved every {every} steps")
                for mode, options in (("saved", saved), ("async", (*saved, "--checkpoint-async"))))]
        return runs

    def notes(self, measured, rows):
        return [machine_note(measured, rows),
                "s per save is how long training waits for one, which tok/sec doesn't count; slower"
                " steps is how much longer than without checkpoints the steps from one to the next"
                " take. The shares are of wall time, by both, with a save every 10, 50 or 200"
                " steps."]
