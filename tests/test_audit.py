"""measure.py audit: what a script lacks, by the ladder's scripts and by toys."""

import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import warnings
from collections import defaultdict
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import torch
from audit_toys import B, H, T
from conftest import ROOT, environment, run_python, small, write_tokens
from made_up import copy_of_checkout

from bench.commands.audit import Audit
from bench.measure.lock import locked
from bench.predict.program import run_traces
from bench.report.page import write_html
from gpt_speed import cli
from gpt_speed.audit import marks, render
from gpt_speed.audit.audit import Reports, machine_of, result_of, with_twice_the_batch
from gpt_speed.audit.checks import (
    CANT_TELL,
    HAS,
    LACKS,
    LARGE,
    NO_GAIN,
    NO_HARDWARE,
    NOT_HERE,
    check,
)
from gpt_speed.audit.order import Order
from gpt_speed.audit.other_gpus import work_of
from gpt_speed.audit.process import gpu_facts
from gpt_speed.audit.render import with_one_compile_row
from gpt_speed.audit.run import timed_and_watched, watch_order
from gpt_speed.audit.step import Step
from gpt_speed.audit.translate import ABOUT, AT_LEAST, AT_MOST, translated
from gpt_speed.audit.watch import Recording, Watch, WatchedOp
from gpt_speed.cards import CARDS
from gpt_speed.common import UserError
from gpt_speed.gains import (
    OUR_SHARES,
    Session,
    expected,
    gains_on,
    reference_sessions,
    technique_names,
)
from gpt_speed.memory import MIB, WORKSPACE, simulate
from gpt_speed.speed import seconds
from patches import stack

TOYS = ROOT / "tests" / "audit_toys.py"
CHILD = ROOT / "gpt_speed" / "audit" / "child.py"
AUDIT = ROOT / "measure.py", "audit", "--results-dir"
TORCHRUN = "-m", "torch.distributed.run", "--nproc_per_node=2"
# As gpt_speed.audit.audit.machine_of returns it.
MACHINE = dict(
    name="AMD EPYC", torch="2", dtype="float32", memory_total=2**34, rates=dict(float32=1e11)
)
GPU = MACHINE | dict(
    name="a GPU that nobody knows", capability="9.0", dtype="bfloat16", memory_total=80 * 2**30
)
SCHEMA = json.loads((ROOT / "gpt_speed" / "schema.json").read_text(encoding="utf-8"))
TECHNIQUES = [patch.name for patch in stack.load() if patch.name != "ddp"]
UNSEEN_ON_CPU = {"02-tensor-cores", "04-pinned-memory", "05-bfloat16", "10-batch-size"}


def watch(folder, *command, key=0, steps=1, **options) -> dict:
    """Returns the report of the watched step of a script."""
    report = folder / "report.json"
    order = dict(mode="watch", report=str(report), key=key, skipped=2, steps=steps)
    done = run_python(CHILD, json.dumps(order), *command, **options)
    assert report.exists(), done.stderr
    facts = json.loads(report.read_text())
    assert facts["how"] == "watched", (facts["how"], facts["error"], done.stderr)
    return facts | MACHINE


def state(facts: dict, technique: str) -> str:
    return check(Step(facts))[technique].state


def with_state(facts: dict, state: str) -> set[str]:
    return {name for name, finding in check(Step(facts)).items() if finding.state == state}


def lacking(facts: dict) -> set[str]:
    """Returns what isn't there, whether it would gain anything or not."""
    return with_state(facts, LACKS) | with_state(facts, NO_GAIN)


@pytest.fixture(scope="module")
def ladder(tmp_path_factory):
    """Returns what was watched of the script after so many techniques."""
    folder = tmp_path_factory.mktemp("ladder")
    data, texts = write_tokens(folder / "data"), list(stack.rebuild_all().values())

    @cache
    def watched(number: int, *options) -> dict:
        script = folder / f"after_{number}.py"
        script.write_text(small(texts[number].decode()))
        return watch(
            folder,
            script,
            "--model",
            "cpu-demo",
            "--context-length",
            32,
            "--batch-size",
            2,
            "--eval-windows",
            2,
            "--data",
            data,
            "--results-dir",
            folder,
            *options,
        )

    return watched


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, marks=[] if number in (0, 8, 15) else pytest.mark.slow)
        for number in range(len(TECHNIQUES) + 1)
    ],
)
def test_a_script_of_the_ladder_lacks_what_comes_after_it(ladder, number):
    assert lacking(ladder(number)) == {*TECHNIQUES[number:]} - UNSEEN_ON_CPU


@pytest.mark.parametrize(("number", "options"), [(0, []), (2, []), (5, ["--dtype", "bfloat16"])])
def test_the_ladder_on_a_simulated_gpu(ladder, number, options):
    facts = on_gpu(ladder(number, *options))
    assert lacking(facts) == {*TECHNIQUES[number:]} - {
        "04-pinned-memory",
        "12-huge-pages",
    }
    assert state(facts | dict(kept=True), "15-kept-memory") == HAS
    assert state(facts | dict(shares_memory=True), "15-kept-memory") == NO_HARDWARE
    full = facts | dict(memory=79 * 2**30)
    assert state(full, "10-batch-size") == CANT_TELL  # a larger batch may not fit


def on_gpu(facts: dict) -> dict:
    """Changes facts as if they had been watched on an H100."""
    ops = [op | dict(device="cuda") for op in facts["ops"]]
    return facts | GPU | dict(ops=ops, memory=2**30)


@pytest.mark.parametrize(
    ("pinned", "non_blocking", "expected"),
    [(False, False, LACKS), (True, False, LACKS), (True, True, HAS)],
)
def test_copies_to_a_gpu(ladder, pinned, non_blocking, expected):
    facts = on_gpu(ladder(0))
    copy = dict(
        name="_to_copy",
        inputs=[[9999, [2, 32], "int64", "self"]],
        outputs=[[9998, [2, 32], "int64"]],
        device="cpu",
        scalars=dict(source="cpu", pinned=pinned, non_blocking=non_blocking),
    )
    assert state(facts | dict(ops=[*facts["ops"], copy]), "04-pinned-memory") == expected
    assert state(facts, "04-pinned-memory") == NOT_HERE


def test_convolutions_have_their_own_tf32(tmp_path):
    facts = on_gpu(toy("convolutions", tmp_path))
    assert state(facts, "02-tensor-cores") == LACKS
    for op in facts["ops"]:
        if not op["name"].startswith("convolution"):
            op["flops"] = 0
    assert state(facts, "02-tensor-cores") == NOT_HERE


@pytest.mark.parametrize(
    ("number", "options"),
    [
        (0, []),
        pytest.param(3, [], marks=pytest.mark.slow),
        pytest.param(7, ["--dtype", "float32"], marks=pytest.mark.slow),
    ],
)
def test_its_work_is_what_predict_traces(ladder, number, options):
    """A script of the ladder, run here, does what its trace without storage does."""
    step = Step(ladder(number, *options))
    text = small(list(stack.rebuild_all().values())[number].decode()).encode()
    options = ["--model", "cpu-demo", "--context-length", "32", *options]
    (traced,) = run_traces(text, options, [2]).values()
    watched, expected = (totals(works) for works in (work_of(step), traced["step"]))
    assert watched.keys() == expected.keys()
    for group, (kernels, flops, size) in expected.items():
        assert watched[group] == [
            pytest.approx(kernels, rel=0.2, abs=2),
            flops,
            pytest.approx(size, rel=0.05, abs=1000),
        ], group


