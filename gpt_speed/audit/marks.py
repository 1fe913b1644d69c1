"""What a function of PyTorch that a script calls tells of the operators within it, as scalars for
each of them. Only PyTorch and the standard library are imported."""

import contextlib
import warnings

import torch
from torch.backends import cuda


def of_checkpoint(*_, preserve_rng_state=True, **__) -> dict:
    """Returns whether activation checkpointing `forgets_random` numbers, by its arguments."""
    return {} if preserve_rng_state else dict(forgets_random=True)


def of_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **named
) -> dict:
    """Returns, by the arguments of F.scaled_dot_product_attention, why it is `not_fused`: what
    PyTorch says against each of a GPU's fused kernels; {} where one runs, and on other devices."""
    if not query.is_cuda:
        return {}
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


def keep_scriptable(function, operator: str) -> None:
    """Lets TorchScript take a Python function for an operator that it stands for."""
    builtins = torch.jit._builtins
    if hasattr(builtins, "_register_builtin"):
        builtins._register_builtin(function, operator)
