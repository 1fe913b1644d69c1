"""The check of gradients: it calls right programs right, and catches what is wrong."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, environment, load, run_python, skip_without
from made_up import setup_of

from bench.analysis.gradients import Verdict, verdict_of
from bench.catalogue import Run
from bench.measure.launch import command_of
from bench.measure.plan import Job
from bench.measure.records import Record, read_record
from bench.measure.sizing import Length
from bench.studies.gradients import Gradients, has_own_type, unchecked_dropout
from gpt_speed.common import UserError
from gpt_speed.gradients import hooks
from gpt_speed.gradients.keeper import Keeper
from gpt_speed.gradients.order import Order
from patches import stack

DRIVER = ROOT / "bench" / "measure" / "gradients.py"
PLAIN, FAST = ROOT / "00_orig.py", ROOT / "01_opt_single_gpu.py"
FLOAT32 = ["--dtype", "float32"]
UNCOMPILED = [*FLOAT32, "--no-compile"]
GROUPS = "memory", "dropout", "attention", "head", "precision", "model"
VARIANTS = [
    (patch, *row)
    for patch in stack.load_variants()
    for row in patch.option_sets
    if patch.fields.get("Group", "").startswith(GROUPS)
]


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    """Returns a cache of the compiler for all tests: what the scripts compile is much the same."""
    return tmp_path_factory.mktemp("compiled-gradients")


@pytest.fixture
def check(tmp_path, cache):
    """Returns the verdict on a script's gradients; uncompiled ones are checked in a fork."""

    def check(script: Path, *options, layers=2, reference=FAST, dropout=True) -> Verdict:
        driver_options = ["--directions", 1, "--layers", layers]
        if reference:
            driver_options += ["--reference", reference]
        if not dropout:
            driver_options.append("--no-dropout")
        results = tmp_path / "results"
        script_options = ["--device", "cpu", "--results-dir", results, *options]
        own_cache = {} if "--no-compile" in options else dict(TORCHINDUCTOR_CACHE_DIR=str(cache))
        done = run_python(
            DRIVER,
            *driver_options,
            script,
            *script_options,
            env=environment(**own_cache),
            timeout=590,
        )
        assert done.returncode == 0, done.stderr
        return verdict_of(read_record(next(results.glob("*.jsonl"))))

    return check


@pytest.fixture
def edited(tmp_path):
    """Returns 01 with something else in the place of each text, which is there once."""

    def edited(*pairs: tuple[str, str]) -> Path:
        text = FAST.read_text()
        for old, new in pairs:
            assert text.count(old) == 1
            text = text.replace(old, new)
        path = tmp_path / "edited.py"
        path.write_text(text)
        return path

    return edited


@pytest.fixture
def variant(tmp_path):
    """Returns 01 with variants."""

    def variant(*names: str) -> Path:
        path = tmp_path / "variant.py"
        path.write_bytes(stack.compose([*names]))
        return path

    return variant


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
            "torch.cat(x_gradients), head_gradient_VC)",
            "torch.cat([0 * x_gradients[0], *x_gradients[1:]]), head_gradient_VC)",
        )
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_caught_without_a_reference(edited, check, name):
    """Numeric derivatives alone show it; the loss is right in all of them."""
    script = edited(*PLANTS[name])
    verdict = check(script, *UNCOMPILED, layers=1, reference=None)
    assert verdict.wrong and "dropout" in verdict.wrong[0]


@pytest.mark.slow
def test_a_small_fault_is_caught_with_a_reference(edited, check):
    """LayerNorm's gradient is off by a thousandth."""
    script = edited(
        (BLOCK, SCALED),
        (
            "self.attention(self.norm1(x_BTC))",
            "self.attention(Scaled.apply(self.norm1(x_BTC), 1.001))",
        ),
    )
    verdict = check(script, *UNCOMPILED, dropout=False)
    assert verdict.wrong and "uncompiled to reference" in verdict.wrong[0]


@pytest.mark.slow
def test_a_memory_budget_with_dropout_is_caught(edited, check):
    """pytorch#190758, as the variant would train if it didn't refuse: right without dropout."""
    script = edited(
        (
            "import torch.nn as nn\n",
            "import torch.nn as nn\n"
            "import torch._functorch.config\n"
            "torch._functorch.config.activation_memory_budget = 0.5\n",
        ),
    )
    verdict = check(script, *FLOAT32)
    assert verdict.wrong and all(reason.startswith("dropout") for reason in verdict.wrong)


