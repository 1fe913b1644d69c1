"""What is done with results: two folders side by side, and a folder for results/reference."""

import re
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

from bench.analysis.rows import Row
from bench.analysis.stats import significant
from bench.commands import Command
from bench.common import DAMAGE, REFERENCE, UserError, listed, relative, trained_in
from bench.measure.journal import locked
from bench.report.machine_section import read_look
from bench.report.page import write_page
from bench.report.tables import (
    INTERVAL,
    Column,
    Table,
    credited,
    fmt,
    found_in,
    markdown,
    num_col,
    text_col,
)
from bench.studies import all_studies

# ---- Two folders side by side -------------------------------------------------------------------


class Pair(NamedTuple):
    """The same technique in both ladders."""

    one: Row
    other: Row
    difference: str = ""  # whether the technique brings more in A or in B, or why that isn't known

    @property
    def why_not(self) -> str | None:
        """Why the two can't be compared: None where they can, "" where neither has a row before it.
        """
        rows = {"A": self.one, "B": self.other}
        if missing := [name for name, row in rows.items() if not row.speeds]:
            return f"no figures in {listed(missing)}"
        if first := [name for name, row in rows.items() if not row.reference]:
            return f"the first one in {first[0]}" if len(first) == 1 else ""
        if self.one.reference.run.name != self.other.reference.run.name:
            return f"over {self.one.reference.label} in A, over {self.other.reference.label} in B"
        return None


def judged(pairs: list[Pair]) -> list[Pair]:
    """Returns them with their differences, by the rule of all tables."""
    differences = {}
    for pair in pairs:
        ours, theirs = (row.speedup().estimate for row in pair[:2])
        if pair.why_not is None and ours and theirs:
            differences[pair.one.run.name] = ours.minus(theirs)
    names = significant(differences)

    def text_col(pair: Pair) -> str:
        difference = differences.get(pair.one.run.name)
        if not difference:
            return "not tested" if pair.why_not is None else pair.why_not
        if pair.one.run.name not in names:
            return "not significant"
        return "more in A" if difference.mean > 0 else "more in B"

    return [pair._replace(difference=text_col(pair)) for pair in pairs]


class Compare(Command):
    """Compare two folders of results: each technique's speedup in both.

    It says whether the two differ significantly, and what differs between the machines."""

    group = "results"
    def options(self, parser):
        for name in "AB":
            parser.add_argument(name, help="a folder of results with a ladder, or the name of one"
                                           " in results/reference")

    def answer(self, setup):
        names = setup.args.A, setup.args.B
        (one, rows), (other, others) = map(ladder_in, names)
        if one.options != other.options:
            ours, theirs = (" ".join(options) or "none" for options in (one.options, other.options))
            raise UserError(f"measured with different options: {ours}; {theirs}")
        there = {row.run.name: row for row in others}
        pairs = [Pair(row, there[row.run.name]) for row in rows if row.run.name in there]
        if not any(pair.why_not is None for pair in pairs):
            reasons = [f"{pair.one.label}: {pair.why_not}" for pair in pairs if pair.why_not]
            raise UserError("the two ladders have no technique in common" + (
                f" with the same one before it ({'; '.join(reasons)})" if reasons else ""))
        pairs = judged(pairs)
        return "\n".join([
            markdown(Table([
                Column("", lambda line: line[0], True), Column("A", lambda line: str(line[1])),
                Column("B", lambda line: str(line[2]))],
                [("folder", *names), *differences(one, other, pairs)])),
            markdown(Table([
                Column("technique", lambda pair: credited(pair.one, pair.one.label), True),
                num_col("published", "one.published_factor", ".2f"),
                num_col("A: ×", "one.factor", ".2f"),
                Column("95 %", lambda pair: INTERVAL.cell(pair.one)),
                num_col("B: ×", "other.factor", ".2f"),
                Column("95 %", lambda pair: INTERVAL.cell(pair.other)),
                text_col("difference", "difference")],
                pairs, "What each technique brings over the one before it:")),
            "The published figures (an A100) have no intervals, so nothing is known of their"
            " significance."])


def ladder_in(name: str) -> tuple:
    """Returns (measurement, rows) of the ladder in a folder. Raises UserError."""
    folder = Path(name) if Path(name).is_dir() else REFERENCE / name
    found = found_in(folder, "ladder") if folder.is_dir() else []
    if not found:
        known = ", ".join(path.parent.name for path in sorted(REFERENCE.glob("*/ladder.jsonl")))
        raise UserError(f"{name}: no ladder there; results/reference has those of {known}", 2)
    return found[-1]


