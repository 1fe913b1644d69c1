"""How a script runs in an audit: run.py orders it, and child.py follows."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Order:
    """What is done with a script, and when it ends."""

    mode: str  # "time": the clock is read where a step ends; "watch": every operator is noted
    report: str = ""  # the file of the facts, as JSON
    # Of a watched run:
    key: int | str | None = None  # the optimizer whose updates end a step: see child.Steps.ends
    skipped: int = 0  # how many steps come before those that are watched
    steps: int = 0  # how many are watched

    @property
    def is_watched(self) -> bool:
        return self.mode == "watch"
