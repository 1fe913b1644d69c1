"""The hardware decides in which type is trained, and all that runs, plans or explains knows it.

Each kind of hardware is simulated by what 01's best_dtype asks: the CPU's capabilities, and the
GPU's compute capability.
"""

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import known_step
import pytest
import torch
from conftest import ROOT, load, settings_restored
from made_up import (
    CPU,
    FLOAT32,
    MACHINE,
    PEAK,
    Children,
    measured_of,
    measured_with,
    plan_of,
    record_events,
    setup_of,
)
from test_report import LOOK
from torch.utils._python_dispatch import TorchDispatchMode

from bench import commands, processes
from bench.analysis.rows import rows_of
from bench.catalogue import STAGES, Scripts, lacking
from bench.common import same_machine, short_name, trained_in
from bench.measure import lengths, machine, rates
from bench.measure.journal import journal_of, read_journal
from bench.measure.records import make_record
from bench.predict import pytorch, trace
from bench.predict.compiled import compile_only_models
from bench.predict.speed import CARDS, TERA
from bench.report import look, page
from bench.report.tables import text_of
from bench.studies import all_studies, doctor
from bench.studies.doctor import Doctor
from bench.studies.fits import Fits
from bench.studies.results import Pair, differences
from bench.studies.stages import Stages, bar_of
from bench.studies.variants import Variants

BFLOAT16, OF_01 = "bfloat16", "01_opt_single_gpu"
NO_UNITS = "this CPU has no bfloat16 units"
OLD_GPU = ("compute capability {} has no bfloat16 units; for float16: python patches/stack.py"
           " compose precision-fp16 --out my.py")
# Of each kind: what PyTorch tells of the CPU, or of the GPU; then the type, and why.
X86 = dict(architecture="x86_64", avx2=True, avx512_f=False, avx512_bf16=False, amx_bf16=False)
ARM = dict(architecture="aarch64", neon=True, bf16=False)
CPUS = {
    "AVX2": (X86, "float32", NO_UNITS),
    "AVX-512": (X86 | dict(avx512_f=True), "float32", NO_UNITS),
    "AVX512-BF16": (X86 | dict(avx512_f=True, avx512_bf16=True), BFLOAT16,
                    "the CPU has avx512_bf16"),
    "AMX": (X86 | dict(avx512_f=True, avx512_bf16=True, amx_bf16=True), BFLOAT16,
            "the CPU has amx_bf16"),
    "ARM": (ARM, "float32", NO_UNITS),
    "ARM with BF16": (ARM | dict(bf16=True), BFLOAT16, "the CPU has bf16"),
}
GPUS = {
    "T4": ("Tesla T4", "7.5", "float32", OLD_GPU.format("7.5")),
    "V100": ("Tesla V100-SXM2-16GB", "7.0", "float32", OLD_GPU.format("7.0")),
    "A100 40 GB": ("NVIDIA A100-SXM4-40GB", "8.0", BFLOAT16, "compute capability 8.0"),
    "H100": ("NVIDIA H100 80GB HBM3", "9.0", BFLOAT16, "compute capability 9.0"),
}
# For which GPUs PyTorch's builds have kernels, by the CUDA that they are built for.
KERNELS = {
    "12.6": "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90".split(),
    "12.8": "sm_70 sm_75 sm_80 sm_86 sm_90 sm_100 sm_120".split(),
    "13.0": "sm_75 sm_80 sm_86 sm_90 sm_100 sm_110 sm_120 compute_120".split(),
}
# A Mac's GPU: the tools train on its CPU.
MPS = {"MPS": (ARM | dict(bf16=True), "float32",
               "bfloat16 was not measured on mps; to try it: --dtype bfloat16")}


@pytest.fixture(params=[*CPUS, *GPUS, *MPS])
def kind(request, monkeypatch) -> SimpleNamespace:
    """A kind of hardware: its device, the type that is right there, and why."""
    gpu = GPUS.get(request.param)
    capabilities, dtype, reason = ({}, *gpu[2:]) if gpu else (CPUS | MPS)[request.param]
    simulate(monkeypatch, capabilities, *gpu[:2] if gpu else ())
    device = "cuda" if gpu else "mps" if request.param in MPS else "cpu"
    return SimpleNamespace(name=request.param, device=torch.device(device), dtype=dtype,
                           reason=reason)


