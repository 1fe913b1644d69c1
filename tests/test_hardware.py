"""The hardware decides in which type is trained, and all tools know it; and the scripts' CUDA
branches, on a CPU.

Hardware is simulated by what 01's best_dtype asks: the CPU's capabilities, and the GPU's compute
capability. On a stand-in GPU every call that names a CUDA device gets the CPU.
"""

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import ONE_RANK, ROOT, STAGES, Bench, call_main, run_python, settings_restored
from made_up import CPU, FLOAT32, MACHINE, setup_of
from torch.cuda._utils import _get_device_index
from torch.overrides import TorchFunctionMode
from torch.utils import benchmark
from torch.utils._python_dispatch import TorchDispatchMode

from bench import cli, processes
from bench.commands.doctor import Doctor
from bench.machine import same_machine, short_name, trained_in
from bench.measure import environment, hardware, sizing
from bench.measure.environment import Build, Gpu
from bench.predict import batches
from bench.report import machine_section
from bench.studies.stages import Stages
from gpt_speed.memory import MemoryNeed

BFLOAT16, OF_01 = "bfloat16", "01_opt_single_gpu"
NO_UNITS = "this CPU has no bfloat16 units"
X86 = dict(architecture="x86_64", avx2=True, avx512_f=False, avx512_bf16=False, amx_bf16=False)
ARM = dict(architecture="aarch64", neon=True, bf16=False)


@dataclass(frozen=True)
class Kind:
    """A kind of hardware: what PyTorch tells of it, the type that is right there, and why."""

    name: str
    type: str  # of the device
    dtype: str
    reason: str
    capabilities: dict = field(default_factory=dict)  # of the CPU
    gpu: str | None = None
    capability: str = "0.0"  # of the GPU

    @property
    def device(self) -> torch.device:
        return torch.device(self.type)

    @property
    def is_gpu(self) -> bool:
        """Whether the tools train on its GPU. A Mac they measure on its CPU."""
        return self.type == "cuda"

    @property
    def of_the_tools(self) -> tuple[str, str]:
        """The type that the tools train in there, and why."""
        if self.type == "mps":
            return BFLOAT16, "the CPU has bf16"
        return self.dtype, self.reason


T4 = Kind(
    "T4",
    "cuda",
    "float32",
    "compute capability 7.5 has no bfloat16 units; for"
    " float16: python patches/stack.py compose precision-fp16 --out my.py",
    gpu="Tesla T4",
    capability="7.5",
)
KINDS = [
    Kind("AVX-512", "cpu", "float32", NO_UNITS, X86 | dict(avx512_f=True)),
    Kind(
        "AMX",
        "cpu",
        BFLOAT16,
        "the CPU has amx_bf16",
        X86 | dict(avx512_f=True, avx512_bf16=True, amx_bf16=True),
    ),
    Kind("ARM with BF16", "cpu", BFLOAT16, "the CPU has bf16", ARM | dict(bf16=True)),
    T4,
    Kind(
        "A100 40 GB",
        "cuda",
        BFLOAT16,
        "compute capability 8.0",
        gpu="NVIDIA A100-SXM4-40GB",
        capability="8.0",
    ),
    Kind(
        "MPS",
        "mps",
        "float32",
        "bfloat16 was not measured on mps; to try it: --dtype bfloat16",
        ARM | dict(bf16=True),
    ),
]
# For which GPUs PyTorch's builds have kernels, by the CUDA that they are built for.
KERNELS = {
    "12.6": "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90".split(),
    "13.0": "sm_75 sm_80 sm_86 sm_90 sm_100 sm_110 sm_120 compute_120".split(),
}


@pytest.fixture(params=KINDS, ids=attrgetter("name"))
def kind(request, monkeypatch) -> Kind:
    """Each kind of hardware, which is then simulated."""
    simulate(monkeypatch, request.param.capabilities, request.param.gpu, request.param.capability)
    return request.param


