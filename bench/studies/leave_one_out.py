"""01 without one technique at a time: what each is still worth next to all the others."""

from bench.catalogue import Run
from bench.common import UserError
from bench.measure.plan import EVERY_ROUND, Plan, Setup
from bench.report.tables import (
    GB,
    RANGE,
    RUN,
    SPEED_OR_ERROR,
    Column,
    Table,
    bold,
    fmt,
    num_col,
    picture_name,
)
from bench.studies import Study
from patches import stack


class LeaveOneOut(Study):
    """Leave out one technique at a time from 01.

    That shows what each is still worth next to all the others. With --names, from a script composed
    of variants, each of which is left out as well."""

    title = "01 without one technique at a time"
    schedule = {60: None}

    def options(self, parser):
        parser.add_argument("--techniques", metavar="0,5-8",
                            help="which techniques, by their numbers (default: all)")
        parser.add_argument("--names", metavar="A+B", help="variants that the script has besides,"
                                                           " joined by + (default: none)")

    def plans(self, setup):
        names = setup.args.names
        base = setup.scripts.find(names or "01", setup.machine)
        if base.error:
            raise UserError(f"{names}: {base.error}")
        base = base.replace(published=None, loss=None, compared_to=None)
        runs = [base, *without_techniques(setup, base)]
        for variant in base.script.split("+") if names else ():
            others = [other for other in base.script.split("+") if other != variant]
            runs.append(setup.scripts.find("+".join(others) or "01", setup.machine).replace(
                name=f"without-{variant}", label=f"without {variant}", published=None, loss=None,
                technique=setup.scripts.find(variant, setup.machine).technique,
                compared_to=base.name, stage=None, ablated=variant))
        yield Plan(runs, "variants" if names else "", seed_noise=2, cold_rounds=EVERY_ROUND,
                   **self.length(setup))

    def excerpts(self, measured, rows):
        return {picture_name(self.name, measured.kind): [Table([
            RUN, SPEED_OR_ERROR, RANGE,
            Column("technique's speedup",
                   lambda row: bold(fmt(row.factor, ".2f"), row.significance)),
            GB, num_col("Δ loss", "loss_difference", "+.3f")], rows)]}


def without_techniques(setup: Setup, base: Run) -> list[Run]:
    """Returns `base` without each of the chosen techniques. A run that can't be made, since later
    patches build on its lines, has an error."""
    runs = []
    chosen = setup.scripts.select(setup.args.techniques, setup.scripts.ladder()[:-1])
    for run in (run for run in chosen if run.number):  # 00 has no technique
        script, error = f"{base.script} without {run.script}", None
        try:
            setup.scripts.text(script)
        except stack.Conflict:
            error = "conflict: later patches build on the lines that it changes"
        runs.append(base.replace(
            name=f"without-{run.name}", label=f"without {run.label}", script=script, error=error,
            technique=run.technique, loss=run.loss, compared_to=base.name, stage=None,
            ablated=run.name))
    return runs
