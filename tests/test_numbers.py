"""The headline numbers: README, docs, the machines' pages and the pictures say what the records
do."""

import re
from pathlib import Path

import pytest
from conftest import ROOT

from bench.analysis.rows import rate_to
from bench.common import REFERENCE
from bench.report import accuracy, cards, readme
from bench.report.tables import found_in
from bench.studies import ladder, time_to_loss

EPYC, XEON, AVX2 = (REFERENCE / name for name in (
    "amd-epyc-2-cores", "intel-xeon-amx-2-cores", "amd-epyc-avx2-2-cores"))


def prose() -> dict[str, str]:
    """Of every page, in one line, without generated tables and code blocks; with captions."""
    return {page.relative_to(ROOT).as_posix(): " ".join(re.sub(
        "```.*?```", "", readme.BLOCK.sub("", page.read_text(encoding="utf-8")),
        flags=re.DOTALL).split()) for page in readme.PAGES}


PROSE = prose()


def claims(pattern: str, pages: str = "") -> list[tuple[str, tuple[str, ...]]]:
    """(the page, its numbers) of each sentence that says so; at least one does."""
    found = [(page, match.groups()) for page, text in PROSE.items() if page.startswith(pages)
             for match in re.finditer(pattern, text)]
    assert found, f"no page says {pattern}"
    return found


def holds(pattern: str, *values: float, pages: str = "") -> None:
    for page, told in claims(pattern, pages):
        for text, value in zip(told, values, strict=True):
            decimals = len(text.partition(".")[2])
            assert f"{value:.{decimals}f}" == text, f"{page} says {text}, records {value:.3f}"


def test_readme():
    """The baseline, the script with bfloat16, FlashAttention and torch.compile, and the last."""
    rows = {row.run.rung: row for _, found in found_in(REFERENCE / "nvidia-h100", "ladder")
            for row in found}
    numbers = set(re.findall(r"[\d,]+", PROSE["README.md"]))
    assert numbers >= {f"{rows[rung].tok_per_sec:,.0f}" for rung in (0, 8, 14)}


def test_the_first_gpu():
    """Whole, and with the techniques that were published for the A100."""
    ((_, rows),) = found_in(REFERENCE / "nvidia-h100", "ladder")
    factors = {row.run.rung: row.factor_baseline for row in rows}
    holds(r"01 is ([\d.]+) times as fast as 00\*\* .*? Techniques 1 to 10 alone are ([\d.]+)",
          factors[14], factors[10], pages="results/reference/nvidia-h100")
    holds(r"Padding and the larger batch, ([\d.]+) and ([\d.]+), aren't", *(
        row.factor for row in rows if row.run.rung in (9, 10)))


@pytest.mark.parametrize("machine", [EPYC, XEON])
def test_ladder(machine):
    """A machine's page, and the title of its picture."""
    (end,) = (each for each in cards.both_ends(machine) if each["folder"] == machine)
    holds(r"\*\*01 is ([\d.]+) times as fast as 00\*\*", end["factor"],
          pages=machine.relative_to(ROOT).as_posix() + "/")
    for measured, rows in found_in(machine, "ladder"):
        assert ladder.finding(measured, rows).startswith(f"{end['factor']:.1f}× faster")


def test_float32():
    """Of a CPU without units for bfloat16."""
    factor = next(row.factor_baseline for _, rows in found_in(AVX2, "stages") for row in rows
                  if row.run.stage == "01")
    holds(r"\*\*01 is ([\d.]+) times as fast as 00\*\*", factor,
          pages="results/reference/amd-epyc-avx2")
    holds(r"`01` trains in float32 \(\[([\d.]+) times `00`", factor)
    holds(r"train in float32 there, ([\d.]+) times as fast as `00`", factor)


def to_loss(machine: Path) -> list[float]:
    """As in the table of machines, without the intervals: at the defaults, 01 at its best, the
    fastest; to the loss of one epoch, if that was measured, the last two again."""
    return [float(told.strip("*").split("×")[0]) for _, _, told, _ in cards.times_to_loss(machine)]


def test_time_to_loss():
    pages = "results/reference/", "docs/time-to-loss.md"
    for machine in (EPYC, XEON):
        default, best, fastest = to_loss(machine)[:3]
        own = pages[0] + machine.name + "/"
        holds(r"\*\*To the same loss\*\* .*? 01 is ([\d.]+) times", best, pages=own)
        holds(r"Muon and regional compilation(?: \(\*the recipe\*\))? ([\d.]+) times", fastest,
              pages=own)
        holds(r"At default settings, to 6\.34,(?: 01 is)? ([\d.]+) times", default, pages=own)
    defaults, bests, fastest = zip(*(to_loss(machine)[:3] for machine in (EPYC, XEON)),
                                   strict=True)
    holds(r"reaches the first target only ([\d.]+) times as fast \(.*?On the Xeon .*? is ([\d.]+)",
          *defaults, pages=pages[1])
    told = claims(r"`01` is [\d.]+ and ([\d.]+) times as fast as `00` to the two targets.*?"
                  r"the recipe [\d.]+ and ([\d.]+) times", pages[1])
    assert [numbers for _, numbers in told] == [
        (f"{best:.1f}", f"{other:.1f}") for best, other in zip(bests, fastest, strict=True)]


def test_time_to_the_loss_of_one_epoch():
    best, fastest = to_loss(XEON)[3:]
    own, docs = f"results/reference/{XEON.name}/", "docs/time-to-loss.md"
    holds(r"4\.88: 01 ([\d.]+) times, the recipe [\d.]+ times, and \*\*([\d.]+) times with the"
          r" modern model", best, fastest, pages=own)
    rows = next(rows for measured, rows in found_in(XEON, "time-to-loss")
                if measured.kind == "epoch")
    (target,) = rows[0].plan.targets.values()
    over_muon = rows[-1].difference(rate_to(target, True), rows[-2])
    holds(r"gets there ([\d.]+) times as fast as the row above it \(95 %: ([\d.]+) to ([\d.]+);"
          r" ([\d.]+) times without", over_muon.factor, *over_muon.interval,
          rows[-1].factor_of(rate_to(target, False), rows[-2]), pages=own)
    holds(r"got there ([\d.]+) times as fast as `00`, and ([\d.]+) times as fast as this recipe",
          fastest, over_muon.factor, pages=docs)


@pytest.mark.parametrize("machine", [EPYC, XEON])
def test_the_title_of_the_times(machine):
    """Names the fastest script and its speedup, as the tables do."""
    study = time_to_loss.TimeToLoss()
    for measured, rows in found_in(machine, "time-to-loss"):
        if measured.kind == "":
            figure = study.draw(measured, rows)
            (title,) = (row.get_suptitle() for row in figure.subfigs)
            assert f": {to_loss(machine)[2]:.1f} times as fast as 00, " in title


def test_accuracy_of_predictions():
    rows = accuracy.judged()
    everything = accuracy.figures_of(rows)
    unfitted = accuracy.figures_of(
        [row for row in rows if row["source"] != accuracy.ONE_PROGRAM])
    holds(r"Of (\d+) speeds that others have measured, with six programs on (\d+) kinds of GPUs,"
          r" the median error is (\d+) %, and (\d+) % are within 20 %\. Some constants were"
          r" fitted to one of these programs; for the (\d+) speeds of the other five the"
          r" two figures are (\d+) % and (\d+) %", everything["count"],
          len({row["card"] for row in rows}), 100 * everything["median"],
          100 * everything["near"], unfitted["count"], 100 * unfitted["median"],
          100 * unfitted["near"])
    assert len({row["program"] for row in rows}) == 6
