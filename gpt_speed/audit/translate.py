"""The memory of the watched step on a GPU, whose kernels make other storages than a CPU's."""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from gpt_speed.audit.graph import Op
from gpt_speed.audit.step import Step
from gpt_speed.audit.storages import StepMemory
from gpt_speed.memory import flash_buffers

AT_LEAST, AT_MOST, ABOUT = "at least", "at most", "about"
# Of PyTorch's optimizers, those whose temporary tensors in an update of all tensors are known.
UPDATES = "Adam", "AdamW", "SGD"
HALF = "bfloat16", "float16"
# What autocast runs in float32 on CUDA, but not on a CPU.
FLOAT32_ON_CUDA = (
    "_log_softmax",
    "_softmax",
    "cumsum",
    "exp",
    "linalg_vector_norm",
    "log",
    "native_group_norm",
    "native_layer_norm",
    "pow",
    "prod",
    "reciprocal",
    "rsqrt",
    "softplus",
    "sum",
)


@dataclass
class Translation:
    """The memory of a step on a GPU: what was changed for that, in words, and what should have
    been, with what it makes of the memory."""

    memory: StepMemory
    changes: dict[str, None] = field(default_factory=dict)  # in order, each one once
    bounds: dict[str, str] = field(default_factory=dict)  # AT_LEAST, AT_MOST or ABOUT

    @property
    def bound(self) -> str:
        """How to read the memory; "" where all is translated."""
        bounds = {*self.bounds.values()}
        if len(bounds) > 1:
            return ABOUT
        return next(iter(bounds), "")


def translated(step: Step) -> Translation:
    """Returns the memory of the watched step on a GPU."""
    changes = {"workspaces for matmuls": None}
    translation = Translation(StepMemory(step), changes, bounds_of(step))
    if step.device == "cpu":
        fuse_calls(translation)
        shrink_masks(translation)
        join_updates(translation, step.facts["optimizers"])
        halve_losses(translation)
        compare_autocast(translation)
    else:
        add_scratch(translation.memory)
    return translation


def bounds_of(step: Step) -> dict[str, str]:
    """Returns what isn't known of any step of this kind, with the bound that it makes."""
    reasons = [
        (
            any(op.name == "convolution" for op in step.ops),
            "workspaces of cuDNN",
            AT_LEAST,
        ),
        (step.facts["recurrent"], "kernels of cuDNN for recurrent networks", ABOUT),
        (step.facts["syncs"], "buckets of DistributedDataParallel", AT_LEAST),
        (step.is_compiled, "compiled parts, which are counted uncompiled", ABOUT),
    ]
    return {what: bound for is_there, what, bound in reasons if is_there}


# ---- Calls that a GPU computes in one kernel


@dataclass(eq=False)
class FusedCall:
    """A call of attention or of a norm, for which a GPU has one kernel and a CPU several.

    inputs ──> casts ──> dropped ──> results ──> other operators
       └─ saved ─┘                      └─ saved of attention

    What it `made` are casts, dropped ones and results; what is saved the backward pass reads."""

    memory: StepMemory
    indices: set[int]  # of its operators, forward and backward
    readers: dict[int, set[int]]  # the indices of the operators that read each storage

    @cached_property
    def forward(self) -> list[int]:
        return sorted(i for i in self.indices if self.memory.ops[i].phase == "forward")

    @cached_property
    def backward(self) -> list[int]:
        return sorted(self.indices - {*self.forward})

    @property
    def query(self) -> list[int] | None:
        """The shape of attention's query; None of a norm."""
        return self.memory.ops[self.forward[0]].scalars.get("query")

    @property
    def end(self) -> int:
        """The index of the operator after it."""
        return max(self.indices) + 1

    @cached_property
    def made(self) -> set[int]:
        """The storages that it makes."""
        return {n for n, storage in self.memory.storages.items() if storage.born in self.indices}

    @cached_property
    def results(self) -> set[int]:
        """Those that other operators read."""
        return {number for number in self.made if self.readers[number] - self.indices}

    @cached_property
    def casts(self) -> set[int]:
        """Those that autocast makes before attention's kernel; a norm's kernel converts itself."""
        forward = (self.memory.ops[i] for i in self.forward)
        casts = (op for op in forward if self.query and is_to_half(op))
        return self.made & {number for op in casts for number in op.writes}

    @cached_property
    def dropped(self) -> set[int]:
        """Those that one kernel doesn't make."""
        return self.made - self.results - self.casts

    @property
    def saved(self) -> set[int]:
        """The storages that the backward pass of one kernel reads: attention's also its result."""
        reading = (self.memory.ops[i] for i in self.forward)
        read = {
            number
            for op in reading
            if not self.casts & op.writes
            for number in op.reads
            if number not in self.dropped
        }
        if not self.query:
            return read
        return read | {n for n in self.results if self.memory.storages[n].born in self.forward}

    def fuse(self) -> None:
        """Puts one kernel, and one of its backward pass, in the place of its operators."""
        storages = self.memory.storages
        for number in self.saved & storages.keys():
            if self.backward:
                storages[number].live_until(self.end)
        for number in self.dropped:
            del storages[number]
        if self.query:
            self.add_buffers(self.query)
            for number in self.results:
                self.merge_copies(number)

    def add_buffers(self, query: list[int]) -> None:
        """Adds what attention's kernel makes beside its result for a query of this shape: the sums
        of the exponentials, and in its backward pass what it drops."""
        last, (sums, _) = self.forward[-1], flash_buffers(query)
        self.memory.add(sums, last, self.end)
        if self.backward:
            self.memory.add_scratch(self.backward[0], flash_buffers(query))

    def merge_copies(self, number: int) -> None:
        """Removes the copies of a result in another layout: in that one a GPU's kernel makes it."""
        storages = self.memory.storages
        for index in self.readers[number]:
            op = self.memory.ops[index]
            copies = [n for n in op.writes & storages.keys() if storages[n].born == index]
            if op.name == "clone" and copies:
                storages[number].live_until(storages.pop(copies[0]).died)


