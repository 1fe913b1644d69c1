"""bench/predict/allocator.py and trace.py: the simulated allocator, the trace, what was
published."""

import json
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import ROOT
from torch.profiler import ProfilerActivity, profile

from bench.catalogue import Scripts, published
from bench.common import UserError, load_script
from bench.predict import child, compiled, lesson, pytorch, trace
from bench.predict import store as predictions
from bench.predict.allocator import GB, MIB, Allocator, DoesNotFit, Need, need, simulate
from bench.predict.speed import Work
from bench.predict.store import (
    TRACED,
    at_batch,
    changed,
    code_of,
    key_of,
    largest,
    predict,
    predict_all,
)
from bench.predict.tracing import ask
from bench.report import check

SCRIPTS = Scripts()
RUNGS = SCRIPTS.rungs()
FLOAT32 = ["--dtype", "float32"]
SMALL = ["--model", "cpu-demo", "--dropout", "0.1"]


# ---- The allocator


@pytest.mark.parametrize(("sizes", "reserved"), [
    ([1], 2 * MIB),
    ([MIB], 2 * MIB),
    ([MIB, MIB], 2 * MIB),
    ([MIB] * 3, 4 * MIB),
    ([MIB + 1], 20 * MIB),
    ([10 * MIB - 1] * 2, 20 * MIB),
    ([10 * MIB], 10 * MIB),
    ([11 * MIB - 5], 12 * MIB),
    ([10 * MIB, MIB + 1, 9 * MIB], 30 * MIB),
])
def test_segments(sizes, reserved):
    assert simulate(sizes).reserved == reserved


def test_sizes_are_rounded_to_512_bytes():
    allocator = Allocator()
    blocks = [allocator.malloc(size) for size in (1, 512, 513)]
    assert [block.size for block in blocks] == [512, 512, 1024] and allocator.allocated == 2048
    assert [block.start - blocks[0].start for block in blocks] == [0, 512, 1024]


def test_a_large_block_is_split_only_if_more_than_a_mebibyte_remains():
    assert Allocator().malloc(19 * MIB).size == 20 * MIB  # all of its own segment
    assert Allocator().malloc(19 * MIB - 1024).size == 19 * MIB - 1024
    allocator = Allocator()
    first = allocator.malloc(9 * MIB)
    assert (first.size, first.after.size) == (9 * MIB, 11 * MIB)
    assert allocator.malloc(10 * MIB).size == 11 * MIB  # all of the rest


def test_neighbours_merge_and_the_best_fit_is_taken():
    allocator = Allocator()
    a, b, c, d = (allocator.malloc(size * MIB) for size in (4, 5, 6, 5))
    assert allocator.reserved == 20 * MIB
    for block in (a, c):
        allocator.release(block)
    assert allocator.malloc(4 * MIB - 1) is a  # not the larger one
    allocator.release(a)
    allocator.release(b)  # joins both neighbours
    assert allocator.malloc(15 * MIB).start == a.start and allocator.reserved == 20 * MIB
    assert (allocator.allocated, allocator.peak_allocated) == (20 * MIB, 20 * MIB)
    allocator.release(d)


def test_a_full_card_gives_free_segments_back_first():
    events = [30 * MIB, 30 * MIB, -1, 40 * MIB]
    assert simulate(events).reserved == 100 * MIB
    found = simulate(events, capacity=90 * MIB)
    assert (found.reserved, found.peak_reserved) == (70 * MIB, 70 * MIB)
    with pytest.raises(DoesNotFit):
        simulate(events, capacity=60 * MIB)
    # A segment of which a part is in use can't go.
    with pytest.raises(DoesNotFit):
        simulate([2 * MIB, 15 * MIB, -2, 40 * MIB], capacity=50 * MIB)


# ---- What a script needs


def test_what_a_card_has_to_have():
    """Less than what is reserved without a limit, where free segments can be given back."""
    events = [30 * MIB, 30 * MIB, -1, 40 * MIB]
    assert need(events) == Need(reserved=100, least=70)
    assert need([3 * MIB]) == Need(20, 20)
    needs = {8: Need(900, 800), 16: Need(1800, 1500), 32: Need(3600, 3600), 24: Need(2000, 2000)}
    assert [largest(needs, predictions.OTHERS + mib)
            for mib in (799, 800, 2100, 3600)] == [0, 8, 16, 32]


