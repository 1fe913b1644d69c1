"""What takes the place of a script's surroundings, so that its own train() makes a few steps on
tensors without storage: its settings, its data, its model and its record."""

from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from bench.predict.pytorch import WORLD_SIZE

STEPS = 3


def settle(config, dtype: str) -> None:
    """Makes its Config one of STEPS steps with an evaluation after the first and the last one;
    where it may choose its type, that is `dtype`, whatever this computer has."""
    if getattr(config, "dtype", None) == "auto":
        config.dtype, config.dtype_reason = dtype, "predicted"
    config.max_steps, config.max_tokens, config.eval_freq = STEPS, None, 99
    config.target_loss = -1


def data_of_zeros(module, config):
    """Its data, of more steps than are made; they take no memory."""
    tokens = 2 * STEPS * WORLD_SIZE * config.batch_size * config.context_length + 1
    windows = module.TokenWindows(np.broadcast_to(np.uint16(0), tokens), config.context_length)
    return module.Data(meta={}, train=windows, val=windows, tokenizer=None)


def model_of(module, config) -> nn.Module:
    with torch.device("meta"):
        return module.GPTModel(config)


def run_of(start, epoch) -> SimpleNamespace:
    """In place of a script's Run: calls what it is given when training starts, after the model was
    moved, and at the end of the first epoch."""
    return SimpleNamespace(start=lambda model, *_: start(model), log=lambda *_: None,
                           epoch=lambda *_: epoch())
