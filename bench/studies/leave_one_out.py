"""01 without one technique at a time: what each is still worth next to all the others."""

from argparse import ArgumentParser

from bench.catalogue import Recipe, Run
from bench.measure.plan import EVERY_ROUND, Plan, Setup
from bench.studies import Plans, Study, add_techniques
from patches import stack


class LeaveOneOut(Study):
    """Leave out one technique at a time from 01.

    That shows what each is still worth next to all the others."""

    title = "01 without one technique at a time"
    position = 60

    def options(self, parser: ArgumentParser) -> None:
        add_techniques(parser)

    def plans(self, setup: Setup) -> Plans:
        base = setup.scripts.stage("01").replace(published=None)
        chosen = setup.scripts.select(setup.args.techniques, setup.scripts.ladder()[:-1])
        runs = [without(setup, base, run) for run in chosen if run.number]  # 00 has no technique
        yield Plan([base, *runs], seed_noise=2, cold_rounds=EVERY_ROUND, length=self.length(setup))


def without(setup: Setup, base: Run, run: Run) -> Run:
    """Returns `base` without the technique of a run of the ladder; with an error where later
    patches build on its lines."""
    script, error = Recipe((str(base.script),), left_out=str(run.script)).name, None
    try:
        setup.scripts.text(script)
    except stack.Conflict:
        error = "conflict: later patches build on the lines that it changes"
    return base.replace(
        name=f"without-{run.name}",
        label=f"without {run.label}",
        script=script,
        error=error,
        technique=run.technique,
        loss=run.loss,
        compared_to=base.name,
        stage=None,
        ablated=run.name,
    )
