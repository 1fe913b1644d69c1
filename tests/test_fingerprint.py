"""bench/predict/fingerprint.py: what a figure's training step is known by, and what changes it."""

import json
import re
import subprocess
import sys
from itertools import pairwise

import pytest
from conftest import ROOT

from bench.catalogue import Scripts
from bench.common import sha256
from bench.predict import fingerprint
from bench.predict.fingerprint import Fingerprint, NotKnown, Request, fingerprints, look_up, reach

SCRIPTS = Scripts()
RUNGS = SCRIPTS.rungs(4)
LAST = SCRIPTS.text(SCRIPTS.stage("01").script).decode()
PLUMBING = {  # what no step depends on: what stands in 01, and what instead
    "a help text": ('"windows per step and process"', '"windows of a step"'),
    "what a step prints": ("steps per epoch,", "steps in an epoch,"),
    "the message of an error": ("the loss is not finite: lower", "no loss: lower"),
    "a field of the record": ("attention_backend=", "attention="),
    "a comment": ("# a sample, not timed either", "# not timed"),
    "a docstring": ('"""Mean cross entropy, in nats per token."""', '"""Nats per token."""'),
    "an annotation": ("def compute_loss(model: nn.Module,", "def compute_loss(model,"),
    "an error that is told": ('"interrupted", f"interrupted by', '"interrupted", f"ended by'),
}
STEP = {  # what a measurement depends on, and no prediction
    "the learning rate": ("config.learning_rate,", "3 * config.learning_rate,"),
    "weight decay": ("weight_decay=config.weight_decay", "weight_decay=0.3"),
    "dropout": ("nn.Dropout(config.dropout)", "nn.Dropout(config.dropout / 2)"),
    "what keeps memory": ('"THP_MEM_ALLOC_ENABLE", "1"', '"THP_MEM_ALLOC_ENABLE", "0"'),
    "pinned memory": ("pin_memory=pin)", "pin_memory=False)"),
}
BOTH = {
    "a type": ("getattr(torch, config.dtype))", "torch.float16)"),
    "a kernel": ('nn.GELU(approximate="tanh")', "nn.ReLU()"),
    "what comes to what": ("x_BTC + self.dropout(self.feed", "self.dropout(self.feed"),
    "attention's kernels": ("enable_cudnn_sdp(not config.dropout)", "enable_flash_sdp(True)"),
    "the optimizer": (", fused=True", ""),
    "the compiler": ("torch.compile(model)", 'torch.compile(model, mode="max-autotune")'),
    "the activations that are kept": (
        '    torch.set_float32_matmul_precision("high")',
        '    torch._functorch.config.activation_memory_budget = 0.5\n'
        '    torch.set_float32_matmul_precision("high")'),
    "products": ('set_float32_matmul_precision("high")', 'set_float32_matmul_precision("medium")'),
}
EDITS = PLUMBING | STEP | BOTH


def edited(*names: str) -> bytes:
    """01 with these edits."""
    text = LAST
    for before, after in map(EDITS.get, names):
        assert before in text, names
        text = text.replace(before, after)
    return text.encode()


OPTIONS = ("--model", "cpu-demo", "--context-length", "64", "--dropout", "0.1")


def traced(requests: dict[str, Request]) -> dict:
    return dict(zip(requests, fingerprint.trace(list(requests.values())), strict=True))


@pytest.mark.slow
def test_each_rung_has_a_step_of_its_own(forked_children):
    """No two neighbours share one; what only the loader or the environment does is in no graph."""
    traced_rungs = traced({run.script: Request(SCRIPTS.text(run.script), OPTIONS) for run in RUNGS})
    same = []
    for one, other in pairwise(run.script for run in RUNGS):
        assert traced_rungs[one].step != traced_rungs[other].step, other
        if traced_rungs[one].graph == traced_rungs[other].graph:
            same.append(other)
    assert same == ["04-pinned-memory", "12-huge-pages", "15-kept-memory"]


@pytest.mark.slow
def test_what_changes_it():
    """All edits of plumbing together don't, each other one does."""
    edits = traced({"none": Request(LAST.encode(), OPTIONS),
                    "plumbing": Request(edited(*PLUMBING), OPTIONS),
                    **{what: Request(edited(what), OPTIONS) for what in STEP | BOTH}})
    plain = edits.pop("none")
    for what, ours in edits.items():
        assert (ours.step == plain.step) is (what == "plumbing"), what
        assert (ours.graph == plain.graph) is (what not in BOTH), what


@pytest.mark.parametrize("what", EDITS)
def test_what_is_reached(what):
    """What train(), the model and Config don't reach needs no trace."""
    assert (reach(edited(what)) == reach(LAST.encode())) is (what in PLUMBING)


def test_reach_of_any_text():
    text = b"import os\nA = 1\nB = 2\ndef train():\n    return A\ndef other():\n    return B\n"
    assert reach(text) == reach(text.replace(b"B = 2", b"B = 3"))
    assert reach(text) != reach(text.replace(b"A = 1", b"A = 2"))
    assert reach(text) != reach(text + b"os.environ['X'] = '1'\n")  # it acts
    assert reach(text) == reach(text + b"if __name__ == '__main__':\n    other()\n")
    assert reach(b"def f(:\n") != reach(b"def g(:\n")


