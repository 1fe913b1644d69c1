"""measure.py predict: the simulated allocator, what is stored and traced, the time of kernels, the
cards, and the command."""

import json
import re
import shutil
import subprocess
import sys
from argparse import ArgumentTypeError, Namespace
from itertools import pairwise
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, load
from made_up import setup_of
from torch.nn import functional

from bench.catalogue import STAGES, Scripts, published
from bench.cli import make_parser
from bench.commands.predict import Predict, prices, tokens
from bench.common import REFERENCE
from bench.predict import child, meta_patches, program, shipped, store
from bench.predict.code_hash import code_of
from bench.predict.forecast import span, speed_text
from bench.predict.prediction import BATCHES, Prediction, largest_that_fits
from bench.predict.program import Program, Untraceable, at_batch, key_of, program_of
from bench.predict.store import Sizes, predict_all
from bench.predict.trace import Recorder
from bench.report import prediction_tables
from gpt_speed import children, speed
from gpt_speed.cards import CARDS, FILE, PEAK_FLOPS, Card, named
from gpt_speed.common import UserError
from gpt_speed.memory import (
    MIB,
    OTHERS,
    Allocator,
    DoesNotFit,
    Event,
    MemoryNeed,
    memory_need,
    simulate,
)
from gpt_speed.speed import Work, seconds, work_at
from gpt_speed.tables import markdown

SCRIPTS = Scripts()
RUNGS = SCRIPTS.ladder()
SMALL = ["--model", "cpu-demo", "--dropout", "0.1"]


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        ([1], 2 * MIB),
        ([MIB, MIB], 2 * MIB),
        ([MIB] * 3, 4 * MIB),
        ([MIB + 1], 20 * MIB),
        ([10 * MIB - 1] * 2, 20 * MIB),
        ([10 * MIB], 10 * MIB),
        ([11 * MIB - 5], 12 * MIB),
        ([10 * MIB, MIB + 1, 9 * MIB], 30 * MIB),
    ],
)
def test_segments(sizes, reserved):
    assert simulate([Event(size) for size in sizes]).reserved == reserved


def test_neighbours_merge_and_the_best_fit_is_taken():
    allocator = Allocator()
    a, b, c, _ = (allocator.malloc(size * MIB) for size in (4, 5, 6, 5))
    assert allocator.reserved == 20 * MIB
    for block in (a, c):
        allocator.release(block)
    assert allocator.malloc(4 * MIB - 1) is a  # not the larger one
    allocator.release(a)
    allocator.release(b)  # joins both neighbours
    assert allocator.malloc(15 * MIB).start == a.start and allocator.reserved == 20 * MIB
    assert (allocator.allocated, allocator.peak_allocated) == (20 * MIB, 20 * MIB)


def test_a_full_card_gives_free_segments_back_first():
    events = [Event(30 * MIB), Event(30 * MIB), Event(released=0), Event(40 * MIB)]
    assert simulate(events).reserved == 100 * MIB
    assert simulate(events, capacity=90 * MIB).peak_reserved == 70 * MIB
    assert memory_need(events) == MemoryNeed(reserved=100, minimum=70)
    needs = {8: MemoryNeed(900, 800), 16: MemoryNeed(1800, 1500), 24: MemoryNeed(2000, 2000)}
    assert [largest_that_fits(needs, OTHERS + mib) for mib in (799, 800, 2100)] == [0, 8, 16]
    assert [largest_that_fits(needs, 2100, 24, others) for others in (100, 101)] == [24, 0]
    with pytest.raises(DoesNotFit):  # a segment of which a part is in use can't go
        simulate(
            [Event(2 * MIB), Event(15 * MIB), Event(released=1), Event(40 * MIB)],
            capacity=50 * MIB,
        )


def test_what_grows_with_the_batch():
    first, second = Event(released=0), Event(released=1)
    events = [Event(800), first, Event(5), second]
    assert at_batch(32, events, [Event(1600), *events[1:]]) == [Event(3200), *events[1:]]
    for other in ([Event(1600), first, Event(5)], [Event(1600), second, Event(5), first]):
        with pytest.raises(ValueError, match="differs|argument"):
            at_batch(32, events, other)
    rest, loss = ("rest", "", True), ("loss", "", True)
    works = {8: [Work(*rest, 2, 80, 100)], 16: [Work(*rest, 2, 160, 150), Work(*loss, 1, 0, 8)]}
    assert work_at(32, works) == [Work(*rest, 2, 320, 250), Work(*loss, 3, 0, 24)]


class Texts:
    """In place of Scripts: a script is its own name and text."""

    def text(self, script: str) -> bytes:
        return script.encode()

    def canonical(self, script: str) -> str:
        return script.partition(" ")[0]


