"""Which techniques the watched step has and which it lacks.

A check follows data flow, not names: attention by hand is a matmul, a softmax of it, and a matmul
of that. Where the evidence isn't certain the state is CANT_TELL: a wrong LACKS is a fault. So is
one that would gain nothing: its state is NO_GAIN.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from gpt_speed.audit.attention import MATH, Attention
from gpt_speed.audit.graph import Op, Tensor, to_matmuls
from gpt_speed.audit.layers import layers_of
from gpt_speed.audit.step import Step
from gpt_speed.common import counted, listed, memory_text

HAS, LACKS, CANT_TELL = "has", "missing", "unknown"
NO_GAIN = "no gain here"  # it is missing, and would change nothing
NOT_HERE, NO_HARDWARE = "not in this model", "not on this hardware"
LEAST_SHARE = 0.005  # of the step's time; less is written as 0%
LARGE = 2**16  # bytes that an operator moves; to move half of fewer takes it as long
CHUNK = 1024  # tokens, at least, in a chunk of technique 14's ChunkedLoss
NATIVE = "native_layer_norm", "gelu", "_fused_rms_norm", "silu"
PYTORCHS = "profiler", "prim", "c10d", "inductor"  # namespaces of operators, beside aten


class Finding(NamedTuple):
    """What a check says of one technique."""

    state: str
    evidence: str
    ops: Sequence[Op] = ()  # that the technique would change
    share: float | None = None  # of the step's time that it would change; else that of `ops`
    beside: float = 0.0  # what it may save elsewhere, as a share of the step's time
    place: str = ""  # the script's line to change, if that isn't where the operators run
    needs: str = ""  # what the technique takes here, beside its lines
    saved: float | None = None  # the part of that share which it saves; None: as on our model

    @property
    def where(self) -> str:
        """The script's line to change, as "model.py:63": that with the first of the operators, or
        another one."""
        return self.place or (self.ops[0].place if self.ops else "")


class OlderMask(NamedTuple):
    """What a mask of attention is made of that is older than the step, and where it is applied."""

    call: Attention
    op: Op  # which applies it
    source: dict  # as watch.describe_older describes it


def causal_mask(step: Step) -> Finding:
    """Asks whether the causal mask is made on the fly: a stored one is read in each call."""
    masks = [mask for call in step.attentions for mask in older_masks(call)]
    stored = [mask for mask in masks if mask.source["triangle"]]
    if stored:
        return stored_masks(stored)
    if masks:
        evidence = "a mask that comes from outside the step"
        return Finding(CANT_TELL, evidence, [mask.op for mask in masks])
    if any(call.masks or call.causal for call in step.attentions):
        evidence = "the mask is made in the step, or the kernel knows that it is causal"
        return Finding(HAS, evidence)
    return Finding(NOT_HERE, "no masked attention")


def older_masks(call: Attention) -> list[OlderMask]:
    """Returns what a call's masks are made of that is older than the step."""
    return [OlderMask(call, op, source) for op, mask in call.masks for source in mask.sources()]


def stored_masks(masks: list[OlderMask]) -> Finding:
    """Returns the finding where calls read stored triangles, each of them maybe more than one."""
    calls = counted(len({id(mask.call) for mask in masks}), "call")
    ops = [*dict.fromkeys(mask.op for mask in masks)]
    tokens = ops[0].outputs[0].shape[-2]
    return Finding(LACKS, f"{calls} of attention with a stored triangle, {tokens} tokens", ops)


def tensor_cores(step: Step) -> Finding:
    """Asks whether float32 matmuls run in TF32."""
    # Convolutions have a setting of their own.
    single = [op for op in step.matmuls if op.type == "float32" and op.name != "convolution"]
    share = step.flops_share(single)
    if share < 0.01:
        return Finding(NOT_HERE, "no matmuls in float32")
    if step.lacks_bfloat16:
        return Finding(NO_HARDWARE, "of GPUs from compute capability 8.0 on")
    if step.facts["tf32"]:
        return Finding(HAS, "float32 matmuls in TF32")
    return Finding(LACKS, f"{share:.0%} of the FLOPs in full float32", single)


