"""Turn text into tokens: train.bin, val.bin (uint16 ids), vocabulary.json and meta.json.

    python data/prepare.py                  # Middlemarch, from Project Gutenberg
    python data/prepare.py FILE [FILE ...]  # your own text, UTF-8
    python data/prepare.py --out DIR        # somewhere else than beside this script

Without a network the text is the Python standard library's own source, and without GPT-2's
tokenizer files the tokens are bytes. meta.json, written last, says what was used. vocabulary.json
has all of the tokenizer: the bytes of each id (as latin-1), the pattern that splits a text, and the
special tokens; so the folder can be copied to a machine without a network.

A text of any size is read, encoded over all cores and written in pieces, so that memory stays
small. It is cut only at line breaks before a character that isn't white space: there the tokenizer
begins anew in any case, so that the ids are those of the whole text in one piece.
"""

import argparse
import hashlib
import json
import os
import sys
import sysconfig
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from io import StringIO
from pathlib import Path
from typing import TextIO
from urllib.error import HTTPError, URLError

import numpy as np
import tiktoken

HERE = Path(__file__).resolve().parent
TRAIN_SHARE = 0.9

BOOK_URL = "https://www.gutenberg.org/cache/epub/145/pg145.txt"
BOOK_TITLE = "Middlemarch"
BOOK_MARKS = ("*** START OF THE PROJECT GUTENBERG EBOOK", "*** END OF THE PROJECT GUTENBERG EBOOK")
BOOK_TOKENS = 460_010  # of GPT-2's; the text without a network is cut to as many

TOKENIZER_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
TOKENIZER_SHA256 = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}

BLOCK = 2**20  # characters that are read and encoded at once

TIMEOUT_SECONDS = 5  # without an answer
WHOLE_SECONDS, WHOLE_BYTES = 120, 20 * 2**20  # of one file, which has less than 2 MiB
TRIES = 3  # of a server that answers and then fails


class UserError(Exception):
    """An error that the user can fix, printed as one line."""


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_whole(path: Path, data: bytes) -> None:
    """Writes to a temporary file and renames it, so that nobody ever sees half a file."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class Web:
    """Fetches files. `failure` tells what couldn't be had; where nothing answers at all, nothing
    else is tried."""

    def __init__(self):
        self.failure, self.answers = None, True

    def fetch(self, url: str, check: Callable[[bytes], bool]) -> bytes | None:
        """The bytes at `url` that pass the check, or None."""
        for attempt in range(TRIES if self.answers else 0):
            time.sleep(attempt)
            try:
                with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:
                    data = read_limited(response)
                if check(data):
                    return data
                self.failure = f"{url} isn't the file that was expected ({len(data):,} bytes)"
            except (OSError, HTTPException, ValueError) as error:
                self.failure = f"{url}: {getattr(error, 'reason', error)}"
                if isinstance(error, URLError) and not isinstance(error, HTTPError):
                    self.answers = False
                    break
        return None


def read_limited(response) -> bytes:
    """All of an answer. Raises TimeoutError or ValueError for one that goes on and on."""
    data, until = bytearray(), time.monotonic() + WHOLE_SECONDS
    while piece := response.read1(2**16):
        data += piece
        if len(data) > WHOLE_BYTES:
            raise ValueError(f"more than {WHOLE_BYTES:,} bytes")
        if time.monotonic() > until:
            raise TimeoutError(f"not there after {WHOLE_SECONDS} seconds")
    return bytes(data)


def blocks_of(file: TextIO) -> Iterator[str]:
    return iter(lambda: file.read(BLOCK), "")


def read_files(paths: list[str], progress: "Progress") -> Iterator[str]:
    """The text of all files in blocks, with a line break between two files. Raises UserError."""
    for number, path in enumerate(paths):
        if number:
            yield "\n"
        empty = True
        try:
            with open(path, encoding="utf-8") as file:
                for block in blocks_of(file):
                    empty = empty and block.isspace()
                    progress.add(len(block.encode()))
                    yield block
        except UnicodeDecodeError:
            raise UserError(f"{path} is not UTF-8 text (byte {first_bad_byte(path)})")
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}")
        if empty:
            raise UserError(f"{path} is empty")


def first_bad_byte(path: str) -> int:
    """The place of the first byte that isn't UTF-8."""
    place = 0
    with open(path, "rb") as file:
        for line in file:
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return place + error.start
            place += len(line)
    return place


