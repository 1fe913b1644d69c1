"""What a study is: its runs, how they are measured, and how their results are shown.

Each file in bench/studies/ holds one. By being there it is a subcommand of measure.py, a part of
the report, a picture of plot_results.py, and a table that a marker in a Markdown page asks for.
"""

import argparse
import importlib
import pkgutil
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # it imports this module
    from bench.catalogue import Scripts

SEED = 123
EPOCHS = 15  # of the published experiment
# Losses are compared after this many training tokens per process; 393,216 are one epoch of the full
# experiment at batch size 32.
TOKENS = {"cuda": 393_216, "cpu": 16_384}
SCRATCH = "{scratch}"  # in a run's options: a new folder, removed after the run
SECONDS = {"cuda": 10.0, "cpu": 0.0}  # a run trains about that long, if the tokens take less


@dataclass(frozen=True)
class Run:
    """A script with its options; each round of a study runs it once.

    Code decides by `tags` (batch, model, variant, mode ...); the label is for readers.
    """

    name: str  # unique in its study, and the stage's name in the record
    label: str  # in tables and pictures, such as "5 bfloat16"
    technique: str = ""
    script: str | Path = ""  # its name in the catalogue of scripts, or where it lies
    loss: str | None = None  # expected effect on the loss: unchanged, rounding or changes
    published: float | None = None  # tok/sec on as many of the published A100s
    expected: float | None = None  # about how many tok/sec such A100s would make, published or not
    processes: int = 1
    torchrun: bool = False  # whether torchrun starts it
    options: tuple[str, ...] = ()  # beside those of the plan
    tags: dict = field(default_factory=dict)
    compared_to: str | None = None  # the name of an earlier run
    error: str | None = None  # why it can't run
    after: str | None = None  # an earlier, smaller run: this one isn't tried unless that fits
    growth: float = 1  # about how many times the memory of that one it takes
    cores: int | None = None  # of a CPU that it may use (None: all)

    def but(self, tags: dict | None = None, **changes) -> "Run":
        """A copy with changes; `tags` come to those that it has, None takes one away."""
        merged = {name: value for name, value in (self.tags | (tags or {})).items()
                  if value is not None}
        return replace(self, tags=merged, **changes)


@dataclass
class Plan:
    """Runs that are compared, and how each of them runs. The first one is the baseline."""

    runs: list[Run]
    kind: str = ""  # what sets it apart from other plans of its study, such as "gpt2-medium"
    rounds: int | None = None  # (None: as many as the study has)
    tokens: int | None = None  # per process: where losses are compared (None: at a run's end)
    seconds: float = 0  # of training, if the tokens take less
    options: list[str] = field(default_factory=list)  # for every script
    seed_noise: bool = False  # whether each round also runs the baseline with another seed
    whole: bool = False  # every run is as long as its script by itself, or has `tokens` in all
    epochs: int | None = None  # of such a run (None: the script's own)
    within: float | None = None  # seconds that all runs may take, by fewer epochs, on a GPU
    cold_rounds: int = 1  # that compile anew, so that their first step tells how long it takes
    first_seed: int = SEED
    new_seeds: bool = False  # round k has the seed first_seed + k - 1; else all have first_seed
    log_tokens: int | None = None  # from one log line to the next (None: lines where they matter)
    targets: dict[str, float] = field(default_factory=dict)  # validation losses; the lowest ends
    #                                                          a run, which then has to be `whole`
    min_steps: int = 1  # of every run, if its tokens are fewer
    until_full: bool = False  # that a run doesn't fit is no failure
    memory_limit_gb: float | None = None  # runs that by their growth would take more aren't tried
    batches: dict[str, int] = field(default_factory=dict)  # in place of these batch sizes, to fit

    def seed_of(self, number: int) -> int:
        """The seed of all runs in round `number`, which counts from 1."""
        return self.first_seed + (number - 1) * self.new_seeds

    @property
    def loss_tokens(self) -> int | None:
        """The tokens after which losses are compared; None: at the end of a run."""
        return None if self.targets else self.tokens

    def as_json(self) -> dict:
        """For a journal: everything but the scripts themselves, of which it has the names."""
        plan = {each.name: getattr(self, each.name) for each in fields(self)}
        empty = Run("", "")
        plan["runs"] = [
            {each.name: value for each in fields(run)
             if (value := getattr(run, each.name)) != getattr(empty, each.name)}
            for run in self.runs]
        for run in plan["runs"]:
            if isinstance(run.get("script"), Path):
                run["script"] = run["script"].name
        return plan

    @classmethod
    def from_json(cls, plan: dict) -> "Plan":
        """Raises TypeError or LookupError for something else."""
        runs = [Run(**run | dict(options=tuple(run.get("options", ())))) for run in plan["runs"]]
        return cls(**plan | dict(runs=runs))


@dataclass
class Setup:
    """Where and how a study is measured."""

    machine: dict  # see bench.measure.machine.this_machine
    scripts: "Scripts"
    data: Path
    results: Path
    args: argparse.Namespace  # the study's own options
    options: list[str] = field(default_factory=list)  # for every script
    matmul_peak: dict | None = None  # floating-point operations per second, where they are known
    minutes: float | None = None  # within a report, those that the report may take
    batches: dict[str, int] | None = None  # see bench.measure.lengths.fitting; None: not looked at yet
    halved: bool = False  # whether memory ran out, so that these are half as large

    @property
    def device(self) -> str:
        return self.machine["device"]