@pytest.fixture
def predicted(tmp_path, monkeypatch):
    """predict(script, options, ...) into a folder, with made-up traces; `asked` for so far."""
    asked = []

    def trace_of(text: bytes, batch: int):
        if b"interrupts" in text:
            raise KeyboardInterrupt
        if b"bad" in text or b"refuses" in text and batch == 2:
            return None
        events = [Event(40 * MIB)] * batch if b"odd" in text else [Event(batch * 40 * MIB)]
        return dict(
            events=events,
            step=[["rest", "", True, 1, 0, batch]],
            tokens=100 * batch,
            flops_per_token=7,
        )

    def run_traces(text, options, batches, optional=()):
        asked.extend([(text, options, [*batches])] if batches else [])
        traces = {batch: trace_of(text, batch) for batch in batches}
        if any(trace is None and batch not in optional for batch, trace in traces.items()):
            raise Untraceable("it can't be traced")
        return {batch: trace for batch, trace in traces.items() if trace}

    monkeypatch.setattr(program, "run_traces", run_traces)
    monkeypatch.setattr(store, "REFERENCE", tmp_path / "reference")
    return SimpleNamespace(
        asked=asked,
        file=tmp_path / "predict.json",
        predict=lambda script, options=(), *sizes, **more: store.predict(
            program_of(Texts(), script, list(options)), tmp_path, *sizes, **more
        ),
        all=lambda names, **more: predict_all(
            [program_of(Texts(), name, []) for name in names], tmp_path, Sizes(1000), **more
        ),
    )


def test_predictions_are_stored(predicted):
    """By a script's name and its options; what a small card needs is traced only for one."""
    asked, predict = predicted.asked, predicted.predict
    first = predict("name", ["--x"])
    assert asked == [(b"name", ["--x"], [8, 16])] and first.code == code_of(b"name")
    assert list(first.needs) == [8, 16, 32, 64, 128, 256, 512]
    assert first.needs[64] == MemoryNeed(64 * 40, 64 * 40) and first.context_length == 100
    assert first.steps[16] == [Work("rest", "", True, 1, 0, 16)]
    assert list(json.loads(predicted.file.read_text())) == ["name --x"]
    assert predict("name", ["--x"]) == first == predict("name with edits", ["--x"])
    assert predict("name", ["--x"], Sizes(320)) == first and len(asked) == 1
    more = predict("name", ["--x"], Sizes(319, batch=6))
    assert asked[1:] == [(b"name", ["--x"], [1, 2, 4, 6])] and more.needs[6] == MemoryNeed(240, 240)
    assert predict("name", ["--x"], Sizes(1, batch=6)) == more and len(asked) == 2
    assert predict("name", ["--x"], retrace=True) and len(asked) == 3
    assert predict("odd").needs[32] == MemoryNeed(32 * 40, 32 * 40)  # each size is traced
    asked.clear()
    text = predicted.file.read_text()
    for damaged in (
        "[]",
        text.replace('"works"', '"w"'),
        text.replace('"16":{', '"17":{'),
        text.replace('"code"', '"c"'),
    ):  # as if it weren't there
        predicted.file.write_text(damaged)
        predict("name", ["--x"])
    assert len(asked) == 4


def test_two_predictions_at_once_are_both_stored(predicted, monkeypatch):
    """The second one starts to write while the first one does."""
    both = []

    def slowly(path, content):
        if not both:
            both.append(Thread(target=predicted.predict, args=("second",)))
            both[0].start()
            both[0].join(1)  # until it has written, or waits
        path.write_text(content)  # as threads may do it

    monkeypatch.setattr(store, "write_whole", slowly)
    predicted.predict("first")
    both[0].join()
    assert sorted(json.loads(predicted.file.read_text())) == ["first", "second"]


def test_sizes_that_a_script_refuses_are_left_out(predicted):
    assert set(predicted.predict("refuses", [], Sizes(1)).needs) == {*BATCHES} - {2}
    for script, batch in (("refuses", 2), ("bad", None)):
        with pytest.raises(UserError, match="traced"):
            predicted.predict(script, [], Sizes(batch=batch))


def test_a_size_that_a_script_refuses_is_asked_for_once(predicted):
    for _ in range(2):
        predicted.predict("refuses", [], Sizes(1))
    assert [sizes for _, _, sizes in predicted.asked] == [[8, 16], [1, 2, 4]]


def test_what_can_not_be_traced_is_tried_once(predicted):
    """Until its code is another one, or --retrace asks for it. What was predicted of older code
    stays."""
    for _ in range(2):
        with pytest.raises(UserError, match="^it can't be traced"):
            predicted.predict("bad")
    assert len(predicted.asked) == 1
    for again in (("bad", dict(retrace=True)), ("bad in other_code", {})):
        with pytest.raises(UserError, match="^it can't be traced$"):
            predicted.predict(again[0], **again[1])
    assert len(predicted.asked) == 3
    first = predicted.predict("good")
    with pytest.raises(UserError):
        predicted.predict("good in bad", retrace=True)
    assert predicted.predict("good in bad") == first == predicted.predict("good")
    assert len(predicted.asked) == 5


def test_another_pytorch_traces_nothing(monkeypatch):
    """It says so before it imports what that may not have."""
    monkeypatch.setattr(torch, "__version__", "2.12.1")
    monkeypatch.delattr("bench.predict.trace")
    monkeypatch.setitem(sys.modules, "bench.predict.trace", None)  # it can't be imported
    with pytest.raises(SystemExit, match="with PyTorch 2.13, not with 2.12.1;"):
        child.main()


def test_a_trace_has_a_time_limit(monkeypatch):
    """For each batch size as much."""
    run_child, hangs = children.run_child, [sys.executable, "-c", "import time; time.sleep(300)"]
    monkeypatch.setattr(
        children, "run_child", lambda command, *args, **how: run_child(hangs, *args, **how)
    )
    monkeypatch.setattr(program, "TRACE_SECONDS", 0.25)
    with pytest.raises(UserError, match="^what it takes can't be predicted: .* within 0.5 s$"):
        program.run_traces(b"", SMALL, [1, 2])


