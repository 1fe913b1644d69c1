"""What a watched step shows beside the techniques, as lines for people."""

from collections import Counter

from bench.audit.signs import count
from bench.audit.step import Op, Step


def notes(step: Step, timed: dict) -> list[str]:
    """What may cost time or memory and isn't one of the techniques."""
    found = [values_read(step), tensor_by_tensor(step), uneven(step), double(step),
             gradients_kept(step), *ranks(step), *compiler(timed), waiting(timed)]
    return [line for line in found if line]


def where(step: Step, numbers: list[int]) -> str:
    """Their places in the user's files, the most frequent first."""
    places = Counter(step.place(each) for each in numbers)
    return ", ".join(place for place, _ in places.most_common(3) if place)


def values_read(step: Step) -> str:
    """The host waits for the GPU where it reads a value."""
    read = [number for number, op in enumerate(step.ops) if op.name == "_local_scalar_dense"
            and (op.phase == "forward" or op.others["device"] == "cuda")]
    cost = "" if step.device == "cuda" else "; free on a CPU, on a GPU each waits for it"
    return f"{count(len(read), 'value')} read back from tensors in a step," \
           f" {where(step, read)}{cost}" if read else ""


def tensor_by_tensor(step: Step) -> str:
    """Gradients clipped one after the other."""
    weights = sum(each["tensors"] for each in step.facts["optimizers"])
    norms = [number for number, op in enumerate(step.ops) if op.name == "linalg_vector_norm"
             and number not in step.training and op.phase == "forward"]
    if len(norms) < 8 or len(norms) < weights / 2:
        return ""
    return f"gradients clipped tensor by tensor, {count(len(norms), 'norm')}:" \
           f" {where(step, norms)}"


def uneven(step: Step) -> str:
    """Sizes that fill no blocks of 8, which tensor cores want. The vocabulary has its technique."""
    def sizes(op: Op) -> set[int]:
        return {size for each in op.inputs for size in each[2][-2:]} - {step.vocabulary}

    bad = [number for number in step.products if number not in step.heads
           and step.ops[number].name != "convolution"
           and any(size % 8 and size > 8 for size in sizes(step.ops[number]))]
    share = sum(step.ops[each].flops for each in bad) / max(
        1, sum(step.ops[each].flops for each in step.products))
    if share < 0.02:
        return ""
    odd = sorted({size for each in bad for size in sizes(step.ops[each]) if size % 8 and size > 8})
    return f"{share:.0%} of the forward pass's FLOPs in products with sizes that 8 doesn't divide" \
           f" ({', '.join(map(str, odd[:4]))}): {where(step, bad)}"


def double(step: Step) -> str:
    wide = [number for number in sorted(step.training) for each in step.ops[number].outputs[:1]
            if each[2] == "float64" and len(each[1]) and max(each[1]) > 64]
    return f"{count(len(wide), 'operator')} in float64: {where(step, wide)}" if wide else ""


def gradients_kept(step: Step) -> str:
    filled = [number for number, op in enumerate(step.ops) if op.others.get("zero_grad")]
    return "gradients filled with zeros, not dropped; zero_grad(set_to_none=True) saves the pass:" \
           f" {where(step, filled)}" if filled else ""


def ranks(step: Step) -> list[str]:
    """Of DistributedDataParallel."""
    syncs = [sync for kind, sync in step.facts["events"] if kind == "ddp"]
    found = []
    if len(syncs) > 1 and all(syncs):
        found.append(f"gradients are reduced in each of {len(syncs)} backward passes of a step: all"
                     " but the last belong into no_sync()")
    for model in step.facts["ddp"]:
        if model["unused"]:
            found.append("find_unused_parameters=True walks the graph in each step")
        if model["compiled_first"]:
            found.append("compiled before it was wrapped in DistributedDataParallel: the other way"
                         " round communication overlaps with computing")
    return found


def compiler(timed: dict) -> list[str]:
    found = []
    breaks = timed.get("breaks", {})
    if breaks:
        reason = " ".join(next(iter(breaks)).split())
        found.append(f"{count(sum(breaks.values()), 'graph break')} in what is compiled:"
                     f" {reason[:90]}")
    if timed["new_graphs"] > 0:
        found.append(f"compiled again in the timed steps, {timed['new_graphs']} times: a shape or a"
                     " value that changes from step to step")
    return found


def waiting(timed: dict) -> str:
    """For the DataLoader."""
    ends = timed["ends"][timed["key"]]
    share = timed["waited"] / max(1e-9, ends[-1] - ends[0])
    if share < 0.05 or not timed["loaders"]:
        return ""
    workers = max(each[0] for each in timed["loaders"])
    return f"{share:.0%} of the time waits for the DataLoader, which has" \
           f" {count(workers, 'worker')}"
