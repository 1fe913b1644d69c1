"""Turn text into tokens: train.bin, val.bin (uint16 ids), vocabulary.json and meta.json.

    python data/prepare.py                  # Middlemarch, from Project Gutenberg
    python data/prepare.py FILE [FILE ...]  # your own text
    python data/prepare.py --out DIR        # somewhere else than next to this script

A FILE is UTF-8 text, JSON lines (both also as .gz, .bz2, .xz or .zst) or Parquet, whose `text` are
documents; or GPT-2's tokens in the files of nanoGPT (train.bin, val.bin) or llm.c (shards). Content
decides, but nanoGPT's files hold nothing but ids, so their names have to end in .bin. A folder
stands for its .bin files, except those for testing. Files named "val" become the validation part;
all else is split 90/10. <|endoftext|>, in a text and between documents, becomes id 50256.

Without a network the text is the source of Python's standard library, and without GPT-2's tokenizer
files the tokens are bytes. meta.json, written last, says what was used. vocabulary.json holds the
whole tokenizer, so that the folder can be copied to a machine without a network.

Texts of any size are read, encoded on all cores and written in pieces. A piece ends where GPT-2's
tokenizer starts anew anyway: at <|endoftext|>, and at line breaks before a character that isn't
white space. The longest piece has to fit in memory.
"""

import argparse
import codecs
import hashlib
import importlib
import json
import os
import re
import shutil
import signal
import stat
import sys
import sysconfig
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.client import HTTPException
from io import IncrementalNewlineDecoder
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple
from urllib.error import HTTPError, URLError

import numpy as np
import tiktoken

HERE = Path(__file__).resolve().parent
TRAIN_SHARE = 0.9
NO_READER = 128 + 13  # as a shell names the end by SIGPIPE, 13, of a program that it has started

BOOK_URL = "https://www.gutenberg.org/cache/epub/145/pg145.txt"
BOOK_TITLE = "Middlemarch"
BOOK_MARKS = ("*** START OF THE PROJECT GUTENBERG EBOOK", "*** END OF THE PROJECT GUTENBERG EBOOK")
BOOK_TOKENS = 460_010  # GPT-2's; the text without a network is cut to this length

TOKENIZER_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
TOKENIZER_SHA256 = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}

END, END_ID = "<|endoftext|>", 50_256  # GPT-2's last id
BYTES = "bytes"  # the tokenizer without GPT-2's files

# How files of a kind begin.
GZIP, XZ, PARQUET = b"\x1f\x8b", b"\xfd7zXZ\0", b"PAR1"
BZIP2 = re.compile(rb"BZh\d1AY&SY")
ZSTD = re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")  # or a frame without data
LLM_C, HEADER = [20240520, 1], 1024  # magic and version of GPT-2's uint16; bytes

NO_TEXT = {
    b"version https://git-lfs": "is a pointer of Git LFS, not the file itself: git lfs pull",
    b"%PDF-": "is a PDF: save it as plain text",
    b"PK\3\4": "is a zip archive, as .docx is: unpack it, or save it as plain text",
    codecs.BOM_UTF16_LE: "is UTF-16: save it as UTF-8",
    codecs.BOM_UTF16_BE: "is UTF-16: save it as UTF-8",
}
PARQUET_STRINGS = re.compile(r"(dictionary<values=)?(large_)?string(_view)?\b")
JSON_NAMES = {".json", ".jsonl", ".ndjson"}
MARKED_UP = {".csv", ".tsv", ".html", ".htm", ".xml"}

# Objects, or an array of objects or strings, which is refused: it isn't JSON lines.
JSON = re.compile(rb'\{\s*(?:\}|"[^"\n]*"\s*:)|\[\s*(?:\{|"[^"\n]*"\s*[],])')

BLOCK = 2**20  # characters, bytes or ids read and encoded at once
PACKED = 2**12  # bytes of an archive unpacked at once; they may grow a lot

SHOWN_SECONDS = 0.1  # from one percentage on a terminal to the next
TIMEOUT_SECONDS = 5  # without an answer
WHOLE_SECONDS, WHOLE_BYTES = 120, 20 * 2**20  # for a file, which has less than 2 MiB
TRIES = 3  # if a server answers but fails

