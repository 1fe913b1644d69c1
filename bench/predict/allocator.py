"""Memory that a script would take on a GPU that isn't there: what its own steps make and release
(bench.predict.trace) goes through a simulation of PyTorch's caching allocator.

The allocator is that of c10/cuda/CUDACachingAllocator.cpp: sizes are rounded to 512 bytes. Up to
1 MiB they come from segments of 2 MiB, below 10 MiB from segments of 20 MiB, and else from one of
their own, rounded to 2 MiB. The smallest free block that is large enough is taken, and split if
more than 1 MiB would remain (512 bytes in a small segment). A block that is released merges with
its free neighbours. If the card is full, whole segments that are free are given back first.
"""

from bisect import bisect_left, insort
from itertools import count
from typing import NamedTuple

MIB, GB = 2**20, 2**30
WORKSPACE = 8_519_680  # bytes that cuBLAS takes at its first product: 2 × 4,096 KiB, 8 × 16 KiB


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
    """The caching allocator of a card with this many bytes (None: no limit)."""

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
    allocator = Allocator(capacity)
    blocks: list[Block | None] = [None]
    for event in events:
        if event >= 0:
            blocks.append(allocator.malloc(event))
        else:
            allocator.release(blocks[-event])
    return allocator


# ---- What a card has to have --------------------------------------------------------------------


class Need(NamedTuple):
    """MiB that a script takes."""

    reserved: int  # at the end of an epoch, without a limit
    least: int  # of a GPU's memory, so that it runs


def need(events: list[int]) -> Need:
    """By halving: the least capacity at which the events come to their end, in whole segments."""
    free = simulate(events)
    # It doesn't fit low, it fits high.
    low, high = -(-free.peak_allocated // (2 * MIB)) - 1, free.peak_reserved // (2 * MIB)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            found = simulate(events, middle * 2 * MIB)
            high = found.peak_reserved // (2 * MIB)  # with so much it goes the same way
        except DoesNotFit:
            low = middle
    return Need(-(-free.reserved // MIB), 2 * high)