def simulate(
    monkeypatch, capabilities: dict, gpu: str | None = None, capability: str = "0.0"
) -> None:
    """The one seam: what PyTorch tells of the hardware."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    major, minor = map(int, capability.split("."))
    for name, answer in (
        ("is_available", bool(gpu)),
        ("device_count", int(bool(gpu))),
        ("get_device_name", gpu),
        ("get_device_capability", (major, minor)),
        ("get_device_properties", SimpleNamespace(multi_processor_count=40)),
        ("init", None),
        ("get_arch_list", KERNELS["12.6" if major < 8 else "13.0"]),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    build = "12.6" if (major, minor) < (7, 5) else "13.0"  # which has the GPU's kernels
    monkeypatch.setattr(torch.version, "cuda", build if gpu else None)
    # A CUDA build would look there for a driver.
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: None)
    monkeypatch.setattr(environment, "nvidia_smi", lambda fields: ["570"] if gpu else [])


class Model:
    """A model that notes to what it is moved."""

    def to(self, device, dtype):
        self.moved = device, dtype


def test_line_and_record_of_each_kind(kind, stages, capsys):
    """The same type in every run of 01 and 02; --dtype forces either, on every kind."""
    assert {stages[stage].best_dtype(kind.device) for stage in STAGES[1:]} == {
        (kind.dtype, kind.reason)
    }
    script = stages[OF_01]
    for asked, dtype, reason in (
        ("auto", kind.dtype, kind.reason),
        ("float32", "float32", "by --dtype"),
        (BFLOAT16, BFLOAT16, "by --dtype"),
    ):
        config, model = script.Config(device=kind.device, dtype=asked, compile=False), Model()
        with settings_restored():
            script.fit_to_hardware(config)
            script.prepare_model(model, config)
        assert model.moved == (kind.device, getattr(torch, dtype))
        assert capsys.readouterr().out == f"Training in {dtype}: {reason}\n"
        recorded = asdict(config)
        assert (recorded["dtype"], recorded["dtype_reason"]) == (dtype, reason)


@pytest.fixture
def predicted(monkeypatch) -> list[list[str]]:
    """The scripts and options whose memory is predicted."""
    asked = []

    def predict(program, *_, **__):
        asked.append(program.key.split())
        return SimpleNamespace(needs={8: MemoryNeed(0, 600), 32: MemoryNeed(0, 9)})

    answers = dict(free_memory=[80_000], compile_error=None)
    monkeypatch.setattr(batches, "predict", predict)
    monkeypatch.setattr(processes, "ask_machine", answers.__getitem__)
    return asked


def test_a_machine_is_described_with_its_type(kind):
    machine = hardware.this_machine()
    device = ("cuda", 1) if kind.is_gpu else ("cpu", 0)
    assert (machine["device"], machine["gpus"]) == device
    assert (machine["dtype"], machine["dtype_reason"]) == kind.of_the_tools
    assert trained_in(machine) == machine["dtype"]


def test_doctor_says_the_type(kind, predicted, tmp_path):
    dtype, reason = kind.of_the_tools
    answer = Doctor().answer(setup_of(tmp_path, hardware.this_machine()))
    assert f"\ntrains in      {dtype}: {reason}" in answer


def test_doctor_predicts_what_fits_in_the_type_of_training(kind, predicted, tmp_path):
    """00 has no choice; of what trains on a CPU nothing is predicted."""
    Doctor().answer(setup_of(tmp_path, hardware.this_machine()))
    fast = "precision-fp16" if kind.name == "T4" else "10-batch-size"
    on_a_gpu = [["00", "--model", "gpt2"], [fast, "--model", "gpt2"]]
    assert predicted == (on_a_gpu if kind.is_gpu else [])


def test_what_fits_uncomposed_is_predicted_in_the_type_of_01(kind, predicted, tmp_path):
    batches.batches_that_fit(setup_of(tmp_path, hardware.this_machine()), composed=False)
    dtype = ["--dtype", "float32"] if kind.name == "T4" else []
    fast = ["10-batch-size", "--model", "gpt2", *dtype]
    assert predicted[1:] == ([fast] if kind.is_gpu else [])


def test_00_is_predicted_without_the_options_of_01(predicted, tmp_path):
    """It has neither a choice of the type nor anything to compile."""
    setup = setup_of(tmp_path, MACHINE)
    setup.options = ["--dtype", "float32", "--dropout=0", "--no-compile"]
    batches.batches_that_fit(setup, composed=False)
    of_00, of_01 = predicted
    assert of_00 == ["00", "--model", "gpt2", "--dropout=0"]
    assert of_01 == ["10-batch-size", "--model", "gpt2", *setup.options]


def test_a_variant_is_run_where_there_are_units_for_it(kind, tmp_path):
    """One that multiplies in bfloat16 isn't begun where that takes an hour."""
    machine = hardware.this_machine()
    scripts = setup_of(tmp_path, machine).scripts
    names = ["precision-autocast", "precision-fp16", "model-mixture"]
    runs = scripts.variants(scripts.stage("01"), machine, names)
    has_units = kind.of_the_tools[0] == BFLOAT16
    assert {run.script: run.error for run in runs} == {
        "precision-autocast": None if has_units else "needs bfloat16 units",
        "precision-fp16": None if kind.is_gpu else "needs an NVIDIA GPU",
        "model-mixture": "needs compute capability 8.0" if kind.name == "T4" else None,
    }