def simulate(monkeypatch, capabilities: dict, gpu: str | None = None,
             capability: str = "0.0") -> None:
    """The one seam: what PyTorch tells of the hardware."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    major, minor = map(int, capability.split("."))
    for name, answer in (("is_available", bool(gpu)), ("device_count", int(bool(gpu))),
                         ("get_device_name", gpu), ("get_device_capability", (major, minor)),
                         ("get_device_properties", SimpleNamespace(multi_processor_count=40)),
                         ("init", None), ("is_tf32_supported", major >= 8),
                         ("get_arch_list", KERNELS["12.6" if major < 8 else "13.0"])):
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    build = "12.6" if (major, minor) < (7, 5) else "13.0"  # the one that has the GPU's kernels
    monkeypatch.setattr(torch.version, "cuda", build if gpu else None)
    # A CUDA build would look there for a driver.
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: None)
    monkeypatch.setattr(machine, "nvidia_smi", lambda fields: ["570"] * bool(gpu))


@pytest.fixture
def avx2(monkeypatch) -> dict:
    """The machine that most laptops are."""
    simulate(monkeypatch, X86)
    return rates.this_machine()


class Model:
    """A model that notes to what it is moved."""

    def to(self, device, dtype):
        self.moved = device, dtype


@pytest.mark.parametrize("stage", [OF_01, "02_opt_multi_gpu_ddp"])
def test_the_type_of_each_kind(kind, stages, stage):
    """The same in every run."""
    script = stages[stage]
    assert {script.best_dtype(kind.device) for _ in range(2)} == {(kind.dtype, kind.reason)}


def test_line_and_record_of_each_kind(kind, stages, capsys):
    """And --dtype forces either, on every kind."""
    script = stages[OF_01]
    for asked, dtype, reason in (("auto", kind.dtype, kind.reason),
                                 ("float32", "float32", "by --dtype"),
                                 (BFLOAT16, BFLOAT16, "by --dtype")):
        config, model = script.Config(device=kind.device, dtype=asked, compile=False), Model()
        with settings_restored():
            script.prepare_model(model, config)
        assert model.moved == (kind.device, getattr(torch, dtype))
        assert capsys.readouterr().out == f"Training in {dtype}: {reason}\n"
        recorded = asdict(config)
        assert (recorded["dtype"], recorded["dtype_reason"]) == (dtype, reason)


PREDICTED: list[dict] = []  # by the kinds so far


def test_a_prediction_is_the_same_on_every_kind(kind):
    """It takes the type of the GPU that it is for, whatever computer makes it."""
    options = ["--model", "cpu-demo", "--context-length", "16", "--no-compile"]
    with settings_restored(), pytorch.as_on_cuda(compile_only_models):
        PREDICTED.append(trace.trace(load(ROOT / f"{OF_01}.py"), options, 2))
    assert PREDICTED[-1] == PREDICTED[0]
    kinds = {(each.kind, each.precision) for each in PREDICTED[0]["step"]}
    assert {("head", "bfloat16"), ("products", "bfloat16")} < kinds


def test_what_the_tools_know_of_each_kind(kind, tmp_path, monkeypatch, capsys):
    """The description, doctor, fits, lengths and needs, all by one answer."""
    here = rates.this_machine()
    gpu = kind.device.type == "cuda"
    assert (here["device"], here["gpus"]) == (("cuda", 1) if gpu else ("cpu", 0))
    # A Mac is measured on its CPU, whose type counts there.
    dtype, reason = (BFLOAT16, "the CPU has bf16") if kind.name in MPS else (
        kind.dtype, kind.reason)
    assert (here["dtype"], here["dtype_reason"]) == (dtype, reason) == (trained_in(here), reason)
    native, setup = dtype == BFLOAT16, setup_of(tmp_path, here)
    setup.batches, asked = None, []

    def predict(scripts, script, options, *_):
        asked.append([script, *options])
        return SimpleNamespace(needs={8: SimpleNamespace(least=600), 32: SimpleNamespace(least=9)})

    monkeypatch.setattr(lengths, "predict", predict)
    monkeypatch.setattr(rates, "product_rate", lambda name: 1e12)
    half = kind.name in ("T4", "V100")  # float16 is what these have units for
    assert set(rates.matmul_peak()) == {"float32", *["float16"] * half, *[BFLOAT16] * native,
                                          *["TF32"] * (gpu and native)}
    monkeypatch.setattr(processes, "ask_machine", dict(free_memory=[80_000]).__getitem__)
    monkeypatch.setattr(doctor, "has_compiler", lambda gpu: True)
    told = Doctor().answer(setup).splitlines()
    (line,) = (line for line in told if line.startswith("trains in"))
    slower = "; 01 is about 2.2 times 00 here" * (not native and not gpu)
    slower += "; make bench and stages do so by themselves" * half
    assert line == f"trains in      {dtype}: {reason}{slower}"
    # What fits is predicted in the type that is trained in: before the study that composes 01, and
    # before others; 00 has no choice.
    assert asked == ([["0", "--model", "gpt2"], [
        "precision-fp16" if half else "10-batch-size", "--model", "gpt2"]] if gpu else [])
    setup.batches = None
    lengths.fitting(setup)
    assert asked[3:] == ([["10-batch-size", "--model", "gpt2", *["--dtype", "float32"] * half]]
                         if gpu else [])
    # Nothing is planned by a rate that the machine doesn't have.
    plain, best = (Scripts().stage(name) for name in ("00", "01"))
    peak = dict(float32=1e12, **{BFLOAT16: 4e12} if native else {})
    slow, fast = (lengths.expected_speed(run, peak, dtype) for run in (plain, best))
    assert slow == pytest.approx(plain.expected * (4 / 312 if native else 1 / 19.2))
    assert fast / slow == pytest.approx(best.expected / plain.expected if native else 2.2)
    # A variant that multiplies in bfloat16 isn't begun where that takes an hour.
    kind_of = "GPU" if gpu else "CPU"
    lacks = None if native else f"needs bfloat16 units, which this {kind_of} lacks"
    assert lacking("bfloat16 units", here) == lacks
    (_, autocast, half, mixture) = Scripts().variants(
        best, here, names="precision-autocast,precision-fp16,model-mixture")
    assert autocast.error == lacks
    assert half.error == (None if gpu else "needs an NVIDIA GPU")
    assert mixture.error == ("needs a GPU of compute capability 8.0" if gpu and lacks else None)


@pytest.mark.parametrize("card", ["T4", "V100"])
def test_float32_on_an_old_gpu_is_estimated_by_its_own_rate(card):
    """Neither by bfloat16's, which it lacks, nor beyond what its units do."""
    peak = dict(float32=CARDS[card].float32 * TERA)
    for name, processes_here in (("00", 1), ("01", 1), ("02", 4)):
        run = Scripts().stage(name, processes_here)
        speed = lengths.expected_speed(run, peak, "float32")
        units = processes_here * peak["float32"] / (6 * 124e6)  # tok/sec of products alone
        assert 0.4 * units < speed < 1.5 * units


