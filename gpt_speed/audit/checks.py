"""Which techniques the watched step has and which it lacks.

A check follows data flow, not names: attention by hand is a matmul, a softmax of it, and a matmul
of that. Where the evidence isn't certain the state is CANT_TELL: a wrong LACKS is a fault. It
returns (state, evidence), and the operators that the technique would change if there are any.
"""

from collections import Counter
from collections.abc import Iterator
from functools import cache, reduce
from itertools import permutations
from typing import NamedTuple

from gpt_speed.audit.step import Op, Step, Tensor, to_matmuls, walk
from gpt_speed.common import counted as count
from gpt_speed.common import memory_text

HAS, LACKS, CANT_TELL = "has", "missing", "unknown"
NOT_HERE, NO_HARDWARE = "not in this model", "not on this hardware"
NATIVE = "native_layer_norm", "gelu", "_fused_rms_norm", "silu"
POLYNOMIAL = "mul", "pow", "add", "sub", "_to_copy"
WHOLE = 1.0  # a share in place of operators: the technique changes the whole step


class Finding(NamedTuple):
    """What a check says of one technique."""

    state: str
    evidence: str
    where: str = ""  # as "model.py:63"
    share: float = 0.0  # of the step's time, taken by what the technique would change


def causal_mask(step: Step) -> tuple:
    older = [
        (op, source)
        for call in step.attentions
        for op, mask in call.masks
        for source in mask.sources()
    ]
    if stored := [*dict.fromkeys(op for op, source in older if source["triangle"])]:
        return (
            LACKS,
            (
                f"{count(len(stored), 'call')} of attention with a stored triangle,"
                f" {stored[0].outputs[0].shape[-2]} tokens"
            ),
            stored,
        )
    if older:
        return CANT_TELL, "a mask that comes from outside the step", [op for op, _ in older]
    if any(call.masks or call.causal for call in step.attentions):
        return HAS, "the mask is made in the step, or the kernel knows that it is causal"
    return NOT_HERE, "no masked attention"


def tensor_cores(step: Step) -> tuple:
    single = [
        op for op in step.matmuls if op.type == "float32" and op.name != "convolution"
    ]  # which has its own setting
    share = step.flops_share(single)
    if share < 0.01:
        return NOT_HERE, "no matmuls in float32"
    if float(step.facts["capability"]) < 8:
        return NO_HARDWARE, "of GPUs from compute capability 8.0 on"
    if step.facts["tf32"]:
        return HAS, "float32 matmuls in TF32"
    return LACKS, f"{share:.0%} of the FLOPs in full float32", single


def fused_optimizer(step: Step) -> tuple:
    optimizers = step.facts["optimizers"]
    updates = [op for op in step.ops if op.phase == "optimizer"]
    if not optimizers:
        return CANT_TELL, "no optimizer of torch.optim"
    names = ", ".join(sorted({optimizer["name"] for optimizer in optimizers}))
    tensors = count(sum(optimizer["tensors"] for optimizer in optimizers), "tensor")
    is_compiled = 2 * sum(op.compiled for op in updates) > len(updates)
    slow = [optimizer for optimizer in optimizers if not optimizer["fused"] and not is_compiled]
    if any(optimizer["own"] and optimizer["accepts"] for optimizer in slow):
        state = LACKS
    elif not all(optimizer["own"] for optimizer in slow):
        state = CANT_TELL
    else:
        state = HAS if len(slow) < len(optimizers) else NOT_HERE
    return state, f"{names}: {count(len(updates), 'operator')} on {tensors}", updates


def pinned_memory(step: Step) -> tuple:
    copies = [
        op
        for op in step.ops
        if op.scalars.get("source") == "cpu" and op.phase == "forward" and op.outputs[0].shape
    ]
    for flag, how in (("pinned", "not pinned"), ("non_blocking", "without non_blocking=True")):
        if slow := [op for op in copies if not op.scalars.get(flag)]:
            return LACKS, f"a batch is copied {how}", slow
    if not copies:
        return NOT_HERE, "no copies to the GPU in the step"
    return HAS, "copies from pinned memory"


def bfloat16(step: Step) -> tuple:
    shares = {type: flops / step.flops.total() for type, flops in step.flops.most_common()}
    half = sum(share for type, share in shares.items() if type not in ("float32", "float64"))
    evidence = "FLOPs in " + ", ".join(f"{type} {share:.0%}" for type, share in shares.items())
    if half > 0.9:
        return HAS, evidence
    if step.facts["dtype"] != "bfloat16":
        return NO_HARDWARE, evidence
    touched = [*step.matmuls, *step.kinds]  # parameters and activations, too
    return LACKS if shares.get("float32", 0) > 0.9 else CANT_TELL, evidence, touched


