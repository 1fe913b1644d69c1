"""patches/variants: each one trains, and where it says so, as its base does."""

import gc
import json
import math
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import (
    ONE_RANK,
    SMALL,
    TINY,
    call_main,
    in_float32,
    load,
    read_record,
    run_python,
    skip_without,
    small,
    without_bfloat16,
    write_tokens,
)
from test_model import largest_difference, losses_of, model_of, one_rank, windows_of

from bench.measure.plan import SCRATCH
from patches import stack

VARIANTS = {patch.name: patch for patch in stack.load_variants() if "Group" in patch.fields}
ROWS = [
    (name, options, needs)
    for name, patch in VARIANTS.items()
    for options, needs in patch.option_sets
]
# These leave the graph as it is; test_checkpoints.py compiles with checkpoints.
EAGER = ("allocator", "checkpoint", "data", "gc", "optimizer", "schedule", "step")
# Traces both directions and splits them as Inductor does, but generates no code, which takes a
# minute on a CPU and says nothing of a GPU's kernels.
TRACED = partial(torch.compile, backend="aot_eager_decomp_partition")
STEPS = dict(eval_freq=1, eval_windows=3, max_steps=6, batch_size=8)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """The script of each variant as a module, loaded once it is asked for."""
    folder, loaded = tmp_path_factory.mktemp("variants"), {}

    def script(name):
        if name not in loaded:
            path = folder / stack.file_of(name)
            path.write_bytes(stack.rebuild_all()[name])
            loaded[name] = load(path)
        return loaded[name]

    return script


@pytest.mark.parametrize(
    ("name", "options", "needs", "compiled"),
    [
        *(pytest.param(*row, "--no-compile", id=" ".join([row[0], *row[1]])) for row in ROWS),
        *(
            pytest.param(
                *row,
                "--compile",
                id=" ".join([row[0], *row[1], "compiled"]),
                marks=pytest.mark.slow,
            )
            for row in ROWS
            if VARIANTS[row[0]].fields["Group"] not in EAGER
        ),
    ],
)
def test_it_trains(scripts, tokens, tmp_path, monkeypatch, name, options, needs, compiled):
    patch = VARIANTS[name]
    if name != "precision-fp16":  # a few products it can do without a GPU
        skip_without(needs)
    script = scripts(name)
    dtype = [] if patch.fields["Group"] == "precision" else in_float32(script)
    if name not in ("compile-mode", "compile-switch"):
        monkeypatch.setattr(torch, "compile", TRACED)
    with mock.patch.dict(script.MODELS["cpu-demo"], SMALL), without_bfloat16():
        result = call_main(
            script,
            *TINY,
            *dtype,
            "--batch-size",
            4,
            "--device",
            "cpu",
            "--data",
            tokens,
            "--results-dir",
            tmp_path,
            "--max-steps",
            3,
            compiled,
            *(option.replace(SCRATCH, str(tmp_path / "scratch")) for option in options),
            variables=ONE_RANK if patch.base == Path(stack.DDP).stem else {},
        )
    assert result.returncode == 0, result.stderr
    start, *_, end = read_record(tmp_path)
    assert (start["stage"], end["status"]) == (f"variant-{name}", "complete")
    assert start["config"]["compile"] is ("--no-compile" not in (compiled, *options))


