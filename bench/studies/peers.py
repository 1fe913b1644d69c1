"""00 and 01 beside nanoGPT and the published script, which are trained from clones."""

import math
import sys
from argparse import ArgumentParser
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench import processes
from bench.analysis.limit import limit_of
from bench.analysis.rows import Row, Rows
from bench.catalogue import Run
from bench.common import ROOT, has_option, relative, sha256
from bench.machine import lacking
from bench.measure.measurement import Measurement
from bench.measure.plan import Plan, Setup
from bench.measure.sizing import with_batch
from bench.report.notes import WIDE_LEGEND, machine_note
from bench.report.pictures import (
    COLOURS,
    MEMORY,
    OTHER,
    Bar,
    draw_bars,
    place_of,
    rows_of_panels,
)
from bench.report.tables import GB, INTERVAL, SPEED, factor_or_error, factor_text, speed_and_factor
from bench.studies import Plans, Study
from bench.subcommands import number_from
from gpt_speed.common import UserError
from gpt_speed.tables import Column, Table, fmt, num_col

DRIVER = ROOT / "peers" / "clone.py"
BATCH = {"cuda": 32, "cpu": 8}  # of all but 00, which keeps its own
LARGEST = 64
STEPS = {"cuda": 48, "cpu": 12}  # of each run; half of them at the largest batch sizes
# PyTorch's variable that gives tensors on a CPU huge pages.
HUGE_PAGES, SMALL_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}, {"THP_MEM_ALLOC_ENABLE": "0"}
HUGE_LABEL = ", huge pages"  # ends the labels of runs that have them, where others don't
# Of the tables of a measurement with both.
CAPTIONS = ("Without huge pages:", "With huge pages for every program:")
UNITS = "bfloat16 units"


@dataclass(frozen=True)
class Peer:
    """A repository of others, and the file of it that is run."""

    title: str
    url: str
    file: str
    commit: str  # of which the figures in this repository are
    sha256: str  # of the file there


PEERS = {
    "nanogpt": Peer(
        title="nanoGPT",
        url="https://github.com/karpathy/nanoGPT",
        file="model.py",
        commit="3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
        sha256="7c01703240dbec5d554527dc666e35b3df8391d0b117fddc07afcf325a21d11c",
    ),
    "published": Peer(
        title="published script",
        url="https://github.com/rasbt/LLMs-from-scratch",
        file="ch05/10_llm-training-speed/01_opt_single_gpu.py",
        commit="28c65cdfbc3338e2e040016eea4b7fdf556e4d57",
        sha256="512abcb5eedfa37aadeac0753dcbf253f0df748d9aed2bf439d8b8e528826717",
    ),
}