def test_an_old_gpu_trains_in_float16_by_itself(monkeypatch, tmp_path):
    """In stages; 02, too. A type that is asked for is taken."""
    simulate(monkeypatch, {}, T4.gpu, T4.capability)
    setup = setup_of(tmp_path, hardware.this_machine())
    plan = next(Stages().plans(setup))
    assert [(run.name, run.script) for run in plan.runs[1:]] == [
        (f"{OF_01}-precision-fp16", "precision-fp16"),
        ("02_opt_multi_gpu_ddp-precision-fp16", "02+precision-fp16"),
    ]
    for run, own in zip(
        plan.runs[1:], (b"torch.compile(model)", b"DistributedDataParallel("), strict=True
    ):
        text = setup.scripts.text(run.script)
        assert b"GradScaler(" in text and own in text
    setup.options = ["--dtype=float32"]
    assert [run.script for run in next(Stages().plans(setup)).runs] == [
        ROOT / name for name in ("00_orig.py", f"{OF_01}.py", "02_opt_multi_gpu_ddp.py")
    ]


class NoBfloat16(TorchDispatchMode):
    """Refuses every operator that makes a tensor of bfloat16; counts the others."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            assert getattr(tensor, "dtype", None) != torch.bfloat16, function
        self.count += 1
        return result


def test_nothing_multiplies_in_bfloat16_unless_asked(monkeypatch):
    """Rates of matmuls, the look of a report."""
    simulate(monkeypatch, X86)

    def once(statement, globals, num_threads):
        exec(statement, globals)
        return SimpleNamespace(blocked_autorange=lambda min_run_time: SimpleNamespace(times=[1.0]))

    monkeypatch.setattr(benchmark, "Timer", once)
    monkeypatch.setattr(hardware, "compile_error", lambda: None)
    with NoBfloat16() as mode, settings_restored():
        look = hardware.look()
        rate = hardware.matmul_rate()
    assert mode.count > 5 and look["matmul_peak"] == {"float32": rate}
    page = machine_section.machine_section(look)
    assert BFLOAT16 not in page and "train in float32" in page


@pytest.mark.parametrize(
    ("change", "gpu_too"),
    [
        (dict(threads=64), False),
        (dict(cores=1), False),
        (dict(cpu="Some CPU (family 26, model 2)"), False),
        (dict(torch="2.0"), True),
        (dict(gpus=8), True),
        (dict(name="Other"), True),
    ],
    ids=str,
)
def test_what_makes_another_machine(change, gpu_too):
    """A rented CPU has the same name in several generations, and taskset leaves it fewer cores; of
    a GPU the host is another matter."""
    assert same_machine(CPU, CPU | dict(python="3.13"))
    assert not same_machine(CPU, CPU | change)
    assert same_machine(CPU, {name: CPU[name] for name in CPU if name != "cores"})  # older
    assert same_machine(MACHINE, MACHINE | change) is not gpu_too


def test_the_type_is_part_of_a_machine():
    older = {name: value for name, value in CPU.items() if not name.startswith("dtype")}
    assert same_machine(older, CPU) and not same_machine(older, CPU | FLOAT32)
    assert [short_name(CPU | own) for own in ({}, FLOAT32)] == ["Some CPU", "Some CPU (float32)"]


# ---- A GPU that PyTorch can't use


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
@pytest.mark.parametrize(
    ("gpu", "words", "version"),
    [(True, [], "2.11.0"), (False, [], "2.13.0"), (False, ["GPU=1"], "2.11.0")],
)
def test_the_pytorch_that_make_installs(tmp_path, gpu, words, version):
    """That of the figures: where there is an NVIDIA GPU another one, and nothing else differs. A
    login node without a GPU installs it with GPU=1."""
    smi = tmp_path / "nvidia-smi"
    smi.touch(mode=0o755 if gpu else 0o644)
    environment = dict(os.environ, PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    command = ["make", "-n", "-W", "requirements.txt", ".venv/complete", *words]
    plan = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    (write,) = (line for line in plan.stdout.splitlines() if " > " in line)
    text = subprocess.run(
        write.partition(" > ")[0], shell=True, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    pins = [line for line in text.splitlines() if "==" in line and not line.startswith("#")]
    assert [pin for pin in pins if pin.startswith("torch==")] == [f"torch=={version}"]
    assert len(pins) == 5


NAME, INSTALL = (
    "NVIDIA A100-SXM4-40GB",
    (
        "`pip install --force-reinstall torch==2.11.0 --index-url https://download.pytorch.org/whl/{}`"
    ),
)
CU130, CPU_BUILD = Build("2.13.0+cu130", "13.0"), Build("2.13.0+cpu", None)
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version {}). Please update your GPU"
    " driver by downloading and installing a new version"
)
NO_CUDA, LOST = "Torch not compiled with CUDA enabled", "CUDA unknown error"
TOLD_OLD = (
    f"a newer driver for the {NAME}: 550.54.14 is too old for PyTorch 2.13.0+cu130, built"
    " for CUDA 13.0"
)


def with_driver(monkeypatch, capability: str | None = "8.0") -> None:
    """What nvidia-smi tells; older drivers don't know the capability."""
    answers = {
        "name,driver_version": [f"{NAME}, 550.54.14"],
        "driver_version": ["550.54.14"],
        "compute_cap": [capability] if capability else [],
    }
    monkeypatch.setattr(environment, "nvidia_smi", answers.__getitem__)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("build", "error", "capability", "needs"),
    [
        (
            CU130,
            TOO_OLD.format(12040),
            "8.0",
            f"{TOLD_OLD}; or, for this driver, {INSTALL.format('cu126')}",
        ),
        (CU130, TOO_OLD.format(12040), "12.0", TOLD_OLD),  # CUDA 12 has no kernels for it
        (CU130, LOST, "8.0", f"what keeps PyTorch 2.13.0+cu130 from the {NAME}: {LOST}"),
        (
            CPU_BUILD,
            NO_CUDA,
            "8.0",
            f"PyTorch for NVIDIA GPUs, since 2.13.0+cpu can't use the {NAME}: "
            + INSTALL.format("cu130"),
        ),
    ],
)
def test_a_gpu_that_is_not_found(monkeypatch, build, error, capability, needs):
    """Both versions, and what to install."""
    with_driver(monkeypatch, capability)
    assert environment.gpu_needs(build, None, error) == needs


