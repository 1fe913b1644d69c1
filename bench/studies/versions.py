"""00 and 01 in several environments, each with a PyTorch and a Python of its own."""

import os
import re
import shutil
from argparse import ArgumentParser
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations
from pathlib import Path

from bench import processes
from bench.analysis.folders import newest_in
from bench.analysis.gradients import verdict_of
from bench.analysis.rows import Row, Rows
from bench.catalogue import Run
from bench.machine import release
from bench.measure.measurement import Measurement
from bench.measure.plan import Plan, Setup, WholeScript
from bench.measure.records import Record
from bench.report.notes import machine_note, speedup_note
from bench.report.pictures import Bar, draw_bars, place_of, rows_of_panels, script_colour
from bench.report.tables import (
    GB,
    INTERVAL,
    LOSS,
    RANGE,
    RUN,
    SPEED_OR_ERROR,
    factor_text,
    speed_and_factor,
)
from bench.studies import Plans, Study
from bench.studies.gradients import Gradients, as_checked
from gpt_speed.common import UserError
from gpt_speed.tables import Column, Table, fmt, num_col, text_col

CHECK = "gradients"  # the kind of the plan that comes before the one of the speeds
CHECKS = Gradients()  # the study whose runs that plan has
PLACES = {"nt": "Scripts/python.exe"}  # of an environment's Python, where it isn't bin/python
OLDEST_TORCH = 2, 5  # that has all of what the check of gradients needs


@dataclass(frozen=True)
class Environment:
    """A Python, and the PyTorch that it imports."""

    python: Path
    torch: str
    version: str  # of the Python
    device: str  # "cuda" or "cpu"

    @property
    def label(self) -> str:
        return f"PyTorch {self.torch}, Python {self.version}"

    @property
    def name(self) -> str:
        """The label, as a part of a file's name."""
        return re.sub(r"[^\w.]+", "-", self.label).lower()

    def run(self, run: Run) -> Run:
        """Returns the run of a script in this environment."""
        return run.replace(
            name=f"{run.name}-{self.name}",
            label=f"{run.label}, {self.label}",
            published=None,
            python=self.python,
            facts=run.facts | dict(torch=self.torch, python=self.version),
        )


class Versions(Study):
    """Train 00 and 01 in several environments, to compare their PyTorch.

    The gradients of 01 are checked in each of them first. Each needs requirements.txt but for
    its versions, and Python 3.11 or newer."""

    title = "PyTorch by version"
    position = 150
    report_options = ()  # it needs environments, and is only shown

    def options(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--python",
            metavar="ENV",
            action="append",
            required=True,
            help="an environment: its folder, or its Python; repeat it for each one",
        )

    def plans(self, setup: Setup) -> Plans:
        environments = environments_of(setup.args.python, setup.device)
        yield check_plan(setup, environments)
        yield training_plan(self, setup, environments)

    def later(self, setup: Setup, plan: Plan) -> list[Plan]:
        if plan.kind != CHECK:
            return []
        environments = environments_of(setup.args.python, setup.device)
        return [training_plan(self, setup, environments)]

    def driver(self, setup: Setup, run: Run) -> list:
        if is_check(run):
            return CHECKS.driver(setup, run)
        return []

    def imports(self, run: Run) -> list[Path]:
        if is_check(run):
            return CHECKS.imports(run)
        return []

    def cores(self, run: Run) -> int | None:
        return run.facts.get("cores")

    def summary(self, record: Record, plan: Plan) -> str:
        if plan.kind == CHECK:
            return CHECKS.summary(record, plan)
        return super().summary(record, plan)

    def has_failed(self, measured: Measurement) -> bool:
        if measured.kind == CHECK:
            return CHECKS.has_failed(measured)
        return super().has_failed(measured)

    def tables(self, rows: Rows) -> list[Table]:
        if rows.measured.kind == CHECK:
            return CHECKS.tables(rows)
        columns = [
            RUN,
            text_col("type", "record.precision"),
            SPEED_OR_ERROR,
            RANGE,
            Column("speedup", factor_text),
            INTERVAL,
            num_col("first step s", "record.first_step_seconds", ".1f"),
            num_col("again", "warm_first_step_seconds", ".1f"),
            GB,
            LOSS,
            Column("gradients", partial(verdict_cell, verdicts_in(rows.measured.folder)), True),
        ]
        return [Table(columns, rows)]

    def notes(self, rows: Rows) -> list[str]:
        if rows.measured.kind == CHECK:
            return [machine_note(rows)]
        speedups = speedup_note(rows, "over the same script in the first environment")
        return [
            machine_note(rows),
            f"{speedups} *First step*: cold, with all to compile; *again*: the median of the rounds"
            " that found it compiled. *Gradients*: those of 01, by the check above.",
        ]

    def picture(self, rows: Rows):
        """Draws the speed, and the seconds of the first step: again, and cold behind it."""
        if rows.measured.kind == CHECK or not any(row.speeds for row in rows[1:]):
            return None
        figure, [(_, speed, first_step)] = rows_of_panels(
            [f"Speed and first step by version of PyTorch: {place_of(rows.measured)}"],
            [1.6 + 0.5 * len(rows)],
            [3, 2],
        )
        draw_bars(speed, [speed_bar(row) for row in rows])
        draw_bars(first_step, [first_step_bar(row) for row in rows])
        speed.set_xlabel("tokens per second")
        first_step.set_xlabel("seconds of the first step; hatched: cold")
        return figure


