"""Fingerprints of a script's training step: what a figure, measured or predicted, was made from.

    graph   the operators of two steps and an evaluation of a model with two layers, with the shapes
            and types of their tensors: what a prediction depends on
    step    the same with every number (learning rate, weight decay, dropout), the batch size, the
            precision of matmuls, attention's kernels, what keeps memory, how batches are
            loaded: what a measurement depends on
    reach   a hash of the lines that train(), the model, Config and configure() reach: while it
            stays the same, so do the other two, and nothing has to be traced. What main() does, how
            tokens are read and how ranks find each other isn't in it

Help texts, messages, the record and errors are in none of them. bench.predict.operators makes the
first two, in a child, since this module doesn't load PyTorch. A fingerprint names the PyTorch that
it was made with, whose operators it tells: those of two versions can't be compared.
"""

import ast
import importlib.metadata
import json
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from bench.common import BUILD, REFERENCE, read_kept, sha256, trained_in, write_whole
from bench.predict import tracing

NAME = "fingerprints.json"  # in results/reference: what was traced before
# Raised when the same step gets other fingerprints than before, so that those aren't compared with
# earlier ones. A slow test holds some of the committed ones to what is traced now.
VERSION = 1
CODE = "operators.py", "lesson.py", "pytorch.py"  # next to this: they make a fingerprint
ROOTS = "train", "GPTModel", "Config", "configure"
read = cache(read_kept)


class Fingerprint(NamedTuple):
    graph: str
    step: str


class Request(NamedTuple):
    """A script with its options, on a device ("cpu" or "cuda") in a type of parameters."""

    text: bytes
    options: tuple[str, ...] = ()
    device: str = "cpu"
    dtype: str = "bfloat16"


def of_run(text: bytes, run, plan, options: list[str], machine: dict) -> Request:
    """That of a run of a study's plan, on a machine as rates.this_machine tells it, with
    these options for every script."""
    options = [*plan.options, *options, *run.options]
    if machine["device"] != "cpu" and not any(each.startswith("--model") for each in options):
        options = ["--model", "gpt2", *options]  # a trace itself is on a CPU, where it isn't so
    return Request(text, tuple(options), machine["device"], trained_in(machine))


# ---- What a training step reaches --------------------------------------------------------------


@cache
def reach(text: bytes) -> str:
    """A hash of what ROOTS reach by name among a script's definitions, and of the statements beside
    these; that of the whole text, if it isn't Python."""
    try:
        tree = Plain().visit(ast.parse(text))
    except (SyntaxError, ValueError):
        return sha256(text)[:16]
    known, acts = {}, []
    for node in tree.body:
        names = defined(node)
        known |= {name: known.get(name, []) + [node] for name in names}
        is_main = isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)
        if not names and not is_main:
            acts.append(node)
    found, left = {}, [*acts, *(node for name in ROOTS for node in known.get(name, ()))]
    while left:
        node = left.pop()
        if id(node) not in found:
            found[id(node)] = node
            left += [other for each in ast.walk(node) if isinstance(each, ast.Name)
                     for other in known.get(each.id, ())]
    # Statements in their order; where a definition stands doesn't matter.
    parts = [ast.unparse(node) for node in acts]
    parts += sorted(ast.unparse(node) for node in found.values() if node not in acts)
    return sha256("\n".join(parts).encode())[:16]


def defined(node: ast.stmt) -> list[str]:
    """The names that a statement defines and does nothing else."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(each.asname or each.name).partition(".")[0] for each in node.names]
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    names = [each for target in targets if target for each in ast.walk(target)]
    plain = all(isinstance(each, ast.Name | ast.Tuple | ast.expr_context) for each in names)
    return [each.id for each in names if isinstance(each, ast.Name)] if plain else []


class Plain(ast.NodeTransformer):
    """Takes away what no training step depends on: docstrings, annotations, help texts, what is
    printed, and the messages of errors."""

    def generic_visit(self, node):
        super().generic_visit(node)
        for name in ("annotation", "returns"):
            if getattr(node, name, None):
                setattr(node, name, ast.Constant(0) if isinstance(node, ast.AnnAssign) else None)
        if isinstance(getattr(node, "body", None), list):
            node.body = node.body or [ast.Pass()]
        return node

    def visit_Expr(self, node):
        call = node.value
        printed = isinstance(call, ast.Call) and getattr(call.func, "id", None) == "print"
        return None if printed or isinstance(call, ast.Constant) else self.generic_visit(node)

    def visit_Call(self, node):
        if getattr(node.func, "id", None) == "option":  # (default, help text, ...)
            node.args[1:2] = []
            node.keywords = [each for each in node.keywords if each.arg not in ("text", "help")]
        return self.generic_visit(node)

    def visit_Raise(self, node):
        return ast.Raise(getattr(node.exc, "func", node.exc))


# ---- Asking ------------------------------------------------------------------------------------


class NotKnown:
    """In place of a fingerprint that wasn't made yet."""


