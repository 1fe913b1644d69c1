"""Places, files and errors that all tools share."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gpt_speed.common import UserError
from patches import stack

ROOT = stack.ROOT
BUILD = ROOT / "build"
REFERENCE = ROOT / "results" / "reference"
BOOK_TOKENS = 414_009  # of the book to train on: 404 windows of 1,024
# What well-formed JSON with the wrong content can raise, somewhere on its way to a page.
DAMAGE = LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError
ELSEWHERE = (
    "for a new report, name another folder: make report RESULTS=FOLDER, or --results-dir FOLDER"
)


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


def without_options(names: Iterable[str], words: Iterable[str]) -> list[str]:
    """Returns the words without the options of these names and their values."""
    kept, is_kept = [], True
    for word in words:
        if word.startswith("--"):
            is_kept = word.partition("=")[0] not in names
        if is_kept:
            kept.append(word)
    return kept


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


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
        raise UserError(f"{relative(path)} can't be written: {error.strerror or error}")


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
    corpus = str(data["corpus"])
    if data.get("tokenizer") == "bytes":
        return f"{shorten(corpus, 60)}, its tokens bytes"
    if corpus.lower().startswith("middlemarch"):
        return ""
    return shorten(corpus, 60)


def shorten(text: str, length: int) -> str:
    """Returns a text of at most `length` characters, whose end is cut off if it is longer."""
    if len(text) <= length:
        return text
    return text[: length - 1] + "…"
