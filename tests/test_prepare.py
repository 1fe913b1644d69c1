"""data/prepare.py: text to tokens, with and without files, network and tokenizer."""

import bz2
import codecs
import gzip
import hashlib
import io
import json
import lzma
import os
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from functools import partial
from http.client import IncompleteRead
from types import SimpleNamespace
from urllib.error import HTTPError, URLError

import numpy as np
import pyarrow.parquet
import pytest
import tiktoken
import zstandard
from conftest import ROOT, environment, load, run_python

PREPARE = ROOT / "data" / "prepare.py"


def prepare(out, *files, **how):
    return run_python(PREPARE, *files, "--out", out, **how)


def check(out) -> dict:
    meta = json.loads((out / "meta.json").read_text())
    for part in ("train", "val"):
        data = (out / f"{part}.bin").read_bytes()
        assert len(data) == 2 * meta["tokens"][part]
        assert hashlib.sha256(data).hexdigest() == meta["sha256"][part]
        assert np.frombuffer(data, "<u2").max() < meta["vocabulary"]
    assert not list(out.glob("*.tmp"))
    return meta


def test_no_network(tmp_path):
    """The tokens are the bytes of Python's standard library, as many as the book has."""
    result = prepare(tmp_path)
    assert result.returncode == 0, result.stderr
    said, *figures = result.stdout.splitlines()
    assert "Connection refused: the text is the standard library of Python" in said
    assert said.endswith(", the tokens are bytes") and len(figures) == 1
    meta = check(tmp_path)
    assert meta["tokens"] == {"train": 414_009, "val": 46_001}
    assert meta["tokenizer"] == "bytes" and meta["vocabulary"] == 256
    assert prepare(tmp_path).returncode == 0
    assert check(tmp_path) == meta


def test_a_file_that_is_not_there(tmp_path):
    """Nothing else is done: no folder is made, and the network isn't asked."""
    result = prepare(tmp_path / "out", PREPARE, tmp_path / "nosuch.txt")
    assert result.returncode == 1 and "nosuch.txt" in result.stderr
    assert len(result.stderr.splitlines()) == 1 and not result.stdout
    assert not (tmp_path / "out").exists()