def totals(works) -> dict[tuple, list[float]]:
    """Sums kernels, floating-point operations and bytes by kind, precision and alignment."""
    sums = defaultdict(lambda: [0, 0, 0])
    for work in works:
        group = tuple(work[:3])
        sums[group] = [*map(sum, zip(sums[group], work[3:], strict=True))]
    return sums


def test_the_compiled_loss_shares_the_row_of_torch_compile(monkeypatch):
    """They do wherever they stand in the series, if both are in the audit."""
    names = {"00-first": "first", **technique_names()}
    monkeypatch.setattr("gpt_speed.audit.render.technique_names", lambda: names)
    rows = [
        dict(number=number, technique=name, state=LACKS, gain=2.0, expected=1.5)
        for number, name in enumerate(names.values(), 1)
    ]
    joined = with_one_compile_row(rows)
    assert len(joined) == len(rows) - 1
    assert joined[8] == rows[8] | dict(
        number="9, 14", technique="torch.compile, compiled loss", gain=4.0, expected=2.25
    )
    assert with_one_compile_row(rows[:9]) == rows[:9]


def test_speeds_on_other_gpus(tmp_path):
    facts = on_gpu(toy("fast", tmp_path))
    report = report_of(facts, tmp_path, ["RTX 4090"])
    (fast,) = report["speeds"]
    times = seconds(work_of(Step(facts)), CARDS["RTX 4090"])
    assert (fast["low"] + fast["high"]) / 2 == pytest.approx(32 / sum(times.values()))


@pytest.fixture(scope="module")
def watched_fast(tmp_path_factory) -> dict:
    return on_gpu(toy("fast", tmp_path_factory.mktemp("fast")))


@pytest.fixture
def fast_facts(watched_fast) -> dict:
    """Returns facts of a step of `fast`, as on a GPU, which the test may change."""
    return deepcopy(watched_fast)


def test_speeds_stand_on_the_page_and_in_json(fast_facts, tmp_path):
    report = report_of(fast_facts, cards=["RTX 4090"])
    page = tmp_path / render.page_name(report["command"], "")
    page.write_text(render.page(report), encoding="utf-8")
    html = write_html(page)
    assert "| RTX 4090 | " in page.read_text(encoding="utf-8")
    assert html.name == "audit-a.html" and ">RTX 4090</td>" in html.read_text(encoding="utf-8")
    assert json.loads(json.dumps(report)) == report


def test_no_speed_on_an_amd(fast_facts):
    (amd,) = report_of(fast_facts, cards=["MI300X"])["speeds"]
    assert amd["speed"] == "unchecked" and amd["low"] is amd["high"] is None


def test_a_compiled_step_is_at_least_as_fast(fast_facts):
    """It runs uncompiled while it is watched."""
    fast_facts["ops"][0]["compiled"] = True
    (speed,) = report_of(fast_facts, cards=["T4"])["speeds"]
    assert speed["speed"].startswith("at least")


def test_no_speed_without_units(fast_facts):
    for op in fast_facts["ops"]:
        if op.get("kernel") and op["kernel"][0]:
            op["kernel"][0] = "float64"
    (speed,) = report_of(fast_facts, cards=["T4"])["speeds"]
    assert speed["speed"] == "no float64" and speed["low"] is None


# What `fast`, the plain one, lacks on any machine, by the numbers of the techniques.
PLAIN = {3, 8, 9, 12, 13, 14, 15}
NO_HEAD = {9, 13, 14}
# What the others lack; and what is uncertain, beside UNSEEN_ON_CPU.
LACKING = dict(
    fast=PLAIN,
    stored_mask=PLAIN | {1},
    by_hand=PLAIN | {1, 7},
    masked_twice=PLAIN | {1, 7},
    assigned=PLAIN | {1, 7},
    lower=PLAIN | {7},
    indexed=PLAIN | {1},
    capped=PLAIN | {1},
    signed=PLAIN,
    gated=PLAIN,
    talking=PLAIN | {1},
    twice=PLAIN,
    scaled=PLAIN | {1, 7},
    schedule_drawn=PLAIN,
    indexed_table=PLAIN,
    characters=PLAIN - {9, 14},
    bytes_of_text=PLAIN - {9, 14},
    own_update=PLAIN - {3},
    normalized=PLAIN | {6},
    exponentials=PLAIN | {7},
    relative=PLAIN | {7},
    relative_only=PLAIN | {7},
    bias_and_mask=PLAIN | {1, 7},
    apart=PLAIN | {11},
    query_apart=PLAIN | {11},
    cross=PLAIN,
    multihead=PLAIN | {7},
    scripted_attention=PLAIN,
    masked_multihead=PLAIN | {1, 7},
    linear=PLAIN,
    written_memory=PLAIN - NO_HEAD,
    several_heads=PLAIN,
    head_twice=PLAIN,
    sampled=PLAIN - NO_HEAD,
    adaptive=PLAIN - NO_HEAD,
    hidden_head=PLAIN - NO_HEAD,
    tiled_head=PLAIN,
    tiles=(PLAIN | {6}) - {14},
    labels=PLAIN - NO_HEAD,
    packed=PLAIN,
    std_norm=PLAIN | {6},
    rms_norm=PLAIN | {6},
    own_rms_norm=PLAIN,
    cubed=PLAIN | {6},
    padded=PLAIN - {9},
    tied=PLAIN,
    closure=PLAIN - NO_HEAD - {3},
    gan=PLAIN - NO_HEAD,
    updates_by_hand=PLAIN - {3},
    accumulated=PLAIN - {3},
    evaluated=PLAIN - {3},
    autocast=PLAIN,
    compiled_model=PLAIN - {8},
    compiled_step=PLAIN - {3, 8, 13},
    compiled_in_part=PLAIN - {8},
    checkpointed=PLAIN | {1, 7},
    square=PLAIN | {1, 7},
    square_heads=PLAIN | {7, 11},
    scripted=PLAIN,
    chunks=PLAIN - {14},
    distributed=PLAIN,
    pieces=PLAIN,
    accelerated=PLAIN,
    two_optimizers=PLAIN,
    workers=PLAIN,
    convolutions=PLAIN - NO_HEAD,
    penalty=PLAIN - NO_HEAD,
)
UNCERTAIN = dict(
    cross={11},
    updates_by_hand={3},
    own_update={3},
    compiled_in_part={8},
    capped={7},
    signed={7},
    gated={7},
    talking={7},
    twice={7},
    adaptive=NO_HEAD,
    hidden_head=NO_HEAD,
)
FAST_TOYS = (
    "fast",
    "by_hand",
    "assigned",
    "capped",
    "talking",
    "normalized",
    "cubed",
    "closure",
    "chunks",
    "several_heads",
    "sampled",
    "written_memory",
    "accumulated",
    "penalty",
    "pieces",
)


def toy(name: str, folder) -> dict:
    key = dict(updates_by_hand="backward", gan=1, two_optimizers=1).get(name, 0)
    return watch(folder, TOYS, name, key=key)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in FAST_TOYS else pytest.mark.slow) for name in LACKING],
)
def test_toys(name, tmp_path):
    if name == "accelerated":
        pytest.importorskip("accelerate")
    facts = toy(name, tmp_path)
    here = set() if facts["huge_pages"] is False else {12}
    numbers = [
        {int(technique[:2]) for technique in techniques}
        for techniques in (lacking(facts), with_state(facts, CANT_TELL))
    ]
    assert numbers == [LACKING[name] - here, {10} | UNCERTAIN.get(name, set())]