class Peers(Study):
    """Compare 00 and 01 with nanoGPT and the published script.

    Each trains on the same text by its own model, optimizer and precision; those of others in a
    clone that you have. On a CPU each is measured with huge pages and without, which are two
    tables: a program is compared to nanoGPT with as large pages."""

    title = "nanoGPT and the published script"
    position = 75
    shows_limit = True
    report_options = ()  # it needs the clones, and is only shown
    tokens = {"cuda": 393_216, "cpu": 6_144}  # of 00; the others have as many steps

    def options(self, parser: ArgumentParser) -> None:
        for name, peer in PEERS.items():
            parser.add_argument(
                f"--{name}", type=Path, metavar="DIR", help=f"a clone of {peer.url}"
            )
        parser.add_argument(
            "--dropout",
            type=number_from(0, below=1),
            default=0.0,
            metavar="P",
            help="of every run: 0 is nanoGPT's default, 0.1 that of 00 (default: 0)",
        )
        parser.add_argument(
            "--largest",
            action="store_true",
            help=f"at the largest batch size, up to {LARGEST}, that fits each program; on a CPU in"
            " half of the RAM, and with huge pages (default: at an equal batch size)",
        )

    def plans(self, setup: Setup) -> Plans:
        check_options(setup)
        programs = programs_of(setup)
        if not setup.args.largest:
            yield plan_of(equal_runs(programs, setup), setup)
            return
        batches = yield from self.largest_batches(programs, setup)
        yield plan_of(largest_runs(programs, batches, setup), setup)

    def largest_batches(
        self, programs: list[Run], setup: Setup
    ) -> Generator[Plan, Measurement, dict[str, int]]:
        """Yields plans of one round, in each of which the programs that have still fitted have
        twice the batch size. Returns the largest batch size of each, by its name."""
        largest = {
            program.name: first_batch(setup) for program in programs if program.stage != "00"
        }
        trying = largest
        while trying:
            runs = largest_runs(programs, largest | trying, setup)
            measured = yield replace(plan_of(runs, setup), rounds=1)
            rows = dict(zip((program.name for program in programs), Rows(measured), strict=True))
            fitting = {name: batch for name, batch in trying.items() if rows[name].speeds}
            largest = largest | fitting
            trying = {
                name: 2 * batch
                for name, batch in fitting.items()
                if 2 * batch <= LARGEST and may_double(rows[name], setup)
            }
        return largest

    def later(self, setup: Setup, plan: Plan) -> list[Plan]:
        if not setup.args.largest or plan.rounds is None:
            return []
        programs = programs_of(setup)
        batches = {program.name: LARGEST for program in programs if program.stage != "00"}
        return [plan_of(largest_runs(programs, batches, setup), setup)]

    def driver(self, setup: Setup, run: Run) -> list:
        peer = run.facts.get("peer")
        if not peer:
            return []
        words: list = [DRIVER]
        if run.facts["float32"]:
            words.append("--float32")
        return [*words, peer, file_in_clone(peer, setup)]

    def has_failed(self, measured: Measurement) -> bool:
        """Returns whether a run failed, but not by a batch size that was too large."""
        shown = {run.name for run in measured.plan.runs}
        return any(
            result.outcome.failed and (result.name in shown or not result.outcome.does_not_fit)
            for result in measured.results
        )

    def tables(self, rows: Rows) -> list[Table]:
        parts = by_pages(rows)
        captions = CAPTIONS if len(parts) > 1 else ("",)
        return [
            Table(columns_over(reference_row(part)), part, caption)
            for part, caption in zip(parts, captions, strict=True)
        ]

    def notes(self, rows: Rows) -> list[str]:
        how = f"{speedups_over(rows)} {MEANS}"
        if any(row.speedup().is_wide for row in rows):
            how += f" {WIDE_LEGEND}"
        limits = [limit_note(row) for row in rows if row.run.stage == "01"]
        return [
            machine_note(rows),
            how,
            *filter(None, limits),
            DIFFERENCES,
            *provenance_notes(rows),
        ]

    def picture(self, rows: Rows):
        shown = [row for row in rows if row.speeds]
        if not any(row.reference for row in shown):
            return None
        parts = by_pages(shown)
        titles = [finding_of_01(part) or self.title for part in parts]
        titles[0] += f"\n{place_of(rows.measured)}"
        inches = [1.2 + 0.36 * len(part) for part in parts]
        figure, panels = rows_of_panels(titles, inches, [3, 2])
        for part, (_, speed, memory) in zip(parts, panels, strict=True):
            draw_bars(speed, list(map(speed_bar, part)))
            draw_bars(memory, list(map(memory_bar, part)))
        _, speeds, memories = zip(*panels, strict=True)
        share_scale(speeds, "tokens per second, and the speedup in the table")
        share_scale(memories, "GB")
        return figure


# ---- Runs --------------------------------------------------------------------------------------


def check_options(setup: Setup) -> None:
    """Raises UserError for options behind -- that the study sets, and for clones that can't be
    used, or where none is given."""
    own = ["--dropout"]
    if setup.args.largest:
        own.append("--batch-size")
    for option in own:
        if has_option(option, setup.options):
            raise UserError(f"{option} is set by the study itself", 2)
    clones = clones_of(setup)
    if not clones:
        how = [f"git clone {peer.url} (commit {peer.commit[:7]})" for peer in PEERS.values()]
        raise UserError(f"no --nanogpt DIR, no --published DIR: {', '.join(how)}", 2)
    for name, folder in clones.items():
        check_clone(name, folder, file_in_clone(name, setup))


