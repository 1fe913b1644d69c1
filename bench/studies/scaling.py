"""Weak scaling: 02 with as many processes as asked, each with the same batch; what they reach, and
what a model of the link between them says.

The model: alone, a process needs `step` seconds for a step, two thirds of them for the backward
pass. DDP sends each bucket of gradients as soon as it is complete, around a ring: of B bytes each
of N processes sends 2 (N - 1) / N × B (Patarasuk and Yuan, 2009, doi:10.1016/j.jpdc.2008.09.002).
The first bucket is complete when the backward pass has gone through the output head; what is sent
from then to its end costs nothing. The last bucket, with the token embedding's gradient, is
complete only at that end. So the longer of two times is added to the step: that of the last bucket,
or what all of them take beyond the rest of the backward pass.

It tells what the link costs. Waiting for the slowest process, and the computing that the reduction
itself takes, come on top.
"""

import math
from typing import NamedTuple

from bench.analysis.rows import Row, ratio, speed_of
from bench.catalogue import Scripts
from bench.common import UserError
from bench.measure.plan import Plan
from bench.report.notes import machine_note
from bench.report.pictures import OWN, place_of, rows_of_panels
from bench.report.tables import (
    GB,
    LOSS,
    RANGE,
    RUN,
    SPEED_OR_ERROR,
    Column,
    Table,
    cell,
    markdown,
    spread,
)
from bench.studies import Study

BACKWARD = 2 / 3  # of a step: 4 of the 6 operations for each weight and token
MODELS = {  # layers, width, context
    "cpu-demo": (4, 256, 256), "gpt2": (12, 768, 1024), "gpt2-medium": (24, 1024, 1024),
    "gpt2-large": (36, 1280, 1024), "gpt2-xl": (48, 1600, 1024),
}
VOCABULARY = 50_304
HOST = 8  # GPUs that a fast link joins
# Bytes per second at which a ring passes, by what all-reduces reach: an H100's NVLink, a host's
# single network card of 400 Gbit/s, an A100's NVLink.
NVLINK, NETWORK, A100_LINK = 370e9, 45e9, 230e9
MFU, PEAK, BATCH = 0.4, 989e12, 32  # of the GPUs that are predicted: H100s, bfloat16


class Load(NamedTuple):
    """What a link has to carry in a step, and when."""

    total: int  # bytes of all gradients
    last: int  # of the token embedding's
    overlap: float  # of a step's time: from the first bucket to the end of the backward pass


def products(model: str) -> tuple[int, int]:
    """Multiplications for each token, forward: (of the blocks, of the output head)."""
    layers, width, context = MODELS[model]
    return layers * (12 * width**2 + 2 * context * width), VOCABULARY * width


def load_of(model: str, each: int = 2, tied: bool = False) -> Load:
    """With `each` bytes for a gradient, and no bias on query, key and value. `tied`: the token
    embedding is the output head too."""
    layers, width, context = MODELS[model]
    embedding = VOCABULARY * width
    blocks = layers * (12 * width**2 + 10 * width)
    total = (2 - tied) * embedding + context * width + blocks + 2 * width
    in_blocks, in_head = products(model)
    return Load(each * total, each * embedding, BACKWARD * in_blocks / (in_blocks + in_head))


def efficiency(processes: int, step: float, load: Load, link: float) -> float:
    """Speed of each of N processes as a share of one alone. `step`: seconds of one alone; `link`:
    bytes per second that a process sends."""
    if processes < 2:
        return 1.0
    total, last = (2 * (processes - 1) / processes * size / link for size in load[:2])
    return step / (step + max(last, total - load.overlap * step))


def step_seconds(model: str) -> float:
    """Of one such GPU, by its MFU."""
    return 6 * sum(products(model)) * BATCH * MODELS[model][2] / (MFU * PEAK)


def predicted_for(model: str, gpus: int) -> float:
    """The efficiency of this many such GPUs, in hosts of 8."""
    return efficiency(gpus, step_seconds(model), load_of(model),
                      NVLINK if gpus <= HOST else NETWORK)


class Point(NamedTuple):
    """An efficiency that was published."""

    label: str
    gpus: int
    step: float  # seconds of one GPU
    measured: float
    link: float  # bytes per second
    load: Load = load_of("gpt2", 4, tied=True)

    @property
    def predicted(self) -> float:
        return efficiency(self.gpus, self.step, self.load, self.link)


