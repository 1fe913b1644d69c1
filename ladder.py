"""Measure every technique between 00_orig.py and 01_opt_single_gpu.py on this machine.

    python ladder.py                       # every rung, 4 rounds
    python ladder.py --rungs 0,5-8         # some of them
    python ladder.py --repeats 1           # one round: figures, but no verdicts
    python ladder.py --repeats 2 --resume  # take up the last ladder, or give it more rounds
    python ladder.py --dry-run             # what would run, and about how long
    python ladder.py --leave-one-out       # 01 without one technique at a time
    python ladder.py -- --model gpt2       # what follows -- goes to every script
    python ladder.py --help                # every setting

Rung 0 is 00_orig.py, rung k the script as it stands after patch k of patches/series; with two or
more GPUs the last one is 02_opt_multi_gpu_ddp.py. Each runs as the file that patches/stack.py
writes out, in a fresh process, with the same data and seed, over the same number of tokens (02: on
each GPU). A round runs every rung once, so that a machine that drifts hits all of them alike.

A run leaves its record in results/ladder/. ladder.json there holds the plan, the runs so far and,
at the end, the rows; ladder.md the same rows as a table. A gain is claimed only after 4 rounds
whose ranges don't overlap. The exit code is 1 if a run failed: the row of its rung says why.
"""

import argparse
import hashlib
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from tqdm import tqdm

from patches import stack

HERE = Path(__file__).resolve().parent
BUILD = HERE / "build"
PUBLISHED = HERE / "results" / "reference" / "published-a100.json"

TOKENS = {"cuda": 393_216, "cpu": 16_384}  # of a run: on a GPU one epoch at batch size 32
SEED = 123  # in round k the baseline runs also with seed 123 + k, which shows the seed noise
ROUNDS_FOR_A_VERDICT = 4
# What the ladder gives every script itself, so that the rungs can be compared.
OWN_OPTIONS = {"--data", "--results-dir", "--name", "--device", "--seed", "--help", "-h"}
OWN_OPTIONS |= {"--max-tokens", "--max-steps", "--epochs"}


@dataclass
class Rung:
    number: int
    name: str
    script: Path
    technique: str
    patches: tuple[str, ...]  # the names of those applied
    loss: str | None = None  # what its patch says that it does to the loss
    published: float | None = None  # tok/sec on the published A100
    processes: int = 1
    error: str | None = None  # why it can't run


@dataclass
class Job:
    """One run. Round 0 is a trial of 3 steps."""

    rung: Rung
    round: int
    seed: int = SEED

    @property
    def key(self) -> tuple:
        return self.rung.name, self.round, self.seed


class UserError(Exception):
    """What the user can mend, told in one line; `code` is the exit code."""

    def __init__(self, text: str, code: int = 1):
        super().__init__(text)
        self.code = code


class Interrupted(BaseException):
    """Ctrl-C, SIGTERM or SIGHUP. No Exception, so that nothing on its way swallows it."""


def on_signals(handler) -> None:
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):  # Windows has no SIGHUP
            signal.signal(getattr(signal, name), handler)


def interrupt(signum, frame) -> None:
    on_signals(signal.SIG_IGN)  # a second one mustn't cut the end short
    raise Interrupted(signum)


# ------------------------------------------------------------------------------------------------
# What there is to run
# ------------------------------------------------------------------------------------------------


def parse_rungs(text: str, count: int) -> list[int]:
    """The numbers that "0,5-8" names, among 0 to `count` - 1. Raises UserError."""
    numbers = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if not match:
            raise UserError(f"--rungs {text}: {part!r} is no number and no range like 5-8", 2)
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last or last >= count:
            raise UserError(f"--rungs {text}: {part!r} isn't within 0-{count - 1}", 2)
        numbers.update(range(first, last + 1))
    return sorted(numbers)


def read_ladder(gpus: int) -> list[Rung]:
    """Every rung in order; their scripts are written out, where no user edits them.

    Raises StackError where a patch fails, UserError where the published figures do.
    """
    try:
        techniques = json.loads(PUBLISHED.read_text(encoding="utf-8"))["techniques"]
        *published, ddp = (float(row["tok_per_sec"]) for row in techniques)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{relative(PUBLISHED)} can't be read: {error!r}")
    patches = stack.load()
    published += [None] * (len(patches) - len(published)) + [ddp]
    rungs, stages = [], zip(stack.names_of(patches), stack.rebuild(patches), strict=True)
    for k, (name, text) in enumerate(stages):
        if name == "ddp" and gpus < 2:
            break
        script = BUILD / "ladder" / stack.file_of(name)
        stack.write_all({script: text})
        fields = patches[k - 1].fields if k else {"Technique": "baseline", "Loss": ""}
        rungs.append(Rung(
            k, script.stem, script, fields["Technique"], tuple(p.name for p in patches[:k]),
            fields["Loss"].partition(" ")[0] or None, published[k],
            processes=gpus if name == "ddp" else 1,
        ))
    return rungs


