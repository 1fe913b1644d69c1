"""What is said of a script's gradients: a text, and JSON."""

from math import isfinite
from operator import itemgetter

from gpt_speed.common import counted, script_name
from gpt_speed.gradients.judge import Check
from gpt_speed.gradients.order import MENDS
from gpt_speed.gradients.run import Answer

LISTED = 5  # wrong tensors that are named


def screen(answer: Answer) -> str:
    """Writes an answer in Markdown."""
    head = (
        f"First gradients of {script_name(answer.command)}:"
        f" {counted(answer.tensors, 'tensor')}, {counted(answer.backwards, 'backward pass', 'es')}"
        f" before the first update: **{answer.verdict}**"
    )
    lines = [head, "", *(f"- {line_of(check)}" for check in answer.checks)]
    lines += [f"- {note}" for note in answer.notes]
    for check in answer.wrong:
        worst = sorted(check.wrong.items(), key=itemgetter(1), reverse=True)
        lines += ["", f"Wrong, {check.name}:", ""]
        lines += [f"- `{tensor}`: off by {error:.0%}" for tensor, error in worst[:LISTED]]
        if len(worst) > LISTED:
            lines.append(f"- and {len(worst) - LISTED} more")
    if answer.mends:
        lines += ["", "Right with each of these:", ""]
        lines += [f"- {MENDS[mend].words}" for mend in answer.mends]
    return "\n".join(lines) + "\n"


def line_of(check: Check) -> str:
    """Writes one comparison."""
    if not check.judged:
        return f"{check.name}: nothing could be told, for rounding"
    state = "right"
    if check.wrong:
        state = "wrong"
    tensors = f"{check.judged} of {counted(check.of, 'tensor')}"
    line = f"{check.name}: {state}, {tensors}, the worst is off by {check.worst:.0e}"
    if check.rounding is None:
        return line
    return f"{line} (by rounding alone {check.rounding:.0e})"


def as_json(answer: Answer) -> dict:
    """Returns what --json prints."""
    return dict(
        version=1,
        command=answer.command,
        verdict=answer.verdict,
        tensors=answer.tensors,
        backward_passes=answer.backwards,
        checks=[
            dict(
                name=check.name,
                judged=check.judged,
                of=check.of,
                worst=finite(check.worst),
                rounding=check.rounding,
                wrong={tensor: finite(error) for tensor, error in check.wrong.items()},
            )
            for check in answer.checks
        ],
        mends=[MENDS[mend].words for mend in answer.mends],
        notes=answer.notes,
    )


def finite(error: float) -> float | None:
    """Returns None for an infinite error, which JSON doesn't have."""
    if not isfinite(error):
        return None
    return error