def test_download_is_checked(tmp_path, monkeypatch):
    """Gutenberg's marks are cut off; another page, or half of the book, is refused."""
    script = load(PREPARE)
    book = "Dorothea " * 200_000
    start, end = (f"{mark} MIDDLEMARCH ***\n" for mark in script.BOOK_MARKS)
    page = f"Title: Middlemarch\r\n{start}\n{book}\n{end}The licence"
    answers(script, monkeypatch, page[: len(page) // 2].encode())
    assert script.book(tmp_path, script.Web()) is None and not [*tmp_path.iterdir()]
    answers(script, monkeypatch, page.encode())
    path = script.book(tmp_path, script.Web())
    assert path.read_text() == book + "\n"
    monkeypatch.setattr(script.urllib.request, "urlopen", lambda *_, **__: pytest.fail("again"))
    assert script.book(tmp_path, script.Web()) == path


def answers(script, monkeypatch, *replies) -> list:
    """Lets the web give these replies, the last one again and again; returns what it is asked."""
    asked, left = [], [*replies]

    def urlopen(url, timeout):
        asked.append(url)
        assert timeout == script.TIMEOUT_SECONDS
        reply = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(reply, Exception):
            raise reply
        return io.BytesIO(reply)

    monkeypatch.setattr(script.urllib.request, "urlopen", urlopen)
    monkeypatch.setattr(script.time, "sleep", lambda seconds: None)
    return asked


@pytest.mark.parametrize(("piece", "error"), [(b"x" * 2**20, ValueError), (b"x", TimeoutError)])
def test_an_endless_answer_is_refused(monkeypatch, piece, error):
    script = load(PREPARE)
    monkeypatch.setattr(script, "WHOLE_SECONDS", 0.5)
    with pytest.raises(error):
        script.read_limited(SimpleNamespace(read1=lambda size: piece))


@pytest.mark.parametrize(
    "failure",
    [
        TimeoutError("timed out"),
        IncompleteRead(b"abc", 5),
        b"other",
        HTTPError("http://one", 503, "busy", {}, None),
    ],
)
def test_a_server_that_fails_is_asked_again(monkeypatch, failure):
    """It isn't, where nothing answers at all."""
    script = load(PREPARE)
    right = b"right".__eq__
    asked, web = answers(script, monkeypatch, failure, b"right"), script.Web()
    assert web.fetch("http://one", right) == b"right" and len(asked) == 2
    asked = answers(script, monkeypatch, failure)
    assert web.fetch("http://one", right) is None and len(asked) == script.TRIES
    assert web.failure.startswith("http://one") and web.answers
    asked = answers(script, monkeypatch, URLError("no route"))
    assert web.fetch("http://one", bool) is None and web.fetch("http://two", bool) is None
    assert asked == ["http://one"] and web.failure == "http://one: no route"


def test_the_tokenizer_comes_from_a_cache_and_is_checked(tmp_path, monkeypatch):
    script = load(PREPARE)
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    answers(script, monkeypatch, b"something else")
    assert script.gpt2_tokenizer(tmp_path / "none", script.Web()) is None
    assert not (tmp_path / "none").exists()
    # What another cache holds is taken, if it is whole, and left beside the tokens.
    contents = {name: name.encode() for name in script.TOKENIZER_SHA256}
    monkeypatch.setattr(
        script,
        "TOKENIZER_SHA256",
        {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()},
    )
    cache, out = tmp_path / "cache", tmp_path / "out"
    cache.mkdir()
    for name, content in contents.items():
        file = hashlib.sha1((script.TOKENIZER_URL + name).encode()).hexdigest()
        (cache / file).write_bytes(content)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
    monkeypatch.setattr(script.tiktoken, "get_encoding", lambda name: name)
    assert script.gpt2_tokenizer(out, script.Web()) == "gpt2"
    assert sorted(path.read_bytes() for path in out.iterdir()) == sorted(contents.values())
    assert os.environ["TIKTOKEN_CACHE_DIR"] == str(cache)
    # What is whole there stays as it is: the folder may be read-only.
    files = {path: path.stat().st_ino for path in out.iterdir()}
    assert script.gpt2_tokenizer(out, script.Web()) == "gpt2"
    assert {path: path.stat().st_ino for path in out.iterdir()} == files


def blocks_of(text: str) -> list[str]:
    return [text[start : start + 20] for start in range(0, len(text), 20)]


def test_pieces_are_encoded_as_the_whole():
    """The tokenizer splits as GPT-2's does, and merges what a wrong cut would part."""
    script = load(PREPARE)
    merges = [b"\n\n", b"  ", b" \n", b"\n ", b" a", b"ab", b"\n\n\n", b"    "]
    ranks = {bytes([i]): i for i in range(256)} | {merge: 256 + i for i, merge in enumerate(merges)}
    pattern = (
        r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|"""
        r"""\s+(?!\S)|\s"""
    )
    tokenizer = tiktoken.Encoding(
        "test", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 300}
    )
    rng = np.random.default_rng(0)
    parts = np.array(["ab", "a", " ", "\n", "\n\n", "\t", "1", "'s", ".", "ü", "<|endoftext|>"])
    for _ in range(100):
        text = "".join(rng.choice(parts, 300))
        found = [*script.pieces(blocks_of(text))]
        assert "".join(found) == text and len(found) > 3
        ids = np.concatenate([*script.encode(tokenizer, found)])
        assert ids.tolist() == tokenizer.encode(text, allowed_special="all")
    text = "word " * 100 + "\n indented" * 50  # without a place to cut
    assert [*script.pieces(blocks_of(text))] == [text]


@pytest.mark.parametrize(("others", "lines"), [([], 0), (["b.txt"], 0), (["./a.txt"], 1)])
def test_a_file_that_is_named_twice(script, tmp_path, monkeypatch, capsys, others, lines):
    """It is told, since the text for validation would be trained on, too."""
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("Some words. " * 99)
    monkeypatch.chdir(tmp_path)
    script.prepare(["a.txt", *others], tmp_path)
    assert capsys.readouterr().out.count("a.txt is named twice: ") == lines


@pytest.mark.parametrize("name", ["a.jsonl", "A.JSONL", "a.JsonL.gz"])
def test_a_name_tells_json_lines(script, tmp_path, name):
    """It does where the content doesn't, as with a quotation mark in the first key."""
    path = tmp_path / name
    path.write_text('{"a\\"b": 1, "text": "x"}\n')
    assert script.kind_of(str(path)) == "json"


def test_a_look_at_a_file_is_no_progress(script, tmp_path, monkeypatch):
    """The percentage on a terminal begins when the text is read."""
    (tmp_path / "a").write_text("text\n" * 99)
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    assert script.kind_of(str(tmp_path / "a")) == "text" and not terminal.getvalue()
    script.prepare([str(tmp_path / "a")], tmp_path / "out")
    assert terminal.getvalue() == "\r100 %\r"


def test_the_percentage_is_shown_some_times_a_second(script, monkeypatch):
    """It isn't shown for each block, however small blocks are."""
    times = iter(np.arange(0, 10, 0.001))
    clock = SimpleNamespace(monotonic=lambda: next(times))
    monkeypatch.setattr(script, "time", clock)
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = script.Progress(1_000_000)
    for _ in range(5_000):
        progress.add(200)
    shown = [int(text) for text in terminal.getvalue().split("%") for text in text.split()]
    assert 20 < len(shown) <= 51 and shown == sorted(shown) and shown[-1] > 95


def test_a_text_through_a_pipe_is_whole(tmp_path):
    result = prepare(tmp_path, "/dev/stdin", input="a line\n" * 50)
    assert result.returncode == 0, result.stderr
    assert check(tmp_path)["tokens"] == dict(train=315, val=35)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_ends_it_leaves_nothing_half_done(tmp_path, number):
    process = subprocess.Popen(
        [sys.executable, PREPARE, "/dev/stdin", "--out", tmp_path],
        env=environment(),
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    until = time.monotonic() + 60
    while not [*tmp_path.glob("val.bin.*.tmp")] and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(number)
    try:
        assert process.wait(60) == 130
    finally:
        process.kill()
    assert process.communicate()[1] == "error: interrupted\n"
    assert not [*tmp_path.iterdir()]


END = "<|endoftext|>"
DOCUMENTS = ["Ein Anfang: äöü€.\n" * 40, "a line\n\n  and more\r\n" * 60, "the end " * 30]
JOINED = [id for document in DOCUMENTS for id in [50256, *document.encode()]][1:]


@pytest.fixture
def script(monkeypatch):
    """Returns prepare.py with a tokenizer of bytes and one special token in place of GPT-2's."""
    script = load(PREPARE)
    tokenizer = tiktoken.Encoding(
        "gpt2",
        pat_str=r"\s+(?!\S)|\S+|\s",
        mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={END: 50256},
    )
    monkeypatch.setattr(script, "gpt2_tokenizer", lambda *_: tokenizer)
    return script


def ids_of(script, out, *files) -> list[int]:
    script.prepare([*map(str, files)], out)
    check(out)
    return np.concatenate(
        [np.fromfile(out / f"{part}.bin", "<u2") for part in ("train", "val")]
    ).tolist()


def json_lines(*documents: str) -> bytes:
    lines = [json.dumps(dict(id=number, text=text)) for number, text in enumerate(documents)]
    return "\n\n".join(lines).encode()


def in_two(pack, before: bytes = b"", after: bytes = b""):
    """Packs two parts, one behind the other, each with more around it."""
    return lambda data: b"".join(before + pack(part) + after for part in (data[:99], data[99:]))


FRAME = b"\x50\x2a\x4d\x18\x04\0\0\0size"  # one to skip, as pzstd writes it before another


def parquet(path, compression="zstd", **columns):
    pyarrow.parquet.write_table(
        pyarrow.table(columns), path, row_group_size=2, compression=compression
    )
    return path


def llm_c(path, ids, magic=20240520, version=1, count=None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + np.array(ids, "<u2").tobytes())
    return path


@pytest.mark.parametrize(
    "pack",
    [
        bytes,
        gzip.compress,
        zstandard.compress,
        bz2.compress,
        in_two(zstandard.compress, FRAME),
        in_two(gzip.compress, after=bytes(500)),
        in_two(lzma.compress, after=bytes(4)),
    ],
)
@pytest.mark.parametrize("form", ["text", "JSON lines"])
def test_archives_and_documents(script, tmp_path, monkeypatch, capsys, form, pack):
    """Content decides; here the name doesn't help. Documents without text are left out."""
    monkeypatch.setattr(script, "PACKED", 50)
    text = END.join(DOCUMENTS).replace("\r\n", "\n")
    path = tmp_path / "no suffix"
    documents = json_lines(None, DOCUMENTS[0], None, "", *DOCUMENTS[1:], "")
    path.write_bytes(pack(text.encode() if form == "text" else documents))
    expected = JOINED if form == "JSON lines" else [id for id in JOINED if id != 13]
    assert ids_of(script, tmp_path / "out", path) == expected
    assert ("; 2 documents without text" in capsys.readouterr().out) is (form == "JSON lines")
    words = json.loads((tmp_path / "out" / "vocabulary.json").read_text())
    assert words["special"] == {END: 50256}


def test_tokens_that_a_run_has_mapped_stay(script, tmp_path):
    """A run that has mapped a file would end with a bus error if that were emptied in place."""
    long, short, out = tmp_path / "long", tmp_path / "short", tmp_path / "out"
    long.write_text("a long text\n" * 99)
    short.write_text("short\n" * 9)
    ids_of(script, out, long)
    mapped = np.memmap(out / "train.bin", "<u2", "r")
    before = mapped.tolist()
    assert len(ids_of(script, out, short)) < len(before) == len(mapped)
    assert mapped.tolist() == before


@pytest.mark.parametrize(
    "strings",
    [
        pyarrow.string(),
        pyarrow.large_string(),
        pyarrow.string_view(),
        pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
    ],
    ids=str,
)
def test_parquet(script, tmp_path, strings):
    text = pyarrow.array([DOCUMENTS[0], None, "", *DOCUMENTS[1:]]).cast(strings)
    path = parquet(tmp_path / "no suffix", id=[1, 2, 3, 4, 5], text=text)
    assert ids_of(script, tmp_path / "out", path) == JOINED


def test_memory_stays_small(script, tmp_path):
    """A reader holds a part of a file at a time: of 16 MB less than 8."""
    data = np.random.default_rng(0).integers(97, 123, 2**24, np.uint8).tobytes()
    path, progress = tmp_path / "a", script.Progress(len(data))
    for pack in (bytes, zstandard.compress, lambda data: gzip.compress(data, 1)):
        path.write_bytes(pack(data))
        assert max(map(len, script.unpacked(path, progress))) < 2**21
    text = [data[start : start + 4096].decode() for start in range(0, len(data), 4096)]
    pyarrow.parquet.write_table(pyarrow.table(dict(text=text)), path, row_group_size=512)
    before = pyarrow.total_allocated_bytes()
    held = [pyarrow.total_allocated_bytes() for _ in script.read_parquet(path, progress)]
    assert len(held) == 64 and max(held) - before < 2**23
    path.write_bytes(json_lines(*text))  # but one document is held whole
    assert max(map(len, script.read_json(str(path), progress))) < 2**21
    path.write_bytes(json_lines("".join(text)))
    assert max(map(len, script.read_json(str(path), progress))) == len(data)


def test_files_of_all_kinds_together(script, tmp_path):
    names = [tmp_path / name for name in ("1.txt", "2.txt", "3.jsonl", "5.txt")]
    for path, content in zip(
        names, (b"one " * 9, b"two", json_lines("three"), b"five"), strict=True
    ):
        path.write_bytes(content)
    names.insert(3, parquet(tmp_path / "4.parquet", text=["four", "4"]))
    text = f"{'one ' * 9}\ntwo{END}three{END}four{END}4{END}five"
    out = tmp_path / "out"
    encode = script.gpt2_tokenizer().encode
    assert ids_of(script, out, *names) == encode(text, allowed_special="all")
    assert json.loads((out / "meta.json").read_text())["corpus"] == (
        "1.txt, 2.txt, 3.jsonl and 2 more"
    )


@pytest.mark.parametrize("text", ["[Illustration]\n", '["Yes," he said.]\n', '{"a"} b\n'])
def test_a_text_that_only_begins_like_json(script, tmp_path, text):
    (tmp_path / "a").write_text(text * 30)
    assert ids_of(script, tmp_path / "out", tmp_path / "a") == [*(text * 30).encode()]


def test_byte_order_marks_are_no_text(script, tmp_path):
    """They are left out at the beginning of a file, and where files were put together."""
    one, two = (codecs.BOM_UTF8 + text for text in (b"one\n" * 9, b"two\n" * 9))
    paths = [tmp_path / name for name in ("1", "2", "3")]
    for path, content in zip(paths, (one, two, two + one), strict=True):
        path.write_bytes(content)
    text = "\n".join(["one\n" * 9, "two\n" * 9, "two\n" * 9 + "one\n" * 9])
    assert ids_of(script, tmp_path / "out", *paths) == [*text.encode()]
    paths[0].write_bytes(codecs.BOM_UTF8 + json_lines("three\ufeff" * 5, "four"))
    assert ids_of(script, tmp_path / "out", paths[0]) == [*b"three" * 5, 50256, *b"four"]


def test_it_is_cut_at_the_end_of_a_text():
    """It isn't cut at the line break before that, which may be one token with white space."""
    script = load(PREPARE)
    for text, cut in (
        (f"a\nb{END}c", 3),
        (f"a\nb{END}c\nd", 17),
        (f"a\nb\n{END}"[:-1], 1),
        (f"a\n{END}", 2),
        ("a\n<b", 1),
        ("a\n<", -1),
        (f"a{END}\n{END[:4]}", 1),
    ):
        assert script.last_cut(text) == cut, text


IDS = [13, 50256, *range(40_000, 45_000), 11]


def test_tokens_that_are_made_already(script, tmp_path):
    """They stay what they are, also in shards; a folder's test.bin is left out."""
    for name, ids in dict(train=IDS, val=IDS[-30:], test=IDS[-50:], latest=IDS[:20]).items():
        (tmp_path / f"{name}.bin").write_bytes(np.array(ids, "<u2").tobytes())
    out = tmp_path / "out"
    assert ids_of(script, out, tmp_path) == IDS[:20] + IDS + IDS[-30:]
    meta = check(out)
    assert meta["tokens"] == dict(train=20 + len(IDS), val=30) and meta["vocabulary"] == 50257
    assert ids_of(script, out, tmp_path / "val.bin", tmp_path / "train.bin") == IDS + IDS[-30:]
    assert ids_of(script, out, tmp_path / "train.bin") == IDS
    assert check(out)["tokens"]["val"] > 400
    assert ids_of(script, out, tmp_path / "test.bin") == IDS[-50:]
    parts = dict(val_000000=IDS[-30:], train_000001=IDS[:99], train_000002=IDS[99:])
    paths = [llm_c(tmp_path / f"fineweb_{name}.bin", ids) for name, ids in parts.items()]
    assert ids_of(script, out, *paths) == IDS + IDS[-30:]


def file(name: str, content: bytes):
    def write(folder):
        (folder / name).write_bytes(content)
        return [folder / name]

    return write


def archive(kind, add: str) -> bytes:
    """Returns an archive of zipfile or tarfile that holds one file."""
    data = io.BytesIO()
    with kind(data) as files:
        getattr(files, add)(PREPARE, "a.txt")
    return data.getvalue()


ZIPPED_FILES = archive(partial(zipfile.ZipFile, mode="w"), "write")
TARRED = archive(lambda file: tarfile.open(fileobj=file, mode="w"), "add")
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
ZIPPED, ZSTD = gzip.compress(json_lines(*DOCUMENTS)), zstandard.compress(b"text\n" * 999)
TOKENS = np.array(IDS, "<u2").tobytes()


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (file("a", b" \n"), "a is empty"),
        (file("a", b"ab"), "too short"),
        (file("a.gz", ZIPPED[:-9]), "a.gz is cut off"),
        (file("a.gz", ZIPPED[:-8] + bytes(8)), "a.gz is damaged: .*incorrect data check"),
        (file("a.zst", ZSTD[:-2]), "a.zst is cut off"),
        (file("a.xz", lzma.compress(b"text\n" * 99)[:-2] + b"no"), "a.xz is damaged"),
        *(
            (file(name, content), f"{name} .*{says}")
            for content, says in (
                (LFS, "Git LFS.*git lfs pull"),
                (ZIPPED_FILES, "zip.*unpack"),
                (b"%PDF-1.4\ntext", "PDF"),
                (TARRED, "unpack"),
                *(
                    (("text\n" * 9).encode(code), "UTF-16.*UTF-8")
                    for code in ("utf-16", "utf-16-le", "utf-16-be")
                ),
            )
            for name in ("a.txt", "a.jsonl", "a.parquet")
        ),
        (file("a.tar.gz", gzip.compress(TARRED)), "a.tar.gz .*unpack"),
        (file("a.gz", gzip.compress(b"abc\xff" * 9)), r"a.gz is not UTF-8 text: b'abc\\xff"),
        (file("a.txt", "é".encode() * 2**20 + b"\xc3"), r"not UTF-8 text: .*\\xc3'$"),
        (
            file("a.jsonl", json_lines("a", "b") + b'\n{"text": "cut'),
            r"a.jsonl is not JSON lines: one object a line \(see line 4\)",
        ),
        (file("a.jsonl", b"[" * 100_000), "not JSON lines: .* line 1"),
        (file("a.json", b'\n{\n  "text": "a"\n}\n'), "a.json is not JSON lines: .* line 2"),
        (file("a", b'{"text": "a"}\n{"content": "b"}'), "a, line 2 has no text in 'text'"),
        *((file("a", text), "a is not JSON lines: .* line 1") for text in (b"[\n {\n", b'[ "a" ]')),
        (file("a.jsonl", b'{"text": ""}\n'), "a.jsonl is empty"),
        (file("a.bin", TOKENS[:-1]), "a.bin is cut off, or not uint16: it has 10,005 bytes"),
        (file("a.bin", TOKENS + b"\x51\xc4"), "a.bin has id 50,257: GPT-2's end with 50,256"),
        (
            file("a.bin", np.array(IDS, "<u4").tobytes()),
            r"a.bin looks like 32-bit ids \(every second",
        ),
        (
            lambda folder: file("a", parquet(folder / "b", text=DOCUMENTS).read_bytes()[:-20])(
                folder
            ),
            "a is damaged: ",
        ),
        (lambda folder: [parquet(folder / "a", text=[1, 2])], "no column 'text' .*but: text int64"),
        (
            lambda folder: [parquet(folder / "a", id=[1], content=["b"])],
            "no column 'text' of strings, but: id int64, content string",
        ),
        (
            lambda folder: [llm_c(folder / "a", IDS, 20240801, 7)],
            r"format and version \[20240801, 7\]",
        ),
        (lambda folder: [llm_c(folder / "a", IDS, count=6000)], "cut off: 5,003 of 6,000 tokens"),
        (lambda folder: [folder], "is a folder without tokens"),
        (
            lambda folder: [llm_c(folder / "a", IDS), *file("b", b"text")(folder)],
            "one kind at a time",
        ),
        (
            lambda folder: [*file("meta.pkl", b"")(folder), *file("a.bin", TOKENS)(folder)][1:],
            "isn't GPT-2's: meta.pkl beside it",
        ),
    ],
)
def test_what_is_refused(script, tmp_path, files, says):
    """One line says why, and the files that were there stay whole."""
    given, out = tmp_path / "given", tmp_path / "out"
    given.mkdir()
    ids_of(script, out, *file("good.txt", b"good text\n" * 50)(tmp_path))
    before = check(out)
    with pytest.raises(script.UserError, match=says) as error:
        script.prepare([*map(str, files(given))], out)
    assert "\n" not in str(error.value)
    assert check(out) == before


def test_a_missing_package_is_named(script, tmp_path, monkeypatch):
    path = parquet(tmp_path / "a", text=DOCUMENTS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(script.UserError, match="a needs pyarrow: .*pip install pyarrow"):
        script.prepare([str(path)], tmp_path / "out")


def test_it_is_trained_on(script, bench, tmp_path, monkeypatch):
    """A script trains on the files that prepare.py writes."""
    path, bench.data = tmp_path / "a.jsonl", tmp_path / "out"
    path.write_bytes(json_lines(*DOCUMENTS))
    script.prepare([str(path)], bench.data)
    monkeypatch.setattr(bench.stages["00_orig"], "sample", lambda *_: "")  # of ids without words
    assert bench.main("00_orig", "--max-steps", 6).returncode == 0
    start, *_, log, _, end = bench.record()
    assert (start["data"]["corpus"], end["status"]) == ("a.jsonl", "complete")
    assert log["step"] == 5 and log["val_loss"] > 0


@pytest.mark.parametrize(
    ("blocks", "lines"),
    [
        ([b"a\nb"], [b"a", b"b"]),
        ([b"a", b"b", b"c\nd\ne", b"f\n"], [b"abc", b"d", b"ef", b""]),
        ([], [b""]),
    ],
)
def test_lines_go_over_blocks(blocks, lines):
    assert [line for part in load(PREPARE).whole_lines(blocks) for line in part] == lines
