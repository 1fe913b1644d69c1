"""What a script does on a GPU that isn't there: its own training steps, run on tensors without
storage (device "meta").

    echo '{"script": "00_orig.py", "options": [], "batch": 8}' | python -m bench.predict.trace

It answers each line with one: {"trace": {...}}, or {"error": "..."}; bench.predict.tracing asks it.

Each storage is noted when it is made and when it dies, and of each kernel how many floating-point
operations it does and how many bytes it reads and writes. What is as on CUDA: dropout keeps a mask
of a byte per element, attention is the flash kernel with the buffers of its backward pass (those
of the memory-efficient kernel, which older GPUs run, are as large: attention_backward.cu), the
optimizer works on all tensors at once, and DDP keeps a second copy of the gradients. No trace sees
the workspace of cuBLAS; it is added.

In place of torch.compile stands bench.predict.compiled.
"""

import contextlib
import gc
import io
import json
import math
import os
import sys
import weakref
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.distributed import fsdp
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from bench.common import load_script
from bench.predict.compiled import (
    aten,
    compile_only_models,
    dropout,
    flash_attention,
    key_of,
    linear,
)
from bench.processes import error_line

WORKSPACE = 8_519_680  # bytes that cuBLAS takes at its first product: 2 × 4,096 KiB, 8 × 16 KiB
STEPS = 3
# Operators that read, or in their backward pass write, one element or row for each index.
ONE_OF_A_ROW = ("embedding", "gather", "index", "index_select", "nll_loss_backward",
                "nll_loss_forward")
PYTORCH = "2.13"  # whose compiler and optimizers bench.predict.compiled and this know from within
WORLD_SIZE = 4  # of 02, whose memory doesn't depend on it unless a variant shards
# PyTorch's own, before in_place_of_pytorch().
real_autocast, resize = torch.autocast, torch.UntypedStorage.resize_
real_fully_shard = fsdp.fully_shard


def is_meta(value) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def bytes_of(*tensors: torch.Tensor) -> int:
    """What is read or written of them: each element once, however often it is broadcast. Of weights
    that ranks share a rank has its own part."""
    own = [getattr(each, "_local_tensor", each) for each in tensors]
    return sum(math.prod(size for size, stride in zip(each.shape, each.stride(), strict=True)
                         if stride) * each.itemsize for each in own)


def is_aligned(matrix: torch.Tensor) -> bool:
    """Whether its rows (or columns, where it is transposed) fill blocks of 16 bytes."""
    sizes = [size for size, stride in zip(matrix.shape, matrix.stride(), strict=True)
             if stride == 1]
    return all(size * matrix.itemsize % 16 == 0 for size in sizes)


def as_on_cuda() -> contextlib.ExitStack:
    """While it is open, functions that take another way on a CPU, or that need a tensor's values,
    do as on CUDA."""
    functional, tensor = torch.nn.functional, torch.Tensor
    item, tolist, cpu = tensor.item, tensor.tolist, tensor.cpu

    def own_dropout(x, p=0.5, training=True, inplace=False):
        if not is_meta(x):
            return dropout(x, p, training, inplace)
        return aten.native_dropout(x, p, True)[0] if training and p else x

    def own_attention(*args, **kwargs):
        if not torch.backends.cuda.flash_sdp_enabled():
            raise NotImplementedError("of attention's kernels only flash can be traced")
        return flash_attention(*args, **kwargs)

    def own_linear(x, weight, bias=None):
        if is_meta(x) and torch.is_autocast_enabled("cpu"):
            x, weight, bias = map(Autocast.cast, (x, weight, bias))
        return linear(x, weight, bias)

    def instead(real, value):
        return lambda self, *args: value(self) if is_meta(self) else real(self, *args)

    stack = contextlib.ExitStack()
    for owner, name, own in (
            (functional, "dropout", own_dropout), (functional, "linear", own_linear),
            (functional, "scaled_dot_product_attention", own_attention),
            (tensor, "item", instead(item, lambda x: 0.0)),
            (tensor, "tolist", instead(tolist, lambda x: [0])),
            (tensor, "cpu", instead(cpu, lambda x: torch.zeros(x.shape, dtype=x.dtype)))):
        stack.enter_context(mock.patch.object(owner, name, own))
    return stack


