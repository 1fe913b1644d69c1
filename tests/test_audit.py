"""measure.py audit: what a script lacks, by the ladder of which that is known, and by toys."""

import json
import shutil

import pytest
from conftest import ROOT, environment, run_python, small, write_tokens

from bench.audit import render
from bench.audit.checks import CANT_TELL, HAS, LACKS, NOT_HERE, verdicts
from bench.audit.notes import notes
from bench.audit.price import gains_of, work_of
from bench.audit.run import audit, machine_of
from bench.audit.step import Step
from bench.cards import CARDS
from bench.common import UserError
from bench.predict.speed import margin, seconds
from bench.predict.store import ask
from patches import stack

TOYS = ROOT / "tests" / "audit_toys.py"
CHILD = ROOT / "bench" / "audit" / "child.py"
# What bench.audit.run.machine_of would tell.
MACHINE = dict(name="AMD EPYC", torch="2", dtype="float32", memory_there=2**34,
               rates=dict(float32=1e11))
GPU = MACHINE | dict(name="a GPU that nobody knows", capability="9.0", dtype="bfloat16",
                     memory_there=80 * 2**30)
TECHNIQUES = [patch.name for patch in stack.load() if patch.name != "ddp"]
# What a CPU can't show: TF32, pinned memory, whether a larger batch pays; and one without units for
# it bfloat16.
UNSEEN = "02-tensor-cores", "04-pinned-memory", "05-bfloat16", "10-batch-size"


def watch(script, *options, report=None, **order) -> dict:
    """The report of the watched step of a script."""
    report = report or script.with_suffix(".json")
    order = dict(mode="watch", report=str(report), key="0", watched=2) | order
    done = run_python(CHILD, json.dumps(order), script, *options)
    assert report.exists(), done.stderr
    facts = json.loads(report.read_text())
    assert facts["how"] == "watched", (facts["how"], facts["error"], done.stderr)
    return facts | MACHINE


def judged(facts: dict) -> dict:
    return verdicts(Step(facts))


def lacking(facts: dict) -> set[str]:
    return {name for name, each in judged(facts).items() if each.state == LACKS}


@pytest.fixture(scope="module")
def rung(tmp_path_factory):
    """What was watched of the ladder's script after so many techniques."""
    folder, known = tmp_path_factory.mktemp("rungs"), {}
    data, texts = write_tokens(folder / "data"), list(stack.rebuild_all().values())

    def watched(number: int, *options) -> dict:
        if (number, options) not in known:
            script = folder / f"rung_{number}.py"
            script.write_text(small(texts[number].decode()))
            known[number, options] = watch(
                script, "--model", "cpu-demo", "--context-length", 32, "--batch-size", 2,
                "--eval-windows", 2, "--data", data, "--results-dir", folder, *options)
        return known[number, options]

    return watched


def expected(number: int, *unseen: str) -> set[str]:
    return {*TECHNIQUES[number:]} - {*unseen}


@pytest.mark.parametrize("number", [
    pytest.param(each, marks=[] if each in (0, 8, 15) else pytest.mark.slow)
    for each in range(len(TECHNIQUES) + 1)])
def test_each_rung_lacks_exactly_what_comes_after_it(rung, number):
    assert lacking(rung(number)) == expected(number, *UNSEEN)


