"""The speed techniques between the scripts, one patch each: read, apply, verify and refresh them.

    python patches/stack.py --help

A stage is a script as it stands after a patch: stage 0 is 00_orig.py, the stage after the last
patch of patches/series is 01_opt_single_gpu.py, and after ddp.patch comes 02_opt_multi_gpu_ddp.py.
A variant, patches/variants/NAME.patch, is an alternative to 01 or 02; nothing builds on it. Each
patch names the script that it applies to, so that `git apply` takes it, too.

Edit scripts, never patches: 00, 01 or 02 in place, or a stage or variant in build/stages/, where
`write` puts them. Then `refresh FILE` merges the edit into every script that builds on that file,
also into lines that a patch changes in other words, and rewrites the patches; a conflict, or a
second edited file, stops it with nothing changed.
"""

import argparse
import difflib
import email
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections import namedtuple
from functools import partial
from itertools import permutations
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIRST, LAST, DDP = "00_orig.py", "01_opt_single_gpu.py", "02_opt_multi_gpu_ddp.py"
WRITTEN = Path("build", "stages")  # where `write` puts scripts
Published = namedtuple("Published", "tok_per_sec reserved_gb gpus")
PUBLISHED = r"(\d{1,3}(?:,\d{3})*) tok/sec, (\d+\.\d+) GB(?: on (\d+) GPUs)?"
NEED = r"(?:package [\w-]+|an NVIDIA GPU|compute capability \d+\.\d|bfloat16 units)"
FIELDS = {  # of a patch's header: the form of each, and what it says
    "Technique": (r".+", "the technique in a few words"),
    "Base": (r".+", "the name of the stage before it"),
    "Loss": (r"unchanged|rounding \(.+\)|changes because .+",
             "`unchanged` (in exact arithmetic), `rounding (...)`, or `changes because ...`"),
    "Hardware": (r".+", "where it helps"),
    "Source": (r".+", "where it is described"),
    "Use": (r".+", "when to use it"),
    "Limits": (r".+", "where it gains nothing, or what it costs"),
    "Published": (PUBLISHED, "the published figures (optional), `27,648 tok/sec, 26.2422 GB`, or"
                  " with ` on 4 GPUs` behind it"),
    "Group": (r"[a-z]+(?:-[a-z]+)*", "the group of a variant, with which its name begins; a script"
             " takes one of each"),
    "Excludes": (r"[a-z0-9-]+(?:, [a-z0-9-]+)*", "variants of other groups that it can't work with"),
    "Needs": (rf"{NEED}(?:, {NEED})*", "what a variant can't do without: `package NAME`, `an NVIDIA"
              " GPU`, `compute capability 8.9`, `bfloat16 units`"),
    "Measure": (r".+", "the options to measure a variant with, ` | ` between rows, behind each what"
                " it alone needs, `[an NVIDIA GPU]`"),
}
OPTIONAL = ("Use", "Limits", "Published", "Group", "Excludes", "Needs", "Measure")
OF_02 = ("ddp", "parallel")  # groups that are measured with 02
NAME = re.compile(r"(?!ddp$)[a-z][a-z0-9]*(-[a-z0-9]+)*")  # what a user may call a patch
HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(?: .*)?\n")
CONFLICT = re.compile(  # as git merge-file --diff3 marks it: ours, the base, theirs
    rb"^<{7} ours\n(.*?)^\|{7} base\n(.*?)^={7}\n(.*?)^>{7} theirs\n", re.DOTALL | re.MULTILINE)
DEFINITION = re.compile(rb"^(?:(?:class|def) \w+|\w+ = {$)", re.MULTILINE)
OPTION = re.compile(rb"^    (\w+): [^=\n]+ = option\(", re.MULTILINE)  # a setting of Config
WORD = re.compile(rb"\w+|\s|[^\w\s]")


class StackError(Exception):
    """What is wrong, in one line for the user."""


class Conflict(StackError):
    """Two changes of the same lines."""

    def __init__(self, text: str, name: str = ""):
        super().__init__(text)
        self.name = name  # of the script that isn't merged


def read(path: Path) -> bytes:
    """A text file's bytes. Raises StackError for line ends other than \\n, else OSError."""
    text = path.read_bytes()
    if not text.endswith(b"\n") or b"\r" in text:
        raise StackError(f"{path}: every line has to end with \\n, without \\r")
    return text


