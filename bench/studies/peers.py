"""00 and 01 beside nanoGPT and the published script, which are trained from clones."""

import math
import sys
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path

from bench import processes
from bench.analysis.limit import limit_of
from bench.analysis.rows import Row, Rows, peak_at
from bench.catalogue import Run, lacking
from bench.common import ROOT, has_option, relative, sha256
from bench.measure.journal import Measurement
from bench.measure.plan import Plan, Setup
from bench.measure.sizing import with_batch
from bench.report.notes import WIDE_LEGEND, machine_note
from bench.report.pictures import COLOURS, MEMORY, Bar, draw_bars, place_of, rows_of_panels
from bench.report.tables import GB, INTERVAL, SPEED, factor_or_error, factor_text, speed_and_factor
from bench.studies import Study
from bench.subcommands import number_from
from gpt_speed.common import UserError
from gpt_speed.tables import Column, Table, fmt, num_col, text_col

DRIVER = ROOT / "peers" / "clone.py"
BATCH = {"cuda": 32, "cpu": 8}  # of all but 00, which keeps its own
LARGEST = 64
STEPS = {"cuda": 48, "cpu": 12}  # of each run; half of them at the largest batch sizes
HUGE_PAGES = "-huge-pages"  # behind the names of runs with them
FLOAT32 = "-float32"  # behind the name of nanoGPT's run without autocast
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
    clone that you have. On a CPU each is measured with huge pages and without."""

    title = "nanoGPT and the published script"
    position = 75
    shows_limit = True
    report_options = ()  # it needs the clones, and is only shown
    tokens = {"cuda": 393_216, "cpu": 6_144}  # of 00; the others have as many steps

    def options(self, parser):
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

    def plans(self, setup):
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

    def later(self, setup, plan):
        if not setup.args.largest or plan.rounds is None:
            return []
        programs = programs_of(setup)
        batches = {program.name: LARGEST for program in programs if program.stage != "00"}
        return [plan_of(largest_runs(programs, batches, setup), setup)]

    def driver(self, setup, run):
        peer = run.facts.get("peer")
        if not peer:
            return []
        in_float32 = ["--float32"] if run.facts["float32"] else []
        return [DRIVER, *in_float32, peer, file_in_clone(peer, setup)]

    def has_failed(self, measured):
        """Returns whether a run failed, but not by a batch size that was too large."""
        shown = {run.name for run in measured.plan.runs}
        return any(
            result.outcome.failed and (result.name in shown or not result.outcome.does_not_fit)
            for result in measured.results
        )

    def tables(self, rows):
        return [Table(columns_over(reference_of([row.run for row in rows])), rows)]

    def notes(self, rows):
        how = f"{speedups_over(rows)} {MEANS}"
        if any(row.speedup().is_wide for row in rows):
            how += f" {WIDE_LEGEND}"
        limits = [limit_note(row) for row in rows if row.run.stage == "01" and limit_of(row)]
        return [machine_note(rows), how, *limits, DIFFERENCES, *provenance_notes(rows)]

    def picture(self, rows):
        title = f"{finding(rows) or self.title}\n{place_of(rows.measured)}"
        rows = [row for row in rows if row.speeds]
        if not any(row.reference for row in rows):
            return None
        figure, [(_, speed, memory)] = rows_of_panels([title], [1.2 + 0.36 * len(rows)], [3, 2])
        draw_bars(
            speed,
            [
                Bar(
                    row.label,
                    row.tok_per_sec,
                    speed_and_factor(row.tok_per_sec, factor_text(row)),
                    colour_of(row.run),
                    row.speeds,
                )
                for row in rows
            ],
        )
        draw_bars(memory, [Bar("", row.reserved_gb, GB.cell(row) or "n/a", MEMORY) for row in rows])
        speed.set_xlabel("tokens per second, and the speedup in the table")
        memory.set_xlabel("GB")
        return figure


# ---- Runs --------------------------------------------------------------------------------------


def finding(rows: Rows) -> str:
    """Returns how many times as fast as its reference 01 is, where that is significant; else ""."""
    own = next((row for row in rows if row.run.stage == "01"), None)
    if not own or not own.reference or not own.speedup().is_significant:
        return ""
    return f"{own.label} is {own.factor:.2f} times as fast as {own.reference.label}"


def check_options(setup: Setup) -> None:
    """Raises UserError for options behind -- that the study sets, and for clones that can't be
    used, or where none is given."""
    own = ["--dropout", "--batch-size"] if setup.args.largest else ["--dropout"]
    for option in own:
        if has_option(option, setup.options):
            raise UserError(f"{option} is set by the study itself", 2)
    given = [name for name in PEERS if clone_of(name, setup)]
    if not given:
        clones = [f"git clone {peer.url} (commit {peer.commit[:7]})" for peer in PEERS.values()]
        raise UserError(f"no --nanogpt DIR, no --published DIR: {', '.join(clones)}", 2)
    for name in given:
        check_clone(name, setup)


def check_clone(name: str, setup: Setup) -> None:
    """Raises UserError where a peer's file isn't there or can't be imported."""
    folder, file = clone_of(name, setup), file_in_clone(name, setup)
    if not file.is_file():
        raise UserError(f"--{name} {folder}: no {PEERS[name].file} there", 2)
    command: list[str | Path] = [sys.executable, DRIVER, name, file]
    failed, _, err = processes.answer_of(command, f"the import of {relative(file)}")
    if failed:
        raise UserError(f"--{name} {folder}: {processes.error_line(err)}", 2)


