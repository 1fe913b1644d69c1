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
from bench.catalogue import EPOCHS, FLOAT16, Run, in_float16, published
from bench.common import (
    BUILD,
    UserError,
    read_kept,
    same_machine,
    sha256,
    tokens_in,
    trained_in,
    write_whole,
)
from bench.measure.journal import journal_of, loose_records, read_journal
from bench.measure.plan import Plan, Setup
from bench.measure.records import comparison_point, tokens_per_step, windows_per_epoch
from bench.predict.speed import A100_FLOPS, CARDS, TERA
from bench.predict.store import TOKENS_OF_BOOK, largest, predict

# What the runner gives every script itself, so that runs can be compared.
OWN_OPTIONS = {
    "--data", "--results-dir", "--name", "--device", "--seed", "--max-tokens", "--max-steps",
    "--epochs", "--eval-freq", "--target-loss", "--help", "-h",
}
PUBLISHED = {"8": "0", "32": "10-batch-size"}  # batch size: the first rung that has it
LOADED = 300  # MiB that kernels and libraries still take of what is free
COMPILE_SECONDS = 40  # of a script that compiles its model, in round 1: a rough estimate
TUNE_SECONDS = 300  # where max-autotune times kernels for each product on a GPU, as rough
CPU_SPEED = 1_500  # tok/sec of a CPU on which nothing is measured yet: a rough estimate
DEMO_TOKENS = 40_960  # that a whole script trains on a CPU, by its own limit
# How much faster 01 is than 00 where both train in float32: measured on two cores with AVX2 alone.
FLOAT32_FACTOR = 2.2
# What is known of a script's configuration, None where it has no such setting; how many are kept.
CONFIGURATION = "model", "batch_size", "context_length", "learning_rate", "compile"
KEPT = 1_000


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
    """Of each run by its name what CONFIGURATION names.

    Each script's own parser judges the options; what it said once of a script, with these options
    on this machine, is kept in build/. Raises UserError where one refuses them.
    """
    for option in setup.options:
        name = option.split("=")[0]
        if name in OWN_OPTIONS:
            raise UserError(f"{name} is set by measure.py itself, for every run alike", 2)
    options = ["--device", setup.device, *plan.options, *setup.options]
    path = BUILD / "configurations.json"
    saved, keys = read_kept(path), {run.name: key_of(run, options, setup) for run in runs}
    unknown = [run for run in runs if keys[run.name] not in saved]
    if unknown:  # all are asked in one child, which loads PyTorch
        requests = [[str(setup.script(run)), [*options, *run.options]] for run in unknown]
        one_rank = dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        answers = json.loads(processes.ask(  # for 02, as if torchrun had started it
            "-m", "bench.measure.lengths", json.dumps(requests), **one_rank))
        for run, answer in zip(unknown, answers, strict=True):
            if "error" in answer:
                raise UserError(f"{run.name}: {answer['error']}", 2)
            saved[keys[run.name]] = answer
        write_whole(path, json.dumps(dict([*saved.items()][-KEPT:]), indent=1))
    return {run.name: saved[keys[run.name]] for run in runs}


def key_of(run: Run, options: list[str], setup: Setup) -> str:
    """What a run's configuration follows from: its script (a peer, which isn't in the catalogue,
    takes settings from 00), its options, and the machine."""
    peer = [setup.scripts.text("0")] * isinstance(run.script, Path)
    facts = [*map(sha256, [setup.scripts.text(run.script), *peer]), options, run.options,
             setup.machine, CONFIGURATION]
    return sha256(json.dumps(facts).encode())


# ---- The batch size that fits a GPU, by the prediction of its memory ----------------------------


def fitting(setup: Setup, script: str = PUBLISHED["32"]) -> dict[str, int]:
    """What takes the place of the published batch sizes, by them; nothing where they fit, or
    without a GPU. From rung 10 on it is what `script` takes that counts. Says what it finds."""
    if setup.batches is None:
        setup.batches = {}
        if setup.device == "cuda" and not option_of("--batch-size", setup.options):
            setup.batches = predicted(setup, script)
    return setup.batches


def option_of(name: str, options: list[str]) -> bool:
    return any(option.split("=")[0] == name for option in options)


