"""The model equals Hugging Face's GPT-2, and the three scripts train the same one."""

import math
import os
import warnings
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import tiktoken
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import ONE_RANK, STAGES, settings_restored, write_tokens
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")
SIZES = dict(layers=2, heads=2, width=32, vocab_size=256, context_length=16, dropout=0.0)


def test_plain_is_hugging_faces_gpt2(stages):
    """Logits, loss and gradients with the same weights, in float64."""
    model, config = model_of(stages["00_orig"])
    model.double()
    theirs = hugging_faces_gpt2(config)
    pairs = weight_pairs(theirs, model)
    assert len({id(parameter) for parameter, _ in pairs}) == len(list(theirs.parameters()))
    copy_weights(model, pairs)
    x_BT, y_BT = torch.randint(config.vocab_size, (2, 3, 11))  # shorter than the context
    logits_BTV, their_logits_BTV = model(x_BT), theirs(x_BT).logits
    loss = stages["00_orig"].compute_loss(model, x_BT, y_BT)
    # Not the loss that their model gives: that is computed in float32.
    their_loss = F.cross_entropy(their_logits_BTV.flatten(0, 1), y_BT.flatten())
    loss.backward()
    their_loss.backward()
    exactly = dict(atol=1e-12, rtol=0)
    torch.testing.assert_close(logits_BTV, their_logits_BTV, **exactly)
    torch.testing.assert_close(loss, their_loss, **exactly)
    for parameter, ours in pairs:
        if ours is not None:
            gradient = in_their_form(ours, lambda weight: weight.grad)
            torch.testing.assert_close(gradient, parameter.grad, **exactly)


def hugging_faces_gpt2(config):
    transformers = pytest.importorskip(
        "transformers", reason="needs transformers: pip install -r requirements-extras.txt"
    )
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.context_length,
            n_embd=config.width,
            n_layer=config.layers,
            n_head=config.heads,
            tie_word_embeddings=False,
            use_cache=False,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).double()


def weight_pairs(theirs, model) -> list[tuple]:
    """Each of their parameters, and ours: a list for a Conv1D's weight, of the matrices that it is
    made of; None for the bias of query, key and value, which we don't have."""
    body = theirs.transformer
    pairs = [
        (body.wte.weight, model.token_embedding.weight),
        (body.wpe.weight, model.position_embedding.weight),
        (body.ln_f.weight, model.norm.weight),
        (body.ln_f.bias, model.norm.bias),
        (theirs.lm_head.weight, model.head.weight),
    ]
    for block, ours in zip(body.h, model.blocks, strict=True):
        attention = ours.attention
        up, _, down = ours.feed_forward
        pairs += [
            (block.ln_1.weight, ours.norm1.weight),
            (block.ln_1.bias, ours.norm1.bias),
            (block.ln_2.weight, ours.norm2.weight),
            (block.ln_2.bias, ours.norm2.bias),
            (
                block.attn.c_attn.weight,
                [attention.query.weight, attention.key.weight, attention.value.weight],
            ),
            (block.attn.c_attn.bias, None),
            (block.attn.c_proj.weight, [attention.out.weight]),
            (block.attn.c_proj.bias, attention.out.bias),
            (block.mlp.c_fc.weight, [up.weight]),
            (block.mlp.c_fc.bias, up.bias),
            (block.mlp.c_proj.weight, [down.weight]),
            (block.mlp.c_proj.bias, down.bias),
        ]
    return pairs


def in_their_form(ours, value_of):
    """Their form of one of our parameters, or of its gradient, by `value_of`: a Conv1D keeps its
    weight transposed, and has query, key and value in one."""
    if isinstance(ours, list):
        return torch.cat([value_of(weight) for weight in ours]).T
    return value_of(ours)


