"""The rooms of bench/: imports run one way, each file is read in one sitting and has its line in
bench/README.md."""

import ast
import re

import pytest
from conftest import ROOT

# Each may import those behind it, and its own modules. bench/README.md shows the same order.
ORDER = ["cli", "commands", "studies", "audit", "report", "predict", "analysis", "measure",
         "catalogue", "subcommands", "processes", "cards", "common"]
BENCH = ROOT / "bench"
MODULES = sorted(BENCH.rglob("*.py"))
LESSONS = {"00_orig.py": 495, "01_opt_single_gpu.py": 594, "02_opt_multi_gpu_ddp.py": 680}
LINES = {ROOT / name: most for name, most in LESSONS.items()} | dict.fromkeys(
    [*MODULES, ROOT / "measure.py", ROOT / "plot_results.py"], 302)  # at most


def imported(path) -> list[str]:
    """The modules of bench that a file imports."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "bench":
            names += [f"bench.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return [name for name in names if name.startswith("bench.")]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_run_one_way(path):
    room = path.relative_to(BENCH).with_suffix("").parts[0]
    for name in imported(path):
        assert ORDER.index(room) <= ORDER.index(name.split(".")[1]), name


def test_files_stay_short():
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in LINES}
    assert {path.name: count for path, count in lines.items() if count > LINES[path]} == {}


def test_the_map_is_whole():
    text = (BENCH / "README.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^\| `([\w/]+\.py)`", text, re.MULTILINE))
    paths = {path.relative_to(BENCH).as_posix() for path in MODULES}
    assert {path for path in paths - shown if not path.endswith("/__init__.py")} == set()
    assert shown <= paths and " ─> ".join(ORDER) in text
