"""The patches lead from script to script, edits travel, and variants can be composed."""

import re
import shlex
import shutil
import signal
import subprocess
from functools import cache
from itertools import combinations
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import (
    ROOT,
    SMALL,
    TINY,
    call_main,
    environment,
    in_float32,
    load,
    read_record,
    run_python,
    without_bfloat16,
    write_tokens,
)

from bench import cli
from bench.catalogue import Scripts
from gpt_speed.common import UserError
from patches import stack

FIRST, LAST, DDP = "00_orig.py", "01_opt_single_gpu.py", "02_opt_multi_gpu_ddp.py"
PATCHES, VARIANTS = stack.load(ROOT), stack.load_variants(ROOT)


def test_series_leads_from_script_to_script():
    text = (ROOT / FIRST).read_bytes()
    for patch in PATCHES:
        assert patch.name != "ddp" or text == (ROOT / LAST).read_bytes()
        before, text = text, patch.apply(text)
        assert patch.apply(text, reverse=True) == before
    assert text == (ROOT / DDP).read_bytes()


@pytest.mark.skipif(not shutil.which("git"), reason="git isn't installed")
def test_git_applies_the_patches(tmp_path):
    """`git apply` makes the scripts that stack.py makes, in a clean checkout."""
    scripts = stack.rebuild_all(ROOT)
    for patch in [PATCHES[0], PATCHES[-1], *VARIANTS]:
        for name in (FIRST, LAST, DDP):
            shutil.copy(ROOT / name, tmp_path)
        result = subprocess.run(
            ["git", "apply", ROOT / patch.file], cwd=tmp_path, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        assert (tmp_path / f"{patch.base}.py").read_bytes() == scripts[patch.name]


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
NEW = {
    "technique": "a trial",
    "loss": "unchanged",
    "hardware": "any",
    "source": "this test",
    "text": "A long text. " * 30,
}


def patch_of(file: str, base: str, before: bytes, after: bytes) -> bytes:
    header = HEADER.format(Path(file).stem, base).encode()
    return stack.make_patch(file, header, base, before, after)


class Tree:
    """Runs stack.py's commands on a stack in a folder."""

    def __init__(self, root: Path, capsys):
        self.root, self.capsys = root, capsys
        text = "".join(f"# line {number}\n" for number in range(1, 71)).encode()
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
        return {
            path.relative_to(self.root).as_posix(): path.read_bytes()
            for path in self.root.rglob("*")
            if path.is_file()
        }

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


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"a\n", b"b\na\n"),
        (b"a\n", b"a\nb\n"),
        (b"a\nb\n", b"a\n"),
        (b"a\n", b"b\n"),
        (b"-- a\n++ a\n", b"++ a\n@@ a\n"),
        (b"a\n" * 40, b"b\n" + b"a\n" * 38 + b"b\n"),
    ],
)
def test_a_patch_leads_both_ways(before, after):
    file = "patches/01-first.patch"
    patch = stack.Patch.parse(file, patch_of(file, "00_orig", before, after), "00_orig")
    assert patch.apply(before) == after and patch.apply(after, reverse=True) == before
    for moved in (b"moved\n" + before, before.replace(b"a", b"c")):
        with pytest.raises(stack.StackError, match=f"{file}: hunk 1 doesn't match 00_orig.py at"):
            patch.apply(moved)


def test_list_and_show(tree):
    rows = [row.split() for row in tree.does("list").splitlines()[1:]]
    assert [row[0] for row in rows] == EVERY[1:]
    assert rows[0][1:] == "changes 00_orig 01-first is done better".split()
    for name, file in (
        ("2", "patches/02-second.patch"),
        ("03-third", "patches/03-third.patch"),
        ("ddp", "patches/ddp.patch"),
        ("0", FIRST),
        ("profile", "patches/variants/profile.patch"),
    ):
        assert tree.does("show", name) == (tree.root / file).read_text()
    for name in ("4", "second", "variants/profile"):
        tree.refuses("show", name, says=f"no patch '{name}'")


