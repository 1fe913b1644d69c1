"""One more file in bench/studies/ is a command, a piece of the report, a picture and a table."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, environment, run_python, write_tokens
from made_up import CPU, copy_of_checkout, record_events, rows_of_text, setup_of

STUDY = '''"""A study for a test: a script of a few lines that reads a record out."""

from bench.report.pictures import rows_of_panels
from bench.catalogue import Run
from bench.measure.plan import Plan
from bench.report.tables import RUN, SPEED_OR_ERROR, Column, Table
from bench.studies import Study

SCRIPT = b"""
import json, pathlib, sys, types

def configure(options):
    return types.SimpleNamespace(batch_size=4, context_length=256, learning_rate=1e-3)

if __name__ == "__main__":
    settings = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    record = pathlib.Path(settings["--record"]).read_text()  # waits for a named pipe's writer
    folder = pathlib.Path(settings["--results-dir"])
    folder.mkdir()
    (folder / "record.jsonl").write_text(record)
"""


class Toy(Study):
    """Two runs of a script of its own, and one that can't run.

    This is no help text.
    """

    title = "The toy"
    schedule = {5: None}
    rounds = {"cuda": 2, "cpu": 2}

    def options(self, parser):
        parser.add_argument("--colour", default="red", help="a setting of its own")

    def plans(self, setup):
        script = setup.data / "toy_script.py"
        script.write_bytes(SCRIPT)
        slow, fast, never = (Run(name, name, setup.args.colour, script,
                                 options=("--record", str(setup.data / f"{name}.jsonl")))
                             for name in ("slow", "fast", "never"))
        yield Plan([slow, fast.but(compared_to="slow"), never.but(error="needs a wand")],
                   **self.length(setup))

    def tables(self, measured, rows):
        return [Table([RUN, SPEED_OR_ERROR, Column("colour", lambda row: row.technique)],
                      rows)]

    def draw(self, measured, rows):
        figure, _ = rows_of_panels(["The toy"], [2.0], [1])
        return figure
'''
TABLE = [["slow", "100", "red"], ["fast", "200", "red"], ["never", "needs a wand", "red"]]
MARKER = "<!-- toy: written by measure.py readme -->\n"
SHOW = f"""from pathlib import Path
from bench.report.readme import update
from bench.studies import all_studies
print(update({MARKER + "<!-- end -->"!r}, Path({{!r}}), all_studies()))"""


def test_the_example_of_contributing():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    [code] = re.findall(r"^```\n(from bench.studies .*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(code, found := {"__name__": "example"})
    study = found["WeightDecay"]()
    base, other = study.runs(setup_of(ROOT))
    assert (study.name, base.stage, other.compared_to) == ("weight-decay", "01", base.name)
    assert other.options == ("--weight-decay", "0")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="not on Windows")
def test_a_study_is_one_file(tmp_path):
    tree = copy_of_checkout(tmp_path / "tree", CPU)
    (tree / "bench" / "studies" / "toy.py").write_text(STUDY)
    data, journal = write_tokens(tmp_path / "data"), tree / "results" / "toy.jsonl"
    texts = {name: "".join(json.dumps(event) + "\n" for event in record_events(name, speed))
             for name, speed in (("slow", 100.0), ("fast", 200.0))}
    for name, text in texts.items():
        (data / f"{name}.jsonl").write_text(text)

    def run(*command, code=0):
        result = run_python(*command, cwd=tree)
        assert result.returncode == code, result.stderr
        assert "Traceback" not in result.stderr
        return result.stdout

    def begun():
        events = map(json.loads, journal.read_text().splitlines() if journal.exists() else ())
        return [(event["name"], event["round"]) for event in events if event["event"] == "run"]

    # The command. It is killed while its second run waits for what it reads, and goes on.
    command = ["measure.py", "toy", "--data", data]
    assert "a script of its own, and one that can't run" in (text := run(*command[:2], "--help"))
    assert "--colour" in text and "no help text" not in text
    (data / "fast.jsonl").unlink()
    os.mkfifo(data / "fast.jsonl")
    with subprocess.Popen([sys.executable, *map(str, command)], cwd=tree, env=environment(),
                          stdout=subprocess.DEVNULL) as killed:
        end, pipe = time.monotonic() + 60, None
        while pipe is None:
            assert killed.poll() is None and time.monotonic() < end
            time.sleep(0.02)
            with contextlib.suppress(OSError):  # as long as nothing reads there
                pipe = os.open(data / "fast.jsonl", os.O_WRONLY | os.O_NONBLOCK)
        killed.send_signal(signal.SIGKILL)
    with contextlib.suppress(BrokenPipeError):  # Linux ends the run with its parent
        os.write(pipe, texts["fast"].encode())  # elsewhere so that the run left behind ends, too
    os.close(pipe)
    (data / "fast.jsonl").unlink()
    (data / "fast.jsonl").write_text(texts["fast"])
    out = run(*command, "--resume")
    # In any order, and what was killed once more.
    assert sorted(begun()) == [("fast", 1), ("fast", 1), ("fast", 2), ("slow", 1), ("slow", 2)]
    assert rows_of_text(out) == TABLE

    # A piece of the report, and a picture there.
    out = run("measure.py", "report", "--pieces", "toy", "--data", data)
    assert len(begun()) == 5  # all was measured
    page = (tree / "results" / "report.md").read_text(encoding="utf-8")
    _, _, section = page.partition("## The toy\n")
    section, _, _ = section.partition("## ")
    assert rows_of_text(section) == TABLE
    assert "![toy](toy.png)" in section and "Alone: `python measure.py toy`" in section
    assert (tree / "results" / "toy.png").stat().st_size > 5_000

    # A picture of plot_results.py, and a marker's table.
    assert "toy.svg" in run("plot_results.py", "--format", "svg", "--out", tmp_path / "pictures")
    assert "<svg" in (tmp_path / "pictures" / "toy.svg").read_text(encoding="utf-8")
    table = run("-c", SHOW.format("results"))
    assert table.startswith(MARKER) and rows_of_text(table) == TABLE

    # All of it is in the archive.
    shutil.unpack_archive(tree / "results" / "report.tar.gz", tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere" / "toy.png").exists()
    assert run("-c", SHOW.format(str(tmp_path / "elsewhere"))) == table