def write_all(files: dict[Path, bytes]) -> list[Path]:
    """Writes all files or none; returns those that changed."""
    changed = [p for p, text in files.items() if not p.exists() or p.read_bytes() != text]
    temporary = {p: p.with_name(f"{p.name}.{os.getpid()}.tmp") for p in changed}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    came = []
    try:  # write them next to their places, and rename only when all are complete
        for path, copy in temporary.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(files[path])
            if path.exists():
                shutil.copymode(path, copy)
        for number in handlers:  # an interrupt between two renames would leave a broken stack
            signal.signal(number, lambda number, frame: came.append(number))
        for path, copy in temporary.items():
            copy.replace(path)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for copy in temporary.values():
            copy.unlink(missing_ok=True)
    for late in came[:1]:  # now it may end the program
        signal.raise_signal(late)
    return changed


class Patch:
    """One technique: its header explains it, its hunks lead from the script `base` to `name`."""

    def __init__(self, file: str, data: bytes, *bases: str):
        """Raises StackError for a bad patch, or one whose Base isn't one of `bases`."""
        start = data.find(b"\n--- ") + 1 or len(data)
        self.header, diff = data[:start], data[start:]  # fields and prose, then the lines
        self.file, self.name = file, Path(file).stem  # file: "patches/05-bfloat16.patch"
        self.fields = fields = parse_header(file, self.header)
        self.base = base = fields["Base"]
        if base not in bases:
            raise StackError(f"{file}: its Base: has to be {' or '.join(bases)}")
        group = fields.get("Group")
        if group and not f"{self.name}-".startswith(f"{group}-"):
            raise StackError(f"{file}: a variant's name has to begin with its Group:")
        self.published = None
        if published := re.fullmatch(PUBLISHED, fields.get("Published", "")):
            speed, memory, gpus = published.groups("1")
            self.published = Published(float(speed.replace(",", "")), float(memory), int(gpus))
        self.option_sets = []  # of each row that a variant has in its plan: options, what they need
        for row in fields.get("Measure", "").split("|"):
            options, _, needs = row.strip().removesuffix("]").partition("[")
            try:
                self.option_sets.append((shlex.split(options), needs or fields.get("Needs", "")))
            except ValueError as error:
                raise StackError(f"{file}: its Measure: can't be read: {error}")
        names = f"--- a/{file_of(base)}", f"+++ b/{file_of(base)}"
        hunks = diff.removeprefix("{}\n{}\n".format(*names).encode())
        if hunks == diff:
            raise StackError(f"{file}: its diff has to begin with {' and '.join(names)}")
        self.hunks = parse_hunks(file, hunks)

    def apply(self, text: bytes, reverse: bool = False) -> bytes:
        """`name` from `base`, or the reverse. Raises StackError unless every hunk fits exactly."""
        source, result, position = text.splitlines(keepends=True), [], 0
        for number, hunk in enumerate(self.hunks, 1):
            start, removed, new_start, added = hunk[2:] + hunk[:2] if reverse else hunk
            result += source[position:start]
            end = start + len(removed)
            if start < position or source[start:end] != removed or len(result) != new_start:
                script = file_of(self.name if reverse else self.base)
                raise StackError(f"{self.file}: hunk {number} doesn't match {script} at line"
                                 f" {start + 1} (edited? `refresh`)")
            result += added
            position = end
        return b"".join(result + source[position:])


def file_of(name: str) -> str:
    """The file name of a stage's or variant's script; 02 is the stage after ddp.patch."""
    if name == "ddp":
        return DDP
    # No plain name for a variant: Python would import a script profile.py as its module `profile`.
    return f"{name}.py" if name[0].isdigit() else f"variant-{name}.py"


