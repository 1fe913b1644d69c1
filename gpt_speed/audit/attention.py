"""The calls of attention in a watched step: by PyTorch's own operators, or by hand."""

import math
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import NamedTuple

from gpt_speed.audit.graph import DROPOUTS, Op, Tensor, walk

NATIVE = "scaled_dot_product", "flash_att", "flex_att", "efficient_att", "cudnn_att"
MATH = "math"  # the kernel of PyTorch's attention that is several operators
SAFE_SOFTMAX = "_safe_softmax"  # of PyTorch's attention where it runs as single operators
SOFTMAXES = "_softmax", "softmax", "exp", SAFE_SOFTMAX
TRIANGULAR = "tril", "triu"
MASKING = "masked_fill", "where", "add", "sub", "mul", "index_put"
# What PyTorch's attention can do to scores and probabilities, too.
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


class Attention(NamedTuple):
    """One call of attention, by one operator or by several."""

    ops: list[Op]
    inputs: list[Tensor]  # query, key and value
    masks: list[tuple[Op, Tensor]]  # each with the operator that applies it
    by_hand: bool
    causal: bool  # without a mask in memory
    kernel: str  # of PyTorch's attention; "" by hand
    # An operator between scores and value that PyTorch's attention can't replace, or "".
    inexpressible: str = ""


def attentions_of(training: Collection[Op], weights: dict[Op, Tensor]) -> list[Attention]:
    """Returns the calls of attention among a step's operators that train; `weights` are the
    parameters of those matmuls that have one."""
    attentions = []
    for op in training:
        if is_native(op):
            attentions.append(native_attention(op))
        elif op not in weights and makes_sums(op):
            attentions += attentions_by_hand(op, training, weights)
    # Where probabilities are multiplied by probabilities, the product with the values is the call.
    inner = {op for attention in attentions for op in attention.ops[:-1]}
    return [attention for attention in attentions if attention.ops[-1] not in inner]


def makes_sums(op: Op) -> bool:
    """Tells whether an operator is a matmul and no outer product of vectors, whose results aren't
    sums. Attention to a single token would be one, too."""
    return op.is_matmul and op.inputs[-2].shape[-1:] != [1]


def is_native(op: Op) -> bool:
    """Tells whether an operator is attention of PyTorch's."""
    return any(name in op.name for name in NATIVE) and len(op.inputs) >= 3


def native_attention(op: Op) -> Attention:
    """Returns the call that is one operator of PyTorch's."""
    masks = [(op, tensor) for tensor in op.inputs if tensor.argument in ("attn_mask", "attn_bias")]
    causal = bool(op.scalars.get("is_causal") or op.scalars.get("causal"))
    return Attention([op], op.inputs[:3], masks, by_hand=False, causal=causal, kernel=op.name)


def attentions_by_hand(
    last: Op, training: Collection[Op], weights: dict[Op, Tensor]
) -> list[Attention]:
    """Returns the attention whose last matmul this is, one at most."""
    for tensor, value in permutations(last.inputs[-2:]):
        call = call_by_hand(last, Probabilities(tensor, weights), training)
        if call:
            return [call.attention(value)]
    return []


def call_by_hand(
    last: Op, probabilities: "Probabilities", training: Collection[Op]
) -> "CallByHand | None":
    """Returns the call whose last matmul reads these probabilities; None where they aren't the
    softmax of a matmul of two activations. In linear attention there is none: keys are normalized
    before they are multiplied."""
    softmax = probabilities.softmax
    if not softmax:
        return None
    before = {*walk(softmax.inputs, probabilities.is_boundary)}
    for op in training:
        if op in before and makes_sums(op) and op not in probabilities.weights:
            path = {*probabilities.after_softmax, *before}
            return CallByHand(op, followers(op, path, training), softmax, last)
    return None


def followers(first: Op, path: set[Op], training: Collection[Op]) -> list[Op]:
    """Returns the operators on a path that read what the first one makes, or what other followers
    make, in order."""
    ops, storages = [], {*first.writes}
    for op in training:
        if op in path and op.reads & storages:
            ops.append(op)
            storages |= op.writes
    return ops


