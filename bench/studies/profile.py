"""Where a training step spends its time, from a trace that PyTorch's profiler has written."""

import json
import re
from collections import defaultdict
from pathlib import Path

from bench.common import write_whole
from bench.measure.plan import Plan
from bench.measure.records import read_record
from bench.report.tables import Column, Table, markdown
from bench.studies import Study

TOP = 20  # operations that are shown
STEPS = 12  # that a profiled run trains: two to warm up, ten in the trace
# What an operation or kernel does, by its name; the first pattern that is found counts. Kernels of
# matmuls are cuBLAS's, CUTLASS's and oneDNN's; the head in chunks has a log-softmax of its own.
KINDS = {
    "attention": r"flash|fmha|scaled_dot_product|attention|cudnn_generated",
    "loss": r"log_softmax|LogSoftMax|softmax_loss|nll_loss|cross_entropy|SoftMax(Forward|Backward)"
            r"|fused\w*_amax_\w*_exp_gather_log_",
    "optimizer": r"[Aa]dam|multi_tensor|Optimizer",
    "matrix products": r"gemm|nvjet|cutlass|cublas|mm\b|mkl|linear|triton_tem",
    "fused by torch.compile": r"triton_|cpp_fused_|CompiledFxGraph",
    "other": r"",
}
GPU_EVENTS = {"kernel", "gpu_memcpy", "gpu_memset"}


def kind_of(name: str) -> str:
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, name))


def self_times(events: list[dict]) -> list[tuple[str, float]]:
    """(name, microseconds without those of the operations inside) of one thread's events."""
    inside, around = defaultdict(float), []  # `around`: those that are open
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
            around.pop()
        if around:
            inside[id(around[-1])] += event["dur"]
        around.append(event)
    return [(event["name"], event["dur"] - inside[id(event)]) for event in events]


def read_trace(path: Path, gpu: bool) -> dict:
    """The profiled steps: {steps, seconds, gpu, operations}, seconds per step everywhere.

    `operations` has the name, calls and seconds of each operation (on a GPU: kernel), the longest
    first. Raises ValueError for no such trace.
    """
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        events = [event for event in events if event.get("ph") == "X"]
        marks = [event for event in events if event["name"].startswith("ProfilerStep#")
                 and event.get("cat") == "user_annotation"]
        steps = len(marks)
        if gpu:
            kernels = [event for event in events if event.get("cat") in GPU_EVENTS]
            start = min(event["ts"] for event in kernels)
            total = max(event["ts"] + event["dur"] for event in kernels) - start
            times = [(event["name"], event["dur"]) for event in kernels]
        else:
            total = sum(event["dur"] for event in marks)
            (thread,) = {event["tid"] for event in marks}
            inside = [event for event in events if event["tid"] == thread and event not in marks
                      and event.get("cat") in ("cpu_op", "user_annotation")]
            times = self_times(inside)
        if not steps or not times:
            raise ValueError("it holds no training step")
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{path.name} is no trace of training steps: {error}")
    seconds, calls = defaultdict(float), defaultdict(int)
    for name, duration in times:
        seconds[name] += duration / 1e6 / steps
        calls[name] += 1
    operations = [dict(name=name, calls=calls[name] / steps, seconds=time)
                  for name, time in sorted(seconds.items(), key=lambda item: -item[1])]
    return dict(steps=steps, seconds=total / 1e6 / steps, gpu=gpu, operations=operations)


def split_of(profile: dict) -> dict[str, float]:
    """The seconds of each kind that a step has, and of "idle": on a GPU the time in which no kernel
    ran, on a CPU that outside of PyTorch's operations."""
    split = dict.fromkeys(KINDS, 0.0)
    for operation in profile["operations"]:
        split[kind_of(operation["name"])] += operation["seconds"]
    split["idle"] = max(0.0, profile["seconds"] - sum(split.values()))
    return {kind: seconds for kind, seconds in split.items() if seconds}


class Profile(Study):
    """Where a step of 01 spends its time: ten steady steps under PyTorch's profiler."""

    title = "Where a step of 01 spends its time"
    schedule = {40: None}
    rounds = {"cuda": 1, "cpu": 1}
    tokens, has_seconds = None, False
    max_tokens_help = ""
    rounds_help = "how often (default: {})"
    environment = {"TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE": "1"}  # a CPU's fused loops, by name

    def plans(self, setup):
        run = setup.scripts.stage("01").but(
            name="01-profile", label="01, profiled", script="profile", published=None,
            options=("--max-steps", str(STEPS), "--eval-freq", str(10**9)))
        yield Plan([run], whole=True)

    def collect(self, setup, folder):
        traces = [*folder.glob("*.trace.json")]
        if len(traces) != 1:
            raise ValueError("it left no trace")
        for path in folder.glob("*.jsonl"):
            if {log["step"] for log in read_record(path).logs} & {*range(1, STEPS - 1)}:
                raise ValueError(f"the profile holds an evaluation, since an epoch has fewer than"
                                 f" {STEPS} steps: take a longer text, or a smaller --batch-size")
        profile = read_trace(traces[0], gpu=bool(setup.machine["gpus"]))
        write_whole(setup.results / "profile.trace.json", traces[0].read_bytes())
        write_whole(setup.results / "profile.json",
                    json.dumps(profile | dict(options=setup.options, trace="profile.trace.json"),
                               indent=1))

    def tables(self, measured, rows):
        return []  # `extra` has them: the trace's figures are no run's

    def notes(self, measured, rows):
        return []

    def result(self, measured, rows):
        return rows[0].error or self.extra(measured.folder, [])

    def extra(self, folder, found):
        try:
            profile = json.loads((folder / "profile.json").read_text(encoding="utf-8"))
        except OSError:
            return ""
        total = profile["seconds"]
        split = markdown(Table([
            Column("kind", lambda line: line[0], True),
            Column("ms per step", lambda line: f"{1000 * line[1]:,.2f}"),
            Column("share", lambda line: f"{line[1] / total:.1%}"),
        ], list(split_of(profile).items())))
        operations = markdown(Table([
            Column("kernel" if profile["gpu"] else "operation",
                   lambda line: f"`{line['name'][:80]}`", True),
            Column("kind", lambda line: kind_of(line["name"]), True),
            Column("calls per step", lambda line: f"{line['calls']:g}"),
            Column("ms per step", lambda line: f"{1000 * line['seconds']:,.2f}"),
            Column("share", lambda line: f"{line['seconds'] / total:.1%}"),
        ], profile["operations"][:TOP]))
        idle = ("no kernel ran" if profile["gpu"] else "none of PyTorch's operations ran")
        return (f"{profile['steps']} steady steps, {1000 * total:,.1f} ms each while the profiler"
                " was recording (which takes time itself). Idle:"
                f" {idle}. The trace, for ui.perfetto.dev: `{profile['trace']}`.\n\n{split}\n"
                f"{operations}")