def parse_header(file: str, header: bytes) -> dict[str, str]:
    message = email.message_from_string(header.decode(errors="replace"))
    fields = {field: " ".join(text.split()) for field, text in message.items()}
    for field in fields:
        if field not in FIELDS or len(message.get_all(field)) > 1:
            raise StackError(f"{file}: its header has {field}: twice, or it is an unknown field")
    for field, (form, meaning) in FIELDS.items():
        optional = field in OPTIONAL and field not in fields
        if not optional and not re.fullmatch(form, fields.get(field, "")):
            raise StackError(f"{file}: its header needs {field}: {meaning}")
    prose = str(message.get_payload())
    if not prose.strip() or not prose.endswith("\n\n"):
        raise StackError(f"{file}: prose and a blank line have to precede its diff")
    return fields


def parse_hunks(file: str, diff: bytes) -> list[tuple[int, list[bytes], int, list[bytes]]]:
    """Of each hunk: the lines before it, the old lines, the new lines before it, the new lines."""
    hunks = []
    for number, text in enumerate(re.split(rb"(?<=\n)(?=@@)", diff), 1):
        match = HUNK.match(text)
        if not match:
            raise StackError(f"{file}: hunk {number} has no @@ -line,count +line,count @@")
        old_line, old_count, new_line, new_count = (int(n) for n in match.groups("1"))
        lines = text[match.end() :].splitlines(keepends=True)
        old = [line[1:] for line in lines if line[:1] in b" -"]
        new = [line[1:] for line in lines if line[:1] in b" +"]
        unknown = any(line[:1] not in b" -+" for line in lines)
        if unknown or (len(old), len(new)) != (old_count, new_count):
            raise StackError(f"{file}: hunk {number} doesn't have the lines that its @@ announces")
        # Lines are counted from 1, but for an empty side a diff gives the line before it.
        hunks.append((old_line - (old_count > 0), old, new_line - (new_count > 0), new))
    return hunks


def make_patch(file: str, header: bytes, base: str, before: bytes, after: bytes) -> bytes:
    """A patch file's content. Raises StackError for a bad header, or if there is no difference."""
    name = Path(file).stem
    if before == after:
        raise StackError(f"nothing would be left of {name}: its script would be the same as {base}")
    names = f"a/{file_of(base)}".encode(), f"b/{file_of(base)}".encode()
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    data = header
    for line in difflib.diff_bytes(difflib.unified_diff, old, new, *names, lineterm=b"\n"):
        if match := HUNK.fullmatch(line):  # name the class or function it is in, as git does
            above = DEFINITION.findall(b"".join(old[: int(match[1]) + 2]))
            line = b" ".join([line[:-1], *above[-1:]]) + b"\n"
        data += line
    if Patch(file, data, base).apply(before) != after:
        raise StackError(f"{file}: the diff would not lead from {base} to {name}")
    return data


def load(root: Path = ROOT) -> list[Patch]:
    """The patches of the series in their order, then ddp.patch. Raises StackError for a bad one."""
    series = read(root / "patches/series").decode(errors="replace").splitlines()
    for number, line in enumerate(series, 1):
        if not re.fullmatch(rf"{number:02}-[a-z0-9-]+\.patch", line):
            raise StackError(f"patches/series, line {number}: expected {number:02}-NAME.patch")
    files, bases = [*series, "ddp.patch"], [FIRST, *series[:-1], LAST]
    return [Patch(f"patches/{file}", read(root / "patches" / file), Path(base).stem)
            for file, base in zip(files, bases, strict=False)]


def load_variants(root: Path = ROOT) -> list[Patch]:
    """The variants, sorted by name. Raises StackError for a bad one."""
    paths = sorted(root.glob("patches/variants/*.patch"))
    files = [path.relative_to(root).as_posix() for path in paths]
    for file in files:
        if not NAME.fullmatch(Path(file).stem):
            raise StackError(f"{file}: a variant has a name like sgd or adamw-8bit")
    bases = Path(LAST).stem, Path(DDP).stem
    return [Patch(file, read(root / file), *bases) for file in files]


def names_of(patches: list[Patch]) -> list[str]:
    """The stages' names in their order: "00_orig", "01-causal-mask" and so on, "ddp"."""
    return [Path(FIRST).stem, *(patch.name for patch in patches)]


