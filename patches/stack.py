"""The speed techniques between the scripts, one patch each: read, apply, verify and refresh them.

    python patches/stack.py list                 # the techniques in their order
    python patches/stack.py show 5               # one of them: why, and the lines it changes
    python patches/stack.py write                # the script after each patch -> build/stages/
    python patches/stack.py verify               # 00 + series = 01, + ddp.patch = 02, byte for byte
    python patches/stack.py refresh 00_orig.py   # carry an edit through everything that follows
    python patches/stack.py --help               # every command

A stage is a script as it stands after a patch: stage 0 is 00_orig.py, the stage after the last
patch of patches/series is 01_opt_single_gpu.py, and after ddp.patch comes 02_opt_multi_gpu_ddp.py.
Edit the scripts, never the hunks: 00, 01 or 02 in place, or a stage that `write` has put into
build/stages/. Then `refresh` names the edited file, merges the edit through the later stages, and
writes the patches and scripts anew; a conflict, or a second edited file, stops it before it has
changed anything. `new` makes an edit of 01 a technique of its own.

Applying is exact, in bytes: a hunk that doesn't match at its very line is an error.
"""

import argparse
import difflib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIRST, LAST, DDP = "00_orig.py", "01_opt_single_gpu.py", "02_opt_multi_gpu_ddp.py"
FIELDS = ("Technique", "Base", "Loss", "Hardware", "Source")
LOSS = r"unchanged|rounding \(.+\)|changes because .+"
HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(?: .*)?")
PLACE = re.compile(rb"(class|def) \w+|\w+ = {$")  # what a hunk header names


class StackError(Exception):
    """What stands in the way, told in one line."""


class Conflict(StackError):
    """Two changes of the same lines."""


# ------------------------------------------------------------------------------------------------
# Files and lines
# ------------------------------------------------------------------------------------------------


