"""What the tools ask of programs of this repository, and of git."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.common import ROOT, relative
from bench.corpus import tokens_in
from gpt_speed import children
from gpt_speed.common import UserError

ANSWER_SECONDS = 600  # an answer takes this long at most, or the GPU or its driver is stuck
PREPARE_SECONDS = 3600  # for data/prepare.py, which may download over a slow line
ERROR = re.compile(r"^([\w.-]+: )?error: ", re.MULTILINE)  # as scripts and argparse begin a line


def error_line(text: str) -> str:
    """Returns the last line of `text` that names an error, or else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [ERROR.sub("", line) for line in lines if ERROR.match(line)]
    if errors:
        return errors[-1]
    if lines:
        return lines[-1]
    return "no reason given"


def ask(
    command: Sequence[str | Path],
    environment: dict[str, str] | None = None,
    seconds: float = ANSWER_SECONDS,
    python: str | Path = sys.executable,
) -> str:
    """Returns what a Python prints for a script or module of this repository with these variables
    besides, within so many seconds. Raises UserError."""
    words = shlex.join(map(relative, command))
    code, out, err = answer_of([python, *command], words, environment, seconds)
    if code < 0:
        raise UserError(f"{words} failed: {children.ending(code)}")
    if code:
        raise UserError(f"{words} failed: {error_line(err)}")
    return out


def answer_of(
    command: Sequence[str | Path],
    words: str,
    environment: dict[str, str] | None = None,
    seconds: float = ANSWER_SECONDS,
) -> tuple[int, str, str]:
    """Returns the exit code, stdout and stderr of a command in this repository, which an error
    calls `words`. Raises UserError where it gives no answer within so many seconds."""
    try:
        return children.run_child([*command], ROOT, seconds, environment=environment)
    except subprocess.TimeoutExpired:
        raise UserError(f"{words} gave no answer within {seconds:g} s")


def ask_machine(question: str, python: str | Path = sys.executable) -> Any:
    """Returns the answer of bench.measure.hardware, in the environment of a Python, to one of its
    questions. Raises UserError."""
    answer = ask(["-m", "bench.measure.hardware", question], python=python)
    return json.loads(answer.splitlines()[-1])


def git_commit() -> str | None:
    """Returns this repository's commit, with a "+" if files outside results/ have been edited
    since; None without git, or where this is no clone. Raises UserError where git gives no
    answer, as on a network's disk that is gone."""
    commit = head_of(ROOT)
    if not commit:
        return None
    edited, *_ = answer_of(["git", "diff", "--quiet", "HEAD", "--", ".", ":!results"], "git diff")
    if edited:
        return f"{commit}+"
    return commit


def head_of(clone: Path) -> str | None:
    """Returns the commit that a clone has checked out; None without git, or where it is no clone.
    Raises UserError where git gives no answer."""
    if not (clone / ".git").exists() or not shutil.which("git"):
        return None
    failed, commit, _ = answer_of(["git", "-C", clone, "rev-parse", "HEAD"], "git rev-parse")
    if failed:
        return None
    return commit.strip()


def prepare_tokens(folder: Path) -> None:
    """Runs data/prepare.py where `folder` holds no tokens, and prints what that says: which text it
    took, maybe in place of the book. Raises UserError where it fails, or where meta.json is
    damaged."""
    if tokens_in(folder):
        return
    print(f"No tokens in {relative(folder)}: running data/prepare.py", flush=True)
    command: list[str | Path] = [ROOT / "data" / "prepare.py", "--out", folder.resolve()]
    print(ask(command, seconds=PREPARE_SECONDS), end="", flush=True)