def clone_of(name: str, setup: Setup) -> Path | None:
    return getattr(setup.args, name)


def file_in_clone(name: str, setup: Setup) -> Path:
    """Returns the file of a peer that is run."""
    return clone_of(name, setup).resolve() / PEERS[name].file


def programs_of(setup: Setup) -> list[Run]:
    """Returns what is compared, the peers first; a run of each at its own batch size. Raises
    UserError, StackError."""
    scripts, machine = setup.scripts, setup.machine
    base = scripts.for_machine("01", machine, setup.options).replace(published=None)
    own = [
        scripts.stage("00").replace(published=None),
        base,
        *scripts.variants(scripts.stage("01"), machine, names="precision-autocast"),
    ]
    peers = [run for name in PEERS if clone_of(name, setup) for run in peer_runs(name, setup)]
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
        name=name + FLOAT32,
        label=f"{peer.title}, float32",
        error=None,
        facts=run.facts | dict(float32=True),
    )
    return [run, in_float32]


def provenance_of(name: str, setup: Setup) -> dict:
    """Returns the SHA-256 of a peer's file, and the clone's commit, or None without git."""
    text = file_in_clone(name, setup).read_bytes()
    return dict(sha256=sha256(text), commit=processes.head_of(clone_of(name, setup)))


def first_batch(setup: Setup) -> int:
    """Returns the batch size of all but 00, as far as it fits this machine."""
    batch = BATCH[setup.device]
    return setup.batches.get(batch, batch)


def plan_of(runs: list[Run], setup: Setup) -> Plan:
    """Returns a plan of runs, with its kind and length."""
    largest, dropout = setup.args.largest, setup.args.dropout
    tokens, steps = setup.args.max_tokens, STEPS[setup.device]
    if largest:
        steps //= 2
    return Plan(
        runs,
        f"largest-dropout-{dropout:g}" if largest else f"dropout-{dropout:g}",
        tokens=tokens or 1,  # a log line after the first step, and one at the end
        min_steps=1 if tokens else steps,
    )


def equal_runs(programs: list[Run], setup: Setup) -> list[Run]:
    """Returns the programs at an equal batch size; on a CPU first without huge pages, then with."""
    batch = None if has_option("--batch-size", setup.options) else first_batch(setup)
    sizes = [None if program.stage == "00" else batch for program in programs]
    if setup.device != "cpu":
        return compared(runs_at(programs, sizes, setup))
    plain = compared(runs_at(programs, sizes, setup, huge_pages=False))
    huge = [
        run.replace(name=run.name + HUGE_PAGES, label=f"{run.label}, huge pages")
        for run in runs_at(programs, sizes, setup, huge_pages=True)
    ]
    return plain + compared(huge, otherwise=reference_of(plain).name)


def largest_runs(programs: list[Run], batches: dict[str, int], setup: Setup) -> list[Run]:
    """Returns the programs at these batch sizes, 00 at its own; on a CPU with huge pages."""
    sizes = [batches.get(program.name) for program in programs]
    huge_pages = True if setup.device == "cpu" else None
    runs = runs_at(programs, sizes, setup, huge_pages)
    return compared(
        [
            run.replace(name=f"{run.name}-batch-{size}", label=f"{run.label}, batch {size}")
            if size
            else run
            for run, size in zip(runs, sizes, strict=True)
        ]
    )


def runs_at(
    programs: list[Run],
    batches: list[int | None],
    setup: Setup,
    huge_pages: bool | None = None,
) -> list[Run]:
    """Returns the programs at batch sizes, None for their own, with the study's dropout, and with
    huge pages or without, None for what each does by itself."""
    dropout = ("--dropout", f"{setup.args.dropout:g}")
    variables = {} if huge_pages is None else {"THP_MEM_ALLOC_ENABLE": str(int(huge_pages))}
    runs = [
        program.replace(options=(*program.options, *dropout), variables=variables)
        for program in programs
    ]
    return [with_batch(run, batch) for run, batch in zip(runs, batches, strict=True)]


