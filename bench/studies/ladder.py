"""One technique more at a time."""

from argparse import ArgumentParser

from bench.analysis.rows import Row, Rows, printed
from bench.analysis.totals import last_with_total
from bench.catalogue import chained
from bench.measure.plan import EVERY_ROUND, Plan, Setup
from bench.report import waterfall
from bench.report.pictures import place_of
from bench.report.tables import bold, credited_technique, factor_text, spread
from bench.studies import Plans, Study, add_techniques
from gpt_speed.tables import Column, Table, fmt, num_col


class Ladder(Study):
    """Add one technique at a time, from 00 to 01.

    On several GPUs 02 comes last."""

    title = "The ladder: one more technique at a time"
    position = 40
    rounds = {"cuda": 4, "cpu": 6}  # a CPU is noisier

    def options(self, parser: ArgumentParser) -> None:
        add_techniques(parser)

    def plans(self, setup: Setup) -> Plans:
        gpus = setup.machine["gpus"]
        runs = setup.scripts.ladder(gpus)
        if gpus < 2:
            runs = runs[:-1]  # without 02
        runs = setup.scripts.select(setup.args.techniques, runs)
        yield Plan(chained(runs), seed_noise=1, cold_rounds=EVERY_ROUND, length=self.length(setup))

    def excerpts(self, rows: Rows) -> dict[str, list[Table]]:
        columns = [
            num_col("#", "run.number"),
            Column("technique", credited_technique, True),
            Column("tok/sec (range)", speed_with_range),
            Column("× before", factor_text),
            num_col("A100", "published_factor", ".2f"),
            num_col("× baseline", "factor_baseline", ".2f"),
            num_col("GB", "reserved_gb", ".2f"),
            num_col("val loss", "val_loss", ".3f"),
            Column("significance", significance_text, True),
        ]
        return {"ladder": [Table(columns, printed(rows))]}

    def picture(self, rows: Rows):
        """Returns None without a baseline. The title claims nothing that isn't significant, and no
        speedup where the last script may be slower than the first."""
        last = last_with_total(rows)
        if not last:
            return None
        finding = "One more technique at a time"
        least, _ = last.speedup_over(last.baseline).interval or (0, 0)
        if least > 1 and any(row.significance == "faster" for row in rows):
            finding = f"{last.factor_baseline:.1f} times as fast"
            first = rows[0].run.number
            if first:
                finding += f" as after technique {first}"
        return waterfall.machine_picture(f"{finding}: {place_of(rows.measured)}", rows)


def speed_with_range(row: Row) -> str:
    speed, values = fmt(row.tok_per_sec, ",.0f"), spread(row.speeds)
    if values:
        speed += f" ({values})"
    return speed


def significance_text(row: Row) -> str:
    """Returns whether a row is significantly faster than the one before, or why it isn't known."""
    return row.error or bold(row.significance or "", row.significance)
