"""plot_results.py: the command, its files and its errors."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from conftest import ROOT, run_python  # noqa: E402
from matplotlib import pyplot as plt  # noqa: E402
from synthetic import ladder_row, ladder_state, write_record, write_state  # noqa: E402

import plot_results  # noqa: E402
from bench import stages  # noqa: E402


@pytest.fixture
def plot(capsys):
    """Runs it in this process: (exit code, lines of stdout, lines of stderr)."""
    def run(results, *options):
        code = plot_results.main([str(part) for part in ("--results", results, *options)])
        said = capsys.readouterr()
        return code, said.out.splitlines(), said.err.splitlines()

    yield run
    plt.close("all")


def test_command(tmp_path):
    """From another folder, as a user starts it."""
    results, out = tmp_path / "results", tmp_path / "deep" / "out"
    write_record(results, "00_orig", "2026-01-01T00:00:00Z", 1000)
    write_record(results, "00_orig", "2026-01-02T00:00:00Z", 1, status="interrupted")
    write_state(results, ladder_state())
    run = run_python("-X", "utf8", ROOT / "plot_results.py", "--results", results, "--out", out,
                     cwd=tmp_path, encoding="utf-8")
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert run.stdout.startswith("1 run that did not complete is left out\n")
    names = ["summary.md", "speed.png", "losses.png", "ladder.png"]
    assert [Path(line).name for line in run.stdout.splitlines()[-4:]] == names
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    for name in names[1:]:
        assert (out / name).read_bytes().startswith(b"\x89PNG")
        assert (out / name).stat().st_size > 10_000
    summary = (out / "summary.md").read_text(encoding="utf-8")
    assert summary in run.stdout
    assert "| Test CPU | cpu-demo / 256 | 00 original | 1,000 |" in summary
    assert "\n\nPublished figures: A100, PyTorch 2.6" in summary


def test_nothing_measured(tmp_path, plot):
    """The published figures as a table; no picture of a machine that isn't this one."""
    code, out, err = plot(tmp_path)
    assert (code, err) == (0, [])
    assert not list(tmp_path.iterdir())
    assert any("| A100 (published) | GPT-2 124M / 1,024 | 02 DDP × 4 | 419,259 | 33.47 |" in line
               for line in out)
    assert out[-1].startswith("Nothing to draw: there is no complete run in ")
    assert "results/reference/amd-epyc-2-cores" in out[-1]


def test_only_what_was_measured_is_drawn(tmp_path, plot):
    write_record(tmp_path, "00_orig", "2026-01-01T00:00:00Z", 1000)
    code, out, err = plot(tmp_path, "--format", "svg")
    names = "losses.svg", "speed.svg", "summary.md"
    assert (code, err) == (0, [])
    assert {path.name for path in tmp_path.iterdir() if path.suffix != ".jsonl"} == {*names}
    assert any(line.startswith("Not measured here, so not drawn: ladder, ") for line in out)
    assert any("results/reference/amd-epyc-2-cores" in line for line in out)
    assert "<svg" in (tmp_path / "speed.svg").read_text(encoding="utf-8")


def test_damaged_ladders_are_named(tmp_path, plot):
    for rows in ([{"name": "00_orig"}], [1], [ladder_row(0, speeds=None)]):
        write_state(tmp_path, ladder_state(rows=rows))
        code, out, err = plot(tmp_path)
        assert code == 0 and len(err) == 1 and err[0].startswith("skipped: ")
        assert not (tmp_path / "ladder.png").exists()


def test_folders_that_do_not_serve(tmp_path, plot):
    (tmp_path / "file").write_text("")
    write_record(tmp_path, "00_orig", "2026-01-01T00:00:00Z", 1000)
    for options in ((tmp_path, "--out", tmp_path / "file" / "out"), (tmp_path / "nowhere",)):
        code, _, err = plot(*options)
        assert code == 1 and len(err) == 1 and err[0].startswith("error: ")


@pytest.mark.parametrize("content", [None, "{", "[]", '{"gpu": "A100"}'])
def test_published_figures_missing_or_damaged(tmp_path, monkeypatch, plot, content):
    monkeypatch.setattr(stages, "PUBLISHED", tmp_path / "published.json")
    if content is not None:
        stages.PUBLISHED.write_text(content)
    code, _, err = plot(tmp_path)
    assert code == 1 and len(err) == 1
    assert err[0].startswith("error: the published figures can't be read: ")


def test_a_terminal_without_the_signs(tmp_path, monkeypatch, plot):
    """`×` and `–` become question marks."""
    with open(tmp_path / "out", "w", encoding="ascii") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        assert plot_results.main(["--results", str(tmp_path)]) == 0
    assert "02 DDP ? 4" in (tmp_path / "out").read_text()
