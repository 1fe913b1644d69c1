"""Show, apply, verify and refresh the patches that lead from script to script.

00_orig.py with all patches of patches/series is 01_opt_single_gpu.py, and with ddp.patch after them
02_opt_multi_gpu_ddp.py. A variant, patches/variants/NAME.patch, changes 01 or 02; nothing builds on
it. Each patch names the script that it applies to, so that `git apply` takes it, too.

Edit scripts, never patches: 00, 01 or 02 in place, or another one in build/stages/, where `write`
puts them. Then `refresh FILE` merges the edit into every script that builds on that file, even into
lines that a patch changes in other words, and rewrites the patches. A conflict or a second edited
file stops it with nothing changed.
"""

import argparse
import ast
import difflib
import email
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from itertools import pairwise, permutations
from pathlib import Path
from typing import NamedTuple

if sys.version_info < (3, 11):  # noqa: UP036 (told here, before a line that needs it)
    sys.exit(f"error: needs Python 3.11 or newer; this is {platform.python_version()}")

ROOT = Path(__file__).resolve().parent.parent
FIRST, LAST, DDP = "00_orig.py", "01_opt_single_gpu.py", "02_opt_multi_gpu_ddp.py"
NO_READER = 128 + 13  # as a shell names the end by SIGPIPE, 13, of a program that it has started
WRITTEN = Path("build", "stages")  # where `write` puts scripts
PUBLISHED = r"(\d{1,3}(?:,\d{3})*) tok/sec, (\d+\.\d+) GB(?: on (\d+) GPUs)?"
NEED = r"(?:package [\w-]+|an NVIDIA GPU|compute capability \d+\.\d|bfloat16 units)"
FIELDS = {  # of a patch's header: the form of each, and what it says
    "Technique": (r".+", "the technique in a few words"),
    "Base": (r".+", "the script that it changes"),
    "Loss": (
        r"unchanged|rounding \(.+\)|changes because .+",
        "`unchanged` (in exact arithmetic), `rounding (...)`, or `changes because ...`",
    ),
    "Hardware": (r".+", "where it helps"),
    "Source": (r".+", "where it is described"),
    "Use": (r".+", "when to use it"),
    "Limits": (r".+", "where it gains nothing, what it costs, or what isn't checked"),
    "Compiled": (
        r"(?:yes|little|no|not measured|part of it)\b.*",
        "whether it still gains in a compiled bfloat16 script: `yes`, `little`, `no`,"
        " `not measured`, or `part of it`, and why",
    ),
    "Code": (r".+", "what to write into another script"),
    "Published": (PUBLISHED, "the published figures: `27,648 tok/sec, 26.2422 GB[ on 4 GPUs]`"),
    "Group": (r"[a-z]+(?:-[a-z]+)*", "the first words of a variant's name; no two go together"),
    "Excludes": (r"[a-z0-9-]+(?:, [a-z0-9-]+)*", "variants of other groups that it excludes"),
    "Needs": (
        rf"{NEED}(?:, {NEED})*",
        "what a variant can't do without: `package NAME`, `an NVIDIA"
        " GPU`, `compute capability 8.9`, `bfloat16 units`",
    ),
    "Unchecked": (
        r"(?:dropout|all), because .+",
        "why its gradients, or those with dropout, can't be compared to others",
    ),
    "Measure": (
        r".+",
        "the options to measure a variant with, ` | ` between runs, behind each what"
        " it alone needs, `[an NVIDIA GPU]`",
    ),
}
REQUIRED = ("Technique", "Base", "Loss", "Hardware", "Source")
NAME = re.compile(r"(?!ddp$)[a-z][a-z0-9]*(-[a-z0-9]+)*")  # what a user may call a patch
HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(?: .*)?\n")
CONFLICT = re.compile(  # as git merge-file --diff3 marks it: ours, the base, theirs
    rb"^<{7} ours\n(.*?)^\|{7} base\n(.*?)^={7}\n(.*?)^>{7} theirs\n", re.DOTALL | re.MULTILINE
)
DEFINITION = re.compile(rb"^(?:(?:class|def) \w+|\w+ = {$)", re.MULTILINE)
WORD = re.compile(rb"\w+|\s|[^\w\s]")
OPTION = re.compile(rb'^    add\("(--[\w-]+)"', re.MULTILINE)  # of a script's command line
SETTING = re.compile(rb'^    (?:\w+: |add\("--[\w-]+")', re.MULTILINE)  # in Config, an option
JOINED = ("the imports", "class Config", "def make_parser", "def set_up_pytorch")


class Published(NamedTuple):
    tok_per_sec: float
    reserved_gb: float
    gpus: int


class StackError(Exception):
    """What is wrong, in one line for the user."""


class Conflict(StackError):
    """Two changes of the same lines; `name` is the script that isn't merged."""

    def __init__(self, text: str, name: str = ""):
        super().__init__(text)
        self.name = name


def read(path: Path) -> bytes:
    """Returns a text file's bytes. Raises OSError, StackError for line ends but \\n."""
    text = path.read_bytes()
    if not text.endswith(b"\n") or b"\r" in text:
        raise StackError(f"{path}: every line has to end with \\n, without \\r")
    return text


