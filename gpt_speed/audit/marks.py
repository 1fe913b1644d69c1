"""What a function of PyTorch that a script calls tells of the operators within it, as scalars for
each of them. Only PyTorch and the standard library are imported."""

import contextlib
import itertools
import warnings

import torch
from torch.backends import cuda

FUSED_TYPES = torch.float32, torch.bfloat16, torch.float16
calls = itertools.count()  # numbers for those that a GPU computes in one kernel


def of_checkpoint(*_, preserve_rng_state=True, **__) -> dict:
    """Returns whether activation checkpointing `forgets_random` numbers, by its arguments."""
    return {} if preserve_rng_state else dict(forgets_random=True)


def of_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **named
) -> dict:
    """Returns, by the arguments of F.scaled_dot_product_attention, why it is `not_fused`: what
    PyTorch says against each of a GPU's fused kernels, {} where one runs; on other devices as
    of_call."""
    if not query.is_cuda:
        return of_call(query)
    gqa = named.get("enable_gqa", False)
    reasons = {}
    with contextlib.suppress(TypeError):  # before PyTorch 2.5
        params = cuda.SDPAParams(query, key, value, attn_mask, dropout_p, is_causal, gqa)
        for kernel, can_use in (
            ("flash", cuda.can_use_flash_attention),
            ("efficient", cuda.can_use_efficient_attention),
        ):
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                if can_use(params, True):
                    return {}
            reasons[kernel] = [str(warning.message).partition(" (Trigger")[0] for warning in told]
    return dict(not_fused=reasons)


def of_call(query) -> dict:
    """Returns a number for a call of attention that a GPU computes in one kernel, as `fused`, and
    the shape of its `query`; {} where it has none for it."""
    is_enabled = cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled()
    if query.dim() != 4 or query.dtype not in FUSED_TYPES or not is_enabled:
        return {}
    return dict(fused=next(calls), query=[*query.shape])


def of_norm(x, *_, **__) -> dict:
    """Returns a number for a call of rms_norm, as `fused`, where a GPU computes it in one kernel,
    and this device in several."""
    if x.is_cuda or not hasattr(torch.ops.aten, "_fused_rms_norm"):  # before PyTorch 2.9
        return {}
    return dict(fused=next(calls))


def keep_scriptable(function, operator: str) -> None:
    """Lets TorchScript take a Python function for an operator that it stands for."""
    builtins = torch.jit._builtins
    if hasattr(builtins, "_register_builtin"):
        builtins._register_builtin(function, operator)