def test_write(tree):
    assert tree.does("write", "2", "profile") == (
        "build/stages/02-second.py\nbuild/stages/variant-profile.py\n"
    )
    tree.does("write")
    written = {path.name: path.read_bytes() for path in tree.root.glob("build/stages/*")}
    assert written.keys() == {stack.file_of(name) for name in EVERY}
    assert written["03-third.py"] == (tree.root / LAST).read_bytes()
    assert written[DDP] == (tree.root / DDP).read_bytes()


# Edits.


def test_edit_of_the_real_00_there_and_back(tree):
    """Two lines at its top move every hunk; without them again, every byte is as it was."""
    shutil.rmtree(tree.root / "patches")
    shutil.copytree(ROOT / "patches", tree.root / "patches", ignore=lambda *_: ["__pycache__"])
    for name in (FIRST, LAST, DDP):
        shutil.copy(ROOT / name, tree.root / name)
    before, text = tree.files(), (tree.root / FIRST).read_bytes()
    (tree.root / FIRST).write_bytes(b"# one\n# two\n" + text)
    tree.does("refresh", FIRST)
    assert len(tree.holders("# one\n# two\n")) == 1 + len(PATCHES + VARIANTS)
    (tree.root / FIRST).write_bytes(text)
    tree.does("refresh", FIRST)
    assert tree.changed(before) == set()


@pytest.mark.parametrize(
    ("file", "into", "patches", "holders"),
    [
        (FIRST, [], set(), EVERY),
        (LAST, ["--into", "0"], set(), EVERY),
        (LAST, ["--into", "2"], {"patches/02-second.patch"}, EVERY[2:]),
        (DDP, [], {"patches/ddp.patch"}, ["ddp", "shard"]),
        ("build/stages/02-second.py", [], {"patches/02-second.patch"}, EVERY[2:]),
        ("build/stages/variant-profile.py", [], {"patches/variants/profile.patch"}, ["profile"]),
    ],
)
def test_edit_reaches_all_that_builds_on_it(tree, file, into, patches, holders):
    """Scripts that don't build on the edited one stay as they are."""
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
        ([], "--into NAME.*`new NAME`"),
        (["ddp"], f"ddp isn't part of {LAST}: edit {DDP}"),
        (["profile"], "edit variant-profile.py"),
        (["02-none"], "no patch"),
        (["1"], "01-first conflicts with another change at line 2\\d"),
    ):
        tree.refuses("refresh", LAST, *(f"--into={name}" for name in into), says=says)
    tree.does("refresh", LAST, "--into", "2")
    assert tree.holders("edited\n") == EVERY[2:]
    assert tree.changed(before) == {LAST, DDP, "patches/02-second.patch"}
    tree.refuses("refresh", "patches/variants/profile.patch", says="no patch 'profile.patch'")
    tree.refuses("refresh", DDP, "--into", "2", says=f"--into is for edits of {LAST}")


@pytest.mark.parametrize(
    ("mine", "edit", "both"),
    [
        ("alpha(b, c=1)", "alpha(a, c=2)", "alpha(b, c=2)"),  # another word of the line
        ("alpha(a, c=1)  # why", "alpha(z, c=1)", "alpha(z, c=1)  # why"),
        ("alpha(b, c=1)", "alpha(z, c=1)", None),
        ("", "alpha(z, c=1)", None),
    ],
)
def test_words_of_a_line_are_merged(mine, edit, both):
    """`refresh` does so; where scripts are composed, a line is never split."""
    base, ours, theirs = (
        f"one\n{line}\nthree\n".encode() for line in ("alpha(a, c=1)", mine, edit)
    )
    if both is None:
        with pytest.raises(stack.Conflict):
            stack.merge(base, ours, theirs, "it", stack.by_words)
    else:
        merged = stack.merge(base, ours, theirs, "it", stack.by_words)
        assert merged == f"one\n{both}\nthree\n".encode()
    with pytest.raises(stack.Conflict):
        stack.merge(base, ours, theirs, "it")


