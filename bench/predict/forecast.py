"""What a script does on a GPU that isn't there: whether it fits, how fast it is, what it costs."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from bench.catalogue import Run, technique_number
from bench.predict.prediction import Prediction, largest_that_fits
from bench.predict.shipped import RESERVE
from gpt_speed.cards import Card
from gpt_speed.memory import OTHERS, MemoryNeed
from gpt_speed.speed import UNCHECKED

GROWING = "14-chunked-head"  # from this technique on a script may reserve more than predicted


class Offer(NamedTuple):
    """A GPU that may be trained on."""

    name: str
    card: Card
    price: float | None = None  # of one, per hour


@dataclass(frozen=True)
class Speed:
    """How fast a script trains on an offered GPU, or on several, at a batch size of each."""

    prediction: Prediction
    card: Card
    batch: int
    gpus: int
    least: float  # tok/sec of all GPUs
    most: float

    @property
    def mfu(self) -> float | None:
        return self.prediction.mfu(self.batch, self.card)

    @property
    def shares(self) -> dict[str, float]:
        """The share of a step's time by the kind of work, of speed.KINDS."""
        times = self.prediction.seconds(self.batch, self.card) or {}
        return {kind: seconds / sum(times.values()) for kind, seconds in times.items()}

    def hours(self, tokens: float) -> tuple[float, float]:
        """Returns the least and the most hours that so many tokens take."""
        return tokens / self.most / 3600, tokens / self.least / 3600

    def cost(self, tokens: float, price: float) -> tuple[float, float]:
        """Returns the least and the most that these hours of all GPUs cost."""
        least, most = self.hours(tokens)
        return least * self.gpus * price, most * self.gpus * price


@dataclass(frozen=True)
class Forecast:
    """A script on an offered GPU. What isn't known is None, as its speed where it doesn't fit."""

    offer: Offer
    run: Run
    prediction: Prediction
    wanted_batch: int | None  # of each GPU (None: the largest that fits)
    tokens: float | None  # to train on

    @cached_property
    def batch(self) -> int:
        """The batch size that fits, 0 where none does."""
        return largest_that_fits(self.prediction.needs, self.offer.card.mib, self.wanted_batch)

    @property
    def memory_batch(self) -> int:
        """The batch size whose memory the answer names, also where it doesn't fit."""
        return self.batch or self.wanted_batch or min(self.prediction.needs)

    @property
    def need(self) -> MemoryNeed:
        return self.prediction.needs[self.memory_batch]

    @property
    def card_gb(self) -> float:
        return self.offer.card.mib / 1024

    @property
    def limit(self) -> int:
        """The MiB that a script may take."""
        return self.offer.card.mib - OTHERS

    @property
    def reserved_gb(self) -> float | None:
        if not self.batch:
            return None
        return min(self.need.reserved, self.limit) / 1024

    @property
    def fits(self) -> str:
        if not self.batch:
            return "does not fit"
        is_tight = RESERVE * self.need.minimum > self.limit
        if is_tight and reserves_more(self.run):
            return "only just fits"
        return "fits"

    @cached_property
    def speed(self) -> Speed | None:
        """How fast it trains, inside the model."""
        batch, card, gpus = self.batch, self.offer.card, self.run.processes
        if not self.has_speed:
            return None
        speeds = self.prediction.speeds(batch, card, gpus)
        if not speeds:
            return None
        return Speed(self.prediction, card, batch, gpus, *speeds)

    @property
    def has_speed(self) -> bool:
        """Whether anything is said of its speed, be it that that isn't known."""
        return bool(self.batch and self.offer.card.bandwidth)

    def speed_on(self, gpus: int) -> str | None:
        """Returns the tok/sec of so many GPUs in thousands, or why they aren't known."""
        if not self.has_speed:
            return None
        return speed_text(self.prediction, self.batch, self.offer.card, gpus)

    @property
    def speed_of_one(self) -> str | None:
        return self.speed_on(1)

    @property
    def speed_of_all(self) -> str | None:
        """The same of several GPUs; None of one."""
        if not self.speed or self.run.processes == 1:
            return None
        return self.speed_on(self.run.processes)

    @property
    def hours(self) -> tuple[float, float] | None:
        if not self.speed or not self.tokens:
            return None
        return self.speed.hours(self.tokens)

    @property
    def cost(self) -> tuple[float, float] | None:
        if not self.speed or not self.tokens or not self.offer.price:
            return None
        return self.speed.cost(self.tokens, self.offer.price)

    def sentence(self, model: str) -> str:
        sentence = (
            f"{self.offer.name}, {model}, {self.run.label}: {self.fits} at batch"
            f" {self.memory_batch} (needs {self.need.minimum / 1024:.2f} of"
            f" {self.limit / 1024:.2f} GB)"
        )
        if self.has_speed:
            sentence += f", {self.speed_on(self.run.processes)}"
        if self.speed:
            sentence += " thousand tok/sec"
        return f"{sentence}."


def reserves_more(run: Run) -> bool:
    """Returns whether a script may reserve more than predicted."""
    if run.script == "00":
        return False
    return run.number is None or run.number >= technique_number(GROWING)


def speed_text(prediction: Prediction, batch: int, card: Card, gpus: int = 1) -> str:
    """Writes the tok/sec to expect of all GPUs in thousands, or why they aren't known."""
    speeds = prediction.speeds(batch, card, gpus)
    if speeds:
        least, most = speeds
        return span((least / 1000, most / 1000))
    precision = prediction.missing_precision(card)
    if not precision:
        return UNCHECKED
    if precision == "float32":  # every GPU computes in it; one of --memory has no speed
        return "float32 speed unknown"
    return f"not in {precision}"


def span(ends: tuple[float, float] | None) -> str:
    """Writes a range of figures, with decimals by its upper end; "" without one."""
    if not ends:
        return ""
    low, high = ends
    places = 2
    if high >= 10:
        places = 0
    elif high >= 1:
        places = 1
    return f"{low:,.{places}f}–{high:,.{places}f}"
