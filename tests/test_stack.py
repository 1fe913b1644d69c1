"""The patches lead from script to script, each stage is a whole program, and edits travel."""

import hashlib
import importlib.util
import math
import py_compile
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TINY, load, read_record, run_python, write_tokens
from test_model import largest_difference, losses_of, model_of, with_weights_of
from test_runs import END

FIRST, LAST, DDP = "00_orig.py", "01_opt_single_gpu.py", "02_opt_multi_gpu_ddp.py"
stack = load(ROOT / "patches" / "stack.py")
PATCHES = stack.load(ROOT)
SERIES = [patch.name for patch in PATCHES[:-1]]
UNCHANGED = [patch.name for patch in PATCHES[:-1] if patch.fields["Loss"] == "unchanged"]
STAGES = ["00_orig", *SERIES, DDP.removesuffix(".py")]
PREVIOUS = dict(zip(STAGES[1:], STAGES, strict=False))


# The series as it is.


def test_series_leads_from_script_to_script():
    text = (ROOT / FIRST).read_bytes()
    for patch, end in zip(PATCHES, [None] * (len(SERIES) - 1) + [LAST, DDP], strict=True):
        before, text = text, patch.apply(text)
        assert patch.apply(text, reverse=True) == before
        if end:
            sums = [hashlib.sha256(t).hexdigest() for t in (text, (ROOT / end).read_bytes())]
            assert sums[0] == sums[1], end


def test_commands_that_look():
    for command, expected in (
        (["verify"], [f"ok: {FIRST} + {len(SERIES)} patches = {LAST}", DDP]),
        (["list"], [*SERIES, "ddp"]),
        (["show", "2"], ["Technique: ", f"\n+++ b/{SERIES[1]}.py\n"]),
        (["show", "ddp"], [f"\n--- a/{LAST}\n+++ b/{DDP}\n"]),
    ):
        result = run_python(ROOT / "patches" / "stack.py", *command)
        assert result.returncode == 0, result.stderr
        assert all(text in result.stdout for text in expected) and "\033" not in result.stdout