def test_masks_that_are_hard_to_see(tmp_path):
    """The scores' own triangle is no mask in memory; a tanh is named."""
    assert state(toy("lower", tmp_path), "01-causal-mask") == HAS
    finding = check(Step(toy("capped", tmp_path)))["07-flash-attention"]
    assert finding.evidence.startswith("tanh between scores and values")


@pytest.mark.parametrize(
    ("name", "expected"), [("relative", HAS), ("relative_only", NOT_HERE), ("bias_and_mask", LACKS)]
)
def test_learned_scores_are_no_mask(tmp_path, name, expected):
    assert state(toy(name, tmp_path), "01-causal-mask") == expected


def test_updates_that_forget_no_grad(tmp_path):
    step = Step(toy("own_update", tmp_path))
    assert {"add_", "mul"} <= {op.name for op in step.updates}
    assert {"add_", "mul"}.isdisjoint(
        op.name for op in step.ops if op.place == step.updates[0].place and op.phase == "forward"
    )


def test_an_optimizer_is_made_where_its_class_is_called(tmp_path):
    file, line = check(Step(toy("own_update", tmp_path)))["03-fused-adamw"].where.split(":")
    assert "OwnUpdate(model" in (TOYS.parent / file).read_text().splitlines()[int(line) - 1]


def test_calls_of_attention_are_counted(tmp_path):
    """None is lost where a projection has the sizes of what mixes heads."""
    findings = check(Step(toy("square_heads", tmp_path)))
    for technique in ("07-flash-attention", "11-merged-qkv"):
        assert findings[technique].evidence.startswith("2 calls of attention")


def test_a_mask_that_is_applied_twice_is_of_one_call(tmp_path):
    finding = check(Step(toy("masked_twice", tmp_path)))["01-causal-mask"]
    assert finding.evidence.startswith("1 call of attention")


def test_tensors_without_a_gradient_are_not_counted(tmp_path):
    """The head isn't used."""
    (optimizer,) = toy("sampled", tmp_path)["optimizers"]
    assert optimizer["tensors"] == 10


@pytest.mark.parametrize(("name", "tokens"), [("labels", 0), ("packed", 16), ("fast", 32)])
def test_labels_are_no_tokens(tmp_path, name, tokens):
    facts = toy(name, tmp_path)
    assert report_of(facts, tmp_path)["figures"]["tokens"] == tokens
    assert (state(facts, "14-chunked-head") == NOT_HERE) == (tokens == 0)


@pytest.mark.slow
def test_what_the_compiler_is_told_not_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    _, watched = timed_and_watched([str(TOYS), "compiled_model"], 2)
    assert {"08-torch-compile", "13-loss-in-graph"} <= with_state(watched | MACHINE, LACKS)
    text = render.screen(report_of(watched | MACHINE, tmp_path))
    assert re.search(r"\| 8, 13 \| torch.compile, compiled loss \| missing \| \d+% \|", text)


def test_updates_before_the_training(forked_children):
    timed, _ = timed_and_watched([str(TOYS), "schedule_drawn"], 2)
    assert timed["steps"] == 4


def test_both_runs_read_stdin():
    """They do through a pipe, too, which the first one empties."""
    code = (
        "from gpt_speed import children\nchildren.keep_stdin()\nfor _ in range(2):\n"
        "    children.rewind_stdin()\n    print(children.run_child(['cat'])[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input="5\n", text=True, cwd=ROOT, capture_output=True
    )
    assert done.stdout.split() == ["5", "5"], done.stderr


def test_an_update_has_the_line_of_its_caller(tmp_path):
    """A library's own line would say little."""
    pytest.importorskip("accelerate")
    where = check(Step(toy("accelerated", tmp_path)))["03-fused-adamw"].where
    assert where.startswith(TOYS.name)


OLD = [*filter(None, os.environ.get("AUDIT_PYTHONS", "").split(os.pathsep))]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["by_hand", "compiled_step"])
@pytest.mark.parametrize(
    "python",
    OLD
    or [
        pytest.param(
            "",
            marks=pytest.mark.skip(
                "AUDIT_PYTHONS names no environments: make one by `python3.10 -m venv old &&"
                " old/bin/pip install torch==2.4.1` (5 GB), and name old/bin/python"
            ),
        )
    ],
)
def test_the_environment_of_an_audited_script(python, name):
    """It needs no more than PyTorch 2.4 and Python 3.10."""
    _, watched = timed_and_watched([str(TOYS), name], 10, python)
    numbers = {int(technique[:2]) for technique in lacking(watched | MACHINE)}
    assert numbers == LACKING[name] | {12} - {12 if watched["huge_pages"] is not False else 0}


def test_a_finding_has_its_line(tmp_path):
    findings = check(Step(toy("by_hand", tmp_path)))
    lines = TOYS.read_text().splitlines()
    for technique, text in (
        ("07-flash-attention", "q @ k.transpose"),
        ("03-fused-adamw", "AdamW("),  # where fused=True goes
    ):
        name, _, line = findings[technique].where.partition(":")
        assert name == TOYS.name and text in lines[int(line) - 1]
        assert 0 < findings[technique].share < 1


def test_notes(tmp_path):
    facts = toy("accumulated", tmp_path)
    (note,) = report_of(facts, tmp_path)["notes"]
    assert "1 value read back from tensors" in note and "audit_toys.py:" in note
    facts |= dict(syncs=[True] * 3)
    report = report_of(
        facts,
        tmp_path,
        breaks={"a reason\nat length": 2},
        new_graphs=3,
        waited=4.0,
        breaks_at=["a.py:2"],
        recompiled_at=["a.py:1"],
    )
    text = render.screen(report)
    assert len(report["notes"]) == 5 and all(note in text for note in report["notes"])
    assert "1 graph break, a.py:2: what lies between them isn't compiled (a reason)" in text
    assert "3 times after the warm-up, a.py:1: a shape" in text


def test_notes_of_what_is_read_back_and_averaged(tmp_path):
    """Its loss is told, not the indices of a batch; so are means over unequal numbers of tokens."""
    (note,) = report_of(toy("indices", tmp_path), tmp_path)["notes"]
    assert note.startswith("1 value read back")
    (note,) = report_of(toy("uneven", tmp_path), tmp_path)["notes"]
    assert "each of 2 micro-batches of unequal size (8 to 24 tokens)" in note
    (note,) = report_of(toy("uneven_labels", tmp_path), tmp_path)["notes"]
    assert "each of 2 micro-batches of unequal size (4 to 12 samples)" in note


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("forgetful", "preserve_rng_state=False, audit_toys.py:"),
        ("forgetful_reentrant", "preserve_rng_state=False, audit_toys.py:"),
        ("memory_budget", "activation_memory_budget of 0.5, audit_toys.py:"),
        ("remembering", ""),
    ],
)
def test_masks_that_differ_in_the_backward_pass(tmp_path, name, cause):
    notes = report_of(toy(name, tmp_path), tmp_path)["notes"]
    assert len(notes) == bool(cause) and all(cause in note for note in notes)


def test_costs_of_a_library_have_no_place(tmp_path):
    """The script itself has no line that calls them."""
    facts = toy("forgetful", tmp_path)
    for op in facts["ops"]:
        op["place"] = ""
    (note,) = report_of(facts, tmp_path)["notes"]
    assert "preserve_rng_state=False: its masks differ" in note


