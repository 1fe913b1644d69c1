"""What a training step does, operator by operator, for bench.predict.fingerprint.

A script's own train() makes three steps (so that a schedule of the learning rate shows) and two
evaluations of a model with two layers, on tensors without storage. torch.compile only leaves marks.
Nothing in this depends on the machine.
"""

import contextlib
import hashlib
import itertools
import os
import re
import weakref
from pathlib import Path
from unittest import mock

import torch
import torch.utils.data
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bench.common import load_script
from bench.predict import lesson, pytorch
from bench.predict.pytorch import KERNELS

# In place, and not there for tensors without storage.
IN_PLACE = torch.ops.aten._fused_adamw_.default, torch.ops.aten._amp_update_scale_.default
FRACTION = re.compile("<[^>]*>")  # as Operators.tell tells it
LAYERS = 2


class Operators(TorchDispatchMode):
    """Each operator in its order, with what it reads and makes."""

    def __init__(self):
        super().__init__()
        self.graph, self.step = hashlib.sha256(), hashlib.sha256()
        self.numbers, self.count, self.open = {}, itertools.count(), False

    def begin(self, model: nn.Module) -> None:
        """What is before (a trial of the compiler, the move to the device) is no part of a step."""
        self.open = True
        for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
            self.note(name, tensor)

    def end(self) -> None:
        self.open = False

    def note(self, *what) -> None:
        """What a step does."""
        if self.open:
            self.mark(*what)

    def mark(self, *what, graph: bool = True) -> None:
        """Into both fingerprints, or `step` alone, which tells all numbers with a fraction."""
        text = self.tell(what)
        self.step.update(text.encode())
        if graph:
            self.graph.update(FRACTION.sub("number", text).encode())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in IN_PLACE:
            result = args[0] if func._schema.returns else None
        else:
            result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, torch.Tensor | tuple | list) else None
        self.note(str(func), args, kwargs or {}, made)
        return result

    def tell(self, value) -> str:
        """A tensor as its storage's number, type, shape and strides, and one of a single number on
        the CPU as that; what depends on the machine as its kind."""
        if isinstance(value, torch.Tensor):
            single = value.dim() == 0 and value.device.type == "cpu" and value.is_floating_point()
            return (f"{self.number(value.untyped_storage())} {value.dtype} {tuple(value.shape)}"
                    f" {value.stride()} {self.tell(value.item()) if single else ''}")
        if isinstance(value, tuple | list):
            return f"({', '.join(map(self.tell, value))})"
        if isinstance(value, dict):
            return self.tell(list(value.items()))
        if isinstance(value, float):  # its last digits may differ between CPUs
            return f"<{value:.9g}>"
        known = bool | int | str | torch.dtype | torch.layout | torch.memory_format | None
        return str(value) if isinstance(value, known) else type(value).__name__

    def number(self, storage: torch.UntypedStorage) -> int:
        """Storages are counted as they appear; an address is used again."""
        key = storage._cdata
        if key not in self.numbers:
            self.numbers[key] = next(self.count), weakref.ref(
                storage, lambda _: self.numbers.pop(key, None))
        return self.numbers[key][0]


class Compiled(nn.Module):
    """In place of what torch.compile makes of a model or a function."""

    def __init__(self, inner, notes: Operators, options: dict):
        super().__init__()
        self._orig_mod, self.notes, self.how = inner, notes, options

    def forward(self, *args, **kwargs):
        self.notes.note("compiled", self.how)
        result = self._orig_mod(*args, **kwargs)
        self.notes.note("compiled until here")
        return result

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_orig_mod"), name)


class WithoutStorage(TorchFunctionMode):
    """A script's device stays "cpu" or "cuda", so that it takes that way; what it moves or makes
    there has no storage."""

    def __init__(self, device: str):
        super().__init__()
        self.device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*map(self.place, args),
                    **{name: self.place(value) for name, value in (kwargs or {}).items()
                       if name != "pin_memory"})  # which needs a GPU

    def place(self, value):
        there = isinstance(value, torch.device) and value.type == self.device
        return torch.device("meta") if there else value


@contextlib.contextmanager
def on_any_machine(device: str):
    """As on any with such a device: with glibc, and only the variables of rank 0."""
    known = {name: os.environ[name]
             for name in ("PATH", "HOME", "SYSTEMROOT", "TEMP", "RANK", "LOCAL_RANK", "WORLD_SIZE",
                          "MASTER_ADDR", "MASTER_PORT") if name in os.environ}
    with (mock.patch.dict(os.environ, known, clear=True), mock.patch("sys.platform", "linux"),
          mock.patch("platform.libc_ver", lambda *_: ("glibc", "")),
          mock.patch("torch.cuda.is_available", lambda: device == "cuda")):
        yield