def native_layers(step: Step) -> tuple:
    layers, is_native = {}, False
    for op in step.training:
        if op.name in NATIVE:
            is_native = True
        elif op.name.rstrip("_") in ("mul", "div") and len(op.inputs) == 2:
            for factor, other in permutations(op.inputs):
                path = [*walk([factor], is_reduction)]
                if other.shape[-1:] > [1] and is_norm(factor, path):
                    if any(maker.call == op.call for maker in path):
                        is_native = True
                    else:
                        layers[op] = "norm"
                elif len(factor.shape) == 1 and not factor.is_data() and is_unit(other):
                    layers[op] = "norm"
                layers |= dict.fromkeys(gelus(other, path), "GELU")
    by_hand = {op: layer for op, layer in layers.items() if not op.compiled}
    if by_hand:
        functions = {op.function for op in by_hand}
        numbers = Counter(by_hand.values()).items()
        evidence = " and ".join(count(number, layer) for layer, number in numbers) + " by hand"
        return (
            LACKS,
            evidence,
            [
                *by_hand,
                *(op for op in step.training if not op.is_matmul and op.function in functions),
            ],
        )
    return (
        (HAS, "PyTorch's own, or fused by the compiler")
        if layers or is_native
        else (NOT_HERE, "neither layer norms nor GELUs")
    )


def is_reduction(op: Op) -> bool:
    return op.is_matmul or op.name in ("mean", "var", "var_mean", "std")


def is_norm(factor: Tensor, path: list[Op]) -> bool:
    """Tells whether a factor is a root of activations reduced in their last dimension."""
    return (
        factor.shape[-1:] == [1]
        and any(
            op.name in ("rsqrt", "sqrt", "std") or op.scalars.get("exponent") in (-0.5, 0.5)
            for op in path
        )
        and any(
            is_reduction(op)
            and op.scalars.get("dim") in ([-1], [len(op.inputs[0].shape) - 1])
            and op.inputs[0].is_data()
            for op in path
        )
    )


def is_unit(x: Tensor) -> bool:
    """Tells whether x is activations, divided by their length in the last dimension and scaled."""
    maker = x.maker
    while maker and maker.name in ("mul", "_to_copy"):
        maker = maker.inputs[0].maker
    return (
        maker is not None
        and maker.name == "div"
        and any(
            op.name == "linalg_vector_norm"
            and maker.inputs[0].storage in op.reads
            and op.scalars.get("dim") in ([-1], [len(op.inputs[0].shape) - 1])
            for op in walk(maker.inputs[1:], is_reduction)
        )
    )


def gelus(x: Tensor, path: list[Op]) -> Iterator[Op]:
    """Yields what makes a factor of x a GELU: erf of x, tanh of a cubic polynomial of x."""

    @cache
    def degrees(storage: int, maker: Op | None) -> Counter:
        """Returns a tensor's degree as a polynomial of each storage that it comes from."""
        name = maker.name.rstrip("_") if maker else ""
        if name not in POLYNOMIAL and not (name == "div" and len(maker.inputs) == 1):
            return Counter([storage])
        total = reduce(
            Counter.__add__ if name == "mul" else Counter.__or__,
            (degrees(factor.storage, factor.maker) for factor in maker.inputs),
        )
        power = maker.scalars.get("exponent", 1) if name == "pow" else 1
        return Counter({root: degree * power for root, degree in total.items()})

    for op in path:
        if op.name in ("erf", "tanh"):
            inner = degrees(op.inputs[0].storage, op.inputs[0].maker)
            if (op.name == "erf" or 3 in inner.values()) and (
                inner.keys() & degrees(x.storage, x.maker).keys()
            ):
                yield op


def flash_attention(step: Step) -> tuple:
    by_hand = [call for call in step.attentions if call.by_hand]
    if not by_hand:
        return HAS, "PyTorch's attention"
    plain = [call for call in by_hand if not call.odd]
    if not plain:
        return (
            CANT_TELL,
            f"{by_hand[0].odd} between scores and values: FlexAttention may do it",
            [op for call in by_hand for op in call.ops],
        )
    scores = plain[0].ops[0].outputs[0]
    return (
        LACKS,
        (
            f"{count(len(plain), 'call')} of attention by hand, {scores.shape[-2]} ×"
            f" {scores.shape[-1]} scores in {scores.type}"
        ),
        [op for call in plain for op in call.ops],
    )


def compiled(step: Step) -> tuple:
    share = step.flops_share(op for op in step.matmuls if op.compiled)
    if not step.is_compiled:
        return LACKS, "nothing is compiled", WHOLE
    return HAS if share >= 0.5 else CANT_TELL, (
        f"{share:.0%} of the forward pass's FLOPs are compiled"
    )


def padded_vocabulary(step: Step) -> tuple:
    evidence = f"a vocabulary of {step.vocabulary:,}"
    if -step.vocabulary % 64 > step.vocabulary / 16:
        return NOT_HERE, f"{evidence}: padded it would cost more"
    return LACKS if step.vocabulary % 64 else HAS, evidence, [*step.heads, *step.losses]


def batch_size(step: Step) -> tuple:
    used, total = step.facts["memory"], step.facts["memory_total"]
    passes = f", {step.backwards} backward passes a step" if step.backwards > 1 else ""
    hint = "" if step.device == "cuda" else "; try twice the batch"
    fits = step.device == "cuda" and 2 * used < 0.95 * total
    return LACKS if fits else CANT_TELL, f"{memory_text(used, total)} in use{passes}{hint}"


