"""Results: two folders side by side, and a folder for results/reference."""

import re
import shutil
import tempfile
from argparse import ArgumentParser
from pathlib import Path
from typing import NamedTuple

from bench.analysis.folders import newest_in, rows_in
from bench.analysis.rows import Row, Rows
from bench.analysis.stats import POOLED_LEVEL, Estimate, significant
from bench.analysis.totals import is_plain
from bench.catalogue import technique_names
from bench.commands import Command
from bench.common import DAMAGE, REFERENCE, relative
from bench.measure.lock import locked
from bench.measure.look import foreign_measurement, read_look
from bench.measure.plan import Setup
from bench.report.notes import machine_note, provenance
from bench.report.page import has_page, is_finished, write_page
from bench.report.tables import credited, interval_text
from bench.studies import all_studies
from gpt_speed.common import UserError
from gpt_speed.tables import Table, fmt, markdown, num_col, text_col, value_col

ENOUGH = {"stages": 4, "ladder": 3}  # rounds of 00 and 01, in either study
COPIED = ".jsonl", ".json", ".md", ".html", ".png"


class Compare(Command):
    """Compare two folders of results: each technique's speedup in both.

    It says whether the two differ significantly."""

    group = "results"

    def options(self, parser: ArgumentParser) -> None:
        for name in "AB":
            parser.add_argument(
                name,
                help="a folder of results with a ladder, or the name of one in results/reference",
            )

    def answer(self, setup: Setup) -> str:
        in_a, in_b = ladder_in(setup.args.A), ladder_in(setup.args.B)
        options = [rows.measured.options for rows in (in_a, in_b)]
        if options[0] != options[1]:
            raise UserError(f"measured with different options: {options[0]}, {options[1]}")
        return "\n\n".join(
            [
                f"A, {setup.args.A}: {described(in_a)}",
                f"B, {setup.args.B}: {described(in_b)}",
                markdown(speedups_table(in_a, in_b)),
            ]
        )


def described(rows: Rows) -> str:
    """Returns what a ladder was measured on, when, and how fast its first script is there."""
    first = rows[0]
    speed = fmt(first.tok_per_sec, ",.0f", " tok/sec") or first.error or "no figures"
    return f"{machine_note(rows)} {provenance([rows.measured])} {first.label}: {speed}."


def speedups_table(in_a: Rows, in_b: Rows) -> Table:
    """Returns the techniques that come after the same one in both ladders, and whether
    their speedups differ. Raises UserError where there are none."""
    pairs = pairs_of(in_a, in_b)
    if not pairs:
        raise UserError("the two ladders have no technique in common with the same one before it")
    return Table(
        [
            text_col("technique", "label"),
            num_col("A: ×", "in_a.factor", ".2f"),
            value_col("95%", "in_a.interval", interval_text),
            num_col("B: ×", "in_b.factor", ".2f"),
            value_col("95%", "in_b.interval", interval_text),
            text_col("difference", "in_words"),
        ],
        with_differences(pairs),
        "Each technique's speedup over the script before it, the same one in both:",
    )


class Pair(NamedTuple):
    """A technique's rows in both ladders."""

    in_a: Row
    in_b: Row
    in_words: str = "not tested"  # whether the speedups differ

    @property
    def name(self) -> str:
        """The name of its run, the same in both."""
        return self.in_a.run.name

    @property
    def label(self) -> str:
        return credited(self.in_a, self.in_a.label)

    def difference(self) -> Estimate | None:
        """Returns by how much the logarithm of its speedup is larger in A; None where one ladder
        has too few rounds to tell."""
        in_a, in_b = self.in_a.speedup().estimate, self.in_b.speedup().estimate
        if not in_a or not in_b:
            return None
        return in_a.minus(in_b)


def pairs_of(in_a: Rows, in_b: Rows) -> list[Pair]:
    """Returns the techniques that have a speedup in both ladders, over the same script."""
    steps_of_a, steps_of_b = steps_in(in_a), steps_in(in_b)
    return [Pair(row, steps_of_b[step]) for step, row in steps_of_a.items() if step in steps_of_b]


def steps_in(ladder: Rows) -> dict[tuple[str, str], Row]:
    """Returns the rows that have a speedup, by step_of."""
    return {step_of(row): row for row in ladder if row.factor}


def step_of(row: Row) -> tuple[str, str]:
    """Returns the names of the runs before and after a technique; "" for none before it."""
    if not row.reference:
        return "", row.run.name
    return row.reference.run.name, row.run.name


def with_differences(pairs: list[Pair]) -> list[Pair]:
    """Returns the pairs, with words for the ladder in which each speedup is larger, if that is
    significant over all of them."""
    estimates = {pair.name: pair.difference() for pair in pairs}
    differences = {name: estimate for name, estimate in estimates.items() if estimate}
    words = dict.fromkeys(differences, "not significant")
    for name in significant(differences, POOLED_LEVEL):
        words[name] = "larger in B"
        if differences[name].mean > 0:
            words[name] = "larger in A"
    return [pair._replace(in_words=words.get(pair.name, pair.in_words)) for pair in pairs]


