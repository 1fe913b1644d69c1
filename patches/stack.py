"""The speed techniques between the scripts, one patch each: read, apply, verify and refresh them.

    python patches/stack.py list                 # the techniques in their order, and the variants
    python patches/stack.py show 5               # one of them: why, and the lines it changes
    python patches/stack.py write                # the script after each patch -> build/stages/
    python patches/stack.py verify               # 00 + series = 01, + ddp.patch = 02, byte for byte
    python patches/stack.py refresh 00_orig.py   # carry an edit into everything that builds on it
    python patches/stack.py new NAME ...         # make an edit of 01 a technique, or a variant
    python patches/stack.py compose NAME... --out FILE    # 01 or 02 with variants of your choice

A stage is a script as it stands after a patch: stage 0 is 00_orig.py, the stage after the last
patch of patches/series is 01_opt_single_gpu.py, and after ddp.patch comes 02_opt_multi_gpu_ddp.py.
A variant, patches/variants/NAME.patch, is an alternative to 01 or 02; nothing builds on it.

Edit scripts, never patches: 00, 01 or 02 in place, or a stage or variant in build/stages/, where
`write` puts them. Then `refresh FILE` merges the edit into every script that builds on that file
and rewrites the patches; a conflict, or a second edited file, stops it with nothing changed.
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
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIRST, LAST, DDP = "00_orig.py", "01_opt_single_gpu.py", "02_opt_multi_gpu_ddp.py"
WRITTEN = Path("build", "stages")  # where `write` puts scripts
PUBLISHED = r"(\d{1,3}(?:,\d{3})*) tok/sec, (\d+\.\d+) GB(?: on (\d+) GPUs)?"
FIELDS = {  # of a patch's header: the form of each, and what it says
    "Technique": (r".+", "the technique in a few words"),
    "Base": (r".+", "the name of the stage before it"),
    "Loss": (r"unchanged|rounding \(.+\)|changes because .+",
             "`unchanged` (in exact arithmetic), `rounding (...)`, or `changes because ...`"),
    "Hardware": (r".+", "where it helps"),
    "Source": (r".+", "where it is described"),
    "Published": (PUBLISHED, "the published figures (optional), `27,648 tok/sec, 26.2422 GB`, or"
                  " with ` on 4 GPUs` behind it"),
    "Slot": (r"[a-z]+", "for a variant that is measured: what it is a choice of; its name begins"
             " with it"),
    "Excludes": (r"[a-z0-9-]+(?:, [a-z0-9-]+)*",
                 "variants of other slots that a variant can't work with"),
    "Needs": (r"(?:package [\w-]+|an NVIDIA GPU)(?:, (?:package [\w-]+|an NVIDIA GPU))*",
              "what a variant can't do without: `package NAME`, `an NVIDIA GPU`"),
    "Measure": (r".+", "the options to measure a variant with, ` | ` between one row's and the"
                " next; what only one row needs stands behind it, `[an NVIDIA GPU]`"),
}
OPTIONAL = ("Published", "Slot", "Excludes", "Needs", "Measure")
NAME = re.compile(r"(?!ddp$)[a-z][a-z0-9]*(-[a-z0-9]+)*")  # what a user may call a patch
HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(?: .*)?\n")
CONFLICT = re.compile(  # in git merge-file --diff3: ours, what both come from, theirs
    rb"<<<<<<< ours\n(.*?)\|\|\|\|\|\|\| base\n(.*?)=======\n(.*?)>>>>>>> theirs\n", re.DOTALL
)
DEFINITION = re.compile(rb"^(?:(?:class|def) \w+|\w+ = {$)", re.MULTILINE)


class StackError(Exception):
    """What is wrong, in one line for the user."""


class Conflict(StackError):
    """Two changes of the same lines."""


def read(path: Path) -> bytes:
    """A text file's bytes. Raises StackError for line ends other than \\n, else OSError."""
    text = path.read_bytes()
    if not text.endswith(b"\n") or b"\r" in text:
        raise StackError(f"{path}: every line has to end with \\n, without \\r")
    return text


def write_all(files: dict[Path, bytes]) -> list[Path]:
    """Writes all files or none; returns those that changed."""
    changed = [p for p, text in files.items() if not p.exists() or p.read_bytes() != text]
    temporary = {path: path.with_name(f"{path.name}.{os.getpid()}.tmp") for path in changed}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:  # write them beside their places, and rename only when all are complete
        for path, copy in temporary.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(files[path])
            if path.exists():
                shutil.copymode(path, copy)
        for number in handlers:  # an interrupt between two renames would leave a broken stack
            signal.signal(number, signal.SIG_IGN)
        for path, copy in temporary.items():
            copy.replace(path)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for copy in temporary.values():
            copy.unlink(missing_ok=True)
    return changed


