"""data/prepare.py: text to tokens, with and without files, network and tokenizer."""

import hashlib
import io
import json
import os
import re
import socket
import threading
import time
from contextlib import suppress
from http.client import IncompleteRead
from urllib.error import HTTPError

import numpy as np
import pytest
import tiktoken
from conftest import ROOT, load, run_python

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
    """The standard library's own text as bytes, as many tokens as the book has, always the same."""
    result = prepare(tmp_path)
    assert result.returncode == 0, result.stderr
    said, *figures = result.stdout.splitlines()
    assert "Connection refused: the text is the standard library of Python" in said
    assert said.endswith(", the tokens are bytes") and len(figures) == 2
    meta = check(tmp_path)
    assert meta["tokens"] == {"train": 414_009, "val": 46_001}
    assert meta["tokenizer"] == "bytes" and meta["vocabulary"] == 256
    assert prepare(tmp_path).returncode == 0
    assert check(tmp_path) == meta


def test_files(tmp_path):
    texts = ["Ein Anfang: äöü€.\n" * 40, "and an end\n" * 60]
    paths = [tmp_path / name for name in ("one text.txt", "two.txt")]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, encoding="utf-8")
    result = prepare(tmp_path / "out", *paths)
    assert result.returncode == 0, result.stderr
    meta = check(tmp_path / "out")
    assert meta["corpus"] == "one text.txt, two.txt"
    assert "in one piece" not in result.stdout and " MB/s" in result.stdout
    parts = [(tmp_path / "out" / f"{part}.bin").read_bytes() for part in ("train", "val")]
    ids = np.frombuffer(b"".join(parts), "<u2")
    assert bytes(ids.astype(np.uint8)).decode() == "\n".join(texts)
    assert meta["tokens"]["train"] == int(0.9 * len(ids))


@pytest.mark.parametrize(
    "content, says",
    [(None, "No such file"), (b"", "is empty"), (b" \n", "is empty"), (b"ab", "too short"),
     (b"abc\xff\xfe" * 99, "is not UTF-8")],
)
def test_bad_text(tmp_path, content, says):
    path, out = tmp_path / "text.txt", tmp_path / "out"
    good = tmp_path / "good.txt"
    good.write_text("good text\n" * 50)
    assert prepare(out, good).returncode == 0
    before = check(out)
    if content is not None:
        path.write_bytes(content)
    result = prepare(out, path)
    assert result.returncode == 1 and says in result.stderr
    assert len(result.stderr.splitlines()) == 1 and result.stderr.startswith("error: ")
    assert check(out) == before  # what was there is still whole


def test_out_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x" * 100)
    result = prepare(tmp_path / "file", tmp_path / "file")
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1