def test_sizes_grow_with_the_batch():
    assert at_batch(32, [800, -1, 5, -2], [1600, -1, 5, -2]) == [3200, -1, 5, -2]
    for other in ([1600, -1, 5], [1600, -2, 5, -1], [801, -1, 5, -2]):
        with pytest.raises(ValueError, match="differs|argument"):
            at_batch(9, [800, -1, 5, -2], other)


def traced(batch: int, events: list[int]) -> dict:
    return dict(events=events, step=[["rest", "", True, 1, 0, batch]], evaluation=[],
                tokens=100 * batch, flops_per_token=7)


class Texts:
    """In place of Scripts: a script is its own name and text."""

    def text(self, script: str) -> bytes:
        return script.encode()

    def canonical(self, script: str) -> str:
        return script.partition(" ")[0]


def ask_by(monkeypatch, ask) -> None:
    """Made-up traces in place of those of bench.predict.tracing."""
    def ask_each(text, options, batches):
        found = {}
        for batch in batches:
            try:
                found |= ask(text, options, [batch])
            except UserError as error:
                found[batch] = error
        return found

    monkeypatch.setattr(predictions, "ask", ask)
    monkeypatch.setattr(predictions, "ask_each", ask_each)


@pytest.fixture
def predicted(tmp_path, monkeypatch):
    """predict(script, options, ...) into a folder, with made-up traces; `asked` of them so far."""
    asked = []

    def ask(text, options, batches):
        if b"refuses" in text and 2 in batches:
            raise UserError("--batch-size has to be a multiple of --micro-batches")
        asked.append((text, options, batches))
        return {batch: traced(batch, [40 * MIB] * batch if b"odd" in text else [batch * 40 * MIB])
                for batch in batches}

    ask_by(monkeypatch, ask)
    monkeypatch.setattr(predictions, "REFERENCE", tmp_path / "reference")
    yield SimpleNamespace(asked=asked, results=tmp_path, predict=lambda script, options=(), **more:
                          predict(Texts(), script, list(options), tmp_path, **more))


def test_what_was_predicted_is_kept(predicted):
    """By a script's name and its options; what a small card needs is traced only for one."""
    asked, predict, kept_in = predicted.asked, predicted.predict, predicted.results / "predict.json"
    known = predict("name", ["--x"])
    assert asked == [(b"name", ["--x"], TRACED)] and known.code == code_of(b"name")
    assert list(known.needs) == [8, 16, 32, 64, 128, 256, 512]
    assert known.needs[64] == Need(64 * 40, 64 * 40) and known.context_length == 100
    assert known.works[16] == dict(step=[Work("rest", "", True, 1, 0, 16)], evaluation=[])
    assert list(json.loads(kept_in.read_text())) == ["name --x"]
    assert predict("name", ["--x"]) == known == predict("name with edits", ["--x"])
    assert predict("name", ["--x"], smallest=320) == known and len(asked) == 1
    known = predict("name", ["--x"], smallest=319, batch=6)
    assert [batches for *_, batches in asked[1:]] == [[1], [2], [4], [6]]
    assert known.needs[6] == Need(240, 240)
    assert predict("name", ["--x"], smallest=1, batch=6) == known and len(asked) == 5
    assert predict("name", ["--x"], anew=True) and len(asked) == 6
    predict("other", ["--x"])
    assert predict("odd").needs[32] == Need(32 * 40, 32 * 40)  # each size is traced
    asked.clear()
    whole = kept_in.read_text()
    for damaged in ("[]", whole.replace('"works"', '"w"'), whole.replace('"16":{', '"17":{'),
                    whole.replace('"code"', '"c"')):  # as if it weren't there
        kept_in.write_text(damaged)
        predict("name", ["--x"])
    assert len(asked) == 4


def test_the_code_of_a_script():
    """Comments, docstrings and help texts are no part of it; defaults and what is printed are."""
    def code(default: int, help: str, comment: str, printed: str) -> str:
        lines = [f'"""{comment}"""', "class Config:", f"    batch = option({default}, '{help}', 1)",
                 "def train():", f'    """{comment}"""', f"    print('{printed}')  # {comment}"]
        return code_of("\n".join(lines).encode())

    assert code(8, "sequences", "old", "x") == code(8, "a batch", "new", "x")
    assert len({code(8, "a batch", "old", "x"), code(4, "a batch", "old", "x"),
                code(8, "a batch", "old", "y")}) == 3
    assert code_of(b"no Python") != code_of(b"nor this")


