"""The rooms of bench/ and gpt_speed/: imports run one way, each file is read in one sitting and has
its line in bench/README.md."""

import ast
import re

import pytest
from conftest import ROOT

# Each may import those behind it, and its own modules. bench/README.md shows the same order.
ORDER = {
    "bench": [
        "cli",
        "commands",
        "studies",
        "report",
        "predict",
        "analysis",
        "measure",
        "catalogue",
        "subcommands",
        "processes",
        "common",
    ],
    "gpt_speed": [
        "audit",
        "speed",
        "cards",
        "tables",
        "gains",
        "memory",
        "counting",
        "children",
        "common",
    ],
}
BENCH, GPT_SPEED = ROOT / "bench", ROOT / "gpt_speed"
MODULES = sorted([*BENCH.rglob("*.py"), *GPT_SPEED.rglob("*.py")])
LESSONS = {"00_orig.py": 495, "01_opt_single_gpu.py": 594, "02_opt_multi_gpu_ddp.py": 680}
LINES = {ROOT / name: most for name, most in LESSONS.items()} | dict.fromkeys(
    [*MODULES, ROOT / "measure.py", ROOT / "plot_results.py"], 302
)  # at most


def imported(path) -> list[str]:
    """The modules that a file imports."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module in ORDER:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_run_one_way(path):
    package, room, *_ = path.relative_to(ROOT).with_suffix("").parts
    order = ORDER[package]
    for name in imported(path):
        if name.startswith(f"{package}."):
            assert order.index(room) <= order.index(name.split(".")[1]), name


@pytest.mark.parametrize(
    "path", sorted(GPT_SPEED.rglob("*.py")), ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_gpt_speed_needs_nothing_of_this_repository(path):
    ours = {"bench", "patches", "measure", "plot_results"}
    assert ours.isdisjoint(name.split(".")[0] for name in imported(path))


def test_files_stay_short():
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in LINES}
    assert {path.name: count for path, count in lines.items() if count > LINES[path]} == {}


def test_the_map_is_whole():
    text = (BENCH / "README.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^\| `([\w/]+\.py)`", text, re.MULTILINE))
    paths = {path.relative_to(ROOT).as_posix().removeprefix("bench/") for path in MODULES}
    assert {path for path in paths - shown if not path.endswith("/__init__.py")} == set()
    assert shown <= paths and all(" ─> ".join(rooms) in text for rooms in ORDER.values())
