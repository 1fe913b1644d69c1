"""GPUs, and how long a step would take on one that isn't there, by the work of its kernels.

Each kernel takes three times, one after the other: to be launched, to move its bytes, and to do its
floating-point operations. That the last two are added, and not only the longer one counted, is what
makes products of a small inner size slow: of 8,192 × 768 by 768 × 3,072 an A100 does 0.7 of what it
does of large ones, as measured. So the time of a step follows from sums over its kernels.
"""

from collections.abc import Iterable
from typing import NamedTuple

from bench.cards import GB, TERA, Card

# Where each of these comes from, docs/predictions.md tells.
LAUNCH = 3e-6  # seconds of the GPU for each kernel
HOST = 30e-6  # seconds of the host for each kernel, with views and autograd
BANDWIDTH = 0.85  # that is reached, of the datasheet's
ATTENTION = 0.44  # FlashAttention's rate, of that of products, where it wasn't measured
# That of the memory-efficient kernel, which GPUs before 8.0 have in its place, with buffers of the
# same sizes.
EFFICIENT = 0.22
# Either way of a prediction, by the kind of card; docs/predictions.md tells how many of others'
# figures lie in it. Of a laptop's or another card that its power holds down, of one whose rate of
# products nobody measured, and before 8.0, where no training speed is known, it is wider.
RANGES = {
    "data centre": 0.15, "workstation, GeForce": 0.15, "power-limited": 0.2, "scaled": 0.2,
    "scaled, power-limited": 0.25, "before 8.0": 0.35}
NOT_COMPILED = 0.25  # at least, where scripts aren't compiled, or not whole
HOST_BOUND = 0.35  # at least, where the GPU waits for the host


KINDS = "products", "head", "attention", "loss", "optimizer", "rest", "host"  # of work


class Work(NamedTuple):
    """That of a step's kernels of one kind. `precision` is that of their products: float32, TF32,
    bfloat16 or float16, or "" where they have none."""

    kind: str  # one of KINDS, but not host
    precision: str
    is_aligned: bool  # whether the matrices of products are
    kernels: float = 0
    flops: float = 0
    size: float = 0  # bytes read and written

    @property
    def group(self) -> tuple[str, str, bool]:
        return self[:3]


def is_compiled(step: Iterable[Work]) -> bool:
    """Whether a step is so as a whole: else more kernels lie between its products than it has
    products."""
    kernels = dict.fromkeys(KINDS, 0.0)
    for each in step:
        kernels[each.kind] += each.kernels
    return kernels["rest"] < kernels["products"]


def seconds(work: Iterable[Work], card: Card) -> dict[str, float] | None:
    """The seconds of each kind of work, and those for which the GPU waits for the host; None where
    the card lacks what the work needs."""
    times, kernels = dict.fromkeys(KINDS, 0.0), 0.0
    padded = is_compiled(work := list(work))
    for kind, precision, is_aligned, count, flops, size in work:
        time = count * LAUNCH + size / (BANDWIDTH * card.bandwidth * GB)
        if flops:
            rate = card.rate(precision, is_aligned, padded)
            if not rate:
                return None
            if kind == "attention" and precision in ("bfloat16", "float16"):
                share = ATTENTION if card.bfloat16 else EFFICIENT
                rate = card.attention * TERA if card.attention else share * rate
            time += flops / rate
        times[kind] += time
        kernels += count
    return times | dict(host=max(0, kernels * HOST - sum(times.values())))


def range_of(card: Card, is_compiled: bool, times: dict[str, float] | None) -> float:
    """Either way of a predicted speed, as a share of it."""
    return max(RANGES[card.kind], 0 if is_compiled else NOT_COMPILED,
               HOST_BOUND if times and times["host"] else 0)


def lacking(work: Iterable[Work], card: Card) -> str | None:
    """The precision for which a card has no units."""
    return next((each.precision for each in work if each.flops and not card.rate(each.precision)),
                None)


def work_at(batch: int, works: dict[int, list[Work]]) -> list[Work]:
    """The work at a batch size, from those at two others: each figure is a + b times the batch."""
    (first, one), (second, other) = (
        (size, {each.group: each for each in work}) for size, work in works.items())

    def between(a: float, b: float) -> float:
        return a + (b - a) * (batch - first) / (second - first)

    return [Work(*group, *map(between, one.get(group, Work(*group))[3:],
                              other.get(group, Work(*group))[3:]))
            for group in {**one, **other}]