def find(name: str, names: list[str] | dict[str, bytes]) -> str:
    """The one of `names` that "5", "05-bfloat16", "ddp", a variant's name or a script's means."""
    names = list(names)
    last = names.index("ddp") - 1  # the stage that is 01; "ddp" is 02
    if name.isdecimal() and int(name) <= last:
        return names[int(name)]
    name = name.removesuffix(".py").removeprefix("variant-")
    name = {LAST: names[last], DDP: "ddp"}.get(f"{name}.py", name)
    if name not in names:
        raise StackError(f"no patch {name!r}; `python patches/stack.py list` shows their names")
    return name


def rebuild(patches: list[Patch], root: Path = ROOT,
            edited: Path | None = None) -> dict[str, bytes]:
    """Each of names_of(patches) with its script, as it was before the file `edited` was edited.

    Raises StackError if a patch doesn't match, or another one of 00, 01 and 02 isn't its stage.
    """
    names, first = names_of(patches), read(root / FIRST)
    if edited == root / FIRST:  # what it was before comes from 01, backwards
        first = read(root / LAST)
        for patch in reversed(patches[: names.index("ddp") - 1]):
            first = patch.apply(first, reverse=True)
    scripts = {names[0]: first}
    for patch in patches:
        scripts[patch.name] = patch.apply(scripts[find(patch.base, names)])
    for file in (FIRST, LAST, DDP):
        stage = scripts[find(file, names)]
        if root / file != edited and (found := read(root / file)) != stage:
            line = found[:len(os.path.commonprefix([found, stage]))].count(b"\n") + 1
            raise StackError(f"{file}, line {line}: not what the patches make (edited? `refresh`"
                             " carries the edit on, `new` makes a patch of it)")
    return scripts


def rebuild_all(root: Path = ROOT, edited: Path | None = None) -> dict[str, bytes]:
    """Every stage, then every variant, by its name. Raises StackError as `rebuild` does."""
    return rebuild(load(root) + load_variants(root), root, edited)


def merge(base: bytes, ours: bytes, theirs: bytes, name: str, join: bool = False,
          words: bool = False) -> bytes:
    """`ours`, the script `name`, with what changed from `base` to `theirs`. Raises Conflict.

    With `join`, where both change the imports or the fields of Config at one place, the lines of
    both are taken, since their order doesn't matter there; no field may come twice. With `words`,
    where both change a line, words of it that only one changes are merged.
    """
    if base == theirs:
        return ours
    merged = merge_lines(base, ours, theirs)
    while conflict := CONFLICT.search(merged):
        before, after = merged[: conflict.start()], merged[conflict.end() :]
        mine, common, other = (side.splitlines(keepends=True) for side in conflict.groups())
        # What both have kept, and what either has added.
        both = [line for line in other if line in mine or line not in common]
        both += [line for line in mine if line not in other and line not in common]
        fields = re.findall(rb"^    (\w+):", b"".join(both), re.MULTILINE)
        place = (DEFINITION.findall(before) or [b"the imports"])[-1].decode()
        listed = place in ("the imports", "class Config") and len(fields) == len(set(fields))
        by_words = merge_words(*conflict.groups()) if words else None
        if by_words is not None:
            both = [by_words]
        elif mine != other and not (join and listed):
            what, line = "the others" if join else "the edit", before.count(b"\n") + 1
            raise Conflict(f"{name} conflicts with {what} at line {line}, {place};"
                           " nothing is changed", name)
        merged = before + b"".join(both) + after
    return merged


def merge_lines(base: bytes, ours: bytes, theirs: bytes) -> bytes:
    """As git merges them, with its marks of conflicts."""
    with tempfile.TemporaryDirectory() as folder:
        for file, text in (("ours", ours), ("base", base), ("theirs", theirs)):
            Path(folder, file).write_bytes(text)
        command = ["git", "merge-file", "--quiet", "-p", "--diff3", "ours", "base", "theirs"]
        result = subprocess.run(command, cwd=folder, capture_output=True)
    if result.returncode > 127:  # up to 127 it is the number of conflicts
        raise StackError(f"git merge-file: {result.stderr.decode(errors='replace').strip()}")
    return result.stdout


def merge_words(ours: bytes, base: bytes, theirs: bytes) -> bytes | None:
    """The same of words, each of which git sees as a line; None for a conflict."""
    newline = b"\1"  # which no script has
    sides = (b"".join(word.replace(b"\n", newline) + b"\n" for word in WORD.findall(side))
             for side in (base, ours, theirs))
    merged = merge_lines(*sides)
    return None if CONFLICT.search(merged) else merged.replace(b"\n", b"").replace(newline, b"\n")