def fuse_calls(translation: Translation) -> None:
    """Fuses the calls that are marked; see marks.py."""
    memory, calls = translation.memory, defaultdict(set)
    for index, op in enumerate(memory.ops):
        if op.phase == "backward" and "fused" in op.scalars:
            translation.bounds["attention and norms that a checkpoint computes again"] = AT_MOST
        elif "fused" in op.origin.scalars:
            calls[op.origin.scalars["fused"]].add(index)
    readers = readers_of(memory)
    for indices in calls.values():
        call = FusedCall(memory, indices, readers)
        call.fuse()
        what = "attention" if call.query else "norms"
        translation.changes[f"{what} in one kernel"] = None


def readers_of(memory: StepMemory) -> dict[int, set[int]]:
    """Returns the indices of the operators that read each storage."""
    readers: dict[int, set[int]] = defaultdict(set)
    for index, op in enumerate(memory.ops):
        for number in op.reads:
            readers[number].add(index)
    return readers


def add_scratch(memory: StepMemory) -> None:
    """Adds what a GPU's kernels of attention make and drop in their backward passes."""
    for index, op in enumerate(memory.ops):
        if op.name.endswith("attention_backward"):
            (query,) = op.passed("query")
            memory.add_scratch(index, flash_buffers(query.shape))


# ---- Other operators


def shrink_masks(translation: Translation) -> None:
    """Gives each dropout mask a byte for an element: on a CPU it has the type of what it drops."""
    ops, storages = translation.memory.ops, translation.memory.storages
    for op, following in zip(ops, ops[1:], strict=False):
        if op.name != "bernoulli_" or following.name != "div_":
            continue
        (number,) = op.writes
        if number in storages and number in following.writes:
            storages[number].size = math.prod(op.outputs[0].shape)
            translation.changes["dropout masks of one byte an element"] = None


def join_updates(translation: Translation, optimizers: Iterable[dict]) -> None:
    """Lets PyTorch's optimizers update all tensors at once, as they do on a GPU by default."""
    names = [
        optimizer["name"]
        for optimizer in optimizers
        if optimizer["own"] and optimizer["foreach"] and not optimizer["fused"]
    ]
    if not names:
        return
    for begin, end in translation.memory.spans_of_updates():
        join_update(translation.memory, begin, end)
    translation.changes["updates of all tensors at once"] = None
    for name in {*names} - {*UPDATES}:
        translation.bounds[f"what {name} makes in an update of all tensors"] = AT_LEAST


def join_update(memory: StepMemory, begin: int, end: int) -> None:
    """Lets all that an update makes and drops live from its first operator to its last; quotients
    take the place of dividends."""
    for number, storage in memory.made_between(begin, end).items():
        if storage.born is not None and memory.ops[storage.born].name == "div":
            del memory.storages[number]
        storage.born, storage.died = begin, end


def halve_losses(translation: Translation) -> None:
    """Lets F.cross_entropy under autocast compute the log-softmax in 16 bits, and then copy it to
    float32, as on CUDA (aten/src/ATen/native/LossNLL.cpp sets its type, so that autocast doesn't);
    a CPU copies the logits first."""
    ops = translation.memory.ops
    for index, (copy, softmax) in enumerate(pairwise(ops), 1):
        is_one_call = copy.call == softmax.call and copy.phase == softmax.phase == "forward"
        if softmax.name == "_log_softmax" and is_from_half(copy) and is_one_call:
            halve_loss(translation.memory, index)
            translation.changes["the loss's log-softmax in 16 bits"] = None


def halve_loss(memory: StepMemory, index: int) -> None:
    """Halves the log-softmax that the operator of this index makes, and its gradient. The copy to
    float32, which a CPU makes before, then follows it and lives until the loss's gradient is there.
    """
    (copy,), (log_softmax,) = memory.ops[index - 1].writes, memory.ops[index].writes
    halved, end_of_copy = {log_softmax}, index + 1
    for later, op in enumerate(memory.ops):
        if op.phase != "backward" or log_softmax not in op.reads:
            continue
        if op.name.startswith("nll_loss"):
            end_of_copy = later + 1
        elif op.name == "_log_softmax_backward_data":
            halved |= op.writes
    storages = memory.storages
    for number in halved & storages.keys():
        storages[number].size //= 2
    if copy in storages:
        storages[copy].born, storages[copy].died = index, end_of_copy


def compare_autocast(translation: Translation) -> None:
    """Tells what autocast runs in float32 on CUDA, and ran in 16 bits here."""
    ops = translation.memory.ops
    if not any(is_to_half(op) and op.inputs[0].is_parameter for op in ops):
        return
    for op in ops:
        if op.phase == "forward" and op.name in FLOAT32_ON_CUDA and op.type in HALF:
            name = op.name.strip("_")
            translation.bounds[f"{name} in float32, as CUDA's autocast has it"] = AT_LEAST


def is_from_half(op: Op) -> bool:
    """Tells whether it converts 16 bits to float32."""
    return op.name == "_to_copy" and op.type in HALF and op.outputs[0].type == "float32"


def is_to_half(op: Op) -> bool:
    """Tells whether it converts to 16 bits."""
    return op.name == "_to_copy" and op.type == "float32" and op.outputs[0].type in HALF
