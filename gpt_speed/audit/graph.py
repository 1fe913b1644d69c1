"""Operators and tensors of a watched step, as a graph: a tensor knows the operator that made it."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import add, or_
from typing import Any

MATMULS = "mm", "addmm", "bmm", "baddbmm", "convolution", "linear", "_scaled_mm"
DROPOUTS = "native_dropout", "bernoulli_", "rand", "rand_like"
POLYNOMIAL = "mul", "pow", "add", "sub", "_to_copy"
COPIES = "_to_copy", "clone", "copy_"


@dataclass(eq=False)
class Tensor:
    """A tensor that an operator reads or makes."""

    storage: int  # its number, as Recording.describe gives it
    shape: list[int]
    type: str
    argument: str = ""  # the operator's parameter that it is passed to
    maker: "Op | None" = None  # the operator that wrote it last; None for parameters
    older: dict | None = None  # from watch.describe_older, if its storage is older than the step
    is_parameter: bool = False

    @property
    def whole_shape(self) -> list[int]:
        """The shape of what it is a view of, if that is older than the step; else its own."""
        return self.older["shape"] if self.older else self.shape

    def sources(self) -> list[dict]:
        """Returns `older` of what it was computed from, except parameters."""
        read = [self, *(tensor for op in walk([self]) for tensor in op.inputs)]
        return [tensor.older for tensor in read if tensor.older and not tensor.is_parameter]

    def is_data(self) -> bool:
        """Tells whether a batch or random numbers went into it."""
        return bool(self.sources()) or any(op.name.startswith("rand") for op in walk([self]))

    def is_learned(self) -> bool:
        """Tells whether a gradient flows through it to a parameter."""
        smooth = (op for op in walk([self], is_discrete) if not is_discrete(op))
        return self.is_parameter or any(
            tensor.is_parameter for op in smooth for tensor in op.inputs
        )

    def unlearned_terms(self) -> "Iterator[Tensor]":
        """Yields itself, unless it is learned: then those terms of it, if it is a sum, that aren't.

        learned ─┬─> add ─> self
        term ────┘
        """
        if not self.is_learned():
            yield self
        elif self.maker and self.maker.base_name in ("add", "sub"):
            for term in self.maker.inputs:
                yield from term.unlearned_terms()

    def is_dropout(self) -> bool:
        return any(op.name in DROPOUTS for op in to_matmuls([self]))

    @cached_property
    def degrees(self) -> Counter[int]:
        """Its degree as a polynomial of each storage that it is computed from, back to the nearest
        operators that aren't POLYNOMIAL."""
        if not self.maker or not self.maker.is_polynomial:
            return Counter([self.storage])
        join = add if self.maker.base_name == "mul" else or_  # sums or maxima of degrees
        degrees = reduce(join, (tensor.degrees for tensor in self.maker.inputs))
        power = self.maker.scalars.get("exponent", 1) if self.maker.base_name == "pow" else 1
        return Counter({storage: degree * power for storage, degree in degrees.items()})

    def root(self) -> "Tensor":
        """Returns the tensor that it is a cast or a copy of, or itself."""
        root = self
        while root.maker and root.maker.name in COPIES:
            root = root.maker.inputs[-1]
        return root


@dataclass(eq=False)
class Op:
    """One call of an operator, with the fields of a gpt_speed.audit.watch.WatchedOp."""

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
        self.reads = {tensor.storage for tensor in self.inputs}
        self.writes = {tensor.storage for tensor in self.outputs}
        self.type = self.inputs[0].type if self.inputs else ""
        self.base_name = self.name.rstrip("_")  # that of the operator which doesn't work in place
        self.is_matmul = self.name in MATMULS
        is_by_number = self.base_name == "div" and len(self.inputs) == 1
        self.is_polynomial = self.base_name in POLYNOMIAL or is_by_number
        self.is_view = bool(self.reads & self.writes) and self.name == self.base_name

    def passed(self, argument: str) -> list[Tensor]:
        """Returns the inputs that an argument, by its name in the operator's schema, holds."""
        return [tensor for tensor in self.inputs if tensor.argument == argument]


def op_of(fields: dict) -> Op:
    """Returns an operator of a report, which has a list of fields for each tensor."""
    inputs = [Tensor(*tensor) for tensor in fields["inputs"]]
    outputs = [Tensor(*tensor) for tensor in fields.get("outputs", [])]
    return Op(**fields | dict(inputs=inputs, outputs=outputs))


def linked_ops(ops: list[dict], older: dict[int, dict]) -> list[Op]:
    """Returns a report's operators, in order, with the makers of their inputs; `older` describes
    storages from before the step, by number."""
    linked: list[Op] = []
    makers: dict[int, Op] = {}
    for fields in ops:
        op = op_of(fields)
        if op.name.startswith("new_") or op.name.endswith("_like"):
            op.inputs = []  # it takes the shape and the type, but no value
        op.origin = op if op.origin is None else linked[op.origin]
        for tensor in op.inputs:
            tensor.older = older.get(tensor.storage)
            tensor.is_parameter = bool(tensor.older and tensor.older["parameter"])
            tensor.maker = None if tensor.is_parameter else makers.get(tensor.storage)
        if not op.is_view:
            makers |= dict.fromkeys(op.writes, op)
        linked.append(op)
    return linked


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


def is_discrete(op: Op) -> bool:
    """Tells whether an operator makes integers or truth values, through which no gradient flows."""
    return bool(op.outputs) and not op.outputs[0].type.startswith(("float", "bfloat", "complex"))


def to_matmuls(tensors: Iterable[Tensor]) -> set[Op]:
    """Returns the operators that made tensors, back to the nearest matmuls."""
    return {*walk(tensors, lambda op: op.is_matmul)}
