"""bench/predict/tracing.py: children that trace many scripts, one after the other."""

import os
import signal
import sys
import threading

import pytest
from conftest import small

from bench import processes
from bench.catalogue import Scripts
from bench.common import UserError
from bench.predict import child as program
from bench.predict import tracing
from bench.predict.tracing import Child, ask, ask_each

SCRIPTS = Scripts()
SMALL = ["--model", "cpu-demo", "--context-length", "64"]


@pytest.fixture
def child():
    """A new one, which is ended."""
    made = Child()
    yield made
    if made.process:
        made.process.terminate()
        made.process.wait()


@pytest.mark.slow
def test_as_a_new_child_answers(child, tmp_path):
    """What scripts before have set doesn't stay, and a compiled program is taken only for an equal
    graph; its first answers, of which a new child made the very first, come again at the end."""
    requests = []
    for name, *options in (["0"], ["01_opt_single_gpu"],
                           ["memory-budget", "--memory-budget", "0"],
                           ["01_opt_single_gpu", "--dropout", "0.1"], ["precision-autocast"],
                           ["02_opt_multi_gpu_ddp"], ["01_opt_single_gpu", "--batch-size", "0"]):
        script = tmp_path / f"{name}.py"
        script.write_text(small(SCRIPTS.text(name).decode()))
        requests.append(dict(script=str(script), options=[*SMALL, *options], batch=2))
    answers = [child.answer(request) for request in requests]
    assert ["told" in each for each in answers] == [True] * 6 + [False]
    alone = Child()
    assert alone.answer(requests[3]) == answers[3]
    alone.process.terminate()
    alone.process.wait()
    assert [child.answer(request) for request in requests[:4]] == answers[:4]
    assert len({str(each) for each in answers}) == len(answers)


@pytest.mark.slow
def test_a_batch_that_a_script_refuses_does_not_stop_the_others():
    text, options = SCRIPTS.text("step-accumulation"), [
        *SMALL, "--micro-batches", "4", "--no-compile"]
    found = ask_each(text, options, [2, 4])
    assert isinstance(found[2], UserError) and found[4]["tokens"] == 4 * 64
    with pytest.raises(UserError, match="^what it takes can't be predicted: .*multiple"):
        ask(text, options, [4, 2])


@pytest.mark.slow
def test_a_child_that_breaks(child, tmp_path, monkeypatch):
    """It is told in a line, and the next request gets another one."""
    script = tmp_path / "script.py"
    script.write_bytes(SCRIPTS.text("0"))
    request = dict(script=str(script), options=SMALL, batch=1)
    start = processes.start
    monkeypatch.setattr(processes, "start", lambda command, errors, **how: start(
        [sys.executable, "-c", "raise SystemExit('error: no memory')"], errors))
    with pytest.raises(UserError, match="^what it takes can't be predicted: no memory$"):
        child.answer(request)
    monkeypatch.setattr(tracing, "CHILDREN", [child, child])
    with pytest.raises(UserError, match="no memory"):  # it isn't the script that refuses this
        ask_each(script.read_bytes(), SMALL, [1])
    monkeypatch.setattr(processes, "start", start)
    assert "told" in child.answer(request)


STUCK = """
import faulthandler, sys
faulthandler.dump_traceback_later(0.2, exit=True)
sys.stdin.readline()
sys.stdin.readline()
"""


@pytest.mark.parametrize(("code", "told"), [
    (STUCK, "was stuck at <string>:5"),
    # No answer, and it lives on.
    ("print('hello', flush=True); input(); input()", "what it takes can't be predicted: .* -9"),
])
def test_a_child_that_does_not_answer(child, monkeypatch, capsys, code, told):
    start = processes.start
    monkeypatch.setattr(processes, "start", lambda command, errors, **how: start(
        [sys.executable, "-c", code], errors))
    with pytest.raises(UserError, match=f"^{told}$"):
        child.answer({})
    twice = f"A trace {told}: made once more\n" if code == STUCK else ""
    assert capsys.readouterr().err == twice


def test_a_folder_for_compiled_code_that_cant_be_made(child, monkeypatch, tmp_path):
    """PyTorch makes it when it is imported to trace: the line names the variable."""
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    told = rf"predicted: .*{folder}. \(see TORCHINDUCTOR_CACHE_DIR\)$"
    with pytest.raises(UserError, match=told):
        child.answer({})


def test_an_interrupt_does_not_wait_for_children(child, monkeypatch):
    """Not even for one that would never answer."""
    def begin(command, errors, **how):
        timer = threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGUSR1])
        timer.start()
        return start([sys.executable, "-c", "input(); input()"], errors)

    def interrupted(*_):
        raise KeyboardInterrupt

    start, before = processes.start, signal.signal(signal.SIGUSR1, interrupted)
    monkeypatch.setattr(processes, "start", begin)
    monkeypatch.setattr(tracing, "CHILDREN", [child, child])
    try:
        with pytest.raises(KeyboardInterrupt):
            tracing.answers([(0, b"", {})])
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_other_versions_of_pytorch(monkeypatch):
    monkeypatch.setattr(program.torch, "__version__", "2.11.0+cpu")
    assert program.answer(dict(batch=8)) == dict(
        error="predictions can be made again with PyTorch 2.13, not with 2.11; stored ones work"
              " with any")


def test_one_batch_size_goes_to_one_child(monkeypatch):
    """Of which each takes about half, also of the small ones."""
    monkeypatch.setattr(tracing, "CHILDREN", [By("a"), By("b")])
    found = ask(b"", [], [1, 2, 4, 8, 16])
    assert [each["by"] for each in found.values()] == ["b", "a", "b", "a", "b"]


class By:
    """In place of a child: it answers with its name."""

    def __init__(self, name: str):
        self.name = name

    def answer(self, request: dict) -> dict:
        return dict(told=dict(by=self.name))