@pytest.mark.parametrize(("capability", "is_slow"), [("7.5", True), ("8.0", False)])
def test_bfloat16_without_units_for_it(ladder, tmp_path, capability, is_slow):
    """It is told on a GPU, where PyTorch says that bfloat16 is supported."""
    facts = on_gpu(ladder(5, "--dtype", "bfloat16")) | dict(capability=capability)
    notes = [note for note in report_of(facts, tmp_path)["notes"] if "in bfloat16" in note]
    assert [note.startswith("100% of the FLOPs") for note in notes] == [True] * is_slow
    assert state(facts, "05-bfloat16") == (NO_HARDWARE if is_slow else HAS)


def test_the_kernel_of_attention(tmp_path):
    """Where no fused one runs on a GPU, attention is as slow as by hand, and the reason is told."""
    facts = on_gpu(toy("fast", tmp_path))
    assert "flash_attention" in check(Step(facts))["07-flash-attention"].evidence
    slow = toy("safe_softmax", tmp_path)
    assert state(slow, "07-flash-attention") == HAS  # on a CPU, as everybody has it there
    finding = check(Step(on_gpu(slow)))["07-flash-attention"]
    assert finding.state == LACKS and "math kernel: why isn't known" in finding.evidence
    for op in slow["ops"]:
        if op["name"] == "_safe_softmax":
            op["scalars"]["not_fused"] = dict(flash=["no mask."], efficient=[])
    finding = check(Step(on_gpu(slow)))["07-flash-attention"]
    assert finding.evidence.endswith("math kernel: flash: no mask.; efficient: not available")


class OnGpu:
    is_cuda = True


@pytest.mark.parametrize("fused", [True, False])
def test_what_pytorch_says_against_a_fused_kernel(monkeypatch, fused):
    def can_use(params, debug):
        warnings.warn(f"{len(params)} arguments (Triggered internally at a.cpp:1.)", stacklevel=1)
        return False

    monkeypatch.setattr(marks.cuda, "SDPAParams", lambda *arguments: arguments)
    monkeypatch.setattr(marks.cuda, "can_use_flash_attention", can_use)
    monkeypatch.setattr(marks.cuda, "can_use_efficient_attention", lambda *_: fused)
    reasons = dict(flash=["7 arguments"], efficient=[])
    expected = {} if fused else dict(not_fused=reasons)
    assert marks.of_attention(OnGpu(), OnGpu(), OnGpu(), dropout_p=0.1) == expected


def test_accumulation_that_memory_does_not_need(tmp_path):
    """It is told on a GPU, of equal micro-batches; what they take together is at most what fits."""
    facts = on_gpu(toy("accumulated", tmp_path))
    for used, fitting in ((1, "of which 3 fit"), (35, "of which 2 fit"), (79, "")):
        *_, note = report_of(facts | dict(memory=used * 2**30), tmp_path)["notes"]
        assert fitting in note and bool(fitting) == ("3 micro-batches of one size" in note)


def test_pages_of_memory_take_a_share(tmp_path):
    """Techniques 12 and 15 save no more than the time that Linux took."""
    facts = toy("fast", tmp_path) | dict(system=0.2, kept=False, huge_pages=False)
    report = report_of(facts, tmp_path)
    assert [row["upper_bound"] for row in report["techniques"] if row["number"] in (12, 15)] == [
        1.25,
        1.25,
    ]


def test_time_on_new_pages_counts_once(tmp_path):
    """For technique 15 here; other gains are within what it leaves of the step."""
    gains = dict.fromkeys(TECHNIQUES, 1.1) | {"12-huge-pages": 1.2}
    session = Session("x", "x", "cpu", MACHINE["dtype"], "x", gains)
    facts = toy("fast", tmp_path) | dict(system=0.6, updating=0.2)
    without, report = (
        report_of(facts | dict(kept=has_both, huge_pages=has_both), sessions=[session])
        for has_both in (True, False)
    )
    before, after = (
        {row["number"]: row for row in audit["techniques"]} for audit in (without, report)
    )
    left = 1 / after[15]["expected"]
    assert left == pytest.approx(1 - 0.6 * saved_by(1.1) / OUR_SHARES["15-kept-memory"])
    assert after[12]["share"] == pytest.approx(left * 0.6) and after[15]["share"] == 0.6
    for number in (3, 8):
        alone, beside = before[number], after[number]
        assert beside["share"] == pytest.approx(left * alone["share"])
        saved = left * saved_by(alone["expected"])
        assert saved_by(beside["expected"]) == pytest.approx(saved) and saved > 0
        assert (beside["upper_bound"] or math.inf) >= (alone["upper_bound"] or math.inf)
    text = render.screen(report)
    first_row = text.partition("| --: |")[2].splitlines()[1]
    assert first_row.startswith("| 15 | ") and "counts once, for #15" in text
    assert "counts once" not in render.screen(without)


def saved_by(gain: float) -> float:
    """Returns the share of the step's time that a speedup saves."""
    return 1 - 1 / gain


def test_pages_that_take_no_time_gain_nothing(tmp_path):
    facts = toy("fast", tmp_path) | dict(system=0.0, kept=False, huge_pages=False)
    rows = [row for row in report_of(facts)["techniques"] if row["number"] in (12, 15)]
    assert [(row["state"], row["expected"]) for row in rows] == [(NO_GAIN, 1.0)] * 2
    text = render.screen(report_of(facts))
    assert "| huge pages | " not in text and "#12 huge pages (Linux needs hardly any time" in text


@pytest.mark.parametrize(("kept", "bound"), [(False, 4), (True, 1.25)])
def test_an_update_may_cost_pages_elsewhere(ladder, kept, bound):
    """Where what it frees goes back to Linux, so that the rest of the step needs new pages."""
    facts = ladder(0) | dict(updating=0.2, system=0.55, kept=kept)
    none_gains = [Session("x", "x", "cpu", MACHINE["dtype"], "x", {})]
    rows = report_of(facts, sessions=none_gains)["techniques"]
    (row,) = [row for row in rows if row["number"] == 3]
    assert row["share"] == 0.2 and row["upper_bound"] == pytest.approx(bound)


def test_graph_breaks_have_their_lines(forked_children):
    timed, _ = timed_and_watched([str(TOYS), "broken_graph"], 4)
    lines = TOYS.read_text().splitlines()
    (place,) = timed["breaks_at"]
    assert "a break" in lines[int(place.removeprefix(f"{TOYS.name}:")) - 1]


def test_graph_breaks_at_hooks_are_not_the_scripts(forked_children):
    """A compiled update has the audit's hooks in it."""
    timed, _ = timed_and_watched([str(TOYS), "compiled_step"], 4)
    assert timed["breaks"] == {} and timed["breaks_at"] == []


def test_the_update_is_timed_as_a_whole(tmp_path, forked_children):
    """Its operators alone take less: Python calls them one by one."""
    timed, watched = timed_and_watched([str(TOYS), "fast"], 2)
    watched |= MACHINE | dict(updating=None)
    by_operators = check(Step(watched))["03-fused-adamw"].share
    whole = check(Step(watched | dict(updating=0.7)))["03-fused-adamw"].share
    assert whole == 0.7 and 0 < by_operators < 1 and 0 < timed["updating"] < 1


def test_updates_with_a_closure_are_not_timed(tmp_path):
    """The passes are within them."""
    assert toy("closure", tmp_path)["updating"] is None


