"""Are the gradients of every script right, compiled, and with dropout?"""

from argparse import ArgumentParser
from functools import partial
from pathlib import Path

from bench.analysis.gradients import Verdict, verdict_of
from bench.analysis.rows import Row, Rows
from bench.catalogue import Run, variants_of
from bench.common import BUILD, ROOT
from bench.measure.measurement import Measurement
from bench.measure.plan import Plan, Setup, WholeScript
from bench.measure.records import Record
from bench.studies import Plans, Study
from gpt_speed.common import UserError
from gpt_speed.tables import Column, Table
from patches import stack

DRIVER = ROOT / "bench" / "measure" / "gradients.py"
IMPORTED = [  # by the driver
    ROOT / "gpt_speed" / "numeric.py",
    ROOT / "gpt_speed" / "script.py",
    ROOT / "gpt_speed" / "gradients" / "tolerance.py",
]
IN_REPORT = "memory", "dropout", "head"  # the groups that a report on a GPU checks next to 01
COMPARISONS = "compiled to uncompiled", "uncompiled to reference", "compiled to reference"
OWN_TYPE = "precision"  # the group of the variants that have types of their own


class Gradients(Study):
    """Check the gradients of the scripts and of every variant.

    Those of the compiled script against the uncompiled one's, and with dropout against numeric
    derivatives. The model is a small one. Exits with 1 where a gradient is wrong."""

    title = "Gradients"
    position = 5
    rounds = {"cuda": 1, "cpu": 1}
    tokens = None
    reads_tokens = False  # the driver has a text of its own
    variables = {
        # Scripts share what they compile, so that a variant of the optimizer takes seconds.
        "TORCHINDUCTOR_CACHE_DIR": str(BUILD / "compiler-cache" / "gradients"),
        "OMP_NUM_THREADS": "1",  # in so small a model threads would wait for each other
    }

    def options(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--names", metavar="A,B", help="which scripts: 00, 01, 02 or variants (default: all)"
        )

    def plans(self, setup: Setup) -> Plans:
        if setup.args.max_tokens and not setup.in_report:
            raise UserError("--max-tokens: a check of gradients has two steps", 2)
        runs = scripts_to_check(setup)
        if setup.args.names:
            runs = chosen(setup.args.names, runs)
        elif setup.in_report:
            runs = [run for run in runs if is_in_report(run, setup.machine["gpus"])]
        yield Plan(runs, length=WholeScript(), cold_rounds=0)

    def driver(self, setup: Setup, run: Run) -> list:
        words: list = [DRIVER]
        reference = reference_of(setup, run)
        if reference:
            words += ["--reference", reference]
        if unchecked_dropout(run):
            words.append("--no-dropout")
        return words

    def imports(self, run: Run) -> list[Path]:
        return IMPORTED

    def summary(self, record: Record, plan: Plan) -> str:
        return verdict_of(record).text

    def has_failed(self, measured: Measurement) -> bool:
        records = [result.record for result in measured.results if result.record]
        return super().has_failed(measured) or any(verdict_of(record).wrong for record in records)

    def tables(self, rows: Rows) -> list[Table]:
        shown = [row for row in rows if row.record or row.error]
        cells = VerdictCells({row.run.name: verdict_of(row.record) for row in shown if row.record})
        columns = [
            Column("script", lambda row: f"`{row.label}`", True),
            Column("verdict", cells.verdict, True),
            *(cells.column(comparison) for comparison in COMPARISONS),
            Column("dropout, to numeric derivatives", cells.dropout, True),
        ]
        return [Table(columns, shown)]

    def notes(self, rows: Rows) -> list[str]:
        machine, notes = rows.measured.machine, []
        left = [row.label for row in rows if not (row.record or row.error)]
        if left:
            notes.append(f"Not checked yet: {', '.join(left)}.")
        notes.append(
            f"{machine['name']}, PyTorch {machine['torch']}. Each figure is that of the worst"
            " tensor, relative to its gradient's norm. The reference of 01 is 00, of 02 and the"
            " variants that train the same model it is 01; both uncompiled, in float32."
        )
        return notes


