"""stack.py compose: a script of one's own from 01 or 02 and variants."""

from itertools import combinations
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import (
    ROOT,
    SMALL,
    TINY,
    call_main,
    in_float32,
    load,
    read_record,
    run_python,
    without_bfloat16,
    write_tokens,
)

from bench.catalogue import Scripts
from bench.common import UserError
from patches import stack

VARIANTS = {patch.name: patch for patch in stack.load_variants()}
PAIRS = [pair for pair in combinations(VARIANTS, 2)
         if VARIANTS[pair[0]].fields.get("Slot") != VARIANTS[pair[1]].fields.get("Slot")]
# Reviewed: these change the same lines, and would not be right if they were joined.
CONFLICTS = {
    ("compile-mode", "embedding-eager"), ("compile-switch", "embedding-eager"),
    ("precision-fp16", "step-accumulation"),  # every piece's gradients have to be scaled
    *(("profile", f"schedule-{name}") for name in ("cosine", "scaled", "wsd")),
    ("checkpoint-resume", "profile"),
    *((f"ddp-{name}", f"parallel-{other}") for name in ("compression", "options")
      for other in ("deepspeed", "sharded")),
    ("attention-backend", "parallel-sharded"),
    ("loop-accelerate", "precision-fp16"), ("loop-accelerate", "step-accumulation"),
    *((f"optimizer-{name}", f"parallel-{other}")
      for name in ("adafactor", "adamw-8bit", "foreach", "muon") for other in ("muon", "zero1")),
    ("parallel-deepspeed", "precision-fp16"), ("parallel-deepspeed", "step-accumulation"),
    ("parallel-sharded", "precision-float8"),
    ("memory-offload", "precision-autocast"), ("memory-offload", "precision-fp16"),
    # Whose head knows neither float8 nor a soft cap; nor does either of these know the other.
    *((f"head-{name}", other) for name in ("cce", "liger", "pytorch")
      for other in ("model-mixture", "model-skips", "precision-float8")),
    ("model-skips", "precision-float8"),
    *(("compile-blocks", name) for name in (
        "embedding-eager", "head-cce", "head-liger", "head-pytorch", "model-mixture",
        "optimizer-in-backward")),
    ("loop-accelerate", "optimizer-in-backward"), ("optimizer-in-backward", "precision-fp16"),
    ("optimizer-in-backward", "step-accumulation"),
    *((name, "optimizer-in-backward") for name in (
        "compile-mode", "compile-switch", "embedding-eager")),
}
EXCLUDED = {  # as their headers say
    *(("model-mixture", f"precision-{name}") for name in ("autocast", "float8", "fp16")),
    ("parallel-deepspeed", "precision-float8"), ("checkpoint-resume", "model-tied-head"),
    ("checkpoint-resume", "optimizer-in-backward"), ("checkpoint-resume", "init-gpt2"),
    *(("init-gpt2", f"model-{name}") for name in ("mixture", "modern", "skips", "tied-head")),
    *(("optimizer-in-backward", f"schedule-{name}") for name in ("cosine", "scaled", "wsd")),
    ("optimizer-adafactor", "parallel-deepspeed"), ("optimizer-muon", "parallel-deepspeed"),
    ("parallel-sharded", "precision-autocast"), ("parallel-sharded", "precision-fp16"),
    # More state than weights and optimizer have.
    *(("checkpoint-resume", name) for name in (
        "data-on-device", "loop-accelerate", "parallel-deepspeed", "parallel-muon",
        "parallel-zero1", "precision-fp16", "precision-stochastic", "schedule-cosine",
        "schedule-wsd")),
    # Where there is no step of the whole optimizer from zero.
    *((name, "precision-stochastic") for name in (
        "loop-accelerate", "optimizer-adafactor", "optimizer-in-backward", "parallel-deepspeed",
        "parallel-sharded")),
}
CONFLICTS_WITH_02 = {
    "compile-blocks", "compile-mode", "compile-switch", "data-on-device", "embedding-eager",
    "loop-accelerate", "optimizer-in-backward",
}


@pytest.fixture(scope="module", autouse=True)
def scripts_are_made_once():
    scripts, variants = stack.rebuild_all(), stack.load_variants()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stack, "rebuild_all", lambda root=None: scripts)
        patch.setattr(stack, "load_variants", lambda root=None: variants)
        yield


