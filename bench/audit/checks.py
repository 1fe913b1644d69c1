"""Which techniques the watched step has and which it lacks.

A check follows data flow and never looks at the script's own names: attention by hand is a matmul,
a softmax of it, and a matmul of that. Where the evidence isn't certain the state is CANT_TELL: a
wrong LACKS is a fault.
"""

from collections import Counter
from collections.abc import Iterator
from functools import cache, reduce
from itertools import permutations
from typing import NamedTuple

from bench.audit.step import Op, Step, Tensor, to_matmuls, walk

HAS, LACKS, CANT_TELL = "has", "lacks", "can't tell"
NOT_HERE, NO_HARDWARE = "not in this model", "not on this hardware"
HALF = "bfloat16", "float16", "float8"
NATIVE = "native_layer_norm", "gelu", "_fused_rms_norm", "silu"
POLYNOMIAL = "mul", "pow", "add", "sub", "_to_copy"
WHOLE = None  # in place of operators: the technique changes the whole step


class Finding(NamedTuple):
    """What a check says of one technique."""

    state: str
    evidence: str
    where: str = ""  # as "model.py:63"
    share: float = 0.0  # of the step's time, taken by what the technique would change


def count(number: int, noun: str) -> str:
    plural = noun[:-1] + "ies" if noun[-1] == "y" else noun + ("es" if noun[-1] == "x" else "s")
    return f"{number:,} {noun if number == 1 else plural}"


# ---- The check of each technique: (state, evidence[, operators that it would change]) ----------


def causal_mask(step: Step) -> tuple:
    older = [(op, source) for call in step.attentions for op, mask in call.masks
             for source in mask.sources()]
    if stored := [*dict.fromkeys(op for op, source in older if source["triangle"])]:
        return LACKS, (f"{count(len(stored), 'call')} of attention with a stored triangle,"
                       f" {stored[0].outputs[0].shape[-2]} tokens"), stored
    if older:
        return CANT_TELL, "a mask that comes from outside the step", [op for op, _ in older]
    if any(call.masks or call.causal for call in step.attentions):
        return HAS, "the mask is made in the step, or the kernel knows that it is causal"
    return NOT_HERE, "no masked attention"


def tensor_cores(step: Step) -> tuple:
    single = [op for op in step.matmuls if op.type == "float32"
              and op.name != "convolution"]  # which has its own setting
    share = step.flops_share(single)
    if share < 0.01:
        return NOT_HERE, "no matmuls in float32"
    if float(step.facts["capability"]) < 8:
        return NO_HARDWARE, "of GPUs from compute capability 8.0 on"
    if step.facts["precision"] != "highest":
        return HAS, f"float32 matmuls at precision {step.facts['precision']}"
    return LACKS, f"{share:.0%} of the FLOPs in full float32", single


def fused_optimizer(step: Step) -> tuple:
    updates = [op for op in step.ops if op.phase == "optimizer"]
    is_compiled = 2 * sum(op.compiled for op in updates) > len(updates)
    optimizers, states = step.facts["optimizers"], set()
    for optimizer in optimizers:
        if all(optimizer["fused"]) or is_compiled:
            states.add(HAS)
        elif not optimizer["own"]:
            states.add(CANT_TELL)
        else:
            states.add(LACKS if optimizer["accepts"] else NOT_HERE)
    if not states:
        return CANT_TELL, "no optimizer of torch.optim"
    names = ", ".join(sorted({optimizer["name"] for optimizer in optimizers}))
    tensors = count(sum(optimizer["tensors"] for optimizer in optimizers), "tensor")
    return (next(state for state in (LACKS, CANT_TELL, HAS, NOT_HERE) if state in states),
            f"{names}: {count(len(updates), 'operator')} on {tensors}", updates)


def pinned_memory(step: Step) -> tuple:
    copies = [op for op in step.ops if op.scalars.get("source") == "cpu"
              and op.phase == "forward" and op.outputs[0].shape]
    for flag, how in (("pinned", "not pinned"), ("non_blocking", "without non_blocking=True")):
        if slow := [op for op in copies if not op.scalars.get(flag)]:
            return LACKS, f"a batch is copied {how}", slow
    if not copies:
        return NOT_HERE, "no copies to the GPU in the step"
    return HAS, f"{count(len(copies), 'copy')}, pinned"


def bfloat16(step: Step) -> tuple:
    shares = {type: flops / step.flops.total() for type, flops in step.flops.most_common()}
    half = sum(share for type, share in shares.items() if type.startswith(HALF))
    evidence = "FLOPs in " + ", ".join(f"{type} {share:.0%}" for type, share in shares.items())
    if half > 0.9:
        cast = "float32" in {weight.older["type"] for weight in step.weights.values()}
        return HAS, evidence + (", of float32 weights (autocast)" if cast else "")
    if step.facts["dtype"] != "bfloat16":
        return NO_HARDWARE, evidence
    return LACKS if shares.get("float32", 0) > 0.9 else CANT_TELL, evidence, step.matmuls