@pytest.mark.slow
def test_other_devices_and_types(forked_children):
    plain = Request(SCRIPTS.text("05-bfloat16"), OPTIONS)
    found = traced({"05": plain, "float32": plain._replace(dtype="float32"),
                    "cuda": plain._replace(device="cuda"), "foreign": Request(b"print('hello')\n"),
                    "again": plain})
    assert found["05"] == found["again"]  # wherever it is among others
    assert found["05"].step != found["float32"].step
    assert found["05"].graph != found["float32"].graph
    assert found["05"].step != found["cuda"].step  # its copies don't wait
    assert found["foreign"] is None


def test_what_was_traced_is_kept(tmp_path, monkeypatch):
    """By what it reaches, its options, device, type and PyTorch's version; also that a script can't
    be traced."""
    asked = []

    def trace(requests):
        asked.append(requests)
        return [None if b"no" in request.text else Fingerprint("g", "s") for request in requests]

    monkeypatch.setattr(fingerprint, "trace", trace)
    monkeypatch.setattr(fingerprint, "BUILD", tmp_path)
    monkeypatch.setattr(fingerprint, "REFERENCE", tmp_path / "reference")
    ours, theirs = Request(b"def train(): a"), Request(b"def train(): no")
    made = Fingerprint("g", "s")
    assert fingerprints([ours, theirs, ours]) == [made, None, made]
    assert fingerprints([Request(b"def train(): a  # one"), theirs]) == [made, None]
    assert asked == [[ours, theirs]]
    other = Request(ours.text, ("--x",))
    assert look_up(other) is NotKnown and look_up(ours) == made
    assert fingerprints([other, ours._replace(dtype="float32"), ours._replace(device="cuda")])
    assert len(asked[1]) == 3
    monkeypatch.setattr(fingerprint, "version", lambda: "2.99")
    assert look_up(ours) is NotKnown
    fingerprint.made_here().write_text("[]")  # damaged: as if it weren't there
    fingerprint.read.cache_clear()
    assert fingerprints([ours]) and len(asked) == 3
    monkeypatch.setattr(fingerprint, "CODE", fingerprint.CODE[1:])  # the code is another one
    assert look_up(ours) is NotKnown
    fingerprint.read.cache_clear()


def test_an_edited_script_is_known_by_its_code(tmp_path, monkeypatch):
    """Where a step can't be traced: if only comments and texts were edited; nothing that runs."""
    (tmp_path / fingerprint.NAME).write_text("{}")
    monkeypatch.setattr(fingerprint, "REFERENCE", tmp_path)
    monkeypatch.setattr(fingerprint, "used", {})
    fingerprint.read.cache_clear()
    text = b'x = option(1, "a text")\ndef f():\n    "It does."\n    print(a.item())\n'
    assert not fingerprint.has_the_same_code(text, sha256(text))
    fingerprint.remember(text)
    fingerprint.keep_used()
    fingerprint.used.clear()
    edited = text.replace(b"a text", b"another") + b"# one"
    assert fingerprint.has_the_same_code(edited.replace(b"It does.", b"It did."), sha256(text))
    for old, new in ((b"a.item()", b"a"), (b"option(1", b"option(2"), (b"def f", b"def g")):
        assert not fingerprint.has_the_same_code(text.replace(old, new), sha256(text)), new
    fingerprint.keep_used()  # it was used
    assert fingerprint.has_the_same_code(text, sha256(text))
    fingerprint.read.cache_clear()


def test_a_version_of_its_own(monkeypatch):
    """From the second one on it is told with PyTorch's, so that nothing made before is compared."""
    fingerprint.version.cache_clear()
    before = fingerprint.version()
    monkeypatch.setattr(fingerprint, "VERSION", 2)
    fingerprint.version.cache_clear()
    assert fingerprint.version() == f"{before}+2"
    monkeypatch.undo()
    fingerprint.version.cache_clear()


@pytest.mark.slow
def test_what_is_committed_is_what_is_traced_now():
    """Else VERSION has to be raised."""
    known = fingerprint.read(ROOT / "results" / "reference" / fingerprint.NAME)
    asked = [Request(SCRIPTS.text(run.script), options, device)
             for run in (RUNGS[0], RUNGS[5], RUNGS[-2], RUNGS[-1])
             for options in ((), ("--model", "gpt2")) for device in ("cpu", "cuda")]
    asked = [each for each in asked if fingerprint.key_of(each) in known]
    if not asked:
        pytest.skip("made by another version of PyTorch, or of other scripts")
    assert fingerprint.trace(asked) == [Fingerprint(*known[fingerprint.key_of(each)])
                                        for each in asked]


def test_torch_is_not_loaded():
    """What asks for a fingerprint has to answer at once."""
    code = ("import sys; from bench.predict import fingerprint; from pathlib import Path;"
            "fingerprint.reach(Path('00_orig.py').read_bytes()); fingerprint.version();"
            "print('torch' in sys.modules)")
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert out.stdout == "False\n", out.stderr


def test_what_is_committed():
    """Its form; that of a test would have other versions, or nothing but null."""
    known = json.loads((ROOT / "results" / "reference" / fingerprint.NAME).read_text())
    traced = 0
    for key, each in known.items():
        if key.startswith("source "):
            assert re.fullmatch(r"source [0-9a-f]{16} [0-9a-f]{16}", f"{key} {each}")
            continue
        made_with, reached, device, dtype, *_ = key.split()
        assert re.fullmatch(r"\d+\.\d+ [0-9a-f]{16} (cpu|cuda) (bfloat16|float32)",
                            f"{made_with} {reached} {device} {dtype}"), key
        if each:
            traced += 1
            assert len(each) == 2
            assert all(re.fullmatch(rf"{made_with} [0-9a-f]{{16}}", digest) for digest in each), key
    assert traced > len(known) / 2 > 50
