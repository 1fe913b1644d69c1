"""GPUs as data, from cards.json, where every number stands with its source. A GPU is added by an
entry there."""

import difflib
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from bench.common import UserError

GB, TERA = 10**9, 10**12
FILE = Path(__file__).with_name("cards.json")  # its "about" tells the units of Card's fields
SCALED = "scaled"  # the source of a number that nobody measured on this GPU
UNCHECKED = "unchecked"  # the source of a number that wasn't compared with its source yet
UNALIGNED = 0.5  # the rate of unaligned matmuls, of that of aligned ones
# The same on Hopper (on data-centre Blackwell by assumption) where torch.compile doesn't pad the
# matrices; probably no kernel with their own matmul instructions takes unaligned ones.
UNALIGNED_HOPPER = 0.15


class Card(NamedTuple):
    mib: int  # of memory in all
    capability: float  # NVIDIA's compute capability
    bandwidth: float  # GB (10⁹ bytes) per second
    # TFLOP/s (10¹² floating-point operations per second) of matmuls; None where that isn't
    # known, or where it has no such units.
    float32: float | None  # reached by large matmuls
    tf32: float | None  # this and the next two: by the datasheet
    bfloat16: float | None
    float16: float
    reached: float  # in bfloat16, or else in float16, by large matmuls
    attention: float | None  # of causal FlashAttention-2
    names: tuple[str, ...] = ()  # PyTorch's first
    is_measured: bool = True  # whether `reached` was, on this GPU
    is_checked: bool = True  # whether the numbers stand in a source that was read
    l2: float | None = None  # MB
    power: int | None = None  # watts
    held: int = 0  # 1: by its power, see cards.json

    @property
    def kind(self) -> str:
        """One of bench.predict.speed.RANGES."""
        if self.capability < 8:
            return "before 8.0"
        if not self.is_measured:
            return "scaled, power-limited" if self.held else "scaled"
        if self.held:
            return "power-limited"
        return ("workstation, GeForce" if any("RTX" in name for name in self.names)
                else "data centre")

    @property
    def peak(self) -> float:
        """The datasheet's floating-point operations per second in 16 bits."""
        return (self.bfloat16 or self.float16) * TERA

    def rate(self, precision: str, aligned: bool = True, padded: bool = True) -> float | None:
        """Returns the operations per second that large matmuls reach; None without units for them.
        Tensor cores want matrices `aligned` to 16 bytes; torch.compile pads others where that
        pays: `padded`."""
        if precision == "float32" or precision == "TF32" and not self.tf32:
            return self.float32 and self.float32 * TERA
        peak = dict(TF32=self.tf32, bfloat16=self.bfloat16, float16=self.float16).get(precision)
        share = self.reached / (self.bfloat16 or self.float16)
        is_hopper = 9 <= self.capability < 12 and not any("AMD" in name for name in self.names)
        slower = UNALIGNED_HOPPER if is_hopper and not padded else UNALIGNED
        return peak and peak * TERA * share * (1 if aligned else slower)


def card_from(names: list[str], **numbers: tuple[Any, str]) -> Card:
    """Makes a card from its entry in cards.json: numbers with their sources."""
    values = {field: value for field, (value, _) in numbers.items()}
    unknown = dict.fromkeys(("tf32", "bfloat16", "attention"))
    return Card(**unknown | values, names=tuple(names),
                is_checked=UNCHECKED not in {source for _, source in numbers.values()},
                is_measured=numbers["reached"][1] != SCALED)


CARDS = {name: card_from(**entry)
         for name, entry in json.loads(FILE.read_text(encoding="utf-8"))["gpus"].items()}
A100_FLOPS = CARDS["A100 80 GB"].peak  # the GPU of the published figures
# Dense operations per second in bfloat16, or else in float16, by PyTorch's names.
PEAK_FLOPS = {name: card.peak for card in CARDS.values() for name in card.names}


def card_of(name: str) -> str | None:
    """Returns the name in CARDS of PyTorch's name; None for a GPU that isn't there."""
    return next((card for card in CARDS if name in CARDS[card].names), None)


def named(text: str) -> list[str]:
    """Returns the cards that --gpu NAME,NAME means. Raises UserError."""
    cards = dict.fromkeys(
        card for name in text.split(",") if name.strip() for card in cards_by(name))
    if not cards:
        raise UserError(f"--gpu {text!r} names no GPU", 2)
    return list(cards)


def cards_by(name: str) -> list[str]:
    """Returns the card with a name, ours or PyTorch's, or else those with it as a part: "rtx4090",
    "4090". Raises UserError for none."""
    def plain(name: str) -> str:
        return re.sub("nvidia|geforce|tesla|rtx|amd|instinct|[^a-z0-9]", "", name.lower())

    part = plain(name)
    names = {plain(other): card for card in CARDS for other in (card, *CARDS[card].names)}
    if part in names:
        return [names[part]]
    if matches := [card for card in CARDS if part and part in plain(card)]:
        return matches
    near = dict.fromkeys(names[other] for other in difflib.get_close_matches(part, names, 9, 0))
    raise UserError(f"--gpu: no GPU {name.strip()!r} is known; the nearest names are"
                    f" {', '.join([*near][:3])}. All: python measure.py predict --gpu list."
                    " Any other: python measure.py predict --memory GB,GB/S,TFLOPS", 2)