def test_a_conflict_says_what_to_type(tree):
    """Whoever types it carries the edit into all scripts."""
    tree.edit(FIRST, "line 5\n", "edited\n")
    tree.edit(FIRST, "line 20\n", "other\n")
    code, _, error = tree.run("refresh", FIRST)
    typed = re.findall("^  python patches/stack.py (.*)$", error, re.MULTILINE)
    assert code == 1 and len(typed) == 3
    tree.does(*shlex.split(typed[0]))
    tree.does(*shlex.split(typed[1]))
    (script,) = re.findall(r"make the edit in (\S+),", error)
    assert shlex.split(typed[2]) == ["refresh", script]
    tree.edit(script, "line 5\n", "edited\n")
    tree.edit(script, "02-second\n", "second of other\n")
    tree.does(*shlex.split(typed[2]))
    assert tree.holders("edited\n") == EVERY
    assert tree.holders("second of other\n") == EVERY[2:]


def test_conflict_with_variants_names_them_and_changes_nothing(tree):
    tree.edit(FIRST, "line 50\n", "edited\n")
    tree.refuses("refresh", FIRST, says="profile conflicts with another change at line 50")
    tree.edit(FIRST, "line 60\n", "edited too\n")
    tree.refuses("refresh", FIRST, "--until", "profile", says="shard conflicts .* at line 60")
    tree.does("refresh", FIRST, "--until", "profile", "--until", "shard")
    assert tree.holders("edited\n# line 51\n") == tree.holders("edited too\n") == STAGES
    assert tree.holders("line 60\n") == ["profile"] and tree.holders("line 50\n") == ["shard"]


@pytest.mark.parametrize(
    ("edited", "other"), [(FIRST, LAST), (LAST, DDP), (FIRST, "build/stages/variant-profile.py")]
)
def test_second_edited_file_is_refused(tree, edited, other):
    tree.does("write")
    tree.edit(edited, "line 5\n", "edited\n")
    tree.edit(other, "line 1\n", "another edit\n")
    into = ["--into", "0"] if edited == LAST else []
    tree.refuses("refresh", edited, *into, says=f"only {Path(edited).name} may be edited")


# New patches.


def new(name: str, *more: str, **fields: str) -> list[str]:
    return ["new", name, *(f"--{key}={text}" for key, text in (NEW | fields).items()), *more]


def test_edit_of_01_becomes_a_technique(tree):
    tree.refuses(*new("trial"), says="nothing would be left")
    tree.edit(LAST, "line 50\n", "edited\n")
    tree.refuses(*new("trial"), says="profile conflicts with another change at line \\d+")
    tree.edit(LAST, "edited\n", "line 50\n")
    tree.edit(LAST, "line 5\n", "edited\n")
    tree.refuses(*new("trial", loss="who knows"), says="its header needs Loss: `unchanged`")
    tree.refuses(*new("trial", text="--- a line like a diff's"), says="prose and a blank line")
    tree.refuses(*new("ddp"), says="'ddp' .*isn't a name")
    tree.refuses(*new("trial", "--base", "02"), says="are for a --variant")
    tree.refuses(*new("trial", group="trial"), says="are for a --variant")
    out = tree.does(*new("trial", published="28,402 tok/sec, 26.2422 GB")).splitlines()
    assert out[:3] == ["patches/04-trial.patch", DDP, "patches/series"]
    assert out[-1] == "  python measure.py ladder --techniques 3-4"  # with the one before it
    assert cli.make_parser().parse_args(out[-1].split()[2:])
    assert tree.holders("edited\n") == ["04-trial", *EVERY[4:]]
    patch = tree.does("show", "4")
    assert "Base: 03-third\nLoss: unchanged\n" in patch and "\n+# edited\n" in patch
    assert max(map(len, patch.partition("\n---")[0].splitlines())) <= 100
    assert stack.load(tree.root)[3].published == (28402.0, 26.2422, 1)


