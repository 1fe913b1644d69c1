"""measure.py: the command line, and a study of real runs on tiny data."""

import os
import signal
import subprocess
import sys

import pytest
from conftest import ROOT, environment, run_python, write_tokens
from made_up import CPU, Children, copy_of_checkout, rows_of_text

import measure
from bench import processes
from bench.measure.journal import journal_of, read_journal
from bench.measure.records import Kind
from bench.report import look, readme
from bench.studies import all_studies

STUDIES = all_studies()
TINY = "--model cpu-demo --context-length 16 --eval-windows 2".split()


@pytest.fixture
def main(tmp_path, monkeypatch, capsys):
    """measure.main() in this process, with made-up runs: (exit code, stdout, stderr)."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "meta.json").write_text('{"tokens": {"train": 4096}}')
    monkeypatch.setattr(processes, "on_signals", lambda handler: None)

    def run(*argv):
        options = [str(part) for part in argv]
        if options and options[0] in STUDIES:
            options[1:1] = ["--data", str(tmp_path / "data"),
                            "--results-dir", str(run.results)]
        monkeypatch.setattr(sys, "argv", ["measure.py", *options])
        try:
            code = measure.main()
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    run.children = Children(monkeypatch, tmp_path / "build")
    run.results = tmp_path / "results"
    run.journal = journal_of(run.results, "ladder")
    return run


# ---- The command line


@pytest.mark.parametrize("command", [*STUDIES, "report", "readme"])
def test_help(main, command):
    code, out, _ = main(command, "--help")
    assert code == 0 and f"usage: measure.py {command} [" in out
    text = " ".join(main("--help")[1].split())
    assert f" {command} " in text
    if command in STUDIES:
        told = "".join(STUDIES[command].help.split())  # lines also end at hyphens
        assert told in "".join(out.split()) and told in "".join(text.split())
    if command in STUDIES and STUDIES[command].runs_scripts:
        assert all(option in out for option in ("--resume", "--dry-run", "--rounds", "--data"))
        assert ("--max-tokens" in out) is bool(STUDIES[command].max_tokens_help)
        assert ("--seconds" in out) is bool(STUDIES[command].has_seconds)
        assert not any(text in out for text in ("{}", "{cuda", "{cpu"))  # defaults are filled in


@pytest.mark.parametrize("program", ["measure", "plot_results", "bench.measure.machine"])
def test_an_older_python(program):
    """It is refused before what it lacks is imported."""
    code = f"import sys; sys.version_info = (3, 10, 13, 'final', 0); import {program}"
    result = run_python("-c", code, cwd=ROOT)
    assert result.returncode == 1
    assert result.stderr.startswith("error: needs Python 3.11 ") and result.stderr.count("\n") == 1


@pytest.mark.parametrize("program", ["measure.py", "plot_results.py", "patches/stack.py"])
def test_a_python_that_keeps_no_docstrings(program):
    result = run_python("-OO", program, "--help", cwd=ROOT)
    assert (result.returncode, result.stderr) == (0, "") and "usage: " in result.stdout


@pytest.mark.parametrize(("argv", "says"), [
    ([], "COMMAND"), (["climb"], "'climb'"), (["stages", "--rungs", "1"], "--rungs 1"),
    (["ladder", "--rounds", "0"], "--rounds: 0 is out of range"),
    (["ladder", "--rounds", "x"], "invalid number value: 'x'"),
    (["ladder", "--max-tokens", "-1"], "-1 is out of range"),
    (["ladder", "--seconds", "-1"], "-1 is out of range"),
    (["ladder", "--seconds", "x"], "invalid number value: 'x'"),
    (["ladder", "--seconds", "inf"], "inf is out of range"),
    (["ladder", "--round", "1"], "unrecognized arguments: --round 1"),
    (["sweep"], "KIND"), (["sweep", "width"], "'width'"),
    (["sweep", "batch", "--stage", "02"], "'02'"),
    (["report", "--minutes", "nan"], "nan is out of range"),
    (["report", "--minutes", "0"], "--minutes: 0 is out of range"),
    (["report", "--minutes", "x"], "invalid number value: 'x'"),
    (["audit", "--minutes", "0", "x.py"], "--minutes: 0 is out of range"),
    (["readme", "--data", "x"], "--data"),
    (["stages", "--epochs", "0"], "--epochs: 0 is out of range"),
    (["predict", "--batch-size", "0"], "--batch-size: 0 is out of range"),
    (["audit", "--minutes", "-1", "x.py"], "--minutes: -1 is out of range"),
])
def test_what_the_parser_refuses(main, argv, says):
    code, out, err = main(*argv)
    assert (code, out) == (2, "") and not main.children.asked
    *_, last = err.splitlines()
    assert says in last and ": error: " in last


@pytest.mark.parametrize(("argv", "says"), [
    (["ladder", "--rungs", "99"], "--rungs 99: '99' isn't within 0-15"),
    (["leave-one-out", "--rungs", ""], "--rungs : '' is neither a number nor a range like 5-8"),
    (["variants", "--names", "nothing"], "no variant 'nothing' of 01"),
    (["scaling", "0,1"], "'0,1': 0 is out of range"), (["scaling", "a"], "'a' isn't a list"),
    (["sweep", "batch", "--", "--batch-size", "2"], "--batch-size is set by the sweep itself"),
    (["report", "--pieces", "ladders"], "--pieces: 'ladders' is none of stages, "),
    (["report", "--pieces", "stages doctor"], "--pieces: 'doctor' is none of stages, "),
    (["report", "--pieces", "time-to-loss"], "--pieces: no report measures time-to-loss"),
    (["ladder", "--resume"], "nothing to resume in "),
    (["ladder", "--resume", "--dry-run"], "nothing to resume in "),
])
def test_what_a_study_refuses(main, argv, says):
    code, out, err = main(*argv)
    (line,) = err.splitlines()
    assert (code, out) == (2, "") and line.startswith("error: ") and says in line
    assert not main.children.ran and not main.journal.exists()


@pytest.mark.parametrize(("argv", "says"), [
    (["--rungs", "0,8", "--", *TINY, "--no-compile"], "00_orig: unrecognized arguments: --no-com"),
    (["--rungs", "1", "--", "--dropout", "x"], "01-causal-mask: argument --dropout"),
    (["--", "--seed", "1"], "--seed is set by measure.py itself, for every run alike"),
    (["--dry-run", "--", "-h"], "-h is set by measure.py itself"),
])
def test_what_the_scripts_refuse(main, monkeypatch, argv, says):
    monkeypatch.undo()
    # With the real children, but for the machine.
    monkeypatch.setattr(processes, "on_signals", lambda handler: None)
    monkeypatch.setattr(processes, "ask_machine", main.children.ask_machine)
    monkeypatch.setattr(look, "machine_in", lambda results: CPU)
    code, out, err = main("ladder", *argv)
    (line,) = err.splitlines()
    assert (code, out) == (2, "") and line.startswith("error: ") and says in line
    assert not main.journal.exists()


def test_options_behind_the_dashes_go_to_every_script(main):
    code, out, err = main("ladder", "--rungs", "0,2", "--rounds", "1", "--max-tokens", "2048", "--",
                          "--model", "gpt2", "--", "--seconds", "3")
    assert (code, err) == (0, "")
    assert len(main.children.calls) == 3
    for call in main.children.calls:
        assert call.command[-5:] == ["--model", "gpt2", "--", "--seconds", "3"]
        assert call.command[call.command.index("--max-tokens") + 1] == "2048"
    assert [row[0] for row in rows_of_text(out)] == ["0 baseline", "2 tensor cores"]
    assert "options `--model gpt2 -- --seconds 3`" in out
    assert out.endswith("ladder.jsonl\n")
    (measured,) = read_journal(main.journal)
    assert measured.options == ["--model", "gpt2", "--", "--seconds", "3"]


def test_exit_code_tells_of_a_failure(main):
    main.children.does["00_orig"] = dict(status="failed", error="it broke")
    code, out, _ = main("ladder", "--rungs", "0,2", "--rounds", "1")
    assert code == 1 and "failed: it broke" in out
    main.children.does.clear()
    assert main("ladder", "--rungs", "0,2", "--rounds", "1", "--resume")[0] == 0


def test_dry_run(main):
    code, out, _ = main("ladder", "--dry-run", "--rungs", "0", "--rounds", "1")
    assert code == 0 and out.splitlines()[-1] == (
        "2 runs; no estimate yet: nothing is measured here")
    assert not main.children.ran and not main.children.asked and not main.results.exists()


# Commands in one process, twice; the second time no child can be asked.
AT_ONCE = """
import sys
from pathlib import Path
import measure
from bench import processes
from bench.measure import lengths
folder = Path(sys.argv[1])
lengths.BUILD = folder / "build"
for run_child in (processes.run_child, None):
    processes.run_child = run_child
    for command in (["--help"], ["ladder", "--help"], ["doctor", "--results-dir", str(folder)],
                    ["ladder", "--dry-run", "--rungs", "0,1", "--results-dir", str(folder)]):
        sys.argv[1:] = command
        try:
            assert measure.main() == 0
        except SystemExit as stop:
            assert stop.code == 0
        loaded = {"torch", "numpy", "matplotlib"} & sys.modules.keys()
        assert not loaded, (command, loaded)