@pytest.mark.slow
def test_all_pairs_merge_but_those_that_were_reviewed():
    found = set()
    for pair in PAIRS:
        on_02 = any(VARIANTS[name].base == Path(stack.DDP).stem for name in pair)
        if on_02 and CONFLICTS_WITH_02 & {*pair}:
            continue
        base = stack.DDP if on_02 else stack.LAST
        try:
            text = stack.compose(list(pair))
            assert text.startswith(f"# {base} with {pair[0]}, {pair[1]}; ".encode())
        except stack.Conflict:
            found.add(pair)
        except stack.StackError as error:
            assert "exclude each other" in str(error) and pair in EXCLUDED
    assert found == CONFLICTS, (f"to be reviewed and added to CONFLICTS: {found - CONFLICTS};"
                                f" to be removed: {CONFLICTS - found}")


def test_alone_it_is_the_variant():
    for name, patch in VARIANTS.items():
        note, _, text = stack.compose([name]).partition(b"\n")
        assert text == stack.rebuild_all(ROOT)[name] and patch.name.encode() in note


def test_variants_of_01_on_02():
    found = set()
    for name in (name for name, patch in VARIANTS.items() if patch.base != "02_opt_multi_gpu_ddp"):
        try:
            text = stack.compose([name], stack.DDP)
            assert b"import torch.distributed as dist" in text
        except stack.Conflict:
            found.add(name)
    assert found == CONFLICTS_WITH_02


@pytest.mark.parametrize(("base", "names", "options"), [
    ("01", ["step-accumulation", "memory-checkpoint", "optimizer-muon", "precision-autocast",
            "compile-mode"], ["--micro-batches", "2"]),
    ("01", ["schedule-cosine", "precision-autocast", "data-on-device"], []),
    ("01", ["optimizer-muon", "compile-blocks", "model-modern", "model-skips", "schedule-wsd",
            "gc-freeze", "memory-budget"], ["--polar-express", "--normuon", "--cautious-decay"]),
    ("01", ["optimizer-muon", "model-skips", "precision-stochastic", "memory-checkpoint"],
     ["--dtype", "bfloat16"]),
    ("02", ["model-modern", "model-skips", "optimizer-muon", "precision-autocast",
            "schedule-wsd"], []),
    ("02", ["step-accumulation", "memory-selective", "schedule-scaled"], ["--micro-batches", "2"]),
    ("02", ["parallel-sharded", "optimizer-foreach", "memory-checkpoint"], []),
    ("02", ["parallel-muon", "model-skips", "schedule-wsd"], []),
])
def test_a_composed_script_trains(tmp_path, base, names, options):
    own = tmp_path / "own.py"
    result = run_python(ROOT / "patches" / "stack.py", "compose", *names, "--base", base, "--out",
                        own)
    assert result.returncode == 0, result.stderr
    data = write_tokens(tmp_path / "data")
    with mock.patch.dict((script := load(own)).MODELS["cpu-demo"], SMALL), without_bfloat16():
        result = call_main(script, *TINY, "--device", "cpu", "--data", data, "--results-dir",
                           tmp_path / "results", "--max-steps", 3, "--no-compile",
                           *in_float32(script), *options)
    assert result.returncode == 0, result.stderr
    start, *_, end = read_record(tmp_path / "results")
    assert (start["stage"], end["status"]) == ("own", "complete")
    # Nothing is overwritten.
    result = run_python(ROOT / "patches" / "stack.py", "compose", *names, "--base", base, "--out",
                        own)
    assert result.returncode == 1 and "exists: nothing is overwritten" in result.stderr


@pytest.mark.parametrize(("names", "options"), [
    (["optimizer-muon", "data-workers", "compile-blocks"],
     {"--polar-express", "--normuon", "--cautious-decay", "--workers"}),
    (["ddp-options"], {"--bucket-mb", "--static-graph", "--compile-first"}),
    (["optimizer-adafactor"], set())])  # other defaults of options that there are
def test_the_options_that_variants_add_are_told(tmp_path, capsys, names, options):
    own = tmp_path / "own.py"
    assert stack.main(["compose", *names, "--out", str(own)]) == 0
    written, *told = capsys.readouterr().out.splitlines()
    words = " ".join(told).replace("see --help", "").split()
    assert Path(written).resolve() == own
    assert {word.strip(",") for word in words if word.startswith("--")} == options


def test_a_typo_is_told_before_the_file_that_exists(tmp_path, capsys):
    own = tmp_path / "own.py"
    own.write_text("kept\n")
    assert stack.main(["compose", "no-such", "--out", str(own)]) == 1
    assert "no variant 'no-such'" in capsys.readouterr().err and own.read_text() == "kept\n"