# ---- A GPU that has units for float16, and none for bfloat16


@pytest.fixture(params=["T4", "V100"])
def old_gpu(request, monkeypatch) -> dict:
    simulate(monkeypatch, {}, *GPUS[request.param][:2])
    return rates.this_machine()


def test_an_old_gpu_trains_in_float16_by_itself(old_gpu, tmp_path):
    """In stages; 02, too. A type that is asked for is taken."""
    setup = setup_of(tmp_path, old_gpu)
    plan = next(Stages().plans(setup))
    assert [(run.name, run.script) for run in plan.runs] == [
        ("00_orig", ROOT / "00_orig.py"), (f"{OF_01}-precision-fp16", "precision-fp16"),
        ("02_opt_multi_gpu_ddp-precision-fp16", "02+precision-fp16")]
    assert plan.runs[2].torchrun and lengths.fast_of(plan) == "precision-fp16"
    for run, own in zip(plan.runs[1:], (b"torch.compile(model)", b"DistributedDataParallel("),
                        strict=True):
        text = setup.scripts.text(run.script)
        assert b"GradScaler(" in text and own in text
    setup.options = ["--dtype=float32"]
    assert [run.script for run in next(Stages().plans(setup)).runs] == [
        ROOT / name for name in ("00_orig.py", f"{OF_01}.py", "02_opt_multi_gpu_ddp.py")]
    # Other studies compare within 01, which trains in float32.
    others = plan_of("a", "b")
    others.runs = setup.scripts.variants(setup.scripts.stage("01"), old_gpu, names="precision-fp16")
    assert lengths.fast_of(others) == "10-batch-size"


def test_its_bars_tell_the_script():
    config = dict(dtype="float32", autocast="float16",
                  dtype_reason="the weights; their products are in float16, by autocast")
    events = {name: record_events(name, config=config) for name in (
        f"{OF_01}-precision-fp16", "02_opt_multi_gpu_ddp-precision-fp16")}
    bars = [bar_of(make_record(name, lines)) for name, lines in events.items()]
    assert [bar.label for bar in bars] == [
        "01 optimized with precision-fp16, batch 4", "02 DDP with precision-fp16 × 1, batch 4"]
    # Float32 weights alone aren't training in float32.
    text = text_of(Stages(), measured_with(plan_of(*events), events, MACHINE | FLOAT32))
    assert "**float32**" not in text