def test_the_code_of_a_script():
    """Comments, docstrings and help texts are no part of it; defaults and what is printed are."""

    def code(default: int, help: str, comment: str, printed: str) -> str:
        lines = [
            f'"""{comment}"""',
            "class Config:",
            f"    batch = {default}",
            "def make_parser():",
            f"    add('--batch', '{help}', type=int)",
            "def train():",
            f'    """{comment}"""',
            f"    print('{printed}')  # {comment}",
        ]
        return code_of("\n".join(lines).encode())

    assert code(8, "sequences", "old", "x") == code(8, "a batch", "new", "x")
    assert (
        len(
            {
                code(8, "a batch", "old", "x"),
                code(4, "a batch", "old", "x"),
                code(8, "a batch", "old", "y"),
            }
        )
        == 3
    )


# What ast and ast.unparse do differently from version to version: quotes, nested f-strings with a
# format, parameters of types, empty lists.
CHANGING = b"""
def run(self, *, x: int = 1) -> None:
    print(f"{x:{self.width}}", f'{x!r:}', f"it's {x:.2f} in '{x['a']}'", u"text")
    return [] or (lambda: None)
class Empty(dict): pass
"""
HASH = """
import sys
from pathlib import Path
from bench.predict.code_hash import code_of
for path in sys.argv[1:]:
    print(code_of(Path(path).read_bytes()))
"""


def other_pythons() -> list[str]:
    """Those that tools can run with, from 3.11 on, of other versions than this one."""
    names = [shutil.which(f"python3.{minor}") for minor in range(11, 20)]
    installed = Path.home().glob(".pyenv/versions/3.*/bin/python")
    return [
        str(path)
        for path in (*filter(None, names), *installed)
        if re.fullmatch("3\\.1[1-9]", version := version_of(path))
        and version != f"3.{sys.version_info.minor}"
    ]


def version_of(python) -> str:
    """Such as 3.12; "" of one that doesn't start, as a name that pyenv reserves."""
    shows = "import sys; print('{}.{}'.format(*sys.version_info))"
    return subprocess.run([python, "-c", shows], capture_output=True, text=True).stdout.strip()


def test_the_code_of_a_script_in_any_python(tmp_path):
    """Its hash is the same in all versions: the stored one was made by 3.11, and is that of 3.12
    and 3.13 as well."""
    assert code_of(CHANGING) == "26da2e496737ed20" and code_of(b"f('')") != code_of(b"f()")
    (tmp_path / "changing.py").write_bytes(CHANGING)
    paths = [tmp_path / "changing.py", *(ROOT / name for name in STAGES.values())]
    own = [code_of(path.read_bytes()) for path in paths]
    for python in other_pythons():
        code, out, err = children.run_child([python, "-c", HASH, *paths], ROOT)
        assert (code, out.split()) == (0, own), (python, err)


def test_all_are_predicted(predicted):
    """What can't be traced stops no other, and an interrupt loses nothing; again only those whose
    code has changed are traced, unless all shall be."""
    names = ["a", "a", "b", "bad", "odd"]

    def traced() -> set[bytes]:
        texts = {text for text, *_ in predicted.asked}
        predicted.asked.clear()
        return texts

    assert predicted.all(names) == "3 of 4 are predicted."
    assert traced() == {b"a", b"b", b"bad", b"odd"}
    text = predicted.file.read_text()
    predicted.file.write_text(text.replace(code_of(b"b"), "before"))
    predicted.all(names)
    assert traced() == {b"b"} and predicted.file.read_text() == text
    predicted.all(names, retrace=True)
    assert traced() == {b"a", b"b", b"bad", b"odd"} and predicted.file.read_text() == text
    with pytest.raises(KeyboardInterrupt):
        predicted.all(["new", "interrupts"])
    assert list(json.loads(predicted.file.read_text())) == ["a", "b", "bad", "odd", "new"]


def test_what_is_committed():
    """It is as near to what was published as docs/predictions.md says, and no other than the pages
    need, whichever version of the scripts it is of."""
    stored = json.loads((REFERENCE / "predict.json").read_text())
    assert not stored.keys() - {key_of(SCRIPTS, *pair) for pair in shipped.wanted()}
    for run in RUNGS:
        own = stored[key_of(SCRIPTS, run.script, ["--model", "gpt2"])]
        assert own["code"] and own["needs"]["8" if run.number < 10 else "32"][0] > 0


def shallow(name) -> bytes:
    """The text of a script whose cpu-demo has half of its layers: it is compiled sooner."""
    return SCRIPTS.text(name).replace(b"layers=4, heads=4", b"layers=2, heads=4")


def traced(name, options: list[str], batch: int = 8) -> dict:
    return program.run_traces(shallow(name), options, [batch])[batch]


def peak(events: list[Event]) -> int:
    return simulate(events).peak_allocated