@pytest.mark.parametrize(("names", "says"), [
    (["optimizer-muon", "optimizer-adafactor"], "adafactor and optimizer-muon exclude each other"),
    (["precision-fp16", "no-such"],
     "no variant 'no-such'; `python patches/stack.py list` shows their names"),
    (["parallel-deepspeed", "optimizer-muon"], "parallel-deepspeed and optimizer-muon exclude"),
    (["model-mixture", "precision-autocast"], "model-mixture and precision-autocast exclude"),
    (["precision-fp16", "step-accumulation"], "step-accumulation conflicts with the others at"),
])
def test_refused(names, says):
    with pytest.raises(stack.StackError, match=says):
        stack.compose(names)


def test_lines_that_both_sides_add_are_joined():
    """Among imports and fields; a field that both change, and any other place, is a conflict."""
    base = b"import a\nimport b\nclass Config:\n    x: int = 1\ndef f():\n    return 1\n"
    ours = base.replace(b"import b", b"import c").replace(b"= 1\n", b"= 1\n    y: int = 2\n")
    theirs = base.replace(b"import b\n", b"import b\nimport d\n").replace(
        b"= 1\n", b"= 1\n    z: int = 3\n")
    joined = base.replace(b"import b", b"import c\nimport d").replace(
        b"= 1\n", b"= 1\n    y: int = 2\n    z: int = 3\n")
    assert stack.merge(base, theirs, ours, "it", join=True) == joined
    for line, place in ((b"    x: int = 1", "class Config"), (b"    return 1", "def f")):
        with pytest.raises(stack.Conflict, match=f"it conflicts with the others at .*{place}"):
            stack.merge(base, base.replace(line, line + b"2"), base.replace(line, line + b"3"),
                        "it", join=True)
    with pytest.raises(stack.Conflict, match="it conflicts with the edit at line 2, the imports"):
        stack.merge(base, theirs, ours, "it")


def test_contributings_clipping_is_of_all_gradients_with_muon_too(tmp_path):
    """Its example, joined with a variant whose optimizer has several groups."""
    example = (ROOT / "CONTRIBUTING.md").read_text().split("     loss.backward()\n")[1]
    added = "".join(line[1:] + "\n" for line in example.splitlines() if line.startswith("+    "))
    assert added.count("\n") == 2
    base, muon = (ROOT / stack.LAST).read_bytes(), stack.rebuild_all(ROOT)["optimizer-muon"]
    place = b"    loss.backward()\n"
    edited = base.replace(place, place + added.encode())
    own = tmp_path / "own.py"
    own.write_bytes(stack.merge(base, edited, muon, "it", join=True))
    script = load(own)
    config = script.Config(**SMALL, context_length=16, vocab_size=300, dropout=0.0, batch_size=2,
                           device=torch.device("cpu"))
    model = script.GPTModel(config)
    optimizer = script.make_optimizer(model, config)
    assert len(optimizer.param_groups) > 1
    ids = torch.randint(300, (2, 16))
    with without_bfloat16():
        script.backward_and_update(1000 * script.compute_loss(model, ids, ids), optimizer)
    gradients = [weight.grad for weight in model.parameters()]
    assert torch.nn.utils.get_total_norm(gradients).item() == pytest.approx(1, rel=1e-3)


def test_a_run_of_several_variants():
    """Each part with the first of the options that it measures, or all with options of one's own;
    its effect on the loss is the larger one, and it is the script that `compose` writes."""
    scripts = Scripts()
    name = "data-workers+memory-checkpoint+optimizer-adafactor"
    base, *runs = scripts.variants(scripts.stage("01"), dict(gpus=0),
                                   names=f"{name}, {name} --workers 4")
    assert [run.options for run in runs] == [("--workers", "2"), ("--workers", "4")]
    assert [run.label for run in runs] == [f"{name} --workers 2", f"{name} --workers 4"]
    assert {(run.loss, run.compared_to, run.error) for run in runs} == {
        ("changes", base.name, None)}
    assert scripts.text(runs[0].script) == stack.compose(name.split("+"))
    assert scripts.find(name, dict(gpus=0)) == runs[0]
    assert scripts.find("00", dict(gpus=0)) == scripts.stage("00")
    assert scripts.find("head-liger+data-workers", dict(gpus=0)).error.startswith("needs ")
    for wrong, told in (("data-workers+none", "no variant 'none' of 01"),
                        ("optimizer-muon+optimizer-adafactor", "exclude each other")):
        with pytest.raises((UserError, stack.StackError), match=told):
            scripts.variants(scripts.stage("01"), dict(gpus=0), names=wrong)