def leave_one_out(rungs: list[Rung]) -> list[Rung]:
    """01, and 01 without each one technique, merged from 01 and the stages around its patch."""
    rungs = [rung for rung in rungs if rung.processes == 1]
    texts = [rung.script.read_bytes() for rung in rungs]
    whole, variants = rungs[-1], []
    for k, rung in enumerate(rungs):
        name = f"without-{rung.name}" if k else Path(stack.LAST).stem
        variant = replace(
            rung, name=name, script=BUILD / "leave-one-out" / f"{name}.py",
            technique=rung.technique if k else "every technique", published=None,
            patches=tuple(n for n in whole.patches if n != rung.name),
        )
        variants.append(variant)
        try:
            # base: the stage with the technique; ours: 01; theirs: the stage before it
            text = stack.merge(texts[k], texts[-1], texts[k - 1], name) if k else texts[-1]
            stack.write_all({variant.script: text})
        except stack.Conflict:
            variant.error = "conflict: later patches build on the lines that it changes"
    return variants


def check_options(rungs: list[Rung], options: list[str]) -> None:
    """Raises UserError for an option that a rung's script doesn't have, or a bad value of one."""
    names = [option.split("=")[0] for option in options if option.startswith("-")]
    for name in names:
        if name in OWN_OPTIONS:
            raise UserError(f"{name} is set by the ladder itself, for every rung alike", 2)
    # Each script's own parser judges them, as if a process of torchrun had started it.
    parse = "import runpy, sys; runpy.run_path(sys.argv[1])['parse_arguments'](sys.argv[2:])"
    for rung in rungs if options else []:
        code, _, err = run_child([sys.executable, "-c", parse, rung.script, *options], RANK="0")
        if code:
            raise UserError(f"rung {rung.number} ({rung.name}): {last_line(err)}", 2)


# ------------------------------------------------------------------------------------------------
# Running
# ------------------------------------------------------------------------------------------------


def run_child(command: list, **extra_environment: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr). It doesn't outlive the ladder."""
    child = subprocess.Popen(
        [str(part) for part in command], env=os.environ | extra_environment, text=True,
        encoding="utf-8", errors="replace", stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C comes here alone, and is passed on once
    )
    try:
        out, err = child.communicate()
    except BaseException:
        child.terminate()
        try:
            child.communicate(timeout=40)  # torchrun gives its ranks 30 seconds
        except subprocess.TimeoutExpired:
            child.kill()
        raise
    return child.returncode, out, err


