"""DDP's own switches."""

from bench.measure.plan import Plan
from bench.studies import Study


class Ddp(Study):
    """02, and 02 with each of DDP's own switches."""

    title = "DDP's own switches"
    schedule = {110: None}

    def plans(self, setup):
        runs = setup.scripts.variants_of_02(setup.machine, "ddp")
        yield Plan(runs, seed_noise=True, **self.length(setup))
