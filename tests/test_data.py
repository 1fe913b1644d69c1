"""Windows, orders and ranks, by property: for every length of text, context, batch and world."""

from collections import Counter
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import STAGES
from hypothesis import given, settings
from hypothesis import strategies as st

SIZES = dict(tokens=st.integers(2, 600), context=st.integers(1, 40), batch=st.integers(1, 9),
             seed=st.integers(0, 2**31), epoch=st.integers(0, 30))
QUICK = settings(max_examples=150, deadline=None, derandomize=True)


def epoch_of(script, windows, config, epoch: int, rank: int = 0, ranks: int = 1) -> list[list[int]]:
    """The first tokens of the windows in each batch of a rank, as train() orders them."""
    seen, sampler = [], getattr(script, "DistributedSampler", None)
    replaced = dict(evaluate=lambda *_: 1.0, make_optimizer=mock.Mock(), now=lambda _: 0.0,
                    prepare_model=lambda model, config: model,
                    backward_and_update=lambda *_: None,
                    compute_loss=lambda model, x_BT, y_BT: seen.append(x_BT[:, 0].tolist()))
    if sampler:
        replaced |= dict(WORLD_SIZE=ranks, DistributedSampler=partial(
            sampler, num_replicas=ranks, rank=rank))
    if len(windows) < config.batch_size and not sampler:
        return []  # the script refuses so short a text
    one = SimpleNamespace(**vars(config) | dict(seed=config.seed + epoch))
    with mock.patch.multiple(script, **replaced):
        script.train(None, SimpleNamespace(train=windows, val=windows, tokenizer=None), one,
                     mock.Mock(), script.now)
    return seen


def config_of(context: int, batch: int, seed: int) -> SimpleNamespace:
    return SimpleNamespace(context_length=context, batch_size=batch, seed=seed, epochs=1,
                           max_tokens=None, max_steps=None, tokens_per_step=1, eval_freq=10**6,
                           target_loss=0, device=torch.device("cpu"))


@QUICK
@given(tokens=SIZES["tokens"], context=SIZES["context"])
def test_windows(stages, tokens, context):
    """They cover the text from its first token on without a gap or an overlap, and what is left
    over is shorter than one; each target is the next token."""
    text = np.arange(tokens, dtype="<u2")
    windows = stages["00_orig"].TokenWindows(text, context)
    pairs = [windows[i] for i in range(len(windows))]
    covered = [token for x_T, _ in pairs for token in x_T.tolist()]
    assert covered == list(range(len(windows) * context))
    assert all((y_T - x_T).tolist() == [1] * context for x_T, y_T in pairs)
    assert tokens - 1 - len(covered) < context


def passes_of(windows, batch: int) -> int:
    """How often 02 passes over the text in an epoch: so that it has 8 steps."""
    return -(-8 * batch // len(windows))


@pytest.mark.parametrize("stage", STAGES)
@QUICK
@given(**SIZES)
def test_an_epoch(stages, stage, tokens, context, batch, seed, epoch):
    """Each window at most once, all but the last short batch; the next epoch has another order, the
    same epoch the same, and every stage that of 00."""
    windows = stages["00_orig"].TokenWindows(np.arange(tokens, dtype="<u2"), context)
    if not len(windows):
        return
    config, script = config_of(context, batch, seed), stages[stage]
    batches = epoch_of(script, windows, config, epoch)
    seen = [start for each in batches for start in each]
    passes = passes_of(windows, batch) if stage == "02_opt_multi_gpu_ddp" else 1
    assert len(seen) == passes * len(windows) // batch * batch
    assert max(Counter(seen).values(), default=0) <= passes
    assert set(seen) <= set(range(0, len(windows) * context, context))
    assert batches == epoch_of(script, windows, config, epoch)
    for start in range(0, len(seen), len(windows)):  # within a pass no window comes twice
        one_pass = seen[start : start + len(windows)]
        assert len({*one_pass}) == len(one_pass)
    if passes == 1:
        assert batches == epoch_of(stages["00_orig"], windows, config, epoch)
    if len(set(seen)) > 12:  # of fewer windows two orders may be alike by chance
        assert batches != epoch_of(script, windows, config, epoch + 1)


@QUICK
@given(**SIZES, ranks=st.integers(1, 6))
def test_ranks(stages, tokens, context, batch, seed, epoch, ranks):
    """No rank sees another's window, unless an epoch passes over a short text more often; and each
    step's windows are those of one process with the batches of all ranks together."""
    windows = stages["00_orig"].TokenWindows(np.arange(tokens, dtype="<u2"), context)
    if len(windows) < batch:  # the script refuses so short a text
        return
    script = stages["02_opt_multi_gpu_ddp"]
    each = [epoch_of(script, windows, config_of(context, batch, seed), epoch, rank, ranks)
            for rank in range(ranks)]
    one = epoch_of(script, windows, config_of(context, batch * ranks, seed), epoch)
    steps = [sorted(start for mine in step for start in mine) for step in zip(*each, strict=True)]
    seen = [start for step in steps for start in step]
    assert max(Counter(seen).values()) <= passes_of(windows, batch * ranks)
    # The first steps that are of one pass alone have no window twice.
    alone = len(windows) // (batch * ranks)
    assert all(len({*step}) == batch * ranks for step in steps[:alone])
    assert len(steps) >= 8 and steps == [sorted(step) for step in one]


def test_a_short_text_is_told(stages, capsys):
    windows = stages["00_orig"].TokenWindows(np.arange(41, dtype="<u2"), 1)
    batches = epoch_of(stages["02_opt_multi_gpu_ddp"], windows, config_of(1, 10, 0), 0)
    said = "One pass over the text has fewer than 8 steps: each epoch makes 2\n"
    assert len(batches) == 8 and capsys.readouterr().out.startswith(said)