def last_line(text: str) -> str:
    """The last line that tells an error, else the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no reason given"]
    told = [line for line in lines if re.match(r"([\w.-]+: )?error: ", line)] or lines
    return re.sub(r"^([\w.-]+: )?error: ", "", told[-1])


def run_tool(script, *options) -> str:
    """What a script of this repository prints. Raises UserError with the last line of its error."""
    code, out, err = run_child([sys.executable, script, *options])
    if code:
        raise UserError(f"{Path(script).name} failed: {last_line(err)}")
    return out


def command_of(job: Job, plan: dict, data: Path, results: Path) -> list:
    launcher = []
    if job.rung.processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        launcher += [f"--nproc_per_node={job.rung.processes}"]
    # 02 gets as many tokens a GPU, or its few steps would give no median.
    tokens = plan["tokens"] * job.rung.processes
    length = ["--max-tokens", tokens] if job.round else ["--max-steps", 3]
    on_a_cpu = ["--eval-freq", 10**9] if plan["machine"]["device"] == "cpu" else []
    return [
        sys.executable, *launcher, job.rung.script, "--name", job.rung.name,
        "--device", plan["machine"]["device"], "--data", data, "--results-dir", results,
        "--seed", job.seed, *length, *on_a_cpu, *plan["options"],
    ]


def run_job(job: Job, plan: dict, data: Path, results: Path) -> dict:
    """Runs it; returns its entry in ladder.json."""
    # torch.compile keeps what it made; the first round must not find it, later ones may.
    cache = BUILD / "compiler-cache" / plan["kind"] / job.rung.name
    if job.round <= 1:
        shutil.rmtree(cache, ignore_errors=True)
    if job.round == 0:
        results = BUILD / "leave-one-out" / "trials"
    began = time.perf_counter()
    code, out, err = run_child(
        command_of(job, plan, data, results),
        TORCHINDUCTOR_CACHE_DIR=str(cache), TRITON_CACHE_DIR=str(cache / "triton"),
    )
    record = re.search(r"^Record: .*?([^/\\\n]+\.jsonl)$", out, re.MULTILINE)
    entry = dict(name=job.rung.name, round=job.round, seed=job.seed, record=None, error=None,
                 seconds=time.perf_counter() - began)
    if record:
        entry["record"] = record[1]
        read_figures(entry, results)
    if code and not entry["error"]:
        entry["error"] = last_line(err) if code > 0 else f"ended by signal {-code}"
    rank = re.search(r"^error: (rank \d+: .+)", err, re.MULTILINE)
    if entry["error"] and rank:  # why the other ranks, and so the record, came to no end
        entry["error"] = rank[1]
    if not record and not entry["error"]:
        entry["error"] = "it left no record"
    return entry


def read_figures(entry: dict, results: Path) -> dict | None:
    """What a run's record says, or None with the reason in `entry`."""
    try:
        lines = (results / entry["record"]).read_text(encoding="utf-8").splitlines()
        start, *_, end = map(json.loads, lines)
        if end["event"] != "end":
            entry["error"] = entry["error"] or "killed: its record has no end"
            return None
        if end["status"] != "complete":
            reason = (end["error"] or "").removeprefix("out of memory: ")
            entry["error"] = f"{end['status'].replace('_', ' ')}: {reason}"
            return None
        speed = end["median_step_tok_per_sec"] or end["avg_tok_per_sec"]
        if entry["round"] and not speed:
            entry["error"] = "too short for a speed: raise --max-tokens"
            return None
        figures = {name: end[name] for name in (
            "reserved_gb", "first_step_seconds", "val_loss", "mfu", "attention_backend")}
        figures |= {name: start["config"].get(name) for name in ("flops_per_token", "compile")}
        return figures | {"tok_per_sec": speed, "average": end["median_step_tok_per_sec"] is None}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        entry["error"] = entry["error"] or f"its record can't be read: {error!r}"
        return None


def measure_ceiling() -> dict[str, float]:
    """Floating-point operations a second of a large matrix product, by precision."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = 8192 if device == "cuda" else 2048
    ceiling = {}
    for name, dtype, precision in (
        ("float32", torch.float32, "highest"), ("TF32", torch.float32, "high"),
        ("bfloat16", torch.bfloat16, "highest"),
    ):
        if name == "TF32" and device != "cuda":
            continue
        torch.set_float32_matmul_precision(precision)
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        seconds = []
        for _ in range(8):
            began = time.perf_counter()
            a @ b
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        ceiling[name] = 2 * size**3 / median(seconds[3:])  # after 3 to warm up
    return ceiling


def this_machine() -> dict:
    """What the ladder has to know of it, told as in every record."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = "cuda" if gpus else "cpu"
    machine = importlib.import_module("00_orig").environment(torch.device(device))
    return dict(device=device, gpus=gpus, torch=machine["torch"], threads=machine["threads"],
                name=machine["gpu"] or machine["cpu"])


# ------------------------------------------------------------------------------------------------
# Figures
# ------------------------------------------------------------------------------------------------


def verdict(new: list[float], old: list[float]) -> str:
    """Whether the speeds `new`, one a round, are faster than `old`: only if no two overlap."""
    if min(len(new), len(old)) < ROUNDS_FOR_A_VERDICT:
        return "no verdict"
    if min(new) > max(old):
        return "faster"
    return "slower" if max(new) < min(old) else "no measurable change"


def precision(patches: tuple[str, ...], device: str) -> str:
    """What a script with these patches multiplies matrices in."""
    if any("bfloat16" in name for name in patches):
        return "bfloat16"
    tensor_cores = any("tensor-cores" in name for name in patches)
    return "TF32" if tensor_cores and device == "cuda" else "float32"


def ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def difference(a: float | None, b: float | None) -> float | None:
    return None if None in (a, b) else a - b


def figures_of(rung: Rung, state: dict, results: Path) -> dict:
    """A rung's row, as far as its own runs tell: the medians over its rounds."""
    entries = [run for run in state["runs"] if run["name"] == rung.name]
    runs, losses = [], {}
    for entry in sorted(entries, key=lambda entry: entry["round"]):
        figures = read_figures(entry, results) if entry["round"] and entry["record"] else None
        if figures:
            losses[entry["seed"]] = figures["val_loss"]
            if entry["seed"] == SEED:
                runs.append(figures)
    errors = [rung.error, *(f"failed: {run['error']}" for run in entries if run["error"])]

    def middle(name: str) -> float | None:
        values = [run[name] for run in runs if run[name] is not None]
        return median(values) if values else None

    used = precision(rung.patches, state["plan"]["machine"]["device"])
    speed, flops_per_token = middle("tok_per_sec"), middle("flops_per_token")
    flops = speed * flops_per_token / rung.processes if speed and flops_per_token else None
    return dict(
        rung=rung.number, name=rung.name, technique=rung.technique, processes=rung.processes,
        loss=rung.loss, published=rung.published, error=next(filter(None, errors), None),
        rounds=len(runs), speeds=[run["tok_per_sec"] for run in runs], tok_per_sec=speed,
        average=any(run["average"] for run in runs), losses=losses, val_loss=middle("val_loss"),
        reserved_gb=middle("reserved_gb"), mfu=middle("mfu"), precision=used,
        first_step_seconds=runs[0]["first_step_seconds"] if runs else None,  # round 1's compiles
        share_of_ceiling=ratio(flops, state["ceiling"].get(used)),
        attention_backend=runs[0]["attention_backend"] if runs else None,
        uncompiled=any(run["compile"] is False for run in runs) and compiles(rung),
    )


def make_rows(rungs: list[Rung], state: dict, results: Path) -> tuple[list[dict], float | None]:
    """(a row for each rung, seed noise). `before` is the nearest row above that has figures."""
    rows = [figures_of(rung, state, results) for rung in rungs]
    before, baseline = {}, next((row for row in rows if row["rung"] == 0 and row["speeds"]), {})
    losses = baseline.get("losses", {}).values()
    noise = max(losses) - min(losses) if len(losses) > 1 and None not in losses else None
    for row in rows:
        others = dict(before=before, baseline=baseline if row is not baseline else {})
        for name, other in others.items():
            row[f"factor_{name}"] = ratio(row["tok_per_sec"], other.get("tok_per_sec"))
            row[f"published_factor_{name}"] = ratio(row["published"], other.get("published"))
            row[f"loss_difference_{name}"] = difference(row["val_loss"], other.get("val_loss"))
        change = row["loss_difference_baseline"]
        row["within_seed_noise"] = None if None in (change, noise) else abs(change) <= noise
        slow, fast = others["before"].get("speeds"), row["speeds"]
        if state["plan"]["kind"] == "leave-one-out":  # 01 has the technique, the row has not
            row["factor_technique"] = ratio(1, row["factor_baseline"])
            slow, fast = row["speeds"], others["baseline"].get("speeds")
        row["verdict"] = verdict(fast, slow) if fast and slow else None
        before = row if row["speeds"] else before
    return rows, noise


def compiles(rung: Rung) -> bool:
    """Whether the script compiles the model unless one says --no-compile."""
    return "--no-compile" in rung.script.read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------------
# Tables
# ------------------------------------------------------------------------------------------------


def show(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)