def native_layers(step: Step) -> tuple:
    norms, activations, native = {}, {}, Counter()
    for op in step.training:
        if op.name in NATIVE:
            native[op.name.removeprefix("native_").removeprefix("_fused_")] += 1
        elif op.name.rstrip("_") in ("mul", "div") and len(op.inputs) == 2:
            for factor, other in permutations(op.inputs):
                path = [*walk([factor], is_reduction)]
                if other.shape[-1:] > [1] and is_norm(factor, path):
                    if any(maker.call == op.call for maker in path):
                        native["rms_norm"] += 1
                    else:
                        norms[op] = "norm"
                activations |= dict.fromkeys(gelus(other, path), "GELU")
    by_hand = {op: what for op, what in (norms | activations).items() if not op.compiled}
    if by_hand:
        functions = {(op.file, op.function) for op in by_hand}
        kinds = Counter(by_hand.values()).items()
        return LACKS, " and ".join(count(number, what) for what, number in kinds) + " by hand", [
            *by_hand, *(op for op in step.training
                        if (op.file, op.function) in functions and not op.is_matmul)]
    if norms or activations:
        return HAS, "by hand, but the compiler fuses them"
    if not native:
        return NOT_HERE, "neither layer norms nor GELUs"
    return HAS, ", ".join(f"{times} {name}" for name, times in native.items())


def is_reduction(op: Op) -> bool:
    return op.is_matmul or op.name in ("mean", "var", "var_mean", "std")


def is_norm(factor: Tensor, path: list[Op]) -> bool:
    """Tells whether a factor is a root of what activations were reduced to in their last
    dimension."""
    return factor.shape[-1:] == [1] and any(
        op.name in ("rsqrt", "sqrt", "std") or op.scalars.get("exponent") in (-.5, .5)
        for op in path) and any(
        is_reduction(op) and op.scalars.get("dim") in ([-1], [len(op.inputs[0].shape) - 1])
        and op.inputs[0].is_data() for op in path)


def gelus(x: Tensor, path: list[Op]) -> Iterator[Op]:
    """Yields what makes a factor of x a GELU: erf of x, or tanh of a cubic polynomial of x."""
    @cache
    def degrees(storage: int, maker: Op | None) -> Counter:
        """Returns the degree of the polynomial that a tensor is of each storage."""
        name = maker.name.rstrip("_") if maker else ""
        if name not in POLYNOMIAL and not (name == "div" and len(maker.inputs) == 1):
            return Counter([storage])
        total = reduce(Counter.__add__ if name == "mul" else Counter.__or__,
                       (degrees(factor.storage, factor.maker) for factor in maker.inputs))
        power = maker.scalars.get("exponent", 1) if name == "pow" else 1
        return Counter({root: degree * power for root, degree in total.items()})

    for op in path:
        if op.name in ("erf", "tanh"):
            inner = degrees(op.inputs[0].storage, op.inputs[0].maker)
            if (op.name == "erf" or 3 in inner.values()) and (
                    inner.keys() & degrees(x.storage, x.maker).keys()):
                yield op


def flash_attention(step: Step) -> tuple:
    by_hand = [call for call in step.attentions if call.by_hand]
    if not by_hand:
        is_split = any(len(call.ops) > 1 for call in step.attentions)
        return HAS, count(len(step.attentions), "call") + " of PyTorch's attention" + (
            ", which runs as single operators here" if is_split else "")
    scores = by_hand[0].ops[0].outputs[0]
    return LACKS, (f"{count(len(by_hand), 'softmax')} of scores, {scores.shape[-2]} ×"
                   f" {scores.shape[-1]} in {scores.type}"), [
                       op for call in by_hand for op in call.ops]


def compiled(step: Step) -> tuple:
    share = step.flops_share(op for op in step.matmuls if op.compiled)
    if not step.is_compiled:
        return LACKS, "nothing is compiled", WHOLE
    return HAS if share >= 0.5 else CANT_TELL, (
        f"{share:.0%} of the forward pass's FLOPs are compiled")


def padded_vocabulary(step: Step) -> tuple:
    return LACKS if step.vocabulary % 64 else HAS, f"a vocabulary of {step.vocabulary:,}", [
        *step.heads, *step.losses]


def memory_text(used: float | None, total: float | None) -> str:
    """Returns "1.0 of 80.0 GB" for two numbers of bytes, with "?" where the system hides one."""
    sizes = ["?" if size is None else f"{size / 2**30:.1f}" for size in (used, total)]
    return " of ".join(sizes) + " GB"


def batch_size(step: Step) -> tuple:
    used, total = step.facts["memory"], step.facts["memory_total"]
    evidence = f"{memory_text(used, total)} in use"
    if step.device == "cuda":
        return LACKS if 2 * used < 0.95 * total else CANT_TELL, evidence
    return CANT_TELL, f"{evidence}; try twice the batch"


