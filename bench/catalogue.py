"""The catalogue of scripts as runs: 00, the script after each technique, 01, 02 and the
variants; and the published figures."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from bench.common import REFERENCE, option_value, parse_options
from bench.machine import Machine, in_float16, lacking
from gpt_speed.common import UserError, counted
from patches import stack

EPOCHS = 15  # of the published experiment
GPUS = 4  # that 02 was published on, and is predicted for
# The three scripts, by the names that `Run.script` and `Run.stage` have for them. The
# stem of each file is the name of its run, and of its records.
STAGES = {"00": stack.FIRST, "01": stack.LAST, "02": stack.DDP}
# Variants that are measured only if their group is asked for.
COMPILER, CHECKPOINTS = "compile-mode", "checkpoint-resume"
# The variant for GPUs whose tensor cores multiply float16 and not bfloat16.
FLOAT16 = "precision-fp16"
LOSSES = ["unchanged", "rounding", "changes"]  # what a patch may do to the loss, by its header


@dataclass(frozen=True)
class Run:
    """A script with its options; each round of a study runs it once. Code decides by the
    fields; the label is for readers."""

    name: str  # unique in its study; the script's record has it as its stage
    label: str  # in tables and pictures, such as "5 bfloat16"
    technique: str = ""
    script: str | Path = ""  # its name in the catalogue, or its file
    loss: str | None = None  # expected effect on the loss, one of LOSSES
    published: float | None = None  # tok/sec on as many of the published A100s
    expected: float | None = None  # estimated tok/sec on such A100s, published or not
    processes: int = 1
    torchrun: bool = False  # whether torchrun starts it
    options: tuple[str, ...] = ()  # next to those of the plan
    variables: dict[str, str] = field(default_factory=dict, hash=False)  # of its environment
    number: int | None = None  # of the technique, in the ladder
    stage: str | None = None  # "00", "01" or "02", if it is one of the three scripts
    ablated: str | None = None  # the technique or variant that was taken out of it
    compared_to: str | None = None  # the name of an earlier run
    error: str | None = None  # why it can't run
    python: str | Path | None = None  # of which environment (None: that of measure.py)
    # What its study has set for it. The journal keeps it: other facts are another run.
    facts: dict[str, Any] = field(default_factory=dict, hash=False)

    def replace(self, **changes) -> "Run":
        return replace(self, **changes)


def published_source() -> dict:
    """Reads where figures are published, of what on what, and those of 00."""
    return json.loads((REFERENCE / "published-a100.json").read_text(encoding="utf-8"))


def published() -> dict[str, stack.Published]:
    """Returns the published figures of 00, of the techniques that have any, and of 01 and
    02, by the scripts' names. Raises StackError."""
    plain = published_source()["baseline"]
    first = stack.Published(float(plain["tok_per_sec"]), float(plain["reserved_gb"]), 1)
    by_patch = {patch.name: patch.published for patch in stack.load() if patch.published}
    # That of the last technique which has one is that of 01 as a whole.
    last = [name for name in by_patch if name != "ddp"][-1]
    return {"00": first, **by_patch, "01": by_patch[last], "02": by_patch["ddp"]}


@cache
def last_published_technique() -> int:
    """Returns the number of the last technique that was published; DDP is none. Raises
    StackError."""
    patches = stack.load()
    return max(
        number for number, patch in enumerate(patches, 1) if patch.published and patch.name != "ddp"
    )


@cache
def without_effect_on_gpus() -> set[int]:
    """Returns the numbers of the techniques that only speed up CPUs. Raises StackError."""
    return {
        number
        for number, patch in enumerate(stack.load(), 1)
        if patch.fields["Hardware"].startswith("CPUs")
    }


@cache
def technique_names() -> dict[str, str]:
    """Returns what each technique is called today, by the name of its patch. Raises StackError."""
    return {patch.name: patch.fields["Technique"] for patch in stack.load()}


def technique_number(patch: str) -> int:
    """Returns the number of a technique by the name of its patch. Raises StackError."""
    names = list(technique_names())
    if patch not in names:
        raise stack.StackError(f"there is no technique {patch}")
    return names.index(patch) + 1


@dataclass(frozen=True)
class Recipe:
    """How a script is composed of others in the catalogue. Its name says so in journals and stored
    predictions: "A+B" joins variants, or the first script with variants; "A@TECHNIQUE" is a variant
    of 01 taken back to that technique; "A without TECHNIQUE" leaves that one out."""

    parts: tuple[str, ...]
    back_to: str = ""
    left_out: str = ""

    @classmethod
    def of(cls, name: str) -> "Recipe":
        """Returns the recipe that a name stands for."""
        name, _, left_out = name.partition(" without ")
        joined, _, back_to = name.partition("@")
        return cls(tuple(joined.split("+")), back_to, left_out)

    @property
    def name(self) -> str:
        name = "+".join(self.parts)
        if self.back_to:
            name += f"@{self.back_to}"
        if self.left_out:
            name += f" without {self.left_out}"
        return name


