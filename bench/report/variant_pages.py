"""What stands in the pages about each variant: tables and cards."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from bench.analysis.claims import Claims
from bench.analysis.gains import Gain, best, gain_of, unclear_variants, variant_key, variant_rows
from bench.analysis.rows import ratio
from bench.catalogue import Run, effect_on_loss
from bench.common import REFERENCE
from bench.predict import shipped
from bench.predict.prediction import Prediction
from bench.report.tables import spread
from bench.report.technique_pages import GPU, Shown, links_of, memory_text, speed_text
from gpt_speed.cards import CARDS
from gpt_speed.common import UserError, listed
from gpt_speed.tables import Column, Table, markdown, text_col
from patches import stack
from patches.stack import Patch

WHERE = {  # what the CPU's figures of a purpose are of, where that isn't 01 with cpu-demo
    "Several GPUs": "Measured on two CPU ranks with `cpu-demo`, over `02`; none has run on several"
    " GPUs. [With gpt2-medium](multi-gpu.md#models-that-one-gpu-cant-hold) ZeRO 3 saves memory.",
}
# Whose figures the tables have beside the GPU's.
CPUS = (Shown("intel-xeon-amx-2-cores", "Xeon"), Shown("amd-epyc-2-cores", "EPYC"))
LINKS = 1  # to the sources of a variant; its patch names all
MISSING = "–"  # what was neither measured nor predicted
# What variants are for, in the order of the page.
PURPOSES = {
    "Less memory": (
        "memory-checkpoint",
        "step-accumulation",
        "memory-budget",
        "memory-offload",
        "memory-selective",
        "optimizer-in-backward",
        "optimizer-adafactor",
        "optimizer-adamw-8bit",
        "head-cce",
        "head-liger",
        "head-pytorch",
    ),
    "Fewer tokens to reach a loss": (
        "optimizer-muon",
        "schedule-cosine",
        "schedule-scaled",
        "schedule-wsd",
    ),
    "Precision": (
        "precision-autocast",
        "precision-float8",
        "precision-fp16",
        "precision-stochastic",
    ),
    "Several GPUs": (
        "parallel-zero1",
        "parallel-deepspeed",
        "parallel-muon",
        "parallel-sharded",
        "ddp-compression",
        "ddp-options",
        "timeout-ranks",
    ),
    "Model": ("init-gpt2", "model-mixture", "model-modern", "model-skips", "model-tied-head"),
    "Speed and compilation": (
        "compile-mode",
        "attention-backend",
        "dropout-hash",
        "compile-blocks",
        "compile-switch",
        "head-sampled",
        "optimizer-foreach",
        "embedding-eager",
        "gc-freeze",
    ),
    "Data and debugging": (
        "checkpoint-resume",
        "data-on-device",
        "data-workers",
        "loop-accelerate",
        "profile",
    ),
}


# What the variants to choose from are good for, by their labels, the most useful first.
USES = {
    "precision-autocast": "**to keep what you train**: no small update is lost",
    "checkpoint-resume": "**to resume after a crash**, at a constant learning rate: most schedules"
    " don't combine with it yet",
    "memory-checkpoint": "a model or batch that doesn't fit",
    "step-accumulation --micro-batches 4": "a larger batch per update",
    "optimizer-muon": "fewer tokens to reach a loss; then add [`model-modern`](#model-modern)",
    "compile-mode --compile-mode reduce-overhead, batch 4": "speed at small batches (CUDA graphs)",
    "compile-blocks": "short runs: it compiles sooner",
    "compile-switch --compile-switch fallback_random": "dropout on PyTorch 2.13 and newer",
    "attention-backend --attention flash --no-attention-dropout": "a model that needs no dropout in"
    " attention; cuDNN's kernel reached 1.08",
    "init-gpt2": "to fine-tune GPT-2, with `precision-autocast`",
}
# Those that were measured on the GPU and are of no use at this model's size, and why.
USELESS = {
    "head-liger": "technique 14 is faster",
    "precision-float8": "it may pay for larger models, untested",
    "precision-float8 --float8 head": "scaling costs more than it saves",
    "precision-float8 --float8 all": "the same",
    "compile-mode --compile-mode reduce-overhead": "batch 32 keeps the GPU busy",
    "compile-switch --compile-switch coordinate_descent_tuning": "six times the compile time",
}
GONE = {"head-cce, skipping small gradients"}  # measured, but nobody can compose it any more
RESTS_ON = {"step": "two turns", "predicted": "predicted"}  # a factor without an interval
NOTES = {"head-pytorch": "probably its small chunks"}  # on what a factor comes from


class Step(NamedTuple):
    """What steps.json calls a variant's change, and what it is compared to there."""

    change: str
    over: str = "01"


