"""Where a training step spends its time, by the averages of PyTorch's profiler."""

import json
import re
from pathlib import Path
from statistics import fmean

from bench.common import UserError, write_whole
from bench.measure.plan import Plan
from bench.measure.records import Record, read_record
from bench.report.tables import Column, Table, num_col, text_col
from bench.studies import Study

MARK = "ProfilerStep*"  # what the profiler calls the steps themselves
TOP = 20  # operations that are shown
PROFILE, TRACE = "profile.json", "profile.trace.json"
STEPS = 12  # that a profiled run trains: two to warm up, ten in the profile
# What an operation or kernel does, by its name; the first pattern that fits counts. Kernels of
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


def kind_of(name: str) -> str:
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, name))


def read_averages(path: Path, record: Record, gpu: bool) -> dict:
    """Returns the profiled steps, from the profiler's table and the run's record: {steps, seconds,
    gpu, operations}, seconds per step everywhere; the operations (on a GPU: kernels) without the
    time of those inside them, the longest first. Raises ValueError for no such table."""
    device, time = ("CUDA", "self_device_us") if gpu else ("CPU", "self_cpu_us")
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        steps = sum(row["calls"] for row in rows
                    if row["name"] == MARK and row["device_type"] == "CPU")
        operations = [
            dict(name=row["name"], calls=row["calls"] / steps, seconds=row[time] / 1e6 / steps)
            for row in rows if row["device_type"] == device and row["name"] != MARK
            and not (gpu and row["is_annotation"])]
        if not operations:
            raise ValueError("it holds no operation")
    except (OSError, LookupError, ArithmeticError, TypeError, ValueError) as error:
        raise ValueError(f"{path.name} is no profile of training steps: {error!r}")
    seconds = [time for log in record.logs for time in log["seconds"]][-steps:]
    operations.sort(key=lambda operation: -operation["seconds"])
    return dict(steps=steps, seconds=fmean(seconds), gpu=gpu, operations=operations)


def split_of(seconds: float, operations: list[dict]) -> list[dict]:
    """Returns the seconds of a step's operations by their kind, and those of "idle": on a GPU the
    time in which no kernel ran, on a CPU that outside of PyTorch's operations."""
    split = dict.fromkeys(KINDS, 0.0)
    for operation in operations:
        split[operation["kind"]] += operation["seconds"]
    split["idle"] = max(0.0, seconds - sum(split.values()))
    return [dict(kind=kind, seconds=time) for kind, time in split.items() if time]


class Profile(Study):
    """Show where a step of 01 spends its time.

    Ten steady steps run under PyTorch's profiler."""

    title = "Where a step of 01 spends its time"
    place = 30
    rounds = {"cuda": 1, "cpu": 1}
    tokens = None
    environment = {"TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE": "1"}  # a CPU's fused loops, by name

    def plans(self, setup):
        if setup.args.max_tokens and not setup.in_report:
            raise UserError(f"--max-tokens: a profile has {STEPS} steps", 2)
        run = setup.scripts.stage("01").replace(
            name="01-profile", label="01, profiled", script="profile", published=None,
            options=("--max-steps", str(STEPS), "--eval-freq", str(10**9)))
        yield Plan([run], full_length=True)

    def collect(self, setup, folder):
        averages = [*folder.glob("*.averages.json")]
        if len(averages) != 1:
            raise ValueError("it left no profile")
        name = averages[0].name.removesuffix(".averages.json")
        record = read_record(folder / f"{name}.jsonl")
        if {log["step"] for log in record.logs} & {*range(1, STEPS - 1)}:
            raise ValueError(f"the profile holds an evaluation, since an epoch has fewer than"
                             f" {STEPS} steps: take a longer text, or a smaller --batch-size")
        profile = read_averages(averages[0], record, gpu=bool(setup.machine["gpus"]))
        write_whole(setup.results / TRACE, (folder / f"{name}.trace.json").read_bytes())
        write_whole(setup.results / PROFILE,
                    json.dumps(profile | dict(options=setup.options, trace=TRACE), indent=1))

    def tables(self, measured, rows):
        """Returns the seconds of each kind of operation, and of the longest operations."""
        if rows[0].error:
            return []
        profile = json.loads((measured.folder / PROFILE).read_text(encoding="utf-8"))
        total, gpu = profile["seconds"], profile["gpu"]
        operations = [line | dict(kind=kind_of(line["name"])) for line in profile["operations"]]
        name = Column("kernel" if gpu else "operation", lambda line: f"`{line['name'][:80]}`", True)
        kind, calls = text_col("kind", "kind"), num_col("calls per step", "calls", "g")
        times = [Column("ms per step", lambda line: f"{1000 * line['seconds']:,.2f}"),
                 Column("share", lambda line: f"{line['seconds'] / total:.1%}")]
        idle = "no kernel ran" if gpu else "none of PyTorch's operations ran"
        caption = (f"{profile['steps']} steady steps, {1000 * total:,.1f} ms each while the"
                   f" profiler was recording (which takes time itself). Idle: {idle}. The trace,"
                   f" for ui.perfetto.dev: `{profile['trace']}`.")
        return [Table([kind, *times], split_of(total, operations), caption),
                Table([name, kind, calls, *times], operations[:TOP])]

    def notes(self, measured, rows):
        return [rows[0].error] if rows[0].error else []
