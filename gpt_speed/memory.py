"""Memory that a script takes on a GPU that isn't there: a simulation of PyTorch's caching allocator
replays the storages that the script's own steps make and release (bench.predict.trace, and
gpt_speed.audit.storages).

The allocator is that of c10/cuda/CUDACachingAllocator.cpp. Sizes are rounded up to 512 bytes. Sizes
up to 1 MiB come from segments of 2 MiB, those below 10 MiB from segments of 20 MiB, and larger ones
from a segment of their own, rounded up to 2 MiB. The smallest free block that is large enough is
taken, and split if more than 1 MiB would remain (512 bytes in a small segment). A released block
merges with its free neighbours. If the card is full, whole free segments are given back first.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

MIB = 2**20
SEGMENT = 2 * MIB  # all segments are multiples of it
OTHERS = 614  # MiB of a card that are left free: the driver's own, its kernels, and a display
WORKSPACE = 8_519_680  # bytes of cuBLAS at its first matmul: 2 × 4,096 and 8 × 16 KiB
WORKSPACES = {9: 32 * MIB, 10: 32 * MIB, 12: 32 * MIB}  # by the generation of newer GPUs
WORKSPACE_AMD = 128 * MIB  # of MI300 and newer


class DoesNotFit(Exception):
    """A request that the card has no memory for."""


class Event(NamedTuple):
    """A storage of `size` bytes is made; or, where `released` is a number, that storage is
    released. Storages are numbered as they are made, from 0."""

    size: int = 0
    released: int | None = None


class Timeline:
    """The storages that a script makes and releases, in order, as `events`."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.count = 0  # of storages that were made

    def make(self, size: int) -> int:
        """Adds that a storage of so many bytes is made; returns its number."""
        self.events.append(Event(size))
        self.count += 1
        return self.count - 1

    def release(self, number: int) -> None:
        self.events.append(Event(released=number))


def round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def large_segment_size(size: int) -> int:
    """Returns the bytes of a large segment for a request of `size` bytes."""
    if size < 10 * MIB:
        return 20 * MIB
    return round_up(size, SEGMENT)


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment; `before` and `after` are its neighbours in the segment."""

    size: int
    start: int
    pool: "Pool"
    before: "Block | None" = None
    after: "Block | None" = None
    is_free: bool = False

    def is_whole_segment(self) -> bool:
        return not self.before and not self.after

    def split(self, size: int) -> "Block":
        """Cuts the block down to `size` bytes, and returns the rest as another one."""
        rest = Block(self.size - size, self.start + size, self.pool, self, self.after)
        if self.after:
            self.after.before = rest
        self.size, self.after = size, rest
        return rest

    def absorb(self, after: "Block") -> None:
        """Takes over the block after this one."""
        self.size += after.size
        self.after = after.after
        if self.after:
            self.after.before = self


class Pool:
    """The free blocks of all small, or of all large, segments."""

    def __init__(self, smallest_rest: int):
        self.smallest_rest = smallest_rest  # bytes; a block with less to spare isn't split
        self.blocks: list[tuple[int, int, Block]] = []  # sorted (size, start, block)

    def put(self, block: Block) -> None:
        block.is_free = True
        insort(self.blocks, (block.size, block.start, block))

    def take(self, block: Block) -> None:
        self.blocks.pop(bisect_left(self.blocks, (block.size, block.start)))

    def take_smallest(self, size: int) -> Block | None:
        """Takes the smallest block of at least `size` bytes, if there is one."""
        index = bisect_left(self.blocks, (size, -1))
        if index >= len(self.blocks):
            return None
        return self.blocks.pop(index)[2]

    def take_whole_segments(self) -> int:
        """Takes the blocks that are whole segments; returns their bytes."""
        whole = sum(size for size, _, block in self.blocks if block.is_whole_segment())
        self.blocks = [entry for entry in self.blocks if not entry[2].is_whole_segment()]
        return whole


class Allocator:
    """The caching allocator of a card with a `capacity` in bytes (None: no limit)."""

    def __init__(self, capacity: int | None = None):
        self.capacity, self.starts = capacity, count()
        self.small, self.large = Pool(smallest_rest=512), Pool(smallest_rest=MIB + 1)
        self.reserved = self.allocated = self.peak_allocated = self.peak_reserved = 0

    def malloc(self, size: int) -> Block:
        """Returns a block of at least `size` bytes. Raises DoesNotFit."""
        size = max(512, round_up(size, 512))
        pool = self.large
        if size <= MIB:
            pool = self.small
        block = pool.take_smallest(size) or self.segment(size, pool)
        if block.size - size >= pool.smallest_rest:
            pool.put(block.split(size))
        block.is_free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def segment(self, size: int, pool: Pool) -> Block:
        """Returns a new segment as one block. Raises DoesNotFit."""
        total = SEGMENT
        if pool is self.large:
            total = large_segment_size(size)
        if not self.has_room(total):
            self.reserved -= self.small.take_whole_segments() + self.large.take_whole_segments()
            if not self.has_room(total):
                raise DoesNotFit(size)
        self.reserved += total
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return Block(total, next(self.starts) << 50, pool)

    def has_room(self, total: int) -> bool:
        """Tells whether the card has room for a further segment of `total` bytes."""
        return self.capacity is None or self.reserved + total <= self.capacity

    def release(self, block: Block) -> None:
        """Frees a block, which merges with its free neighbours."""
        self.allocated -= block.size
        before, after = block.before, block.after
        if after and after.is_free:
            after.pool.take(after)
            block.absorb(after)
        if before and before.is_free:
            before.pool.take(before)
            before.absorb(block)
            block = before
        block.pool.put(block)


def simulate(events: Sequence[Event], capacity: int | None = None) -> Allocator:
    """Returns the allocator after the events. Raises DoesNotFit."""
    allocator = Allocator(capacity)
    blocks: list[Block] = []
    for size, released in events:
        if released is None:
            blocks.append(allocator.malloc(size))
        else:
            allocator.release(blocks[released])
    return allocator


def workspace(capability: float, is_amd: bool) -> int:
    """Returns the bytes that matmuls take on a card (aten/src/ATen/cuda/CublasHandlePool.cpp)."""
    if is_amd:
        return WORKSPACE_AMD
    return WORKSPACES.get(int(capability), WORKSPACE)


def flash_buffers(query: Sequence[int]) -> tuple[int, int]:
    """Returns the bytes of what FlashAttention's backward pass makes and drops for a query of
    shape (B, H, T, D), in float32 and in whole blocks (csrc/flash_attn/flash_api.cpp)."""
    B, H, T, D = query
    T = round_up(T, 128)
    return 4 * B * H * T, 4 * B * H * T * round_up(D, 32)


class MemoryNeed(NamedTuple):
    """The MiB of GPU memory that a script takes."""

    reserved: int  # at the end of an epoch, on a card without a limit
    minimum: int  # the least capacity at which the script runs


def memory_need(events: Sequence[Event]) -> MemoryNeed:
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
