"""bench/report: tables and what stands below them, a machine's page, how it goes on after an end at
any place, the tables inside the pages, and plot_results.py."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from conftest import ROOT, environment, run_python
from made_up import (
    CPU,
    MACHINE,
    PEAK,
    Children,
    cells_of,
    plan_of,
    rounds_of,
    rows_of_text,
    write_journal,
    write_record,
)

import plot_results
from bench import cli
from bench.analysis import claims
from bench.analysis.figures import Goal
from bench.analysis.folders import newest_in, rows_in
from bench.analysis.gains import Gain
from bench.analysis.rows import Comparison, Rows, printed
from bench.analysis.totals import totals_in
from bench.analysis.tuning import EPOCH_LOSS
from bench.common import REFERENCE
from bench.measure.journal import read_journal
from bench.measure.look import read_look
from bench.report import (
    page,
    readme,
    readme_tables,
    sentences,
    technique_pages,
    to_loss,
    variant_pages,
    waterfall,
)
from bench.report.machine_section import headline
from bench.report.notes import full_notes, provenance
from bench.report.pictures import place_of
from bench.report.tables import full_table, range_text
from bench.report.to_loss import speedup_with_interval
from bench.studies import all_studies, time_to_loss
from gpt_speed import children
from gpt_speed.audit.checks import CANT_TELL, LACKS
from gpt_speed.audit.render import techniques_table
from gpt_speed.common import UserError
from gpt_speed.machine import ram_bytes
from gpt_speed.tables import Table, markdown, num_col, text_col
from patches import stack

LOOK = dict(
    memory_gb=24.0, matmul_peak=PEAK, compile_error=None, missing=["a thing: how to get it"]
)
SPEEDS = {"00_orig": 100.0, "01_opt_single_gpu": 900.0, "03-fused-adamw": 120.0}
PIECES = ",".join(
    name
    for name, study in all_studies().items()  # profile needs a trace besides
    if study.position and study.report_options and name != "profile"
)


# ---- Tables ------------------------------------------------------------------------------------


@pytest.fixture
def shown(tmp_path):
    """(each row of a plan's full table, the notes below it)"""

    def shown(plan, runs, *how, **header):
        *_, measured = read_journal(write_journal(tmp_path, "a", plan, runs, *how, **header))
        rows = Rows(measured)
        cells = cells_of(markdown(full_table(rows)))
        return [*cells.values()], full_notes(rows)

    return shown


def test_a_row_stays_one_line():
    """Whatever a record's texts hold; a terminal gets no control characters from them."""
    column = text_col("model", "model")
    rows = [SimpleNamespace(model=text) for text in ("gpt\n2", "gpt\u20282\x1b[2J|")]
    assert markdown(Table([column], rows)).split("\n")[2:] == ["| gpt 2 |", r"| gpt 2 [2J\| |", ""]


def test_markdown():
    """A column without a figure is left out, unless the table wants it; a bar is escaped; a figure
    is an attribute or a key, or one within another."""
    rows = [
        dict(label="a|b", record=SimpleNamespace(mfu=0.25, end=dict(gb=2, mib=None))),
        dict(label=None, record=None),
    ]
    columns = [
        text_col("run|s", "label"),
        num_col("MFU", "record.mfu", ".1%"),
        num_col("GB", "record.end.gb"),
        num_col("gone", "record.end.mib", ".2f"),
    ]
    assert markdown(Table(columns, rows)) == (
        "| run\\|s | MFU | GB |\n| :-- | --: | --: |\n| a\\|b | 25.0% | 2 |\n|  |  |  |\n"
    )
    whole = markdown(Table(columns, rows, "What:", missing="n/a", every_column=True))
    assert whole.startswith("What:\n\n| run") and rows_of_text(whole)[1] == ["n/a"] * 4


@pytest.mark.parametrize(
    ("row", "name"),
    [
        (SimpleNamespace(mfu=1), "mfo"),
        (dict(mfu=1), "mfo"),
        (SimpleNamespace(config=dict(mfu=1)), "config.mfo"),
    ],
)
def test_a_misspelt_figure_is_no_empty_column(row, name):
    with pytest.raises((AttributeError, KeyError), match="mfo"):
        markdown(Table([num_col("MFU", name)], [row]))


def test_techniques(shown):
    """Each over the one before and over the first, with the published speedups beside them."""
    plan = plan_of("base", "cores", "broken", "last")
    plan.runs = [
        run.replace(published=speed)
        for run, speed in zip(plan.runs, (100.0, 200.0, 500.0, None), strict=True)
    ]
    runs = [
        *rounds_of("base", *range(100, 104)),
        dict(name="base", seed=124, loss=8.1875),
        *rounds_of("cores", *range(103, 107), loss=8.25),
        dict(name="broken", error="a | b"),
        *rounds_of("last", *[418.0] * 4, loss=8.0625),
    ]
    (base, cores, broken, last), notes = shown(plan, runs, MACHINE)
    assert cores == {
        "run": "cores",
        "technique": "technique cores",
        "tok/sec": "104",
        "range": "103–106",
        "speedup": "1.03",
        "95%": "1.03–1.03",
        "speedup, A100": "2.00",
        "over the baseline": "1.03",
        "reserved GB": "1.25",
        "× GB": "1.00",
        "first step s": "10.0",
        "val loss": "8.2500",
        "Δ loss": "+0.2500",
        "expected effect on the loss": "rounding",
        "of matmul peak": "10.4%",
        "significance": "faster",
    }
    assert base["significance"] == "baseline" and base["speedup"] == base["Δ loss"] == "n/a"
    assert (broken["tok/sec"], broken["significance"]) == ("n/a", r"failed: a \| b")
    assert (broken["speedup"], broken["speedup, A100"]) == ("n/a", "2.50")
    assert (last["speedup"], last["over the baseline"]) == ("4.00", "4.12")
    assert last["significance"] == "faster" and "0.1875" in notes[1]


def test_a_wide_interval_is_marked(shown):
    """The factor is still the mean; a note says what the mark means."""
    runs = [*rounds_of("a", 100.0, 100.0, 101.0), *rounds_of("b", 200.0, 110.0, 205.0)]
    (_, b), notes = shown(plan_of("a", "b"), runs)
    mean = (200 / 100 * 110 / 100 * 205 / 101) ** (1 / 3)
    assert b["speedup"] == f"{mean:.2f}†" and "†: " in notes[1]
    (_, b), notes = shown(plan_of("a", "b"), [run for run in runs if run["round"] != 2], id="2")
    assert "†" not in b["speedup"] + notes[1]


def test_one_figure_for_one_thing():
    """A technique's gain on the H100 is the same in the ladder's table, on the technique's page and
    in the picture; techniques 9 and 10, of which a run was slow, have one together."""
    rows = printed(rows_in(REFERENCE / "nvidia-h100", "ladder"))
    own = {row.run.number: waterfall.bar_label(row).removesuffix("×") for row in rows[1:]}
    assert 9 not in own and own[10] == "1.44"
    page = (REFERENCE / "nvidia-h100" / "README.md").read_text(encoding="utf-8")
    table = page.partition("<!-- ladder@")[2].partition("<!-- end -->")[0]
    cells = {int(line[0]): line for line in rows_of_text(table)}
    assert {number: cells[number][3] for number in own} == own
    gains = {
        technique.number: technique.on(technique_pages.GPU)
        for technique in technique_pages.techniques()
    }
    for number, text in (own | {9: own[10]}).items():
        assert f"{gains[number].factor:.2f}" == text
    assert (gains[9].together_with, gains[10].together_with) == ((10,), (9,))
    assert (f"{gains[9].memory:.2f}", f"{gains[10].memory:.2f}") == ("0.99", "3.79")  # apart
    line = next(line for line in claims.Claims(REFERENCE).contributions() if 15 in line.numbers)
    assert gains[15].at_most and gains[15].factor == line.speed and gains[15].memory == line.memory


def test_a_column_holds_the_gains_of_its_machine():
    """Not those on another GPU or CPU, whatever their intervals."""
    h200 = Gain("H200", 1.5, 0.5, folder="nvidia-h200", interval=(1.49, 1.51))
    xeon = Gain("Xeon", 1.2, 0.9, folder=XEON, device="cpu", interval=(1.19, 1.21))
    epyc = Gain("EPYC", 1.3, 0.7, folder="amd-epyc-2-cores", device="cpu")
    predicted = Gain("H100", 1.1, 0.8, folder="nvidia-h100", source="predicted")
    variant = variant_pages.Variant("a", "a --b", [h200, xeon, epyc])

    def cells() -> list[str]:
        (line,) = rows_of_text(markdown(variant_pages.variants_table([variant])))
        return line[1:]

    assert cells() == ["1.20", "0.90", "1.30", "0.70"]  # no GPU, so the CPUs' memory
    variant.gains.append(predicted)
    assert cells() == ["*1.10*", "*0.80*", "1.20", "1.30"]


def test_a_variant_that_changes_nothing():
    """It is predicted to, and no CPU says otherwise."""

    def changes(*gains: Gain) -> bool:
        return variant_pages.Variant("a", "a", list(gains)).changes_something

    nothing = Gain("H100", 1.001, 0.999, folder="nvidia-h100", source="predicted")
    cpu = Gain("Xeon", 1.01, 1.0, device="cpu", significance="no significant change")
    assert not changes(nothing) and not changes(nothing, cpu)
    assert changes(nothing, replace(cpu, significance="slower"))
    assert changes(replace(nothing, memory=0.99)) and changes(replace(nothing, source="measured"))
    assert changes(cpu) and changes()


def test_a_missing_cell_says_why():
    unclear = variant_pages.Variant("a", "a", [], unclear_on=frozenset({XEON}))
    predicted = variant_pages.Variant(
        "b", "b", [Gain("H100", 1.1, 0.8, folder="nvidia-h100", source="predicted")]
    )
    lines = rows_of_text(markdown(variant_pages.variants_table([unclear, predicted])))
    assert [line[1:] for line in lines] == [["–", "–", "unclear"], ["*1.10*", "*0.80*", "–"]]


def test_variants_without_figures_are_named():
    """And no variant that can't be composed any more has a line."""
    one, other = stack.load_variants()[:2]
    measured = variant_pages.Variant(one.name, one.name, [Gain("H100", 1.5, 1.0)])
    text = variant_pages.without_figures([one, other], [measured])
    assert f"(#{other.name})" in text and one.name not in text
    assert not variant_pages.without_figures([one], [measured])
    gone = variant_pages.Variant("head-cce", *variant_pages.GONE, [Gain("H100", 0.5, 1.0)])
    assert gone.changes_something and not gone.is_shown


def test_a_step_of_another_day_says_so():
    """It has no interval, and isn't predicted."""
    (label,) = [label for label in variant_pages.STEPS if label.endswith("batch 4")]
    gains = {key[1]: gain for key, gain in variant_pages.step_gains()}
    assert gains.keys() == variant_pages.STEPS.keys()
    assert technique_pages.speed_text(gains[label]) == "1.91"
    variant = variant_pages.Variant(label, label, [gains[label]])
    assert variant_pages.interval_cell(variant) == "two turns"
    variant.gains = [replace(gains[label], source="predicted")]
    assert variant_pages.interval_cell(variant) == "predicted"


def test_a_long_diff_is_linked(monkeypatch):
    patch = stack.load()[0]
    assert "```diff" in technique_pages.diff_text(patch)
    monkeypatch.setattr(technique_pages, "LONG", 5)
    assert technique_pages.diff_text(patch).startswith(f"[Its diff](../{patch.file})")


def test_lines_of_a_diff(monkeypatch):
    diff = "--- a/00.py\n+++ b/00.py\n@@ -1,3 +1,3 @@\n a\n-b\n+c\n+d\n \n"
    monkeypatch.setattr(technique_pages, "diff_of", lambda patch: diff)
    assert technique_pages.lines_changed(technique_pages.techniques()[0]) == "+2 −1"


@pytest.mark.parametrize(
    ("sign", "interval", "text"),
    [("> ", None, "> 3.1×"), ("< ", None, "< 3.1×"), ("", (2.9, 3.34), "3.1× (2.9–3.3)")],
)
def test_a_speedup_to_a_loss_that_one_script_missed_is_a_bound(sign, interval, text):
    speedup = SimpleNamespace(factor=3.1, sign=sign, interval=interval, significance=None)
    row = SimpleNamespace(run=SimpleNamespace(stage="01"), speedup=lambda goal: speedup)
    assert speedup_with_interval(row, Goal(3.0)) == text


def test_the_title_of_times_to_a_loss():
    """Where the best script isn't significantly faster it tells of 01."""
    (rows,) = newest_in(REFERENCE / "nvidia-h200", "time-to-loss")
    (target,) = rows.measured.plan.targets.values()
    title = time_to_loss.title_with_finding(rows, target)
    finding, _, shows = title.partition("\n")
    assert finding == "01 takes 27.0 s to the loss, 00 takes 14.5 s"
    assert "5.22" in shows


@pytest.fixture
def h200_times(tmp_path, monkeypatch):
    """A copy of the journals that the picture of losses over seconds is of."""
    monkeypatch.setattr(to_loss, "MACHINE", tmp_path)
    for study in ("search", "time-to-loss"):
        shutil.copy(REFERENCE / "nvidia-h200" / f"{study}.jsonl", tmp_path)
    return tmp_path / "time-to-loss.jsonl"


def test_a_curve_is_of_the_script_that_its_label_names(h200_times):
    """Wherever its row stands in the journal; its label ends with the seconds of the table."""
    lines = [json.loads(line) for line in h200_times.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        if line["event"] == "study":
            baseline, *others = line["plan"]["runs"]
            line["plan"]["runs"] = [baseline, *reversed(others)]
    h200_times.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (rows,) = newest_in(h200_times.parent, "time-to-loss")
    by_script = {str(row.run.script): row for row in rows}
    (axes,) = to_loss.loss_over_seconds().axes
    curves = {line.get_label(): line for line in axes.get_lines()}
    texts = {text.get_text() for text in axes.texts}
    for label, seconds in {
        "00": "14.5",
        "01, training alone": "1.9",
        "01, warm start": "10.9",
        "01, cold start": "27.0",
    }.items():
        losses = [point.val_loss for point in by_script[label[:2]].trainings[0].points]
        assert list(curves[label].get_ydata()) == losses, label
        assert f"{label}\n{seconds} s" in texts


def test_a_curve_that_the_journal_lacks_is_named(h200_times):
    drop_runs(h200_times, "01_opt_single_gpu-batch-8-rate-0.0005")
    with pytest.raises(UserError, match="no time to a loss of 01 in"):
        to_loss.loss_over_seconds()


def test_a_warm_start_is_one_after_the_first_of_the_same_script(h200_times):
    """Of a search's three starts of 01 the first compiled for 26 seconds."""
    (rows,) = newest_in(h200_times.parent, "time-to-loss")
    (row,) = (row for row in rows if row.run.stage == "01")
    searched = rows_in(h200_times.parent, "search")
    assert len([other for other in searched if other.run.name == row.run.name]) == 3
    assert to_loss.warm_excess(row, searched) == pytest.approx(9.05, abs=0.01)
    assert to_loss.warm_excess(row, []) is None
    search = h200_times.parent / "search.jsonl"
    source = row.record.start["source_sha256"]
    search.write_text(search.read_text(encoding="utf-8").replace(source, "0" * 64))
    assert to_loss.warm_excess(row, rows_in(search.parent, "search")) is None
    with pytest.raises(UserError, match="no warm start of 01 in"):
        to_loss.loss_over_seconds()


def test_what_was_measured(shown):
    runs = [*rounds_of("a", 100.0, 90.0, config=dict(compile=False)), *rounds_of("b", 1.0, 1.0)]
    _, notes = shown(plan_of("a", "b", tokens=None), runs, options=["--name", "a b"])
    assert re.search("Not compiled, .*: `a`.$", notes[1]) and notes[0] == (
        "Some CPU, PyTorch 2.13; seed 123, 2 rounds, options `--name 'a b'`. The scripts' own"
        " length per run."
        " Matmul throughput (matmul peak): float32 1.00, TF32 2.00, bfloat16 4.00 TFLOP/s."
    )


def test_a_note_tells_how_long_the_runs_were(shown):
    """Of several lengths, also after how many tokens losses are compared."""
    a, b = dict(name="a"), dict(name="b")
    _, notes = shown(plan_of("a", "b"), [a, b])
    assert " 8,192 tokens per run. " in notes[0]
    _, notes = shown(plan_of("a", "b"), [a, b | dict(steps=32)], id="2")
    assert " 8,192 to 32,768 tokens per run; losses are those after 4,096. " in notes[0]


def test_provenance(tmp_path):
    """When, at which commits, with which PyTorch: from the first measurement to the last."""
    older = dict(time="20260102T030405Z", commit="0123456789")
    newer = dict(time="20260203T030405Z", commit="abcdefghij", machine=MACHINE | dict(torch="2.11"))
    for id, header in (("1", older), ("2", newer)):
        path = write_journal(tmp_path, "x", plan_of("a"), id=id, **header)
    first, last = read_journal(path)
    assert provenance([]) == ""
    assert provenance([first]) == "Measured on 2026-01-02 at 0123456 with PyTorch 2.13."
    assert provenance([last, first]) == (
        "Measured from 2026-01-02 at 0123456 to 2026-02-03 at abcdefg with PyTorch 2.13 and 2.11."
    )


# ---- A machine's page --------------------------------------------------------------------------


class Reports:
    """Makes reports of made-up runs, all in one folder unless another one is given."""

    def __init__(self, folder: Path, monkeypatch):
        self.children = Children(monkeypatch, folder / "build", MACHINE)
        self.children.answers |= dict(look=dict(machine=MACHINE) | LOOK)
        self.children.does |= {
            name: dict(speed=speed, gpu=MACHINE["name"]) for name, speed in SPEEDS.items()
        }
        self.missing = LOOK["missing"]  # when a report is made
        monkeypatch.setattr("bench.measure.look.missing_here", lambda *_: self.missing)
        self.data, self.results = folder / "data", folder / "results"
        self.data.mkdir()
        (self.data / "meta.json").write_text('{"tokens": {"train": 414009}}')

    def make(self, *options, pieces=PIECES, results=None) -> int:
        """measure.py report; returns its exit code. `ran` has what it ran."""
        before = len(self.children.ran)
        args = cli.make_parser().parse_args(
            [
                "report",
                "--data",
                str(self.data),
                "--results-dir",
                str(results or self.results),
                "--minutes",
                "600",
                "--max-tokens",
                "4096",
                "--techniques",
                "0,1,3",
                "--studies",
                pieces,
                *options,
            ]
        )
        try:
            return cli.run(args, [])
        finally:
            self.ran = self.children.ran[before:]

    @property
    def text(self) -> str:
        return (self.results / "report.md").read_text(encoding="utf-8")


@pytest.fixture
def reports(tmp_path, monkeypatch):
    return Reports(tmp_path, monkeypatch)


@pytest.fixture
def no_pictures(monkeypatch):
    monkeypatch.setattr(page, "draw_all", lambda *_: {})


def figures(folder: Path) -> list:
    return [
        (row.label, row.rounds, row.tok_per_sec, row.val_loss, row.error)
        for study in all_studies()
        for rows in newest_in(folder, study)
        for row in rows
    ]


def test_page(reports, tmp_path):
    """Has every study, its figures and its pictures; carried to another place, it goes on there."""
    assert reports.make() == 0
    head, machine, *sections = reports.text.split("\n## ")
    titles = [
        study.title for study in all_studies().values() if study.position and study.report_options
    ]
    assert [section.partition("\n")[0] for section in sections] == titles
    assert reports.text.count("Not measured yet") == 1  # the profile
    assert "Not finished" not in head and "bfloat16 4.00 TFLOP/s" in machine
    assert "**900 tok/sec, 9.00 times** 00's 100" in head
    assert "Missing: a thing: how to get it." in machine
    for picture in ("stages.png", "ladder.png", "variants.png"):
        assert f"]({picture})" in reports.text
        assert (reports.results / picture).stat().st_size > 10_000
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(reports.results, elsewhere)
    assert reports.make(results=elsewhere) == 0 and reports.ran == []
    assert (elsewhere / "report.md").read_text(encoding="utf-8") == reports.text
    assert reports.children.asked.count("look") == 1


def test_the_first_line_of_a_page(tmp_path):
    """It is of the ladder where that has more rounds than the three scripts, and is as long."""

    def stages_of(folder: Path, day: str, *speeds: float) -> None:
        plan = plan_of("00_orig", "01_opt_single_gpu")
        plan.runs = [
            run.replace(stage=run.name[:2], label=run.name[:2], published=100.0)
            for run in plan.runs
        ]
        write_journal(
            folder,
            f"stages{day}",
            plan,
            [
                *rounds_of("00_orig", *[100.0] * len(speeds)),
                *rounds_of("01_opt_single_gpu", *speeds),
            ],
        )

    stages_of(tmp_path, "", 450.0)
    assert "01 trains **450 tok/sec, 4.50 times** 00's 100 (published, " in headline(tmp_path)
    assert "measurements" not in headline(tmp_path)
    for last, leads in ((10, False), (13, True)):  # the tenth is the last that was published
        plan = plan_of("00_orig", "06", "13")
        plan.runs = [
            run.replace(number=number) for run, number in zip(plan.runs, (0, 6, last), strict=True)
        ]
        (tmp_path / "ladder.jsonl").unlink(missing_ok=True)
        write_journal(
            tmp_path,
            "ladder",
            plan,
            [
                *rounds_of("00_orig", 100.0, 101.0, 99.0),
                *rounds_of("06", 200.0, 201.0, 203.0),
                *rounds_of("13", 500.0, 501.0, 505.0),
            ],
        )
        assert ("**501 tok/sec, 5.0 times** 00_orig's 100" in headline(tmp_path)) is leads
    assert "the 2 measurements of this folder 01 is 4.50–5.02 times" in headline(tmp_path)
    stages_of(tmp_path, "-2026-01-02", 600.0, 600.0)
    assert "the 3 measurements of this folder 01 is 4.50–6.00 times" in headline(tmp_path)


def test_a_page_of_scripts_that_share_no_round_begins_with_the_ladder(tmp_path):
    """A speedup is a mean over the rounds of both."""
    plan = plan_of("00_orig", "01_opt_single_gpu")
    plan.runs = [run.replace(stage=run.name[:2], published=100.0) for run in plan.runs]
    runs = [dict(name="00_orig", round=1), dict(name="01_opt_single_gpu", round=2, speed=500.0)]
    write_journal(tmp_path, "stages", plan, runs)
    assert headline(tmp_path) == ""
    write_ladder(tmp_path, "00_orig", "03-fused-adamw")
    assert headline(tmp_path).startswith("1 03-fused-adamw trains **123 tok/sec, 1.0 times** 0 00")


@pytest.mark.slow
def test_stopped_anywhere_it_ends_with_the_same_figures(reports, tmp_path, no_pictures):
    short = dict(pieces="stages,ladder")
    assert reports.make("--techniques", "0,3", **short) == 0
    whole, wanted = reports.ran, figures(reports.results)
    for place in range(1, len(whole) + 1):
        reports.children.calls.clear()
        reports.children.stop_at, folder = place, tmp_path / str(place)
        with pytest.raises(children.Interrupted):
            reports.make("--techniques", "0,3", results=folder, **short)
        before = reports.ran
        assert "Not finished: " in (folder / "report.md").read_text(encoding="utf-8")
        assert reports.make("--techniques", "0,3", results=folder, **short) == 0
        assert before + reports.ran == whole  # none of them twice
        assert figures(folder) == wanted


def test_time_is_over(reports, no_pictures):
    assert reports.make("--minutes", "0.1") == 0 and not reports.ran
    names = re.findall("Not finished: (.+): run it again to", reports.text)
    assert sorted(names) == sorted(PIECES.split(","))


def test_the_page_is_written_whatever_happens(reports, no_pictures, capsys, monkeypatch):
    """A study that can't be measured is named, and the others are measured."""
    monkeypatch.setattr(type(all_studies()["ladder"]), "plans", Mock(side_effect=OSError("no git")))
    assert reports.make(pieces="stages,ladder,leave-one-out") == 1
    assert "error: ladder: no git\n" in capsys.readouterr().err
    assert "\nNot finished: ladder: no git\n" in reports.text
    assert figures(reports.results)[-1][0] == "without 3 fused adamw"


def test_failures(reports, no_pictures, capsys):
    """A run that fails is a row and an exit code; a new start with its options tries it again."""
    works = reports.children.does.pop("01_opt_single_gpu")
    reports.children.does["01_opt_single_gpu"] = dict(status="failed", error="it broke")
    assert reports.make(pieces="stages") == 1
    assert "failed: it broke" in reports.text and "01 trains" not in reports.text
    assert reports.make("--max-tokens", "8192", pieces="stages") == 1
    for text in (capsys.readouterr().err, reports.text):
        assert "was measured with other settings: tokens" in text and "RESULTS=FOLDER" in text
    reports.children.does["01_opt_single_gpu"] = works
    assert reports.make(pieces="stages") == 0
    assert [name for name, _ in reports.ran] == ["01_opt_single_gpu"] * 4


def test_what_is_refused(reports, no_pictures):
    """Another machine, but no other host of its kind; a folder that can't be written."""
    assert reports.make(pieces="stages") == 0
    before = reports.text
    reports.children.answers["this_machine"] = MACHINE | dict(cpu="another host's", threads=64)
    assert reports.make(pieces="stages") == 0 and not reports.ran
    reports.children.answers["this_machine"] = CPU
    with pytest.raises(UserError, match="(?s)another machine.*RESULTS=FOLDER"):
        reports.make(pieces="ladder")
    assert reports.text == before and not reports.ran
    other = reports.results.parent / "other"
    write_journal(other, "ladder", plan_of("a"), [dict(name="a")], MACHINE)
    with pytest.raises(UserError, match=r"ladder\.jsonl.*another machine.*RESULTS=FOLDER"):
        reports.make(pieces="stages", results=other)  # whose page would have both
    assert not reports.ran and not (other / "report.md").exists()
    below = reports.data.parent / "file" / "below"
    below.parent.touch()
    with pytest.raises(OSError, match="Not a directory"):
        reports.make(results=below)
    assert not reports.ran


@pytest.mark.parametrize(
    ("corpus", "text"), [("Middlemarch", ""), ("a b|$x_1$.txt", "a b|$x_1$.txt")]
)
def test_another_text_than_the_book(reports, no_pictures, corpus, text):
    """Stands below each table, and in the pictures' titles."""
    start = dict(data=dict(corpus=corpus, tokenizer="gpt2", tokens=dict(train=414_009)))
    for name in SPEEDS:
        reports.children.does[name] |= dict(start=start)
    reports.children.does |= {"01-causal-mask": dict(start=start)}
    (reports.data / "meta.json").write_text(json.dumps(start["data"]))
    assert reports.make(pieces="stages,ladder") == 0
    (rows,) = newest_in(reports.results, "ladder")
    assert place_of(rows.measured).partition("\ntext: ")[2] == text
    assert reports.text.count(f", text: {text}.") == (2 if text else 0)


@pytest.mark.parametrize("damaged", ["", "[]", "{}", "[" * 100_000, json.dumps(LOOK)])
def test_a_damaged_look_is_asked_for_again(reports, no_pictures, damaged):
    reports.results.mkdir()
    (reports.results / "machine.json").write_text(damaged)
    assert reports.make(pieces="stages") == 0
    assert reports.children.asked.count("look") == 1
    assert read_look(reports.results)["memory_gb"] == 24.0


def test_what_was_missing_may_be_there_now(reports, no_pictures, capsys):
    """The page and the line on the screen forget it; nothing is measured again for that."""
    reports.make(pieces="stages")
    assert "missing: a thing" in capsys.readouterr().out and "a thing" in reports.text
    reports.missing = []
    reports.make(pieces="stages")
    assert "missing: " not in capsys.readouterr().out and "a thing" not in reports.text
    assert reports.children.asked.count("look") == 1


def test_damaged_pieces(reports, capsys):
    """They are named, and the page has all else."""
    reports.make(pieces="stages,ladder")
    ladder = reports.results / "ladder.jsonl"
    lines = ladder.read_bytes().splitlines(keepends=True)
    before, _, after = lines[-2].rpartition(b'"reserved_gb"')
    lines[-2] = before + b'"gb"' + after  # a record without a figure
    ladder.write_bytes(b"".join([*lines[:2], b'{"event"\n', *lines[3:]]))
    capsys.readouterr()
    page.write_page(all_studies(), reports.results, {})
    err = capsys.readouterr().err
    assert "ladder.jsonl, line 3: " in err and "no reserved_gb" in err
    assert "![ladder]" in reports.text and "01 trains" in reports.text


def test_a_container_has_less_memory(tmp_path):
    """Without a limit, or with a larger one, it is the machine's."""
    file = tmp_path / "memory.max"
    whole = ram_bytes(file)
    for limit, size in (("max", whole), (2**20, 2**20), (2**62, whole)):
        file.write_text(f"{limit}\n")
        assert ram_bytes(file) == size


# ---- The tables inside the pages ---------------------------------------------------------------


def update(text: str, folder) -> str:
    return readme.update(text, folder, readme.tables_of(all_studies()))


def marker(name: str, between: str = "", end: str = "<!-- end -->\n") -> str:
    return f"<!-- {name}: written by measure.py readme -->\n{between}{end}"


def write_ladder(folder: Path, *names: str) -> None:
    plan = plan_of(*names)
    plan.runs = [run.replace(label=f"{k} {run.name}", number=k) for k, run in enumerate(plan.runs)]
    write_journal(folder, "ladder", plan, [dict(name=name, speed=123) for name in names])


def test_the_pages_are_what_the_command_writes():
    blocks = set()
    for path in readme.PAGES:
        text = path.read_bytes().decode()
        blocks |= {block["name"] for block in readme.BLOCK.finditer(text)}
        assert update(text, readme.SHOWN) == text, path.name
    assert readme.BLOCKS.keys() | readme.MACHINE_BLOCKS.keys() <= blocks
    assert all({"Use", "Limits", "Compiled"} <= patch.fields.keys() for patch in stack.load())
    assert technique_pages.EFFECTS.keys() <= {patch.name for patch in stack.load()}


# ---- README's figures --------------------------------------------------------------------------

# What of README stands in no log: names, settings, versions, and two things seen but not logged.
NOT_MEASURED = [
    "GPT-2 124M",
    "context 1,024 and dropout 0.1",
    "Python 3.11 or newer",
    "2.11 where there is",
    "2.13 elsewhere",
    "2.5 and newer do",
    "up to 4% slower",
]
NUMBER = re.compile(  # with a unit, a fraction or thousands
    r"\d[\d.,–]*\s?(?:×|%|GB|tok/s|tokens|times|minutes|seconds|M\b)|\d+\.\d+|\d,\d{3}"
)


def readme_text() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def test_no_figure_of_readme_is_typed():
    """Code shows commands and what they printed, as does the audit's table."""
    text = re.sub(r"```.*?```|^\|.*?$", "", readme_text(), flags=re.DOTALL | re.MULTILINE)
    text = " ".join(sentences.FIGURE.sub("", readme.BLOCK.sub("", text)).split())
    for words in NOT_MEASURED:
        assert text.count(words) == 1, words
        text = text.replace(words, "")
    assert NUMBER.findall(text) == []


def test_the_audit_in_readme_is_as_an_audit_prints_it():
    names = {str(k): patch.fields["Technique"] for k, patch in enumerate(stack.load(), 1)}
    keys = "number technique state share upper_bound expected evidence needs where"
    header = techniques_table([dict.fromkeys(keys.split(), 0)]).splitlines()[0]
    assert readme_text().count(header) == 1
    rows = rows_of_text(header + readme_text().partition(header)[2].partition("\n\n")[0])
    for numbers, technique, state, *_ in rows:
        assert technique == ", ".join(names[number] for number in numbers.split(", "))
        assert state in (LACKS, CANT_TELL)


def test_every_figure_stands_in_readme():
    names = {name for _, name in sentences.FIGURE.findall(readme_text())}
    assert names == sentences.FIGURES.keys()


def test_readme_is_short():
    """120 lines, and 1,000 words outside tables and code."""
    text = readme_text()
    assert len(text.splitlines()) <= 120
    prose = re.sub(r"```.*?```|<!--.*?-->|^\|.*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert len(prose.split()) <= 1000


@pytest.fixture
def reference(tmp_path, monkeypatch):
    """A copy of results/reference from which README is generated."""
    folder = tmp_path / "reference"
    shutil.copytree(REFERENCE, folder, ignore=shutil.ignore_patterns("*.png", "search*"))
    for module in (readme, readme_tables, sentences):
        monkeypatch.setattr(module, "REFERENCE", folder)
    monkeypatch.setattr("bench.predict.shipped.REFERENCE", folder)
    return folder


README_BLOCKS = "hardware", "contributions", "speedup-picture"


def generated() -> dict[str, str]:
    """All that is generated of README, by name."""
    blocks = {name: readme.block_text(name, readme.SHOWN) for name in README_BLOCKS}
    known = sentences.Claims(sentences.REFERENCE)
    return blocks | {name: sentences.figure_text(name, known) for name in sentences.FIGURES}


@pytest.mark.parametrize(
    ("figure", "journal", "run"),
    [
        ("autocast", "nvidia-h100/variants", "variant-precision-autocast"),
        ("h100-technique-8", "nvidia-h100/ladder", "08-torch-compile"),
        ("h100-speedup", "nvidia-h100/steps", None),
        ("seconds-01", "nvidia-h200/time-to-loss", None),
    ],
)
def test_a_figure_that_its_journal_lacks(reference, figure, journal, run):
    """Costs one line with its name, and only the pages that have it."""
    if run:
        drop_runs(reference / f"{journal}.jsonl", run)
    else:
        path = next(reference.glob(f"{journal}.json*"))
        path.write_text("[]" if path.suffix == ".json" else "")
    with pytest.raises(UserError, match=f"^the figure {figure}[ :].+") as error:
        sentences.with_figures(f"1<!--{figure}-->")
    assert "\n" not in str(error.value)
    assert sentences.with_figures("1<!--epoch-loss-01-->") in readme_text()


def drop_runs(journal: Path, run: str) -> None:
    """Removes a run of every round, as if it had not been measured."""
    lines, name = [], None
    for line in journal.read_text(encoding="utf-8").splitlines(keepends=True):
        event = json.loads(line)
        if event["event"] in ("study", "run"):
            name = event.get("name")
        if name != run:
            lines.append(line)
    journal.write_text("".join(lines), encoding="utf-8")


def halve_seconds(journal: Path, run: str) -> None:
    """Makes a run of every round twice as fast."""
    lines, name = [], None
    for line in journal.read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event["event"] == "run":
            name = event["name"]
        if name == run and "seconds" in event and event["event"] == "log":
            event["seconds"] = [seconds / 2 for seconds in event["seconds"]]
        lines.append(json.dumps(event) + "\n")
    journal.write_text("".join(lines), encoding="utf-8")


def test_readme_stays_as_it_is_with_the_same_logs(reference):
    assert update(readme_text(), readme.SHOWN) == readme_text()


@pytest.mark.parametrize(
    ("journal", "run", "changed"),
    [
        (
            "nvidia-h100/ladder",
            "14-chunked-head",
            "hardware contributions speedup-picture h100-optimized h100-mfu h100-speedup"
            " h100-after-8 h100-11-to-15",
        ),
        (
            "nvidia-h100/ladder",
            "08-torch-compile",
            "contributions h100-technique-8 h100-after-8",
        ),
        (
            "nvidia-h100/variants",
            "variant-precision-autocast",
            "autocast",
        ),
        ("nvidia-h200/stages", "01_opt_single_gpu", "hardware"),
        (
            "nvidia-h200/time-to-loss",
            "00_orig-batch-2-rate-0.0005",
            "seconds-00 seconds-00-compiling",
        ),
        ("amd-epyc-avx2-2-cores/ladder", "00_orig", "avx2-speedup"),
    ],
)
def test_a_changed_journal_changes_readme(reference, journal, run, changed):
    before = generated()
    halve_seconds(reference / f"{journal}.jsonl", run)
    after = generated()
    assert {name for name in before if after[name] != before[name]} == set(changed.split())
    page = update(readme_text(), readme.SHOWN)
    in_sentences = set(changed.split()) - {*README_BLOCKS}
    assert page != readme_text()
    assert all(f"{after[name]}<!--{name}-->" in page for name in in_sentences)


def test_a_figure_of_a_technique_is_found_by_its_name(reference):
    """Also where a technique was put in before it, so that it has another number."""
    names = "h100-technique-8", "h100-after-8", "h100-11-to-15"
    known = sentences.Claims(reference)
    before = [sentences.figure_text(name, known) for name in names]
    path = reference / "nvidia-h100" / "ladder.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        if line["event"] == "study":
            for run in line["plan"]["runs"][3:]:
                run["number"] += 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    known = sentences.Claims(reference)
    assert [sentences.figure_text(name, known) for name in names] == before
    with pytest.raises(UserError, match="03-fused-adamw was measured as technique 4"):
        readme.block_text("contributions", reference)  # which tells techniques by their numbers


@pytest.mark.parametrize(
    ("name", "row"), [("h100-technique-8", "08-torch-compile"), ("h100-optimized", "00")]
)
def test_a_figure_without_its_row(reference, name, row):
    (reference / "nvidia-h100" / "ladder.jsonl").unlink()
    with pytest.raises(UserError, match=f"the figure {name}: no row '{row}' in "):
        sentences.figure_text(name, sentences.Claims(reference))


def test_techniques_that_share_a_line(tmp_path):
    """One with a slow run shares it with the next; what gains little and changes nothing else is a
    small one."""
    plan = plan_of("00_orig", "one", "two", "three", "failed", "five", rounds=3)
    plan.runs = [run.replace(number=k) for k, run in enumerate(plan.runs)]
    speeds = dict(
        zip(
            [run.name for run in plan.runs],
            [(100.0,) * 3, (101.0,) * 3, (200.0, 100.0, 200.0), (300.0,) * 3, (), (600.0,) * 3],
            strict=True,
        )
    )
    runs = [run for name, of_rounds in speeds.items() for run in rounds_of(name, *of_rounds)]
    runs.append(dict(name="failed", error="it broke"))
    (measured,) = read_journal(write_journal(tmp_path, "ladder", plan, runs, MACHINE))
    one, two_and_three, five = claims.contributions_of(row for row in Rows(measured) if row.speeds)
    assert (one.numbers, one.is_small) == ((1,), True)
    assert (two_and_three.numbers, five.numbers) == ((2, 3), (4, 5))  # 4 failed
    assert one.speed == pytest.approx(1.01)
    assert two_and_three.speed == pytest.approx(300 / 101)
    assert not two_and_three.is_small and not five.is_small
    line = claims.shared_line([one, five])
    assert (line.numbers, line.at_most) == ((1, 4, 5), True)
    assert line.speed == pytest.approx(2)


def test_changed_single_steps_change_readme(reference):
    path = reference / "nvidia-h100" / "steps.json"
    records = json.loads(path.read_text())
    for record in records:
        if record.get("name") == "published 01" and "tok_s" in record:
            record["tok_s"] /= 2
    before = generated()
    path.write_text(json.dumps(records))
    after = generated()
    changed = {name for name in before if after[name] != before[name]}
    assert changed == {"h100-11-to-15"}
    assert float(after["h100-11-to-15"].split("–")[-1]) > 100  # percent


def test_a_changed_prediction_changes_readme(reference):
    path = reference / "predict.json"
    stored = json.loads(path.read_text())
    stored["00 --model gpt2"] = stored["01 --model gpt2"]
    before = generated()
    path.write_text(json.dumps(stored))
    after = generated()
    assert {name for name in before if after[name] != before[name]} == {
        "hardware",
        "bench-minutes",
    }


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a <!--techniques-->", "no figure stands before <!--techniques-->"),
        ("a 3 <!--techniques-->", "no figure stands before"),
        ("3<!--technique-->", "there is no figure technique in"),
    ],
)
def test_figures_that_do_not_serve(tmp_path, text, error):
    with pytest.raises(UserError, match=error):
        update(text, tmp_path)


def test_a_figure_in_a_sentence(tmp_path):
    """Whatever stood there, a range too; what stands around it stays."""
    for old in ("3", "1,234.5", "2.4–7.0"):
        text = update(f"**x{old}<!--parameters-millions-->M**, y", tmp_path)
        assert text == "**x163<!--parameters-millions-->M**, y"


# ---- Typed figures of other pages --------------------------------------------------------------


XEON = "intel-xeon-amx-2-cores"
COUNTS = dict(enumerate("no one two three four five six seven eight nine ten eleven".split()))


def unwrapped(path: str) -> str:
    """A page as one line."""
    return " ".join((ROOT / path).read_text(encoding="utf-8").split())


def test_the_xeons_typed_range_is_that_of_the_logs():
    factors = totals_in(REFERENCE / XEON)
    low, high, count = f"{min(factors):.1f}", f"{max(factors):.1f}", COUNTS[len(factors)]
    page, methodology = f"results/reference/{XEON}/README.md", "docs/methodology.md"
    says = f"**`01` is {low} to {high} times as fast as `00`** in {count} measurements"
    assert says in unwrapped(page)
    assert f"gained {low}× to {high}× in {count} measurements" in unwrapped(methodology)


def test_the_h100s_typed_range_is_that_of_the_logs():
    """From the slowest session of single steps to the ladder that README cites."""
    known = claims.Claims(REFERENCE)
    ladder, speedups = known.optimized.factor_baseline, known.speedups_on("nvidia-h100")
    assert len(speedups) == 5 and max(speedups) == ladder
    says = f"the H100's range is {min(speedups):.1f}–{ladder:.1f}"
    assert says in unwrapped("docs/results.md")


def test_the_epycs_typed_gains_over_nanogpt_are_those_of_the_logs():
    """Of 01, by dropout, batch, and huge pages; all are significant."""
    folder = REFERENCE / "amd-epyc-2-cores"
    gains = {}
    for rows in newest_in(folder, "peers"):
        for row in rows:
            if row.run.stage == "01":
                speedup = row.speedup()
                low, high = speedup.interval
                name = f"{rows.measured.kind} {row.run.variables['THP_MEM_ALLOC_ENABLE']}"
                assert speedup.significance == "faster"
                gains[name] = f"**{speedup.factor:.2f}** ({low:.2f}–{high:.2f})"
    text = (folder / "README.md").read_text(encoding="utf-8").partition("## nanoGPT")[2]
    kinds = ("dropout-0", "dropout-0.1", "largest-dropout-0")
    typed = rows_of_text(text[: text.index("\n- ")])
    for kind, (_, _, huge, small) in zip(kinds, typed, strict=True):
        assert (huge, small) == (gains[f"{kind} 1"], gains.get(f"{kind} 0", "not measured"))


def test_totals_are_of_every_measurement_of_one_model(tmp_path):
    text = (REFERENCE / "amd-epyc-2-cores" / "stages.jsonl").read_text(encoding="utf-8")
    model = '"model": "cpu-demo"'
    for journal, count in ((text, 2), (text.replace(model, '"model": "gpt2"', 1), 1)):
        (tmp_path / "stages.jsonl").write_text(journal, encoding="utf-8")
        assert len(totals_in(tmp_path)) == count


def test_the_xeons_typed_count_of_variants_is_that_of_the_logs():
    (rows,) = (rows for rows in newest_in(REFERENCE / XEON, "variants") if not rows.measured.kind)
    slower = sum(row.significance == "slower" for row in rows)
    page = unwrapped(f"results/reference/{XEON}/README.md")
    assert f"; {COUNTS[slower]} are slower." in page


def test_the_typed_times_to_a_loss_are_those_of_the_table():
    page = unwrapped("docs/time-to-loss.md")
    rows = rows_of_text(readme.block_text("to-loss-epoch", REFERENCE / "nvidia-h200"))
    (_, _, _, _, of_00, *_), (_, _, _, _, cold, _, warm, _, alone), *_ = rows
    assert f"it took {cold} seconds, and `00` {of_00}" in page
    assert f"With a warm cache, probably: about {warm} seconds, computed from two runs" in page
    assert f"is **{alone.split('**')[1]} as fast**" in page
    _, optimized, muon, modern = rows_of_text(readme.block_text("to-loss-epoch", REFERENCE / XEON))
    factor, interval = optimized[5].replace("*", "").strip(")").split(" (")
    assert f"{optimized[4]} seconds, {factor} as fast (95%: {interval})" in page
    factor, interval = modern[5].replace("*", "").strip(")").split(" (")
    assert f"Muon took {muon[4]} and the modern model with Muon {modern[4]} seconds, " in page
    assert f"seconds, {factor} as fast ({interval})" in page


@pytest.mark.parametrize("machine", [XEON, "amd-epyc-2-cores"])
def test_a_cpus_typed_gains_to_two_losses_are_those_of_the_logs(machine):
    """Of 01 at default settings, and of three tuned scripts."""
    folder = REFERENCE / machine
    text = (folder / "README.md").read_text(encoding="utf-8")
    typed = rows_of_text(text[text.index("| loss | `01`, default settings") :].partition("\n\n")[0])
    (rows,) = (rows for rows in newest_in(folder, "time-to-loss") if not rows.measured.kind)
    default = next(row for row in rows if row.run.stage == "01" and not row.run.options)
    tuned = to_loss.tuned_rows("", folder)[1:4]
    cells = to_loss.TimeCells
    for cell, target in zip(typed, rows.measured.plan.targets.values(), strict=True):
        assert cell[0] == f"{target:.2f}"
        own = cells(target).factor(default)
        assert cell[1] == "not reached" if own.startswith("<") else cell[1].startswith(own)
        assert cell[2:] == [cells(target).factor(row) for row in tuned]


def test_the_h200s_typed_tokens_are_those_of_the_logs():
    """Of each script over 00, to the loss of one epoch."""
    base, *rows = to_loss.tuned_rows("epoch", REFERENCE / "nvidia-h200")
    (target,) = base.plan.targets.values()
    ratios = [f"{row.tokens_to(target) / base.tokens_to(target):.2f}" for row in rows]
    page = unwrapped("results/reference/nvidia-h200/README.md")
    says = "`01` needs {} times those of `00`, Muon {}, and the modern model {}."
    assert says.format(*ratios) in page
    for text in (page, unwrapped("docs/time-to-loss.md")):
        assert f"{ratios[0]} times as many" in text


def test_the_h100s_typed_runs_of_technique_9_are_those_of_the_log():
    """All six, the slow one in bold."""
    rows = rows_in(REFERENCE / "nvidia-h100", "ladder")
    (row,) = (row for row in rows if row.run.number == 9)
    slow = min(row.speeds)
    typed = ", ".join(f"**{s:,.0f}**" if s == slow else f"{s:,.0f}" for s in row.speeds)
    assert f"> {typed} " in unwrapped("results/reference/nvidia-h100/README.md")


@pytest.mark.parametrize(("machine", "column"), [("nvidia-h200", 2), (XEON, 3)])
def test_the_typed_gains_of_records_are_over_01_alone(machine, column):
    """Muon's, and the modern model's with it, to the loss of one epoch, without compiling."""
    page = (ROOT / "docs/records.md").read_text(encoding="utf-8")
    typed = [row[column] for row in rows_of_text(page.partition("## Variants")[2])]
    (rows,) = (
        rows
        for rows in newest_in(REFERENCE / machine, "time-to-loss")
        if rows.measured.kind == "epoch"
    )
    optimized = next(row for row in rows if row.run.stage == "01")
    (target,) = rows.measured.plan.targets.values()
    for cell, script in zip(typed, ("optimizer-muon", "model-modern"), strict=True):
        row = next(row for row in rows if str(row.run.script).startswith(script))
        gain = Comparison(row, optimized, Goal(target))
        low, high = gain.interval
        assert cell == f"{gain.factor:.2f}× ({low:.2f}–{high:.2f})"


def test_the_h200s_typed_second_starts_are_those_of_the_logs():
    """First steps of the search, and with them the seconds to the loss, of each script at its best
    settings."""
    folder = REFERENCE / "nvidia-h200"
    text = (folder / "README.md").read_text(encoding="utf-8")
    text = text[text.index("## A second start") :]
    typed = rows_of_text(text[: text.index("\n## ", 1)])
    base, *rows = to_loss.tuned_rows("epoch", folder)
    goal = Goal(rows[0].plan.targets[EPOCH_LOSS], with_first_step=True)
    searched = [row for kind in newest_in(folder, "search") for row in kind]
    for row, (_, first, again, to_the_loss, factors, reached) in zip(rows, typed, strict=True):
        starts = [other for other in searched if other.run.name == row.run.name]
        starts.sort(key=lambda other: other.record.start["time"])
        cold, *warm = [other.record.first_step_seconds for other in starts]
        times = [other.seconds_to(*goal) for other in starts[1:]]
        assert reached == (", ".join(f"{s:.1f}" for s in sorted(filter(None, times))) or "none")
        assert (first, again) == (f"{cold:.1f}", ", ".join(f"{s:.1f}" for s in sorted(warm)))
        trained = row.seconds_to(goal.loss) - row.record.tokens_per_step / row.tok_per_sec
        seconds = [trained + first_step for first_step in warm]
        assert to_the_loss == range_text(seconds, ".1f")
        assert factors == range_text([base.seconds_to(*goal) / time for time in seconds], ".1f")


def test_a_table_of_times_to_a_loss():
    """It has the scripts at their best settings, in words; and of 00, which all are compared to, no
    speedup."""
    rows = rows_of_text(readme.block_text("to-loss-epoch", REFERENCE / "nvidia-h200"))
    first, second, muon, _ = rows
    assert first == ["00", "2", "0.0005", "30,479", "14.5", "", "14.4", "", ""]
    assert second[:3] == ["01", "8", "0.0005"]
    assert second[4:] == ["27.0", "**0.54×** (0.45–0.64)", "10.9", "1.3×", "**7.4×** (6.5–8.6)"]
    assert muon[:3] == ["Muon, regional compilation", "4", "0.001"]
    assert muon[5::3] == ["1.26× (1.02–1.56)", "**7.8×** (6.3–9.6)"]
    rows = rows_of_text(readme.block_text("to-loss", REFERENCE / XEON))
    assert [rows[1][column] for column in (4, 6)] == ["15.0", "8.0"]  # cold and warm
    assert rows[0][7] == ""  # 00's own factor, which is over its default run


def anchors(path: Path) -> set[str]:
    """Of a page's headings, as code hosts make them."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }


def test_links_lead_somewhere():
    for path in {*readme.PAGES, *ROOT.glob("*.md"), *REFERENCE.glob("*/*.md")}:
        for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
            place, _, anchor = link.partition("#")
            target = path.parent / place if place else path
            assert (
                "://" in place or target.exists() and (not anchor or anchor in anchors(target))
            ), f"{path.name}: {link}"


def test_update_writes_what_stands_between_markers(tmp_path):
    """It leaves all else as it was. A marker's `@` names another machine's folder."""
    write_ladder(tmp_path, "00_orig")
    other = f"stages@{readme.SHOWN.name}"
    text = marker("ladder", "old\n") + "a | b\n" + marker(other, "old\n")
    after = update(text, tmp_path)
    _, table, between, stages, _ = re.split("<!-- .+ -->\n", after)
    assert between == "a | b\n"
    assert rows_of_text(table) == [["0", "technique 00_orig", "123", "1.25", "8.000"]]
    assert marker(other, stages) == update(marker("stages"), readme.SHOWN).replace("stages", other)
    assert update(after, tmp_path) == after


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (marker("other"), "no table other in"),
        (marker("ladder"), "no table ladder in"),
        (marker("measured@no.where"), "no table measured in"),
        (marker("machines", "| 1 |\n", ""), "no <!-- end"),
        (marker("machines", "", "") + marker("machines"), "no <!-- end -->"),
    ],
)
def test_markers_that_do_not_serve(tmp_path, text, error):
    with pytest.raises(UserError, match=error):
        update(text, tmp_path)


def test_each_variant_measured_on_the_gpu_has_a_use():
    """In a table of at most ten rows, which also has others; a sentence names those without."""
    text = readme.block_text("variant-choice", REFERENCE)
    uses, names, *_ = zip(*rows_of_text(text), strict=True)
    assert [re.findall("`(.+)`", name)[0] for name in names] == [*variant_pages.USES]
    assert all(uses) and len(uses) <= 10
    useless = text.rpartition("|\n")[2]
    assert re.findall("`(.+?)`", useless) == [*variant_pages.USELESS]
    measured = {
        variant.label
        for variants in variant_pages.variants_by_script().values()
        for variant in variants
        if variant_pages.is_measured(variant.on(variant_pages.GPU))
    }
    named = {*variant_pages.USES, *variant_pages.USELESS, *variant_pages.GONE}
    assert measured <= named
    others = {label.split()[0] for label in named - measured}
    assert others <= {patch.name for patch in stack.load_variants()}


def test_a_variant_without_a_purpose_is_named():
    *known, last = stack.load_variants()
    with pytest.raises(stack.StackError, match=f"PURPOSES .* differ in {last.name}$"):
        variant_pages.by_purpose(known)


def test_write_readme(tmp_path, monkeypatch):
    path = tmp_path / "README.md"
    for name, value in dict(PAGES=[path], SHOWN=tmp_path, PICTURES=tmp_path).items():
        monkeypatch.setattr(readme, name, value)
    path.write_text(marker("technique-index"))
    write_ladder(tmp_path, "00_orig")
    assert readme.write_readme(all_studies())
    assert not readme.write_readme(all_studies())
    assert len(rows_of_text(path.read_text(encoding="utf-8"))) == len(stack.load())
    pictures = [tmp_path / name for name in (*waterfall.README_PICTURES, *to_loss.PICTURES)]
    assert all(picture.stat().st_size > 10_000 for picture in pictures)
    assert len({picture.read_bytes() for picture in pictures}) == 4


# ---- plot_results.py ---------------------------------------------------------------------------


@pytest.fixture
def plot(capsys):
    """Runs it in this process: (exit code, lines of stdout, lines of stderr)."""

    def run(results):
        code = plot_results.main(["--results-dir", str(results)])
        said = capsys.readouterr()
        return code, said.out.splitlines(), said.err.splitlines()

    return run


@pytest.mark.parametrize(
    ("rounds", "says"), [(1, "; single runs, no significance."), (2, "; 2 runs each.")]
)
@pytest.mark.parametrize("published", [100.0, None])
@pytest.mark.parametrize("study", ["stages", "ladder"])
def test_single_runs_say_so(tmp_path, study, published, rounds, says):
    """Also where nothing is published to stand beside them."""
    plan = plan_of("a", "b", rounds=rounds)
    plan.runs = [
        run.replace(stage=f"0{k}" if study == "stages" else None, published=published)
        for k, run in enumerate(plan.runs)
    ]
    write_journal(
        tmp_path,
        study,
        plan,
        [run for name in "ab" for run in rounds_of(name, *range(100, 100 + rounds))],
    )
    assert headline(tmp_path).endswith(says)
    assert ("published" in headline(tmp_path)) is bool(study == "stages" and published)


def test_runs_in_which_a_speedup_has_no_part_are_told(tmp_path):
    """The speeds are medians of more runs than there are rounds of both."""
    runs = [*rounds_of("a", 100, 100), *rounds_of("b", *[200] * 4)]
    runs += rounds_of("a", 100, 100, seed=9)
    write_journal(tmp_path, "ladder", plan_of("a", "b", rounds=2), runs)
    assert headline(tmp_path).endswith("; medians of 4 runs each, the speedup over 2 rounds.")
    runs += rounds_of("a", 100, seed=10)
    write_journal(tmp_path, "ladder", plan_of("a", "b", rounds=2), runs, id="2")
    assert headline(tmp_path).endswith("; medians of 4 and 5 runs, the speedup over 2 rounds.")


def test_plot_results(tmp_path):
    """From another folder, whatever backend is named: one that matplotlib no longer has."""
    results = tmp_path / "results"
    write_record(results, "00_orig", speed=1000)
    write_record(results, "00_orig", "20260102T000000Z", status="interrupted")
    write_ladder(results, "00_orig", "01-causal-mask")
    write_journal(
        results,
        "stages",
        plan_of("00_orig", "01_opt_single_gpu"),
        [dict(name="01_opt_single_gpu", speed=3000)],
    )
    run = run_python(
        "-X",
        "utf8",
        ROOT / "plot_results.py",
        "--results-dir",
        results,
        cwd=tmp_path,
        encoding="utf-8",
        env=environment(MPLBACKEND="Qt4Agg"),
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("1 run that did not complete: left out\n")
    assert run.stdout.count("left out") == 1
    assert {path.name for path in results.glob("*.png")} == {"stages.png", "ladder.png"}
    for path in results.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
    summary = (results / "summary.md").read_text(encoding="utf-8")
    assert summary in run.stdout
    for cells in ("00 original, batch 4 | 1,000 | 1.00", "01 optimized, batch 4 | 3,000 | 3.00"):
        assert f"| Some CPU | cpu-demo / 256 | {cells} |" in summary


def test_nothing_measured(tmp_path, plot, monkeypatch):
    """The published figures as a table, no picture; a terminal without × shows "?"."""
    code, out, err = plot(tmp_path)
    assert (code, err) == (0, []) and not list(tmp_path.iterdir())
    assert any("02 DDP × 4 | 419,259 | 33.47 |" in line for line in out)
    with open(tmp_path / "out", "w", encoding="ascii") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        assert plot_results.main(["--results-dir", str(tmp_path)]) == 0
    assert "02 DDP ? 4" in (tmp_path / "out").read_text()


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("folder", "summary.md can't be written"),
        ("nowhere", "is not a folder"),
        ("matplotlib", "matplotlib"),
    ],
)
def test_plot_results_ends_with_one_line(tmp_path, plot, monkeypatch, fault, says):
    write_record(tmp_path, "00_orig")
    if fault == "folder":
        (tmp_path / "summary.md").mkdir()
    if fault == "matplotlib":
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = plot(tmp_path / "nowhere" if fault == "nowhere" else tmp_path)
    assert code == 1 and len(err) == 1 and err[0].startswith("error: ") and says in err[0]
    assert not [*tmp_path.glob("*.png")]


def test_a_page_without_matplotlib(reports, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert reports.make(pieces="stages") == 0
    assert "there are no pictures: " in capsys.readouterr().err
    assert "![" not in reports.text


def test_runs_that_cannot_be_compared(tmp_path, plot):
    """Those of another text have a group of their own; where lengths differ they are shown."""
    book, mine = (
        dict(data=dict(corpus=name, tokenizer="gpt2")) for name in ("Middlemarch", "mine.txt")
    )
    limits = dict(epochs=15, max_steps=None, max_tokens=40_960)
    write_record(tmp_path, "00_orig", start=book, config=limits)
    write_record(
        tmp_path, "02_opt_multi_gpu_ddp", start=book, steps=4, config=limits | dict(world_size=2)
    )
    assert "8,192 tokens" not in "\n".join(plot(tmp_path)[1])
    write_record(
        tmp_path, "01_opt_single_gpu", speed=300.0, start=book, config=limits, tokens=2048, steps=5
    )
    text = "\n".join(plot(tmp_path)[1])
    assert "| 00 original, batch 4, 8,192 tokens | 100 | 1.00 |" in text
    assert "| 01 optimized, batch 4, 5,120 tokens | 300 | 3.00 |" in text
    write_record(
        tmp_path, "01_opt_single_gpu", "20260103T000000Z", speed=500.0, start=mine, config=limits
    )
    assert "256, mine.txt | 01 optimized, batch 4 | 500 | n/a |" in "\n".join(plot(tmp_path)[1])
