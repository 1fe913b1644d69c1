"""The three scripts side by side, whether they were started by hand or by measure.py."""

from argparse import ArgumentParser

from bench.analysis.rows import Rows
from bench.catalogue import EPOCHS, STAGES, Run, chained
from bench.common import ROOT
from bench.machine import in_float16
from bench.measure.plan import Plan, Setup
from bench.predict.batches import batches_that_fit
from bench.report.notes import full_notes
from bench.report.scripts import draw_scripts, latest_runs, scripts_table
from bench.studies import Plans, Study
from bench.subcommands import positive
from gpt_speed.common import counted
from gpt_speed.tables import Table

EPOCHS_IN_REPORT = 1  # of each run on a GPU: a slow one has no more in some minutes


class Stages(Study):
    """Train the three scripts: 00, 01 and 02.

    02 has one process for each GPU, or two where there is no GPU. On a GPU without units for
    bfloat16 01 and 02 are composed with precision-fp16."""

    group = "start here"
    title = "The three stages"
    position = 10
    tokens = None

    def options(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--epochs",
            type=positive,
            metavar="N",
            help=f"passes over the text on a GPU (default: the scripts' own {EPOCHS})",
        )

    def plans(self, setup: Setup) -> Plans:
        runs = chained([run_here(stage, setup) for stage in STAGES])
        tokens, epochs = setup.args.max_tokens, setup.args.epochs
        if setup.in_report and setup.machine["gpus"]:
            epochs = EPOCHS_IN_REPORT
        if tokens:
            epochs = None  # the tokens alone say how long a run is
        yield Plan(runs, full_length=True, tokens=tokens, epochs=epochs)

    def batches(self, setup: Setup) -> dict[int, int]:
        """Returns other batch sizes where scripts are composed, which need less memory."""
        if setup.batches and in_float16(setup.machine, setup.options):
            return batches_that_fit(setup, composed=True)
        return setup.batches

    def notes(self, rows: Rows) -> list[str]:
        epochs = rows.measured.plan.epochs
        if not epochs:
            return full_notes(rows)
        return full_notes(rows, f"{counted(epochs, 'epoch')} per run")

    def excerpts(self, rows: Rows) -> dict[str, list[Table]]:
        return {"stages": [scripts_table(latest_runs(rows.measured.folder))]}

    def picture(self, rows: Rows):
        return draw_scripts(latest_runs(rows.measured.folder))


def run_here(stage: str, setup: Setup) -> Run:
    """Returns one of the three scripts as this machine trains it: the file itself, edited or not,
    unless it is composed for this machine. Raises UserError, StackError."""
    run = setup.scripts.for_machine(stage, setup.machine, setup.options)
    if run.script != stage:
        return run
    return run.replace(script=ROOT / STAGES[stage])
