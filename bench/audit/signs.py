"""What the watched step of a script tells of each technique: the signs.

A sign looks at where a tensor comes from, not at names: attention by hand is a product, a softmax
of it, and a product of that. Where a sign isn't certain the answer is CANT_TELL: a wrong LACKS is
a fault.
"""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from bench.audit.step import Op, Step

HAS, LACKS, CANT_TELL = "has", "lacks", "can't tell"
NOT_HERE, NO_HARDWARE = "not in this model", "not on this hardware"
HALF = "bfloat16", "float16"


class Verdict(NamedTuple):
    state: str
    seen: str
    place: str = ""  # "model.py:63"
    share: float = 0.0  # of the step's time, of the operators that it would change


def count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


# ---- A sign for each technique -----------------------------------------------------------------


def causal_mask(step: Step) -> Verdict:
    stored, unknown, masked = [], [], False
    for each in step.attentions:
        masked |= bool(each.masks) or each.causal
        for mask in each.masks:
            older = {number for number in step.sources(mask, each.ops[-1])
                     if not step.is_parameter(number)}
            if any(step.older[number]["triangle"] for number in older):
                stored.append((each, mask))
            elif older:
                unknown.append(each)
    if stored:
        each = stored[0][0]
        size = step.ops[each.ops[-1]].inputs[0][2][-2]
        return Verdict(LACKS, f"{count(len(stored), 'call')} of attention with a stored triangle,"
                              f" {size} tokens", step.place(each.ops[0]))
    if unknown:
        return Verdict(CANT_TELL, "a mask that comes from outside the step",
                       step.place(unknown[0].ops[0]))
    if not masked:
        return (foreign(step) if not step.attentions else None) or Verdict(
            NOT_HERE, "no masked attention")
    return Verdict(HAS, "the mask is made in the step, or the kernel knows that it is causal")


def tensor_cores(step: Step) -> Verdict:
    if step.device != "cuda":
        return Verdict(NO_HARDWARE, "of NVIDIA GPUs")
    kinds = step.flops(lambda _, op: op.type if op.name != "convolution" else "")  # has its own
    share = kinds["float32"] / max(1, kinds.total())
    if share < 0.01:
        return Verdict(NOT_HERE, "no products in float32")
    if step.facts["capability"][0] < 8:
        return Verdict(NO_HARDWARE, "of GPUs from compute capability 8.0 on")
    if step.facts["precision"] != "highest":
        return Verdict(HAS, f"float32 products at precision {step.facts['precision']}")
    return Verdict(LACKS, f"{share:.0%} of the FLOPs in full float32", "",
                   step.share(step.products))


def fused_optimizer(step: Step) -> Verdict:
    updates = [number for number, op in enumerate(step.ops) if op.phase == "optimizer"]
    used, states = step.facts["optimizers"], []
    compiled = sum(step.ops[each].compiled for each in updates)
    for each in used:
        if all(each["fused"]) or compiled * 2 > len(updates):
            states.append(HAS)
        elif each["own"]:
            states.append(LACKS if each["accepts"] else NOT_HERE)
        else:
            states.append(CANT_TELL)
    seen = ", ".join(sorted({each["name"] for each in used})) or "no optimizer of torch.optim"
    seen += f": {count(len(updates), 'operator')} on" \
            f" {count(sum(each['tensors'] for each in used), 'tensor')}" * bool(used)
    state = next((each for each in (LACKS, CANT_TELL, HAS) if each in states),
                 NOT_HERE if used else CANT_TELL)
    line = next((step.place(each) for each in updates), "")
    return Verdict(state, seen, line, step.share(updates))


