"""The events of a model of many layers, from those of two models that have few.

A trace (bench.trace) is a list of events: the size of a storage that is made, or -k when the k-th
one dies; 0 after that: something else goes on in its storage, under a number of its own. So a
storage that several layers use in turn is told by each of them. A further layer repeats, at some places of that list, what the layer before it did: in a
forward pass, in a backward pass, where an optimizer makes a list of tensors. Where these places
are, is found by comparing the lists of two models, of which one has a layer more. What a release
releases is told by that one's position in the list, which is linear both in the repetition and in
the number of layers. Where it isn't, where layers differ, or where the grown list releases anything
twice, too early, or of another size, ValueError is raised: nothing is guessed.
"""

from typing import NamedTuple

import numpy as np

PIECE, OTHER_SIZE, NEVER = 1, 4, 10**6  # costs of an alignment


class Region(NamedTuple):
    """Events that each layer repeats."""

    start: int  # position of the first one, in the larger list
    period: int  # events of a repetition
    count: int  # repetitions in the larger list; the smaller one has one less


def grow(fewer: list[int], more: list[int], layers: int) -> list[int]:
    """The events with so many further layers than `more` has, which has one more than `fewer`.
    Raises ValueError."""
    small, large = signed_sizes(fewer), signed_sizes(more)
    targets, of_fewer = made_by(more), made_by(fewer)
    regions = repetitions(small, large)
    slots: list[tuple[int, int]] = []  # size, or -size of what is released; where that was made
    position, before = 0, 0  # in the larger list, and in the smaller one
    for start, period, count in [*regions, Region(len(large), 0, 0)]:
        for i in range(start - position):  # what stands there once
            size, target = int(large[position + i]), targets[position + i]
            more_size = size - int(small[before + i])
            if more_size % 2:
                raise ValueError("only with a further layer a storage is used again")
            slots.append((size + layers * more_size,
                          target + layers * (target - of_fewer[before + i])))
        before += start - position
        end, its_end = start + period * count, before + period * (count - 1)
        repeated = [repeat(targets[start + i:end:period], of_fewer[before + i:its_end:period],
                           regions, layers) for i in range(period)]
        slots += [(int(large[start + i]), repeated[i][number])
                  for number in range(count + layers * bool(count)) for i in range(period)]
        position, before = end, its_end
    return events_of(slots)


def repeat(targets: list[int], of_fewer: list[int], regions: list[Region],
           layers: int) -> list[int]:
    """What the repetitions of one release release, with so many further layers; by the same with
    one layer more and one less. The first and the last ones may be odd; between them each
    repetition is a period away from the one before. Raises ValueError."""
    if targets[0] < 0:
        return [-1] * (len(targets) + layers)
    found = []
    for i in range(1, len(targets)):  # was the i-th one inserted?
        step = targets[i] - targets[i - 1]
        if abs(step) in {nearest(regions, target).period for target in targets[i - 1:i + 1]}:
            first = [own + layers * (own - other)
                     for own, other in zip(targets[:i], of_fewer, strict=False)]
            last = [own + layers * (own - other)
                    for own, other in zip(targets[i:], of_fewer[i - 1:], strict=True)]
            between = [first[-1] + step * k for k in range(1, layers + 1)]
            found.append([*first, *between, *last])
    if not found or any(each != found[0] for each in found):
        raise ValueError("layers release what can't be told")
    return found[0]


def nearest(regions: list[Region], position: int) -> Region:
    return min(regions, key=lambda each: max(
        each.start - position, position - each.start - each.period * each.count, 0))


def events_of(slots: list[tuple[int, int]]) -> list[int]:
    """The list of these events. Raises ValueError for a release of what isn't there."""
    events, there = [], {}
    made = released = 0
    for position, (size, target) in enumerate(slots):
        if size < 0:
            number, released = there.pop(target, (0, 0))
            if released != -size // 2:
                raise ValueError("layers release what isn't there")
            events.append(-number)
            continue
        made += 1
        there[position] = made, size // 2
        events.append(size // 2)
        if size % 2:
            if released != size // 2:
                raise ValueError("layers use a storage again that isn't there")
            events[-1] = 0
        released = 0
    return events


def in_order(events: list[int]) -> list[int]:
    """The events where what is released at one time is released in the order in which it was made.
    For memory that is the same, but autograd's order among many gradients isn't regular."""
    found, run = [], []
    for i, event in enumerate([*events, 1]):
        goes_on = i + 1 < len(events) and events[i + 1] == 0
        if event < 0 and not goes_on:
            run.append(event)
        else:
            found += [*sorted(run, reverse=True), event]
            run = []
    return found[:-1]


def of_storages(events: list[int]) -> list[int]:
    """The events without those by which something goes on in a storage."""
    numbers, found, made, released = [0], [], 0, 0
    for event in events:
        if event < 0:
            released = numbers[-event]
            found.append(-released)
        elif event > 0:
            made += 1
            numbers.append(made)
            found.append(event)
        else:
            numbers.append(released)
            found.pop()
    return found


def signed_sizes(events: list[int]) -> np.ndarray:
    """Twice the size of what is made, one more where it goes on in the storage of what was released
    just before; - twice the size of what is released."""
    made, signed = [], []
    for event in events:
        if event < 0:
            signed.append(-2 * made[-event - 1])
        else:
            made.append(event or -signed[-1] // 2)
            signed.append(2 * made[-1] + (event == 0))
    return np.array(signed)


def made_by(events: list[int]) -> list[int]:
    """Of each release the position at which that was made; -1 for what isn't one."""
    made = [i for i, event in enumerate(events) if event >= 0]
    return [-1 if event >= 0 else made[-event - 1] for event in events]


def repetitions(small: np.ndarray, large: np.ndarray) -> list[Region]:
    """Where `large` repeats what `small` has one time less. Raises ValueError."""
    regions, end = [], 0
    for start, period in inserted(small, large):
        first, last = start, start + period
        own = large[start:last]
        while first - period >= end and np.array_equal(large[first - period:first], own):
            first -= period
        while np.array_equal(large[last:last + period], own):
            last += period
        regions.append(Region(first, period, (last - first) // period))
        end = last
    return regions


def inserted(small: np.ndarray, large: np.ndarray) -> list[tuple[int, int]]:
    """(position in `large`, length) of what it has besides `small`, in as few pieces as can be.
    Raises ValueError where there is more between them."""
    extra = len(large) - len(small)
    if extra < 0:
        raise ValueError("a further layer takes events away")
    costs = np.full(extra + 1, NEVER)  # by how many events of `large` were inserted before
    costs[0] = 0
    begun = np.empty((len(small) + 1, extra + 1), dtype=np.int32)  # with how many a piece began
    own = np.arange(extra + 1)
    for i in range(len(small) + 1):
        cheapest = np.minimum.accumulate(costs)
        where = np.maximum.accumulate(np.where(costs == cheapest, own, 0))
        begun[i] = np.where(cheapest + PIECE < costs, where, own)
        costs = np.minimum(costs, cheapest + PIECE)
        if i < len(small):
            there = large[i:i + extra + 1]
            costs = costs + np.where(there == small[i], 0, np.where(
                (there < 0) == (small[i] < 0), OTHER_SIZE, NEVER))
    if costs[extra] >= NEVER:
        raise ValueError("a further layer adds other events")
    found, count = [], extra
    for i in range(len(small), -1, -1):
        before = int(begun[i, count])
        if before < count:
            found.append((i + before, count - before))
            count = before
    return found[::-1]
