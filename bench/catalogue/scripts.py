"""`Scripts`: the ladder, the three scripts and the variants, as runs."""

import re
from collections.abc import Sequence
from pathlib import Path

from bench.catalogue.recipes import Recipe, Texts
from bench.catalogue.runs import STAGES, Run
from bench.catalogue.techniques import effect_on_loss, published
from bench.catalogue.variants import (
    Choice,
    as_base,
    at_dropout_of,
    first_part,
    parse_variant,
    parse_variants,
    runs_of,
    variant_run,
    variants_of,
)
from bench.machine import Machine, in_float16
from gpt_speed.common import UserError, counted
from patches import stack

# Variants that are measured only if their group is asked for.
COMPILER, CHECKPOINTS = "compile-mode", "checkpoint-resume"
# The variant for GPUs whose tensor cores multiply float16 and not bfloat16.
FLOAT16 = "precision-fp16"


class Scripts(Texts):
    """Every script as a run, and its text."""

    def ladder(self, gpus: int = 1) -> list[Run]:
        """Returns 00, the script after each technique, and 02 on `gpus`. Raises
        UserError, StackError."""
        speed = published()["00"].tok_per_sec
        baseline = Run(
            name=Path(stack.FIRST).stem,
            label="0 baseline",
            technique="baseline",
            script="00",
            number=0,
            published=speed,
            expected=speed,
        )
        runs = [baseline]
        for number, patch in enumerate(stack.load(), 1):
            if patch.published:  # else it is expected to be as fast as the one before
                speed = patch.published.tok_per_sec / patch.published.gpus
            runs.append(technique_run(number, patch, speed, gpus))
        return runs

    def select(self, techniques: str | None, runs: list[Run]) -> list[Run]:
        """Returns those of the ladder's runs that "0,5-8" names; all for None. Raises UserError."""
        if techniques is None:
            return runs
        numbers: set[int] = set()
        for part in techniques.split(","):
            chosen = numbers_in(part)
            if not chosen or chosen[-1] >= len(runs):
                raise UserError(
                    f"--techniques {techniques}: {part!r} isn't within 0-{len(runs) - 1}, as"
                    " a number or a range like 5-8",
                    2,
                )
            numbers.update(chosen)
        return [runs[number] for number in sorted(numbers)]

    def stage(self, name: str, gpus: int = 1) -> Run:
        """Returns "00", "01", or "02" on `gpus` processes. Raises UserError, StackError."""
        first, *_, last, ddp = self.ladder(gpus)
        run, label = {"00": first, "01": last, "02": ddp}[name], name
        if name == "01":  # the last published figure of a technique is that of the whole script
            run = run.replace(technique="every technique", loss=None, published=run.expected)
        if name == "02":
            label = f"02, {counted(gpus, 'rank')}"
        return run.replace(
            name=Path(STAGES[name]).stem, label=label, script=name, stage=name, number=None
        )

    def for_machine(self, name: str, machine: Machine, options: list[str]) -> Run:
        """Returns one of the three scripts in the type that this machine has units for;
        02 on all its GPUs, or on two ranks of a CPU. Raises UserError, StackError."""
        run = self.stage(name, machine["gpus"] or 2)
        if name != "00" and in_float16(machine, options):
            return self.float16(run)
        return run

    @staticmethod
    def float16(run: Run) -> Run:
        """Returns 01 or 02, composed with FLOAT16."""
        script = FLOAT16  # which is a variant of 01
        if run.stage == "02":
            script = Recipe(("02", FLOAT16)).name
        return run.replace(
            name=f"{run.name}-{FLOAT16}", label=f"{run.label} with {FLOAT16}", script=script
        )

    def find(self, name: str, machine: Machine) -> Run:
        """Returns "00", "01", or variants of 01 joined by +, with their first measured
        options. Raises UserError, StackError."""
        if "," in name:
            raise UserError(f"{name} is more than one script: join variants of one by +", 2)
        if name in STAGES:
            return self.stage(name)
        base = self.stage("01")
        choice = parse_variant(name, variants_of(base), base)[0]
        self.check(choice)
        return variant_run(choice, at_dropout_of(choice.options, as_base(base, machine)), machine)

    def base_of(self, variant: str, gpus: int) -> Run:
        """Returns 01, or 02 on `gpus`: what "A+B --option 8" is a variant of, by the first. Raises
        UserError, StackError."""
        ddp = self.stage("02", gpus)
        if first_part(variant) in variants_of(ddp):
            return ddp
        return self.stage("01")

    def variants(self, base: Run, machine: Machine, names: Sequence[str]) -> list[Run]:
        """Returns the named variants of `base`, as with_variants() does, without it."""
        _, *variants = self.with_variants(base, machine, names)
        return variants

    def with_variants(self, base: Run, machine: Machine, names: Sequence[str]) -> list[Run]:
        """Returns `base`, 01 or 02, and the named variants of it, as they are measured together:
        before a variant without dropout comes `base` without dropout, which it is compared to.

        "A" is a variant, with each set of options that it is measured with. "A+B" joins variants,
        each with its first set. "A --option 8" has the options behind it in place of those. Raises
        UserError, StackError.
        """
        choices = parse_variants(names, variants_of(base), base)
        for choice in choices:
            self.check(choice)
        return runs_of(choices, base, machine)

    @staticmethod
    def variant_names(base: Run, group: str | None = None) -> list[str]:
        """Returns the names of the variants of 01 or 02 in a group; without one those of all groups
        but the compiler's modes and checkpoints. Raises StackError."""
        names = list(variants_of(base, group))
        if group:
            return names
        return [name for name in names if name not in (COMPILER, CHECKPOINTS)]

    def check(self, choice: Choice) -> None:
        """Raises StackError where joined variants don't go together."""
        if len(choice.patches) > 1:
            self.text(choice.script)


def numbers_in(text: str) -> range:
    """Returns the numbers in "5" or "5-8"; none for another text."""
    match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", text)
    if not match:
        return range(0)
    first, last = match.groups()
    return range(int(first), int(last or first) + 1)


def technique_run(number: int, patch: stack.Patch, speed: float, gpus: int) -> Run:
    """Returns the script after a technique, which is expected to train at `speed` tok/sec on each
    A100; DDP's on so many GPUs."""
    words, processes = re.sub("^[0-9]+-", "", patch.name).replace("-", " "), 1
    if patch.name == "ddp":
        words, processes = "DDP", gpus
    published_speed = None
    if patch.published and patch.published.gpus == processes:
        published_speed = patch.published.tok_per_sec
    return Run(
        name=Path(stack.file_of(patch.name)).stem,
        label=f"{number} {words}",
        technique=patch.fields["Technique"],
        script=patch.name,
        number=number,
        processes=processes,
        torchrun=patch.name == "ddp",
        loss=effect_on_loss(patch),
        expected=speed * processes,
        published=published_speed,
    )