def merged_qkv(step: Step) -> tuple:
    merged, apart = 0, []
    for call in step.attentions:
        makers = [[op for op in to_matmuls([tensor]) if op in step.weights]
                  for tensor in call.inputs]
        if all(len(ops) == 1 for ops in makers):
            matmuls = [op for (op,) in makers]
            inputs = {root.storage for op in matmuls for root in map(Tensor.root, op.inputs)
                      if len(root.shape) > 1 and root.storage != step.weights[op].storage}
            merged += len({*matmuls}) == 1
            if len({*matmuls}) == 3 and len(inputs) == 1:
                apart.append(matmuls)
    if apart:
        return LACKS, (f"{count(len(apart), 'call')} of attention with three matmuls of one"
                       " input"), [op for matmuls in apart for op in matmuls]
    if merged:
        return HAS, f"query, key and value from one matmul, {merged} times"
    return CANT_TELL, "where query, key and value come from isn't plain"


def huge_pages(step: Step) -> tuple:
    return {"never": (NO_HARDWARE, "the system has them switched off"),
            "always": (HAS, "the system gives them to every program"),
            "set": (HAS, "THP_MEM_ALLOC_ENABLE set"),
            "not set": (LACKS, "THP_MEM_ALLOC_ENABLE not set", WHOLE)}[step.facts["huge_pages"]]


def loss_in_graph(step: Step) -> tuple:
    touched = [*reversed(step.losses), *step.heads]
    inside = {op.compiled for op in step.losses}
    if not inside:
        return foreign(step) or (CANT_TELL, "no operator that reads the logits")
    if len(inside) == 2:
        return CANT_TELL, "a part of the loss is compiled", touched
    if True in inside:
        return HAS, "the loss is compiled", touched
    return LACKS, "the loss isn't compiled", touched


def chunked_head(step: Step) -> tuple:
    # A forward pass may look tokens up twice, and a loss take a backward pass for each chunk.
    if len(step.heads) > min(len(step.lookups), step.backwards):
        return HAS, f"{len(step.heads)} matmuls with the head's weight"
    shape = " × ".join(f"{size:,}" for size in step.heads[0].outputs[0].shape)
    return LACKS, f"logits of {shape} at once", [*step.heads, *step.losses]


def kept_memory(step: Step) -> tuple:
    return {None: (CANT_TELL, "memory isn't glibc's"),
            True: (HAS, "large pieces stay with the process"),
            False: (LACKS, "large pieces go back to Linux when they are freed", WHOLE),
            }[step.facts["kept"]]


# ---- All of them -------------------------------------------------------------------------------

# By the technique's patch: its check, and the device or the part of a model that it needs.
CHECKS = {
    "01-causal-mask": (causal_mask, "attention"), "02-tensor-cores": (tensor_cores, "cuda"),
    "03-fused-adamw": (fused_optimizer, ""), "04-pinned-memory": (pinned_memory, "cuda"),
    "05-bfloat16": (bfloat16, ""), "06-native-layers": (native_layers, ""),
    "07-flash-attention": (flash_attention, "attention"), "08-torch-compile": (compiled, ""),
    "09-padded-vocabulary": (padded_vocabulary, "head"), "10-batch-size": (batch_size, ""),
    "11-merged-qkv": (merged_qkv, "attention"), "12-huge-pages": (huge_pages, "cpu"),
    "13-loss-in-graph": (loss_in_graph, "head"), "14-chunked-head": (chunked_head, "head"),
    "15-kept-memory": (kept_memory, "cpu"),
}


def missing(step: Step, needs: str) -> tuple | None:
    """Returns the answer of a check whose device or part of a model isn't there."""
    if needs in ("cuda", "cpu") and step.device != needs:
        return NO_HARDWARE, f"only on {dict(cuda='NVIDIA GPUs', cpu='CPUs')[needs]}"
    if needs == "attention" and not step.attentions:
        return foreign(step) or (NOT_HERE, "no attention")
    if needs == "head" and not step.heads:
        return NOT_HERE, "no head whose width is the vocabulary"
    return None


def foreign(step: Step) -> tuple | None:
    """Returns CANT_TELL where kernels run that aren't PyTorch's: they hide what they do."""
    return next(((CANT_TELL, f"the kernel {op.name} is not PyTorch's", [op])
                 for op in step.training if "." in op.name and not op.name.startswith(
                     ("profiler", "prim", "c10d", "inductor"))), None)


def check(step: Step) -> dict[str, Finding]:
    """Returns the finding of each technique, by its patch."""
    findings = {}
    for patch, (technique_check, needs) in CHECKS.items():
        state, evidence, *touched = missing(step, needs) or technique_check(step)
        ops = touched[0] if touched else []
        findings[patch] = Finding(state, evidence, ops[0].place if ops else "",
                                  1.0 if ops is WHOLE else step.time_share(ops))
    return findings
