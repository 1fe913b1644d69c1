"""01 without one technique at a time: what each is still worth next to all the others."""

from bench.measure.plan import EVERY_ROUND, Plan
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
)
from bench.studies import Study
from patches import stack


class LeaveOneOut(Study):
    """01 without one technique at a time: what each is still worth next to all the others."""

    title = "01 without one technique at a time"
    schedule = {60: None}
    rungs_help = "which techniques, by their numbers (default: all)"

    def plans(self, setup):
        """Yields 01, and 01 without each of the chosen techniques that later ones don't build on.
        """
        scripts = setup.scripts
        base = scripts.stage("01").but(published=None)
        runs = [base]
        for rung in scripts.chosen(setup.args.rungs, scripts.rungs()[:-1]):
            if rung.rung == 0:
                continue  # 00 has no technique; 01 runs in any case
            script, error = f"01 without {rung.script}", None
            try:
                scripts.text(script)
            except stack.Conflict:
                error = "conflict: later patches build on the lines that it changes"
            runs.append(base.but(
                name=f"without-{rung.name}", label=f"without {rung.label}", script=script,
                error=error, technique=rung.technique, loss=rung.loss, compared_to=base.name,
                stage=None, without=rung.name))
        yield Plan(runs, seed_noise=2, cold_rounds=EVERY_ROUND, **self.length(setup))

    def excerpts(self, measured, rows):
        return {self.name: [Table([
            RUN, SPEED_OR_ERROR, RANGE,
            Column("technique's speedup",
                   lambda row: bold(cell(row.technique_factor, ".2f"), row.significance)),
            GB, number("Δ loss", "loss_difference", "+.3f")], rows)]}