# ---- A patch -----------------------------------------------------------------------------------

# The lines `old`, which come after `old_start` lines, become `new`, after `new_start` lines.
Hunk = namedtuple("Hunk", "old_start old new_start new")
Published = namedtuple("Published", "tok_per_sec reserved_gb gpus")


@dataclass
class Patch:
    """One technique: its header explains it, its hunks lead from the script `base` to `name`."""

    file: str  # as seen from the root: "patches/05-bfloat16.patch"
    name: str
    base: str
    fields: dict[str, str]
    published: Published | None
    header: bytes  # fields and prose: all of the file before the diff
    hunks: list[Hunk]

    @property
    def option_sets(self) -> list[tuple[list[str], str]]:
        """(the options, what they need) of each row that a variant has in its plan."""
        rows = []
        for part in self.fields.get("Measure", "").split("|"):
            options, _, needs = part.strip().removesuffix("]").partition("[")
            rows.append((shlex.split(options), needs or self.fields.get("Needs", "")))
        return rows

    def apply(self, text: bytes, reverse: bool = False) -> bytes:
        """`name` from `base`, or the reverse. Raises StackError unless every hunk fits exactly."""
        source, result, position = text.splitlines(keepends=True), [], 0
        for number, hunk in enumerate(self.hunks, 1):
            start, removed, new_start, added = hunk[2:] + hunk[:2] if reverse else hunk
            result += source[position:start]
            end = start + len(removed)
            if start < position or source[start:end] != removed or len(result) != new_start:
                script = file_of(self.name if reverse else self.base)
                reason = f"hunk {number} doesn't match {script} at line {start + 1}"
                raise patch_error(self.file, f"{reason} (edited? `refresh`)")
            result += added
            position = end
        return b"".join(result + source[position:])


def patch_error(file: str, reason: str) -> StackError:
    return StackError(f"{file}: {reason}")


def file_of(name: str) -> str:
    """The file name of a stage's or variant's script; 02 is the stage after ddp.patch."""
    if name == "ddp":
        return DDP
    # No plain name for a variant: Python would import a script profile.py as its module `profile`.
    return f"{name}.py" if name[0].isdigit() else f"variant-{name}.py"


def parse(file: str, data: bytes, *bases: str) -> Patch:
    """A patch from its file's content. Raises StackError for a bad one, or one on another base."""
    start = data.find(b"\n--- ") + 1 or len(data)
    header, diff = data[:start], data[start:]
    fields, name = parse_header(file, header), Path(file).stem
    base, published = fields["Base"], re.fullmatch(PUBLISHED, fields.get("Published", ""))
    if base not in bases:
        raise patch_error(file, f"its Base: has to be {' or '.join(bases)}")
    if published:
        speed, memory, gpus = published.groups("1")
        published = Published(float(speed.replace(",", "")), float(memory), int(gpus))
    scripts = f"--- a/{file_of(base)}\n+++ b/{file_of(name)}\n"
    if not diff.startswith(scripts.encode()):
        raise patch_error(file, f"its diff has to begin with {' and '.join(scripts.splitlines())}")
    hunks = parse_hunks(file, diff[len(scripts) :])
    return Patch(file, name, base, fields, published, header, hunks)


def parse_header(file: str, header: bytes) -> dict[str, str]:
    message = email.message_from_string(header.decode(errors="replace"))
    fields = {field: " ".join(text.split()) for field, text in message.items()}
    for field in fields.keys() - FIELDS.keys():
        raise patch_error(file, f"its header has an unknown field {field}:")
    for field, (form, meaning) in FIELDS.items():
        optional = field in OPTIONAL and field not in fields
        if not optional and not re.fullmatch(form, fields.get(field, "")):
            raise patch_error(file, f"its header needs {field}: {meaning}")
    prose = message.get_payload()
    if not prose.strip() or not prose.endswith("\n\n"):
        raise patch_error(file, "prose and a blank line have to precede its diff")
    return fields


