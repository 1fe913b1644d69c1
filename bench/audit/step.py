"""The watched step of a script as a graph: where each tensor comes from, and what became of it."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

PRODUCTS = "mm", "addmm", "bmm", "baddbmm", "convolution", "linear", "_scaled_mm"
FUSED = "scaled_dot_product", "flash_att", "flex_att", "efficient_att", "cudnn_att"
NATIVE = "_safe_softmax"  # that of PyTorch's attention where it runs as single operators
MASKING = "masked_fill", "where", "add", "sub", "mul"


@dataclass(eq=False)
class Tensor:
    """What an operator reads or makes."""

    storage: int
    shape: list[int]
    type: str
    argument: str = ""  # of what it reads
    maker: "Op | None" = None  # the operator that wrote it last; None of parameters
    older: dict | None = None  # of one that is older than the step: see Watch.describe

    @property
    def is_parameter(self) -> bool:
        return bool(self.older and self.older["parameter"])

    def sources(self) -> list[dict]:
        """What it comes from that is older than the step, but for parameters."""
        read = [self, *(each for op in walk([self]) for each in op.inputs)]
        return [each.older for each in read if each.older and not each.is_parameter]

    def is_data(self) -> bool:
        """Whether it comes from a batch, and not from parameters and constants alone."""
        return bool(self.sources()) or any(op.name.startswith("rand") for op in walk([self]))

    def root(self) -> "Tensor":
        """Where it comes from, through casts and copies."""
        root = self
        while root.maker and root.maker.name in ("_to_copy", "clone", "copy_"):
            root = root.maker.inputs[-1]
        return root


@dataclass(eq=False)
class Op:
    """One operator; see Watch.note in bench/audit/watch.py."""

    name: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    phase: str  # forward (all that is neither of the others), backward, optimizer
    origin: Any  # of an operator of the backward pass: that of the forward pass; else itself
    file: str
    line: int
    function: int  # its first line
    call: int  # the same for all operators of one call of a function of PyTorch's that has no frame
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
        self.makes = {each.storage for each in self.outputs}
        self.type = self.inputs[0].type if self.inputs else ""
        self.place = f"{Path(self.file).name}:{self.line}" if self.file else ""
        self.is_product = self.name in PRODUCTS
        self.is_view = not self.name.endswith("_") and bool(self.outputs) and (
            self.outputs[0].storage in self.reads)


def walk(tensors: Iterable[Tensor],
         stop: Callable[[Op], bool] = lambda op: False) -> Iterator[Op]:
    """The operators that made some tensors, and what made theirs; beyond one that is to `stop` at,
    which is told too, it doesn't go."""
    seen, waiting = set(), list(tensors)
    while waiting:
        maker = waiting.pop().maker
        if maker and maker not in seen:
            seen.add(maker)
            yield maker
            if not stop(maker):
                waiting += maker.inputs


def to_products(tensors: Iterable[Tensor]) -> list[Op]:
    """As walk(), up to the nearest products; in no order."""
    return [*walk(tensors, lambda op: op.is_product)]


class Attention(NamedTuple):
    """One call."""

    ops: list[Op]  # that do it
    inputs: list[Tensor]  # query, key and value
    masks: list[tuple[Op, Tensor]]  # each with the operator that applies it
    by_hand: bool
    causal: bool  # without a mask in memory