def test_code_that_has_changed_is_named(predicted):
    def line(*scripts: str) -> str | None:
        return changed(Texts(), [(script, predicted.predict(script)) for script in scripts])

    assert line("f", "a", "b") is None
    assert line("f # edited", "a", "b") is None
    assert "of a and f has" in line("a -x", "f -x", "b")
    unknown = predicted.predict("b")._replace(code=None)
    assert "of b has" in changed(Texts(), [("b", unknown)])


def test_all_are_made_anew(predicted, capsys):
    """Equal code is traced once; those that aren't wanted go; what can't be traced is told."""
    wanted = [(name, []) for name in ("a", "(a)", "b", "refuses", "odd")]
    predicted.predict("gone")
    predicted.predict("a")
    text = (predicted.results / "predict.json").read_text()
    (predicted.results / "predict.json").write_text(text.replace("[320,320]", "[400,320]"))
    predicted.asked.clear()
    told = predict_all(Texts(), wanted, predicted.results, 1000, anew=True)
    assert sorted({text for text, *_ in predicted.asked}) == [b"a", b"b", b"odd", b"refuses"]
    kept = json.loads((predicted.results / "predict.json").read_text())
    assert list(kept) == ["a", "(a)", "b", "refuses", "odd"]
    assert kept["(a)"]["code"] == code_of(b"a")
    assert "a: reserved memory by up to 20.00%, operations or bytes of a step by up to 0.00%" in (
        told)
    assert "gone: gone" in told and "new: b" in told and "0 as before, 6 not, 0 can't" in told
    capsys.readouterr()
    told = predict_all(Texts(), wanted, predicted.results, 1000)
    assert told == "5 as before, 0 not, 0 can't be predicted"


def test_those_whose_code_has_changed_are_made_again(predicted, monkeypatch, capsys):
    """And only those; what was made before an interrupt is kept."""
    wanted = [(name, []) for name in ("a", "b", "c", "odd")]
    kept_in = predicted.results / "predict.json"
    predict_all(Texts(), wanted, predicted.results, 1000)
    text = kept_in.read_text()
    kept_in.write_text(text.replace(code_of(b"b"), "before").replace(f'"{code_of(b"c")}"', "null"))
    predicted.asked.clear()
    ask = predictions.ask

    def until_c(text, *asked):
        if text == b"c":
            raise KeyboardInterrupt
        return ask(text, *asked)

    monkeypatch.setattr(predictions, "ask", until_c)
    with pytest.raises(KeyboardInterrupt):
        predict_all(Texts(), wanted, predicted.results, 1000)
    monkeypatch.setattr(predictions, "ask", ask)
    capsys.readouterr()
    predict_all(Texts(), wanted, predicted.results, 1000)
    assert [*dict.fromkeys(text for text, *_ in predicted.asked)] == [b"b", b"c"]
    assert capsys.readouterr().out.splitlines() == [
        "1 of 4: a: as it was", "2 of 4: b: as it was", "3 of 4: c", "4 of 4: odd: as it was"]


def test_one_that_can_not_be_traced_does_not_stop_the_others(predicted, monkeypatch, capsys):
    def ask(text, options, batches):
        if text == b"bad":
            raise UserError("what it takes can't be predicted: why")
        return {batch: traced(batch, [batch * 40 * MIB]) for batch in batches}

    ask_by(monkeypatch, ask)
    told = predict_all(Texts(), [("bad", []), ("a", [])], predicted.results, 1000)
    assert told == "new: a\n0 as before, 1 not, 1 can't be predicted"
    assert "1 of 2: bad: what it takes can't be predicted: why" in capsys.readouterr().out


def test_sizes_that_a_script_refuses_are_left_out(predicted):
    """Unless it is the one that was asked for."""
    assert set(predicted.predict("refuses", smallest=1).needs) == {*predictions.BATCHES} - {2}
    with pytest.raises(UserError, match="multiple"):
        predicted.predict("refuses", batch=2)


# ---- What is traced


def shallow(name) -> bytes:
    """Its text with half of cpu-demo's layers, which is compiled in half of the time."""
    return SCRIPTS.text(name).replace(b"layers=4, heads=4", b"layers=2, heads=4")


def events_of(name, options: list[str], batch: int = 8, text=SCRIPTS.text) -> list[int]:
    (found,) = ask(text(name), options, [batch]).values()
    return found["events"]