@pytest.mark.parametrize(
    "answer",
    [
        "[N/A], [N/A]",
        "[Insufficient Permissions]",
        "No devices were found",
        "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 570.12",
    ],
)
def test_an_answer_that_tells_nothing(tmp_path, monkeypatch, answer):
    """Of nvidia-smi, with exit code 0."""
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\ncat << END\n{answer}\nEND\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(environment.Path, "exists", lambda path: False)  # no driver is loaded
    for fields in ("name,driver_version", "driver_version", "compute_cap"):
        assert environment.nvidia_smi(fields) == []
    assert environment.gpu_needs(CU130, None, LOST) is None


def test_a_gpu_that_is_hidden_or_out_of_reach(monkeypatch):
    def needs() -> str | None:
        return environment.gpu_needs(CU130, None, TOO_OLD.format(12040))

    with_driver(monkeypatch)
    for hides in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hides)
        assert needs() == f"a visible GPU: CUDA_VISIBLE_DEVICES={hides} hides the {NAME}"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # as a scheduler sets it
    assert needs().startswith(TOLD_OLD)
    monkeypatch.setattr(environment, "nvidia_smi", lambda fields: [])
    for loaded in (True, False):  # a host's driver
        monkeypatch.setattr(environment.Path, "exists", lambda path, loaded=loaded: loaded)
        assert ("a container is started with --gpus all" in (needs() or "")) is loaded


@pytest.mark.parametrize(
    ("capability", "kernels", "build"),
    [
        ("7.0", KERNELS["13.0"], "cu126"),
        ("12.0", KERNELS["12.6"], "cu130"),
        ("8.0", ["sm_86"], "cu130"),  # for later ones alone
        ("8.9", KERNELS["13.0"], None),
        ("9.0", ["sm_90a"], None),
        ("12.1", ["compute_90"], None),  # compiled when it is needed
        ("9.4", ["gfx90a", "gfx942"], None),
    ],
)  # ROCm
def test_a_build_without_kernels_for_the_gpu(capability, kernels, build):
    """By what it was compiled for, whatever its CUDA is."""
    found = Build("2.13.0", "12.8", kernels), Gpu("Tesla P100", capability)
    needs = environment.gpu_needs(*found, error="")
    assert needs == (
        build
        and "kernels for the Tesla P100, compute capability"
        f" {capability}, which PyTorch 2.13.0 doesn't have: {INSTALL.format(build)}"
    )


