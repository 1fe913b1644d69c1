"""bench/report.py: the page, its pieces, and how it goes on after an end at any place."""

import json
import re
import signal
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from conftest import ROOT
from made_up import CPU, MACHINE, PEAK, write_record
from test_profiles import STEPS, write_trace

from bench import lengths, plans, processes, report, runner, states
from bench.plans import UserError

LOOK = dict(
    memory_gb=24.0, matmul_peak=PEAK, bandwidth=3e10, compile_error=None,
    missing=["a thing: how to get it"],
    attention=[dict(dropout=0.1, backend="flash_attention", runs=True, chosen=True,
                    milliseconds=1.5, real_dropout=0.0998)],
)
PLANS = ("stages", "ladder", "leave-one-out", "trainer")
# Of the pieces with one plan like another's, one is enough here.
SOME = [name for name in report.PIECES
        if name not in ("variants", "compile-modes", "sharded", "scaling", "checkpoints", "sweeps")]


@pytest.fixture
def fake(monkeypatch, tmp_path_factory):
    """Made-up runs in place of real ones; `stop_at` names the one that a signal ends."""
    speeds = {"00_orig": 100.0, "03-fused-adamw": 120.0, "01_opt_single_gpu": 900.0}

    def run_job(job, plan, length):
        fake.started += 1
        if fake.started == fake.stop_at:
            raise processes.Interrupted(signal.SIGTERM)
        fake.ran.append((plan.name, *job.key))
        if job.run.name in fake.fails:
            return dict(name=job.run.name, round=job.round, seed=job.seed, record=None,
                        error="failed: it broke", seconds=1.0)
        speed = speeds.get(job.run.name, 150.0) + job.round
        return write_record(plan.path.parent, job.run.name, job.round, speed, seed=job.seed,
                            loss=8 + job.seed / 1000, gpu="Some | GPU")

    def run_child(command, *_, **environment):  # the profile's
        fake.started += 1
        folder = Path(command[command.index("--results-dir") + 1])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "profile-1.jsonl").write_text("{}")
        if fake.started == fake.stop_at:
            raise processes.Interrupted(signal.SIGTERM)
        fake.ran.append("profile")
        kernel = ("kernel", "some_gemm", 2000, 900, 7)
        write_trace(folder / "profile-1.trace.json", [*STEPS, kernel])
        return 0, "", ""

    def ask_machine(question):
        answers = dict(this_machine=fake.machine, matmul_peak=PEAK,
                       look=dict(machine=fake.machine) | LOOK, large_loss="right")
        return answers[question]

    fake = SimpleNamespace(ran=[], fails=set(), started=0, stop_at=None, machine=MACHINE)
    monkeypatch.setattr(plans, "BUILD", tmp_path_factory.mktemp("build"))
    monkeypatch.setattr(runner, "run_job", run_job)
    monkeypatch.setattr(processes, "run_child", run_child)
    monkeypatch.setattr(processes, "ask_machine", ask_machine)
    config = dict(batch_size=4, context_length=256, compile=False)
    monkeypatch.setattr(lengths, "configurations",
                        lambda plan: {run.name: config for run in plan.runs if not run.error})
    return fake


def make(folder: Path, names=tuple(report.PIECES), minutes: float = 600, **settings) -> int:
    folder.mkdir(exist_ok=True)
    (folder / "meta.json").write_text('{"tokens": {"train": 414009}}')
    settings = dict(tokens=4096, rungs="0,1,3") | settings
    return report.make_report(report.Report(folder, folder, minutes, **settings), list(names))


def rows_of(folder: Path) -> dict:
    found = {name: states.earlier_state(folder / name / f"{name}.json") for name in PLANS}
    profile = json.loads((folder / "profile" / "profile.json").read_text())
    return {name: state["rows"] for name, state in found.items()} | dict(profile=profile)


def test_stopped_anywhere_it_ends_with_the_same_rows(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "draw", lambda _: None)
    assert make(tmp_path / "whole", SOME) == 0
    whole, rows = fake.ran, rows_of(tmp_path / "whole")
    assert [row["rounds"] for row in rows["ladder"]] == [4, 4, 4]
    assert rows["leave-one-out"][1]["error"].startswith("conflict")
    assert whole.index("profile") == 3 + 4  # after the stages and a round of the ladder
    for number in range(1, len(whole) + 1):
        fake.ran, fake.started, fake.stop_at = [], 0, number
        folder = tmp_path / str(number)
        with pytest.raises(processes.Interrupted):
            make(folder, SOME)
        fake.stop_at = None
        assert make(folder, SOME) == 0
        assert fake.ran == whole  # none of them twice
        assert rows_of(folder) == rows