class Autocast(real_autocast):
    """In place of torch.autocast, which doesn't convert tensors without storage."""

    weights = {}  # converted, until its end

    def __init__(self, device: str, dtype: torch.dtype):
        super().__init__("cpu", dtype)

    @classmethod
    def cast(cls, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None or tensor.dtype != torch.float32:
            return tensor
        if id(tensor) in cls.weights:
            return cls.weights[id(tensor)]
        new = tensor.to(torch.get_autocast_dtype("cpu"))
        if tensor.is_leaf and tensor.requires_grad:
            cls.weights[id(tensor)] = new
        return new

    def __exit__(self, *error):
        self.weights.clear()
        return super().__exit__(*error)


class Notes(TorchDispatchMode):
    """`events`: a storage's size in bytes when it is made, -k when the k-th one dies.

    `work`: what was done from each mark() to the next, as {"KIND PRECISION": [kernels,
    floating-point operations, bytes read and written]}. KIND is products (of linear layers), head
    (of the one that makes logits), attention, loss, optimizer or rest. Products of a matrix that
    isn't aligned are "unaligned".
    """

    def __init__(self, config):
        super().__init__()
        self.config, self.events, self.made, self.live = config, [], 0, {}
        self.work, self.updating = [{}], 0  # optimizers that are at it; one may use another

    def __enter__(self):
        Notes.current = self
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten._fused_adamw_.default:  # in place, and not there for such tensors
            for weight, gradient, *averages in zip(*args[:4], strict=True):
                size = 2 * bytes_of(weight, *averages) + bytes_of(gradient)
                self.add_work("optimizer", "", 0, 0, size)
            self.add_work("optimizer", "", 1, 0, 0)
            return None
        if func is aten._amp_update_scale_.default:  # nor is this one
            return args[0]
        if func is aten._scaled_dot_product_flash_attention_backward.default:
            q_BHTD = args[1]
            B, H, T, D = q_BHTD.shape
            T = -(-T // 128) * 128  # csrc/flash_attn/flash_api.cpp: float32 in whole blocks
            buffers = [self.add(4 * B * H * T), self.add(4 * B * H * T * -(-D // 32) * 32)]
            result = func(*args, **(kwargs or {}))
            self.events += [-number for number in buffers]
        else:
            result = func(*args, **(kwargs or {}))
        made = [value for value in tree_iter(result) if is_meta(value)]
        for value in made:
            self.note(value)
        self.count(func, args, kwargs or {}, made, result)
        return result

    def mark(self) -> float:
        self.work.append({})
        return 0.0

    def add_work(self, *kernel) -> None:
        kind, precision, *figures = kernel
        name = f"{kind} {precision}".strip()
        known = self.work[-1].get(name, (0, 0, 0))
        self.work[-1][name] = [a + b for a, b in zip(known, figures, strict=True)]

    def count(self, func, args: tuple, kwargs: dict, made: list, result) -> None:
        """The work of an operator: what its schema says that it reads and writes. Views, and
        tensors that stay empty, need no kernel."""
        schema = func._schema
        name = schema.name.partition("::")[2]
        given = dict(zip((each.name for each in schema.arguments), args, strict=False)) | kwargs

        def tensors(only_written: bool) -> list:
            return [x for each in schema.arguments if each.name in given
                    and (not only_written or each.alias_info and each.alias_info.is_write)
                    for x in tree_iter(given[each.name]) if is_meta(x)]

        read, written = tensors(False), tensors(True)
        keys = {key_of(each) for each in read}
        new = [each for each in made if key_of(each) not in keys]
        if not new and not written or name.startswith(("empty", "new_empty")):
            return
        if name.startswith("new_") or name.endswith("_like"):
            size = bytes_of(*new)
        elif name in ONE_OF_A_ROW:
            size = bytes_of(*new) * (1 if "backward" in name else 2)
        elif "out" in kwargs or name in ("copy_", "zero_", "fill_"):  # written, but not read
            size = bytes_of(*read)
        else:
            size = bytes_of(*read, *written, *new)
        formula, flops, precision = flop_registry.get(func._overloadpacket), 0, ""
        if formula:
            flops = formula(*args, **kwargs, out_val=result)
            precision = str(read[0].dtype).removeprefix("torch.")
            if precision == "float32" and torch.get_float32_matmul_precision() != "highest":
                precision = "TF32"
            if "attention" in name:
                flops //= 2  # the fused kernel leaves out what a causal mask hides
            elif not all(map(is_aligned, [*read, *new])):
                precision += " unaligned"
        self.add_work(self.kind(name, [*read, *made], flops), precision, 1, flops, size)

    def kind(self, name: str, tensors: list, flops: int) -> str:
        T, V = self.config.context_length, self.config.vocab_size
        if self.updating:
            return "optimizer"
        if flops and any(V in x.shape for x in tensors):
            return "head"
        if any(x.shape[-1:] == (V,) for x in tensors):  # logits; the weights are (V, C)
            return "loss"
        if "attention" in name or any(
                x.shape[-2:] == (T, T) and (x.dim() == 4 or "bmm" in name) for x in tensors):
            return "attention"
        return "products" if flops else "rest"

    def compiled_kernel(self, parameters: list[str], *args) -> None:
        """One that the compiler has made: it reads or writes each of its tensors once, or both."""
        tensors = [each for each in args if is_meta(each)]
        size = sum(bytes_of(each) * (1 + ("in_out_ptr" in parameter))
                   for each, parameter in zip(tensors, parameters, strict=False))
        self.add_work(self.kind("", tensors, 0), "", 1, 0, size)

    def add(self, size: int) -> int:
        self.events.append(size)
        self.made += 1
        return self.made

    def note(self, tensor: torch.Tensor) -> None:
        tensor = getattr(tensor, "_local_tensor", tensor)  # of weights that ranks share, its own
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live or not storage.nbytes():
            return

        def died(_):
            number, _ = self.live.pop(key)
            self.events += [-number] * bool(number)

        self.live[key] = self.add(storage.nbytes()), weakref.ref(storage, died)

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """In place of a storage's resize_(), by which fully_shard gathers and releases weights."""
        resize(storage, size)
        if storage._cdata in self.live:
            number, reference = self.live[storage._cdata]
            self.events += [-number] * bool(number)
            self.live[storage._cdata] = self.add(size) if size else 0, reference


class Buckets(nn.Module):
    """In place of DistributedDataParallel: gradients lie in buffers that stay."""

    def __init__(self, model: nn.Module, **how):
        super().__init__()
        self.module = model
        for parameter in model.parameters():
            parameter.bucket = torch.empty_like(parameter, requires_grad=False)
            parameter.register_post_accumulate_grad_hook(self.to_bucket)

    @staticmethod
    def to_bucket(parameter: nn.Parameter) -> None:
        parameter.grad = parameter.bucket

    def forward(self, *inputs):
        return self.module(*inputs)


def shares(module: nn.Module, offload_policy=None, **how) -> nn.Module:
    """In place of fully_shard: the same, for tensors without storage."""
    if isinstance(offload_policy, fsdp.CPUOffloadPolicy):
        raise NotImplementedError("--offload can't be traced")
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group  # not a public name

    _fsdp_param_group.FSDPParamGroup._validate_no_meta_params = lambda _: None
    return real_fully_shard(module, offload_policy=offload_policy or fsdp.OffloadPolicy(), **how)


class NoStream(torch.cpu.Stream):
    stream_id = device_index = device_type = 0


# In place of torch.cuda, for fully_shard.
NO_STREAMS = SimpleNamespace(
    current_device=lambda: 0, device_count=lambda: WORLD_SIZE, set_device=lambda _: None,
    current_stream=NoStream, stream=torch.cpu.stream, Stream=NoStream, Event=torch.cpu.Event)


def kept_elsewhere(*_, **how):
    """In place of torch.autograd.graph.save_on_cpu."""
    raise NotImplementedError("activations in the CPU's memory can't be traced")


def in_place_of_pytorch() -> contextlib.ExitStack:
    """While it is open, all that a script takes from PyTorch and that can't be traced as it is, is
    replaced; it has to be opened before the script is loaded, which may import these names."""
    stack = contextlib.ExitStack()
    optimizers = import_module("torch.optim.optimizer")  # torch.optim hides its name
    kernels = optimizers._get_foreach_kernels_supported_devices
    for name, own in (
            ("torch.compile", compile_only_models), ("torch.autocast", Autocast),
            ("torch.nn.parallel.DistributedDataParallel", Buckets),
            ("torch.distributed.fsdp.fully_shard", shares),
            ("torch.autograd.graph.save_on_cpu", kept_elsewhere),
            ("torch.UntypedStorage.resize_", lambda *args: Notes.current.resize(*args)),
            ("torch.optim.adam._device_dtype_check_for_fused", lambda *_, **__: None)):
        stack.enter_context(mock.patch(name, own))
    stack.enter_context(mock.patch("torch.meta", NO_STREAMS, create=True))
    # On CUDA an optimizer works on all tensors at once unless it is told not to.
    stack.enter_context(mock.patch.object(
        optimizers, "_get_foreach_kernels_supported_devices", lambda: [*kernels(), "meta"]))

    def updating(change: int):
        def hook(*_):
            Notes.current.updating += change

        return hook

    for register, change in ((register_optimizer_step_pre_hook, 1),
                             (register_optimizer_step_post_hook, -1)):
        stack.callback(register(updating(change)).remove)
    return stack


# ---- A script ----------------------------------------------------------------------------------


def text_of_zeros(module, config):
    """The script's own dataset, of more steps than are made; it takes no memory."""
    tokens = 2 * STEPS * WORLD_SIZE * config.batch_size * config.context_length + 1
    return module.TokenWindows(np.broadcast_to(np.uint16(0), tokens), config.context_length)


class Run:
    """In place of a script's Run; keeps the events as they are at the end of the first epoch."""

    def __init__(self, notes: Notes):
        self.notes = notes

    def start(self, model: nn.Module, data, config) -> None:
        for tensor in [*model.parameters(), *model.buffers()]:  # what was made on the device
            self.notes.note(tensor)
        self.notes.add(WORKSPACE)

    def log(self, *figures) -> None:
        pass

    def epoch(self, *figures) -> None:
        self.events = list(self.notes.events)


def trace(module, options: list[str], batch: int) -> dict:
    """What is known of training at a batch size, by a script's own train(): a step, an
    evaluation of one batch of each text, further steps, an evaluation. The epoch's sample is left
    out: it takes less memory than an evaluation.

    `events` and the `work` of a step and of an evaluation are those of Notes; `tokens` are those of
    a step on one GPU. A model of few layers can't stand for one of many: the compiler takes one of
    four orders of a whole graph's kernels, by the memory that each would take.
    """
    config = module.configure(["--device", "cpu", *options, "--batch-size", str(batch)])
    if getattr(config, "dtype", None) == "auto":  # that of the GPU, whatever this computer has
        config.dtype, config.dtype_reason = "bfloat16", "predicted"
    config.device = torch.device("meta")
    config.max_steps, config.max_tokens, config.eval_freq = STEPS, None, 99
    config.target_loss = -1
    config.eval_windows = 8 * getattr(module, "WORLD_SIZE", 1)  # of which each rank has its share
    windows = text_of_zeros(module, config)
    data = module.Data(meta={}, train=windows, val=windows, tokenizer=None)
    with torch.device("meta"):
        model = module.GPTModel(config)
    with as_on_cuda(), Notes(config) as notes:
        run = Run(notes)
        module.train(model, data, config, run, lambda _: notes.mark())
    if len(notes.work) != STEPS + 4:  # now() is asked before, after each step, and at log lines
        raise NotImplementedError("its loop takes the time in another way than 00's")
    *_, step, evaluation, _ = notes.work
    return dict(
        events=run.events, step=step, evaluation=evaluation,
        tokens=config.batch_size * config.context_length,
        flops_per_token=module.count_parameters(model, config)["flops_per_token"])


def begin_ranks() -> None:
    """For 02, as if torchrun had started it; nothing is sent."""
    os.environ |= dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(WORLD_SIZE))
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)


def answer(request: dict) -> dict:
    """What a request gets: the trace, or an error in a line."""
    traced_by = ".".join(torch.__version__.split(".")[:2])
    if traced_by != PYTORCH:
        return dict(error=f"predictions can be made anew with PyTorch {PYTORCH}, not with"
                          f" {traced_by}; stored ones work with any")
    # What a script that was traced before may have set.
    torch.set_float32_matmul_precision("highest")
    for enable in (torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.enable_math_sdp,
                   torch.backends.cuda.enable_mem_efficient_sdp,
                   torch.backends.cuda.enable_cudnn_sdp):
        enable(True)
    said = io.StringIO()
    try:
        with (contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said),
              in_place_of_pytorch()):
            module = load_script(Path(request["script"]))
            return dict(trace=trace(module, request["options"], request["batch"]))
    except SystemExit:  # an option that the script doesn't take
        return dict(error=error_line(said.getvalue()))
    except Exception as error:
        error = getattr(error, "inner_exception", error)  # of the compiler's
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return dict(error=lines[0])


def main() -> None:
    begin_ranks()
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