class Step:
    """The watched step as a graph of operators and tensors."""

    def __init__(self, facts: dict):
        self.facts, self.older, makers = facts, dict(facts["older"]), {}
        self.ops = [Op(**each) for each in facts["ops"]]
        self.roots = []  # what a backward pass begins with
        roots = [(number, Tensor(each, [], "")) for number, storages in facts["roots"]
                 for each in storages]
        for number, op in enumerate([*self.ops, None]):
            begun = [each for place, each in roots if place == number]
            for each in [*begun, *(op.inputs if op else [])]:
                each.older = self.older.get(each.storage)
                each.maker = None if each.is_parameter else makers.get(each.storage)
            self.roots += begun
            if op:
                op.origin = op if op.origin is None else self.ops[op.origin]
                makers |= {} if op.is_view else dict.fromkeys(op.makes, op)

    @cached_property
    def training(self) -> dict[Op, None]:
        """The operators of the forward pass that the loss or the gradients come from, in order."""
        ends = self.roots + [each for op in self.ops if op.phase == "backward"
                             for each in op.inputs]
        found = {op for op in walk(ends) if op.phase == "forward"}
        return dict.fromkeys(op for op in self.ops if op in found)

    @cached_property
    def products(self) -> list[Op]:
        """Those of the forward pass."""
        return [op for op in self.training if op.is_product]

    @cached_property
    def weights(self) -> dict[Op, Tensor]:
        """The weight of each product that has one."""
        return {op: root for op in self.products for root in map(Tensor.root, op.inputs)
                if root.is_parameter and len(root.older["shape"]) > 1}

    @cached_property
    def seconds(self) -> float:
        """Of all operators that train."""
        return sum(op.seconds for op in self.kinds) or 1e-9

    def share(self, ops: Iterable[Op]) -> float:
        """Of the step's time, of these operators and their backward passes."""
        chosen = set(ops)
        return sum(op.seconds for op in self.ops if op.origin in chosen) / self.seconds

    def part(self, products: Iterable[Op]) -> float:
        """Of the forward pass's FLOPs."""
        return sum(op.flops for op in products) / max(1, sum(op.flops for op in self.products))

    def flops(self) -> Counter[str]:
        """Of forward and backward pass, by type."""
        count: Counter[str] = Counter()
        for op in self.ops:
            if op.flops and (op in self.training or op.phase == "backward"):
                count[op.type] += op.flops
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
                masks = [(op, each) for each in op.inputs
                         if each.argument in ("attn_mask", "attn_bias")]
                causal = bool(op.others.get("is_causal") or op.others.get("causal"))
                found.append(Attention([op], op.inputs[:3], masks, False, causal))
            elif op.is_product and op not in self.weights:
                found += self.by_hand(op)
        return found

    def by_hand(self, last: Op) -> list[Attention]:
        """Attention whose second product this is, if it is one."""
        for scores, value in (last.inputs[-2:], last.inputs[:-3:-1]):
            path = {*to_products([scores])}
            first = next((op for op in self.products if op in path and op not in self.weights),
                         None)
            names = {op.name for op in path}
            if not first or not names & {"_softmax", "softmax", "exp", NATIVE}:
                continue
            own = [op for op in self.training if op in path and first in to_products(op.inputs)]
            made = first.makes.union(*(op.makes for op in own))
            masks = [(op, each) for op in own if op.name.rstrip("_") in MASKING
                     for each in op.inputs if each.storage not in made and len(each.shape) > 1]
            if first.name == "baddbmm":
                masks.append((first, first.inputs[0]))
            return [Attention([first, *own, last], [*first.inputs[-2:], value], masks,
                              NATIVE not in names, NATIVE in names and not masks)]
        return []

    @cached_property
    def lookups(self) -> list[Op]:
        """The look-ups of tokens: those in the largest table whose indices aren't counted out, as
        positions are, but come from data."""
        tables = defaultdict(list)
        for op in self.training:
            if op.name == "embedding" and any(
                    each.is_data() for each in op.inputs if each.argument == "indices"):
                tables[op.inputs[0].root().storage].append(op)
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
        alike = [(op, weight.storage) for op, weight in self.weights.items()
                 if sorted(weight.older["shape"]) == sorted(table.shape)]
        tied = [op for op, weight in alike if weight == table.storage]
        return tied or [op for op, weight in alike if weight == alike[-1][1]]

    @cached_property
    def losses(self) -> list[Op]:
        """The operators that read logits."""
        logits, found = set().union(*(op.makes for op in self.heads)), []
        for op in self.training:
            if logits & op.reads and not op.is_product:
                found += [] if op.is_view else [op]
                if op.outputs and self.vocabulary in op.outputs[0].shape:
                    logits |= op.makes
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
                    "products" if op.flops and op.origin.is_product else "rest")
        return found
