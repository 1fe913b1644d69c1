"""The storages of the watched step, and what gpt_speed.memory's allocator is told of them."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from gpt_speed.audit.graph import Op
from gpt_speed.audit.step import Step
from gpt_speed.memory import Event, Timeline

STEPS = 3  # that are replayed


@dataclass(eq=False)
class Storage:
    """The life of a storage, from the fields of a gpt_speed.audit.watch.WatchedStorage."""

    size: int  # bytes
    device: str
    role: str  # "model"; "optimizer", for its state; "gradient"; "" for all else
    born: int | None  # the index of the operator that made it; None where it is older than the step
    died: int | None  # the index of the next operator after its end; None where it lives on

    def live_until(self, index: int | None) -> None:
        """Puts off its end to an operator, if that isn't earlier; None: beyond the step."""
        if index is None or self.died is None:
            self.died = None
        else:
            self.died = max(self.died, index)

    def is_on(self, device: str) -> bool:
        """Tells whether it lies on the device that trains. A step on a CPU stands for one on a GPU,
        which leaves data in the CPU's memory: what is older than the step, outlives it, and belongs
        neither to the model nor to the optimizer."""
        is_data = self.born is None and self.died is None and not self.role
        return self.device == device and not (device == "cpu" and is_data)


class StepMemory:
    """The storages of the watched step on the device that trains."""

    def __init__(self, step: Step):
        self.ops: list[Op] = step.ops
        storages = (Storage(*row) for row in step.facts["storages"])
        self.storages = {
            number: storage for number, storage in enumerate(storages) if storage.is_on(step.device)
        }  # by the numbers that tensors have
        self.others: list[Storage] = []  # that no tensor of the watched step has
        self.scratch: dict[int, list[int]] = defaultdict(list)  # bytes: see add_scratch

    def add(self, size: int, born: int, died: int) -> None:
        """Adds a storage from one operator to another."""
        self.others.append(Storage(size, "", "", born, died))

    def add_scratch(self, index: int, sizes: Iterable[int]) -> None:
        """Adds what an operator makes before its results, and drops."""
        self.scratch[index] += sizes

    def made_between(self, begin: int, end: int) -> dict[int, Storage]:
        """Returns the storages that operators from `begin` to before `end` make and drop, by
        number."""
        return {
            number: storage
            for number, storage in self.storages.items()
            if storage.born is not None
            and storage.died is not None
            and begin <= storage.born < storage.died <= end
        }

    def spans_of_updates(self) -> list[tuple[int, int]]:
        """Returns the indices of the first operator of each update, and of the one after it."""
        spans: list[tuple[int, int]] = []
        for index, op in enumerate(self.ops):
            if op.phase != "optimizer":
                continue
            if spans and spans[-1][1] == index:
                spans[-1] = spans[-1][0], index + 1
            else:
                spans.append((index, index + 1))
        return spans

    def first_matmul_of_backward(self) -> int | None:
        """Returns the index of the backward pass's first matmul by cuBLAS; None without one."""
        for index, op in enumerate(self.ops):
            if op.phase == "backward" and op.is_matmul and op.name != "convolution":
                return index
        return None

    def events(self, workspace: int, of_backward: int = 0) -> list[Event]:
        """Returns the events of the model, of the `workspace` of matmuls and that of the backward
        pass, which a GPU runs in a thread of its own, in bytes; and of STEPS steps like the watched
        one, in the first of which the optimizer makes its state."""
        replay = Replay(self)
        replay.begin_training(workspace)
        replay.run_first_step(of_backward)
        for _ in range(STEPS - 1):
            replay.run_step()
        return replay.timeline.events


class Replay:
    """Steps like the watched one, one after the other, on a `timeline`."""

    def __init__(self, memory: StepMemory):
        self.memory = memory
        self.timeline = Timeline()
        self.living: dict[Storage, int] = {}  # the number of each on the timeline
        # Of those that outlive the step in which they are made, by size: the next step has them as
        # older storages.
        self.survivors: dict[int, list[int]] = defaultdict(list)
        self.born, self.died = by_index(memory, "born"), by_index(memory, "died")
        self.older = self.born.pop(None, [])
        self.state = [storage for storage in self.older if storage.role == "optimizer"]
        self.added: dict[int, list[Storage]] = defaultdict(list)  # by the first step, as by index

    def begin_training(self, workspace: int) -> None:
        """Makes what is there before the first step: the model, the data, and the workspace."""
        self.begin(
            storage
            for storage in self.older
            if storage.role == "model" or storage.died is None and storage not in self.state
        )
        self.timeline.make(workspace)

    def run_first_step(self, workspace: int) -> None:
        """Runs a step that also makes the optimizer's state before the first update, and a
        workspace before the first matmul of the backward pass."""
        first_update = next((begin for begin, _ in self.memory.spans_of_updates()), 0)
        self.added[first_update] += self.state
        first_matmul = self.memory.first_matmul_of_backward()
        if workspace and first_matmul is not None:
            self.added[first_matmul].append(Storage(workspace, "", "", None, None))
        self.run_step()
        self.added.clear()

    def run_step(self) -> None:
        """Makes and releases what a step does."""
        for index in range(len(self.memory.ops) + 1):
            for storage in self.died[index]:
                self.end(storage)
            self.begin(self.added[index])
            self.use_scratch(self.memory.scratch.get(index, []))
            self.begin(self.born[index])
        for storage in [storage for storage in self.living if storage.born is not None]:
            self.survivors[storage.size].append(self.living.pop(storage))

    def use_scratch(self, sizes: Iterable[int]) -> None:
        """Makes storages of so many bytes, and then releases them."""
        for number in [self.timeline.make(size) for size in sizes]:
            self.timeline.release(number)

    def begin(self, storages: Iterable[Storage]) -> None:
        for storage in storages:
            self.living[storage] = self.timeline.make(storage.size)

    def end(self, storage: Storage) -> None:
        """Ends a storage of this step, or the one of the step before that is as large; the first
        step has no other one before it."""
        survivors = self.survivors[storage.size]
        if storage in self.living:
            self.timeline.release(self.living.pop(storage))
        elif survivors:
            self.timeline.release(survivors.pop(0))


def by_index(memory: StepMemory, field: str) -> dict[int | None, list[Storage]]:
    """Returns the storages by the index of the operator at their birth or at their end."""
    groups = defaultdict(list)
    for storage in (*memory.storages.values(), *memory.others):
        groups[getattr(storage, field)].append(storage)
    return groups