def fast_of(plan: Plan) -> str:
    """The script that counts in fitting(): that of rung 10, or the one in place of 01."""
    in_place = any(run.script == FLOAT16 and run.stage for run in plan.runs)
    return FLOAT16 if in_place else PUBLISHED["32"]


def fast_here(setup: Setup) -> str:
    """That of this machine's 01."""
    return FLOAT16 if in_float16(setup.machine, setup.options) else PUBLISHED["32"]


def predicted(setup: Setup, script: str) -> dict[str, int]:
    """As fitting. Up to rung 9 the largest power of two that fits, from there four times that, or
    the largest that fits. Predictions are in bfloat16 unless told otherwise."""
    free = min(processes.ask_machine("free_memory"))
    model = [] if option_of("--model", setup.options) else ["--model", "gpt2"]
    found, rest = {}, ""
    try:
        for batch, rung in (PUBLISHED | {"32": script}).items():
            options = [option for option in setup.options  # 00 has nothing to compile
                       if rung != "0" or option not in ("--compile", "--no-compile")]
            own = options_of_type(setup, rung) if rung != "0" else []
            needs = predict(setup.scripts, rung, [*model, *own, *options], setup.results,
                            free - LOADED).needs
            fits = largest(needs, free, LOADED)
            rest = rest or "; not even that fits" * (not fits)
            found[batch] = min(int(batch), fits or 1)
    except UserError as error:
        print(f"whether the published batch sizes fit isn't known: {error}", file=sys.stderr)
        return {}
    found["32"] = min(found["32"], 4 * found["8"])
    if found == {batch: int(batch) for batch in PUBLISHED}:
        return {}
    print(f"{free / 1024:.1f} GB of the GPU's memory are free: by prediction, batch size"
          f" {found['8']} in place of 8, and {found['32']} in place of 32{rest}", file=sys.stderr,
          flush=True)
    return found


def options_of_type(setup: Setup, script: str | Path) -> list[str]:
    """For a prediction of a script from rung 5 on: the type that it trains in here."""
    asked = option_of("--dtype", setup.options) or trained_in(setup.machine) == "bfloat16"
    return [] if asked or script == FLOAT16 else ["--dtype", trained_in(setup.machine)]


def fit(plan: Plan, setup: Setup, batches: dict[str, int]) -> Plan:
    """The plan with these batch sizes in place of the published ones. Raises UserError."""
    if not batches or plan.until_full:
        return plan
    free = [run for run in plan.runs if not run.error and not option_of(
        "--batch-size", [*plan.options, *setup.options, *run.options])]
    configs = configurations(free, plan, setup)
    runs = []
    for run in plan.runs:
        own = configs[run.name]["batch_size"] if run in free else None
        batch = batches.get(str(own), own)
        runs.append(run if batch == own else run.but(
            options=(*run.options, "--batch-size", str(batch))))
    return replace(plan, runs=runs, batches=batches)


# ---- The length --------------------------------------------------------------------------------


def lengths_of(plan: Plan, setup: Setup, configs: dict[str, dict], matmul_peak: dict,
               speeds: dict[str, float] | None = None) -> dict[str, Length]:
    """How long each run trains that has a configuration, by its name: enough steps for the common
    token count, and for `plan.seconds` by the estimated speed. `speeds` are those that were
    measured on this CPU."""
    runs = [run for run in plan.runs if run.name in configs]
    steps, rates, usual = {}, {}, median((speeds or {"": CPU_SPEED}).values())
    for run in runs:
        speed = expected_speed(run, matmul_peak, trained_in(setup.machine))
        tokens = max(plan.seconds * speed, (plan.tokens or 0) * run.processes)
        steps[run.name] = max(plan.min_steps, math.ceil(
            tokens / tokens_per_step(configs[run.name], run.processes)))
        rates[run.name] = speed if setup.machine["gpus"] else (speeds or {}).get(run.name) or usual
    if plan.equal_steps:
        steps = dict.fromkeys(steps, max(steps.values(), default=0))
    return {run.name: length_of(run, plan, setup, configs[run.name], rates[run.name],
                                steps[run.name]) for run in runs}


