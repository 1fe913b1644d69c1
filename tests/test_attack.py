"""Generated bad input, full disks, and kills at random moments, each from a seed.

    make attack                                                   # 200 of each
    ATTACK_COUNT=50 ATTACK_SEED=7 python -m pytest tests/test_attack.py -k tokens

Never a traceback, never a hang, never a partial file under a final name.
"""

import json
import os
import random
import re
import subprocess
import sys
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import pytest
from conftest import ROOT, STAGES, TINY, environment, write_tokens
from test_stack import Tree

from bench.measure.records import read_record

COUNT = int(os.environ.get("ATTACK_COUNT", 12))
KILLS = int(os.environ.get("ATTACK_COUNT", 2))  # each takes seconds


@pytest.fixture
def draw(request) -> random.Random:
    return random.Random(f"{os.environ.get('ATTACK_SEED', 1)}-{request.node.name}")


def cases(count: int):
    """Runs a test so often, each time with another seed."""
    return pytest.mark.parametrize("draw", range(count), indirect=True)


def spoil(draw: random.Random, path: Path) -> None:
    """Replaces a word or a line of a file, or cuts it off there."""
    data = path.read_bytes()
    pattern = draw.choice([rb'(?s)"[^"]*"|[\w.+-]+|.', rb'(?s)"[^"]*"|[\w.+-]+|.', rb".*\n"])
    place = draw.choice([*re.finditer(pattern, data), None])
    first, last = place.span() if place else (0, 0)
    instead = draw.choice([data[first:last] * 2, *INSTEAD])
    path.write_bytes(data[:first] + instead + (data[last:] if draw.random() < 0.9 else b""))


INSTEAD = [
    b"",
    b"\xff\xfe",
    b"[" * 100_000,
    b"null",
    b"true",
    b"-1",
    b"0",
    b"7",
    b"0.5",
    b"1e308",
    b"9" * 400,
    b"NaN",
    b'""',
    b'"x"',
    b'"\\u0000"',
    b'"\\ud800"',
    b'"../../x"',
    b'"/etc/passwd"',
    b'"%s"' % (b"x" * 5000),
    b"[]",
    b"{}",
    b"[[]]",
    b"[null]",
    b'{"a": 1}',
    b"\n",
    b"Base: ../../x\n",
    b"--- a//etc/passwd\n",
    b"+++ b/../../x.py\n",
    b"Group: ../x\n",
    b"Needs: package os;x\n",
    b"Measure: $(touch x)\n",
    b"@@ -1,99999999 +1,1 @@\n",
]


def one_error(code: int, err: str) -> list[str]:
    lines = err.splitlines()
    errors = [line for line in lines if "error: " in line]
    assert "Traceback" not in err and code in (0, 1, 2) and len(errors) == bool(code), err
    return lines


# ---- Bad input ---------------------------------------------------------------------------------


@cases(COUNT)
def test_tokens(draw, bench):
    """Into the scripts: they train, or one line says what is wrong."""
    spoil(draw, bench.data / draw.choice(["meta.json", "meta.json", "train.bin", "val.bin"]))
    result = bench.main(draw.choice(STAGES), "--max-steps", 1)
    one_error(result.returncode, result.stderr)
    assert bench.no_record() is bool(result.returncode)


@cases(COUNT)
def test_patches(draw, tmp_path, monkeypatch, capsys):
    """Into stack.py: verified as they were, or refused in one line; nothing outside is touched."""
    folder = tmp_path / "inside"
    folder.mkdir()
    monkeypatch.chdir(folder)
    tree = Tree(folder, capsys)
    spoil(draw, draw.choice(sorted(folder.glob("patches/**/*.patch"))))
    code, _, err = tree.run(
        *draw.choice(
            [
                ["verify"],
                ["list"],
                ["write"],
                ["show", "1"],
                ["compose", "profile", "--out", "own.py"],
            ]
        )
    )
    assert code in (0, 1) and err.count("\n") == code, err
    assert [path.name for path in tmp_path.iterdir()] == ["inside"]
    assert {path.name for path in folder.iterdir()} <= {
        "patches",
        "build",
        "own.py",
        *(f"{stage}.py" for stage in STAGES),
    }


# ---- Kills and full disks ----------------------------------------------------------------------


def start(command: list, before: list = (), **how) -> subprocess.Popen:
    return subprocess.Popen(
        [*before, sys.executable, *map(str, command)],
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **how,
    )


def killed_after(seconds: float, command: list) -> str:
    """What it has printed."""
    process = start(command)
    with suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=seconds)
    process.kill()
    return process.communicate()[0]


def check_record(results: Path, printed: str) -> None:
    """The only record in a folder, if its first line is whole, holds all log lines printed."""
    logs = [
        log
        for path in results.glob("*.jsonl")
        if b"\n" in path.read_bytes()
        for log in read_record(path).logs
    ]
    assert len(logs) >= len(re.findall("^Ep .*\n", printed, re.MULTILINE))


@cases(KILLS)
def test_the_preparation_is_killed(draw, tmp_path):
    """There are whole tokens, or none; also where those of another text were before."""
    text, out = tmp_path / "text", tmp_path / "out"
    for number in range(2):
        text.write_text(f"It was a dark and stormy night, number {number}. " * 40_000)
        killed_after(draw.uniform(0, 1.5), [ROOT / "data" / "prepare.py", text, "--out", out])
        if (out / "meta.json").exists():
            for part, digest in json.loads((out / "meta.json").read_text())["sha256"].items():
                assert sha256((out / f"{part}.bin").read_bytes()).hexdigest() == digest


@pytest.mark.slow
@pytest.mark.parametrize(("program", "blocks"), [("00_orig.py", 16), ("data/prepare.py", 3000)])
@cases(max(1, COUNT // 12))
def test_full_disks(draw, tmp_path, program, blocks):
    """By a limit on the size of files. One line says what is wrong, and what is there can be
    read."""
    text, out = tmp_path / "text", tmp_path / "out"
    text.write_text("It was a dark and stormy night. " * 20_000)
    options = (
        [text, "--out", out]
        if "prepare" in program
        else [
            *TINY,
            "--data",
            write_tokens(tmp_path / "data"),
            "--eval-freq",
            1,
            "--results-dir",
            out,
        ]
    )
    limit = f'ulimit -f {draw.randrange(blocks)}; exec "$@"'
    process = start([ROOT / program, *options], before=["sh", "-c", limit, "sh"])
    printed, err = process.communicate(timeout=120)
    lines = one_error(process.returncode, err)
    if process.returncode:
        assert any("error: " in line and "File too large" in line for line in lines)
        assert not (out / "meta.json").exists()
    assert not list(out.glob("*.tmp"))
    check_record(out, printed)