def pinned_memory(step: Step) -> Verdict:
    if step.device != "cuda":
        return Verdict(NO_HARDWARE, "nothing is copied to a GPU")
    copies = [number for number, op in enumerate(step.ops) if op.others.get("source") == "cpu"
              and op.phase == "forward" and op.outputs[0][1]]
    if not copies:
        return Verdict(NOT_HERE, "no copies to the GPU in the step")
    bad = [each for each in copies if not (step.ops[each].others["pinned"]
                                           and step.ops[each].others.get("non_blocking"))]
    if not bad:
        return Verdict(HAS, f"{count(len(copies), 'copy').replace('copys', 'copies')}, pinned")
    how = "not pinned" if not step.ops[bad[0]].others["pinned"] else "without non_blocking=True"
    return Verdict(LACKS, f"a batch is copied {how}", step.place(bad[0]), step.share(bad))


def bfloat16(step: Step) -> Verdict:
    kinds = step.flops(lambda _, op: op.type)
    half = sum(kinds[kind] for kind in kinds if kind in HALF or "float8" in kind) / max(
        1, kinds.total())
    seen = ", ".join(f"{kind} {flops / kinds.total():.0%}" for kind, flops in kinds.most_common())
    if not step.facts["bfloat16"]:
        return Verdict(HAS if half > 0.9 else NO_HARDWARE, f"FLOPs in {seen}")
    if half > 0.9:
        masters = "float32" in {weight_type(step, each) for each in step.weights.values()}
        return Verdict(HAS, f"FLOPs in {seen}" + ", of float32 weights (autocast)" * masters)
    return Verdict(LACKS if kinds["float32"] > 0.9 * kinds.total() else CANT_TELL,
                   f"FLOPs in {seen}", step.place(step.products[0]), step.share(step.products))


def weight_type(step: Step, storage: int) -> str:
    return next((each[3] for number in step.readers[storage] for each in step.ops[number].inputs
                 if each[1] == storage), "")


def native_layers(step: Step) -> Verdict:
    def back(number: int, steps: int) -> list[Op]:
        """What made the inputs of an operator, some pointwise operators back."""
        found, waiting = [], [(each[1], number, steps) for each in step.ops[number].inputs]
        while waiting:
            storage, before, left = waiting.pop()
            maker = step.maker(storage, before)
            if maker is not None and left and not step.is_product(step.ops[maker]):
                found.append(step.ops[maker])
                waiting += [(each[1], maker, left - 1) for each in step.ops[maker].inputs]
        return found

    def is_norm(op: Op, before: int) -> bool:
        """Whether it reduces the last dimension alone, of activations."""
        if op.name not in ("mean", "var", "var_mean", "std") or not op.inputs:
            return False
        last = len(op.inputs[0][2]) - 1
        return op.others.get("dim") in ([-1], [last]) and last > 0 and step.is_data(
            op.inputs[0][1], before)

    def degrees(storage: int, before: int, left: int = 8) -> Counter:
        """The degree of the polynomial that it is, in each storage that it is made of."""
        maker = step.maker(storage, before)
        op = step.ops[maker] if maker is not None and left else None
        name = op.name.rstrip("_") if op else ""
        parts = [degrees(each[1], maker, left - 1) for each in op.inputs] if name in (
            "mul", "pow", "add", "sub", "_to_copy") else [Counter([storage])]
        total: Counter = Counter()
        for part in parts:
            total = Counter(total + part if name == "mul" else total | part)
        power = op.others.get("exponent") if name == "pow" else 1
        return Counter({each: degree * power for each, degree in total.items()})

    norms, activations, native = [], [], Counter()
    for number in sorted(step.training):
        op = step.ops[number]
        name = op.name
        if name in ("native_layer_norm", "gelu", "_fused_rms_norm", "silu"):
            native[name.replace("native_", "").replace("_fused_", "")] += 1
        elif name == "rsqrt" and op.others.get("within") == "rms_norm":
            native["rms_norm"] += 1
        elif "within" in op.others:
            continue
        elif name in ("rsqrt", "sqrt", "std") or (
                name == "pow" and op.others.get("exponent") == -0.5):
            norms += [number] * any(is_norm(each, number) for each in [op, *back(number, 3)])
        elif name == "erf":
            activations.append(number)
        elif name == "tanh":
            activations += [number] * (3 in degrees(op.inputs[0][1], number).values())
    found = norms + activations
    alone = [each for each in found if not step.ops[each].compiled]
    if alone:
        parts = [count(len(kind), what) for kind, what in ((
            [each for each in norms if each in alone], "norm"), (
            [each for each in activations if each in alone], "GELU")) if kind]
        return Verdict(LACKS, f"{' and '.join(parts)} by hand", step.place(alone[0]),
                       step.share(step.same_function(alone)))
    if found:
        return Verdict(HAS, "by hand, but the compiler fuses them")
    if not native:
        return Verdict(NOT_HERE, "neither layer norms nor GELUs")
    return Verdict(HAS, ", ".join(f"{times} {name}" for name, times in native.items()))