@pytest.mark.parametrize(
    "name",
    [
        "step-accumulation",
        *(name for name, patch in VARIANTS.items() if patch.fields["Group"] == "memory"),
    ],
)
def test_the_gradient_is_that_of_the_whole_batch(scripts, stages, tokens, name):
    """Of a first step, relative to the largest of each tensor."""
    patch, models = VARIANTS[name], []
    skip_without(patch.fields.get("Needs", ""))
    for script in (stages[patch.base], scripts(name)):
        model, config = model_of(script, **STEPS | dict(max_steps=1))
        with one_rank(script):
            losses_of(script, model, config, windows_of(script, tokens))
        models.append(model)
    for whole, pieces in zip(*(model.parameters() for model in models), strict=True):
        assert (whole.grad - pieces.grad).abs().max() <= 1e-6 * whole.grad.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "windows", "options"),
    [
        ("ddp", 1, []),
        ("parallel-zero1", 3, []),
        ("parallel-sharded", 1, ["--zero", 2]),
        ("parallel-sharded", 3, ["--zero", 3]),
        ("parallel-muon", 3, []),
    ],
)
def test_two_ranks_train_as_one(tmp_path, name, windows, options):
    """With one window to evaluate the second rank has none; with three it has one less."""
    script, losses = tmp_path / f"{name}.py", []
    script.write_text(small(stack.rebuild_all()[name].decode()))
    options = [
        *TINY,
        "--device",
        "cpu",
        "--data",
        write_tokens(tmp_path / "data"),
        "--no-compile",
        "--dtype",
        "float32",
        "--max-steps",
        4,
        "--eval-freq",
        1,
        "--eval-windows",
        windows,
        *options,
        "--results-dir",
    ]
    for result in (
        call_main(load(script), *options, tmp_path / "one", "--batch-size", 4),
        run_python(
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node=2",
            script,
            *options,
            tmp_path / "two",
            "--batch-size",
            2,
        ),
    ):
        assert result.returncode == 0, result.stderr
        _, *logs, _, end = read_record(tmp_path / ("two" if losses else "one"))
        assert (len(logs), end["status"]) == (4, "complete")
        losses.append(torch.tensor([[log["train_loss"], log["val_loss"]] for log in logs]))
    torch.testing.assert_close(*losses, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("dropout", "budget", "compiled", "refused"),
    [
        (0.1, 0.5, True, True),
        (0.1, 1.0, True, False),
        (0.1, 0.5, False, False),
        (0.0, 0.5, True, False),
    ],
)
def test_a_memory_budget_refuses_dropout(scripts, monkeypatch, dropout, budget, compiled, refused):
    """With it, what the compiler makes has wrong gradients."""
    script = scripts("memory-budget")
    monkeypatch.setattr(torch, "compile", lambda model: model)
    model, config = model_of(script, dropout=dropout, memory_budget=budget, compile=compiled)
    if not refused:
        assert script.prepare_model(model, config) is model
        return
    with pytest.raises(script.UserError, match="wrong .* --dropout 0"):
        script.prepare_model(model, config)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "breaks"), [("float32", True), ("bfloat16", False)])
def test_experts_are_compiled(scripts, dtype, breaks):
    """In bfloat16 as one graph; float32's products, which the compiler refuses, are left out."""
    script = scripts("model-mixture")
    model, config = model_of(script)
    layer = model.blocks[0].feed_forward.to(getattr(torch, dtype))
    x_BTC = torch.randn(2, 8, config.width).to(layer.up.dtype)
    explanation = torch._dynamo.explain(layer)(x_BTC)
    assert bool(explanation.graph_break_count) is breaks
    torch._dynamo.reset()
    torch.testing.assert_close(TRACED(layer)(x_BTC), layer(x_BTC))


