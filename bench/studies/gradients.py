"""Are the gradients of every script right, compiled, and with dropout?"""

from pathlib import Path

from bench.analysis.gradients import Verdict, verdict_of
from bench.analysis.rows import Row
from bench.catalogue import Run
from bench.common import BUILD, ROOT
from bench.measure.plan import Plan, Setup
from bench.studies import Study
from gpt_speed.common import UserError
from gpt_speed.tables import Column, Table
from patches import stack

DRIVER = ROOT / "bench" / "measure" / "gradients.py"
IN_REPORT = "memory", "dropout", "head"  # the groups that a report on a GPU checks next to 01
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
    environment = {
        # Scripts share what they compile, so that a variant of the optimizer takes seconds.
        "TORCHINDUCTOR_CACHE_DIR": str(BUILD / "compiler-cache" / "gradients"),
        "OMP_NUM_THREADS": "1",  # in so small a model threads would wait for each other
    }

    def options(self, parser):
        parser.add_argument(
            "--names", metavar="A,B", help="which scripts: 00, 01, 02 or variants (default: all)"
        )

    def plans(self, setup):
        if setup.args.max_tokens and not setup.in_report:
            raise UserError("--max-tokens: a check of gradients has two steps", 2)
        runs = scripts_to_check(setup)
        if names := setup.args.names:
            runs = chosen(names, runs)
        elif setup.in_report:
            runs = [run for run in runs if is_in_report(run, setup.machine["gpus"])]
        yield Plan(runs, full_length=True, cold_rounds=0)

    def driver(self, setup, run):
        words: list = [DRIVER]
        if reference := reference_of(setup, run):
            words += ["--reference", reference]
        if unchecked_dropout(run):
            words.append("--no-dropout")
        return words

    def summary(self, record, plan):
        return verdict_of(record).text

    def failed(self, measured):
        return super().failed(measured) or any(
            verdict_of(result.record).wrong for result in measured.results if result.record
        )

    def tables(self, measured, rows):
        rows = [row for row in rows if row.record or row.error]
        verdicts = {
            row.run.name: verdict_of(row.record) if row.record else Verdict() for row in rows
        }

        def figure(row: Row, name: str) -> str:
            return verdicts[row.run.name].cells.get(name, "")

        def comparison(name: str) -> Column:
            return Column(name, lambda row: figure(row, name))

        def dropout(row: Row) -> str:
            return unchecked_dropout(row.run) or figure(row, "dropout")

        return [
            Table(
                [
                    Column("script", lambda row: f"`{row.label}`", True),
                    Column("verdict", lambda row: row.error or verdicts[row.run.name].text, True),
                    comparison("compiled to uncompiled"),
                    comparison("uncompiled to reference"),
                    comparison("compiled to reference"),
                    Column("dropout, to numeric derivatives", dropout, True),
                ],
                rows,
            )
        ]

    def notes(self, measured, rows):
        machine = measured.machine
        left = [row.label for row in rows if not (row.record or row.error)]
        unfinished = [f"Not checked yet: {', '.join(left)}."] if left else []
        return [
            *unfinished,
            f"{machine['name']}, PyTorch {machine['torch']}. Each figure is that of the worst"
            " tensor, relative to its gradient's norm. The reference of 01 is 00, of 02 and the"
            " variants that train the same model it is 01; both uncompiled, in float32.",
        ]


def scripts_to_check(setup: Setup) -> list[Run]:
    """Returns the three scripts and every variant with its options, in float32 where they have no
    type of their own. Raises UserError, StackError."""
    scripts, machine = setup.scripts, setup.machine
    one = scripts.stage("01")
    two = scripts.stage("02", machine["gpus"] or 2)
    alone = scripts.stage("02", 1).replace(name="02-one-rank")
    runs = [scripts.stage("00"), one, alone]
    if machine["gpus"] != 1:
        runs.append(two)
    for base in (one, two):
        names = [
            patch.name
            for patch in stack.load_variants()
            if patch.base == base.name and "Group" in patch.fields
        ]
        # Without `base` at no dropout, which some variants are compared to.
        runs += [
            run
            for run in scripts.variants(base, machine, names=",".join(names))
            if run.script in names
        ]
    float32 = [
        in_float32(run).replace(
            published=None, compared_to=None, error=run.error or unchecked(run, "all")
        )
        for run in runs
    ]
    rounded = one.replace(
        name="01-bfloat16",
        label="01 --dtype bfloat16",
        published=None,
        options=("--dtype", "bfloat16"),
    )
    return [*float32[:2], rounded, *float32[2:]]


def in_float32(run: Run) -> Run:
    """Returns a run in float32, unless it is 00, which has no other type, or has its own."""
    if run.stage == "00" or has_own_type(run):
        return run
    return run.replace(options=(*run.options, "--dtype", "float32"))


def has_own_type(run: Run) -> bool:
    return str(run.script).startswith(OWN_TYPE)


def chosen(names: str, runs: list[Run]) -> list[Run]:
    """Returns the runs of the scripts in "A,B". Raises UserError for another name."""
    wanted = names.split(",")
    if unknown := set(wanted) - {str(run.script) for run in runs}:
        raise UserError(
            f"--names: {min(unknown)!r} is no script; there are"
            f" {', '.join(dict.fromkeys(str(run.script) for run in runs))}",
            2,
        )
    return [run for run in runs if run.script in wanted]


def is_in_report(run: Run, gpus: int) -> bool:
    """Returns whether a report checks it: on a CPU 01 alone, since others take minutes each."""
    return run.script == "01" or gpus > 0 and str(run.script).startswith(IN_REPORT)


def unchecked(run: Run, what: str) -> str | None:
    """Returns why a variant's gradients can't be checked: "all" of them, or those with "dropout";
    None where they can. Its header says so."""
    for patch in stack.load_variants():
        if patch.name == run.script:
            scope, _, reason = patch.fields.get("Unchecked", "").partition(", ")
            return f"not checkable, {reason}" if scope == what else None
    return None


def unchecked_dropout(run: Run) -> str | None:
    """Returns why its gradients with dropout can't be checked; None where they can."""
    if has_own_type(run) or "bfloat16" in run.options:
        return "not checkable, because the loss is rounded more than it changes"
    return unchecked(run, "dropout")


def reference_of(setup: Setup, run: Run) -> Path | None:
    """Returns the file of the script that has the same gradients; None where none has, since it is
    the first, or trains another model."""
    if run.stage == "00" or run.loss == "changes" and run.stage != "02":
        return None
    return setup.script(setup.scripts.stage("00" if run.stage == "01" else "01"))
