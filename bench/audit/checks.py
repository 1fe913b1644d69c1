"""What the watched step of a script tells of each technique: the signs.

A sign looks at where a tensor comes from, not at names: attention by hand is a product, a softmax
of it, and a product of that. Where a sign isn't certain the answer is CANT_TELL: a wrong LACKS is
a fault.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, reduce
from itertools import permutations
from typing import NamedTuple

from bench.audit.step import Op, Step, Tensor, to_products, walk

HAS, LACKS, CANT_TELL = "has", "lacks", "can't tell"
NOT_HERE, NO_HARDWARE = "not in this model", "not on this hardware"
HALF = "bfloat16", "float16", "float8"
NATIVE = "native_layer_norm", "gelu", "_fused_rms_norm", "silu"


class Verdict(NamedTuple):
    state: str
    seen: str
    place: str = ""  # "model.py:63"
    share: float = 0.0  # of the step's time, of the operators that it would change


def count(number: int, what: str) -> str:
    many = what[:-1] + "ies" if what[-1] == "y" else what + ("es" if what[-1] == "x" else "s")
    return f"{number:,} {what if number == 1 else many}"


# ---- A sign for each technique: (state, what was seen[, operators that it would change]) -------


def causal_mask(step: Step) -> tuple:
    stored, unknown = [], []
    for each in step.attentions:
        older = [(source, op) for op, mask in each.masks for source in mask.sources()]
        if any(source["triangle"] for source, _ in older):
            stored.append(older[0][1])
        elif older:
            unknown.append(older[0][1])
    if stored:
        return LACKS, (f"{count(len(stored), 'call')} of attention with a stored triangle,"
                       f" {stored[0].outputs[0].shape[-2]} tokens"), stored
    if unknown:
        return CANT_TELL, "a mask that comes from outside the step", unknown
    if any(each.masks or each.causal for each in step.attentions):
        return HAS, "the mask is made in the step, or the kernel knows that it is causal"
    return NOT_HERE, "no masked attention"


def tensor_cores(step: Step) -> tuple:
    single = [op for op in step.products if op.type == "float32"
              and op.name != "convolution"]  # which has its own setting
    if step.part(single) < 0.01:
        return NOT_HERE, "no products in float32"
    if float(step.facts["capability"]) < 8:
        return NO_HARDWARE, "of GPUs from compute capability 8.0 on"
    if step.facts["precision"] != "highest":
        return HAS, f"float32 products at precision {step.facts['precision']}"
    return LACKS, f"{step.part(single):.0%} of the FLOPs in full float32", single


def fused_optimizer(step: Step) -> tuple:
    updates = [op for op in step.ops if op.phase == "optimizer"]
    used = step.facts["optimizers"]
    if not used:
        return CANT_TELL, "no optimizer of torch.optim"
    compiled = 2 * sum(op.compiled for op in updates) > len(updates)
    states = {HAS if all(each["fused"]) or compiled else CANT_TELL if not each["own"] else
              LACKS if each["accepts"] else NOT_HERE for each in used}
    names = ", ".join(sorted({each["name"] for each in used}))
    return min(states, key=[LACKS, CANT_TELL, HAS, NOT_HERE].index), (
        f"{names}: {count(len(updates), 'operator')} on"
        f" {count(sum(each['tensors'] for each in used), 'tensor')}"), updates


def pinned_memory(step: Step) -> tuple:
    copies = [op for op in step.ops if op.others.get("source") == "cpu"
              and op.phase == "forward" and op.outputs[0].shape]
    for flag, how in (("pinned", "not pinned"), ("non_blocking", "without non_blocking=True")):
        if bad := [op for op in copies if not op.others.get(flag)]:
            return LACKS, f"a batch is copied {how}", bad
    if not copies:
        return NOT_HERE, "no copies to the GPU in the step"
    return HAS, f"{count(len(copies), 'copy')}, pinned"


def bfloat16(step: Step) -> tuple:
    kinds = step.flops()
    shares = {kind: flops / kinds.total() for kind, flops in kinds.most_common()}
    half = sum(share for kind, share in shares.items() if kind.startswith(HALF))
    seen = "FLOPs in " + ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items())
    if half > 0.9:
        cast = "float32" in {weight.older["type"] for weight in step.weights.values()}
        return HAS, seen + (", of float32 weights (autocast)" if cast else "")
    if step.facts["dtype"] != "bfloat16":
        return NO_HARDWARE, seen
    return LACKS if shares.get("float32", 0) > 0.9 else CANT_TELL, seen, step.products


def native_layers(step: Step) -> tuple:
    def ends(op: Op) -> bool:
        return op.is_product or op.name in ("mean", "var", "var_mean", "std")

    @cache
    def degrees(storage: int, maker: Op | None) -> Counter:
        """The degree of the polynomial that it is, in each storage that it is made of."""
        name = maker.name.rstrip("_") if maker else ""
        if name not in ("mul", "pow", "add", "sub", "_to_copy") and not (
                name == "div" and len(maker.inputs) == 1):
            return Counter([storage])
        total = reduce(Counter.__add__ if name == "mul" else Counter.__or__,
                       (degrees(each.storage, each.maker) for each in maker.inputs))
        power = maker.others.get("exponent", 1) if name == "pow" else 1
        return Counter({each: degree * power for each, degree in total.items()})

    def is_norm(factor: Tensor, path: list[Op]) -> bool:
        """Whether it is a root of what is reduced of the last dimension alone, of activations."""
        return factor.shape[-1:] == [1] and any(
            op.name in ("rsqrt", "sqrt", "std") or op.others.get("exponent") in (-.5, .5)
            for op in path) and any(
            ends(op) and op.others.get("dim") in ([-1], [len(op.inputs[0].shape) - 1])
            and op.inputs[0].is_data() for op in path)

    def gelus(other: Tensor, path: list[Op]) -> Iterator[Op]:
        """The functions in what `other` is multiplied by, of what that is made of, too."""
        for op in path:
            if op.name in ("erf", "tanh"):
                inner = degrees(op.inputs[0].storage, op.inputs[0].maker)
                if (op.name == "erf" or 3 in inner.values()) and inner.keys() & degrees(
                        other.storage, other.maker).keys():
                    yield op

    norms, activations, native = {}, {}, Counter()
    for op in step.training:
        if op.name in NATIVE:
            native[op.name.removeprefix("native_").removeprefix("_fused_")] += 1
        elif op.name.rstrip("_") in ("mul", "div") and len(op.inputs) == 2:
            for factor, other in permutations(op.inputs):
                path = [*walk([factor], ends)]
                if other.shape[-1:] > [1] and is_norm(factor, path):
                    if any(each.call == op.call for each in path):
                        native["rms_norm"] += 1
                    else:
                        norms[op] = "norm"
                activations |= dict.fromkeys(gelus(other, path), "GELU")
    found = {op: what for op, what in (norms | activations).items() if not op.compiled}
    if found:
        functions = {(op.file, op.function) for op in found}
        kinds = Counter(found.values())
        return LACKS, f"{' and '.join(count(*each[::-1]) for each in kinds.items())} by hand", [
            *found, *(op for op in step.training
                      if (op.file, op.function) in functions and not op.is_product)]
    if norms or activations:
        return HAS, "by hand, but the compiler fuses them"
    if not native:
        return NOT_HERE, "neither layer norms nor GELUs"
    return HAS, ", ".join(f"{times} {name}" for name, times in native.items())


def flash_attention(step: Step) -> tuple:
    by_hand = [each for each in step.attentions if each.by_hand]
    if not by_hand:
        single = any(len(each.ops) > 1 for each in step.attentions)
        return HAS, count(len(step.attentions), "call") + " of PyTorch's attention" + (
            ", which runs as single operators here" if single else "")
    scores = by_hand[0].ops[0].outputs[0]
    return LACKS, (f"{count(len(by_hand), 'softmax')} of scores, {scores.shape[-2]} ×"
                   f" {scores.shape[-1]} in {scores.type}"), [
                       op for each in by_hand for op in each.ops]


def compiled(step: Step) -> tuple:
    share = step.part(op for op in step.products if op.compiled)
    if share >= 0.5:
        return HAS, f"{share:.0%} of the forward pass's FLOPs"
    if share:
        return CANT_TELL, f"{share:.0%} of the forward pass's FLOPs are compiled"
    if any(op.compiled for op in step.ops):
        return CANT_TELL, "something is compiled, but no product of the forward pass"
    return LACKS, "nothing is compiled", WHOLE


def padded_vocabulary(step: Step) -> tuple:
    return LACKS if step.vocabulary % 64 else HAS, f"a vocabulary of {step.vocabulary:,}", [
        *step.heads, *step.losses]


def of_memory(used: float | None, there: float | None) -> str:
    """How much memory was used, in words, with "?" for what the system doesn't tell."""
    sizes = ["?" if size is None else f"{size / 2**30:.1f}" for size in (used, there)]
    return " of ".join(sizes) + " GB"