@pytest.mark.parametrize("number", [0, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_ladder_on_a_simulated_gpu(rung, number):
    """TF32 shows there, and what is a CPU's doesn't."""
    facts = on_gpu(rung(number))
    unseen = {"04-pinned-memory", "12-huge-pages", "15-kept-memory"}
    assert lacking(facts) == expected(number, *unseen)
    full = judged(on_gpu(rung(number), memory=79 * 2**30))
    assert full["10-batch-size"].state == CANT_TELL  # a larger batch may not fit


def on_gpu(facts: dict, **changes) -> dict:
    """As if it had been watched on an H100."""
    ops = [op | dict(device="cuda") for op in facts["ops"]]
    return facts | GPU | dict(ops=ops, memory=2**30) | changes


def test_bfloat16_weights(rung):
    before, after = (on_gpu(rung(number, *options)) for number, options in (
        (4, ()), (5, ("--dtype", "bfloat16"))))
    assert lacking(before) - lacking(after) == {"05-bfloat16"}


def test_copies_to_a_gpu(rung):
    """As the operators of such a copy would be noted."""
    facts = on_gpu(rung(0))
    for pinned, non_blocking, state in ((False, False, LACKS), (True, False, LACKS),
                                        (True, True, HAS)):
        copy = facts["ops"][-1] | dict(
            name="_to_copy", inputs=[[9999, [2, 32], "int64", "self"]], phase="forward",
            origin=None, outputs=[[9998, [2, 32], "int64"]], flops=0, device="cpu",
            others=dict(source="cpu", pinned=pinned, non_blocking=non_blocking))
        found = judged(facts | dict(ops=[*facts["ops"], copy]))["04-pinned-memory"]
        assert found.state == state
    assert judged(facts)["04-pinned-memory"].state == NOT_HERE


def test_convolutions_have_their_own_tf32(tmp_path):
    facts = on_gpu(toy("convolutions", tmp_path))
    assert judged(facts)["02-tensor-cores"].state == LACKS
    for op in facts["ops"]:
        op["flops"] *= op["name"].startswith("convolution")
    assert judged(facts)["02-tensor-cores"].state == NOT_HERE


# ---- GPUs that aren't here ---------------------------------------------------------------------


@pytest.mark.parametrize(("number", "options"), [
    (0, []), pytest.param(3, [], marks=pytest.mark.slow),
    pytest.param(7, ["--dtype", "float32"], marks=pytest.mark.slow)])
def test_priced_as_predict_does(rung, number, options):
    """A rung, run here, does what its trace without storage does."""
    step = Step(rung(number, *options))
    text = small(list(stack.rebuild_all().values())[number].decode()).encode()
    options = ["--model", "cpu-demo", "--context-length", "32", *options]
    (traced,) = ask(text, options, [2]).values()
    found, known = (totals(works) for works in (work_of(step), traced["step"]))
    assert found.keys() == known.keys()
    for group, (kernels, flops, size) in known.items():
        assert found[group] == [pytest.approx(kernels, rel=0.2, abs=2), flops,
                                pytest.approx(size, rel=0.05, abs=1000)], group


def totals(works) -> dict[tuple, list[float]]:
    """Kernels, floating-point operations and bytes by kind, precision and alignment."""
    found = {}
    for *group, kernels, flops, size in works:
        before = found.get(tuple(group), [0, 0, 0])
        found[tuple(group)] = [before[0] + kernels, before[1] + flops, before[2] + size]
    return found


def test_prices(tmp_path):
    facts = on_gpu(toy("fast", tmp_path), precision="high")
    found = of_timed(facts, tmp_path, ["RTX 4090", "T4"])
    fast, slow = found.prices
    times = seconds(work_of(Step(facts)), CARDS["RTX 4090"])
    assert (fast["low"] + fast["high"]) / 2 == pytest.approx(32 / sum(times.values()))
    share = margin(CARDS["RTX 4090"], False, times)  # of what waits for the host
    assert fast["high"] / fast["low"] == pytest.approx((1 + share) / (1 - share))
    assert slow["lacks"] is None
    page, html = render.write_page(found, "", tmp_path)
    assert "| RTX 4090 | " in page.read_text(encoding="utf-8")
    assert html.name == "audit-a.html" and ">RTX 4090</td>" in html.read_text(encoding="utf-8")
    assert json.loads(json.dumps(found.as_json()))["prices"][0]["card"] == "RTX 4090"


def test_prices_say_what_they_can_not_tell(tmp_path):
    """What is compiled runs uncompiled while it is watched; some types a card has no units for."""
    facts = toy("fast", tmp_path)
    for each in facts["ops"]:
        each["compiled"] = True
    text = render.text(of_timed(facts, tmp_path, ["T4"]))
    assert "at least" in text and "uncompiled" in text
    for each in facts["ops"]:
        if each["kernel"] and each["kernel"][0]:
            each["kernel"][0] = "float64"
    assert "no float64" in render.text(of_timed(facts, tmp_path, ["T4"]))


# ---- Toys --------------------------------------------------------------------------------------

# What `fast`, the plain one, lacks on any machine: the numbers of the techniques.
PLAIN = {3, 8, 9, 12, 13, 14, 15}
NO_HEAD = {9, 13, 14}
# By the toy's name: what it lacks in place of that, and what can't be told beside UNSEEN.
LACKING = dict(
    fast=PLAIN, stored_mask=PLAIN | {1}, by_hand=PLAIN | {1, 7},
    exponentials=PLAIN | {7}, apart=PLAIN | {11}, cross=PLAIN, multihead=PLAIN | {7},
    std_norm=PLAIN | {6}, rms_norm=PLAIN | {6}, own_rms_norm=PLAIN, cubed=PLAIN | {6},
    padded=PLAIN - {9}, tied=PLAIN, closure=PLAIN - NO_HEAD - {3}, gan=PLAIN - NO_HEAD,
    updates_by_hand=PLAIN - {3}, accumulated=PLAIN - {3}, evaluated=PLAIN - {3}, autocast=PLAIN,
    compiled_model=PLAIN - {8}, compiled_step=PLAIN - {3, 8, 13}, compiled_in_part=PLAIN - {8},
    checkpointed=PLAIN | {1, 7}, chunks=PLAIN - {14}, distributed=PLAIN,
    accelerated=PLAIN, lightning=PLAIN - NO_HEAD - {3}, two_optimizers=PLAIN, workers=PLAIN,
    convolutions=PLAIN - NO_HEAD, penalty=PLAIN - NO_HEAD - {15})
UNTOLD = dict(cross={11}, updates_by_hand={3}, compiled_in_part={8}, penalty={15})
FAST_TOYS = "fast", "by_hand", "cubed", "closure", "chunks", "accumulated", "lightning", "penalty"


def toy(name: str, folder) -> dict:
    key = dict(updates_by_hand="backward", gan="1", two_optimizers="1").get(name, "0")
    return watch(TOYS, name, report=folder / "report.json", key=key)


@pytest.mark.parametrize("name", [
    pytest.param(each, marks=[] if each in FAST_TOYS else pytest.mark.slow) for each in LACKING])
def test_toys(name, tmp_path):
    if name == "accelerated":
        pytest.importorskip("accelerate")
    facts = toy(name, tmp_path)
    found = judged(facts)
    states = {state: {int(name[:2]) for name, each in found.items() if each.state == state}
              for state in (LACKS, CANT_TELL)}
    here = {12} if facts["huge_pages"] != "not set" else set()
    assert states[LACKS] == LACKING[name] - here
    assert states[CANT_TELL] == {10} | UNTOLD.get(name, set())


def test_what_was_seen_has_its_line(tmp_path):
    found = judged(toy("by_hand", tmp_path))
    lines = TOYS.read_text().splitlines()
    for technique, text in (("07-flash-attention", "q @ k.transpose"),
                            ("14-chunked-head", "self.head(self.hidden(ids))"),
                            ("13-loss-in-graph", "F.cross_entropy"),
                            ("03-fused-adamw", "optimizer.step()")):
        name, _, line = found[technique].place.partition(":")
        assert name == TOYS.name and text in lines[int(line) - 1]
        assert 0 < found[technique].share < 1


def test_notes(tmp_path):
    facts = toy("accumulated", tmp_path)
    text = "\n".join(notes(Step(facts), timed_of(facts)))
    assert "1 value read back from tensors" in text and "audit_toys.py:" in text
    assert "float64" not in text
    facts |= dict(syncs=[True] * 3, ddp=[dict(unused=True, compiled_first=True)])
    timed = timed_of(facts) | dict(breaks={"a reason": 2}, new_graphs=3, waited=4.0,
                                   workers=[0])
    text = "\n".join(notes(Step(facts), timed))
    for part in ("no_sync()", "find_unused_parameters", "2 graph breaks", "3 times",
                 "80% of the time waits", "0 workers", "the other way round"):
        assert part in text


def timed_of(facts: dict) -> dict:
    """What a timed run would report."""
    return facts | dict(seconds=[1.0] * 5, breaks={}, new_graphs=0)


def of_timed(facts: dict, folder, cards=()) -> render.Findings:
    return render.findings(["a.py"], timed_of(facts), facts, facts, folder, cards)


def test_tokens_and_operations(rung, tmp_path):
    """As many as a formula says: 6 for each weight of a product and token, and attention's."""
    facts = rung(0)
    found = of_timed(facts, tmp_path)
    assert found.figures["tokens"] == 2 * 32
    width, layers, context = 32, 1, 32
    weights = layers * 12 * width**2 + width * 50_257
    assert found.figures["flops"] == 64 * (6 * weights + 12 * layers * context * width)
    assert found.figures["seconds"] == 1 and found.figures["tok_per_sec"] == 64
    assert sum(found.figures["shares"].values()) == pytest.approx(1)
    text = render.text(found)
    assert "64 tokens a step" in text and "**not on this hardware**: #2 TF32 tensor cores" in text


def test_gains_are_from_the_machine_that_is_nearest(tmp_path):
    def of(name: str, device: str, dtype: str = "bfloat16"):
        return gains_of(dict(name=name, dtype=dtype), device, tmp_path)

    gains, where = of("NVIDIA H100 80GB HBM3", "cuda")
    assert where == "measured on H100" and 1.6 < gains["05-bfloat16"] < 1.7
    gains, where = of("NVIDIA H200", "cuda")
    assert where == "predicted for the H200" and gains["05-bfloat16"] > 1.3
    _, where = of("a GPU that nobody knows", "cuda")
    assert where == "measured on H100, another machine than this one, in bfloat16"
    gains, where = of("AMD EPYC", "cpu")
    assert where == "measured on AMD EPYC" and gains["05-bfloat16"] > 1.3
    gains, where = of("AMD EPYC", "cpu", "float32")
    assert where == "measured on AMD EPYC (float32)" and gains["05-bfloat16"] < 1.1
    _, where = of("a CPU that nobody knows", "cpu", "float32")
    assert where.endswith("another machine than this one, in float32")


def test_the_machine_is_named_as_in_journals(monkeypatch):
    """It is that on which the script trained."""
    def machine(name: str, ram_gb: float | None, **timed) -> tuple[dict, list]:
        asked, answers = [], dict(this_machine=dict(name=name, ram_gb=ram_gb), matmul_peak={})
        monkeypatch.setattr("bench.processes.ask_machine", lambda question, **environment:
                            asked.append((question, environment)) or answers[question])
        return machine_of(timed), asked

    hidden, cpu = dict(CUDA_VISIBLE_DEVICES=""), dict(device="cpu", memory_there=None)
    assert machine("Xeon", 2.0, **cpu) == (
        dict(name="Xeon", ram_gb=2.0, memory_there=2**31, rates={}),
        [("this_machine", hidden), ("matmul_peak", hidden)])
    assert machine("Xeon", None, **cpu)[0]["memory_there"] is None
    gpu, asked = machine("NVIDIA H100 80GB HBM3", 2.0, device="cuda", memory_there=7)
    assert gpu["memory_there"] == 7 and asked == [("this_machine", {})]  # a datasheet has its rate


def test_a_system_that_is_not_unix(tmp_path):
    """What Windows lacks isn't asked for: no sizes of memory, no groups of processes, no fork."""
    (tmp_path / "resource.py").write_text("raise ImportError(__name__)\n")
    (tmp_path / "sitecustomize.py").write_text(
        "import os, torch\ndel os.killpg, os.getpgid, os.register_at_fork\n")
    report = tmp_path / "report.json"
    for order in (dict(mode="time"), dict(mode="watch", key="0", watched=2)):
        done = run_python(CHILD, json.dumps(order | dict(report=str(report))), TOYS, "fast",
                          env=environment(PYTHONPATH=str(tmp_path)), fork=False)
        assert not done.returncode and report.exists(), done.stderr
    facts = json.loads(report.read_text()) | MACHINE | dict(memory_there=None)
    assert facts["memory"] is None and facts["how"] == "watched"
    assert judged(facts)["10-batch-size"].state == CANT_TELL
    assert "memory ? of ? GB" in render.text(of_timed(facts, tmp_path))


# ---- Scripts that need care --------------------------------------------------------------------


@pytest.mark.parametrize("name, words", [
    ("short", "ended after 1 step, and an audit needs 2"), ("fails", "failed: ZeroDivisionError"),
    ("nothing", "trained nothing in its own process: no backward pass"),
    pytest.param("thread", "let it train in the main thread", marks=pytest.mark.slow)])
def test_one_line_says_what_to_do(name, words, forked_children):
    with pytest.raises(UserError, match=words):
        audit([str(TOYS), name], 2)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "key", "steps"), [
    ("gan", "1", 4), ("two_optimizers", "1", 4), ("updates_by_hand", "backward", 4),
    ("closure", "0", 4), ("lightning", "0", 4)])
