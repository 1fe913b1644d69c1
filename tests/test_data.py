"""Windows, orders and ranks, by property: for every length of text, context, batch and world."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import STAGES
from hypothesis import given, settings
from hypothesis import strategies as st

SIZES = dict(tokens=st.integers(2, 600), context=st.integers(1, 40), batch=st.integers(1, 9),
             seed=st.integers(0, 2**31), epoch=st.integers(0, 30))
QUICK = settings(max_examples=150, deadline=None, derandomize=True)


def epoch_of(script, windows, config, epoch: int, rank: int = 0, ranks: int = 1) -> list[list[int]]:
    """The first tokens of the windows in each batch of a rank, as train() orders them."""
    replaced = dict(num_replicas=ranks, rank=rank)
    if hasattr(script, "DistributedSampler"):
        whole = script.DistributedSampler
        script.DistributedSampler = lambda *args, **named: whole(*args, **named, **replaced)
        script.WORLD_SIZE = ranks
        try:
            loader = script.make_loader(windows, config)
        finally:
            script.DistributedSampler, script.WORLD_SIZE = whole, 1
        loader.sampler.set_epoch(epoch)
    else:
        loader = script.make_loader(windows, config)
        loader.sampler.generator.manual_seed(config.seed + epoch)
    return [x_BT[:, 0].tolist() for x_BT, _ in loader]


def config_of(context: int, batch: int, seed: int) -> SimpleNamespace:
    return SimpleNamespace(context_length=context, batch_size=batch, seed=seed,
                           device=SimpleNamespace(type="cpu"))


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
    assert len(steps) >= 8 and steps == [sorted(step) for step in one]


def test_a_short_text_is_told(stages, capsys):
    windows = stages["00_orig"].TokenWindows(np.arange(41, dtype="<u2"), 1)
    batches = epoch_of(stages["02_opt_multi_gpu_ddp"], windows, config_of(1, 10, 0), 0)
    said = "One pass over the text has fewer than 8 steps: each epoch makes 2\n"
    assert len(batches) == 8 and capsys.readouterr().out == said