Ids = Iterable[np.ndarray]  # of tokens, in blocks


class Parts(NamedTuple):
    train: Ids
    val: Ids | None  # None: `train` is all there is, and its last tenth is to become this part


class UserError(Exception):
    """An error that the user can fix, printed as one line."""


class Source(NamedTuple):
    path: str
    kind: str  # "tokens", "parquet", "json" or "text"


class Corpus(NamedTuple):
    name: str
    sources: list[Source]  # none where it is the source text of Python's own modules

    @property
    def has_tokens(self) -> bool:
        return any(source.kind == "tokens" for source in self.sources)


@contextmanager
def whole(*paths: Path) -> Iterator[list[Path]]:
    """Yields temporary files and renames them to `paths` in the end, so that nobody sees half a
    file, and a run that has opened the old file keeps it."""
    temporary = [path.with_name(f"{path.name}.{os.getpid()}.tmp") for path in paths]
    try:
        yield temporary
        for written, path in zip(temporary, paths, strict=True):
            written.replace(path)
    finally:
        for written in temporary:
            written.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes) -> None:
    with whole(path) as (temporary,):
        temporary.write_bytes(data)


class NotFetched(Exception):
    """Why a file wasn't fetched, in words; `answers` is whether its server said anything."""

    def __init__(self, why: str, answers: bool = True):
        super().__init__(why)
        self.answers = answers


class Web:
    """Fetches files; `failure` is the last error. After a server that didn't answer at all, nothing
    else is tried."""

    def __init__(self):
        self.failure, self.answers = None, True

    def fetch(self, url: str, check: Callable[[bytes], object]) -> bytes | None:
        """Returns the bytes at `url` if they pass the check."""
        for attempt in range(TRIES):
            if not self.answers:
                break
            time.sleep(attempt)
            try:
                return fetched(url, check)
            except NotFetched as failure:
                self.failure, self.answers = str(failure), failure.answers
        return None


def fetched(url: str, check: Callable[[bytes], object]) -> bytes:
    """Returns the bytes at `url`. Raises NotFetched, also if they don't pass the check."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:
            data = read_limited(response)
    except (OSError, HTTPException, ValueError) as error:
        answers = isinstance(error, HTTPError) or not isinstance(error, URLError)
        raise NotFetched(f"{url}: {getattr(error, 'reason', error)}", answers)
    if not check(data):
        raise NotFetched(f"{url} isn't the file that was expected ({len(data):,} bytes)")
    return data


def read_limited(response) -> bytes:
    """Returns an answer's bytes. Raises TimeoutError or ValueError for an endless one."""
    data, until = bytearray(), time.monotonic() + WHOLE_SECONDS
    for piece in iter(partial(response.read1, 2**16), b""):
        data += piece
        if len(data) > WHOLE_BYTES:
            raise ValueError(f"more than {WHOLE_BYTES:,} bytes")
        if time.monotonic() > until:
            raise TimeoutError(f"not there after {WHOLE_SECONDS} seconds")
    return bytes(data)


def extra(name: str, what: str):
    """Imports a library for `what`. Raises UserError if it isn't installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(f"{what} needs {name}: python -m pip install {name}")


def files_of(names: list[str]) -> Iterator[str]:
    """Yields the files, and instead of a folder its tokens, except for tests. Raises UserError."""
    for name in names:
        paths = [name]
        if os.path.isdir(name):
            inside = sorted(map(str, Path(name).glob("*.bin")))
            paths = [path for path in inside if not has_word(path, "test")]
        if not paths:
            raise UserError(f"{name} is a folder without tokens (*.bin): name the files in it")
        yield from paths


def warn_of_doubles(paths: list[str]) -> None:
    """Prints which file comes twice: its text may be trained on and validated on."""
    files = [os.path.realpath(path) for path in paths]
    for file in sorted({file for file in files if files.count(file) > 1}):
        print(f"{Path(file).name} is named twice: text for validation may be trained on, too")


def has_word(path: str, word: str) -> bool:
    """Returns whether a file's name has the word (a pattern), and not within a longer one."""
    return bool(re.search(rf"(?<![a-z])(?:{word})(?![a-z])", Path(path).name.lower()))


