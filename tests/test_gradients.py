"""The check of gradients: it calls right programs right, and catches what is wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, skip_without

from bench.analysis.gradients import verdict_of
from bench.measure.records import Record, read_record
from bench.studies.gradients import has_own_type, unchecked_dropout
from patches import stack

DRIVER = ROOT / "bench" / "measure" / "gradients.py"
PLAIN, FAST = ROOT / "00_orig.py", ROOT / "01_opt_single_gpu.py"
GROUPS = "memory", "dropout", "attention", "head", "precision", "model"
VARIANTS = [
    (patch, *row)
    for patch in stack.load_variants()
    for row in patch.option_sets
    if patch.fields.get("Group", "").startswith(GROUPS)
]


def check(script: Path, folder: Path, *options, sizes=(), reference=FAST, dropout=True):
    """The verdict on a script's gradients."""
    words = [
        sys.executable,
        DRIVER,
        "--directions",
        1,
        *sizes,
        *(["--reference", reference] if reference else []),
        *([] if dropout else ["--no-dropout"]),
        script,
        "--device",
        "cpu",
        "--results-dir",
        folder / "results",
        *options,
    ]
    result = subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        env=os.environ | dict(TORCHINDUCTOR_CACHE_DIR=str(folder / "cache")),
    )
    assert result.returncode == 0, result.stderr
    return verdict_of(read_record(next((folder / "results").glob("*.jsonl"))))


def edited(folder: Path, *pairs: tuple[str, str]) -> Path:
    """01 with something else in the place of a text that is there once."""
    text = FAST.read_text()
    for old, new in pairs:
        assert text.count(old) == 1
        text = text.replace(old, new)
    path = folder / "edited.py"
    path.write_text(text)
    return path


# ---- Programs that are wrong

