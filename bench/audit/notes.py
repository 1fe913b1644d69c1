"""What costs time in a script and isn't one of the techniques."""

from collections import Counter
from collections.abc import Iterable, Iterator

from bench.audit.checks import count
from bench.audit.step import Op, Step


def where(ops: Iterable[Op]) -> str:
    """Returns the lines of the script that call operators most often, at most three."""
    places = Counter(op.place for op in ops if op.place)
    return ", ".join(place for place, _ in places.most_common(3))


def notes(step: Step, timed: dict) -> Iterator[str]:
    """Yields a line for each cost that the watched step or the timed run shows."""
    reads = [op for op in step.ops if op.name == "_local_scalar_dense"
             and (op.phase == "forward" or op.device == "cuda")]
    if reads:  # the host waits for the GPU
        cost = "" if step.device == "cuda" else (
            "; free on a CPU, but on a GPU the program waits for each")
        yield f"{count(len(reads), 'value')} read back from tensors in a step, {where(reads)}{cost}"
    unaligned = [op for op in step.matmuls if op.kernel and not op.kernel[1]
                 and op not in step.heads and op.name != "convolution"]
    if (share := step.flops_share(unaligned)) >= 0.02:
        yield f"{share:.0%} of the forward pass's FLOPs in matmuls of matrices whose rows don't" \
              f" fill blocks of 16 bytes, as tensor cores want them: {where(unaligned)}"
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
    if breaks := timed["breaks"]:
        reason = " ".join(next(iter(breaks)).split())
        yield f"{count(sum(breaks.values()), 'graph break')} in what is compiled: {reason[:90]}"
    if timed["new_graphs"]:
        yield f"compiled again in the timed steps, {timed['new_graphs']} times: a shape or a" \
              " value that changes from step to step"
    share = timed["waited"] / sum(timed["seconds"])
    if share >= 0.05 and timed["workers"]:
        yield f"{share:.0%} of the time waits for the DataLoader, which has" \
              f" {count(max(timed['workers']), 'worker')}"
