"""The three scripts side by side, whether they were started by hand or by measure.py."""

import sys
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from bench.catalogue import EPOCHS, FLOAT16, ROOT, STAGES, UserError, published
from bench.measure.journal import journal_of, loose_records, read_journal
from bench.measure.plan import Plan
from bench.measure.records import Record
from bench.report.notes import float32_reason, mfu_notes
from bench.report.pictures import COLOURS, draw_bars, rows_of_panels, shorten
from bench.report.tables import Column, Table, cell, markdown
from bench.studies import Study

SECONDS = 480  # of the three stages on a GPU, in a report: as many of the 15 epochs as fit
NAMES = {"00_orig": ("00", "00 original"), "01_opt_single_gpu": ("01", "01 optimized"),
         "02_opt_multi_gpu_ddp": ("02", "02 DDP")}
NAMES |= {f"{script}-{FLOAT16}": (stage, f"{name} with {FLOAT16}")
          for script, (stage, name) in NAMES.items() if stage != "00"}


class Group(NamedTuple):
    """Runs with all of this in common may be compared."""

    device: str
    model: str
    context_length: int
    text: str = ""  # where it isn't the book
    sha256: str = ""  # the text's; "" in records that don't tell it

    @property
    def title(self) -> str:
        return (f"{shorten(self.device, 60)}: {self.model}, context {self.context_length:,}"
                + f"\ntext: {self.text}" * bool(self.text))


@dataclass(frozen=True)
class Bar:
    """The figures of one stage on one device, measured or published."""

    group: Group
    stage: str  # "00", "01" or "02"
    processes: int
    tok_per_sec: float  # of all processes together; the median over the steps
    reserved_gb: float | None  # of one process
    record: Record | None = None
    tokens: int | None = None  # that it trained on, where runs of its group differ in length

    @property
    def label(self) -> str:
        _, name = NAMES[self.record.stage if self.record else Path(STAGES[self.stage]).stem]
        name += f" × {self.processes}" * (self.stage == "02")
        batch = self.record and self.record.config.get("batch_size")
        name += f", batch {batch}" * bool(batch)
        name += f", {self.tokens:,} tokens" if self.tokens else ""
        return name + ", float32" * bool(self.record and float32_reason(self.record))


def bar_of(record: Record) -> Bar:
    """Raises LookupError, TypeError or ValueError where a figure is missing or isn't one."""
    config = record.config
    group = Group(record.device_name, str(config["model"]), int(config["context_length"]),
                  record.text, digest_of(record))
    figures = record.tok_per_sec, record.end["reserved_gb"]
    if not all(figure is None or 0 <= figure < 1e15
               for figure in (*figures, *(record.quartiles or ()), record.val_loss,
                              config.get("max_tokens"), trained_tokens(record))):
        raise ValueError("a figure is out of range")
    return Bar(group, NAMES[record.stage][0], int(config["world_size"]), *figures, record)


def digest_of(record: Record) -> str:
    """Of the text, the first digits for each of its files."""
    data = record.start.get("data")
    known = (data.get("sha256") if isinstance(data, dict) else None) or {}
    parts = [known[name] for name in sorted(known)] if isinstance(known, dict) else [known]
    return " ".join(str(part)[:8] for part in parts)


def named(group: Group, groups: list[Group]) -> Group:
    """With the text's sha256 in its name, where another text has the same name."""
    if not any(other != group and other[:4] == group[:4] for other in groups):
        return group
    return group._replace(
        text=f"{group.text or 'the book'}, sha256 {group.sha256 or 'unknown'}")


