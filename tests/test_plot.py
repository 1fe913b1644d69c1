"""plot_results.py: its figures, its pictures, and what it does with damaged records."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

ROOT = Path(__file__).resolve().parent.parent


def record(folder, stage, time, speed, *, gpu=None, status="complete", **end):
    """Write the record of a run; returns its path."""
    start = {
        "event": "start", "schema": 1, "stage": stage, "time": time,
        "config": {
            "model": "cpu-demo", "context_length": 256, "batch_size": 8, "world_size": 2,
            "device": "cuda" if gpu else "cpu",
        },
        "environment": {"gpu": gpu, "cpu": "Test CPU"},
    }
    logs = [
        {"event": "log", "epoch": 1, "step": step, "tokens": 2048 * (step + 1),
         "train_loss": 10 - step, "val_loss": 10.5 - step, "train_seconds": step + 0.5}
        for step in range(3)
    ]
    last = {
        "event": "end", "status": status, "error": None, "avg_tok_per_sec": speed - 1,
        "median_step_tok_per_sec": speed, "p25_step_tok_per_sec": speed - 100,
        "p75_step_tok_per_sec": speed + 100, "reserved_gb": 1.25, "mfu": None, "val_loss": 7.5,
    } | end
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stage}-{'cuda' if gpu else 'cpu'}-{time.replace(':', '')}-1.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in (start, *logs, last)))
    return path


def plot(results, *options, script=ROOT / "plot_results.py"):
    command = [sys.executable, "-X", "utf8", script, "--results", results, *options]
    return subprocess.run(command, capture_output=True, encoding="utf-8", check=False)


def rows(text):
    """The table as {(device, stage): cells}, without its two lines of heading."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return {(cells[0], cells[2]): cells for cells in lines[2:]}


def test_pictures_and_summary(tmp_path):
    results, out = tmp_path / "results", tmp_path / "deep" / "out"
    record(results, "00_orig", "20260101T000000Z", 1000)
    record(results, "00_orig", "2026-01-03T00:00:00Z", 1500)  # the latest, in the ISO form
    record(results, "00_orig", "20260104T000000Z", 9999, status="interrupted")
    record(results / "reference" / "a", "00_orig", "20260102T000000Z", 1200)
    record(results, "01_opt_single_gpu", "20260101T000000Z", 4500)
    record(results / "reference" / "a", "01_opt_single_gpu", "20260105T000000Z", 6000)
    record(results, "02_opt_multi_gpu_ddp", "20260101T000000Z", 412_345, gpu="Fast | $x_1$ GPU",
           mfu=0.314, reserved_gb=None, median_step_tok_per_sec=None,
           p25_step_tok_per_sec=None, p75_step_tok_per_sec=None)
    record(results, "03_fused_adamw", "20260109T000000Z", 8888)  # not one of the three stages
    killed = record(results, "00_orig", "20260106T000000Z", 7777)
    killed.write_text("".join(killed.read_text().splitlines(keepends=True)[:-1]))

    run = plot(results, "--out", out)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert "2 runs that did not complete are left out" in run.stdout
    names = ("speed.png", "losses.png", "summary.md")
    assert [Path(line).name for line in run.stdout.splitlines()[-3:]] == list(names)
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    for name in names[:2]:
        assert (out / name).read_bytes().startswith(b"\x89PNG")
        assert (out / name).stat().st_size > 10_000

    summary = (out / "summary.md").read_text(encoding="utf-8")
    assert summary in run.stdout
    table = rows(summary)
    assert len(table) == 5
    assert table["Test CPU", "00 original"][1:] == [
        "cpu-demo / 256", "00 original", "1,500", "1.00", "1,400–1,600", "1.25", "n/a", "7.500",
        "12,525", "1.00",
    ]
    assert table["Test CPU (reference)", "01 optimized"][3:5] == ["6,000", "5.00"]
    # No 00 in this group: no factor. No median: the average.
    assert table[r"Fast \| $x_1$ GPU", "02 DDP × 2"][3:] == [
        "412,344", "n/a", "n/a", "n/a", "31.4%", "7.500", "419,259", "33.47",
    ]


def test_latest_of_many_groups(tmp_path):
    for i in range(4):
        record(tmp_path, "00_orig", f"2026010{i + 1}T000000Z", 1000, gpu=f"GPU {i}")
    run = plot(tmp_path)
    assert run.returncode == 0, run.stderr
    assert len(rows(run.stdout)) == 4
    assert (tmp_path / "losses.png").exists()


def test_damaged_records_are_named_and_skipped(tmp_path):
    record(tmp_path, "00_orig", "20260101T000000Z", 1000)
    good = record(tmp_path, "00_orig", "20260102T000000Z", 2000).read_bytes()
    lines = good.splitlines(keepends=True)
    damaged = {
        "broken": (b"".join([*lines[:1], b'{"event": \n', *lines[2:]]), 2),
        "fields": (good.replace(b'"val_loss": 7.5', b'"loss": 7.5'), 5),
        "utf8": (b"".join([*lines[:2], b'{"event": "\xff"}\n', *lines[3:]]), 3),
        "torn": (good[:-30], 5),
        "nan": (good.replace(b'"reserved_gb": 1.25', b'"reserved_gb": NaN'), 5),
        "list": (b"[]\n" + good, 1),
        "type": (good.replace(b'"context_length": 256', b'"context_length": "256"'), 1),
        "empty": (b"", 1),
        "no_start": (b"".join(lines[1:]), 1),
        "deep": (good + b"[" * 100_000 + b"\n", 6),
    }
    for name, (content, _) in damaged.items():
        (tmp_path / f"z-{name}.jsonl").write_bytes(content)
    run = plot(tmp_path, "--out", tmp_path / "out")
    assert run.returncode == 0, run.stderr
    reports = run.stderr.splitlines()
    assert len(reports) == len(damaged)
    for name, (_, line) in damaged.items():
        assert any(f"z-{name}.jsonl, line {line}: " in report for report in reports), name
    assert rows(run.stdout)["Test CPU", "00 original"][3] == "2,000"