@pytest.mark.parametrize(
    ("name", "state", "needs"),
    [
        ("fast", NO_GAIN, ""),
        ("autocast", NO_GAIN, ""),
        ("large", LACKS, ""),
        ("large_autocast", LACKS, "cast its input and weight before"),
    ],
)
def test_what_chunks_need(tmp_path, name, state, needs):
    """One verdict: where all tokens are in one chunk, nothing is missing."""
    (row,) = [
        row for row in report_of(toy(name, tmp_path), tmp_path)["techniques"] if row["number"] == 14
    ]
    assert row["state"] == state and needs in row["needs"] and bool(needs) == bool(row["needs"])
    assert (row["expected"] == 1) == (state == NO_GAIN)
    assert ("at least 1,024 tokens" in row["evidence"]) == (state == NO_GAIN)


def test_logits_of_several_heads_are_counted(tmp_path):
    evidence = check(Step(toy("several_heads", tmp_path)))["14-chunked-head"].evidence
    assert evidence.startswith(f"logits of {B * T} × 1,001 at once in each of 4 heads")


@pytest.mark.parametrize(("share", "state"), [(0.9, LACKS), (0.01, LACKS), (0.001, NO_GAIN)])
def test_bfloat16_gains_by_its_share(ladder, share, state):
    """That of matmuls which move many bytes: small operators take as long in 16 bits. Large ones
    are twice as fast on this machine, whatever bfloat16 gained on our model."""
    rates = dict(float32=1e11, bfloat16=2e11)
    facts = deepcopy(ladder(0)) | dict(dtype="bfloat16", rates=rates, system=0.0)
    step = Step(facts)
    large = {op.origin for op in step.kinds if op.kernel and op.kernel[-1] >= LARGE}
    kinds = [(op.origin in large, op.origin in step.matmuls) for op in step.ops]
    seconds = {(True, True): share, (False, False): 1 - share}
    for op, kind in zip(facts["ops"], kinds, strict=True):
        op["seconds"] = seconds.get(kind, 0) / kinds.count(kind)
    gains = {patch: 3.0 for patch in TECHNIQUES}
    session = Session("x", "x", facts["device"], "bfloat16", "x", gains)
    (row,) = [
        row for row in report_of(facts, sessions=[session])["techniques"] if row["number"] == 5
    ]
    assert row["state"] == state and row["share"] == pytest.approx(share, abs=0.05)
    saved = row["share"] / 2 if state == LACKS else 0
    assert saved_by(row["expected"]) == pytest.approx(saved)


def test_a_technique_gains_by_its_share():
    """Twice the share of our model's saves twice the time; one of the whole step as there."""
    gain = 1 / (1 - 0.05)
    twice = 2 * OUR_SHARES["03-fused-adamw"]
    assert expected("03-fused-adamw", twice, gain) == pytest.approx(1 / (1 - 0.1))
    assert expected("08-torch-compile", 1.0, gain) == gain
    assert expected("06-native-layers", 0.28, 1.02) == pytest.approx(1.06, abs=0.01)
    assert expected("03-fused-adamw", 0.5, None) is None


@pytest.mark.parametrize(
    ("patch", "says"),
    [
        ("03-fused-adamw", "`python patches/stack.py show 3`"),
        ("08-torch-compile", "`python patches/stack.py show 8`"),
        ("", "None of the missing techniques"),
    ],
)
def test_the_next_step_is_named(ladder, patch, says):
    """That which gains most, if any gains; of a row with two techniques the first."""
    gains = dict.fromkeys(TECHNIQUES, 1.0) | {patch: 1.3}
    session = Session("x", "x", "cpu", MACHINE["dtype"], "x", gains)
    facts = ladder(0) | dict(device="cpu", updating=0.3)
    report = report_of(facts, sessions=[session])
    assert says in render.screen(report)
    for row in report["techniques"]:
        row["state"] = HAS
    assert "Nothing is missing." in render.screen(report)


def made_up_times(facts: dict, draw: random.Random) -> dict:
    """Returns facts in which each operator, the updates and Linux took another time, and matmuls
    have other rates."""
    ops = [op | dict(seconds=draw.expovariate(1) ** 4) for op in facts["ops"]]
    updating = draw.choice([None, draw.random()])
    rates = dict(float32=1.0, bfloat16=draw.lognormvariate(0.7, 0.5))
    return facts | dict(ops=ops, updating=updating, system=draw.random(), rates=rates)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_gain_exceeds_its_bound(ladder, device):
    """And no bound is below what a step gains that has nothing of the technique's share."""
    facts = ladder(0) if device == "cpu" else on_gpu(ladder(0))
    facts |= dict(device=device, dtype="bfloat16", huge_pages=False, kept=False)
    for seed in range(100):
        draw = random.Random(seed)
        made_up = made_up_times(facts, draw)
        gains = {patch: draw.lognormvariate(0.3, 0.5) for patch in TECHNIQUES}
        session = Session("x", "x", device, facts["dtype"], "x", gains)
        step = Step(made_up)
        findings = [*check(step).values()]
        rows = report_of(made_up, sessions=[session])["techniques"]
        for finding, row in zip(findings, rows, strict=True):
            bound = row["upper_bound"] or math.inf
            assert row["expected"] <= bound, (seed, row)
            if finding.ops:
                left = sum(op.seconds for op in step.kinds if op.origin not in {*finding.ops})
                if row["number"] == 3 and made_up["updating"]:
                    left = step.seconds * (1 - made_up["updating"])
                assert bound * left >= (1 - 1e-9) * step.seconds, (seed, row)


def report_of(facts: dict, folder=None, cards=(), sessions=None, **timed) -> dict:
    timed = (
        facts
        | dict(seconds=[1.0] * 5, breaks={}, new_graphs=0, breaks_at=[], recompiled_at=[])
        | timed
    )
    sessions = sessions or reference_sessions()
    return result_of(["a.py"], Reports(timed, facts, facts), sessions, cards)


def test_tokens_and_operations(ladder, tmp_path):
    """They follow from formulas: 6 for each weight of a matmul and token, and attention's."""
    report = report_of(ladder(0), tmp_path)
    width, layers, context = 32, 1, 32
    weights = layers * 12 * width**2 + width * 50_257
    flops = 64 * (6 * weights + 12 * layers * context * width)
    expected = dict(tokens=64, flops=flops, seconds=1, tok_per_sec=64)
    assert expected.items() <= report["figures"].items()
    assert sum(report["figures"]["shares"].values()) == pytest.approx(1)
    text = render.screen(report)
    assert "64 tokens a step" in text and "**not on this hardware**: #2 TF32 tensor cores" in text


@pytest.mark.parametrize(
    ("name", "device", "dtype", "expected", "gain"),
    [
        ("NVIDIA H100 80GB HBM3", "cuda", "bfloat16", "H100", 1.63),
        (
            "NVIDIA H200",
            "cuda",
            "bfloat16",
            "H100, another machine than this one, in bfloat16",
            1.63,
        ),
        ("AMD EPYC", "cpu", "float32", "AMD EPYC (float32)", 1.0),
    ],
)
def test_gains_are_from_the_most_similar_machine(name, device, dtype, expected, gain):
    machine = dict(name=name, dtype=dtype, device=device)
    gains, where = gains_on(machine, reference_sessions())
    assert where == f"measured on {expected}"
    assert gains["05-bfloat16"] == pytest.approx(gain, abs=0.1)


