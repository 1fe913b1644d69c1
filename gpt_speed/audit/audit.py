"""One audit: a script is run twice, timed and watched, and its step judged."""

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from gpt_speed.audit.checks import NO_GAIN, Finding, check
from gpt_speed.audit.notes import notes_of
from gpt_speed.audit.other_gpus import LargerBatch, on_other_gpus
from gpt_speed.audit.render import saves_most_pages, summary
from gpt_speed.audit.run import audit, watch
from gpt_speed.audit.step import Step
from gpt_speed.cards import PEAK_FLOPS
from gpt_speed.common import UserError
from gpt_speed.gains import Session, expected, gains_on, technique_names
from gpt_speed.interpreter import ask_machine, usable_python

# Of gpt_speed.speed.KINDS, where they have other names for people.
NAMES = dict(
    products="matmuls", head="head and loss", loss="head and loss", rest="norms and the rest"
)


@dataclass(frozen=True)
class Reports:
    """What is known of a script's steps: see gpt_speed.audit.run, and machine_of."""

    timed: dict
    watched: dict
    machine: dict

    def step(self) -> Step:
        """Returns the watched step, with the shares of its time that watching would change."""
        undisturbed = {name: self.timed[name] for name in ("system", "updating")}
        return Step(self.watched | self.machine | undisturbed)


def audit_of(
    command: list[str],
    sessions: Iterable[Session],
    python: str,
    minutes: float,
    cards: Sequence[str],
    batch_option: str,
) -> dict | None:
    """Runs a command and returns an audit of it, as result_of; None in a rank of torchrun that
    isn't the first. `python` is the name of the one that runs it, or ""; `minutes` is the limit of
    each run; `batch_option` is the command's for the batch size, or "". Raises UserError."""
    doubled = None
    if batch_option:
        doubled = with_twice_the_batch(command, batch_option, bool(cards))
    python = usable_python(python)
    timed, watched = audit(command, minutes, python)
    if int(os.environ.get("RANK") or 0):
        return None
    reports, larger = Reports(timed, watched, machine_of(python, timed)), None
    if doubled:
        watched_again = watch(doubled.command, timed, minutes, python)
        again = Reports(timed, watched_again, reports.machine)
        larger = LargerBatch(doubled.batch, again.step())
    return result_of(command, reports, sessions, cards, larger)


class Doubled(NamedTuple):
    """A command with twice the batch size."""

    command: list[str]
    batch: int


def with_twice_the_batch(command: list[str], option: str, has_cards: bool) -> Doubled:
    """Returns a command with twice the value of the option for the batch size, by its name without
    dashes. Raises UserError."""
    if not has_cards:
        raise UserError("--batch-option is for --gpu, which tells the memory at two batch sizes", 2)
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise UserError("--batch-option is for one process: leave out torchrun", 2)
    name = option.lstrip("-")
    for index, (word, following) in enumerate(pairwise([*command, ""])):
        key, sign, value = word.partition("=")
        if key.lstrip("-") != name:
            continue
        if value.isdecimal():
            return doubled_at(command, index, value, before=f"{key}=")
        if not sign and following.isdecimal():
            return doubled_at(command, index + 1, following)
    raise UserError(f"--batch-option {option}: the script's command has no {name} with a number", 2)


def doubled_at(command: list[str], index: int, value: str, before: str = "") -> Doubled:
    """Returns a command with twice the value in the word of this index, where it stands behind
    `before`."""
    batch = 2 * int(value)
    return Doubled([*command[:index], f"{before}{batch}", *command[index + 1 :]], batch)


def machine_of(python: str, timed: dict) -> dict:
    """Describes the device that a script trained on, with its memory in bytes (None where the
    system hides it) and, without a datasheet, the FLOP/s of its matmuls."""
    hidden = {} if timed["device"] == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    machine = ask_machine(python, rates=True, environment=hidden)
    return machine | dict(memory_total=timed["memory_total"] or machine["memory_total"])


# ---- What the reports come to


