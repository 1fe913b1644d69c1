"""docs/upstream.md: each script shows its fault on the versions of PyTorch that the page names."""

import os
import re
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

FOLDER = ROOT / "docs" / "upstream"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py"))


def outcomes() -> dict[str, dict[str, str]]:
    """Returns for each script of the page's table "right" or "wrong" by the version of PyTorch."""
    text = FOLDER.with_suffix(".md").read_text(encoding="utf-8")
    header = re.search(r"^\| script \|(.+)\|$", text, re.MULTILINE)
    versions = [cell.strip() for cell in header[1].split("|")]
    rows = re.findall(r"^\| \[`(\w+\.py)`\]\(upstream/\1\) \|(.+)\|$", text, re.MULTILINE)
    return {
        name: dict(zip(versions, (cell.strip() for cell in cells.split("|")), strict=True))
        for name, cells in rows
    }


def test_the_table_is_whole():
    table = outcomes()
    assert sorted(table) == SCRIPTS
    assert {cell for row in table.values() for cell in row.values()} == {"right", "wrong"}


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
    found = {0: "right", 1: "wrong"}[done.returncode]
    assert found == outcomes()[name][version], done.stdout