@pytest.mark.parametrize("rung", [0, 1, 5, 6, 7])
def test_published(rung):
    """Within 1 % of what the published program reserved; 2 to 4 have the memory of 1."""
    script = RUNGS[rung].script
    events = traced(script, ["--model", "gpt2"])["events"]
    assert simulate(events).reserved / 2**30 == pytest.approx(
        published()[script].reserved_gb, rel=0.01
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "memory"), [("13-loss-in-graph", 0.9), ("compile-blocks", 1)])
def test_compiled(name, memory):
    """The products are as without it, the other kernels fewer; also of single blocks."""
    eager, compiled = (traced(name, [*SMALL, *options], 32) for options in (["--no-compile"], []))

    def works(trace: dict, has_flops: bool) -> list[Work]:
        return [work for work in map(Work._make, trace["step"]) if bool(work.flops) == has_flops]

    assert [work.flops for work in works(compiled, True)] == [
        work.flops for work in works(eager, True)
    ]
    kernels, in_eager = (
        sum(work.kernels for work in works(trace, False)) for trace in (compiled, eager)
    )
    assert 10 < kernels < 0.5 * in_eager
    assert peak(compiled["events"]) < memory * peak(eager["events"])


def test_a_hook_of_a_compiled_model_runs_before_each_call():
    from bench.predict.compiled import Compiled  # of one version of PyTorch alone

    seen, x = [], torch.ones(1, 2)
    compiled = Compiled(torch.nn.Linear(2, 3))
    compiled.register_forward_pre_hook(lambda module, inputs: seen.append((module, inputs)))
    with torch.no_grad():
        compiled(x)
        compiled(x)
    assert [(module is compiled, inputs[0] is x) for module, inputs in seen] == [(True, True)] * 2


@pytest.mark.slow
def test_what_takes_less_memory():
    plain, checkpoints, autocast, ddp, shared = (
        peak(traced(name, [*SMALL, "--no-compile"], 64)["events"])
        for name in ("01", "memory-checkpoint", "precision-autocast", "02", "parallel-zero1")
    )
    assert checkpoints < plain < min(autocast, ddp) and shared < ddp


@pytest.mark.slow
def test_batches_of_one_process():
    """Larger ones follow from two; none depends on those before it, nor on one that is refused."""
    text = shallow("13-loss-in-graph")  # after it small batches have fewer chunks of logits
    events = [trace["events"] for trace in program.run_traces(text, SMALL, [8, 16, 32]).values()]
    (alone,) = program.run_traces(text, SMALL, [32]).values()
    assert at_batch(32, *events[:2]) == events[2] == alone["events"]
    options = [*SMALL, "--micro-batches", "4", "--no-compile"]
    traces = program.run_traces(shallow("step-accumulation"), options, [2, 4], optional=[2])
    assert traces.keys() == {4} and traces[4]["tokens"] == 4 * 256


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        pytest.param(
            "attention-backend",
            ["--attention", "math"],
            "of attention's kernels only flash can",
            marks=pytest.mark.slow,
        ),
        (
            "compile-mode",
            ["--compile-mode", "reduce-overhead"],
            "a mode, a backend or options can't",
        ),
        ("parallel-sharded", ["--no-compile"], "weights that ranks share can't be traced"),
        ("model-mixture", [], "a model with several results can't be traced"),
        ("14-chunked-head", ["--context-length", "1000000"], "8,000,000 tokens"),
        ("14-chunked-head", ["--batch-size", "0"], "0 is out of range"),
    ],
)
def test_what_can_not_be_traced_is_said_in_a_line(name, options, says):
    with pytest.raises(UserError, match=f"^.*{re.escape(says)}.*$") as refusal:
        traced(name, [*SMALL, *options])
    assert isinstance(refusal.value, Untraceable) is says.endswith(("can", "can't", "traced"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(attn_mask=torch.ones(4, 4, dtype=torch.bool)), "a mask"),
        (dict(is_causal=True, enable_gqa=True), "share keys"),
    ],
)
def test_attention_that_is_not_flash_is_refused(options, says):
    """It would be counted as a kernel that CUDA doesn't run."""
    x = torch.empty(1, 2, 4, 8, device="meta")
    with pytest.raises(NotImplementedError, match=says):
        meta_patches.attention(x, x, x, **options)
    assert meta_patches.attention(x, x, x, is_causal=True, scale=0.5).shape == x.shape


def test_a_child_that_breaks(monkeypatch):
    run_child = children.run_child
    monkeypatch.setattr(
        children,
        "run_child",
        lambda command, *args, **how: run_child(
            [sys.executable, "-c", "raise SystemExit('error: no memory')"], *args, **how
        ),
    )
    with pytest.raises(UserError, match="^what it takes can't be predicted: no memory$"):
        program.run_traces(b"", SMALL, [1])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "share"), [("0", 1), ("06-native-layers", 1), ("01", 7 / 12)])
def test_operations_of_a_step(name, share):
    """The flash kernel leaves half of attention's out, and does the forward pass's again."""
    trace = traced(name, ["--model", "cpu-demo", *(["--no-compile"] if name == "01" else [])], 4)
    flops = dict.fromkeys(speed.KINDS, 0)
    for work in map(Work._make, trace["step"]):
        flops[work.kind] += work.flops
        assert work.kernels > 0 and work.size > 0, work.kind
    attention = trace["tokens"] * 12 * 2 * 256 * 256  # layers, context length, width
    assert flops["attention"] == attention * share and trace["tokens"] == 4 * 256
    assert flops["products"] + flops["head"] == (
        trace["tokens"] * trace["flops_per_token"] - attention
    )


ROW = 4 * 64  # bytes of a row of the matrices below


