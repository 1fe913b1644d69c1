"""Runs somebody's script twice until some of its steps are over: timed, then watched."""

import json
import os
import re
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from gpt_speed import children
from gpt_speed.audit.order import Order
from gpt_speed.audit.step import Step
from gpt_speed.common import UserError, counted, script_name

CHILD = Path(__file__).with_name("child.py")
OWN = str(CHILD.parent)  # the folder of what runs beside the script
WATCHED = 3  # steps
NO_STEP = 3  # the exit code where no step was seen that can be judged
# What a user reads while nothing else is printed for a while.
BEGINS = (
    "{script} runs twice, until it has made some steps, which are timed, then recorded: mostly a"
    " minute or two"
)
# What PyTorch's logs say since 2.5, by what a report calls it.
LINES = dict(
    breaks_at=r"Graph break .*in user code at (\S+:\d+)",
    recompiled_at=r"Recompiling function \S+ in (\S+:\d+)",
)


def timed_and_watched(
    command: list[str], minutes: float, python: str = sys.executable
) -> tuple[dict, dict]:
    """Returns the reports of child.py on the timed and the watched run of a command: a script,
    or "-m" and a module, with arguments. Raises UserError, which says what to do."""
    children.keep_stdin()
    if not int(os.environ.get("RANK") or 0):
        print(BEGINS.format(script=script_name(command)), file=sys.stderr, flush=True)
    timed = run(command, Order("time"), minutes, python)
    check_steps(timed, script_name(command))
    return timed, watched_run(command, timed, minutes, python)


def watched_run(command: list[str], timed: dict, minutes: float, python: str) -> dict:
    """Returns the report on a watched run, by that on the timed one. Raises UserError."""
    watched = run(command, watch_order(timed), minutes, python)
    check_matmuls(watched, script_name(command))
    if not timed["graphs"]:  # as with TORCH_COMPILE_DISABLE=1
        for op in watched["ops"]:
            op["compiled"] = False
    return watched


def watch_order(timed: dict) -> Order:
    """Returns what the watched run has to do: to skip the first steps, which differ, and to watch
    some. It makes no more steps than the timed run did, which made few where they are slow."""
    skipped = min(2, timed["steps"] - 1)
    steps = min(WATCHED, timed["steps"] - skipped)
    return Order("watch", key=timed["key"], skipped=skipped, steps=steps)


def check_steps(timed: dict, script: str) -> None:
    """Raises UserError unless a script made two steps."""
    if timed["key"] is None:
        cause = "no backward pass, or no update by an optimizer of torch.optim"
        if timed["children"] > 1:
            cause = (
                f"its children computed for {timed['children']:.0f} s. Start one of them, or let"
                " torchrun or accelerate launch start `-m gpt_speed audit` with it"
            )
        raise UserError(f"{script} trained nothing in its own process: {cause}", NO_STEP)
    if timed["steps"] < 2:
        raise UserError(
            f"{script} ended after {counted(timed['steps'], 'step')}, and an audit needs 2:"
            " let it train longer",
            NO_STEP,
        )


def check_matmuls(watched: dict, script: str) -> None:
    """Raises UserError unless the watched step multiplies matrices to train."""
    if any(op["flops"] for op in watched["ops"]) and Step(watched).flops:
        return
    if any(op["origin"] is not None for op in watched["ops"]):
        raise UserError(
            f"a step of {script} multiplies no matrices: the techniques are for models that do",
            NO_STEP,
        )
    raise UserError(
        f"no matmul was seen in a step of {script}: let it train in the main thread of its own"
        " process, on dense tensors",
        NO_STEP,
    )


def run(command: list[str], order: Order, minutes: float, python: str) -> dict:
    """Returns the report of a child. Raises UserError."""
    environment = ranks_of_their_own() if order.is_watched else {}
    facts, log = report_of(command, order, environment, minutes, python)
    facts |= facts_in(log)
    if facts["how"] == "failed" or order.is_watched and facts["how"] != "watched":
        print(log, file=sys.stderr, end="")
        when = " while it was watched" if order.is_watched else ""
        raise UserError(f"{script_name(command)} failed{when}: {facts['error'] or facts['how']}")
    return facts


def facts_in(log: str) -> dict:
    """Returns the script's lines that PyTorch's log tells of, as "model.py:63". In a compiled
    update graphs break at the audit's hooks, too: where no others do, the script has no breaks."""
    facts: dict = {}
    for name, line in LINES.items():
        places = [*dict.fromkeys(re.findall(line, log))]
        facts[name] = [os.path.basename(place) for place in places if not place.startswith(OWN)]
        if name == "breaks_at" and places and not facts[name]:
            facts["breaks"] = {}
    return facts


def ranks_of_their_own() -> dict[str, str]:
    """Returns the variables by which the ranks of a second run find each other: torchrun's store
    still holds what those of the first exchanged, so that rank 0 opens one at a port beside it."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    port = int(os.environ["MASTER_PORT"]) - 1
    return dict(TORCHELASTIC_USE_AGENT_STORE="False", MASTER_PORT=str(port))


def report_of(
    command: list[str], order: Order, environment: dict[str, str], minutes: float, python: str
) -> tuple[dict, str]:
    """Returns what a child reports, and its stderr. Raises UserError."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        words = json.dumps(asdict(replace(order, report=str(report))))
        try:
            return children.report_of_child(
                [python, CHILD, words, *command], report, 60 * minutes, environment
            )
        except children.NoReport as child:
            name = script_name(command)
            if child.ending:
                raise UserError(f"{name} {child.ending}, before the audit was done")
            goal = "watched" if order.is_watched else "timed"
            raise UserError(
                f"{name} is stuck, or too slow to be {goal} in {minutes:g} minutes: give it a"
                " smaller batch or fewer micro-batches, or the audit more --minutes"
            )
