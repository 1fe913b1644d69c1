"""The scripts' CUDA branches, on a CPU: every call that names a CUDA device gets the CPU, and
stand-ins take the place of what only a GPU has. (On a machine with a GPU they hide it.)"""

import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import ONE_RANK, STAGES, call_main, settings_restored
from torch.cuda._utils import _get_device_index
from torch.overrides import TorchFunctionMode

GB = 1024**3
GPU = "Stand-In A100"
MEMORY = dict(memory_allocated=1.5 * GB, memory_reserved=2.5 * GB, max_memory_allocated=3.5 * GB,
              max_memory_reserved=4.5 * GB)
STEP = 250  # milliseconds from one event to the next

# A loader that pins says so where it finds no GPU to pin for.
pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")


def tensors_in(values) -> list[torch.Tensor]:
    nested = [values] if isinstance(values, torch.Tensor) else values
    if not isinstance(nested, list | tuple):
        return []
    return [tensor for value in nested for tensor in (
        [value] if isinstance(value, torch.Tensor) else tensors_in(value))]


class OnTheCPU(TorchFunctionMode):
    """Gives the CPU to every call that names a CUDA device; marks what it returns, and what is
    computed from that, `on_gpu`, so that a test sees what nobody has moved."""

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
        moves = any(a is not b for a, b in zip([*args, *kwargs.values()],
                                               [*new, *new_named.values()], strict=True))
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


class Distributed:
    """torch.distributed: gloo, where NCCL is asked for."""

    def __init__(self):
        self.groups = []

    def __getattr__(self, name):
        return getattr(dist, name)

    def init_process_group(self, backend, device_id=None):
        self.groups.append((backend, device_id))
        dist.init_process_group("gloo")

    def barrier(self):  # of one rank
        assert self.groups

    def get_backend(self):
        return self.groups[-1][0]


@pytest.fixture
def gpus(monkeypatch, stages) -> SimpleNamespace:
    """Two GPUs; what was asked of them."""
    seen = SimpleNamespace(mode=OnTheCPU(), chosen=[], distributed=Distributed(), asked=set(),
                           inputs=[], capability=(8, 0))
    for name, value in (("count", 0), ("known", -1), ("waits", 0)):
        monkeypatch.setattr(Event, name, value)

    def noting(value):
        return lambda device: seen.asked.add(str(device)) or value

    for name, stand_in in (
        ("is_available", lambda: True), ("device_count", lambda: 2), ("Event", Event),
        ("get_device_name", noting(GPU)),
        *((name, lambda size=size: size) for name, size in MEMORY.items()),
        # With PyTorch's own check of what it is given.
        ("set_device", lambda device: seen.chosen.append(_get_device_index(device))),
        ("is_current_stream_capturing", lambda: False),  # optimizers ask
        ("init", lambda: None),
        ("get_device_capability", lambda device: seen.capability),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    # The scripts don't ask for an accelerator; PyTorch's loaders and optimizers do, and must not
    # be told of one that they would then use.
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: None)
    monkeypatch.setattr(stages["02_opt_multi_gpu_ddp"], "dist", seen.distributed)
    return seen


@pytest.fixture
def run_on_gpu(bench, gpus, monkeypatch):
    """Runs a stage with the options of a GPU's run, but a gpt2 and a text of a moment."""
    def run(stage, *options):
        script = bench.stages[stage]
        monkeypatch.setitem(script.MODELS, "gpt2", dict(layers=2, heads=2, width=32))
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
        with mock.patch.multiple(script, **seams), gpus.mode:
            return call_main(script, *folders, *small, *off, *options)
    return run


@pytest.mark.parametrize("stage", STAGES)
def test_the_defaults_are_the_published_experiment(stage, stages, gpus, monkeypatch):
    script = stages[stage]
    for name, value in ONE_RANK.items():
        monkeypatch.setenv(name, value)
    with gpus.mode:
        config = script.configure([])
    published = dict(
        model="gpt2", layers=12, heads=12, width=768, context_length=1024, dropout=0.1,
        vocab_size=50_257, batch_size=8, learning_rate=5e-4, weight_decay=0.1, seed=123,
        epochs=15, max_steps=None, max_tokens=None, eval_freq=15, eval_windows=40,
    )
    assert config.device.type == "cuda"
    if stage != "00_orig":
        published |= dict(vocab_size=50_304, batch_size=32, compile=True)
    assert {name: getattr(config, name) for name in published} == published


@pytest.mark.parametrize("stage", [
    pytest.param(stage, marks=[pytest.mark.slow] * (stage != STAGES[1])) for stage in STAGES])