def test_page(fake, tmp_path):
    assert make(tmp_path) == 0
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    head, *sections = text.split("\n## ")
    for piece in report.PIECES.values():
        if piece.section:
            (section,) = (part for part in sections if part.startswith(piece.title))
            assert piece.command in section and "Not measured yet" not in section
    assert "01 trains **901 tok/sec, 8.92 times** 00's 101 (published, on an A100: 142,156" in head
    assert "fused AdamW" in head and "Not finished" not in head
    assert "Missing: a thing: how to get it." in text
    assert "| 0.1 | flash attention | yes | ← | 1.50 | 0.100 |" in text
    assert "| matrix products | 0.45 | 100.0% |" in text
    assert "| 00, published | 9.535, 9.609 | 0.150, 6.914 |" in text
    for picture in ("speed.png", "losses.png", "ladder.png", "compile-modes.png"):
        assert f"]({picture})" in text and (tmp_path / picture).stat().st_size > 10_000
    with tarfile.open(tmp_path / "report.tar.gz") as tar:
        names = set(tar.getnames())
    assert {"report.md", "machine.json", "speed.png", "ladder/ladder.json",
            "profile/profile-1.trace.json"} <= names
    # Carried to another place, it goes on there.
    with tarfile.open(tmp_path / "report.tar.gz") as tar:
        # Python 3.11.2 and before have no filters.
        filters = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        tar.extractall(tmp_path / "elsewhere", **filters)
    fake.ran.clear()
    assert make(tmp_path / "elsewhere") == 0 and not fake.ran


def test_time_is_over(fake, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "draw", lambda _: None)
    assert make(tmp_path, minutes=0.1) == 0
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    missing = [name for name in report.PIECES if name != "machine"]
    assert f"Not finished: {', '.join(missing)}; started again" in text
    assert text.count("Not measured yet.") == 12 and not fake.ran
    assert "after 0.0 minutes" in capsys.readouterr().out


def test_the_page_is_written_whatever_happens(fake, tmp_path, monkeypatch, capsys):
    """A piece that can't be measured is told, and the others are; so is one that a signal ends."""
    monkeypatch.setattr(report, "draw", lambda _: None)
    monkeypatch.setattr(report.plans, "ladder", mock.Mock(side_effect=OSError("no git")))
    assert make(tmp_path) == 1
    assert "error: ladder: no git" in capsys.readouterr().err
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "Not finished: ladder, rounds; started again" in text
    assert text.count("Not measured yet.") == 1
    fake.stop_at = 2
    fake.started = 0
    with pytest.raises(processes.Interrupted):
        make(tmp_path / "stopped")
    text = (tmp_path / "stopped" / "report.md").read_text(encoding="utf-8")
    missing = [name for name in report.PIECES if name != "machine"]
    assert f"Not finished: {', '.join(missing)};" in text


def test_without_matplotlib(fake, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert make(tmp_path, ["stages"]) == 0
    assert "the page has no pictures" in capsys.readouterr().err
    assert "![" not in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_some_pieces(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "draw", lambda _: None)
    assert make(tmp_path, ["stages"]) == 0
    assert [key[0] for key in fake.ran] == ["stages"] * 3


def test_epochs_that_fit(fake, tmp_path, monkeypatch):
    """On a GPU the published 15, or as many as the time of the piece holds; kept for a restart."""
    monkeypatch.setattr(report, "draw", lambda _: None)
    for peak, epochs in ((312e12, range(1, 15)), (312e13, range(15, 16))):
        folder = tmp_path / str(peak)
        monkeypatch.setitem(LOOK, "matmul_peak", dict(bfloat16=peak))
        make(folder, ["stages"], tokens=None)
        found = states.earlier_state(folder / "stages" / "stages.json")["plan"]["epochs"]
        assert found in epochs
        assert make(folder, ["stages"], tokens=None) == 0
    fake.machine = CPU
    make(tmp_path / "cpu", ["stages"], tokens=None)
    assert states.earlier_state(tmp_path / "cpu/stages/stages.json")["plan"]["epochs"] is None


def test_failures(fake, tmp_path, monkeypatch, capsys):
    """A run that fails is a row, and the exit code tells."""
    monkeypatch.setattr(report, "draw", lambda _: None)
    fake.fails.add("01_opt_single_gpu")
    assert make(tmp_path, ["stages"]) == 1
    assert "failed: it broke" in (tmp_path / "report.md").read_text(encoding="utf-8")
    assert make(tmp_path, ["stages"], tokens=8192) == 1
    assert re.search("was measured with other tokens.*move .* away", capsys.readouterr().err)
    fake.machine = MACHINE | dict(cpu="another host's", threads=64)  # the same GPU
    fake.fails.clear()
    assert make(tmp_path, ["stages"]) == 0
    fake.machine = CPU
    with pytest.raises(UserError, match="the report of another machine"):
        make(tmp_path)


def test_profile_that_fails(fake, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "draw", lambda _: None)
    monkeypatch.setattr(processes, "run_child", lambda *_, **__: (1, "", "error: out of memory"))
    assert make(tmp_path, ["profile"]) == 1
    assert "profile: failed: out of memory" in capsys.readouterr().err
    assert "Not measured yet" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_makefile_and_pieces():
    """Every piece has a name that the command knows, and `make report` passes them on."""
    text = (ROOT / "Makefile").read_text()
    assert "measure.py report --minutes" in text and "--pieces" in text
