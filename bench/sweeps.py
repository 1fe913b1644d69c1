"""What a machine carries: speed and memory over batch sizes, models and context lengths.

Each sweep is a plan whose runs grow; where one doesn't fit, its row says so, and no larger one is
tried. On a CPU none is tried that by the one before it would take more than half of the memory.
"""

import os
import re
from dataclasses import replace
from pathlib import Path

from bench.plans import BUILD, Plan, Run, UserError, read_rungs
from patches import stack

KINDS = ("batch", "model", "context")
STAGES = {"00": stack.FIRST, "01": stack.LAST}
BATCHES = [2**k for k in range(13)]
# What each model's best batch size is searched among.
MODEL_BATCHES = {"cuda": [4, 16, 64], "cpu": [1, 4, 16]}
BATCH_TOKENS = {"cuda": 32_768, "cpu": 2_048}  # of every batch in a sweep over contexts
CONTEXTS = {"cuda": [2**k for k in range(8, 15)], "cpu": [2**k for k in range(6, 12)]}
MODELS = {"cuda": ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"],
          "cpu": ["cpu-demo", "gpt2", "gpt2-medium"]}
MODEL_OPTIONS = {"cuda": (), "cpu": ("--context-length", "128", "--eval-windows", "2")}
MIN_STEPS = 6  # of a run, so that it has a median: two of them are warm-up


def memory_limit_gb(machine: dict) -> float | None:
    """Half of a CPU's memory, in GB (1024³ bytes); None on a GPU, whose end is an error."""
    if machine["gpus"] or not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3 / 2


def sweep(machine: dict, kind: str, stage: str = "01", **settings) -> Plan:
    """The plan of one sweep with the script `stage`. Raises StackError, UserError.

    `kind` is "batch", "context", or "model" for the search of each model's best batch size: see
    `models` for what follows it.
    """
    script = script_of(machine, stage)
    device = machine["device"]
    if kind == "batch":
        runs = growing(script, [(f"batch {size}", ("--batch-size", str(size)))
                                for size in BATCHES])
    elif kind == "context":
        runs = growing(script, [
            (f"context {length}", ("--context-length", str(length),
                                   "--batch-size", str(BATCH_TOKENS[device] // length)))
            for length in CONTEXTS[device]])
    else:
        kind, runs = "model-batch", []
        for model in MODELS[device]:
            options = ("--model", model, *MODEL_OPTIONS[device])
            runs += growing(script, [(f"{model}, batch {size}",
                                      (*options, "--batch-size", str(size)))
                                     for size in MODEL_BATCHES[device]])
    return plan(machine, kind, stage, runs, settings)


def models(machine: dict, found: list[dict], stage: str = "01", **settings) -> Plan:
    """Each model at its fastest batch size by the rows `found` of its search; one that doesn't fit
    at any is a row that says so. Raises UserError where there are none."""
    script, runs = script_of(machine, stage), []
    for model in MODELS[machine["device"]]:
        rows = [row for row in found if row["label"].startswith(f"{model}, ")]
        if not rows:
            raise UserError(f"no search of {model}'s batch size")
        best = max(rows, key=lambda row: row["tok_per_sec"] or 0)
        (run,) = growing(script, [(best["label"], tuple(best["options"]))])
        runs.append(replace(run, error=None if best["tok_per_sec"] else best["error"]))
    return plan(machine, "model", stage, runs, settings)


def script_of(machine: dict, stage: str) -> Run:
    """00 or 01, a copy in build/."""
    if stage not in STAGES:
        raise UserError(f"no stage {stage!r}; there are {', '.join(STAGES)}", 2)
    file = STAGES[stage]
    stages = read_rungs(stack.load(), gpus=1)[:-1]
    run = stages[0] if stage == "00" else stages[-1]
    path = BUILD / "sweeps" / file
    stack.write_all({path: stack.script_of(Path(file).stem)})
    return replace(run, script=path, published=None, compared_to=None, loss=None)


def growing(script: Run, sizes: list[tuple[str, tuple[str, ...]]]) -> list[Run]:
    """A run for each (label, options), none of which is tried where the one before doesn't fit."""
    runs = []
    for label, options in sizes:
        name = "-".join([script.name, *re.findall(r"[\w-]+", label)])
        runs.append(replace(script, name=name, label=label, options=options,
                            after=runs[-1].name if runs else None))
    return runs


def plan(machine: dict, kind: str, stage: str, runs: list[Run], settings: dict) -> Plan:
    suffix = "" if stage == "01" else f"-{stage}"
    if kind.startswith("model") or not machine["gpus"]:  # MIN_STEPS are enough
        settings["tokens"] = settings.get("tokens") or 1
    return Plan(f"sweep-{kind}{suffix}", runs, machine, seed_noise=False, min_steps=MIN_STEPS,
                memory_limit_gb=memory_limit_gb(machine), cold_rounds=0, **settings)