def merged_qkv(step: Step) -> tuple:
    is_merged, apart = False, []
    for call in step.attentions:
        makers = to_matmuls(call.inputs)
        matmuls = [op for op in step.weights if op in makers]
        inputs = {
            root.storage
            for op in matmuls
            for root in map(Tensor.root, op.inputs)
            if len(root.shape) > 1 and root.storage != step.weights[op].storage
        }
        is_merged |= len(matmuls) == 1
        if len(matmuls) == 3 and len(inputs) == 1:
            apart += matmuls
    if apart:
        calls = count(len(apart) // 3, "call")
        return LACKS, f"{calls} of attention with three matmuls of one input", apart
    if is_merged:
        return HAS, "query, key and value from one matmul"
    return CANT_TELL, "where query, key and value come from isn't plain"


def huge_pages(step: Step) -> tuple:
    return {
        None: (NO_HARDWARE, "the system has none, or has them switched off"),
        True: (HAS, "set for this program or for all"),
        False: (LACKS, "THP_MEM_ALLOC_ENABLE not set", step.facts["system"]),
    }[step.facts["huge_pages"]]


def loss_in_graph(step: Step) -> tuple:
    touched = [*reversed(step.losses), *step.heads]
    inside = {op.compiled for op in step.losses}
    if len(inside) != 1:
        reason = "a part of the loss is compiled" if inside else "no operator that reads the logits"
        return CANT_TELL, reason, touched
    return (
        (HAS, "the loss is compiled", touched)
        if inside == {True}
        else (LACKS, "the loss isn't compiled", touched)
    )


def chunked_head(step: Step) -> tuple:
    # A forward pass may look tokens up twice; a loss may take a backward pass per chunk.
    if len(step.heads) > min(len(step.lookups), step.backwards):
        return HAS, f"{len(step.heads)} matmuls with the head's weight"
    if step.vocabulary <= min(step.heads[0].inputs[-1].shape):
        return NOT_HERE, "logits are no larger than what they are computed from"
    shape = " × ".join(f"{size:,}" for size in step.heads[0].outputs[0].shape)
    return LACKS, f"logits of {shape} at once", [*step.heads, *step.losses]


def kept_memory(step: Step) -> tuple:
    if step.facts["shares_memory"]:
        return NO_HARDWARE, "the GPU shares the host's memory"
    if step.device == "cuda":
        return (
            (HAS, "expandable segments")
            if step.facts["kept"]
            else (LACKS, "PYTORCH_CUDA_ALLOC_CONF not set to expandable_segments:True")
        )
    return {
        None: (CANT_TELL, "memory isn't glibc's"),
        True: (HAS, "large pieces stay with the process"),
        False: (LACKS, "large pieces go back to Linux when freed", step.facts["system"]),
    }[step.facts["kept"]]


# By the technique's patch: its check, and the device or part of a model that it needs.
CHECKS = {
    "01-causal-mask": (causal_mask, "attention"),
    "02-tensor-cores": (tensor_cores, "cuda"),
    "03-fused-adamw": (fused_optimizer, ""),
    "04-pinned-memory": (pinned_memory, "cuda"),
    "05-bfloat16": (bfloat16, ""),
    "06-native-layers": (native_layers, ""),
    "07-flash-attention": (flash_attention, "attention"),
    "08-torch-compile": (compiled, ""),
    "09-padded-vocabulary": (padded_vocabulary, "head"),
    "10-batch-size": (batch_size, ""),
    "11-merged-qkv": (merged_qkv, "attention"),
    "12-huge-pages": (huge_pages, "cpu"),
    "13-loss-in-graph": (loss_in_graph, "head"),
    "14-chunked-head": (chunked_head, "head"),
    "15-kept-memory": (kept_memory, ""),
}


def missing(step: Step, needs: str) -> tuple | None:
    """Returns the answer of a check whose device or part of a model isn't there."""
    if needs in ("cuda", "cpu") and step.device != needs:
        return NO_HARDWARE, f"only on {dict(cuda='NVIDIA GPUs', cpu='CPUs')[needs]}"
    if needs == "attention" and not step.attentions:
        for op in step.training:
            if "." in op.name and not op.name.startswith(("profiler", "prim", "c10d", "inductor")):
                return CANT_TELL, f"the kernel {op.name} is not PyTorch's", [op]
        return NOT_HERE, "no attention"
    if needs == "head" and not step.heads:
        return NOT_HERE, "no head whose width is the vocabulary"
    return None


def check(step: Step) -> dict[str, Finding]:
    """Returns the finding of each technique, by its patch."""
    findings = {}
    for patch, (technique_check, needs) in CHECKS.items():
        state, evidence, *touched = missing(step, needs) or technique_check(step)
        ops = touched[0] if touched else []
        findings[patch] = (
            Finding(state, evidence, share=ops)
            if isinstance(ops, float)
            else (Finding(state, evidence, ops[0].place if ops else "", step.time_share(ops)))
        )
    return findings
