"""notebooks/colab.ipynb, on a CPU with tiny settings."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TINY, write_tokens
from made_up import CPU, copy_of_checkout

NOTEBOOK = ROOT / "notebooks" / "colab.ipynb"


@pytest.mark.slow
def test_notebook(tmp_path, monkeypatch):
    """Every cell runs, the last one names the archive; what is installed already is left alone."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    settings = next(cell for cell in notebook.cells if cell.cell_type == "code")
    assert "OPTIONS = " in settings.source
    options = " ".join([*TINY, "--max-steps", "4"])
    settings.source = f"OPTIONS = {options!r}\nMINUTES = 0.01"
    folder = copy_of_checkout(tmp_path / "gpt-speed", CPU)
    write_tokens(folder / "data")
    for name in ("Makefile", "requirements.txt"):
        shutil.copy(ROOT / name, folder)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    nbclient.NotebookClient(notebook, timeout=500, resources={
        "metadata": {"path": str(tmp_path)}}).execute()
    text = json.dumps(notebook.cells)
    results = folder / "results"
    assert str(folder / "results.tar.gz") in text and "Traceback" not in text
    assert (results / "stages.png").exists() and "Not finished: " in (
        results / "report.md").read_text()
