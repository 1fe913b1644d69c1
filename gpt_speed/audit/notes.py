"""What a watched step costs beside the techniques. A note is a line, or "" without that cost."""

from collections import Counter

from gpt_speed.audit.graph import DROPOUTS, Op, walk
from gpt_speed.audit.step import Step
from gpt_speed.common import counted


def notes_of(step: Step, timed: dict) -> list[str]:
    """Returns a line for each cost that isn't one of the techniques."""
    lines = (
        *notes_of_masks(step),
        note_of_bfloat16(step),
        note_of_values_read(step),
        note_of_reductions(step),
        note_of_uneven_means(step),
        note_of_accumulation(step),
        note_of_graph_breaks(timed),
        note_of_recompilations(timed),
        note_of_waiting(timed),
    )
    return [line for line in lines if line]


def notes_of_masks(step: Step) -> list[str]:
    """Tells where dropout that is computed again in the backward pass has masks of its own."""
    drawn = [op for op in step.training if op.name in DROPOUTS or op.scalars.get("dropout_p")]
    in_checkpoint = [op for op in drawn if op.scalars.get("forgets_random")]
    budget = step.facts["budget"]
    under_budget = [op for op in drawn if op.compiled and budget < 1]
    lines = []
    if in_checkpoint:
        dropout = "dropout in activation checkpointing with preserve_rng_state=False"
        lines.append(
            f"{with_places(dropout, in_checkpoint)}: its masks differ in the backward pass, so that"
            " gradients are wrong. `gpt-speed gradients` tells which"
        )
    if under_budget:
        dropout = f"dropout under torch.compile's activation_memory_budget of {budget:g}"
        lines.append(
            f"{with_places(dropout, under_budget)}: where the backward pass computes it again, its"
            " masks differ, and gradients are wrong. `gpt-speed gradients` tells which"
        )
    return lines


def note_of_bfloat16(step: Step) -> str:
    """Tells whether a GPU without units for bfloat16 computes in it."""
    if not step.lacks_bfloat16 or not step.flops["bfloat16"]:
        return ""
    share = step.flops["bfloat16"] / step.flops.total()
    return (
        f"{share:.0%} of the FLOPs are in bfloat16, for which GPUs below compute capability 8.0"
        f" have no units (this one: {step.facts['capability']}), though"
        " torch.cuda.is_bf16_supported() is True: float16 with a GradScaler is faster"
    )


def with_places(words: str, ops: list[Op]) -> str:
    """Writes words, then the three lines of the script that have most of some operators; none of
    what only libraries call."""
    places = Counter(op.place for op in ops if op.place).most_common(3)
    return ", ".join([words, *(place for place, _ in places)])


def note_of_values_read(step: Step) -> str:
    """Tells which of the model's values the program waits for, as loss.item() makes it do."""
    reads = [
        op
        for op in step.ops
        if op.name == "_local_scalar_dense"
        and op.phase == "forward"
        and op.device == step.device
        and is_computed(op)
    ]
    if not reads:
        return ""
    values = f"{counted(len(reads), 'value')} read back from tensors in a step, as .item() does"
    return f"{with_places(values, reads)}: on a GPU the program waits for each"


def note_of_reductions(step: Step) -> str:
    """Tells whether ranks reduce gradients more often than once a step."""
    syncs = step.facts["syncs"]
    if len(syncs) < 2 or not all(syncs):
        return ""
    return (
        f"gradients are reduced in each of {len(syncs)} backward passes of a step: put all"
        " but the last into no_sync()"
    )


def note_of_uneven_means(step: Step) -> str:
    """Tells whether tokens, or samples, of small micro-batches count more."""
    sizes, unit = uneven_means(step), "token" if step.lookups else "sample"
    if not sizes:
        return ""
    return (
        f"the loss is a mean over each of {len(sizes)} micro-batches of unequal size"
        f" ({min(sizes):,.0f} to {max(sizes):,.0f} {unit}s): a {unit} of a small one counts"
        f" more. Divide sums by the {unit}s of all"
    )


def note_of_accumulation(step: Step) -> str:
    """Tells whether larger micro-batches would fit."""
    fitting = fitting_micro_batches(step)
    if fitting < 2:
        return ""
    return (
        f"a step accumulates {step.backwards} micro-batches of one size, of which {fitting}"
        " fit the GPU at once: fewer, larger ones leave the loss as it is"
    )


def note_of_graph_breaks(timed: dict) -> str:
    """Tells where torch.compile leaves code out."""
    breaks, places = timed["breaks"], timed["breaks_at"]
    if not breaks:
        return ""
    number = counted(len(places) or sum(breaks.values()), "graph break")
    reason = next(iter(breaks)).splitlines()[0][:90]
    return (
        f"{', '.join([number, *places[:5]])}: what lies between them isn't compiled ({reason})."
        " tlparse explains each"
    )


def note_of_recompilations(timed: dict) -> str:
    """Tells how often torch.compile compiled again during the timed steps."""
    if not timed["new_graphs"]:
        return ""
    times = f"torch.compile compiled again {timed['new_graphs']} times after the warm-up"
    places = timed["recompiled_at"][:5]
    return f"{', '.join([times, *places])}: a shape or a value changes from step to step"


def note_of_waiting(timed: dict) -> str:
    """Tells which share of the time is spent waiting for batches."""
    waited = timed["waited"] / sum(timed["seconds"])
    if waited < 0.05:
        return ""
    return (
        f"for {waited:.0%} of the time the script waits for its DataLoader, which has"
        f" num_workers={timed['workers']}"
    )


def is_computed(op: Op) -> bool:
    """Tells whether parameters went into what an operator reads. Other values, such as places to
    cut a batch from, may be on the CPU anyway."""
    return any(tensor.is_parameter for maker in [op, *walk(op.inputs)] for tensor in maker.inputs)


def uneven_means(step: Step) -> list[float]:
    """Returns the numbers of targets of a step's micro-batches if they differ and each one's loss
    is their mean, which nothing but constants weights before its backward pass."""
    sizes: list = []
    for begin in (op for op in step.ops if op.name == "backward"):
        chain = [*walk(begin.inputs, lambda op: op.name == "nll_loss_forward")]
        if chain and all(len(op.inputs) == 1 for op in chain[:-1]):
            sizes += [chain[-1].scalars.get("tokens")]
    return sizes if None not in sizes and len({*sizes}) > 1 else []


def fitting_micro_batches(step: Step) -> int:
    """Returns how many micro-batches of a step fit a GPU at once, if all are alike. None takes more
    memory than the whole process did; where memory is tight, 1."""
    shapes = {tuple(head.outputs[0].shape) for head in step.heads}
    alike = len(shapes) == 1 and len(step.heads) == len(step.lookups) == step.backwards
    if step.device != "cuda" or not alike:
        return 1
    return min(step.backwards, int(0.95 * step.facts["memory_total"] / step.facts["memory"]))