def check_clone(name: str, folder: Path, file: Path) -> None:
    """Raises UserError where a peer's file isn't there or can't be imported."""
    if not file.is_file():
        raise UserError(f"--{name} {folder}: no {PEERS[name].file} there", 2)
    command: list[str | Path] = [sys.executable, DRIVER, name, file]
    failed, _, err = processes.answer_of(command, f"the import of {relative(file)}")
    if failed:
        raise UserError(f"--{name} {folder}: {processes.error_line(err)}", 2)


def clones_of(setup: Setup) -> dict[str, Path]:
    """Returns the folders of the clones that are there, by the names of the peers."""
    folders = {name: getattr(setup.args, name) for name in PEERS}
    return {name: folder for name, folder in folders.items() if folder}


def file_in_clone(name: str, setup: Setup) -> Path:
    """Returns the file of a peer that is run."""
    return clones_of(setup)[name].resolve() / PEERS[name].file


def programs_of(setup: Setup) -> list[Run]:
    """Returns what is compared, the peers first; a run of each at its own batch size. Raises
    UserError, StackError."""
    scripts, machine = setup.scripts, setup.machine
    base = scripts.for_machine("01", machine, setup.options).replace(published=None)
    own = [
        scripts.stage("00").replace(published=None),
        base,
        *scripts.variants(scripts.stage("01"), machine, names=["precision-autocast"]),
    ]
    peers = [run for name in clones_of(setup) for run in peer_runs(name, setup)]
    names = {"variant-precision-autocast": "01, float32 weights, autocast"}
    return peers + [run.replace(label=names.get(run.name, run.label)) for run in own]


def peer_runs(name: str, setup: Setup) -> list[Run]:
    """Returns the run of a peer: 00, for which peers/clone.py puts the peer's own model. nanoGPT's
    own train.py has no autocast on a CPU, so it has two runs there."""
    peer, is_cpu = PEERS[name], setup.device == "cpu"
    run = setup.scripts.stage("00").replace(
        name=name,
        label=peer.title,
        technique=peer.title,
        published=None,
        expected=setup.scripts.stage("01").expected,
        loss="changes",
        stage=None,
        error=lacking(UNITS, setup.machine),
        facts=dict(peer=name, float32=False, **provenance_of(name, setup)),
    )
    if name != "nanogpt" or not is_cpu:
        return [run]
    in_float32 = run.replace(
        name=f"{name}-float32",
        label=f"{peer.title}, float32",
        error=None,
        facts=run.facts | dict(float32=True),
    )
    return [run, in_float32]


def provenance_of(name: str, setup: Setup) -> dict:
    """Returns the SHA-256 of a peer's file, and the clone's commit, or None without git."""
    text = file_in_clone(name, setup).read_bytes()
    return dict(sha256=sha256(text), commit=processes.head_of(clones_of(setup)[name]))


def first_batch(setup: Setup) -> int:
    """Returns the batch size of all but 00, as far as it fits this machine."""
    batch = BATCH[setup.device]
    return setup.batches.get(batch, batch)


def plan_of(runs: list[Run], setup: Setup) -> Plan:
    """Returns a plan of runs, with its kind and length."""
    kind, steps = f"dropout-{setup.args.dropout:g}", STEPS[setup.device]
    if setup.args.largest:
        kind, steps = f"largest-{kind}", steps // 2
    if setup.args.max_tokens:
        return Plan(runs, kind, tokens=setup.args.max_tokens)
    # A log line after the first step, and one at the end.
    return Plan(runs, kind, tokens=1, min_steps=steps)


def equal_runs(programs: list[Run], setup: Setup) -> list[Run]:
    """Returns the programs at an equal batch size, but 00 at its own; on a CPU first without huge
    pages, then with."""
    batches: dict[str, int] = {}
    if not has_option("--batch-size", setup.options):
        batches = {run.name: first_batch(setup) for run in programs if run.stage != "00"}
    runs = [run_at_batch(program, batches.get(program.name), setup) for program in programs]
    if setup.device != "cpu":
        return compared(runs)
    small = [run.replace(variables=SMALL_PAGES) for run in runs]
    huge = [
        run.replace(
            name=f"{run.name}-huge-pages", label=f"{run.label}{HUGE_LABEL}", variables=HUGE_PAGES
        )
        for run in runs
    ]
    return compared(small) + compared(huge, before=reference_of(small))


