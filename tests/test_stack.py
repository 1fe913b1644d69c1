"""The patches lead from script to script, each stage is a whole program, and edits travel."""

import hashlib
import importlib.util
import math
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import (
    ROOT,
    TINY,
    load,
    read_record,
    run_python,
    settings_restored,
    skip_without,
    small,
    write_tokens,
)
from test_model import (
    TWENTY_STEPS,
    largest_difference,
    losses_of,
    model_of,
    windows_of,
    with_weights_of,
)
from test_runs import END

from bench import commands
from bench.studies import all_studies

FIRST, LAST, DDP = "00_orig.py", "01_opt_single_gpu.py", "02_opt_multi_gpu_ddp.py"
stack = load(ROOT / "patches" / "stack.py")
PATCHES, VARIANTS = stack.load(ROOT), stack.load_variants(ROOT)
SERIES = [patch.name for patch in PATCHES[:-1]]
# In float32, in which 13 has nothing to round.
UNCHANGED = [patch.name for patch in PATCHES[:-1]
             if patch.fields["Loss"] == "unchanged" or patch.name == "13-loss-in-graph"]
NEEDS = {variant.name: variant.fields.get("Needs", "") for variant in VARIANTS}
# tests/test_runs.py runs 00 and 02.
ON_ONE_DEVICE = SERIES + [v.name for v in VARIANTS if v.base == Path(LAST).stem]


# The stack of this repository.


def test_series_leads_from_script_to_script():
    text = (ROOT / FIRST).read_bytes()
    for patch, end in zip(PATCHES, [None] * (len(SERIES) - 1) + [LAST, DDP], strict=True):
        before, text = text, patch.apply(text)
        assert patch.apply(text, reverse=True) == before
        if end:
            sums = [hashlib.sha256(t).hexdigest() for t in (text, (ROOT / end).read_bytes())]
            assert sums[0] == sums[1], end


def test_the_command_line():
    result = run_python(ROOT / "patches" / "stack.py", "verify", cwd=ROOT / "tests")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"ok: {FIRST} + {len(SERIES)} patches = {LAST}")


@pytest.mark.skipif(not shutil.which("git"), reason="git isn't installed")
def test_git_applies_the_patches(tmp_path):
    """Those of 00, 01 and 02, in a clean checkout; with the same result."""
    scripts = stack.rebuild_all(ROOT)
    for patch in [PATCHES[0], PATCHES[-1], *VARIANTS]:
        for name in (FIRST, LAST, DDP):
            shutil.copy(ROOT / name, tmp_path)
        for check in (["--check"], []):
            result = subprocess.run(["git", "apply", *check, ROOT / patch.file], cwd=tmp_path,
                                    capture_output=True, text=True)
            assert result.returncode == 0, result.stderr
        assert (tmp_path / f"{patch.base}.py").read_bytes() == scripts[patch.name]


@pytest.fixture(scope="session")
def written(tmp_path_factory) -> Path:
    """Every stage and variant, written out."""
    out = tmp_path_factory.mktemp("stages")
    stack.write_all({out / stack.file_of(n): text for n, text in stack.rebuild_all(ROOT).items()})
    return out


def test_stages_lint(written):
    if not importlib.util.find_spec("ruff"):
        pytest.skip("ruff isn't installed")
    config = ROOT / "pyproject.toml"
    result = run_python("-m", "ruff", "check", "--no-cache", "--config", config, written)
    assert result.returncode == 0, result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("stage", ON_ONE_DEVICE)
def test_stage_runs(stage, written, tmp_path, capsys):
    skip_without(NEEDS.get(stage, ""))
    script = tmp_path / stack.file_of(stage)
    script.write_text(small((written / script.name).read_text()))
    plain = ["--no-compile"] if b"compile: bool" in script.read_bytes() else []
    options = [
        *TINY, "--context-length", 4, "--eval-windows", 1, "--device", "cpu",
        "--data", write_tokens(tmp_path / "data"), "--results-dir", tmp_path / "results",
        "--max-steps", 3, "--eval-freq", 1, *plain,
    ]
    with settings_restored(), pytest.raises(SystemExit) as ended:
        sys.argv = [str(script), *map(str, options)]
        runpy.run_path(str(script), run_name="__main__")
    assert not ended.value.code, capsys.readouterr().err
    start, *logs, epoch, end = read_record(tmp_path / "results")
    assert (start["event"], epoch["event"], end["event"]) == ("start", "epoch", "end")
    assert start["stage"] == script.stem
    assert start["source_sha256"] == hashlib.sha256(script.read_bytes()).hexdigest()
    assert [log["step"] for log in logs] == [0, 1, 2]
    assert all(math.isfinite(log[part]) for log in logs for part in ("train_loss", "val_loss"))
    assert end.keys() == END and end["status"] == "complete" and end["error"] is None


