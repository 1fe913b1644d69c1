"""bench/report/tables.py: how rows are shown, and what is said of them."""

from types import SimpleNamespace

import pytest
from made_up import MACHINE, cells_of, plan_of, rounds_of, write_journal, write_record

from bench.analysis.rows import rows_of
from bench.measure.journal import read_journal
from bench.report.notes import full_notes, provenance
from bench.report.tables import (
    Column,
    Table,
    cell,
    full_table,
    markdown,
    number,
    short_table,
    words,
)
from bench.studies import all_studies
from bench.studies.times import time_notes, time_tables


@pytest.fixture
def shown(tmp_path):
    """(each row of a plan's full table, the notes below it)"""
    def shown(plan, runs, *how, **header):
        *_, measured = read_journal(write_journal(tmp_path, "a", plan, runs, *how, **header))
        rows = rows_of(measured)
        cells = cells_of(markdown(full_table(rows)))
        return [*cells.values()], full_notes(measured, rows)

    return shown


def test_markdown():
    columns = [Column("a|b", lambda row: row[0], True), Column("e", lambda row: ""),
               Column("n", lambda row: cell(row[1], ".1f"))]
    rows = [("x | y", 2), ("", None)]
    assert markdown(Table(columns, rows)) == (
        "| a\\|b | n |\n| :-- | --: |\n| x \\| y | 2.0 |\n|  |  |\n")
    assert markdown(Table(columns, rows, "What:", missing="n/a", every_column=True)) == (
        "What:\n\n| a\\|b | e | n |\n| :-- | --: | --: |\n| x \\| y | n/a | 2.0 |\n"
        "| n/a | n/a | n/a |\n")


def test_columns_by_the_name_of_a_figure():
    """Of an attribute or a key, or of one within another; what isn't known is an empty cell."""
    rows = [dict(label="a|b", record=SimpleNamespace(mfu=0.25, end=dict(gb=2))),
            dict(label=None, record=None), {}]
    columns = [words("run", "label"), number("MFU", "record.mfu", ".1%"),
               number("GB", "record.end.gb"), number("gone", "record.end.mib", ".2f")]
    assert markdown(Table(columns, rows), Table(columns[:1], rows[:1], "Again:")) == (
        "| run | MFU | GB |\n| :-- | --: | --: |\n| a\\|b | 25.0% | 2 |\n|  |  |  |\n|  |  |  |\n"
        "\nAgain:\n\n| run |\n| :-- |\n| a\\|b |\n")
    with pytest.raises(AttributeError):  # a name that no row has is an error, not an empty column
        markdown(Table([number("MFU", "record.mfo")], rows))


@pytest.mark.parametrize(("gpu", "says"), [
    ("NVIDIA H100 80GB HBM3", None), (None, None),
    ("NVIDIA X",
     "its rate isn't known. An entry with this name in bench/predict/gpus.json,"),
    ("Tesla T4", None)])
def test_why_a_gpu_has_no_mfu(shown, tmp_path, gpu, says):
    """Below the table of a study, of a sweep, and of plot_results.py."""
    rows, notes = shown(plan_of("one"), rounds_of("one", 100, gpu=gpu))
    assert ("MFU" in rows[0]) is (gpu is not None and says is None)
    found = [note for note in notes if "MFU" in note]
    assert len(found) == bool(says) and (not says or found[0].startswith(
        f"No MFU of the {gpu}: {says}"))
    (measured,) = read_journal(tmp_path / "a.jsonl")
    in_sweep = all_studies()["sweep"].notes(measured, rows_of(measured))
    assert [note for note in in_sweep if "MFU" in note] == found
    write_record(tmp_path, "00_orig", gpu=gpu)
    summary = all_studies()["stages"].summary(tmp_path).splitlines()
    assert [line for line in summary if line.startswith("No MFU")] == found


def test_the_peak_is_not_that_of_a_slow_moment(shown):
    """Where products ran faster after the runs than before them, that counts."""
    for rate, told in ((8e12, "8.00"), (2e12, "4.00")):
        runs = [run | dict(matmul_rate=rate) for run in rounds_of("one", 100, 101)]
        notes = shown(plan_of("one"), runs, id=told)[1]
        assert sum(f"bfloat16 {told} TFLOP/s" in note for note in notes) == 1


# ---- Techniques --------------------------------------------------------------------------------