@pytest.mark.slow
def test_a_nested_region_is_caught(edited, check):
    """A region on the block of three layers, whose loss is right: see docs/upstream.md."""
    script = edited(
        (
            "    def forward(self, x_BTC):\n        x_BTC = x_BTC +",
            "    @torch.compiler.nested_compile_region\n"
            "    def forward(self, x_BTC):\n        x_BTC = x_BTC +",
        ),
    )
    verdict = check(script, *FLOAT32, layers=3, dropout=False)
    assert any("norm" in reason for reason in verdict.wrong)


# ---- Programs that are right


def test_01_has_the_gradients_of_00(check):
    verdict = check(FAST, *UNCOMPILED, reference=PLAIN, dropout=False)
    assert verdict.cells.keys() == {"uncompiled to reference"} and not verdict.wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "reference"),
    [
        (None, [], FAST),
        ("memory-checkpoint", [], FAST),
        ("attention-backend", ["--attention", "math"], FAST),
        ("head-sampled", [], None),
        ("dropout-hash", [], FAST),
    ],
)
def test_what_is_compiled_is_right(variant, check, name, options, reference):
    script = variant(name) if name else FAST
    verdict = check(script, *FLOAT32, *options, reference=reference)
    assert {"compiled to uncompiled", "dropout"} <= verdict.cells.keys()
    assert not verdict.wrong and "refused" not in verdict.cells["dropout"]


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [[], ["--no-compile"]], ids=["compiled", "uncompiled"])
def test_checkpoints_make_the_masks_of_a_hash_again(variant, check, compiled):
    verdict = check(variant("dropout-hash", "memory-checkpoint"), *FLOAT32, *compiled)
    assert "dropout" in verdict.cells and not verdict.wrong


REFUSES = "if config.compile and config.dropout and config.memory_budget < 1:"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "options", "is_wrong"),
    [
        (0.5, ["--no-attention-dropout"], False),
        (0.2, ["--no-attention-dropout"], False),
        (0.0, ["--no-attention-dropout"], False),
        (0.2, [], True),
    ],
)
def test_a_memory_budget_makes_the_masks_of_a_hash_again(variant, check, budget, options, is_wrong):
    """It makes the same ones at every budget. But attention draws its own masks anew, so that
    memory-budget refuses dropout with this variant, too; that check is taken out here."""
    script = variant("dropout-hash", "memory-budget", "attention-backend")
    text = script.read_text()
    assert text.count(REFUSES) == 1
    script.write_text(text.replace(REFUSES, "if False:"))
    attention = "--attention", "math", *options
    verdict = check(
        script, *FLOAT32, *attention, "--memory-budget", budget, layers=1, reference=None
    )
    assert bool(verdict.wrong) is is_wrong
    assert all(reason.startswith("dropout") for reason in verdict.wrong)