def reference_of(runs: list[Run]) -> Run:
    """Returns the run that others are compared to: the first one that this machine can run."""
    return next((run for run in runs if not run.error), runs[0])


def compared(runs: list[Run], otherwise: str | None = None) -> list[Run]:
    """Returns runs compared to their reference; that one is compared to the run `otherwise`."""
    reference = reference_of(runs)
    compared_runs = []
    compared_to = None  # of those before the reference, which this machine can't run
    for run in runs:
        if run is reference:
            compared_runs.append(run.replace(compared_to=otherwise))
            compared_to = reference.name
        else:
            compared_runs.append(run.replace(compared_to=compared_to))
    return compared_runs


def may_double(row: Row, setup: Setup) -> bool:
    """Returns whether a run that fitted may have twice its batch size: on a CPU if twice its memory
    is at most half of the RAM. Where the system hides the memory it may not."""
    if setup.device != "cpu":
        return True
    return 2 * (row.reserved_gb or math.inf) <= setup.machine["ram_gb"] / 2


# ---- What is shown -----------------------------------------------------------------------------


def weights_of(row: Row) -> str:
    """Returns the type of a program's weights, and that of autocast."""
    if not row.record:
        return ""
    config = row.record.config
    autocast = config.get("autocast")
    return f"{config['dtype']}, {autocast} by autocast" if autocast else config["dtype"]


def first_loss(row: Row) -> str:
    return fmt(row.record.logs[0]["val_loss"], ".2f") if row.record else ""


def columns_over(reference: Run) -> list[Column]:
    """Returns the columns of the table whose speedups are over this run."""
    return [
        text_col("program", "label"),
        SPEED,
        Column(f"× {reference.label}", factor_or_error),
        INTERVAL,
        GB,
        num_col("first step, s", "record.first_step_seconds", ".1f"),
        num_col("again, s", "warm_first_step_seconds", ".1f"),
        num_col("parameters", "record.config.parameters", ","),
        Column("weights", weights_of, True),
        Column("first loss", first_loss),
    ]


MEANS = (
    "Medians over the rounds. Speedups are means of the rounds' ratios, with their 95 % intervals;"
    " bold: significant over the whole table. *Again*: the first step of a program that is started"
    " again, and finds what the compiler has kept."
)
DIFFERENCES = (
    "nanoGPT has fewer parameters, since its head is its embedding, and it has no biases. The"
    " vocabulary of 00 is 50,257 tokens, that of the others 50,304. First loss: of validation,"
    " after a step; it depends on the batch size and on the initial weights, which nanoGPT draws"
    " smaller."
)


def limit_note(row: Row) -> str:
    """Returns which share of what this machine allows 01 reaches."""
    limit, measured = limit_of(row), row.measured
    matmuls = peak_at(row.record.precision, measured.peak) / 1e12
    return (
        f"The limit of `{row.label}`: its matmuls at {matmuls:.2f} TFLOP/s and the bytes of its"
        f" logits and of AdamW at {measured.copy_rate / 1e9:.0f} GB/s, rates of this measurement,"
        f" allow {limit:,.0f} tok/sec; it reaches {row.tok_per_sec / limit:.2f} of them."
    )


def speedups_over(rows: list[Row]) -> str:
    """Returns what the speedups of a table are over."""
    reference = reference_of([row.run for row in rows])
    over = f"Speedups are over {reference.label}."
    if any(row.run.name.endswith(HUGE_PAGES) for row in rows):
        over += (
            f" With huge pages they are over {reference.label} with huge pages, and those of that"
            f" one over {reference.label} without."
        )
    return over


def provenance_notes(rows: list[Row]) -> list[str]:
    """Returns of which commit each peer's file is, and whether it is that of the figures in this
    repository."""
    facts = {row.run.facts["peer"]: row.run.facts for row in rows if "peer" in row.run.facts}
    return [provenance_note(PEERS[name], own) for name, own in facts.items()]


def provenance_note(peer: Peer, facts: dict) -> str:
    commit, own = facts["commit"], facts["sha256"]
    at = f"commit {commit[:7]}" if commit else f"SHA-256 {own[:12]}"
    note = f"{peer.title}: `{peer.file}` of {peer.url}, {at}."
    if own != peer.sha256:
        note += f" The file isn't that of commit {peer.commit[:7]}: it is newer, older or edited."
    return note


def colour_of(run: Run) -> str:
    """Returns the colour of 00, of 01 and its variant, or of others' programs."""
    if "peer" in run.facts:
        return COLOURS["02"]
    return COLOURS["00"] if run.stage == "00" else COLOURS["01"]