def parse_hunks(file: str, diff: bytes) -> list[Hunk]:
    hunks = []
    for number, text in enumerate(re.split(rb"(?<=\n)(?=@@)", diff), 1):
        match = HUNK.match(text)
        if not match:
            raise patch_error(file, f"hunk {number} has no @@ -line,count +line,count @@")
        old_line, old_count, new_line, new_count = (int(n) for n in match.groups("1"))
        lines = text[match.end() :].splitlines(keepends=True)
        old = [line[1:] for line in lines if line[:1] in b" -"]
        new = [line[1:] for line in lines if line[:1] in b" +"]
        unknown = any(line[:1] not in b" -+" for line in lines)
        if unknown or (len(old), len(new)) != (old_count, new_count):
            raise patch_error(file, f"hunk {number} doesn't have the lines that its @@ announces")
        # Lines are counted from 1, but for an empty side a diff gives the line before it.
        hunks.append(Hunk(old_line - (old_count > 0), old, new_line - (new_count > 0), new))
    return hunks


def make_patch(file: str, header: bytes, before: bytes, after: bytes) -> bytes:
    """A patch file's content. Raises StackError for a bad header, or if there is no difference."""
    base, name = parse_header(file, header)["Base"], Path(file).stem
    names = f"a/{file_of(base)}".encode(), f"b/{file_of(name)}".encode()
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    diff = list(difflib.diff_bytes(difflib.unified_diff, old, new, *names, lineterm=b"\n"))
    if not diff:
        raise StackError(f"nothing would be left of {name}: its script would be the same as {base}")
    for i, line in enumerate(diff):
        if match := HUNK.fullmatch(line):  # name the class or function it is in, as git does
            above = DEFINITION.findall(b"".join(old[: int(match[1]) + 2]))
            diff[i] = b" ".join([line[:-1], *above[-1:]]) + b"\n"
    data = header + b"".join(diff)
    if parse(file, data, base).apply(before) != after:
        raise patch_error(file, f"the diff would not lead from {base} to {name}")
    return data


# ---- The stack ---------------------------------------------------------------------------------

def load(root: Path = ROOT) -> list[Patch]:
    """The patches of the series in their order, then ddp.patch. Raises StackError for a bad one."""
    patches, base = [], Path(FIRST).stem
    series = read(root / "patches/series").decode(errors="replace").splitlines()
    for number, line in enumerate(series, 1):
        if not re.fullmatch(rf"{number:02}-[a-z0-9-]+\.patch", line):
            raise StackError(f"patches/series, line {number}: expected {number:02}-NAME.patch")
        patches.append(parse(f"patches/{line}", read(root / "patches" / line), base))
        base = patches[-1].name
    ddp = parse("patches/ddp.patch", read(root / "patches/ddp.patch"), Path(LAST).stem)
    return [*patches, ddp]


def load_variants(root: Path = ROOT) -> list[Patch]:
    """The variants, sorted by name. Raises StackError for a bad one."""
    variants = []
    for path in sorted(root.glob("patches/variants/*.patch")):
        file = path.relative_to(root).as_posix()
        if not NAME.fullmatch(path.stem):
            raise patch_error(file, "a variant has a name like sgd or adamw-8bit")
        variant = parse(file, read(path), Path(LAST).stem, Path(DDP).stem)
        if not variant.name.startswith(variant.fields.get("Slot", "")):
            raise patch_error(file, "a variant's name has to begin with its Slot:")
        try:
            variant.option_sets  # noqa: B018
        except ValueError as error:  # of shlex
            raise patch_error(file, f"its Measure: can't be read: {error}")
        variants.append(variant)
    return variants


def names_of(patches: list[Patch]) -> list[str]:
    """The stages' names in their order: "00_orig", "01-causal-mask" and so on, "ddp"."""
    return [Path(FIRST).stem, *(patch.name for patch in patches)]


def find(name: str, names: list[str]) -> str:
    """The one of `names` that is meant by "5", "05-bfloat16", "ddp" or a variant's name.

    "01_opt_single_gpu" is the stage before ddp.patch, "02_opt_multi_gpu_ddp" the one after it.
    """
    last = names.index("ddp") - 1
    if name.isdecimal() and int(name) <= last:
        return names[int(name)]
    name = {Path(LAST).stem: names[last], Path(DDP).stem: "ddp"}.get(name, name)
    name = name.removeprefix("variant-")  # as its script is called
    if name not in names:
        raise StackError(f"no patch {name!r}; `list` shows their names")
    return name


