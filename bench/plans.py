"""What is measured: a plan is a list of runs, each with the run that it is compared to."""

import importlib.util
import json
import math
import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.files import REFERENCE, ROOT, relative
from patches import stack

BUILD = ROOT / "build"
PUBLISHED = REFERENCE / "published-a100.json"
# The validation losses of a plan's runs are compared after this many training tokens per process;
# 393,216 are one epoch of the full experiment at batch size 32.
TOKENS = {"cuda": 393_216, "cpu": 16_384}
SECONDS = {"cuda": 10.0, "cpu": 0.0}  # a run trains about that long, if the tokens take less
SEED = 123
COMPILER = "compile-mode"  # the variant whose rows are the compiler's modes and backends
CHECKPOINTS = "checkpoint-resume"
SCRATCH = "{scratch}"  # in options: a new folder, removed after the run
# Steps from one checkpoint to the next, where their price is measured.
CHECKPOINT_EVERY = {"cuda": 25, "cpu": 4}
CHECKPOINT_TOKENS = {"cuda": 1_310_720, "cpu": 32_768}  # four saves or more
# How a larger model is run: 40 GB of a GPU, or a minute of two cores, are enough for it. (Compiling
# gpt2-medium takes them three minutes.)
MODEL_BATCH = {"cuda": "8", "cpu": "1"}
MODEL_OPTIONS = {
    "cuda": [], "cpu": ["--context-length", "128", "--eval-windows", "2", "--no-compile"],
}
MODEL_TOKENS = {"cuda": 131_072, "cpu": 768}
EPOCHS = 15  # of the published experiment


class UserError(Exception):
    """An error that the user can fix, printed as one line; `code` is the exit code."""

    def __init__(self, text: str, code: int = 1):
        super().__init__(text)
        self.code = code


@dataclass
class Run:
    """One script with its options; every round of a plan runs it once."""

    name: str  # unique in its plan, and the stage's name in the record
    label: str  # what tables and pictures call it, such as "5 bfloat16"
    script: Path
    technique: str
    loss: str | None = None  # what its patch says it does to the loss: unchanged, rounding, changes
    published: float | None = None  # tok/sec on as many of the published A100s
    expected: float | None = None  # about how many tok/sec such A100s would make, published or not
    processes: int = 1
    torchrun: bool = False  # whether torchrun starts it
    compared_to: str | None = None  # the name of an earlier run
    without_technique: bool = False  # its technique is what it lacks: the other run has it
    options: tuple[str, ...] = ()  # beside those of the plan
    error: str | None = None  # why it can't run
    after: str | None = None  # an earlier, smaller run: this one isn't tried unless that fits
    growth: float = 1  # about how many times the memory of that one it takes
    cores: int | None = None  # of a CPU that it may use (None: all)
    mbit: float | None = None  # on two hosts made on this machine: Mbit/s that each sends


@dataclass
class Plan:
    """Runs, and how each of them runs. The first one is the baseline of all."""

    name: str
    runs: list[Run]
    machine: dict  # see bench.machine.this_machine
    tokens: int | None = None  # per process: where losses are compared (None: TOKENS)
    seconds: float | None = None  # of training (None: SECONDS)
    options: list[str] = field(default_factory=list)  # for every script
    data: Path = ROOT / "data"
    results: Path = ROOT / "results"  # the plan's folder goes there
    seed_noise: bool = True  # whether each round also runs the baseline with another seed
    whole: bool = False  # every run is as long as its script by itself, or has `tokens` in all
    epochs: int | None = None  # of such a run (None: the script's own)
    cold_rounds: int = 1  # that compile anew, so that their first step tells how long it takes
    first_seed: int = SEED
    new_seeds: bool = False  # round k has the seed first_seed + k - 1; else all have first_seed
    log_tokens: int | None = None  # from one log line to the next (None: lines where they matter)
    targets: dict[str, float] = field(default_factory=dict)  # validation losses; the lowest ends
    #                                                          a run, which then has to be `whole`
    grows: bool = False  # a later start may have other runs, whose results come to the earlier ones
    min_steps: int = 1  # of every run, if its tokens are fewer
    until_full: bool = False  # that a run doesn't fit is no failure
    memory_limit_gb: float | None = None  # runs that by their growth would take more aren't tried

    def __post_init__(self):
        device = self.machine["device"]
        if self.whole:
            self.seconds = None
            return
        self.tokens = TOKENS[device] if self.tokens is None else self.tokens
        self.seconds = SECONDS[device] if self.seconds is None else self.seconds

    def seed_of(self, number: int) -> int:
        """The seed of all runs in round `number`, which counts from 1."""
        return self.first_seed + (number - 1) * self.new_seeds

    @property
    def loss_tokens(self) -> int | None:
        """The tokens after which losses are compared; None: at the end of a run."""
        return None if self.targets else self.tokens

    @property
    def path(self) -> Path:
        """The state file, with the records beside it; the table has the suffix .md."""
        return self.results / self.name / f"{self.name}.json"