@pytest.mark.parametrize(
    ("file", "next_one", "more"),
    [
        (LAST, "measure.py variants --names data-trial", []),
        (DDP, "patches/stack.py verify", ["--base", "02"]),
    ],
)
def test_edit_becomes_a_variant(tree, file, next_one, more):
    def variant(name, group="data"):
        return new(name, "--variant", *more, group=group)

    before = tree.files()
    tree.edit(file, "line 5\n", "edited\n")
    tree.refuses(*variant("profile"), says="'profile' is taken")
    tree.refuses(*variant("4"), says="'4' .*isn't a name")
    tree.refuses(*variant("trial"), says="begin with its Group:")
    tree.refuses(*variant("data-trial", group=""), says="--variant needs a --group")
    assert tree.does(*variant("data-trial")).endswith(f"\n  python {next_one}\n")
    assert tree.changed(before) == {"patches/variants/data-trial.patch"}  # 01 and 02 are as before
    assert tree.holders("edited\n") == ["data-trial"]
    patch = tree.does("show", "data-trial")
    assert f"Base: {Path(file).stem}\nLoss" in patch and "\nGroup: data\n" in patch


@pytest.mark.parametrize(
    ("file", "pattern", "replacement", "says"),
    [
        *(
            ("01-first", *damage)
            for damage in (
                (
                    r"(@@ -.*\n) ",
                    r"\1 another ",
                    f"hunk 1 doesn't match {FIRST} at line \\d+ .*`refresh`",
                ),
                (r"(@@ -\d+),(\d)", r"\1,9\2", "hunk 1 doesn't have the lines"),
                (r"(@@ -.*) \+\d+,", r"\1 +8,", f"hunk 1 doesn't match {FIRST} at line \\d+"),
                (r"\n@@ .*", "\n@@ here @@", "hunk 1 doesn't begin with @@"),
                (r"\Z", "\\\\ No newline at end of file\n", "hunk 1 doesn't have the lines"),
                (r"\n--- .*", r"\n--- a/x.py", "hunk 1 doesn't begin with @@"),
                (r"Hardware: .*\n", "", "its header needs Hardware"),
                (r"Base: .*\n", "Base: ddp\n", "its Base: has to be 00_orig"),
                ("^", "Published: 27648 tok/sec, 26.2422 GB\n", "its header needs Published: "),
                (r"Loss: ", "Loss: unchanged\nLoss: ", "its header has Loss: twice"),
                (r"Source: ", "Sources: ", "its header has Sources:, .*unknown"),
                (r"\n\n(.+\n)+\n", "\n\n", "prose and a blank line"),
                (r"\n\Z", "\r\n", r"every line has to end with \\n"),
            )
        ),
        ("variants/profile", "^", "Group: prof\n", "a variant's name has to begin with its Group:"),
        ("variants/profile", "^", "Needs: luck\n", "its header needs Needs:"),
        ("02-second", "Base: .*", "Base: 00_orig", "its Base: has to be 01-first"),
    ],
)
def test_damaged_patch_is_refused(tree, file, pattern, replacement, says):
    path = tree.root / "patches" / f"{file}.patch"
    text, count = re.subn(pattern, replacement, path.read_bytes().decode(), count=1)
    assert count == 1
    path.write_bytes(text.encode())
    tree.refuses("verify", says=f"patches/{file}.patch: {says}")


def test_damaged_series_is_refused(tree):
    series = tree.root / "patches" / "series"
    series.write_text("02-second.patch\n01-first.patch\n03-third.patch\n", newline="\n")
    tree.refuses("verify", says="patches/series, line 1: expected 01-NAME.patch")


def test_drifted_script_and_forgotten_patches_are_refused(tree):
    original = (tree.root / LAST).read_bytes()
    tree.edit(LAST, "line 5\n", "edited\n")
    tree.refuses("verify", says=f"{LAST} isn't what the patches make .*`refresh`.*`new`")
    (tree.root / LAST).write_bytes(original)
    for stray in ("99-left-over.patch", "variants/left.py"):
        shutil.copy(tree.root / "patches" / "ddp.patch", tree.root / "patches" / stray)
        tree.refuses("verify", says=f"patches/{stray}")
        (tree.root / "patches" / stray).unlink()
    tree.does("verify")


