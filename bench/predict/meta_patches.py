"""All that is replaced of PyTorch while a script trains on tensors without storage (device "meta").

What is as on CUDA: dropout keeps a mask of a byte per element, attention is the flash kernel with
the buffers of its backward pass (those of the memory-efficient kernel, which older GPUs run, are as
large: attention_backward.cu), the optimizer works on all tensors at once, and DDP keeps a second
copy of the gradients.
"""

import contextlib
import os
from collections.abc import Iterator
from importlib import import_module
from unittest import mock

import torch
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

WORLD_SIZE = 4  # of 02, whose memory doesn't depend on it unless ranks share the states
# PyTorch's own, before anything replaces them.
aten, functional = torch.ops.aten, torch.nn.functional
real_autocast, real_compile = torch.autocast, torch.compile
real_dropout, real_linear = functional.dropout, functional.linear
ATTENTION = "torch.nn.functional.scaled_dot_product_attention"
FOREACH = "_get_foreach_kernels_supported_devices"


def is_meta(value) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def key_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextlib.contextmanager
def replaced(changes: dict[str, object]) -> Iterator[None]:
    """While it is open, these names mean something else."""
    with contextlib.ExitStack() as stack:
        for name, own in changes.items():
            stack.enter_context(mock.patch(name, own))
        yield


def begin_ranks() -> None:
    """For 02, as if torchrun had started it; nothing is sent."""
    os.environ |= dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(WORLD_SIZE),
                       MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)


# ---- Functions that take another way on a CPU, or that need a tensor's values -------------------


def flash_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **how):
    return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]


def attention(*args, **kwargs):
    if not torch.backends.cuda.flash_sdp_enabled():
        raise NotImplementedError("of attention's kernels only flash can be traced")
    return flash_attention(*args, **kwargs)


def dropout(x, p=0.5, training=True, inplace=False):
    if not is_meta(x):
        return real_dropout(x, p, training, inplace)
    return aten.native_dropout(x, p, True)[0] if training and p else x


def linear(x, weight, bias=None):
    if is_meta(x) and torch.is_autocast_enabled("cpu"):
        x, weight, bias = map(Autocast.cast, (x, weight, bias))
    return real_linear(x, weight, bias)


def instead(name: str, value):
    """A tensor's method of this name, which without storage makes up its `value`."""
    real = getattr(torch.Tensor, name)
    return lambda self, *args: value(self) if is_meta(self) else real(self, *args)


class Autocast(real_autocast):
    """In place of torch.autocast, which doesn't convert tensors without storage."""

    weights: dict[int, torch.Tensor] = {}  # converted, until its end

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


AS_ON_CUDA: dict[str, object] = {
    "torch.autocast": Autocast,
    "torch.nn.functional.dropout": dropout, "torch.nn.functional.linear": linear,
    ATTENTION: attention,
    "torch.Tensor.item": instead("item", lambda x: 0.0),
    "torch.Tensor.tolist": instead("tolist", lambda x: [0]),
    "torch.Tensor.cpu": instead("cpu", lambda x: torch.zeros(x.shape, dtype=x.dtype)),
    "torch.optim.adam._device_dtype_check_for_fused": lambda *_, **__: None,
}
# While the compiler makes its graph.
AS_COMPILED = {"torch.nn.functional.dropout": real_dropout,
               "torch.nn.functional.linear": real_linear, ATTENTION: flash_attention}


# ---- Several GPUs ------------------------------------------------------------------------------


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


# ---- All of it ---------------------------------------------------------------------------------


def refused(what: str):
    """Stands in for a function that no trace can follow."""
    def refuse(*_, **__):
        raise NotImplementedError(f"{what} can't be traced")

    return refuse


@contextlib.contextmanager
def as_on_cuda(compile) -> Iterator[None]:
    """Replaces all of it for bench.predict.trace, torch.compile by `compile`."""
    optimizers = import_module("torch.optim.optimizer")  # torch.optim hides its name
    # On CUDA an optimizer works on all tensors at once unless it is told not to.
    at_once = [*getattr(optimizers, FOREACH)(), "meta"]
    with (mock.patch.object(optimizers, FOREACH, lambda: at_once),
          replaced(AS_ON_CUDA | {
              "torch.compile": compile,
              "torch.nn.parallel.DistributedDataParallel": Buckets,
              "torch.distributed.fsdp.fully_shard": refused("weights that ranks share"),
              "torch.autograd.graph.save_on_cpu": refused("activations in the CPU's memory")})):
        yield