SCALED = '''class Scaled(torch.autograd.Function):
    """Hands its input on, and a part of the gradient back."""

    @staticmethod
    def forward(ctx, x, share):
        ctx.share = share
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.share * gradient, None


class TransformerBlock(nn.Module):
'''
NEW_MASK = '''class NewMask(torch.autograd.Function):
    """Dropout whose backward pass draws another mask."""

    @staticmethod
    def forward(ctx, x, rate):
        ctx.rate = rate
        return F.dropout(x, rate)

    @staticmethod
    def backward(ctx, gradient):
        return F.dropout(gradient, ctx.rate), None


class TransformerBlock(nn.Module):
'''
BLOCK = "class TransformerBlock(nn.Module):\n"
NORMED = "self.feed_forward(self.norm2(x_BTC))"
PLANTS = {
    "a missing term": [
        (BLOCK, SCALED),
        (NORMED, "Scaled.apply(self.feed_forward(self.norm2(x_BTC)), 0 if self.last else 1)"),
        ("        self.norm1 = ", "        self.last = False\n        self.norm1 = "),
        (
            "        self.norm = nn.LayerNorm",
            "        self.blocks[-1].last = True\n        self.norm = nn.LayerNorm",
        ),
    ],
    "a bias's scale": [
        (BLOCK, SCALED),
        (
            "return self.out(y_BHTD.transpose(1, 2).reshape(B, T, C))",
            "return F.linear(y_BHTD.transpose(1, 2).reshape(B, T, C),"
            " self.out.weight, Scaled.apply(self.out.bias, 0.9))",
        ),
    ],
    "a mask drawn anew": [
        (BLOCK, NEW_MASK),
        (
            "return x_BTC + self.dropout(self.feed_forward(",
            "return x_BTC + (lambda y: NewMask.apply(y, self.dropout.p))(self.feed_forward(",
        ),
    ],
    "a detached residual": [
        ("return x_BTC + self.dropout(self.feed", "return x_BTC.detach() + self.dropout(self.feed")
    ],
    "a chunk left out": [
        (
            "torch.cat(x_gradients), sum_VC)",
            "torch.cat([0 * x_gradients[0], *x_gradients[1:]]), sum_VC)",
        )
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_caught_without_a_reference(tmp_path, name):
    """By numeric derivatives alone; the loss is right in all of them."""
    script = edited(tmp_path, *PLANTS[name])
    verdict = check(script, tmp_path, "--dtype", "float32", "--no-compile", reference=None)
    assert verdict.wrong and "dropout" in verdict.wrong[0]


@pytest.mark.slow
def test_a_small_fault_is_caught_with_a_reference(tmp_path):
    """LayerNorm's gradient in one inner block, off by a thousandth."""
    script = edited(
        tmp_path,
        (BLOCK, SCALED),
        (
            "self.attention(self.norm1(x_BTC))",
            "self.attention(Scaled.apply(self.norm1(x_BTC), 1.001))",
        ),
    )
    verdict = check(script, tmp_path, "--dtype", "float32", "--no-compile", dropout=False)
    assert verdict.wrong and "uncompiled to reference" in verdict.wrong[0]


@pytest.mark.slow
def test_a_memory_budget_with_dropout_is_caught(tmp_path):
    """pytorch#190758, as the variant would train if it didn't refuse: right without dropout."""
    script = edited(
        tmp_path,
        (
            "import torch.nn as nn\n",
            "import torch.nn as nn\n"
            "import torch._functorch.config\n"
            "torch._functorch.config.activation_memory_budget = 0.5\n",
        ),
    )
    verdict = check(script, tmp_path, "--dtype", "float32")
    assert verdict.wrong and all(reason.startswith("dropout") for reason in verdict.wrong)


@pytest.mark.slow
def test_a_nested_region_is_caught(tmp_path):
    """A region on the block of three layers, whose loss is right: see docs/upstream.md."""
    script = edited(
        tmp_path,
        (
            "    def forward(self, x_BTC):\n        x_BTC = x_BTC +",
            "    @torch.compiler.nested_compile_region\n"
            "    def forward(self, x_BTC):\n        x_BTC = x_BTC +",
        ),
    )
    verdict = check(script, tmp_path, "--dtype", "float32", sizes=("--layers", 3), dropout=False)
    assert any("norm" in reason for reason in verdict.wrong)


# ---- Programs that are right


def test_01_has_the_gradients_of_00(tmp_path):
    verdict = check(
        FAST, tmp_path, "--dtype", "float32", "--no-compile", reference=PLAIN, dropout=False
    )
    assert verdict.cells.keys() == {"uncompiled to reference"} and not verdict.wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("01", []),
        ("memory-checkpoint", []),
        ("memory-budget", ["--memory-budget", 0.5, "--dropout", 0]),  # it refuses dropout
        ("attention-backend", ["--attention", "math"]),
        ("head-sampled", []),
    ],
)
def test_what_is_compiled_is_right(tmp_path, name, options):
    script, reference = FAST, FAST
    if name != "01":
        script = tmp_path / "variant.py"
        script.write_bytes(stack.compose([name]))
    if name == "head-sampled":
        reference = None
    verdict = check(script, tmp_path, "--dtype", "float32", *options, reference=reference)
    assert {"compiled to uncompiled", "dropout"} <= verdict.cells.keys()
    assert not verdict.wrong
    assert ("refused" in verdict.cells["dropout"]) is (name == "memory-budget")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("patch", "options", "needs"),
    VARIANTS,
    ids=lambda value: value.name if isinstance(value, stack.Patch) else " ".join(value) or None,
)
def test_what_touches_gradients_is_right(tmp_path, patch, options, needs):
    if patch.name != "precision-fp16":  # a few products it can do without a GPU
        skip_without(needs)
    script = tmp_path / "variant.py"
    script.write_bytes(stack.compose([patch.name]))
    dtype = [] if patch.fields["Group"] == "precision" else ["--dtype", "float32"]
    changes = patch.fields["Loss"].startswith("changes")
    numeric = patch.fields["Group"] != "precision" and "Unchecked" not in patch.fields
    if changes and not numeric:
        pytest.skip("only the compiled script has something to be compared to")
    verdict = check(
        script,
        tmp_path,
        *dtype,
        *options,
        "--no-compile",
        reference=None if changes else FAST,
        dropout=numeric,
    )
    assert not verdict.wrong
    assert changes or "uncompiled to reference" in verdict.cells


# ---- The verdict


def record_of(*events, **config) -> Record:
    return Record(
        "",
        dict(config=dict(dtype="float32") | config),
        [],
        {},
        [dict(event="gradients", **event) for event in events],
    )


def exact(
    error: float, comparison: str = "compiled to uncompiled", cosine=1.0, norm=1.0, name="b"
) -> dict:
    right = [1e-6, 1.0, 1.0]
    tensors = dict(a=right, b=[error, cosine, norm], c=right)
    if name != "b":
        tensors[name] = tensors.pop("b")
    return dict(comparison=comparison, tensors=tensors)


