"""The three scripts side by side, whether they were started by hand or by measure.py."""

import sys
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from bench.catalogue import EPOCHS, FLOAT16, ROOT, STAGES, published
from bench.measure.journal import journal_of, loose_records, read_journal
from bench.measure.plan import Plan
from bench.measure.records import Record
from bench.report.notes import float32_reason
from bench.report.pictures import COLOURS, draw_bars, rows_of_panels, shorten
from bench.report.tables import Column, Table, cell, markdown
from bench.studies import Study, positive

SECONDS = 480  # of the three stages on a GPU, in a report: as many of the 15 epochs as fit
# By what a record says of its stage, which begins with its number.
NAMES = {Path(STAGES[stage]).stem + suffix: name + words
         for stage, name in (("00", "00 original"), ("01", "01 optimized"), ("02", "02 DDP"))
         for suffix, words in (("", ""), (f"-{FLOAT16}", f" with {FLOAT16}"))}


class Group(NamedTuple):
    """Runs with all of this in common may be compared."""

    device: str
    model: str
    context_length: int
    text: str = ""  # where it isn't the book
    sha256: str = ""  # the first digits for each file of the text; "" in records that don't tell it

    @property
    def title(self) -> str:
        return (f"{shorten(self.device, 60)}: {self.model}, context {self.context_length:,}"
                + f"\ntext: {self.text}" * bool(self.text))


@dataclass(frozen=True)
class Bar:
    """One stage on one device, measured or published."""

    group: Group
    record: Record
    tokens: int | None = None  # that it trained on, where runs of its group differ in length

    stage = property(lambda self: self.record.stage[:2])
    processes = property(lambda self: self.record.config["world_size"])
    tok_per_sec = property(lambda self: self.record.tok_per_sec)  # of all processes together
    reserved_gb = property(lambda self: self.record.end["reserved_gb"])  # of one process
    trained = property(lambda self: self.record.curve[-1].tokens if self.record.curve else 0)
    is_average = property(lambda self: self.record.curve and self.record.speed_is_average)

    @property
    def label(self) -> str:
        name = NAMES[self.record.stage] + f" × {self.processes}" * (self.stage == "02")
        batch = self.record.config.get("batch_size")
        return (name + f", batch {batch}" * bool(batch)
                + f", {self.tokens or 0:,} tokens" * bool(self.tokens)
                + ", float32" * bool(float32_reason(self.record)))

    def as_long_as(self, other: "Bar") -> bool:
        """Whether two runs have the same limits, and trained on about as many tokens: an epoch of
        02 may make several passes. A limit of tokens is that of all processes together by default,
        and of each in a study."""
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
    config, data = record.config, record.start.get("data")
    digests = (data.get("sha256") if isinstance(data, dict) else None) or {}
    parts = [digests[name] for name in sorted(digests)] if isinstance(digests, dict) else [digests]
    bar = Bar(Group(record.device_name, str(config["model"]), int(config["context_length"]),
                    record.text, " ".join(str(part)[:8] for part in parts)), record)
    if not all(figure is None or 0 <= figure < 1e15 for figure in (
            bar.tok_per_sec, bar.reserved_gb, *(record.quartiles or ()), record.val_loss,
            config.get("max_tokens"), bar.trained, int(bar.processes))):
        raise ValueError("a number is out of range")
    return bar


def read_bars(folder: Path, tell: bool = True) -> list[Bar]:
    """The latest complete run of each stage and group, sorted by group, then stage: of the scripts
    started by hand, whose records lie in the folder, and of the journal of this study.

    Says which records are damaged, and how many runs did not complete, unless that was told.
    """
    def began(record: Record) -> tuple[str, str]:
        time = str(record.start.get("time", ""))
        return time.replace("-", "").replace(":", ""), record.name  # schema 1 had them

    latest: dict[tuple[Group, str], Bar] = {}
    journal = [result for measured in read_journal(journal_of(folder, "stages"))
               for result in measured.results]
    left_out = sum(not result.record for result in journal)
    records = [*loose_records(folder), *(result.record for result in journal if result.record)]
    for record in sorted((each for each in records if each.stage in NAMES), key=began):
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
    groups, bars = {group for group, _ in latest}, []
    for group, stage in sorted(latest):
        bar = latest[group, stage]
        if not all(map(bar.as_long_as, (latest[other] for other in latest if other[0] == group))):
            bar = replace(bar, tokens=bar.trained)
        if any(other != group and other[:4] == group[:4] for other in groups):
            bar = replace(bar, group=group._replace(  # another text has the same name
                text=f"{group.text or 'the book'}, sha256 {group.sha256 or 'unknown'}"))
        bars.append(bar)
    return bars


def published_bars() -> list[Bar]:
    """As records of their own. Raises UserError, StackError."""
    found = published()
    return [bar_of(Record(
        name=stage, logs=[], checkpoints=[], curve=[], first_step_seconds=None, quartiles=None,
        val_loss=None, end=dict(avg_tok_per_sec=theirs.tok_per_sec, reserved_gb=theirs.reserved_gb),
        start=dict(stage=Path(STAGES[stage]).stem, environment=dict(gpu=f"{found.gpu} (published)"),
                   config=dict(device="cuda", model=found.model, world_size=theirs.gpus,
                               context_length=found.context_length))))
            for stage, theirs in found.stages.items()]


def factor(bar: Bar, bars: list[Bar]) -> float | None:
    """How many times as fast as stage 00 of its group; None without a 00."""
    speeds = [each.tok_per_sec for each in bars if (each.group, each.stage) == (bar.group, "00")]
    return bar.tok_per_sec / speeds[0] if speeds else None