"""


def test_what_is_kept_is_answered_without_pytorch(tmp_path):
    """Nor numpy, nor matplotlib, and the second time without a child that loads them."""
    result = run_python("-c", AT_ONCE, tmp_path, cwd=ROOT, fork=False)
    assert result.returncode == 0, result.stderr
    told = f"Looking at this machine, once: {os.path.relpath(tmp_path, ROOT)}/machine.json keeps it"
    assert result.stderr == told + "\n"
    assert result.stdout.count(" runs; no estimate yet: nothing is measured here\n") == 2



def test_only_one_measurement_in_a_folder(main):
    code = ("from pathlib import Path; from bench.measure.journal import locked\n"
            f"with locked(Path({str(main.results)!r})): print('locked', flush=True); input()")
    with subprocess.Popen([sys.executable, "-c", code], text=True, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, env=environment(PYTHONPATH=str(ROOT))) as other:
        assert other.stdout.readline() == "locked\n"
        for command in (["ladder"], ["report", "--results-dir", main.results]):
            code, _, err = main(*command)
            assert code == 1 and err.startswith("error: another measurement is running in ")
        assert main("ladder", "--dry-run")[0] == 0
        other.kill()  # the lock ends with it
    assert not main.children.ran and not main.journal.exists()
    assert main("ladder", "--rungs", "0", "--rounds", "1")[0] == 0


def test_an_interrupt_tells_how_to_go_on(main):
    main.children.stop_at = 2
    argv = "--rungs", "0", "--rounds", "1", "--", "--dropout", "0.2"
    code, _, err = main("ladder", *argv)
    assert code == 128 + signal.SIGTERM
    again = "--rungs 0 --rounds 1 -- --dropout 0.2 continues from here\n"
    assert err.startswith("interrupted: python measure.py ladder --resume ") and err.endswith(again)
    main.children.stop_at = 3
    assert main("ladder", "--resume", *argv)[2].count("--resume") == 1
    main.children.stop_at = None
    assert main("ladder", "--resume", *argv)[0] == 0 and len(main.children.ran) == 2


def test_readme(main, tmp_path, monkeypatch):
    page = tmp_path / "README.md"
    monkeypatch.setattr(readme, "PAGES", [page])
    monkeypatch.setattr(readme, "SHOWN", tmp_path)
    page.write_text("<!-- points: written by measure.py readme -->\n<!-- end -->\n")
    pages = "README.md, docs/, results/reference/*/README.md"
    assert main("readme") == (0, f"{pages}: written\n", "")
    assert main("readme") == (0, f"{pages}: nothing to change\n", "")
    for name, why in (("other", "no table other"), ("own-gpu", "nothing for the table own-gpu")):
        page.write_text(f"<!-- {name}: written by measure.py readme -->\n<!-- end -->\n")
        code, out, err = main("readme")
        assert (code, out) == (1, "")
        assert err.startswith(f"error: there is {why} in ")


# ---- Real runs


@pytest.mark.slow
def test_ladder(tmp_path):
    """Interrupted by Ctrl-C, taken up, with a run that fails."""
    tree = copy_of_checkout(tmp_path / "tree", CPU)
    journal = tree / "results" / "ladder.jsonl"
    data = write_tokens(tmp_path / "data", train=16 * 6 + 1)  # 6 windows: a batch of 4, none of 8
    # The batch grows in rung 10.
    command = ["--rungs", "0,3,10", "--rounds", "1", "--max-tokens", "128", "--data", str(data),
               "--", *TINY]
    with subprocess.Popen(
            [sys.executable, "measure.py", "ladder", *command], cwd=tree, env=environment(),
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        while not child.stdout.readline().startswith("round 1: "):  # of a random order
            assert child.poll() is None, child.stderr.read()
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=120)
    assert child.returncode == 130, err
    assert err == ("Looking at this machine, once: results/machine.json keeps it\n"
                   f"interrupted: python measure.py ladder --resume {' '.join(command)} continues"
                   " from here\n")
    (before,) = read_journal(journal)
    (done,) = before.results

    result = run_python("measure.py", "ladder", "--resume", *command, cwd=tree)
    assert result.returncode == 1 and result.stderr == ""  # of the failed run
    (after,) = read_journal(journal)
    found = {result.key: result for result in after.results}
    # A failed run is tried again, another one stands.
    assert done == found[done.key] or not done.outcome.complete
    assert sorted(found) == [("00_orig", 1, 123), ("00_orig", 1, 124), ("03-fused-adamw", 1, 123),
                             ("10-batch-size", 1, 123)]
    base, _, adam, batch = (found[key] for key in sorted(found))
    assert adam.record.tok_per_sec > 0 and adam.record.curve[-1].tokens == 128
    assert adam.record.val_loss == pytest.approx(base.record.val_loss, abs=1e-4)
    assert batch.outcome.kind is Kind.TEXT_TOO_SHORT
    rows = rows_of_text(result.stdout)
    assert [row[0] for row in rows] == ["0 baseline", "3 fused adamw", "10 batch size"]
    assert "not tested" in rows[1]
    assert any(cell.startswith("failed: the text is too short") for cell in rows[2])
    assert result.stdout.endswith("results/ladder.jsonl\n")
    assert {path.name.partition("-")[0] for path in (tree / "build").iterdir()} <= {
        "scripts", "compiler", "configurations.json"}