def tokens_per_step(config: dict, processes: int) -> int:
    return config["batch_size"] * config["context_length"] * processes


def comparison_point(tokens: int, per_step: int) -> int:
    """The tokens after the first step that reaches `tokens`: where a run's loss is read."""
    return math.ceil(tokens / per_step) * per_step


# ---- The plans ---------------------------------------------------------------------------------
# To add one: a function that returns a Plan, and a line in measure.py's parse_arguments. 01 with
# other options is replace(last, name="batch-16", script=ROOT / stack.LAST, published=None,
# options=("--batch-size", "16")), with `last` as in `stages`; the name has to tell the options.


def ladder(machine: dict, rungs: str | None = None, **settings) -> Plan:
    """00, the script after each patch of the series, and with two or more GPUs 02.

    `rungs`: a choice such as "0,5-8"; `settings`: fields of Plan. Raises StackError where a patch
    fails, UserError for a bad choice or where the published figures can't be read.
    """
    patches = stack.load()
    runs = read_rungs(patches, machine["gpus"])
    scripts = [run.script for run in runs]
    texts = dict(zip(scripts, stack.rebuild(patches), strict=True))
    if machine["gpus"] < 2:
        runs.pop()
    runs = [runs[k] for k in parse_rungs(rungs, len(runs))]
    stack.write_all({run.script: texts[run.script] for run in runs})
    return Plan("ladder", compared_in_turn(runs), machine, **settings)


def leave_one_out(machine: dict, rungs: str | None = None, **settings) -> Plan:
    """01, and 01 without each one technique, made by a three-way merge. The rest as in `ladder`."""
    patches = stack.load()
    *stages_to_01, _ = read_rungs(patches, gpus=1)
    *texts, _ = stack.rebuild(patches)
    whole = replace(stages_to_01[-1], name=Path(stack.LAST).stem, label="01", loss=None,
                    technique="every technique", script=BUILD / "leave-one-out" / stack.LAST)
    runs, scripts = [whole], {whole.script: texts[-1]}
    for k in parse_rungs(rungs, len(texts)):
        if k == 0:
            continue  # 00 has no technique; 01 runs in any case
        rung = stages_to_01[k]
        name = f"without-{rung.name}"
        script = whole.script.with_name(f"{name}.py")
        run = replace(rung, name=name, label=f"without {rung.label}", script=script, published=None,
                      expected=whole.expected, compared_to=whole.name, without_technique=True)
        runs.append(run)
        try:
            # base: the stage with the technique; ours: 01; theirs: the stage before it
            scripts[script] = stack.merge(texts[k], texts[-1], texts[k - 1], name)
        except stack.Conflict:
            run.error = "conflict: later patches build on the lines that it changes"
    stack.write_all(scripts)
    return Plan("leave-one-out", runs, machine, cold_rounds=0, **settings)


def variants(machine: dict, names: str | None = None, **settings) -> Plan:
    """01, and each measured variant of it, compared to 01.

    `names`: a choice such as "optimizer-muon,head-chunked" (None: all but the compiler's modes and
    checkpoints, which have plans of their own). Raises StackError, UserError.
    """
    *stages_to_01, _ = read_rungs(stack.load(), gpus=1)
    base = replace(stages_to_01[-1], name=Path(stack.LAST).stem, label="01", loss=None,
                   technique="every technique", published=None)
    return Plan("variants", with_variants("variants", base, names, machine), machine, **settings)


def with_variants(folder: str, base: Run, names: str | None, machine: dict,
                  slot: str | None = None) -> list[Run]:
    """The script of `base`, and a run for each row of its measured variants, or those of a slot,
    compared to it; all are written to build/`folder`. Raises StackError, UserError."""
    known = {patch.name: patch for patch in stack.load_variants()
             if patch.base == base.name and "Slot" in patch.fields
             and slot in (None, patch.fields["Slot"])}
    chosen = [name for name in known if name not in (COMPILER, CHECKPOINTS)]
    if names is not None:
        chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in known:
            raise UserError(f"no variant {name!r} of {base.label}; there are {', '.join(known)}", 2)
    texts = stack.rebuild_all()
    base = replace(base, script=BUILD / folder / f"{base.name}.py")
    runs, scripts = [base], {base.script: texts[stack.find(base.name, list(texts))]}
    for patch in (known[name] for name in chosen):
        script = BUILD / folder / stack.file_of(patch.name)
        scripts[script] = texts[patch.name]
        for options, needs in patch.option_sets:
            name = "-".join(["variant", patch.name, *re.findall(r"\w[\w.-]*", " ".join(options))])
            runs.append(replace(
                base, name=name, label=" ".join([patch.name, *options]), script=script,
                technique=patch.fields["Technique"], loss=patch.fields["Loss"].split()[0],
                options=tuple(options), compared_to=base.name,
                error=lacking(needs, machine),
            ))
    stack.write_all(scripts)
    return runs