def fused_optimizer(step: Step) -> Finding:
    """Asks whether an optimizer that could be fused is."""
    optimizers = step.facts["optimizers"]
    updates = step.updates
    if not optimizers:
        return Finding(CANT_TELL, "no optimizer of torch.optim")
    names = ", ".join(sorted({optimizer["name"] for optimizer in optimizers}))
    tensors = counted(sum(optimizer["tensors"] for optimizer in optimizers), "tensor")
    evidence = f"{names}: {counted(len(updates), 'operator')} on {tensors}"
    is_compiled = 2 * sum(op.compiled for op in updates) > len(updates)
    slow = [optimizer for optimizer in optimizers if not optimizer["fused"] and not is_compiled]
    first = (slow or optimizers)[0]  # where it is made, fused=True goes
    state = state_of_optimizers(slow, len(optimizers))
    return Finding(
        state,
        evidence,
        updates,
        share=step.update_share,
        beside=step.pages_share,
        place=first["place"],
    )


def state_of_optimizers(slow: list[dict], count: int) -> str:
    """Returns the state of a step with `count` optimizers, of which some are neither fused nor
    compiled."""
    if any(optimizer["own"] and optimizer["accepts"] for optimizer in slow):
        return LACKS
    if not all(optimizer["own"] for optimizer in slow):
        return CANT_TELL
    return HAS if len(slow) < count else NOT_HERE


def pinned_memory(step: Step) -> Finding:
    """Asks whether batches are copied from pinned memory, without waiting."""
    copies = [
        op
        for op in step.ops
        if op.scalars.get("source") == "cpu" and op.phase == "forward" and op.outputs[0].shape
    ]
    if not copies:
        return Finding(NOT_HERE, "no copies to the GPU in the step")
    for flag, how in (("pinned", "not pinned"), ("non_blocking", "without non_blocking=True")):
        slow = [op for op in copies if not op.scalars.get(flag)]
        if slow:
            return Finding(LACKS, f"a batch is copied {how}", slow)
    return Finding(HAS, "copies from pinned memory")


def bfloat16(step: Step) -> Finding:
    """Asks whether nearly all FLOPs are in 16 bits."""
    shares = {type: flops / step.flops.total() for type, flops in step.flops.most_common()}
    half = sum(share for type, share in shares.items() if type not in ("float32", "float64"))
    evidence = "FLOPs in " + ", ".join(f"{type} {share:.0%}" for type, share in shares.items())
    if step.lacks_bfloat16:
        return Finding(NO_HARDWARE, evidence)
    if half > 0.9:
        return Finding(HAS, evidence)
    if step.facts["dtype"] != "bfloat16":
        return Finding(NO_HARDWARE, evidence)
    return float32_step(step, evidence, LACKS if shares.get("float32", 0) > 0.9 else CANT_TELL)


def float32_step(step: Step, evidence: str, state: str) -> Finding:
    """Returns what bfloat16 may gain by autocast: the time that large matmuls save here, of those
    which move many bytes; smaller ones take as long in 16 bits."""
    large = {op.origin for op in step.kinds if op.kernel and op.kernel[-1] >= LARGE}
    matmuls = [op for op in step.matmuls if op in large]
    share = step.time_share(matmuls)
    if share < LEAST_SHARE:
        return Finding(NO_GAIN, f"{evidence}; operators are too small to be faster in 16 bits")
    rates = step.facts.get("rates", {})  # a known GPU has none
    if "bfloat16" not in rates:
        return Finding(state, evidence, matmuls, share=share)
    speedup = rates["bfloat16"] / rates["float32"]
    evidence += f"; large matmuls are {speedup:.1f}× as fast in bfloat16 here"
    return Finding(state, evidence, matmuls, share=share, saved=1 - 1 / speedup)