class Choice(NamedTuple):
    """A variant, or several joined by +, with options."""

    script: str
    patches: list[stack.Patch]
    options: list[str]  # that were typed behind it, or that it is measured with
    needs: str  # what it can't do without, as a patch's header says it

    @property
    def label(self) -> str:
        return " ".join([self.script, *self.options])

    @property
    def spelling(self) -> tuple[frozenset[str], frozenset[tuple[str, str]]]:
        """What two spellings of one choice have in common: the set of its variants and that of its
        options."""
        return frozenset(Recipe.of(self.script).parts), frozenset(parse_options(self.options))


class Scripts:
    """Every script, as a run and as a text."""

    @cached_property
    def patched(self) -> dict[str, bytes]:
        """The text of 00, of the script after each patch, and of each variant."""
        return stack.rebuild_all()

    def text(self, script: str | Path) -> bytes:
        """Returns the text of a file, or of a script by its name: one in the catalogue, or a
        Recipe's. Raises StackError where patches don't fit together, OSError."""
        if isinstance(script, Path):
            return script.read_bytes()
        recipe = Recipe.of(script)
        text = self.joined(recipe.parts)
        if recipe.back_to:
            # What the variant changes in 01, changed in the earlier script.
            variant = "+".join(recipe.parts)
            text = stack.merge(self.listed("01"), text, self.listed(recipe.back_to), variant)
        if recipe.left_out:
            # What the technique's patch has changed, changed back.
            names = list(self.patched)
            before = self.patched[names[names.index(recipe.left_out) - 1]]
            after = self.patched[recipe.left_out]
            text = stack.merge(after, text, before, script, stack.by_joining)
        return text

    def joined(self, parts: Sequence[str]) -> bytes:
        """Returns the text of one script, or of several joined: variants, or the first script with
        variants. Raises StackError."""
        first, *rest = parts
        if not rest:
            return self.listed(first)
        if first in STAGES:
            return stack.compose(rest, STAGES[first])
        return stack.compose([*parts])

    def listed(self, name: str) -> bytes:
        """Returns the text of one of the three scripts, or after one patch. Raises StackError."""
        series = stack.Series(list(self.patched))
        return self.patched[series.find(STAGES.get(name, name))]

    def canonical(self, script: str | Path) -> str:
        """Returns the name by which predictions are stored: 00, 01 and 02 have several.
        Raises StackError."""
        names = list(self.patched)
        ends = {"0": "00", names[names.index("ddp") - 1]: "01", "ddp": "02"}
        return ends.get(str(script), str(script))

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
        runs = {
            "00": first.replace(label="00"),
            # The last published figure of a technique is that of the whole script.
            "01": last.replace(
                label="01", technique="every technique", loss=None, published=last.expected
            ),
            "02": ddp.replace(label=f"02, {counted(gpus, 'rank')}"),
        }
        return runs[name].replace(
            name=Path(STAGES[name]).stem, script=name, stage=name, number=None
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
        runs = self.variants(base, machine, names=[name])
        return next(run for run in runs if run.script != base.script)  # not 01 without dropout

    def variants(
        self,
        base: Run,
        machine: Machine,
        group: str | None = None,
        names: Sequence[str] | None = None,
    ) -> list[Run]:
        """Returns the variants of `base`, 01 or 02: those of a group, those in `names`, or all but
        the compiler's modes and checkpoints; each with every set of options that it is measured
        with. In a name + joins variants, each with its first set, and options behind it take their
        place: "data-workers --workers 8". Before a variant without dropout comes what it is
        compared to, `base` without dropout. Raises UserError, StackError."""
        _, *variants = self.with_variants(base, machine, group, names)
        return variants

    def with_variants(
        self,
        base: Run,
        machine: Machine,
        group: str | None = None,
        names: Sequence[str] | None = None,
    ) -> list[Run]:
        """Returns `base` and its variants(), as they are measured together. Raises as that."""
        patches = variants_of(base, group)
        if names is None:
            names = [name for name in patches if group or name not in (COMPILER, CHECKPOINTS)]
        choices = parse_variants(names, patches, base)
        for choice in choices:
            if len(choice.patches) > 1:
                self.text(choice.script)  # which refuses what doesn't go together
        return runs_of(choices, base, machine)


def chained(runs: list[Run]) -> list[Run]:
    """Returns runs of which each is compared to the one before it; the first one as it is."""
    return runs[:1] + [run.replace(compared_to=before.name) for before, run in pairwise(runs)]


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
    is_ddp, figures = patch.name == "ddp", patch.published
    processes, words = 1, re.sub("^[0-9]+-", "", patch.name).replace("-", " ")
    if is_ddp:
        processes, words = gpus, "DDP"
    published_speed = None
    if figures and figures.gpus == processes:
        published_speed = figures.tok_per_sec
    return Run(
        name=Path(stack.file_of(patch.name)).stem,
        label=f"{number} {words}",
        technique=patch.fields["Technique"],
        script=patch.name,
        number=number,
        processes=processes,
        torchrun=is_ddp,
        loss=effect_on_loss(patch),
        expected=speed * processes,
        published=published_speed,
    )


def effect_on_loss(patch: stack.Patch) -> str:
    """Returns one of LOSSES: the first word of what the header says."""
    return patch.fields["Loss"].split()[0]


def parse_variants(
    names: Sequence[str], patches: dict[str, stack.Patch], base: Run
) -> list[Choice]:
    """Returns what names such as "A" and "B+C --option 8" choose of the variants of `base`, each
    choice once. Raises UserError for an unknown one."""
    choices = []
    for text in names:
        script, *options = text.split() or [""]
        parts = script.split("+")
        for part in parts:
            if part not in patches:
                raise UserError(
                    f"no variant {part!r} of {base.label}; there are {', '.join(patches)}", 2
                )
        choices += choices_of(script, [patches[part] for part in parts], options)
    return once_each(choices)


def choices_of(script: str, patches: list[stack.Patch], typed: list[str]) -> list[Choice]:
    """Returns a script with the options that were typed, or else with those that it is measured
    with: one variant with each of its sets, joined variants with the first set of each."""
    if len(patches) == 1 and not typed:
        return [
            Choice(script, patches, options, needs) for options, needs in patches[0].option_sets
        ]
    first_sets = [patch.option_sets[0] for patch in patches]
    usual = [word for options, _ in first_sets for word in options]
    needs = ", ".join(needs for _, needs in first_sets if needs)
    return [Choice(script, patches, typed or usual, needs)]


def runs_of(choices: list[Choice], base: Run, machine: Machine) -> list[Run]:
    """Returns `base` and the runs of these variants of it. Before a variant without dropout comes
    `base` without dropout. Raises UserError where two would have one name."""
    base = base.replace(published=None, loss=None)
    if base.torchrun and machine["gpus"] == 1:
        base = base.replace(error="needs two or more GPUs")
    runs = [base]
    for choice in choices:
        reference = at_dropout_of(choice.options, base)
        if reference not in runs:
            runs.append(reference)
        runs.append(variant_run(choice, reference, machine))
    check_names(runs)
    return runs


def variants_of(base: Run, group: str | None = None) -> dict[str, stack.Patch]:
    """Returns the variants of 01 or 02 that can be measured, of a group or all, by their names.
    Raises StackError."""
    return {
        patch.name: patch
        for patch in stack.load_variants()
        if patch.base == base.name
        and "Group" in patch.fields
        and group in (None, patch.fields["Group"])
    }


def variant_run(choice: Choice, reference: Run, machine: Machine) -> Run:
    """Returns the run of a choice, compared to `reference`, 01 or 02; with an error where this
    machine can't run it."""
    words = re.findall(r"\w[\w.-]*", " ".join(choice.options))
    return reference.replace(
        name="-".join(["variant", choice.script, *words]),
        label=choice.label,
        script=choice.script,
        options=tuple(choice.options),
        technique=", ".join(patch.fields["Technique"] for patch in choice.patches),
        loss=max(map(effect_on_loss, choice.patches), key=LOSSES.index),
        compared_to=reference.name,
        stage=None,
        error=reference.error or lacking(choice.needs, machine),
    )


def is_zero(text: str) -> bool:
    """Returns whether an option's value is the number 0, however it is spelled."""
    try:
        return float(text) == 0
    except ValueError:  # no number, or no such option
        return False


def at_dropout_of(options: list[str], base: Run) -> Run:
    """Returns `base`, without dropout if the options of a variant switch it off: that alone would
    make the variant faster."""
    if not is_zero(option_value("--dropout", options)):
        return base
    return base.replace(
        name=f"{base.name}-dropout-0",
        label=f"{base.label} --dropout 0",
        options=("--dropout", "0"),
        compared_to=base.name,
        stage=None,
    )


def once_each(choices: list[Choice]) -> list[Choice]:
    """Returns of two spellings of one choice the first, and prints that there are two."""
    first_of: dict[tuple, Choice] = {}
    for choice in choices:
        first = first_of.setdefault(choice.spelling, choice)
        if first is not choice:
            print(f"asked for twice, and taken once: {both_labels(first, choice)}", file=sys.stderr)
    return list(first_of.values())


def both_labels(one: Choice, other: Choice) -> str:
    """Returns how two choices are written, once where that is the same."""
    if one.label == other.label:
        return one.label
    return f"{one.label} ({other.label})"


def check_names(runs: list[Run]) -> None:
    """Raises UserError where two runs have one name: in a journal the second would replace the
    first."""
    by_name: dict[str, Run] = {}
    for run in runs:
        other = by_name.setdefault(run.name, run)
        if other is not run:
            raise UserError(
                f"{other.label} and {run.label} would both be called {run.name}: ask"
                " for one at a time",
                2,
            )