def table(state: dict) -> str:
    """The rows and what there is to know about them, as Markdown."""
    plan, rows = state["plan"], state["rows"]
    machine, left_out = plan["machine"], plan["kind"] == "leave-one-out"

    def number(name: str, form: str):
        return lambda row: show(row[name], form)

    def factor(name: str):
        def cell(row: dict) -> str:
            ours, theirs = (row[f"{by}factor_{name}"] for by in ("", "published_"))
            return show(ours, ".2f") + ("" if theirs is None else f" ({theirs:.2f})")

        return cell

    columns = {  # heading: what a row has there
        "rung": lambda row: str(row["rung"]),
        "without" if left_out else "technique":
            lambda row: row["technique"] + " \\*" * row["uncompiled"] + " †" * row["average"],
        "tok/sec": number("tok_per_sec", ",.0f"),
        "range": lambda row: (f"{min(row['speeds']):,.0f}–{max(row['speeds']):,.0f}"
                              if row["rounds"] > 1 else "n/a"),
        "technique's factor": number("factor_technique", ".2f") if left_out else None,
        "× before (A100)": None if left_out else factor("before"),
        "× baseline (A100)": None if left_out else factor("baseline"),
        "reserved GB": number("reserved_gb", ".2f"),
        "first step s": number("first_step_seconds", ".1f"),
        "val loss": number("val_loss", ".4f"),
        "Δ before": None if left_out else number("loss_difference_before", "+.4f"),
        "Δ 01" if left_out else "Δ baseline": number("loss_difference_baseline", "+.4f"),
        "within seed noise":
            lambda row: {None: "n/a", True: "yes", False: "no"}[row["within_seed_noise"]],
        "loss by the patch": lambda row: row["loss"] or "n/a",
        "of ceiling": number("share_of_ceiling", ".1%"),
        "MFU": number("mfu", ".1%") if any(row["mfu"] for row in rows) else None,
        "attention": lambda row: row["attention_backend"] or "n/a",
        "verdict": lambda row: (row["error"] or row["verdict"]
                                or ("baseline" if row["rung"] == 0 else "n/a")),
    }
    columns = {heading: cell for heading, cell in columns.items() if cell}
    texts = {"without", "technique", "loss by the patch", "attention", "verdict"}
    lines = [list(columns), [":--" if heading in texts else "--:" for heading in columns]]
    lines += [[cell(row) for cell in columns.values()] for row in rows]

    rounds = max((row["rounds"] for row in rows), default=0)
    ceilings = ", ".join(f"{k} {v / 1e12:,.2f}" for k, v in state["ceiling"].items())
    options = f", options `{shlex.join(plan['options'])}`" if plan["options"] else ""
    notes = [
        f"{machine['name']}, PyTorch {machine['torch']}, {plan['tokens']:,} tokens a run,"
        f" {rounds} round(s), seed {SEED}{options}. Matrix products: {ceilings} TFLOP/s.",
        "tok/sec is the median over the rounds of each run's median step, the range their smallest"
        " and largest. \"faster\" and \"slower\" need 4 rounds and ranges that don't overlap.",
    ]
    if left_out:
        notes += ["The factor is 01's tok/sec over that without the technique; \"faster\" means"
                  " that 01 is faster with it."]
    else:
        notes += ["Factors over the nearest rung above that ran, and over the baseline; in brackets"
                  " the published ones, from an A100, where there are any; of these, rungs 0-7 are"
                  " averages of an epoch, from 8 on the speed at its end."]
    if state["seed_noise"] is not None:
        first = rows[0]
        notes += [f"Seed noise is the range of {first['name']}'s losses over"
                  f" {len(first['losses'])} seeds, {state['seed_noise']:.4f}."]
    if any(row["processes"] > 1 for row in rows):
        notes += ["02 trains as many tokens on each GPU, so on several times as many; its loss is"
                  " that after them."]
    if any(row["uncompiled"] for row in rows):
        notes += ["\\* without torch.compile: it found no compiler, or was told not to use it."]
    if any(row["average"] for row in rows):
        notes += ["† too few steps for a median: the average of the run."]
    markdown = ["| " + " | ".join(c.replace("|", r"\|") for c in line) + " |" for line in lines]
    return "\n".join([*markdown, "", *(f"{note}\n" for note in notes)])


# ------------------------------------------------------------------------------------------------
# Main
# ------------------------------------------------------------------------------------------------


def write(path: Path, text: str) -> None:
    """Written beside it and renamed: `path` is never half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(text.encode())
    temporary.replace(path)


def keep(path: Path) -> None:
    """Puts an earlier ladder's files aside, named by the time when it ended."""
    if path.exists():
        ended = time.strftime("-%Y%m%dT%H%M%SZ", time.gmtime(path.stat().st_mtime))
        for file in (path.with_suffix(".md"), path):
            if file.exists():
                file.replace(file.with_stem(file.stem + ended))


def read_state(path: Path) -> dict:
    """The earlier state, or {} where there is none that can be read."""
    fields = {"name", "round", "seed", "record", "error", "seconds"}
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        state |= dict(plan=dict(state["plan"]), ceiling=dict(state["ceiling"]))
        return state if all(fields <= run.keys() for run in state["runs"]) else {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}