@pytest.mark.parametrize("form", ["png", "svg"])
def test_published_alone(tmp_path, form):
    run = plot(tmp_path, "--format", form)
    assert run.returncode == 0, run.stderr
    assert "no complete runs" in run.stdout
    assert f"no losses.{form}" in run.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"speed.{form}", "summary.md"]
    assert rows(run.stdout)["A100 (published)", "02 DDP × 4"][3:5] == ["419,259", "33.47"]
    if form == "svg":
        assert "<svg" in (tmp_path / "speed.svg").read_text(encoding="utf-8")


def test_folders_that_do_not_serve(tmp_path):
    (tmp_path / "file").write_text("")
    for options in ((tmp_path, "--out", tmp_path / "file" / "out"), (tmp_path / "nowhere",)):
        run = plot(*options)
        assert run.returncode == 1
        assert run.stderr.startswith("error: ")
        assert len(run.stderr.splitlines()) == 1


@pytest.mark.parametrize("content", [None, "{", "[]", '{"techniques": [1]}'])
def test_published_figures_missing_or_damaged(tmp_path, content):
    script = Path(shutil.copy(ROOT / "plot_results.py", tmp_path))
    reference = tmp_path / "results" / "reference"
    reference.mkdir(parents=True)
    if content is not None:
        (reference / "published-a100.json").write_text(content)
    run = plot(tmp_path / "results", script=script)
    assert run.returncode == 1
    assert run.stderr.startswith("error: ")
    assert len(run.stderr.splitlines()) == 1


def test_published_figures():
    path = ROOT / "results" / "reference" / "published-a100.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    techniques = {row["id"]: row for row in data["techniques"]}
    assert len(techniques) == len(data["techniques"]) == 12
    assert {row["measure"] for row in techniques.values()} == set(data["measures"])
    stages = [techniques[name] for name in data["stages"].values()]
    assert [row["tok_per_sec"] for row in stages] == [12525, 142156, 419259]
    assert [row["reserved_gb"] for row in stages] == [26.2617, 22.5078, 22.7969]
    assert [row["world_size"] for row in stages] == [1, 1, 4]


def ladder(folder, time="2026-01-01T00:00:00Z", **state):
    """Write a ladder.json of 13 rungs, one of which failed; its rows as ladder.py leaves them."""
    rows = [
        dict(rung=k, name=f"{k:02}-technique", speeds=[100 + k, 110 + k], tok_per_sec=105 + k,
             factor_baseline=(105 + k) / 105 if k else None, reserved_gb=2 - k / 20, error=None,
             published_factor_baseline=k or None, val_loss=8.0 + (k > 9))
        for k in range(13)
    ]
    rows[7] |= dict(speeds=[], tok_per_sec=None, factor_baseline=None, reserved_gb=None,
                    val_loss=None, error="failed: out of memory: lower --batch-size")
    state = dict(time=time, rows=rows, seed_noise=0.05,
                 plan=dict(machine=dict(name="Test $x_1$ CPU"))) | state
    path = folder / "ladder" / "ladder.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(state))


def test_ladder(tmp_path):
    def svg():
        run = plot(tmp_path, "--format", "svg", "--out", tmp_path / "out")
        assert run.returncode == 0, run.stderr
        path = tmp_path / "out" / "ladder.svg"
        text = path.read_text(encoding="utf-8") if path.exists() else None
        path.unlink(missing_ok=True)
        return run, text

    ladder(tmp_path / "reference" / "a", plan=dict(machine=dict(name="older")))
    ladder(tmp_path / "reference" / "b", time="2026-01-02T00:00:00Z")
    run, text = svg()
    assert "ladder.svg" in run.stdout
    assert run.stderr == ""
    for shown in ("The ladder on Test $x_1$ CPU (reference): median", "baseline", "technique 12",
                  "failed: out of memory", "117  (1.11×, 1.40 GB)", "10.00×", "validation loss"):
        assert f"<!-- {shown}" in text, shown
    # One in results/ goes before those of the reference; an unfinished one has no picture.
    ladder(tmp_path, plan=dict(machine=dict(name="mine")), seed_noise=None)
    assert "<!-- The ladder on mine: median and range of 2 rounds -->" in svg()[1]
    ladder(tmp_path, rows=[])
    assert "Test $x_1$ CPU" in svg()[1]
    # A damaged one is named.
    for state in (dict(rows=[{"rung": 0}]), dict(rows=[1]), dict(plan=None)):
        ladder(tmp_path, **state)
        run, text = svg()
        assert text is None
        assert "skipped: ladder.json is damaged" in run.stderr
        assert len(run.stderr.splitlines()) == 1