def read_bars(folder: Path, tell: bool = True) -> list[Bar]:
    """The latest complete run of each stage and group, sorted by group, then stage: of the scripts
    started by hand, whose records lie in the folder, and of the journal of this study.

    Says which records are damaged, and how many runs did not complete, unless that was told.
    """
    latest, journal = {}, [result for measured in read_journal(journal_of(folder, "stages"))
                           for result in measured.results]
    left_out = sum(not result.record for result in journal)
    records = [*loose_records(folder), *(result.record for result in journal if result.record)]
    for record in sorted(records, key=began):
        if record.stage not in NAMES:
            continue
        if record.status != "complete" or not record.tok_per_sec:
            left_out += 1
            continue
        try:
            bar = bar_of(record)
        except (LookupError, ArithmeticError, TypeError, ValueError) as error:
            if tell:
                print(f"skipped: {record.name}, {error!r}", file=sys.stderr)
            continue
        latest[bar.group, bar.stage] = bar
    if left_out and tell:
        runs, verb = ("run", "is") if left_out == 1 else ("runs", "are")
        print(f"{left_out} {runs} that did not complete {verb} left out")
    groups = [bar.group for bar in latest.values()]
    bars = [replace(latest[place], group=named(place[0], groups)) for place in sorted(latest)]
    return [bar if all(same_length(bar, other) for other in bars if other.group == bar.group)
            else replace(bar, tokens=trained_tokens(bar.record)) for bar in bars]


def trained_tokens(record: Record) -> int | None:
    return record.curve[-1].tokens if record.curve else None


def same_length(one: Bar, other: Bar) -> bool:
    """Whether two runs have the same limits, and trained on about as many tokens: an epoch of 02
    may make several passes. A limit of tokens is that of all processes together by default, and of
    each in a study."""
    ours, theirs = one.record.config, other.record.config
    limits = [(config.get("epochs"), config.get("max_steps")) for config in (ours, theirs)]
    tokens = [config.get("max_tokens") or 0 for config in (ours, theirs)]
    shares = 1, 1
    if tokens[0] != tokens[1]:
        shares = one.processes, other.processes
    trained = [(trained_tokens(bar.record) or 0) / share
               for bar, share in zip((one, other), shares, strict=True)]
    return (limits[0] == limits[1] and tokens[0] * shares[1] == tokens[1] * shares[0]
            and (not all(trained) or max(trained) < 1.5 * min(trained)))


def began(record: Record) -> tuple[str, str]:
    time = str(record.start.get("time", "")).replace("-", "").replace(":", "")  # schema 1 had them
    return time, record.name


def published_bars() -> list[Bar]:
    """Raises UserError, StackError."""
    figures = published()
    group = Group(f"{figures.data['gpu']} (published)", figures.data["model"],
                  int(figures.data["context_length"]))
    return [Bar(group, stage, theirs.gpus, theirs.tok_per_sec, theirs.reserved_gb)
            for stage, theirs in figures.stages.items()]


def factor(bar: Bar, bars: list[Bar]) -> float | None:
    """How many times as fast as stage 00 of its group; None without a 00."""
    speeds = [each.tok_per_sec for each in bars if (each.group, each.stage) == (bar.group, "00")]
    return bar.tok_per_sec / speeds[0] if speeds else None


def is_average(bar: Bar) -> bool:
    return bool(bar.record and bar.record.speed_is_average)


def bars_table(bars: list[Bar], theirs: list[Bar]) -> Table:
    """Without any measured, the published figures alone."""
    bars, by_stage = bars or theirs, {bar.stage: bar for bar in theirs}

    def of_record(name: str, form: str):
        return lambda bar: cell(bar.record and getattr(bar.record, name), form) or "n/a"

    def quartiles(bar: Bar) -> str:
        known = bar.record and bar.record.quartiles
        return f"{known[0]:,.0f}–{known[2]:,.0f}" if known else "n/a"

    return Table([
        Column("device", lambda bar: bar.group.device, True),
        Column("model / context",
               lambda bar: f"{bar.group.model} / {bar.group.context_length:,}", True),
        Column("text", lambda bar: bar.group.text, True),
        Column("stage", lambda bar: bar.label, True),
        Column("tok/sec", lambda bar: f"{bar.tok_per_sec:,.0f}" + " †" * is_average(bar)),
        Column("factor over 00", lambda bar: cell(factor(bar, bars), ".2f") or "n/a"),
        Column("p25–p75", quartiles),
        Column("reserved GB", lambda bar: cell(bar.reserved_gb, ".2f") or "n/a"),
        Column("MFU", of_record("mfu", ".1%")),
        Column("val loss", of_record("val_loss", ".3f")),
        Column("published tok/sec", lambda bar: f"{by_stage[bar.stage].tok_per_sec:,.0f}"),
        Column("published factor",
               lambda bar: cell(factor(by_stage[bar.stage], theirs), ".2f") or "n/a"),
    ], bars)