def test_what_ends_a_step(name, key, steps, forked_children):
    """The rarest update, of those that are as frequent the last one; without any a backward
    pass."""
    timed, watched = audit([str(TOYS), name], 2)
    assert (timed["key"], timed["steps"]) == (key, steps)
    assert watched["how"] == "watched"


@pytest.mark.slow
def test_accelerate_launch(tmp_path, capfd):
    """It starts a child; so it has to start the audit."""
    pytest.importorskip("accelerate")
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    with pytest.raises(UserError, match="its children computed for .* let torchrun or accelerate"):
        audit([*launch, str(TOYS), "accelerated"], 4)
    done = run_python(*launch, ROOT / "measure.py", "audit", "--results-dir", tmp_path, TOYS,
                      "accelerated", fork=False, env=environment(OMP_NUM_THREADS="1"))
    assert not done.returncode, done.stderr
    assert "64 tokens a step" in done.stdout


def test_it_ends_whatever_is_caught(tmp_path, monkeypatch, forked_children):
    monkeypatch.chdir(tmp_path)
    timed, watched = audit([str(TOYS), "catches_all"], 2)
    assert not list(tmp_path.iterdir())  # nothing was saved
    assert timed["steps"] == 24 and len(timed["seconds"]) == 20 and watched["steps"] == 3