def test_a_driver_that_is_too_old_is_told_everywhere(monkeypatch, tmp_path, capsys):
    """By doctor and by every study, also by `fits`, which `make bench` asks."""
    simulate(monkeypatch, X86 | dict(amx_bf16=True))
    with_driver(monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)  # by NVIDIA's library
    monkeypatch.setattr(
        torch.cuda, "init", mock.Mock(side_effect=RuntimeError(TOO_OLD.format(12040)))
    )
    here = hardware.this_machine()
    assert (here["device"], here["gpus"], hardware.rank_count()) == ("cpu", 0, 2)
    assert here["gpu_needs"].startswith(TOLD_OLD)
    monkeypatch.setattr(processes, "ask_machine", dict(compile_error=None).__getitem__)
    assert f"missing        {here['gpu_needs']}\n" in Doctor().answer(setup_of(tmp_path, here))
    monkeypatch.setattr("bench.measure.look.describe_here", lambda: here)
    monkeypatch.setattr(
        sizing,
        "configurations",
        lambda runs, setup: {
            run.name: dict(batch_size=4, context_length=256, compile=True) for run in runs
        },
    )
    for command in (["stages", "--dry-run"], ["fits", "00"]):
        args = cli.make_parser().parse_args([*command, "--results-dir", str(tmp_path / "no-such")])
        assert cli.run(args, []) == 0
        assert capsys.readouterr().err.count(f"missing: {here['gpu_needs']}\n") == 1
    assert not [*tmp_path.iterdir()]  # a misspelt folder isn't made


@pytest.mark.parametrize(("is_integrated", "free"), [(0, [80_000, 40_000]), (1, [60_000, 30_000])])
def test_free_memory(monkeypatch, is_integrated, free):
    """Of a GPU that shares the host's memory, a part stays free: there a host hangs where it runs
    out."""
    monkeypatch.setattr(hardware, "gpu_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: ((80_000, 40_000)[gpu] * 2**20, 0))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda gpu: SimpleNamespace(is_integrated=is_integrated),
    )
    assert hardware.free_memory() == free


@pytest.mark.slow
@pytest.mark.parametrize("case", ["first step", "log line", "sample and memory"])
def test_a_step_of_known_cost(case):
    """What takes as long as the whole training beside it is left out of all figures."""
    done = run_python("-m", "tests.known_step", ROOT / "00_orig.py", case, "cpu", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    for name in ("average", "median"):
        reported, true = figures[name]
        assert 0.9 * true < reported < 1.5 * true
    reported, true = figures["memory"]
    assert reported == pytest.approx(true, rel=0.02)


# ---- The scripts on a stand-in GPU


GB = 1024**3
GPU = "Stand-In A100"
MEMORY = dict(
    memory_allocated=1.5 * GB,
    memory_reserved=2.5 * GB,
    max_memory_allocated=3.5 * GB,
    max_memory_reserved=4.5 * GB,
)
STEP = 250  # milliseconds from one event to the next

# A loader that pins says so where it finds no GPU to pin for.
pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")


def tensors_in(values) -> list[torch.Tensor]:
    nested = [values] if isinstance(values, torch.Tensor) else values
    if not isinstance(nested, list | tuple):
        return []
    return [
        tensor
        for value in nested
        for tensor in ([value] if isinstance(value, torch.Tensor) else tensors_in(value))
    ]


class OnTheCPU(TorchFunctionMode):
    """Gives the CPU to every call that names a CUDA device; marks what it returns, and all
    that follows from it, `on_gpu`, so that a test sees what nobody has moved."""

    def __init__(self):
        super().__init__()
        self.devices, self.copies = set(), []

    def instead(self, value):
        named = isinstance(value, torch.device) or (isinstance(value, str) and value[:4] == "cuda")
        if named and torch.device(value).type == "cuda":
            self.devices.add(str(value))
            return torch.device("cpu")
        return value

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # These two name a device, and don't use it yet; Module.to() has the second.
        if function in (torch.device, torch._C._nn._parse_to):
            return function(*args, **kwargs)
        new = [self.instead(value) for value in args]
        new_named = {name: self.instead(value) for name, value in kwargs.items()}
        moves = any(
            a is not b
            for a, b in zip([*args, *kwargs.values()], [*new, *new_named.values()], strict=True)
        )
        if function is F.cross_entropy and self.devices:
            assert all(hasattr(tensor, "on_gpu") for tensor in args[:2])
        result = function(*new, **new_named)
        if function is torch.Tensor.to and moves:
            self.copies.append(kwargs.get("non_blocking", False))
        if moves or any(hasattr(tensor, "on_gpu") for tensor in tensors_in(args)):
            for tensor in tensors_in(result):
                tensor.on_gpu = True
        return result


class Event:
    """torch.cuda.Event: a time in milliseconds, known once somebody has waited for it."""

    count, known, waits = 0, -1, 0

    def __init__(self, enable_timing=False):
        assert enable_timing

    def record(self):
        self.number, Event.count = Event.count, Event.count + 1

    def synchronize(self):
        Event.known, Event.waits = self.number, Event.waits + 1

    def elapsed_time(self, end):
        assert self.number < end.number <= Event.known, "read before it had happened"
        return float(STEP * (end.number - self.number))


@contextlib.contextmanager
def two_gpus():
    """Two stand-in GPUs: yields what was asked of them."""
    seen = SimpleNamespace(mode=OnTheCPU(), chosen=[], groups=[], asked=set(), inputs=[])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("count", 0), ("known", -1), ("waits", 0)):
            patch.setattr(Event, name, value)
        for name, stand_in in in_place_of_torch_cuda(seen).items():
            patch.setattr(torch.cuda, name, stand_in)
        # PyTorch's loaders and optimizers must not be told of one that they would then use.
        patch.setattr(torch.accelerator, "is_available", answering(False))
        patch.setattr(torch.accelerator, "current_accelerator", answering(None))
        for name, stand_in in in_place_of_nccl(seen).items():
            patch.setattr(dist, name, stand_in)
        yield seen