@pytest.mark.parametrize(
    "compiled", ["--no-compile", pytest.param("--compile", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("options", "works"),
    [
        (["--dropout", 0.1], "math"),
        (["--attention", "efficient"], "math or flash"),
        (["--attention", "cudnn", "--dropout", 0.1], "math"),
        (["--attention", "math", "--dropout", 0.1], None),
        (["--dropout", 0.1, "--no-attention-dropout"], None),
    ],
)
def test_kernels_that_a_cpu_lacks(scripts, tokens, tmp_path, monkeypatch, options, works, compiled):
    """Its flash has no dropout, and it has neither of NVIDIA's."""
    script = scripts("attention-backend")
    monkeypatch.setattr(torch, "compile", TRACED)
    with mock.patch.dict(script.MODELS["cpu-demo"], SMALL):
        result = call_main(
            script,
            *TINY,
            "--device",
            "cpu",
            "--data",
            tokens,
            "--results-dir",
            tmp_path,
            "--max-steps",
            1,
            "--dtype",
            "float32",
            compiled,
            *options,
        )
    assert result.returncode == (1 if works else 0), result.stderr
    if works:
        assert result.stderr.count("\n") == 1
        assert result.stderr.endswith(f"; here works --attention {works}\n")


def test_trying_a_kernel_draws_no_random_numbers(scripts):
    """Else dropout's masks would be others than those of 01."""
    script = scripts("attention-backend")
    model, config = model_of(script, dropout=0.1, attention="math")
    before = torch.get_rng_state()
    assert script.attention_backend(model, config) == "math"
    assert torch.equal(torch.get_rng_state(), before)


def test_experts(scripts):
    """The grouped products are those of each token's experts, one by one; and the balance loss is
    1 where all experts have the same share."""
    script = scripts("model-mixture")
    model, config = model_of(script)
    layer = model.blocks[0].feed_forward
    x_BTC = torch.randn(2, 5, config.width)
    y_BTC = layer(x_BTC)
    weights_E = layer.router(x_BTC).softmax(-1)
    for x_C, y_C, weights in zip(
        x_BTC.flatten(0, 1), y_BTC.flatten(0, 1), weights_E.flatten(0, 1), strict=True
    ):
        values, experts = weights.topk(2)
        parts = [
            torch.nn.functional.gelu(x_C @ layer.up[e], approximate="tanh") @ layer.down[e]
            for e in experts
        ]
        expected = sum(v * part for v, part in zip(values / values.sum(), parts, strict=True))
        torch.testing.assert_close(y_C, expected)
    assert layer.share_E.sum().item() == pytest.approx(1) and layer.share_E.max() <= 0.5
    with torch.no_grad():
        layer.router.weight.zero_()
    layer(x_BTC)
    assert layer.balance_loss.item() == pytest.approx(1)
    plain, _ = model_of(scripts("optimizer-foreach"))
    flops, plain_flops = (
        script.count_parameters_and_flops(network, config)["flops_per_token"]
        for network in (model, plain)
    )
    router = 6 * layer.router.weight.numel() * config.layers
    assert flops == plain_flops + router  # as many products for a token as without experts


@pytest.mark.parametrize(
    ("name", "off"),
    [
        ("model-modern", dict(rotary=False, qk_norm=False, relu_squared=False, zero_init=False)),
        ("model-skips", dict(value_embeddings=False, first_skips=False, soft_cap=0.0)),
    ],
)
def test_a_model_switched_off_is_01s(scripts, stages, tokens, name, off):
    """It trains as 01's, from the same weights."""
    losses = []
    for script, settings in ((stages["01_opt_single_gpu"], {}), (scripts(name), off)):
        model, config = model_of(script, **STEPS, **settings)
        losses.append(losses_of(script, model, config, windows_of(script, tokens)))
    assert largest_difference(*losses) < 1e-6


def test_modern_attention(scripts):
    """It is that of a plain formulation, with rotations as products of complex numbers, also for a
    text shorter than the context; and moving all tokens on by some places changes no score."""
    script = scripts("model-modern")
    config = script.Config(layers=1, heads=2, width=32, context_length=16, dropout=0.0)
    attention = script.MultiHeadAttention(config).double()
    attention.rotary.double()
    x_BTC = torch.randn(3, 11, 32, dtype=torch.float64)
    q, k, v = (
        t.unflatten(-1, (2, 16)).transpose(1, 2)
        for t in attention.query_key_value(x_BTC).chunk(3, dim=-1)
    )
    q, k = (
        t / (t.square().mean(-1, keepdim=True) + torch.finfo(t.dtype).eps).sqrt() for t in (q, k)
    )
    speeds = 10_000 ** (-torch.arange(8, dtype=torch.float64) / 8)

    def turned(t, first=0):
        angles = torch.arange(first, first + t.shape[2])[:, None] * speeds
        pairs = torch.complex(t[..., :8], t[..., 8:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    scores = turned(q) @ turned(k).mT / 4
    torch.testing.assert_close(turned(q, 5) @ turned(k, 5).mT / 4, scores)
    later = torch.ones(11, 11, dtype=torch.bool).triu(1)
    y = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
    expected = attention.out(y.transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x_BTC), expected, atol=1e-6, rtol=0)  # angles: float32


def test_skips_are_a_plain_models(scripts):
    """A table that has one vector for all tokens adds its product with the next weights, since the
    weights of attention sum to 1: as a bias, of every other block. And a block adds its share of
    the first input before anything else."""
    script, logits = scripts("model-skips"), []
    ids_BT = torch.randint(256, (2, 9))
    for with_tables in (True, False):
        model, config = model_of(script, layers=3, value_embeddings=with_tables)
        assert len(model.value_embeddings) == 2 * with_tables
        torch.manual_seed(1)
        with torch.no_grad():
            for name, weight in sorted(model.named_parameters()):
                if not name.startswith("value_embeddings"):
                    weight.copy_(0.2 * torch.randn(weight.shape))
            for i, vector_C in ((0, torch.randn(config.width)), (2, torch.randn(config.width))):
                out = model.blocks[i].attention.out
                if with_tables:
                    model.value_embeddings[i // 2].weight.copy_(vector_C.expand(256, -1))
                else:
                    out.bias.add_(out.weight @ vector_C)
        logits.append(model(ids_BT))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
    block, (x_BTC, first_BTC) = model.blocks[1], torch.randn(2, 2, 9, config.width)
    plain = torch.zeros_like(x_BTC)
    torch.testing.assert_close(
        block(x_BTC, first_BTC, 0.0), block(x_BTC + block.first_share * first_BTC, plain, 0.0)
    )


def test_the_capped_loss_is_that_of_the_capped_logits(scripts):
    """With its gradients; and no logit is larger than the cap."""
    script, results = scripts("model-skips"), []
    model, _ = model_of(script, soft_cap=2.0)
    with torch.no_grad():
        model.head.weight.mul_(20)
    x_BT, y_BT = torch.randint(256, (2, 3, 9))
    logits_BTV = model(x_BT)
    assert 1.9 < logits_BTV.abs().max() <= 2
    for loss in (
        script.compute_loss(model, x_BT, y_BT),
        torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), y_BT.flatten()),
    ):
        results.append([loss, *torch.autograd.grad(loss, [*model.parameters()])])
    torch.testing.assert_close(*results)


def test_cce_is_given_01s_head(scripts, stages, tokens, monkeypatch):
    """By a stand-in for the package, which needs a GPU: the losses of 01. Its filter, off here,
    would leave out nearly all gradients of a new model."""

    def linear_cross_entropy(e, c, targets, filter_eps="high"):
        assert filter_eps is None
        return torch.nn.functional.cross_entropy(e @ c.T, targets)

    monkeypatch.setitem(
        sys.modules, "cut_cross_entropy", SimpleNamespace(linear_cross_entropy=linear_cross_entropy)
    )
    losses = [
        losses_of(script, *model_of(script, **STEPS), windows_of(script, tokens))
        for script in (stages["01_opt_single_gpu"], scripts("head-cce"))
    ]
    assert largest_difference(*losses) < 1e-5


@pytest.mark.parametrize("shape", [(48, 32, 64), (48, 24, 64)])
def test_the_heads_products_in_float8(scripts, monkeypatch, shape):
    """As near as 3 bits of mantissa allow, 2 of a gradient; sizes that don't fit as they are."""
    skip_without(VARIANTS["precision-float8"].fields["Needs"].partition(",")[0])
    script = scripts("precision-float8")
    monkeypatch.setattr(script.Product, "in_float8", True)
    rows, inner, columns = shape
    a, b = torch.randn(rows, inner), 1e-3 * torch.randn(inner, columns)
    for dtype, off in ((torch.float8_e4m3fn, 0.05), (torch.float8_e5m2, 0.1)):
        error = (script.Product.of(a, b, dtype) - a @ b).norm() / (a @ b).norm()
        assert off / 4 < error < off if inner == 32 else error == 0


def muon(script, matrices, **options):
    """Muon in float32 on some matrices."""
    config = script.Config(device=torch.device("cpu"), learning_rate=0.01, **options)
    optimizer = script.Muon(matrices, config)
    optimizer.dtype = torch.float32
    return optimizer


def matrices_of(*shapes):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]


def test_muon_is_pytorchs(scripts):
    """Which multiplies in bfloat16, whatever the weights are, but for this test."""
    shapes = (6, 12), (12, 6), (12, 6), (5, 5)
    ours, theirs = matrices_of(*shapes), matrices_of(*shapes)
    optimizers = (
        muon(scripts("optimizer-muon"), ours),
        torch.optim.Muon(theirs, lr=0.01, adjust_lr_fn="match_rms_adamw"),
    )
    with without_bfloat16():
        for _ in range(5):
            for weight, other in zip(ours, theirs, strict=True):
                weight.grad = torch.randn_like(weight)
                other.grad = weight.grad.clone()
            for optimizer in optimizers:
                optimizer.step()
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("polar_express", "below", "above"), [(False, 0.68, 1.21), (True, 0.85, 1.15)]
)
def test_muons_products_are_nearly_orthogonal(scripts, polar_express, below, above):
    """As the polynomials on singular values, which Polar Express brings nearer to 1."""
    script = scripts("optimizer-muon")
    torch.manual_seed(0)
    for shape in ((3, 8, 20), (2, 20, 8), (1, 8, 8)):
        x_NRC = torch.randn(shape, dtype=torch.float64)
        u, values, v = torch.linalg.svd(x_NRC, full_matrices=False)
        values /= values.square().sum(-1, keepdim=True).sqrt()
        for a, b, c in script.POLAR_EXPRESS if polar_express else script.NEWTON_SCHULZ:
            values = a * values + b * values**3 + c * values**5
        expected = u @ torch.diag_embed(values) @ v
        torch.testing.assert_close(script.orthogonalize(x_NRC, polar_express), expected)
        assert below < values.min() and values.max() < above


