"""Places, files and errors that all tools share."""

import os
from pathlib import Path

from patches import stack

ROOT = stack.ROOT
BUILD = ROOT / "build"
REFERENCE = ROOT / "results" / "reference"


class UserError(Exception):
    """An error that the user can fix, printed as one line; `code` is the exit code."""

    def __init__(self, text: str, code: int = 1):
        super().__init__(text)
        self.code = code


def relative(path: Path) -> str:
    """`path` as seen from the current folder."""
    try:
        return os.path.relpath(path)
    except ValueError:  # on another drive of a Windows machine
        return str(path)


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file that is never half-written."""
    stack.write_all({path: content.encode() if isinstance(content, str) else content})
