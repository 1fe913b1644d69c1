"""The rooms of bench/ and gpt_speed/: imports run one way, functions have few branches, and
each file has its line in bench/README.md."""

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
        "terminal",
        "machine",
        "options",
        "corpus",
        "common",
    ],
    "gpt_speed": [
        "__main__",
        "cli",
        "gradients",
        "audit",
        "interpreter",
        "speed",
        "cards",
        "tables",
        "gains",
        "memory",
        "counting",
        "pytorch",
        "children",
        "numeric",
        "machine",
        "script",
        "common",
    ],
}
BENCH, GPT_SPEED = ROOT / "bench", ROOT / "gpt_speed"
MODULES = sorted([*BENCH.rglob("*.py"), *GPT_SPEED.rglob("*.py")])
SCRIPTS = sorted(ROOT.glob("0*.py"))  # and the three lessons
TOOLS = [*MODULES, ROOT / "patches" / "stack.py", ROOT / "data" / "prepare.py", *SCRIPTS]
MOST_DECISIONS = 10


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


# ---- Branches, not lines


BRANCHES = (
    ast.If,
    ast.For,
    ast.While,
    ast.ExceptHandler,
    ast.match_case,
    ast.IfExp,
)
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
CONDITIONS = ast.Compare, ast.BoolOp


def own_nodes(function: ast.AST):
    """What a function holds, without the functions and classes inside it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield node
            yield from own_nodes(node)


def decisions(function: ast.AST) -> int:
    """Branches, each `and` and `or`, each comprehension and each of its filters."""
    count = 0
    for node in own_nodes(function):
        count += isinstance(node, BRANCHES)
        if isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        if isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
    return count


def packed(tree: ast.AST):
    """Expressions that hide a branch: a conditional expression in another one, a condition as an
    index, text times a condition."""
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            inner = [other for other in ast.walk(node) if isinstance(other, ast.IfExp)]
            if len(inner) > 1:
                yield node
        if isinstance(node, ast.Subscript) and isinstance(node.slice, CONDITIONS):
            yield node
        if isinstance(node, ast.Slice) and isinstance(node.lower, CONDITIONS):
            yield node
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            sides = node.left, node.right
            if any(map(is_text, sides)) and any(map(is_condition, sides)):
                yield node


def is_text(node: ast.AST) -> bool:
    is_number = isinstance(node, ast.Constant) and isinstance(node.value, int | float)
    return isinstance(node, ast.Constant | ast.JoinedStr) and not is_number


def is_condition(node: ast.AST) -> bool:
    is_bool_call = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "bool"
    return isinstance(node, CONDITIONS) or is_bool_call


@pytest.mark.parametrize("path", TOOLS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_function_has_few_decisions(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    assert {one.name: decisions(one) for one in functions if decisions(one) > MOST_DECISIONS} == {}
    assert [ast.unparse(node) for node in packed(tree)] == []


def test_the_map_is_whole():
    text = (BENCH / "README.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^\| `([\w/]+\.py)`", text, re.MULTILINE))
    paths = {path.relative_to(ROOT).as_posix().removeprefix("bench/") for path in MODULES}
    assert {path for path in paths - shown if not path.endswith("/__init__.py")} == set()
    assert shown <= paths and all(" ─> ".join(rooms) in text for rooms in ORDER.values())
