"""Memory that a script takes on a GPU that isn't there: a simulation of PyTorch's caching allocator
replays the storages that the script's own steps make and release (bench.predict.trace).

The allocator is that of c10/cuda/CUDACachingAllocator.cpp. Sizes are rounded up to 512 bytes. Sizes
up to 1 MiB come from segments of 2 MiB, those below 10 MiB from segments of 20 MiB, and larger ones
from a segment of their own, rounded up to 2 MiB. The smallest free block that is large enough is
taken, and split if more than 1 MiB would remain (512 bytes in a small segment). A released block
merges with its free neighbours. If the card is full, whole free segments are given back first.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

MIB = 2**20
SEGMENT = 2 * MIB  # all segments are multiples of it
WORKSPACE = 8_519_680  # bytes of cuBLAS at its first matmul: 2 × 4,096 and 8 × 16 KiB


class DoesNotFit(Exception):
    """A request that the card has no memory for."""


def round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def segment_size(size: int, small: bool) -> int:
    """Returns the bytes of a segment for a request of `size` bytes."""
    if small:
        return SEGMENT
    return 20 * MIB if size < 10 * MIB else round_up(size, SEGMENT)


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment; `before` and `after` are its neighbours in the segment."""

    size: int
    start: int
    small: bool
    before: "Block | None" = None
    after: "Block | None" = None
    is_free: bool = False


class Allocator:
    """The caching allocator of a card with a `capacity` in bytes (None: no limit)."""

    def __init__(self, capacity: int | None = None):
        self.capacity, self.starts = capacity, count()
        self.free = {True: [], False: []}  # by `small`: sorted (size, start, block)
        self.reserved = self.allocated = self.peak_allocated = self.peak_reserved = 0

    def malloc(self, size: int) -> Block:
        """Returns a block of at least `size` bytes. Raises DoesNotFit."""
        size = max(512, round_up(size, 512))
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
        """Returns a new segment as one block. Raises DoesNotFit."""
        total = segment_size(size, small)
        if self.is_too_large(total):
            self.give_back_segments()
            if self.is_too_large(total):
                raise DoesNotFit(size)
        self.reserved += total
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return Block(total, next(self.starts) << 50, small)

    def is_too_large(self, total: int) -> bool:
        """Tells whether the card has no room for a segment of `total` bytes."""
        return self.capacity is not None and self.reserved + total > self.capacity

    def give_back_segments(self) -> None:
        """Gives the segments that are wholly free back to the card."""
        for blocks in self.free.values():
            whole = [entry for entry in blocks if not entry[2].before and not entry[2].after]
            self.reserved -= sum(size for size, *_ in whole)
            blocks[:] = [entry for entry in blocks if entry not in whole]

    def put(self, block: Block) -> None:
        block.is_free = True
        insort(self.free[block.small], (block.size, block.start, block))

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
    """Returns the allocator after the events: a size in bytes for a storage that is made, -k for
    the release of the k-th one. Raises DoesNotFit."""
    allocator = Allocator(capacity)
    blocks: list[Block | None] = [None]
    for event in events:
        if event >= 0:
            blocks.append(allocator.malloc(event))
        else:
            allocator.release(blocks[-event])
    return allocator


class MemoryNeed(NamedTuple):
    """The MiB of GPU memory that a script takes."""

    reserved: int  # at the end of an epoch, on a card without a limit
    minimum: int  # the least capacity at which the script runs


def memory_need(events: list[int]) -> MemoryNeed:
    """Returns what a script with these events needs; the minimum is found by halving."""
    unlimited = simulate(events)
    # In segments: the script doesn't fit into `low`, it fits into `high`.
    low = round_up(unlimited.peak_allocated, SEGMENT) // SEGMENT - 1
    high = unlimited.peak_reserved // SEGMENT
    while high - low > 1:
        middle = (low + high) // 2
        try:
            high = simulate(events, middle * SEGMENT).peak_reserved // SEGMENT
        except DoesNotFit:
            low = middle
    return MemoryNeed(unlimited.reserved // MIB, high * SEGMENT // MIB)
