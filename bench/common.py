"""Places, files and errors that all tools share."""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, TypedDict

from gpt_speed.common import UserError
from patches import stack

ROOT = stack.ROOT
BUILD = ROOT / "build"
REFERENCE = ROOT / "results" / "reference"
BOOK_TOKENS = 414_009  # of the book to train on: 404 windows of 1,024
# What well-formed JSON with the wrong content can raise, somewhere on its way to a page.
DAMAGE = LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError
# What a short name of a machine leaves out of the name that the machine gives itself.
LEFT_OUT = (
    r"\((R|TM)\)",
    r"( CPU)? @.*$",  # the clock rate
    r" Processor$",
    r"^NVIDIA (GeForce )?",
    r" \d+GB HBM\w+$",
    r" \d+GB(?= PCIe$)",
    r"-\d+GB$",
)
ELSEWHERE = (
    "for a new report, name another folder: make report RESULTS=FOLDER, or --results-dir FOLDER"
)


class Machine(TypedDict, total=False):
    """What a study has to know of a machine, by bench.measure.hardware.this_machine. Journals keep
    it; older ones lack some of it."""

    device: str  # "cuda" or "cpu"
    gpus: int  # that PyTorch can use
    name: str  # of the GPU, or else of the CPU
    cpu: str
    torch: str  # its version
    python: str
    os: str
    threads: int  # of PyTorch on the CPU
    cores: int | None  # that a process may run on
    compiles: bool  # whether torch.compile works
    driver: str | None  # the GPU's
    capability: str | None  # the GPU's compute capability, such as "8.0"
    cuda: str | None  # the version that PyTorch was built with
    ram_gb: float | None  # of the host, GB of 1024³ bytes
    dtype: str  # that the optimized scripts train in here, "bfloat16" or "float32"
    dtype_reason: str
    gpu_needs: str | None  # what is missing before PyTorch computes on the GPU


def relative(part: Any) -> str:
    """Returns a path as seen from the current folder, and other parts of a command as they are."""
    try:
        return os.path.relpath(part) if isinstance(part, Path) else str(part)
    except ValueError:  # on another drive of a Windows machine
        return str(part)


def parse_options(words: Iterable[str]) -> list[tuple[str, str]]:
    """Returns each option with its value, written `--name value` or `--name=value`; "" for one
    without."""
    options: list[tuple[str, str]] = []
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            options.append((name, value))
        elif options:
            name, value = options[-1]
            options[-1] = name, f"{value} {word}".strip()
    return options


def option_value(name: str, words: Iterable[str]) -> str:
    """Returns the value of an option, the last one if it is repeated; "" without it."""
    return dict(parse_options(words)).get(name, "")


def has_option(name: str, words: Iterable[str]) -> bool:
    return any(option == name for option, _ in parse_options(words))


def short_name(machine: Machine) -> str:
    """Returns a machine's name as pictures show it: "H100", "T4 (float32)"."""
    name = machine["name"]
    for part in LEFT_OUT:
        name = re.sub(part, "", name, flags=re.IGNORECASE)
    if trained_in(machine) != "bfloat16":
        name += f" ({trained_in(machine)})"
    return name


def trained_in(machine: Machine) -> str:
    """Returns the type that the optimized scripts train in there, bfloat16 or float32."""
    # Older journals don't tell; their machines had bfloat16 units.
    return machine.get("dtype", "bfloat16")


def machine_difference(one: Machine, other: Machine) -> str | None:
    """Returns, with both values, what keeps figures of one machine from standing for the other's;
    None where nothing does. A GPU may have another host. One name of a CPU may stand for several
    generations, which `cpu` tells apart; a process may have been given fewer cores; and
    torch.compile may have begun to work."""
    names = ["name", "device", "gpus", "torch"]
    if_known = ["compiles"]  # which older journals lack
    if one.get("device") == "cpu":
        names += ["cpu", "threads"]
        if_known += ["cores"]
    names += [name for name in if_known if None not in (one.get(name), other.get(name))]
    for name in names:
        if one.get(name) != other.get(name):
            return f"{name}: {one.get(name)}, here: {other.get(name)}"
    if trained_in(one) != trained_in(other):
        return f"dtype: {trained_in(one)}, here: {trained_in(other)}"
    return None


def same_machine(one: Machine, other: Machine) -> bool:
    return machine_difference(one, other) is None


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def load_script(path: Path, name: str = "script") -> ModuleType:
    """Returns a script as a module. Its file's name begins with a digit: `import` can't. Programs
    that import nothing of bench, bench/measure/gradients.py and those of peers/, have their own."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def read_kept(path: Path) -> dict:
    """Reads a JSON file that is made again where it isn't there or is damaged: {}."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, *DAMAGE):
        return {}


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file that is never half-written. Raises UserError."""
    if isinstance(content, str):
        content = content.encode(errors="replace")  # JSON may hold half a character, "\ud800"
    try:
        stack.write_all({path: content})
    except OSError as error:
        raise UserError(f"{relative(path)} can't be written: {error.strerror}")


def remove_built(folder: Path) -> None:
    """Removes a folder of build/. Raises UserError for a folder that lies elsewhere."""
    if BUILD.resolve() not in folder.resolve().parents:
        raise UserError(f"{relative(folder)} isn't in {relative(BUILD)}, so it isn't removed")
    shutil.rmtree(folder, ignore_errors=True)


def tokens_in(folder: Path) -> dict | None:
    """Reads meta.json; None without tokens. Raises UserError where it is damaged."""
    meta = folder / "meta.json"  # written last
    if not meta.exists():
        return None
    try:
        data = json.loads(meta.read_text(encoding="utf-8"))
        if data["tokens"]["train"] < 1:
            raise ValueError("no tokens")
        return data
    except (OSError, *DAMAGE) as error:
        raise UserError(f"{relative(meta)} is damaged ({error!r}): run data/prepare.py")


def other_text(data: Any) -> str:
    """Returns the text that meta.json, or a record's copy of it, names; "" for the book
    in GPT-2's tokens, or where it isn't known."""
    if not isinstance(data, dict) or not data.get("corpus"):
        return ""
    corpus, in_bytes = str(data["corpus"]), data.get("tokenizer") == "bytes"
    if corpus.lower().startswith("middlemarch") and not in_bytes:
        return ""
    if len(corpus) > 60:
        corpus = corpus[:59] + "…"
    if in_bytes:
        corpus += ", its tokens bytes"
    return corpus
