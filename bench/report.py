"""A machine's page, results/report.md: all that measure.py knows to measure, piece by piece."""

import hashlib
import json
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench import lengths, plans, processes, runner, scaling, states, statistics, sweeps
from bench.files import relative, write_whole
from bench.profiles import read_trace
from bench.stages import read_published, read_runs
from bench.tables import markdown, plan_table, show, time_tables
from patches import stack

STAGES_SECONDS = 480  # of the three stages on a GPU: as many of the 15 epochs as fit
PAGE_SECONDS = 20  # to draw and write the page at the end
LOOK = {"machine", "memory_gb", "matmul_peak", "bandwidth", "attention", "compile_error",
        "missing", "large_loss"}
TOP = 20  # operations of the profile that are shown


@dataclass
class Report:
    """What the pieces share. All state is in the folder `results`."""

    results: Path
    data: Path
    minutes: float
    tokens: int | None = None  # see plans.Plan; also ends the stages' runs, where it is given
    rungs: str | None = None  # of the ladder and of leave-one-out, such as "0,5-8"
    options: list[str] = field(default_factory=list)  # for every script
    began: float = field(default_factory=time.monotonic)
    failed: bool = False

    @property
    def deadline(self) -> float:
        return self.began + 60 * self.minutes - PAGE_SECONDS

    def read(self, file: str) -> dict:
        """What an earlier start has left in a JSON file, or {}."""
        try:
            return dict(json.loads((self.results / file).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError):
            return {}

    def plan(self, make: Callable, **settings) -> plans.Plan:
        return make(self.machine, data=self.data, results=self.results, tokens=self.tokens,
                    options=self.options, **settings)

    @property
    def look(self) -> dict:
        """What bench.machine.look has found; {} before it has looked."""
        look = self.read("machine.json")
        return look if look.keys() >= LOOK else {}

    @property
    def machine(self) -> dict:
        return self.look["machine"]

    @property
    def time_is_over(self) -> bool:
        return time.monotonic() > self.deadline

    def run(self, plan: plans.Plan, rounds: int) -> bool:
        """Goes on with a plan until it is finished, or the time is over: then it returns False."""
        earlier = bool(states.earlier_state(plan.path))
        try:
            finished = runner.run_plan(plan, rounds, resume=earlier, deadline=self.deadline)
        except plans.UserError as error:
            hint = f"; for a new report, move {relative(self.results)} away, or use --results-dir"
            raise plans.UserError(f"{error}{hint * earlier}", error.code)
        self.failed |= runner.failures(plan, states.earlier_state(plan.path))
        return finished


# ---- What the pieces run: each returns whether it came to its end -------------------------------


def run_machine(report: Report) -> bool:
    machine = processes.ask_machine("this_machine")
    if report.look and not runner.same_machine(report.machine, machine):
        raise plans.UserError(f"{relative(report.results)} holds the report of another machine or"
                              " PyTorch: move it away, or use --results-dir")
    if not report.look:
        found = processes.ask_machine("look")
        try:
            found["large_loss"] = processes.ask_machine("large_loss")
        except plans.UserError as error:
            found["large_loss"] = f"wrong: {error}"
        write_whole(report.results / "machine.json", json.dumps(found, indent=1))
    for thing in report.look["missing"]:
        print(f"missing: {thing}")
    return True


def run_stages(report: Report) -> bool:
    plan = report.plan(plans.stages)
    earlier = states.earlier_state(plan.path)
    if earlier:
        plan.epochs = earlier["plan"]["epochs"]
    elif plan.machine["gpus"] and not plan.tokens:
        speeds = [lengths.expected_speed(run, report.look["matmul_peak"]) for run in plan.runs]
        per_epoch = sum(lengths.seconds_per_epoch(plan, speed) for speed in speeds)
        fitting = int((STAGES_SECONDS - 30 * len(plan.runs)) / per_epoch)
        plan.epochs = min(plans.EPOCHS, max(1, fitting))
    return report.run(plan, rounds=1)


def run_ladder(report: Report) -> bool:
    return report.run(report.plan(plans.ladder, rungs=report.rungs), rounds=1)


def run_more_rounds(report: Report) -> bool:
    return report.run(report.plan(plans.ladder, rungs=report.rungs), rounds=4)


def run_leave_one_out(report: Report) -> bool:
    return report.run(report.plan(plans.leave_one_out, rungs=report.rungs), rounds=4)


def run_variants(report: Report) -> bool:
    return report.run(report.plan(plans.variants), rounds=4)


def run_compile_modes(report: Report) -> bool:
    return report.run(report.plan(plans.compile_modes), rounds=1 if report.machine["gpus"] else 4)


def run_sharded(report: Report) -> bool:
    return all(report.run(report.plan(plans.sharded, model=model), rounds=4)
               for model in (None, "gpt2-medium"))


def run_scaling(report: Report) -> bool:
    return all([report.run(report.plan(scaling.scaling, sizes="1,2,4,8"), rounds=4),
                report.run(report.plan(plans.ddp), rounds=4)])


def run_checkpoints(report: Report) -> bool:
    return report.run(report.plan(plans.checkpoints), rounds=4)


def run_trainer(report: Report) -> bool:
    return report.run(report.plan(plans.trainer), rounds=4)


def run_sweeps(report: Report) -> bool:
    finished = [report.run(report.plan(sweeps.sweep, kind=kind), rounds)
                for kind, rounds in (("batch", 3), ("context", 3), ("model", 1))]
    if not finished[-1]:
        return False
    found = states.read_state(report.results / "sweep-model-batch" / "sweep-model-batch.json")
    finished.append(report.run(report.plan(sweeps.models, found=found["rows"]), 3))
    return all(finished)


def run_profile(report: Report) -> bool:
    text, folder = stack.script_of("profile"), report.results / "profile"
    what = dict(source_sha256=hashlib.sha256(text).hexdigest(), options=report.options)
    earlier = report.read("profile/profile.json")
    if all(earlier.get(name) == value for name, value in what.items()):
        return True
    if time.monotonic() + 90 > report.deadline:
        return False
    script = plans.BUILD / "profile" / stack.file_of("profile")
    stack.write_all({script: text})
    for old in folder.glob("profile-*"):  # of a start that was cut off
        old.unlink()
    code, out, err = processes.run_child(
        [sys.executable, script, "--name", "profile", "--device", report.machine["device"],
         "--data", report.data, "--results-dir", folder, "--max-steps", 12,
         "--eval-freq", 10**9, *report.options],
        TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE="1",  # a CPU's fused loops, by their names
        timeout=600, TORCHINDUCTOR_CACHE_DIR=str(plans.BUILD / "compiler-cache" / "profile"),
    )
    traces = [*folder.glob("profile-*.trace.json")]
    try:
        if code or len(traces) != 1:
            raise ValueError(processes.error_line(err))
        profile = read_trace(traces[0], gpu=bool(report.machine["gpus"]))
    except ValueError as error:
        print(f"profile: failed: {error}", file=sys.stderr)
        report.failed = True
        return True
    write_whole(folder / "profile.json",
                json.dumps(profile | what | dict(trace=traces[0].name), indent=1))
    return True


# ---- What they say on the page ------------------------------------------------------------------


def machine_section(report: Report) -> str:
    look, m = report.look, report.machine
    versions = [f"PyTorch {m['torch']}", f"Python {m['python']}", m["os"],
                f"{m['threads']} threads"]
    if m["gpus"]:
        versions += [f"CUDA {m['cuda']}", f"driver {m['driver']}",
                     f"compute capability {m['capability']}"]
    peaks = ", ".join(f"{name} {flops / 1e12:,.2f}" for name, flops in look["matmul_peak"].items())
    device = f"{m['gpus']} × {m['name']}, host {m['cpu']}" if m["gpus"] else f"No GPU; {m['cpu']}"
    lines = [
        f"{device}. {', '.join(versions)}.",
        f"Matrix products: {peaks} TFLOP/s. Copy within memory: {look['bandwidth'] / 1e9:,.0f} GB/s"
        f" (10⁹ bytes, read and written). Memory: {show(look['memory_gb'], '.1f')} GB.",
        "torch.compile " + (f"doesn't work: {look['compile_error']}" if look["compile_error"]
                            else "works."),
        *(["Cross entropy on more than 2³¹ logits (batch 42 and up at context 1,024): "
           + look["large_loss"] + "."] if m["gpus"] else []),
        *(f"Missing: {thing}." for thing in look["missing"]),
        "Which attention kernels run with which dropout (bfloat16, causal), which one PyTorch"
        " chooses by itself, and the dropout that each really applies; 01 turns cuDNN's off:",
    ]
    backends = markdown({
        "dropout": lambda row: f"{row['dropout']:g}",
        "kernel": lambda row: row["backend"].replace("_", " "),
        "runs": lambda row: "yes" if row["runs"] else "no",
        "PyTorch's choice": lambda row: "←" if row["chosen"] else "",
        "ms, forward and backward": lambda row: show(row["milliseconds"], ".2f"),
        "real dropout": lambda row: show(row["real_dropout"], ".3f"),
    }, look["attention"], {"kernel", "PyTorch's choice"})
    return "\n\n".join(lines) + f"\n\n{backends}"


def plan_section(report: Report, name: str, *pictures: str) -> str:
    """The table of a plan, as far as it is measured, and its pictures."""
    state = states.earlier_state(report.results / name / f"{name}.json")
    rows = state.get("rows", [])
    if not rows or not (any(row["rounds"] for row in rows) or all(row["error"] for row in rows)):
        return ""
    images = [f"![{file.removesuffix('.png')}]({file})" for file in pictures
              if (report.results / file).exists()]
    return "\n\n".join([plan_table(state), *images]) + "\n"


def sweeps_section(report: Report) -> str:
    parts = [plan_section(report, f"sweep-{kind}", f"sweep-{kind}.png") for kind in sweeps.KINDS]
    return "\n".join(part for part in parts if part)


def sharded_section(report: Report) -> str:
    parts = [plan_section(report, f"sharded{suffix}", *pictures)
             for suffix, pictures in (("", ["sharded.png"]), ("-gpt2-medium", []))]
    return "\n".join(part for part in parts if part)


def scaling_section(report: Report) -> str:
    parts = [plan_section(report, "scaling", "scaling.png"), plan_section(report, "ddp")]
    return "\n".join(part for part in parts if part)


def stages_section(report: Report) -> str:
    text = plan_section(report, "stages", "speed.png", "losses.png")
    if not text:
        return ""
    baseline = json.loads(plans.PUBLISHED.read_text(encoding="utf-8"))["baseline"]
    lines = []
    for run in read_runs(report.results / "stages"):
        if run.curve:
            (_, _, *first), (_, _, *last) = run.curve[0], run.curve[-1]
            lines.append(dict(stage=run.label, first=first, last=last))
    lines.append(dict(stage="00, published", first=list(baseline["first_line"].values()),
                      last=list(baseline["last_line"].values())))
    losses = markdown({
        "stage": lambda row: row["stage"],
        "first line: train, val": lambda row: "{:.3f}, {:.3f}".format(*row["first"]),
        "last line: train, val": lambda row: "{:.3f}, {:.3f}".format(*row["last"]),
    }, lines, {"stage"})
    return f"{text}\nLosses, the published ones after 15 epochs of the full experiment:\n\n{losses}"


def time_section(report: Report) -> str:
    """What measure.py time-to-loss has measured, or else what the stages' records tell."""
    parts = [plan_section(report, name, f"{name}.png")
             for name in ("time-to-loss", "time-to-loss-variants")]
    text = "\n".join(part for part in parts if part)
    state = states.earlier_state(report.results / "stages" / "stages.json")
    if text or not state.get("rows"):
        return text
    rows, folder = state["rows"], report.results / "stages"
    plain = statistics.records_of(rows[0], state, folder)
    target = plain and statistics.lowest_val_loss(plain[0])
    if not target:
        return ""
    for row in rows:
        row["time_to"] = {"published": statistics.time_to(
            target, statistics.records_of(row, state, folder))}
    for row, other in zip(rows[1:], rows, strict=False):
        statistics.compare_times(row, other)
    return (f"From the records of the three stages. {time_tables(rows, {'published': target})}\n"
            "Not reached: not within the length of that run; `measure.py time-to-loss` trains for"
            " longer, and with several seeds.\n")


def profile_section(report: Report) -> str:
    profile = report.read("profile/profile.json")
    if not profile:
        return ""
    split = markdown({
        "kind": lambda row: row[0],
        "ms per step": lambda row: f"{1000 * row[1]:,.2f}",
        "share": lambda row: f"{row[1] / profile['seconds']:.1%}",
    }, list(profile["split"].items()), {"kind"})
    operations = markdown({
        "kernel" if profile["gpu"] else "operation": lambda row: f"`{row['name'][:80]}`",
        "kind": lambda row: row["kind"],
        "calls per step": lambda row: f"{row['calls']:g}",
        "ms per step": lambda row: f"{1000 * row['seconds']:,.2f}",
        "share": lambda row: f"{row['seconds'] / profile['seconds']:.1%}",
    }, profile["operations"][:TOP], {"kernel", "operation", "kind"})
    idle = ("no kernel ran" if profile["gpu"] else "none of PyTorch's operations ran")
    return (f"{profile['steps']} steady steps, {1000 * profile['seconds']:,.1f} ms each while the"
            f" profiler was recording (which takes time itself). Idle: {idle}. The trace, for"
            f" ui.perfetto.dev: `profile/{profile['trace']}`.\n\n{split}\n{operations}")


@dataclass(frozen=True)
class Piece:
    """What `run` measures stands in a `section` of the page (None: in that of an earlier piece),
    and can be had alone by `command`."""

    title: str
    run: Callable[[Report], bool]
    section: Callable[[Report], str] | None
    command: str


PIECES = {
    "machine": Piece("This machine", run_machine, machine_section, "python -m bench.machine look"),
    "stages": Piece("The three stages", run_stages, stages_section,
                    "python measure.py stages --rounds 1"),
    "time-to-loss": Piece("The time to a loss", lambda report: True, time_section,
                          "python measure.py time-to-loss"),
    "ladder": Piece("The ladder: one technique more at a time", run_ladder,
                    lambda report: plan_section(report, "ladder", "ladder.png"),
                    "python measure.py ladder"),
    "profile": Piece("Where a step of 01 spends its time", run_profile, profile_section,
                     "python measure.py report --pieces profile"),
    "rounds": Piece("Further rounds of the ladder", run_more_rounds, None,
                    "python measure.py ladder --resume"),
    "leave-one-out": Piece("01 without one technique at a time", run_leave_one_out,
                           lambda report: plan_section(report, "leave-one-out"),
                           "python measure.py leave-one-out"),
    "variants": Piece("01 with one alternative at a time", run_variants,
                      lambda report: plan_section(report, "variants", "variants.png"),
                      "python measure.py variants"),
    "compile-modes": Piece("The compiler's modes: seconds to compile and per step",
                           run_compile_modes,
                           lambda report: plan_section(report, "compile-modes",
                                                       "compile-modes.png"),
                           "python measure.py compile-modes"),
    "sharded": Piece("02 with its memory shared out over the ranks", run_sharded, sharded_section,
                     "python measure.py sharded --model gpt2-medium"),
    "scaling": Piece("How 02 scales over processes", run_scaling, scaling_section,
                     "python measure.py scaling 1,2,4,8"),
    "checkpoints": Piece("What checkpoints cost", run_checkpoints,
                         lambda report: plan_section(report, "checkpoints"),
                         "python measure.py checkpoints"),
    "trainer": Piece("Hugging Face's Trainer", run_trainer,
                     lambda report: plan_section(report, "trainer"),
                     "python measure.py trainer"),
    "sweeps": Piece("What it carries: batch, model, context", run_sweeps, sweeps_section,
                    "python measure.py sweep batch"),
}


def summary(report: Report) -> list[str]:
    """What this machine gives, and where it differs from the published table, in five lines."""
    machine, rows = report.machine, {}
    for name in ("stages", "ladder"):
        state = states.earlier_state(report.results / name / f"{name}.json")
        rows[name] = [row for row in state.get("rows", []) if row["tok_per_sec"]]
    peak = report.look["matmul_peak"]["bfloat16"] / 1e12
    lines = [f"**{machine['name']}**, PyTorch {machine['torch']}: {peak:,.2f} TFLOP/s in bfloat16"
             " matrix products" + ("." if machine["gpus"] else
                                   "; no GPU, so the small model `cpu-demo` is trained.")]
    stages = {row["label"][:2]: row for row in rows["stages"]}
    if {"00", "01"} <= stages.keys():
        plain, fast = stages["00"], stages["01"]
        lines.append(
            f"01 trains **{fast['tok_per_sec']:,.0f} tok/sec, {fast['factor_baseline']:.2f} times**"
            f" 00's {plain['tok_per_sec']:,.0f} (published, on an A100: "
            f"{fast['published']:,.0f}, {fast['published_factor_baseline']:.2f} times), with"
            f" {show(fast['reserved_gb'], '.2f')} GB instead of"
            f" {show(plain['reserved_gb'], '.2f')};"
            f" {min(plain['rounds'], fast['rounds'])} run(s) each."
        )
        if fast["share_of_peak"]:
            lines.append(f"01 reaches {fast['share_of_peak']:.0%} of this machine's own rate of"
                         f" matrix products, 00 {plain['share_of_peak'] or 0:.0%}"
                         " (of that of its precision).")
    rungs = [row for row in rows["ladder"] if row["factor"]]
    if rungs:
        best = sorted(rungs, key=lambda row: -row["factor"])[:4]
        rounds = min(row["rounds"] for row in rungs)
        lines.append(f"What brings most in the ladder ({rounds} round{'s' * (rounds != 1)}): "
                     + ", ".join(f"{row['technique']} {row['factor']:.2f}×" for row in best) + ".")
        other = [row for row in rungs if row["published_factor"]
                 and not 0.8 < row["factor"] / row["published_factor"] < 1.25]
        lines.append("More than a fifth off the published factor: " + (", ".join(
            f"{row['technique']} {row['factor']:.2f}× ({row['published_factor']:.2f}×)"
            for row in other) or "none") + ".")
    return lines


def draw(report: Report) -> None:
    """The pictures of the page. matplotlib is loaded only now, and nothing else needs it."""
    try:
        import matplotlib
    except ImportError as error:
        print(f"the page has no pictures: {error}", file=sys.stderr)
        return
    matplotlib.use("Agg")  # draws without a display
    from bench import pictures

    published, _ = read_published(stack.load())
    folders = {name: report.results / name for name in pictures.PLANS}
    measured = {name: (states.earlier_state(folder / f"{name}.json"), folder)
                for name, folder in folders.items()}
    runs = read_runs(report.results / "stages")
    for name, picture in pictures.draw_all(runs, published, measured).items():
        write_whole(report.results / name, picture)


def write_page(report: Report, missing: list[str]) -> Path:
    """Writes report.md, its pictures, and report.tar.gz with all of the folder's state."""
    draw(report)
    sections = []
    for piece in PIECES.values():
        if piece.section:
            try:
                text = piece.section(report) or "Not measured yet.\n"
            except (LookupError, TypeError, ValueError) as error:
                text = f"What is left of it in the folder is damaged: {error!r}\n"
            sections.append(f"## {piece.title}\n\n{text}\nAlone: `{piece.command}`\n")
    head = [f"# GPT training on {report.machine['name']}", *summary(report)]
    page = head[0] + "\n\n" + "".join(f"{i}. {line}\n" for i, line in enumerate(head[1:], 1))
    options = f" --max-tokens {report.tokens}" if report.tokens else ""
    options += f" --rungs {report.rungs}" if report.rungs else ""
    options += f" -- {' '.join(report.options)}" if report.options else ""
    page += f"\nMade by `python measure.py report{options}`. tok/sec counts training alone.\n"
    if missing:
        page += f"\nNot finished: {', '.join(missing)}; started again, it goes on with them.\n"
    path = report.results / "report.md"
    write_whole(path, page + "\n" + "\n".join(sections))
    archive = report.results / "report.tar.gz"
    temporary = archive.with_name(f".{archive.name}.tmp")
    with tarfile.open(temporary, "w:gz") as tar:
        for item in sorted(report.results.iterdir()):
            if item.name != "reference" and item.suffix != ".gz" and item.suffix != ".tmp":
                tar.add(item, item.name)
    temporary.replace(archive)
    return path


def make_report(report: Report, names: list[str]) -> int:
    """Runs the pieces until they are finished or the time is over; the page is written in any case.

    Returns the exit code: 1 if something failed. Raises UserError where nothing can be measured.
    """
    processes.prepare_tokens(report.data)
    run_machine(report)
    missing = [name for name in names if name != "machine"]
    try:
        for name in list(missing):
            if report.time_is_over:
                break
            print(f"--- {name}", flush=True)
            try:
                if PIECES[name].run(report):
                    missing.remove(name)
            except (plans.UserError, stack.StackError, OSError) as error:
                print(f"error: {name}: {error}", file=sys.stderr)
                report.failed = True
    finally:
        path = write_page(report, missing)
    minutes = (time.monotonic() - report.began) / 60
    print(f"\n{path.read_text(encoding='utf-8').partition('## ')[0]}{relative(path)}, after"
          f" {minutes:.1f} minutes; report.tar.gz beside it holds all of it")
    return 1 if report.failed else 0