def resume(path: Path, plan: dict, results: Path) -> dict:
    """The state to go on from. Raises UserError if it was measured with another plan."""
    state = read_state(path)
    if not state:
        raise UserError(f"nothing to resume: {relative(path)} is missing or damaged", 2)
    for name, value in plan.items():
        earlier = state["plan"].get(name)
        if earlier != value and name != "repeats":  # more rounds of the same are welcome
            raise UserError(f"can't resume {relative(path)}: it was measured with other {name};"
                            " without --resume a new one begins", 2)
    # A run that failed is tried again, and so is one whose record is gone.
    state["runs"] = [run for run in state["runs"] if not run["error"] and run["record"]
                     and (run["round"] == 0 or read_figures(run, results))]
    return state | {"plan": plan}


def seconds_left(jobs: list[Job], runs: list[dict]) -> float | None:
    """By the median time of each rung's runs; for a rung that had none, of all runs."""
    times = {}
    for run in runs:
        times.setdefault(run["name"], []).append(run["seconds"])
    whole = [second for seconds in times.values() for second in seconds]
    return sum(median(times.get(job.rung.name, whole)) for job in jobs) if whole else None


def minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def make_jobs(rungs: list[Rung], kind: str, repeats: int) -> list[Job]:
    rungs = [rung for rung in rungs if not rung.error]
    jobs = [Job(rung, 0) for rung in rungs[1:] if kind == "leave-one-out"]
    for number in range(1, repeats + 1):
        for rung in rungs:
            jobs.append(Job(rung, number))
            if rung.number == 0:
                jobs.append(Job(rung, number, SEED + number))
    return jobs


def announce(jobs: list[Job], plan: dict, earlier: list[dict], data: Path, results: Path) -> None:
    """Prints the commands of the jobs, and how long they take, as far as `earlier` runs tell."""
    for job in jobs:
        _, *command = command_of(job, plan, *map(relative, (data, results)))
        parts = [relative(part) if isinstance(part, Path) else str(part) for part in command]
        print(f"round {job.round}: python {shlex.join(parts)}")
    start, tok_per_sec = (15, 20_000) if plan["machine"]["gpus"] else (10, 1_500)
    guess = len(jobs) * (start + plan["tokens"] / tok_per_sec)
    seconds = seconds_left(jobs, earlier)
    source = "by the ladder before it" if seconds else "a rough estimate"
    print(f"{len(jobs)} runs, about {minutes(seconds or guess)} ({source})")


def run_jobs(jobs: list[Job], state: dict, path: Path, data: Path, results: Path) -> None:
    """Runs them in order, and saves the state after each."""
    failed = {run["name"] for run in state["runs"] if run["error"]}
    form = "{desc} {percentage:3.0f}% {bar} {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
    with tqdm(total=len(jobs), bar_format=form, disable=None) as bar:
        for i, job in enumerate(jobs):
            bar.set_description_str(f"round {job.round}: {job.rung.name}")
            if job.rung.name not in failed:
                entry = run_job(job, state["plan"], data, results)
                state["runs"].append(entry)
                write(path, json.dumps(state, indent=1))
                figures = read_figures(entry, results) if entry["record"] and job.round else None
                if entry["error"]:
                    failed.add(job.rung.name)
                    text = f"failed: {entry['error']}"
                elif figures:
                    text = (f"{figures['tok_per_sec']:,.0f} tok/sec, val loss"
                            f" {show(figures['val_loss'], '.3f')}, {entry['seconds']:.0f} s")
                else:
                    text = "3 steps, complete"
                later = [job for job in jobs[i + 1 :] if job.rung.name not in failed]
                left = minutes(seconds_left(later, state["runs"]))
                seed = f", seed {job.seed}" if job.seed != SEED else ""
                bar.set_postfix_str(f"{left} left")
                bar.write(f"round {job.round}: {job.rung.name}{seed}: {text}; {left} left")
                sys.stdout.flush()
            bar.update()


def relative(path: Path) -> str:
    try:
        return os.path.relpath(path)
    except ValueError:  # another drive of a Windows machine
        return str(path)


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is out of range")
    return int(text)


positive.__name__ = "whole number"