@pytest.mark.parametrize("line", [b"x = (\n", b"# \0\n", "# é\n".encode("latin-1")])
def test_what_isnt_python_is_refused(tree, line):
    path, original = tree.root / LAST, (tree.root / LAST).read_bytes()
    path.write_bytes(original.replace(b"# line 5\n", line))
    tree.refuses(*new("trial"), says="04-trial.py isn't Python")
    tree.refuses("refresh", LAST, "--into", "3", says="03-third.py isn't Python")
    path.write_bytes(original)
    variant = tree.root / "patches/variants/profile.patch"
    variant.write_bytes(variant.read_bytes().replace(b"+# profile\n", b"+" + line))
    tree.refuses("verify", says="variant-profile.py isn't Python")


@pytest.mark.parametrize("line", ["line 5\n", "line 12\n", "line 50\n"])
def test_an_edited_00_is_named(tree, line):
    """The error doesn't name the patches that no longer fit; nor does a study that is resumed."""
    tree.edit(FIRST, f"# {line}", "# edited\n# twice\n")
    tree.refuses("verify", says=f"{FIRST} is edited: `python patches/stack.py refresh {FIRST}`")
    with pytest.raises(stack.StackError, match=f"^{FIRST} is edited"):
        stack.rebuild_all(tree.root)


def test_all_files_are_written_or_none(tmp_path):
    (tmp_path / "first").write_bytes(b"old")
    (tmp_path / "file").write_bytes(b"not a folder")
    with pytest.raises(NotADirectoryError):
        stack.write_all({tmp_path / "first": b"new", tmp_path / "file" / "second": b"new"})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "first": b"old",
        "file": b"not a folder",
    }


def test_an_interrupt_is_raised_where_a_write_fails():
    """It isn't lost with the error that comes after it."""

    def interrupted() -> None:
        signal.raise_signal(signal.SIGINT)
        raise OSError("the disk is full")

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), stack.interrupts_delayed():
        interrupted()
    assert signal.getsignal(signal.SIGINT) is handler


def test_renaming_is_not_interrupted(tmp_path, monkeypatch):
    rename = Path.replace

    def interrupted(path, target):
        signal.raise_signal(signal.SIGINT)
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    files = {tmp_path / name: b"new" for name in ("one", "two")}
    (tmp_path / "one").write_bytes(b"old")
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):  # when all is written, not between two renames
        stack.write_all(files)
    assert signal.getsignal(signal.SIGINT) is handler
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "one": b"new",
        "two": b"new",
    }
    assert stack.write_all(files) == []


# Scripts of one's own.


# Reviewed: these change the same lines, and would not be right if they were joined.
CONFLICTS = {
    ("compile-mode", "embedding-eager"),
    ("compile-switch", "embedding-eager"),
    ("precision-fp16", "step-accumulation"),  # every piece's gradients have to be scaled
    *(("profile", f"schedule-{name}") for name in ("cosine", "scaled", "wsd")),
    ("checkpoint-resume", "profile"),
    *(
        (f"ddp-{name}", f"parallel-{other}")
        for name in ("compression", "options")
        for other in ("deepspeed", "sharded")
    ),
    ("attention-backend", "parallel-sharded"),
    ("attention-backend", "model-skips"),
    ("dropout-hash", "model-skips"),  # both change the residuals of a block
    ("data-workers", "timeout-ranks"),
    ("loop-accelerate", "precision-fp16"),
    ("loop-accelerate", "step-accumulation"),
    *(
        (f"optimizer-{name}", f"parallel-{other}")
        for name in ("adafactor", "adamw-8bit", "foreach", "muon")
        for other in ("muon", "zero1")
    ),
    ("parallel-deepspeed", "precision-fp16"),
    ("parallel-deepspeed", "step-accumulation"),
    ("parallel-sharded", "precision-float8"),
    ("memory-offload", "precision-autocast"),
    ("memory-offload", "precision-fp16"),
    # Whose head knows neither float8 nor a soft cap; nor does either of these know the other.
    *(
        (f"head-{name}", other)
        for name in ("cce", "liger", "pytorch")
        for other in ("model-mixture", "model-skips", "precision-float8")
    ),
    ("head-sampled", "precision-float8"),
    ("model-skips", "precision-float8"),
    *(
        ("compile-blocks", name)
        for name in (
            "embedding-eager",
            "head-cce",
            "head-liger",
            "head-pytorch",
            "model-mixture",
            "optimizer-in-backward",
        )
    ),
    ("loop-accelerate", "optimizer-in-backward"),
    ("optimizer-in-backward", "precision-fp16"),
    ("optimizer-in-backward", "step-accumulation"),
    *(
        (name, "optimizer-in-backward")
        for name in ("compile-mode", "compile-switch", "embedding-eager")
    ),
}
CONFLICTS_WITH_02 = {
    "compile-blocks",
    "compile-mode",
    "compile-switch",
    "data-on-device",
    "embedding-eager",
    "loop-accelerate",
    "optimizer-in-backward",
}