def rebuild(patches: list[Patch], root: Path = ROOT, edited: str | None = None) -> list[bytes]:
    """Every stage, from 00 to 02, as it was before the script `edited` was edited.

    Raises StackError if a patch doesn't match, or another one of 00, 01 and 02 isn't its stage.
    """
    first = read(root / FIRST)
    if edited == FIRST:  # what it was before comes from 01, backwards
        first = read(root / LAST)
        for patch in reversed(patches[:-1]):
            first = patch.apply(first, reverse=True)
    stages = [first]
    for patch in patches:
        stages.append(patch.apply(stages[-1]))
    for file, stage in zip((FIRST, LAST, DDP), (first, *stages[-2:]), strict=True):
        if file != edited and (found := read(root / file)) != stage:
            line = os.path.commonprefix([found, stage]).count(b"\n") + 1
            raise StackError(f"{file}, line {line}: not what the patches make (edited? `refresh`)")
    return stages


def rebuild_all(root: Path = ROOT, edited: str | None = None) -> dict[str, bytes]:
    """Every stage, then every variant, by its name. Raises StackError as `rebuild` does."""
    patches = load(root)
    names = names_of(patches)
    scripts = dict(zip(names, rebuild(patches, root, edited), strict=True))
    for variant in load_variants(root):
        scripts[variant.name] = variant.apply(scripts[find(variant.base, names)])
    return scripts


def script_of(name: str, root: Path = ROOT) -> bytes:
    """The script of a stage or variant, by any name that `find` knows."""
    scripts = rebuild_all(root)
    return scripts[find(name, list(scripts))]


def merge(base: bytes, ours: bytes, theirs: bytes, name: str) -> bytes:
    """`ours`, the script `name`, with what changed from `base` to `theirs`. Raises Conflict."""
    if base == theirs:
        return ours
    merged = merge_file(base, ours, theirs)
    before, conflict, _ = merged.partition(b"<<<<<<< ours\n")
    if conflict:
        line = before.count(b"\n") + 1
        raise Conflict(f"{name}, line {line}: it conflicts with the edit; nothing is changed")
    return merged


def merge_file(base: bytes, ours: bytes, theirs: bytes, *options: str) -> bytes:
    """What git merge-file makes, with its marks where there are conflicts. Raises StackError."""
    with tempfile.TemporaryDirectory() as folder:
        for file, text in (("ours", ours), ("base", base), ("theirs", theirs)):
            Path(folder, file).write_bytes(text)
        command = ["git", "merge-file", "--quiet", "-p", *options, "ours", "base", "theirs"]
        result = subprocess.run(command, cwd=folder, capture_output=True)
    if result.returncode > 127:  # up to 127 it is the number of conflicts
        raise StackError(f"git merge-file: {result.stderr.decode(errors='replace').strip()}")
    return result.stdout


def compose(names: list[str], base: str | None = None, root: Path = ROOT) -> bytes:
    """01 or 02, the script `base`, with variants. Raises StackError, Conflict for two that meet."""
    known = {variant.name: variant for variant in load_variants(root)}
    for name in names:
        if name not in known:
            raise StackError(f"no variant {name!r}; `list` shows their names")
    variants = [known[name] for name in sorted(set(names))]
    base = base or max(f"{variant.base}.py" for variant in variants)
    scripts, text, slots = rebuild_all(root), read(root / base), {}
    for variant in variants:
        if (slot := variant.fields.get("Slot", variant.name)) in slots:
            raise StackError(f"{slots[slot]} and {variant.name} exclude each other")
        if variant.base == Path(DDP).stem != Path(base).stem:
            raise StackError(f"{variant.name} is a variant of {DDP}: --base 02")
        for other in variant.fields.get("Excludes", "").split(", "):
            if other in names:
                raise StackError(f"{variant.name} and {other} exclude each other")
        slots[slot] = variant.name
        before = scripts[find(variant.base, list(scripts))]
        text = merge_joining(before, text, scripts[variant.name], variant.name)
    note = f"# {base} with {', '.join(slots.values())}; composed by patches/stack.py.\n"
    text = note.encode() + text
    try:
        compile(text, "composed", "exec")
    except SyntaxError as error:
        raise Conflict(f"{', '.join(slots.values())} don't go together: line {error.lineno}")
    return text


