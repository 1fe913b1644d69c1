"""Runs somebody's script twice, until some of its steps are over: timed, then watched."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import processes
from bench.audit.checks import count
from bench.cards import PEAK_FLOPS
from bench.common import UserError

CHILD = Path(__file__).with_name("child.py")
LEAST = 2  # steps that a script has to make


def audit(command: list[str], minutes: float, folder: Path | None = None) -> tuple[dict, dict]:
    """What bench/audit/child.py reports of `command`, a script or "-m" and a module, with its
    arguments, in a folder: of the timed run, and of the watched one. Raises UserError, with one
    line that says what to do, where a script can't be audited."""
    timed = run(command, dict(mode="time"), minutes, folder)
    key, steps = timed["key"], timed["steps"]
    if key is None:
        raise UserError(f"{command[0]} trained nothing in its own process: {why_nothing(timed)}")
    if steps < LEAST:
        raise UserError(f"{command[0]} ended after {count(steps, 'step')}, and an audit needs"
                        f" {LEAST}: let it train longer")
    order = dict(mode="watch", key=key, watched=min(2, steps - 1))
    watched = run(command, order, minutes, folder)
    if not any(op["flops"] for op in watched.get("ops", [])):
        raise UserError(f"no matrix product was seen in a step of {command[0]}: let it train in the"
                        " main thread of its own process, on dense tensors")
    return timed, watched


def run(command: list[str], order: dict, minutes: float, folder: Path | None = None) -> dict:
    """The report of a child. Raises UserError."""
    watching = order["mode"] == "watch"
    if watching and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun's store still holds what the ranks of the first run told each other.
        port = int(os.environ["MASTER_PORT"])
        os.environ |= dict(TORCHELASTIC_USE_AGENT_STORE="False",
                           MASTER_PORT=str(port - 1 if port > 60_000 else port + 1))
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.json")
        try:
            code, out, err = processes.run_child(
                [sys.executable, CHILD, json.dumps(order | dict(report=str(report))), *command],
                folder, 60 * minutes)
        except subprocess.TimeoutExpired:
            what = "was watched" if watching else f"made {LEAST} steps"
            raise UserError(f"{command[0]} has not {what} after {minutes:g} minutes: give it a"
                            " smaller batch or fewer micro-batches, or the audit more --minutes")
        if not report.exists():
            print(err or out, file=sys.stderr, end="")
            raise UserError(f"{command[0]} ended by itself, with code {code}, before the audit was"
                            " done")
        facts = json.loads(report.read_text(encoding="utf-8"))
    if facts["how"] == "failed" or watching and facts["how"] != "watched":
        print(err, file=sys.stderr, end="")
        while_watched = " while it was watched" if watching else ""
        raise UserError(f"{command[0]} failed{while_watched}: {facts['error'] or facts['how']}")
    return facts


def why_nothing(timed: dict) -> str:
    """What to do with a script without a step."""
    if timed["children"] > 1:
        return (f"its children computed for {timed['children']:.0f} s. Start one of them, or let"
                " torchrun or accelerate launch start `measure.py audit` with it")
    if timed["backwards"]:
        return ("it made backward passes, but no update by an optimizer of torch.optim that audit"
                " could see")
    return "no backward pass and no update of an optimizer"


def machine_of(timed: dict) -> dict:
    """What bench.measure.environment tells of the device that a script trained on, with its memory,
    or None where the system doesn't tell it, and with the rates of its products where no datasheet
    has them."""
    hidden = {} if timed["device"] == "cuda" else dict(CUDA_VISIBLE_DEVICES="")
    machine = processes.ask_machine("this_machine", **hidden)
    if machine["name"] not in PEAK_FLOPS:
        machine |= dict(rates=processes.ask_machine("matmul_peak", **hidden))
    ram = None if machine["ram_gb"] is None else machine["ram_gb"] * 2**30
    return machine | dict(memory_there=timed["memory_there"] or ram)