def batch_size(step: Step) -> tuple:
    used, there = step.facts["memory"], step.facts["memory_there"]
    seen = f"{of_memory(used, there)} in use"
    if step.device == "cuda":
        return LACKS if 2 * used < 0.95 * there else CANT_TELL, seen
    return CANT_TELL, f"{seen}; try twice the batch"


def merged_qkv(step: Step) -> tuple:
    merged, apart = 0, []
    for each in step.attentions:
        near = [[op for op in to_products([one]) if op in step.weights] for one in each.inputs]
        if all(len(ops) == 1 for ops in near):
            makers = [op for ops in near for op in ops]
            inputs = {root.storage for op in makers for root in map(Tensor.root, op.inputs)
                      if len(root.shape) > 1 and root.storage != step.weights[op].storage}
            merged += len({*makers}) == 1
            apart += [makers] if len({*makers}) == 3 and len(inputs) == 1 else []
    if apart:
        return LACKS, (f"{count(len(apart), 'call')} of attention with three products of one"
                       " input"), [op for makers in apart for op in makers]
    if merged:
        return HAS, f"query, key and value from one product, {merged} times"
    return CANT_TELL, "where query, key and value come from isn't plain"


def huge_pages(step: Step) -> tuple:
    state = step.facts["huge_pages"]
    return {"never": (NO_HARDWARE, "the system has them switched off"),
            "always": (HAS, "the system gives them to every program"),
            "set": (HAS, "THP_MEM_ALLOC_ENABLE set"),
            "not set": (LACKS, "THP_MEM_ALLOC_ENABLE not set", WHOLE)}[state]