def test_techniques(shown):
    """Each over the one before and over the first, with the published speedups in brackets."""
    plan = plan_of("base", "cores", "broken", "last")
    plan.runs = [run.but(published=speed)
                 for run, speed in zip(plan.runs, (100.0, 200.0, 500.0, None), strict=True)]
    runs = [*rounds_of("base", *range(100, 104)), dict(name="base", seed=124, loss=8.1875),
            *rounds_of("cores", *range(103, 107), loss=8.25), dict(name="broken", error="a | b"),
            *rounds_of("last", *[418.0] * 4, loss=8.0625)]
    (base, cores, broken, last), notes = shown(plan, runs, MACHINE)
    assert cores == {
        "run": "cores", "technique": "technique cores", "tok/sec": "104", "range": "103–106",
        "speedup (A100)": "1.03 (2.00)", "95 %": "1.03–1.03",
        "over the baseline (A100)": "1.03 (2.00)",
        "reserved GB": "1.25", "first step s": "10.0", "val loss": "8.2500", "Δ loss": "+0.2500",
        "Δ loss, baseline": "+0.2500", "within seed noise": "no",
        "expected effect on the loss": "rounding",
        "of matmul peak": "10.4%", "attention": "manual", "significance": "faster"}
    assert base["significance"] == "baseline"
    assert base["speedup (A100)"] == base["Δ loss"] == "n/a"
    assert (broken["tok/sec"], broken["significance"]) == ("n/a", r"failed: a \| b")
    assert broken["speedup (A100)"] == "n/a (2.50)"
    assert (last["speedup (A100)"], last["over the baseline (A100)"]) == ("4.00", "4.12")
    assert (last["within seed noise"], last["significance"]) == ("yes", "faster")
    assert any("over the row above" in note and "in brackets" in note for note in notes)
    assert "Seed noise is the range of the first row's losses over 2 seeds, 0.1875." in notes


@pytest.mark.parametrize(("record", "mark"), [
    (dict(steps=4), "†"), (dict(config=dict(compile=False)), r"\*")])
def test_marks(shown, record, mark):
    (marked, plain), notes = shown(plan_of("a", "b"), [dict(name="a", **record), dict(name="b")])
    assert marked["technique"] == f"technique a {mark}" and plain["technique"] == "technique b"
    assert notes[-1].startswith(f"{mark} ") and "over the row above" in notes[3]


def test_alternatives(shown):
    """All over the first row."""
    plan = plan_of("base", "a", "b")
    plan.runs[2] = plan.runs[2].but(compared_to="base", processes=2)
    speeds = dict(base=(99.0, 100.0, 101.0), a=(100.0, 101.0, 99.0), b=(101.0, 99.0, 100.0))
    runs = [run for name, gb in (("base", 2.0), ("a", 1.0), ("b", 2.0))
            for run in rounds_of(name, *speeds[name], reserved_gb=gb)]
    (base, less, same), notes = shown(plan, runs)
    assert (less["speedup"], less["× GB"], same["× GB"]) == ("1.00", "0.50", "1.00")
    assert not {"over the baseline", "Δ loss, baseline", "within seed noise", "MFU"} & base.keys()
    assert notes[3] == "The speedup is over the first row."
    assert "all rounds had one order" in notes[4]  # of an old journal
    assert "02 trains as many tokens on each GPU" in notes[5] and len(notes) == 6


def test_leave_one_out(shown):
    plan = plan_of("01", "without-a", "without-b")
    plan.runs[1:] = [run.but(compared_to="01", without="a", error=error)
                     for run, error in zip(plan.runs[1:], (None, "conflict: x"), strict=True)]
    (_, a, b), notes = shown(plan, [dict(name="01"), dict(name="without-a", speed=50.0)])
    assert (a["technique's speedup"], b["technique's speedup"]) == ("2.00", "n/a")
    assert b["significance"] == "conflict: x" and not {"speedup", "× GB"} & a.keys()
    assert "faster with it" in notes[3] and len(notes) == 4


@pytest.mark.parametrize(("settings", "says", "loss"), [
    (dict(tokens=4096), ". 4,096 tokens per run, 2 rounds, seed 123. ", "after 4,096 training"),
    (dict(tokens=4096, seconds=10.0),
     "4,096 tokens per run or about 10 s of training, whichever is longer, 2", "after 4,096"),
    (dict(tokens=None), "the scripts' own length, 2 rounds", "at the end of the run"),
    (dict(tokens=None, epochs=5), "5 epochs per run, 2 rounds", "at the end of the run"),
    (dict(options=["--name", "a b"]), "seed 123, options `--name 'a b' --dropout 0`.", "4,096"),
])
def test_what_was_measured(shown, settings, says, loss):
    _, notes = shown(plan_of("a", **settings), rounds_of("a", 100.0, 90.0),
                     options=["--dropout", "0"] if "options" in settings else [])
    assert notes[0].startswith("Some CPU, PyTorch 2.13. ") and says in notes[0]
    assert notes[0].endswith("float32 1.00, TF32 2.00, bfloat16 4.00 TFLOP/s.")
    assert loss in notes[2] and len(notes) == 3  # with nothing to explain