def test_gains_from_elsewhere_are_named_by_their_numbers():
    """Nothing is said of a patch that no technique has."""
    machine = dict(name="AMD EPYC", dtype="float32", device="cpu")
    near = Session("AMD EPYC", "EPYC", "cpu", "float32", "near", {"01-causal-mask": 1.1})
    far = replace(near, name="Xeon", folder="far", gains={"13-loss-in-graph": 1.2, "other": 1.9})
    gains, where = gains_on(machine, [near, far])
    assert where == "measured on EPYC; #13 on other machines"
    assert gains["01-causal-mask"] == 1.1 and gains["13-loss-in-graph"] == 1.2


def test_the_memory_of_a_gpu_by_the_oldest_pytorch(monkeypatch):
    """It asks for the device by its number, and doesn't say whether memory is shared."""
    for name, answer in dict(
        memory_snapshot=lambda: [dict(is_expandable=True)],
        current_device=lambda: 1,
        get_device_properties=lambda device: SimpleNamespace(name=f"GPU {device}"),
        max_memory_reserved=lambda: 2**30,
        mem_get_info=lambda: (0, 2**34),
    ).items():
        monkeypatch.setattr(torch.cuda, name, answer)
    facts = gpu_facts()
    assert (facts["memory"], facts["memory_total"]) == (2**30, 2**34)
    assert facts["kept"] and facts["shares_memory"] is False


@pytest.fixture
def answer_of_audit(monkeypatch, tmp_path):
    """Returns a function that answers as Audit does with some variables, at once; build/ is the
    test's own."""
    monkeypatch.setattr("bench.common.BUILD", tmp_path / "build")
    monkeypatch.setattr(cli, "audited", lambda args, command, sessions: None)
    setup = SimpleNamespace(
        args=SimpleNamespace(module=[], script=[str(TOYS)]), options=[], results=ROOT / "results"
    )

    def answer(variables: dict[str, str]) -> str:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return Audit().answer(setup)

    return answer


FIRST, SECOND = (dict(RANK=number, LOCAL_RANK=number) for number in "01")


@pytest.mark.parametrize("variables", [FIRST, SECOND], ids=["first", "second"])
def test_ranks_are_not_taken_for_what_is_left_over(variables, answer_of_audit, monkeypatch):
    """The ranks beside one may have begun before it looks."""
    monkeypatch.setattr("bench.commands.audit.alone", None)
    assert answer_of_audit(variables) == ""


@pytest.mark.parametrize(
    "variables",
    [FIRST, dict(RANK="2", LOCAL_RANK="0"), dict(RANK="0"), dict(RANK="")],
    ids=["first", "of-another-machine", "without-local", "no-rank"],
)
def test_no_audit_beside_a_measurement(variables, answer_of_audit, tmp_path):
    """Under torchrun the first rank of each machine is refused, and torchrun ends the others."""
    with locked(tmp_path / "build"), pytest.raises(UserError, match="^another measurement"):
        answer_of_audit(variables)


def test_one_rank_locks_for_those_beside_it(answer_of_audit, tmp_path):
    with locked(tmp_path / "build"):
        assert answer_of_audit(SECOND) == ""


def test_a_closed_stdin_is_left_alone():
    code = "import os; os.close(0); from gpt_speed import children; children.keep_stdin()"
    done = run_python("-c", code, cwd=ROOT, fork=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="of a Unix's pipes")
def test_a_pipe_without_an_end_is_not_waited_for():
    code = (
        "from gpt_speed import children; children.STDIN_SECONDS = 0.3; children.keep_stdin();"
        " print('on')"
    )
    endless = "import time\nwhile True:\n    print('x', flush=True)\n    time.sleep(0.1)"
    with subprocess.Popen([sys.executable, "-c", endless], stdout=subprocess.PIPE) as writer:
        done = run_python("-c", code, stdin=writer.stdout, cwd=ROOT, fork=False)
        writer.kill()
    assert done.stdout == "on\n"


def recorded(times: dict[str, float]) -> Recording:
    """Returns a recording whose operators, by their names, took so many seconds."""
    recording = Recording()
    recording.ops = [WatchedOp(name, [], seconds=time) for name, time in times.items()]
    return recording


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([dict(mm=1, add=9), dict(mm=2, add=8), dict(mm=6, add=7)], dict(mm=2, add=8)),
        # Of steps that differ, the middle one, with the times of those that are like it.
        ([dict(mm=1, add=2), dict(mm=50, exp=50), dict(mm=3, add=4)], dict(mm=2, add=3)),
        ([dict(mm=1), dict(exp=9), dict(mm=2, add=3)], dict(mm=2, add=3)),
        ([dict(mm=5)], dict(mm=5)),
    ],
)
def test_each_operator_has_its_middle_time(steps, expected):
    watch = Watch()
    for times in steps:
        watch.recording = recorded(times)
        watch.end_step()
    ops = watch.middle().with_middle_times()
    assert {op["name"]: op["seconds"] for op in ops} == expected


def test_three_steps_are_watched_where_there_are_five():
    assert watch_order(dict(key=0, steps=23)) == Order("watch", key=0, skipped=2, steps=3)
    assert watch_order(dict(key=0, steps=3)).steps == 1  # as of a slow script
    assert watch_order(dict(key=0, steps=2)) == Order("watch", key=0, skipped=1, steps=1)


def test_a_further_step_is_watched_from_anew(tmp_path):
    """Its weights and its batch are older than it, as they are for the first one."""
    one, three = (watch(tmp_path, TOYS, "by_hand", steps=steps) for steps in (1, 2))
    assert [op["name"] for op in one["ops"]] == [op["name"] for op in three["ops"]]
    assert one["older"] == three["older"]


def test_a_storage_has_one_life(tmp_path):
    """It lives from its maker to the operator after its end, whatever views there are of it."""
    facts = watch(tmp_path, TOYS, "lives")
    names, lives = [op["name"] for op in facts["ops"]], defaultdict(list)
    for size, device, role, born, died in facts["storages"]:
        assert device == "cpu" and (died is None or (born or 0) <= died <= len(names))
        lives[size].append((role, born is None, died is None))
    assert sorted(lives[4 * 10 * 100]) == [
        ("", False, True),  # the gradient
        ("gradient", True, False),  # that of the step before
        ("model", True, True),
        ("optimizer", True, True),
    ]
    assert sorted(lives[4 * 11]) == [("", False, True), ("", True, False)]
    assert lives[4 * 7 * 10] == [("", False, False)]  # the batch
    first = names.index("mm")
    (output,) = (row for row in facts["storages"] if row[3] == first)
    assert output[0] == 4 * 7 * 100 and output[4] > first + 3  # one life with three views


# ---- Memory on a GPU

SEGMENTS = 20 + 2  # MiB: the workspace of matmuls, and all small tensors


@pytest.mark.parametrize(
    ("name", "mib", "change"),
    [
        # Weights; results and one gradient; the rest of the two averages; the roots of all squares.
        ("known", 12 * (4 + 5 + 7 + 4), "updates of all tensors at once"),
        # One root, its quotient, and that of the tensor before.
        ("known_one_by_one", 12 * (4 + 5 + 7 + 3), None),
        # The weight, the result or the gradient.
        ("known_norm", 12 * 2, "norms in one kernel"),
        # The weight, its gradient, and the result of the step before or of this one.
        ("kept_result", 12 * 3, None),
    ],
)
def test_memory_that_is_known(name, mib, change, tmp_path):
    translation = translated(Step(toy(name, tmp_path)))
    assert simulate(translation.memory.events(WORKSPACE)).reserved == (mib + SEGMENTS) * MIB
    assert change is None or change in translation.changes
    assert translation.bound == ""


