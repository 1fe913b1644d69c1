"""patches/variants: each one trains, and where it says so, as its base does."""

import pytest
import torch
from conftest import ROOT, TINY, call_main, load, read_record, write_tokens
from test_model import CPU, largest_difference, losses_of, model_of, one_rank, windows_of

from bench import plans
from patches import stack

VARIANTS = {patch.name: patch for patch in stack.load_variants() if "Slot" in patch.fields}
ROWS = [pytest.param(name, options, needs, id=" ".join([name, *options]))
        for name, patch in VARIANTS.items() for options, needs in patch.option_sets]
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
            path.write_bytes(stack.script_of(name))
            loaded[name] = load(path)
        return loaded[name]

    return script


def skip_without(needs: str) -> None:
    lacking = plans.lacking(needs, dict(gpus=0))
    if lacking:
        pytest.skip(lacking)


@pytest.mark.parametrize(("name", "options", "needs"), ROWS)
def test_it_trains(scripts, tokens, tmp_path, name, options, needs):
    patch = VARIANTS[name]
    skip_without(needs)
    eager = ("allocator", "data", "optimizer", "schedule", "step")  # leave the graph as it is
    compiled = "--no-compile" if patch.fields["Slot"] in eager else "--compile"
    result = call_main(scripts(name), *TINY, "--batch-size", 4, "--device", "cpu", "--data", tokens,
                       "--results-dir", tmp_path, "--max-steps", 3, compiled, *options)
    assert result.returncode == 0, result.stderr
    start, *_, end = read_record(tmp_path)
    assert (start["stage"], end["status"]) == (f"variant-{name}", "complete")


@pytest.mark.parametrize("name", [name for name, patch in VARIANTS.items()
                                  if patch.fields["Loss"] == "unchanged"])
def test_unchanged_is_unchanged(scripts, stages, tokens, name):
    """Same weights, same batches, float32: the losses of its base."""
    patch, losses = VARIANTS[name], []
    skip_without(patch.fields.get("Needs", ""))
    for script in (stages[patch.base], scripts(name)):
        with one_rank(script):
            losses.append(losses_of(script, *model_of(script, **STEPS), windows_of(script, tokens)))
    assert len(losses[0]) == 6 and losses[0][-1][2] < losses[0][0][2]
    assert largest_difference(*losses) < 1e-5


def test_the_head_in_chunks_needs_no_whole_chunks(scripts):
    """The loss and its gradients, for pieces of unequal sizes."""
    script = scripts("head-chunked")
    x_BT, y_BT = torch.randint(256, (2, 3, 7), device=CPU)
    results = []
    for chunks in (1, 4):
        model, _ = model_of(script, head_chunks=chunks)
        loss = model(x_BT, y_BT)
        results.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
    torch.testing.assert_close(*results)


def test_plan(tmp_path, monkeypatch):
    monkeypatch.setattr(plans, "BUILD", tmp_path)
    machine = dict(device="cpu", gpus=0)
    plan = plans.variants(machine)
    base, *runs = plan.runs
    assert base.name == "01_opt_single_gpu" and base.script.read_bytes() == (
        ROOT / stack.LAST).read_bytes()
    assert len(runs) == len(ROWS) and len({run.name for run in runs}) == len(runs)
    assert {run.compared_to for run in runs} == {base.name}
    assert "profile" not in " ".join(run.name for run in runs)  # no technique, so never measured
    mode = plans.variants(machine, "compile-mode").runs[1]
    assert mode.name == "variant-compile-mode-compile-mode-max-autotune-no-cudagraphs"
    assert mode.options == ("--compile-mode", "max-autotune-no-cudagraphs")
    with pytest.raises(plans.UserError, match="no variant 'x'; there are allocator-keep, "):
        plans.variants(machine, "compile-mode,x")


def test_what_is_lacking():
    assert plans.lacking("", dict(gpus=0)) is None
    assert plans.lacking("package torch", dict(gpus=0)) is None
    assert plans.lacking("an NVIDIA GPU, package torch", dict(gpus=1)) is None
    assert plans.lacking("an NVIDIA GPU", dict(gpus=0)) == "needs an NVIDIA GPU"
    assert plans.lacking("package torch, package no_such", dict(gpus=1)).startswith(
        "needs the package no_such: pip install")