def check_plan(setup: Setup, environments: list[Environment]) -> Plan:
    """Returns the plan that checks the gradients of 01 in each environment. Raises StackError."""
    checked = as_checked(setup.scripts.stage("01"))
    cores = None
    if setup.device == "cpu":  # whose threads would wait for each other in so small a model
        cores = 1
    checked = checked.replace(name=check_name(checked), facts=dict(cores=cores, is_check=True))
    runs = [environment.run(checked) for environment in environments]
    return Plan(runs, CHECK, WholeScript(), rounds=1)


def training_plan(study: Study, setup: Setup, environments: list[Environment]) -> Plan:
    """Returns the plan of 00 and 01 in every environment, each compared to itself in the first
    one. Raises StackError."""
    runs = []
    for stage in ("00", "01"):
        script = setup.scripts.stage(stage)
        first, *others = [environment.run(script) for environment in environments]
        runs += [first, *(run.replace(compared_to=first.name) for run in others)]
    return Plan(runs, length=study.length(setup))


def check_name(run: Run) -> str:
    """Returns what the check of a run's gradients is called."""
    return f"{CHECK}-{run.name}"


def is_check(run: Run) -> bool:
    return "is_check" in run.facts


def verdicts_in(folder: Path) -> dict[str, str]:
    """Returns what the newest check in a folder came to, by the names of its runs."""
    checked = [rows for rows in newest_in(folder, "versions") if rows.measured.kind == CHECK]
    return {row.run.name: verdict_text(row) for rows in checked for row in rows}


def verdict_text(row: Row) -> str:
    """Returns what the gradients of a checked run came to, or why that isn't known."""
    if row.error or not row.record:
        return row.error or ""
    return verdict_of(row.record).text


def verdict_cell(verdicts: dict[str, str], row: Row) -> str:
    """Returns what the gradients of a run that trains came to; "" where they weren't checked."""
    return verdicts.get(check_name(row.run), "")


def speed_bar(row: Row) -> Bar:
    text = row.error or speed_and_factor(row.tok_per_sec, factor_text(row))
    label = row.label.replace(", ", "\n", 1)
    return Bar(label, row.tok_per_sec, text, script_colour(row.run), row.speeds)


def first_step_bar(row: Row) -> Bar:
    again, cold = row.warm_first_step_seconds, None
    if row.record:
        cold = row.record.first_step_seconds
    text = " / ".join(fmt(seconds, ".1f") for seconds in (again, cold) if seconds is not None)
    return Bar("", again, text, script_colour(row.run), behind=cold)


def environments_of(names: list[str], device: str) -> list[Environment]:
    """Returns the environments that were named, which train on a device. Raises UserError for one
    that can't, and for one that is named twice."""
    environments = [environment_of(name) for name in names]
    for name, environment in zip(names, environments, strict=True):
        if environment.device != device:
            raise UserError(
                f"--python {name}: {environment.label} trains on {environment.device}, not on"
                f" {device}",
                2,
            )
    for one, other in combinations(environments, 2):
        if one.label == other.label:
            raise UserError(f"--python: two environments have {one.label}: name one of them", 2)
    return environments


@cache
def environment_of(name: str) -> Environment:
    """Returns the environment that a folder or a Python is of. Raises UserError where the scripts
    can't train there."""
    python = python_of(name)
    try:
        machine = processes.ask_machine("this_machine", python)
    except UserError as reason:
        raise UserError(f"--python {name}: {reason}", 2)
    except (OSError, LookupError, ValueError):
        raise UserError(f"--python {name}: {python} is no Python", 2)
    torch = machine["torch"]
    if release(torch) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise UserError(f"--python {name}: has PyTorch {torch}: it takes {oldest} or newer", 2)
    return Environment(python, torch, machine["python"], machine["device"])


def python_of(name: str) -> Path:
    """Returns the Python of a folder, or that is meant by a path or a command. It isn't resolved,
    since an environment's Python is a link. Raises UserError where there is none."""
    path: str | Path = name
    if Path(name).is_dir():
        path = Path(name) / PLACES.get(os.name, "bin/python")
    python = shutil.which(path)
    if not python:
        raise UserError(f"--python {name}: there is no Python", 2)
    return Path(python).absolute()
