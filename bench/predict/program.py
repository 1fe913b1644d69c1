"""A script with its options, and what is predicted of it by bench.predict.trace, which runs in a
process of its own."""

import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from bench import processes
from bench.catalogue import Scripts
from bench.predict.code_hash import code_of
from bench.predict.prediction import BATCHES, TRACED, Prediction
from gpt_speed import children
from gpt_speed.common import UserError
from gpt_speed.memory import Event, MemoryNeed, memory_need
from gpt_speed.speed import Work

NOT_TRACED = "what it takes can't be predicted: "
TRACE_SECONDS = 900  # that the trace of one batch size may take; most take some seconds
VARIABLES = dict(
    OMP_NUM_THREADS="1",
    CUDA_VISIBLE_DEVICES="",  # it computes nothing
    PYTHONUTF8="1",  # PyTorch reads its own files by the locale
)


class Untraceable(UserError):
    """A script does what no trace can follow, however often it is tried."""


class Program(NamedTuple):
    """A script with its options: what is traced."""

    key: str  # by which its prediction is stored
    text: bytes
    options: list[str]


def program_of(scripts: Scripts, script: str | Path, options: list[str]) -> Program:
    """Raises StackError where patches don't fit together, OSError."""
    return Program(key_of(scripts, script, options), scripts.text(script), options)


def key_of(scripts: Scripts, script: str | Path, options: list[str]) -> str:
    return " ".join([scripts.canonical(script), *options])


def traced_needs(
    program: Program, sizes: Sequence[int], batch: int | None
) -> dict[int, MemoryNeed]:
    """Returns the memory at each of the batch sizes. Raises UserError where the script refuses
    `batch`; others, which nobody asked for, may be no multiple of --micro-batches."""
    optional = [size for size in sizes if size != batch]
    traces = run_traces(program.text, program.options, sizes, optional)
    return {size: memory_need(trace["events"]) for size, trace in traces.items()}


def traced(program: Program) -> Prediction:
    """Traces a program at the batch sizes of TRACED. Raises UserError, Untraceable."""
    traces = run_traces(program.text, program.options, TRACED)
    events = [trace["events"] for trace in traces.values()]
    needs = dict(zip(TRACED, map(memory_need, events), strict=True))
    with suppress(ValueError):  # then predict() traces the larger sizes
        needs |= {
            size: memory_need(at_batch(size, *events)) for size in BATCHES if size > TRACED[-1]
        }
    first = traces[TRACED[0]]
    return Prediction(
        needs=needs,
        steps={size: [*map(as_floats, trace["step"])] for size, trace in traces.items()},
        context_length=first["tokens"] // TRACED[0],
        flops_per_token=first["flops_per_token"],
        code=code_of(program.text),
    )


def as_floats(row: list) -> Work:
    """Returns the work of a row of a trace, in floats, as it is stored."""
    work = Work(*row)
    return work._replace(
        kernels=float(work.kernels), flops=float(work.flops), size=float(work.size)
    )


def at_batch(batch: int, first: list[Event], second: list[Event]) -> list[Event]:
    """Returns the events at a multiple of the first of TRACED, from those at both. Raises
    ValueError where these aren't the same events."""
    steps = (batch - TRACED[0]) // (TRACED[1] - TRACED[0])
    events = []
    for one, other in zip(first, second, strict=True):
        if one.released != other.released:
            raise ValueError("what is made differs between batches by more than its size")
        events.append(Event(one.size + (other.size - one.size) * steps, one.released))
    return events


def run_traces(
    text: bytes, options: list[str], batches: Sequence[int], optional: Sequence[int] = ()
) -> dict[int, dict]:
    """Returns what bench.predict.trace.trace() does of a script, by the batch size, without the
    `optional` ones that the script refuses. Raises UserError, Untraceable."""
    traces = {}
    for batch, answer in zip(batches, answers_of_child(text, options, batches), strict=True):
        if "trace" in answer:
            trace = answer["trace"]
            traces[batch] = trace | dict(events=[Event(*event) for event in trace["events"]])
        elif answer["is_untraceable"]:
            raise Untraceable(NOT_TRACED + answer["error"])
        elif batch not in optional:
            raise UserError(NOT_TRACED + answer["error"])
    return traces


def answers_of_child(text: bytes, options: list[str], batches: Sequence[int]) -> list[dict]:
    """Returns the answers of bench.predict.trace, in a process of its own, to each batch size.
    Raises UserError."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_bytes(text)
        requests = [dict(script=str(script), options=options, batch=batch) for batch in batches]
        command = [sys.executable, "-m", "bench.predict.child", json.dumps(requests)]
        seconds = TRACE_SECONDS * len(batches)
        try:
            code, out, err = processes.answer_of(command, "its trace", VARIABLES, seconds)
        except UserError as stuck:
            raise UserError(f"{NOT_TRACED}{stuck}")
    if code < 0:
        raise UserError(NOT_TRACED + children.ending(code))
    if code:
        raise UserError(NOT_TRACED + processes.error_line(err))
    return json.loads(out.splitlines()[-1])