@pytest.mark.slow
def test_what_refuses_dropout_is_right_without(variant, check):
    options = "--memory-budget", 0.5, "--dropout", 0
    verdict = check(variant("memory-budget"), *FLOAT32, *options)
    assert "compiled to uncompiled" in verdict.cells and not verdict.wrong
    assert "refused" in verdict.cells["dropout"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("patch", "options", "needs"),
    VARIANTS,
    ids=lambda value: value.name if isinstance(value, stack.Patch) else " ".join(value) or None,
)
def test_what_touches_gradients_is_right(variant, check, patch, options, needs):
    """Of one layer where a variant's change is within a layer, or behind all of them."""
    if patch.name != "precision-fp16":  # a few products it can do without a GPU
        skip_without(needs)
    dtype = [] if patch.fields["Group"] == "precision" else FLOAT32
    changes = patch.fields["Loss"].startswith("changes")
    numeric = patch.fields["Group"] != "precision" and "Unchecked" not in patch.fields
    layers = 1 if patch.fields["Group"] in ("attention", "head", "precision") else 2
    if changes and not numeric:
        pytest.skip("only the compiled script has something to be compared to")
    verdict = check(
        variant(patch.name),
        *dtype,
        *options,
        "--no-compile",
        layers=layers,
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


def test_what_cant_be_checked_is_said():
    """The variant's header says so, or the loss is too coarse in its type."""
    assert "experts" in unchecked_dropout(Run("", "", script="model-mixture"))
    assert has_own_type(Run("", "", script="precision-autocast"))
    assert unchecked_dropout(Run("", "", script="01", options=("--dtype", "bfloat16")))
    assert not unchecked_dropout(Run("", "", script="memory-checkpoint"))


# ---- The driver


@pytest.mark.parametrize("scratch", [".", "/scratch"])
def test_each_run_has_a_folder_of_its_own(monkeypatch, tmp_path, scratch):
    """It takes the place of the folder behind --results-dir alone."""
    driver, commands = load(DRIVER), []
    run = SimpleNamespace(train=commands.append, derivatives={})
    monkeypatch.setattr(driver, "TrainingRun", lambda *_: run)
    monkeypatch.setattr(driver, "load_script", lambda *_: None)
    args = SimpleNamespace(
        script="x.py",
        device="cpu",
        layers=None,
        width=None,
        results_dir=Path(scratch, "results"),
        options=["--checkpoint-dir", scratch, "--weight-decay", "0.1", "--data", "/scratch.d"],
    )
    check = driver.ScriptCheck(args, tmp_path)
    for _ in range(2):
        check.run(given=None)
    first, second = commands
    assert first[:2] == ["--checkpoint-dir", str(tmp_path / "1")] and scratch not in second
    assert first[2:6] == second[2:6] == args.options[2:]
    assert first[1] != second[1] and first[-1] != second[-1]


def test_a_run_leaves_the_scripts_clock_as_it_was():
    """The next run of the same script has a clock of its own."""
    driver, model = load(DRIVER), torch.nn.Linear(2, 2)
    steps = []

    def train(model, data, config, run):
        for _ in range(3):
            steps.append(script.now())

    script = SimpleNamespace(
        train=train, compute_loss=None, explain=None, now=lambda: len(steps), __file__="x.py"
    )
    own_now = script.now
    run = driver.TrainingRun(script, {}, None)
    run.train_from_weights(model, None, SimpleNamespace(), None)
    assert steps == [0, 1, 2] and run.steps == 0 and script.now is own_now


def test_the_worst_of_ranks():
    """A tensor's comparison is that of the rank where it is farthest off; NaN is farther still."""
    driver = load(DRIVER)
    nan = float("nan")
    ranks = (
        dict(tensors=dict(a=[0.1, 1, 1], b=[nan, 1, 1]), directions=dict(c=[[1.0, 0.1, 1.5]])),
        dict(tensors=dict(a=[0.3, 1, 1], b=[0.9, 1, 1]), directions=dict(c=[[1.0, 0.1, nan]])),
    )
    for order in (ranks, ranks[::-1]):
        worst = driver.worst_of(order)
        assert worst["tensors"]["a"] == [0.3, 1, 1]
        assert worst["tensors"]["b"] is ranks[0]["tensors"]["b"]
        assert worst["directions"]["c"] is ranks[1]["directions"]["c"]


# ---- The study


def test_a_study_checks_every_script_and_variant(tmp_path):
    (plan,) = Gradients().plans(setup_of(tmp_path))
    grouped = {patch.name for patch in stack.load_variants() if "Group" in patch.fields}
    assert {"00", "01", "02"} | grouped == {str(run.script) for run in plan.runs}


def test_a_study_checks_02_with_one_rank_and_with_two(tmp_path):
    """torchrun starts the driver with so many."""
    study, setup = Gradients(), setup_of(tmp_path)
    (plan,) = study.plans(setup)
    jobs = [Job(run, 1, 0) for run in plan.runs if run.script == "02"]
    commands = [command_of(study, job, setup, Length((), 0), tmp_path) for job in jobs]
    ranks = [command[command.index(DRIVER) - 1] for command in commands]
    assert ranks == ["--nproc_per_node=1", "--nproc_per_node=2"]


def test_a_study_refuses_unknown_names(tmp_path):
    with pytest.raises(UserError, match="'nothing'") as refusal:
        next(Gradients().plans(setup_of(tmp_path, names="01,nothing")))
    assert refusal.value.code == 2


def test_names_of_a_study_may_have_spaces(tmp_path):
    """They may in the other studies, too."""
    first, second = (
        next(Gradients().plans(setup_of(tmp_path, names=names))) for names in ("00,01", "00, 01")
    )
    assert [run.name for run in first.runs] == [run.name for run in second.runs]


def test_a_compiled_method_is_a_method(monkeypatch):
    """What takes the place of torch.compile binds to the object that it is called of."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    keeper = Keeper(Order())
    compile = hooks.Compiler(keeper).compile

    class Model:
        @compile
        def twice(self, x):
            return 2 * x

        @compile(dynamic=False)
        def half(self, x):
            return x / 2

    assert (Model().twice(3), Model().half(x=4)) == (6, 2) and keeper.facts.compiles == 2
