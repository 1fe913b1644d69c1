"""The parts written by hand equal PyTorch's, and the stages train the same model."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, STAGES, environment, run_python, write_tokens
from torch import nn
from torch.cuda._utils import _get_device_index

CPU = torch.device("cpu")
SIZES = dict(layers=2, heads=2, width=32, vocab_size=256, context_length=16, dropout=0.0)


def same_forward_and_gradients(ours, theirs, x, parameters=((), ())):
    """Both on x, and the gradients of x and of each one's parameters for a random cotangent."""
    outputs = ours(x), theirs(x)
    torch.testing.assert_close(*outputs)
    cotangent = torch.randn_like(outputs[0])
    gradients = [
        torch.autograd.grad((y * cotangent).sum(), [x, *own], retain_graph=True)
        for y, own in zip(outputs, parameters, strict=True)
    ]
    torch.testing.assert_close(*gradients)


def test_layer_norm(stages):
    ours, theirs = stages["00_orig"].LayerNorm(24).double(), nn.LayerNorm(24).double()
    for norm in (ours, theirs):
        torch.manual_seed(1)
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    x = torch.randn(5, 7, 24, dtype=torch.float64, requires_grad=True)
    same_forward_and_gradients(ours, theirs, x, (ours.parameters(), theirs.parameters()))


def test_gelu(stages):
    x = (3 * torch.randn(500, dtype=torch.float64)).requires_grad_()
    same_forward_and_gradients(stages["00_orig"].GELU(), nn.GELU(approximate="tanh"), x)


def test_attention(stages):
    script = stages["00_orig"]
    ours = script.MultiHeadAttention(script.Config(**SIZES)).double()

    def theirs(x):
        layers = ours.query, ours.key, ours.value
        split = [layer(x).unflatten(2, (2, 16)).transpose(1, 2) for layer in layers]
        y = F.scaled_dot_product_attention(*split, is_causal=True)
        return ours.out(y.transpose(1, 2).flatten(2))

    x = torch.randn(3, 11, 32, dtype=torch.float64, requires_grad=True)  # shorter than the context
    parameters = list(ours.parameters())
    same_forward_and_gradients(ours, theirs, x, (parameters, parameters))


class Losses:
    """Takes the place of Run: keeps what train() reports."""

    def __init__(self):
        self.rows = []

    def log(self, epoch, step, tokens, seconds, train_loss, val_loss):
        self.rows.append((step, tokens, train_loss, val_loss))

    def epoch(self, epoch, text):
        pass


def model_of(script, seed: int = 1, **settings):
    """A float32 model with the weights of 00 under `seed`, whatever the script's names for them."""
    config = script.Config(**SIZES | settings)
    torch.manual_seed(seed)
    return script.GPTModel(config), config


def losses_of(script, model, config, folder: Path, **settings) -> list[tuple]:
    config.eval_freq, config.eval_windows, config.max_steps = 1, 3, 20
    for name, value in settings.items():
        setattr(config, name, value)
    windows = [script.TokenWindows(folder / f"{part}.bin", count, 256, 16)
               for part, count in (("train", 2000), ("val", 200))]
    losses = Losses()
    tokenizer = script.load_tokenizer("bytes", folder)
    script.train(model, *windows, tokenizer, config, CPU, losses)
    assert len(losses.rows) == 20
    return losses.rows


def largest_difference(rows, others) -> float:
    assert [row[:2] for row in rows] == [row[:2] for row in others]
    pairs = [(a, b) for row, other in zip(rows, others, strict=True)
             for a, b in zip(row[2:], other[2:], strict=True)]
    return max(abs(a - b) for a, b in pairs)


def with_weights_of(plain: nn.Module, optimized: nn.Module) -> nn.Module:
    """`optimized` with the weights of `plain`, query, key and value merged."""
    weights = plain.state_dict()
    for name in [n for n in weights if n.endswith("query.weight")]:
        parts = [name.replace("query.", f"{part}.") for part in ("query", "key", "value")]
        merged = torch.cat([weights.pop(part) for part in parts])
        weights[name.replace("query.", "query_key_value.")] = merged
    optimized.load_state_dict(weights)
    return optimized


@pytest.fixture
def pair(stages, tmp_path):
    """(losses of 00, 01, its model with the weights of 00, its configuration, token folder)."""
    folder = write_tokens(tmp_path)
    plain, optimized = stages["00_orig"], stages["01_opt_single_gpu"]
    model_0, config_0 = model_of(plain)
    model_1, config_1 = model_of(optimized, batch_size=config_0.batch_size, compile=False)
    with_weights_of(model_0, model_1)
    return losses_of(plain, model_0, config_0, folder), optimized, model_1, config_1, folder


def test_optimized_trains_like_plain(pair):
    losses, script, model, config, folder = pair
    assert losses[-1][2] < losses[0][2] - 0.4  # it learns
    assert largest_difference(losses, losses_of(script, model, config, folder)) < 1e-5