def kind_of(path: str) -> str:
    """Returns a file's kind by its content: "tokens", "parquet", "json" (lines) or "text", the last
    two also in an archive. Raises UserError, OSError."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        return "text"  # a pipe can be read only once
    with open(path, "rb") as file:
        head = file.read(BLOCK)
    if has_tokens(path, head):
        return "tokens"
    if head.startswith(PARQUET):
        return "parquet"
    beginning = next(unpacked(path))  # which refuses what is no text
    if is_json(path, beginning):
        return "json"
    return "text"


def has_tokens(path: str, head: bytes) -> bool:
    """Returns whether a file that begins so holds ids: nanoGPT's, whose NUL bytes no text has, or
    llm.c's."""
    return path.endswith(".bin") and b"\0" in head or has_llm_c_header(head)


def is_json(path: str, beginning: bytes) -> bool:
    """Returns whether a text that begins so is JSON lines, by its file's name or its beginning."""
    has_name = not JSON_NAMES.isdisjoint(Path(path.lower()).suffixes)
    return has_name or bool(JSON.match(beginning.removeprefix(codecs.BOM_UTF8).lstrip()))


def has_llm_c_header(head: bytes) -> bool:
    """Returns whether it begins with a date of 2024, as no text and no two of GPT-2's ids do."""
    return len(head) >= 12 and int.from_bytes(head[:4], "little") // 10_000 == 2024


def unpacker(head: bytes, path: str) -> Callable | None:
    """Returns a constructor of what unpacks the file, None if it isn't packed. Raises UserError."""
    if head.startswith(GZIP):
        return partial(zlib.decompressobj, 31)
    if BZIP2.match(head):
        return extra("bz2", path).BZ2Decompressor
    if head.startswith(XZ):
        return extra("lzma", path).LZMADecompressor
    if ZSTD.match(head):
        return extra("zstandard", path).ZstdDecompressor().decompressobj
    return None


def unpacked(path: str, progress: "Progress | None" = None) -> Iterator[bytes]:
    """Yields a file's bytes in blocks, unpacked. Raises OSError, UserError for what is no text."""
    blocks = blocks_of(path, progress)
    first = next(blocks, b"")
    for beginning, what in NO_TEXT.items():
        if first.startswith(beginning):
            raise UserError(f"{path} {what}")
    if b"\0" in first:
        raise UserError(
            f"{path} has NUL bytes: it is UTF-16 (save it as UTF-8), an archive such as"
            " tar (unpack it), or no text"
        )
    yield first
    yield from blocks


def blocks_of(path: str, progress: "Progress | None") -> Iterator[bytes]:
    """Yields a file's bytes in blocks, unpacked. Raises UserError, OSError."""
    with open(path, "rb") as file:
        start = unpacker(file.peek(10), path)
        if start:
            yield from unpack(path, read_blocks(file, PACKED, progress), start)
        else:
            yield from read_blocks(file, BLOCK, progress)


def read_blocks(file: BinaryIO, size: int, progress: "Progress | None") -> Iterator[bytes]:
    for block in iter(partial(file.read, size), b""):
        if progress:
            progress.add(len(block))
        yield block


def unpack(path: str, blocks: Iterable[bytes], start: Callable) -> Iterator[bytes]:
    """Yields what is in an archive, or in several of which each follows the one before; `start`
    makes what unpacks one. Raises UserError."""
    archive = start()
    for block in blocks:
        if archive.eof:  # zeros may follow
            block = block.lstrip(b"\0")
        while block:
            if archive.eof:
                archive = start()
            data = decompressed(path, archive, block)
            if data:
                yield data
            block = archive.unused_data.lstrip(b"\0")
    if not archive.eof:
        raise UserError(f"{path} is cut off: the archive has no end")


def decompressed(path: str, archive, block: bytes) -> bytes:
    """Returns what is in a block of an archive. Raises UserError."""
    try:
        return archive.decompress(block)
    except Exception as error:  # each library raises its own
        raise UserError(f"{path} is damaged: {error}")


