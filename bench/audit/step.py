"""The watched step of a script as a graph: where each tensor comes from, and what became of it."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

PRODUCTS = "mm", "addmm", "bmm", "baddbmm", "convolution", "linear", "_scaled_mm"
FUSED = "scaled_dot_product", "flash_att", "flex_att", "efficient_att", "cudnn_att"
MASKING = "masked_fill", "where", "add", "sub", "mul"


class Op(NamedTuple):
    """One operator; see Watch.note in bench/audit/child.py."""

    name: str
    inputs: list  # [argument, storage, shape, type]
    outputs: list  # [storage, shape, type]
    phase: str  # forward (all that is neither of the others), backward, optimizer
    origin: int | None  # of an operator of the backward pass: that of the forward pass
    place: list  # [file, line, first line of the function]
    compiled: bool
    flops: int
    type: str
    others: dict
    seconds: float

    @property
    def is_view(self) -> bool:
        return not self.name.endswith("_") and bool(self.outputs) and (
            self.outputs[0][0] in [each[1] for each in self.inputs])

    def given(self, argument: str) -> int | None:
        """The storage of an argument."""
        return next((each[1] for each in self.inputs if each[0] == argument), None)


class Attention(NamedTuple):
    """One call: the storages of query, key and value, and the operators that do it."""

    ops: list[int]
    query: int
    key: int
    value: int
    masks: list[int]  # storages
    by_hand: bool
    causal: bool  # without a mask in memory


class Step:
    """The watched step as a graph of operators and storages."""

    def __init__(self, facts: dict):
        self.facts = facts
        self.ops = [Op(*each) for each in facts["ops"]]
        self.older = {int(number): about for number, about in facts["older"].items()}
        self.writers, self.readers = defaultdict(list), defaultdict(list)
        for number, op in enumerate(self.ops):
            for each in {each[1] for each in op.inputs}:
                self.readers[each].append(number)
            for each in [] if op.is_view else {each[0] for each in op.outputs}:
                self.writers[each].append(number)

    def is_parameter(self, storage: int) -> bool:
        return storage in self.older and self.older[storage]["parameter"]

    def maker(self, storage: int, before: int) -> int | None:
        """The last operator that wrote it before another one."""
        if self.is_parameter(storage):
            return None
        return max((each for each in self.writers[storage] if each < before), default=None)

    def walk(self, places: Iterable[tuple[int, int]],
             stop: Callable[[Op], bool] = lambda op: False) -> Iterator[int]:
        """The operators that made some storages, each before an operator, and what made theirs;
        beyond one that is to `stop` at, which is told too, it doesn't go."""
        seen, waiting = set(), list(places)
        while waiting:
            maker = self.maker(*waiting.pop())
            if maker is not None and maker not in seen:
                seen.add(maker)
                yield maker
                if not stop(self.ops[maker]):
                    waiting += [(each[1], maker) for each in self.ops[maker].inputs]

    def sources(self, storage: int, before: int) -> set[int]:
        """The storages older than the step that it comes from."""
        inputs = {each[1] for number in self.walk([(storage, before)])
                  for each in self.ops[number].inputs} | {storage}
        return {each for each in inputs if each in self.older}

    def is_data(self, storage: int, before: int) -> bool:
        """Whether it comes from a batch, and not from parameters and constants alone."""
        return any(not self.is_parameter(each) for each in self.sources(storage, before)) or any(
            self.ops[each].name.startswith("rand") for each in self.walk([(storage, before)]))

    def root(self, storage: int, before: int) -> int:
        """Where it comes from, through casts and copies."""
        maker = self.maker(storage, before)
        while maker is not None and self.ops[maker].name in ("_to_copy", "clone", "copy_"):
            storage = self.ops[maker].inputs[-1][1]
            maker = self.maker(storage, maker)
        return storage

    @cached_property
    def training(self) -> set[int]:
        """The operators of the forward pass that the loss or the gradients come from."""
        places = [(each, place) for place, storages in self.facts["roots"] for each in storages]
        places += [(each[1], number) for number, op in enumerate(self.ops)
                   if op.phase == "backward" for each in op.inputs]
        return {number for number in self.walk(places) if self.ops[number].phase == "forward"}

    @cached_property
    def products(self) -> list[int]:
        """Those of the forward pass."""
        return [each for each in sorted(self.training) if self.is_product(self.ops[each])]

    @staticmethod
    def is_product(op: Op) -> bool:
        return op.name in PRODUCTS

    @cached_property
    def weights(self) -> dict[int, int]:
        """The weight of each product that has one."""
        found = {}
        for number in self.products:
            for each in self.ops[number].inputs:
                root = self.root(each[1], number)
                if self.is_parameter(root) and len(self.older[root]["shape"]) > 1:
                    found[number] = root
        return found

    @cached_property
    def seconds(self) -> float:
        """Of all operators that train."""
        return sum(self.ops[number].seconds for number in self.kinds) or 1e-9

    def share(self, numbers: Iterable[int]) -> float:
        """Of the step's time, of these operators and their backward passes."""
        chosen = set(numbers)
        return sum(op.seconds for number, op in enumerate(self.ops)
                   if number in chosen or op.origin in chosen) / self.seconds

    def flops(self, key: Callable[[int, Op], object]) -> Counter:
        """Of forward and backward pass, by `key`."""
        count: Counter = Counter()
        for number, op in enumerate(self.ops):
            if op.flops and (number in self.training or op.phase == "backward"):
                count[key(number, op)] += op.flops
        return count

    @cached_property
    def device(self) -> str:
        count = Counter({op.others["device"]: 0 for op in self.ops})
        for op in self.ops:
            count[op.others["device"]] += op.flops
        return count.most_common(1)[0][0] if count else "cpu"

    @cached_property
    def attentions(self) -> list[Attention]:
        found = []
        for number in sorted(self.training):
            op = self.ops[number]
            if any(name in op.name for name in FUSED) and len(op.inputs) >= 3:
                mask = op.given("attn_mask") or op.given("attn_bias")
                query, key, value = (each[1] for each in op.inputs[:3])
                found.append(Attention(
                    [number], query, key, value, [mask] if mask else [], False,
                    bool(op.others.get("is_causal") or op.others.get("causal"))))
            elif number in self.products and number not in self.weights:
                found += self.by_hand(number)
        return found

    def by_hand(self, second: int) -> list[Attention]:
        """Attention whose second product this is, if it is one."""
        for each in self.ops[second].inputs[-2:]:
            path = sorted(self.walk([(each[1], second)], self.is_product))
            first = next((number for number in path if self.is_product(self.ops[number])
                          and number not in self.weights), None)
            names = {self.ops[number].name for number in path}
            if first is None or not names & {"_softmax", "_safe_softmax", "exp", "softmax"}:
                continue
            after = self.reached(first, second)
            own = [number for number in path if number in after]
            made = {out[0] for number in [first, *own] for out in self.ops[number].outputs}
            masks = [given[1] for number in own if self.ops[number].name.rstrip("_") in MASKING
                     for given in self.ops[number].inputs if given[1] not in made
                     and len(given[2]) > 1]
            if self.ops[first].name == "baddbmm":
                masks.append(self.ops[first].inputs[0][1])
            one, other = self.ops[first].inputs[-2:]
            value = next(given[1] for given in self.ops[second].inputs[-2:] if given is not each)
            native = any(self.ops[number].others.get("within") == "scaled_dot_product_attention"
                         for number in (first, second))
            return [Attention([first, *own, second], one[1], other[1], value, masks, not native,
                              native and not masks)]
        return []

    def reached(self, first: int, last: int) -> set[int]:
        """The operators between two that read what comes from the first one."""
        storages, found = {each[0] for each in self.ops[first].outputs}, set()
        for number in range(first + 1, last):
            op = self.ops[number]
            if storages & {each[1] for each in op.inputs} and not self.is_product(op):
                found.add(number)
                storages |= {each[0] for each in op.outputs}
        return found

    @cached_property
    def lookups(self) -> list[int]:
        """The look-ups of tokens: those in the largest table whose indices aren't counted out, as
        positions are, but come from data."""
        tables = defaultdict(list)
        for number in sorted(self.training):
            op = self.ops[number]
            if op.name == "embedding" and self.is_data(op.given("indices"), number):
                tables[self.root(op.inputs[0][1], number)].append(number)
        return max(tables.values(), key=lambda each: self.ops[each[0]].inputs[0][2][0], default=[])

    @cached_property
    def heads(self) -> list[int]:
        """The products that make logits: their weight is the table of tokens, or else the last one
        of its shape."""
        if not self.lookups:
            return []
        table = self.ops[self.lookups[0]].inputs[0]
        alike = {number: weight for number, weight in self.weights.items()
                 if sorted(self.older[weight]["shape"]) == sorted(table[2])}
        own = table[1] if table[1] in alike.values() else alike[max(alike)] if alike else None
        return [number for number, weight in alike.items() if weight == own]

    @property
    def vocabulary(self) -> int:
        return self.ops[self.lookups[0]].inputs[0][2][0] if self.lookups else 0

    @cached_property
    def losses(self) -> list[int]:
        """The operators that read logits."""
        storages = {each[0] for number in self.heads for each in self.ops[number].outputs}
        found = []
        for number in range(min(self.heads, default=0), len(self.ops)):
            op = self.ops[number]
            if number not in self.training or self.is_product(op) or not storages & {
                    each[1] for each in op.inputs}:
                continue
            if not op.is_view:
                found.append(number)
            if op.outputs and self.vocabulary in op.outputs[0][1]:
                storages |= {each[0] for each in op.outputs}
        return found

    @cached_property
    def kinds(self) -> dict[int, str]:
        """Of the operators of a training step, as bench.predict.speed.KINDS; its evaluation has
        none."""
        attention = {each for one in self.attentions for each in one.ops}
        heads, losses, found, begun = {*self.heads}, {*self.losses}, {}, False
        for number, op in enumerate(self.ops):
            origin = number if op.origin is None else op.origin
            begun |= op.phase == "backward"  # what follows, such as clipping, is no evaluation
            if op.phase != "forward" or number in self.training or begun:
                found[number] = (
                    "optimizer" if op.phase == "optimizer" else "head" if origin in heads else
                    "loss" if origin in losses else "attention" if origin in attention else
                    "products" if op.flops and self.is_product(self.ops[origin]) else "rest")
        return found

    def place(self, number: int) -> str:
        file, line, _ = self.ops[number].place
        return f"{Path(file).name}:{line}" if file else ""

    def same_function(self, numbers: Iterable[int]) -> set[int]:
        """What the forward pass does in the functions of some operators, but for products."""
        functions = {(self.ops[each].place[0], self.ops[each].place[2]) for each in numbers}
        return {each for each in self.training if not self.is_product(self.ops[each])
                and (self.ops[each].place[0], self.ops[each].place[2]) in functions}