@pytest.mark.parametrize(
    ("kernel", "rows"),
    [
        (lambda a, b, i: a + b, 3 * 32),
        (lambda a, b, i: a.add_(b), 3 * 32),
        (lambda a, b, i: torch._foreach_add_([a, b], [b, a]), 6 * 32),
        (lambda a, b, i: a.copy_(b), 2 * 32),
        (lambda a, b, i: torch.zeros_like(a), 32),
        (lambda a, b, i: a.t()[3:], 0),
        (lambda a, b, i: torch.empty_like(a), 0),
        (lambda a, b, i: a + b[:1].expand(32, 64), 2 * 32 + 1),
        (lambda a, b, i: functional.embedding(i, a), 2 * 8),
        (lambda a, b, i: functional.nll_loss(a, i.repeat(4)), 1),
    ],
)
def test_bytes_of_a_kernel(kernel, rows):
    """What is read and written, in rows; indices and single numbers don't count."""
    a, b = (torch.empty(32, 64, device="meta") for _ in range(2))
    indices = torch.empty(8, dtype=torch.int64, device="meta")
    with Recorder(SimpleNamespace(context_length=1, vocab_size=1)) as recorder:
        kernel(a, b, indices)
    moved = sum(work.size for work in recorder.work[-1].values())
    assert rows <= moved / ROW <= rows + 1.2


# ---- The time of kernels -----------------------------------------------------------------------

CARD = Card(
    24_000,
    8.0,
    1_000,
    float16=200,
    reached=150,
    bfloat16=200,
    tf32=100,
    float32=20,
    attention=50,
    names=("X",),
)


def test_times_of_a_kernel():
    times = seconds([Work("products", "bfloat16", True, 2, 3e12, 8.5e9)], CARD)
    assert times["products"] == pytest.approx(2 * 3e-6 + 0.010 + 3 / 150) and not times["host"]
    times = seconds([Work("rest", "", True, 1_000, 0, 0)], CARD)
    assert (times["rest"], times["host"]) == pytest.approx((0.003, 0.027))


@pytest.mark.parametrize(
    ("precision", "kind", "aligned", "card", "rate"),
    [
        ("float32", "products", True, {}, 20),
        ("TF32", "products", True, {}, 75),
        ("float16", "head", True, {}, 150),
        ("bfloat16", "head", False, {}, 75),
        ("bfloat16", "attention", True, {}, 50),
        ("bfloat16", "attention", True, dict(attention=None), 66),
        ("float16", "attention", True, dict(attention=None, bfloat16=None), 33),
        ("bfloat16", "head", False, dict(capability=9.0), 22.5),  # of Hopper, not of other makers
        ("bfloat16", "head", False, dict(capability=9.4, names=("AMD X",)), 75),
    ],
)
def test_rates(precision, kind, aligned, card, rate):
    times = seconds([Work(kind, precision, aligned, 0, 1e12, 0)], CARD._replace(**card))
    assert sum(times.values()) == pytest.approx(1 / rate)


def made_up(batches: dict[int, tuple]) -> Prediction:
    steps = {
        batch: [
            Work("products", "bfloat16", True, 1, batch * 1e12, batch * 1e9),
            Work("optimizer", "", True, 1, 0, 1e9),
        ]
        for batch in (8, 16)
    }
    needs = {batch: MemoryNeed(*need) for batch, need in batches.items()}
    return Prediction(needs, steps, 1024, 10**9, "code")


def test_cards():
    """Which units each has follows from its capability; every number has a source."""
    text = json.loads(FILE.read_text())
    for name, card in CARDS.items():
        sources = {value[1] for field, value in text["gpus"][name].items() if field != "names"}
        assert sources <= text["sources"].keys(), name
        assert card.names and (card.bfloat16 is None) == (card.capability < 8), name
        assert 0.4 < card.reached / (card.bfloat16 or card.float16) < 1.2, name
    assert PEAK_FLOPS["NVIDIA H100 80GB HBM3"] == 989e12


def test_the_range_of_a_speed():
    """It is wider where the script is compiled, and where little was checked."""
    waits, busy = dict(rest=1, host=1), dict(rest=1, host=0)
    ranges = [
        speed.margin(CARD, True, busy),
        speed.margin(CARD, False, busy),
        speed.margin(CARD, True, waits),
        speed.margin(CARDS["V100"], False, None),
    ]
    assert ranges == [0.3, 0.25, 0.35, 0.35]


def test_no_range_outside_the_model(command):
    """For AMD GPUs and batches below 4 the memory is predicted, but the speed is unchecked."""
    known = made_up({2: (300, 200), 4: (500, 400), 8: (1024, 900)})
    for name, batch, is_inside in (("H100", 4, True), ("H100", 2, False), ("MI300X", 8, False)):
        assert (known.speeds(batch, CARDS[name]) is not None) is is_inside
        assert (speed_text(known, batch, CARDS[name]) == "unchecked") is not is_inside
    steps = {size: [Work("head", "float64", True, 1, 1e9)] for size in (8, 16)}
    assert speed_text(known._replace(steps=steps), 2, CARDS["H100"]) == "not in float64"
    text = command.answer(gpu="MI300X", tokens=1e9, price=[1.0])
    assert re.match(r"MI300X, .*: fits at batch 32 .*, unchecked\.$", text.split("\n")[0])
    assert "| MI300X | 192 | 01 | 32 | 3.00 | unchecked |" in text and "hours" not in text
    assert "unchecked: " in text and "unchecked" not in command.answer(gpu="H100")
    assert "MI300X" not in prediction_tables.COMMON


