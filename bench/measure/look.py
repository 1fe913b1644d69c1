"""This machine, as a folder of results has it: results/machine.json."""

import json
import sys
from pathlib import Path

from bench import processes
from bench.common import ELSEWHERE, read_kept, relative, write_whole
from bench.machine import Machine, machine_difference
from bench.measure.environment import missing_here
from bench.measure.journal import newest, read_journal
from gpt_speed.common import UserError

FIELDS = {"machine", "matmul_peak", "memory_gb", "compile_error", "missing"}


def describe_here() -> Machine:
    """Returns this machine, as bench.measure.hardware.this_machine does. Raises UserError."""
    print("Looking at this machine", file=sys.stderr, flush=True)
    return processes.ask_machine("this_machine")


def look_at(results: Path) -> dict:
    """Returns what bench.measure.hardware.look sees here, and keeps it in a folder of results: what
    takes long is measured once, what is missing is looked for each time. Raises UserError where
    the folder holds another machine's report, or a measurement that would stand in this one's."""
    here, earlier = describe_here(), read_look(results)
    if earlier:
        different = machine_difference(earlier["machine"], here)
        if different:
            raise UserError(
                f"{relative(results)} holds the report of another machine or PyTorch"
                f" ({different}); {ELSEWHERE}"
            )
    foreign = foreign_measurement(results, here)
    if foreign:
        raise UserError(f"{foreign}; {ELSEWHERE}")
    if earlier:
        look = earlier | dict(missing=missing_here(here, earlier["compile_error"]))
    else:
        look = processes.ask_machine("look")
    if look != earlier:
        write_whole(results / "machine.json", json.dumps(look, indent=1))
    return look


def foreign_measurement(results: Path, machine: Machine) -> str | None:
    """Returns which journal's newest measurement, the one that a page shows, is another machine's,
    and what differs; None where none is."""
    for path in sorted(results.glob("*.jsonl")):
        for measurement in newest(read_journal(path)):
            different = machine_difference(measurement.machine, machine)
            if different:
                return f"{relative(path)} was measured on another machine or PyTorch ({different})"
    return None


def read_look(results: Path) -> dict:
    """Returns what an earlier start has kept; {} without it, or in an older form."""
    look = read_kept(results / "machine.json")
    if FIELDS <= look.keys():
        return look
    return {}
