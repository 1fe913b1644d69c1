"""Weak scaling: 02 with as many processes as asked, each with the same batch."""

import argparse

from bench.analysis.rows import Row, ratio, speed_of
from bench.catalogue import published
from bench.common import UserError
from bench.measure.plan import Plan
from bench.report.notes import machine_note
from bench.report.tables import GB, LOSS, RANGE, RUN, SPEED_OR_ERROR, Column, Table, fmt, spread
from bench.studies import Study
from bench.subcommands import positive


def numbers(text: str) -> list[int]:
    """Returns the numbers in "1,2,4", each once, in ascending order. Raises UserError."""
    try:
        return sorted({positive(part) for part in text.split(",")})
    except (ValueError, argparse.ArgumentTypeError):
        raise UserError(f"{text!r} isn't a list of numbers like 1,2,4", 2)


def efficiency_of(row: Row) -> float | None:
    """Returns the speed of each process as a share of that of the first run, which is one process:
    the mean over the rounds."""
    factor = row.factor_baseline if row.baseline else 1.0
    return ratio(factor, row.run.processes) if row.speeds else None


def interval_of(row: Row) -> str:
    """Returns the 95 % interval of the efficiency."""
    effect = row.baseline and row.difference(speed_of, row.baseline)
    if not effect:
        return ""
    return spread([factor / row.run.processes for factor in effect.interval], ".0%")


class Scaling(Study):
    """Run 02 with more and more processes, each with the same batch."""

    title = "How 02 scales over processes"
    schedule = {100: None}
    in_report = ("1,2,4,8",)

    def options(self, parser):
        parser.add_argument("sizes", nargs="?", default="1,2,4", metavar="1,2,4",
                            help="how many processes (default: %(default)s)")

    def plans(self, setup):
        """01, and 02 with each number of processes, compared to 01. On a CPU each process has as
        many cores at every size."""
        machine = setup.machine
        there, unit = ((machine["gpus"], "GPUs") if machine["gpus"]
                       else (machine["threads"], "cores"))
        sizes = numbers(setup.args.sizes)
        fitting = [size for size in sizes if size <= there]
        share = None if machine["gpus"] else max(1, there // max([1, *fitting]))
        base = setup.scripts.stage("01").replace(published=None, cores=share)
        runs, ddp = [base], setup.scripts.stage("02").replace(published=None, compared_to=base.name)
        for size in sizes:
            runs.append(ddp.replace(
                name=f"{ddp.name}-{size}", label=f"02, {size} process{'es' if size > 1 else ''}",
                processes=size, cores=share and share * size,
                error=None if size in fitting else f"needs {size} {unit}"))
        yield Plan(runs, **self.length(setup))

    def tables(self, measured, rows):
        return [Table([
            RUN, SPEED_OR_ERROR, RANGE,
            Column("per process",
                   lambda row: fmt(ratio(row.tok_per_sec, row.run.processes), ",.0f")),
            Column("efficiency", lambda row: fmt(efficiency_of(row), ".1%")),
            Column("95 %", interval_of), GB._replace(heading="GB per process"), LOSS], rows)]

    def notes(self, measured, rows):
        one, many = (published().stages[stage] for stage in ("01", "02"))
        theirs = many.tok_per_sec / many.gpus / one.tok_per_sec
        return [machine_note(measured, rows),
                "Weak scaling: each process has the same batch, and on a CPU as many cores at every"
                " size. Efficiency is the speed of each process over that of 01: the mean of the"
                f" rounds' ratios, with its 95 % interval; published for {many.gpus} A100s:"
                f" {theirs:.0%}."]