def flash_attention(step: Step) -> Verdict:
    by_hand = [each for each in step.attentions if each.by_hand]
    if not step.attentions:
        return foreign(step) or Verdict(NOT_HERE, "no attention")
    if not by_hand:
        math = [each for each in step.attentions if len(each.ops) > 1]
        return Verdict(HAS, count(len(step.attentions), "call") + " of PyTorch's attention"
                       + ", which runs as single operators here" * bool(math))
    first = by_hand[0].ops[0]
    scores = step.ops[first].outputs[0]
    return Verdict(LACKS, f"{count(len(by_hand), 'softmax').replace('xs', 'xes')} of scores,"
                          f" {scores[1][-2]} × {scores[1][-1]} in {scores[2]}", step.place(first),
                   step.share(each for one in by_hand for each in one.ops))


def foreign(step: Step) -> Verdict | None:
    """Where kernels run that aren't PyTorch's own: what they do can't be seen."""
    for number in sorted(step.training):
        op = step.ops[number]
        if "." in op.name and not op.name.startswith(("profiler", "prim", "c10d", "inductor")):
            return Verdict(CANT_TELL, f"the kernel {op.name} is not PyTorch's", step.place(number))
    return None


def compiled(step: Step) -> Verdict:
    flops = {state: sum(step.ops[each].flops for each in step.products
                        if step.ops[each].compiled == state) for state in (True, False)}
    share = flops[True] / max(1, sum(flops.values()))
    if 0 < share < 0.5:
        return Verdict(CANT_TELL, f"{share:.0%} of the forward pass's FLOPs are compiled")
    if share:
        return Verdict(HAS, f"{share:.0%} of the forward pass's FLOPs")
    if any(op.compiled for op in step.ops):
        return Verdict(CANT_TELL, "something is compiled, but no product of the forward pass")
    return Verdict(LACKS, "nothing is compiled", "", 1.0)


def padded_vocabulary(step: Step) -> Verdict:
    if not step.heads:
        return Verdict(NOT_HERE, "no head whose width is the vocabulary")
    share = step.share([*step.heads, *step.losses])
    state = LACKS if step.vocabulary % 64 else HAS
    return Verdict(state, f"a vocabulary of {step.vocabulary:,}", step.place(step.heads[0]), share)


def batch_size(step: Step) -> Verdict:
    used, there = step.facts["memory"], step.facts["memory_there"]
    seen = f"{used / 2**30:.1f} of {there / 2**30:.1f} GB in use"
    if step.device == "cuda":
        return Verdict(LACKS if 2 * used < 0.95 * there else CANT_TELL, seen)
    return Verdict(CANT_TELL, f"{seen}; try twice the batch")


