"""The watched step of a script as a graph: where each tensor comes from, and what became of it."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

PRODUCTS = "mm", "addmm", "bmm", "baddbmm", "convolution", "linear", "_scaled_mm"
FUSED = "scaled_dot_product", "flash_att", "flex_att", "efficient_att", "cudnn_att"
SOFTMAX = {"_softmax", "_safe_softmax", "exp", "softmax"}
MASKING = "masked_fill", "where", "add", "sub", "mul"


class Tensor(NamedTuple):
    """What an operator reads or makes."""

    storage: int
    shape: list[int]
    type: str
    argument: str = ""  # of what it reads


@dataclass(eq=False)
class Op:
    """One operator; see Watch.note in bench/audit/watch.py."""

    number: int
    name: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    phase: str  # forward (all that is neither of the others), backward, optimizer
    origin: Any  # of an operator of the backward pass: that of the forward pass; else itself
    file: str
    line: int
    function: int  # its first line
    compiled: bool
    device: str
    flops: int
    kernel: list | None  # as bench.predict.counting.Kernel
    others: dict
    seconds: float

    def __post_init__(self):
        self.inputs = [Tensor(*each) for each in self.inputs]
        self.outputs = [Tensor(*each) for each in self.outputs]
        self.reads = {each.storage for each in self.inputs}
        self.is_view = not self.name.endswith("_") and bool(self.outputs) and (
            self.outputs[0].storage in self.reads)
        self.writes = set() if self.is_view else {each.storage for each in self.outputs}

    @property
    def type(self) -> str:
        return self.inputs[0].type if self.inputs else ""

    @property
    def place(self) -> str:
        return f"{Path(self.file).name}:{self.line}" if self.file else ""

    @property
    def behind(self) -> list[tuple[int, int]]:
        """What it reads, as Step.walk wants it."""
        return [(each, self.number) for each in self.reads]

    def is_product(self) -> bool:
        return self.name in PRODUCTS


class Attention(NamedTuple):
    """One call: the operators that do it, and the storages of query, key, value and masks."""

    ops: list[Op]
    query: int
    key: int
    value: int
    masks: set[int]
    by_hand: bool
    causal: bool  # without a mask in memory


class Step:
    """The watched step as a graph of operators and storages."""

    def __init__(self, facts: dict):
        self.facts, self.older = facts, dict(facts["older"])
        self.ops = [Op(number, **each) for number, each in enumerate(facts["ops"])]
        self.writers = defaultdict(list)
        for op in self.ops:
            op.origin = op if op.origin is None else self.ops[op.origin]
            for each in op.writes:
                self.writers[each].append(op)

    def is_parameter(self, storage: int) -> bool:
        return storage in self.older and self.older[storage]["parameter"]

    def maker(self, storage: int, before: int) -> Op | None:
        """The last operator that wrote it before the one with that number."""
        if self.is_parameter(storage):
            return None
        return next((op for op in reversed(self.writers[storage]) if op.number < before), None)

    def walk(self, places: Iterable[tuple[int, int]],
             stop: Callable[[Op], bool] = lambda op: False) -> Iterator[Op]:
        """The operators that made some storages, each before a number, and what made theirs; beyond
        one that is to `stop` at, which is told too, it doesn't go."""
        seen, waiting = set(), list(places)
        while waiting:
            maker = self.maker(*waiting.pop())
            if maker and maker not in seen:
                seen.add(maker)
                yield maker
                if not stop(maker):
                    waiting += maker.behind

    def sources(self, storage: int, before: int) -> set[int]:
        """The storages older than the step that it comes from, but for parameters."""
        found = {storage}.union(*(op.reads for op in self.walk([(storage, before)])))
        return {each for each in found if each in self.older and not self.is_parameter(each)}

    def is_data(self, storage: int, before: int) -> bool:
        """Whether it comes from a batch, and not from parameters and constants alone."""
        return bool(self.sources(storage, before)) or any(
            op.name.startswith("rand") for op in self.walk([(storage, before)]))

    def root(self, storage: int, before: int) -> int:
        """Where it comes from, through casts and copies."""
        while (maker := self.maker(storage, before)) and maker.name in (
                "_to_copy", "clone", "copy_"):
            storage, before = maker.inputs[-1].storage, maker.number
        return storage

    @cached_property
    def training(self) -> dict[Op, None]:
        """The operators of the forward pass that the loss or the gradients come from, in order."""
        places = [(each, place) for place, storages in self.facts["roots"] for each in storages]
        for op in self.ops:
            places += op.behind if op.phase == "backward" else []
        found = {op for op in self.walk(places) if op.phase == "forward"}
        return dict.fromkeys(op for op in self.ops if op in found)

    @cached_property
    def products(self) -> list[Op]:
        """Those of the forward pass."""
        return [op for op in self.training if op.is_product()]

    @cached_property
    def weights(self) -> dict[Op, int]:
        """The weight of each product that has one."""
        return {op: root for op in self.products for each in op.inputs
                if self.is_parameter(root := self.root(each.storage, op.number))
                and len(self.older[root]["shape"]) > 1}

    @cached_property
    def seconds(self) -> float:
        """Of all operators that train."""
        return sum(op.seconds for op in self.kinds) or 1e-9

    def share(self, ops: Iterable[Op]) -> float:
        """Of the step's time, of these operators and their backward passes."""
        chosen = set(ops)
        return sum(op.seconds for op in self.ops if op.origin in chosen) / self.seconds

    def flops(self, key: Callable[[Op], str] = lambda op: op.type) -> Counter[str]:
        """Of forward and backward pass, by `key`."""
        count: Counter[str] = Counter()
        for op in self.ops:
            if op.flops and (op in self.training or op.phase == "backward"):
                count[key(op)] += op.flops
        return count

    def precision(self, kind: str) -> str:
        """Of products of a type, on a GPU."""
        shortened = kind == "float32" and self.facts["precision"] != "highest"
        return "TF32" if shortened else kind

    @cached_property
    def device(self) -> str:
        """That of most products."""
        count: Counter[str] = Counter()
        for op in self.ops:
            count[op.device] += op.flops
        return max(count, key=lambda name: count[name], default="cpu")

    @cached_property
    def attentions(self) -> list[Attention]:
        found = []
        for op in self.training:
            if any(name in op.name for name in FUSED) and len(op.inputs) >= 3:
                masks = {each.storage for each in op.inputs
                         if each.argument in ("attn_mask", "attn_bias")}
                found.append(Attention(
                    [op], *(each.storage for each in op.inputs[:3]), masks, False,
                    bool(op.others.get("is_causal") or op.others.get("causal"))))
            elif op.is_product() and op not in self.weights:
                found += self.by_hand(op)
        return found

    def by_hand(self, last: Op) -> list[Attention]:
        """Attention whose second product this is, if it is one."""
        for each in last.inputs[-2:]:
            path = sorted(self.walk([(each.storage, last.number)], Op.is_product),
                          key=lambda op: op.number)
            first = next((op for op in path if op.is_product() and op not in self.weights), None)
            if not first or not SOFTMAX & {op.name for op in path}:
                continue
            own = [op for op in path if first in self.walk(op.behind, Op.is_product)]
            made = first.writes.union(*({out.storage for out in op.outputs} for op in own))
            masks = {given.storage for op in own if op.name.rstrip("_") in MASKING
                     for given in op.inputs if given.storage not in made and len(given.shape) > 1}
            if first.name == "baddbmm":
                masks.add(first.inputs[0].storage)
            query, key = first.inputs[-2:]
            value = next(given for given in last.inputs[-2:] if given is not each)
            native = any(op.others.get("within") == "scaled_dot_product_attention"
                         for op in (first, last))
            return [Attention([first, *own, last], query.storage, key.storage, value.storage, masks,
                              not native, native and not masks)]
        return []

    @cached_property
    def lookups(self) -> list[Op]:
        """The look-ups of tokens: those in the largest table whose indices aren't counted out, as
        positions are, but come from data."""
        tables = defaultdict(list)
        for op in self.training:
            if op.name == "embedding" and any(
                    self.is_data(each.storage, op.number) for each in op.inputs
                    if each.argument == "indices"):
                tables[self.root(op.inputs[0].storage, op.number)].append(op)
        return max(tables.values(), key=lambda each: each[0].inputs[0].shape[0], default=[])

    @property
    def vocabulary(self) -> int:
        return self.lookups[0].inputs[0].shape[0] if self.lookups else 0

    @cached_property
    def heads(self) -> list[Op]:
        """The products that make logits: their weight is the table of tokens, or else the last one
        of its shape."""
        if not self.lookups:
            return []
        table = self.lookups[0].inputs[0]
        alike = [(op, weight) for op, weight in self.weights.items()
                 if sorted(self.older[weight]["shape"]) == sorted(table.shape)]
        tied = [op for op, weight in alike if weight == table.storage]
        return tied or [op for op, weight in alike if weight == alike[-1][1]]

    @cached_property
    def losses(self) -> list[Op]:
        """The operators that read logits."""
        logits, found = set().union(*(op.writes for op in self.heads)), []
        for op in self.training:
            if logits & op.reads and not op.is_product():
                found += [] if op.is_view else [op]
                if op.outputs and self.vocabulary in op.outputs[0].shape:
                    logits |= {each.storage for each in op.outputs}
        return found

    @cached_property
    def kinds(self) -> dict[Op, str]:
        """Of the operators of a training step, as bench.predict.speed.KINDS; its evaluation has
        none."""
        known = dict.fromkeys((op for each in self.attentions for op in each.ops), "attention")
        known |= dict.fromkeys(self.losses, "loss") | dict.fromkeys(self.heads, "head")
        found, begun = {}, False
        for op in self.ops:
            begun |= op.phase == "backward"  # what follows, such as clipping, is no evaluation
            if op.phase == "optimizer":
                found[op] = "optimizer"
            elif op.phase != "forward" or op in self.training or begun:
                found[op] = known.get(op.origin) or (
                    "products" if op.flops and op.origin.is_product() else "rest")
        return found
