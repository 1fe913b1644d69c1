"""What each technique is still worth beside all the others."""

from bench.study import Plan, Study
from patches import stack


class LeaveOneOut(Study):
    """01 without one technique at a time: what each is still worth beside all the others."""

    title = "01 without one technique at a time"
    schedule = {60: None}

    def options(self, parser):
        parser.add_argument("--rungs", metavar="0,5-8",
                            help="which techniques, by their numbers (default: all)")

    def plans(self, setup):
        rungs, scripts = setup.scripts.rungs()[:-1], setup.scripts
        base = scripts.stage("01").but(published=None)
        runs = [base]
        for rung in scripts.chosen(setup.args.rungs, rungs):
            k = rung.tags["rung"]
            if k == 0:
                continue  # 00 has no technique; 01 runs in any case
            name, error = f"without-{rung.name}", None
            try:
                # base: the stage with the technique; ours: 01; theirs: the stage before it
                scripts.own[name] = stack.merge(
                    scripts.text(rung.script), scripts.text("01_opt_single_gpu"),
                    scripts.text(rungs[k - 1].script), name)
            except stack.Conflict:
                error = "conflict: later patches build on the lines that it changes"
            runs.append(rung.but(
                name=name, label=f"without {rung.label}", script=name, published=None,
                expected=base.expected, compared_to=base.name, error=error,
                tags={"rung": None, "without": rung.name}))
        yield Plan(runs, seed_noise=True, cold_rounds=0, **self.length(setup))
