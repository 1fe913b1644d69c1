"""What the patches' headers say of the techniques: their names, effects and published figures."""

import json
from functools import cache

from bench.common import REFERENCE
from patches import stack


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


def effect_on_loss(patch: stack.Patch) -> str:
    """Returns one of LOSSES: the first word of what the header says."""
    return patch.fields["Loss"].split()[0]