def last_cut(text: str) -> int:
    """The place of the last line break before a character that isn't white space, or -1."""
    place = len(text) - 1
    while (place := text.rfind("\n", 0, place)) >= 0 and text[place + 1].isspace():
        pass
    return place


def pieces(blocks: Iterable[str]) -> Iterator[str]:
    """The text, one piece for each block that it can be cut in; all of it where it can't be."""
    held, longest = [], 0
    for block in blocks:
        cut = last_cut(block)
        if cut >= 0:
            yield "".join([*held, block[:cut]])
            held = [block[cut:]]
        else:
            held.append(block)
            longest = max(longest, sum(map(len, held)))
    if longest > 2 * BLOCK:
        print(f"{longest:,} characters of the text have no line break before a character that"
              " isn't white space: they were encoded in one piece")
    yield "".join(held)


def encode(tokenizer: tiktoken.Encoding, texts: Iterable[str]) -> Iterator[np.ndarray]:
    """The ids of each text, in their order, encoded by as many threads as there are cores; the
    tokenizer doesn't hold Python's lock."""
    cores = available_cores()

    def ids_of(text: str) -> np.ndarray:
        return tokenizer.encode_to_numpy(text, disallowed_special=()).astype("<u2")

    with ThreadPoolExecutor(cores) as threads:
        waiting = deque()
        for text in texts:
            waiting.append(threads.submit(ids_of, text))
            if len(waiting) >= min(2 * cores, 32):  # few at a time, for memory's sake
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