def answering(value):
    """A function of anything that returns this value."""
    return lambda *_, **__: value


def in_place_of_torch_cuda(seen) -> dict:
    """What stands in for torch.cuda, by names there."""

    def get_device_name(device):
        seen.asked.add(str(device))
        return GPU

    def set_device(device):
        seen.chosen.append(_get_device_index(device))  # PyTorch's own check of what it is given

    return dict(
        is_available=answering(True),
        device_count=answering(2),
        Event=Event,
        get_device_name=get_device_name,
        set_device=set_device,
        is_current_stream_capturing=answering(False),  # optimizers ask
        init=answering(None),
        get_device_capability=answering((8, 0)),
        **{name: answering(size) for name, size in MEMORY.items()},
    )


def in_place_of_nccl(seen) -> dict:
    """What stands in for torch.distributed with NCCL, of one rank, by names there."""
    start = dist.init_process_group

    def start_gloo(backend, device_id, timeout):
        seen.groups.append((backend, device_id))
        assert timeout.total_seconds() >= 1800  # another rank may have more to compile
        start("gloo")

    return dict(
        init_process_group=start_gloo, barrier=answering(None), get_backend=answering("nccl")
    )


@pytest.fixture
def gpus(stages) -> SimpleNamespace:
    with two_gpus() as seen:
        yield seen


def run_on(gpus, bench, stage, *options):
    """Runs a stage with the options of a GPU's run, but a gpt2 and a text of a moment."""
    script = bench.stages[stage]
    folders = ["--data", bench.data, "--results-dir", bench.results]
    small = ["--context-length", 16, "--batch-size", 2, "--max-steps", 8, "--eval-freq", 3]
    off = [] if stage == "00_orig" else ["--no-compile"]
    prepare_model, make_loader = script.prepare_model, script.make_loader

    def checked_model(model, config):
        model.register_forward_pre_hook(lambda _, inputs: gpus.inputs.append(inputs[0]))
        prepared = prepare_model(model, config)
        gpus.moved = len(gpus.mode.copies), len([*model.parameters(), *model.buffers()])
        return prepared

    def noted_loader(*arguments):
        gpus.loader = make_loader(*arguments)
        return gpus.loader

    seams = dict(prepare_model=checked_model, make_loader=noted_loader)
    with (
        mock.patch.dict(script.MODELS, gpt2=dict(layers=2, heads=2, width=32)),
        mock.patch.multiple(script, **seams),
        gpus.mode,
    ):
        return call_main(script, *folders, *small, *off, *options)


def test_a_rank_that_sees_its_own_gpu_alone(gpus, stages, monkeypatch):
    """As srun --gpus-per-task=1 shows it: that is the first one, whatever the rank."""
    script = stages[STAGES[2]]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in (ONE_RANK | dict(RANK="5", LOCAL_RANK="5", WORLD_SIZE="8")).items():
        monkeypatch.setenv(name, value)
    with gpus.mode:
        assert script.configure({}).device == torch.device("cuda:0")
    assert gpus.chosen == [0]