def test_a_gpu_without_tf32():
    """A script that asks for it is compared with the rate that it has."""
    events = {"02-tensor-cores": record_events("02-tensor-cores", gpu="Tesla T4", config=dict(
        matmul_precision="high"))}
    without = measured_with(plan_of(*events), events, MACHINE | FLOAT32)
    native = measured_with(plan_of(*events), events, MACHINE)
    without.matmul_peak = dict(float32=1e12, float16=4e12)
    (row,), (other,) = map(rows_of, (without, native))
    assert row.share_of_peak == pytest.approx(2 * other.share_of_peak)  # of 1e12, not of 2e12


def test_a_report_on_a_t4_comes_to_its_ladder(tmp_path, monkeypatch):
    """In 25 minutes, with runs that take as long as they may on such a card."""
    simulate(monkeypatch, {}, *GPUS["T4"][:2])
    here, clock = rates.this_machine(), SimpleNamespace(now=1000.0)
    peak = dict(float32=CARDS["T4"].float32 * TERA, float16=CARDS["T4"].reached * TERA)
    children = Children(monkeypatch, tmp_path / "build", here)
    children.answers |= dict(look=LOOK | dict(machine=here, matmul_peak=peak), large_loss="right")
    run_child = processes.run_child

    def takes_its_time(command, **how):
        words = list(map(str, command))
        name = words[words.index("--name") + 1]
        speed = 7_000 if "fp16" in name else 2_000 if name[:2] in ("00", "01") else 3_500
        tokens = (int(words[words.index("--max-tokens") + 1]) if "--max-tokens" in words else
                  414_009 * int(words[words.index("--epochs") + 1]))
        clock.now += 60 + tokens / speed
        return run_child(command, **how)

    monkeypatch.setattr(processes, "run_child", takes_its_time)
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: clock.now)
    monkeypatch.setattr(page, "draw_all", lambda *_: {})
    data, results, studies = tmp_path / "data", tmp_path / "results", all_studies()
    data.mkdir()
    (data / "meta.json").write_text('{"tokens": {"train": 414009}}')
    args = commands.make_parser(studies).parse_args(
        ["report", "--data", str(data), "--results-dir", str(results), "--minutes", "25"])
    assert commands.report(args, [], studies) == 0
    stages, ladder = ([result.name for measured in read_journal(journal_of(results, name))
                       for result in measured.results if result.record]
                      for name in ("stages", "ladder"))
    assert stages == ["00_orig", f"{OF_01}-precision-fp16", "02_opt_multi_gpu_ddp-precision-fp16"]
    assert len(ladder) >= 2 and clock.now - 1000 < 26 * 60


@pytest.mark.parametrize("name", GPUS)
def test_a_step_of_known_cost_is_of_its_type(name, monkeypatch):
    """tests/known_step.py multiplies in what the GPU has units for."""
    simulate(monkeypatch, {}, *GPUS[name][:2])
    monkeypatch.setattr(sys, "argv", ["known_step", str(ROOT / "00_orig.py"), "nothing", "cuda"])
    products = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(known_step, "Products", products)
    with pytest.raises(KeyboardInterrupt):
        known_step.main()
    assert products.call_args.args[1] == getattr(torch, GPUS[name][2])


def test_what_rocm_lacks():
    """An AMD GPU isn't an NVIDIA one, and its capability is counted in another way."""
    amd = MACHINE | dict(cuda=None, capability="9.4")
    assert lacking("an NVIDIA GPU", amd) == "needs an NVIDIA GPU"
    assert lacking("bfloat16 units", amd) is None
    runs = Scripts().variants(
        Scripts().stage("01"), amd, names="attention-backend,precision-float8")
    told = {run.label: run.error for run in runs[1:]}
    assert told.pop("attention-backend --attention math") is None and all(told.values())