class Column(NamedTuple):
    """`cell` gives a row's text; "" where there is nothing to show."""

    heading: str
    cell: Callable[..., str]  # of a row: a bench.judge.rows.Row, or what else the table is of
    left: bool = False  # set to the left, as text is


class Table(NamedTuple):
    columns: list[Column]
    rows: list
    caption: str = ""
    missing: str = ""  # what stands in an empty cell
    every_column: bool = False  # also those without a figure


class Study:
    """One measurement. The first paragraph of its docstring is its help text."""

    title = ""  # its heading on a machine's page
    # At which places of a report it is measured, and for how many rounds (None: as many as it has);
    # 0 rounds: it is only shown. Without a place it isn't part of a report.
    schedule: dict[int, int | None] = {}
    in_report: tuple[str, ...] = ("",)  # the command lines by which a report measures it
    rounds: dict[str, int] = {"cuda": 4, "cpu": 4}
    tokens: dict[str, int] | None = TOKENS  # None: whole scripts
    seconds: dict[str, float] | None = SECONDS  # None: no such option
    # Of --max-tokens ("": no such option) and --rounds, with their defaults filled in.
    max_tokens_help = ("training tokens, per process, after which losses are compared (default:"
                       " {cuda:,} on a GPU, {cpu:,} on a CPU)")
    arguments = ""  # of its command line, those that are no options
    environment: dict[str, str] = {}  # of its runs
    runs_scripts = True  # else it has an `answer` instead of plans
    of_this_machine = True  # else it isn't told what this machine is
    failures_count = True  # whether a run that fails makes the command fail
    rounds_help = "how often each script runs (default: {}; a verdict needs 4)"

    @property
    def name(self) -> str:
        return type(self).__module__.rpartition(".")[2].replace("_", "-")

    @property
    def help(self) -> str:
        return " ".join(type(self).__doc__.split("\n\n")[0].split()).rstrip(".")

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Adds the study's own command-line options."""

    def plans(self, setup: Setup) -> Generator[Plan, list, None]:
        """What to measure. A plan that was measured gives its rows back, on which the next one may
        depend. Raises UserError, StackError."""
        raise NotImplementedError

    def answer(self, setup: Setup) -> str:
        """What a study that runs no scripts prints. Raises as `plans`."""
        raise NotImplementedError

    def length(self, setup: Setup) -> dict:
        """How long a run trains, by the options and the device, as fields of Plan."""
        return dict(tokens=setup.args.max_tokens or self.tokens[setup.device],
                    seconds=self.seconds[setup.device] if setup.args.seconds is None
                    else setup.args.seconds)

    def collect(self, setup: Setup, folder: Path) -> None:
        """Takes what a run has left in `folder` beside its record. Raises ValueError where it
        isn't there."""

    def tables(self, measured, rows: list) -> list[Table] | None:
        """What a report shows of a plan that was measured; None: bench.report.tables.full_table."""

    def notes(self, measured, rows: list) -> list[str] | None:
        """Paragraphs below its tables; None: bench.report.tables.full_notes."""

    def excerpts(self, measured, rows: list) -> dict[str, list[Table]] | None:
        """The tables that a marker `<!-- NAME: ... -->` in a page asks for, by NAME; None: those of
        `tables`, or else bench.report.tables.short_table, by the study's name and the kind."""

    def fixed(self) -> dict[str, str]:
        """The tables, as text, that need no measurement, by the NAME of their marker."""
        return {}

    def extra(self, folder: Path, found: list[tuple]) -> str:
        """What a page shows beside the tables, from the folder of the results; `found` are
        (measurement, rows), the newest of each kind."""
        return ""

    def draw(self, measured, rows: list):
        """The picture of a plan that was measured, a matplotlib figure; None without one."""

    def pictures(self, folder: Path, found: list[tuple]) -> dict:
        """All its pictures: {name: figure}."""
        drawn = {picture_name(self.name, each.kind): self.draw(each, rows) for each, rows in found}
        return {name: figure for name, figure in drawn.items() if figure}

    def summary(self, folder: Path) -> str:
        """A table for plot_results.py to print and keep."""
        return ""

    def result(self, measured, rows: list) -> str:
        """What measure.py prints below the tables."""
        return ""


def same_machine(one: dict, other: dict) -> bool:
    """Whether figures of the one stand for the other; the rest may differ, as between hosts."""
    return trained_in(one) == trained_in(other) and all(
        one.get(name) == other.get(name) for name in ("name", "device", "gpus", "torch"))


def trained_in(machine: dict) -> str:
    """The type that the optimized scripts train in there: "bfloat16" or "float32". The machines of
    older journals, which don't tell, had bfloat16 units."""
    return machine.get("dtype", "bfloat16")


def picture_name(study: str, kind: str) -> str:
    return f"{study}-{kind}" if kind else study


def all_studies() -> dict[str, Study]:
    """Every study by its name, in the order of a report, the others behind."""
    from bench import studies

    found = []
    for module in pkgutil.iter_modules(studies.__path__):
        loaded = vars(importlib.import_module(f"bench.studies.{module.name}"))
        found += [kind() for kind in loaded.values()
                  if isinstance(kind, type) and issubclass(kind, Study)
                  and kind.__module__ == f"bench.studies.{module.name}"]
    found.sort(key=lambda study: (min(study.schedule, default=1000), study.name))
    return {study.name: study for study in found}