def bars_table(bars: list[Bar], theirs: list[Bar]) -> Table:
    """Without any measured, the published figures alone."""
    bars = bars or theirs

    def quartiles(bar: Bar) -> str:
        known = bar.record.quartiles
        return f"{known[0]:,.0f}–{known[2]:,.0f}" if known else ""

    columns = [
        Column("device", lambda bar: bar.group.device, True),
        Column("model / context",
               lambda bar: f"{bar.group.model} / {bar.group.context_length:,}", True),
        Column("text", lambda bar: bar.group.text, True),
        Column("stage", lambda bar: bar.label, True),
        Column("tok/sec", lambda bar: f"{bar.tok_per_sec:,.0f}" + " †" * bool(bar.is_average)),
        Column("speedup over 00", lambda bar: cell(factor(bar, bars), ".2f") or "n/a"),
        Column("p25–p75", lambda bar: quartiles(bar) or "n/a"),
        Column("reserved GB", lambda bar: cell(bar.reserved_gb, ".2f") or "n/a"),
        Column("MFU", lambda bar: cell(bar.record.mfu, ".1%")
               or "n/a" * (bar.record.config["device"] != "cpu")),
        Column("val loss", lambda bar: cell(bar.record.val_loss, ".3f") or "n/a"),
    ]
    return Table(columns, bars)


class Stages(Study):
    """The three scripts as they stand: 00, 01, and 02 with one process per GPU, or with two where
    there is no GPU. On a GPU without units for bfloat16 01 and 02 are composed with
    precision-fp16."""

    title = "The three stages"
    schedule = {10: None}
    rounds = {"cuda": 1, "cpu": 1}
    tokens, has_seconds = None, False
    max_tokens_help = "training tokens of each run, per process (default: the scripts' own length)"

    def options(self, parser):
        parser.add_argument("--epochs", type=positive, metavar="N",
                            help="passes over the text on a GPU (default: the scripts' own"
                                 f" {EPOCHS})")

    def plans(self, setup):
        runs = [setup.scripts.here(stage, setup.machine, setup.options) for stage in STAGES]
        runs = [run.but(script=ROOT / file if run.script in STAGES else run.script,
                        compared_to=before and before.name)  # the files, edited or not
                for run, before, file in zip(runs, [None, *runs], STAGES.values(), strict=False)]
        tokens, epochs = setup.args.max_tokens, setup.args.epochs
        limit = SECONDS if setup.machine["gpus"] and setup.minutes and not tokens else None
        yield Plan(runs, whole=True, tokens=tokens, epochs=epochs, within=limit)

    def excerpts(self, measured, rows):
        return {"stages": [bars_table(read_bars(measured.folder), published_bars())]}

    def summary(self, folder):
        bars = read_bars(folder)
        table = markdown(bars_table(bars, published_bars()))
        note = "† too few steps for a median: the average of the run.\n" * any(
            bar.is_average for bar in bars)
        note += "Runs of different lengths: their losses can't be compared.\n" * any(
            bar.tokens for bar in bars)
        return f"{table}\n{note}{published().source}\n"

    def extra(self, folder, found):
        """The losses of the journal's runs, next to the published ones."""
        lines = [(bar.label, bar.record.curve[0][2:], bar.record.curve[-1][2:])
                 for bar in (bar_of(row.records[-1]) for _, rows in found for row in rows
                             if row.records) if bar.record.curve]
        if not lines:
            return ""
        theirs = published()
        lines.append(("00, published", theirs.first_losses, theirs.last_losses))
        table = markdown(Table([
            Column("stage", lambda line: line[0], True),
            *(Column(f"{which} line: train, val", lambda line, place=place: ", ".join(
                cell(loss, ".3f") or "n/a" for loss in line[place]))
              for place, which in enumerate(("first", "last"), 1))], lines))
        return f"Losses, the published ones after {EPOCHS} epochs of the experiment:\n\n{table}"

    def pictures(self, folder, found):
        bars = read_bars(folder, tell=False)  # that was told by the summary
        return {"speed": draw_speed([*bars, *published_bars()])} if bars else {}


def draw_speed(bars: list[Bar]):
    """Bars of tok/sec and of reserved memory; every group has scales of its own."""
    groups = {group: list(members) for group, members in groupby(bars, lambda bar: bar.group)}
    inches = [1.3 + 0.3 * bool(group.text) + 0.45 * len(members)
              for group, members in groups.items()]
    titles = []
    for group, members in groups.items():
        known = [(bar.stage, factor(bar, members)) for bar in members]
        told = " and ".join(f"{stage} {each:.1f}×" for stage, each in known
                            if stage != "00" and each)
        titles.append(f"{told} as fast as 00 (one run of each)\n" * bool(told) + group.title)
    figure, rows = rows_of_panels(titles, inches, [5, 3])
    for members, (_, speed, memory) in zip(groups.values(), rows, strict=True):
        names = [bar.label.replace(f", {bar.tokens or 0:,}", f",\n{bar.tokens or 0:,}")
                 for bar in members]  # in one line it would leave the panels no room
        colours = [COLOURS[bar.stage] for bar in members]
        speeds = [f"{bar.tok_per_sec:,.0f}" + (f"  ({factor(bar, members):.2f}×)" if (
            bar.stage != "00" and factor(bar, members)) else "") for bar in members]
        draw_bars(speed, names, [bar.tok_per_sec for bar in members], speeds, colours, 5.0)
        draw_bars(memory, [""] * len(members), [bar.reserved_gb for bar in members],
                  [cell(bar.reserved_gb, ".2f") or "n/a" for bar in members], colours, 3.0)
        speed.set_xlabel("speed, tok/sec (all processes)")
        memory.set_xlabel("reserved memory, GB (per process)")
    return figure