def configured(module, device: str, options: list[str]) -> tuple:
    """A script's settings, and what it does besides, to keep memory: calls of C functions, and
    changes of the environment."""
    done: list = []

    class Library:
        def __getattr__(self, name: str):
            return lambda *args: done.append((name, args))

    with on_any_machine(device), mock.patch("ctypes.CDLL", lambda *_, **__: Library()):
        before = dict(os.environ)
        config = module.configure(["--device", "cpu", *options])
        done += sorted(os.environ.items() - before.items())
    return config, done


def fingerprint(script: Path, options: list[str], device: str, dtype: str) -> tuple[str, str]:
    """(graph, step). Raises what a script raises that isn't like ours."""
    notes = Operators()
    with pytorch.replaced(marks(notes, device)):
        module = load_script(script)
        config, kept = configured(module, device, options)
        notes.mark(kept, graph=False)
        lesson.settle(config, dtype)
        notes.mark(config.layers)
        config.layers, config.eval_windows = LAYERS, 8 * pytorch.WORLD_SIZE
        data = lesson.data_of_zeros(module, config)
        config.device = torch.device("cuda")
        with contextlib.suppress(RuntimeError, AssertionError):  # it may need a GPU at once
            module.make_loader(data.train, config)  # only how: pinned memory
        config.device = torch.device(device)
        model = lesson.model_of(module, config)
        with WithoutStorage(device), notes:
            module.train(model, data, config, lesson.run_of(notes.begin, notes.end),
                         lambda _: 0.0)
    notes.mark(torch.get_float32_matmul_precision())
    if pytorch.compiler.activation_memory_budget < 1:
        notes.mark("activations", str(pytorch.compiler.activation_memory_budget))
    notes.mark(kernels(), graph=False)
    return notes.graph.hexdigest()[:16], notes.step.hexdigest()[:16]


def kernels() -> list[bool]:
    """Those of attention that a script hasn't turned off."""
    return [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in KERNELS]


def marks(notes: Operators, device: str) -> dict[str, object]:
    """In place of what can't be run without storage, or depends on the machine: it only leaves a
    mark."""
    switch = torch.backends.cuda.enable_cudnn_sdp

    def compile(model=None, **how):
        if model is None:
            return lambda model: compile(model, **how)
        return Compiled(model, notes, {name: str(value) for name, value in how.items()})

    def attention(*args, **how):
        notes.note(kernels())
        return pytorch.flash_attention(*args, **how)

    def disable(function=None, **how):
        if function is None:
            return lambda function: disable(function, **how)

        def left_out(*args, **kwargs):
            notes.note("not compiled")
            result = function(*args, **kwargs)
            notes.note("not compiled until here")
            return result

        return left_out

    class Loader(torch.utils.data.DataLoader):
        """Without processes of its own."""

        def __init__(self, dataset, batch_size=1, num_workers=0, prefetch_factor=None,
                     persistent_workers=False, pin_memory=False, **how):
            notes.mark("loader", batch_size, num_workers, prefetch_factor, pin_memory, graph=False)
            super().__init__(dataset, batch_size, pin_memory=pin_memory, **how)

    class Parallel(nn.Module):
        def __init__(self, module: nn.Module, **how):
            super().__init__()
            self.module = module
            notes.mark("parallel", how)

        def forward(self, *args):
            return self.module(*args)

    def shared(module: nn.Module, **how) -> nn.Module:
        notes.mark("shared", type(module).__name__, sorted(how))
        return module

    def elsewhere(**how) -> contextlib.nullcontext:
        notes.note("saved elsewhere")
        return contextlib.nullcontext()

    return pytorch.AS_ON_CUDA | {
        # Without effect on a CPU, so of one mark.
        "torch.backends.cuda.enable_cudnn_sdp": lambda on: switch(on and device == "cuda"),
        "torch.compile": compile, pytorch.ATTENTION: attention,
        "torch.nn.Module.compile": lambda self, **how: notes.mark("compiled part", how),
        "torch.compiler.disable": disable, "torch.utils.data.DataLoader": Loader,
        "torch.nn.parallel.DistributedDataParallel": Parallel,
        "torch.distributed.fsdp.fully_shard": shared,
        "torch.autograd.graph.save_on_cpu": elsewhere}