def largest_runs(programs: list[Run], batches: dict[str, int], setup: Setup) -> list[Run]:
    """Returns the programs at these batch sizes, 00 at its own; on a CPU with huge pages."""
    runs = []
    for program in programs:
        batch = batches.get(program.name)
        run = run_at_batch(program, batch, setup)
        if batch:
            run = run.replace(name=f"{run.name}-batch-{batch}", label=f"{run.label}, batch {batch}")
        if setup.device == "cpu":
            run = run.replace(variables=HUGE_PAGES)
        runs.append(run)
    return compared(runs)


def run_at_batch(program: Run, batch: int | None, setup: Setup) -> Run:
    """Returns a program at a batch size, None for its own, with the study's dropout."""
    options = (*program.options, "--dropout", f"{setup.args.dropout:g}")
    return with_batch(program.replace(options=options), batch)


def reference_of(runs: list[Run]) -> Run:
    """Returns the run that others are compared to: the first one that this machine can run."""
    return next((run for run in runs if not run.error), runs[0])


def compared(runs: list[Run], before: Run | None = None) -> list[Run]:
    """Returns runs that are compared to their reference, and that one to the run `before`, if there
    is one. Those before the reference, which this machine can't run, are compared to none."""
    reference = reference_of(runs)
    place = runs.index(reference)
    cannot_run = [run.replace(compared_to=None) for run in runs[:place]]
    others = [run.replace(compared_to=reference.name) for run in runs[place + 1 :]]
    if before:
        return [*cannot_run, reference.replace(compared_to=before.name), *others]
    return [*cannot_run, reference.replace(compared_to=None), *others]


def may_double(row: Row, setup: Setup) -> bool:
    """Returns whether a run that fitted may have twice its batch size: on a CPU if twice its memory
    is at most half of the RAM. Where the system hides the memory it may not."""
    if setup.device != "cpu":
        return True
    return 2 * (row.reserved_gb or math.inf) <= (setup.machine["ram_gb"] or 0) / 2


# ---- What is shown -----------------------------------------------------------------------------


def weights_of(row: Row) -> str:
    """Returns the type of a program's weights, and that of autocast."""
    if not row.record:
        return ""
    dtype, autocast = row.record.config["dtype"], row.record.config.get("autocast")
    if autocast:
        return f"{dtype}, {autocast} by autocast"
    return dtype


def first_loss(row: Row) -> str:
    if not row.record:
        return ""
    return fmt(row.record.logs[0]["val_loss"], ".2f")


def by_pages(rows: Sequence[Row]) -> list[list[Row]]:
    """Returns the rows of programs without huge pages and of those with them, where there are
    any."""
    small = [row for row in rows if row.run.variables != HUGE_PAGES]
    huge = [row for row in rows if row.run.variables == HUGE_PAGES]
    return [part for part in (small, huge) if part]


def reference_row(rows: Sequence[Row]) -> Row:
    """Returns the row that the others of its table are compared to."""
    reference = reference_of([row.run for row in rows])
    return next(row for row in rows if row.run is reference)


def program_of(row: Row) -> str:
    """Returns a program's name, without the pages that its table's caption tells."""
    return row.label.removesuffix(HUGE_LABEL)


def columns_over(reference: Row) -> list[Column]:
    """Returns the columns of the table whose speedups are over this row."""

    def factor(row: Row) -> str:
        if row is reference:  # with huge pages, its own is over the other table
            return row.error or ""
        return factor_or_error(row)

    def interval(row: Row) -> str:
        if row is reference:
            return ""
        return INTERVAL.cell(row)

    return [
        Column("program", program_of, True),
        SPEED,
        Column(f"× {program_of(reference)}", factor),
        Column(INTERVAL.heading, interval),
        GB,
        num_col("first step, s", "record.first_step_seconds", ".1f"),
        num_col("again, s", "warm_first_step_seconds", ".1f"),
        num_col("parameters", "record.config.parameters", ","),
        Column("weights", weights_of, True),
        Column("first loss", first_loss),
    ]