def native_layers(step: Step) -> Finding:
    """Asks whether layer norms and GELUs are single kernels."""
    layers = [*layers_of(step.training)]
    by_hand = {layer.op: layer.name for layer in layers if layer.by_hand and not layer.op.compiled}
    if by_hand:
        return layers_by_hand(step, by_hand)
    if layers or any(op.name in NATIVE for op in step.training):
        return Finding(HAS, "PyTorch's own, or fused by the compiler")
    return Finding(NOT_HERE, "neither layer norms nor GELUs")


def layers_by_hand(step: Step, names: dict[Op, str]) -> Finding:
    """Returns the finding where there are layers by hand, of which one operator and the name is
    given. The technique changes what else their functions do, too, except matmuls."""
    numbers = Counter(names.values()).items()
    evidence = " and ".join(counted(number, name) for name, number in numbers) + " by hand"
    functions = {op.function for op in names}
    others = (op for op in step.training if op.function in functions and not op.is_matmul)
    return Finding(LACKS, evidence, [*names, *others])


def flash_attention(step: Step) -> Finding:
    """Asks whether attention is PyTorch's function."""
    by_hand = [call for call in step.attentions if call.by_hand]
    if not by_hand:
        return kernel_of_attention(step)
    plain = [call for call in by_hand if not call.inexpressible]
    if not plain:
        name = by_hand[0].inexpressible
        evidence = f"{name} between scores and values: FlexAttention may do it"
        return Finding(CANT_TELL, evidence, ops_of(by_hand))
    scores = plain[0].ops[0].outputs[0]
    size = f"{scores.shape[-2]} × {scores.shape[-1]} scores in {scores.type}"
    evidence = f"{counted(len(plain), 'call')} of attention by hand, {size}"
    return Finding(LACKS, evidence, ops_of(plain))


def kernel_of_attention(step: Step) -> Finding:
    """Asks which kernel PyTorch's attention chose: on a GPU, math is as slow as one by hand."""
    slow = [call for call in step.attentions if call.kernel == MATH]
    if step.device == "cuda" and slow:
        evidence = f"PyTorch's attention ran as its math kernel: {reason_for_math(slow[0])}"
        return Finding(LACKS, evidence, ops_of(slow))
    kernels = dict.fromkeys(call.kernel for call in step.attentions)
    return Finding(HAS, f"PyTorch's attention, by {listed(kernels)}")


def reason_for_math(call: Attention) -> str:
    """Returns what PyTorch says against each fused kernel."""
    notes = [op.scalars["not_fused"] for op in call.ops if "not_fused" in op.scalars]
    lines_of: dict[str, list[str]] = notes[0] if notes else {}
    reasons = [
        f"{kernel}: {' '.join(lines) or 'not available'}" for kernel, lines in lines_of.items()
    ]
    return "; ".join(reasons) or "why isn't known"


def ops_of(calls: list[Attention]) -> list[Op]:
    """Returns the operators of all calls of attention."""
    return [op for call in calls for op in call.ops]


def compiled(step: Step) -> Finding:
    """Asks whether torch.compile runs at least half of the forward pass."""
    share = step.flops_share(op for op in step.matmuls if op.compiled)
    if not step.is_compiled:
        return Finding(LACKS, "nothing is compiled", share=1.0)
    state = HAS if share >= 0.5 else CANT_TELL
    return Finding(state, f"{share:.0%} of the forward pass's FLOPs are compiled")


def padded_vocabulary(step: Step) -> Finding:
    """Asks whether the vocabulary is a multiple of 64."""
    evidence = f"a vocabulary of {step.vocabulary:,}"
    padding = -step.vocabulary % 64
    if padding > step.vocabulary / 16:
        return Finding(NOT_HERE, f"{evidence}: padded it would cost more")
    return Finding(LACKS if padding else HAS, evidence, [*step.heads, *step.losses])


