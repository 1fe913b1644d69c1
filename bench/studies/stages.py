"""The three scripts side by side, whether they were started by hand or by measure.py."""

import sys
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

from bench.catalogue import EPOCHS, FLOAT16, ROOT, STAGES, published
from bench.measure.journal import journal_of, loose_records, read_journal
from bench.measure.plan import Plan
from bench.measure.records import Record
from bench.report.notes import float32_reason
from bench.report.pictures import COLOURS, draw_bars, rows_of_panels, shorten
from bench.report.tables import Column, Table, fmt, lookup, markdown, text_col
from bench.studies import Study
from bench.subcommands import positive

EPOCHS_IN_REPORT = 3  # on a GPU: in some minutes a slow one has no more
# By what a record says of its stage, which begins with its number.
NAMES = {Path(STAGES[stage]).stem + suffix: name + words
         for stage, name in (("00", "00 original"), ("01", "01 optimized"), ("02", "02 DDP"))
         for suffix, words in (("", ""), (f"-{FLOAT16}", f" with {FLOAT16}"))}


class Group(NamedTuple):
    """What runs have in common that may be compared."""

    device: str
    model: str
    context_length: int
    text: str = ""  # where it isn't the book

    @property
    def title(self) -> str:
        text = f"\ntext: {self.text}" if self.text else ""
        return f"{shorten(self.device, 60)}: {self.model}, context {self.context_length:,}{text}"


class Bar(NamedTuple):
    """One stage on one device: measured, or without a record published."""

    group: Group
    stage: str
    name: str
    processes: int
    tok_per_sec: float  # of all processes together
    reserved_gb: float | None  # of one process
    record: Record | None = None
    tokens: int | None = None  # that it trained on, where runs of its group differ in length

    @property
    def trained(self) -> int:
        return self.record.curve[-1].tokens if self.record and self.record.curve else 0

    @property
    def label(self) -> str:
        parts = [f"{self.name} × {self.processes}" if self.stage == "02" else self.name]
        if self.record and self.record.config.get("batch_size"):
            parts.append(f"batch {self.record.config['batch_size']}")
        if self.tokens:
            parts.append(f"{self.tokens:,} tokens")
        if self.record and float32_reason(self.record):
            parts.append("float32")
        return ", ".join(parts)

    def is_as_long_as(self, other: "Bar") -> bool:
        """Returns whether two runs have the same limits, and trained on about as many tokens: an
        epoch of 02 may make several passes. A limit of tokens is that of all processes together by
        default, and of each in a study."""
        ours, theirs = self.record.config, other.record.config
        if any(ours.get(name) != theirs.get(name) for name in ("epochs", "max_steps")):
            return False
        limits = [config.get("max_tokens") or 0 for config in (ours, theirs)]
        shares = (1, 1) if limits[0] == limits[1] else (self.processes, other.processes)
        trained = self.trained / shares[0], other.trained / shares[1]
        return limits[0] * shares[1] == limits[1] * shares[0] and (
            not all(trained) or max(trained) < 1.5 * min(trained))


def bar_of(record: Record) -> Bar:
    """Raises LookupError, TypeError or ValueError where a figure is missing or isn't one."""
    config = record.config
    group = Group(record.device_name, str(config["model"]), int(config["context_length"]),
                  record.text)
    bar = Bar(group, record.stage[:2], NAMES[record.stage], config["world_size"],
              record.tok_per_sec, record.end["reserved_gb"], record)
    if not all(figure is None or 0 <= figure < 1e15 for figure in (
            bar.tok_per_sec, bar.reserved_gb, *(record.quartiles or ()), record.val_loss,
            config.get("max_tokens"), bar.trained, int(bar.processes))):
        raise ValueError("a number is out of range")
    return bar


def read_bars(folder: Path, tell: bool = True) -> list[Bar]:
    """Returns the latest complete run of each stage and group, sorted by group, then stage: of the
    scripts started by hand, whose records lie in the folder, and of the journal of this study.

    Says which records are damaged, and how many runs did not complete, unless that was told.
    """
    latest: dict[tuple[Group, str], Bar] = {}
    journal = [result for measured in read_journal(journal_of(folder, "stages"))
               for result in measured.results]
    left_out = sum(not result.record for result in journal)
    records = [*loose_records(folder), *(result.record for result in journal if result.record)]
    for record in sorted((record for record in records if record.stage in NAMES),
                         key=lambda record: (str(record.start.get("time", "")), record.name)):
        if record.status != "complete" or not record.tok_per_sec:
            left_out += 1
            continue
        try:
            bar = bar_of(record)
            latest[bar.group, bar.stage] = bar
        except (LookupError, ArithmeticError, TypeError, ValueError) as error:
            if tell:
                print(f"skipped: {record.name}, {error!r}", file=sys.stderr)
    if left_out and tell:
        runs, verb = ("run", "is") if left_out == 1 else ("runs", "are")
        print(f"{left_out} {runs} that did not complete {verb} left out")
    bars = []
    for (group, _), bar in sorted(latest.items(), key=lambda item: item[0]):
        others = [other for other in latest.values() if other.group == group]
        if not all(map(bar.is_as_long_as, others)):
            bar = bar._replace(tokens=bar.trained)
        bars.append(bar)
    return bars


def published_bars() -> list[Bar]:
    """Raises UserError, StackError."""
    source = published()
    group = Group(f"{source.gpu} (published)", source.model, source.context_length)
    return [Bar(group, stage, NAMES[Path(STAGES[stage]).stem], theirs.gpus, theirs.tok_per_sec,
                theirs.reserved_gb) for stage, theirs in source.stages.items()]


