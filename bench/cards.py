"""GPUs: the memory, bandwidth and throughput of each, by cards.json, where every number stands with
its source, or as "unchecked"."""

import difflib
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from bench.common import UserError, relative

GB, TERA = 10**9, 10**12
FILE = Path(__file__).with_name("cards.json")  # its "about" tells the units of Card's fields
SCALED = "scaled"  # the source of a number that nobody measured on this GPU
UNCHECKED = "unchecked"  # that of one which wasn't compared with its source yet
UNALIGNED = 0.5  # of the rate of aligned products
# The same on Hopper (on data-centre Blackwell by assumption) where torch.compile doesn't pad the
# matrices; probably no kernel with their own matmul instructions takes unaligned ones.
UNALIGNED_HOPPER = 0.15


class Card(NamedTuple):
    mib: int  # of memory in all
    capability: float  # NVIDIA's compute capability
    bandwidth: float  # GB (10⁹ bytes) per second
    # TFLOP/s (10¹² floating-point operations per second) of matmuls; None where that isn't
    # known, or where it has no such units.
    float32: float | None  # by large products
    tf32: float | None  # as the next two by the datasheet
    bfloat16: float | None
    float16: float
    reached: float  # of bfloat16, or else of float16, by large products
    attention: float | None  # by causal FlashAttention-2
    names: tuple[str, ...] = ()  # PyTorch's first
    is_measured: bool = True  # whether `reached` was, on this GPU
    is_checked: bool = True  # whether the numbers stand in a source that was read
    l2: float | None = None  # MB
    power: int | None = None  # watts
    held: int = 0  # 1: by its power, see cards.json

    @property
    def kind(self) -> str:
        """One of bench.predict.speed.MARGINS."""
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
        """Floating-point operations per second that large products reach; None where it has no
        units for them. Tensor cores want matrices `aligned` to 16 bytes; torch.compile has others
        `padded` where that pays."""
        if precision == "float32" or precision == "TF32" and not self.tf32:
            return self.float32 and self.float32 * TERA
        peak = dict(TF32=self.tf32, bfloat16=self.bfloat16,
                    float16=self.float16).get(precision)
        share = self.reached / (self.bfloat16 or self.float16)
        is_hopper = 9 <= self.capability < 12 and not any("AMD" in name for name in self.names)
        slower = UNALIGNED_HOPPER if is_hopper and not padded else UNALIGNED
        return peak and peak * TERA * share * (1 if aligned else slower)


# What a file of cards has as numbers.
NUMBERS = [field for field in Card._fields if field not in ("names", "is_measured", "is_checked")]


def read_cards(path: Path) -> dict[str, Card]:
    """Those of a file like cards.json, by their names. A number may stand without its source; what
    has to be there is mib, bandwidth, and bfloat16 or float16. Raises UserError."""
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{relative(path)} can't be read: {error}", 2)
    entries = given.get("gpus", given) if isinstance(given, dict) else None
    if not isinstance(entries, dict) or not entries:
        raise UserError(f"{relative(path)} names no GPUs; bench/cards.json shows its form",
                        2)
    cards = {}
    for name, entry in entries.items():
        try:
            cards[name] = card_from(entry)
        except ValueError as error:
            raise UserError(f"{relative(path)}, {name}: {error}; bench/cards.json shows its"
                            " form", 2)
    return cards


def card_from(entry) -> Card:
    """A card from what a file has of it. Raises ValueError, which names the key that is wrong."""
    if not isinstance(entry, dict):
        raise ValueError("it isn't an object with keys such as mib")
    names = entry.get("names", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("names isn't a list of texts")
    values = {key: value[0] if isinstance(value, list) and value else value
              for key, value in entry.items() if key != "names"}
    for key, value in values.items():
        if key not in NUMBERS:
            raise ValueError(f"there is no key {key!r}, only names, {', '.join(NUMBERS)}")
        if not isinstance(value, int | float) or not 0 < value < 1e18:
            raise ValueError(f"{key} isn't a number above 0: {value!r}")
    for key in ("mib", "bandwidth"):
        if key not in values:
            raise ValueError(f"{key} is missing")
    rate = values.get("bfloat16") or values.get("float16")
    if not rate:
        raise ValueError("bfloat16 is missing, and float16 too")
    reached = entry.get("reached", [0, SCALED])
    unknown = dict.fromkeys(("float32", "tf32", "bfloat16", "attention"))
    defaults = dict(capability=8.0, float16=rate, reached=0.8 * rate)
    sources = [value[1] for value in entry.values() if isinstance(value, list) and len(value) == 2]
    return Card(**unknown | defaults | values, names=tuple(names),
                is_checked=UNCHECKED not in sources,
                is_measured=not isinstance(reached, list) or reached[1:] != [SCALED])


CARDS = read_cards(FILE)
A100_FLOPS = CARDS["A100 80 GB"].peak  # the GPU of the published figures
# Dense floating-point operations per second in bfloat16, or where a GPU hasn't got that in float16,
# by PyTorch's name of it.
PEAK_FLOPS = {name: card.peak for card in CARDS.values() for name in card.names}


def card_of(name: str) -> str | None:
    """The card by PyTorch's name of it; None for one that isn't known."""
    return next((card for card, each in CARDS.items() if name in each.names), None)


def named(text: str, cards: dict[str, Card], option: str = "--gpu") -> list[str]:
    """The cards that an option's `text` means, by names with commas between them; one that several
    names mean comes once, and a line says so. Raises UserError."""
    means = Counter(card for name in filter(str.strip, text.split(","))
                    for card in cards_by(name, cards, option))
    if not means:
        raise UserError(f"{option} {text!r} names no GPU", 2)
    doubles = [card for card, count in means.items() if count > 1]
    if doubles:
        print(f"{option}: named more than once: {', '.join(doubles)}", file=sys.stderr)
    return list(means)


def cards_by(name: str, cards: dict[str, Card], option: str) -> list[str]:
    """The cards that a name means, ours or PyTorch's, or else a part of names. Case, spaces,
    hyphens and the vendor's words don't count: "rtx4090", "4090". Raises UserError where it means
    none."""
    def plain(name: str) -> str:
        return re.sub("nvidia|geforce|tesla|rtx|amd|instinct|[^a-z0-9]", "", name.lower())

    part = plain(name)
    names = {card: [plain(each) for each in (card, *cards[card].names)] for card in cards}
    exact = [card for card in cards if part in names[card]]
    if means := exact or [card for card in cards if part and part in plain(card)]:
        return means

    def likeness(card: str) -> float:
        return max(difflib.SequenceMatcher(None, part, each).ratio() for each in names[card])

    nearest = sorted(cards, key=likeness, reverse=True)[:3]
    raise UserError(f"{option}: no GPU {name.strip()!r} is known; the nearest names are"
                    f" {', '.join(nearest)}. All: python measure.py predict --gpu list. Any other:"
                    " python measure.py predict --memory GB --bandwidth GB/S --tflops N", 2)