STEPS = {  # by the labels of the variants that make the same change
    "compile-mode --compile-mode reduce-overhead, batch 4": Step(
        "--batch-size 4, reduce-overhead", over="--batch-size 4"
    ),
    "compile-mode --compile-mode reduce-overhead": Step("reduce-overhead"),
    "attention-backend --attention flash --no-attention-dropout": Step("no dropout in attention"),
    "compile-switch --compile-switch coordinate_descent_tuning": Step("coordinate_descent_tuning"),
    "compile-switch --compile-switch fallback_random": Step("fallback_random"),
}


@dataclass
class Variant:
    """What a table tells of a variant, with the options that it was measured with."""

    script: str
    label: str
    gains: list[Gain]
    # The folders of the machines where it was measured, but its gain is too uncertain to print.
    unclear_on: frozenset[str] = frozenset()

    @property
    def is_part(self) -> bool:
        """Whether it is a variant without one of its parts, which only a machine's page shows."""
        return f"{self.script} --no-" in self.label

    @property
    def is_shown(self) -> bool:
        """Whether it has a line in the table of its purpose."""
        return self.changes_something and not self.is_part and self.label not in GONE

    @property
    def changes_something(self) -> bool:
        """Whether it isn't just predicted to leave speed and memory as they are."""
        gain = self.on(GPU)
        if not gain or gain.source != "predicted":
            return True
        if any(other.is_significant for other in self.gains):
            return True
        return not (is_one(gain.factor) and is_one(gain.memory))

    @property
    def link(self) -> str:
        note = NOTES.get(self.label)
        link = f"[`{self.label}`](#{self.script})"
        if note:
            return f"{link}: {note}"
        return link

    def on(self, machine: Shown) -> Gain | None:
        """What it gained on a machine: with the narrowest interval, or else predicted."""
        return best(gain for gain in self.gains if gain.folder == machine.folder)

    def has_figures_of(self, machine: Shown) -> bool:
        """Returns whether it was measured on a machine, or is predicted there."""
        return bool(self.on(machine)) or machine.folder in self.unclear_on


def is_one(factor: float | None) -> bool:
    """Returns whether a factor is 1 as it is printed."""
    return factor is not None and round(factor, 2) == 1


def variant_tables() -> str:
    """Returns for each purpose a table of what its variants gain, and the names of the others."""
    variants, texts = variants_by_script(), []
    for purpose, patches in by_purpose(stack.load_variants()).items():
        lines = [variant for patch in patches for variant in variants.get(patch.name, [])]
        shown = [variant for variant in lines if variant.is_shown]
        table = markdown(variants_table(shown)).rstrip()
        others = without_figures(patches, shown)
        texts += [f"### {purpose}", *filter(None, [WHERE.get(purpose), table, others])]
    return "\n\n".join(texts) + "\n"


def without_figures(patches: list[Patch], shown: list[Variant]) -> str:
    """Returns a line with links to the patches that no variant of a table has; "" without any."""
    scripts = {variant.script for variant in shown}
    links = [f"[`{one.name}`](#{one.name})" for one in patches if one.name not in scripts]
    if not links:
        return ""
    return f"Without figures: {', '.join(links)}"


def variant_cards() -> str:
    """Returns a card for each variant, by name."""
    patches = sorted(stack.load_variants(), key=attrgetter("name"))
    return "\n\n".join(map(variant_card, patches)) + "\n"


def by_purpose(patches: list[Patch]) -> dict[str, list[Patch]]:
    """Returns what variants are for each of PURPOSES. Raises StackError for one that isn't there,
    or that is there and no variant."""
    by_name = {patch.name: patch for patch in patches}
    names = {name for group in PURPOSES.values() for name in group}
    different = sorted(by_name.keys() ^ names)
    if different:
        raise stack.StackError(
            f"PURPOSES in bench/report/variant_pages.py and patches/variants/ differ in"
            f" {listed(different)}"
        )
    return {purpose: [by_name[name] for name in group] for purpose, group in PURPOSES.items()}


def variants_table(variants: list[Variant]) -> Table:
    """Returns what variants gained, on each machine that has a figure of one of them: the memory
    on the GPU, or on CPUs where no GPU has a figure."""
    shown = [
        machine
        for machine in (GPU, *CPUS)
        if any(variant.has_figures_of(machine) for variant in variants)
    ]
    columns = [text_col("variant", "link")]
    for machine in shown:
        columns.append(Column(f"{machine.name}: × speed", partial(speed_cell, machine)))
        if machine == GPU or GPU not in shown:
            columns.append(Column(f"{machine.name}: × memory", partial(memory_cell, machine)))
    return Table(columns, variants)


def speed_cell(machine: Shown, variant: Variant) -> str:
    """Writes times the speed on a machine, or why it isn't there."""
    gain = variant.on(machine)
    if not gain and machine.folder in variant.unclear_on:
        return "unclear"
    return speed_text(gain) or MISSING