def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(the settings, the options behind --)."""
    parser = argparse.ArgumentParser(
        usage="ladder.py [options] [-- options of the scripts]", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--rungs", metavar="0,5-8", help="which rungs (default: all)")
    parser.add_argument("--repeats", type=positive, default=4, metavar="N", help="rounds (4)")
    parser.add_argument("--max-tokens", type=positive, metavar="N",
                        help="tokens of a run (GPU: 393,216, CPU: 16,384)")
    parser.add_argument("--resume", action="store_true", help="go on where the last one stopped")
    parser.add_argument("--dry-run", action="store_true", help="tell what would run, and how long")
    parser.add_argument("--leave-one-out", action="store_true",
                        help="01 without one technique at a time")
    parser.add_argument("--data", type=Path, default=HERE / "data", metavar="DIR",
                        help="folder of the tokens (default: data/ beside this script)")
    parser.add_argument("--results-dir", type=Path, default=HERE / "results", metavar="DIR",
                        help="where the folder ladder/ or leave-one-out/ with records and tables"
                             " goes (default: results/ beside this script)")
    cut = argv.index("--") if "--" in argv else len(argv)
    return parser.parse_args(argv[:cut]), argv[cut + 1 :]


def ladder(args: argparse.Namespace, options: list[str]) -> int:
    """Does what the options say; returns the exit code. Raises UserError."""
    kind = "leave-one-out" if args.leave_one_out else "ladder"
    results = args.results_dir / kind
    path = results / f"{kind}.json"
    machine = json.loads(run_tool(__file__, "--this-machine"))
    rungs = read_ladder(machine["gpus"])
    chosen = parse_rungs(args.rungs, len(rungs)) if args.rungs is not None else range(len(rungs))
    if args.leave_one_out:
        rungs, chosen = leave_one_out(rungs), {0, *chosen}
    rungs = [rung for rung in rungs if rung.number in chosen]
    check_options([rung for rung in rungs if not rung.error], options)

    meta = args.data / "meta.json"
    if not meta.exists() and not args.dry_run:
        print("No tokens there: running data/prepare.py", flush=True)
        run_tool(HERE / "data" / "prepare.py", "--out", args.data)
    plan = dict(
        kind=kind, machine=machine, repeats=args.repeats, options=options,
        tokens=args.max_tokens or TOKENS[machine["device"]],
        data=hashlib.sha256(meta.read_bytes()).hexdigest() if meta.exists() else None,
        rungs={rung.name: hashlib.sha256(rung.script.read_bytes()).hexdigest()
               if rung.script.exists() else None for rung in rungs},
    )
    earlier = read_state(path).get("runs", [])
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    state = dict(schema=1, time=now, plan=plan, ceiling={}, runs=[], rows=[], seed_noise=None)
    if args.resume:
        state |= resume(path, plan, results) | {"rows": []}
    done = {(run["name"], run["round"], run["seed"]) for run in state["runs"]}
    jobs = [job for job in make_jobs(rungs, kind, args.repeats) if job.key not in done]

    if args.dry_run:
        announce(jobs, plan, earlier, args.data, results)
        return 0

    if not state["ceiling"]:
        print("Measuring this machine's matrix products", flush=True)
        state["ceiling"] = json.loads(run_tool(__file__, "--measure-ceiling"))
    if not args.resume:
        keep(path)
    write(path, json.dumps(state, indent=1))
    run_jobs(jobs, state, path, args.data, results)
    state["rows"], state["seed_noise"] = make_rows(rungs, state, results)
    write(path, json.dumps(state, indent=1))
    text = table(state)
    write(path.with_suffix(".md"), text)
    print(f"\n{text}\n{relative(path.with_suffix('.md'))}\n{relative(path)}")
    return 1 if any(run["error"] for run in state["runs"]) else 0


def main() -> int:
    sys.stdout.reconfigure(errors="replace")  # a terminal without × or Δ is no reason to stop
    # In processes of their own, that leave the GPU free.
    looks = {"--this-machine": this_machine, "--measure-ceiling": measure_ceiling}
    if len(sys.argv) == 2 and sys.argv[1] in looks:
        print(json.dumps(looks[sys.argv[1]]()))
        return 0
    args, options = parse_arguments(sys.argv[1:])
    on_signals(interrupt)
    try:
        return ladder(args, options)
    except (UserError, stack.StackError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "code", 1)
    except Interrupted as error:
        again = [option for option in sys.argv[1:] if option != "--resume"]
        print(f"interrupted: python ladder.py --resume {shlex.join(again)} goes on from here",
              file=sys.stderr)
        return 128 + error.args[0]


if __name__ == "__main__":
    sys.exit(main())