@pytest.mark.parametrize(
    ("text", "cards"),
    [
        ("rtx-4090", ["RTX 4090"]),
        ("h100 nvl", ["H100 NVL"]),
        ("3080", ["RTX 3080"]),
        ("NVIDIA GeForce RTX 3070 Laptop GPU", ["RTX 3070 Mobile"]),
        ("H100, H200,", ["H100", "H200"]),
        ("h100,4090,H100 SXM", ["H100", "RTX 4090"]),
    ],
)
def test_names_as_people_write_them(text, cards):
    assert named(text) == cards


@pytest.fixture
def command(tmp_path, monkeypatch):
    """answer(option=value, ...) of predict, whose every script needs what made_up() says; the
    options that were `asked` for; the made-up prediction as `known`."""
    known, asked = made_up({8: (1024, 900), 16: (2048, 1500), 32: (3072, 3000), 5: (700, 600)}), []
    monkeypatch.setattr(
        "bench.commands.predict.predict",
        lambda program, *_: asked.append(program.options) or known,
    )
    setup = setup_of(tmp_path)
    args = dict(
        gpu="all",
        memory=None,
        bandwidth=None,
        tflops=None,
        batch_size=None,
        model="gpt2",
        techniques=None,
        variants="",
        all=False,
        retrace=False,
        tokens=None,
        price=None,
    )

    def answer(**changes) -> str:
        setup.args = Namespace(**args | changes)
        return Predict().answer(setup)

    return SimpleNamespace(answer=answer, asked=asked, known=known, setup=setup)


@pytest.mark.parametrize(
    ("options", "begins"),
    [
        (dict(gpu="L4", batch_size=5), r"L4, .*: fits at batch 5 .*0\.59 of .*\), {speed} tho"),
        (dict(gpu="L4", variants="optimizer-muon"), r"L4, gpt2, .*muon: fits at batch 32 "),
        (dict(memory=2.0, batch_size=32), r".* not fit .*2\.93 of 1\.40 GB\)\.$"),
        (dict(memory=0.7), r".*does not fit"),
        (dict(memory=11.0), r"11 GB, .* of 10\.40 GB\)\.$"),
        (dict(batch_size=5), "gpt2 at batch 5:$"),
    ],
)
def test_the_answer_comes_first(command, options, begins):
    """Of the last script, at the batch that is asked for."""
    begins = begins.format(speed=speed_text(command.known, 5, CARDS["L4"]))
    assert re.match(begins, command.answer(**options).split("\n\n")[0])


def test_the_table_of_the_command(command):
    """A row for each card and script, also where it trains in another way."""
    answer, asked, known = command.answer, command.asked, command.known
    speed = speed_text(known, 32, CARDS["RTX 4060 Ti"])
    text = answer(gpu="4xall")
    for label in ("00", "01", "02, 4 ranks"):
        assert f"| RTX 4060 Ti | 8 | {label} | 32 | 3.00 | {speed} |" in text
    text, times = answer(gpu="8 x h100"), known.seconds(32, CARDS["H100"])
    whole = sum(times.values())
    for figure in (
        f"{known.mfu(32, CARDS['H100']):.0%}",
        f"{times['products'] / whole:.0%}",
        "02, 8 ranks",
        speed_text(known, 32, CARDS["H100"], 8),
    ):
        assert f"| {figure} |" in text
    assert "| P100 | 16 | 01 in float32, not compiled | 32 |" in answer(gpu="p100")
    assert ["--model", "gpt2", "--dtype", "float32", "--no-compile"] in asked
    assert "| 01 with precision-fp16 | 5 | 0.68 |" in answer(gpu="tesla t4", batch_size=5)
    assert "| 48 GB | 48 | 01 | 32 | 3.00 | " in answer(memory=48.0, bandwidth=500.0, tflops=100.0)
    text = answer(
        variants="memory-checkpoint --no-compile, optimizer-muon, optimizer-muon", gpu="L4"
    )
    assert text.count("| optimizer-muon |") == 1
    assert ["--model", "gpt2", "--no-compile"] in asked
    hours = [10e9 / speed / 3600 for speed in reversed(known.speeds(32, CARDS["L4"]))]
    cost = span([0.5 * time for time in hours])
    assert f"| {span(hours)} | {cost} |" in answer(gpu="L4", tokens=10e9, price=[0.5])


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("10e9", 1e10),
        ("10B", 1e10),
        ("0.3m", 3e5),
        ("1T", 1e12),
        ("10,000,000", 1e7),
        ("1,500k", 1.5e6),
    ],
)
def test_numbers_of_tokens(text, number):
    assert tokens(text) == number


@pytest.mark.parametrize(
    "text", ["", "B", "many", "-1", "0", "nan", "inf", "1,,2", "1,0000", "1e300", "1e300T"]
)
def test_what_is_no_number(text):
    for read in (prices, tokens):
        with pytest.raises((ValueError, ArgumentTypeError)):
            read(text)


