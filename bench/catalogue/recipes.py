"""The texts of scripts, and `Recipe`: how one is composed of others."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from bench.catalogue.runs import STAGES
from patches import stack


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


class Texts:
    """The text of every script, by its name."""

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
            text = self.taken_back(text, recipe)
        if recipe.left_out:
            text = self.without(text, recipe)
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

    def taken_back(self, text: bytes, recipe: Recipe) -> bytes:
        """Returns what a variant changes in 01, changed in an earlier script. Raises StackError."""
        variant = "+".join(recipe.parts)
        return stack.merge(self.listed("01"), text, self.listed(recipe.back_to), variant)

    def without(self, text: bytes, recipe: Recipe) -> bytes:
        """Returns a text in which what a technique's patch has changed is changed back. Raises
        StackError."""
        after = self.patched[recipe.left_out]
        before = self.patched[self.name_before(recipe.left_out)]
        return stack.merge(after, text, before, recipe.name, stack.by_joining)

    def name_before(self, patch: str) -> str:
        """Returns the name of the script that a patch of the series changes."""
        names = list(self.patched)
        return names[names.index(patch) - 1]

    def listed(self, name: str) -> bytes:
        """Returns the text of one of the three scripts, or after one patch. Raises StackError."""
        series = stack.Series(list(self.patched))
        return self.patched[series.find(STAGES.get(name, name))]

    def canonical(self, script: str | Path) -> str:
        """Returns the name by which predictions are stored: 00, 01 and 02 have several.
        Raises StackError."""
        ends = {"0": "00", self.name_before("ddp"): "01", "ddp": "02"}
        return ends.get(str(script), str(script))