@pytest.mark.parametrize("options", [dict(normuon=True), dict(cautious_decay=True)])
def test_muons_options(scripts, options):
    """Three steps of a plain formulation, number by number."""
    script = scripts("optimizer-muon")
    (weight,), (expected,) = matrices_of((4, 6)), matrices_of((4, 6))
    expected, momentum, squares = expected.detach().clone(), torch.zeros(4, 6), torch.zeros(4)
    optimizer = muon(script, [weight], weight_decay=0.5, **options)
    for _ in range(3):
        weight.grad = torch.randn(4, 6)
        momentum = 0.95 * momentum + 0.05 * weight.grad
        step = script.orthogonalize((0.05 * weight.grad + 0.95 * momentum)[None], False)[0]
        if options.get("normuon"):
            squares = 0.95 * squares + 0.05 * (step**2).mean(1)
            step = step / squares.sqrt()[:, None]
            step *= 0.2 * 24**0.5 / step.norm()
        else:
            step *= 0.2 * 6**0.5
        for row in range(4):
            for column in range(6):
                old, move = expected[row, column].item(), step[row, column].item()
                decays = not options.get("cautious_decay") or old * move >= 0
                expected[row, column] = old - 0.01 * (move + 0.5 * old * decays)
        optimizer.step()
        torch.testing.assert_close(weight.detach(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_gloo_sends_one_bucket_after_the_other(scripts, monkeypatch, backend):
    """Two in flight can wait for each other forever."""
    script, sent = scripts("ddp-compression"), mock.Mock()
    monkeypatch.setattr(script.dist, "get_backend", lambda: backend)
    monkeypatch.setattr(script.powerSGD_hook, "powerSGD_hook", lambda state, bucket: sent)
    assert script.send_thin_matrices(None, None) is sent
    assert sent.wait.called is (backend == "gloo")


def test_the_collector_is_frozen_once(scripts, tokens):
    script = scripts("gc-freeze")
    gc.unfreeze()
    with mock.patch.object(gc, "freeze", wraps=gc.freeze) as freeze:
        losses_of(script, *model_of(script, **STEPS), windows_of(script, tokens))
    try:
        assert freeze.call_count == 1 and gc.get_freeze_count() > 10_000 and gc.isenabled()
    finally:
        gc.unfreeze()


def test_evaluation_runs_without_the_compiled_blocks(scripts, tokens, monkeypatch):
    script = scripts("compile-blocks")
    model, config = model_of(script, compile=True)
    compiled = mock.Mock(wraps=TRACED)
    monkeypatch.setattr(torch, "compile", compiled)
    script.prepare_model(model, config)
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    script.evaluate(model, windows_of(script, tokens)[1], config)
    assert compiled.call_count == config.layers + 1  # the loss is the last
    assert graphs["unique_graphs"] == before


def test_sampled_softmax_estimates_the_whole_sum_and_starts_with_the_frequencies(scripts):
    """The mean of exp(loss) over many samples is the inverse of the target's probability."""
    script = scripts("head-sampled")
    model, config = model_of(script, **STEPS, classes=40)
    tokens = np.repeat(np.arange(200), np.arange(200) + 1)
    model.sampled_loss.count_words(tokens, model, config)
    model.head.weight.data[:, 1:] = 0  # what the context says
    logits_NV = model.eval()(torch.randint(200, (2, 8))).flatten(0, 1)
    counts_V = torch.bincount(torch.from_numpy(tokens), minlength=config.vocab_size) + 0.1
    assert (logits_NV.softmax(-1) - counts_V / counts_V.sum()).abs().max() < 1e-3

    x_1C, weight_VC = torch.randn(1, config.width), torch.randn(config.vocab_size, config.width)
    target_1 = torch.tensor([199])
    exact = torch.nn.functional.cross_entropy(x_1C @ weight_VC.T / 4, target_1).exp()
    sampled = [model.sampled_loss(x_1C / 4, weight_VC, target_1).exp() for _ in range(20_000)]
    sampled = torch.stack(sampled)
    mean, deviation = sampled.mean(), sampled.std()
    assert (mean - exact).abs() < 5 * deviation / math.sqrt(len(sampled)) and deviation > 0
    losses = sampled.log()  # too low, as its header says
    assert exact.log() - losses.mean() > 5 * losses.std() / math.sqrt(len(losses))


def test_rounding_by_chance_loses_no_change(scripts):
    """AdamW's small steps, and the fall of its average once gradients become smaller, come to as
    much as in float32; rounded to the nearest they come to something else. Each seed its own."""
    script, ends = scripts("precision-stochastic"), {}
    for name, dtype in (
        ("exact", torch.float32),
        ("nearest", torch.bfloat16),
        ("chance", torch.bfloat16),
        ("again", torch.bfloat16),
        ("other", torch.bfloat16),
    ):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.cat([torch.ones(1000), -torch.ones(1000)]).to(dtype))
        optimizer = torch.optim.AdamW([weight], lr=1e-4, weight_decay=1.0, fused=True)
        if name not in ("exact", "nearest"):
            config = script.Config(device=torch.device("cpu"), seed=2 if name == "other" else 1)
            config.dtype = "bfloat16"
            script.StochasticRounding(optimizer, config)
        for step in range(600):
            weight.grad = (0.1 if step > 200 else 1) * (0.5 + torch.randn(2000)).to(dtype)
            optimizer.step()
        ends[name] = [weight.detach(), optimizer.state[weight]["exp_avg_sq"]]
    means = {
        name: torch.stack([tensor.float().unflatten(0, (2, -1)).mean(1) for tensor in tensors])
        for name, tensors in ends.items()
    }
    assert (means["chance"] - means["exact"]).abs().max() < 3e-3
    assert (means["nearest"] - means["exact"]).abs().min() > 2e-2
    assert torch.equal(ends["chance"][0], ends["again"][0])  # as on another rank
    assert not torch.equal(ends["chance"][0], ends["other"][0])
    assert ends["chance"][0].dtype == torch.bfloat16


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A GPT-2 with random weights, as transformers saves it: the model, and its folder."""
    transformers = pytest.importorskip(
        "transformers", reason="needs transformers: pip install -r requirements-extras.txt"
    )
    folder = tmp_path_factory.mktemp("released")
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
        )
    )
    with torch.no_grad():  # biases begin at 0, which would hide a lost one
        for parameter in theirs.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    theirs.save_pretrained(folder, safe_serialization=True)
    return theirs.eval(), folder


def test_a_released_model_has_its_loss(scripts, released):
    """That of transformers, with the same weights; and its context may be shorter."""
    theirs, folder = released
    script = scripts("init-gpt2")
    ids = torch.randint(0, 50_257, (3, 17))
    for context in (64, 16):
        model, _ = model_of(
            script,
            layers=2,
            heads=2,
            width=32,
            context_length=context,
            vocab_size=50_257,
            weights=str(folder),
        )
        ours = script.compute_loss(model.eval(), ids[:, :-1], ids[:, 1:])
        loss = theirs(ids, labels=ids).loss
        assert ours.item() == pytest.approx(loss.item(), rel=1e-5)
    assert model.head.weight is model.token_embedding.weight


def test_a_trained_model_is_a_released_one(scripts, released, tokens, tmp_path, monkeypatch):
    """transformers reads what was saved, and it has the loss of the last log line; a folder that is
    there isn't overwritten."""
    transformers = pytest.importorskip("transformers")
    theirs, folder = released
    script, out = scripts("init-gpt2"), tmp_path / "saved"
    monkeypatch.setitem(script.MODELS, "cpu-demo", dict(layers=2, heads=2, width=32))
    options = [
        *TINY,
        "--device",
        "cpu",
        "--data",
        tokens,
        "--results-dir",
        tmp_path / "results",
        "--weights",
        folder,
        "--save-to",
        out,
        "--max-steps",
        2,
        "--no-compile",
    ]
    result = call_main(script, *options)
    assert result.returncode == 0, result.stderr
    start, *_, last, _, _ = read_record(tmp_path / "results")
    assert start["config"]["weights"] == folder.name and "save_to" not in start["config"]
    config = json.loads((folder / "config.json").read_text()) | dict(n_positions=16)
    (out / "config.json").write_text(json.dumps(config))
    saved = transformers.GPT2LMHeadModel.from_pretrained(out, dtype=torch.bfloat16).eval()
    windows = script.TokenWindows(np.fromfile(tokens / "val.bin", "<u2"), 16)
    ids = torch.stack([torch.cat([windows[i][0], windows[i][1][-1:]]) for i in range(2)])
    with torch.no_grad():
        logits = saved(ids[:, :-1]).logits.float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()
    assert loss == pytest.approx(last["val_loss"], rel=0.01)  # in bfloat16
    again = call_main(script, *options)
    assert again.returncode == 1 and "File exists" in again.stderr


@pytest.mark.parametrize(
    ("settings", "damaged"),
    [
        (dict(layers=3), False),
        (dict(layers=1), False),
        (dict(width=64), False),
        (dict(context_length=65), False),
        ({}, True),
    ],
)
def test_what_is_no_released_model(scripts, released, tmp_path, settings, damaged):
    script, (_, folder) = scripts("init-gpt2"), released
    if damaged:
        folder = tmp_path
        (folder / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(script.UserError, match=r"model.safetensors isn't a GPT-2 of this size: "):
        model_of(
            script,
            **dict(layers=2, heads=2, width=32, context_length=16, vocab_size=50_257) | settings,
            weights=str(folder),
        )


def test_workers_that_lack_shared_memory(scripts, capsys):
    script = scripts("data-workers")
    error = RuntimeError(
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible"
        " that dataloader's workers are out of shared memory."
    )
    status, says, code = script.explain(error)
    assert (status, code) == ("failed", 1) and "--shm-size" in says
    assert capsys.readouterr().err == ""  # no traceback