def test_readme_lists_what_the_headers_say():
    rows = re.findall(r"^\|.*\|.*\[(.+)\]\(patches/(.+)\.patch\).*\| (\w+) \|",
                      (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    fields = [(patch.fields["Technique"], patch.name, patch.fields["Loss"]) for patch in PATCHES]
    assert rows == [(technique, name, loss.split()[0]) for technique, name, loss in fields]


@pytest.fixture(scope="session")
def written(tmp_path_factory) -> Path:
    """Every stage, written out."""
    out = tmp_path_factory.mktemp("stages")
    result = run_python(ROOT / "patches" / "stack.py", "write", "--out", out)
    assert result.returncode == 0, result.stderr
    assert {path.name for path in out.iterdir()} == {FIRST, DDP, *(f"{n}.py" for n in SERIES)}
    return out


def test_stages_lint(written):
    if not importlib.util.find_spec("ruff"):
        pytest.skip("ruff isn't installed")
    config = ROOT / "pyproject.toml"
    result = run_python("-m", "ruff", "check", "--no-cache", "--config", config, written)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("stage", SERIES)  # tests/test_runs.py runs 00 and 02
def test_stage_runs(stage, written, tmp_path):
    script = written / f"{stage}.py"
    py_compile.compile(script, cfile=tmp_path / "compiled", doraise=True)
    plain = ["--no-compile"] if b'"--no-compile"' in script.read_bytes() else []
    result = run_python(
        script, *TINY, "--device", "cpu", "--data", write_tokens(tmp_path / "data"),
        "--results-dir", tmp_path / "results", "--max-steps", 3, "--eval-freq", 1, *plain,
    )
    assert result.returncode == 0, result.stderr
    start, *logs, epoch, end = read_record(tmp_path / "results")
    assert (start["event"], epoch["event"], end["event"]) == ("start", "epoch", "end")
    assert start["stage"] == stage
    assert start["source_sha256"] == hashlib.sha256(script.read_bytes()).hexdigest()
    assert [log["step"] for log in logs] == [0, 1, 2]
    assert all(math.isfinite(log[part]) for log in logs for part in ("train_loss", "val_loss"))
    assert end.keys() == END and end["status"] == "complete" and end["error"] is None


@pytest.mark.parametrize("stage", UNCHANGED)
def test_same_losses_as_the_stage_before(stage, written, tmp_path):
    """From the same weights, in float32, uncompiled."""
    folder, models = write_tokens(tmp_path), []
    for name in (PREVIOUS[stage], stage):
        script = load(written / f"{name}.py")
        model, config = model_of(script, batch_size=8)
        if hasattr(config, "compile"):
            config.compile = False
        models.append((script, model, config))
    before, after = models[0][1], models[1][1]
    if before.state_dict().keys() == after.state_dict().keys():
        after.load_state_dict(before.state_dict())
    else:
        with_weights_of(before, after)
    rows = [losses_of(*each, folder) for each in models]
    assert rows[0][-1][2] < rows[0][0][2] - 0.4  # it learns
    assert largest_difference(*rows) < 1e-5


# Edits, on a copy.


class Tree:
    """A copy of the scripts and patches, and stack.py in it as a program."""

    def __init__(self, root: Path):
        self.root = root
        shutil.copytree(ROOT / "patches", root / "patches", ignore=lambda *_: ["__pycache__"])
        for name in (FIRST, LAST, DDP):
            shutil.copy(ROOT / name, root)

    def run(self, *command):
        return run_python("patches/stack.py", *command, cwd=self.root)

    def does(self, *command) -> str:
        result = self.run(*command)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def refuses(self, *command, says: str) -> None:
        """It ends with one line on stderr that matches, and has changed nothing."""
        before = self.bytes()
        result = self.run(*command)
        assert result.returncode == 1 and not result.stdout
        assert re.fullmatch(rf"error: .*{says}.*\n", result.stderr), result.stderr
        assert self.bytes() == before

    def bytes(self) -> dict[str, bytes]:
        return {str(path.relative_to(self.root)): path.read_bytes()
                for path in self.root.rglob("*")
                if path.is_file() and "__pycache__" not in path.parts}

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.root / name
        text = path.read_bytes().decode()
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {name}"
        path.write_bytes(text.replace(old, new).encode())

    def changed(self, before: dict) -> set[str]:
        after = self.bytes()
        return {name for name in before | after if before.get(name) != after.get(name)}

    def holders(self, text: str) -> list[str]:
        """The stages that hold `text`, as the patches make them, after a check of the patches."""
        assert self.does("verify").startswith("ok: ")
        shutil.rmtree(self.root / "out", ignore_errors=True)
        self.does("write", "--out", "out")
        return [n for n in STAGES if text in (self.root / "out" / f"{n}.py").read_text("utf-8")]


@pytest.fixture
def tree(tmp_path) -> Tree:
    return Tree(tmp_path / "tree")


SHARED = "Median step tok/sec: "  # a text that all stages have
COMPILING = "Training without torch.compile: "  # one that comes with this patch
COMPILE = next(name for name in SERIES if name.endswith("torch-compile"))
BATCH = next(name for name in SERIES if name.endswith("batch-size"))


@pytest.mark.parametrize("file", [FIRST, LAST, DDP, f"build/stages/{COMPILE}.py"])
def test_refresh_changes_no_byte_of_an_unchanged_tree(tree, file):
    tree.does("write")
    before = tree.bytes()
    into = ["--into", COMPILE] if file == LAST else []
    assert tree.does("refresh", file, *into) == "nothing to change\n"
    assert tree.bytes() == before


def test_edit_of_00_reaches_all_stages(tree):
    tree.does("write")
    tree.edit(FIRST, SHARED, "Speed in the middle: ")
    tree.does("refresh", FIRST)
    assert tree.holders("Speed in the middle: ") == STAGES
    assert tree.holders(SHARED) == []
    for name in STAGES:  # what was written out follows
        assert "Speed in the middle: " in (tree.root / f"build/stages/{name}.py").read_text("utf-8")


def test_lines_added_to_00_move_every_hunk(tree):
    tree.edit(FIRST, "import argparse\n", "# one\n# two\nimport argparse\n")
    tree.does("refresh", FIRST)
    assert tree.holders("# one\n# two\nimport argparse\n") == STAGES


def test_edit_of_01_goes_into_its_patch(tree):
    before = tree.bytes()
    tree.edit(LAST, COMPILING, "No compiler: ")
    tree.refuses("refresh", LAST, says="--into NAME")
    tree.refuses("refresh", LAST, "--into", "ddp", says=DDP)
    tree.refuses("refresh", LAST, "--into", BATCH.replace("batch", "none"), says="no patch")
    earlier = PREVIOUS[COMPILE]  # which doesn't have that line
    tree.refuses("refresh", LAST, "--into", earlier, says=f"stage {earlier}, line \\d+: .*conflict")
    tree.does("refresh", LAST, "--into", COMPILE[:2])
    assert tree.holders("No compiler: ") == STAGES[STAGES.index(COMPILE) :]
    assert FIRST not in tree.changed(before) and DDP in tree.changed(before)


def test_edit_of_01_goes_back_to_00(tree):
    tree.edit(LAST, SHARED, "Speed in the middle: ")
    tree.does("refresh", LAST, "--into", "0")
    assert tree.holders("Speed in the middle: ") == STAGES


def test_edit_of_02_goes_into_ddp(tree):
    before = tree.bytes()
    tree.edit(DDP, SHARED, "Speed in the middle: ")
    tree.does("refresh", DDP)
    assert tree.changed(before) == {DDP, "patches/ddp.patch"}
    assert tree.holders("Speed in the middle: ") == STAGES[-1:]


def test_edit_of_a_stage(tree):
    tree.does("write")
    tree.edit(f"build/stages/{COMPILE}.py", SHARED, "Speed in the middle: ")
    tree.does("refresh", f"build/stages/{COMPILE}.py")
    later = STAGES[STAGES.index(COMPILE) :]
    assert tree.holders("Speed in the middle: ") == later
    assert SHARED not in (tree.root / f"build/stages/{later[1]}.py").read_text("utf-8")


def test_conflict_changes_nothing(tree):
    tree.does("write")
    tree.edit(FIRST, "batch_size: int = 8\n", "batch_size: int = 16\n")
    tree.refuses("refresh", FIRST, says=f"stage {BATCH}, line \\d+: .*conflict")
    before = tree.bytes()
    tree.does("refresh", FIRST, "--until", BATCH)  # which has another size in any case
    assert tree.holders("batch_size: int = 16\n") == STAGES[: STAGES.index(BATCH)]
    assert LAST not in tree.changed(before)


@pytest.mark.parametrize("edited, other", [
    (FIRST, LAST), (FIRST, DDP), (LAST, FIRST), (LAST, DDP), (DDP, FIRST), (DDP, LAST),
    (f"build/stages/{COMPILE}.py", FIRST), (FIRST, f"build/stages/{COMPILE}.py"),
])
def test_second_edited_file_is_refused(tree, edited, other):
    tree.does("write")
    tree.edit(edited, SHARED, "Speed in the middle: ")
    tree.edit(other, "import argparse\n", "import argparse  # another edit\n")
    into = ["--into", "0"] if edited == LAST else []
    tree.refuses("refresh", edited, *into, says=f"only {Path(edited).name} may be edited")


def test_edit_of_01_becomes_a_technique(tree):
    options = {
        "technique": "a trial", "loss": "unchanged", "hardware": "any", "source": "this test",
        "text": "A long text. " * 30,
    }
    command = ["new", "trial", *(f"--{name}={value}" for name, value in options.items())]
    tree.refuses(*command, says="nothing would be left")
    tree.edit(LAST, SHARED, "Speed in the middle: ")
    tree.refuses(*command, "--loss", "who knows", says="Loss: is")
    tree.refuses(*command, "--text=--- a line like a diff's first", says="prose and a blank line")
    tree.does(*command)
    tree.does("verify")
    name = f"{len(SERIES) + 1:02}-trial"
    patch = tree.does("show", name)
    assert f"Base: {SERIES[-1]}\nLoss: unchanged\n" in patch and "\n+" in patch
    assert max(map(len, patch.partition("\n---")[0].splitlines())) <= 100
    assert name in tree.does("list")


PATCH = SERIES[0]


@pytest.mark.parametrize("pattern, replacement, says", [
    (r"(@@ -.*\n) ", r"\1 another ", r"hunk 1, line {1}: it doesn't match line \d+ of " + FIRST),
    (r"(@@ -\d+),(\d)", r"\1,9\2", r"hunk 1, line \d+: the hunk has another number"),
    (r"@@ -\d+,", "@@ -7,", r"hunk 1, line {0}: the hunk isn't where"),
    (r"\n@@ .*", "\n@@ here @@", r"hunk 1, line {0}: expected @@"),
    (r"\Z", "\\\\ No newline at end of file\n", r"hunk \d+, line \d+: expected @@"),
    (r"\n--- .*", r"\n--- a/x.py", r"line \d+: the diff has to begin with"),
    (r"Hardware: .*\n", "", "the header has no Hardware:"),
    (r"Source: (.*\n)+?\n", "Source:\n\n", "the header has no Source:"),
    (r"Loss: .*\n", "Loss: small\n", "Loss: is"),
    (r"Base: .*\n", "Base 00_orig\n", "line 2: expected one of the fields"),
    (r"\n\n(.+\n)+\n", "\n\n", "prose and a blank line"),
])
def test_damaged_patch_is_refused(tree, pattern, replacement, says):
    path = tree.root / "patches" / f"{PATCH}.patch"
    text = path.read_bytes().decode()
    hunk = text[: text.index("\n@@ ")].count("\n") + 2  # the line of its header
    text, count = re.subn(pattern, replacement, text, count=1)
    assert count == 1
    path.write_bytes(text.encode())
    for at, line in enumerate((hunk, hunk + 1)):
        says = says.replace(f"{{{at}}}", str(line))
    tree.refuses("verify", says=f"patches/{PATCH}.patch(, |: ){says}")


def test_damaged_series_is_refused(tree):
    series = tree.root / "patches" / "series"
    series.write_bytes(b"".join(reversed(series.read_bytes().splitlines(keepends=True))))
    tree.refuses("verify", says="patches/series, line 1")
    (tree.root / "patches" / f"{PATCH}.patch").unlink()
    series.write_text(f"{PATCH}.patch\n", newline="\n")
    tree.refuses("verify", says=f"{PATCH}.patch: No such file")


def test_drifted_script_and_forgotten_patch_are_refused(tree):
    tree.edit(LAST, SHARED, "Speed in the middle: ")
    tree.refuses("verify", says=f"{LAST} isn't what the patches make: sha256 .* line \\d+")
    shutil.copy(ROOT / LAST, tree.root)
    shutil.copy(ROOT / "patches" / "ddp.patch", tree.root / "patches" / "99-left-over.patch")
    tree.refuses("verify", says="99-left-over.patch isn't in patches/series")


def test_output_into_a_closed_pipe(tree):
    command = [sys.executable, "patches/stack.py", "show", "ddp"]
    with subprocess.Popen(command, cwd=tree.root, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