@pytest.mark.parametrize("stage", STAGES)
def test_the_defaults_are_the_published_experiment(stage, stages, gpus, monkeypatch):
    script = stages[stage]
    for name, value in ONE_RANK.items():
        monkeypatch.setenv(name, value)
    with gpus.mode:
        config = script.configure({})
    published = dict(
        model="gpt2",
        layers=12,
        heads=12,
        width=768,
        context_length=1024,
        dropout=0.1,
        vocab_size=50_257,
        batch_size=8,
        learning_rate=5e-4,
        weight_decay=0.1,
        seed=123,
        epochs=15,
        max_steps=None,
        max_tokens=None,
        eval_freq=15,
        eval_windows=40,
    )
    assert config.device.type == "cuda"
    if stage != "00_orig":
        published |= dict(vocab_size=50_304, batch_size=32, compile=True)
    assert {name: getattr(config, name) for name in published} == published


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(stage, marks=[pytest.mark.slow] * (stage != STAGES[1])) for stage in STAGES
    ],
)
def gpu_run(request, tmp_path_factory, stages) -> SimpleNamespace:
    """A run of each script on a GPU. Of 02 it is the first rank of a job, but the second here: only
    LOCAL_RANK is the GPU."""
    stage, bench = request.param, Bench(tmp_path_factory.mktemp("gpu"), stages)
    is_rank = stage == STAGES[2]
    with contextlib.ExitStack() as stack:
        gpus = stack.enter_context(two_gpus())
        if is_rank:
            stack.enter_context(mock.patch.dict(ONE_RANK, LOCAL_RANK="1"))
        result = run_on(gpus, bench, stage)
        waits = Event.waits
    assert result.returncode == 0, result.stderr
    start, *logs, epoch, end = bench.record()
    return SimpleNamespace(
        stage=stage,
        is_optimized=stage != STAGES[0],
        is_rank=is_rank,
        gpus=gpus,
        waits=waits,
        out=result.stdout,
        record_name=next(bench.results.iterdir()).name,
        config=start["config"],
        logs=logs,
        epoch=epoch,
        end=end,
    )


def test_a_gpu_trains_gpt2_in_the_types_of_the_script(gpu_run):
    types = ("bfloat16", "high") if gpu_run.is_optimized else ("float32", "highest")
    names = "model", "device", "dtype", "matmul_precision"
    assert [gpu_run.config[name] for name in names] == ["gpt2", "cuda", *types]
    manual = gpu_run.end["attention_backend"] == "manual"
    assert gpu_run.end["attention_backend"] and manual is not gpu_run.is_optimized


def test_a_gpu_is_named_in_the_output_and_the_record(gpu_run):
    assert f"\nDevice: cuda ({GPU})\n" in gpu_run.out
    assert gpu_run.record_name.startswith(f"{gpu_run.stage}-cuda-")


def test_the_memory_of_a_gpu_is_that_of_the_ranks_own(gpu_run):
    memory = dict(reserved_gb=2.5, peak_reserved_gb=4.5)
    for event in (gpu_run.epoch, gpu_run.end):
        assert event | memory == event
    assert "\nReserved memory: 2.5000 GB\n" in gpu_run.out
    assert gpu_run.gpus.asked == {"cuda:1" if gpu_run.is_rank else "cuda"}


def test_steps_on_a_gpu_are_timed_between_events(gpu_run):
    """A quarter of a second apart; evaluation lies between two intervals."""
    rate = 2 * 16 / 0.25
    assert [log["step"] for log in gpu_run.logs] == [0, 3, 6, 7]
    assert [log["seconds"] for log in gpu_run.logs] == [[0.25], [0.25] * 3, [0.25] * 3, [0.25]]
    assert {log["step_tok_per_sec"] for log in gpu_run.logs} == {rate}
    assert (gpu_run.end["status"], gpu_run.end["avg_tok_per_sec"]) == ("complete", rate)
    assert f"Median step tok/sec: {rate:.0f}\n" in gpu_run.out


def test_nothing_waits_for_the_gpu_between_two_lines(gpu_run):
    assert gpu_run.waits == len(gpu_run.logs)


def test_the_model_and_its_inputs_are_on_the_ranks_gpu(gpu_run):
    gpus = gpu_run.gpus
    copies, tensors = gpus.moved
    assert copies == tensors > 0
    assert all(hasattr(ids_BT, "on_gpu") for ids_BT in gpus.inputs)
    assert gpus.chosen == [1 if gpu_run.is_rank else 0]
    assert gpus.mode.devices == ({"cuda:1", "cuda"} if gpu_run.is_rank else {"cuda"})


def test_ranks_on_gpus_talk_by_nccl(gpu_run):
    groups = [("nccl", torch.device("cuda:1"))] if gpu_run.is_rank else []
    assert gpu_run.gpus.groups == groups


def test_optimized_scripts_copy_from_pinned_memory_without_waiting(gpu_run):
    """x and y of each of the 8 steps."""
    assert gpu_run.gpus.loader.pin_memory is gpu_run.is_optimized
    assert sum(gpu_run.gpus.mode.copies) == (2 * 8 if gpu_run.is_optimized else 0)