def sharded(machine: dict, model: str | None = None, **settings) -> Plan:
    """02, and each variant that shares its memory out over the ranks: one per GPU, two on a CPU.

    `model`: a size such as "gpt2-medium" (None: the scripts' own), for which a smaller batch, and
    on a CPU a shorter context and run, are chosen. Raises StackError, UserError.
    """
    runs = variants_of_02("sharded", "parallel", machine)
    if model is None:
        return Plan("sharded", runs, machine, **settings)
    device = machine["device"]
    settings["tokens"] = settings.get("tokens") or MODEL_TOKENS[device]
    settings["options"] = ["--model", model, "--batch-size", MODEL_BATCH[device],
                           *MODEL_OPTIONS[device], *settings.get("options", [])]
    return Plan(f"sharded-{model}", runs, machine, seed_noise=False, **settings)


def ddp(machine: dict, **settings) -> Plan:
    """02, and 02 with each of DDP's own switches, on as many ranks as `sharded`. Raises StackError,
    UserError."""
    return Plan("ddp", variants_of_02("ddp", "ddp", machine), machine, **settings)


def variants_of_02(folder: str, slot: str, machine: dict) -> list[Run]:
    """02, and its variants of a slot, on all GPUs or on two ranks of a CPU."""
    *_, ddp = read_rungs(stack.load(), machine["gpus"] or 2)
    base = replace(ddp, name=Path(stack.DDP).stem, loss=None, published=None,
                   label=f"02, {ddp.processes} rank{'s' * (ddp.processes > 1)}")
    runs = with_variants(folder, base, None, machine, slot)
    if machine["gpus"] == 1:
        runs = [replace(run, error="needs two or more GPUs") for run in runs]
    return runs


def compile_modes(machine: dict, **settings) -> Plan:
    """01 without the compiler, and with each of its modes and backends, compiled anew in each
    round. On a GPU they train 5 epochs, as the published study did. Raises StackError, UserError.
    """
    base, *runs = variants(machine, COMPILER, **settings).runs
    none = next(run for run in runs if run.options == ("--no-compile",))
    runs = [replace(run, label=run.options[-1].removeprefix("--"), compared_to=none.name)
            for run in (replace(base, options=("--compile-mode", "default"), script=none.script),
                        *(run for run in runs if run is not none))]
    first = replace(none, label="none", compared_to=None)
    whole = {"epochs": 5, "whole": True} if machine["gpus"] else {}
    return Plan("compile-modes", [first, *runs], machine, cold_rounds=sys.maxsize, seed_noise=False,
                **whole | settings)


def checkpoints(machine: dict, **settings) -> Plan:
    """01, and 02 with one process per GPU or two on a CPU: each without checkpoints, with, and with
    such that are written beside the training. Raises StackError, UserError."""
    *_, last, ddp = read_rungs(stack.load(), machine["gpus"] or 2)
    every = CHECKPOINT_EVERY[machine["device"]]
    settings["tokens"] = settings.get("tokens") or CHECKPOINT_TOKENS[machine["device"]]
    saving = ("--checkpoint-every", str(every), "--checkpoint-dir", SCRATCH)
    error = lacking("package safetensors", machine)
    runs, scripts = [], {}
    for run, file, label in (
        (last, stack.LAST, "01"),
        (ddp, stack.DDP, f"02, {ddp.processes} rank{'s' * (ddp.processes > 1)}"),
    ):
        name = Path(file).stem
        base = replace(run, name=name, label=label, script=BUILD / "checkpoints" / file, loss=None,
                       technique="none are saved", published=None)
        own = base.script.with_stem(f"{name}-checkpoints")
        scripts |= {base.script: stack.script_of(name), own: stack.compose([CHECKPOINTS], file)}
        runs.append(base)
        for kind, options in (("saved", saving), ("async", (*saving, "--checkpoint-async"))):
            runs.append(replace(
                base, name=f"{name}-{kind}", label=f"{label}, {kind}", script=own, options=options,
                technique=f"saved every {every} steps", compared_to=name, error=error))
    stack.write_all(scripts)
    return Plan("checkpoints", runs, machine, seed_noise=False, **settings)