def compose(names: list[str], base: str | None = None, root: Path = ROOT) -> bytes:
    """01 or 02, the script `base`, with variants. Raises StackError, Conflict for two that meet."""
    variants = {patch.name: patch for patch in load_variants(root) if patch.name in names}
    for name in names:
        if name not in variants:
            raise StackError(
                f"no variant {name!r}; `python patches/stack.py list` shows their names")
    for one, other in permutations(variants.values(), 2):
        excluded = one.fields.get("Excludes", "").split(", ")
        if other.name in excluded or one.fields.get("Group", one.name) == other.fields.get("Group"):
            raise StackError(f"{one.name} and {other.name} exclude each other")
    base = base or max(file_of(variant.base) for variant in variants.values())
    scripts, text = rebuild_all(root), read(root / base)
    for name, variant in variants.items():
        if file_of(variant.base) == DDP != base:
            raise StackError(f"{name} is a variant of {DDP}: --base 02")
        before = scripts[find(variant.base, scripts)]
        text = merge(before, scripts[name], text, name, join=True)
    chosen = ", ".join(variants)
    note = textwrap.fill(f"# {base} with {chosen}; composed by patches/stack.py.", 100,
                         subsequent_indent="# ", break_on_hyphens=False)
    text = f"{note}\n".encode() + text
    try:
        compile(text, "composed", "exec")
    except SyntaxError as error:
        raise Conflict(f"{chosen} don't go together: line {error.lineno}")
    return text


def examples(root: Path) -> dict[Path, bytes]:
    """The composed scripts in docs/, as compose makes them today of what their first comment
    names; others there have no such comment."""
    found = {}
    for path in sorted(root.glob("docs/*.py")):
        first = re.match(rb"(?:# .*\n)*", read(path)).group().decode()
        base, _, names = first.removeprefix("# ").replace("\n# ", " ").partition(" with ")
        if names:
            found[path] = compose(names.partition(";")[0].split(", "), base, root)
    return found


def before_edit(file: Path, root: Path) -> dict[str, bytes]:
    """Every script as before the edit of `file`. Raises StackError if another is edited too."""
    try:
        scripts = rebuild_all(root, edited=file)
        for name, script in scripts.items():
            path = root / WRITTEN / file_of(name)
            if path != file and path.exists() and read(path) != script:
                raise StackError(f"{WRITTEN / path.name} is edited too, or old: `write` it anew")
    except StackError as error:
        raise StackError(f"only {file.name} may be edited, but {error}")
    return scripts


def carry(patches: list, old: dict, new: dict[str, bytes], root: Path) -> dict[Path, bytes]:
    """The files to write if `new` replaces `old`; the other scripts follow their bases."""
    names, files = names_of(patches), {}
    new = {names[0]: old[names[0]]} | new  # a copy, with 00
    for patch in patches:
        file, name, base = patch.file, patch.name, find(patch.base, names)
        if name not in new:
            new[name] = merge(old[base], old[name], new[base], name, words=True)
        files[root / file] = make_patch(file, patch.header, patch.base, new[base], new[name])
    files |= {root / file: new[find(file, names)] for file in (FIRST, LAST, DDP)}
    written = {root / WRITTEN / file_of(name): script for name, script in new.items()}
    return files | {path: script for path, script in written.items() if path.exists()}


def list_command(root: Path) -> list[str]:
    """the techniques in their order, then the variants: what each does to the loss, and its base"""
    row = "{:22}  {:9}  {:20}  {}".format
    return [row("name", "loss", "base", "technique")] + [
        row(patch.name, patch.fields["Loss"].split()[0], patch.base, patch.fields["Technique"])
        for patch in load(root) + load_variants(root)]


def show_command(root: Path, name: str) -> list[str]:
    """one technique or variant: what it is, and the lines it changes"""
    files = {patch.name: patch.file for patch in load(root) + load_variants(root)}
    file = files.get(find(name, [Path(FIRST).stem, *files]))
    if file is None:
        raise StackError(f"{FIRST} is what the patches begin with, no patch")
    return [read(root / file).decode(errors="replace")[:-1]]