def write_all(files: dict[Path, bytes]) -> list[Path]:
    """Writes all files or none; returns those that changed."""
    changed = [
        path for path, text in files.items() if not path.exists() or path.read_bytes() != text
    ]
    temporary = {path: path.with_name(f"{path.name}.{os.getpid()}.tmp") for path in changed}
    try:  # write next to the final names, and rename only when all files are complete
        for path, copy in temporary.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(files[path])
        with interrupts_delayed():  # an interrupt would leave half of the stack
            for path, copy in temporary.items():
                copy.replace(path)
    finally:
        for copy in temporary.values():
            copy.unlink(missing_ok=True)
    return changed


@contextmanager
def interrupts_delayed() -> Iterator[None]:
    """Holds SIGINT and SIGTERM back; one that comes meanwhile is raised at the end.

    gpt_speed.children.signals_held is the same for the start of a child, with a signal mask, which
    Windows lacks. It stands twice since this file runs anywhere, and without that package."""
    received: list[int] = []

    def keep(number: int, frame) -> None:
        received.append(number)

    handlers = {number: signal.signal(number, keep) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if received:
        signal.raise_signal(received[0])


class Hunk(NamedTuple):
    """The lines of the old file from `start` on, counted from 0, and those of the new one, from
    `new_start` on, that take their place."""

    start: int
    removed: list[bytes]
    new_start: int
    added: list[bytes]

    def reversed(self) -> "Hunk":
        return Hunk(self.new_start, self.added, self.start, self.removed)


@dataclass(frozen=True)
class Patch:
    """One technique: its header explains it, its hunks lead from `base` to `name`."""

    file: str  # "patches/05-bfloat16.patch"
    header: bytes  # as it stands in the file: fields and prose
    fields: dict[str, str]
    hunks: list[Hunk]

    @classmethod
    @cache  # the tools read all patches again and again
    def parse(cls, file: str, data: bytes, *bases: str) -> "Patch":
        """Parses `file`. Raises StackError if it is bad or changes none of `bases`."""
        header, newline, diff = data.partition(b"\n--- ")
        if newline:
            header, diff = header + b"\n", b"--- " + diff
        fields = parse_header(file, header)
        base = fields["Base"]
        name = Path(file).stem
        if base not in bases:
            raise StackError(f"{file}: its Base: has to be {' or '.join(bases)}")
        if not f"{name}-".startswith(f"{fields.get('Group', name)}-"):
            raise StackError(f"{file}: a variant's name has to begin with its Group:")
        names = f"--- a/{file_of(base)}\n+++ b/{file_of(base)}\n"
        return cls(file, header, fields, parse_hunks(file, diff.removeprefix(names.encode())))

    @property
    def name(self) -> str:
        return Path(self.file).stem

    @property
    def base(self) -> str:
        """The script that it changes, as its header names it: 01 and 02 by their files."""
        return self.fields["Base"]

    @property
    def published(self) -> Published | None:
        """The published figures of its script."""
        figures = re.fullmatch(PUBLISHED, self.fields.get("Published", ""))
        if not figures:
            return None
        speed, memory, gpus = figures.groups("1")
        return Published(float(speed.replace(",", "")), float(memory), int(gpus))

    @property
    def option_sets(self) -> list[tuple[list[str], str]]:
        """Of each run of a variant its options, and what they need."""
        option_sets = []
        for run in self.fields.get("Measure", "").split("|"):
            options, _, needs = run.strip().removesuffix("]").partition("[")
            if not needs:
                needs = self.fields.get("Needs", "")
            option_sets.append((options.split(), needs))
        return option_sets

    @property
    def prose(self) -> str:
        """The first paragraph behind the header's fields, which says what a reader needs."""
        _, paragraph, *_ = self.header.decode().split("\n\n")
        return " ".join(paragraph.split())

    def excludes(self, other: "Patch") -> bool:
        """Returns whether its header says that a script can't have both."""
        excluded = self.fields.get("Excludes", "").split(", ")
        is_same_group = self.fields.get("Group", self.name) == other.fields.get("Group")
        return other.name in excluded or is_same_group

    def apply(self, text: bytes, reverse: bool = False) -> bytes:
        """Leads from `base` to `name`, or back. Raises StackError if a hunk doesn't fit."""
        script = file_of(self.base)
        hunks = self.hunks
        if reverse:
            script = file_of(self.name)
            hunks = [hunk.reversed() for hunk in self.hunks]
        source = text.splitlines(keepends=True)
        result = []
        position = 0
        for number, (start, removed, new_start, added) in enumerate(hunks, 1):
            result += source[position:start]
            end = start + len(removed)
            if start < position or source[start:end] != removed or len(result) != new_start:
                raise StackError(
                    f"{self.file}: hunk {number} doesn't match {script} at line"
                    f" {start + 1} (edited? `refresh`)"
                )
            result += added
            position = end
        return b"".join(result + source[position:])


def file_of(name: str) -> str:
    """Returns the file name of the script after the patch `name`."""
    if name == "ddp":
        return DDP
    if name[0].isdigit():
        return f"{name}.py"
    return f"variant-{name}.py"  # Python would import a script profile.py as its own `profile`


def parse_header(file: str, header: bytes) -> dict[str, str]:
    """Returns a header's fields. Raises StackError for a bad one, or without prose."""
    message = email.message_from_string(header.decode(errors="replace"))
    fields = {field: " ".join(text.split()) for field, text in message.items()}
    for field in fields:
        if field not in FIELDS:
            raise StackError(f"{file}: its header has {field}:, which is unknown")
        if message.keys().count(field) > 1:
            raise StackError(f"{file}: its header has {field}: twice")
    for field, (form, meaning) in FIELDS.items():
        is_needed = field in REQUIRED or field in fields
        if is_needed and not re.fullmatch(form, fields.get(field, "")):
            raise StackError(f"{file}: its header needs {field}: {meaning}")
    prose = str(message.get_payload())
    if not prose.strip() or not prose.endswith("\n\n"):
        raise StackError(f"{file}: prose and a blank line have to precede its diff")
    return fields


def parse_hunks(file: str, diff: bytes) -> list[Hunk]:
    """Returns a diff's hunks. Raises StackError for a bad one."""
    hunks = re.split(rb"(?<=\n)(?=@@)", diff)
    return [parse_hunk(text, f"{file}: hunk {number}") for number, text in enumerate(hunks, 1)]


def parse_hunk(text: bytes, place: str) -> Hunk:
    """Returns a hunk; `place` says in errors which one it is. Raises StackError."""
    match = HUNK.match(text)
    if not match:
        raise StackError(f"{place} doesn't begin with @@ -1,2 +3,4 @@")
    old_line, old_count, new_line, new_count = (int(number) for number in match.groups("1"))
    lines = text[match.end() :].splitlines(keepends=True)
    old = [line[1:] for line in lines if line[:1] in b" -"]
    new = [line[1:] for line in lines if line[:1] in b" +"]
    unknown = any(line[:1] not in b" -+" for line in lines)
    if unknown or (len(old), len(new)) != (old_count, new_count):
        raise StackError(f"{place} doesn't have the lines that its @@ announces")
    return Hunk(start_of(old_line, old_count), old, start_of(new_line, new_count), new)


def start_of(line: int, count: int) -> int:
    """Returns where `count` lines start, counted from 0: a diff counts from 1, but where there are
    no lines it gives the one before."""
    if count == 0:
        return line
    return line - 1


def make_patch(file: str, header: bytes, base: str, before: bytes, after: bytes) -> bytes:
    """Returns a patch's content. Raises StackError for a bad header or no difference."""
    name = Path(file).stem
    if before == after:
        raise StackError(f"nothing would be left of {name}: its script would be the same as {base}")
    names = f"a/{file_of(base)}".encode(), f"b/{file_of(base)}".encode()
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    data = header
    for line in difflib.diff_bytes(difflib.unified_diff, old, new, *names, lineterm=b"\n"):
        data += with_definition(line, old)
    if Patch.parse(file, data, base).apply(before) != after:
        raise StackError(f"{file}: the diff would not lead from {base} to {name}")
    return data


def with_definition(line: bytes, old: list[bytes]) -> bytes:
    """Returns a line of a diff; the first one of a hunk with the class or function that it is in,
    as git has it."""
    first = HUNK.fullmatch(line)
    if not first:
        return line
    above = DEFINITION.findall(b"".join(old[: int(first[1]) + 2]))
    return b" ".join([line[:-1], *above[-1:]]) + b"\n"


def load(root: Path = ROOT) -> list[Patch]:
    """Reads the series in its order, then ddp.patch. Raises StackError."""
    series = read(root / "patches/series").decode(errors="replace").splitlines()
    for number, line in enumerate(series, 1):
        if not re.fullmatch(rf"{number:02}-[a-z0-9-]+\.patch", line):
            raise StackError(f"patches/series, line {number}: expected {number:02}-NAME.patch")
    files = [*series, "ddp.patch"]
    bases = [FIRST, *series[:-1], LAST]  # with no series ddp.patch changes 00
    return [
        Patch.parse(f"patches/{file}", read(root / "patches" / file), Path(base).stem)
        for file, base in zip(files, bases, strict=False)
    ]


def load_variants(root: Path = ROOT) -> list[Patch]:
    """Reads the variants, sorted by name. Raises StackError."""
    bases = Path(LAST).stem, Path(DDP).stem
    return [
        Patch.parse(path.relative_to(root).as_posix(), read(path), *bases)
        for path in sorted(root.glob("patches/variants/*.patch"))
    ]


@dataclass(frozen=True)
class Series:
    """The names of all scripts in the order of their patches: "00_orig", "01-causal-mask" ...,
    "ddp", then the variants."""

    names: list[str]

    @classmethod
    def of(cls, patches: list[Patch]) -> "Series":
        return cls([Path(FIRST).stem, *(patch.name for patch in patches)])

    @property
    def first(self) -> str:
        return self.names[0]

    @property
    def to_01(self) -> list[str]:
        """The scripts from 00 to 01."""
        return self.names[: self.names.index("ddp")]

    @property
    def last(self) -> str:
        """The last technique, whose script is 01."""
        return self.to_01[-1]

    @property
    def by_file(self) -> dict[str, str]:
        """The names of 00, 01 and 02 by their files."""
        return {FIRST: self.first, LAST: self.last, DDP: "ddp"}

    def base_of(self, patch: Patch) -> str:
        """Returns the script that a patch changes."""
        return self.by_file.get(file_of(patch.base), patch.base)

    def find(self, name: str) -> str:
        """Returns the script that a user means by "5", "05-bfloat16", "ddp", a variant or a file.
        Raises StackError."""
        if name.isdecimal() and int(name) < len(self.to_01):
            return self.to_01[int(name)]
        name = name.removesuffix(".py").removeprefix("variant-")
        name = self.by_file.get(f"{name}.py", name)
        if name not in self.names:
            raise StackError(f"no patch {name!r}; `python patches/stack.py list` shows their names")
        return name


def rebuild_all(root: Path = ROOT) -> dict[str, bytes]:
    """Returns all scripts by name, the variants' last. Raises StackError if a patch doesn't fit, or
    if 00, 01 or 02 is edited."""
    patches = load(root) + load_variants(root)
    try:
        return rebuild(patches, read(root / FIRST), root)
    except StackError:
        if is_first_edited(patches, root):  # the first patch that doesn't fit is right
            raise StackError(
                f"{FIRST} is edited: `python patches/stack.py refresh {FIRST}` carries"
                " that into all other scripts"
            ) from None
        raise


def is_first_edited(patches: list[Patch], root: Path) -> bool:
    """Returns whether all patches fit, but for an edit of 00."""
    try:
        rebuild(patches, first_by_01(patches, root), root, edited=root / FIRST)
    except StackError:
        return False
    return True


def rebuild(
    patches: list[Patch], first: bytes, root: Path, edited: Path | None = None
) -> dict[str, bytes]:
    """Returns all scripts by name, from the text of 00 on. Raises StackError if a patch doesn't
    fit, or if 00, 01 or 02 isn't what they make; the file `edited` may differ."""
    scripts = apply_all(patches, first)
    for file, name in Series(list(scripts)).by_file.items():
        if root / file != edited and read(root / file) != scripts[name]:
            raise StackError(
                f"{file} isn't what the patches make (edited? `refresh` carries the"
                " edit on, `new` makes a patch of it)"
            )
    return scripts


def first_by_01(patches: list[Patch], root: Path) -> bytes:
    """Returns what 00 was before its edit: the text of 01 without the techniques."""
    text = read(root / LAST)
    techniques = Series.of(patches).to_01[1:]
    for patch in reversed(patches[: len(techniques)]):
        text = patch.apply(text, reverse=True)
    return text


def apply_all(patches: list[Patch], first: bytes) -> dict[str, bytes]:
    """Returns the scripts by name, from `first` on: each is its base with its patch."""
    series = Series.of(patches)
    scripts = {series.first: first}
    for patch in patches:
        scripts[patch.name] = patch.apply(scripts[series.base_of(patch)])
    return scripts


def check_python(file: str, text: bytes) -> None:
    """Raises StackError for a text that isn't Python."""
    try:
        compile(text.decode(), file, "exec", dont_inherit=True)
    except SyntaxError as error:
        line = ""
        if error.lineno:
            line = f", line {error.lineno}"
        raise StackError(f"{file} isn't Python{line}: {error.msg}") from None
    except ValueError as error:  # no UTF-8, or a null byte
        raise StackError(f"{file} isn't Python: {error}") from None


class Overlap(NamedTuple):
    """Lines that both sides of a merge change."""

    place: str  # the definition that they are in: "class Config", or "the imports"
    ours: bytes
    base: bytes
    theirs: bytes


def never(overlap: Overlap) -> None:
    """Settles no overlap."""


def merge(
    base: bytes,
    ours: bytes,
    theirs: bytes,
    name: str,
    settle: Callable[[Overlap], bytes | None] = never,
) -> bytes:
    """Returns `ours`, the script `name`, with what changed from `base` to `theirs`.

    Where both sides change the same lines, `settle` returns what they become: by_words, by_joining.
    Raises Conflict where it returns None.
    """
    if base == theirs:
        return ours
    merged = merge_lines(base, ours, theirs)
    settled, end = b"", 0  # what is merged so far, and where `merged` goes on
    for conflict in CONFLICT.finditer(merged):
        settled += merged[end : conflict.start()]
        end = conflict.end()
        overlap = Overlap(place_behind(settled), *conflict.groups())
        lines = settle(overlap)
        if lines is None:
            line = settled.count(b"\n") + 1
            raise Conflict(
                f"{name} conflicts with another change at line {line}, {overlap.place}; nothing is"
                " changed",
                name,
            )
        settled += lines
    return settled + merged[end:]


def place_behind(text: bytes) -> str:
    """Returns the definition that the line behind a text is in, as Overlap has it."""
    return (DEFINITION.findall(text) or [b"the imports"])[-1].decode()


def merge_lines(base: bytes, ours: bytes, theirs: bytes) -> bytes:
    """Merges as git does, which marks conflicts."""
    with tempfile.TemporaryDirectory() as folder:
        for file, text in (("ours", ours), ("base", base), ("theirs", theirs)):
            Path(folder, file).write_bytes(text)
        command = ["git", "merge-file", "--quiet", "-p", "--diff3", "ours", "base", "theirs"]
        result = subprocess.run(command, cwd=folder, capture_output=True)
    if not 0 <= result.returncode <= 127:  # else it is the number of conflicts
        reason = result.stderr.decode(errors="replace").strip()
        raise StackError(f"git merge-file: {reason or f'ended by signal {-result.returncode}'}")
    return result.stdout


def by_words(overlap: Overlap) -> bytes | None:
    """Settles an overlap word by word, each of which git sees as a line; returns None where both
    sides change the same word."""
    newline = b"\1"  # no script has this character
    sides = (
        b"".join(word.replace(b"\n", newline) + b"\n" for word in WORD.findall(side))
        for side in (overlap.base, overlap.ours, overlap.theirs)
    )
    merged = merge_lines(*sides)
    if CONFLICT.search(merged):
        return None
    return merged.replace(b"\n", b"").replace(newline, b"\n")


def by_joining(overlap: Overlap) -> bytes | None:
    """Settles an overlap where lines don't depend on each other, in JOINED: those that either side
    adds are all taken. Returns None elsewhere, if a setting would come twice, or where one side has
    equal lines, of which it isn't known which the other one means."""
    if overlap.place not in JOINED:
        return None
    sides = [
        side.splitlines(keepends=True) for side in (overlap.ours, overlap.base, overlap.theirs)
    ]
    joined = b"".join(joined_lines(*sides))
    settings = SETTING.findall(joined)
    if any(map(has_doubles, [*sides, settings])):
        return None
    return joined


def joined_lines(ours: list[bytes], base: list[bytes], theirs: list[bytes]) -> list[bytes]:
    """Returns the lines that both sides keep and those that `theirs` adds, in its order, then those
    that `ours` alone adds."""
    lines = [line for line in theirs if line in ours or line not in base]
    return lines + [line for line in ours if line not in theirs and line not in base]


def has_doubles(lines: list[bytes]) -> bool:
    return len(lines) > len(set(lines))


CHECK = """\
from importlib.util import find_spec

if missing := [name for name in {} if not find_spec(name)]:
    sys.exit("error: it needs packages: pip install " + " ".join(missing).replace("_", "-"))

"""


def imports_of(text: bytes) -> list[tuple[int, str]]:
    """Returns the line and the module or package of each import of a script."""
    imports = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imports += [(node.lineno, alias.name.partition(".")[0]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imports.append((node.lineno, str(node.module).partition(".")[0]))
    return imports


def packages_of(variants: list[Patch]) -> list[str]:
    """Returns the packages that variants need, sorted, by the names that they import."""
    needs = " ".join(variant.fields.get("Needs", "") for variant in variants)
    return sorted(set(re.findall(r"package ([\w-]+)", needs)))


def compose(names: list[str], base: str | None = None, root: Path = ROOT) -> bytes:
    """Returns the script `base`, 01 or 02, with variants; it begins with a check of the packages
    that they need. Raises StackError, Conflict."""
    variants = chosen_variants(names, root)
    if base is None:  # 02, if one is a variant of it
        base = max(file_of(variant.base) for variant in variants)
    script = with_variants(base, variants, rebuild_all(root))  # which refuses an edited 01 or 02
    script = with_check(script, packages_of(variants))
    chosen = ", ".join(variant.name for variant in variants)
    note = textwrap.fill(
        f"# {base} with {chosen}; composed by patches/stack.py.",
        100,
        subsequent_indent="# ",
        break_on_hyphens=False,
    )
    text = f"{note}\n".encode() + script
    try:
        compile(text, "composed", "exec")
    except SyntaxError as error:
        raise Conflict(f"{chosen} don't go together: line {error.lineno}")
    return text


def with_variants(base: str, variants: list[Patch], scripts: dict[str, bytes]) -> bytes:
    """Returns the script in the file `base` with variants merged in, one after the other. Raises
    StackError, Conflict."""
    series = Series(list(scripts))
    text = scripts[series.by_file[base]]
    for variant in variants:
        if file_of(variant.base) == DDP and base == LAST:
            raise StackError(f"{variant.name} is a variant of {DDP}: --base 02")
        before = scripts[series.base_of(variant)]
        text = merge(before, scripts[variant.name], text, variant.name, by_joining)
    return text


def chosen_variants(names: list[str], root: Path) -> list[Patch]:
    """Returns the variants of these names, sorted. Raises StackError for an unknown one, or for two
    that exclude each other."""
    variants = [patch for patch in load_variants(root) if patch.name in names]
    for name in set(names) - {variant.name for variant in variants}:
        raise StackError(f"no variant {name!r}; `python patches/stack.py list` shows their names")
    for one, other in permutations(variants, 2):
        if one.excludes(other):
            raise StackError(f"{one.name} and {other.name} exclude each other")
    return variants


def with_check(text: bytes, packages: list[str]) -> bytes:
    """Returns a script that looks for packages, if there are any, before it imports the first that
    isn't Python's own."""
    if not packages:
        return text
    lines = text.splitlines(keepends=True)
    first = min(line for line, module in imports_of(text) if module not in sys.stdlib_module_names)
    lines.insert(first - 1, CHECK.format(packages).encode())
    return b"".join(lines)


def check_name(out: Path, text: bytes) -> None:
    """Raises StackError for a file that a script would import instead of the module of that name,
    since Python looks into the script's folder first."""
    imported = sys.stdlib_module_names | {module for _, module in imports_of(text)}
    if out.suffix == ".py" and out.stem in imported:
        raise StackError(
            f"{out.name} would take the place of Python's module {out.stem}: choose another name"
        )


# ---- An edit of one script, carried into others
#
# An arrow is a patch. An edit of a script follows the arrows by merges, into every script behind it
# (`follow`), as far as `until`; one of 01 goes back first, to the script after the patch `into`,
# and from there on (`carry_back`). Then each patch is made anew between its two scripts (`carry`).
#
#     00 ─> 01-causal-mask ─> 02-tensor-cores ─> ... ─> 01 ─> 02 ─> variants of 02
#                                                        └──> variants of 01


def before_edit(file: Path, root: Path) -> dict[str, bytes]:
    """Returns all scripts as before the edit of `file`. Raises StackError for another."""
    try:
        patches = load(root) + load_variants(root)
        first = first_by_01(patches, root) if file == root / FIRST else read(root / FIRST)
        scripts = rebuild(patches, first, root, edited=file)
        for name, script in scripts.items():
            path = root / WRITTEN / file_of(name)
            if path != file and path.exists() and read(path) != script:
                raise StackError(f"{WRITTEN / path.name} is edited too, or old: `write` it anew")
    except StackError as error:
        raise StackError(f"only {file.name} may be edited, but {error}")
    return scripts


def carry(
    patches: list[Patch], old: dict[str, bytes], edited: dict[str, bytes], root: Path
) -> dict[Path, bytes]:
    """Returns the files to write if the scripts `edited` take the place of their `old` ones. Raises
    StackError, Conflict."""
    series = Series.of(patches)
    scripts = follow(patches, old, edited)
    files = {}
    for patch in patches:
        before, after = scripts[series.base_of(patch)], scripts[patch.name]
        files[root / patch.file] = make_patch(patch.file, patch.header, patch.base, before, after)
    files |= {root / file: scripts[name] for file, name in series.by_file.items()}
    for name, script in scripts.items():
        path = root / WRITTEN / file_of(name)
        if path.exists():
            files[path] = script
    return files


def follow(
    patches: list[Patch], old: dict[str, bytes], edited: dict[str, bytes]
) -> dict[str, bytes]:
    """Returns all scripts, of which those that aren't edited follow their base. Raises StackError,
    Conflict."""
    series = Series.of(patches)
    scripts = {series.first: old[series.first]} | edited
    for patch in patches:
        if patch.name not in edited:
            base = series.base_of(patch)
            scripts[patch.name] = merge(
                old[base], old[patch.name], scripts[base], patch.name, by_words
            )
        check_python(file_of(patch.name), scripts[patch.name])
    return scripts


@dataclass(frozen=True)
class Edit:
    """An edit of one script, which `refresh` carries into others."""

    file: Path
    name: str  # of the edited script
    text: bytes
    old: dict[str, bytes]  # all scripts as before, by name
    patches: list[Patch]  # of the series, then the variants

    @classmethod
    def of(cls, file: Path, root: Path) -> "Edit":
        """Raises StackError where another script is edited, too."""
        patches = load(root) + load_variants(root)
        name = Series.of(patches).find(file.name)
        old = before_edit(file, root)
        return cls(file, name, read(file), old, patches)

    @property
    def series(self) -> Series:
        return Series.of(self.patches)

    def scripts(self, into: str | None) -> dict[str, bytes]:
        """Returns the scripts with the edit that others follow: the edited one; where that is 01,
        those from the patch `into` on. Raises StackError, Conflict."""
        if self.file.name == LAST:
            return self.carried_back(into)
        if into is not None:
            raise StackError(f"--into is for edits of {LAST}; this one belongs to {self.name}")
        return {self.name: self.text}

    def carried_back(self, patch: str | None) -> dict[str, bytes]:
        """Returns the scripts from a patch to 01 with the edit that was made in 01. Raises
        StackError, Conflict."""
        if patch is None:
            raise StackError("name the patch of this edit (--into NAME), or use `new NAME`")
        first = self.series.find(patch)
        names = self.series.to_01
        if first not in names:
            raise StackError(f"{first} isn't part of {LAST}: edit {file_of(first)}")
        return carry_back(self.old, self.text, names[names.index(first) :])

    def kept(self, until: list[str]) -> dict[str, bytes]:
        """Returns the scripts that the edit doesn't reach: those of `until`, and what follows one
        of the series. Raises StackError where the edited script is among them."""
        kept: dict[str, bytes] = {}
        in_order = [*self.series.to_01, "ddp"]
        for name in map(self.series.find, until):
            names = [name]
            if name in in_order:
                names = in_order[in_order.index(name) :]
            if self.name in names:
                raise StackError(f"--until: {name} doesn't come after {self.name}")
            kept |= {name: self.old[name] for name in names}
        return kept


def carry_back(old: dict[str, bytes], text: bytes, names: list[str]) -> dict[str, bytes]:
    """Returns the scripts `names`, which follow one another, with the edit that made `text` of the
    last one. Raises Conflict."""
    new = {names[-1]: text}
    for later, name in pairwise(reversed(names)):
        new[name] = merge(old[later], old[name], new[later], name, by_words)
    return new


def way_on(root: Path, file: Path, into: str | None, until: list[str], name: str) -> str:
    """Returns what to type after a conflict in the script `name`: the edit goes as far as that, and
    is made there by hand."""
    options = []
    if into:
        options.append(f"--into={into}")
    options += [f"--until={stop}" for stop in [*until, name]]
    edit = shlex.join([os.path.relpath(file), *options])
    script = os.path.relpath(root / WRITTEN / file_of(name))
    return (
        f"To go on, type\n  python patches/stack.py refresh {edit}\n"
        f"  python patches/stack.py write {name}\n"
        f"make the edit in {script}, and type\n  python patches/stack.py refresh {script}"
    )


# ---- The commands


def list_command(root: Path) -> list[str]:
    """lists techniques, then variants: effect on the loss, base, what it is"""
    row = "{:22}  {:9}  {:20}  {}".format
    return [row("name", "loss", "base", "technique")] + [
        row(patch.name, patch.fields["Loss"].split()[0], patch.base, patch.fields["Technique"])
        for patch in load(root) + load_variants(root)
    ]


def show_command(root: Path, name: str) -> list[str]:
    """shows a patch: what the technique or variant is, and the lines that it changes"""
    patches = load(root) + load_variants(root)
    series = Series.of(patches)
    files = {series.first: FIRST} | {patch.name: patch.file for patch in patches}
    return [read(root / files[series.find(name)]).decode(errors="replace")[:-1]]


def write_command(root: Path, names: list[str]) -> list[str]:
    """writes scripts as they stand after the named patches (run them with --data data)"""
    scripts = rebuild_all(root)
    series = Series(list(scripts))
    if names:
        names = [series.find(name) for name in names]
    else:
        names = series.names
    files = {root / WRITTEN / file_of(name): scripts[name] for name in names}
    write_all(files)
    return [os.path.relpath(path) for path in files]


def verify_command(root: Path) -> list[str]:
    """verifies that the patches lead from 00 to 01 and 02 and to every variant"""
    patches, variants = load(root), load_variants(root)
    for name, script in rebuild_all(root).items():
        check_python(file_of(name), script)
    files = {patch.file for patch in patches + variants}
    for path in sorted([*root.glob("patches/*.patch"), *root.glob("patches/variants/*")]):
        file = path.relative_to(root).as_posix()
        if file not in files:
            raise StackError(f"{file} is neither in patches/series nor a variant's patch")
    series = f"{FIRST} + {len(patches) - 1} patches = {LAST}, + ddp.patch = {DDP}"
    return [f"ok: {series}; variants that apply: {len(variants)}"]


def refresh_command(root: Path, file: Path, into: str | None, until: list[str]) -> list[str]:
    """carries an edit into all patches and scripts that build on it"""
    edit = Edit.of(file.resolve(), root)
    edited = edit.scripts(into) | edit.kept(until)
    try:
        changed = write_all(carry(edit.patches, edit.old, edited, root))
    except Conflict as conflict:
        raise StackError(f"{conflict}. {way_on(root, edit.file, into, until, conflict.name)}")
    return [os.path.relpath(path) for path in changed] or ["nothing to change"]


def new_command(
    root: Path, name: str, variant: bool, base: str | None, text: str, **options: str | None
) -> list[str]:
    """turns your edit of 01 into a patch, at the end of the series or a variant"""
    header = NewHeader.of(options, text)
    has_group = "Group" in header.fields
    if not variant:
        if has_group or base:
            raise StackError("--group and --base are for a --variant")
        return new_technique(root, name, header)
    if not has_group:
        raise StackError("--variant needs a --group")
    edited = LAST
    if base == "02":
        edited = DDP
    return new_variant(root, name, edited, header)


def new_technique(root: Path, name: str, header: "NewHeader") -> list[str]:
    """Makes an edit of 01 the last technique; returns what is printed."""
    series = load(root)
    number = len(series)  # ddp.patch has none
    base = Series.of(series).last
    file = new_file(root, f"patches/{number:02}-{name}.patch", name)
    new = patch_of_edit(root, LAST, file, base, header)
    patches = [*series[:-1], new.patch, series[-1], *load_variants(root)]
    files = carry(patches, new.old, new.edited, root)
    path = root / "patches/series"
    files[path] = read(path) + f"{Path(file).name}\n".encode()
    written = [os.path.relpath(path) for path in write_all(files)]
    return [*written, *what_is_next(f"ladder --techniques {number - 1}-{number}", LAST)]


def new_variant(root: Path, name: str, edited: str, header: "NewHeader") -> list[str]:
    """Makes an edit of the script `edited`, 01 or 02, a variant of it; returns what is printed."""
    file = new_file(root, f"patches/variants/{name}.patch", name)
    new = patch_of_edit(root, edited, file, Path(edited).stem, header)
    files = carry([*load(root), *load_variants(root), new.patch], new.old, new.edited, root)
    written = [os.path.relpath(path) for path in write_all(files)]
    return [*written, *what_is_next(f"variants --names {name}", edited)]


def new_file(root: Path, file: str, name: str) -> str:
    """Returns `file`, in which a patch called `name` is to be. Raises StackError if it can't."""
    if not NAME.fullmatch(name) or (root / file).exists():
        raise StackError(f"{name!r} is taken, or isn't a name like sgd or adamw-8bit")
    return file


class NewPatch(NamedTuple):
    """A patch that an edit becomes, and what carry() takes."""

    patch: Patch
    old: dict[str, bytes]  # all scripts, by name; its own as if it changed nothing
    edited: dict[str, bytes]  # its own script


def patch_of_edit(root: Path, edited: str, file: str, base: str, header: "NewHeader") -> NewPatch:
    """Returns the patch `file` that leads from `base` to the script `edited`. Raises StackError."""
    old = before_edit(root / edited, root)
    after = read(root / edited)
    before = old[Series(list(old)).by_file[edited]]
    data = make_patch(file, header.written(base), base, before, after)
    patch = Patch.parse(file, data, base)
    return NewPatch(patch, old | {patch.name: before}, {patch.name: after})


def what_is_next(study: str, edited: str) -> list[str]:
    """Returns what to type after a patch was made. What 02 gains is measured on several GPUs."""
    lines = ["next:", "  python patches/stack.py verify"]
    if edited != DDP:
        lines.append(f"  python measure.py {study}")
    return lines


class NewHeader(NamedTuple):
    """What a user says of a new patch: FIELDS by their names, and the prose behind them."""

    fields: dict[str, str]
    text: str

    @classmethod
    def of(cls, options: dict[str, str | None], text: str) -> "NewHeader":
        """Takes the fields from the options of the command line that are named after them."""
        values = {field: options.get(field.lower()) for field in FIELDS}
        return cls({field: value for field, value in values.items() if value}, text)

    def written(self, base: str) -> bytes:
        """Returns it as the header of a patch of the script `base`, wrapped."""
        wrap = partial(textwrap.fill, width=100, break_long_words=False, break_on_hyphens=False)
        values = self.fields | {"Base": base}
        lines = [
            wrap(f"{field}: {values[field]}", subsequent_indent="  ")
            for field in FIELDS
            if field in values
        ]
        return "\n".join([*lines, "", wrap(self.text), "", ""]).encode()


def compose_command(root: Path, names: list[str], base: str | None, out: Path) -> list[str]:
    """composes a script of your own: 01 or 02 with the named variants, in one file"""
    text = compose(names, {"01": LAST, "02": DDP}.get(base or ""), root)
    if os.path.lexists(out):
        raise StackError(f"{out} exists: nothing is overwritten")
    check_name(out, text)
    written = [os.path.relpath(path) for path in write_all({out: text})]
    missing = missing_packages(names, root)
    added = added_options(text, root)
    if missing:
        written.append(f"first: pip install {' '.join(missing)}")
    if added:
        written.append(f"its variants add {', '.join(added)} (see --help)")
    return written


def missing_packages(names: list[str], root: Path) -> list[str]:
    """Returns the packages that variants need and that aren't installed, as pip has them."""
    packages = packages_of(chosen_variants(names, root))
    return [package.replace("_", "-") for package in packages if not find_spec(package)]


def added_options(text: bytes, root: Path) -> list[str]:
    """Returns the command-line options of a script that neither 01 nor 02 has."""
    usual = OPTION.findall(read(root / LAST) + read(root / DDP))
    return [name.decode() for name in OPTION.findall(text) if name not in usual]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    title = (__doc__ or "").partition("\n")[0]  # `python -OO` keeps none
    parser = argparse.ArgumentParser(description=title, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add_command(function: Callable) -> argparse.ArgumentParser:
        name = function.__name__.removesuffix("_command")
        text = function.__doc__ or ""
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.set_defaults(command=function)
        return command

    name = 'a patch by number ("5") or name ("05-bfloat16"), "ddp", or a variant'
    add_command(list_command)
    add_command(show_command).add_argument("name", metavar="NAME", help=name)
    write = add_command(write_command)
    write.add_argument("names", metavar="NAME", nargs="*", help=f"{name} (default: all)")
    add_command(verify_command)
    add_refresh_arguments(add_command(refresh_command))
    add_compose_arguments(add_command(compose_command))
    add_new_arguments(add_command(new_command))
    return parser.parse_args(argv)


def add_refresh_arguments(refresh: argparse.ArgumentParser) -> None:
    refresh.add_argument(
        "file", metavar="FILE", type=Path, help=f"{FIRST}, 01, 02, or one of {WRITTEN}"
    )
    refresh.add_argument(
        "--into", metavar="NAME", help="the patch that an edit of 01 belongs to, or 0"
    )
    refresh.add_argument(
        "--until",
        metavar="NAME",
        action="append",
        default=[],
        help="where the edit would"
        " conflict: this script and those after it, or this variant, stay (repeatable)",
    )


def add_compose_arguments(compose: argparse.ArgumentParser) -> None:
    compose.add_argument("names", metavar="NAME", nargs="+", help="a variant")
    compose.add_argument(
        "--base",
        choices=("01", "02"),
        help="the script to change (default: 01, or 02 if a variant is one of it)",
    )
    compose.add_argument(
        "--out", metavar="FILE", type=Path, required=True, help="the script to write"
    )


def add_new_arguments(new: argparse.ArgumentParser) -> None:
    """Adds an option for each field of a header."""
    new.add_argument("name", metavar="NAME", help="its name, without a number")
    for field, (_, meaning) in FIELDS.items():
        if field != "Base":
            is_required = field in REQUIRED
            new.add_argument(
                f"--{field.lower()}", metavar="TEXT", help=meaning, required=is_required
            )
    new.add_argument(
        "--text",
        metavar="TEXT",
        required=True,
        help="what it does, why it is faster or smaller, and when it isn't",
    )
    new.add_argument("--variant", action="store_true", help="make it a variant, and undo the edit")
    new.add_argument(
        "--base", choices=("01", "02"), help="the edited script of a variant (default: 01)"
    )


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    sys.stdout = sys.stdout or open(os.devnull, "w")  # it may be closed
    sys.stdout.reconfigure(errors="replace")  # a script may hold what a terminal can't show
    arguments = vars(parse_arguments(argv))
    command = arguments.pop("command")
    try:
        print("\n".join(command(root, **arguments)), flush=True)
    except BrokenPipeError:  # into `head`, say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    except (StackError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
