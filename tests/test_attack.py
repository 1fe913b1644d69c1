"""Generated bad input, full disks, and kills at random moments, each from a seed.

    make attack                                                   # 200 of each
    ATTACK_COUNT=50 ATTACK_SEED=7 python -m pytest -s tests/test_attack.py -k tokens

Never a traceback, never a hang, never a partial file under a final name.
"""

import io
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from hashlib import sha256
from pathlib import Path

import pytest
from conftest import ROOT, STAGES, TINY, environment, on_small_disk, write_tokens
from made_up import (
    CPU,
    Children,
    complete_results,
    copy_of_checkout,
    plan_of,
    write_journal,
    write_record,
)
from matplotlib.image import imread

import measure
import plot_results
from bench.measure.journal import read_journal
from bench.measure.records import read_record
from bench.report.page import section
from bench.studies import all_studies

COUNT = int(os.environ.get("ATTACK_COUNT", 12))
KILLS = int(os.environ.get("ATTACK_COUNT", 3))  # each takes seconds
SEED = os.environ.get("ATTACK_SEED", "1")
pytestmark = pytest.mark.timeout(60 + 20 * COUNT)

VALUES = [None, True, -1, 0, 7, 0.5, 1e308, -1e308, 10**400, math.nan, math.inf, "", "x", "\0",
          "\ud800", "../../x", "/etc/passwd", "a b;'\"\n", "é" * 5000, [], {}, [[]], [None],
          {"a": 1}]


@contextmanager
def attack(name: str, count: int = COUNT):
    """Gives random.Random for each case; an error names the case, and the end counts outcomes."""
    outcomes, case = Counter(), 0

    def cases():
        nonlocal case
        for case in range(count):  # noqa: B007 (named below)
            yield random.Random(f"{SEED}-{name}-{case}")

    try:
        yield cases(), outcomes
    except BaseException as error:
        error.add_note(f"{name}, case {case} of ATTACK_SEED={SEED}")
        raise
    print(f"\n{name}, seed {SEED}: {sum(outcomes.values())} tried: "
          + ", ".join(f"{number} {what}" for what, number in outcomes.most_common()))


def spoiled_value(draw: random.Random, value):
    """A copy with one place of it changed, removed or renamed."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name, rest = draw.choice(list(value)), dict(value)
        what = draw.random()
        if what < 0.15:
            del rest[name]
        elif what < 0.25:
            rest["other"] = rest.pop(name)
        else:
            rest[name] = spoiled_value(draw, rest[name])
        return rest
    if isinstance(value, list) and value and draw.random() < 0.7:
        place = draw.randrange(len(value))
        return [*value[:place], spoiled_value(draw, value[place]), *value[place + 1:]]
    return draw.choice(VALUES)


def spoiled(draw: random.Random, data: bytes) -> bytes:
    """Text with one thing wrong."""
    lines = data.splitlines(keepends=True) or [b""]
    place = draw.randrange(len(lines))
    what = draw.choice(["value"] * 6 + ["byte", "cut", "twice", "away", "swap", "utf8", "deep"])
    if what == "value":
        with suppress(ValueError):
            value = spoiled_value(draw, json.loads(lines[place]))
            lines[place] = json.dumps(value).encode() + b"\n"
            return b"".join(lines)
    if what in ("value", "byte"):
        at = draw.randrange(len(data) or 1)
        return data[:at] + bytes([draw.randrange(256)]) + data[at + 1:]
    if what == "cut":
        return data[:draw.randrange(len(data) + 1)]
    changed = dict(twice=[lines[place]] * 2, away=[], swap=[lines[-1]], utf8=[b"\xff\xfe\n"],
                   deep=[b"[" * 100_000 + b"\n"])[what]
    return b"".join([*lines[:place], *changed, *lines[place + 1:]])


def called(function, *arguments) -> tuple[int, str]:
    """(exit code, stderr) of a program's main()."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", "replace", write_through=True)
                for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = function(*arguments)
        except SystemExit as stop:
            code = stop.code
    return code or 0, err.buffer.getvalue().decode()


# ---- Bad input ---------------------------------------------------------------------------------