@torch.no_grad()
def copy_weights(model, pairs: list[tuple]) -> None:
    """Draws our weights, and makes theirs the same."""
    for parameter in model.parameters():
        parameter.normal_(std=0.2)
    for parameter, ours in pairs:
        if ours is None:
            parameter.zero_()
        else:
            parameter.copy_(in_their_form(ours, lambda weight: weight))


class Losses:
    """Takes the place of Run: keeps what train() reports."""

    def __init__(self, at_epoch=lambda: None):
        self.rows, self.at_epoch = [], at_epoch

    def start(self, model, data, config):
        self.config = config

    def log(self, epoch, step, seconds, train_loss, val_loss):
        self.rows.append((step, (step + 1) * self.config.tokens_per_step, train_loss, val_loss))

    def epoch(self, epoch, text):
        self.at_epoch()


def model_of(script, seed: int = 1, **settings):
    """(the weights of a stage under `seed`, its configuration)"""
    config = script.Config(**SIZES | dict(device=CPU) | settings)
    if hasattr(config, "compile"):
        config.compile = settings.get("compile", False)
    config.dtype = "float32"  # so that stages can be compared; 00 has no such setting
    torch.manual_seed(seed)
    return script.GPTModel(config), config


def windows_of(script, folder: Path, context_length: int = 16) -> list:
    return [
        script.TokenWindows(np.fromfile(folder / f"{part}.bin", "<u2"), context_length)
        for part in ("train", "val")
    ]


@contextmanager
def one_rank(script):
    """A process group with this process alone, which 02 needs."""
    with settings_restored():
        if hasattr(script, "join_ranks"):
            os.environ.update(ONE_RANK)
            dist.init_process_group("gloo")
        yield


def losses_of(script, model, config, windows, losses=None) -> list[tuple]:
    losses = losses or Losses()
    with mock.patch.object(script, "sample", lambda *_: ""):
        script.train(model, script.Data({}, *windows, None), config, losses)
    return losses.rows


def largest_difference(rows, others) -> float:
    assert [row[:2] for row in rows] == [row[:2] for row in others]
    pairs = [
        (a, b)
        for row, other in zip(rows, others, strict=True)
        for a, b in zip(row[2:], other[2:], strict=True)
    ]
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


TWENTY_STEPS = dict(eval_freq=1, eval_windows=3, max_steps=20, batch_size=8)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def plain_losses(stages, tokens) -> list[tuple]:
    script = stages["00_orig"]
    losses = losses_of(script, *model_of(script, **TWENTY_STEPS), windows_of(script, tokens))
    assert len(losses) == 20 and losses[-1][2] < losses[0][2] - 0.4  # it learns
    return losses


@pytest.mark.parametrize("stage", STAGES[1:])
def test_optimized_trains_like_plain(stages, stage, tokens, plain_losses):
    script = stages[stage]
    model, config = model_of(script, **TWENTY_STEPS)
    with_weights_of(model_of(stages["00_orig"])[0], model)
    with one_rank(script):
        losses = losses_of(script, model, config, windows_of(script, tokens))
    assert largest_difference(plain_losses, losses) < 1e-5


@pytest.mark.slow
def test_compiled_02_trains_like_uncompiled(bench):
    """Under DDP the graph is cut, so that it compiles something else than 01, which test_golden.py
    holds."""
    stage = STAGES[2]
    script, losses = bench.stages[stage], []
    if not script.can_compile(model_of(script)[1]):
        pytest.skip("torch.compile doesn't work here")
    for option in ("--compile", "--no-compile"):
        bench.results = bench.data.parent / option
        result = bench.main(stage, option, "--max-steps", 4, "--eval-freq", 1)
        assert result.returncode == 0, result.stderr
        assert "torch.compile" not in result.stdout
        start, *events = bench.record()
        assert start["config"]["compile"] is (option == "--compile")
        losses.append(
            [
                (e["step"], e["tokens"], e["train_loss"], e["val_loss"])
                for e in events
                if e["event"] == "log"
            ]
        )
    assert largest_difference(*losses) < 1e-3


