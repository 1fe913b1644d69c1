"""How long a training step takes on a GPU, by the work of its kernels.

Each kernel takes three times, one after the other: to be launched, to move its bytes, and to do its
floating-point operations. Adding the last two, where a roofline counts the longer one, is what
makes matmuls with a small inner size slow: at 8,192 × 768 by 768 × 3,072 an A100 was measured to
reach 0.7 of what it reaches on large ones.
"""

from typing import NamedTuple

from gpt_speed.cards import GB, TERA, Card

# The constants of the model; docs/predictions.md tells where each comes from.
LAUNCH = 3e-6  # seconds of the GPU for each kernel
HOST = 30e-6  # seconds of the CPU for each kernel, with views and autograd
BANDWIDTH = 0.85  # reached share of the datasheet's bandwidth
FLASH = 0.44  # rate of FlashAttention by that of matmuls, where nobody measured it
EFFICIENT = 0.22  # that of the memory-efficient kernel, which GPUs before 8.0 have

# The margin of a predicted speed, as a share of it, in which four of five figures of others lie.
COMPILED = 0.3  # as a whole
NOT_COMPILED = 0.25
LITTLE_CHECKED = 0.35  # where the GPU waits for the CPU, or before 8.0
# Smaller batches, and AMD GPUs, lie outside the model: there others measured a half, and a fifth,
# of what it says.
LEAST_BATCH = 4
UNCHECKED = "unchecked"  # in place of a range there

KINDS = "products", "head", "attention", "loss", "optimizer", "rest", "host"  # of work


class Work(NamedTuple):
    """The work of a step's kernels of one kind, precision and alignment."""

    kind: str  # one of KINDS, but not host
    precision: str  # of their matmuls: float32, TF32, bfloat16, float16; or ""
    is_aligned: bool  # whether the matrices of matmuls are
    kernels: float = 0
    flops: float = 0
    size: float = 0  # bytes read and written

    @property
    def group(self) -> tuple[str, str, bool]:
        """What it shares with other work that is counted together."""
        return self.kind, self.precision, self.is_aligned


def is_compiled(step: list[Work]) -> bool:
    """Tells whether a step is compiled as a whole: else it has more kernels between its matmuls
    than matmuls."""

    def kernels(kind: str) -> float:
        return sum(work.kernels for work in step if work.kind == kind)

    return kernels("rest") < kernels("products")


def seconds(step: list[Work], card: Card) -> dict[str, float] | None:
    """Returns the seconds of each kind of work, with "host" for those in which the GPU waits for
    the CPU; None where the card lacks what the work needs."""
    times, kernels = dict.fromkeys(KINDS, 0.0), 0.0
    padded = is_compiled(step)
    for work in step:
        time = work.kernels * LAUNCH + work.size / (BANDWIDTH * card.bandwidth * GB)
        if work.flops:
            rate = flops_rate(work, card, padded)
            if not rate:
                return None
            time += work.flops / rate
        times[work.kind] += time
        kernels += work.kernels
    return times | dict(host=max(0, kernels * HOST - sum(times.values())))


def flops_rate(work: Work, card: Card, padded: bool) -> float | None:
    """Returns the floating-point operations per second at which a card does the work; None where it
    has no units for it."""
    rate = card.rate(work.precision, work.is_aligned, padded)
    is_fused = work.kind == "attention" and work.precision in ("bfloat16", "float16")
    if not rate or not is_fused:
        return rate
    if card.attention:
        return card.attention * TERA
    if card.bfloat16:
        return FLASH * rate
    return EFFICIENT * rate


def missing_precision(step: list[Work], card: Card) -> str | None:
    """Returns a precision of matmuls for which the card has no units, or None."""
    return next(
        (work.precision for work in step if work.flops and not card.rate(work.precision)), None
    )


def is_inside(card: Card, batch: int) -> bool:
    """Tells whether a speed lies inside the model, so that it has a margin."""
    return batch >= LEAST_BATCH and not card.is_amd


def margin(card: Card, compiled: bool, times: dict[str, float] | None) -> float:
    """Returns the margin of a predicted speed, as a share of it; `times` are of seconds()."""
    if card.capability < 8 or times and times["host"]:
        return LITTLE_CHECKED
    if compiled:
        return COMPILED
    return NOT_COMPILED


def work_at(batch: int, steps: dict[int, list[Work]]) -> list[Work]:
    """Returns the work at a batch size from that at two others, as a + b × batch."""
    (first, step), (second, other_step) = steps.items()
    share = (batch - first) / (second - first)
    at_first = {work.group: work for work in step}
    at_second = {work.group: work for work in other_step}
    return [
        interpolate(at_first.get(group, Work(*group)), at_second.get(group, Work(*group)), share)
        for group in at_first | at_second
    ]


def interpolate(one: Work, other: Work, share: float) -> Work:
    """Returns the work of a group at this share of the way from one to the other, maybe beyond."""
    return one._replace(
        kernels=one.kernels + share * (other.kernels - one.kernels),
        flops=one.flops + share * (other.flops - one.flops),
        size=one.size + share * (other.size - one.size),
    )
