"""docs/upstream.md: each script shows its bug on the versions of PyTorch that the page names."""

import os
import re
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

FOLDER = ROOT / "docs" / "upstream"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py"))
# What the page calls an exit code: 0, 1. The cache's script shows no gradient.
WORDS = {name: ("right", "wrong") for name in SCRIPTS} | {
    "autograd_cache.py": ("cached", "not cached")
}


def outcomes() -> dict[str, dict[str, str]]:
    """Returns for each script of the page's tables one of its WORDS by the version of PyTorch."""
    text = FOLDER.with_suffix(".md").read_text(encoding="utf-8")
    headers = set(re.findall(r"^\| script \|(.+)\|$", text, re.MULTILINE))
    (header,) = headers  # of both tables
    versions = [cell.strip() for cell in header.split("|")]
    rows = re.findall(r"^\| \[`(\w+\.py)`\]\(upstream/\1\) \|(.+)\|$", text, re.MULTILINE)
    return {
        name: dict(zip(versions, (cell.strip() for cell in cells.split("|")), strict=True))
        for name, cells in rows
    }


def test_the_tables_are_whole():
    table = outcomes()
    assert sorted(table) == SCRIPTS
    assert all(set(row.values()) <= set(WORDS[name]) for name, row in table.items())
    assert {"right", "wrong"} <= {cell for row in table.values() for cell in row.values()}


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_short(name):
    assert len((FOLDER / name).read_text(encoding="utf-8").splitlines()) <= 30


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_page_is_true_of_the_installed_version(name, tmp_path):
    version = torch.__version__.partition("+")[0]
    if version not in outcomes()[name]:
        pytest.skip(f"the page doesn't say how PyTorch {version} does")
    env = {key: value for key, value in os.environ.items() if not key.startswith("TORCHINDUCTOR_")}
    done = subprocess.run(
        [sys.executable, FOLDER / name],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        env=env | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
    )
    # A crash ends with 1 as well, but prints no figure.
    assert len(done.stdout.splitlines()) == 1, done.stderr
    assert WORDS[name][done.returncode] == outcomes()[name][version], done.stdout