def merged_qkv(step: Step) -> Verdict:
    merged, apart, other = [], [], []
    for each in step.attentions:
        makers = []
        for storage in (each.query, each.key, each.value):
            before = each.ops[-1 if storage == each.value else 0]
            near = [number for number in step.walk([(storage, before)], step.is_product)
                    if number in step.weights]
            makers.append(near[0] if len(near) == 1 else None)
        if None in makers:
            other.append(each)
            continue
        inputs = {step.root(next(given[1] for given in step.ops[number].inputs[::-1]
                                 if step.root(given[1], number) != step.weights[number]
                                 and len(given[2]) > 1), number) for number in makers}
        if len(set(makers)) == 1:
            merged.append(each)
        elif len(set(makers)) == 3 and len(inputs) == 1:
            apart.append((each, makers))
        else:
            other.append(each)
    if apart:
        touched = [number for _, makers in apart for number in makers]
        return Verdict(LACKS, f"{count(len(apart), 'call')} of attention with three products of one"
                              " input", step.place(apart[0][1][0]), step.share(touched))
    if merged:
        return Verdict(HAS, f"query, key and value from one product, {len(merged)} times")
    if other:
        return Verdict(CANT_TELL, "where query, key and value come from isn't plain")
    return foreign(step) or Verdict(NOT_HERE, "no attention")


def huge_pages(step: Step) -> Verdict:
    if step.device != "cpu":
        return Verdict(NO_HARDWARE, "a CPU's")
    state = step.facts["huge_pages"]
    if state == "never":
        return Verdict(NO_HARDWARE, "the system has them switched off")
    return Verdict(LACKS if state == "not set" else HAS, f"THP_MEM_ALLOC_ENABLE {state}"
                   if "set" in state else "the system gives them to every program", "",
                   1.0 if state == "not set" else 0.0)


def loss_in_graph(step: Step) -> Verdict:
    if not step.heads:
        return Verdict(NOT_HERE, "no head whose width is the vocabulary")
    if not step.losses:
        return foreign(step) or Verdict(CANT_TELL, "nothing was seen to read the logits")
    inside = {step.ops[each].compiled for each in step.losses}
    share = step.share([*step.heads, *step.losses])
    place = step.place(step.losses[-1])
    if inside == {True}:
        return Verdict(HAS, "the loss is compiled", place)
    if inside == {False}:
        return Verdict(LACKS, "the loss is outside what is compiled"
                       if any(op.compiled for op in step.ops) else "nothing is compiled", place,
                       share)
    return Verdict(CANT_TELL, "a part of the loss is compiled", place, share)


def chunked_head(step: Step) -> Verdict:
    if not step.heads:
        return Verdict(NOT_HERE, "no head whose width is the vocabulary")
    if len(step.heads) > len(step.lookups):
        return Verdict(HAS, f"{len(step.heads)} products with the head's weight")
    shape = step.ops[step.heads[0]].outputs[0][1]
    return Verdict(LACKS, f"logits of {' × '.join(f'{size:,}' for size in shape)} at once",
                   step.place(step.heads[0]), step.share([*step.heads, *step.losses]))


def kept_memory(step: Step) -> Verdict:
    if step.device != "cpu":
        return Verdict(NO_HARDWARE, "a CPU's")
    kept = step.facts["kept"]
    if kept is None:
        return Verdict(CANT_TELL, "memory isn't glibc's")
    return Verdict(HAS if kept else LACKS, "large pieces "
                   + ("stay with the process" if kept else "go back to Linux when they are freed"),
                   "", 0.0 if kept else 1.0)


# By the name of the technique's patch.
SIGNS: dict[str, Callable[[Step], Verdict]] = {
    "01-causal-mask": causal_mask, "02-tensor-cores": tensor_cores,
    "03-fused-adamw": fused_optimizer, "04-pinned-memory": pinned_memory,
    "05-bfloat16": bfloat16, "06-native-layers": native_layers,
    "07-flash-attention": flash_attention, "08-torch-compile": compiled,
    "09-padded-vocabulary": padded_vocabulary, "10-batch-size": batch_size,
    "11-merged-qkv": merged_qkv, "12-huge-pages": huge_pages, "13-loss-in-graph": loss_in_graph,
    "14-chunked-head": chunked_head, "15-kept-memory": kept_memory,
}


def verdicts(step: Step) -> dict[str, Verdict]:
    """By the technique's patch."""
    return {name: sign(step) for name, sign in SIGNS.items()}