def read(path: Path) -> bytes:
    """A text file's bytes. Raises StackError where a line doesn't end with \\n alone."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise StackError(f"can't read {path}: {error.strerror}")
    if not text.endswith(b"\n") or b"\r\n" in text:
        raise StackError(f"{path}: each line has to end with \\n, and with nothing else")
    return text


def write_all(files: dict[Path, bytes]) -> list[Path]:
    """Writes those that differ from what is there, and returns them. Each is written beside its
    place first; only when all are whole are they renamed."""
    changed = [p for p, text in files.items() if not p.exists() or p.read_bytes() != text]
    temporary = [path.with_name(path.name + ".tmp") for path in changed]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for path, copy in zip(changed, temporary, strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(files[path])
            if path.exists():
                shutil.copymode(path, copy)
        for number in handlers:  # half of them renamed would be no stack any more
            signal.signal(number, signal.SIG_IGN)
        for path, copy in zip(changed, temporary, strict=True):
            copy.replace(path)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for copy in temporary:
            copy.unlink(missing_ok=True)
    return changed


def lines_of(text: bytes) -> list[bytes]:
    return text.split(b"\n")[:-1]


def text_of(lines: list[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


# ------------------------------------------------------------------------------------------------
# A patch
# ------------------------------------------------------------------------------------------------


@dataclass
class Hunk:
    number: int  # among the hunks of its patch
    line: int  # of its "@@" in the patch file
    old: int  # how many lines of the stage before come before it
    new: int  # and how many of the stage after
    lines: list[bytes]  # each behind its " ", "-" or "+"


@dataclass
class Patch:
    """One technique: `fields` and `prose` explain it, `hunks` lead from `base` to `name`."""

    name: str
    fields: dict[str, str]
    prose: str
    header: bytes  # fields and prose as they stand in the file, up to the diff
    diff: bytes
    hunks: list[Hunk]

    @property
    def base(self) -> str:
        return self.fields["Base"]

    def apply(self, text: bytes, reverse: bool = False) -> bytes:
        """The stage after this patch, made from the stage before it; in reverse, the other way.

        Raises StackError, naming patch, hunk and line, where a line isn't the one it expects.
        """
        leaves, comes = (b"+", b"-") if reverse else (b"-", b"+")
        source, result, position = lines_of(text), [], 0
        for hunk in self.hunks:
            start, target = (hunk.new, hunk.old) if reverse else (hunk.old, hunk.new)
            result += source[position:start]
            position = max(position, start)
            if start != position or target != len(result):
                raise damage(self.name, hunk, hunk.line, "the hunk isn't where its header says")
            for number, line in enumerate(hunk.lines, hunk.line + 1):
                tag, content = line[:1], line[1:]
                if tag != comes:
                    if source[position : position + 1] != [content]:
                        stage = file_of(self.name if reverse else self.base)
                        reason = f"it doesn't match line {position + 1} of {stage}"
                        raise damage(self.name, hunk, number, reason)
                    position += 1
                if tag != leaves:
                    result.append(content)
        return text_of(result + source[position:])


def damage(name: str, hunk: Hunk | None, line: int, reason: str) -> StackError:
    place = f"hunk {hunk.number}, line {line}" if hunk else f"line {line}"
    return StackError(f"patches/{name}.patch, {place}: {reason}")


def file_of(stage: str) -> str:
    """The file name of a stage; 02 is the stage after the patch "ddp"."""
    return DDP if stage == "ddp" else f"{stage}.py"


def parse(name: str, data: bytes) -> Patch:
    """A patch file: fields, a blank line, prose, a blank line, and a unified diff.

    Raises StackError, naming patch and line, for anything else.
    """
    lines = lines_of(data)
    start = next((i for i, line in enumerate(lines) if line.startswith(b"--- ")), len(lines))
    header = text_of(lines[:start])
    fields, prose = parse_header(name, header)
    between = [f"--- a/{file_of(fields['Base'])}".encode(), f"+++ b/{file_of(name)}".encode()]
    if lines[start : start + 2] != between:
        reason = f"the diff has to begin with {between[0].decode()} and {between[1].decode()}"
        raise damage(name, None, start + 1, reason)
    hunks = parse_hunks(name, lines, start + 2)
    return Patch(name, fields, prose, header, text_of(lines[start:]), hunks)


def parse_header(name: str, header: bytes) -> tuple[dict[str, str], str]:
    """(fields, prose). A field goes on in the next line where that begins with a space."""
    try:
        top, _, prose = header.decode("utf-8").partition("\n\n")
    except UnicodeDecodeError:
        raise StackError(f"patches/{name}.patch: the header isn't UTF-8")
    fields, field = {}, None
    for number, line in enumerate(top.splitlines(), 1):
        field, colon, value = (field, ":", line) if line[:1] == " " else line.partition(":")
        if field not in FIELDS or not colon:
            raise damage(name, None, number, f"expected one of the fields {', '.join(FIELDS)}")
        fields[field] = f"{fields.get(field, '')} {value.strip()}".strip()
    for field in FIELDS:
        if not fields.get(field):
            raise StackError(f"patches/{name}.patch: the header has no {field}:")
    if not re.fullmatch(LOSS, fields["Loss"]):
        raise StackError(
            f"patches/{name}.patch: Loss: is `unchanged`, `rounding (...)` or `changes because ...`"
        )
    if not prose.strip() or not prose.endswith("\n\n"):
        raise StackError(f"patches/{name}.patch: prose and a blank line have to precede the diff")
    return fields, prose.strip()


def parse_hunks(name: str, lines: list[bytes], start: int) -> list[Hunk]:
    hunks = []
    while start < len(lines) or not hunks:
        match = HUNK.fullmatch(lines[start]) if start < len(lines) else None
        hunk = Hunk(len(hunks) + 1, start + 1, 0, 0, [])
        if not match:
            raise damage(name, hunk, start + 1, "expected @@ -line,count +line,count @@")
        first_old, old, first_new, new = (1 if n is None else int(n) for n in match.groups())
        # An empty side gives the line before it.
        hunk.old, hunk.new = first_old - (old > 0), first_new - (new > 0)
        while old > 0 or new > 0:
            start += 1
            tag = lines[start][:1] if start < len(lines) else None
            old -= tag in (b" ", b"-")
            new -= tag in (b" ", b"+")
            if tag not in (b" ", b"-", b"+") or min(old, new) < 0:
                reason = "the hunk has another number of lines than its header says"
                raise damage(name, hunk, start + 1, reason)
            hunk.lines.append(lines[start])
        hunks.append(hunk)
        start += 1
    return hunks


def make_patch(name: str, header: bytes, before: bytes, after: bytes) -> bytes:
    """A patch file: the header, and what leads from `before` to `after`.

    Raises StackError where the header is incomplete or holds what begins a diff, or nothing is left
    to do for the patch.
    """
    fields, _ = parse_header(name, header)
    old, new = lines_of(before), lines_of(after)
    names = f"a/{file_of(fields['Base'])}".encode(), f"b/{file_of(name)}".encode()
    diff = list(difflib.diff_bytes(difflib.unified_diff, old, new, *names, lineterm=b""))
    if not diff:
        raise StackError(f"nothing would be left of {name}: the stages around it would be the same")
    for i, line in enumerate(diff):
        if match := HUNK.fullmatch(line):  # name the class or function it is in, as git does
            above = (PLACE.match(text) for text in reversed(old[: int(match[1]) + 2]))
            if place := next(filter(None, above), None):
                diff[i] += b" " + place[0]
    data = header + text_of(diff)
    if parse(name, data).apply(before) != after:
        raise StackError(f"patches/{name}.patch would not lead from one stage to the next")
    return data


# ------------------------------------------------------------------------------------------------
# The stack
# ------------------------------------------------------------------------------------------------


def load(root: Path = ROOT) -> list[Patch]:
    """The patches of the series in their order, then ddp.patch, each checked to be well-formed."""
    patches, base = [], Path(FIRST).stem
    for number, line in enumerate(read(root / "patches" / "series").decode().splitlines(), 1):
        name = line.removesuffix(".patch")
        if not re.fullmatch(rf"{number:02}-[a-z0-9-]+\.patch", line):
            raise StackError(f"patches/series, line {number}: expected {number:02}-NAME.patch")
        patches.append(parse(name, read(root / "patches" / line)))
        if patches[-1].base != base:
            raise StackError(f"patches/{line}: its Base: has to be {base}")
        base = name
    patches.append(parse("ddp", read(root / "patches" / "ddp.patch")))
    if patches[-1].base != Path(LAST).stem:
        raise StackError(f"patches/ddp.patch: its Base: has to be {Path(LAST).stem}")
    return patches


def names_of(patches: list[Patch]) -> list[str]:
    """The stages' names in their order: "00_orig", "01-causal-mask" and so on, "ddp"."""
    return [Path(FIRST).stem, *(patch.name for patch in patches)]