def fingerprints(requests: Sequence[Request]) -> list[Fingerprint | None]:
    """Of each request; None where a script can't be traced, such as one that isn't ours. What was
    traced before is kept; the rest is traced in one child. Raises UserError."""
    unknown = [request for request in dict.fromkeys(requests) if look_up(request) is NotKnown]
    if unknown:
        made = trace(unknown)
        path = made_here()
        write_whole(path, as_lines(read(path) | {
            key_of(request): each for request, each in zip(unknown, made, strict=True)}))
        read.cache_clear()
    return [look_up(request) for request in requests]


used: dict[str, list | str | None] = {}  # what was looked up and found, by this process


def keep_used() -> None:
    """Makes results/reference hold what was used so far, and no more, so that nobody has to trace
    it again."""
    write_whole(REFERENCE / NAME, as_lines(dict(sorted(used.items()))))
    read.cache_clear()


def still(asked: Sequence[tuple[Request, str | None]], part: str) -> list[bool | None]:
    """Whether each script has the fingerprint ("graph" or "step") yet that a figure was made from;
    None where none was known, or where it can't be told: it is traced for that only if this PyTorch
    made the fingerprint. Raises UserError."""
    fingerprints([request for request, known in asked
                  if known and known.split()[0] == version()])
    found = [look_up(request, known.split()[0]) if known else None for request, known in asked]
    return [None if each in (None, NotKnown) else getattr(each, part) == known
            for each, (_, known) in zip(found, asked, strict=True)]


class Code(Plain):
    """As Plain, but what is printed stays."""

    def visit_Expr(self, node):
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)


@cache
def code(text: bytes) -> str:
    """A hash of a whole script but its comments, docstrings, help texts and messages."""
    return sha256(ast.unparse(Code().visit(ast.parse(text))).encode())[:16]


def has_the_same_code(text: bytes, source_sha256: str) -> bool:
    """Whether a script whose text had this hash, if remember() saw it, had the same code."""
    key, known = f"source {source_sha256[:16]}", read(REFERENCE / NAME)
    if key in known:
        used[key] = known[key]
    return known.get(key) == code(text)


def remember(text: bytes) -> None:
    """For has_the_same_code() when the script has been edited: not every step can be traced where
    it runs, so that a figure may have no fingerprint."""
    used[f"source {sha256(text)[:16]}"] = code(text)


def look_up(request: Request, version: str | None = None):
    """What was traced before with a version of PyTorch (None: with this one): as in fingerprints(),
    or NotKnown."""
    key = key_of(request, version)
    for path in (made_here(), REFERENCE / NAME):
        known = read(path)
        if key in known:
            used[key] = known[key]
            return known[key] and Fingerprint(*known[key])
    return NotKnown


def key_of(request: Request, made_with: str | None = None) -> str:
    text, options, device, dtype = request
    return " ".join([made_with or version(), reach(text), device, dtype, *options])


@cache
def version() -> str:
    """PyTorch's, without its last part, and VERSION from the second one on."""
    made_with = ".".join(importlib.metadata.version("torch").split(".")[:2])
    return made_with if VERSION == 1 else f"{made_with}+{VERSION}"


def made_here() -> Path:
    """In build/, by the code that makes fingerprints: what another one has made isn't found."""
    here = Path(__file__).parent
    code = sha256(b"".join((here / name).read_bytes() for name in CODE))[:16]
    return BUILD / f"fingerprints-{code}.json"


def as_lines(entries: dict) -> str:
    """JSON with a line for each entry."""
    return "{\n" + ",\n".join(
        f"{json.dumps(key)}: {json.dumps(each, separators=(',', ':'))}"
        for key, each in entries.items()) + "\n}\n"


def trace(requests: list[Request]) -> list[Fingerprint | None]:
    """In children; says so. Raises UserError where one breaks."""
    print(f"Tracing {len(requests)} training step{'s' * (len(requests) > 1)}", file=sys.stderr,
          flush=True)
    told = tracing.answers([
        (number, text, dict(options=options, device=device, dtype=dtype))
        for number, (text, options, device, dtype) in enumerate(requests)])
    return [Fingerprint(*(f"{version()} {digest}" for digest in each["told"]))
            if "told" in each else None for each in told]