def result_of(
    command: list[str],
    reports: Reports,
    sessions: Iterable[Session],
    cards: Sequence[str] = (),
    larger: LargerBatch | None = None,
) -> dict:
    """Returns what --json prints: the step's figures, of each technique whether the step has it and
    what it gained on our model in the sessions, and what the step takes on the cards, with its
    memory at a larger batch size."""
    step, machine = reports.step(), reports.machine
    gains, gains_from = gains_on(machine | dict(device=step.device), sessions)
    figures = figures_of(step, reports.timed, machine)
    gpus = on_other_gpus(cards, step, figures["tokens"], larger)
    return dict(
        version=1,
        command=command,
        head=summary(reports.timed, machine, figures),
        figures=figures,
        techniques=techniques_of(step, gains),
        gains_from=gains_from,
        notes=notes_of(step, reports.timed),
        speeds=gpus.rows,
        speeds_text=gpus.text,
    )


def techniques_of(step: Step, gains: dict[str, float]) -> list[dict]:
    """Returns what the step shows of each technique, with its gain on our model by its patch."""
    findings = check(step)
    rows = [
        row_of(number, name, patch, findings[patch], gains.get(patch), step.device)
        for number, (patch, name) in enumerate(technique_names().items(), 1)
        if patch in findings
    ]
    return with_pages_once(rows)


def with_pages_once(rows: list[dict]) -> list[dict]:
    """Returns the rows of an audit such that time on new pages of memory counts once, for the
    technique that saves most of it: the others count what it leaves of the step, of which they
    change the same share."""
    first = saves_most_pages(rows)
    if first is None:
        return rows
    left = 1 / first["expected"]
    return [row if row is first else within(row, left) for row in rows]


def within(row: dict, left: float) -> dict:
    """Returns a row whose technique saves time only within the part of the step that is left."""
    gain = row["expected"]
    return row | dict(share=left * row["share"], expected=gain and 1 / (1 - left * (1 - 1 / gain)))


def row_of(
    number: int, name: str, patch: str, finding: Finding, gain: float | None, device: str
) -> dict:
    """Returns what an audit says of one technique, with its `gain` on our model."""
    share = finding.share or 0.0
    most = share + finding.beside
    # The speedup if that took no time, unless it is nearly the whole step.
    bound = 1 / (1 - most) if 0 < most < 0.95 else None
    here = gain_here(patch, finding, gain, device)
    return dict(
        number=number,
        technique=name,
        state=finding.state,
        evidence=finding.evidence,
        where=finding.where,
        share=share,
        gain=gain,
        expected=here and min(here, bound or math.inf),
        upper_bound=bound,
        needs=finding.needs,
    )


def gain_here(patch: str, finding: Finding, gain: float | None, device: str) -> float | None:
    """Returns the speedup to expect of a technique that gained `gain` on our model."""
    if finding.state == NO_GAIN:
        return 1.0
    if device == "cuda":
        return gain
    if finding.saved is not None:
        return 1 / (1 - (finding.share or 0.0) * finding.saved)
    return expected(patch, finding.share, gain)


def figures_of(step: Step, timed: dict, machine: dict) -> dict:
    """Returns the step's seconds, tokens, FLOPs and shares, and the memory in bytes."""
    times, seconds = timed["seconds"], median(timed["seconds"])
    indices = [tensor for op in step.lookups for tensor in op.passed("indices")]
    tokens = sum(math.prod(tensor.shape) for tensor in indices)
    flops, rates = step.flops.total(), machine.get("rates", {})
    peak = PEAK_FLOPS.get(machine["name"])
    rate = peak or rates.get(step.precision(step.type)) or rates.get("float32")
    shares: dict[str, float] = defaultdict(float)
    for op, kind in step.kinds.items():
        shares[NAMES.get(kind, kind)] += op.seconds / step.seconds
    return dict(
        seconds=seconds,
        fastest=min(times),
        slowest=max(times),
        steps=len(times),
        tokens=tokens,
        tok_per_sec=tokens / seconds,
        flops=flops,
        type=step.type,
        rate=rate,
        share_of_rate=rate and flops / seconds / rate,
        mfu=bool(peak),
        memory=timed["memory"],
        memory_total=machine["memory_total"],
        shares=dict(sorted(shares.items(), key=lambda item: -item[1])),
    )