def test_the_chunked_loss_is_the_cross_entropy(stages):
    """Value and gradients, also those of a multiple of it; the chunks are of unequal sizes."""
    script = stages[STAGES[1]]
    x_BT, y_BT = torch.randint(256, (2, 3, 700), device=CPU)  # chunks of 1,024, 1,024 and 52 tokens
    model, _ = model_of(script, context_length=700)
    plain = F.cross_entropy(model(x_BT).flatten(0, 1), y_BT.flatten())
    results = [
        (3 * loss, *torch.autograd.grad(3 * loss, list(model.parameters())))
        for loss in (plain, model(x_BT, y_BT))
    ]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("stage", STAGES[1:])
def test_a_trial_decides_whether_to_compile(stages, stage, monkeypatch, capsys):
    """In the model's type; where it fails, or does nothing, one line says why."""

    def broken(function):
        raise RuntimeError(
            "C++ compile error\n\nCommand:\ng++ /a b/x\n\ng++: fatal error: no input"
        )

    def left_out(function):
        warnings.warn("Some GPU does not support bfloat16", stacklevel=1)
        return function

    dtypes, script = [], stages[stage]
    config = script.Config(device=CPU, dtype="bfloat16")
    for stand_in, reason in (
        (broken, "C++ compile error  g++: fatal error: no input"),
        (left_out, "Some GPU does not support bfloat16"),
        (lambda function: function, "TORCH_COMPILE_DISABLE"),
    ):
        monkeypatch.setattr(torch, "compile", stand_in)
        assert script.can_compile(config) is False
        out = capsys.readouterr().out
        assert out.count("\n") == 1 and reason in out
    monkeypatch.setattr(
        torch, "compile", lambda function: lambda x: dtypes.append(x.dtype) or 2 * x
    )
    assert script.can_compile(config) and dtypes == [torch.bfloat16]


@pytest.mark.parametrize("stage", STAGES)
def test_every_script_sees_the_same_batches(stages, stage, tokens, monkeypatch):
    """An epoch is the permutation of seed + epoch, cut into batches, the short one dropped."""

    class Spy(stages[stage].TokenWindows):
        def __getitem__(self, i):
            seen.append(i)
            return super().__getitem__(i)

    script, seen = stages[stage], []
    train, val = windows_of(script, tokens)
    train.__class__ = Spy
    model, config = model_of(script, epochs=2, seed=7, batch_size=8)
    config.seed, config.eval_freq = 7, 1000
    monkeypatch.setattr(script, "evaluate", lambda *_: 1.0)
    with one_rank(script):
        losses_of(script, model, config, (train, val))
    steps = len(train) // 8
    expected = [
        torch.randperm(len(train), generator=torch.Generator().manual_seed(7 + epoch))
        for epoch in range(2)
    ]
    assert len(train) == 1999 // 16 and len(train) % 8  # there is a short batch to drop
    assert seen == torch.cat([order[: 8 * steps] for order in expected]).tolist()


@pytest.mark.parametrize("stage", STAGES)
def test_evaluation(stages, stage, tokens):
    """The mean over the first windows, at every batch size the same, 8 at most in a batch."""
    script, shapes = stages[stage], []
    train, _ = windows_of(script, tokens)
    model, config = model_of(script, dropout=0.5)
    model.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape)))
    config.eval_windows = 19
    losses = []
    for batch_size in (32, 8, 3):
        config.batch_size = batch_size
        with one_rank(script):
            losses.append(script.evaluate(model, train, config))
    assert [shape[0] for shape in shapes] == [8, 8, 3] * 2 + [3] * 6 + [1]
    assert model.training and all(p.grad is None for p in model.parameters())
    x_BT, y_BT = (torch.stack(part) for part in zip(*(train[i] for i in range(19)), strict=True))
    with torch.no_grad():
        expected = F.cross_entropy(model.eval()(x_BT).double().flatten(0, 1), y_BT.flatten())
    assert losses == pytest.approx([expected.item()] * 3, abs=1e-6)
    config.eval_windows = 10**6  # more than there are
    with one_rank(script):
        assert math.isfinite(script.evaluate(model, train, config))


