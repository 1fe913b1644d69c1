"""How each run of a plan trains: at which batch size, how long, and in about how many seconds."""

import contextlib
import io
import json
import math
import runpy
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from bench import processes
from bench.cards import A100_FLOPS, CARDS, TERA
from bench.catalogue import EPOCHS, FLOAT16, Run, published
from bench.common import BOOK_TOKENS, UserError, has_option, tokens_in, trained_in
from bench.measure.journal import Result
from bench.measure.plan import Job, Plan, Setup
from bench.measure.records import comparison_point, tokens_per_step, windows_per_epoch

# What the runner gives every script itself, so that runs can be compared.
OWN_OPTIONS = {
    "--data", "--results-dir", "--name", "--device", "--seed", "--max-tokens", "--max-steps",
    "--epochs", "--eval-freq", "--target-loss", "--help", "-h",
}
COMPILE_SECONDS = 40  # of a script that compiles its model, in round 1: a rough estimate
TUNE_SECONDS = 300  # where max-autotune times kernels for each product on a GPU, as rough
DEMO_TOKENS = 40_960  # that a whole script trains on a CPU, by its own limit
# How much faster 01 is than 00 where both train in float32: measured on two cores with AVX2 alone.
FLOAT32_FACTOR = 2.2
GPT2 = dict(layers=12, width=768, vocab_size=50_257, context_length=1024)  # as it was published
# The settings of a script that count here, None where it has no such setting.
CONFIGURATION = "batch_size", "learning_rate", "compile", *GPT2


@dataclass(frozen=True)
class Length:
    """How long a run trains, as options, and a rough estimate of all the seconds it takes."""

    options: tuple
    seconds: float


def read_configurations(requests: list) -> list[dict]:
    """For each [script, options]: its configuration, or {"error": why it has none}."""
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


def configurations(runs: list[Run], plan: Plan, setup: Setup) -> dict[str, dict]:
    """The settings of each run that CONFIGURATION names, by its name. Each script's own parser
    judges the options, all in one child, which loads PyTorch. Raises UserError where one refuses
    them."""
    for option in setup.options:
        name = option.split("=")[0]
        if name in OWN_OPTIONS:
            raise UserError(f"{name} is set by measure.py itself, for every run alike", 2)
    options = ["--device", setup.device, *plan.options, *setup.options]
    requests = {run.name: (str(setup.script(run)), (*options, *run.options)) for run in runs}
    if asked := [run for run in runs if requests[run.name] not in setup.configurations]:
        one_rank = dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        answers = json.loads(processes.ask(  # for 02, as if torchrun had started it
            "-m", "bench.measure.sizing", json.dumps([requests[run.name] for run in asked]),
            **one_rank))
        for run, answer in zip(asked, answers, strict=True):
            if "error" in answer:
                raise UserError(f"{run.name}: {answer['error']}", 2)
            setup.configurations[requests[run.name]] = answer
    return {name: setup.configurations[request] for name, request in requests.items()}


# ---- Batch sizes ---------------------------------------------------------------------------------


def fit(plan: Plan, setup: Setup, batches: dict[str, int]) -> Plan:
    """The plan with these batch sizes in place of the published ones. Raises UserError."""
    if not batches or plan.stop_at_oom:
        return plan
    free = [run for run in plan.runs if not run.error and not has_option(
        "--batch-size", [*plan.options, *setup.options, *run.options])]
    configs = configurations(free, plan, setup)
    runs = []
    for run in plan.runs:
        own = configs[run.name]["batch_size"] if run in free else None
        batch = batches.get(str(own), own)
        runs.append(run if batch == own else run.replace(
            options=(*run.options, "--batch-size", str(batch))))
    return replace(plan, runs=runs, batches=batches)


# ---- The length --------------------------------------------------------------------------------


def lengths_of(plan: Plan, setup: Setup, configs: dict[str, dict], matmul_peak: dict,
               ) -> dict[str, Length]:
    """How long each run trains that has a configuration, by its name: enough steps for the common
    token count, and for `plan.seconds` by the estimated speed."""
    steps, speeds = {}, {}
    for run in plan.runs:
        if config := configs.get(run.name):
            speed = expected_speed(run, matmul_peak, trained_in(setup.machine), config)
            tokens = max(plan.seconds * speed, (plan.tokens or 0) * run.processes)
            steps[run] = max(plan.min_steps, math.ceil(
                tokens / tokens_per_step(config, run.processes)))
            speeds[run] = speed
    if plan.equal_steps:
        steps = dict.fromkeys(steps, max(steps.values(), default=0))
    return {run.name: length_of(run, plan, setup, configs[run.name], speed, steps[run])
            for run, speed in speeds.items()}