def write_results(folder: Path) -> None:
    """What a machine has measured: records of scripts started by hand, and journals."""
    for name in STAGES:
        write_record(folder, name)
    names = ["00_orig", "05-bfloat16", "14-chunked-head"]
    for study, kind in (("stages", ""), ("ladder", ""), ("variants", ""), ("leave-one-out", ""),
                        ("sweep", "batch"), ("time-to-loss", ""), ("search", "")):
        plan = plan_of(*names, kind=kind,
                       targets={"best": 7.5} if study in ("time-to-loss", "search") else {})
        for place, run in enumerate(plan.runs):
            plan.runs[place] = run.but(rung=place, batch=2**place, stage="01", rate=1e-3)
        write_journal(folder, study, plan, [
            dict(name=name, round=number, speed=100.0 + place)
            for number in (1, 2) for place, name in enumerate(names)])


@pytest.mark.slow
def test_records(tmp_path, monkeypatch):
    """Into tables and pictures: what is damaged is named, the rest is shown."""
    from matplotlib.figure import Figure

    draw_really = Figure.savefig
    with attack("records") as (cases, outcomes):
        for number, draw in enumerate(cases):
            folder = tmp_path / str(number)
            write_results(folder)
            for _ in range(draw.choice([1, 1, 3])):
                path = draw.choice(sorted(folder.iterdir()))
                path.write_bytes(spoiled(draw, path.read_bytes()))
            # Drawing takes seconds; making the figure finds most of what can go wrong.
            monkeypatch.setattr(Figure, "savefig",
                                (lambda *_, **__: None) if number % 20 else draw_really)
            code, err = called(plot_results.main, ["--results-dir", str(folder)])
            assert code in (0, 1) and "Traceback" not in err
            assert all(re.match("skipped: |error: |no picture|.*[wW]arning|  ", line)
                       for line in err.splitlines()), err
            with redirect_stderr(io.StringIO()):
                for study in all_studies().values():
                    section(study, folder, [])
            outcomes["told" if err else "shown"] += 1


def test_tokens(bench):
    """Into the scripts: they train, or one line says what is wrong."""
    with attack("tokens") as (cases, outcomes):
        for draw in cases:
            write_tokens(bench.data)
            path = bench.data / draw.choice(["meta.json", "meta.json", "train.bin", "val.bin"])
            path.write_bytes(spoiled(draw, path.read_bytes()))
            result = bench.main(draw.choice(STAGES), "--max-steps", 1)
            errors = [line for line in result.stderr.splitlines() if "error: " in line]
            assert "Traceback" not in result.stderr, result.stderr
            assert (result.returncode, len(errors)) in ((0, 0), (1, 1)), result.stderr
            outcomes["refused" if errors else "trained"] += 1
            if errors:
                assert bench.no_record()
            for file in bench.results.glob("*"):
                file.unlink()


ARGUMENTS = ["0", "-1", "1", "3", "7", "16", "1e300", "nan", "inf", "-inf", "x", "", " ", "1.5",
             "9" * 30, "1e-320", "é", "a b;'\"\n", "../x", "--", "-", "cpu", "cuda", "meta", "gpt3"]


def random_arguments(draw: random.Random, options: list[str]) -> list[str]:
    words = []
    for _ in range(draw.randrange(1, 4)):
        words.append(draw.choice(options))
        words += [draw.choice(ARGUMENTS)] * (draw.random() < 0.85)
    return words