def memory_cell(machine: Shown, variant: Variant) -> str:
    return memory_text(variant.on(machine)) or MISSING


def variant_choice() -> str:
    """Returns a table of the variants to choose from, the most useful first, and a sentence on
    those that are of no use."""
    everything = [one for variants in variants_by_script().values() for one in variants]
    known = {variant.label: variant for variant in everything}
    table = Table(
        [
            Column("you want", lambda variant: USES[variant.label], True),
            text_col("variant", "link"),
            Column(f"{GPU.name}: × speed", partial(speed_cell, GPU)),
            Column("95%", interval_cell),
            Column(f"{GPU.name}: × memory", partial(memory_cell, GPU)),
        ],
        [known.get(label) or Variant(label, label, []) for label in USES],
    )
    others = [
        f"`{label}` ({speed_text(known[label].on(GPU))}: {reason})"
        for label, reason in USELESS.items()
    ]
    return f"{markdown(table)}\n**Of no use** at this model's size: {', '.join(others)}.\n"


def is_measured(gain: Gain | None) -> bool:
    return gain is not None and gain.source != "predicted"


def interval_cell(variant: Variant) -> str:
    """Writes the interval of what a variant gained on GPU, or on how little the factor rests."""
    gain = variant.on(GPU)
    if not gain:
        return MISSING
    if gain.source in RESTS_ON:
        return RESTS_ON[gain.source]
    return spread(gain.interval, ".2f") or "one run"


def variants_by_script() -> dict[str, list[Variant]]:
    """Returns the variants that were measured or predicted, by the names of their patches, sorted
    by their labels."""
    of_runs = [*((row.run, gain_of(row)) for row in variant_rows()), *predicted_gains()]
    of_keys = [(variant_key(run), gain) for run, gain in of_runs]
    gains: dict[tuple[str, str], list[Gain]] = {}
    for key, gain in (*of_keys, *step_gains()):
        gains.setdefault(key, []).append(gain)
    variants: dict[str, list[Variant]] = {}
    unclear = unclear_variants()
    for key in sorted(gains):
        variant = Variant(*key, gains[key], unclear.get(key, frozenset()))
        variants.setdefault(variant.script, []).append(variant)
    return variants


def variant_card(patch: Patch) -> str:
    """Returns the first paragraph of a patch's header, what it needs or lacks, and its sources."""
    fields, title = patch.fields, patch.fields["Technique"]
    remarks = {
        "Loss": effect_on_loss(patch),
        "Hardware": fields["Hardware"],
        "Package": ", ".join(stack.packages_of([patch])),
        "Limits": fields.get("Limits", ""),
    }
    return " ".join(
        [
            f"### `{patch.name}`\n\n**{title[0].upper()}{title[1:]}.**",
            re.sub(r"--[a-z][\w-]*(?: [\d.]*\d)?", r"`\g<0>`", patch.prose),  # options as code
            *(
                f"*{name}*: {text}."
                for name, text in remarks.items()
                if text not in ("unchanged", "any", "")
            ),
            links_of(patch, LINKS),
        ]
    )


def step_gains() -> Iterator[tuple[tuple[str, str], Gain]]:
    """Yields what variants gained in the GPU's single steps, each with its variant_key. Raises
    OSError, MissingRow."""
    steps = Claims(REFERENCE).steps
    for label, step in STEPS.items():
        factor = steps.speedup(step.change, step.over)
        memory = steps.step_gb[step.change] / steps.step_gb[step.over]
        if factor:
            gain = Gain(GPU.name, factor, memory, folder=GPU.folder, source="step")
            yield (label.split()[0], label), gain


def predicted_gains() -> list[tuple[Run, Gain]]:
    """Returns what each variant whose prediction is stored gains on an H100, over what it is
    compared to. Raises UserError, StackError."""
    gains = []
    base, variants = shipped.scripts().stage("01"), shipped.variants()
    by_name: dict[str | None, Run] = {run.name: run for run in variants}
    by_name[base.name] = base
    for run in variants:
        prediction = shipped.kept_of(run.script, [*shipped.GPT2, *run.options])
        if prediction:
            other = by_name[run.compared_to]
            before = shipped.prediction_of(other.script, [*shipped.GPT2, *other.options])
            gains.append((run, gain_over(before, prediction)))
    return gains


def gain_over(before: Prediction, prediction: Prediction) -> Gain:
    """Returns what one prediction gains over another on GPU, at batch 32. Raises UserError where
    a speed isn't predicted."""
    card, batch = CARDS[GPU.name], 32
    factor = ratio(prediction.tok_per_sec(batch, card), before.tok_per_sec(batch, card))
    if factor is None:
        raise UserError(f"no speed is predicted on {GPU.name}")
    memory = prediction.needs[batch].reserved / before.needs[batch].reserved
    return Gain(GPU.name, factor, memory, folder=GPU.folder, source="predicted")