@pytest.mark.parametrize("stage", UNCHANGED)
def test_same_losses_as_the_stage_before(stage, written, tmp_path):
    """From the same weights, in float32, uncompiled."""
    folder, models = write_tokens(tmp_path), []
    stages = ["00_orig", *SERIES]
    for name in (stages[stages.index(stage) - 1], stage):
        script = load(written / stack.file_of(name))
        models.append((script, *model_of(script, **TWENTY_STEPS)))
    before, after = models[0][1], models[1][1]
    if before.state_dict().keys() == after.state_dict().keys():
        after.load_state_dict(before.state_dict())
    else:
        with_weights_of(before, after)
    rows = [losses_of(*each, windows_of(each[0], folder)) for each in models]
    assert rows[0][-1][2] < rows[0][0][2] - 0.4  # it learns
    assert largest_difference(*rows) < 1e-5


# A small stack of its own: "scripts" of 70 lines, in which each patch changes one.

HEADER = """\
Technique: {0} is done better
Base: {1}
Loss: changes because
  it {0}s
Hardware: any
Source: this test

What it is about.

"""
CHANGES = {  # patch: its base, and the line that it changes
    "01-first": ("00_orig", 10),
    "02-second": ("01-first", 20),
    "03-third": ("02-second", 30),
    "ddp": ("01_opt_single_gpu", 40),
    "profile": ("01_opt_single_gpu", 50),
    "shard": ("02_opt_multi_gpu_ddp", 60),
}
STAGES = ["00_orig", "01-first", "02-second", "03-third", "ddp"]
EVERY = [*STAGES, "profile", "shard"]
NEW = {"technique": "a trial", "loss": "unchanged", "hardware": "any", "source": "this test",
       "text": "A long text. " * 30}


def patch_of(file: str, base: str, before: bytes, after: bytes) -> bytes:
    header = HEADER.format(Path(file).stem, base).encode()
    return stack.make_patch(file, header, base, before, after)


class Tree:
    """The stack in a folder, and stack.py's commands on it."""

    def __init__(self, root: Path, capsys):
        self.root, self.capsys = root, capsys
        text = "".join(f"line {number}\n" for number in range(1, 71)).encode()
        scripts = {"00_orig": text}
        files = {"patches/series": "".join(f"{name}.patch\n" for name in STAGES[1:-1]).encode()}
        for name, (base, line) in CHANGES.items():
            before = scripts[base]
            after = before.replace(b"line %d\n" % line, b"%s\n" % name.encode())
            scripts[name] = scripts[Path(stack.file_of(name)).stem] = after
            scripts |= {"01_opt_single_gpu": after} if name == "03-third" else {}
            folder = "patches/variants" if name in ("profile", "shard") else "patches"
            file = f"{folder}/{name}.patch"
            files[file] = patch_of(file, base, before, after)
        files |= {name: scripts[Path(name).stem] for name in (FIRST, LAST, DDP)}
        stack.write_all({root / name: text for name, text in files.items()})

    def run(self, *command) -> tuple[int, str, str]:
        code = stack.main([str(part) for part in command], self.root)
        return code, *self.capsys.readouterr()

    def does(self, *command) -> str:
        code, out, error = self.run(*command)
        assert code == 0 and not error, error
        return out

    def refuses(self, *command, says: str) -> None:
        """It ends with an error on stderr whose line matches, and has changed nothing."""
        before = self.files()
        code, out, error = self.run(*command)
        assert code == 1 and not out
        assert re.fullmatch(rf"error: .*{says}.*\n(?:(?<=type\n)(?:.*\n)+)?", error), error
        assert self.files() == before

    def files(self) -> dict[str, bytes]:
        return {path.relative_to(self.root).as_posix(): path.read_bytes()
                for path in self.root.rglob("*") if path.is_file()}

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.root / name
        text = path.read_bytes().decode()
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {name}"
        path.write_bytes(text.replace(old, new).encode())

    def changed(self, before: dict) -> set[str]:
        after = self.files()
        return {name for name in before | after if before.get(name) != after.get(name)}

    def holders(self, text: str) -> list[str]:
        """The stages and variants whose scripts hold `text`, after a check of all patches."""
        assert self.does("verify").startswith("ok: ")
        return [n for n, script in stack.rebuild_all(self.root).items() if text.encode() in script]


@pytest.fixture
def tree(tmp_path, monkeypatch, capsys) -> Tree:
    monkeypatch.chdir(tmp_path)
    return Tree(tmp_path, capsys)


# What the commands show and write.


def test_a_patch_file_in_full():
    before = b"import os\n\n\nclass Model:\n    a = 1\n    b = 2\n    c = 3\n    d = 4\n"
    data = patch_of("patches/01-one.patch", "00_orig", before, before.replace(b"4", b"5"))
    assert data == HEADER.format("01-one", "00_orig").encode() + (
        b"--- a/00_orig.py\n+++ b/00_orig.py\n@@ -5,4 +5,4 @@ class Model\n"
        b"     a = 1\n     b = 2\n     c = 3\n-    d = 4\n+    d = 5\n"
    )