def trainer(machine: dict, **settings) -> Plan:
    """01, and the same training by Hugging Face's Trainer, from its defaults to its fastest
    settings. Raises StackError, UserError."""
    *_, last, _ = read_rungs(stack.load(), gpus=1)
    base = replace(last, name=Path(stack.LAST).stem, label="01", loss=None, published=None,
                   technique="every technique", script=ROOT / stack.LAST)
    batch = ("--per_device_train_batch_size", "32" if machine["gpus"] else "8")  # as 01
    tf32 = ("--tf32", "True") if float(machine.get("capability") or 0) >= 8 else ()
    mixed = ("--bf16", *tf32)
    half = ("--dtype", "bfloat16")
    rows = [(), mixed, (*mixed, "--torch_compile"), (*half, "--torch_compile")]
    if not machine["gpus"]:
        rows.append((*rows[-1], "--huge_pages"))
    error = lacking("package transformers, package accelerate", machine)
    runs = [replace(base, name="-".join(["trainer", *re.findall(r"\w+", " ".join(options))]),
                    label=" ".join(["Trainer", *options]), script=ROOT / "peers" / "hf_trainer.py",
                    technique="Hugging Face's Trainer", loss="changes", options=batch + options,
                    compared_to=base.name, error=error)
            for options in rows]
    return Plan("trainer", [base, *runs], machine, seed_noise=False, **settings)


def lacking(needs: str, machine: dict) -> str | None:
    """What a variant needs and this machine doesn't have, as a row tells it."""
    for need in needs.split(", ") if needs else []:
        package = need.removeprefix("package ")
        if package != need and not importlib.util.find_spec(package):
            pinned = package in (ROOT / "requirements-extras.txt").read_text(encoding="utf-8")
            source = "-r requirements-extras.txt" if pinned else package
            return f"needs the package {package}: pip install {source}"
        if package == need and not machine["gpus"]:
            return f"needs {need}"
    return None


def stages(machine: dict, **settings) -> Plan:
    """00, 01, and 02 with one process per GPU, or with two where there is no GPU; the scripts as
    they stand, edited or not, at their full length. Raises StackError and UserError as `ladder`
    does."""
    first, *_, last, ddp = read_rungs(stack.load(), machine["gpus"] or 2)
    ranks = f"{ddp.processes} rank{'s' * (ddp.processes > 1)}"
    runs = [
        replace(first, label="00", script=ROOT / stack.FIRST),
        # The last published figure of a technique is that of the whole script.
        replace(last, name=Path(stack.LAST).stem, label="01", script=ROOT / stack.LAST,
                technique="every technique", loss=None, published=last.expected),
        replace(ddp, label=f"02, {ranks}", script=ROOT / stack.DDP),
    ]
    return Plan("stages", compared_in_turn(runs), machine, seed_noise=False, whole=True, **settings)


def read_rungs(patches: list[stack.Patch], gpus: int) -> list[Run]:
    """00, the script after each patch, and 02 on `gpus`. Raises UserError."""
    published = published_baseline()
    runs = [Run(Path(stack.FIRST).stem, "0 baseline", BUILD / "ladder" / stack.FIRST, "baseline",
                published=published, expected=published)]
    for number, patch in enumerate(patches, 1):
        file = stack.file_of(patch.name)
        run = Run(
            Path(file).stem, f"{number} {re.sub('^[0-9]+-', '', patch.name).replace('-', ' ')}",
            BUILD / "ladder" / file, patch.fields["Technique"], patch.fields["Loss"].split()[0],
            expected=runs[-1].expected,  # where it has no figure of its own
        )
        if patch.name == "ddp":
            run.label, run.processes, run.torchrun = f"{number} DDP", gpus, True
            run.expected *= gpus
        figures = patch.published
        if figures:
            speed, _, on_gpus = figures
            run.expected = speed / on_gpus * run.processes
            run.published = speed if on_gpus == run.processes else None
        runs.append(run)
    return runs


def published_baseline() -> float:
    """tok/sec of 00 on the published A100. Raises UserError."""
    try:
        return float(json.loads(PUBLISHED.read_text(encoding="utf-8"))["baseline"]["tok_per_sec"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{relative(PUBLISHED)} can't be read: {error!r}")


def compared_in_turn(runs: list[Run]) -> list[Run]:
    """The runs, each compared to the one before it."""
    names = [None, *(run.name for run in runs)]
    return [replace(run, compared_to=name) for run, name in zip(runs, names, strict=False)]


def parse_rungs(text: str | None, count: int) -> list[int]:
    """The numbers that "0,5-8" names, of 0 to `count` - 1; all for None. Raises UserError."""
    numbers = set(range(count) if text is None else ())
    for part in [] if text is None else text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if not match:
            raise UserError(f"--rungs {text}: {part!r} is neither a number nor a range like 5-8", 2)
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last or last >= count:
            raise UserError(f"--rungs {text}: {part!r} isn't within 0-{count - 1}", 2)
        numbers.update(range(first, last + 1))
    return sorted(numbers)