# Published by others, all of GPT-2 124M with a tied head and float32 gradients. gollem:
# github.com/Jjschwartz/gollem, experiments/gpt2/6_gpt2_124M_DDP.ipynb, batch 64. Modal: pull
# request 27 of github.com/modal-labs/multinode-training-guide tells a step's time without and with
# the network; here hosts with a network card for each GPU are assumed.
OTHERS = (
    Point("8 × H100, gollem", 8, 64 * 1024 / 412_000, 381 / 412, NVLINK),
    Point("16 × H100 on two hosts, Modal", 16, 0.112, 112 / 115, HOST * NETWORK),
    Point("64 × H100 on eight hosts, Modal", 64, 0.027, 27 / 30, HOST * NETWORK),
)


def published_points() -> list[Point]:
    """Raises StackError, UserError."""
    *_, last, ddp = Scripts().rungs(gpus=4)
    return [Point("4 × A100, the published 02", 4, 32 * 1024 / last.expected,
                  ddp.published / 4 / last.expected, A100_LINK, load_of("gpt2")), *OTHERS]


def numbers(text: str, kind: type = int) -> list:
    """The numbers in "1,2,4", each once, from the smallest on. Raises UserError."""
    try:
        found = sorted({kind(part) for part in text.split(",")})
    except ValueError:
        raise UserError(f"{text!r} isn't a list of numbers like 1,2,4", 2)
    for number in found:
        if not 1 <= number < math.inf:
            raise UserError(f"{text!r}: {number} is out of range", 2)
    return found


def efficiency_of(row: Row) -> float | None:
    """Speed of each process as a share of that of the first run, which is one process: the mean
    over the rounds."""
    factor = row.factor_baseline if row.baseline else 1.0
    return ratio(factor, row.run.processes) if row.speeds else None


def interval_of(row: Row) -> str:
    """That in which the efficiency lies with a confidence of 95 %."""
    found = row.baseline and row.difference(speed_of, row.baseline)
    return spread([each / row.run.processes for each in found.interval], ".0%") if found else ""


def predict(row: Row) -> float | None:
    """The efficiency by the model of a row whose link's rate is known: what the link leaves of the
    efficiency of as many processes without it."""
    alone, *others = row.rows.values()
    free = next((other for other in others if other.run.processes == row.run.processes
                 and other.tok_per_sec and not other.run.mbit), None)
    model = row.record and row.record.config.get("model")
    if not row.run.mbit or not alone.record or not free or model not in MODELS:
        return None
    return efficiency_of(free) * efficiency(row.run.processes, alone.seconds_per_step,
                                            load_of(model), row.run.mbit * 1e6 / 8)


