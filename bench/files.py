"""Paths as a user reads them, and files that are never half-written."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "results" / "reference"


def relative(path: Path) -> str:
    """`path` as seen from the current folder."""
    try:
        return os.path.relpath(path)
    except ValueError:  # on another drive of a Windows machine
        return str(path)


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a temporary file beside `path` and renames it: `path` is never half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
