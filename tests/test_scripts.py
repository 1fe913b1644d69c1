"""bench/catalogue/: the catalogue of scripts, as runs, and the published figures."""

import pytest
from made_up import CPU, MACHINE, setup_of

from bench import catalogue as module
from bench.catalogue import Recipe, Scripts
from bench.common import ROOT
from bench.machine import lacking
from bench.report import explorer
from bench.studies.ladder import Ladder
from bench.studies.stages import Stages
from gpt_speed.common import UserError
from patches import stack

AMD = MACHINE | dict(cuda=None, capability="9.4")


@pytest.fixture(scope="module")
def scripts() -> Scripts:
    return Scripts()


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        (None, list(range(13))),
        ("0,5-8", [0, 5, 6, 7, 8]),
        (" 12, 3 - 3,12", [3, 12]),
        *((text, None) for text in ("", "13", "5-", "8-5", "0,x", "-1")),
    ],
)
def test_chosen_techniques(scripts, text, numbers):
    if numbers:
        assert scripts.select(text, list(range(13))) == numbers
        return
    with pytest.raises(UserError, match="--techniques") as error:
        scripts.select(text, list(range(13)))
    assert error.value.code == 2


def test_the_ladder(scripts):
    runs = scripts.ladder(gpus=2)
    assert [run.number for run in runs] == list(range(len(stack.load()) + 1))
    assert (runs[0].label, runs[0].published) == ("0 baseline", 12_525)
    assert (runs[5].label, runs[5].published) == ("5 bfloat16", 45_486)
    assert (runs[11].published, runs[11].expected) == (None, 142_156)  # as the one before it
    for run, text in zip(runs, stack.rebuild_all().values(), strict=False):
        assert scripts.text(run.script) == text
    two, four = runs[-1], scripts.ladder(gpus=4)[-1]
    assert (two.name, two.processes) == ("02_opt_multi_gpu_ddp", 2)
    assert two.torchrun
    assert (four.published, four.expected) == (419_259, 419_259)  # as the published ones


@pytest.mark.parametrize(
    ("name", "gpus", "label", "figures"),
    [
        ("00", 1, "00", (12_525, 12_525)),
        ("01", 1, "01", (142_156, 142_156)),
        ("02", 4, "02, 4 ranks", (419_259, 419_259)),
        ("02", 1, "02, 1 rank", (None, 419_259 / 4)),
    ],
)
def test_the_three_scripts(scripts, name, gpus, label, figures):
    run = scripts.stage(name, gpus)
    assert (run.name + ".py", run.label) == (module.STAGES[name], label)
    assert (run.published, run.expected) == figures and run.stage == name
    assert scripts.text(run.script) == (ROOT / module.STAGES[name]).read_bytes()


@pytest.mark.parametrize(
    ("variant", "stage", "processes"),
    [("step-accumulation --micro-batches 8", "01", 1), (" parallel-zero1+ddp-options", "02", 4)],
)
def test_what_a_variant_is_of(scripts, variant, stage, processes):
    base = scripts.base_of(variant, 4)
    assert (base.stage, base.processes) == (stage, processes)


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("01", Recipe(("01",))),
        ("02+precision-fp16", Recipe(("02", "precision-fp16"))),
        ("precision-autocast@05-bfloat16", Recipe(("precision-autocast",), "05-bfloat16")),
        ("a+b without 12-huge-pages", Recipe(("a", "b"), left_out="12-huge-pages")),
    ],
)
def test_a_name_is_a_recipe(name, recipe):
    assert Recipe.of(name) == recipe and recipe.name == name


def test_a_technique_left_out_or_a_variant_taken_back(scripts):
    """Leaving out the last technique of a script that ends with it is the script before."""
    *_, before, last, _ = [run.script for run in scripts.ladder()]
    assert scripts.text(f"{last} without {last}") == scripts.text(before)
    assert scripts.text(f"optimizer-muon@{last}") == scripts.text("optimizer-muon")