@pytest.mark.parametrize("option", ["--memory", "--bandwidth", "--tflops", "--price", "--tokens"])
def test_no_number_is_endless(option, capsys):
    with pytest.raises(SystemExit):
        make_parser().parse_args(["predict", option, "1e300"])
    assert f"argument {option}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(gpu="H1000"), "nearest names are H100, "),
        (dict(gpu=""), "names no GPU"),
        (dict(techniques="99"), "99"),
        (dict(tflops=3.0), "together"),
        (dict(gpu="0xH100"), "no GPU"),
        (dict(memory=8.0, gpu="T4"), "leave --gpu"),
        (dict(price=[1.0]), "needs --tokens"),
        (dict(memory=8.0, tokens=1e9), "--tokens needs a speed"),
        (dict(variants="no-such"), "no variant 'no-such' of 01"),
        (
            dict(gpu="H100,L4", tokens=1e9, price=[1.0, 2.0, 3.0]),
            "one for each of 2 GPUs: H100, L4",
        ),
    ],
)
def test_what_the_command_refuses(command, options, says):
    with pytest.raises(UserError, match=says):
        command.answer(**options)


# ---- docs/check_predictions.py: the predictions of other people's programs

CHECK = load(ROOT / "docs" / "check_predictions.py")


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return CHECK.compared()


def test_what_cannot_be_read_is_not_written_over(tmp_path):
    """As where a merge has left its marks; hours of traces are in it."""
    stored = tmp_path / "predict.json"
    damaged = '{\n<<<<<<< HEAD\n"key": {}\n=======\n}\n'
    stored.write_text(damaged)
    with (
        pytest.raises(UserError, match="predict.json is damaged"),
        store.changed_entries(tmp_path) as entries,
    ):
        entries["other"] = {}
    assert stored.read_text() == damaged


def test_checks_come_first(rows):
    """Figures that constants were tuned on, that led to a change or are outside of the model are
    none."""
    checks, *parts, used, cards, gollem, outside, first = CHECK.accuracy_table(rows).rows
    compiled, eager, last = (part["count"] for part in parts)
    assert (checks["count"], compiled + eager, last) == (53, 53, 16)
    assert [line["count"] for line in (used, cards, gollem, outside)] == [2, 40, 7, 14]
    assert {row["program"] for row in rows if row["group"] == "check"}.isdisjoint(CHECK.TUNED_ON)
    for row in rows:
        is_outside = row["batch"] < 4 or row["card"] == "MI300X"
        assert (row["group"] == "outside") is is_outside
        assert row["group"] != "check" or "used" not in row
    for line in (checks, *parts, cards):  # the ranges hold in four cases of five
        assert line["median"] < 0.15 and line["inside"] >= 0.8
    assert checks["median"] < 0.1 and checks["near"] > 0.8 and checks["left_out"] >= 0.8
    assert outside["inside"] is None and {used["left_out"], cards["left_out"]} == {None}
    assert len({row["card"] for row in rows}) == 32
    by_all = [CHECK.range_by(rows, is_compiled) for is_compiled in (True, False)]
    assert [round(margin, 2) for margin in by_all] == [0.3, 0.17]  # as the page says
    assert by_all[0] <= speed.COMPILED + 0.005 and by_all[1] <= speed.NOT_COMPILED
    assert first["count"] == 24  # before they changed the model
    assert [f"{first[key]:.0%}" for key in ("median", "near", "inside")] == ["17%", "62%", "79%"]


def test_the_picture_shows_what_the_page_begins_with(rows):
    """The last figures, as they were first predicted."""
    near = [row for row in CHECK.as_first_predicted(rows) if abs(row["error"]) <= CHECK.NEAR]
    (subfigure,) = CHECK.picture(rows).subfigs
    assert subfigure.get_suptitle().startswith(f"{len(near)} of the last 24 figures")
    page = " ".join((ROOT / "docs" / "predictions.md").read_text().split())
    assert f"{len(near)} of the last 24" in page
    others = [row for row in CHECK.as_first_predicted(rows) if row["program"] != "MPT"]
    assert f"without MPT {CHECK.near_text(others)}" in page
    too_fast = [row for row in others if row["error"] > CHECK.NEAR]
    assert (24 - len(near), len(too_fast)) == (9, 7) and "of the nine misses seven" in page


def test_the_picture_shows_apart_what_the_model_was_tuned_on(rows):
    """Hollow, and neither among the checks nor twice; what is outside of the model isn't drawn."""
    (axes,) = CHECK.picture(rows).subfigs[0].axes
    lines = {line.get_label(): line for line in axes.lines}
    tuned = lines["tuned on, as predicted today"]
    assert tuned.get_markerfacecolor() == "none"
    groups = [CHECK.chosen(rows, group=group) for group in ("tuned", "check")]
    expected = [len([row for row in group if "first" not in row]) for group in groups]
    checks = lines["earlier checks, as predicted today"]
    assert [len(line.get_xdata()) for line in (tuned, checks)] == expected


def test_the_range_by_all_other_programs():
    """It holds 95% of their checks, and none of the program's own."""

    def row(program: str, speed: float, group: str = "check", is_compiled: bool = True) -> dict:
        return dict(
            program=program,
            group=group,
            is_compiled=is_compiled,
            tok_per_sec=speed,
            predicted=100.0,
        )

    others = [row("a", 100 + k) for k in range(1, 11)]
    rows = [*others, row("b", 180.0), row("c", 170.0, "tuned"), row("d", 160.0, is_compiled=False)]
    for measured, is_inside in ((109.0, True), (91.0, True), (109.9, False), (180.0, False)):
        assert CHECK.inside_others_range(row("b", measured), rows) is is_inside