class NoBfloat16(TorchDispatchMode):
    """Refuses every operator that makes a tensor of bfloat16; counts the others."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            assert getattr(tensor, "dtype", None) != torch.bfloat16, function
        self.count += 1
        return result


def test_nothing_multiplies_in_bfloat16_unless_asked(avx2, monkeypatch):
    """Rates of products, attention's kernels, and the look of a report."""
    def once(statement, minimum, **names):
        exec(statement, {}, names)
        return 1.0

    monkeypatch.setattr(rates, "seconds_of", once)
    monkeypatch.setattr(rates, "compile_error", lambda: None)
    with NoBfloat16() as mode, settings_restored():
        found = rates.look()
        rate = rates.matmul_rate()
    assert mode.count > 100 and found["matmul_peak"] == {"float32": rate}
    assert found["machine"]["dtype"] == "float32"
    text = look.machine_section(found | dict(large_loss="not tried"))
    assert "dropout (float32, causal)" in text and BFLOAT16 not in text
    first = look.first_line(found)
    assert f"in float32 matmuls, the type that the optimized scripts train in here" \
           f" ({NO_UNITS}); no GPU" in first


def test_the_rate_beside_each_run_is_of_its_type():
    """Journals keep rates by type; the one after each run is that of the type trained in."""
    peak = dict(float32=1e12)
    plan = plan_of("a")
    measured = measured_of("x", plan, CPU | FLOAT32, matmul_peak=peak)
    measured.results = [SimpleNamespace(matmul_rate=2e12)]
    assert measured.peak == dict(float32=2e12)
    older = {name: value for name, value in CPU.items() if not name.startswith("dtype")}
    measured = measured_of("x", plan, older, matmul_peak=peak | {BFLOAT16: 1e12})
    measured.results = [SimpleNamespace(matmul_rate=2e12)]
    assert measured.peak == {"float32": 1e12, BFLOAT16: 2e12}
    assert same_machine(older, CPU) and not same_machine(older, CPU | FLOAT32)


def in_float32(name: str, speed: float, **config) -> list[dict]:
    return record_events(name, speed, config=dict(dtype="float32") | config)


def test_tables_say_where_float32_was_trained():
    """Beside published figures they say that those are in bfloat16; names of machines tell it."""
    plan = plan_of("00", "01")
    plan.runs[1] = plan.runs[1].but(published=142_156.0)
    events = {"00": in_float32("00", 100.0),
              "01": in_float32("01", 220.0, dtype_reason=NO_UNITS)}
    measured = measured_with(plan, events, CPU | FLOAT32)
    note = (f" From technique 5 on all is trained in **float32** ({NO_UNITS}); the published"
            " figures, from there on, are in bfloat16.")
    assert note in text_of(Stages(), measured)
    assert short_name(measured.machine) == "Some CPU (float32)"
    plan.runs[1] = plan.runs[1].but(published=None)
    text = text_of(Stages(), measured_with(plan, events))
    assert f"**float32** ({NO_UNITS})." in text and "published figures, from" not in text
    native = events | {"01": record_events("01", 300.0, config=dict(
        dtype=BFLOAT16, dtype_reason="the CPU has amx_bf16"))}
    assert "float32**" not in text_of(Stages(), measured_with(plan, native))
    assert short_name(CPU) == "Some CPU"


@pytest.mark.parametrize(("dtype", "told"), [("float32", ", float32"), (BFLOAT16, "")])
def test_a_bar_of_01_tells_float32(dtype, told):
    bars = [bar_of(make_record(stage, record_events(stage, config=dict(dtype=dtype) | own)))
            for stage, own in (("00_orig", {}), (OF_01, dict(dtype_reason="why")))]
    assert [bar.label for bar in bars] == ["00 original, batch 4", f"01 optimized, batch 4{told}"]


def test_comparing_two_machines_names_their_types(tmp_path):
    """And an older journal, which doesn't tell it, counts as bfloat16."""
    older = {name: value for name, value in CPU.items() if not name.startswith("dtype")}
    plan = plan_of("00", "01")
    pairs = [Pair(row, row) for row in rows_of(
        measured_with(plan, {"00": record_events("00"), "01": record_events("01")}))]
    line = ("techniques from 5 on train in", BFLOAT16, "float32")
    one, two, three = (measured_of("ladder", plan, each) for each in (
        older, CPU, CPU | FLOAT32))
    assert line in differences(one, three, pairs)
    told = [name for name, *_ in differences(one, two, pairs)]
    assert line[0] not in told and not any(name.startswith("dtype") for name in told)


