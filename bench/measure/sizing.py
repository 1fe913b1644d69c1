"""How each run of a plan trains: at which batch size, how long, in how many seconds."""

import contextlib
import io
import json
import math
import runpy
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench import processes
from bench.catalogue import Run
from bench.corpus import BOOK_TOKENS, tokens_in
from bench.machine import Machine, trained_in
from bench.measure.plan import EqualSteps, Job, Measurable, Plan, Setup, WholeScript
from bench.measure.records import Result, comparison_point, tokens_per_step
from bench.options import has_option
from gpt_speed.cards import A100_FLOPS
from gpt_speed.common import UserError

# What every script is given, so that runs can be compared.
OWN_OPTIONS = {
    "--data",
    "--results-dir",
    "--name",
    "--device",
    "--seed",
    "--max-tokens",
    "--max-steps",
    "--epochs",
    "--eval-freq",
    "--target-loss",
    "--help",
    "-h",
}
WITHOUT_END = ("--epochs", 10**6)  # for a run that ends by its tokens, or at its target
START_SECONDS = {"cuda": 40, "cpu": 10}  # until a run trains, about, whether it compiles or not
RATE_SECONDS = 5  # about; in them the machine's matmul rate is measured after each run
DEMO_TOKENS = 40_960  # that a whole script trains on a CPU, by its own limit
FLOAT32_SHARE = 0.5  # of the peak of matmuls that training in float32 reaches, about
UNKNOWN_SPEED = 20_000  # tok/sec, where nothing is known of the machine or the script
GPT2 = dict(layers=12, width=768, vocab_size=50_257, context_length=1024)  # as it was published
# The settings of a script that count here, None where it has no such setting.
CONFIGURATION = "batch_size", "learning_rate", "epochs", *GPT2


@dataclass(frozen=True)
class Length:
    """How long a run trains, as options, and about how many seconds it takes in all."""

    options: tuple
    seconds: float


def read_configurations(requests: list) -> list[dict]:
    """Returns each [script, options]'s configuration, or {"error": why it has none}."""
    answers = []
    for script, options in requests:
        messages = io.StringIO()
        try:
            with contextlib.redirect_stdout(messages), contextlib.redirect_stderr(messages):
                functions = runpy.run_path(script)
                config = functions["configure"](functions["read_options"](options))
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
    refuse_own_options(setup.options)
    options = ["--device", setup.device, *setup.options]
    requests = {run.name: (str(setup.write_script(run)), (*options, *run.options)) for run in runs}
    new = [request for request in requests.values() if request not in setup.configurations]
    if new:
        setup.configurations |= zip(new, ask_scripts(new), strict=True)
    configs = {name: setup.configurations[request] for name, request in requests.items()}
    for name, config in configs.items():
        if "error" in config:
            raise UserError(f"{name}: {config['error']}", 2)
    return configs


def refuse_own_options(options: list[str]) -> None:
    """Raises UserError for an option behind -- that measure.py sets."""
    for option in options:
        name = option.split("=")[0]
        if name in OWN_OPTIONS:
            raise UserError(f"{name} is set by measure.py itself, for every run alike", 2)


def ask_scripts(requests: list[tuple]) -> list[dict]:
    """Returns what read_configurations does in a process of its own; for 02, as if torchrun had
    started it. Raises UserError."""
    one_rank = dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    answers = processes.ask(["-m", "bench.measure.sizing", json.dumps(requests)], one_rank)
    return json.loads(answers)


def with_batches(plan: Plan, setup: Setup, batches: dict[int, int]) -> Plan:
    """Returns the plan with other batch sizes than published. Raises UserError."""
    if not batches or plan.growth:
        return plan
    free = [
        run for run in plan.runs if not run.error and not has_option("--batch-size", run.options)
    ]
    configs = configurations(free, setup)
    other = {run.name: batches.get(configs[run.name]["batch_size"]) for run in free}
    runs = [with_batch(run, other.get(run.name)) for run in plan.runs]
    return replace(plan, runs=runs, batches=batches)


def with_batch(run: Run, batch: int | None) -> Run:
    """Returns the run at a batch size; for None as it is."""
    if batch is None:
        return run
    return run.replace(options=(*run.options, "--batch-size", str(batch)))


def lengths_of(
    plan: Plan,
    setup: Setup,
    configs: dict[str, dict],
    matmul_peak: dict,
) -> dict[str, Length]:
    """Returns how long each run trains that has a configuration, by its name."""
    runs = [run for run in plan.runs if run.name in configs]
    if isinstance(plan.length, WholeScript):
        extents = {
            run.name: whole_script(run, plan.length, setup, configs[run.name]) for run in runs
        }
    else:
        extents = equal_steps(runs, plan.length, configs, may_differ=plan.growth is not None)
    lengths = {}
    for run in runs:
        extent = extents[run.name]
        speed = expected_speed(run, matmul_peak, setup.machine, configs[run.name])
        seconds = START_SECONDS[setup.device] + extent.tokens / speed
        lengths[run.name] = Length(extent.options, seconds)
    return lengths


class Extent(NamedTuple):
    """How many tokens a run trains on, about, and the options that say so."""

    tokens: int
    options: tuple


def equal_steps(
    runs: list[Run], length: EqualSteps, configs: dict[str, dict], may_differ: bool
) -> dict[str, Extent]:
    """Returns the extents of runs, by their names: as many steps for all as the longest one needs.
    Where sizes grow, they `may_differ`."""
    steps = {run.name: steps_of(run, length, configs[run.name]) for run in runs}
    if steps and not may_differ:
        steps = dict.fromkeys(steps, max(steps.values()))
    return {run.name: some_steps(run, length, configs[run.name], steps[run.name]) for run in runs}


