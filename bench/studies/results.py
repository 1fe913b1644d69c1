"""What is done with results: two folders side by side, every run for other programs, and a folder
for results/reference."""

import csv
import importlib.util
import io
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from bench.common import DAMAGE, REFERENCE, UserError, relative, trained_in, write_whole
from bench.judge.noise import significant, verdict
from bench.judge.rows import Row, speed_of
from bench.measure.journal import locked, loose_records
from bench.measure.records import Record
from bench.report.look import read_look
from bench.report.page import write_page
from bench.report.tables import (
    INTERVAL,
    Column,
    Table,
    cell,
    found_in,
    markdown,
    number,
    picture_name,
    words,
)
from bench.studies import Study, all_studies

# ---- Two folders side by side -------------------------------------------------------------------


class Pair(NamedTuple):
    """The same rung of both ladders."""

    one: Row
    other: Row
    difference: str = ""  # whether the technique brings more here or there

    @property
    def comparable(self) -> bool:
        """Whether both have factors, over the same rung."""
        return bool(self.one.factor and self.other.factor
                    and self.one.versus.run.name == self.other.versus.run.name)


def judged(pairs: list[Pair]) -> list[Pair]:
    """With their differences, by the rule of all verdicts."""
    found, told = {}, {}
    for pair in pairs:
        ours, theirs = (row.rows.differences(speed_of).get(row.run.name)
                        for row in (pair.one, pair.other))
        if pair.comparable:
            told[pair.one.run.name] = "not tested"
            if ours and theirs:
                found[pair.one.run.name] = ours.minus(theirs)
    levels = [row.rows.level for pair in pairs for row in (pair.one, pair.other)]
    sure = significant(found, min(levels, default=0))
    for name, each in found.items():
        told[name] = verdict(each, name in sure, "more in A", "more in B", "not significant")
    return [pair._replace(difference=told.get(pair.one.run.name, "")) for pair in pairs]


class Compare(Study):
    """Two folders of results side by side: what each technique brings in the one and in the other,
    whether the two differ significantly, and what differs between the machines."""

    runs_scripts = of_this_machine = False
    arguments = "A B"

    def options(self, parser):
        for name in "AB":
            parser.add_argument(name, help="a folder of results with a ladder, or the name of one"
                                           " in results/reference")

    def answer(self, setup):
        names = setup.args.A, setup.args.B
        (one, rows), (other, others) = map(ladder_in, names)
        if one.options != other.options:
            ours, theirs = (" ".join(each.options) or "none" for each in (one, other))
            raise UserError(f"measured with different options: {ours}; {theirs}")
        there = {row.run.name: row for row in others}
        pairs = [Pair(row, there[row.run.name]) for row in rows if row.run.name in there]
        if not any(pair.comparable for pair in pairs):
            raise UserError("the two ladders have no technique in common")
        pairs = judged(pairs)
        return "\n".join([
            markdown(Table([
                Column("", lambda line: line[0], True), Column("A", lambda line: str(line[1])),
                Column("B", lambda line: str(line[2]))],
                [("folder", *names), *differences(one, other, pairs)])),
            markdown(Table([
                words("technique", "one.label"), number("published", "one.published_factor", ".2f"),
                number("A: ×", "one.factor", ".2f"),
                Column("95 %", lambda pair: INTERVAL.cell(pair.one)),
                number("B: ×", "other.factor", ".2f"),
                Column("95 %", lambda pair: INTERVAL.cell(pair.other)),
                words("difference", "difference")],
                pairs, "What each technique brings over the one before it:")),
            "The published figures (an A100) have no intervals, so nothing is known of their"
            " significance."])


def ladder_in(name: str) -> tuple:
    """(measurement, rows) of the ladder in a folder. Raises UserError."""
    folder = Path(name) if Path(name).is_dir() else REFERENCE / name
    found = found_in(folder, "ladder") if folder.is_dir() else []
    if not found:
        known = ", ".join(path.parent.name for path in sorted(REFERENCE.glob("*/ladder.jsonl")))
        raise UserError(f"{name}: no ladder there; results/reference has those of {known}", 2)
    return found[-1]


def differences(one, other, pairs: list[Pair]) -> list[tuple]:
    """Lines of (what, A, B), of all in which the two measurements differ; and how fast they are."""
    def facts(measured) -> dict:
        return {"techniques from 5 on train in": trained_in(measured.machine)} | {
            name: value for name, value in measured.machine.items()
            if not name.startswith("dtype")} | {
            "measured at commit": (measured.commit or "")[:7],
            "text": measured.text or "the book", "SHA-256 of its tokens": (measured.data or "")[:8],
            "tokens per run": measured.plan.tokens}

    ours, theirs = facts(one), facts(other)
    lines: list[tuple] = [(name, ours.get(name), theirs.get(name)) for name in ours | theirs
                          if ours.get(name) != theirs.get(name)]
    lines += [(f"matmuls in {name}, TFLOP/s", *(
        f"{each.peak[name] / 1e12:.2f}" if name in each.peak else "" for each in (one, other)))
        for name in one.peak | other.peak]
    first = pairs[0]
    return [*lines, ("rounds", *(row.rounds for row in first[:2])),
            (f"{first.one.label}, tok/sec", *(cell(row.tok_per_sec, ",.0f") for row in first[:2]))]


# ---- For other programs -------------------------------------------------------------------------