def test_variants(scripts):
    base = scripts.stage("01")

    def labels(names: list[str]) -> list[str]:
        runs = scripts.with_variants(base, MACHINE, names)
        assert {run.compared_to for run in runs[1:] if "--dropout" not in run.label} == {
            runs[0].name
        }
        assert {run.published for run in runs} == {None}
        return [run.label for run in runs]

    assert labels(["step-accumulation", " optimizer-muon"]) == [
        "01",
        "step-accumulation --micro-batches 4",
        "optimizer-muon",
    ]
    group, every = (labels(scripts.variant_names(base, name)) for name in ("loop", None))
    assert group == ["01", "loop-accelerate --micro-batches 1", "loop-accelerate --micro-batches 4"]
    assert set(group) < set(every)
    assert not any(
        name in label
        for label in every
        for name in (module.COMPILER, module.CHECKPOINTS, "parallel-zero1")
    )
    (run,) = scripts.variants(base, CPU, ["step-accumulation"])
    assert (run.name, run.options, run.script, run.stage) == (
        "variant-step-accumulation-micro-batches-4",
        ("--micro-batches", "4"),
        "step-accumulation",
        None,
    )
    for names in ([""], ["muon"], ["optimizer-muon", ""], ["parallel-zero1"]):  # of 02
        with pytest.raises(UserError, match="no variant .* of 01; there are .*optimizer-muon"):
            labels(names)


def test_a_variant_without_dropout_is_compared_to_its_base_without(scripts):
    base, plain, *variants = scripts.with_variants(
        scripts.stage("01"),
        MACHINE,
        names=[
            "memory-budget",
            "memory-budget --memory-budget 0.5 --dropout=0",
            "gc-freeze",
            "attention-backend --attention cudnn --dropout 0.125",
        ],
    )
    assert (plain.script, plain.options, plain.label) == (
        "01",
        ("--dropout", "0"),
        "01 --dropout 0",
    )
    assert [run.compared_to for run in [plain, *variants]] == [
        base.name,
        *3 * [plain.name],
        base.name,
        base.name,
    ]
    assert scripts.find("memory-budget", MACHINE) == variants[0]
    assert "01 --dropout 0" not in explorer.choices()


@pytest.mark.parametrize(("gpus", "error"), [(1, "needs two or more GPUs"), (4, None)])
def test_variants_of_02(scripts, gpus, error):
    base = scripts.stage("02", gpus)
    sharded = scripts.variant_names(base, "parallel")
    runs = scripts.with_variants(base, MACHINE | dict(gpus=gpus), sharded)
    assert {run.processes for run in runs} == {gpus} and runs[0].error == error
    assert error is None or {run.error for run in runs} == {error}


@pytest.mark.parametrize(
    ("needs", "machine", "says"),
    [
        ("an NVIDIA GPU", MACHINE, None),
        ("package json, an NVIDIA GPU", CPU, "needs an NVIDIA GPU"),
        ("package no_such", CPU, "needs package no_such"),
        ("compute capability 8.9", CPU, None),  # where variants are emulated
        ("compute capability 8.0", MACHINE, None),
        ("compute capability 8.9", MACHINE, "needs compute capability 8.9"),
        # An AMD GPU isn't an NVIDIA one, and its capability is counted in another way.
        ("an NVIDIA GPU", AMD, "needs an NVIDIA GPU"),
        ("compute capability 8.9", AMD, "needs compute capability 8.9"),
    ],
)
def test_lacking(needs, machine, says):
    assert lacking(needs, machine) == says


def test_a_need_that_no_rule_knows():
    """It isn't taken for one that every machine has; each of the variants' own is known."""
    with pytest.raises(UserError, match="no rule .* 'an NVIDA GPU'"):
        lacking("an NVIDA GPU", MACHINE)
    for patch in stack.load_variants():
        for _, needs in patch.option_sets:
            lacking(needs, CPU)


def test_the_three_scripts_may_be_edited(tmp_path, monkeypatch):
    """Only what is made from patches needs scripts that fit them."""

    def rebuild_all():
        raise stack.StackError("00_orig.py isn't what the patches make")

    monkeypatch.setattr(stack, "rebuild_all", rebuild_all)
    setup = setup_of(tmp_path)
    for run in next(Stages().plans(setup)).runs:
        assert setup.scripts.text(run.script)
    with pytest.raises(stack.StackError):
        setup.scripts.text(next(Ladder().plans(setup)).runs[0].script)