def test_the_trainer_of_such_a_cpu(avx2, tmp_path):
    """Its rows in bfloat16 aren't begun, and its fastest settings are in float32."""
    plan = next(Variants().plans(setup_of(tmp_path, avx2, group="trainer", names=None)))
    mixed = [run for run in plan.runs if "--bf16" in run.options]
    assert len(mixed) == 2 and all("bfloat16 units" in run.error for run in mixed)
    assert not any(BFLOAT16 in run.options for run in plan.runs)
    assert sum("--torch_compile" in run.options and "float32" in run.options
               for run in plan.runs) == 2


# ---- A GPU that PyTorch can't use


NAME, INSTALL = "NVIDIA A100-SXM4-40GB", (
    "`pip install --force-reinstall torch==2.13.0 --index-url https://download.pytorch.org/whl/{}`")
CU130, CPU_BUILD = ("2.13.0+cu130", "13.0"), ("2.13.0+cpu", None)
OLD, TOO_OLD, NEW = ("550.54.14", 12_040), ("470.82.01", 11_040), ("580.65.06", 13_000)
TOLD_OLD = ("a newer driver for the NVIDIA A100-SXM4-40GB, 580 or later: 550.54.14 is for CUDA"
            " 12.4, and PyTorch 2.13.0+cu130 is built for CUDA 13.0")