def test_the_backward_pass_has_a_workspace_of_its_own(tmp_path):
    memory = translated(Step(toy("fast", tmp_path))).memory
    one, two = (simulate(memory.events(32 * MIB, *more)) for more in ([], [32 * MIB]))
    assert two.allocated - one.allocated == 32 * MIB


def test_the_loss_under_autocast_is_computed_in_16_bits(tmp_path):
    """At the peak are the weight, the log-softmax of its copy in 16 bits, that in float32, and the
    gradient of the latter."""
    translation = translated(Step(toy("known_loss", tmp_path)))
    allocator = simulate(translation.memory.events(WORKSPACE))
    assert "the loss's log-softmax in 16 bits" in translation.changes
    assert allocator.peak_allocated // MIB == 48 + 24 + 48 + 48 + WORKSPACE // MIB
    assert translation.bound == ""


@pytest.mark.parametrize(
    ("number", "options"),
    [
        (0, ["--dropout", "0.1"]),
        pytest.param(0, [], marks=pytest.mark.slow),
        pytest.param(6, ["--dtype", "float32"], marks=pytest.mark.slow),
        (7, ["--dtype", "float32", "--dropout", "0.1"]),
    ],
)
def test_its_memory_is_what_predict_traces(ladder, number, options):
    """A script of the ladder, run here, makes what its trace without storage does, whose
    evaluations take no more at this batch size."""
    translation = translated(Step(ladder(number, "--batch-size", 8, *options)))
    text = small(list(stack.rebuild_all().values())[number].decode()).encode()
    options = ["--model", "cpu-demo", "--context-length", "32", *options]
    (traced,) = run_traces(text, options, [8]).values()
    watched = simulate(translation.memory.events(WORKSPACE))
    expected = simulate(traced["events"])
    assert watched.peak_allocated == pytest.approx(expected.peak_allocated, rel=0.02)
    assert watched.reserved == pytest.approx(expected.reserved, rel=0.03)


@pytest.mark.parametrize(
    ("name", "bound", "why"),
    [
        ("fast", "", None),
        ("soft_scores", AT_LEAST, "softmax in float32, as CUDA's autocast has it"),
        ("convolutions", AT_LEAST, "workspaces of cuDNN"),
        ("recurrent", ABOUT, "kernels of cuDNN for recurrent networks"),
        ("compiled_model", ABOUT, "compiled parts, which are counted uncompiled"),
        ("attention_again", AT_MOST, "attention and norms that a checkpoint computes again"),
    ],
)
def test_what_is_not_translated_makes_a_bound(name, bound, why, tmp_path):
    translation = translated(Step(toy(name, tmp_path)))
    assert translation.bound == bound and [*translation.bounds] == ([why] if why else [])


def test_buckets_of_gradients_are_not_known(tmp_path):
    facts = toy("fast", tmp_path) | dict(syncs=[True])
    assert translated(Step(facts)).bounds == {"buckets of DistributedDataParallel": AT_LEAST}


def test_scores_of_attention_stay_in_its_kernel(tmp_path):
    """With dropout, a CPU stores them, and their masks."""
    facts = toy("safe_softmax", tmp_path)
    scores = 4 * B * H * T * T  # bytes

    def count(sizes) -> int:
        return sum(size == scores for size in sizes)

    assert count(storage[0] for storage in facts["storages"]) > 4
    memory = translated(Step(facts)).memory
    assert count(storage.size for storage in memory.storages.values()) == 0


def test_memory_on_other_gpus(tmp_path):
    facts = toy("known", tmp_path)
    report = report_of(facts, cards=["RTX 3090", "H100", "MI300X"])
    jsonschema.validate(json.loads(json.dumps(report)), SCHEMA)
    rows = report["speeds"]
    small, large, amd = (row["memory"]["reserved"] // MIB for row in rows)
    assert (large, amd) == (small + 32 - 20, small + 128 - 20)  # their workspaces
    assert rows[0]["memory"]["room"] == (24576 - 614) * MIB
    assert rows[0]["memory"]["fits"] and rows[0]["memory"]["text"] == "0.3 of 23.4 GB"
    for storage in facts["storages"]:
        storage[0] *= 1000
    assert report_of(facts, cards=["RTX 3090"])["speeds"][0]["memory"]["fits"] is False
    facts["ops"][-1]["compiled"] = True
    assert report_of(facts, cards=["RTX 3090"])["speeds"][0]["memory"]["fits"] is None


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["a.py", "--batch=8", "x"], ["a.py", "--batch=16", "x"]),
        (["a.py", "--batch", "8", "-v"], ["a.py", "--batch", "16", "-v"]),
        (["-m", "a", "batch=8"], ["-m", "a", "batch=16"]),
    ],
)
@pytest.mark.parametrize("option", ["batch", "--batch"])
def test_twice_the_batch(command, expected, option):
    assert with_twice_the_batch(command, option, has_cards=True) == (expected, 16)


@pytest.mark.parametrize(
    ("command", "has_cards", "ranks", "says"),
    [
        (["a.py", "--batch=8"], False, "1", "is for --gpu"),
        (["a.py", "--batch=8"], True, "2", "leave out torchrun"),
        (["a.py", "--batches=8"], True, "1", "has no batch with a number"),
        (["a.py", "--batch", "large"], True, "1", "has no batch with a number"),
        (["a.py", "--batch"], True, "1", "has no batch with a number"),
    ],
)
def test_no_batch_to_double(command, has_cards, ranks, says, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", ranks)
    with pytest.raises(UserError, match=says) as error:
        with_twice_the_batch(command, "batch", has_cards)
    assert error.value.code == 2


@pytest.mark.slow
def test_memory_at_twice_the_batch(tmp_path, own_audit):
    options = ["--gpu", "T4", "--batch-option", "batch", "--json"]
    answer = json.loads(printed(*own_audit, tmp_path, *options, TOYS, "sized", "--batch", 512))
    (row,) = answer["speeds"]
    jsonschema.validate(answer, SCHEMA)
    assert row["larger"]["batch"] == 1024 and "at batch size 1,024" in answer["speeds_text"]
    assert 1.5 < row["larger"]["reserved"] / row["memory"]["reserved"] < 2.5


@pytest.mark.parametrize(
    ("others", "computing", "is_busy"),
    [
        (None, None, []),
        (0.1, 0.99, []),
        (1.3, 0.99, ["1.3 of its cores"]),
        (1.3, 0.4, ["1.3 of its cores", "a core for only 40% of the time"]),
        (None, 0.4, ["a core for only 40% of the time"]),
    ],
)
def test_a_busy_machine_is_told_first(ladder, tmp_path, others, computing, is_busy):
    first, *_ = report_of(ladder(0), tmp_path, others=others, computing=computing)["head"]
    assert first.startswith("**") == bool(is_busy) and all(words in first for words in is_busy)


def test_a_script_that_waits_has_no_core(forked_children):
    timed, _ = timed_and_watched([str(TOYS), "sleeps"], 2)
    assert timed["computing"] < 0.5


def test_a_machine_that_hides_its_memory(monkeypatch):
    machine = dict(name="Xeon", memory_total=None)
    monkeypatch.setattr("gpt_speed.audit.audit.ask_machine", lambda *_, **__: machine)
    assert machine_of("python", dict(device="cpu", memory_total=None)) == machine


def test_a_system_that_is_not_unix(tmp_path):
    """Windows has no sizes of memory, no groups of processes, no fork."""
    (tmp_path / "resource.py").write_text("raise ImportError(__name__)\n")
    (tmp_path / "sitecustomize.py").write_text(
        "import os, torch\ndel os.killpg, os.getpgid, os.register_at_fork\n"
    )
    facts = watch(tmp_path, TOYS, "fast", env=environment(PYTHONPATH=str(tmp_path)), fork=False)
    facts |= dict(memory_total=None)
    assert state(facts, "10-batch-size") == CANT_TELL
    assert "? of ? GB" in render.screen(report_of(facts, tmp_path))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("short", "ended after 1 step, and an audit needs 2"),
        ("fails", "failed: ZeroDivisionError"),
        ("nothing", "trained nothing in its own process: no backward pass"),
        ("no_matmuls", "multiplies no matrices: the techniques are for models that do"),
        ("matmuls_in_evaluation", "multiplies no matrices: the techniques are for models that do"),
        pytest.param("thread", "let it train in the main thread", marks=pytest.mark.slow),
    ],
)
def test_one_line_says_what_to_do(name, words, forked_children):
    with pytest.raises(UserError, match=words):
        timed_and_watched([str(TOYS), name], 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "key", "steps"),
    [
        ("gan", 1, 4),
        ("two_optimizers", 1, 4),
        ("updates_by_hand", "backward", 4),
        ("probe", 1, 24),
        ("update_fails", 0, 3),
    ],
)
def test_what_ends_a_step(name, key, steps, forked_children):
    """The rarest update does, of equally frequent ones the last, of an optimizer that goes on and
    doesn't fail; without any, a backward pass does."""
    timed, _ = timed_and_watched([str(TOYS), name], 2)
    assert (timed["key"], timed["steps"]) == (key, steps)