def test_command_lines_of_the_scripts(bench, monkeypatch, tmp_path):
    """They train a step, diverge, or refuse the options in one line; and nothing is written but
    into the folder of the results."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    script = bench.stages[STAGES[1]]
    names = [f"--{field.replace('_', '-')}" for field, setting in
             script.Config.__dataclass_fields__.items()
             if setting.metadata and field not in ("model", "data", "results_dir", "compile")]
    around = sorted(tmp_path.parent.iterdir())
    with attack("command lines of the scripts") as (cases, outcomes):
        for draw in cases:
            stage = draw.choice(STAGES)
            result = bench.main(stage, *random_arguments(draw, [*names, "--x", "-h"]),
                                "--max-steps", 1)
            told = [line for line in result.stderr.splitlines() if "error: " in line]
            assert "Traceback" not in result.stderr, (result.args, result.stderr)
            assert result.returncode in (0, 1, 2), (result.args, result.stderr)
            assert len(told) == bool(result.returncode), (result.args, result.stderr)
            outcomes[{0: "trained", 1: "failed in one line", 2: "refused"}[result.returncode]] += 1
            assert sorted(tmp_path.parent.iterdir()) == around
            assert {path.name for path in tmp_path.iterdir()} <= {"data", "results"}, result.args


def test_command_lines_of_measure(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    children = Children(monkeypatch, tmp_path / "build")
    monkeypatch.setattr(measure.processes, "run_child", lambda command, *args, **named: (
        children.run_child(command, *args, **named) if "--name" in command
        else (1, "", "error: only scripts of studies run here")))
    data = write_tokens(tmp_path / "data")
    monkeypatch.setattr(measure.processes, "on_signals", lambda handler: None)
    commands = [name for name, study in all_studies().items() if study.runs_scripts]
    options = ["--rounds", "--max-tokens", "--seconds", "--rungs", "--names", "--resume",
               "--dry-run", "--epochs", "--x", "-h", "batch", "1,2", "--"]
    with attack("command lines of measure.py") as (cases, outcomes):
        for draw in cases:
            words = [draw.choice([*commands, *commands, "x", "report", "predict", "fits"]),
                     *random_arguments(draw, options), "--dry-run", "--data", str(data),
                     "--results-dir", str(tmp_path / "results")]
            monkeypatch.setattr(sys, "argv", ["measure.py", *words])
            code, err = called(measure.main)
            assert "Traceback" not in err and code in (0, 1, 2), (words, err)
            assert bool(code) == bool(re.search("error: ", err)), (words, err)
            outcomes["refused" if code else "planned"] += 1


def test_patches(tmp_path, monkeypatch, capsys):
    """Into stack.py: verified as they were, or refused in one line; nothing outside is touched."""
    from test_stack import Tree

    folder = tmp_path / "inside"
    folder.mkdir()
    monkeypatch.chdir(folder)
    tree = Tree(folder, capsys)
    whole = tree.files()
    fields = [b"Base: ../../x\n", b"--- a//etc/passwd\n", b"+++ b/../../x.py\n", b"Slot: ../x\n",
              b"Needs: package os;x\n", b"Measure: $(touch x)\n", b"@@ -1,99999999 +1,1 @@\n"]
    with attack("patches") as (cases, outcomes):
        for draw in cases:
            for name, text in whole.items():
                (folder / name).write_bytes(text)
            path = folder / draw.choice([name for name in whole if name.startswith("patches/")])
            text = path.read_bytes()
            if draw.random() < 0.4:
                lines = text.splitlines(keepends=True)
                lines.insert(draw.randrange(len(lines) + 1), draw.choice(fields))
                text = b"".join(lines)
            else:
                text = spoiled(draw, text)
            path.write_bytes(text)
            command = draw.choice([["verify"], ["list"], ["write"], ["show", "1"],
                                   ["compose", "profile", "--out", "own.py"]])
            code, _, err = tree.run(*command)
            assert code in (0, 1) and err.count("\n") == code, (command, err)
            outcomes["refused" if code else "taken"] += 1
            assert [each.name for each in tmp_path.iterdir()] == ["inside"]
            assert {each.name for each in folder.iterdir()} <= {
                "patches", "build", "own.py", "00_orig.py", "01_opt_single_gpu.py",
                "02_opt_multi_gpu_ddp.py"}


def test_folders_of_others(tmp_path, monkeypatch):
    """Into `measure.py pack` and `compare`: a damaged or hostile folder of results is taken as far
    as it is whole, or refused in one line; nothing else is written, and no link is copied."""
    from bench.studies import results as module

    secret, reference = tmp_path / "secret", tmp_path / "reference"
    secret.write_text("not for others")
    monkeypatch.setattr(module, "REFERENCE", reference)
    monkeypatch.setattr("bench.report.page.draw_all", lambda *_: {})  # test_records draws
    monkeypatch.setattr(measure.processes, "on_signals", lambda handler: None)
    Children(monkeypatch, tmp_path / "build")
    names, whole = ["../x", "", "/tmp/x", "a b", "x/y", "é", "\n"], tmp_path / "whole"
    complete_results(whole)
    with attack("folders of others") as (cases, outcomes):
        for number, draw in enumerate(cases):
            folder = tmp_path / f"results-{number}"
            complete_results(folder)
            for _ in range(draw.choice([0, 1, 1, 3])):
                path = draw.choice(sorted(folder.iterdir()))
                if draw.random() < 0.2:
                    path.unlink()
                    path.symlink_to(draw.choice([secret, "/etc/passwd", "x", folder]))
                elif not path.is_symlink():
                    path.write_bytes(spoiled(draw, path.read_bytes()))
            name = draw.choice(names) if draw.random() < 0.1 else "rtx-4090"
            words = draw.choice([*[["pack", "--results-dir", folder, name]] * 3,
                                 ["compare", folder, whole, "--results-dir", reference]])
            monkeypatch.setattr(sys, "argv", ["measure.py", *map(str, words)])
            code, err = called(measure.main)
            errors = [line for line in err.splitlines() if "error: " in line]
            assert "Traceback" not in err and code in (0, 1, 2), err
            assert len(errors) == bool(code), err
            outcomes["refused" if code else "taken"] += 1
            around = {path.name for path in tmp_path.iterdir()}
            assert around <= {"secret", "reference", "build", "whole", folder.name}
            assert secret.read_text() == "not for others"
            for copy in reference.rglob("*"):
                assert not copy.is_symlink() and copy.name[-4:] != ".tmp"
                assert copy.is_dir() or copy.read_bytes() != secret.read_bytes(), copy
            shutil.rmtree(reference, ignore_errors=True)
            shutil.rmtree(folder)


# ---- Kills and full disks ----------------------------------------------------------------------


def started(command: list, before: list = (), **how) -> subprocess.Popen:
    return subprocess.Popen([*before, sys.executable, *map(str, command)], env=environment(),
                            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how)


def small_ladder(tree: Path, data: Path, *options, rungs: str = "0,1", rounds: int = 1,
                 of_scripts: list = ()) -> list:
    return [tree / "measure.py", "ladder", "--rungs", rungs, "--rounds", rounds, "--max-tokens", 64,
            "--data", data, *options, "--", *TINY, *of_scripts]


def killed_after(seconds: float, command: list, **how) -> str:
    """What it has printed."""
    process = started(command, **how)
    with suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=seconds)
    process.kill()
    return process.communicate()[0]


def lines_kept(results: Path, printed: str) -> int:
    """The log lines in the only record in a folder, if there is one; all that were printed are in
    it, and it can be read, unless its first line isn't whole."""
    logs = 0
    for path in results.glob("*.jsonl"):
        if b"\n" in path.read_bytes():
            logs = len(read_record(path).logs)
    assert logs >= len(re.findall("^Ep .*\n", printed, re.MULTILINE))
    return logs