def batch_size(step: Step) -> Finding:
    """Asks whether twice the memory would fit."""
    used, total = step.facts["memory"], step.facts["memory_total"]
    passes = f", {step.backwards} backward passes a step" if step.backwards > 1 else ""
    hint = "" if step.device == "cuda" else "; try twice the batch"
    fits = step.device == "cuda" and 2 * used < 0.95 * total
    evidence = f"{memory_text(used, total)} in use{passes}{hint}"
    return Finding(LACKS if fits else CANT_TELL, evidence)


def merged_qkv(step: Step) -> Finding:
    """Asks whether one matmul makes query, key and value."""
    projections = [projections_of(step, call) for call in step.attentions]
    apart = [ops for ops in projections if len(ops) in (2, 3) and read_one_input(step, ops)]
    if apart:
        matmuls = "three" if len(apart[0]) == 3 else "two"
        evidence = f"{counted(len(apart), 'call')} of attention with {matmuls} matmuls of one input"
        return Finding(LACKS, evidence, [op for ops in apart for op in ops])
    if any(len(ops) == 1 for ops in projections):
        return Finding(HAS, "query, key and value from one matmul")
    return Finding(CANT_TELL, "query, key and value don't plainly come from one input")


def projections_of(step: Step, call: Attention) -> list[Op]:
    """Returns the matmuls with weights that make query, key and value."""
    makers = to_matmuls(call.inputs)
    return [op for op in step.weights if op in makers]


def read_one_input(step: Step, matmuls: list[Op]) -> bool:
    """Tells whether matmuls with weights multiply one and the same tensor."""
    inputs = {
        root.storage
        for op in matmuls
        for root in map(Tensor.root, op.inputs)
        if len(root.shape) > 1 and root.storage != step.weights[op].storage
    }
    return len(inputs) == 1


def huge_pages(step: Step) -> Finding:
    """Asks whether memory comes in pages of 2 MiB."""
    match step.facts["huge_pages"]:
        case None:
            return Finding(NO_HARDWARE, "the system has none, or has them switched off")
        case True:
            return Finding(HAS, "set for this program or for all")
        case _:
            return slow_pages(step, "THP_MEM_ALLOC_ENABLE not set")


def slow_pages(step: Step, evidence: str) -> Finding:
    """Returns the finding where Linux makes more pages than it has to, if they take it time."""
    share = step.facts["system"]
    if share < LEAST_SHARE:
        return Finding(NO_GAIN, "Linux needs hardly any time for new pages of memory")
    return Finding(LACKS, evidence, share=share)


def loss_in_graph(step: Step) -> Finding:
    """Asks whether the loss is compiled."""
    ops = [*reversed(step.losses), *step.heads]
    if not step.losses:
        return Finding(CANT_TELL, "no operator that reads the logits", ops)
    if all(op.compiled for op in step.losses):
        return Finding(HAS, "the loss is compiled", ops)
    if any(op.compiled for op in step.losses):
        return Finding(CANT_TELL, "a part of the loss is compiled", ops)
    return Finding(LACKS, "the loss isn't compiled", ops)


def chunked_head(step: Step) -> Finding:
    """Asks whether logits are computed chunk by chunk."""
    by_weight = defaultdict(list)
    for head in step.heads:
        by_weight[step.weights[head].storage].append(head)
    most = max(by_weight.values(), key=len)
    if are_chunks(step, most):
        return Finding(HAS, f"{len(most)} matmuls with the head's weight")
    if step.vocabulary <= widest_layer(step):
        return Finding(NOT_HERE, "logits are no larger than what another layer makes")
    return whole_logits(step, len(by_weight))


def are_chunks(step: Step, heads: list[Op]) -> bool:
    """Tells whether matmuls with one weight share the step's tokens. A forward pass may look tokens
    up twice, a loss may take a backward pass per chunk, and several losses may each read the
    logits of all tokens."""
    if len(heads) <= min(len(step.lookups), step.backwards):
        return False
    shapes = [head.outputs[0].shape for head in heads]  # or those of gradients, within the loss
    tokens = sum(math.prod(shape[:-1]) for shape in shapes if shape[-1] == step.vocabulary)
    return tokens <= step.backwards * max(map(indices_of, step.lookups))


