"""Places, files and errors that all tools share."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from gpt_speed.common import UserError
from patches import stack

ROOT = stack.ROOT
BUILD = ROOT / "build"
REFERENCE = ROOT / "results" / "reference"
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


def shorten(text: str, length: int) -> str:
    """Returns a text of at most `length` characters, whose end is cut off if it is longer."""
    if len(text) <= length:
        return text
    return text[: length - 1] + "…"
