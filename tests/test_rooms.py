"""The rooms of bench/: imports run one way, and each file is read in one sitting."""

import ast

import pytest
from conftest import ROOT

# Each may import those behind it, and its own modules; `bench` is what lies below all: common,
# processes and the catalogue.
ORDER = ["cli", "commands", "studies", "audit", "report", "predict", "analysis", "measure",
         "catalogue", "subcommands", "processes", "cards", "common"]
MODULES = sorted((ROOT / "bench").rglob("*.py"))
LINES = 350  # of a file, at most
LESSONS = {"00_orig.py": 495, "01_opt_single_gpu.py": 575, "02_opt_multi_gpu_ddp.py": 640}


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_run_one_way(path):
    own = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "bench":
            names = [f"bench.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            if name.startswith("bench.") and own != "__init__":
                assert ORDER.index(own) <= ORDER.index(room_of(name)), f"line {node.lineno}: {name}"


def lines_of(path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_files_stay_short():
    tools = [*MODULES, ROOT / "measure.py", ROOT / "plot_results.py"]
    assert {path.name: lines_of(path) for path in tools if lines_of(path) > LINES} == {}
    assert {name: lines_of(ROOT / name) for name, most in LESSONS.items()
            if lines_of(ROOT / name) > most} == {}