@pytest.fixture
def own_audit(tmp_path):
    """Returns the command in a clone of its own: other tests start tools in this one meanwhile."""
    return copy_of_checkout(tmp_path / "clone") / "measure.py", "audit", "--results-dir"


def printed(*command) -> str:
    done = run_python(*command, fork=False, env=environment(OMP_NUM_THREADS="1"))
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.mark.slow
def test_accelerate_launch(tmp_path, own_audit, capfd):
    """The launcher starts a child, so it has to start the audit."""
    pytest.importorskip("accelerate")
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    with pytest.raises(UserError, match="its children computed for .* let torchrun or accelerate"):
        timed_and_watched([*launch, str(TOYS), "accelerated"], 4)
    assert "64 tokens a step" in printed(*launch, *own_audit, tmp_path, TOYS, "accelerated")


def test_it_ends_whatever_is_caught(tmp_path, monkeypatch, forked_children):
    monkeypatch.chdir(tmp_path)
    timed, watched = timed_and_watched([str(TOYS), "catches_all"], 2)
    assert not list(tmp_path.iterdir())  # nothing was saved
    assert len(timed["seconds"]) == 20 and watched["steps"] == 5


def test_a_module_and_its_arguments(tmp_path, monkeypatch, forked_children):
    """They are as `python -m` has them, also where the module's name is one of ours."""
    (tmp_path / "watch").mkdir()
    (tmp_path / "watch" / "bench.py").write_text(
        "import sys, os\nassert __name__ == '__main__' and sys.argv[1:] == ['--', '-x']\n"
        "assert sys.path[0] == os.getcwd(), sys.path\n"
        "from watch import own\nown.TOYS['fast']()\n"
    )
    shutil.copy(TOYS, tmp_path / "watch" / "own.py")
    monkeypatch.chdir(tmp_path)
    _, watched = timed_and_watched(["-m", "watch.bench", "--", "-x"], 2)
    assert watched["how"] == "watched"


@pytest.mark.slow
def test_the_command_and_its_page(tmp_path, own_audit):
    text, *_ = (
        printed(*own_audit, tmp_path, "--name", "mine", "--gpu", "4090, T4", TOYS, "by_hand")
        .strip()
        .rpartition("\n")
    )
    assert "1 call of attention by hand, 16 × 16 scores" in text and "| T4 | " in text
    page = (tmp_path / "audit-mine.md").read_text(encoding="utf-8")
    assert text in page and page.startswith("# Audit of audit_toys")


@pytest.mark.slow
def test_under_torchrun_rank_0_tells(tmp_path):
    text = printed(*TORCHRUN, *AUDIT, tmp_path, TOYS, "distributed")
    assert text.count("64 tokens a step") == 1 and "no_sync()" in text


@pytest.mark.slow
def test_the_rank_that_fails_says_why(tmp_path):
    """It does so at once, and the others don't wait for it."""
    done = run_python(*TORCHRUN, *AUDIT, tmp_path, TOYS, "one_rank_fails", fork=False, timeout=100)
    assert done.returncode == 1
    assert f"error: {TOYS} failed: ValueError: the real reason" in done.stderr


@pytest.mark.slow
def test_ranks_end_after_the_same_step(tmp_path):
    """They do, though by its own clock each one would end after another step."""
    for path in (ROOT / "gpt_speed").rglob("*.py"):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text().replace("LONGEST = 20 ", "LONGEST = 2 "))
    script = tmp_path / "audited.py"  # each rank with a report of its own
    script.write_text(
        "import json, os, subprocess, sys\n"
        "order = dict(mode='time', report=f'{os.environ[\"RANK\"]}.json')\n"
        "sys.exit(subprocess.run([sys.executable, 'gpt_speed/audit/child.py', json.dumps(order),"
        f" {str(TOYS)!r}, 'one_rank_is_late']).returncode)\n"
    )
    done = run_python(*TORCHRUN, script, cwd=tmp_path, fork=False, timeout=60)
    assert done.returncode == 0, done.stderr
    one, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert one["how"] == other["how"] == "timed" and one["steps"] == other["steps"] < 20


def test_a_report_is_read_after_a_time_out(monkeypatch):
    """A process may write its report and then not end."""

    def run_child(command, timeout, environment):
        report = Path(json.loads(command[2])["report"])
        report.write_text(json.dumps(dict(how="failed", error="ValueError: the real reason")))
        raise subprocess.TimeoutExpired(command, timeout, stderr=b"its traceback")

    monkeypatch.setattr("gpt_speed.children.run_child", run_child)
    with pytest.raises(UserError, match="failed: ValueError: the real reason"):
        timed_and_watched([str(TOYS), "fast"], 2)


@pytest.mark.parametrize(
    ("code", "says", "shown"),
    [
        (
            "import time; print('Waiting for a lock', flush=True); time.sleep(300)",
            "is stuck, or too slow to be timed in 0.1 minutes",
            "Waiting for a lock",
        ),
        (
            "import os, sys; sys.stderr.write('the last words'); os.kill(os.getpid(), 9)",
            "ended by signal 9, as Linux ends a program for want of RAM, before",
            "the last words",
        ),
    ],
)
def test_what_a_script_said_last_is_shown(tmp_path, capsys, code, says, shown):
    """They are shown where it is stuck, and where something else ends it."""
    script = tmp_path / "script.py"
    script.write_text(code)
    with pytest.raises(UserError, match=says):
        timed_and_watched([str(script)], 0.1)
    assert shown in capsys.readouterr().err