@pytest.mark.parametrize(
    ("stage", "device", "gpu"), [("00_orig", "cuda:1", [1]), (OF_01, "cpu", [])]
)
def test_a_device_that_is_named(bench, gpus, stage, device, gpu):
    """--device cpu leaves the GPU alone."""
    result = run_on(gpus, bench, stage, "--device", device, "--model", "gpt2")
    assert result.returncode == 0, result.stderr
    assert gpus.chosen == gpu and gpus.asked == ({device} if gpu else set())
    assert gpus.mode.devices == ({device} if gpu else set())
    assert bench.record()[0]["config"]["device"] == device.partition(":")[0]
    assert gpu or not gpus.loader.pin_memory


class Driver:
    """NVIDIA's, of a GPU that shares the host's memory or doesn't."""

    def __init__(self, shares_memory: bool):
        self.attributes = {18: int(shares_memory)}  # CU_DEVICE_ATTRIBUTE_INTEGRATED in cuda.h

    def cuInit(self, flags):
        return 0

    def cuDeviceGetAttribute(self, answer, attribute, device):
        ctypes.cast(answer, ctypes.POINTER(ctypes.c_int))[0] = self.attributes[attribute]
        return 0


@pytest.mark.parametrize("stage", STAGES[1:])
@pytest.mark.parametrize(
    ("driver", "given", "kept"),
    [
        (Driver(False), None, "expandable_segments:True"),
        (Driver(True), None, None),
        (None, None, None),  # Windows, AMD
        (Driver(False), "backend:native", "backend:native"),
        (Driver(True), "backend:native", "backend:native"),
    ],
)
def test_expandable_segments(stages, gpus, monkeypatch, stage, driver, given, kept):
    """Only on GPUs with memory of their own: a GB10 failed with them. PyTorch tells which is which,
    but has read its allocator's settings by then."""
    script, name = stages[stage], "PYTORCH_CUDA_ALLOC_CONF"
    monkeypatch.setattr(torch.cuda, "get_device_properties", None)
    drivers = {"libcuda.so.1": driver} if driver else {}
    monkeypatch.setattr(ctypes, "CDLL", lambda file: drivers.get(file) or open("/no/such/file"))
    for variable, value in ONE_RANK.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.delenv(name, raising=False)
    if given:
        monkeypatch.setenv(name, given)
    with gpus.mode, settings_restored():
        script.set_up_pytorch()
        assert os.environ.get(name) == kept


@pytest.mark.parametrize("stage", STAGES[1:])
@pytest.mark.parametrize(
    ("device", "kernel", "lines"),
    [("cuda", "MATH", 1), ("cuda", "FLASH_ATTENTION", 0), ("cpu", "MATH", 0)],
)
def test_a_slow_attention_kernel(stages, monkeypatch, capsys, stage, device, kernel, lines):
    """AMD's RDNA GPUs take it, and PyTorch doesn't say so."""
    monkeypatch.setattr(
        torch,
        "_fused_sdp_choice",
        lambda *_, **__: getattr(torch.nn.attention.SDPBackend, kernel).value,
    )
    config = stages[stage].Config(device=torch.device(device), width=8, heads=2, context_length=4)
    assert stages[stage].attention_backend(torch.nn.Linear(1, 1), config) == kernel.lower()
    text = capsys.readouterr().out
    assert text.count("\n") == text.count("TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1") == lines


@pytest.mark.parametrize(("cores", "given", "workers"), [(64, None, "8"), (64, "5", "5")])
def test_ranks_share_the_cores_for_compiling(stages, monkeypatch, cores, given, workers):
    """The workers of all ranks together are no more than there are cores."""
    script, name = stages["02_opt_multi_gpu_ddp"], "TORCHINDUCTOR_COMPILE_THREADS"
    monkeypatch.setattr(script.os, "sched_getaffinity", lambda pid: range(cores), raising=False)
    monkeypatch.setenv(name, given or "")
    if not given:
        monkeypatch.delenv(name)
    monkeypatch.setattr(script.dist, "init_process_group", lambda *_, **how: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with settings_restored():
        script.join_ranks(script.Config(device=torch.device("cuda")))
        assert os.environ[name] == workers


def test_gpus_are_counted_by_cuda(stages, gpus, monkeypatch):
    """Not by NVIDIA's library, which has eight where one is cut up."""
    started = []
    monkeypatch.setattr(torch.cuda, "init", lambda: started.append(1))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1 if started else 8)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    script = stages["02_opt_multi_gpu_ddp"]
    with pytest.raises(script.UserError, match="torchrun --nproc_per_node=1$"):
        script.configure({})
    started.clear()
    assert hardware.rank_count() == 1
