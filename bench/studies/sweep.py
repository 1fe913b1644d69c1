"""What fits, and how fast: speed and memory over batch sizes and context lengths.

The runs of a sweep grow. Where one doesn't fit, its row says so, and no larger one is tried. On a
CPU a run is skipped if, judging by the one before it, it would take more than half of the RAM.
"""

import math

from bench.analysis.rows import ratio
from bench.catalogue import Run
from bench.common import UserError
from bench.measure.plan import Plan
from bench.measure.records import Kind
from bench.report.notes import machine_note, peak_note
from bench.report.pictures import OWN, place_of, rows_of_panels, thousands
from bench.report.tables import GB, RANGE, RUN, SPEED_OR_ERROR, Table, number
from bench.studies import Study

BATCHES = [2**k for k in range(13)]
CONTEXTS = {"cuda": [2**k for k in range(8, 15)], "cpu": [2**k for k in range(6, 12)]}
CONTEXT_TOKENS = {"cuda": 32_768, "cpu": 2_048}  # of each batch in a sweep over contexts
MIN_STEPS = 6  # of a run, so that it has a median: two of them are warm-up
OPTION = {"batch": "--batch-size", "context": "--context-length"}


class Sweep(Study):
    """Speed and memory over batch sizes or context lengths, up to what fits."""

    title = "What fits: batch, context"
    schedule = {140: None}
    in_report = tuple(OPTION)
    rounds = {"cuda": 3, "cpu": 3}
    has_seconds = False
    rounds_help = "how often each size runs (default: {})"
    max_tokens_help = ("training tokens of each run, at least six steps (default: six steps on a"
                       " CPU; else 393,216, or for 10 seconds)")

    def options(self, parser):
        parser.add_argument("what", choices=list(OPTION), metavar="KIND",
                            help=" or ".join(OPTION))

    def plans(self, setup):
        what, cpu = setup.args.what, setup.device == "cpu"
        if what == "batch":
            growth, sizes = 2, [dict(batch=size) for size in BATCHES]
        else:
            growth, tokens = 1, CONTEXT_TOKENS[setup.device]  # as many tokens take as much memory
            sizes = [dict(context=length, batch=tokens // length)
                     for length in CONTEXTS[setup.device]]
        for option in (option.split("=")[0] for option in setup.options):
            if option in {OPTION[name] for name in sizes[0]}:
                raise UserError(f"{option} is set by the sweep itself", 2)
        script = setup.scripts.stage("01").but(published=None)
        ram = setup.machine["ram_gb"] if cpu else None
        yield Plan(chain(script, growth, sizes), what, cold_rounds=0, min_steps=MIN_STEPS,
                   tokens=setup.args.max_tokens or (1 if cpu else self.tokens["cuda"]),
                   seconds=0.0 if cpu else 10.0, until_full=True, memory_limit_gb=ram and ram / 2)

    def tables(self, measured, rows):
        """Returns speed and memory of each size, up to the first that isn't tried."""
        shown = [row for before, row in zip([None, *rows], rows, strict=False) if not (
            row.outcome and row.outcome.kind is Kind.NOT_TRIED and before and before.error)]
        return [Table([RUN, SPEED_OR_ERROR, RANGE, GB._replace(heading="reserved GB"),
                       number("MFU", "mfu", ".1%"),
                       number("of matmul peak", "share_of_peak", ".1%")], shown)]

    def notes(self, measured, rows):
        return [f"{machine_note(measured, rows)} {peak_note(measured)}",
                "tok/sec is the median over the rounds of each run's median step."]

    def draw(self, measured, rows):
        """Draws speed and memory over the batch size, as far as it fits."""
        rows = [row for row in rows if row.tok_per_sec]
        if not rows or measured.kind != "batch":
            return None
        speeds, first, last = [row.tok_per_sec for row in rows], rows[0], rows[-1]
        title = (f"01 from {first.label} to {last.label}: the speed varies by"
                 f" {max(speeds) / min(speeds):.2f} times")
        if growth := ratio(last.reserved_gb, first.reserved_gb):  # not each system tells memory
            title += f", the memory grows {growth:.1f} times"
        figure, [(_, speed, memory)] = rows_of_panels(
            [f"{title}\n{place_of(measured)}"], [3.8], [1, 1])
        places = range(len(rows))
        speed.fill_between(places, [min(row.speeds) for row in rows],
                           [max(row.speeds) for row in rows], color=OWN, alpha=0.2, linewidth=0)
        speed.plot(places, [row.tok_per_sec for row in rows], "o-", color=OWN, linewidth=2)
        speed.set(ylim=(0, None), ylabel="speed, tok/sec")
        memory.plot(places, [row.reserved_gb or math.nan for row in rows], "o-", color=OWN,
                    linewidth=2)
        memory.set_yscale("log", base=2)
        memory.set_ylabel("reserved memory, GB (log scale)")
        ram = measured.machine["device"] == "cpu" and measured.machine.get("ram_gb")
        if ram:
            memory.axhline(ram, color="0.5", linestyle="--", linewidth=1)
            memory.annotate("RAM", (0, ram), (0, 3), textcoords="offset points", color="0.4")
        for axes in (speed, memory):
            axes.set_xlabel("batch size")
            axes.set_xticks(places, [str(row.record.config["batch_size"]) for row in rows],
                            fontsize=10)
        thousands(speed.yaxis)
        memory.yaxis.set_major_formatter("{x:g}")  # in place of a power of two
        return figure


def chain(script: Run, growth: float, sizes: list[dict[str, int]]) -> list[Run]:
    """Returns a run for each size, which takes about `growth` times the memory of the one before
    it, and isn't tried where that doesn't fit."""
    runs: list[Run] = []
    for size in sizes:
        parts = [f"{name} {value}" for name, value in size.items()]
        options = [str(part) for name, value in size.items() for part in (OPTION[name], value)]
        runs.append(script.but(
            name="-".join([script.name, *parts]).replace(" ", "-"), label=", ".join(parts),
            options=tuple(options), growth=growth, after=runs[-1].name if runs else None))
    return runs
