"""Memory that a script would take on a GPU that isn't there: what its own steps make and release
(see bench.trace) goes through a simulation of PyTorch's caching allocator.

The allocator is that of c10/cuda/CUDACachingAllocator.cpp: sizes are rounded to 512 bytes. Up to
1 MiB they come from segments of 2 MiB, below 10 MiB from segments of 20 MiB, and else from one of
their own, rounded to 2 MiB. The smallest free block that is large enough is taken, and split if
more than 1 MiB would remain (512 bytes in a small segment). A block that is released merges with
its free neighbours. If the card is full, whole segments that are free are given back first.
"""

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from bisect import bisect_left, insort
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

from bench.common import REFERENCE, ROOT, UserError, write_whole

MIB, GB = 2**20, 2**30
BATCHES = [2**k for k in range(10)]
TRACED = 8, 16  # from these two follow the larger ones: all sizes are a + b times the batch
NAME = "predict.json"  # what was predicted, in a folder of results


class Card(NamedTuple):
    mib: int  # in all, as nvidia-smi tells it
    capability: float  # NVIDIA's compute capability


CARDS = {
    "T4": Card(15_360, 7.5), "V100": Card(16_384, 7.0), "RTX 3060": Card(12_288, 8.6),
    "RTX 4060 Ti": Card(8_188, 8.9), "RTX 3090": Card(24_576, 8.6),
    "RTX 4090": Card(24_564, 8.9), "RTX 5090": Card(32_607, 12.0), "A10": Card(23_028, 8.6),
    "L4": Card(23_034, 8.9), "L40S": Card(46_068, 8.9), "RTX A6000": Card(49_140, 8.6),
    "A100 40 GB": Card(40_960, 8.0), "A100 80 GB": Card(81_920, 8.0), "H100": Card(81_559, 9.0),
    "H200": Card(143_771, 9.0), "B200": Card(183_359, 10.0),
}
OTHERS = 614  # MiB: the driver's own, its kernels, and a display


class DoesNotFit(Exception):
    """A request that the card has no memory for."""


class Block:
    """Part of a segment; `before` and `after` are its neighbours in it."""

    __slots__ = ("size", "start", "is_free", "before", "after", "small")

    def __init__(self, size: int, start: int, small: bool, before: "Block | None" = None,
                 after: "Block | None" = None):
        self.size, self.start, self.small, self.is_free = size, start, small, False
        self.before, self.after = before, after

    @property
    def place(self) -> tuple:
        """Free blocks are sorted by it."""
        return self.size, self.start, self