class Probabilities:
    """One input of a matmul, which may be attention's probabilities: then a softmax made it."""

    def __init__(self, tensor: Tensor, weights: dict[Op, Tensor]):
        self.tensor, self.weights = tensor, weights
        self.size = tensor.shape[-2:]  # tokens that ask, tokens that are asked
        self.count = math.prod(tensor.shape)

    @cached_property
    def after_softmax(self) -> list[Op]:
        """The operators from the probabilities back to the softmax, that one included:

            softmax ─> dropout ─> probabilities

        Without a softmax they end at matmuls, though not where probabilities are multiplied by
        probabilities.
        """

        def is_end(op: Op) -> bool:
            return op.name in SOFTMAXES or (
                self.is_boundary(op) and op.outputs[0].shape[-2:] != self.size
            )

        return [*walk([self.tensor], is_end)]

    @cached_property
    def softmax(self) -> Op | None:
        """The operator that makes probabilities out of scores. By hand it is

        scores ─> exp ─┬────────> div ─> probabilities
                       └─> sum ──┘
        """
        is_divided = any(op.name == "sum" for op in self.after_softmax)
        for op in self.after_softmax:
            if op.name in SOFTMAXES and (op.name != "exp" or is_divided):
                return op
        return None

    def is_boundary(self, op: Op) -> bool:
        """Tells whether an operator is a matmul that no path from scores to probabilities leads
        through."""
        return op.is_matmul and not self.mixes_heads(op)

    def mixes_heads(self, op: Op) -> bool:
        """Tells whether a matmul makes each head's scores, or probabilities, of those of all heads,
        by a weight; B: batch, H: heads, T: tokens:

            scores (B, T, T, H) ─> op, weight (H, H) ─> scores (B, T, T, H)
        """
        if op not in self.weights:
            return False
        heads = self.weights[op].whole_shape[:2]
        has_so_many = max(heads) * math.prod(self.size) <= self.count
        return has_so_many and self.touches_scores(op) and not self.other_sizes.isdisjoint(heads)

    def touches_scores(self, op: Op) -> bool:
        """Tells whether an operator makes scores, or reads what was made as such."""
        makers = [op, *(tensor.maker for tensor in op.inputs if tensor.maker)]
        return any(self.is_of_scores(maker.outputs[0].shape) for maker in makers)

    @cached_property
    def other_sizes(self) -> set[int]:
        """The sizes of what a softmax makes, without the tokens': one is the number of heads."""
        softmaxes = walk([self.tensor], lambda op: op.name in SOFTMAXES)
        shapes = [op.outputs[0].shape for op in softmaxes if op.name in SOFTMAXES]
        return {
            size
            for shape in shapes
            if self.is_of_scores(shape)
            for size in Counter(shape) - Counter(self.size)
        }

    def is_of_scores(self, shape: list[int]) -> bool:
        """Tells whether a shape is that of the scores, in any order of the dimensions."""
        return math.prod(shape) == self.count and not Counter(self.size) - Counter(shape)


@dataclass(frozen=True)
class CallByHand:
    r"""Attention by several operators.

    query   key
        \   /
    scores_matmul
          |         scaling, masks
       softmax
          |         dropout
    probabilities   value
                \   /
                 last
    """

    scores_matmul: Op
    between: list[Op]  # those that make the probabilities out of the scores, in order
    softmax: Op
    last: Op

    def attention(self, value: Tensor) -> Attention:
        """Returns the call, by the values that the probabilities are multiplied by."""
        is_native = self.softmax.name == SAFE_SOFTMAX
        masks = self.masks()
        has_triangle = any(op.base_name in TRIANGULAR for op in self.between)
        return Attention(
            [self.scores_matmul, *self.between, self.last],
            [*self.scores_matmul.inputs[-2:], value],
            masks,
            by_hand=not is_native,
            causal=is_native and not masks or has_triangle,
            kernel=MATH if is_native else "",
            inexpressible=self.inexpressible(),
        )

    @cached_property
    def storages(self) -> set[int]:
        """Those of the scores and of all that is computed from them."""
        return self.scores_matmul.writes.union(*(op.writes for op in self.between))

    def masks(self) -> list[tuple[Op, Tensor]]:
        """Returns the masks, each with the operator that applies it:

        scores ─┬─> masked_fill, where, add, ... ─> softmax
        mask ───┘

        mask, query, key ─> baddbmm ─> softmax
        """
        return [
            (op, term)
            for op, tensor in self.masking()
            for term in tensor.unlearned_terms()
            if is_mask(op, term)
        ]

    def masking(self) -> Iterator[tuple[Op, Tensor]]:
        """Yields what is applied to scores or probabilities by operators that masks are applied by,
        each with its operator."""
        if self.scores_matmul.name == "baddbmm":
            yield from ((self.scores_matmul, added) for added in self.scores_matmul.passed("self"))
        for op in self.between:
            if op.base_name in MASKING:
                yield from (
                    (op, tensor) for tensor in op.inputs if tensor.storage not in self.storages
                )

    def inexpressible(self) -> str:
        """Returns the name of the first operator that PyTorch's attention can't replace, or "":

        scores_matmul ─> tanh ─> softmax
        """
        for op in self.between:
            if not is_expressible(op, self.storages):
                return "a matmul" if op.is_matmul else op.name
        return ""


def is_mask(op: Op, term: Tensor) -> bool:
    """Tells whether what an operator applies to scores, and isn't learned, is a mask: it has rows
    and columns, or is the index of what is replaced, and isn't what dropout leaves."""
    dimensions = 1 if "index" in op.name else 2
    return len(term.shape) >= dimensions and not term.is_dropout()


def is_expressible(op: Op, scores: set[int]) -> bool:
    """Tells whether PyTorch's attention can do what an operator does to scores or probabilities,
    whose storages are given: scale rows, columns or heads, hide places, drop out."""
    if op.base_name != "mul":
        return op.is_view or op.base_name in EXPRESSIBLE
    if len(op.inputs) < 2 or any(tensor.is_dropout() for tensor in op.inputs):
        return True
    factors = [tensor for tensor in op.inputs if tensor.storage not in scores]
    return bool(factors) and all(scales_or_hides(factor) for factor in factors)


def scales_or_hides(factor: Tensor) -> bool:
    """Tells whether a factor of scores has one number for each row, column or head, or holds a
    triangle."""
    is_line = len(factor.shape) < 2 or 1 in factor.shape[-2:]
    return is_line or any(older["triangle"] for older in factor.sources())
