"""What an audit shows beside the techniques, as lines for people."""

from collections import Counter
from collections.abc import Iterable, Iterator

from bench.audit.checks import count
from bench.audit.step import Op, Step


def notes(step: Step, timed: dict) -> list[str]:
    """What may cost time or memory and isn't one of the techniques."""
    return [*of_operators(step), *of_ranks(step), *of_compiler(timed), *of_loader(timed)]


def where(ops: Iterable[Op]) -> str:
    """Their places in the user's files, the most frequent first."""
    places = Counter(op.place for op in ops if op.place)
    return ", ".join(place for place, _ in places.most_common(3))


def of_operators(step: Step) -> Iterator[str]:
    read = [op for op in step.ops if op.name == "_local_scalar_dense"
            and (op.phase == "forward" or op.device == "cuda")]
    if read:  # the host waits for the GPU
        cost = "" if step.device == "cuda" else (
            "; free on a CPU, but on a GPU the program waits for each")
        yield f"{count(len(read), 'value')} read back from tensors in a step, {where(read)}{cost}"

    # Tensor cores want blocks of 8. The vocabulary has its technique.
    odd = {op: sizes for op in step.products if op not in step.heads and op.name != "convolution"
           and (sizes := {size for each in op.inputs for size in each.shape[-2:]
                          if size % 8 and size > 8} - {step.vocabulary})}
    if (share := step.part(odd)) >= 0.02:
        least = ", ".join(map(str, sorted(set().union(*odd.values()))[:4]))
        yield f"{share:.0%} of the forward pass's FLOPs in products with sizes that 8 doesn't" \
              f" divide ({least}): {where(odd)}"

    double = [op for op in step.training for each in op.outputs[:1]
              if each.type == "float64" and max(each.shape, default=0) > 64]
    if double:
        yield f"{count(len(double), 'operator')} in float64: {where(double)}"


def of_ranks(step: Step) -> Iterator[str]:
    """Of DistributedDataParallel."""
    syncs = step.facts["syncs"]
    if len(syncs) > 1 and all(syncs):
        yield f"gradients are reduced in each of {len(syncs)} backward passes of a step: all but" \
              " the last belong into no_sync()"
    for model in step.facts["ddp"]:
        if model["unused"]:
            yield "find_unused_parameters=True walks the graph in each step"
        if model["compiled_first"]:
            yield "compiled before it was wrapped in DistributedDataParallel: the other way round" \
                  " communication overlaps with computing"


def of_compiler(timed: dict) -> Iterator[str]:
    if breaks := timed["breaks"]:
        reason = " ".join(next(iter(breaks)).split())
        yield f"{count(sum(breaks.values()), 'graph break')} in what is compiled: {reason[:90]}"
    if timed["new_graphs"]:
        yield f"compiled again in the timed steps, {timed['new_graphs']} times: a shape or a" \
              " value that changes from step to step"


def of_loader(timed: dict) -> Iterator[str]:
    share = timed["waited"] / sum(timed["seconds"])
    if share >= 0.05 and timed["workers"]:  # of each loader
        yield f"{share:.0%} of the time waits for the DataLoader, which has" \
              f" {count(max(timed['workers']), 'worker')}"