class Allocator:
    """The caching allocator of a card with so many bytes (None: no limit)."""

    def __init__(self, capacity: int | None = None):
        self.capacity, self.starts = capacity, count()
        self.free = {True: [], False: []}  # blocks by whether they are small, sorted
        self.reserved = self.allocated = self.peak_allocated = self.peak_reserved = 0

    def malloc(self, size: int) -> Block:
        """Raises DoesNotFit."""
        size = max(512, -(-size // 512) * 512)
        small = size <= MIB
        free = self.free[small]
        i = bisect_left(free, (size, -1))
        block = free.pop(i)[2] if i < len(free) else self.segment(size, small)
        remaining = block.size - size
        if remaining >= 512 if small else remaining > MIB:
            rest = Block(remaining, block.start + size, small, block, block.after)
            if block.after:
                block.after.before = rest
            block.after, block.size = rest, size
            self.put(rest)
        block.is_free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def segment(self, size: int, small: bool) -> Block:
        total = 2 * MIB if small else 20 * MIB
        if size >= 10 * MIB:
            total = -(-size // (2 * MIB)) * 2 * MIB
        if self.capacity is not None and self.reserved + total > self.capacity:
            for free in self.free.values():
                whole = [place for place in free if not place[2].before and not place[2].after]
                self.reserved -= sum(size for size, *_ in whole)
                free[:] = [place for place in free if place not in whole]
            if self.reserved + total > self.capacity:
                raise DoesNotFit(size)
        self.reserved += total
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return Block(total, next(self.starts) << 50, small)

    def put(self, block: Block) -> None:
        block.is_free = True
        insort(self.free[block.small], block.place)

    def take(self, block: Block) -> None:
        free = self.free[block.small]
        free.pop(bisect_left(free, (block.size, block.start)))

    def release(self, block: Block) -> None:
        self.allocated -= block.size
        before, after = block.before, block.after
        if after and after.is_free:
            self.take(after)
            block.size, block.after = block.size + after.size, after.after
            if after.after:
                after.after.before = block
        if before and before.is_free:
            self.take(before)
            before.size, before.after = before.size + block.size, block.after
            if block.after:
                block.after.before = before
            block = before
        self.put(block)


def simulate(events: list[int], capacity: int | None = None) -> Allocator:
    """The allocator after these events: a size in bytes, or -k for the release of the k-th one.
    Raises DoesNotFit."""
    allocator, blocks = Allocator(capacity), [None]
    for event in events:
        if event >= 0:
            blocks.append(allocator.malloc(event))
        else:
            allocator.release(blocks[-event])
    return allocator


# ---- Scripts -----------------------------------------------------------------------------------


class Need(NamedTuple):
    """MiB that a script takes."""

    reserved: int  # at the end of an epoch, without a limit
    least: int  # of a GPU's memory, so that it runs


def need(events: list[int]) -> Need:
    """By halving: the least capacity at which the events come to their end, in whole segments."""
    free = simulate(events)
    low, high = 0, free.peak_reserved // (2 * MIB)  # it doesn't fit low, it fits high
    while high - low > 1:
        middle = (low + high) // 2
        try:
            simulate(events, middle * 2 * MIB)
            high = middle
        except DoesNotFit:
            low = middle
    return Need(-(-free.reserved // MIB), 2 * high)


def at_batch(batch: int, first: list[int], second: list[int]) -> list[int]:
    """The events at a batch size, from those at the two of TRACED. Raises ValueError where they
    aren't the same events."""
    (a, b), events = TRACED, []
    for one, other in zip(first, second, strict=True):
        size = one + (other - one) * (batch - a) / (b - a)
        if (one < 0 or other < 0) and one != other or size != int(size):
            raise ValueError("what is made differs between batches by more than its size")
        events.append(int(size))
    return events


def largest_within(needs: dict[int, Need], mib: int) -> int:
    """The largest power of two that fits so many MiB; 0 where none does."""
    return max((batch for batch in BATCHES if batch in needs and needs[batch].least <= mib),
               default=0)


def largest(needs: dict[int, Need], mib: int) -> int:
    """That of a card with so many MiB in all."""
    return largest_within(needs, mib - OTHERS)


def ask(text: bytes, options: list[str], batches: list[int | None]) -> dict[int, list[int]]:
    """The events by the batch size (None: the script's own). Raises UserError."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_bytes(text)
        request = dict(script=str(script), options=options, batches=batches)
        child = subprocess.run([sys.executable, "-m", "bench.trace", json.dumps(request)],
                               cwd=ROOT, capture_output=True, text=True, errors="replace")
    if child.returncode:
        told = re.findall("error: (.+)", child.stderr) or child.stderr.splitlines() or [
            f"ended by {child.returncode}"]
        raise UserError(f"what it takes can't be predicted: {told[-1]}")
    return dict(json.loads(child.stdout))


def predict(text: bytes, options: list[str], results: Path, smallest: int | None = None,
            batch: int | None = None) -> dict[int, Need]:
    """What a script with these options needs at each of BATCHES, and at `batch`. The smaller ones,
    which have to be traced one by one, only if a card of `smallest` MiB doesn't have what the first
    of TRACED takes.

    What was predicted once stands in NAME, in `results` or results/reference. Raises UserError.
    """
    known = kept(text, options, REFERENCE) | kept(text, options, results)
    before = len(known)
    if TRACED[0] not in known:
        traces = ask(text, options, TRACED)
        known |= {size: need(events) for size, events in traces.items()}
        for size in BATCHES:
            if size > max(TRACED):
                with suppress(ValueError):  # it is traced below
                    known[size] = need(at_batch(size, *traces.values()))
    small = smallest is not None and smallest < known[TRACED[0]].least
    wanted = [size for size in BATCHES if small or size > TRACED[0]] + [batch] * bool(batch)
    wanted = [size for size in wanted if size not in known]
    if wanted:
        known |= {size: need(events) for size, events in ask(text, options, wanted).items()}
    if len(known) > before:
        saved = read(results)
        saved[key_of(text, options)] = {str(size): known[size] for size in sorted(known)}
        write_whole(results / NAME, json.dumps(saved, indent=0))
    return known


def key_of(text: bytes, options: list[str]) -> str:
    return f"{hashlib.sha256(text).hexdigest()} {' '.join(options)}"


def read(folder: Path) -> dict:
    try:
        return dict(json.loads((folder / NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def kept(text: bytes, options: list[str], folder: Path) -> dict[int, Need]:
    """What was predicted before."""
    try:
        sizes = read(folder).get(key_of(text, options), {})
        return {int(size): Need(*each) for size, each in sizes.items()}
    except (ValueError, TypeError, AttributeError):  # damaged
        return {}
