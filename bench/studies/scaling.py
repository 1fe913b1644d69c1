"""Weak scaling: 02 with as many processes as asked, each with the same batch."""

from argparse import ArgumentTypeError

from bench.analysis.rows import Row, ratio, speed_of
from bench.catalogue import published
from bench.common import UserError
from bench.measure.plan import Plan
from bench.report.notes import machine_note
from bench.report.pictures import OWN, place_of, rows_of_panels
from bench.report.tables import GB, LOSS, RANGE, RUN, SPEED_OR_ERROR, Column, Table, cell, spread
from bench.studies import Study, positive


def numbers(text: str) -> list[int]:
    """Returns the numbers in "1,2,4", each once, in ascending order. Raises UserError."""
    try:
        return sorted({positive(part) for part in text.split(",")})
    except (ValueError, ArgumentTypeError):
        raise UserError(f"{text!r} isn't a list of numbers like 1,2,4", 2)


def efficiency_of(row: Row) -> float | None:
    """Returns the speed of each process as a share of that of the first run, which is one process:
    the mean over the rounds."""
    factor = row.factor_baseline if row.baseline else 1.0
    return ratio(factor, row.run.processes) if row.speeds else None


def published_efficiency() -> tuple[int, float]:
    """Returns (GPUs, efficiency) of the published 02 on A100s. Raises UserError, StackError."""
    one, many = (published().stages[stage] for stage in ("01", "02"))
    return many.gpus, many.tok_per_sec / many.gpus / one.tok_per_sec


def interval_of(row: Row) -> str:
    """Returns that in which the efficiency lies with a confidence of 95 %."""
    effect = row.baseline and row.difference(speed_of, row.baseline)
    if not effect:
        return ""
    return spread([factor / row.run.processes for factor in effect.interval], ".0%")


class Scaling(Study):
    """02 with more and more processes, each with the same batch."""

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
        there, unit = ((machine["gpus"], "GPUs") if machine["gpus"] else
                       (machine["threads"], "cores"))
        sizes = numbers(setup.args.sizes)
        fitting = [size for size in sizes if size <= there]
        share = None if machine["gpus"] else max(1, there // max([1, *fitting]))
        base = setup.scripts.stage("01").but(published=None, cores=share)
        runs, ddp = [base], setup.scripts.stage("02").but(published=None, compared_to=base.name)
        for size in sizes:
            runs.append(ddp.but(
                name=f"{ddp.name}-{size}", label=f"02, {size} process{'es' if size > 1 else ''}",
                processes=size, cores=share and share * size,
                error=None if size in fitting else f"needs {size} {unit}"))
        yield Plan(runs, **self.length(setup))

    def tables(self, measured, rows):
        return [Table([
            RUN, SPEED_OR_ERROR, RANGE,
            Column("per process",
                   lambda row: cell(ratio(row.tok_per_sec, row.run.processes), ",.0f")),
            Column("efficiency", lambda row: cell(efficiency_of(row), ".1%")),
            Column("95 %", interval_of), GB._replace(heading="GB per process"), LOSS], rows)]

    def notes(self, measured, rows):
        machine = measured.machine
        most = max(row.run.processes for row in rows if not row.run.error)
        shares = "" if machine["gpus"] else (
            f" Each process has {machine['threads'] // most} of the {machine['threads']} cores at"
            " every size.")
        return [machine_note(measured, rows) + shares,
                 "Weak scaling: each process has the same batch. Efficiency is the speed of each"
                 " process over that of 01: the mean of the rounds' ratios, with its 95 %"
                 " interval."]

    def draw(self, measured, rows):
        """Draws efficiency over processes: this machine's, and that of the published A100s."""
        sizes = {}  # the first row of each number of processes
        for row in rows[1:]:
            if row.tok_per_sec:
                sizes.setdefault(row.run.processes, row)
        if not sizes or not rows[0].tok_per_sec:
            return None
        most = sizes[max(sizes)]
        figure, [(subfigure, axes)] = rows_of_panels(
            [f"{most.label}: {efficiency_of(most):.0%} efficient (weak scaling)"
             f"\n{place_of(measured)}"], [4.1], [1])
        axes.axhline(100, color="0.5", linewidth=1, linestyle="--", label="ideal")
        axes.plot(list(sizes), [100 * efficiency_of(row) for row in sizes.values()], "o-",
                  color=OWN, linewidth=2, label="this machine")
        gpus, efficiency = published_efficiency()
        axes.plot([gpus], [100 * efficiency], "s", color="0.5", markersize=8,
                  label=f"{gpus} × A100, the published 02 (timed with its evaluation)")
        axes.set(xlabel="processes", ylabel="efficiency, %", ylim=(0, 112))
        axes.set_xscale("log", base=2)
        ticks = sorted({1, gpus, *sizes})
        axes.set_xticks(ticks, ticks)
        subfigure.legend(loc="outside lower center", ncols=2, frameon=False)
        return figure
