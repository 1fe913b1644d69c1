"""What each technique is still worth beside all the others."""

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
    cell,
    number,
    picture_name,
)
from bench.studies import Study
from patches import stack


class LeaveOneOut(Study):
    """01 without one technique at a time: what each is still worth beside all the others; with
    --names also of a script composed of variants, without one technique or variant at a time."""

    title = "01 without one technique at a time"
    schedule = {60: None}

    def options(self, parser):
        parser.add_argument("--rungs", metavar="0,5-8",
                            help="which techniques, by their numbers (default: all)")
        parser.add_argument("--names", metavar="A+B",
                            help="variants that the script has besides (default: none)")

    def plans(self, setup):
        names = setup.args.names or "01"
        base = setup.scripts.find(names, setup.machine)
        if base.error:
            raise UserError(f"{names}: {base.error}")
        base = base.but(published=None, loss=None, compared_to=None)
        runs = [base, *without_techniques(setup, base)]
        if setup.args.names:
            runs += without_variants(setup, base)
        yield from self.in_two_stages(Plan(
            runs, "variants" if setup.args.names else "", seed_noise=2, cold_rounds=EVERY_ROUND,
            **self.length(setup)))

    def excerpts(self, measured, rows):
        return {picture_name(self.name, measured.kind): [Table([
            RUN, SPEED_OR_ERROR, RANGE,
            Column("technique's factor",
                   lambda row: bold(cell(row.technique_factor, ".2f"), row.verdict)),
            GB, number("Δ loss", "loss_difference", "+.3f")], rows)]}


def without_techniques(setup: Setup, base: Run) -> list[Run]:
    """`base` without each of the chosen techniques that later ones don't build on."""
    scripts, runs = setup.scripts, []
    rungs = scripts.rungs()[:-1]
    for rung in scripts.chosen(setup.args.rungs, rungs):
        if rung.rung == 0:
            continue  # 00 has no technique; `base` runs in any case
        script, error = f"{base.script} without {rung.script}", None
        try:
            scripts.text(script)
        except stack.Conflict:
            error = "conflict: later patches build on the lines that it changes"
        runs.append(rung.but(
            name=f"without-{rung.name}", label=f"without {rung.label}", script=script,
            published=None, expected=base.expected, compared_to=base.name, options=base.options,
            error=error, rung=None, without=rung.name))
    return runs


def without_variants(setup: Setup, base: Run) -> list[Run]:
    """`base` without each of the variants that it is composed of."""
    parts, runs = base.script.split("+"), []
    for part in parts:
        rest = "+".join(other for other in parts if other != part) or "01"
        run = setup.scripts.find(rest, setup.machine)
        runs.append(run.but(
            name=f"without-{part}", label=f"without {part}", published=None, loss=None,
            technique=setup.scripts.find(part, setup.machine).technique, compared_to=base.name,
            stage=None, without=part))
    return runs
