"""The watched step of a script: which of its operators train, and what each is for."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cached_property

from gpt_speed.audit.attention import Attention, attentions_of
from gpt_speed.audit.graph import Op, Tensor, linked_ops, walk


class Step:
    """The watched step, from a report of child.py with what machine_of adds."""

    def __init__(self, facts: dict):
        self.facts, self.ops = facts, linked_ops(facts["ops"], dict(facts["older"]))
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
            if root.is_parameter and len(root.whole_shape) > 1
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

    @property
    def lacks_bfloat16(self) -> bool:
        """Tells whether it runs on a GPU without units for bfloat16."""
        return self.device == "cuda" and float(self.facts["capability"]) < 8

    @cached_property
    def seconds(self) -> float:
        """The time of all operators that train."""
        return sum(op.seconds for op in self.kinds) or 1e-9

    def time_share(self, ops: Iterable[Op]) -> float:
        """Returns the share of the step's time, with that of their backward passes."""
        origins = set(ops)
        return sum(op.seconds for op in self.ops if op.origin in origins) / self.seconds

    @cached_property
    def updates(self) -> list[Op]:
        """The operators of updates."""
        return [op for op in self.ops if op.phase == "optimizer"]

    @property
    def update_share(self) -> float:
        """The updates' share of the step's time: as they were timed, since Python may take longer
        to call their short operators than these run; else that of the operators."""
        return self.facts["updating"] or self.time_share(self.updates)

    @property
    def pages_share(self) -> float:
        """The share of the step's time in which Linux makes pages, at most, where freed memory goes
        back to it: operators pay for what others before them have freed."""
        return self.facts["system"] if self.device == "cpu" and not self.facts["kept"] else 0.0

    @cached_property
    def attentions(self) -> list[Attention]:
        """The calls of attention."""
        return attentions_of(self.training, self.weights)

    @cached_property
    def lookups(self) -> list[Op]:
        """The look-ups in the table of tokens: of those whose indices are data, the largest."""
        tables = defaultdict(list)
        for op in self.training:
            if is_lookup(op) and any(index.is_data() for index in op.passed("indices")):
                tables[op.inputs[0].root().storage].append(op)
        of_tokens = [ops for ops in tables.values() if any(map(self.reads_tokens, ops))]
        return max(of_tokens, key=lambda ops: ops[0].inputs[0].shape[0], default=[])

    def reads_tokens(self, lookup: Op) -> bool:
        """Tells whether what is looked up are tokens: of labels there is one a sample, and no head
        has their table's shape."""
        shapes = [index.shape for index in lookup.passed("indices")]
        are_rows = any(len(shape) > 1 and shape[-1] > 1 for shape in shapes)
        return are_rows or bool(self.heads_of(lookup.inputs[0]))

    @property
    def vocabulary(self) -> int:
        return self.lookups[0].inputs[0].shape[0] if self.lookups else 0

    @cached_property
    def heads(self) -> list[Op]:
        """The matmuls that compute logits."""
        return self.heads_of(self.lookups[0].inputs[0]) if self.lookups else []

    def heads_of(self, table: Tensor) -> list[Op]:
        """Returns the matmuls with a table, and with weights of its shape whose logits no other
        matmul reads; if there are none, those with the last weight of its shape."""
        alike = {
            op: weight.storage
            for op, weight in self.weights.items()
            if sorted(weight.whole_shape) == sorted(table.shape)
        }
        of_heads = {
            storage
            for op, storage in alike.items()
            if storage == table.storage or self.makes_last(op, table.shape[0])
        }
        if not of_heads:
            of_heads = {*[*alike.values()][-1:]}
        return [op for op, storage in alike.items() if storage in of_heads]

    def makes_last(self, matmul: Op, width: int) -> bool:
        """Tells whether a matmul makes numbers of this width, which no other one reads."""
        return width in matmul.outputs[0].shape and matmul not in self.before_matmuls

    @cached_property
    def before_matmuls(self) -> set[Op]:
        """The operators that the input of a matmul depends on."""
        return {*walk(tensor for op in self.matmuls for tensor in op.inputs)}

    @cached_property
    def loss_path(self) -> set[Op]:
        """The operators that lead to the losses, which backward passes begin from."""
        begins = (op for op in self.ops if op.name == "backward")
        return {*walk(tensor for op in begins for tensor in op.inputs)}

    def widens(self, matmul: Op) -> bool:
        """Tells whether a matmul makes more numbers than it reads, as that of a head does."""
        weight = self.weights.get(matmul)
        read = [
            math.prod(tensor.shape)
            for tensor in matmul.inputs
            if weight is None or tensor.root().storage != weight.storage
        ]
        return math.prod(matmul.outputs[0].shape) > max(read, default=0)

    @cached_property
    def losses(self) -> list[Op]:
        """The operators that read logits."""
        logits, losses = set().union(*(head.writes for head in self.heads)), []
        for op in self.training:
            if op.is_matmul or not logits & op.reads:
                continue
            if not op.is_view:
                losses.append(op)
            if op.outputs and self.vocabulary in op.outputs[0].shape:
                logits |= op.writes
        return losses

    @cached_property
    def kinds(self) -> dict[Op, str]:
        """One of gpt_speed.speed.KINDS for each operator except an evaluation's."""
        kinds, has_begun = {}, False
        for op in self.ops:
            has_begun |= op.phase == "backward"  # what follows, trains, too
            if op.phase != "forward" or op in self.training or has_begun:
                kinds[op] = self.kind_of(op)
        return kinds

    def kind_of(self, op: Op) -> str:
        """Returns the one of gpt_speed.speed.KINDS that an operator belongs to."""
        if op.phase == "optimizer":
            return "optimizer"
        if op.origin in self.parts:
            return self.parts[op.origin]
        return "products" if op.flops and op.origin.is_matmul else "rest"

    @cached_property
    def parts(self) -> dict[Op, str]:
        """The kinds of those forward operators that belong to attention, head or loss."""
        attention = [op for attention in self.attentions for op in attention.ops]
        return {
            **dict.fromkeys(attention, "attention"),
            **dict.fromkeys(self.losses, "loss"),
            **dict.fromkeys(self.heads, "head"),
        }


def is_lookup(op: Op) -> bool:
    """Tells whether an operator takes rows of a table: an embedding, or a weight by its index."""
    if op.name == "index":
        is_table = op.inputs[0].root().is_parameter and len(op.inputs[0].shape) == 2
        return is_table and len(op.passed("indices")) == 1
    return op.name == "embedding"