def test_for_readers(tmp_path):
    """What is measurable is bold; an error stands in place of the factor, and what the machine
    lacks above the table."""
    runs = [*rounds_of("a", 99.0, 100.0, 100.0, 101.0, reserved_gb=2.0),
            *rounds_of("b", 50.0, 50.0, 51.0, 49.0, reserved_gb=1.0),
            *rounds_of("c", 75.0, 74.0, 76.0, 75.0, loss=8.5), dict(name="d", error="it broke")]
    plan = plan_of(*"abcdef")
    plan.runs[4:] = [run.but(error="needs a GPU") for run in plan.runs[4:]]
    rows = rows_of(*read_journal(write_journal(tmp_path, "a", plan, runs)))
    text = markdown(short_table(rows))
    assert text.startswith("Not run here: `e`, `f` (needs a GPU).\n\n| run |")
    base, slower, faster, failed = cells_of(text).values()
    assert base == {"run": "`a`", "tok/sec": "100", "× speed": "", "95 %": "", "GB": "2.00",
                    "× memory": "",
                    "first step, s": "10.0", "Δ loss": "",
                    "expected effect on the loss": "rounding"}
    assert (slower["× speed"], slower["× memory"]) == ("**0.50**", "0.50")
    assert (faster["× speed"], faster["× memory"], faster["Δ loss"]) == (
        "**1.50**", "1.25", "+0.500")
    assert (failed["× speed"], failed["GB"]) == ("failed: it broke", "")


# ---- Time to a loss ----------------------------------------------------------------------------


def test_time_to_a_loss(tmp_path):
    """At 100 tok/sec, 8.5 is reached after 33.28 s; see test_records.py."""
    plan = plan_of("base", "fast", "slow", "failed", new_seeds=True, tokens=8192,
                   targets=dict(published=8.5, best=6.5))
    plan.runs[2:] = [run.but(compared_to="base") for run in plan.runs[2:]]
    runs = [*rounds_of("base", 100.0, 50.0, 200.0), *rounds_of("fast", 400.0, 400.0, 400.0),
            dict(name="slow"), dict(name="slow", round=2, loss=9.0, steps=4),
            dict(name="slow", round=3, loss=9.0, steps=4), dict(name="failed", error="it broke")]
    (measured,) = read_journal(write_journal(tmp_path, "a", plan, runs))
    published, best = time_tables(rows_of(measured), plan.targets)
    base, fast, slow, failed = cells_of(markdown(published)).values()
    assert base == {
        "run": "base", "tok/sec": "100", "× tok/sec": "", "tokens": "3,328", "seconds": "33.0",
        "range": "16.4–66.3", "× to the loss": "", "95 %": "", "first step, extra s": "0.0",
        "× not counting compiling": "", "compared to": ""}
    assert fast == {
        "run": "fast", "tok/sec": "400", "× tok/sec": "4.00", "tokens": "3,328", "seconds": "15.8",
        "range": "15.8–15.8", "× to the loss": "2.09", "95 %": "",
        "first step, extra s": "7.4", "× not counting compiling": "4.00", "compared to": "base"}
    assert (slow["seconds"], slow["range"], slow["× to the loss"]) == (
        "not reached", "33.0–not reached", "< 0.85")
    assert (failed["seconds"], failed["range"], failed["compared to"]) == (
        "failed: it broke", "", "base")
    lowest = "the lowest validation loss of 00"
    assert published.caption == f"Target 8.5000, {lowest} in its default run:"
    assert best.caption == f"Target 6.5000, {lowest} at its best learning rate:"
    never = cells_of(markdown(best))["base"]  # every column, though none came there
    assert (never["seconds"], never["range"], never["tokens"]) == ("not reached", "", "")
    first, *_, last = time_notes(measured, rows_of(measured))
    assert first == "Some CPU, PyTorch 2.13; seeds 123 to 125, 3 rounds."
    assert "trained on 8,192 tokens" in last


def test_runs_that_set_a_target(tmp_path):
    plan = plan_of("a", "b", new_seeds=True, first_seed=1)
    runs = [dict(name="a"), dict(name="b", error="it broke")]
    (measured,) = read_journal(write_journal(tmp_path, "a", plan, runs))
    rows = rows_of(measured)
    (table,) = time_tables(rows, plan.targets)
    assert [*cells_of(markdown(table)).values()] == [
        {"run": "a", "lowest val loss": "7.0000", "tok/sec": "100"},
        {"run": "b", "lowest val loss": "failed: it broke", "tok/sec": ""}]
    assert time_notes(measured, rows)[0] == "Some CPU, PyTorch 2.13; seed 1, 1 round."


def test_provenance(tmp_path):
    """When, at which commits, with which PyTorch: of several measurements from the first to the
    last."""
    def told(*headers: dict) -> str:
        found = []
        for place, header in enumerate(headers, 1):
            path = write_journal(tmp_path, "x", plan_of("a"), id=str(place), **header)
            found.append(read_journal(path)[-1])
        return provenance(reversed(found))

    first = dict(time="20260102T030405Z", commit="0123456789", edited=False)
    last = dict(time="20260203T030405Z", commit="abcdefghij", edited=True)
    assert told() == ""
    assert told(first) == "Measured on 2026-01-02 at 0123456 with PyTorch 2.13."
    assert told(first | dict(commit=None)) == "Measured on 2026-01-02 with PyTorch 2.13."
    assert told(first, last, last | dict(machine=MACHINE | dict(torch="2.11"))) == (
        "Measured from 2026-01-02 at 0123456 to 2026-02-03 at abcdefg with edited files"
        " with PyTorch 2.13 and 2.11.")
