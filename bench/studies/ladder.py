"""One technique more at a time."""

from bench.analysis.rows import Row
from bench.measure.plan import EVERY_ROUND, Plan
from bench.report import waterfall
from bench.report.pictures import place_of
from bench.report.tables import Column, Table, bold, credited, fmt, num_col, spread, within_01
from bench.studies import Study


class Ladder(Study):
    """Add one technique at a time, from 00 to 01.

    On several GPUs 02 comes last."""

    title = "The ladder: one more technique at a time"
    schedule = {30: 1, 50: None}
    rounds = {"cuda": 4, "cpu": 6}  # a CPU is noisier

    def options(self, parser):
        parser.add_argument("--techniques", metavar="0,5-8",
                            help="which techniques, by their numbers (default: all)")

    def plans(self, setup):
        gpus = setup.machine["gpus"]
        runs = setup.scripts.ladder(gpus)[: None if gpus > 1 else -1]
        runs = setup.scripts.select(setup.args.techniques, runs)
        runs = [run.replace(compared_to=before and before.name)
                for before, run in zip([None, *runs], runs, strict=False)]
        yield Plan(runs, seed_noise=1, cold_rounds=EVERY_ROUND, **self.length(setup))

    def excerpts(self, measured, rows):
        def speed(row: Row) -> str:
            values = spread(row.speeds)
            return fmt(row.tok_per_sec, ",.0f") + (f" ({values})" if values else "")

        in_01 = within_01(measured.folder)
        return {"ladder": [Table([
            Column("#", lambda row: str(row.run.number)),
            Column("technique", lambda row: credited(row, row.technique), True),
            Column("tok/sec (range)", speed),
            num_col("× before", "factor", ".2f"),
            num_col("A100", "published_factor", ".2f"),
            num_col("× baseline", "factor_baseline", ".2f"),
            Column("× in 01", lambda row: in_01.get(row.run.name, "")),
            num_col("GB", "reserved_gb", ".2f"),
            num_col("val loss", "val_loss", ".3f"),
            Column("significance",
                   lambda row: row.error or bold(row.significance or "", row.significance), True),
        ], rows)]}

    def picture(self, measured, rows):
        """Without a baseline there is none."""
        if not any(row.factor_baseline for row in rows):
            return None
        return waterfall.machine_picture(finding(measured, rows), rows)


def finding(measured, rows: list[Row]) -> str:
    """Returns a title: how much faster it is in total, and which techniques are significantly
    faster; where none is, the place alone."""
    faster = sorted((row for row in rows if row.significance == "faster"),
                    key=lambda row: -row.factor)
    place = place_of(measured)
    if not faster:
        return f"One more technique at a time: {place}"
    names = [f"{credited(row, waterfall.technique_of(row))} {row.factor:.2f}×" for row in faster]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    total = next((row.factor_baseline for row in reversed(rows) if row.factor_baseline), None)
    first = rows[0].run.number
    since = f" than after technique {first}" if first else ""
    return ((f"{total:.1f}× faster{since}: " if total else "") + f"{place}\n"
            f"significant: {', '.join(names[:3])}{more}")