@pytest.mark.parametrize("stage", STAGES)
def test_no_logits_are_alive_when_memory_is_read(stages, stage, tokens):
    """What run.epoch() reports is the model's memory, not what a variable still holds."""
    script, size = stages[stage], 256 * 64
    storages, alive = {}, []

    class Watch(TorchDispatchMode):  # sees what gradients are computed with, too
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple | list) else [result]:
                if isinstance(tensor, torch.Tensor) and tensor.numel() >= size:
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr(), len(storages)] = StorageWeakRef(storage)
            return result

    losses = Losses(lambda: alive.append([not ref.expired() for ref in storages.values()]))
    # Every parameter is smaller than the logits of one window; all together too (DDP's buckets).
    model, config = model_of(
        script, layers=1, width=8, context_length=64, batch_size=2, epochs=2, eval_windows=3
    )
    assert sum(p.numel() for p in model.parameters()) < size
    with one_rank(script), Watch():
        losses_of(script, model, config, windows_of(script, tokens, 64), losses)
    assert len(alive) == 2 and len(alive[0]) > 50  # it saw some
    assert not any(alive[0] + alive[1])


def test_optimized_model_is_bfloat16(stages):
    """Parameters, gradients and AdamW's state, in one fused update."""
    script = stages["01_opt_single_gpu"]
    model, config = model_of(script)
    config.dtype = "bfloat16"
    training_model = script.prepare_model(model, config)
    assert training_model is model
    optimizer = script.make_optimizer(model, config)
    assert optimizer.defaults["fused"] is True
    loss = script.compute_loss(model, *torch.randint(256, (2, 2, 16)))
    script.backward_and_update(loss, optimizer)
    state = [
        value
        for values in optimizer.state.values()
        for key, value in values.items()
        if key != "step"
    ]
    tensors = [*model.parameters(), *(p.grad for p in model.parameters()), *state]
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}


@pytest.mark.parametrize("stage", STAGES)
def test_cudnn_attention_is_off_where_it_would_round_dropout(stages, stage):
    for dropout in (0.1, 0.0):
        with one_rank(stages[stage]):
            torch.backends.cuda.enable_cudnn_sdp(True)
            stages[stage].prepare_model(*model_of(stages[stage], dropout=dropout))
            assert torch.backends.cuda.cudnn_sdp_enabled() is (stage == "00_orig" or not dropout)


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_and_operations(stages, stage):
    """GPT-2 124M with an untied head and no QKV bias, and 0.855 GFLOP a token."""
    script = stages[stage]
    config = script.Config()
    with torch.device("meta"):
        model = script.GPTModel(config)
    parameters, flops = script.count_parameters_and_flops(model, config).values()
    padding = config.vocab_size - 50_257
    assert parameters == 163_009_536 + 2 * padding * 768  # as the book counts them
    products = 12 * 12 * 768**2 + 768 * config.vocab_size
    assert flops == 6 * products + 12 * 12 * 1024 * 768


@pytest.mark.parametrize("stage", STAGES)
def test_a_sample(stages, stage):
    """Of ids that the tokenizer has, not those that pad; bytes that are no text are escaped."""
    script = stages[stage]
    tokenizer = tiktoken.Encoding(
        "bytes",
        pat_str="(?s:.)",
        special_tokens={},
        mergeable_ranks={bytes([i]): i for i in range(256)},
    )
    model = torch.nn.Module()
    model.forward = lambda ids: (
        F.one_hot(torch.full_like(ids, 0xFF), 300) + 2 * F.one_hot(torch.full_like(ids, 299), 300)
    )
    text = script.sample(model, tokenizer, script.Config(device=CPU))
    assert text == "Every effort moves you" + 50 * r"\xff" and model.training
