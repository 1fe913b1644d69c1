"""How each run of a plan trains: at which batch size, and how long; and what seconds are left."""

import contextlib
import io
import json
import math
import runpy
import sys
from dataclasses import replace
from statistics import median

from bench import processes
from bench.catalogue import Run
from bench.common import UserError, has_option
from bench.measure.journal import Result
from bench.measure.plan import Job, Plan, Setup
from bench.measure.records import comparison_point, tokens_per_step

# What every script is given, so that runs can be compared.
OWN_OPTIONS = {
    "--data", "--results-dir", "--name", "--device", "--seed", "--max-tokens", "--max-steps",
    "--epochs", "--eval-freq", "--target-loss", "--help", "-h",
}
WITHOUT_END = ("--epochs", 10**6)  # for a run that ends by its tokens, or at its target
# The settings of a script that count here, None where it has no such setting.
CONFIGURATION = "batch_size", "learning_rate", "context_length"


def read_configurations(requests: list) -> list[dict]:
    """Returns for each [script, options] its configuration, or {"error": why it has none}."""
    answers = []
    for script, options in requests:
        messages = io.StringIO()
        try:
            with contextlib.redirect_stdout(messages), contextlib.redirect_stderr(messages):
                config = runpy.run_path(script)["configure"](options)
            answers.append({name: getattr(config, name, None) for name in CONFIGURATION})
        except SystemExit:  # argparse has printed why
            answers.append({"error": processes.error_line(messages.getvalue())})
        except Exception as error:
            answers.append({"error": f"{type(error).__name__}: {error}"})
    return answers


def configurations(runs: list[Run], setup: Setup) -> dict[str, dict]:
    """Returns the settings of each run that CONFIGURATION names, by its name. Each script's own
    parser judges the options, all in one child, which loads PyTorch. Raises UserError where one
    refuses them."""
    for option in setup.options:
        name = option.split("=")[0]
        if name in OWN_OPTIONS:
            raise UserError(f"{name} is set by measure.py itself, for every run alike", 2)
    options = ["--device", setup.device, *setup.options]
    requests = {run.name: (str(setup.script(run)), (*options, *run.options)) for run in runs}
    new = {name: request for name, request in requests.items()
           if request not in setup.configurations}
    if new:
        one_rank = dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        answers = json.loads(processes.ask(  # for 02, as if torchrun had started it
            "-m", "bench.measure.sizing", json.dumps([*new.values()]), **one_rank))
        for (name, request), answer in zip(new.items(), answers, strict=True):
            if "error" in answer:
                raise UserError(f"{name}: {answer['error']}", 2)
            setup.configurations[request] = answer
    return {name: setup.configurations[request] for name, request in requests.items()}


def fit(plan: Plan, setup: Setup, batches: dict[str, int]) -> Plan:
    """Returns the plan with these batch sizes in place of the published ones. Raises UserError."""
    if not batches:
        return plan
    free = [run for run in plan.runs if not run.error and not has_option(
        "--batch-size", run.options)]
    configs, runs = configurations(free, setup), []
    for run in plan.runs:
        batch = run in free and batches.get(str(configs[run.name]["batch_size"]))
        options = (*run.options, "--batch-size", str(batch)) if batch else run.options
        runs.append(run.replace(options=options))
    return replace(plan, runs=runs, batches=batches)


def lengths_of(plan: Plan, configs: dict[str, dict]) -> dict[str, tuple]:
    """Returns how long each run trains that has a configuration, as options, by its name."""
    runs = [run for run in plan.runs if run.name in configs]
    per_step = {run: tokens_per_step(configs[run.name], run.processes) for run in runs}
    if plan.full_length:
        return {run.name: whole_script(run, plan, per_step[run]) for run in runs}
    steps = {run: max(plan.min_steps, math.ceil(plan.tokens * run.processes / per_step[run]))
             for run in runs}
    if plan.equal_steps:
        steps = dict.fromkeys(steps, max(steps.values(), default=0))
    return {run.name: some_steps(run, plan, per_step[run], steps[run]) for run in runs}


def some_steps(run: Run, plan: Plan, per_step: int, steps: int) -> tuple:
    """Returns the options of a run of at least so many steps, with a log line where losses are
    compared."""
    compared_at = comparison_point(plan.tokens * run.processes, per_step)
    tokens = max(compared_at, steps * per_step)
    # Log lines come after 1, 1 + eval_freq, 1 + 2 * eval_freq ... steps.
    eval_freq = compared_at // per_step - 1 or tokens // per_step
    return "--max-tokens", tokens, "--eval-freq", eval_freq, *WITHOUT_END


def whole_script(run: Run, plan: Plan, per_step: int) -> tuple:
    """Returns the options of a run that is as long as its script, or has the plan's tokens or
    epochs."""
    options: tuple = ("--epochs", plan.epochs) if plan.epochs else ()
    if plan.tokens:
        options = ("--max-tokens", plan.tokens * run.processes)
    if plan.log_tokens:
        options += ("--eval-freq", max(1, plan.log_tokens // per_step))
    if plan.targets:  # one of them, or the tokens, ends the run
        options += ("--target-loss", min(plan.targets.values()), *WITHOUT_END)
    return options


def seconds_left(jobs: list[Job], results: list[Result]) -> float:
    """Returns about how many seconds some jobs take, by the median time of their run's results; of
    a run without results by the median of all."""
    times: dict[str, list[float]] = {}
    for result in results:
        times.setdefault(result.name, []).append(result.seconds)
    usual = [result.seconds for result in results] or [0.0]
    return sum(median(times.get(job.run.name, usual)) for job in jobs)


def in_words(seconds: float) -> str:
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


if __name__ == "__main__":
    print(json.dumps(read_configurations(json.loads(sys.argv[1]))))