def merge_joining(base: bytes, ours: bytes, theirs: bytes, name: str) -> bytes:
    """As merge, but where both sides change the imports or the fields of Config at one place, the
    lines of both are taken, since their order doesn't matter there; no field may come twice."""
    result = merge_file(base, ours, theirs, "--diff3")
    *pieces, rest = re.split(CONFLICT, result)
    merged = b""
    for before, mine, common, other in zip(*[iter(pieces)] * 4, strict=True):
        merged += before
        place = (DEFINITION.findall(merged) or [b"the imports"])[-1]
        lines = join_lines(*(part.splitlines(keepends=True) for part in (mine, common, other)))
        fields = re.findall(rb"^    (\w+):", b"".join(lines), re.MULTILINE)
        if place not in (b"the imports", b"class Config") or len(fields) > len(set(fields)):
            line = merged.count(b"\n") + 1
            raise Conflict(f"{name} conflicts with the others at line {line}, {place.decode()}")
        merged += b"".join(lines)
    return merged + rest


def join_lines(mine: list[bytes], common: list[bytes], other: list[bytes]) -> list[bytes]:
    """The lines that both have kept, and those that either has added."""
    return [line for line in mine if line in other or line not in common] + [
        line for line in other if line not in mine and line not in common]


def before_edit(file: Path, root: Path) -> dict[str, bytes]:
    """Every script as before the edit of `file`. Raises StackError if another is edited too."""
    try:
        scripts = rebuild_all(root, edited=file.name if file.parent == root else None)
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
        name, base = patch.name, find(patch.base, names)
        if name not in new:
            new[name] = merge(old[base], old[name], new[base], name)
        if (old[base], old[name]) != (new[base], new[name]):
            files[root / patch.file] = make_patch(patch.file, patch.header, new[base], new[name])
    files |= {root / file: new[find(Path(file).stem, names)] for file in (FIRST, LAST, DDP)}
    written = {root / WRITTEN / file_of(name): script for name, script in new.items()}
    return files | {path: script for path, script in written.items() if path.exists()}


# ---- The commands ------------------------------------------------------------------------------

def list_command(args) -> list[str]:
    """the techniques in their order, then the variants: what each does to the loss, and its base"""
    row = "{:22}  {:9}  {:20}  {}".format
    return [row("name", "loss", "base", "technique")] + [
        row(patch.name, patch.fields["Loss"].split()[0], patch.base, patch.fields["Technique"])
        for patch in load(args.root) + load_variants(args.root)
    ]


def show_command(args) -> list[str]:
    """one technique or variant: what it is, and the lines it changes"""
    patches = load(args.root) + load_variants(args.root)
    number = names_of(patches).index(find(args.name, names_of(patches)))
    if number == 0:
        raise StackError(f"{FIRST} is what the patches begin with, no patch")
    return [read(args.root / patches[number - 1].file).decode(errors="replace")[:-1]]


def write_command(args) -> list[str]:
    """the scripts as they stand after the named patches (run them with --data data)"""
    scripts = rebuild_all(args.root)
    names = [find(name, list(scripts)) for name in args.name] or scripts
    files = {args.root / WRITTEN / file_of(name): scripts[name] for name in names}
    write_all(files)
    return [os.path.relpath(path) for path in files]


def verify_command(args) -> list[str]:
    """checks that 00 + series is 01, and + ddp.patch is 02, byte for byte, and every variant"""
    root, patches, variants = args.root, load(args.root), load_variants(args.root)
    known = {patch.file for patch in patches + variants}
    found = [*root.glob("patches/*.patch"), *root.glob("patches/variants/*")]
    for file in sorted({path.relative_to(root).as_posix() for path in found} - known):
        raise StackError(f"{file} is neither in patches/series nor a variant's patch")
    rebuild_all(root)
    series = f"{FIRST} + {len(patches) - 1} patches = {LAST}, + ddp.patch = {DDP}"
    return [f"ok: {series}; variants that apply: {len(variants)}"]


def refresh_command(args) -> list[str]:
    """carries an edit into all that builds on it: patches, 01, 02, variants, build/stages/"""
    root, file, into = args.root, args.file.resolve(), args.into
    patches, variants = load(root), load_variants(root)
    stages, names = names_of(patches), names_of(patches + variants)
    edited = find(file.name.removesuffix(".py"), names)
    old, new = before_edit(file, root), {edited: read(file)}
    if file.name == LAST and into is None:
        raise StackError("say to which patch this edit belongs (--into NAME), or use `new NAME`")
    if file.name != LAST and into is not None:
        raise StackError(f"--into is for edits of {LAST}; this one belongs to {edited}")
    if into is not None:  # back through the stages to that one; all later ones follow below
        first = find(into, names)
        if first not in stages[:-1]:
            raise StackError(f"{first} isn't part of {LAST}: edit {file_of(first)}")
        for i in reversed(range(stages.index(first), stages.index(edited))):
            name, later = stages[i], stages[i + 1]
            new[name] = merge(old[later], old[name], new[later], name)
    for name in [find(name, names) for name in args.until]:
        kept = stages[stages.index(name) :] if name in stages else [name]
        if edited in kept:
            raise StackError(f"--until: {name} doesn't come after {edited}")
        new |= {name: old[name] for name in kept}
    changed = write_all(carry(patches + variants, old, new, root))
    return [os.path.relpath(path) for path in changed] or ["nothing to change"]


