"""plot_results.py: the command, its files and its errors."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from conftest import ROOT, environment, run_python  # noqa: E402
from made_up import plan_of, write_journal, write_record  # noqa: E402
from matplotlib import pyplot as plt  # noqa: E402

import plot_results  # noqa: E402
from bench import catalogue as scripts  # noqa: E402
from bench.common import relative  # noqa: E402


@pytest.fixture
def plot(capsys):
    """Runs it in this process: (exit code, lines of stdout, lines of stderr)."""
    def run(results, *options):
        code = plot_results.main([str(part) for part in ("--results-dir", results, *options)])
        said = capsys.readouterr()
        return code, said.out.splitlines(), said.err.splitlines()

    yield run
    plt.close("all")


def write_ladder(folder: Path) -> Path:
    plan = plan_of("00_orig", "01-causal-mask")
    plan.runs = [run.but(label=f"{k} {run.name}", rung=k)
                 for k, run in enumerate(plan.runs)]
    return write_journal(folder, "ladder", plan, [dict(name=run.name) for run in plan.runs])


def test_command(tmp_path):
    """From another folder, as a user starts it."""
    results, out = tmp_path / "results", tmp_path / "deep" / "out"
    write_record(results, "00_orig", speed=1000)
    write_record(results, "00_orig", "20260102T000000Z", status="interrupted")
    write_ladder(results)
    stages = plan_of("00_orig", "01_opt_single_gpu")
    write_journal(results, "stages", stages, [dict(name="01_opt_single_gpu", speed=3000)])
    run = run_python("-X", "utf8", ROOT / "plot_results.py", "--results-dir", results, "--out", out,
                     cwd=tmp_path, encoding="utf-8")
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("1 run that did not complete is left out\n")
    names = ["summary.md", "speed.png", "ladder.png"]
    assert [Path(line).name for line in run.stdout.splitlines()[-3:]] == names
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    for name in names[1:]:
        assert (out / name).read_bytes().startswith(b"\x89PNG")
        assert (out / name).stat().st_size > 10_000
    summary = (out / "summary.md").read_text(encoding="utf-8")
    assert summary in run.stdout
    assert "| Some CPU | cpu-demo / 256 | 00 original, batch 4 | 1,000 | 1.00 |" in summary
    assert "| Some CPU | cpu-demo / 256 | 01 optimized, batch 4 | 3,000 | 3.00 |" in summary
    assert "\n\nPublished figures: A100, PyTorch 2.6" in summary


def test_nothing_measured(tmp_path, plot):
    """The published figures as a table; no picture of a machine that isn't this one."""
    code, out, err = plot(tmp_path)
    assert (code, err) == (0, []) and not list(tmp_path.iterdir())
    assert any("| A100 (published) | GPT-2 124M / 1,024 | 02 DDP × 4 | 419,259 | 33.47 |" in line
               for line in out)
    assert any(line.startswith("Nothing to draw: there is no complete run in ") for line in out)
    assert "results/reference/amd-epyc-2-cores" in out[-1]


