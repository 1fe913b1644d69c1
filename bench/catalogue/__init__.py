"""The catalogue: every script as a `Run`, its text, and the published figures. Other rooms import
these names from here."""

from bench.catalogue.recipes import Recipe
from bench.catalogue.runs import EPOCHS, GPUS, STAGES, Run, chained
from bench.catalogue.scripts import CHECKPOINTS, COMPILER, FLOAT16, Scripts
from bench.catalogue.techniques import (
    effect_on_loss,
    last_published_technique,
    published,
    published_source,
    technique_names,
    technique_number,
    without_effect_on_gpus,
)
from bench.catalogue.variants import variants_of

__all__ = [
    "CHECKPOINTS",
    "COMPILER",
    "EPOCHS",
    "FLOAT16",
    "GPUS",
    "STAGES",
    "Recipe",
    "Run",
    "Scripts",
    "chained",
    "effect_on_loss",
    "last_published_technique",
    "published",
    "published_source",
    "technique_names",
    "technique_number",
    "variants_of",
    "without_effect_on_gpus",
]