class VerdictCells:
    """The text of a row's cells, by the verdicts on the runs that have one."""

    def __init__(self, verdicts: dict[str, Verdict]):
        self.verdicts = verdicts

    def verdict(self, row: Row) -> str:
        return row.error or self.verdicts[row.run.name].text

    def column(self, comparison: str) -> Column:
        """Returns the column of how far a comparison's worst tensor is off."""
        return Column(comparison, partial(self.figure, comparison))

    def dropout(self, row: Row) -> str:
        reason = unchecked_dropout(row.run)
        if reason and not row.error:
            return reason
        return self.figure("dropout", row)

    def figure(self, comparison: str, row: Row) -> str:
        verdict = self.verdicts.get(row.run.name)
        if not verdict:
            return ""
        return verdict.cells.get(comparison, "")


def scripts_to_check(setup: Setup) -> list[Run]:
    """Returns the three scripts and every variant with its options, in float32 where they have no
    type of their own; 01 in bfloat16, too. Raises UserError, StackError."""
    scripts, gpus = setup.scripts, setup.machine["gpus"]
    one, two = scripts.stage("01"), scripts.stage("02", gpus or 2)
    bfloat16 = one.replace(
        name="01-bfloat16",
        label="01 --dtype bfloat16",
        published=None,
        options=("--dtype", "bfloat16"),
    )
    runs = [scripts.stage("02", 1).replace(name="02-one-rank")]
    if gpus != 1:
        runs.append(two)
    runs += checked_variants(one, setup)
    runs += checked_variants(two, setup)
    return [as_checked(scripts.stage("00")), as_checked(one), bfloat16, *map(as_checked, runs)]


def checked_variants(base: Run, setup: Setup) -> list[Run]:
    """Returns every variant of 01 or 02, without the runs that some are compared to."""
    names = variants_of(base)
    runs = setup.scripts.variants(base, setup.machine, [*names])
    return [run for run in runs if run.script in names]


def as_checked(run: Run) -> Run:
    """Returns a run as its gradients are checked, with an error where none of them can be."""
    return in_float32(run).replace(
        published=None, compared_to=None, error=run.error or unchecked(run, "all")
    )


def in_float32(run: Run) -> Run:
    """Returns a run in float32, unless it is 00, which has no other type, or has its own."""
    if run.stage == "00" or has_own_type(run):
        return run
    return run.replace(options=(*run.options, "--dtype", "float32"))


def has_own_type(run: Run) -> bool:
    return header_of(run).get("Group") == OWN_TYPE


def header_of(run: Run) -> dict[str, str]:
    """Returns the fields of a variant's header; none of another script."""
    headers = {patch.name: patch.fields for patch in stack.load_variants()}
    return headers.get(str(run.script), {})


def chosen(names: str, runs: list[Run]) -> list[Run]:
    """Returns the runs of the scripts in "A,B". Raises UserError for another name."""
    wanted = [name.strip() for name in names.split(",")]
    scripts = list(dict.fromkeys(str(run.script) for run in runs))
    unknown = set(wanted) - set(scripts)
    if unknown:
        raise UserError(
            f"--names: {min(unknown)!r} is no script; there are {', '.join(scripts)}", 2
        )
    return [run for run in runs if run.script in wanted]


def is_in_report(run: Run, gpus: int) -> bool:
    """Returns whether a report checks it: on a CPU 01 alone, since others take minutes each."""
    if run.script == "01":
        return True
    return gpus > 0 and header_of(run).get("Group") in IN_REPORT


def unchecked(run: Run, gradients: str) -> str | None:
    """Returns why gradients of a variant can't be checked, by its header, "Unchecked: all, REASON":
    "all" of them, or those with "dropout". Returns None where they can."""
    which, _, reason = header_of(run).get("Unchecked", "").partition(", ")
    if which != gradients:
        return None
    return f"not checkable, {reason}"


def unchecked_dropout(run: Run) -> str | None:
    """Returns why its gradients with dropout can't be checked; None where they can."""
    if has_own_type(run) or "bfloat16" in run.options:
        return "not checkable, because the loss is rounded more than it changes"
    return unchecked(run, "dropout")


def reference_of(setup: Setup, run: Run) -> Path | None:
    """Returns the file of the script that has the same gradients; None where none has, since it is
    the first, or trains another model."""
    trains_another_model = run.loss == "changes" and run.stage != "02"
    if run.stage == "00" or trains_another_model:
        return None
    reference = "01"
    if run.stage == "01":
        reference = "00"
    return setup.write_script(setup.scripts.stage(reference))
