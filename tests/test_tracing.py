"""bench/predict/tracing.py: a child that traces a script at several batch sizes."""

import sys

import pytest

from bench import processes
from bench.catalogue import Scripts
from bench.common import UserError
from bench.predict import child, tracing
from bench.predict.tracing import ask, ask_each

SCRIPTS = Scripts()
SMALL = ["--model", "cpu-demo", "--context-length", "64"]


@pytest.mark.slow
def test_a_batch_does_not_depend_on_those_before_it():
    text = SCRIPTS.text("memory-budget")
    options = [*SMALL, "--memory-budget", "0"]
    together, alone = ask(text, options, [4, 2]), ask(text, options, [2])
    assert together[2] == alone[2] != together[4]


@pytest.mark.slow
def test_a_batch_that_a_script_refuses_does_not_stop_the_others():
    text, options = SCRIPTS.text("step-accumulation"), [
        *SMALL, "--micro-batches", "4", "--no-compile"]
    traces = ask_each(text, options, [2, 4])
    assert isinstance(traces[2], UserError) and traces[4]["tokens"] == 4 * 64
    with pytest.raises(UserError, match="^what it takes can't be predicted: .*multiple"):
        ask(text, options, [4, 2])


@pytest.mark.parametrize(("code", "says"), [
    ("raise SystemExit('error: no memory')", "no memory"),
    ("import time; time.sleep(60)", "no answer after 1 s"),
])
def test_a_child_that_breaks_or_is_stuck(monkeypatch, code, says):
    run_child = processes.run_child
    monkeypatch.setattr(tracing, "SECONDS", 1)
    monkeypatch.setattr(processes, "run_child", lambda command, *args, **how: run_child(
        [sys.executable, "-c", code], *args, **how))
    with pytest.raises(UserError, match=f"^what it takes can't be predicted: {says}$"):
        ask_each(b"", SMALL, [1])


def test_a_folder_for_compiled_code_that_cant_be_made(monkeypatch, tmp_path):
    """PyTorch makes it when it is imported to trace: the line names the variable."""
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    with pytest.raises(UserError, match=rf"{folder}. \(see TORCHINDUCTOR_CACHE_DIR\)$"):
        ask_each(b"", SMALL, [1])


def test_other_versions_of_pytorch(monkeypatch):
    monkeypatch.setattr(child.torch, "__version__", "2.11.0+cpu")
    assert "2.13, not with 2.11" in child.answer("script.py", [], 8)["error"]