def indices_of(lookup: Op) -> int:
    """Counts what is looked up."""
    return sum(math.prod(index.shape) for index in lookup.passed("indices"))


def widest_layer(step: Step) -> int:
    """Returns the most numbers that a layer other than the head reads or makes for a token."""
    widths = (max(step.weights[op].whole_shape) for op in step.weights if op not in step.heads)
    return max(widths, default=0)


def whole_logits(step: Step, count: int) -> Finding:
    """Returns the finding where each of `count` heads computes all logits of a micro-batch at
    once."""
    head = step.heads[0]
    *sizes, vocabulary = head.outputs[0].shape
    shape = " × ".join(f"{size:,}" for size in (*sizes, vocabulary))
    evidence = f"logits of {shape} at once"
    if count > 1:
        evidence += f" in each of {count} heads"
    ops = [*step.heads, *step.losses]
    if math.prod(sizes) <= CHUNK:
        reason = f"{evidence}, while a chunk of technique 14 has at least {CHUNK:,} tokens"
        return Finding(NO_GAIN, reason, ops)
    needs = ""
    if step.weights[head].type != head.type:
        needs = "under autocast, cast its input and weight before"
    return Finding(LACKS, evidence, ops, needs=needs)


def kept_memory(step: Step) -> Finding:
    """Asks whether the allocator keeps what is freed."""
    if step.facts["shares_memory"]:
        return Finding(NO_HARDWARE, "the GPU shares the host's memory")
    match step.device, step.facts["kept"]:
        case "cuda", True:
            return Finding(HAS, "expandable segments")
        case "cuda", _:
            evidence = "PYTORCH_CUDA_ALLOC_CONF not set to expandable_segments:True"
            return Finding(LACKS, evidence)
        case _, None:
            return Finding(CANT_TELL, "memory isn't glibc's")
        case _, True:
            return Finding(HAS, "large pieces stay with the process")
        case _:
            return slow_pages(step, "large pieces go back to Linux when freed")


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


def not_applicable(step: Step, needs: str) -> Finding | None:
    """Returns the finding of a check whose device or part of a model isn't there."""
    if needs == "cuda" and step.device != "cuda":
        return Finding(NO_HARDWARE, "only on NVIDIA GPUs")
    if needs == "cpu" and step.device != "cpu":
        return Finding(NO_HARDWARE, "only on CPUs")
    if needs == "attention" and not step.attentions:
        return no_attention(step)
    if needs == "head" and not step.heads:
        return no_head(step)
    return None


def no_head(step: Step) -> Finding:
    """Returns the finding where no head was seen. There is none if the step shows how the loss
    follows from the tokens, and no last matmul makes more numbers than it reads."""
    evidence = "no head whose width is the vocabulary"
    if not step.lookups:
        return Finding(NOT_HERE, evidence)
    is_whole = not step.loss_path.isdisjoint(step.lookups)
    ends = (op for op in step.matmuls if op in step.loss_path and op not in step.before_matmuls)
    if not is_whole or any(map(is_of_others, step.loss_path)) or any(map(step.widens, ends)):
        return Finding(CANT_TELL, evidence)
    return Finding(NOT_HERE, evidence)


def no_attention(step: Step) -> Finding:
    """Returns the finding where no attention was seen: a kernel of others may be one."""
    for op in filter(is_of_others, step.training):
        return Finding(CANT_TELL, f"the kernel {op.name} is not PyTorch's", [op])
    return Finding(NOT_HERE, "no attention")


def is_of_others(op: Op) -> bool:
    """Tells whether an operator isn't PyTorch's own."""
    return "." in op.name and not op.name.startswith(PYTORCHS)


def check(step: Step) -> dict[str, Finding]:
    """Returns the finding of each technique, by its patch."""
    findings = {}
    for patch, (technique_check, needs) in CHECKS.items():
        finding = not_applicable(step, needs) or technique_check(step)
        if finding.ops and finding.share is None:
            finding = finding._replace(share=step.time_share(finding.ops))
        findings[patch] = finding
    return findings
