"""What was measured, for other programs."""

import csv
import importlib.util
import io
import re
from pathlib import Path

from bench.common import UserError, relative, write_whole
from bench.measure.journal import loose_records
from bench.measure.records import Record
from bench.report.tables import Table, found_in, picture_name, tables_of
from bench.studies import Study, all_studies

MARKS = re.compile(r"\*\*|`|\\(?=\*)")  # Markdown's, without the characters that they set


class Export(Study):
    """Writes every table of results/ as a CSV file, or the losses and the speed of every run for
    TensorBoard."""

    runs_scripts = of_this_machine = False
    in_report = ()

    def options(self, parser):
        parser.add_argument("--csv", type=Path, metavar="DIR",
                            help="a file for each table, thousands without commas")
        parser.add_argument("--tensorboard", type=Path, metavar="DIR",
                            help="a folder for each run (needs the package tensorboard)")

    def answer(self, setup):
        args, written = setup.args, []
        if not args.csv and not args.tensorboard:
            raise UserError("--csv DIR or --tensorboard DIR says what to write", 2)
        if not setup.results.is_dir():
            raise UserError(f"{setup.results} is not a folder")
        if args.tensorboard and not importlib.util.find_spec("tensorboard"):
            raise UserError("needs the package tensorboard: pip install -r requirements-extras.txt")
        if args.csv:
            tables = tables_in(setup.results)
            for name, table in tables.items():
                write_whole(args.csv / f"{name}.csv", csv_of(table))
            written.append(f"{len(tables)} tables in {relative(args.csv)}")
        if args.tensorboard:
            runs = runs_in(setup.results)
            for name, record in runs.items():
                write_events(record, args.tensorboard / name)
            written.append(f"{len(runs)} runs in {relative(args.tensorboard)}:"
                           f" tensorboard --logdir {args.tensorboard}")
        return "\n".join(written)


def tables_in(folder: Path) -> dict[str, Table]:
    """Every table of a page about the machine, by the name of its study, and a number where that
    has several."""
    tables = {}
    for study in all_studies().values():
        for measured, rows in found_in(folder, study.name):
            own = tables_of(study, measured, rows)
            name = picture_name(study.name, measured.kind)
            tables |= {name + f"-{number}" * (len(own) > 1): table
                       for number, table in enumerate(own, 1)}
    return tables


def csv_of(table: Table) -> str:
    """The table without Markdown, and with figures as programs read them: 12525, not 12,525."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    columns = [[column.heading, *(MARKS.sub("", column.cell(row)) for row in table.rows)]
               for column in table.columns]
    for line in zip(*(column for column in columns if any(column[1:])), strict=True):
        writer.writerow([re.sub(r"(?<=\d),(?=\d{3}\b)", "", cell) for cell in line])
    return file.getvalue()


def runs_in(folder: Path) -> dict[str, Record]:
    """Every run with a log line, by a name for its folder: those of scripts started by hand, and
    those of each study's journal with round and seed."""
    runs: dict[tuple[str, ...], Record] = {
        (Path(record.name).stem,): record for record in loose_records(folder)}
    for study in all_studies().values():
        for measured, _ in found_in(folder, study.name):
            runs |= {(picture_name(study.name, measured.kind), result.name,
                      f"round-{result.round}-seed-{result.seed}"): result.record
                     for result in measured.results if result.record}
    return {"/".join(re.sub(r"[^\w+=-]+", "-", part) for part in name): record
            for name, record in runs.items() if record.logs}


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