@pytest.fixture
def made_once(monkeypatch):
    """Scripts are made once, however often one is composed."""
    for function in ("rebuild_all", "load_variants"):
        monkeypatch.setattr(stack, function, cache(getattr(stack, function)))


@pytest.mark.slow
def test_all_pairs_merge_but_those_that_were_reviewed(made_once):
    conflicts = set()
    for one, other in combinations(VARIANTS, 2):
        pair, on_02 = (one.name, other.name), Path(DDP).stem in (one.base, other.base)
        if on_02 and CONFLICTS_WITH_02 & {*pair}:
            continue
        try:
            note = stack.compose(list(pair)).partition(b"\n")[0].decode()
            assert note.startswith(f"# {DDP if on_02 else LAST} with {', '.join(pair)}; ")
        except stack.Conflict:
            conflicts.add(pair)
        except stack.StackError as error:
            assert "exclude each other" in str(error)
    assert conflicts == CONFLICTS, f"to be reviewed, and added or removed: {conflicts ^ CONFLICTS}"


def test_composed_alone_it_is_the_variant_and_on_02_too(made_once):
    scripts, conflicts = stack.rebuild_all(ROOT), set()
    for variant in VARIANTS:
        note, _, text = stack.compose([variant.name]).partition(b"\n")
        if packages := stack.packages_of([variant]):
            check = stack.CHECK.format(packages).encode()
            assert text.count(check) == 1
            text = text.replace(check, b"")
        assert text == scripts[variant.name] and variant.name.encode() in note
        try:
            assert b"import torch.distributed as dist" in stack.compose([variant.name], DDP)
        except stack.Conflict:
            conflicts.add(variant.name)
    assert conflicts == CONFLICTS_WITH_02


@pytest.mark.parametrize(
    ("base", "names", "options"),
    [
        (
            "01",
            [
                "step-accumulation",
                "memory-checkpoint",
                "optimizer-muon",
                "precision-autocast",
                "compile-mode",
            ],
            ["--micro-batches", "2"],
        ),
        (
            "01",
            [
                "optimizer-muon",
                "compile-blocks",
                "model-modern",
                "model-skips",
                "schedule-wsd",
                "gc-freeze",
                "memory-budget",
            ],
            ["--polar-express", "--normuon", "--cautious-decay"],
        ),
        (
            "01",
            ["optimizer-muon", "model-skips", "precision-stochastic", "memory-checkpoint"],
            ["--dtype", "bfloat16"],
        ),
        (
            "02",
            ["model-modern", "model-skips", "optimizer-muon", "precision-autocast", "schedule-wsd"],
            [],
        ),
        ("02", ["parallel-muon", "model-skips", "schedule-wsd"], []),
    ],
)
def test_a_composed_script_trains(tmp_path, base, names, options):
    own = tmp_path / "own.py"
    result = run_python(
        ROOT / "patches" / "stack.py", "compose", *names, "--base", base, "--out", own
    )
    assert result.returncode == 0, result.stderr
    data = write_tokens(tmp_path / "data")
    with mock.patch.dict((script := load(own)).MODELS["cpu-demo"], SMALL), without_bfloat16():
        result = call_main(
            script,
            *TINY,
            "--device",
            "cpu",
            "--data",
            data,
            "--results-dir",
            tmp_path / "results",
            "--max-steps",
            3,
            "--no-compile",
            *in_float32(script),
            *options,
        )
    assert result.returncode == 0, result.stderr
    start, *_, end = read_record(tmp_path / "results")
    assert (start["stage"], end["status"]) == ("own", "complete")