def numeric(*derivatives: tuple[float, float, float]) -> dict:
    """[numeric, its uncertainty, autograd's] of two tensors, of which the first is right."""
    return dict(
        comparison="dropout",
        loss_noise=1e-7,
        directions=dict(a=[[1.0, 1e-4, 1.0]], b=[list(each) for each in derivatives]),
    )


@pytest.mark.parametrize(
    ("event", "is_wrong"),
    [
        (exact(9e-5), False),
        (exact(1.1e-4), True),
        (exact(float("nan")), True),
        (numeric((1.0, 1e-3, 1.019)), False),
        (numeric((1.0, 1e-3, 1.03)), True),
        (numeric((1.0, 0.05, 1.5)), False),  # too uncertain
        (numeric((0.0, 1e-4, 1.0)), True),
        (numeric((1.0, 1e-4, 0.0)), True),
        (numeric((1.0, 1e-4, 1.0), (-2.0, 1e-4, 2.0)), True),
        (numeric((float("nan"), 1e-4, 1.0)), True),
        (numeric((1.0, 1e-4, float("nan"))), True),
        (dict(comparison="dropout", refused="no"), False),
    ],
)
def test_verdicts_in_float32(event, is_wrong):
    verdict = verdict_of(record_of(event))
    assert bool(verdict.wrong) is is_wrong
    assert all("b is off" in reason for reason in verdict.wrong)


@pytest.mark.parametrize(
    ("uncompiled", "compiled", "is_wrong"),
    [
        (dict(error=0.2, cosine=0.98, norm=1.1, name="norm"), 0.5, False),
        (dict(error=0.2, cosine=0.98, norm=1.1, name="norm"), 0.8, True),
        (dict(error=0.6, cosine=0.8, norm=1.1, name="norm"), 0.2, True),
        (dict(error=0.3, cosine=0.99, norm=1.3, name="norm"), 0.2, True),
        (dict(error=0.02), 0.05, False),
        (dict(error=0.2, norm=1.2), 0.2, True),
        (dict(error=0.01), 0.44, True),
    ],
)
def test_verdicts_in_bfloat16(uncompiled, compiled, is_wrong):
    """By roundings, norms by angle and length; compiled, by how far the uncompiled program is
    off."""
    record = record_of(
        exact(comparison="uncompiled to reference", **uncompiled),
        exact(compiled, name=uncompiled.get("name", "b")),
        dtype="bfloat16",
    )
    assert bool(verdict_of(record).wrong) is is_wrong


def test_what_decides_nothing_is_not_right():
    """Nothing compared is wrong; too few tensors above the noise, or refused, is not checkable."""
    assert verdict_of(record_of()).wrong
    assert verdict_of(record_of(dict(comparison="compiled to uncompiled", tensors={}))).wrong
    noisy = dict(comparison="dropout", loss_noise=1e-3, directions=dict(a=[[1.0, 0.5, 1.1]]))
    refused = dict(comparison="dropout", refused="no dropout here")
    for event in (noisy, refused):
        assert verdict_of(record_of(event)).text == "not checkable"
        assert verdict_of(record_of(event, exact(1e-6))).text == "right"


def test_what_cant_be_checked_is_said(monkeypatch):
    """By the variant's header, and of types in which the loss is too coarse."""
    from bench.catalogue import Run

    assert "experts" in unchecked_dropout(Run("", "", script="model-mixture"))
    assert has_own_type(Run("", "", script="precision-autocast"))
    assert unchecked_dropout(Run("", "", script="01", options=("--dtype", "bfloat16")))
    assert not unchecked_dropout(Run("", "", script="memory-checkpoint"))


def test_a_study_of_them(tmp_path):
    """What it would run: every script and variant, each once; unknown names are refused."""

    def dry_run(*options):
        return subprocess.run(
            [
                sys.executable,
                ROOT / "measure.py",
                "gradients",
                "--dry-run",
                "--results-dir",
                tmp_path,
                *options,
            ],
            capture_output=True,
            text=True,
        )

    lines = dry_run().stdout.splitlines()
    for name in ("00_orig", "01_opt_single_gpu", "variant-memory-checkpoint", "02-one-rank"):
        assert len([line for line in lines if f"--name {name} " in line]) == 1
    two = [line for line in lines if "--nproc_per_node=2" in line]
    assert two and all("bench/measure/gradients.py" in line for line in two)
    result = dry_run("--names", "01,nothing")
    assert result.returncode == 2 and "nothing" in result.stderr