def find(patches: list[Patch], name: str) -> int:
    """The number of the stage meant by "5", "05", "05-bfloat16" or "ddp"; 0 is 00_orig."""
    names = names_of(patches)
    if name.isdecimal() and int(name) < len(patches):
        return int(name)
    if name not in names:
        raise StackError(f"no patch {name!r}; `list` shows their names")
    return names.index(name)


def rebuild(patches: list[Patch], root: Path = ROOT, edited: str | None = None) -> list[bytes]:
    """Every stage, from 00 to 02; made from 00 forwards, or from 01 backwards if 00 is `edited`.

    Raises StackError where a patch doesn't match, or where a script of the tree, other than the
    edited one, isn't its stage byte for byte.
    """
    *series, ddp = patches
    if edited == FIRST:
        stages = [read(root / LAST)]
        for patch in reversed(series):
            stages.insert(0, patch.apply(stages[0], reverse=True))
    else:
        stages = [read(root / FIRST)]
        for patch in series:
            stages.append(patch.apply(stages[-1]))
    stages.append(ddp.apply(stages[-1]))
    for name, stage in ((FIRST, stages[0]), (LAST, stages[-2]), (DDP, stages[-1])):
        if name != edited and read(root / name) != stage:
            raise StackError(difference(name, read(root / name), stage))
    return stages


def difference(name: str, found: bytes, expected: bytes) -> str:
    pairs = zip(lines_of(found) + [None], lines_of(expected) + [None], strict=False)
    line = next(i for i, (a, b) in enumerate(pairs, 1) if a != b)
    return (
        f"{name} isn't what the patches make: sha256 {sha256(found)[:12]}, by the patches"
        f" {sha256(expected)[:12]}; the first difference is at line {line}"
    )