def differences(one, other, pairs: list[Pair]) -> list[tuple]:
    """Returns lines of (what, A, B): all in which the two measurements differ, and how fast they
    are."""
    def facts(measured) -> dict[str, str]:
        machine = {name: f"{value:.1f}" if isinstance(value, float) else str(value)
                   for name, value in measured.machine.items()
                   if value is not None and not name.startswith("dtype")}
        return {"techniques from 5 on train in": trained_in(measured.machine)} | machine | {
            "measured at commit": (measured.commit or "")[:7],
            "text": measured.text or "the book", "SHA-256 of its tokens": (measured.data or "")[:8],
            "tokens per run": str(measured.plan.tokens)} | {
            f"matmuls in {name}, TFLOP/s": f"{rate / 1e12:.2f}"
            for name, rate in measured.peak.items()}

    ours, theirs, first = facts(one), facts(other), pairs[0]
    lines = [(name, ours.get(name, ""), theirs.get(name, "")) for name in ours | theirs
             if ours.get(name) != theirs.get(name)]
    return [*lines, ("rounds", *(row.rounds for row in first[:2])),
            (f"{first.one.label}, tok/sec", *(fmt(row.tok_per_sec, ",.0f") for row in first[:2]))]


# ---- For results/reference ----------------------------------------------------------------------

ROUNDS = {"stages": 2, "ladder": 3}  # that a table which others quote needs
MADE_BY = r"\bMade by `(.+?)`"
KEPT = ".jsonl", ".json", ".md", ".html", ".png"


class Pack(Command):
    """Copy complete results to results/reference/NAME, for a pull request.

    It checks page, journals and rounds before."""

    group = "results"
    def options(self, parser):
        parser.add_argument("name", metavar="NAME",
                            help="the machine, such as rtx-4090: small letters, digits and hyphens")

    def answer(self, setup):
        name, results = setup.args.name, setup.results
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
            raise UserError(f"{name!r} isn't a name like rtx-4090", 2)
        target = REFERENCE / name
        if target.exists():
            raise UserError(f"{relative(target)} exists: nothing is overwritten")
        with locked(results):
            try:
                missing = what_is_missing(results)
            except DAMAGE as error:
                raise UserError(f"{relative(results)} is damaged: {error!r}")
            if missing:
                raise UserError(f"{relative(results)} isn't complete: {'; '.join(missing)}")
            command = re.search(MADE_BY, page_of(results))[1]
            write_page(all_studies(), results, command, {})  # it may be older than the journals
            files = [path for path in sorted(results.iterdir())
                     if path.suffix in KEPT and path.is_file() and not path.is_symlink()
                     and not path.name.endswith(".trace.json")]
            REFERENCE.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=REFERENCE, prefix=".") as scratch:
                copy = Path(scratch, name)  # renamed when it is whole
                copy.mkdir()
                for path in files:
                    shutil.copyfile(path, copy / path.name)
                copy.rename(target)
        return (f"{len(files)} files in {relative(target)}\n"
                "Now write its README.md (docs/results.md says what it has to state), and run"
                " python measure.py readme")


def page_of(results) -> str:
    page = results / "report.md"
    return page.read_text(encoding="utf-8", errors="replace") if page.is_file() else ""


def what_is_missing(results) -> list[str]:
    """Returns what a page lacks before others may quote it, each with the command that gets it."""
    missing, look, text = [], read_look(results), page_of(results)
    if not look or not re.search(MADE_BY, text):
        return ["no report: make report"]
    if "\nNot finished: " in text:
        missing.append("the report isn't finished: make report continues it, or says why it can't")
    for study, rounds in ROUNDS.items():
        found = found_in(results, study)
        command = f"python measure.py {study} --resume --rounds {rounds}"
        if not found:
            missing.append(f"no {study}: {command}")
        for measured, rows in found:
            if failed := [row.label for row in rows if row.outcome and row.outcome.failed]:
                missing.append(f"{study}: {', '.join(failed)} failed")
            if few := [row.label for row in rows if not row.error and row.rounds < rounds]:
                missing.append(f"{study}: too few rounds of {', '.join(few)}: {command}")
            if measured.options:
                missing.append(f"{study}: measured with {' '.join(measured.options)}")
    return missing