class Stages(Study):
    """The three scripts as they stand: 00, 01, and 02 with one process per GPU, or with two where
    there is no GPU. On a GPU without units for bfloat16 01 and 02 are composed with
    precision-fp16."""

    title = "The three stages"
    schedule = {10: None}
    rounds = {"cuda": 1, "cpu": 1}
    tokens = seconds = None
    max_tokens_help = "training tokens of each run, per process (default: the scripts' own length)"

    def options(self, parser):
        parser.add_argument("--epochs", type=int, metavar="N",
                            help="passes over the text on a GPU (default: the scripts' own"
                                 f" {EPOCHS})")

    def plans(self, setup):
        runs = [setup.scripts.here(stage, setup.machine, setup.options) for stage in STAGES]
        runs = [run.but(script=ROOT / file if run.name == Path(file).stem else run.script,
                        compared_to=before and before.name)  # the files, edited or not
                for run, before, file in zip(runs, [None, *runs], STAGES.values(), strict=False)]
        tokens, epochs = setup.args.max_tokens, setup.args.epochs
        if epochs is not None and epochs < 1:
            raise UserError(f"argument --epochs: {epochs} is out of range", 2)
        limit = SECONDS if setup.machine["gpus"] and setup.minutes and not tokens else None
        yield Plan(runs, whole=True, tokens=tokens, epochs=epochs, within=limit)

    def excerpts(self, measured, rows):
        return {"stages": [bars_table(read_bars(measured.folder), published_bars())]}

    def summary(self, folder):
        bars = read_bars(folder)
        table = markdown(bars_table(bars, published_bars()))
        note = "† too few steps for a median: the average of the run.\n" * any(
            map(is_average, bars))
        note += "".join(f"{line}\n" for line in mfu_notes(bar.record for bar in bars))
        note += "Runs of different lengths: their losses can't be compared.\n" * any(
            bar.tokens for bar in bars)
        return f"{table}\n{note}{published().source}\n"

    def extra(self, folder, found):
        """The losses of the journal's runs, beside the published ones."""
        lines = [(bar.label, bar.record.curve[0], bar.record.curve[-1])
                 for bar in (bar_of(row.records[-1]) for _, rows in found for row in rows
                             if row.records) if bar.record.curve]
        if not lines:
            return ""
        lines = [(name, first[2:], last[2:]) for name, first, last in lines]
        baseline = published().data["baseline"]
        lines.append(("00, published", tuple(baseline["first_line"].values()),
                      tuple(baseline["last_line"].values())))
        table = markdown(Table([
            Column("stage", lambda line: line[0], True),
            Column("first line: train, val", lambda line: "{}, {}".format(
                *(cell(loss, ".3f") or "n/a" for loss in line[1]))),
            Column("last line: train, val", lambda line: "{}, {}".format(
                *(cell(loss, ".3f") or "n/a" for loss in line[2]))),
        ], lines))
        return f"Losses, the published ones after {EPOCHS} epochs of the experiment:\n\n{table}"

    def pictures(self, folder, found):
        bars = read_bars(folder, tell=False)  # that was told by the summary
        return {"speed": draw_speed([*bars, *published_bars()])} if bars else {}


def draw_speed(bars: list[Bar]):
    """Bars of tok/sec and of reserved memory; every group has scales of its own."""
    groups = {group: list(members) for group, members in groupby(bars, lambda bar: bar.group)}
    inches = [1.0 + 0.3 * bool(group.text) + 0.45 * len(members)
              for group, members in groups.items()]
    figure, rows = rows_of_panels([group.title for group in groups], inches, [5, 3])
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
