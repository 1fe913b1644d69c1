"""What stands in the pages about each variant: tables and cards."""

import re
from dataclasses import dataclass

from bench.analysis.gains import Gain, best, gain_of, unclear_variants, variant_key, variant_rows
from bench.analysis.rows import ratio
from bench.catalogue import Run, effect_on_loss
from bench.predict import reference
from bench.predict.store import Prediction
from bench.report.tables import spread
from bench.report.technique_pages import GPU, links_of, memory_text, speed_text
from gpt_speed.cards import CARDS
from gpt_speed.common import UserError, listed
from gpt_speed.tables import Column, Table, markdown, text_col, value_col
from patches import stack
from patches.stack import Patch

WHERE = {  # what the CPU's figures of a purpose are of, where that isn't 01 with cpu-demo
    "Several GPUs": "Measured on two CPU ranks with `cpu-demo`, over `02`; none has run on several"
    " GPUs. [With gpt2-medium](multi-gpu.md#models-that-one-gpu-cant-hold) ZeRO 3 saves memory.",
}
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
    "Fewer tokens to a loss": (
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
        "head-sampled",
        "dropout-hash",
        "attention-backend",
        "compile-blocks",
        "compile-mode",
        "compile-switch",
        "embedding-eager",
        "optimizer-foreach",
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


# What those that were measured on the GPU are good for, by their labels, the most useful first.
USES = {
    "precision-autocast": "**long trainings**: no small update is lost",
    "memory-checkpoint": "**a model or batch that doesn't fit**",
    "optimizer-muon": "**fewer tokens to a loss**",
    "compile-blocks": "**short runs**: it compiles sooner",
    "precision-float8": "larger models, untested",
    "head-cce, skipping small gradients": "large vocabularies, untested",
    "head-liger": "nothing: technique 14 is faster",
    "precision-float8 --float8 head": "nothing",
    "precision-float8 --float8 all": "nothing",
}


@dataclass
class Variant:
    """What a table tells of a variant, with the options that it was measured with."""

    script: str
    label: str
    gains: list[Gain]
    is_unclear: bool = False  # it was measured, but what it gains is too uncertain to be printed

    @property
    def is_part(self) -> bool:
        """Whether it is a variant without one of its parts, which only a machine's page shows."""
        return " --no-" in self.label

    @property
    def changes_something(self) -> bool:
        """Whether it isn't just predicted to leave speed and memory as they are."""
        gain, cpu = self.on_gpu, self.on_cpu
        if not gain or gain.source != "predicted" or (cpu and cpu.is_significant):
            return True
        return not (is_one(gain.factor) and is_one(gain.memory))

    @property
    def link(self) -> str:
        return f"[`{self.label}`](#{self.script})"

    @property
    def on_gpu(self) -> Gain | None:
        """What it gained on GPU: with the narrowest interval, or else predicted."""
        return best(gain for gain in self.gains if gain.folder == GPU.folder)

    @property
    def on_cpu(self) -> Gain | None:
        return best(gain for gain in self.gains if gain.device == "cpu")

    @property
    def on_gpu_or_cpu(self) -> Gain | None:
        return self.on_gpu or self.on_cpu


def is_one(factor: float | None) -> bool:
    """Returns whether a factor is 1 as it is printed."""
    return factor is not None and round(factor, 2) == 1


def variant_cards() -> str:
    """Returns for each purpose a table of what its variants gain, without their parts and those
    that are predicted to change nothing, and a card for each."""
    variants, texts = variants_by_script(), []
    for purpose, patches in by_purpose(stack.load_variants()).items():
        lines = [variant for patch in patches for variant in variants.get(patch.name, [])]
        shown = [one for one in lines if one.changes_something and not one.is_part]
        table = markdown(variants_table(shown)).rstrip()
        texts += [f"## {purpose}", *filter(None, [WHERE.get(purpose)]), table]
        texts += map(variant_card, patches)
    return "\n\n".join(texts) + "\n"


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
    """Returns what variants gained; on a GPU only where one of them has a figure of one."""
    on_gpu = [Column(f"speed, {GPU.name}", speed_on_gpu)]
    return Table(
        [
            text_col("variant", "link"),
            *(on_gpu if any(variant.on_gpu for variant in variants) else []),
            Column("speed, CPU", speed_on_cpu),
            Column("memory", lambda variant: memory_text(variant.on_gpu_or_cpu) or MISSING),
        ],
        variants,
    )


def speed_on_gpu(variant: Variant) -> str:
    return speed_text(variant.on_gpu) or MISSING


def speed_on_cpu(variant: Variant) -> str:
    """Writes times the speed, or why it isn't there."""
    return speed_text(variant.on_cpu) or ("unclear" if variant.is_unclear else MISSING)


def measured_on_gpu() -> Table:
    """Returns what was measured of variants on the GPU, the most useful first."""
    everything = [one for variants in variants_by_script().values() for one in variants]
    gains = [(variant.on_gpu, variant) for variant in everything]
    measured = [variant for gain, variant in gains if gain and gain.source == "measured"]
    order = [*USES, *(variant.label for variant in measured)]
    measured.sort(key=lambda variant: order.index(variant.label))
    return Table(
        [
            text_col("variant", "link"),
            Column("use it for", lambda variant: USES.get(variant.label, ""), True),
            value_col("× speed", "on_gpu", speed_text),
            value_col("95%", "on_gpu", interval_cell),
            value_col("× memory", "on_gpu", memory_text),
        ],
        measured,
    )


def interval_cell(gain: Gain) -> str:
    return spread(gain.interval, ".2f") or "one run"


def variants_by_script() -> dict[str, list[Variant]]:
    """Returns the variants that were measured or predicted, by the names of their patches, sorted
    by their labels."""
    measured = [(row.run, gain_of(row)) for row in variant_rows()]
    gains: dict[tuple[str, str], list[Gain]] = {}
    for run, gain in (*measured, *predicted_gains()):
        gains.setdefault(variant_key(run), []).append(gain)
    variants: dict[str, list[Variant]] = {}
    unclear = unclear_variants()
    for key in sorted(gains):
        variant = Variant(*key, gains[key], is_unclear=key in unclear)
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


def predicted_gains() -> list[tuple[Run, Gain]]:
    """Returns what each variant whose prediction is stored gains on an H100, over what it is
    compared to. Raises UserError, StackError."""
    gains = []
    base, variants = reference.scripts().stage("01"), reference.variants()
    by_name: dict[str | None, Run] = {run.name: run for run in variants}
    by_name[base.name] = base
    for run in variants:
        prediction = reference.kept_of(run.script, [*reference.GPT2, *run.options])
        if prediction:
            other = by_name[run.compared_to]
            before = reference.prediction_of(other.script, [*reference.GPT2, *other.options])
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