def length_of(run: Run, plan: Plan, setup: Setup, config: dict, rate: float, steps: int) -> Length:
    """So many steps, of about `rate` tok/sec; or, where the plan runs whole scripts, as long as
    they are."""
    gpus = setup.machine["gpus"]
    tuned = any(option.startswith("max-autotune") for option in run.options)
    extra = (TUNE_SECONDS if tuned else COMPILE_SECONDS) if gpus and config["compile"] else 0
    per_step = tokens_per_step(config, run.processes)
    if plan.whole:
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


def speeds_here(study: str, plan: Plan, setup: Setup, configs: dict[str, dict]) -> dict[str, float]:
    """tok/sec of the runs that were measured on this machine's CPU with these options, by their
    names: of `stages`, and of the study, the newest ones; without any as speeds_by_hand. Nothing on
    a GPU, whose speed follows from its products. Raises OSError."""
    if setup.device != "cpu":
        return {}
    return {result.name: result.record.tok_per_sec
            for name in dict.fromkeys(("stages", study))
            for measured in read_journal(journal_of(setup.results, name))
            if same_machine(measured.machine, setup.machine)
            and (measured.options, measured.plan.options) == (setup.options, plan.options)
            for result in measured.results if result.record} or speeds_by_hand(setup, configs)


def speeds_by_hand(setup: Setup, configs: dict[str, dict]) -> dict[str, float]:
    """tok/sec of the scripts that `make bench` or a user started with the model and the context of
    such runs, by their stages. Damaged records are named. Raises OSError."""
    kinds = {(config["model"], config["context_length"]) for config in configs.values()}
    return {record.stage: record.tok_per_sec for record in loose_records(setup.results)
            if record.outcome.complete and record.config["device"] == setup.device
            and record.environment.get("torch") == setup.machine["torch"]
            and (record.config.get("model"), record.config["context_length"]) in kinds}


def peak_by_hand(setup: Setup, configs: dict[str, dict]) -> dict[str, float]:
    """About the rate of matmuls on a GPU where none was measured: that with which
    expected_speed gives 01 the speed that speeds_by_hand tells; {} where it tells none."""
    run, dtype = setup.scripts.here("01", setup.machine, setup.options), trained_in(setup.machine)
    speed = setup.machine["gpus"] and speeds_by_hand(setup, configs).get(run.name)
    return {dtype: speed / expected_speed(run, {dtype: 1.0}, dtype)} if speed else {}


def epochs_within(plan: Plan, setup: Setup, matmul_peak: dict, configs: dict[str, dict]) -> int:
    """As many of the published epochs as each run of a plan can have within its limit."""
    dtype = trained_in(setup.machine)
    per_epoch = sum(seconds_per_epoch(setup.data, expected_speed(run, matmul_peak, dtype), run,
                                      configs.get(run.name)) for run in plan.runs)
    return min(EPOCHS, max(1, int((plan.within - 30 * len(plan.runs)) / per_epoch)))


def expected_speed(run: Run, matmul_peak: dict, dtype: str) -> float:
    """About how many tok/sec: as much faster than an A100 as matmuls are in the type that
    is trained in. In float32 an A100 has the published speed of 00, and other techniques bring no
    more than FLOAT32_FACTOR. Raises UserError, StackError."""
    expected, theirs = run.expected or 0, A100_FLOPS
    if FLOAT16 in str(run.script) and "float16" in matmul_peak:
        dtype = "float16"
    if dtype == "float32":
        plain = published().stages["00"].tok_per_sec * run.processes
        expected = min(expected, FLOAT32_FACTOR * plain)
        theirs = CARDS["A100 80 GB"].float32 * TERA
    return expected * matmul_peak.get(dtype, 0) / theirs or 20_000


def seconds_per_epoch(data: Path, tok_per_sec: float, run: Run, config: dict | None) -> float:
    """A rough estimate, with the evaluations of an epoch and its sample."""
    tokens = tokens_per_epoch(data)
    if config and tokens > (context := config["context_length"]):
        tokens = context * windows_per_epoch(tokens // context, config["batch_size"], run.processes)
    return 1.3 * tokens / tok_per_sec + 1


def tokens_per_epoch(data: Path) -> int:
    """Those to train on; where none are prepared yet, those of the book."""
    known = tokens_in(data)
    return known["tokens"]["train"] if known else TOKENS_OF_BOOK


if __name__ == "__main__":
    print(json.dumps(read_configurations(json.loads(sys.argv[1]))))
