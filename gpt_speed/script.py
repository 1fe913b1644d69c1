"""Runs somebody's script in this process, with hooks. Only the standard library is imported."""

import ctypes
import json
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


def hook(owner, name: str, before: Callable[..., Callable[[], None] | None]) -> None:
    """Replaces a function by one that first calls `before` with the same arguments. What `before`
    returns, if anything, is called last, also where the function raises."""
    real = getattr(owner, name)

    @wraps(real, updated=())  # without the compiler's own marks on it
    def hooked(*args, **kwargs):
        after = before(*args, **kwargs)
        try:
            return real(*args, **kwargs)
        finally:
            if after:
                after()

    setattr(owner, name, hooked)


def load_script(path: str | Path, name: str = "script") -> ModuleType:
    """Returns a script as a module, also where `import` can't, as of a file whose name begins with
    a digit."""
    spec = spec_from_file_location(name, path)
    assert spec and spec.loader
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def run_script(command: list[str]) -> str:
    """Runs a script, or "-m" and a module, with its arguments, as Python itself would; returns how
    it failed: the type and the first line of what it raised, "" where it didn't."""
    first, *words = command
    end_with_tool()
    try:
        if first == "-m":
            begin(os.getcwd(), words)
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            begin(os.path.dirname(os.path.abspath(first)), command)
            runpy.run_path(first, run_name="__main__")
    except SystemExit as stop:
        if not stop.code:
            return ""
        return f"it ended with {stop.code}"
    except BaseException as raised:
        traceback.print_exception(raised)
        return first_line(raised)
    return ""


def begin(folder: str, arguments: list[str]) -> None:
    """Sets where a script imports from first, and what it is given, as Python itself would."""
    sys.path.insert(0, folder)
    sys.argv = arguments


def end_with_tool() -> None:
    """Lets Linux kill this process when the tool is killed, whatever the script does with the
    SIGTERM that children.prepare_child() asks for."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def write_report(report: str, facts: dict) -> None:
    """Writes a report as JSON: whoever reads the file finds the whole of it, or no file."""
    path = Path(report)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(facts), encoding="utf-8")
    part.replace(path)
    sys.stdout.flush()
    sys.stderr.flush()


def kill() -> None:
    """Ends the process with its children, so that nothing more of the script runs."""
    if hasattr(os, "killpg") and os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def first_line(error: BaseException) -> str:
    """Returns the type of an error and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]])
