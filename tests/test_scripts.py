"""bench/catalogue.py: the catalogue of scripts, as runs, and the published figures."""

import json

import pytest
from made_up import CPU, MACHINE, setup_of

from bench import catalogue as scripts
from bench.catalogue import Scripts, lacking, published
from bench.common import ROOT, UserError
from bench.studies.ladder import Ladder
from bench.studies.stages import Stages
from patches import stack


@pytest.fixture(scope="module")
def catalogue() -> Scripts:
    return Scripts()


@pytest.mark.parametrize(("text", "numbers"), [
    (None, list(range(13))), ("0,5-8", [0, 5, 6, 7, 8]), (" 12, 3 - 3,12", [3, 12])])
def test_chosen_rungs(catalogue, text, numbers):
    assert catalogue.select(text, list(range(13))) == numbers


@pytest.mark.parametrize("text", ["", "13", "5-", "8-5", "0,x", "-1"])
def test_bad_rungs(catalogue, text):
    with pytest.raises(UserError, match="--techniques") as error:
        catalogue.select(text, list(range(13)))
    assert error.value.code == 2


def test_rungs(catalogue):
    rungs = catalogue.ladder(gpus=2)
    assert [run.number for run in rungs] == list(range(len(stack.load()) + 1))
    assert (rungs[0].label, rungs[0].published, rungs[0].loss) == ("0 baseline", 12_525, None)
    assert (rungs[5].label, rungs[5].published) == ("5 bfloat16", 45_486)
    assert (rungs[11].label, rungs[11].published) == ("11 merged qkv", None)
    assert rungs[11].expected == 142_156  # of the nearest before it
    for run, text in zip(rungs, stack.rebuild_all().values(), strict=False):
        assert catalogue.text(run.script) == text
        assert run.technique and run.technique != run.name
    two, four = rungs[-1], catalogue.ladder(gpus=4)[-1]
    assert (two.name, two.label, two.processes, two.torchrun) == (
        "02_opt_multi_gpu_ddp", f"{len(stack.load())} DDP", 2, True)
    assert (two.published, two.expected) == (None, 419_259 / 2)
    assert (four.published, four.expected) == (419_259, 419_259)  # on as many as the published one


@pytest.mark.parametrize(("name", "gpus", "label", "figures"), [
    ("00", 1, "00", (12_525, 12_525)), ("01", 1, "01", (142_156, 142_156)),
    ("02", 4, "02, 4 ranks", (419_259, 419_259)), ("02", 1, "02, 1 rank", (None, 419_259 / 4))])
def test_stage(catalogue, name, gpus, label, figures):
    run = catalogue.stage(name, gpus)
    assert (run.name + ".py", run.label) == (scripts.STAGES[name], label)
    assert (run.published, run.expected) == figures and run.stage == name
    assert catalogue.text(run.script) == (ROOT / scripts.STAGES[name]).read_bytes()


def test_variants(catalogue):
    base = catalogue.stage("01")

    def labels(machine=MACHINE, **chosen) -> list[str]:
        runs = catalogue.variants(base, machine, **chosen)
        assert {run.compared_to for run in runs[1:]} == {runs[0].name}
        assert {run.published for run in runs} == {None}
        return [run.label for run in runs]

    assert labels(names="step-accumulation, optimizer-muon") == [
        "01", "step-accumulation --micro-batches 4", "optimizer-muon"]
    group = labels(group="loop")
    assert group == ["01", "loop-accelerate --micro-batches 1", "loop-accelerate --micro-batches 4"]
    every = labels()
    assert set(group) < set(every) and "parallel-zero1" not in every
    assert not any(name in label for label in every
                   for name in (scripts.COMPILER, scripts.CHECKPOINTS))
    _, run = catalogue.variants(base, CPU, names="step-accumulation")
    assert (run.name, run.options, run.script, run.stage) == (
        "variant-step-accumulation-micro-batches-4", ("--micro-batches", "4"),
        "step-accumulation", None)
    assert catalogue.text(run.script) == catalogue.stages["step-accumulation"]
    for names in ("", "muon", "optimizer-muon,", "parallel-zero1"):  # the last one is 02's
        with pytest.raises(UserError, match="no variant .* of 01; there are .*optimizer-muon"):
            labels(names=names)


def test_variants_of_02(catalogue):
    assert [run.processes for run in catalogue.variants_of_02(CPU, "parallel")][:1] == [2]
    one, four = (catalogue.variants_of_02(MACHINE | dict(gpus=gpus), "parallel") for gpus in (1, 4))
    assert {run.error for run in one} == {"needs two or more GPUs"}
    assert {run.processes for run in four} == {4} and four[0].error is None


@pytest.mark.parametrize(("needs", "machine", "says"), [
    ("", CPU, None), ("an NVIDIA GPU", MACHINE, None),
    ("package json, an NVIDIA GPU", CPU, "needs an NVIDIA GPU"),
    ("package no_such", CPU, "needs the package no_such: pip install no_such"),
    ("compute capability 8.9", CPU, None),  # where variants are emulated
    ("compute capability 8.0", MACHINE, None), ("compute capability 8.9", MACHINE,
                                                "needs a GPU of compute capability 8.9")])
def test_lacking(needs, machine, says):
    assert lacking(needs, machine) == says


def test_stages_may_be_edited(tmp_path, monkeypatch):
    """Only what is made from patches needs scripts that fit them."""
    def rebuild_all():
        raise stack.StackError("00_orig.py isn't what the patches make")

    monkeypatch.setattr(stack, "rebuild_all", rebuild_all)
    setup = setup_of(tmp_path)
    for run in next(Stages().plans(setup)).runs:
        assert setup.scripts.text(run.script)
    with pytest.raises(stack.StackError):
        setup.scripts.text(next(Ladder().plans(setup)).runs[0].script)


@pytest.mark.parametrize("text", [
    None, "{", "[]", '{"gpu": "A100"}', '{"baseline": {"tok_per_sec": "fast"}}',
    json.dumps(json.loads(scripts.PUBLISHED.read_text()) | dict(context_length="long"))])
def test_published_figures_missing_or_damaged(tmp_path, monkeypatch, catalogue, text):
    monkeypatch.setattr(scripts, "PUBLISHED", tmp_path / "published.json")
    if text is not None:
        scripts.PUBLISHED.write_text(text)
    for read in (published, catalogue.ladder):
        with pytest.raises(UserError, match="published.json can't be read"):
            read()
