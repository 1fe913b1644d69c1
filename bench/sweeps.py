"""What a machine carries: speed and memory over batch sizes, models and context lengths.

Each sweep is a plan whose runs grow. Where one doesn't fit, its row says so, and no larger one is
tried. On a CPU a run is skipped if, judging by the one before it, it would take more than half of
the RAM.
"""

import re
from dataclasses import replace

from bench import plans
from bench.machine import ram_gb
from bench.plans import Plan, Run, UserError, read_rungs
from patches import stack

KINDS = ("batch", "model", "context")
STAGES = {"00": stack.FIRST, "01": stack.LAST}
BATCHES = [2**k for k in range(13)]
MODELS = {"cuda": ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"],
          "cpu": ["cpu-demo", "gpt2", "gpt2-medium"]}
MODEL_BATCHES = {"cuda": [4, 16, 64], "cpu": [1, 4, 16]}  # of which each model's best is taken
CONTEXTS = {"cuda": [2**k for k in range(8, 15)], "cpu": [2**k for k in range(6, 12)]}
CONTEXT_TOKENS = {"cuda": 32_768, "cpu": 2_048}  # of each batch in a sweep over contexts
MIN_STEPS = 6  # of a run, so that it has a median: two of them are warm-up


def sweep(machine: dict, kind: str, stage: str = "01", **settings) -> Plan:
    """The plan of one sweep with the script `stage`. Raises StackError, UserError.

    `kind` is "batch", "context", or "model" for the search of each model's best batch size: see
    `models` for what follows it.
    """
    script, device, runs = script_of(machine, stage), machine["device"], []
    if kind == "batch":
        for size in BATCHES:
            grow(runs, script, f"batch {size}", 2, batch_size=size)
    elif kind == "context":
        for length in CONTEXTS[device]:
            size = CONTEXT_TOKENS[device] // length
            # As many tokens take as much memory, but where 00 keeps the scores of its attention.
            grow(runs, script, f"context {length}, batch {size}", 2 if stage == "00" else 1,
                 context_length=length, batch_size=size)
    else:
        kind = "model-batch"
        for model in MODELS[device]:
            chain = runs[-len(MODEL_BATCHES[device]):][:1]  # a model's first after another's first
            for size in MODEL_BATCHES[device]:
                grow(chain, script, f"{model}, batch {size}", 4, model=model, batch_size=size)
            runs += chain[-len(MODEL_BATCHES[device]):]
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
        runs.append(replace(script, name=best["name"], label=best["label"],
                            options=tuple(best["options"]),
                            error=None if best["tok_per_sec"] else best["error"]))
    return plan(machine, "model", stage, runs, settings)


def script_of(machine: dict, stage: str) -> Run:
    """00 or 01, a copy in build/."""
    if stage not in STAGES:
        raise UserError(f"no stage {stage!r}; there are {', '.join(STAGES)}", 2)
    path = plans.BUILD / "sweeps" / STAGES[stage]
    stack.write_all({path: stack.script_of(path.stem)})
    first, *_, last, _ = read_rungs(stack.load(), gpus=1)
    return replace(first if stage == "00" else last, name=path.stem, script=path, published=None,
                   compared_to=None, loss=None)


def grow(runs: list[Run], script: Run, label: str, growth: float, **settings) -> None:
    """Adds the next larger run to a chain: it isn't tried where the one before doesn't fit."""
    options = [str(part) for name, value in settings.items()
               for part in (f"--{name.replace('_', '-')}", value)]
    runs.append(replace(
        script, name="-".join([script.name, *re.findall(r"[\w-]+", label)]), label=label,
        options=tuple(options), after=runs[-1].name if runs else None, growth=growth))


def plan(machine: dict, kind: str, stage: str, runs: list[Run], settings: dict) -> Plan:
    """Raises UserError for options that the sweep itself sets."""
    options, device = settings.pop("options", []), machine["device"]
    own = {option for run in runs for option in run.options if option.startswith("--")}
    for option in options:
        if option.split("=")[0] in own:
            raise UserError(f"{option.split('=')[0]} is set by the sweep itself", 2)
    if kind.startswith("model"):
        more = [option for option in plans.MODEL_OPTIONS[device]
                if stage != "00" or option != "--no-compile"]  # 00 has no such option
        options = [*more, *options]
        settings["seconds"] = 0.0
    if kind.startswith("model") or device == "cpu":
        settings["tokens"] = settings.get("tokens") or 1  # MIN_STEPS are enough
    limit = ram_gb() if device == "cpu" else None
    return Plan(f"sweep-{kind}" + f"-{stage}" * (stage != "01"), runs, machine, seed_noise=False,
                cold_rounds=0, min_steps=MIN_STEPS, until_full=True,
                memory_limit_gb=limit and limit / 2, options=options, **settings)
