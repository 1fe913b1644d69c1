"""Whether a script's code is the one that was traced: a hash of what can change what it takes."""

import ast
import json

from bench.common import sha256


def code_of(text: bytes) -> str:
    """Hashes a script without its comments, docstrings and help texts; in every version of Python
    to the same."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        strip(node)
    return sha256(json.dumps(plain(tree)).encode())[:16]


def strip(node: ast.AST) -> None:
    """Takes from a part of a syntax tree what isn't hashed."""
    match node:
        case ast.Module() | ast.ClassDef() | ast.FunctionDef():
            node.body = [line for line in node.body if not is_text(line)]
        case ast.Call(func=ast.Name(id="add"), args=[ast.Constant(), ast.Constant(), *_]):
            node.args[1:2] = []  # add("--flag", help text, ...)
        case ast.JoinedStr():  # 3.12.1 adds empty texts to the formats of f-strings
            node.values = [part for part in node.values if getattr(part, "value", None) != ""]


def is_text(line: ast.stmt) -> bool:
    """Returns whether a line is a constant alone, as docstrings are."""
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)


def plain(node):
    """Returns a part of a syntax tree for json, without empty fields: which ones there are depends
    on the version of Python."""
    if isinstance(node, ast.AST):
        fields = {
            name: plain(value) for name, value in ast.iter_fields(node) if value not in ([], None)
        }
        return {type(node).__name__: fields}
    if isinstance(node, list):
        return [plain(part) for part in node]
    return repr(node)