def read_text(path: str, progress: "Progress") -> Iterator[str]:
    """Yields a text in blocks. Raises UserError, OSError."""
    if MARKED_UP & {*Path(path.lower()).suffixes}:
        print(f"{path} is taken as text, with its markup")
    decoder = IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")(), translate=True)
    for block in chain(unpacked(path, progress), [b""]):
        try:
            yield decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            near = error.object[max(0, error.start - 20) : error.end + 20]
            raise UserError(f"{path} is not UTF-8 text: {near!r}")


def read_json(path: str, progress: "Progress") -> Iterator[str]:
    """Yields the documents of JSON lines in blocks. Raises UserError, OSError."""
    number = 0
    for lines in whole_lines(unpacked(path, progress)):
        documents = [document_in(line, path, number + i) for i, line in enumerate(lines, 1)]
        number += len(lines)
        # JSON may hold half a character, which becomes U+FFFD, as in tiktoken.
        yield re.sub("[\ud800-\udfff]", "\ufffd", joined(documents, progress))


def whole_lines(blocks: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yields the lines that end in each block; the last one may lack its end."""
    begun: list[bytes] = []  # the parts of a line without its end so far
    for block in chain(blocks, [b"\n"]):
        first, *others = block.split(b"\n")
        begun.append(first)
        if others:
            yield [b"".join(begun), *others[:-1]]
            begun = others[-1:]


def joined(documents: list[str | None], progress: "Progress") -> str:
    """Returns the documents with <|endoftext|> between them; those without text are skipped."""
    progress.skipped += documents.count(None)
    return END.join(filter(None, documents))


def document_in(line: bytes, path: str, number: int) -> str | None:
    """Returns the text of a line of JSON lines, None for a document without one. Raises
    UserError."""
    if not line.strip():
        return ""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise UserError(f"{path} is not JSON lines: one object a line (see line {number})")
    text = document.get("text", False)
    if not isinstance(text, str | None):
        raise UserError(f"{path}, line {number} has no text in 'text': {line[:80]!r}")
    return text


def read_parquet(path: str, progress: "Progress") -> Iterator[str]:
    """Yields the documents of a Parquet file in blocks. Raises UserError, OSError."""
    arrow, parquet = extra("pyarrow", path), extra("pyarrow.parquet", path)
    size = os.path.getsize(path)
    with (
        damage_told(path, arrow.ArrowException, OSError, ValueError),
        parquet.ParquetFile(path, buffer_size=BLOCK, pre_buffer=False) as file,
    ):
        check_columns(path, {field.name: str(field.type) for field in file.schema_arrow})
        for batch in file.iter_batches(64, columns=["text"]):  # a document may be a book
            progress.add(size * len(batch) // file.metadata.num_rows)
            yield joined(batch.column(0).to_pylist(), progress)


@contextmanager
def damage_told(path: str, *errors: type[Exception]) -> Iterator[None]:
    """Raises UserError, with the first line of what a library says, in the place of its errors."""
    try:
        yield
    except errors as error:
        reason, *_ = [*str(error).splitlines(), type(error).__name__]
        raise UserError(f"{path} is damaged: {reason}")


def check_columns(path: str, columns: dict[str, str]) -> None:
    """Raises UserError unless a Parquet file, by the types of its columns, has texts."""
    if not PARQUET_STRINGS.match(columns.get("text", "")):
        others = ", ".join(map(" ".join, columns.items()))
        raise UserError(f"{path} has no column 'text' of strings, but: {others}")


READ = dict(text=read_text, json=read_json, parquet=read_parquet)


def read_files(sources: list[Source], progress: "Progress") -> Iterator[str]:
    """Yields the text of all files in blocks, with a line break between two texts and <|endoftext|>
    between documents. Raises UserError, OSError."""
    for previous, source in pairwise([None, *sources]):
        yield from read_file(source, separator(previous, source), progress)


def separator(previous: Source | None, source: Source) -> str:
    """Returns what is between the text of two files."""
    if previous is None:
        return ""
    if previous.kind == source.kind == "text":
        return "\n"
    return END


def read_file(source: Source, before: str, progress: "Progress") -> Iterator[str]:
    """Yields the text of a file in blocks, the first of them after `before`, and <|endoftext|>
    between blocks of documents. Raises UserError, OSError."""
    between = END
    if source.kind == "text":
        between = ""
    blocks = READ[source.kind](source.path, progress)
    texts = (block.replace("\ufeff", "") for block in blocks)
    for text in not_blank(source.path, filter(None, texts)):
        yield before + text
        before = between


def not_blank(path: str, texts: Iterable[str]) -> Iterator[str]:
    """Yields the texts of a file. Raises UserError where they hold nothing but white space."""
    is_blank = True
    for text in texts:
        is_blank = is_blank and text.isspace()
        yield text
    if is_blank:
        raise UserError(f"{path} is empty")


def read_tokens(path: str, progress: "Progress") -> Iterator[np.ndarray]:
    """Yields the ids of a file of nanoGPT or llm.c. Raises UserError, OSError."""
    with open(path, "rb") as file:
        file.seek(start_of_ids(path, file))
        for block in iter(partial(file.read, 2 * BLOCK), b""):
            ids = np.frombuffer(block, "<u2")
            if ids.max() > END_ID:
                raise UserError(f"{path} has id {ids.max():,}: GPT-2's end with {END_ID:,}")
            progress.add(ids.nbytes)
            yield ids


def start_of_ids(path: str, file: BinaryIO) -> int:
    """Returns the byte that a file's ids begin at: after llm.c's header, or the first of nanoGPT's.
    Raises UserError for a file that isn't whole, isn't of GPT-2's ids as uint16, or has none."""
    size, head = os.fstat(file.fileno()).st_size, file.read(HEADER)
    if has_llm_c_header(head):
        start = HEADER
        check_llm_c(path, head, size - start)
    else:
        start = 0
        check_nano_gpt(path, head, size)
    if size <= start:
        raise UserError(f"{path} is empty")
    return start


def check_llm_c(path: str, head: bytes, size: int) -> None:
    """Raises UserError unless the header announces uint16 ids, and as many as there are bytes."""
    *form, count = np.frombuffer(head[:12], "<i4").tolist()
    if form != LLM_C:
        raise UserError(f"{path} is of llm.c's format and version {form}, not {LLM_C}")
    if size != 2 * count:
        raise UserError(f"{path} is cut off: {max(0, size // 2):,} of {count:,} tokens")


def check_nano_gpt(path: str, head: bytes, size: int) -> None:
    """Raises UserError for what can't be GPT-2's ids as uint16: a file of nothing else."""
    if Path(path).with_name("meta.pkl").exists():
        raise UserError(
            f"{path} isn't GPT-2's: meta.pkl beside it is another vocabulary,"
            " nanoGPT's of characters; prepare the text instead"
        )
    if len(head) > 2 and not np.frombuffer(head[: len(head) // 2 * 2], "<u2")[1::2].any():
        raise UserError(f"{path} looks like 32-bit ids (every second is 0), not uint16")
    if size % 2:
        raise UserError(f"{path} is cut off, or not uint16: it has {size:,} bytes")


def last_cut(text: str) -> int:
    """Returns the last place to cut at, or -1: <|endoftext|>, or a line break at which GPT-2's
    tokenizer starts anew."""
    last_end = text.rfind(END)
    for line_break in line_breaks_behind(last_end, text):
        following = line_break + 1
        if is_new_start(text[following : following + len(END)]):
            return line_break
    return last_end


def line_breaks_behind(start: int, text: str) -> Iterator[int]:
    """Yields the places of line breaks behind `start`, the last one first, but that of a line break
    at the very end: what follows it isn't known."""
    place = text.rfind("\n", 0, -1)
    while place > start:
        yield place
        place = text.rfind("\n", 0, place)


def is_new_start(following: str) -> bool:
    """Returns whether GPT-2's tokenizer starts anew at a line break before these characters: before
    anything but white space and <|endoftext|>, of which a block may end with a part."""
    return not (following[0].isspace() or END.startswith(following))


def pieces(blocks: Iterable[str]) -> Iterator[str]:
    """Yields the text in pieces, one for each block in which it can be cut."""
    held = []
    for block in blocks:
        cut = last_cut(block)
        if cut >= 0:
            yield "".join([*held, block[:cut]])
            held = []
        held.append(block[max(0, cut) :])
    yield "".join(held)


def encode(tokenizer: tiktoken.Encoding, texts: Iterable[str]) -> Iterator[np.ndarray]:
    """Yields each text's ids, in order, encoded on all cores (tiktoken releases Python's lock)."""
    cores, texts = usable_cores(), iter(texts)
    with ThreadPoolExecutor(cores) as threads:
        while batch := list(islice(texts, min(2 * cores, 32))):  # few at a time save memory
            yield from threads.map(partial(tokenizer.encode_to_numpy, allowed_special="all"), batch)


def usable_cores() -> int:
    """Returns on how many cores this process may run; os.process_cpu_count, from Python 3.13 on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Progress:
    """Counts the bytes read of `total`, which a terminal shows, and the documents skipped for want
    of text."""

    def __init__(self, total: int):
        self.total, self.done, self.skipped = total, 0, 0
        self.is_shown = sys.stderr is not None and sys.stderr.isatty()
        self.next_time = 0.0  # at which the percentage is shown again

    def add(self, count: int) -> None:
        self.done += count
        if self.is_shown and time.monotonic() >= self.next_time:
            self.next_time = time.monotonic() + SHOWN_SECONDS
            percent = min(100, 100 * self.done // max(1, self.total))
            print(f"\r{percent:3} %\r", end="", file=sys.stderr, flush=True)


def book(out: Path, web: Web) -> Path | None:
    """Returns the file of Middlemarch's text in `out`, fetched if need be; None if that fails."""
    path = out / "middlemarch.txt"
    if not path.exists():
        data = web.fetch(BOOK_URL, text_of_the_book)
        if data is None:
            return None
        write_whole(path, text_of_the_book(data).encode("utf-8"))
    return path


def text_of_the_book(data: bytes) -> str | None:
    """Returns what is between Gutenberg's marks, None if that isn't the whole book."""
    text = data.decode("utf-8-sig", errors="replace").replace("\r\n", "\n")
    start, end = (text.find(mark) for mark in BOOK_MARKS)
    if not (0 <= start < end) or BOOK_TITLE not in text[:start] or end - start < 1_500_000:
        return None
    return text[text.index("\n", start) : end].strip("\n") + "\n"


def standard_library(characters: int) -> str:
    """Returns the first `characters` of Python's own modules, sorted by name."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [folder / f"{name}.py" for name in sorted(sys.stdlib_module_names)]
    text = "".join(path.read_text(encoding="utf-8") for path in paths if path.is_file())
    if len(text) < characters:
        raise UserError("no network and no source text of Python here: name a text file")
    return text[:characters]


def gpt2_tokenizer(cache: Path, web: Web) -> tiktoken.Encoding | None:
    """Returns GPT-2's tokenizer, with its files in `cache`; None if they can't be fetched."""
    for name, digest in TOKENIZER_SHA256.items():
        if not ensure_cached(TOKENIZER_URL + name, digest, cache, web):
            return None
    with environment_variable("TIKTOKEN_CACHE_DIR", str(cache)):
        return tiktoken.get_encoding("gpt2")


def ensure_cached(url: str, digest: str, cache: Path, web: Web) -> bool:
    """Copies the file at `url` from the user's cache into `cache`, or fetches it, as tiktoken would
    without a time-out, unless it is there. Returns whether it is there now."""
    file = hashlib.sha1(url.encode()).hexdigest()  # as tiktoken calls it
    if content_of(cache / file, digest):
        return True
    users_cache = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or cache)
    data = content_of(users_cache / file, digest) or web.fetch(url, partial(has_sha256, digest))
    if data is None:
        return False
    cache.mkdir(parents=True, exist_ok=True)
    write_whole(cache / file, data)
    return True


def content_of(path: Path, digest: str) -> bytes | None:
    """Returns the content of a file, None if there is none with this SHA-256."""
    if not path.is_file():
        return None
    data = path.read_bytes()
    if not has_sha256(digest, data):
        return None
    return data


def has_sha256(digest: str, data: bytes) -> bool:
    return hashlib.sha256(data).hexdigest() == digest


@contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable, and in the end puts back what it was."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def tokenizer_for(corpus: Corpus, cache: Path, web: Web) -> tiktoken.Encoding:
    """Returns GPT-2's tokenizer, or where it can't be fetched one whose tokens are bytes. Raises
    UserError for tokens, which need their own."""
    tokenizer = gpt2_tokenizer(cache, web)
    if tokenizer:
        return tokenizer
    if corpus.has_tokens:
        raise UserError(f"{web.failure}: tokens need GPT-2's tokenizer beside them")
    ranks = {bytes([i]): i for i in range(256)}
    return tiktoken.Encoding(BYTES, pat_str="(?s:.)", mergeable_ranks=ranks, special_tokens={})


def vocabulary_of(tokenizer: tiktoken.Encoding) -> dict:
    """Returns, for JSON, what tiktoken.Encoding is built from."""
    ranks = tokenizer._mergeable_ranks
    return dict(
        pattern=tokenizer._pat_str,
        special=tokenizer._special_tokens,
        tokens=[token.decode("latin-1") for token in sorted(ranks, key=ranks.get)],
    )


class Plan(NamedTuple):
    """What text is turned into tokens, and by what."""

    corpus: Corpus
    tokenizer: tiktoken.Encoding
    failure: str | None  # the last error of the web, whose files others may take the place of

    @property
    def replacements(self) -> list[str]:
        """What takes the place of the book and of GPT-2's tokenizer, in words."""
        replacements = []
        if not self.corpus.sources:
            replacements.append(f"the text is the {self.corpus.name}")
        if self.tokenizer.name == BYTES:
            replacements.append("the tokens are bytes")
        return replacements


def prepare(files: list[str], out: Path) -> None:
    """Writes train.bin, val.bin, vocabulary.json and meta.json. Raises UserError, OSError."""
    plan = plan_for(files, out)
    if plan.replacements:
        print(f"{plan.failure}: {', '.join(plan.replacements)}", flush=True)
    progress = Progress(sum(os.stat(source.path).st_size for source in plan.corpus.sources))
    parts = parts_of(plan.corpus, plan.tokenizer, progress)
    counts = write_folder(out, plan.corpus.name, plan.tokenizer, parts)
    written = ", ".join(f"{count:,} {part}" for part, count in counts.items())
    line = f"{plan.corpus.name}: {written} tokens ({plan.tokenizer.name}) in {out}"
    if progress.skipped:
        line += f"; {progress.skipped:,} documents without text skipped"
    print(line)


def plan_for(files: list[str], out: Path) -> Plan:
    """Returns what to do with files, or without any with the book; fetches what that takes. Raises
    UserError, OSError."""
    sources, web = sources_of(files), Web()
    out.mkdir(parents=True, exist_ok=True)
    if files:
        corpus = corpus_of(sources)
    else:
        corpus = default_corpus(out, web)
    tokenizer = tokenizer_for(corpus, out / "tiktoken", web)
    return Plan(corpus, tokenizer, web.failure)


def sources_of(files: list[str]) -> list[Source]:
    """Returns the files to read, and prints which comes twice. Raises UserError for tokens beside
    text."""
    sources = [Source(path, kind_of(path)) for path in files_of(files)]
    warn_of_doubles([source.path for source in sources])
    tokens = [source.path for source in sources if source.kind == "tokens"]
    if 0 < len(tokens) < len(sources):
        raise UserError(f"{tokens[0]} has tokens, another file has text: one kind at a time")
    return sources


def corpus_of(sources: list[Source]) -> Corpus:
    """Returns the files as a corpus, which is called "a, b, c and 2 more"."""
    names = [Path(source.path).name for source in sources]
    title = ", ".join(names[:3])
    if len(names) > 3:
        title += f" and {len(names) - 3} more"
    return Corpus(title, sources)


def default_corpus(out: Path, web: Web) -> Corpus:
    """Returns the book, or Python's own modules where it can't be fetched."""
    path = book(out, web)
    if path:
        return Corpus(BOOK_TITLE, [Source(str(path), "text")])
    return Corpus(f"standard library of Python {sys.version.split()[0]}", [])


def parts_of(corpus: Corpus, tokenizer: tiktoken.Encoding, progress: Progress) -> Parts:
    """Returns the ids to train on and those to validate on. Raises UserError."""
    if corpus.has_tokens:
        return parts_by_name([source.path for source in corpus.sources], progress)
    if corpus.sources:
        return Parts(encode(tokenizer, pieces(read_files(corpus.sources, progress))), val=None)
    # GPT-2's tokens of source text are 2 to 4 characters long.
    (ids,) = encode(tokenizer, [standard_library(4 * BOOK_TOKENS)])
    return Parts([ids[:BOOK_TOKENS]], val=None)


def parts_by_name(paths: list[str], progress: Progress) -> Parts:
    """Returns the ids in files, of which those named "val" are for validation unless all are."""
    val = [path for path in paths if has_word(path, "val(idation)?")]
    train = [path for path in paths if path not in val]
    if train and val:
        return Parts(ids_in(train, progress), ids_in(val, progress))
    return Parts(ids_in(paths, progress), val=None)


def ids_in(paths: list[str], progress: Progress) -> Ids:
    return chain.from_iterable(read_tokens(path, progress) for path in paths)


def write_folder(
    out: Path, corpus: str, tokenizer: tiktoken.Encoding, parts: Parts
) -> dict[str, int]:
    """Writes all files, meta.json last, since it marks the others complete. Returns how many tokens
    each part has. Raises UserError, OSError."""
    with whole(out / "train.bin", out / "val.bin") as paths:
        counts = write_parts(parts, *paths)
        figures = dict(
            corpus=corpus,
            tokenizer=tokenizer.name,
            vocabulary=tokenizer.n_vocab,
            tokens=counts,
            sha256=dict(zip(counts, map(sha256_of, paths), strict=True)),
        )
        (out / "meta.json").unlink(missing_ok=True)
    write_whole(out / "vocabulary.json", json.dumps(vocabulary_of(tokenizer)).encode())
    write_whole(out / "meta.json", (json.dumps(figures, indent=2) + "\n").encode())
    return counts


def write_parts(parts: Parts, train_path: Path, val_path: Path) -> dict[str, int]:
    """Writes the ids, which are split here where they aren't yet, and never holds them all; returns
    how many each part has. Raises UserError for too few."""
    with open(train_path, "wb+") as train, open(val_path, "wb") as val:
        counts = dict(train=write_ids(train, parts.train))
        if parts.val is None:
            counts = move_end(train, counts["train"], val)
        else:
            counts["val"] = write_ids(val, parts.val)
    count = sum(counts.values())
    if count < round(2 / (1 - TRAIN_SHARE)):
        raise UserError(f"the text is too short: {count} tokens")
    return counts


def write_ids(file: BinaryIO, blocks: Ids) -> int:
    """Writes uint16 ids; returns how many."""
    file.writelines(block.astype("<u2") for block in blocks)
    return file.tell() // 2


def move_end(train: BinaryIO, count: int, val: BinaryIO) -> dict[str, int]:
    """Moves the last of `count` ids from one file to the other; returns how many each then has."""
    kept = int(TRAIN_SHARE * count)
    train.seek(2 * kept)
    shutil.copyfileobj(train, val, BLOCK)
    train.truncate(2 * kept)
    return dict(train=kept, val=count - kept)


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> int:
    sys.stdout = sys.stdout or open(os.devnull, "w")  # it may be closed
    sys.stdout.reconfigure(errors="replace")  # a name may hold what a terminal can't show
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: it cleans up
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="text, JSON lines (also packed),"
        " Parquet, tokens of nanoGPT or llm.c (default: the book)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=HERE,
        help="folder of the tokens (default: next to this script)",
    )
    args = parser.parse_args()
    try:
        prepare(args.files, args.out)
        sys.stdout.flush()  # here, where a pipe without a reader is expected
    except BrokenPipeError:  # into `head`, say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