class Progress:
    """A bar on the terminal, where there is one, by the bytes that were read."""

    def __init__(self, total: int):
        self.total, self.done, self.shown, self.began = total, 0, -1, time.perf_counter()

    def add(self, count: int) -> None:
        self.done += count
        percent = min(100, 100 * self.done // max(1, self.total))
        if percent > self.shown and sys.stderr.isatty():
            self.shown, bar = percent, "#" * (percent // 4)
            print(f"\r[{bar:25}] {percent} %", end="", file=sys.stderr, flush=True)
            if percent == 100:
                self.clear()

    def clear(self) -> None:
        if self.shown >= 0:
            print("\r" + " " * 40 + "\r", end="", file=sys.stderr, flush=True)
        self.shown = -1

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began


def book(out: Path, web: Web) -> str | None:
    """The text of Middlemarch between Gutenberg's marks, kept in `out`; None without a network."""
    path = out / "middlemarch.txt"
    if path.exists():
        return path.read_text(encoding="utf-8")
    data = web.fetch(BOOK_URL, lambda data: text_of_the_book(data) is not None)
    if data is None:
        return None
    text = text_of_the_book(data)
    write_whole(path, text.encode("utf-8"))
    return text


def text_of_the_book(data: bytes) -> str | None:
    """What is between Gutenberg's marks, None where that isn't the whole book."""
    text = data.decode("utf-8-sig", errors="replace").replace("\r\n", "\n")
    start, end = (text.find(mark) for mark in BOOK_MARKS)
    if not (0 <= start < end) or BOOK_TITLE not in text[:start] or end - start < 1_500_000:
        return None
    return text[text.index("\n", start) : end].strip("\n") + "\n"


def standard_library(characters: int) -> str:
    """The first `characters` of Python's own modules in the order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = ""
    for name in sorted(sys.stdlib_module_names):
        path = folder / f"{name}.py"
        if path.is_file():
            text += path.read_text(encoding="utf-8")
        if len(text) >= characters:
            return text[:characters]
    raise UserError("no network and no source text of Python here: name a text file")


def gpt2_tokenizer(cache: Path, web: Web) -> tiktoken.Encoding | None:
    """GPT-2's tokenizer, whose files are put into `cache`; None without a network."""
    places = [cache, Path(os.environ.get("TIKTOKEN_CACHE_DIR") or cache)]
    for name, digest in TOKENIZER_SHA256.items():
        def whole(data: bytes, digest=digest) -> bool:
            return sha256(data) == digest

        # tiktoken looks for a file by the SHA-1 of its URL, and fetches without a time-out.
        file = hashlib.sha1((TOKENIZER_URL + name).encode()).hexdigest()
        known = [place / file for place in places if (place / file).is_file()]
        data = next(filter(whole, (path.read_bytes() for path in known)), None)
        data = data or web.fetch(TOKENIZER_URL + name, whole)
        if data is None:
            return None
        cache.mkdir(parents=True, exist_ok=True)
        write_whole(cache / file, data)
    os.environ["TIKTOKEN_CACHE_DIR"] = str(cache)
    return tiktoken.get_encoding("gpt2")


def byte_tokenizer() -> tiktoken.Encoding:
    ranks = {bytes([i]): i for i in range(256)}
    return tiktoken.Encoding("bytes", pat_str="(?s:.)", mergeable_ranks=ranks, special_tokens={})


def vocabulary_of(tokenizer: tiktoken.Encoding) -> dict:
    """What tiktoken.Encoding is made from, as JSON can hold it."""
    ranks = tokenizer._mergeable_ranks
    return dict(pattern=tokenizer._pat_str, special=tokenizer._special_tokens,
                tokens=[token.decode("latin-1") for token in sorted(ranks, key=ranks.get)])


def prepare(files: list[str], out: Path) -> None:
    """Writes train.bin, val.bin, vocabulary.json and meta.json. Raises UserError, OSError."""
    out.mkdir(parents=True, exist_ok=True)
    web = Web()
    text = None if files else book(out, web)
    tokenizer = gpt2_tokenizer(out / "tiktoken", web) or byte_tokenizer()
    library = f"standard library of Python {sys.version.split()[0]}"
    instead = [] if files or text is not None else [f"the text is the {library}"]
    instead += ["the tokens are bytes"] if tokenizer.name == "bytes" else []
    if instead:
        print(f"{web.failure}: {', '.join(instead)}", flush=True)
    limit = None
    if files:
        corpus = ", ".join(Path(file).name for file in files)
        progress = Progress(sum(os.stat(file).st_size for file in files if os.path.isfile(file)))
        blocks = read_files(files, progress)
    else:
        if text is not None:
            corpus = BOOK_TITLE
        else:
            corpus = library
            # GPT-2's tokens of source text are 2 to 4 characters long.
            text, limit = standard_library(4 * BOOK_TOKENS), BOOK_TOKENS
        progress, blocks = Progress(len(text.encode())), blocks_of(StringIO(text))
    temporary = {part: out / f"{part}.bin.{os.getpid()}.tmp" for part in ("train", "val")}
    meta = out / "meta.json"
    try:
        counts = write_parts(encode(tokenizer, pieces(blocks)), temporary, limit)
        seconds = progress.seconds
        figures = dict(
            corpus=corpus, tokenizer=tokenizer.name, vocabulary=tokenizer.n_vocab, tokens=counts,
            sha256={part: sha256_of_file(path) for part, path in temporary.items()},
        )
        meta.unlink(missing_ok=True)  # it marks the parts complete: not while they change
        for part, path in temporary.items():
            path.replace(out / f"{part}.bin")
        write_whole(out / "vocabulary.json", json.dumps(vocabulary_of(tokenizer)).encode())
    finally:
        progress.clear()
        for path in temporary.values():
            path.unlink(missing_ok=True)
    write_whole(meta, (json.dumps(figures, indent=2) + "\n").encode())
    told = ", ".join(f"{count:,} {part}" for part, count in counts.items())
    print(f"{corpus}: {told} tokens ({tokenizer.name}) in {out}")
    megabytes = (progress.done or progress.total) / 1e6
    print(f"{megabytes:,.1f} MB in {seconds:,.1f} s, {megabytes / seconds:,.1f} MB/s, with"
          f" {available_cores()} threads")


def write_parts(ids: Iterable[np.ndarray], paths: dict[str, Path], limit: int | None) -> dict:
    """Writes the ids, up to `limit`, and cuts them into the two parts, without ever holding them
    all; returns the tokens of each. Raises UserError for too few."""
    with open(paths["train"], "wb+") as train, open(paths["val"], "wb") as val:
        for some in ids:
            train.write(some.tobytes())
        count = min(train.tell() // 2, limit or sys.maxsize)
        if count < 2 / (1 - TRAIN_SHARE):
            raise UserError(f"the text is too short: {count} tokens")
        split = int(TRAIN_SHARE * count)
        train.truncate(2 * count)
        train.seek(2 * split)
        while block := train.read(BLOCK):
            val.write(block)
        train.truncate(2 * split)
    return dict(train=split, val=count - split)


def sha256_of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [FILE ...] [--out DIR]", description=__doc__.splitlines()[0]
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="UTF-8 text (default: the book)")
    parser.add_argument("--out", type=Path, default=HERE, help="default: beside this script")
    args = parser.parse_args()
    try:
        prepare(args.files, args.out)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