class Scaling(Study):
    """02 with more and more processes, each with the same batch."""

    title = "How 02 scales over processes"
    schedule = {100: None}
    in_report = ("1,2,4,8",)
    arguments = "[1,2,4]"
    columns = [
        RUN, SPEED_OR_ERROR, RANGE,
        Column("per process", lambda row: cell(ratio(row.tok_per_sec, row.run.processes), ",.0f")),
        Column("efficiency", lambda row: cell(efficiency_of(row), ".1%")),
        Column("95 %", interval_of),
        Column("predicted", lambda row: cell(predict(row), ".1%")),
        GB._replace(heading="GB per process"), LOSS]

    def options(self, parser):
        parser.add_argument("sizes", nargs="?", default="1,2,4", metavar="1,2,4",
                            help="how many processes (default: %(default)s)")
        parser.add_argument("--links", metavar="200,400",
                            help="Mbit/s: also on two hosts that send so much, made on this"
                                 " machine (Linux, root, no GPU)")

    def plans(self, setup):
        """01, and 02 with each number of processes, compared to 01. On a CPU each process has as
        many cores at every size."""
        machine, links = setup.machine, setup.args.links
        there, unit = ((machine["gpus"], "GPUs") if machine["gpus"] else
                       (machine["threads"], "cores"))
        sizes = numbers(setup.args.sizes)
        fitting = [size for size in sizes if size <= there]
        if links and machine["gpus"]:
            raise UserError("--links needs a machine without a GPU: its hosts talk by gloo", 2)
        share = None if machine["gpus"] else max(1, there // max([2 if links else 1, *fitting]))
        base = setup.scripts.stage("01").but(published=None, cores=share)
        runs, ddp = [base], setup.scripts.stage("02").but(published=None, compared_to=base.name)
        for size in sizes:
            runs.append(ddp.but(
                name=f"{ddp.name}-{size}", label=f"02, {size} process{'es' * (size > 1)}",
                processes=size, cores=share and share * size,
                error=None if size in fitting else f"needs {size} {unit}"))
        for mbit in reversed(numbers(links, float) if links else []):
            runs.append(ddp.but(
                name=f"{ddp.name}-{mbit:g}-mbit", label=f"02, 2 hosts, {mbit:g} Mbit/s",
                processes=2, cores=2 * share, mbit=mbit))
        yield Plan(runs, **self.length(setup))

    def notes(self, measured, rows):
        machine = measured.machine
        most = max(row.run.processes for row in rows if not row.run.error)
        shares = "" if machine["gpus"] else (
            f" Each process has {machine['threads'] // most} of the {machine['threads']} cores at"
            " every size.")
        notes = [machine_note(measured, rows) + shares,
                 "Weak scaling: each process has the same batch. Efficiency is the speed of each"
                 " process over that of 01: the mean of the rounds' ratios, with its 95 %"
                 " interval."]
        if any(row.run.mbit for row in rows if row.rounds):
            notes.append("Two hosts are network namespaces of this machine. By the model: what it"
                         " leaves for the link's cost, times the efficiency of as many processes"
                         " without it (bench/studies/scaling.py).")
        return notes

    def fixed(self):
        return {
            "predictions": markdown(Table([
                Column("model", lambda model: model, True),
                Column("step, ms", lambda model: f"{1000 * step_seconds(model):,.0f}"),
                Column("gradients, MB", lambda model: f"{load_of(model).total / 1e6:,.0f}"),
                *(Column(f"{gpus} GPUs",
                         lambda model, gpus=gpus: f"{predicted_for(model, gpus):.1%}")
                  for gpus in (2, 4, 8, 16, 32, 64))], list(MODELS)[1:])),
            "points": markdown(Table([
                Column("published", lambda point: point.label, True),
                Column("efficiency", lambda point: f"{point.measured:.1%}"),
                Column("predicted", lambda point: f"{point.predicted:.1%}"),
            ], published_points())),
        }

    def draw(self, measured, rows):
        """Efficiency over processes, this machine's and that of the published A100s; and over the
        rate of the link between two hosts, where that was measured."""
        known = [row for row in rows if row.tok_per_sec]
        linked = [row for row in known if row.run.mbit]
        sizes = [row for row in known[1:] if not row.run.mbit]
        if not sizes or known[0] is not rows[0]:
            return None
        most = max(sizes, key=lambda row: row.run.processes)
        figure, [(subfigure, axes, *others)] = rows_of_panels(
            [f"{most.label}: {efficiency_of(most):.0%} efficient (weak scaling)"
             f"\n{place_of(measured)}"], [4.1], [1, 1] if linked else [1])

        def percents(rows: list[Row]) -> list[float]:
            return [100 * efficiency_of(row) for row in rows]

        counts = [row.run.processes for row in sizes]
        axes.axhline(100, color="0.5", linewidth=1, linestyle="--", label="ideal")
        axes.plot(counts, percents(sizes), "o-", color=OWN, linewidth=2,
                  label="this machine")
        published, *_ = published_points()
        axes.plot([4], [100 * published.measured], "s", color="0.5", markersize=8,
                  label=f"{published.label} (timed with its evaluation)")
        axes.set(xlabel="processes", ylabel="efficiency, %", ylim=(0, 112))
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({*counts, 1, 4}), sorted({*counts, 1, 4}))
        for axes in others:
            rates = [row.run.mbit for row in linked]
            axes.axhline(100, color="0.5", linewidth=1, linestyle="--")
            axes.plot(rates, percents(linked), "o-", color=OWN, linewidth=2)
            axes.plot(rates, [100 * (predict(row) or float("nan")) for row in linked],
                      "^--", color="0.2", linewidth=1.5, label="predicted")
            axes.set(xlabel="Mbit/s between two hosts", ylim=(0, 112))
            axes.set_xscale("log", base=2)
            axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        subfigure.legend(loc="outside lower center", ncols=2, frameon=False)
        return figure