def test_download_is_checked(tmp_path, monkeypatch):
    """Gutenberg's marks are cut off; a page that isn't the book, or half of it, is not taken."""
    script = load(PREPARE)
    book = "Dorothea " * 200_000
    start, end = (f"{mark} MIDDLEMARCH ***\n" for mark in script.BOOK_MARKS)
    page = f"Title: Middlemarch\r\n{start}\n{book}\n{end}The licence"
    for answer, expected in ((page[: len(page) // 2], None), (page, book + "\n")):
        answers(script, monkeypatch, answer.encode())
        web = script.Web()
        assert script.book(tmp_path, web) == expected
    assert (tmp_path / "middlemarch.txt").read_text() == book + "\n"
    monkeypatch.setattr(script.urllib.request, "urlopen", lambda *_, **__: pytest.fail("again"))
    assert script.book(tmp_path, script.Web()) == book + "\n"


def answers(script, monkeypatch, *replies) -> list:
    """Has the web reply so, the last one again and again; returns the addresses that are asked."""
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


HEAD = b"HTTP/1.0 200 OK\r\nContent-Length: 1000000\r\n\r\n"


@pytest.mark.parametrize(("reply", "says"), [
    ([], "timed out"),
    ([HEAD, b"half"], "isn't the file that was expected"),
    ([HEAD[:20]], "isn't the file that was expected|urlopen|BadStatus|closed|timed out"),
    ([b"HTTP/1.0 200 OK\r\n\r\n", b"wrong" * 100], "isn't the file that was expected"),
    ([b"HTTP/1.0 200 OK\r\n\r\n", *[b"x" * 2**20] * 30], "more than 20,971,520 bytes"),
    ([HEAD, *[b"x", 0.1] * 30], "not there after 1 seconds"),
    ([b"\x00" * 100_000], ".")])
def test_a_real_server_that_misbehaves(monkeypatch, reply, says):
    """It never answers, sends half, something else, far too much, or a byte now and then."""
    script = load(PREPARE)
    monkeypatch.setattr(script, "TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(script, "WHOLE_SECONDS", 1)
    monkeypatch.setattr(script, "TRIES", 1)
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        connection, _ = server.accept()
        with suppress(OSError), connection:
            connection.recv(4096)
            for part in reply:
                time.sleep(part) if isinstance(part, float) else connection.sendall(part)
            if not reply:
                time.sleep(1)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    web, began = script.Web(), time.monotonic()
    address = f"http://127.0.0.1:{server.getsockname()[1]}/book"
    assert web.fetch(address, lambda data: data == b"right") is None
    assert re.search(says, web.failure), web.failure
    assert time.monotonic() - began < 60
    server.close()


def test_where_nothing_answers_nothing_else_is_tried(monkeypatch):
    script = load(PREPARE)
    asked, web = answers(script, monkeypatch, script.URLError("no route")), script.Web()
    assert web.fetch("http://one", bool) is None and web.fetch("http://two", bool) is None
    assert asked == ["http://one"] and web.failure == "http://one: no route"


@pytest.mark.parametrize("failure", [
    TimeoutError("timed out"), IncompleteRead(b"abc", 5), b"other",
    HTTPError("http://one", 503, "busy", {}, None)])
def test_a_server_that_fails_is_asked_again(monkeypatch, failure):
    script = load(PREPARE)
    right = b"right".__eq__
    asked, web = answers(script, monkeypatch, failure, b"right"), script.Web()
    assert web.fetch("http://one", right) == b"right" and len(asked) == 2
    asked = answers(script, monkeypatch, failure)
    assert web.fetch("http://one", right) is None and len(asked) == script.TRIES
    assert web.failure.startswith("http://one") and web.answers


def test_the_tokenizer_comes_from_a_cache_and_is_checked(tmp_path, monkeypatch):
    script = load(PREPARE)
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    answers(script, monkeypatch, b"something else")
    assert script.gpt2_tokenizer(tmp_path / "none", script.Web()) is None
    assert not (tmp_path / "none").exists()
    # What another cache holds is taken, if it is whole, and left beside the tokens.
    contents = {name: name.encode() for name in script.TOKENIZER_SHA256}
    monkeypatch.setattr(script, "TOKENIZER_SHA256",
                        {name: script.sha256(content) for name, content in contents.items()})
    cache, out = tmp_path / "cache", tmp_path / "out"
    cache.mkdir()
    for name, content in contents.items():
        file = hashlib.sha1((script.TOKENIZER_URL + name).encode()).hexdigest()
        (cache / file).write_bytes(content)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
    monkeypatch.setattr(script.tiktoken, "get_encoding", lambda name: name)
    assert script.gpt2_tokenizer(out, script.Web()) == "gpt2"
    assert sorted(path.read_bytes() for path in out.iterdir()) == sorted(contents.values())
    assert os.environ["TIKTOKEN_CACHE_DIR"] == str(out)


def test_pieces_are_encoded_as_the_whole(tmp_path, monkeypatch):
    """With a tokenizer that splits as GPT-2's does and merges what a wrong cut would part."""
    script = load(PREPARE)
    merges = [b"\n\n", b"  ", b" \n", b"\n ", b" a", b"ab", b"\n\n\n", b"    "]
    ranks = {bytes([i]): i for i in range(256)} | {
        merge: 256 + i for i, merge in enumerate(merges)}
    pattern = (r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|"""
               r"""\s+(?!\S)|\s""")
    tokenizer = tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=ranks,
                                  special_tokens={"<|endoftext|>": 300})
    rng = np.random.default_rng(0)
    parts = np.array(["ab", "a", " ", "\n", "\n\n", "\t", "1", "'s", ".", "ü", "<|endoftext|>"])
    monkeypatch.setattr(script, "BLOCK", 20)
    for _ in range(100):
        text = "".join(rng.choice(parts, 300))
        found = [*script.pieces(script.blocks_of(io.StringIO(text)))]
        assert "".join(found) == text and len(found) > 3
        ids = np.concatenate([*script.encode(tokenizer, found)])
        assert ids.tolist() == tokenizer.encode_ordinary(text)


def test_a_text_without_places_to_cut_is_one_piece(monkeypatch, capsys):
    script = load(PREPARE)
    monkeypatch.setattr(script, "BLOCK", 20)
    text = "word " * 100 + "\n indented" * 50
    assert [*script.pieces(script.blocks_of(io.StringIO(text)))] == [text]
    assert "encoded in one piece" in capsys.readouterr().out
    text = "line\nline\n"
    assert "".join(script.pieces(script.blocks_of(io.StringIO(text)))) == text
    assert not capsys.readouterr().out