MEANS = (
    "Medians over the rounds. Speedups are means of the rounds' ratios, with their 95 % intervals;"
    " bold: significant over all rows. *Again*: the first step of a program that is started"
    " again, and finds what the compiler has kept."
)
DIFFERENCES = (
    "nanoGPT has fewer parameters, since its head is its embedding, and it has no biases. The"
    " vocabulary of 00 is 50,257 tokens, that of the others 50,304. First loss: of validation,"
    " after a step; it depends on the batch size and on the initial weights, which nanoGPT draws"
    " smaller."
)


def limit_note(row: Row) -> str:
    """Returns which share of what this machine allows 01 reaches; "" where that isn't known."""
    limit = limit_of(row)
    if not limit or not row.tok_per_sec:
        return ""
    return (
        f"The limit of `{row.label}`: its matmuls at {limit.matmul_rate / 1e12:.2f} TFLOP/s and the"
        f" bytes of its logits and of AdamW at {limit.copy_rate / 1e9:.0f} GB/s, rates of this"
        f" measurement, allow {limit.tok_per_sec:,.0f} tok/sec; it reaches"
        f" {row.tok_per_sec / limit.tok_per_sec:.2f} of them."
    )


def speedups_over(rows: Sequence[Row]) -> str:
    """Returns what the speedups of the tables are over, and what huge pages gain that program."""
    references = [reference_row(part) for part in by_pages(rows)]
    first, last = references[0], references[-1]
    if first is last:
        return f"Speedups are over {first.label}."
    over = f"Speedups are over the {program_of(first)} of the same table."
    if not last.factor:
        return over
    gain = f"{factor_text(last)} times as fast (95%: {INTERVAL.cell(last) or 'n/a'})"
    return f"{over} Huge pages make {program_of(first)} {gain}."


def provenance_notes(rows: Sequence[Row]) -> list[str]:
    """Returns of which commit each peer's file is, and whether it is that of the figures in this
    repository."""
    facts = {row.run.facts["peer"]: row.run.facts for row in rows if "peer" in row.run.facts}
    return [provenance_note(PEERS[name], own) for name, own in facts.items()]


def provenance_note(peer: Peer, facts: dict) -> str:
    at = f"SHA-256 {facts['sha256'][:12]}"
    if facts["commit"]:
        at = f"commit {facts['commit'][:7]}"
    note = f"{peer.title}: `{peer.file}` of {peer.url}, {at}."
    if facts["sha256"] != peer.sha256:
        note += f" The file isn't that of commit {peer.commit[:7]}: it is newer, older or edited."
    return note


def finding_of_01(rows: Sequence[Row]) -> str:
    """Returns how many times as fast as its reference 01 is, where that is significant; else ""."""
    own = next((row for row in rows if row.run.stage == "01"), None)
    if not own or not own.reference or not own.speedup().is_significant:
        return ""
    finding = f"{program_of(own)} is {own.factor:.2f} times as fast as {program_of(own.reference)}"
    if own.label.endswith(HUGE_LABEL):
        return f"With huge pages for every program, {finding}"
    return finding


def speed_bar(row: Row) -> Bar:
    factor = factor_text(row)
    if row.reference and row.run.variables != row.reference.run.variables:
        factor = ""  # of a reference itself, over that of the other pages
    text = speed_and_factor(row.tok_per_sec, factor)
    return Bar(program_of(row), row.tok_per_sec, text, program_colour(row.run), row.speeds)


def memory_bar(row: Row) -> Bar:
    return Bar("", row.reserved_gb, GB.cell(row) or "n/a", MEMORY)


def share_scale(panels: Sequence, label: str) -> None:
    """Gives panels that stand below each other one scale, with its name below the last."""
    end = max(axes.get_xlim()[1] for axes in panels)
    for axes in panels:
        axes.set_xlim(right=end)
    panels[-1].set_xlabel(label)


def program_colour(run: Run) -> str:
    """Returns the colour of 00, of 01 and its variant, or of others' programs."""
    if "peer" in run.facts:
        return OTHER
    if run.stage == "00":
        return COLOURS["00"]
    return COLOURS["01"]
