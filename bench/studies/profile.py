"""Where a training step spends its time, by the averages of PyTorch's profiler."""

import json
import re
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from bench.analysis.rows import Rows
from bench.common import write_whole
from bench.measure.plan import Plan, Setup, WholeScript
from bench.measure.records import Record, read_record
from bench.studies import Plans, Study
from gpt_speed.common import UserError
from gpt_speed.tables import Column, Table, num_col, text_col

TOP = 20  # operations that are shown
PROFILE, TRACE = "profile.json", "profile.trace.json"
STEPS, TIMED = 12, 10  # of such a run, and those in the profile, after two to warm up
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


@dataclass(frozen=True)
class Operation:
    """What a step spends on all calls of an operation or kernel."""

    name: str
    calls: float
    seconds: float

    @property
    def kind(self) -> str:
        return kind_of(self.name)

    @property
    def short_name(self) -> str:
        return f"`{self.name[:80]}`"


class KindTime(NamedTuple):
    """What a step spends on a kind of operation."""

    kind: str
    seconds: float


def operations_in(averages: list[dict], gpu: bool) -> list[Operation]:
    """Returns the operations of a profile, on a GPU its kernels; the longest first. A span of time
    isn't counted, since its operations are."""
    device, time = "CPU", "self_cpu_us"
    if gpu:
        device, time = "CUDA", "self_device_us"
    operations = [
        Operation(row["name"], row["calls"] / TIMED, row[time] / 1e6 / TIMED)
        for row in averages
        if row["device_type"] == device
        and row["name"] != "ProfilerStep*"
        and not (gpu and row["is_annotation"])
    ]
    return sorted(operations, key=attrgetter("seconds"), reverse=True)


@dataclass(frozen=True)
class StepProfile:
    """A steady step, as profile.json keeps it."""

    seconds: float
    gpu: bool
    operations: list[Operation]  # the longest first

    def by_kind(self) -> dict[str, float]:
        """Returns the seconds of each kind of operation, and those in which nothing ran."""
        split = dict.fromkeys([*KINDS, "idle"], 0.0)
        for operation in self.operations:
            split[operation.kind] += operation.seconds
        split["idle"] = max(0.0, self.seconds - sum(split.values()))
        return split


def profile_of(record: Record, averages: list[dict], on_gpu: bool) -> StepProfile:
    """Returns the profile of a run. Raises ValueError where that isn't one of training steps."""
    if any(1 <= log["step"] < STEPS - 1 for log in record.logs):
        raise ValueError(
            f"the profile holds an evaluation, since an epoch has fewer than"
            f" {STEPS} steps: take a longer text, or a smaller --batch-size"
        )
    operations = operations_in(averages, on_gpu)
    if not operations:
        raise ValueError("the profile holds no operation")
    seconds = [time for log in record.logs for time in log["seconds"]]
    return StepProfile(fmean(seconds[-TIMED:]), on_gpu, operations)


def read_profile(folder: Path) -> StepProfile:
    content = json.loads((folder / PROFILE).read_text())
    operations = [
        Operation(operation["name"], operation["calls"], operation["seconds"])
        for operation in content["operations"]  # older files have other fields, too
    ]
    return StepProfile(content["seconds"], content["gpu"], operations)


class Profile(Study):
    """Show where a step of 01 spends its time.

    Ten steady steps run under PyTorch's profiler."""

    title = "Where a step of 01 spends its time"
    position = 30
    rounds = {"cuda": 1, "cpu": 1}
    tokens = None
    variables = {"TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE": "1"}  # a CPU's fused loops, by name

    def plans(self, setup: Setup) -> Plans:
        if setup.args.max_tokens and not setup.in_report:
            raise UserError(f"--max-tokens: a profile has {STEPS} steps", 2)
        run = setup.scripts.stage("01").replace(
            name="01-profile",
            label="01, profiled",
            script="profile",
            published=None,
            options=("--max-steps", str(STEPS), "--eval-freq", str(10**9)),
        )
        yield Plan([run], length=WholeScript())

    def collect(self, setup: Setup, folder: Path) -> None:
        """Writes the profile and the trace. Raises ValueError where the run left none."""
        averages = next(folder.glob("*.averages.json"), None)
        if not averages:
            raise ValueError("it left no profile")
        record = Path(str(averages).removesuffix(".averages.json") + ".jsonl")
        on_gpu = setup.machine["gpus"] > 0
        profile = profile_of(read_record(record), json.loads(averages.read_text()), on_gpu)
        write_whole(setup.results / TRACE, record.with_suffix(".trace.json").read_bytes())
        write_whole(setup.results / PROFILE, json.dumps(asdict(profile), indent=1))

    def tables(self, rows: Rows) -> list[Table]:
        """Returns the seconds of each kind of operation, and of the longest operations."""
        if rows[0].error:
            return []
        if not (rows.measured.folder / PROFILE).exists():  # as where a journal alone was copied
            return []
        profile = read_profile(rows.measured.folder)
        return [kinds_table(profile), operations_table(profile)]

    def notes(self, rows: Rows) -> list[str]:
        if rows[0].error:
            return [rows[0].error]
        if not (rows.measured.folder / PROFILE).exists():
            return [f"{PROFILE} isn't there: run `python measure.py profile`."]
        return []


def kinds_table(profile: StepProfile) -> Table:
    idle = "none of PyTorch's operations ran"
    if profile.gpu:
        idle = "no kernel ran"
    kinds = [KindTime(kind, time) for kind, time in profile.by_kind().items() if time]
    caption = (
        f"{TIMED} steady steps, {1000 * profile.seconds:,.1f} ms each while the profiler was"
        f" recording (which takes time itself). Idle: {idle}. The trace, for"
        f" ui.perfetto.dev: `{TRACE}`."
    )
    return Table([text_col("kind", "kind"), *step_columns(profile)], kinds, caption)


def operations_table(profile: StepProfile) -> Table:
    heading = "operation"
    if profile.gpu:
        heading = "kernel"
    columns = [
        text_col(heading, "short_name"),
        text_col("kind", "kind"),
        num_col("calls per step", "calls", "g"),
        *step_columns(profile),
    ]
    return Table(columns, profile.operations[:TOP])


def step_columns(profile: StepProfile) -> list[Column]:
    """Returns the columns of the seconds of a table's lines."""

    def milliseconds(line: Operation | KindTime) -> str:
        return f"{1000 * line.seconds:,.2f}"

    def share(line: Operation | KindTime) -> str:
        return f"{line.seconds / profile.seconds:.1%}"

    return [Column("ms per step", milliseconds), Column("share", share)]
