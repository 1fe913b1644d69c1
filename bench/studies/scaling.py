"""Weak scaling: 02 with as many processes as asked, each with the same batch."""

from bench.analysis.rows import Row, ratio
from bench.catalogue import published
from bench.measure.plan import Plan
from bench.report.notes import machine_note
from bench.report.tables import GB, LOSS, RANGE, RUN, SPEED_OR_ERROR, spread
from bench.studies import Study
from bench.subcommands import positive
from gpt_speed.tables import Column, Table, fmt


def numbers(text: str) -> list[int]:
    """Returns the numbers in "1,2,4", in ascending order. Raises ValueError, ArgumentTypeError."""
    return sorted({positive(part) for part in text.split(",")})


def speed_per_process(row: Row) -> str:
    return fmt(ratio(row.tok_per_sec, row.run.processes), ",.0f")


def efficiency_of(row: Row) -> float | None:
    """Returns the speed of each process as a share of that of 01: the mean over the rounds; None
    where one of the two has no figures."""
    if row.baseline:
        return ratio(row.factor, row.run.processes)
    return 1.0 if row.speeds else None


def interval_of(row: Row) -> str:
    """Returns that in which the efficiency lies with a confidence of 95 %."""
    interval = row.speedup_over(row.baseline).interval or ()
    return spread([factor / row.run.processes for factor in interval], ".0%")


class Scaling(Study):
    """Run 02 with more and more processes, each with the same batch."""

    title = "How 02 scales over processes"
    position = 100
    report_options = ("1,2,4,8",)

    def options(self, parser):
        parser.add_argument(
            "sizes",
            nargs="?",
            default="1,2,4",
            type=numbers,
            metavar="1,2,4",
            help="how many processes (default: %(default)s)",
        )

    def plans(self, setup):
        """Yields 01, and 02 with each number of processes. On a CPU each process has as many cores
        at every size."""
        gpus, sizes = setup.machine["gpus"], setup.args.sizes
        most, unit = (gpus, "GPUs") if gpus else (setup.machine["threads"], "cores")
        largest = max((size for size in sizes if size <= most), default=1)
        cores = None if gpus else max(1, most // largest)  # of each process
        base = setup.scripts.stage("01").replace(published=None, facts=dict(cores=cores))
        ddp = setup.scripts.stage("02").replace(published=None, compared_to=base.name)
        runs = [base]
        for size in sizes:
            run = ddp.replace(
                name=f"{ddp.name}-{size}",
                label=f"02, {size} process{'es' if size > 1 else ''}",
                processes=size,
                facts=dict(cores=cores and cores * size),
                error=f"needs {size} {unit}" if size > most else None,
            )
            runs.append(run)
        yield Plan(runs, **self.length(setup))

    def cores(self, run):
        return run.facts["cores"]

    def tables(self, measured, rows):
        columns = [
            RUN,
            SPEED_OR_ERROR,
            RANGE,
            Column("per process", speed_per_process),
            Column("efficiency", lambda row: fmt(efficiency_of(row), ".1%")),
            Column("95 %", interval_of),
            GB._replace(heading="GB per process"),
            LOSS,
        ]
        return [Table(columns, rows)]

    def notes(self, measured, rows):
        one, many = (published()[stage] for stage in ("01", "02"))
        theirs = many.tok_per_sec / many.gpus / one.tok_per_sec
        return [
            machine_note(measured, rows),
            "Weak scaling: each process has the same batch, and on a CPU as many cores at every"
            " size. Efficiency is the speed of each process over that of 01: the mean of the"
            f" rounds' ratios, with its 95 % interval; published for {many.gpus} A100s:"
            f" {theirs:.0%}.",
        ]
