"""`Run`: a script with its options, as studies measure it."""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from patches import stack

EPOCHS = 15  # of the published experiment
GPUS = 4  # that 02 was published on, and is predicted for
# The three scripts, by the names that `Run.script` and `Run.stage` have for them. The
# stem of each file is the name of its run, and of its records.
STAGES = {"00": stack.FIRST, "01": stack.LAST, "02": stack.DDP}
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


def chained(runs: list[Run]) -> list[Run]:
    """Returns runs of which each is compared to the one before it; the first one as it is."""
    return runs[:1] + [run.replace(compared_to=before.name) for before, run in pairwise(runs)]