@pytest.mark.parametrize("before, after", [
    (b"a\n", b"b\na\n"), (b"a\n", b"a\nb\n"), (b"a\nb\n", b"a\n"), (b"a\n", b"b\n"),
    (b"-- a\n++ a\n", b"++ a\n@@ a\n"), (b"a\n" * 40, b"b\n" + b"a\n" * 38 + b"b\n"),
])
def test_a_patch_leads_both_ways(before, after):
    file = "patches/01-first.patch"
    patch = stack.Patch(file, patch_of(file, "00_orig", before, after), "00_orig")
    assert patch.apply(before) == after and patch.apply(after, reverse=True) == before
    for moved in (b"moved\n" + before, before.replace(b"a", b"c")):
        with pytest.raises(stack.StackError, match=f"{file}: hunk 1 doesn't match 00_orig.py at"):
            patch.apply(moved)


def test_list_and_show(tree):
    rows = tree.does("list").splitlines()
    assert [row.split()[0] for row in rows[1:]] == EVERY[1:]
    assert "changes" in rows[1] and "01-first is done better" in rows[1]
    assert "01_opt_single_gpu" in rows[5] and "02_opt_multi_gpu_ddp" in rows[6]
    for name, file in (("2", "02-second"), ("03-third", "03-third"), ("ddp", "ddp"),
                       ("profile", "variants/profile")):
        assert tree.does("show", name) == (tree.root / f"patches/{file}.patch").read_text()
    for name in ("4", "second", "variants/profile"):
        tree.refuses("show", name, says=f"no patch '{name}'")
    tree.refuses("show", "0", says=f"{FIRST} is what the patches begin with")


def test_write(tree):
    assert tree.does("write", "2", "profile") == (
        "build/stages/02-second.py\nbuild/stages/variant-profile.py\n"
    )
    assert len(list(tree.root.glob("build/stages/*"))) == 2
    tree.does("write")
    files = tree.files()
    assert {n for n in files if n.startswith("build")} == {
        f"build/stages/{stack.file_of(name)}" for name in EVERY
    }
    assert files["build/stages/03-third.py"] == files[LAST]
    assert files[f"build/stages/{DDP}"] == files[DDP]
    assert b"profile\n" in files["build/stages/variant-profile.py"]
    assert tree.does("verify") == (
        f"ok: {FIRST} + 3 patches = {LAST}, + ddp.patch = {DDP}; variants that apply: 2\n"
    )


def test_the_names_of_a_script(tree):
    scripts = stack.rebuild_all(tree.root)
    assert list(scripts) == EVERY
    for name, same in (("00_orig", "00_orig"), ("2", "02-second"), ("profile", "profile"),
                       ("01_opt_single_gpu", "03-third"), ("02_opt_multi_gpu_ddp", "ddp"),
                       (LAST, "03-third"), ("variant-profile.py", "profile")):
        assert stack.find(name, scripts) == same
    with pytest.raises(stack.StackError, match="no patch 'x'"):
        stack.find("x", scripts)