class Export(Study):
    """Writes every run of results/ as a line of a CSV file, or its losses and its speed for
    TensorBoard."""

    runs_scripts = of_this_machine = False

    def options(self, parser):
        parser.add_argument("--csv", type=Path, metavar="FILE",
                            help="a line for each run: its settings, and what it reached")
        parser.add_argument("--tensorboard", type=Path, metavar="DIR",
                            help="a folder for each run (needs the package tensorboard)")

    def answer(self, setup):
        args, written = setup.args, []
        if not args.csv and not args.tensorboard:
            raise UserError("--csv FILE or --tensorboard DIR says what to write", 2)
        if not setup.results.is_dir():
            raise UserError(f"{setup.results} is not a folder")
        if args.tensorboard and not importlib.util.find_spec("tensorboard"):
            raise UserError("needs the package tensorboard: pip install -r requirements-extras.txt")
        try:
            runs = runs_in(setup.results)
            lines = [line_of(place, record) for place, record in runs]
        except DAMAGE as error:
            raise UserError(f"{relative(setup.results)} is damaged: {error!r}")
        if args.csv:
            file = io.StringIO()
            columns = {name: None for line in lines for name in line}
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)
            write_whole(args.csv, file.getvalue())
            written.append(f"{len(lines)} runs in {relative(args.csv)}")
        if args.tensorboard:
            logged = [run for run in runs if run[1].logs]
            for place, record in logged:
                write_events(record, args.tensorboard / "/".join(
                    re.sub(r"[^\w+=-]+", "-", part) for part in place if part))
            written.append(f"{len(logged)} runs in {relative(args.tensorboard)}:"
                           f" tensorboard --logdir {args.tensorboard}")
        return "\n".join(written)


def runs_in(folder: Path) -> list[tuple[tuple[str, str, str], Record]]:
    """Every complete run and its place: its study, its name, and its round and seed; of a script
    that was started by hand, its name alone."""
    runs = [(("", Path(record.name).stem, ""), record) for record in loose_records(folder)]
    for study in all_studies().values():
        for measured, _ in found_in(folder, study.name):
            runs += [((picture_name(study.name, measured.kind), result.name,
                       f"round-{result.round}-seed-{result.seed}"), result.record)
                     for result in measured.results if result.record]
    return runs


def line_of(place: tuple[str, str, str], record: Record) -> dict:
    """Of the CSV file: where a run stands, its settings, how it ended, and what it reached."""
    names = "tok_per_sec", "val_loss", "lowest_val_loss", "first_step_seconds", "mfu"
    return (dict(zip(("study", "run", "round"), place, strict=True)) | record.config | record.end
            | {name: getattr(record, name) for name in names}
            | (dict(tokens=record.curve[-1].tokens, train_seconds=record.curve[-1].seconds)
               if record.curve else {}))


def write_events(record: Record, folder: Path) -> None:
    """Losses and tok/sec by training tokens; TensorBoard's relative time is seconds of training."""
    from torch.utils.tensorboard import SummaryWriter

    for old in folder.glob("events.out.tfevents.*"):  # it would show each point twice
        old.unlink()
    with SummaryWriter(str(folder)) as writer:
        for log, point in zip(record.logs, record.curve, strict=True):
            figures = {"loss/train": point.train_loss, "loss/validation": point.val_loss,
                       "tok per sec": log.get("step_tok_per_sec")}
            for tag, value in figures.items():
                if value is not None:
                    writer.add_scalar(tag, value, point.tokens, point.seconds)


# ---- For results/reference ----------------------------------------------------------------------

ROUNDS = {"stages": 2, "ladder": 3}  # that a table which others quote needs
MADE_BY = r"\nMade by `(.+?)`"
KEPT = ".jsonl", ".json", ".md", ".html", ".png"


class Pack(Study):
    """Checks that results/ is complete (page, journals, rounds, a quiet machine), and copies it to
    results/reference/NAME, for a pull request."""

    runs_scripts = of_this_machine = False
    arguments = "NAME"

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
            copy = target.with_name(f".{name}.tmp")  # renamed when it is whole
            shutil.rmtree(copy, ignore_errors=True)
            copy.mkdir(parents=True)
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
    """Of what a page needs before others may quote it, each with the command that gets it."""
    missing = []
    look, text = read_look(results), page_of(results)
    if not look or not text:
        return ["no report: make report"]
    if "\nNot finished: " in text:
        missing.append("the report isn't finished: make report continues it, or says why it can't")
    if not re.search(MADE_BY, text):
        missing.append("the page doesn't name its command: make report")
    for study, rounds in ROUNDS.items():
        found = found_in(results, study)
        command = f"python measure.py {study} --resume --rounds {rounds}"
        if not found:
            missing.append(f"no {study}: {command}")
        for measured, rows in found:
            failed = [row.label for row in rows if row.outcome and row.outcome.failed]
            few = [row.label for row in rows if not row.error and row.rounds < rounds]
            missing += [f"{study}: {text}" for wrong, text in (
                (failed, f"{', '.join(failed)} failed"),
                (few, f"too few rounds of {', '.join(few)}: {command}"),
                (any(result.record and not result.matmul_rate for result in measured.results),
                 "runs without the machine's rate: measure again"),
                (measured.options, f"measured with {' '.join(measured.options)}"),
                (measured.machine["torch"] != look["machine"]["torch"],
                 "measured with another PyTorch than the page names")) if wrong]
    return missing