def new_command(args) -> list[str]:
    """makes what was edited in 01 a patch of its own: at the series' end, or a variant"""
    root, name, edited = args.root, args.name, DDP if args.base == "02" else LAST
    patches, variants = load(root), load_variants(root)
    file, base = f"patches/{len(patches):02}-{name}.patch", names_of(patches)[-2]
    if args.variant:
        file, base = f"patches/variants/{name}.patch", Path(edited).stem
    elif args.base:
        raise StackError("--base is for a --variant; other patches go to the end of the series")
    if not NAME.fullmatch(name) or (root / file).exists():
        raise StackError(f"{name!r} is taken, or isn't a name like sgd or adamw-8bit")
    old, text = before_edit(root / edited, root), read(root / edited)
    before = old[find(base, list(old))]

    fields = {field: getattr(args, field.lower()) for field in FIELDS} | {"Base": base}
    wrap = partial(textwrap.fill, width=100, break_long_words=False, break_on_hyphens=False)
    header = [wrap(f"{field}: {value}", subsequent_indent="  ")
              for field, value in fields.items() if value]
    header = "\n".join([*header, "", wrap(args.text), "", ""]).encode()
    files = {root / file: make_patch(file, header, before, text)}
    if args.variant:
        files[root / edited] = before
    else:  # insert it as a patch that changes nothing yet; then its edit is carried like any other
        patch, series = parse(file, files[root / file], base), root / "patches" / "series"
        patches.insert(-1, patch)
        old[patch.name] = before
        files |= carry(patches + variants, old, {patch.name: text}, root)
        files[series] = read(series) + f"{patch.name}.patch\n".encode()
    return [os.path.relpath(path) for path in write_all(files)]


def compose_command(args) -> list[str]:
    """a script of your own: 01 or 02 with the named variants, in one file that needs no other"""
    if os.path.lexists(args.out):
        raise StackError(f"{args.out} exists: nothing is overwritten")
    text = compose(args.name, {"01": LAST, "02": DDP}.get(args.base), args.root)
    return [os.path.relpath(path) for path in write_all({args.out: text})]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(function):
        name, text = function.__name__.removesuffix("_command"), function.__doc__
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.set_defaults(function=function)
        return sub.add_argument

    command(list_command)
    name = 'a patch by its number ("5") or name ("05-bfloat16"), "ddp", or a variant'
    command(show_command)("name", metavar="NAME", help=name)
    command(write_command)("name", metavar="NAME", nargs="*", help=f"{name} (default: all)")
    command(verify_command)
    argument = command(refresh_command)
    argument("file", metavar="FILE", type=Path, help=f"{FIRST}, 01, 02, or one of {WRITTEN}")
    argument("--into", metavar="NAME", help="the patch that an edit of 01 belongs to; 0 for 00")
    argument("--until", metavar="NAME", action="append", default=[],
             help="where the edit ends if it would conflict: this stage and those after it, or this"
                  " variant, keep their scripts (may be given several times)")
    argument = command(compose_command)
    argument("name", metavar="NAME", nargs="+", help="a variant")
    argument("--base", choices=("01", "02"),
             help="the script to change (default: 01, or 02 if a variant is one of it)")
    argument("--out", metavar="FILE", type=Path, required=True, help="the script to write")
    argument = command(new_command)
    argument("name", metavar="NAME", help="its name, without a number")
    for field, (_, meaning) in FIELDS.items():
        if field != "Base":
            required = field not in OPTIONAL
            argument(f"--{field.lower()}", metavar="TEXT", required=required, help=meaning)
    argument("--text", metavar="TEXT", required=True, help="what, why, and when it doesn't help")
    argument("--variant", action="store_true", help="make it a variant, and undo the edit")
    argument("--base", choices=("01", "02"), help="the edited script of a variant (default: 01)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    sys.stdout.reconfigure(errors="replace")  # a script may hold what a terminal can't show
    args = parse_arguments(argv)
    args.root = root
    try:
        print("\n".join(args.function(args)), flush=True)
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