def with_driver(monkeypatch, version: str, cuda: int, capability: str | None = "8.0") -> None:
    """What NVIDIA's driver tells; older ones don't know what is asked for the capability."""
    told = {"name,driver_version": [f"{NAME}, {version}"], "driver_version": [version],
            "compute_cap": [capability] if capability else []}
    monkeypatch.setattr(machine, "nvidia_smi", told.__getitem__)
    monkeypatch.setattr(machine, "driver_cuda", lambda: cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(("build", "driver", "capability", "needs"), [
    (CU130, OLD, "8.0", f"{TOLD_OLD}; or, for this driver, {INSTALL.format('cu126')}"),
    (CU130, OLD, "12.0", TOLD_OLD),  # no build for CUDA 12 has kernels for it
    (CU130, TOO_OLD, None, TOLD_OLD.replace("550.54.14", "470.82.01").replace("12.4", "11.4")),
    (CU130, NEW, "8.0", f"what keeps PyTorch 2.13.0+cu130 from the {NAME}: `python -c 'import"
                        " torch; torch.cuda.init()'` tells it"),
    (CU130, ("550.54.14", 0), "8.0", f"what keeps PyTorch 2.13.0+cu130 from the {NAME}: `python -c"
                                     " 'import torch; torch.cuda.init()'` tells it"),
    (CPU_BUILD, NEW, "8.0", f"PyTorch for NVIDIA GPUs, since 2.13.0+cpu can't use the {NAME}: "
                            + INSTALL.format("cu130")),
    (CPU_BUILD, NEW, "7.0", f"PyTorch for NVIDIA GPUs, since 2.13.0+cpu can't use the {NAME}: "
                            + INSTALL.format("cu126")),
    (CPU_BUILD, TOO_OLD, None, f"PyTorch for NVIDIA GPUs, since 2.13.0+cpu can't use the {NAME};"
                               " its driver 470.82.01 is too old for that"),
])
def test_a_gpu_that_is_not_found(monkeypatch, build, driver, capability, needs):
    """Both versions, and what to install."""
    with_driver(monkeypatch, *driver, capability)
    assert machine.gpu_needs(*build, None, None, []) == needs


@pytest.mark.parametrize("answer", [
    "[N/A], [N/A]", "[Insufficient Permissions]", "[Not Supported]", "No devices were found",
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
    "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 570.12"])
def test_an_answer_that_tells_nothing(tmp_path, monkeypatch, answer):
    """Of nvidia-smi, with exit code 0."""
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\ncat << END\n{answer}\nEND\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(machine.Path, "exists", lambda path: False)  # no driver is loaded
    for fields in ("name,driver_version", "driver_version", "compute_cap"):
        assert machine.nvidia_smi(fields) == []
    assert machine.gpu_needs(*CU130, None, None, []) is None


def test_an_answer_that_tells_a_part(tmp_path, monkeypatch):
    """The driver is too old to be asked for the compute capability."""
    script = tmp_path / "nvidia-smi"
    script.write_text('#!/bin/sh\ncase $1 in *compute_cap) echo "[N/A]";;'
                      f' *) echo "{NAME}, 550.54.14";; esac\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(machine, "driver_cuda", lambda: 12_040)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert machine.nvidia_smi("name,driver_version") == [f"{NAME}, 550.54.14"]
    assert machine.gpu_needs(*CU130, None, None, []).startswith(TOLD_OLD)


def test_a_gpu_that_is_hidden_or_out_of_reach(monkeypatch):
    with_driver(monkeypatch, *OLD)
    for hides in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hides)
        assert machine.gpu_needs(*CU130, None, None, []) == (
            f"a visible GPU: CUDA_VISIBLE_DEVICES={hides} hides the {NAME}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # as a scheduler sets it
    assert machine.gpu_needs(*CU130, None, None, []).startswith(TOLD_OLD)
    monkeypatch.setattr(machine, "nvidia_smi", lambda fields: [])
    monkeypatch.setattr(machine.Path, "exists", lambda path: True)  # a host's driver
    assert machine.gpu_needs(*CU130, None, None, []).endswith(
        "a container is started with --gpus all")
    monkeypatch.setattr(machine.Path, "exists", lambda path: False)
    assert machine.gpu_needs(*CU130, None, None, []) is None


@pytest.mark.parametrize(("capability", "kernels", "build"), [
    ("7.0", KERNELS["13.0"], "cu126"), ("6.0", KERNELS["13.0"], "cu126"),
    ("6.1", KERNELS["12.8"], "cu126"), ("7.0", KERNELS["12.8"][1:], "cu126"),
    ("12.0", KERNELS["12.6"], "cu130"), ("8.0", ["sm_86"], "cu130"),  # for later ones alone
    ("7.5", KERNELS["13.0"], None), ("7.0", KERNELS["12.6"], None), ("6.1", KERNELS["12.6"], None),
    ("12.0", KERNELS["12.8"], None), ("8.9", KERNELS["13.0"], None), ("9.0", ["sm_90a"], None),
    ("12.1", ["compute_90"], None),  # compiled when it is needed
    ("9.4", ["gfx90a", "gfx942"], None), ("9.4", [], None)])  # ROCm
def test_a_build_without_kernels_for_the_gpu(capability, kernels, build):
    """By what it was compiled for, whatever its CUDA is."""
    needs = machine.gpu_needs("2.13.0", "12.8", "Tesla P100", capability, kernels)
    assert needs == (build and "kernels for the Tesla P100, compute capability"
                     f" {capability}, which PyTorch 2.13.0 doesn't have: {INSTALL.format(build)}")


@pytest.mark.parametrize(("name", "told"), [("V100", True), ("A100 40 GB", False)])
def test_a_card_without_kernels_is_named(monkeypatch, name, told):
    """With PyTorch's build for CUDA 12.8 or later, as PyPI has it."""
    simulate(monkeypatch, {}, *GPUS[name][:2])
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: KERNELS["13.0"])
    needs = rates.this_machine()["gpu_needs"]
    assert bool(needs) is told and (not told or needs.startswith("kernels for the Tesla V100-SXM2"))


def test_a_driver_that_is_too_old_is_told_everywhere(monkeypatch, tmp_path, capsys):
    """By doctor, `make bench`, which asks `fits`, and by every study, whatever else it does."""
    simulate(monkeypatch, X86 | dict(amx_bf16=True))
    with_driver(monkeypatch, *OLD)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)  # as NVIDIA's library counts them
    here = rates.this_machine()
    assert (here["device"], here["gpus"], rates.rank_count()) == ("cpu", 0, 2)
    monkeypatch.setattr(doctor, "has_compiler", lambda gpu: True)
    line = f"{TOLD_OLD}; or, for this driver, {INSTALL.format('cu126')}"
    told = Doctor().answer(setup_of(tmp_path, here)).splitlines()
    assert f"missing        {line}" in told and "an NVIDIA GPU: " not in "".join(told)
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0), raising=False)
    for stage in ("00", "01"):
        assert Fits().answer(setup_of(tmp_path, here, stage=stage, half=False)) == STAGES[stage]
    assert capsys.readouterr().err == f"missing: {line}\n"
    monkeypatch.setattr(look, "machine_in", lambda results: here)
    command = ["stages", "--dry-run", "--results-dir", str(tmp_path)]
    monkeypatch.setattr(lengths, "configurations", lambda runs, plan, setup: {run.name: dict(
        model="gpt2", batch_size=4, context_length=256, compile=True) for run in runs})
    args = commands.make_parser(all_studies()).parse_args(command)
    assert commands.measure(args, [], all_studies()) == 0
    assert capsys.readouterr().err == f"missing: {line}\n"