@pytest.mark.slow
def test_a_run_is_killed(bench):
    """Its record holds whole lines, and can be read."""
    with attack("kills of a run", KILLS) as (cases, outcomes):
        for draw in cases:
            stage = draw.choice(STAGES[:2])
            printed = killed_after(draw.uniform(0, 8), bench.command(
                stage, "--eval-freq", 1, "--epochs", 1000))
            logs, paths = lines_kept(bench.results, printed), list(bench.results.glob("*"))
            for path in paths:
                path.unlink()
            outcomes["with log lines" if logs else "before one" if paths else "no record yet"] += 1


def test_the_preparation_is_killed(tmp_path):
    """There are whole tokens, or none; also where those of another text were before."""
    texts = [tmp_path / "one.txt", tmp_path / "two.txt"]
    for number, text in enumerate(texts):
        text.write_text(f"It was a dark and stormy night, number {number}. " * 40_000)
    out = tmp_path / "out"
    with attack("kills of data/prepare.py", KILLS) as (cases, outcomes):
        for draw in cases:
            if draw.random() < 0.2:
                shutil.rmtree(out, ignore_errors=True)
            killed_after(draw.uniform(0, 1.5), [ROOT / "data" / "prepare.py", draw.choice(texts),
                                                "--out", out])
            meta = out / "meta.json"
            if meta.exists():
                for part, told in json.loads(meta.read_text())["sha256"].items():
                    assert sha256((out / f"{part}.bin").read_bytes()).hexdigest() == told
            outcomes["whole" if meta.exists() else "none"] += 1


RUNS_OF_TWO_ROUNDS = 6  # of two scripts, and of the first one with two other seeds


@pytest.mark.slow
def test_a_measurement_is_killed(tmp_path):
    """Its journal can be read, its child ends with it, and --resume goes on to the end."""
    tree = copy_of_checkout(tmp_path / "tree", CPU)
    data = write_tokens(tmp_path / "data")
    journal = tree / "results" / "ladder.jsonl"

    def again() -> list:
        return small_ladder(tree, data, *["--resume"] * journal.exists(), rounds=2)

    def kept() -> int:
        found = read_journal(journal)
        return len(found[-1].results) if found else 0

    with attack("kills of a measurement", KILLS) as (cases, outcomes):
        for draw in cases:
            before = kept()
            killed_after(draw.uniform(0.5, 12), again())
            wait_for_no_child_of(tree)
            assert kept() >= before
            outcomes[f"{kept() - before} runs more"] += 1
            if kept() == RUNS_OF_TWO_ROUNDS:
                journal.unlink()
    result = started(again())
    _, err = result.communicate(timeout=240)
    assert result.returncode == 0, err
    assert kept() == RUNS_OF_TWO_ROUNDS


