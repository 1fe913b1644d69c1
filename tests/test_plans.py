"""bench/plans.py: what runs, and what each run is compared to."""

import json

import pytest
from made_up import CPU, MACHINE

from bench import plans
from patches import stack

PUBLISHED = {"01-causal-mask": (12_526, 26.2, 1), "05-bfloat16": (45_486, 13.8, 1),
             "10-batch-size": (142_156, 22.5, 1), "ddp": (419_259, 22.8, 4)}


@pytest.fixture(autouse=True)
def published(monkeypatch, tmp_path):
    """Published figures of some patches; scripts are written out to a folder of the test."""
    path = tmp_path / "published.json"
    path.write_text(json.dumps(dict(baseline=dict(tok_per_sec=12_525, reserved_gb=26.3))))
    monkeypatch.setattr(plans, "PUBLISHED", path)
    monkeypatch.setattr(plans, "BUILD", tmp_path / "build")
    load = stack.load

    def load_with_figures():
        patches = load()
        for patch in patches:
            patch.published = PUBLISHED.get(patch.name)
        return patches

    monkeypatch.setattr(stack, "load", load_with_figures)
    return path


def gpus(count: int) -> dict:
    return MACHINE | dict(gpus=count)


def test_parse_rungs():
    assert plans.parse_rungs(None, 3) == [0, 1, 2]
    assert plans.parse_rungs("0,5-8", 13) == [0, 5, 6, 7, 8]
    assert plans.parse_rungs(" 12, 3 - 3,12", 13) == [3, 12]
    for text in ("", "13", "5-", "8-5", "0,x", "0,5-13", "-1"):
        with pytest.raises(plans.UserError, match="--rungs"):
            plans.parse_rungs(text, 13)


def test_ladder():
    plan = plans.ladder(gpus(2))
    names = [run.name for run in plan.runs]
    assert [run.compared_to for run in plan.runs] == [None, *names[:-1]]
    assert plan.runs[0].published == 12_525
    assert plan.runs[5].label == "5 bfloat16" and plan.runs[5].published == 45_486
    assert plan.runs[6].label == "6 native layers" and plan.runs[6].published is None
    assert plan.runs[6].expected == 45_486  # of the nearest before it
    assert {run.loss for run in plan.runs[1:-1]} == {"unchanged", "rounding", "changes"}
    for run, text in zip(plan.runs, stack.rebuild(stack.load()), strict=True):
        assert run.script.read_bytes() == text
        assert run.technique and run.technique != run.name
    assert (plan.tokens, plan.seconds) == (393_216, 10)


def test_ladder_and_gpus():
    """02 needs two GPUs; its figure counts on as many as the published one."""
    assert not plans.ladder(gpus(1)).runs[-1].torchrun
    two, four = (plans.ladder(gpus(count)).runs[-1] for count in (2, 4))
    assert (two.name, two.processes, two.torchrun) == ("02_opt_multi_gpu_ddp", 2, True)
    assert (two.published, two.expected) == (None, 419_259 / 2)
    assert (four.published, four.expected) == (419_259, 419_259)


def test_some_rungs():
    plan = plans.ladder(CPU, "0,5-6", tokens=99)
    assert [(run.name, run.compared_to) for run in plan.runs] == [
        ("00_orig", None), ("05-bfloat16", "00_orig"), ("06-native-layers", "05-bfloat16"),
    ]
    assert (plan.tokens, plan.seconds) == (99, 0)


def test_leave_one_out(tmp_path):
    """The last technique leaves 01 as the stage before it; the first conflicts."""
    plan = plans.leave_one_out(gpus(2), "1,13")
    whole, first, last = plan.runs
    assert (whole.name, whole.published, whole.compared_to) == ("01_opt_single_gpu", None, None)
    assert whole.script.read_bytes() == (stack.ROOT / stack.LAST).read_bytes()
    assert first.error.startswith("conflict: ") and not first.script.exists()
    assert (last.name, last.label) == ("without-13-loss-in-graph", "without 13 loss in graph")
    assert (last.compared_to, last.without_technique) == ("01_opt_single_gpu", True)
    assert last.expected == whole.expected == 142_156
    assert last.script.read_bytes() == stack.rebuild(stack.load())[-3]
    assert not whole.without_technique and whole.processes == 1


@pytest.mark.parametrize(("count", "ranks"), [(0, 2), (1, 1), (4, 4)])
def test_stages(count, ranks):
    plan = plans.stages(gpus(count) if count else CPU)
    assert [run.script.name for run in plan.runs] == [stack.FIRST, stack.LAST, stack.DDP]
    assert [run.script.parent for run in plan.runs] == [stack.ROOT] * 3
    assert [run.compared_to for run in plan.runs] == [None, "00_orig", "01_opt_single_gpu"]
    assert [run.published for run in plan.runs[:2]] == [12_525, 142_156]
    assert (plan.runs[2].processes, plan.runs[2].torchrun) == (ranks, True)
    assert plan.runs[2].published == (419_259 if ranks == 4 else None)


def test_stages_may_be_edited(monkeypatch):
    """Only what is made from patches needs scripts that fit them."""
    def rebuild(patches):
        raise stack.StackError("00_orig.py isn't what the patches make")

    monkeypatch.setattr(stack, "rebuild", rebuild)
    assert len(plans.stages(CPU).runs) == 3
    for make in (plans.ladder, plans.leave_one_out):
        with pytest.raises(stack.StackError):
            make(CPU)


def test_damaged_published_figures(published):
    for text in ("", "[]", "{}", '{"baseline": {"tok_per_sec": "fast"}}'):
        published.write_text(text)
        with pytest.raises(plans.UserError, match="can't be read"):
            plans.ladder(CPU)


def test_comparison_point():
    assert plans.comparison_point(16_384, 2048) == 16_384
    assert plans.comparison_point(16_385, 2048) == 18_432
    assert plans.tokens_per_step(dict(batch_size=8, context_length=256), 2) == 4096