def test_output_into_a_closed_pipe(tree, monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe, monkeypatch.context() as context:
        context.setattr(sys, "stdout", pipe)
        assert stack.main(["show", "ddp"], tree.root) == 0
    assert tree.capsys.readouterr() == ("", "")


# Published figures.


@pytest.mark.parametrize("text, expected", [
    ("27,648 tok/sec, 26.2422 GB", (27648.0, 26.2422, 1)),
    ("419,259 tok/sec, 22.7969 GB on 4 GPUs", (419259.0, 22.7969, 4)),
    ("1,234,567 tok/sec,\n  0.5 GB", (1234567.0, 0.5, 1)),
    *((text, None) for text in (
        "", "27648 tok/sec, 26.2422 GB", "27,648 tok/s, 26.2422 GB", "27,648 tok/sec", "fast",
        "27,648 tok/sec, 26.2422 GB on 4 A100s", "27,648 tok/sec, 26.2422 GB.",
        "27,64 tok/sec, 26 GB")),
])
def test_published_figures(tree, text, expected):
    tree.edit("patches/02-second.patch", "Source: this test\n",
              f"Source: this test\nPublished: {text}\n")
    if expected is None:
        tree.refuses("list", says="patches/02-second.patch: its header needs Published: ")
        return
    first, second, *_ = stack.load(tree.root)
    found = second.published
    assert (found.tok_per_sec, found.reserved_gb, found.gpus) == found == expected
    assert first.published is None
    tree.does("verify")


# Edits.


@pytest.mark.parametrize("file", [FIRST, LAST, DDP, "build/stages/02-second.py",
                                  "build/stages/variant-profile.py"])
def test_refresh_changes_no_byte_of_an_unchanged_tree(tree, file):
    tree.does("write")
    before = tree.files()
    into = ["--into", "2"] if file == LAST else []
    assert tree.does("refresh", file, *into) == "nothing to change\n"
    assert tree.files() == before


@pytest.fixture
def real_tree(tree) -> Tree:
    """A copy of this repository's stack."""
    shutil.rmtree(tree.root / "patches")
    shutil.copytree(ROOT / "patches", tree.root / "patches", ignore=lambda *_: ["__pycache__"])
    shutil.copytree(ROOT / "docs", tree.root / "docs", ignore=lambda _, names: {
        name for name in names if not name.endswith(".py")})
    for name in (FIRST, LAST, DDP):
        shutil.copy(ROOT / name, tree.root)
    return tree


def test_edit_of_the_real_00_there_and_back(real_tree):
    """Two lines at its top move every hunk; without them again, every byte is as it was. They reach
    a composed script in docs/, too."""
    tree, before = real_tree, real_tree.files()
    text = (tree.root / FIRST).read_bytes()
    (tree.root / FIRST).write_bytes(b"# one\n# two\n" + text)
    tree.does("refresh", FIRST)
    assert len(tree.holders("# one\n# two\n")) == 1 + len(PATCHES + VARIANTS)
    assert b"# one\n# two\n" in (tree.root / "docs" / "epoch_recipe.py").read_bytes()
    (tree.root / FIRST).write_bytes(text)
    tree.does("refresh", FIRST)
    assert tree.changed(before) == set()
    recipe = tree.root / "docs" / "epoch_recipe.py"
    recipe.write_bytes(recipe.read_bytes() + b"# three\n")
    tree.refuses("verify", says="docs/epoch_recipe.py isn't what `compose` makes now: python")


@pytest.mark.parametrize("file, into, patches, holders", [
    (FIRST, [], set(), EVERY),
    (LAST, ["--into", "0"], set(), EVERY),
    (LAST, ["--into", "2"], {"patches/02-second.patch"}, EVERY[2:]),
    (DDP, [], {"patches/ddp.patch"}, ["ddp", "shard"]),
    ("build/stages/02-second.py", [], {"patches/02-second.patch"}, EVERY[2:]),
    ("build/stages/variant-profile.py", [], {"patches/variants/profile.patch"}, ["profile"]),
])
def test_edit_reaches_all_that_builds_on_it(tree, file, into, patches, holders):
    """And nothing else."""
    tree.does("write")
    before = tree.files()
    tree.edit(file, "line 5\n", "edited\n")
    tree.does("refresh", file, *into)
    assert tree.holders("edited\n") == holders
    assert tree.holders("line 5\n") == [name for name in EVERY if name not in holders]
    in_root = {"00_orig": FIRST, "03-third": LAST, "ddp": DDP}
    scripts = {in_root[name] for name in holders if name in in_root}
    scripts |= {f"build/stages/{stack.file_of(name)}" for name in holders}
    assert tree.changed(before) == patches | scripts
    assert all("edited\n" in (tree.root / script).read_text() for script in scripts)


def test_edit_of_01_goes_into_the_patch_of_that_line(tree):
    before = tree.files()
    tree.edit(LAST, "02-second\n", "edited\n")
    for into, says in (
        ([], "--into NAME.*`new NAME`"), (["ddp"], f"ddp isn't part of {LAST}: edit {DDP}"),
        (["profile"], "edit variant-profile.py"), (["02-none"], "no patch"),
        (["1"], "01-first conflicts with the edit at line 2\\d"),
    ):
        tree.refuses("refresh", LAST, *(f"--into={name}" for name in into), says=says)
    tree.does("refresh", LAST, "--into", "2")
    assert tree.holders("edited\n") == EVERY[2:]
    assert tree.changed(before) == {LAST, DDP, "patches/02-second.patch"}


@pytest.mark.parametrize("mine, edit, both", [
    ("alpha(b, c=1)", "alpha(a, c=2)", "alpha(b, c=2)"),  # another word of the line
    ("alpha(a, c=1)  # why", "alpha(z, c=1)", "alpha(z, c=1)  # why"),
    ("alpha(b, c=1)", "alpha(z, c=1)", None), ("", "alpha(z, c=1)", None)])
def test_words_of_a_line_are_merged(mine, edit, both):
    """By `refresh`; where scripts are composed a line stays a line."""
    base, ours, theirs = (f"one\n{line}\nthree\n".encode() for line in
                          ("alpha(a, c=1)", mine, edit))
    if both is None:
        with pytest.raises(stack.Conflict):
            stack.merge(base, ours, theirs, "it", words=True)
    else:
        merged = stack.merge(base, ours, theirs, "it", words=True)
        assert merged == f"one\n{both}\nthree\n".encode()
    with pytest.raises(stack.Conflict):
        stack.merge(base, ours, theirs, "it")


def test_help_text_of_the_real_00_on_a_line_that_a_patch_changes(real_tree):
    """--batch-size has another default from rung 10 on."""
    tree, text = real_tree, "windows of a step"
    tree.edit(FIRST, "windows per step and process", text)
    tree.does("refresh", FIRST)
    assert len(tree.holders(f'option(8, "{text}"')) == 10
    assert len(tree.holders(text)) == 1 + len(PATCHES + VARIANTS)


def test_a_conflict_says_what_to_type(tree):
    """And that leads to its end."""
    tree.edit(FIRST, "line 5\n", "edited\n")
    tree.edit(FIRST, "line 20\n", "other\n")
    code, _, error = tree.run("refresh", FIRST)
    typed = re.findall("^  python patches/stack.py (.*)$", error, re.MULTILINE)
    assert code == 1 and len(typed) == 3
    tree.does(*shlex.split(typed[0]))
    tree.does(*shlex.split(typed[1]))
    (script,) = re.findall(r"make the edit in (\S+) as", error)
    assert shlex.split(typed[2]) == ["refresh", script]
    tree.edit(script, "line 5\n", "edited\n")
    tree.edit(script, "02-second\n", "second of other\n")
    tree.does(*shlex.split(typed[2]))
    assert tree.holders("edited\n") == EVERY
    assert tree.holders("second of other\n") == EVERY[2:]


def test_conflict_changes_nothing(tree):
    tree.does("write")
    tree.edit(FIRST, "line 20\n", "edited\n")
    tree.refuses("refresh", FIRST, says="02-second conflicts with the edit at line 20, .*; nothing")
    before = tree.files()
    tree.refuses("refresh", FIRST, "--until", "0", says="00_orig doesn't come after 00_orig")
    tree.does("refresh", FIRST, "--until", "2")  # which replaces that line in any case
    assert tree.holders("edited\n") == ["00_orig", "01-first"]
    assert LAST not in tree.changed(before)


def test_conflict_with_variants_names_them_and_changes_nothing(tree):
    tree.edit(FIRST, "line 50\n", "edited\n")
    tree.refuses("refresh", FIRST, says="profile conflicts with the edit at line 50")
    tree.edit(FIRST, "line 60\n", "edited too\n")
    tree.refuses("refresh", FIRST, "--until", "profile", says="shard conflicts .* at line 60")
    tree.does("refresh", FIRST, "--until", "profile", "--until", "shard")
    assert tree.holders("edited\nline 51\n") == tree.holders("edited too\n") == STAGES
    assert tree.holders("line 60\n") == ["profile"] and tree.holders("line 50\n") == ["shard"]


@pytest.mark.parametrize("edited, other", [
    (FIRST, LAST), (FIRST, DDP), (LAST, FIRST), (LAST, DDP), (DDP, FIRST), (DDP, LAST),
    ("build/stages/02-second.py", FIRST), (FIRST, "build/stages/02-second.py"),
    ("build/stages/variant-profile.py", LAST), (FIRST, "build/stages/variant-profile.py"),
])
def test_second_edited_file_is_refused(tree, edited, other):
    tree.does("write")
    tree.edit(edited, "line 5\n", "edited\n")
    tree.edit(other, "line 1\n", "another edit\n")
    into = ["--into", "0"] if edited == LAST else []
    tree.refuses("refresh", edited, *into, says=f"only {Path(edited).name} may be edited")


def test_what_no_edit_belongs_to_is_refused(tree):
    (tree.root / "other.py").write_text("pass\n")
    tree.refuses("refresh", "other.py", says="no patch 'other'")
    tree.refuses("refresh", "patches/variants/profile.patch", says="no patch 'profile.patch'")
    tree.edit(DDP, "line 5\n", "edited\n")
    tree.refuses("refresh", DDP, "--into", "2", says=f"--into is for edits of {LAST}")


# New patches.


def new(name: str, *more: str, **fields: str) -> list[str]:
    return ["new", name, *(f"--{key}={text}" for key, text in (NEW | fields).items()), *more]


def study(text: str) -> list[str]:
    """What `new` says to type next where the study `text` measures the patch."""
    return ["python patches/stack.py verify", *(f"python measure.py {text}{options}" for options in
            (" --dry-run", ""))]


def next_of(out: list[str]) -> list[str]:
    """The commands that `new` says to type next; each is one that the programs take."""
    typed = [line.removeprefix("  ") for line in out[out.index("next:") + 1:]]
    for program, *words in (shlex.split(line.removeprefix("python ")) for line in typed):
        if program == "measure.py":
            commands.make_parser(all_studies()).parse_args(words)
        elif program == "patches/stack.py":
            stack.parse_arguments(words)
    return typed


def test_edit_of_01_becomes_a_technique(tree):
    tree.refuses(*new("trial"), says="nothing would be left")
    tree.edit(LAST, "line 5\n", "edited\n")
    tree.refuses(*new("trial", loss="who knows"), says="its header needs Loss: `unchanged`")
    tree.refuses(*new("trial", published="fast"), says="its header needs Published: ")
    tree.refuses(*new("trial", text="--- a line like a diff's"), says="prose and a blank line")
    tree.refuses(*new("Trial"), says="'Trial' .*isn't a name")
    tree.refuses(*new("ddp"), says="'ddp' .*isn't a name")
    tree.refuses(*new("trial", "--base", "02"), says="--base and --slot are for a --variant")
    tree.refuses(*new("trial", slot="trial"), says="--base and --slot are for a --variant")
    out = tree.does(*new("trial", published="28,402 tok/sec, 26.2422 GB")).splitlines()
    assert out[:3] == ["patches/04-trial.patch", DDP, "patches/series"]
    assert next_of(out) == study("ladder --rungs 3-4")  # with the one before it
    assert tree.holders("edited\n") == ["04-trial", *EVERY[4:]]
    patch = tree.does("show", "4")
    assert "Base: 03-third\nLoss: unchanged\n" in patch and "\n+edited\n" in patch
    assert max(map(len, patch.partition("\n---")[0].splitlines())) <= 100
    assert "04-trial" in tree.does("list")
    assert stack.load(tree.root)[3].published == (28402.0, 26.2422, 1)


@pytest.mark.parametrize("file, base, slot, following, more", [
    (LAST, "01_opt_single_gpu", "data", study("variants --names data-trial"), []),
    (LAST, "01_opt_single_gpu", "data", study("variants --names data-trial"), ["--base", "01"]),
    (DDP, "02_opt_multi_gpu_ddp", "ddp", study("variants ddp"), ["--base", "02"]),
    (DDP, "02_opt_multi_gpu_ddp", "parallel", study("variants parallel"), ["--base", "02"]),
    (DDP, "02_opt_multi_gpu_ddp", "link", [  # of a slot that no study measures
        "python patches/stack.py verify", "python patches/stack.py write link-trial",
        "torchrun --standalone --local-addr 127.0.0.1 --nproc_per_node=2"
        " build/stages/variant-link-trial.py",
    ], ["--base", "02"]),
])
def test_edit_becomes_a_variant(tree, file, base, slot, following, more):
    def variant(name, **fields):
        return new(name, "--variant", *more, **{"slot": slot} | fields)

    before, name = tree.files(), f"{slot}-trial"
    tree.refuses(*variant(name), says="nothing would be left")
    tree.edit(file, "line 5\n", "edited\n")
    tree.refuses(*variant("profile"), says="'profile' is taken")
    tree.refuses(*variant("4"), says="'4' .*isn't a name")
    tree.refuses(*variant("trial"), says="begin with its Slot:")
    tree.refuses(*variant("trial", slot="Two words"), says="its header needs Slot:")
    out = tree.does(*variant(name)).splitlines()
    assert next_of(out) == following
    assert tree.changed(before) == {f"patches/variants/{name}.patch"}  # 01 and 02 are as before
    assert tree.holders("edited\n") == [name]
    assert f"Base: {base}\nLoss" in (shown := tree.does("show", name))
    assert f"\nSlot: {slot}\n" in shown


@pytest.mark.parametrize("command, lacks", [
    (["new", "data-trial", "--variant"],
     "--slot, --technique, --loss, --hardware, --source, --text"),
    (["new", "data-trial", "--loss", "rounding (of sums)"],
     "--technique, --hardware, --source, --text"),
    (new("trial", text=""), "--text"),
    (new("data-trial", "--variant", technique="it's one", needs="package torch"), "--slot"),
    (new("data-trial", "--variant", "--base", "01", text="", slot="data"), "--text"),
])
def test_new_names_all_that_it_lacks_and_shows_a_whole_command(tree, command, lacks):
    tree.edit(LAST, "line 5\n", "edited\n")
    before = tree.files()
    code, out, error = tree.run(*command)
    assert (code, out) == (1, "") and tree.files() == before
    first, _, rest = error.partition("\n")
    assert first == f"error: new {command[1]} lacks {lacks}; a whole command:"
    example, says, _ = rest.partition("--slot says")
    assert bool(says) == ("--slot" in lacks)
    python, file, *words = shlex.split(example.replace("\\\n", ""))
    assert (python, file) == ("python", "patches/stack.py")
    given, whole = (vars(stack.parse_arguments(each)) for each in (command, words))
    assert {key: whole[key] for key, value in given.items() if value} == {
        key: value for key, value in given.items() if value}
    tree.does(*words)


def test_new_names_the_slots_that_there_are(capsys):
    before = {path: path.read_bytes() for path in ROOT.glob("patches/**/*.patch")}
    assert stack.main(["new", "data-trial", "--variant"]) == 1
    error = " ".join(capsys.readouterr().err.split())
    there = sorted({variant.fields["Slot"] for variant in VARIANTS if "Slot" in variant.fields})
    assert len(there) > 10 and f"There are {', '.join(there)};" in error
    assert {path: path.read_bytes() for path in ROOT.glob("patches/**/*.patch")} == before


def test_new_patch_with_a_second_edited_file_is_refused(tree):
    tree.edit(LAST, "line 5\n", "edited\n")
    tree.edit(DDP, "line 6\n", "edited\n")
    for command in (new("trial"), new("trial", "--variant", slot="trial")):
        tree.refuses(*command, says=f"only {LAST} may be edited, but {DDP}")


def test_new_patch_that_conflicts_with_a_variant_is_refused(tree):
    tree.edit(LAST, "line 50\n", "edited\n")
    tree.refuses(*new("trial"), says="profile conflicts with the edit at line \\d+")


def test_the_worked_example_of_contributing(real_tree):
    """Its edit fits 01, its commands print what stands there, and its script trains."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n\$ (.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 6
    (diff, edit), *others = map(typed_and_printed, blocks)
    assert diff == ["git", "diff", "-U1"]
    lines = [line for line in edit.splitlines(keepends=True) if line[0] in " +-"]
    sides = ["".join(line[1:] for line in lines if line[0] in signs) for signs in (" -", " +")]
    real_tree.edit(LAST, *sides)
    for (_, program, *words), printed in others:
        if program == "patches/stack.py":
            pattern = re.escape(printed).replace("…", ".*")
            assert re.fullmatch(pattern, out := real_tree.does(*words)), out
            if words[0] == "new":
                name = words[1]
        elif program == "-m":
            assert words[0] == "pytest" and words[-1] == name
            assert all((ROOT / word).is_file() for word in words if word.endswith(".py"))
        else:
            args = commands.make_parser(all_studies()).parse_args(words)
            assert program == "measure.py" and args.command == "variants" and args.names == name
    assert re.search(rf"^\| {name} \|", others[-1][1], re.MULTILINE)  # the row in the table
    real_tree.does("write", name)
    script = load(real_tree.root / stack.WRITTEN / stack.file_of(name))
    windows = windows_of(script, write_tokens(real_tree.root / "data"))
    losses = losses_of(script, *model_of(script, **TWENTY_STEPS), windows)
    assert losses[-1][2] < losses[0][2] - 0.4  # it learns


def typed_and_printed(block: str) -> tuple[list[str], str]:
    """The words of the command that a block of the page begins with, and what follows it."""
    lines = block.splitlines(keepends=True)
    for count in range(1, len(lines) + 1):
        try:
            words = shlex.split("".join(lines[:count]).replace("\\\n", ""))
        except ValueError:  # an open quotation
            continue
        if not lines[count - 1].endswith("\\\n"):
            return words, "".join(lines[count:])
    raise AssertionError(block)


# Damage.


DAMAGE = [
    (r"(@@ -.*\n) ", r"\1 another ", r"hunk 1 doesn't match {base} at line \d+"),
    (r"(@@ -\d+),(\d)", r"\1,9\2", "hunk 1 doesn't have the lines"),
    (r"@@ -\d+,", "@@ -8,", "hunk 1 doesn't match {base} at line 8 .*`refresh`"),
    (r"(@@ -.*) \+\d+,", r"\1 +8,", r"hunk 1 doesn't match {base} at line \d+"),
    (r"\n@@ .*", "\n@@ here @@", "hunk 1 has no @@"),
    (r"\n@@ (.*\n)+", "\n", "hunk 1 has no @@"),
    (r"\Z", "\\\\ No newline at end of file\n", "hunk 1 doesn't have the lines"),
    (r"\n--- .*", r"\n--- a/x.py", r"its diff has to begin with --- a/{base} and \+\+\+ b/{base}"),
    (r"\n\+\+\+ .*", r"\n+++ b/01-first.py", "its diff has to begin with"),
    (r"Hardware: .*\n", "", "its header needs Hardware"),
    (r"Source: (.*\n)+?\n", "Source:\n\n", "its header needs Source"),
    (r"Loss: .*\n(  .*\n)*", "Loss: small\n", "its header needs Loss"),
    (r"Base: .*\n", "Base 00_orig\n", "its header needs Base"),
    (r"Base: .*\n", "Base: ddp\n", "its Base: has to be "),
    (r"Loss: ", "Loss: unchanged\nLoss: ", "its header has Loss: twice"),
    (r"Source: ", "Sources: ", "its header has an unknown field Sources"),
    (r"\n\n(.+\n)+\n", "\n\n", "prose and a blank line"),
    (r"\n\Z", "\r\n", r"every line has to end with \\n"),
]
DAMAGED_VARIANT = [
    ("^", "Slot: data\n", "a variant's name has to begin with its Slot:"),
    ("^", "Slot: prof\n", "a variant's name has to begin with its Slot:"),  # not a whole word
    ("^", "Slot: Two Words\n", "its header needs Slot:"),
    ("^", "Measure: --text 'open\n", "its Measure: can't be read: No closing quotation"),
    ("^", "Needs: package torch.nn\n", "its header needs Needs:"),
    ("^", "Needs: luck\n", "its header needs Needs:"),
    ("^", "Excludes: \n", "its header needs Excludes:"),
    ("Base: .*", "Base: 03-third", "its Base: has to be 01_opt_single_gpu or 02_opt"),
]


def test_an_edit_that_is_not_carried_on_is_named(tree):
    """By every command that needs the scripts; the patches' line numbers tell a user nothing."""
    tree.edit(FIRST, "line 20\n", "edited\n")
    tree.refuses("verify", says=r"00_orig.py was edited \(patches/02-second.patch: .*\): `python "
                 "patches/stack.py refresh 00_orig.py` carries the edit through the patches")


@pytest.mark.parametrize("file, pattern, replacement, says", [
    *(("01-first", *damage) for damage in DAMAGE),
    *(("variants/profile", *damage) for damage in DAMAGE + DAMAGED_VARIANT),
    ("02-second", "Base: .*", "Base: 00_orig", "its Base: has to be 01-first"),
    ("ddp", "Base: .*", "Base: 03-third", "its Base: has to be 01_opt_single_gpu"),
])
def test_damaged_patch_is_refused(tree, file, pattern, replacement, says):
    path = tree.root / "patches" / f"{file}.patch"
    text, count = re.subn(pattern, replacement, path.read_bytes().decode(), count=1)
    assert count == 1
    path.write_bytes(text.encode())
    base = FIRST if file == "01-first" else LAST
    tree.refuses("verify", says=f"patches/{file}.patch: {says.format(base=base)}")


def test_damaged_series_is_refused(tree):
    series = tree.root / "patches" / "series"
    series.write_text("02-second.patch\n01-first.patch\n03-third.patch\n", newline="\n")
    tree.refuses("verify", says="patches/series, line 1: expected 01-NAME.patch")
    (tree.root / "patches" / "01-first.patch").unlink()
    series.write_text("01-first.patch\n", newline="\n")
    tree.refuses("verify", says="No such file .*01-first.patch")


def test_drifted_script_and_forgotten_patches_are_refused(tree):
    original = (tree.root / LAST).read_bytes()
    tree.edit(LAST, "line 5\n", "edited\n")
    tree.refuses("verify", says=f"{LAST}, line 5: not what the patches make .*`refresh`.*`new`")
    (tree.root / LAST).write_bytes(original)
    for stray in ("99-left-over.patch", "variants/left.py", "variants/Left.patch"):
        shutil.copy(tree.root / "patches" / "ddp.patch", tree.root / "patches" / stray)
        tree.refuses("verify", says=f"patches/{stray}")
        (tree.root / "patches" / stray).unlink()
    tree.does("verify")


# Writing.


def test_all_files_are_written_or_none(tmp_path):
    (tmp_path / "first").write_bytes(b"old")
    (tmp_path / "file").write_bytes(b"not a folder")
    with pytest.raises(OSError):
        stack.write_all({tmp_path / "first": b"new", tmp_path / "file" / "second": b"new"})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "first": b"old", "file": b"not a folder"
    }


def test_renaming_is_not_interrupted(tmp_path, monkeypatch, request):
    rename, handlers = Path.replace, []

    def interrupted(path, target):
        os.kill(os.getpid(), signal.SIGINT)
        handlers.append(signal.getsignal(signal.SIGTERM))
        return rename(path, target)

    theirs = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, theirs))
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr(Path, "replace", interrupted)
    files = {tmp_path / name: b"new" for name in ("one", "two")}
    (tmp_path / "one").write_bytes(b"old")
    (tmp_path / "one").chmod(0o755)
    with pytest.raises(KeyboardInterrupt):  # when all is written, not between two renames
        stack.write_all(files)
    assert len(handlers) == 2 and before[1] not in handlers
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "one": b"new", "two": b"new"
    }
    assert (tmp_path / "one").stat().st_mode & 0o777 == 0o755
    assert stack.write_all(files) == []


def test_a_thread_may_write(tmp_path):
    """Python lets only the main thread say what a signal does."""
    files = {tmp_path / name: b"new" for name in ("one", "two")}
    with ThreadPoolExecutor() as threads:
        assert threads.submit(stack.write_all, files).result() == list(files)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files