@contextmanager
def little_memory(size: int):
    """Gives what a child calls to be in a group that may use so many bytes, as in a container:
    Linux kills what needs more. Skips the test where one may not make such a group."""
    root = Path("/sys/fs/cgroup")
    first = (root / "memory").is_dir()  # version 1
    group = (root / "memory" if first else root) / f"test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(size))
        (group / ("memory.swappiness" if first else "memory.swap.max")).write_text("0")
    except OSError:
        with suppress(OSError):
            group.rmdir()
        pytest.skip("needs the right to limit the memory of a group of processes")
    try:
        yield lambda: (group / "cgroup.procs").write_text("0")
    finally:
        until = time.monotonic() + 10
        while group.exists():  # until the last killed process has left
            with suppress(OSError):
                group.rmdir()
            assert time.monotonic() < until, "processes are left in the group"
            time.sleep(0.1)


@pytest.mark.slow
def test_too_much_for_a_container(bench, tmp_path):
    """A run that its container kills leaves a whole record, and a measurement tells it."""
    write_tokens(bench.data, train=40_000, val=600)
    large = ["--context-length", 256, "--batch-size", 64]  # logits of 3 GB
    tree = copy_of_checkout(tmp_path / "tree", CPU)
    with little_memory(1_500_000_000) as enter:
        run = started(bench.command("00_orig", *large), preexec_fn=enter)
        assert run.communicate(timeout=120) and run.returncode == -signal.SIGKILL
        (path,) = bench.results.glob("*.jsonl")
        assert read_record(path).status == "killed"
        ladder = started(small_ladder(tree, bench.data, rungs="0", of_scripts=large),
                         preexec_fn=enter)
        out, err = ladder.communicate(timeout=240)
    assert ladder.returncode == 1 and "ended by signal 9" in out and "Traceback" not in err, err
    (measured,) = read_journal(tree / "results" / "ladder.jsonl")
    assert {result.outcome.text for result in measured.results} == {"ended by signal 9"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems answer in other ways")
def test_tokens_are_cut_under_a_run(bench):
    """Linux ends it, without a word of the script; its record keeps what was logged."""
    write_tokens(bench.data, train=200_000)
    run = started(bench.command("00_orig", "--eval-freq", 1, "--epochs", 1000))
    try:
        until = time.monotonic() + 60
        while not any(b'"log"' in path.read_bytes() for path in bench.results.glob("*.jsonl")):
            assert time.monotonic() < until
            time.sleep(0.1)
        os.truncate(bench.data / "train.bin", 0)
        run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == -signal.SIGBUS
    (path,) = bench.results.glob("*.jsonl")
    assert read_record(path).logs


def wait_for_no_child_of(tree: Path) -> None:
    """No script of a killed measurement may go on and disturb the next one."""
    until = time.monotonic() + 60
    while any(str(tree) in line for line in processes()):
        assert time.monotonic() < until, "a child outlived the measurement"
        time.sleep(0.2)


def processes() -> list[str]:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return lines


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limits")
@pytest.mark.parametrize("limit", ["a file", "a disk"])
def test_full_disk(tmp_path, limit):
    """A file can't grow beyond so many bytes, or a disk is full: one line says so, and what is
    there can be read."""
    import resource

    text, data, made_up = tmp_path / "text.txt", tmp_path / "data", tmp_path / "made-up"
    text.write_text("It was a dark and stormy night. " * 20_000)
    write_tokens(data)
    write_results(made_up)
    with attack(f"full disks, {limit}", max(3, COUNT // 4)) as (cases, outcomes):
        for number, draw in enumerate(cases):
            out, place = tmp_path / f"out-{number}", tmp_path / f"place-{number}"
            place.mkdir()
            what, most, command = [
                ("a run", 8_000, [ROOT / "00_orig.py", *TINY, "--device", "cpu", "--eval-freq", 1,
                                  "--data", data, "--results-dir", "out"]),
                ("prepare.py", 1_500_000, [ROOT / "data" / "prepare.py", text, "--out", "out"]),
                ("plot_results.py", 60_000, [ROOT / "plot_results.py", "--results-dir", made_up,
                                             "--out", "out"])][number % 3]
            size = draw.randrange(most)
            if limit == "a disk":  # whose smallest size is a page
                size = max(4096, size)
            if limit == "a file":
                process = started(command, cwd=place, preexec_fn=lambda size=size:
                                  resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)))
            else:
                process = started(command, before=on_small_disk(size, place, out))
            printed, err = process.communicate(timeout=120)
            left = (out if limit == "a disk" else place) / "out"
            errors = [line for line in err.splitlines() if line.startswith("error: ")]
            assert "Traceback" not in err and process.returncode in (0, 1), (what, size, err)
            assert len(errors) == process.returncode, (what, size, err)
            reason = "No space left" if limit == "a disk" else "too large"
            assert all(reason in line for line in errors), (what, size, err)
            outcomes[f"{what}: {'refused' if errors else 'done'}"] += 1
            if what == "a run":
                lines_kept(left, printed)
            for path in left.glob("*.png"):
                assert imread(path).size
            if what == "prepare.py" and process.returncode:
                assert not (left / "meta.json").exists()
            assert not list(left.glob("*.tmp")) if left.exists() else True


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs namespaces")
def test_a_disk_fills_up_under_a_measurement(tmp_path):
    """One line says so; what was measured can be read, and --resume continues it."""
    tree = copy_of_checkout(tmp_path / "tree", CPU)
    data, place, out = write_tokens(tmp_path / "data"), tmp_path / "place", tmp_path / "out"
    place.mkdir()
    process = started(small_ladder(tree, data, "--results-dir", "results"),
                      before=on_small_disk(3 * 4096, place, out))
    _, err = process.communicate(timeout=240)
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert process.returncode == 1 and "Traceback" not in err, err
    assert len(errors) == 1 and "No space left" in errors[0], err
    results = out / "results"
    (before,) = read_journal(results / "ladder.jsonl")
    assert 0 < len(before.results) < 4
    again = started(small_ladder(tree, data, "--results-dir", results, "--resume"))
    _, err = again.communicate(timeout=240)
    assert again.returncode == 0, err
    (after,) = read_journal(results / "ladder.jsonl")
    assert after.results[:len(before.results)] == before.results
    assert [result.outcome.kind for result in after.results] == ["complete"] * 3


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs namespaces")
@pytest.mark.parametrize("program", ["00_orig.py", "plot_results.py", "prepare.py",
                                     pytest.param("measure.py", marks=pytest.mark.slow)])
def test_a_folder_that_may_only_be_read(tmp_path, program):
    data, made_up, place = tmp_path / "data", tmp_path / "made-up", tmp_path / "place"
    text = tmp_path / "text.txt"
    text.write_text("It was a dark and stormy night. " * 100)
    place.mkdir()
    write_tokens(data)
    write_results(made_up)
    command = {
        "00_orig.py": [ROOT / "00_orig.py", *TINY, "--data", data, "--results-dir", "out"],
        "plot_results.py": [ROOT / "plot_results.py", "--results-dir", made_up, "--out", "out"],
        "prepare.py": [ROOT / "data" / "prepare.py", text, "--out", "out"],
        "measure.py": small_ladder(ROOT, data, "--results-dir", "out")}[program]
    before = on_small_disk(4096, place, tmp_path / "copy", "ro")
    _, err = started(command, before=before).communicate(timeout=120)
    assert "Traceback" not in err and "Read-only file system" in err, err
    assert len([line for line in err.splitlines() if line.startswith("error: ")]) == 1, err


@pytest.mark.slow
def test_interrupted_while_it_is_imported(bench):
    """Ctrl-C before main() is reached, in the seconds in which PyTorch is loaded."""
    def as_in_a_terminal():  # a shell's background jobs ignore it, and so do their children
        signal.signal(signal.SIGINT, signal.default_int_handler)

    with attack("Ctrl-C in the first seconds", max(2, COUNT // 6)) as (cases, outcomes):
        for draw in cases:
            process = started(bench.command("00_orig", "--epochs", 1000),
                              preexec_fn=as_in_a_terminal)
            time.sleep(draw.uniform(0.05, 4))
            process.send_signal(signal.SIGINT)
            try:
                _, err = process.communicate(timeout=60)
            finally:
                process.kill()
            assert process.returncode not in (0, 1), err
            by = "the script" if "interrupted by signal" in err else "Python, loading PyTorch"
            outcomes[f"ended by {by}"] += 1
