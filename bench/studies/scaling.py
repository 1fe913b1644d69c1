"""Weak scaling: 02 with as many processes as asked, each with the same batch."""

from argparse import ArgumentParser

from bench.analysis.rows import Row, Rows
from bench.analysis.values import ratio
from bench.catalogue import Run, published
from bench.machine import Machine
from bench.measure.plan import Plan, Setup
from bench.report.notes import machine_note
from bench.report.tables import GB, LOSS, RANGE, RUN, SPEED_OR_ERROR, spread
from bench.studies import Plans, Study
from bench.subcommands import positive
from gpt_speed.common import counted
from gpt_speed.tables import Column, Table, fmt


def numbers(text: str) -> list[int]:
    """Returns the numbers in "1,2,4", in ascending order. Raises ValueError, ArgumentTypeError."""
    return sorted({positive(part) for part in text.split(",")})


def speed_per_process(row: Row) -> str:
    return fmt(ratio(row.tok_per_sec, row.run.processes), ",.0f")


def efficiency_of(row: Row) -> float | None:
    """Returns the speed of each process as a share of that of 01: the mean over the rounds. Returns
    None where it or that of 01 isn't known."""
    if not row.speeds:
        return None
    if row.run.compared_to is None:  # 01 itself
        return 1.0
    return ratio(row.factor, row.run.processes)


def efficiency_text(row: Row) -> str:
    return fmt(efficiency_of(row), ".1%")


def efficiency_interval(row: Row) -> str:
    """Returns the efficiency's 95% confidence interval."""
    interval = row.speedup_over(row.baseline).interval or ()
    return spread([factor / row.run.processes for factor in interval], ".0%")


def with_processes(size: int, ddp: Run, machine: Machine) -> Run:
    """Returns 02 with so many processes, with an error where the machine is too small."""
    available, unit = machine["threads"], "cores"
    if machine["gpus"]:
        available, unit = machine["gpus"], "GPUs"
    run = ddp.replace(
        name=f"{ddp.name}-{size}",
        label=f"02, {counted(size, 'process', 'es')}",
        processes=size,
    )
    if size > available:
        return run.replace(error=f"needs {size} {unit}")
    return run


def cores_of_each(sizes: list[int], machine: Machine) -> int | None:
    """Returns how many cores of a CPU each process has at every size: its share at the largest size
    that has a core for each. On GPUs None: all processes may use all cores."""
    if machine["gpus"]:
        return None
    threads = machine["threads"]
    most_processes = max((size for size in sizes if size <= threads), default=1)
    return max(1, threads // most_processes)


def with_cores(run: Run, of_each: int | None) -> Run:
    """Returns a run with the number of cores that all of its processes have."""
    if of_each is None:
        return run.replace(facts=dict(cores=None))
    return run.replace(facts=dict(cores=of_each * run.processes))


class Scaling(Study):
    """Run 02 with more and more processes, each with the same batch."""

    title = "How 02 scales over processes"
    position = 100
    report_options = ("1,2,4,8",)

    def options(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "sizes",
            nargs="?",
            default="1,2,4",
            type=numbers,
            metavar="1,2,4",
            help="how many processes (default: %(default)s)",
        )

    def plans(self, setup: Setup) -> Plans:
        """Yields 01, and 02 with each number of processes. On a CPU each process has as many cores
        at every size."""
        base = setup.scripts.stage("01").replace(published=None)
        ddp = setup.scripts.stage("02").replace(published=None, compared_to=base.name)
        machine, sizes = setup.machine, setup.args.sizes
        runs = [base, *(with_processes(size, ddp, machine) for size in sizes)]
        runs = [with_cores(run, cores_of_each(sizes, machine)) for run in runs]
        yield Plan(runs, length=self.length(setup))

    def cores(self, run: Run) -> int | None:
        return run.facts["cores"]

    def tables(self, rows: Rows) -> list[Table]:
        columns = [
            RUN,
            SPEED_OR_ERROR,
            RANGE,
            Column("per process", speed_per_process),
            Column("efficiency", efficiency_text),
            Column("95%", efficiency_interval),
            GB._replace(heading="GB per process"),
            LOSS,
        ]
        return [Table(columns, rows)]

    def notes(self, rows: Rows) -> list[str]:
        one, many = (published()[stage] for stage in ("01", "02"))
        published_efficiency = many.tok_per_sec / many.gpus / one.tok_per_sec
        return [
            machine_note(rows),
            "Weak scaling: each process has the same batch, and on a CPU as many cores at every"
            " size. Efficiency is the speed of each process over that of 01: the mean of the"
            f" rounds' ratios, with its 95% interval; published for {many.gpus} A100s:"
            f" {published_efficiency:.0%}.",
        ]