def loss_in_graph(step: Step) -> tuple:
    touched = [*reversed(step.losses), *step.heads]
    inside = {op.compiled for op in step.losses}
    if not inside:
        return foreign(step) or (CANT_TELL, "nothing was seen to read the logits")
    if inside == {True}:
        return HAS, "the loss is compiled", touched
    if inside == {False}:
        return LACKS, ("the loss is outside what is compiled" if any(op.compiled for op in step.ops)
                       else "nothing is compiled"), touched
    return CANT_TELL, "a part of the loss is compiled", touched


def chunked_head(step: Step) -> tuple:
    # A forward pass may look tokens up twice, and a loss take a backward pass for each chunk.
    if len(step.heads) > min(len(step.lookups), len(step.facts["roots"])):
        return HAS, f"{len(step.heads)} products with the head's weight"
    shape = " × ".join(f"{size:,}" for size in step.heads[0].outputs[0].shape)
    return LACKS, f"logits of {shape} at once", [*step.heads, *step.losses]


def kept_memory(step: Step) -> tuple:
    return {None: (CANT_TELL, "memory isn't glibc's"),
            True: (HAS, "large pieces stay with the process"),
            False: (LACKS, "large pieces go back to Linux when they are freed", WHOLE),
            }[step.facts["kept"]]


# ---- All of them -------------------------------------------------------------------------------

WHOLE = None  # in place of operators: all of the step
ONLY = dict(cuda="only on NVIDIA GPUs", cpu="only on CPUs")
# By the name of the technique's patch: the sign, and the device or part of a model that it needs.
SIGNS: dict[str, tuple[Callable[[Step], tuple], str]] = {
    "01-causal-mask": (causal_mask, "attention"), "02-tensor-cores": (tensor_cores, "cuda"),
    "03-fused-adamw": (fused_optimizer, ""), "04-pinned-memory": (pinned_memory, "cuda"),
    "05-bfloat16": (bfloat16, ""), "06-native-layers": (native_layers, ""),
    "07-flash-attention": (flash_attention, "attention"), "08-torch-compile": (compiled, ""),
    "09-padded-vocabulary": (padded_vocabulary, "head"), "10-batch-size": (batch_size, ""),
    "11-merged-qkv": (merged_qkv, "attention"), "12-huge-pages": (huge_pages, "cpu"),
    "13-loss-in-graph": (loss_in_graph, "head"), "14-chunked-head": (chunked_head, "head"),
    "15-kept-memory": (kept_memory, "cpu"),
}


def foreign(step: Step) -> tuple | None:
    """Where kernels run that aren't PyTorch's own: what they do can't be seen."""
    return next(((CANT_TELL, f"the kernel {op.name} is not PyTorch's", [op])
                 for op in step.training if "." in op.name and not op.name.startswith(
                     ("profiler", "prim", "c10d", "inductor"))), None)


def missing(step: Step, needs: str) -> tuple | None:
    """The answer of every sign that needs what isn't there."""
    if needs in ONLY and step.device != needs:
        return NO_HARDWARE, ONLY[needs]
    if needs == "attention" and not step.attentions:
        return foreign(step) or (NOT_HERE, "no attention")
    if needs == "head" and not step.heads:
        return NOT_HERE, "no head whose width is the vocabulary"
    return None


def verdicts(step: Step) -> dict[str, Verdict]:
    """By the technique's patch."""
    found = {}
    for name, (sign, needs) in SIGNS.items():
        state, seen, *touched = missing(step, needs) or sign(step)
        ops = touched[0] if touched else []
        found[name] = Verdict(state, seen, "", 1.0) if ops is WHOLE else Verdict(
            state, seen, ops[0].place if ops else "", step.share(ops))
    return found
