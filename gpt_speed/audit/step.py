"""The watched step of a script as a graph: the operator that made each tensor."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations
from typing import Any, NamedTuple

MATMULS = "mm", "addmm", "bmm", "baddbmm", "convolution", "linear", "_scaled_mm"
ATTENTION = "scaled_dot_product", "flash_att", "flex_att", "efficient_att", "cudnn_att"
SAFE_SOFTMAX = "_safe_softmax"  # of PyTorch's attention where it runs as single operators
SOFTMAXES = "_softmax", "softmax", "exp", SAFE_SOFTMAX
DROPOUTS = "native_dropout", "bernoulli_", "rand", "rand_like"
TRIANGULAR = "tril", "triu"
MASKING = "masked_fill", "where", "add", "sub", "mul", "index_put"
# What PyTorch's attention can do to scores and weights, too.
EXPRESSIBLE = {
    "_to_copy",
    "clone",
    "copy",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    *TRIANGULAR,
    "masked_fill",
    "where",
    "index_put",
    "add",
    "sub",
    "eq",
    "ne",
    "fill",
    *DROPOUTS,
    "bernoulli",
    "lt",
    "gt",
    "le",
    "ge",
    *SOFTMAXES,
    "amax",
    "max",
    "sum",
    "div",
    "logsumexp",
    "nan_to_num",
}


@dataclass(eq=False)
class Tensor:
    """A tensor that an operator reads or makes."""

    storage: int  # its number, as Watch.describe gives it
    shape: list[int]
    type: str
    argument: str = ""  # the operator's parameter that it is passed to
    maker: "Op | None" = None  # the operator that wrote it last; None for parameters
    older: dict | None = None  # from Watch.describe, of a storage older than the step
    is_parameter: bool = False

    def sources(self) -> list[dict]:
        """Returns `older` of what it was computed from, except parameters."""
        read = [self, *(tensor for op in walk([self]) for tensor in op.inputs)]
        return [tensor.older for tensor in read if tensor.older and not tensor.is_parameter]

    def is_data(self) -> bool:
        """Tells whether a batch or random numbers went into it."""
        return bool(self.sources()) or any(op.name.startswith("rand") for op in walk([self]))

    def is_dropout(self) -> bool:
        return any(op.name in DROPOUTS for op in to_matmuls([self]))

    def root(self) -> "Tensor":
        """Returns the tensor that it is a cast or a copy of, or itself."""
        root = self
        while root.maker and root.maker.name in ("_to_copy", "clone", "copy_"):
            root = root.maker.inputs[-1]
        return root


@dataclass(eq=False)
class Op:
    """One call of an operator, as Watch.note records it."""

    name: str
    inputs: list[Tensor]
    outputs: list[Tensor] = field(default_factory=list)
    phase: str = "forward"  # forward, backward or optimizer
    origin: Any = None  # in the backward pass the forward operator, elsewhere itself
    place: str = ""  # the script's line that called it, as "model.py:63"
    function: str = ""  # the function around that line, by its file and first line
    call: int = 0  # equal for the operators into which PyTorch splits one call
    compiled: bool = False
    device: str = ""
    flops: int = 0
    kernel: list | None = None  # the first four fields of gpt_speed.counting.Kernel
    scalars: dict = field(default_factory=dict)  # arguments that checks look at
    seconds: float = 0.0

    def __post_init__(self):
        self.inputs = [Tensor(*fields) for fields in self.inputs]
        self.outputs = [Tensor(*fields) for fields in self.outputs]
        self.reads = {tensor.storage for tensor in self.inputs}
        self.writes = {tensor.storage for tensor in self.outputs}
        self.type = self.inputs[0].type if self.inputs else ""
        self.is_matmul = self.name in MATMULS
        self.is_view = bool(self.reads & self.writes) and not self.name.endswith("_")


def walk(tensors: Iterable[Tensor], stop: Callable[[Op], bool] = lambda op: False) -> Iterator[Op]:
    """Yields the operators that made tensors, then those that made their inputs, until `stop`."""
    seen, waiting = set(), list(tensors)
    while waiting:
        maker = waiting.pop().maker
        if maker and maker not in seen:
            seen.add(maker)
            yield maker
            if not stop(maker):
                waiting += maker.inputs


def to_matmuls(tensors: Iterable[Tensor]) -> set[Op]:
    """Returns the operators that made tensors, back to the nearest matmuls."""
    return {*walk(tensors, lambda op: op.is_matmul)}


def is_expressible(op: Op, scores: set[int]) -> bool:
    """Tells whether PyTorch's attention can do what an operator does to scores or weights, whose
    storages are given: scale rows, columns or heads, hide places, drop out."""
    if op.name.rstrip("_") != "mul":
        return op.is_view or op.name.rstrip("_") in EXPRESSIBLE
    if any(tensor.is_dropout() for tensor in op.inputs):
        return True
    others = [tensor for tensor in op.inputs if tensor.storage not in scores]
    return (
        len(op.inputs) < 2
        or bool(others)
        and all(
            1 in [1, 1, *tensor.shape][-2:] or any(older["triangle"] for older in tensor.sources())
            for tensor in others
        )
    )


class Attention(NamedTuple):
    """One call of attention, by one operator or by several."""

    ops: list[Op]
    inputs: list[Tensor]  # query, key and value
    masks: list[tuple[Op, Tensor]]  # each with the operator that applies it
    by_hand: bool
    causal: bool  # without a mask in memory
    odd: str = ""  # an operator between scores and values that PyTorch's attention can't replace


class Step:
    """The watched step, from a report of child.py with what machine_of adds."""

    def __init__(self, facts: dict):
        older, makers = dict(facts["older"]), {}
        self.facts, self.ops = facts, [Op(**fields) for fields in facts["ops"]]
        for op in self.ops:
            op.origin = op if op.origin is None else self.ops[op.origin]
            for tensor in op.inputs:
                tensor.older = older.get(tensor.storage)
                tensor.is_parameter = bool(tensor.older and tensor.older["parameter"])
                tensor.maker = None if tensor.is_parameter else makers.get(tensor.storage)
            if not op.is_view:
                makers |= dict.fromkeys(op.writes, op)
        self.is_compiled = any(op.compiled for op in self.ops)  # in part, maybe
        self.device = max(self.ops, key=lambda op: op.flops).device
        self.backwards = sum(op.name == "backward" for op in self.ops)

    @cached_property
    def training(self) -> dict[Op, None]:
        """The forward operators that the loss or the gradients depend on, in order."""
        trained = {
            *walk(tensor for op in self.ops if op.phase == "backward" for tensor in op.inputs)
        }
        return dict.fromkeys(op for op in self.ops if op.phase == "forward" and op in trained)

    @cached_property
    def matmuls(self) -> list[Op]:
        """The matmuls and convolutions of the forward pass."""
        return [op for op in self.training if op.is_matmul]

    @cached_property
    def weights(self) -> dict[Op, Tensor]:
        """The weight of each matmul that has one."""
        return {
            op: root
            for op in self.matmuls
            for root in map(Tensor.root, op.inputs)
            if root.is_parameter and len(root.older["shape"]) > 1
        }

    @cached_property
    def flops(self) -> Counter[str]:
        """The FLOPs of forward and backward pass by type."""
        flops: Counter[str] = Counter()
        for op in self.ops:
            if op.flops and (op in self.training or op.phase == "backward"):
                flops[op.type] += op.flops
        return flops

    @cached_property
    def type(self) -> str:
        """The type of most FLOPs."""
        return self.flops.most_common(1)[0][0]

    def flops_share(self, matmuls: Iterable[Op]) -> float:
        """Returns the share of the forward pass's FLOPs."""
        return sum(op.flops for op in matmuls) / max(1, sum(op.flops for op in self.matmuls))

    def precision(self, type: str) -> str:
        """Returns what matmuls of a type compute in on a GPU."""
        return "TF32" if type == "float32" and self.facts["tf32"] else type

    @cached_property
    def seconds(self) -> float:
        """The time of all operators that train."""
        return sum(op.seconds for op in self.kinds) or 1e-9

    def time_share(self, ops: Iterable[Op]) -> float:
        """Returns the share of the step's time, with that of their backward passes."""
        chosen = set(ops)
        return sum(op.seconds for op in self.ops if op.origin in chosen) / self.seconds

    @cached_property
    def attentions(self) -> list[Attention]:
        attentions = []
        for op in self.training:
            if any(name in op.name for name in ATTENTION) and len(op.inputs) >= 3:
                masks = [
                    (op, tensor)
                    for tensor in op.inputs
                    if tensor.argument in ("attn_mask", "attn_bias")
                ]
                causal = bool(op.scalars.get("is_causal") or op.scalars.get("causal"))
                attentions.append(Attention([op], op.inputs[:3], masks, False, causal))
            elif op.is_matmul and op not in self.weights:
                pairs = permutations(op.inputs[-2:])
                calls = (self.attention_by_hand(op, *pair) for pair in pairs)
                attentions += [call for call in calls if call][:1]
        inner = {op for call in attentions for op in call.ops[:-1]}  # weights times weights
        return [call for call in attentions if call.ops[-1] not in inner]

    def attention_by_hand(self, last: Op, scores: Tensor, value: Tensor) -> Attention | None:
        """Returns the attention whose last matmul has these inputs, if it is one."""
        size, count = scores.shape[-2:], math.prod(scores.shape)

        def is_outside(op: Op) -> bool:  # a matmul that doesn't mix the scores of several heads
            makers = [op, *(tensor.maker for tensor in op.inputs if tensor.maker)]
            shapes = [maker.outputs[0].shape for maker in makers]
            return op.is_matmul and not (
                op in self.weights
                and max(self.weights[op].older["shape"][:2]) * math.prod(size) <= count
                and any(
                    math.prod(shape) == count and not Counter(size) - Counter(shape)
                    for shape in shapes
                )
            )

        after = [
            *walk(
                [scores],
                lambda op: (
                    op.name in SOFTMAXES or is_outside(op) and op.outputs[0].shape[-2:] != size
                ),
            )
        ]  # else weights times weights
        is_divided = any(op.name == "sum" for op in after)  # by a sum of exponentials, maybe
        softmax = next(
            (op for op in after if op.name in SOFTMAXES and (op.name != "exp" or is_divided)), None
        )
        path = {*after, *walk(softmax.inputs, is_outside)} if softmax else {}
        first = next((op for op in self.matmuls if op in path and op not in self.weights), None)
        if not softmax or not first:
            return None
        between, written = [], {*first.writes}
        for op in self.training:
            if op in path and op.reads & written:
                between.append(op)
                written |= op.writes
        masks = [
            (op, tensor)
            for op in between
            if op.name.rstrip("_") in MASKING
            for tensor in op.inputs
            if tensor.storage not in written
            and len(tensor.shape) > ("index" not in op.name)
            and not tensor.root().is_parameter
            and not tensor.is_dropout()
        ]
        is_native = softmax.name == SAFE_SOFTMAX
        is_causal = (
            is_native and not masks or any(op.name.rstrip("_") in TRIANGULAR for op in between)
        )
        odd = next(
            (
                "a matmul" if op.is_matmul else op.name
                for op in between
                if not is_expressible(op, written)
            ),
            "",
        )
        return Attention(
            [first, *between, last],
            [*first.inputs[-2:], value],
            masks,
            not is_native,
            is_causal,
            odd,
        )

    @cached_property
    def lookups(self) -> list[Op]:
        """The look-ups in the table of tokens: the largest one whose indices are data."""
        tables = defaultdict(list)
        for op in self.training:
            if op.name == "embedding" and any(
                tensor.is_data() for tensor in op.inputs if tensor.argument == "indices"
            ):
                tables[op.inputs[0].root().storage].append(op)
        return max(tables.values(), key=lambda ops: ops[0].inputs[0].shape[0], default=[])

    @property
    def vocabulary(self) -> int:
        return self.lookups[0].inputs[0].shape[0] if self.lookups else 0

    @cached_property
    def heads(self) -> list[Op]:
        """The matmuls with the table of tokens, or else the last weight of its shape."""
        if not self.lookups:
            return []
        table = self.lookups[0].inputs[0]
        alike = [
            (op, weight.storage)
            for op, weight in self.weights.items()
            if sorted(weight.older["shape"]) == sorted(table.shape)
        ]
        tied = [op for op, weight in alike if weight == table.storage]
        return tied or [op for op, weight in alike if weight == alike[-1][1]]

    @cached_property
    def losses(self) -> list[Op]:
        """The operators that read logits."""
        logits, losses = set().union(*(op.writes for op in self.heads)), []
        for op in self.training:
            if logits & op.reads and not op.is_matmul:
                losses += [] if op.is_view else [op]
                if op.outputs and self.vocabulary in op.outputs[0].shape:
                    logits |= op.writes
        return losses

    @cached_property
    def kinds(self) -> dict[Op, str]:
        """One of gpt_speed.speed.KINDS for each operator except an evaluation's."""
        parts = dict.fromkeys((op for call in self.attentions for op in call.ops), "attention")
        parts |= dict.fromkeys(self.losses, "loss") | dict.fromkeys(self.heads, "head")
        kinds, has_begun = {}, False
        for op in self.ops:
            has_begun |= op.phase == "backward"  # what follows, trains, too
            if op.phase == "optimizer":
                kinds[op] = "optimizer"
            elif op.phase != "forward" or op in self.training or has_begun:
                kinds[op] = parts.get(op.origin) or (
                    "products" if op.flops and op.origin.is_matmul else "rest"
                )
        return kinds