def test_a_module_and_its_arguments(tmp_path, monkeypatch, forked_children):
    """As `python -m` has them, also where its name is one of ours."""
    (tmp_path / "watch").mkdir()
    (tmp_path / "watch" / "bench.py").write_text(
        "import sys, os\nassert __name__ == '__main__' and sys.argv[1:] == ['--', '-x']\n"
        "assert sys.path[0] == os.getcwd(), sys.path\n"
        "from watch import own\nown.TOYS['fast']()\n")
    shutil.copy(TOYS, tmp_path / "watch" / "own.py")
    monkeypatch.chdir(tmp_path)
    timed, watched = audit(["-m", "watch.bench", "--", "-x"], 2)
    assert timed["how"] == "ended" and watched["how"] == "watched"


@pytest.mark.slow
def test_the_command_and_its_page(tmp_path):
    done = run_python(ROOT / "measure.py", "audit", "--results-dir", tmp_path, "--name", "mine",
                      "--gpu", "4090, T4", TOYS, "by_hand", fork=False,
                      env=environment(OMP_NUM_THREADS="1"))
    assert not done.returncode, done.stderr
    assert "4 softmaxes" not in done.stdout and "1 softmax of scores, 16 × 16" in done.stdout
    page = (tmp_path / "audit-mine.md").read_text(encoding="utf-8")
    assert "| RTX 4090 | " in done.stdout and "| T4 | " in done.stdout
    shown, _, name = done.stdout.strip().rpartition("\n")
    assert shown in page and page.startswith("# Audit of audit_toys") and "audit-mine.md" in name


@pytest.mark.slow
def test_under_torchrun_rank_0_tells(tmp_path):
    done = run_python("-m", "torch.distributed.run", "--nproc_per_node=2", ROOT / "measure.py",
                      "audit", "--results-dir", tmp_path, TOYS, "distributed", fork=False,
                      env=environment(OMP_NUM_THREADS="1"))
    assert not done.returncode, done.stderr
    assert done.stdout.count("64 tokens a step") == 1 and "no_sync()" in done.stdout
