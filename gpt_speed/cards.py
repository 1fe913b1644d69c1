"""GPUs: the memory, bandwidth and throughput of each, by cards.json, where every number
stands with its source, or as "unchecked"."""

import difflib
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from gpt_speed.common import UserError

GB, TERA = 10**9, 10**12
FILE = Path(__file__).with_name("cards.json")  # its "about" tells the units of Card's fields
# Of the rate of aligned matmuls: not compiled, and where logits leave the compiled part, as in the
# script after technique 8; within it PyTorch pads them from 2.5 on.
UNALIGNED = 0.5
# The same on Hopper (on data-centre Blackwell by assumption) where torch.compile doesn't pad the
# matrices; probably no kernel with their own matmul instructions takes unaligned ones.
UNALIGNED_HOPPER = 0.15


class Card(NamedTuple):
    mib: int  # of memory in all
    capability: float  # NVIDIA's compute capability
    bandwidth: float  # GB (10⁹ bytes) per second
    # TFLOP/s (10¹² floating-point operations per second) of matmuls; None where that
    # isn't known, or where it has no such units.
    float16: float  # as bfloat16 and tf32 by the datasheet
    reached: float  # of bfloat16, or else of float16, by large matmuls
    bfloat16: float | None = None
    tf32: float | None = None
    float32: float | None = None  # by large matmuls
    attention: float | None = None  # by causal FlashAttention-2
    names: tuple[str, ...] = ()  # PyTorch's first
    is_measured: bool = True  # whether `reached` was, on this GPU
    is_checked: bool = True  # whether the numbers stand in a source that was read

    @property
    def peak(self) -> float:
        """Returns the datasheet's floating-point operations per second in 16 bits."""
        return (self.bfloat16 or self.float16) * TERA

    @property
    def float32_rate(self) -> float | None:
        """Returns the operations per second that large matmuls in float32 reach."""
        if not self.float32:
            return None
        return self.float32 * TERA

    @property
    def is_amd(self) -> bool:
        return any("AMD" in name for name in self.names)

    def rate(self, precision: str, aligned: bool = True, padded: bool = True) -> float | None:
        """Returns the operations per second that large matmuls reach; None where it has
        no units for them. Tensor cores want matrices `aligned` to 16 bytes; torch.compile
        has others `padded` where that pays."""
        if precision == "float32":
            return self.float32_rate
        if precision == "TF32" and not self.tf32:  # then it multiplies in float32
            return self.float32_rate
        peak = dict(TF32=self.tf32, bfloat16=self.bfloat16, float16=self.float16).get(precision)
        if not peak:
            return None
        rate = peak * TERA * (self.reached / (self.bfloat16 or self.float16))
        if aligned:
            return rate
        return rate * self.unaligned_share(padded)

    def unaligned_share(self, padded: bool) -> float:
        """Returns the rate of unaligned matrices as a share of that of aligned ones."""
        is_hopper = 9 <= self.capability < 12 and not self.is_amd
        if is_hopper and not padded:
            return UNALIGNED_HOPPER
        return UNALIGNED


class Sourced(NamedTuple):
    """A number of a card, as cards.json has it."""

    value: float
    source: str


def card_of(entry: dict) -> Card:
    """Returns the card that an entry of cards.json describes. It has figures, too, that no
    prediction uses; those count where it is asked whether all were checked."""
    figures = {name: Sourced(*pair) for name, pair in entry.items() if name != "names"}
    values: dict[str, Any] = {
        name: figure.value for name, figure in figures.items() if name in Card._fields
    }
    return Card(
        **values,
        names=tuple(entry["names"]),
        is_measured=figures["reached"].source != "scaled",
        is_checked=all(figure.source != "unchecked" for figure in figures.values()),
    )


def read_cards() -> dict[str, Card]:
    """Returns the cards of cards.json by their names."""
    entries = json.loads(FILE.read_text(encoding="utf-8"))["gpus"]
    return {name: card_of(entry) for name, entry in entries.items()}


CARDS = read_cards()
A100_FLOPS = CARDS["A100 80 GB"].peak  # the GPU of the published figures
BY_NAME = {name: card for card in CARDS.values() for name in card.names}  # as PyTorch has them
PEAK_FLOPS = {name: card.peak for name, card in BY_NAME.items()}  # per second, dense, in 16 bits


def named(names: str) -> list[str]:
    """Returns the cards that names with commas between them mean, and warns of those that are
    named more than once. Raises UserError."""
    parts = list(filter(str.strip, names.split(",")))
    if not parts:
        raise UserError(f"--gpu {names!r} names no GPU", 2)
    counts = Counter(card for part in parts for card in cards_by(part))
    doubles = [card for card, count in counts.items() if count > 1]
    if doubles:
        print(f"--gpu: named more than once: {', '.join(doubles)}", file=sys.stderr)
    return list(counts)


def cards_by(name: str) -> list[str]:
    """Returns the cards that a name means, ours or PyTorch's, or else a part of names.
    Case, spaces, hyphens and the vendor's words don't count: "rtx4090", "4090". Raises
    UserError where it means none."""
    part = plain(name)
    names = {card: [plain(alias) for alias in (card, *CARDS[card].names)] for card in CARDS}
    exact = [card for card in CARDS if part in names[card]]
    if exact:
        return exact
    partial = [card for card in CARDS if part and part in plain(card)]
    if partial:
        return partial
    nearest = difflib.get_close_matches(name.strip().upper(), CARDS, 3, 0)
    raise UserError(
        f"--gpu: no GPU {name.strip()!r} is known; the nearest names are"
        f" {', '.join(nearest)}. All: gpt-speed gpus. Any other, in a clone of gpt-speed:"
        " python measure.py predict --memory GB --bandwidth GB/S --tflops N",
        2,
    )


def plain(name: str) -> str:
    """Returns what of a name counts: "rtx4090" and "GeForce RTX 4090" are "4090"."""
    return re.sub("nvidia|geforce|tesla|rtx|amd|instinct|[^a-z0-9]", "", name.lower())
