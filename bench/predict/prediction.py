"""What a script takes on GPUs that aren't there: `Prediction`, and what follows from one."""

from collections.abc import Iterable
from typing import NamedTuple

from bench.catalogue import EPOCHS
from bench.corpus import BOOK_TOKENS
from gpt_speed import speed
from gpt_speed.cards import Card
from gpt_speed.memory import OTHERS, MemoryNeed
from gpt_speed.speed import Work

BATCHES = [2**k for k in range(10)]
TRACED = 8, 16  # from these two follow the larger ones: all sizes are a + b × batch


class Prediction(NamedTuple):
    """What a script takes. Methods return None if the card lacks what it needs."""

    needs: dict[int, MemoryNeed]  # by the batch size
    steps: dict[int, list[Work]]  # the work of a step, by the batch sizes of TRACED
    context_length: int
    flops_per_token: int
    code: str  # code_of() the traced script
    refused: tuple[int, ...] = ()  # batch sizes that the script doesn't take

    @classmethod
    def from_json(cls, entry: dict) -> "Prediction":
        """Returns what is stored. Raises one of common.DAMAGE for something else."""
        return cls(
            needs={int(size): MemoryNeed(*need) for size, need in entry["needs"].items()},
            steps={
                size: [Work(*work) for work in entry["works"][str(size)]["step"]] for size in TRACED
            },
            context_length=entry["context_length"],
            flops_per_token=entry["flops_per_token"],
            code=entry["code"],
            refused=tuple(entry.get("refused", ())),
        )

    def as_json(self) -> dict:
        entry: dict = dict(
            needs=self.needs,
            works={size: dict(step=step) for size, step in self.steps.items()},
            context_length=self.context_length,
            flops_per_token=self.flops_per_token,
            code=self.code,
        )
        if self.refused:
            entry["refused"] = self.refused
        return entry

    def with_needs(self, needs: dict[int, MemoryNeed], refused: Iterable[int]) -> "Prediction":
        """Returns it with the memory at further batch sizes, and those that were refused."""
        return self._replace(
            needs=dict(sorted((self.needs | needs).items())),
            refused=(*self.refused, *sorted(refused)),
        )

    def tokens(self, batch: int) -> int:
        """Returns the tokens of a step on one GPU."""
        return batch * self.context_length

    def seconds(self, batch: int, card: Card) -> dict[str, float] | None:
        """Returns the seconds of a step, as gpt_speed.speed.seconds()."""
        return speed.seconds(speed.work_at(batch, self.steps), card)

    def tok_per_sec(self, batch: int, card: Card) -> float | None:
        """Returns the tok/sec of one GPU."""
        times = self.seconds(batch, card)
        if not times:
            return None
        return self.tokens(batch) / sum(times.values())

    def speeds(self, batch: int, card: Card, gpus: int = 1) -> tuple[float, float] | None:
        """Returns the least and the most tok/sec to expect of all GPUs, whose communication takes
        no time; None also outside the model."""
        times = self.seconds(batch, card)
        if not times or not speed.is_inside(card, batch):
            return None
        expected = gpus * self.tokens(batch) / sum(times.values())
        margin = speed.margin(card, speed.is_compiled(self.steps[TRACED[0]]), times)
        return expected * (1 - margin), expected * (1 + margin)

    def missing_precision(self, card: Card) -> str | None:
        """Returns the precision that the script multiplies in and the card has no units for, or
        whose speed there isn't known; None where there is none."""
        return speed.missing_precision(self.steps[TRACED[0]], card)

    def minutes(self, batch: int, card: Card) -> float | None:
        """Returns the minutes of the published epochs on the book."""
        expected = self.tok_per_sec(batch, card)
        if not expected:
            return None
        return EPOCHS * BOOK_TOKENS / expected / 60

    def mfu(self, batch: int, card: Card) -> float | None:
        """Returns the share of the datasheet's 16-bit throughput that is used."""
        expected = self.tok_per_sec(batch, card)
        if not expected:
            return None
        return expected * self.flops_per_token / card.peak


def largest_that_fits(
    needs: dict[int, MemoryNeed], mib: int, batch: int | None = None, others: int = OTHERS
) -> int:
    """Returns the largest of BATCHES, or `batch` instead, if it fits a card with this many MiB, of
    which `others` are left free; 0 where none does."""
    sizes = BATCHES
    if batch:
        sizes = [batch]
    fits = [size for size in sizes if size in needs and needs[size].minimum <= mib - others]
    return max(fits, default=0)