def factor(bar: Bar, bars: list[Bar]) -> float | None:
    """Returns how many times as fast as stage 00 of its group a stage is; None without a 00."""
    return next((bar.tok_per_sec / other.tok_per_sec for other in bars
                 if (other.group, other.stage) == (bar.group, "00")), None)


def bars_table(bars: list[Bar], theirs: list[Bar]) -> Table:
    """Returns a row for each bar; without any measured, the published figures alone."""
    bars = bars or theirs

    def quartiles(bar: Bar) -> str:
        known = bar.record and bar.record.quartiles
        return f"{known[0]:,.0f}–{known[2]:,.0f}" if known else "n/a"

    def mfu(bar: Bar) -> str:
        is_cpu = bar.record and bar.record.config["device"] == "cpu"
        return fmt(lookup(bar, "record.mfu"), ".1%") or ("" if is_cpu else "n/a")

    return Table([
        text_col("device", "group.device"),
        Column("model / context",
               lambda bar: f"{bar.group.model} / {bar.group.context_length:,}", True),
        text_col("text", "group.text"), text_col("stage", "label"),
        Column("tok/sec", lambda bar: f"{bar.tok_per_sec:,.0f}" + (
            " †" if lookup(bar, "record.speed_is_average") else "")),
        Column("speedup over 00", lambda bar: fmt(factor(bar, bars), ".2f") or "n/a"),
        Column("p25–p75", quartiles),
        Column("reserved GB", lambda bar: fmt(bar.reserved_gb, ".2f") or "n/a"),
        Column("MFU", mfu),
        Column("val loss", lambda bar: fmt(lookup(bar, "record.val_loss"), ".3f") or "n/a")], bars)


class Stages(Study):
    """Train the three scripts: 00, 01 and 02.

    02 has one process for each GPU, or two where there is no GPU. On a GPU without units for
    bfloat16 01 and 02 are composed with precision-fp16."""

    group = "start here"
    title = "The three stages"
    schedule = {10: None}
    defaults = dict(epochs=None)
    rounds = {"cuda": 1, "cpu": 1}
    tokens, has_seconds = None, False
    composed = True
    max_tokens_help = "training tokens of each run, per process (default: the scripts' own length)"

    def options(self, parser):
        parser.add_argument("--epochs", type=positive, metavar="N",
                            help="passes over the text on a GPU (default: the scripts' own"
                                 f" {EPOCHS})")

    def plans(self, setup):
        runs = [setup.scripts.for_machine(stage, setup.machine, setup.options) for stage in STAGES]
        runs = [run.replace(script=ROOT / file if run.script in STAGES else run.script,
                        compared_to=before and before.name)  # the files, edited or not
                for run, before, file in zip(runs, [None, *runs], STAGES.values(), strict=False)]
        tokens, epochs = setup.args.max_tokens, setup.args.epochs
        if setup.in_report and setup.machine["gpus"] and not tokens:
            epochs = EPOCHS_IN_REPORT
        yield Plan(runs, full_length=True, tokens=tokens, epochs=epochs)

    def excerpts(self, measured, rows):
        return {"stages": [bars_table(read_bars(measured.folder), published_bars())]}

    def summary(self, folder):
        bars = read_bars(folder)
        notes = []
        if any(bar.record.speed_is_average for bar in bars):
            notes.append("† too few steps for a median: the average of the run.")
        if any(bar.tokens for bar in bars):
            notes.append("Runs of different lengths: their losses can't be compared.")
        return "\n".join([markdown(bars_table(bars, published_bars())), *notes,
                          f"{published().source}\n"])

    def pictures(self, folder, found):
        bars = read_bars(folder, tell=False)  # that was told by the summary
        return {"speed": draw_speed([*bars, *published_bars()])} if bars else {}


def draw_speed(bars: list[Bar]):
    """Draws bars of tok/sec and of reserved memory; every group has scales of its own."""
    groups = {group: list(members) for group, members in groupby(bars, lambda bar: bar.group)}
    titles, inches = [], []
    for group, members in groups.items():
        factors = " and ".join(f"{bar.stage} {factor(bar, members):.1f}×" for bar in members
                               if bar.stage != "00" and factor(bar, members))
        titles.append((f"{factors} as fast as 00 (one run of each)\n" if factors else "")
                      + group.title)
        inches.append((1.6 if group.text else 1.3) + 0.45 * len(members))
    figure, panels = rows_of_panels(titles, inches, [5, 3])
    for members, (_, speed, memory) in zip(groups.values(), panels, strict=True):
        colours = [COLOURS[bar.stage] for bar in members]
        speeds = [f"{bar.tok_per_sec:,.0f}" + (f"  ({factor(bar, members):.2f}×)" if (
            bar.stage != "00" and factor(bar, members)) else "") for bar in members]
        draw_bars(speed, [fill(bar.label, 26) for bar in members],
                  [bar.tok_per_sec for bar in members], speeds, colours, 5.0)
        draw_bars(memory, [""] * len(members), [bar.reserved_gb for bar in members],
                  [fmt(bar.reserved_gb, ".2f") or "n/a" for bar in members], colours, 3.0)
        speed.set_xlabel("speed, tok/sec (all processes)")
        memory.set_xlabel("reserved memory, GB (per process)")
    return figure