def write_command(root: Path, names: list[str]) -> list[str]:
    """the scripts as they stand after the named patches (run them with --data data)"""
    scripts = rebuild_all(root)
    names = [find(name, scripts) for name in names] or list(scripts)
    files = {root / WRITTEN / file_of(name): scripts[name] for name in names}
    write_all(files)
    return [os.path.relpath(path) for path in files]


def verify_command(root: Path) -> list[str]:
    """checks that 00 + series is 01, and + ddp.patch is 02, byte for byte, and every variant"""
    patches, variants = load(root), load_variants(root)
    known = {root / patch.file for patch in patches + variants}
    found = {*root.glob("patches/*.patch"), *root.glob("patches/variants/*")}
    for path in sorted(found - known):
        file = path.relative_to(root).as_posix()
        raise StackError(f"{file} is neither in patches/series nor a variant's patch")
    rebuild(patches + variants, root)
    for path, text in examples(root).items():
        if read(path) != text:
            raise StackError(f"{path.relative_to(root).as_posix()} isn't what `compose` makes now:"
                             f" python patches/stack.py refresh {FIRST}")
    series = f"{FIRST} + {len(patches) - 1} patches = {LAST}, + ddp.patch = {DDP}"
    return [f"ok: {series}; variants that apply: {len(variants)}"]


def refresh_command(root: Path, file: Path, into: str | None, until: list[str]) -> list[str]:
    """carries an edit into all that builds on it: patches, 01, 02, variants, build/stages/"""
    file, patches, variants = file.resolve(), load(root), load_variants(root)
    stages, names = names_of(patches), names_of(patches + variants)
    edited = find(file.name, names)
    old, new = before_edit(file, root), {edited: read(file)}
    if file.name == LAST:  # back through the stages to `into`; all later ones follow below
        if into is None:
            raise StackError(
                "say to which patch this edit belongs (--into NAME), or use `new NAME`")
        first = find(into, names)
        if first not in stages[:-1]:
            raise StackError(f"{first} isn't part of {LAST}: edit {file_of(first)}")
        for i in reversed(range(stages.index(first), stages.index(edited))):
            name, later = stages[i], stages[i + 1]
            new[name] = merge(old[later], old[name], new[later], name, words=True)
    elif into is not None:
        raise StackError(f"--into is for edits of {LAST}; this one belongs to {edited}")
    for name in [find(name, names) for name in until]:
        kept = stages[stages.index(name) :] if name in stages else [name]
        if edited in kept:
            raise StackError(f"--until: {name} doesn't come after {edited}")
        new |= {name: old[name] for name in kept}
    try:
        changed = write_all(carry(patches + variants, old, new, root))
    except Conflict as conflict:
        again = ["refresh", os.path.relpath(file), *(["--into", into] if into else [])]
        for name in [*until, conflict.name]:
            again += ["--until", name]
        script = os.path.relpath(root / WRITTEN / file_of(conflict.name))
        raise StackError(
            f"{conflict}. To go on, type\n  python patches/stack.py {shlex.join(again)}\n"
            f"  python patches/stack.py write {conflict.name}\n"
            f"make the edit in {script} as it has to be there, and type\n"
            f"  python patches/stack.py refresh {script}")
    changed += write_all(examples(root))
    return [os.path.relpath(path) for path in changed] or ["nothing to change"]


