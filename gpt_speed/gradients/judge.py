"""Are somebody's gradients right? What the comparisons of run.py come to."""

from dataclasses import dataclass, field

from gpt_speed.gradients.tolerance import (
    TIMES_CHANGED,
    TOLERANCES,
    Deviation,
    deviations_from_numeric,
    error_of,
    wrong_ones,
)

# By so much rounding alone changes a tensor's gradient that nothing can be told, as where it is
# nothing but rounding: a softmax doesn't change with the bias of attention's keys.
HIDDEN = {"float64": 0.01, "float32": 0.01, "float16": 0.1, "bfloat16": 0.2}
SAME_LOSS = 1e-3  # relative to it: of two runs that are the same but for rounding


@dataclass
class Check:
    """One comparison of all tensors."""

    name: str
    judged: int  # how many tensors could be judged
    of: int  # how many tensors there are
    worst: float  # how far the worst of the judged tensors is off
    rounding: float | None = None  # the most that rounding alone does to one of them
    wrong: dict[str, float] = field(default_factory=dict)  # how far each wrong tensor is off
    is_numeric: bool = False

    @property
    def is_right(self) -> bool:
        """Whether something was judged, and nothing is wrong."""
        return bool(self.judged and not self.wrong)


def by_other_run(name: str, roundings: dict, type: str, facts: dict) -> Check:
    """Judges the gradients of a compiled program by how far each tensor is from that of the
    uncompiled one, and by how far rounding alone brings that: both as child.py compares them."""
    rounding_of = {tensor: error_of(distances) for tensor, distances in roundings.items()}
    deviations = {}
    for tensor, distances in facts["tensors"].items():
        rounding = rounding_of.get(tensor, 0)
        if rounding <= HIDDEN[type]:
            bound = TOLERANCES[type].floor + TIMES_CHANGED * rounding
            deviations[tensor] = Deviation(error_of(distances), bound)
    return check_of(
        name,
        deviations,
        of=len(facts["tensors"]),
        rounding=max((rounding_of.get(tensor, 0) for tensor in deviations), default=0),
    )


def by_numbers(name: str, facts: dict) -> Check:
    """Judges gradients by numeric derivatives, where those are certain enough."""
    deviations = deviations_from_numeric(
        {tensor: [direction] for tensor, direction in facts["derivatives"].items()}
    )
    return check_of(name, deviations, of=facts["weights"], is_numeric=True)


def check_of(name: str, deviations: dict[str, Deviation], **fields) -> Check:
    """Returns what a comparison comes to, by the deviations of the tensors that are judged."""
    return Check(
        name,
        judged=len(deviations),
        worst=max((deviation.error for deviation in deviations.values()), default=0),
        wrong=wrong_ones(deviations),
        **fields,
    )


def unlike(base: dict, again: dict, jitter: float) -> str:
    """Returns the first thing in which two runs differ that should be the same; "" for none."""
    if again["batch"] != base["batch"]:
        return "the first batch is another one"
    tolerated = 100 * jitter  # relative to what is jittered
    if again["weight_change"] > tolerated:
        return "the initial weights are other ones"
    losses = base["loss"], again["loss"]
    if None not in losses and differ(*losses, max(SAME_LOSS, tolerated)):
        return f"the loss is {losses[0]:.6g} and {losses[1]:.6g}"
    return ""


def differ(number: float, other: float, tolerated: float) -> bool:
    """Tells whether two numbers differ by more than is tolerated, relative to the first one."""
    return abs(number - other) > tolerated * abs(number)