def test_a_file_that_exists_is_kept(tmp_path, capsys):
    own = tmp_path / "own.py"
    own.write_text("kept\n")
    assert stack.main(["compose", "gc-freeze", "--out", str(own)]) == 1
    assert "exists: nothing" in capsys.readouterr().err and own.read_text() == "kept\n"


def test_variants_that_make_no_python_together(monkeypatch):
    """It is a conflict, also where a check of packages is added, for which the script is parsed."""
    monkeypatch.setattr(stack, "merge", lambda *_: b"def half(:\n")
    with pytest.raises(stack.Conflict, match="^init-gpt2 don't go together: .* isn't Python"):
        stack.compose(["init-gpt2"])


@pytest.mark.parametrize("name", ["profile.py", "random.py", "tiktoken.py", "torch.py"])
def test_a_name_that_hides_a_module_is_refused(tmp_path, capsys, name):
    assert stack.main(["compose", "profile", "--out", str(tmp_path / name)]) == 1
    assert f"{name} would take the place" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_missing_package_is_named_in_one_line(tmp_path, capsys, monkeypatch):
    """`compose` names it, and so does a script that was composed elsewhere."""
    own = tmp_path / "own.py"
    monkeypatch.setattr(stack, "find_spec", lambda name: None)
    assert (
        stack.main(
            ["compose", "checkpoint-resume", "init-gpt2", "loop-accelerate", "--out", str(own)]
        )
        == 1
    )  # they don't go together
    capsys.readouterr()
    assert stack.main(["compose", "init-gpt2", "optimizer-adamw-8bit", "--out", str(own)]) == 0
    assert "first: pip install bitsandbytes safetensors\n" in capsys.readouterr().out
    own.write_text(own.read_text().replace("['bitsandbytes', 'safetensors']", "['no_such', 'os']"))
    result = run_python(own, "--help", fork=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "error: it needs packages: pip install no-such\n"


def test_a_module_of_the_same_name_elsewhere(tmp_path):
    (tmp_path / "patches.py").write_text("")
    result = run_python(
        ROOT / "measure.py", "--help", fork=False, env=environment(PYTHONPATH=str(tmp_path))
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (
            ["optimizer-muon", "optimizer-adafactor"],
            "adafactor and optimizer-muon exclude each other",
        ),
        (["precision-fp16", "no-such"], "no variant 'no-such'; `python patches/stack.py list`"),
        (["parallel-deepspeed", "optimizer-muon"], "parallel-deepspeed and optimizer-muon exclude"),
        (
            ["precision-fp16", "step-accumulation"],
            "step-accumulation conflicts with another change at",
        ),
    ],
)
def test_refused(names, says):
    with pytest.raises(stack.StackError, match=says):
        stack.compose(names)


def test_lines_that_both_sides_add_are_joined():
    """Imports and fields are; a field that both change, and any other place, is a conflict."""
    base = b"import a\nimport b\nclass Config:\n    x: int = 1\ndef f():\n    return 1\n"
    ours = base.replace(b"import b", b"import c").replace(b"= 1\n", b"= 1\n    y: int = 2\n")
    theirs = base.replace(b"import b\n", b"import b\nimport d\n").replace(
        b"= 1\n", b"= 1\n    z: int = 3\n"
    )
    joined = base.replace(b"import b", b"import c\nimport d").replace(
        b"= 1\n", b"= 1\n    y: int = 2\n    z: int = 3\n"
    )
    assert stack.merge(base, theirs, ours, "it", stack.by_joining) == joined
    for line, place in ((b"    x: int = 1", "class Config"), (b"    return 1", "def f")):
        with pytest.raises(stack.Conflict, match=f"it conflicts with another change at .*{place}"):
            stack.merge(
                base,
                base.replace(line, line + b"2"),
                base.replace(line, line + b"3"),
                "it",
                stack.by_joining,
            )
    with pytest.raises(stack.Conflict, match="another change at line 2, the imports"):
        stack.merge(base, theirs, ours, "it")