@pytest.mark.parametrize("rung", [0, 1, 5, 6, 7])
def test_published(rung):
    """Within 1 % of what the published program reserved after its first epoch; 2 to 4 have the
    memory of 1."""
    script = RUNGS[rung].script
    events = events_of(script, ["--model", "gpt2"])
    theirs = published().reserved_gb[script]
    assert simulate(events).reserved / GB == pytest.approx(theirs, rel=0.01)


def test_what_is_committed():
    """Its form, of all that the pages tell, and it is as near to what was published as docs/gpus.md
    says, whichever version of the scripts it is of."""
    known = json.loads((ROOT / "results" / "reference" / "predict.json").read_text())
    wanted = {key_of(SCRIPTS, *each) for each in check.wanted()}
    assert not known.keys() - wanted
    for key, each in known.items():
        assert set(each["works"]) == {"8", "16"} and each["needs"]["8"][0] > 0, key
    for run in RUNGS:
        own = known[key_of(SCRIPTS, run.script, ["--model", "gpt2"])]
        assert own["code"] and own["needs"]["8" if run.rung < 10 else "32"][0] > 0
    errors = {row["label"]: row["error"] for row in check.memory_table().rows}
    assert len(errors) == 12
    for label, error in errors.items():
        assert abs(error) < (0.06 if label.startswith("8 ") else 0.01), label


def live_bytes(script: Path, options: list[str]) -> int:
    """The most that PyTorch's own profiler counts as live in the same training on a CPU."""
    module = load_script(script)
    config = module.configure(["--device", "cpu", *options])
    lesson.settle(config, "bfloat16")
    config.eval_windows, data = 8, lesson.data_of_zeros(module, config)
    devices = "_get_foreach_kernels_supported_devices"  # where all tensors are updated at once
    optimizers = import_module("torch.optim.optimizer")
    run = lesson.run_of(lambda model: None, lambda: None)
    with (mock.patch.object(optimizers, devices, lambda: ["cpu"]),
          profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled):
        module.train(module.GPTModel(config), data, config, run, lambda _: 0.0)
    events = [event for event in profiled.profiler.kineto_results.events()
              if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(sizes))