def test_the_published_memory():
    errors = {row["label"]: row["error"] for row in CHECK.memory_table().rows}
    assert len(errors) == 9
    for label, error in errors.items():
        assert abs(error) < (0.06 if label.startswith("8 ") else 0.01), label


def test_pages_have_the_tables(rows):
    def text_of(page: str) -> str:
        return (ROOT / "docs" / f"{page}.md").read_text()

    assert markdown(CHECK.program_table(rows)) in text_of("predictions")
    assert markdown(CHECK.accuracy_table(rows)) in text_of("predictions")
    assert markdown(CHECK.memory_table()) in text_of("predictions")
    times = shipped.prediction_of("01", CHECK.GPT2).seconds(32, CARDS["H100"])
    for kind, spent in times.items():  # where a step of 01 goes
        assert not spent or f"| {kind} | {1000 * spent:.1f} |" in text_of("predictions"), kind


@pytest.mark.parametrize(
    ("card", "others", "tuned"),
    [
        ("RTX 4090", "nanoGPT 106, nanogpt-speedrun 110, NoCap 129", ""),
        ("RTX 3090", "", ""),  # its settings are assumed
        ("T4", "", ""),
        ("A100 40 GB", "nanoGPT 109 (below)", ""),
        ("H100", "modded-nanogpt 366", "gollem 419, twenty cards 466"),
    ],
)
def test_what_others_measured(card, others, tuned):
    """Of each program that resembles 01 the fastest; apart, those that the model was tuned on."""
    line = prediction_tables.card_line(card)
    assert (line.others, line.tuned) == (others, tuned)


def test_a_speed_outside_of_the_expected_range_says_so():
    speeds = {"fast": 30_000, "slow": 9_000, "near": 20_000}
    text = prediction_tables.others_text(speeds, (10_000, 25_000))
    assert text == "slow 9 (below), near 20, fast 30 (above)"


def test_the_largest_batches_of_a_gpu():
    """A "?" marks one that fits without a margin. Float32 weights never fit where bfloat16 ones
    don't; on a GPU without bfloat16 units 01 has them anyway."""
    lines = {line.card: line for line in prediction_tables.gpus_table().rows}
    assert lines["RTX 4090"][2:5] == (4, "32 (64?)", "32")
    assert (lines["RTX 3080"].optimized, lines["RTX 3080"].float32) == ("16", "8 (16?)")
    assert lines["T4"].optimized == lines["T4"].float32
    page = " ".join((ROOT / "docs" / "gpus.md").read_text().split())
    fast, slow = (lines[card].speed.replace("–", " to ") for card in ("RTX 4090", "RTX 3090"))
    assert f"{fast} thousand tok/sec on the RTX 4090 and {slow} thousand on the RTX 3090" in page
    for line in lines.values():
        bfloat16, float32 = (int(text.split()[0]) for text in (line.optimized, line.float32))
        assert line.baseline < float32 <= bfloat16, line.card


def test_the_memory_of_each_batch_size():
    """Of 32 what the page says, and more with each batch; float32 weights take more."""
    lines = {line.batch: line for line in prediction_tables.memory_table().rows}
    optimized, float32, _ = lines[32][1:]
    assert f"{optimized:.1f}" == "11.9" and f"{float32:.1f}" == "16.2"
    assert list(lines) == sorted(lines)
    for line, larger in pairwise(lines.values()):
        assert line.optimized < line.float32 < line.baseline
        assert all(less < more for less, more in zip(line, larger, strict=True))


def test_rules_count_what_differs():
    by_hand = shipped.prediction_of("06-native-layers", CHECK.GPT2)

    def work(kind: str, is_matmul: bool, *rules: str) -> Work:
        (work,) = (
            work
            for work in CHECK.compose(by_hand, rules).steps[16]
            if work.kind == kind and bool(work.flops) is is_matmul
        )
        return work

    def size(kind: str, *rules: str) -> float:
        return work(kind, False, *rules).size

    assert work("products", True, "TF32").precision == "TF32"
    assert size("rest", "TF32") == 2 * size("rest")
    for kind in ("attention", "rest"):
        assert 0.8 < size(kind, "no dropout") / size(kind) < 1
    assert (
        size("rest", "no dropout")
        < size("rest", "no dropout", "autocast")
        < size("rest", "no dropout", "TF32")
    )
    assert size("optimizer", "foreach") == 3 * size("optimizer")
    assert size("attention", "attention by hand") < 0.5 * size("attention")
    assert not work("head", True, "unaligned head").is_aligned


def test_sizes_of_two_scripts_do_not_mix(monkeypatch, tmp_path):
    """A stored prediction of an older script that lacks a size is made anew as a whole."""
    program = Program("made-up", b"now", [])
    sizes = {size: MemoryNeed(0, 1) for size in BATCHES}
    older = Prediction(sizes, {}, 16, 1, code_of(b"before"))
    newer = older._replace(code=code_of(b"now"))
    monkeypatch.setattr(store, "load_prediction", lambda key, *folders: older)
    monkeypatch.setattr(store, "traced", lambda program: newer)
    monkeypatch.setattr(
        store,
        "traced_needs",
        lambda program, sizes, batch: {size: MemoryNeed(0, 2) for size in sizes},
    )
    missing = tmp_path / "no folder, so that nothing is saved"
    assert store.predict(program, missing) is older
    assert store.predict(program, missing, Sizes(batch=3)).code == newer.code