def test_record_of_a_gpu(stage, bench, gpus, run_on_gpu, monkeypatch):
    script, rank, optimized = bench.stages[stage], stage.startswith("02"), stage != "00_orig"
    device = "cuda:1" if rank else "cuda"
    if rank:  # of a job whose second rank here is the first of all: only LOCAL_RANK is the GPU
        monkeypatch.setattr(script, "LOCAL_RANK", 1)
    result = run_on_gpu(stage)
    assert result.returncode == 0, result.stderr
    start, *logs, epoch, end = bench.record()
    config = start["config"]
    expected = dict(
        model="gpt2", device="cuda", dropout=0.1, epochs=15, learning_rate=5e-4,
        weight_decay=0.1, seed=123, eval_windows=40, max_tokens=None, world_size=1,
        dtype="bfloat16" if optimized else "float32",
        matmul_precision="high" if optimized else "highest",
    )
    assert config | expected == config
    assert start["environment"]["gpu"] == GPU
    assert f"\nDevice: cuda ({GPU})\n" in result.stdout
    assert next(bench.results.iterdir()).name.startswith(f"{stage}-cuda-")

    memory = dict(reserved_gb=2.5, peak_reserved_gb=4.5)
    assert epoch | memory == epoch
    assert (end["reserved_gb"], end["peak_reserved_gb"]) == (2.5, 4.5)
    assert "\nReserved memory: 2.5000 GB\n" in result.stdout
    assert gpus.asked == {device}

    # Events a quarter of a second apart; evaluation lies between two intervals and isn't timed.
    assert [log["step"] for log in logs] == [0, 3, 6, 7]
    assert [log["seconds"] for log in logs] == [[0.25], [0.25] * 3, [0.25] * 3, [0.25]]
    rate = 2 * 16 / 0.25
    assert {log["step_tok_per_sec"] for log in logs} == {rate}
    assert end["avg_tok_per_sec"] == rate
    assert f"Median step tok/sec: {rate:.0f}\n" in result.stdout
    assert end["status"] == "complete"
    assert Event.waits == len(logs)  # between two lines nothing waits for the GPU

    assert gpus.moved[0] == gpus.moved[1] > 0  # every parameter and buffer
    assert len(gpus.inputs) > 8 + 50  # of training, evaluation and the sample
    assert all(hasattr(ids_BT, "on_gpu") for ids_BT in gpus.inputs)
    assert gpus.chosen == [1 if rank else 0]
    assert gpus.mode.devices == ({"cuda:1", "cuda"} if rank else {"cuda"})
    assert gpus.distributed.groups == ([("nccl", torch.device("cuda:1"))] if rank else [])
    assert gpus.loader.pin_memory is optimized
    # From pinned memory x and y of each of the 8 steps are copied without waiting.
    assert sum(gpus.mode.copies) == (2 * 8 if optimized else 0)
    assert (end["attention_backend"] == "manual") is not optimized
    assert end["attention_backend"] is not None


def test_device_with_a_number(bench, gpus, run_on_gpu):
    result = run_on_gpu("00_orig", "--device", "cuda:1")
    assert result.returncode == 0, result.stderr
    assert gpus.chosen == [1] and gpus.mode.devices == {"cuda:1"}
    assert gpus.asked == {"cuda:1"}
    assert bench.record()[0]["config"]["device"] == "cuda"


def test_cpu_beside_a_gpu(bench, gpus, run_on_gpu):
    """--device cpu leaves the GPU alone."""
    for stage in STAGES[1:]:
        bench.results = bench.data.parent / stage
        result = run_on_gpu(stage, "--device", "cpu", "--model", "gpt2")
        assert result.returncode == 0, result.stderr
        assert bench.record()[0]["config"]["device"] == "cpu" and not gpus.loader.pin_memory
    assert not gpus.chosen and not gpus.asked and not gpus.mode.devices


def test_diverged_on_a_gpu(bench, run_on_gpu):
    result = run_on_gpu("01_opt_single_gpu", "--learning-rate", 1e30)
    assert result.returncode == 1 and "is not finite" in result.stderr
    assert bench.record()[-1]["status"] == "diverged"


def test_gpu_out_of_memory(bench, run_on_gpu, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 12.27 GiB.")

    monkeypatch.setattr(bench.stages["00_orig"], "backward_and_update", full)
    result = run_on_gpu("00_orig")
    assert result.returncode == 1
    assert result.stderr.startswith("error: out of memory: lower --batch-size or --context")
    end = bench.record()[-1]
    assert end["status"] == "out_of_memory" and end["peak_reserved_gb"] == 4.5


@pytest.mark.parametrize("stage", STAGES[1:])
def test_a_gpu_without_bfloat16(stage, bench, gpus, run_on_gpu):
    """It trains in float32, and says what is faster there."""
    gpus.capability = (7, 5)
    result = run_on_gpu(stage, "--max-steps", 1)
    assert result.returncode == 0, result.stderr
    said = ("Training in float32: compute capability 7.5 has no bfloat16 units; for float16: python"
            " patches/stack.py compose precision-fp16 --out my.py\n")
    assert result.stdout.count(said) == 1
    start, *_, end = bench.record()
    assert start["config"]["dtype"] == "float32" and end["status"] == "complete"
    assert "7.5" in start["config"]["dtype_reason"]


@pytest.mark.parametrize(("cores", "given", "workers"), [(64, None, "8"), (1024, None, "32"),
                                                         (4, None, "1"), (64, "5", "5")])
def test_ranks_share_the_cores_for_compiling(stages, monkeypatch, cores, given, workers):
    """The workers of all ranks together are no more than there are cores."""
    script, name = stages["02_opt_multi_gpu_ddp"], "TORCHINDUCTOR_COMPILE_THREADS"
    monkeypatch.setattr(script.os, "sched_getaffinity", lambda pid: range(cores), raising=False)
    monkeypatch.setattr(script, "LOCAL_WORLD_SIZE", 8)
    monkeypatch.setenv(name, given or "")
    if not given:
        monkeypatch.delenv(name)
    monkeypatch.setattr(script.dist, "init_process_group", lambda *_, **how: None)
    with settings_restored():
        script.join_ranks(SimpleNamespace(device=torch.device("cuda")))
        assert os.environ[name] == workers


@pytest.mark.parametrize(("available", "says"), [(False, 2), (True, 1)])
def test_02_counts_gpus_by_cuda(stages, gpus, monkeypatch, capsys, available, says):
    """Not by NVIDIA's library, which has eight where the driver is too old, or one is cut up."""
    started = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "init", lambda: started.append(1))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1 if started else 8)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        stages["02_opt_multi_gpu_ddp"].configure([])
    assert f"torchrun --nproc_per_node={says} " in capsys.readouterr().err