def new_command(root: Path, name: str, variant: bool, base: str | None,
                **fields: str | None) -> list[str]:
    """makes what was edited in 01 a patch of its own: at the series' end, or a variant"""
    patches, edited = load(root), DDP if base == "02" else LAST
    group, text = fields["group"], fields.pop("text")
    if variant != bool(group) or base and not variant:
        raise StackError("--group is for a --variant, which needs one, and so is --base")
    if variant:
        file, stage = f"patches/variants/{name}.patch", Path(edited).stem
        measure = f"variants {group}" if base == "02" else f"variants --names {name}"
    else:
        number = len(patches)  # ddp.patch, which isn't a technique, makes room for it
        file, stage = f"patches/{number:02}-{name}.patch", names_of(patches)[-2]
        measure = f"ladder --techniques {number - 1}-{number}"
    if not NAME.fullmatch(name) or (root / file).exists():
        raise StackError(f"{name!r} is taken, or isn't a name like sgd or adamw-8bit")
    old, new = before_edit(root / edited, root), read(root / edited)

    fields["base"] = stage
    wrap = partial(textwrap.fill, width=100, break_long_words=False, break_on_hyphens=False)
    header = [wrap(f"{field}: {fields[field.lower()]}", subsequent_indent="  ")
              for field in FIELDS if fields[field.lower()]]
    head = "\n".join([*header, "", wrap(text), "", ""]).encode()
    before = old[find(stage, old)]
    files = {root / file: make_patch(file, head, stage, before, new)}
    # Insert it as a patch that changes nothing yet; then its edit is carried like any other.
    patch = Patch(file, files[root / file], stage)
    patches.insert(len(patches) if variant else -1, patch)
    old[patch.name] = before
    files |= carry(patches + load_variants(root), old, {patch.name: new}, root)
    if not variant:
        series = root / "patches/series"
        files[series] = read(series) + f"{patch.name}.patch\n".encode()
    written = [os.path.relpath(path) for path in write_all(files)]
    is_measured = base != "02" or group in OF_02
    return [*written, "next:", "  python patches/stack.py verify",
            *([f"  python measure.py {measure}"] if is_measured else [])]


def compose_command(root: Path, names: list[str], base: str | None, out: Path) -> list[str]:
    """a script of your own: 01 or 02 with the named variants, in one file that needs no other"""
    text = compose(names, {"01": LAST, "02": DDP}.get(base), root)
    if os.path.lexists(out):
        raise StackError(f"{out} exists: nothing is overwritten")
    written = [os.path.relpath(path) for path in write_all({out: text})]
    known = OPTION.findall(read(root / LAST) + read(root / DDP))
    added = [f"--{option.decode().replace('_', '-')}" for option in OPTION.findall(text)
             if option not in known]
    return written + [f"its variants add {', '.join(added)} (see --help)"] if added else written


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    title = (__doc__ or "").partition("\n")[0]  # `python -OO` keeps none
    parser = argparse.ArgumentParser(description=title, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(function):
        name, text = function.__name__.removesuffix("_command"), function.__doc__ or ""
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.set_defaults(command=function)
        return sub.add_argument

    command(list_command)
    name = 'a patch by its number ("5") or name ("05-bfloat16"), "ddp", or a variant'
    command(show_command)("name", metavar="NAME", help=name)
    command(write_command)("names", metavar="NAME", nargs="*", help=f"{name} (default: all)")
    command(verify_command)
    argument = command(refresh_command)
    argument("file", metavar="FILE", type=Path, help=f"{FIRST}, 01, 02, or one of {WRITTEN}")
    argument("--into", metavar="NAME", help="the patch that an edit of 01 belongs to; 0 for 00")
    argument("--until", metavar="NAME", action="append", default=[],
             help="where the edit ends if it would conflict: this stage and those after it, or this"
                  " variant, keep their scripts (may be given several times)")
    argument = command(compose_command)
    argument("names", metavar="NAME", nargs="+", help="a variant")
    argument("--base", choices=("01", "02"),
             help="the script to change (default: 01, or 02 if a variant is one of it)")
    argument("--out", metavar="FILE", type=Path, required=True, help="the script to write")
    argument = command(new_command)
    argument("name", metavar="NAME", help="its name, without a number")
    for field, (_, meaning) in FIELDS.items():
        if field != "Base":
            argument(f"--{field.lower()}", metavar="TEXT", help=meaning,
                     required=field not in OPTIONAL)
    argument("--text", metavar="TEXT", required=True,
             help="what it does, why it is faster or smaller, and when it isn't")
    argument("--variant", action="store_true", help="make it a variant, and undo the edit")
    argument("--base", choices=("01", "02"), help="the edited script of a variant (default: 01)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    sys.stdout = sys.stdout or open(os.devnull, "w")  # it may be closed
    sys.stdout.reconfigure(errors="replace")  # a script may hold what a terminal can't show
    arguments = vars(parse_arguments(argv))
    command = arguments.pop("command")
    try:
        print("\n".join(command(root, **arguments)), flush=True)
    except BrokenPipeError:  # into `head`, say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (StackError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