def length_of(run: Run, plan: Plan, setup: Setup, config: dict, rate: float, steps: int) -> Length:
    """So many steps, of about `rate` tok/sec; or, where the plan runs whole scripts, as long as
    they are."""
    gpus = setup.machine["gpus"]
    tuned = any(option.startswith("max-autotune") for option in run.options)
    extra = (TUNE_SECONDS if tuned else COMPILE_SECONDS) if gpus and config["compile"] else 0
    per_step = tokens_per_step(config, run.processes)
    if plan.full_length:
        options: tuple = ("--epochs", plan.epochs) if plan.epochs else ()
        training = DEMO_TOKENS / rate if not gpus else (
            (plan.epochs or EPOCHS) * seconds_per_epoch(setup.data, rate, run, config))
        if plan.tokens:
            options = ("--max-tokens", plan.tokens * run.processes)
            training = plan.tokens * run.processes / rate
        if plan.log_tokens:
            options += ("--eval-freq", max(1, plan.log_tokens // per_step))
        if plan.targets:  # one of them, or the tokens, ends the run
            options += ("--target-loss", min(plan.targets.values()), "--epochs", 10**6)
        return Length(options, 20 + extra + training)
    compared_at = comparison_point(plan.tokens * run.processes, per_step)
    max_tokens = max(compared_at, steps * per_step)
    # Lines come after 1, 1 + eval_freq, 1 + 2 * eval_freq ... steps; so one is at the common count.
    eval_freq = compared_at // per_step - 1 or max_tokens // per_step
    options = ("--max-tokens", max_tokens, "--eval-freq", eval_freq)
    options += ("--epochs", 10**6)  # the tokens alone end the run
    return Length(options, (20 if gpus else 10) + extra + max_tokens / rate)


def expected_speed(run: Run, matmul_peak: dict, dtype: str, config: dict | None = None) -> float:
    """About how many tok/sec, within a factor of three: as much faster than an A100 as matmuls are
    in the type that is trained in, and as the model of `config` is smaller than GPT-2. In float32
    an A100 has the published speed of 00, and other techniques bring no more than FLOAT32_FACTOR.
    Raises UserError, StackError."""
    expected, theirs = run.expected or 0, A100_FLOPS
    if FLOAT16 in str(run.script) and "float16" in matmul_peak:
        dtype = "float16"
    if dtype == "float32":
        plain = published().stages["00"].tok_per_sec * run.processes
        expected = min(expected, FLOAT32_FACTOR * plain)
        theirs = CARDS["A100 80 GB"].float32 * TERA
    smaller = flops_per_token(**GPT2) / flops_per_token(
        **{name: (config or {}).get(name) or size for name, size in GPT2.items()})
    return smaller * expected * matmul_peak.get(dtype, 0) / theirs or 20_000


def flops_per_token(layers: int, width: int, vocab_size: int, context_length: int) -> int:
    """As 00 counts them, but for its norms and biases."""
    products = 12 * layers * width**2 + vocab_size * width
    return 6 * products + 12 * layers * context_length * width


def seconds_per_epoch(data: Path, tok_per_sec: float, run: Run, config: dict | None) -> float:
    """A rough estimate, with the evaluations of an epoch and its sample."""
    tokens = tokens_per_epoch(data)
    if config and tokens > (context := config["context_length"]):
        tokens = context * windows_per_epoch(tokens // context, config["batch_size"], run.processes)
    return 1.3 * tokens / tok_per_sec + 1


def tokens_per_epoch(data: Path) -> int:
    """Those to train on; where none are prepared yet, those of the book."""
    known = tokens_in(data)
    return known["tokens"]["train"] if known else BOOK_TOKENS


# ---- What is left of a study ------------------------------------------------------------------


def time_left(jobs: list[Job], plan: Plan, results: list[Result], expected: dict[str, Length],
              ahead: float) -> str:
    """In words: of these jobs of a plan, and of what is `ahead`, by estimate in so many seconds."""
    seconds = (seconds_left(within_memory(jobs, results, plan), results, expected)
               + ahead * correction(results, expected))
    if plan.memory_limit_gb:  # more may fit
        return f"{in_words(seconds)} or more"
    most = "at most " if seconds and (ahead or plan.may_end_early) else ""
    return most + in_words(seconds)


def seconds_left(jobs: list[Job], results: list[Result], expected: dict[str, Length]) -> float:
    """By the median time of each run's results; for a run without any by its length's estimate,
    corrected by how far the others' were off."""
    times, off = times_of(results), correction(results, expected)
    return sum(times[name] if name in times else off * expected[name].seconds
               for name in (job.run.name for job in jobs))


def times_of(results: list[Result]) -> dict[str, float]:
    """The median seconds of each run's results."""
    return {name: median(result.seconds for result in results if result.name == name)
            for name in {result.name for result in results}}


def correction(results: list[Result], expected: dict[str, Length]) -> float:
    """How many times as long as estimated the runs took; 1 without results."""
    return median([seconds / expected[name].seconds
                   for name, seconds in times_of(results).items() if name in expected] or [1])


def seconds_of_later(study, setup: Setup, plan: Plan, rounds: int | None, matmul_peak: dict,
                     ) -> tuple[int, float]:
    """(how many runs, about how many seconds) the study's plans take that follow `plan`. Raises
    UserError, StackError, OSError."""
    count, seconds = 0, 0.0
    for later, times in study.later(setup, plan):
        configs = configurations(later.runs, later, setup)
        expected = lengths_of(later, setup, configs, matmul_peak)
        jobs = replace(later, rounds=later.rounds or rounds or study.rounds[setup.device]).jobs()
        count += times * len(jobs)
        seconds += times * seconds_left(jobs, [], expected)
    return count, seconds


def within_memory(jobs: list[Job], results: list[Result], plan: Plan) -> list[Job]:
    """Of jobs that grow those whose memory is within the plan's limit, if each run takes as many
    times that of the one before it as it says; all where the limit or the memory isn't known."""
    memory = {result.name: result.record.end["reserved_gb"] for result in results if result.record}
    for run in plan.runs:
        memory[run.name] = memory.get(run.name) or run.memory_growth * memory.get(run.requires, 0)
    limit = plan.memory_limit_gb or math.inf
    return [job for job in jobs if memory[job.run.name] <= limit]


def in_words(seconds: float) -> str:
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


if __name__ == "__main__":
    print(json.dumps(read_configurations(json.loads(sys.argv[1]))))
