"""Turn text into tokens: train.bin, val.bin (uint16 ids) and meta.json.

    python data/prepare.py                  # Middlemarch, from Project Gutenberg
    python data/prepare.py FILE [FILE ...]  # your own text, UTF-8
    python data/prepare.py --out DIR        # somewhere else than beside this script

Without a network the text is the Python standard library's own source, and without GPT-2's
tokenizer files the tokens are bytes. meta.json, written last, says what was used.
"""

import argparse
import hashlib
import json
import os
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from pathlib import Path

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

TIMEOUT_SECONDS = 15
TRIES = 3


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


def fetch(url: str) -> bytes | None:
    """The bytes at `url`, or None, said in a line, where that fails."""
    for attempt in range(1, TRIES + 1):
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:
                data = response.read()
                length = response.headers.get("Content-Length")
                if length and len(data) != int(length):
                    raise OSError(f"{len(data)} of {length} bytes")
                return data
        except (OSError, urllib.error.URLError, ValueError) as error:
            reason = getattr(error, "reason", error)
            print(f"{url}: {reason} (try {attempt} of {TRIES})", flush=True)
            if attempt < TRIES:
                time.sleep(attempt)
    return None


def read_files(paths: list[str]) -> str:
    texts = []
    for path in paths:
        try:
            texts.append(Path(path).read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 text (byte {error.start})")
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}")
        if not texts[-1].strip():
            raise UserError(f"{path} is empty")
    return "\n".join(texts)


def book(out: Path) -> str | None:
    """The text of Middlemarch between Gutenberg's marks, kept in `out`; None without a network."""
    path = out / "middlemarch.txt"
    if path.exists():
        return path.read_text(encoding="utf-8")
    data = fetch(BOOK_URL)
    if data is None:
        return None
    text = data.decode("utf-8-sig", errors="replace").replace("\r\n", "\n")
    start, end = (text.find(mark) for mark in BOOK_MARKS)
    if not (0 <= start < end) or BOOK_TITLE not in text[:start] or end - start < 1_500_000:
        print(f"{BOOK_URL} is not the whole of {BOOK_TITLE} ({len(data):,} bytes)", flush=True)
        return None
    text = text[text.index("\n", start) : end].strip("\n") + "\n"
    write_whole(path, text.encode("utf-8"))
    return text


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


def gpt2_tokenizer(cache: Path) -> tiktoken.Encoding | None:
    """GPT-2's tokenizer, its files fetched where `cache` lacks them; None without a network."""
    for name, digest in TOKENIZER_SHA256.items():
        # tiktoken looks for a file by the SHA-1 of its URL, and fetches without a time-out.
        path = cache / hashlib.sha1((TOKENIZER_URL + name).encode()).hexdigest()
        if path.is_file() and sha256(path.read_bytes()) == digest:
            continue
        data = fetch(TOKENIZER_URL + name)
        if data is None:
            return None
        if sha256(data) != digest:
            print(f"{TOKENIZER_URL}{name} is not the file that tiktoken expects", flush=True)
            return None
        cache.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)
    os.environ["TIKTOKEN_CACHE_DIR"] = str(cache)
    return tiktoken.get_encoding("gpt2")


def byte_tokenizer() -> tiktoken.Encoding:
    ranks = {bytes([i]): i for i in range(256)}
    return tiktoken.Encoding("bytes", pat_str="(?s:.)", mergeable_ranks=ranks, special_tokens={})


def prepare(files: list[str], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    text = read_files(files) if files else book(out)
    tokenizer = gpt2_tokenizer(Path(os.environ.get("TIKTOKEN_CACHE_DIR") or out / "tiktoken"))
    if tokenizer is None:
        print("GPT-2's tokenizer isn't available: the tokens are bytes")
        tokenizer = byte_tokenizer()
    whole_text = True
    if files:
        corpus = ", ".join(Path(file).name for file in files)
    elif text is not None:
        corpus = BOOK_TITLE
    else:
        corpus = f"standard library of Python {sys.version.split()[0]}"
        print(f"{BOOK_TITLE} isn't available: the text is the {corpus}")
        # GPT-2's tokens of source text are 2 to 4 characters long.
        text, whole_text = standard_library(4 * BOOK_TOKENS), False
    ids = tokenizer.encode_ordinary(text)
    if not whole_text:
        ids = ids[:BOOK_TOKENS]
    if len(ids) < 2 / (1 - TRAIN_SHARE):
        raise UserError(f"the text is too short: {len(ids)} tokens")
    split = int(TRAIN_SHARE * len(ids))
    parts = {
        part: np.array(ids_of_part, dtype="<u2").tobytes()
        for part, ids_of_part in (("train", ids[:split]), ("val", ids[split:]))
    }
    meta = out / "meta.json"
    meta.unlink(missing_ok=True)  # it marks the parts complete: not while they change
    for part, data in parts.items():
        write_whole(out / f"{part}.bin", data)
    figures = dict(
        corpus=corpus,
        tokenizer=tokenizer.name,
        vocabulary=tokenizer.n_vocab,
        tokens={part: len(data) // 2 for part, data in parts.items()},
        sha256={part: sha256(data) for part, data in parts.items()},
    )
    write_whole(meta, (json.dumps(figures, indent=2) + "\n").encode())
    counts = ", ".join(f"{count:,} {part}" for part, count in figures["tokens"].items())
    print(f"{corpus}: {counts} tokens ({tokenizer.name}) in {out}")


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
