"""What checkpoints cost."""

from bench.catalogue import CHECKPOINTS, STAGES, lacking
from bench.judge.rows import Row, middle
from bench.measure.plan import SCRATCH, Plan
from bench.report.notes import machine_note
from bench.report.tables import GB, LOSS, RANGE, RUN, SPEED_OR_ERROR, Column, Table
from bench.studies import Study
from patches import stack

EVERY = {"cuda": 25, "cpu": 4}  # steps from one checkpoint to the next, where they are measured
DISTANCES = 10, 50, 200  # steps between checkpoints, in the table


class Checkpoints(Study):
    """01 and 02, with synchronous and with asynchronous checkpoints."""

    title = "What checkpoints cost"
    schedule = {120: None}
    tokens = {"cuda": 1_310_720, "cpu": 32_768}  # four saves or more

    def plans(self, setup):
        scripts, every = setup.scripts, EVERY[setup.device]
        saving = ("--checkpoint-every", str(every), "--checkpoint-dir", SCRATCH)
        error = lacking("package safetensors", setup.machine)
        runs = []
        for stage in ("01", "02"):
            base = scripts.stage(stage, 1 if stage == "01" else setup.machine["gpus"] or 2).but(
                published=None, technique="none are saved")
            script = f"{base.name}-checkpoints"
            scripts.own[script] = stack.compose([CHECKPOINTS], STAGES[stage])
            runs.append(base)
            for mode, options in (("saved", saving), ("async", (*saving, "--checkpoint-async"))):
                runs.append(base.but(
                    name=f"{base.name}-{mode}", label=f"{base.label}, {mode}", script=script,
                    options=options, technique=f"saved every {every} steps", error=error,
                    compared_to=base.name))
        yield Plan(runs, **self.length(setup))

    def tables(self, measured, rows):
        """What a save costs, and its share of the wall time at several distances."""
        def share(every: int):
            def cell_of(row: Row) -> str:
                if not cost(row):
                    return ""
                waiting, slower, step = cost(row)
                price = waiting + max(0, slower)
                return f"{price / (price + every * step):.1%}"

            return cell_of

        def part(place: int):
            return lambda row: format(cost(row)[place], ".2f") if cost(row) else ""

        return [Table([
            RUN, Column("checkpoints", lambda row: row.technique, True), SPEED_OR_ERROR, RANGE,
            Column("s per save", part(0)), Column("slower steps, s", part(1)),
            *(Column(f"share, every {every}", share(every)) for every in DISTANCES), GB, LOSS,
        ], rows)]

    def notes(self, measured, rows):
        distances = ", ".join(map(str, DISTANCES[:-1]))
        return [machine_note(measured, rows),
                "s per save is how long training waits for one, which tok/sec doesn't count; slower"
                " steps is how much longer than without checkpoints the steps from one to the next"
                " take. The shares are of wall time, by both, with a save every"
                f" {distances} or {DISTANCES[-1]} steps."]


def cost(row: Row) -> tuple[float, float, float] | None:
    """(seconds that training waits for a save, seconds that the steps up to the next one take
    longer, seconds of a step without checkpoints) of a row that saves."""
    saves = [save["seconds"] for record in row.records for save in record.checkpoints]
    if not saves or not row.versus:
        return None
    # By the average, since few of the steps may be slower.
    step, alone = (each.record.tokens_per_step / middle(
        record.end["avg_tok_per_sec"] for record in each.records) for each in (row, row.versus))
    return middle(saves), row.record.config["checkpoint_every"] * (step - alone), alone