def test_that_test_notices_another_gelu(pair):
    losses, script, model, config, folder = pair
    for block in model.blocks:
        block.feed_forward[1].approximate = "none"  # erf
    assert largest_difference(losses, losses_of(script, model, config, folder)) > 1e-5


def test_that_test_notices_another_attention_scale(pair, monkeypatch):
    losses, script, model, config, folder = pair
    attention = F.scaled_dot_product_attention
    scale = 0.9 / math.sqrt(SIZES["width"] // SIZES["heads"])
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *qkv, **how: attention(*qkv, scale=scale, **how)
    )
    assert largest_difference(losses, losses_of(script, model, config, folder)) > 1e-5


def test_compiled_trains_like_uncompiled(stages, tmp_path):
    script, folder = stages["01_opt_single_gpu"], write_tokens(tmp_path)
    if not script.can_compile(CPU):
        pytest.skip("torch.compile doesn't work here")
    rows = [
        losses_of(script, *model_of(script, batch_size=4, compile=on), folder)
        for on in (True, False)
    ]
    assert largest_difference(*rows) < 1e-3


WORKER = """
import json, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch.distributed as dist
from conftest import ROOT, load
from test_model import losses_of, model_of
script = load(ROOT / "02_opt_multi_gpu_ddp.py")
dist.init_process_group("gloo")
# Each rank starts from weights of its own: DDP has to make them equal.
model, config = model_of(script, seed=1 + dist.get_rank(), batch_size=4, compile=False)
rows = losses_of(script, model, config, Path({folder!r}), eval_windows={eval_windows})
if dist.get_rank() == 0:
    Path({out!r}).write_text(json.dumps(rows))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("eval_windows", [1, 3])  # at 1 the second rank has nothing to evaluate
def test_two_ranks_train_like_one_process(stages, tmp_path, eval_windows):
    folder, out, worker = write_tokens(tmp_path / "data"), tmp_path / "out", tmp_path / "worker.py"
    worker.write_text(WORKER.format(
        tests=str(ROOT / "tests"), folder=str(folder), out=str(out), eval_windows=eval_windows
    ))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    result = run_python(*launcher, worker, env=environment(OMP_NUM_THREADS="1"))
    assert result.returncode == 0, result.stderr
    script = stages["01_opt_single_gpu"]
    model, config = model_of(script, batch_size=8, compile=False)
    single = losses_of(script, model, config, folder, eval_windows=eval_windows)
    rows = [tuple(row) for row in json.loads(out.read_text())]
    assert largest_difference(single, rows) < 1e-5


@pytest.mark.parametrize("stage", ["00_orig", "01_opt_single_gpu"])
def test_every_stage_sees_the_same_batches(stages, stage, tmp_path, monkeypatch):
    """An epoch is the permutation of seed + epoch, cut into batches, the short one dropped."""
    script, seen = stages[stage], []
    windows = script.TokenWindows(write_tokens(tmp_path) / "train.bin", 2000, 256, 16)

    class Spy(type(windows)):
        def __getitem__(self, i):
            seen.append(i)
            return super().__getitem__(i)

    windows.__class__ = Spy
    model, config = model_of(script, batch_size=8, epochs=2, seed=7)
    config.seed, config.eval_freq, config.eval_windows = 7, 1000, 1
    if hasattr(config, "compile"):
        config.compile = False
    val = script.TokenWindows(tmp_path / "val.bin", 200, 256, 16)
    monkeypatch.setattr(script, "evaluate", lambda *_: 0.0)
    tokenizer = script.load_tokenizer("bytes", tmp_path)
    script.train(model, windows, val, tokenizer, config, CPU, Losses())
    steps = len(windows) // 8
    expected = [torch.randperm(len(windows), generator=torch.Generator().manual_seed(7 + epoch))
                for epoch in range(2)]
    assert len(windows) == 1999 // 16 and len(windows) % 8  # there is a short batch to drop
    assert seen == torch.cat([order[: 8 * steps] for order in expected]).tolist()


@pytest.mark.parametrize("stage", STAGES)
def test_pick_device_with_gpus(stages, stage, monkeypatch):
    """Without a GPU, but with PyTorch's own check of what it is given."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: chosen.append(_get_device_index(d)))
    pick = stages[stage].pick_device
    assert [pick(None).type, pick("cuda").type] == ["cuda", "cuda"]
    if not stage.startswith("02"):
        pick("cuda:1")
        with pytest.raises(stages[stage].UserError, match="sees 2 GPU"):
            pick("cuda:2")
    assert chosen == ([0, 0] if stage.startswith("02") else [0, 0, 1])


def test_parameters_and_operations(stages):
    """GPT-2 124M with an untied head and no QKV bias, and 0.855 GFLOP a token."""
    script = stages["00_orig"]
    parameters, flops = script.count_parameters(script.Config())
    assert parameters == 163_009_536  # as the book counts them
    assert flops == 6 * (12 * 12 * 768**2 + 768 * 50_257) + 12 * 12 * 1024 * 768
