"""Every command in the pages is one that the programs take; quick ones run, and the notebook."""

import json
import os
import re
import shlex
import shutil
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
from conftest import ONE_RANK, ROOT, STAGES, TINY, load, write_tokens
from made_up import CPU, copy_of_checkout, setup_of

import measure
from bench import cli
from bench.catalogue import Scripts
from bench.report import readme
from gpt_speed import cli as gpt_speed
from patches import stack

PAGES = [*readme.PAGES, ROOT / "CONTRIBUTING.md"]
START = (
    r"(?:OMP_NUM_THREADS=1 )?"
    r"(?:python3? |gpt-speed |torchrun (?=-)|make (?=[a-z-]+\b)|(?:python -m )?pip )"
)
BLANKS = r"NAME|PATH|…|GPUS|FIRST_HOST|\$"  # what a reader fills in
TARGETS = re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


def commands_of(text: str) -> list[str]:
    """Those in blocks of code, a line each, also in lists, and those between backticks."""
    blocks = re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    lines = [
        line.strip()
        for language, block in blocks
        if language in ("", "bash")
        for line in block.replace("\\\n", " ").splitlines()
    ]
    rest = re.sub(r"(?ms)^ *```.*?^ *```", "", text)
    lines += [" ".join(part.split()) for part in re.findall(r"`([^`]+)`", rest)]
    return [line.partition("  #")[0].strip() for line in lines if re.match(START, line)]


COMMANDS = [
    (page, command)
    for page in PAGES
    for command in dict.fromkeys(commands_of(page.read_text(encoding="utf-8")))
    if not re.search(BLANKS, command)
]
# Variants that a page makes before it measures them.
MADE = {shlex.split(command)[3] for _, command in COMMANDS if " patches/stack.py new " in command}


@pytest.fixture(scope="module")
def composed(tmp_path_factory):
    """{file: modules} of the scripts that the pages compose."""
    folder, modules = tmp_path_factory.mktemp("composed"), {}
    for number, (_, command) in enumerate(COMMANDS):
        if " compose " in command:
            words = shlex.split(command)[3:]
            place = words.index("--out") + 1
            name, out = Path(words[place]).name, folder / f"{number}.py"
            words[place] = str(out)
            assert stack.main(["compose", *words], ROOT) == 0, command
            modules.setdefault(name, []).append(load(out))
    return modules


def takes(script, options: list[str]) -> bool:
    try:
        with mock.patch.dict(os.environ, ONE_RANK), suppress(script.UserError):  # no such device
            script.configure(script.read_options(options))
    except SystemExit as stop:
        return stop.code == 0  # --help
    return True


@pytest.mark.parametrize(
    ("page", "command"), COMMANDS, ids=[f"{page.name}: {command}" for page, command in COMMANDS]
)
def test_a_command(page, command, stages, composed):
    words = shlex.split(command.removeprefix("OMP_NUM_THREADS=1 "))
    script = next((word for word in words if word.endswith(".py")), None)
    ours = {"gpt-speed", "gpt_speed"} & {*words}  # the command, or `-m gpt_speed`
    if ours:
        assert gpt_speed.parse(words[words.index(*ours) + 1 :]).run
    elif words[0] == "make":
        assert {word for word in words[1:] if "=" not in word} <= {*TARGETS}
    elif "pip" in words[:3]:
        assert all((ROOT / name).exists() for name in words if name.endswith(".txt"))
    elif words[:2] == ["python", "-m"]:
        assert find_spec(words[2]) and all(
            (ROOT / word).exists() for word in words[3:] if word.endswith(".py")
        )
    else:
        check_script(script, words[words.index(script) + 1 :], stages, composed)


def check_script(script: str, options: list[str], stages, composed) -> None:
    cut = options.index("--") if "--" in options else len(options)
    if Path(script).name == "measure.py":
        args = cli.make_parser().parse_args(options[:cut])
        for name in {*(getattr(args, "names", None) or "01").split(",")} - MADE:
            Scripts().find(name, setup_of(ROOT).machine)
        assert not options[cut + 1 :] or takes(stages[STAGES[0]], options[cut + 1 :])
    elif script == "patches/stack.py":
        if options[0] in ("list", "show", "verify"):
            assert stack.main(options, ROOT) == 0
        else:  # compose is in `composed`; the others change files
            assert options[0] in ("write", "refresh", "compose", "new")
    else:
        modules = (
            [stages[Path(script).stem]]
            if Path(script).stem in stages
            else composed.get(Path(script).name)
        )
        assert (
            any(takes(module, options) for module in modules)
            if modules
            else (ROOT / script).exists()
        )


@pytest.mark.parametrize(
    "command",
    [
        command
        for page, command in COMMANDS
        if page == ROOT / "README.md" and " predict " in command
    ],
)
def test_predictions_of_the_readme_run(command, monkeypatch, capsys, tmp_path):
    """They are stored, so that a reader has them at once."""
    monkeypatch.setattr(sys, "argv", [*shlex.split(command)[1:], "--results-dir", str(tmp_path)])
    assert measure.main() == 0
    assert "tok/sec" in capsys.readouterr().out


@pytest.mark.slow
def test_notebook(tmp_path, monkeypatch):
    """Every cell runs, the last one names the archive; what is installed already is left alone."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(ROOT / "notebooks" / "colab.ipynb", as_version=4)
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
    nbclient.NotebookClient(
        notebook, timeout=500, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    text = json.dumps(notebook.cells)
    results = folder / "results"
    assert str(folder / "results.tar.gz") in text and "Traceback" not in text
    assert (results / "stages.png").exists() and "Not finished: " in (
        results / "report.md"
    ).read_text()