@pytest.mark.parametrize(("form", "begin"), [("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_only_what_was_measured_is_drawn(tmp_path, plot, form, begin):
    write_record(tmp_path, "00_orig")
    code, out, err = plot(tmp_path, "--format", form)
    assert (code, err) == (0, [])
    assert {path.name for path in tmp_path.iterdir() if path.suffix != ".jsonl"} == {
        f"speed.{form}", "summary.md"}
    assert (tmp_path / f"speed.{form}").read_bytes().startswith(begin)
    assert any("results/reference/amd-epyc-2-cores" in line for line in out)


def test_what_is_damaged_is_named(tmp_path, plot):
    """And all else is drawn."""
    write_record(tmp_path, "00_orig")
    path = write_ladder(tmp_path)
    path.write_text(path.read_text() + "[]\n")
    write_journal(tmp_path, "time-to-loss", plan_of("a", targets={"best": "low"}), [
        dict(name="a")])
    code, _, err = plot(tmp_path)
    assert code == 0 and len(err) == 2
    assert err[0].startswith("no picture of time-to-loss, it is damaged: ")
    assert err[1].startswith("skipped: ") and "ladder.jsonl, line " in err[1]
    assert {path.name for path in tmp_path.glob("*.png")} == {"ladder.png", "speed.png"}


def test_folders_that_do_not_serve(tmp_path, plot):
    (tmp_path / "file").write_text("")
    write_record(tmp_path, "00_orig")
    out = tmp_path / "file" / "out"
    for options, says in (
            ((tmp_path, "--out", out), f"{relative(out)}/summary.md can't be written: Not a direc"),
            ((tmp_path / "nowhere",), f"{tmp_path / 'nowhere'} is not a folder")):
        code, _, err = plot(*options)
        assert code == 1 and len(err) == 1 and err[0].startswith(f"error: {says}")


@pytest.mark.parametrize("content", [None, "{", "[]", '{"gpu": "A100"}'])
def test_published_figures_missing_or_damaged(tmp_path, monkeypatch, plot, content):
    monkeypatch.setattr(scripts, "PUBLISHED", tmp_path / "published.json")
    if content is not None:
        scripts.PUBLISHED.write_text(content)
    code, _, err = plot(tmp_path)
    assert code == 1 and len(err) == 1
    assert err[0].startswith("error: ") and "published.json can't be read: " in err[0]


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """A folder with something to draw."""
    folder = tmp_path_factory.mktemp("measured")
    write_record(folder, "00_orig")
    return folder


@pytest.mark.parametrize("backend", ["Qt4Agg", "TkAgg", "module://matplotlib_inline.backend_inline"])
def test_whatever_backend_is_named(tmp_path, measured, backend):
    """One that matplotlib no longer has, one without a display, and a notebook's."""
    run = run_python(ROOT / "plot_results.py", "--results-dir", measured, "--out", tmp_path,
                     env=environment(MPLBACKEND=backend))
    assert (run.returncode, run.stderr) == (0, "")
    assert [path.stat().st_size > 10_000 for path in tmp_path.glob("*.png")] == [True]


def test_windows_that_cannot_be_opened(tmp_path, measured):
    """A wrong backend is told where it is asked for, in one line."""
    run = run_python(ROOT / "plot_results.py", "--results-dir", measured, "--out", tmp_path,
                     "--show", env=environment(MPLBACKEND="Qt4Agg"))
    assert run.returncode == 1 and not list(tmp_path.iterdir())
    (line,) = run.stderr.splitlines()
    assert line.startswith("error: --show can't open a window (MPLBACKEND: Qt4Agg): ")


@pytest.mark.slow
def test_a_folder_of_matplotlib_that_cannot_be_made(tmp_path, measured):
    """Its own lines name the variable, and all is drawn."""
    (tmp_path / "file").touch()
    run = run_python(ROOT / "plot_results.py", "--results-dir", measured, "--out", tmp_path,
                     env=environment(MPLCONFIGDIR=str(tmp_path / "file" / "below")))
    assert run.returncode == 0 and (tmp_path / "speed.png").stat().st_size > 10_000
    assert "MPLCONFIGDIR" in run.stderr and "Traceback" not in run.stderr


def test_without_matplotlib(tmp_path, measured, monkeypatch, plot):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = plot(measured, "--out", tmp_path)
    assert code == 1 and len(err) == 1 and err[0].startswith("error: ")
    assert "matplotlib" in err[0] and not list(tmp_path.iterdir())


def test_runs_that_cannot_be_compared_are_told(tmp_path, plot):
    """Those of another text have a group of their own; where limits differ lengths are told."""
    book, mine = (dict(data=dict(corpus=name, tokenizer="gpt2")) for name in (
        "Middlemarch", "mine.txt"))
    limits = dict(epochs=15, max_steps=None, max_tokens=40_960)
    write_record(tmp_path, "00_orig", start=book, config=limits)
    write_record(tmp_path, "01_opt_single_gpu", speed=300.0, start=book, config=limits)
    code, out, _ = plot(tmp_path)
    text = "\n".join(out)
    assert code == 0 and "| 01 optimized, batch 4 | 300 | 3.00 |" in text
    assert "Middlemarch |" not in text and "Runs of different lengths" not in text
    write_record(tmp_path, "02_opt_multi_gpu_ddp", start=book, config=limits | dict(
        world_size=2, max_tokens=81_920))  # as many for each process
    assert not any("Runs of different lengths" in line for line in plot(tmp_path)[1])
    write_record(tmp_path, "01_opt_single_gpu", "20260102T000000Z", speed=300.0, start=book,
                 config=limits | dict(max_steps=8))
    text = "\n".join(plot(tmp_path)[1])
    assert "| 01 optimized, batch 4, 8,192 tokens | 300 | 3.00 |" in text
    assert "\nRuns of different lengths: their losses can't be compared.\n" in text
    write_record(tmp_path, "01_opt_single_gpu", "20260103T000000Z", speed=500.0, start=mine,
                 config=limits)
    text = "\n".join(plot(tmp_path)[1])
    assert "| mine.txt | 01 optimized, batch 4 | 500 | n/a |" in text
    assert "| 01 optimized, batch 4, 8,192 tokens | 300 | 3.00 |" in text


@pytest.mark.parametrize(("steps", "told"), [(14, False), (16, True)])
def test_epochs_of_several_passes_are_told(tmp_path, plot, steps, told):
    """02 trains on more tokens than 01 in as many epochs, where an epoch would be too short."""
    limits = dict(epochs=15, max_steps=None, max_tokens=None)
    write_record(tmp_path, "01_opt_single_gpu", config=limits, steps=20)  # 20,480 tokens
    write_record(tmp_path, "02_opt_multi_gpu_ddp", config=limits | dict(world_size=2), steps=steps)
    text = "\n".join(plot(tmp_path)[1])
    assert ("Runs of different lengths" in text) == told
    assert ("| 02 DDP × 2, batch 4, 32,768 tokens |" in text) == told


def test_texts_of_the_same_name(tmp_path, plot):
    """Other tokens than those of 00: no factor, and both say which they are."""
    def text(train):
        return dict(data=dict(corpus="train.bin, val.bin", tokenizer="gpt2",
                              sha256=dict(train=64 * train, val=64 * "c")))

    write_record(tmp_path, "00_orig", start=text("a"))
    write_record(tmp_path, "01_opt_single_gpu", speed=300.0, start=text("a"))
    table = "\n".join(plot(tmp_path)[1])
    assert "| train.bin, val.bin | 01 optimized, batch 4 | 300 | 3.00 |" in table
    write_record(tmp_path, "01_opt_single_gpu", "20260102T000000Z", speed=500.0, start=text("b"))
    write_record(tmp_path, "01_opt_single_gpu", "20260103T000000Z", speed=700.0, start=dict(
        data=dict(corpus="train.bin, val.bin")))  # an old one
    table = "\n".join(plot(tmp_path)[1])
    for digest, figures in (("aaaaaaaa cccccccc", "300 | 3.00"), ("bbbbbbbb cccccccc", "500 | n/a"),
                            ("unknown", "700 | n/a")):
        assert (f"| train.bin, val.bin, sha256 {digest} | 01 optimized, batch 4 | {figures} |"
                in table)


def test_a_terminal_without_the_signs(tmp_path, monkeypatch, plot):
    """`×` and `–` become question marks."""
    with open(tmp_path / "out", "w", encoding="ascii") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        assert plot_results.main(["--results-dir", str(tmp_path)]) == 0
    assert "02 DDP ? 4" in (tmp_path / "out").read_text()
