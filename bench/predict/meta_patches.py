"""What is replaced of PyTorch while a script trains on tensors without storage (device "meta").

The replacements do what CUDA does: dropout keeps a mask of a byte per element, attention is the
flash kernel with the buffers of its backward pass (those of the memory-efficient kernel, which
older GPUs run, are as large: attention_backward.cu), the optimizer works on all tensors at once,
and DDP keeps a second copy of the gradients.
"""

import os
from contextlib import ExitStack
from typing import ClassVar
from unittest import mock

import torch
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.catalogue import GPUS

# PyTorch's own functions, before anything replaces them.
aten, functional = torch.ops.aten, torch.nn.functional
real_autocast, real_compile = torch.autocast, torch.compile
real_dropout, real_linear = functional.dropout, functional.linear
real_foreach_devices = torch.utils._foreach_utils._get_foreach_kernels_supported_devices


def is_meta(value) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def storage_id(tensor: torch.Tensor) -> int:
    """Returns what tells a tensor's storage, maybe shared with others, from every other one."""
    return tensor.untyped_storage()._cdata


def begin_ranks() -> None:
    """Starts the ranks of 02 as torchrun does; nothing is sent. How many there are matters to its
    memory only if they share states."""
    os.environ |= dict(
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE=str(GPUS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=GPUS)


def attention(
    q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """Replaces scaled_dot_product_attention by the flash kernel; a scale takes no time. Raises
    NotImplementedError for what CUDA would give to another kernel, and for shared keys."""
    if attn_mask is not None:
        raise NotImplementedError("attention with a mask can't be traced: flash takes none")
    if enable_gqa:
        raise NotImplementedError("attention whose heads share keys can't be traced")
    if not torch.compiler.is_compiling() and not torch.backends.cuda.flash_sdp_enabled():
        raise NotImplementedError("of attention's kernels only flash can be traced")
    return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]


def dropout(x, p=0.5, training=True, inplace=False):
    if not is_meta(x):
        return real_dropout(x, p, training, inplace)
    if not training or not p:
        return x
    return aten.native_dropout(x, p, True)[0]


def linear(x, weight, bias=None):
    if is_meta(x) and torch.is_autocast_enabled("cpu"):
        x, weight, bias = map(Autocast.cast, (x, weight, bias))
    return real_linear(x, weight, bias)


class Autocast(real_autocast):
    """Replaces torch.autocast, which doesn't convert tensors without storage."""

    # What has been made of each weight; by the tensor itself, which so stays alive.
    converted: ClassVar[dict[torch.Tensor, torch.Tensor]] = {}

    def __init__(self, device: str, dtype: torch.dtype):
        super().__init__("cpu", dtype)

    def __exit__(self, *error):
        self.converted.clear()
        return super().__exit__(*error)

    @classmethod
    def cast(cls, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """Returns a tensor in the type of autocast, which converts a weight once until its end."""
        if tensor is None or tensor.dtype != torch.float32:
            return tensor
        if tensor in cls.converted:
            return cls.converted[tensor]
        converted = tensor.to(torch.get_autocast_dtype("cpu"))
        if tensor.is_leaf and tensor.requires_grad:
            cls.converted[tensor] = converted
        return converted


class Buckets(nn.Module):
    """Replaces DistributedDataParallel: gradients lie in buffers that stay."""

    def __init__(self, model: nn.Module, **options):
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


def refused(what: str):
    """Replaces a function that no trace can follow."""
    return mock.Mock(side_effect=NotImplementedError(f"{what} can't be traced"))


def replaced(replacements: dict[str, object]) -> ExitStack:
    """Replaces what the names mean until the stack is closed."""
    with ExitStack() as stack:
        for name, replacement in replacements.items():
            stack.enter_context(mock.patch(name, replacement))
        return stack.pop_all()


def foreach_devices() -> list[str]:
    """Returns where an optimizer works on all tensors at once unless it is told not to: also here,
    as on CUDA."""
    return [*real_foreach_devices(), "meta"]


def accept_any_device(*_, **__) -> None:
    """Replaces the check of where fused optimizers run."""


def as_on_cuda(compile) -> ExitStack:
    """Replaces all of it for bench.predict.trace, and torch.compile by `compile`."""
    return replaced(
        {
            "torch.autocast": Autocast,
            "torch.compile": compile,
            "torch.nn.functional.dropout": dropout,
            "torch.nn.functional.linear": linear,
            "torch.nn.functional.scaled_dot_product_attention": attention,
            "torch.nn.parallel.DistributedDataParallel": Buckets,
            "torch.optim.adam._device_dtype_check_for_fused": accept_any_device,
            "torch.optim.optimizer._get_foreach_kernels_supported_devices": foreach_devices,
            "torch.distributed.fsdp.fully_shard": refused("weights that ranks share"),
            "torch.autograd.graph.save_on_cpu": refused("activations in the CPU's memory"),
        }
    )
