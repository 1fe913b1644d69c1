"""Variants of 01 and 02 as they are asked for: "A", or "B+C --option 8"."""

import re
import sys
from collections.abc import Sequence
from typing import NamedTuple

from bench.catalogue.recipes import Recipe
from bench.catalogue.runs import LOSSES, Run
from bench.catalogue.techniques import effect_on_loss
from bench.machine import Machine, lacking
from bench.options import option_value, parse_options
from gpt_speed.common import UserError
from patches import stack


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


def parse_variants(
    names: Sequence[str], patches: dict[str, stack.Patch], base: Run
) -> list[Choice]:
    """Returns what names such as "A" and "B+C --option 8" choose of the variants of `base`, each
    choice once. Raises UserError for an unknown one."""
    return once_each([choice for name in names for choice in parse_variant(name, patches, base)])


def parse_variant(name: str, patches: dict[str, stack.Patch], base: Run) -> list[Choice]:
    """Returns what one such name chooses. Raises UserError for an unknown one."""
    script, *options = name.split() or [""]
    parts = script.split("+")
    for part in parts:
        if part not in patches:
            raise UserError(
                f"no variant {part!r} of {base.label}; there are {', '.join(patches)}", 2
            )
    return choices_of(script, [patches[part] for part in parts], options)


def first_part(name: str) -> str:
    """Returns the first variant of such a name: "B" of "B+C --option 8"."""
    script, *_ = name.split()
    return script.partition("+")[0]


def choices_of(script: str, patches: list[stack.Patch], typed: list[str]) -> list[Choice]:
    """Returns a script with the options that were typed. Without any it has those that it is
    measured with: a single variant comes once with each of its sets, joined ones with the first set
    of each."""
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
    base = as_base(base, machine)
    runs = [base]
    for choice in choices:
        reference = at_dropout_of(choice.options, base)
        if reference not in runs:
            runs.append(reference)
        runs.append(variant_run(choice, reference, machine))
    check_names(runs)
    return runs


def as_base(run: Run, machine: Machine) -> Run:
    """Returns 01 or 02 as the run that variants of it are compared to; with an error where this
    machine can't run it."""
    error = run.error
    if run.torchrun and machine["gpus"] == 1:
        error = "needs two or more GPUs"
    return run.replace(published=None, loss=None, error=error)


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