@pytest.fixture
def ranks(monkeypatch):
    """As the first of four, which send nothing."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")
    pytorch.begin_ranks()
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [
    ("05-bfloat16", []), ("14-chunked-head", FLOAT32),
    ("parallel-sharded", ["--zero", "3", *FLOAT32]),
    *(pytest.param(name, options, marks=pytest.mark.slow) for name, options in (
        ("0", []), ("13-loss-in-graph", FLOAT32), ("memory-checkpoint", FLOAT32),
        ("optimizer-muon", FLOAT32), ("step-accumulation", ["--micro-batches", "4", *FLOAT32]),
        ("precision-autocast", [])))])
def test_as_much_as_the_profiler_counts(name, options, tmp_path, ranks, stages):
    """Not compiled, and without dropout, which is another operator on CUDA."""
    dtype, reason = stages["01_opt_single_gpu"].best_dtype(torch.device("cpu"))
    if name in ("05-bfloat16", "precision-autocast") and dtype != "bfloat16":
        pytest.skip(f"it would take minutes: {reason}")
    text = SCRIPTS.text(name)
    script = tmp_path / "script.py"
    script.write_bytes(text)
    options = [*options, "--model", "cpu-demo", "--context-length", "128", "--batch-size", "8"]
    options += ["--no-compile"] * (b"--no-compile" in text or b"    compile: bool" in text)
    events = events_of(name, options)
    live, sizes = [0], []
    for event in events:
        sizes += [event] * (event >= 0)
        live.append(live[-1] + (event if event >= 0 else -sizes[-event - 1]))
    assert max(live) - trace.WORKSPACE == pytest.approx(live_bytes(script, options), rel=0.01)


@pytest.mark.slow
def test_compiled():
    """The compiler's own program takes less than the same script without it: the loss is inside.
    Larger batches follow from two, exactly."""
    text = shallow("13-loss-in-graph")  # after it small batches have fewer chunks of logits
    eager = ask(text, [*SMALL, "--no-compile"], [32])
    traces = {batch: each["events"] for batch, each in ask(text, SMALL, [8, 16, 32]).items()}
    assert at_batch(32, traces[8], traces[16]) == traces[32]
    sizes = [simulate(events).peak_allocated
             for events in (*traces.values(), eager[32]["events"])]
    assert sizes == sorted(sizes) and sizes[2] < 0.9 * sizes[3]


@pytest.mark.slow
def test_regional_compilation():
    """Blocks and loss, each compiled by itself. The products are those of the script without the
    compiler, with fewer other kernels and less memory."""
    text = shallow("compile-blocks")
    eager, found = (ask(text, [*SMALL, *options], [32])[32] for options in (["--no-compile"], []))

    def work(trace: dict, has_flops: bool) -> list[Work]:
        return [each for each in map(Work._make, trace["step"]) if bool(each.flops) == has_flops]

    assert ([each.flops for each in work(found, True)]
            == [each.flops for each in work(eager, True)])
    kernels, in_eager = (sum(each.kernels for each in work(trace, False))
                         for trace in (found, eager))
    assert 10 < kernels < 0.5 * in_eager
    assert simulate(found["events"]).peak_allocated < simulate(eager["events"]).peak_allocated


@pytest.mark.slow
def test_one_graph_is_compiled_once(tmp_path, ranks, monkeypatch):
    """Of scripts that differ in their optimizer alone; kernels are never written in C++. The
    partitioner knows that weights stay anyway, else it keeps other tensors for the backward pass:
    a sixth more memory than others have measured."""
    made, compile_graph = [], compiled.compile_graph
    stay, partition = [], compiled.min_cut_rematerialization_partition
    monkeypatch.setattr(
        compiled, "min_cut_rematerialization_partition", lambda *args, **how: stay.append(
            how["static_lifetime_input_indices"]) or partition(*args, **how))
    monkeypatch.setattr(compiled, "compile_graph", lambda *args: made.append(1) or compile_graph(
        *args))
    for name in ("01_opt_single_gpu", "optimizer-adafactor"):
        script = tmp_path / "script.py"
        script.write_bytes(SCRIPTS.text(name))
        options = [*SMALL, "--context-length", "64"]
        answer = child.answer(str(script), options, 2)
        assert "trace" in answer, answer
    weights = 2 + 4 * 11 + 3  # of cpu-demo: two tables, 11 in each block, norm and head
    assert len(made) == 1 and [len(each) for each in stay] == [weights]
    (forward, *_), = compiled.PLANS.values()
    assert any(name.startswith("kernel_") for name in forward.__globals__)


@pytest.mark.parametrize(("name", "options", "says"), [
    pytest.param("attention-backend", ["--attention", "math"],
                 "of attention's kernels only flash can", marks=pytest.mark.slow),
    ("compile-mode", ["--compile-mode", "reduce-overhead"], "with mode='reduce-overhead' can't"),
    ("parallel-sharded", [], "weights that ranks share can only be traced with --no-c"),
    ("parallel-sharded", ["--no-compile", "--offload"], "--offload can't be traced"),
    ("model-mixture", [], "a model with several results can't be traced"),
    ("memory-offload", [], "activations in the CPU's memory can't be traced"),
    ("head-pytorch", [], "can't be predicted: "),
    ("14-chunked-head", ["--batch-size", "0"], "0 is out of range"),
])
def test_what_can_not_be_traced_is_told_in_a_line(name, options, says):
    with pytest.raises(UserError, match=says) as error:
        ask(SCRIPTS.text(name), [*SMALL, *options], [8])
    assert "\n" not in str(error.value)


def test_what_is_compiled():
    """A model, or one whose own method nn.Module.compile() gives; functions stay as they are."""
    part = torch.nn.Linear(2, 2)
    for model in (part, part._call_impl):
        assert compiled.compile_only_models(model).model is part
    for function in (len, "text".upper, simulate):
        assert compiled.compile_only_models(function) is function


def test_the_kernel_of_older_gpus_keeps_as_much():
    """The memory-efficient one, of which flash attention's buffers stand in a trace."""
    aten = torch.ops.aten
    q, k, v = (torch.empty(2, 12, 1024, 64, dtype=torch.float16, device="meta") for _ in range(3))
    flash = aten._scaled_dot_product_flash_attention(q, k, v, 0.1, True)
    efficient = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.1, True)
    for one, other in zip(flash[:2], efficient[:2], strict=True):  # what is attended, and a sum
        assert (one.shape, one.dtype) == (other.shape, other.dtype)


@pytest.mark.slow
def test_less_memory():
    """What saves memory does, by the trace."""
    def peak(name: str, *options) -> int:
        return simulate(events_of(name, [*SMALL, *options], 64, shallow)).peak_allocated

    plain = peak(SCRIPTS.stage("01").script)
    assert peak("memory-checkpoint") < plain
    assert peak("precision-autocast") > plain
    assert peak(SCRIPTS.stage("02").script) > plain  # DDP's buckets