def steps_of(run: Run, length: EqualSteps, config: dict) -> int:
    """Returns how many steps a run needs."""
    tokens = (length.tokens or 0) * run.processes
    return max(length.min_steps, math.ceil(tokens / tokens_per_step(config, run.processes)))


def some_steps(run: Run, length: EqualSteps, config: dict, steps: int) -> Extent:
    """Returns the extent of a run of at least so many steps, with a log line where losses are
    compared."""
    per_step = tokens_per_step(config, run.processes)
    compared_at = comparison_point((length.tokens or 0) * run.processes, per_step)
    tokens = max(compared_at, steps * per_step)
    # Log lines come after 1, 1 + eval_freq, 1 + 2 * eval_freq ... steps.
    eval_freq = compared_at // per_step - 1
    if eval_freq < 1:  # losses are compared after the first step
        eval_freq = tokens // per_step
    options = ("--max-tokens", tokens, "--eval-freq", eval_freq, *WITHOUT_END)
    return Extent(tokens, options)


def whole_script(run: Run, length: WholeScript, setup: Setup, config: dict) -> Extent:
    """Returns the extent of a run that ends as its script does, unless its length ends it."""
    tokens = DEMO_TOKENS
    options: tuple = ()
    if length.epochs:
        options += ("--epochs", length.epochs)
    if length.tokens:
        tokens = length.tokens * run.processes
        options += ("--max-tokens", tokens)
    elif setup.device == "cuda":
        tokens = (length.epochs or config["epochs"]) * tokens_per_epoch(setup.data)
    if length.log_tokens:
        log_steps = length.log_tokens // tokens_per_step(config, run.processes)
        options += ("--eval-freq", max(1, log_steps))
    if length.targets:  # one of them, or the tokens, ends the run
        options += ("--target-loss", min(length.targets.values()), *WITHOUT_END)
    return Extent(tokens, options)


def tokens_per_epoch(data: Path) -> int:
    """Returns how many tokens a folder has to train on; where none are prepared yet, the book's."""
    meta = tokens_in(data)
    if not meta:
        return BOOK_TOKENS
    return meta["tokens"]["train"]


def expected_speed(run: Run, matmul_peak: dict, machine: Machine, config: dict) -> float:
    """Returns about how many tok/sec a run makes, within a factor of three.

    It reaches a share of this machine's peak of matmuls in the type that is trained in: in bfloat16
    the same as on the published A100, in float32 FLOAT32_SHARE. Each GPU has that peak; the ranks
    of a CPU share one."""
    dtype = trained_in(machine)
    peak = matmul_peak.get(dtype, 0)
    if machine["gpus"]:
        peak *= run.processes
    share = FLOAT32_SHARE
    if dtype != "float32":
        share = (run.expected or 0) / run.processes * flops_per_token({}) / A100_FLOPS
    return share * peak / flops_per_token(config) or UNKNOWN_SPEED


def flops_per_token(config: dict) -> int:
    """Returns the floating-point operations of a model as 00 counts them, but for its norms and
    biases. A setting that `config` lacks is GPT-2's."""
    layers, width, vocab_size, context = (config.get(name) or GPT2[name] for name in GPT2)
    return 6 * (12 * layers * width**2 + vocab_size * width) + 12 * layers * context * width


def seconds_left(
    jobs: list[Job], results: list[Result], lengths: dict[str, Length], afterwards: float = 0
) -> float:
    """Returns about how many seconds some jobs take, and the plans after them, whose estimate is
    `afterwards`. A run that has results takes their median time. The estimates of all others are
    corrected by how far those of the runs with results were off."""
    medians = median_seconds(results)
    over_estimate = [
        middle / lengths[name].seconds for name, middle in medians.items() if name in lengths
    ]
    correction = median(over_estimate or [1])
    total = correction * afterwards
    for job in jobs:
        seconds = medians.get(job.run.name)
        if seconds is None:
            seconds = correction * lengths[job.run.name].seconds
        total += seconds + RATE_SECONDS
    return total


def median_seconds(results: list[Result]) -> dict[str, float]:
    """Returns the median time of each run's results, by its name."""
    seconds: dict[str, list[float]] = {}
    for result in results:
        seconds.setdefault(result.name, []).append(result.seconds)
    return {name: median(values) for name, values in seconds.items()}


def estimate_later(
    study: Measurable,
    setup: Setup,
    plan: Plan,
    rounds: int | None,
    matmul_peak: dict,
) -> tuple[int, float]:
    """Returns (how many runs, about how many seconds) the study's plans take that follow `plan`.
    Raises UserError, StackError, OSError."""
    count, seconds = 0, 0.0
    for later in study.later(setup, plan):
        lengths = lengths_of(later, setup, configurations(later.runs, setup), matmul_peak)
        jobs = replace(later, rounds=later.rounds or rounds or study.rounds[setup.device]).jobs()
        count += len(jobs)
        seconds += seconds_left(jobs, [], lengths)
    return count, seconds


def in_words(seconds: float) -> str:
    """Writes seconds as "89 s", "2 min" or "2.0 h"."""
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 90:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s"


if __name__ == "__main__":
    print(json.dumps(read_configurations(json.loads(sys.argv[1]))))