def test_gpus_are_counted_by_cuda(monkeypatch):
    """Before it has started PyTorch tells whole GPUs, though only a part of one can be used."""
    simulate(monkeypatch, {}, "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "8.0")
    started = []
    monkeypatch.setattr(torch.cuda, "init", lambda: started.append(1))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1 if started else 8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (2**30, 2**31))
    assert rates.rank_count() == 1 and rates.this_machine()["gpus"] == 1
    started.clear()
    assert rates.free_memory() == [1024]


# ---- What this machine is, kept in machine.json


@pytest.fixture
def asked(monkeypatch) -> list:
    """The questions to bench.measure.machine, each answered with CPU; `facts` may change."""
    questions = []
    monkeypatch.setattr(processes, "ask_machine", lambda question: (
        questions.append(question), CPU)[1])
    return questions


def test_a_description_is_kept(asked, tmp_path, capsys):
    """The first call says that it takes a moment; later ones are at once."""
    results = tmp_path / "results"
    results.mkdir()
    assert look.machine_in(results) == CPU
    assert capsys.readouterr().err.startswith("Looking at this machine, once: ")
    assert look.machine_in(results) == CPU and asked == ["this_machine"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", [["doctor"], ["ladder", "--dry-run", "--rungs", "0"]])
def test_a_misspelt_folder_is_not_made(asked, tmp_path, monkeypatch, capsys, command):
    monkeypatch.setattr(doctor, "has_compiler", lambda gpu: True)
    options = [*command, "--results-dir", str(tmp_path / "no-such"), "--data", str(tmp_path)]
    args = commands.make_parser(all_studies()).parse_args(options)
    assert commands.measure(args, [], all_studies()) == 0
    assert asked == ["this_machine"] and not [*tmp_path.iterdir()]


@pytest.mark.parametrize("damage", [
    lambda text: "", lambda text: "[]", lambda text: text[:-9], lambda text: "[" * 100_000,
    lambda text: text.replace('"Some CPU"', '"Other CPU"'), lambda text: '{"now": 1}',
    lambda text: text.replace('"key"', '"lock"'), lambda text: text.replace('"machine"', '"m"')])
def test_a_damaged_description_is_made_anew(asked, tmp_path, damage):
    look.machine_in(tmp_path)
    path = tmp_path / "machine.json"
    whole = path.read_text()
    path.write_text(damage(whole))
    assert look.machine_in(tmp_path) == CPU and len(asked) == 2
    assert json.loads(path.read_text())["now"] == json.loads(whole)["now"]
    assert look.machine_in(tmp_path) == CPU and len(asked) == 2


@pytest.mark.parametrize("change", [
    lambda patch: patch.setattr(machine.metadata, "version", lambda name: "9.9"),
    lambda patch: patch.setattr(machine, "nvidia_smi", lambda fields: ["Tesla T4, 570"]),
    lambda patch: patch.setattr(machine, "ram_gb", lambda: 1.0),
    lambda patch: patch.setenv("CUDA_VISIBLE_DEVICES", "7"),
    lambda patch: patch.setenv("OMP_NUM_THREADS", "3")],
    ids=["PyTorch", "GPU", "memory", "visible GPUs", "threads"])
def test_a_change_is_seen(asked, tmp_path, monkeypatch, change):
    look.machine_in(tmp_path)
    change(monkeypatch)
    look.machine_in(tmp_path)
    look.machine_in(tmp_path)
    assert len(asked) == 2


def test_a_report_stays_beside_it(asked, tmp_path):
    """Of an earlier start, in the same file; the description doesn't touch it."""
    report = dict(machine=MACHINE, matmul_peak=PEAK)
    (tmp_path / "machine.json").write_text(json.dumps(report))
    look.machine_in(tmp_path)
    kept = json.loads((tmp_path / "machine.json").read_text())
    assert kept.pop("now")["machine"] == CPU and kept == report


def test_where_it_cannot_be_kept(asked, tmp_path, capsys):
    """Such as in a folder that may not be written: it is told, and the command goes on."""
    (tmp_path / "machine.json").mkdir()
    assert look.machine_in(tmp_path) == CPU
    assert "it can't be kept: " in capsys.readouterr().err


def test_facts_need_no_pytorch():
    """They name its version, the build that PyTorch adds only where a wheel's name has it, and
    change with the code that describes."""
    facts = machine.facts()
    assert facts == machine.facts()
    assert facts[0] in (torch.__version__, torch.__version__.partition("+")[0])
    json.dumps(facts)
    assert any("flags" in line or "Features" in line for line in facts[4]) or (
        not Path("/proc/cpuinfo").exists())
