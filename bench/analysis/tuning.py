"""Trainings to a loss: the settings that a search tunes, and the losses that runs are timed to."""

from typing import NamedTuple

from bench.catalogue import Run

# The targets of plans: what 00 comes to, alone and after a search.
DEFAULT_LOSS = "the lowest validation loss of 00 in its default run"
EPOCH_LOSS = "the lowest validation loss of 00 in one epoch of the text, at its best settings"


class Setting(NamedTuple):
    """A script with the settings that a search varies."""

    script: str  # "00", "01", or variants of 01: "optimizer-muon+model-tied-head --polar-express"
    batch: int
    rate: float

    @property
    def facts(self) -> dict[str, str | int | float]:
        """As a run keeps it in its facts, and a journal does."""
        return dict(stage=self.script, batch=self.batch, rate=self.rate)

    def around(self) -> list["Setting"]:
        """Returns half and twice the batch size, and half and twice the learning rate."""
        sizes = [size for size in (self.batch // 2, self.batch * 2) if size]
        return [
            *(self._replace(batch=size) for size in sizes),
            *(self._replace(rate=rate) for rate in (self.rate / 2, self.rate * 2)),
        ]


def is_tuned(run: Run) -> bool:
    """Returns whether a run has settings of a search, and not those of its script."""
    return "batch" in run.facts


def setting_of(run: Run) -> Setting:
    """Returns the settings of a run that is_tuned."""
    return Setting(run.facts["stage"], run.facts["batch"], run.facts["rate"])