def ladder_in(name: str) -> Rows:
    """Returns the rows of the ladder in a folder. Raises UserError."""
    folder = Path(name)
    if not folder.is_dir():
        folder = REFERENCE / name
    ladders = newest_in(folder, "ladder")
    if not ladders:
        names = sorted(path.parent.name for path in REFERENCE.glob("*/ladder.jsonl"))
        raise UserError(f"{name}: no ladder there; there are {', '.join(names)}", 2)
    return ladders[-1]


class Pack(Command):
    """Copy complete results to results/reference/NAME, for a pull request.

    It checks page and journals before, and asks for more rounds where there are few."""

    group = "results"

    def options(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "name",
            metavar="NAME",
            help="the machine, such as rtx-4090: small letters, digits and hyphens",
        )

    def answer(self, setup: Setup) -> str:
        """Copies the results, and says what is next. Raises UserError, OSError."""
        results, target = setup.results, target_of(setup.args.name)
        with locked(results):
            write_complete_page(results)
            count = copy_results(results, target)
        return (
            f"{count} files in {relative(target)}\n"
            f"{more_rounds(results)}"
            "Now write its README.md (docs/results.md says what it has to state), and run"
            " python measure.py readme"
        )


def target_of(name: str) -> Path:
    """Returns the new folder of a machine's results. Raises UserError for a name that isn't one, or
    that is taken."""
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise UserError(f"{name!r} isn't a name like rtx-4090", 2)
    target = REFERENCE / name
    if target.exists():
        raise UserError(f"{relative(target)} exists: nothing is overwritten")
    return target


def write_complete_page(results: Path) -> None:
    """Writes the page of a folder again, since it may be older than the journals. Raises UserError
    where results are missing or damaged."""
    try:
        missing = what_is_missing(results)
        if missing:
            raise UserError(f"{relative(results)} isn't complete: {'; '.join(missing)}")
        write_page(all_studies(), results, {})
    except DAMAGE as error:
        raise UserError(f"{relative(results)} is damaged: {error!r}")


def copy_results(results: Path, target: Path) -> int:
    """Makes a folder of what is shared of results: whole, or not at all. Returns how many files
    that are. Raises OSError."""
    files = [path for path in results.iterdir() if is_shared(path)]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".packing-", dir=target.parent) as scratch:
        copy = Path(scratch, target.name)
        copy.mkdir()
        for path in files:
            shutil.copyfile(path, copy / path.name)
        copy.rename(target)
    return len(files)


def is_shared(path: Path) -> bool:
    """Returns whether a file of results is for others to read. A trace is too large."""
    if path.suffix not in COPIED or path.name.endswith(".trace.json"):
        return False
    return path.is_file() and not path.is_symlink()


def what_is_missing(results: Path) -> list[str]:
    """Returns what results lack before others may quote them, and how to get it."""
    look = read_look(results)
    if not has_page(results) or not look:
        return ["no report: make report"]
    missing = []
    if not is_finished(results):
        missing.append("the report isn't finished: make report continues it")
    if not any(rounds_in(results).values()):
        missing.append("no figures of 00 and 01: python measure.py stages")
    for study in ENOUGH:
        for rows in newest_in(results, study):
            missing += [f"{study}: {fault}" for fault in faults_of(rows)]
    foreign = foreign_measurement(results, look["machine"])
    if foreign:
        missing.append(foreign)
    return missing


def faults_of(rows: Rows) -> list[str]:
    """Returns why others may not quote a measurement."""
    faults = []
    failed = [row.label for row in rows if row.outcome and row.outcome.failed]
    if failed:
        faults.append(f"{', '.join(failed)} failed")
    if rows.measured.options:
        faults.append(f"measured with {' '.join(rows.measured.options)}")
    return faults


def rounds_in(results: Path) -> dict[str, int]:
    """Returns by study in how many rounds both 00 and 01 ran."""
    rounds = {}
    for study in ENOUGH:
        rows = rows_in(results, study)
        of_00 = max((row.rounds for row in rows if is_plain(row)), default=0)
        of_01 = max((row.rounds for row in rows if is_whole(row)), default=0)
        rounds[study] = min(of_00, of_01)
    return rounds


def is_whole(row: Row) -> bool:
    """Returns whether a row is that of 01, alone or as a ladder's script with every technique."""
    every = len(technique_names()) - 1  # DDP comes behind it
    return row.run.stage == "01" or row.run.number == every


def more_rounds(results: Path) -> str:
    """Returns a line that asks for more rounds; "" where there are enough."""
    rounds = rounds_in(results)
    if any(rounds[study] >= enough for study, enough in ENOUGH.items()):
        return ""
    most_rounds = max(rounds.values())
    words = f"Only {most_rounds} rounds"
    if most_rounds == 1:
        words = "Single runs, no significance"
    return (
        f"{words}: better {ENOUGH['stages']} rounds of stages, or {ENOUGH['ladder']} of a"
        " ladder with 00 and 01, such as python measure.py stages --resume --rounds"
        f" {ENOUGH['stages']}\n"
    )