def sha256(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def merge(base: bytes, ours: bytes, theirs: bytes, name: str) -> bytes:
    """`ours` with what changed from `base` to `theirs`.

    Raises Conflict, naming the stage `name` and the line, where the two changes meet.
    """
    if base == theirs:
        return ours
    with tempfile.TemporaryDirectory() as folder:
        for file, text in (("ours", ours), ("base", base), ("theirs", theirs)):
            Path(folder, file).write_bytes(text)
        command = ["git", "merge-file", "--quiet", "-p", "ours", "base", "theirs"]
        try:
            result = subprocess.run(command, cwd=folder, capture_output=True)
        except FileNotFoundError:
            raise StackError("git isn't installed, and `git merge-file` is needed for this")
    if result.returncode == 0:
        return result.stdout
    if result.returncode > 127:
        raise StackError(f"git merge-file: {result.stderr.decode(errors='replace').strip()}")
    lines = lines_of(result.stdout)
    line = next(i for i, text in enumerate(lines, 1) if text.startswith(b"<<<<<<< "))
    raise Conflict(
        f"stage {name}, line {line}: the edit conflicts with what the stage has there; nothing is"
        " changed"
    )


def updated(patches: list[Patch], old: list[bytes], new: list[bytes], root: Path) -> dict:
    """{path: bytes} of the scripts and patches for the `new` stages, which were `old` before."""
    files = {root / FIRST: new[0], root / LAST: new[-2], root / DDP: new[-1]}
    for i, patch in enumerate(patches):
        if new[i : i + 2] != old[i : i + 2]:
            data = make_patch(patch.name, patch.header, *new[i : i + 2])
            files[root / "patches" / f"{patch.name}.patch"] = data
    return files


def refresh(
    file: Path, into: str | None = None, until: str | None = None, root: Path = ROOT
) -> list[Path]:
    """Carries the edit in `file` through the stages, writes what follows, returns what changed.

    An edit of 01 goes back to the stage `into`, and so into all from there on. From the stage
    `until` on, all stay as they are. Raises StackError, with nothing changed, for a conflict or a
    second edited file.
    """
    patches = load(root)
    names, file = names_of(patches), file.resolve()
    numbers = {file_of(name): i for i, name in enumerate(names)} | {LAST: len(names) - 2}
    if file.name not in numbers:
        raise StackError(f"{file.name} isn't a script of this stack")
    edited = first = numbers[file.name]
    if file.name == LAST:
        if into is None:
            raise StackError(
                "which technique does this edit belong to? --into NAME says it, and `new NAME`"
                " makes it one of its own"
            )
        first = find(patches, into)
        if first > edited:
            raise StackError(f"for ddp.patch, edit {DDP}")
    elif into is not None:
        raise StackError(f"--into is for edits of {LAST}; this one belongs to {names[edited]}")

    end = find(patches, until) if until else len(names)
    if end <= edited:
        raise StackError(f"--until: {names[end]} isn't behind {names[edited]}")

    text, in_place = read(file), file.parent == root
    written = root / "build" / "stages"
    try:
        old = rebuild(patches, root, edited=file.name if in_place else None)
        for name, stage in zip(names, old, strict=True):
            path = written / file_of(name)
            if path != file and path.exists() and read(path) != stage:
                raise StackError(f"{path.relative_to(root)} is edited too, or old: `write` it anew")
    except StackError as error:
        raise StackError(f"only {file.name} may be edited, but {error}")

    new = list(old)
    new[edited] = text
    for i in reversed(range(first, edited)):
        new[i] = merge(old[i + 1], old[i], new[i + 1], names[i])
    for i in range(edited + 1, end):
        new[i] = merge(old[i - 1], old[i], new[i - 1], names[i])
    files = updated(patches, old, new, root)
    for name, stage in zip(names, new, strict=True):
        if (written / file_of(name)).exists():
            files[written / file_of(name)] = stage
    return write_all(files)


def add(name: str, fields: dict[str, str], prose: str, root: Path = ROOT) -> list[Path]:
    """Makes the edit of 01 a patch at the end of the series, and returns the changed files.

    `fields` are the header's, in small letters, all but "base".
    """
    patches = load(root)
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise StackError(f"{name!r}: a name has small letters, digits, and hyphens between them")
    name = f"{len(patches):02}-{name}"
    *old, old_ddp = rebuild(patches, root, edited=LAST)
    after = read(root / LAST)
    new_ddp = merge(old[-1], old_ddp, after, "ddp")
    fields = fields | {"base": names_of(patches)[-2]}
    fields = {field: fields[field.lower()] for field in FIELDS}
    wrap = partial(textwrap.fill, width=100, break_long_words=False, break_on_hyphens=False)
    header = [wrap(f"{field}: {text}", subsequent_indent="  ") for field, text in fields.items()]
    header = "\n".join([*header, "", wrap(prose), "", ""]).encode()
    folder = root / "patches"
    return write_all({
        folder / f"{name}.patch": make_patch(name, header, old[-1], after),
        folder / "series": read(folder / "series") + f"{name}.patch\n".encode(),
        folder / "ddp.patch": make_patch("ddp", patches[-1].header, after, new_ddp),
        root / DDP: new_ddp,
    })


# ------------------------------------------------------------------------------------------------
# The commands
# ------------------------------------------------------------------------------------------------


def list_command(args) -> None:
    """the techniques in their order, and what each does to the loss"""
    patches = load()
    width = max(len(patch.name) for patch in patches)
    broad = max(len(patch.fields["Technique"]) for patch in patches)
    print(f"{'#':>3}  {'name':{width}}  {'technique':{broad}}  loss")
    for number, patch in enumerate(patches, 1):
        number = "" if patch.name == "ddp" else number
        technique, loss = patch.fields["Technique"], patch.fields["Loss"].split()[0]
        print(f"{number:>3}  {patch.name:{width}}  {technique:{broad}}  {loss}")


def show_command(args) -> None:
    """one technique: what it is, and the lines it changes"""
    patches = load()
    number = find(patches, args.name)
    if number == 0:
        raise StackError(f"{FIRST} is what the patches begin with, no patch")
    patch = patches[number - 1]
    text = (patch.header + patch.diff).decode(errors="replace")
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        print(text, end="")
        return
    colours = {"---": "1", "+++": "1", "@@ ": "36", "+": "32", "-": "31"}
    colours |= {f"{field}:": "1" for field in FIELDS}
    for line in text.splitlines():
        colour = next((c for start, c in colours.items() if line.startswith(start)), None)
        print(f"\033[{colour}m{line}\033[0m" if colour else line)


def write_command(args) -> None:
    """the scripts as they stand after the named patches (run them with --data data)"""
    patches = load()
    stages, names = rebuild(patches), names_of(patches)
    numbers = [find(patches, name) for name in args.name] or range(len(names))
    out = args.out or ROOT / "build" / "stages"
    write_all({out / file_of(names[i]): stages[i] for i in numbers})
    for i in numbers:
        print(os.path.relpath(out / file_of(names[i])))


def new_command(args) -> None:
    """makes what was edited in 01_opt_single_gpu.py a patch of its own, at the series' end"""
    report(add(args.name, vars(args), args.text))


def verify_command(args) -> None:
    """checks that 00 + series is 01, and + ddp.patch is 02, byte for byte"""
    patches = load()
    listed = {f"{patch.name}.patch" for patch in patches}
    for path in sorted((ROOT / "patches").glob("*.patch")):
        if path.name not in listed:
            raise StackError(f"patches/{path.name} isn't in patches/series")
    try:
        *_, last, ddp = rebuild(patches)
    except StackError as error:
        raise StackError(f"{error} (after an edit of a script: `refresh` it)")
    print(
        f"ok: {FIRST} + {len(patches) - 1} patches = {LAST} (sha256 {sha256(last)[:12]}),"
        f" + ddp.patch = {DDP} (sha256 {sha256(ddp)[:12]})"
    )


def refresh_command(args) -> None:
    """carries an edit through every later stage; rewrites the patches, 01, 02 and build/stages/"""
    report(refresh(args.file, args.into, args.until))


def report(changed: list[Path]) -> None:
    for path in changed:
        print(os.path.relpath(path))
    if not changed:
        print("nothing to change")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function) -> argparse.ArgumentParser:
        text = function.__doc__
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.set_defaults(function=function)
        return sub

    command("list", list_command)
    name = 'a patch by its number ("5"), its name ("05-bfloat16"), or "ddp"'
    command("show", show_command).add_argument("name", metavar="NAME", help=name)
    sub = command("write", write_command)
    sub.add_argument("name", metavar="NAME", nargs="*", help=f"{name}; 0 is {FIRST} (default: all)")
    sub.add_argument("--out", metavar="DIR", type=Path,
                     help="folder of the scripts (default: build/stages/)")
    sub = command("new", new_command)
    sub.add_argument("name", metavar="NAME", help="its name; the number is put before it")
    for option, text in (
        ("technique", "the technique in a few words"),
        ("loss", "`unchanged` (the same function in exact arithmetic), `rounding (...)`, or"
                 " `changes because ...`"),
        ("hardware", "where it helps"),
        ("source", "where it is described"),
        ("text", "what it does, why it is faster or smaller, and when it doesn't help"),
    ):
        sub.add_argument(f"--{option}", metavar="TEXT", required=True, help=text)
    command("verify", verify_command)
    sub = command("refresh", refresh_command)
    sub.add_argument("file", metavar="FILE", type=Path,
                     help=f"the edited file: {FIRST}, {LAST}, {DDP}, or one of build/stages/")
    sub.add_argument("--into", metavar="NAME",
                     help=f"the patch that an edit of {LAST} belongs to; 0 for {FIRST}")
    sub.add_argument("--until", metavar="NAME",
                     help="a later patch that takes the edited lines out again: it ends the edit's"
                          " way, where it would conflict otherwise")
    return parser.parse_args()


def main() -> int:
    sys.stdout.reconfigure(errors="replace")  # a script may hold what a terminal can't show
    args = parse_arguments()
    try:
        args.function(args)
        sys.stdout.flush()
    except BrokenPipeError:  # into `head`, say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (StackError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