def test_equal_lines_are_not_joined():
    """One of them would be lost, such as the end of a call."""
    base, ours, theirs = (
        b"".join(b'    add("--%c",\n    )\n' % name for name in names)
        for names in (b"a", b"ab", b"ac")
    )
    assert stack.by_joining(stack.Overlap("def make_parser", ours, base, theirs)) is None
    whole = (text.replace(b",\n    )", b")") for text in (ours, base, theirs))
    joined = stack.by_joining(stack.Overlap("def make_parser", *whole))
    assert joined == b'    add("--a")\n    add("--c")\n    add("--b")\n'


def test_a_run_of_several_variants():
    """Each variant has the first of the options that it is measured with, unless there are others
    for all of them; the script is the one that `compose` writes."""
    scripts, name = Scripts(), "data-workers+memory-checkpoint+optimizer-adafactor"
    base, *runs = scripts.with_variants(
        scripts.stage("01"), dict(gpus=0), names=[name, f"{name} --workers 4"]
    )
    assert [run.options for run in runs] == [("--workers", "2"), ("--workers", "4")]
    assert {(run.loss, run.compared_to, run.error) for run in runs} == {
        ("changes", base.name, None)
    }
    assert scripts.text(runs[0].script) == stack.compose(name.split("+"))
    assert scripts.find("head-liger+data-workers", dict(gpus=0)).error.startswith("needs ")
    with pytest.raises(UserError, match="no variant 'none' of 01"):
        scripts.variants(scripts.stage("01"), dict(gpus=0), ["data-workers+none"])


def test_contributings_clipping_is_of_all_gradients_with_muon_too(tmp_path):
    """CONTRIBUTING's example is joined with a variant whose optimizer has several groups."""
    example = (ROOT / "CONTRIBUTING.md").read_text().split("     loss.backward()\n")[1]
    added = "".join(line[1:] + "\n" for line in example.splitlines() if line.startswith("+    "))
    assert added.count("\n") == 2
    base, muon = (ROOT / LAST).read_bytes(), stack.rebuild_all(ROOT)["optimizer-muon"]
    place = b"    loss.backward()\n"
    edited = base.replace(place, place + added.encode())
    own = tmp_path / "own.py"
    own.write_bytes(stack.merge(base, edited, muon, "it", stack.by_joining))
    script = load(own)
    config = script.Config(
        **SMALL,
        context_length=16,
        vocab_size=300,
        dropout=0.0,
        batch_size=2,
        device=torch.device("cpu"),
    )
    model = script.GPTModel(config)
    optimizer = script.make_optimizer(model, config)
    assert len(optimizer.param_groups) > 1
    ids = torch.randint(300, (2, 16))
    with without_bfloat16():
        script.backward_and_update(1000 * script.compute_loss(model, ids, ids), optimizer)
    gradients = [weight.grad for weight in model.parameters()]
    assert torch.nn.utils.get_total_norm(gradients).item() == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (
            ["optimizer-muon", "data-workers", "compile-blocks"],
            {"--polar-express", "--normuon", "--cautious-decay", "--workers"},
        ),
        (["ddp-options"], {"--bucket-mb", "--static-graph", "--compile-first"}),
        (["optimizer-adafactor"], set()),
    ],
)  # other defaults of options that there are
def test_the_options_that_variants_add_are_told(tmp_path, capsys, names, options):
    own = tmp_path / "own.py"
    assert stack.main(["compose", *names, "--out", str(own)]) == 0
    written, *told = capsys.readouterr().out.splitlines()
    words = " ".join(told).replace("see --help", "").split()
    assert Path(written).resolve() == own
    assert {word.strip(",") for word in words if word.startswith("--")} == options
