"""Made-up machines, records and journals, for the tests of the tools."""

import json
import shutil
import signal
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

from conftest import ROOT, SIZES

from bench.analysis.rows import Rows
from bench.catalogue import Run, Scripts, technique_names
from bench.measure import launch
from bench.measure.journal import append, journal_of, make_result, read_journal
from bench.measure.measurement import Measurement
from bench.measure.plan import EqualSteps, Job, Plan, Setup, WholeScript
from bench.measure.records import COMPLETE, Outcome, Status
from bench.studies import Study
from gpt_speed import children
from gpt_speed.common import UserError

MACHINE = dict(
    device="cuda",
    gpus=1,
    name="Some | GPU $x_1$",
    torch="2.13",
    python="3.11",
    os="Linux x86_64",
    threads=2,
    cores=2,
    compiles=True,
    cpu="Some CPU",
    driver="570",
    capability="8.0",
    cuda="12.8",
    ram_gb=64.0,
    dtype="bfloat16",
    dtype_reason="compute capability 8.0",
)
CPU = MACHINE | dict(
    device="cpu",
    gpus=0,
    name="Some CPU",
    capability=None,
    ram_gb=8.0,
    dtype_reason="the CPU has avx512_bf16",
)
FLOAT32 = dict(dtype="float32", dtype_reason="this CPU has no bfloat16 units")
PEAK = dict(float32=1e12, TF32=2e12, bfloat16=4e12)


def setup_of(folder: Path, machine: dict = CPU, options: list[str] = (), **args) -> Setup:
    """A Setup whose results lie in `folder`; `args` are the study's options."""
    args = (
        dict(
            max_tokens=None,
            techniques=None,
            names=None,
            model=None,
            what="batch",
            group=None,
            stage="01",
            epochs=None,
            epoch=False,
        )
        | args
    )
    return Setup(
        machine,
        Scripts(),
        folder / "data",
        folder,
        Namespace(**args),
        list(options),
        matmul_peak=PEAK,
        batches={},
    )


def record_events(
    name: str,
    speed: float = 100.0,
    *,
    loss: float = 8.0,
    tokens: int = 4096,
    steps: int = 8,
    seed: int = 123,
    config: dict | None = None,
    gpu: str | None = None,
    start: dict | None = None,
    **end,
) -> list[dict]:
    """The events of a run of so many equal steps but for a first one of 10 s. Its log lines are
    after the first step, at `tokens`, where the validation loss is `loss`, and at its end."""
    first = start_event(name, seed, gpu, config or {}) | (start or {})
    per_step = tokens_per_step(first["config"])
    at = max(2, -(-tokens // per_step))
    losses = {1: 10.0, at: loss, max(at, steps): loss - 1 if steps > at else loss}
    logs = log_events(losses, per_step, speed)
    return [first, *logs, dict(event="epoch", epoch=1), record_end(speed) | end]


def start_event(name: str, seed: int, gpu: str | None, config: dict) -> dict:
    """The line that a record begins with, where `config` is what isn't as usual."""
    usual = dict(
        model="cpu-demo",
        device="cuda" if gpu else "cpu",
        batch_size=4,
        context_length=256,
        world_size=1,
        flops_per_token=10**9,
        dtype="float32",
        matmul_precision="highest",
        parameters=1000,
        seed=seed,
    )
    return dict(
        event="start",
        schema=3,
        stage=name,
        time="20260101T000000Z",
        config=usual | config,
        environment=dict(torch="2.13", gpu=gpu, cpu="Some CPU"),
        data=dict(tokens=dict(train=100_001)),
    )


def tokens_per_step(config: dict) -> int:
    return config["batch_size"] * config["context_length"] * config["world_size"]


def log_events(losses: dict[int, float], per_step: int, speed: float) -> Iterator[dict]:
    """A log line after each of these numbers of steps, with its validation loss."""
    for before, (step, val_loss) in zip([0, *losses], losses.items(), strict=False):
        seconds = [per_step / speed] * (step - before)
        if not before:
            seconds[0] = 10.0
        yield dict(
            event="log",
            epoch=1,
            step=step - 1,
            tokens=step * per_step,
            train_loss=val_loss + 0.5,
            val_loss=val_loss,
            seconds=seconds,
        )


def record_end(speed: float) -> dict:
    """The line that a complete run's record ends with."""
    return dict(
        event="end",
        status="complete",
        error=None,
        avg_tok_per_sec=0.9 * speed,
        reserved_gb=1.25,
        attention_backend="manual",
    )


def write_record(
    folder: Path, name: str, time: str = "20260101T000000Z", start: dict | None = None, **record
) -> Path:
    """The record of a script that was started by hand."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{time}-1.jsonl"
    events = record_events(name, start=dict(time=time) | (start or {}), **record)
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def plan_of(*names: str, **settings) -> Plan:
    """Runs of which each is compared to the one before."""
    runs = [
        Run(name, name, f"technique {name}", loss="rounding", compared_to=before)
        for before, name in zip([None, *names], names, strict=False)
    ]
    return plan_with_length(runs, **(dict(tokens=4096) | settings))


def plan_with_length(runs: list[Run], **settings) -> Plan:
    """A plan, with the fields of its length among those of Plan: runs to a target, and those of
    `full_length`, are whole scripts."""
    kind = EqualSteps
    if settings.pop("full_length", "targets" in settings):
        kind = WholeScript
    names = {part.name for part in fields(kind)} & settings.keys()
    length = kind(**{name: settings.pop(name) for name in names})
    return Plan(runs, length=length, **settings)


def measured_of(
    study: str, plan: Plan, machine: dict = CPU, id: str = "1", **header
) -> Measurement:
    fields = dict(
        id=id,
        study=study,
        kind=plan.kind,
        time=f"20260101T00000{id[-1]}Z",
        machine=machine,
        matmul_peak=PEAK,
        data="d",
        options=[],
        plan=plan,
        sources={run.name: "s" for run in plan.runs},
    )
    return Measurement(**fields | header)


def write_journal(
    folder: Path, study: str, plan: Plan, runs: list[dict] = (), machine: dict = CPU, **header
) -> Path:
    """Adds a measurement to a journal: its study line, then the lines of each of `runs`."""
    path, measured = journal_of(folder, study), measured_of(study, plan, machine, **header)
    append(path, measured.as_json(), *(line for run in runs for line in run_lines(measured, **run)))
    return path


def run_lines(
    measured: Measurement,
    name: str,
    round: int = 1,
    *,
    seed: int | None = None,
    compiled: bool = True,
    error: str | None = None,
    kind: Status = Status.FAILED,
    seconds: float = 1.0,
    matmul_rate: float | None = 4e12,
    **record,
) -> list[dict]:
    """A run's lines in a journal: as bench.measure.launch writes them, around a made-up record, or
    around none where it failed with an `error` of this `kind`."""
    plan = measured.plan
    (run,) = (run for run in plan.runs if run.name == name)
    job = Job(run, round, plan.seed_of(round) if seed is None else seed)
    # Any file or folder that exists stands for what torch.compile has kept.
    cache = ROOT if compiled else ROOT / "none"
    outcome = Outcome(kind, error) if error else COMPLETE
    begin = launch.begin_event(job, measured, ["python", f"{name}.py"], cache)
    events = [] if error else record_events(name, seed=job.seed, **record)
    ended = launch.Ended(int(bool(error)), error or "", seconds)
    return [begin, *events, launch.end_event(ended, outcome, matmul_rate)]


def rounds_of(name: str, *speeds: float, **run) -> list[dict]:
    """For write_journal: a run in as many rounds, each with its speed."""
    return [
        dict(name=name, round=number, speed=speed, **run) for number, speed in enumerate(speeds, 1)
    ]


def rows_of_text(markdown: str, heading: bool = False) -> list[list[str]]:
    """The cells of a table, maybe with its heading and the line below."""
    lines = [line[2:-2].split(" | ") for line in markdown.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines[0 if heading else 2 :]]


class Toy(Study):
    """A study of the plans that it is made with."""

    name = "toy"

    def __init__(self, *plans):
        self.made_with = plans

    def plans(self, setup):
        for plan in self.made_with:  # noqa: UP028 (a tuple takes no rows)
            yield plan


RIGHT_GRADIENTS = dict(
    event="gradients",
    comparison="uncompiled to reference",
    tensors={"head.weight": [1e-7, 1.0, 1.0]},
)


class Children:
    """In place of the children that bench.measure.launch starts: each leaves a made-up record in no
    time.

    `does` tells by a run's name what its child does instead: a dict for record_events, or a
    function of the command and the environment that does as children.run_child. A signal ends
    child number `stop_at`. `refuses` is why no script takes its options.
    """

    def __init__(self, monkeypatch, build: Path, machine: dict = CPU):
        self.ran, self.calls, self.asked = [], [], []
        self.does, self.stop_at, self.refuses = {}, None, None
        self.out_of_ram = 0  # programs that Linux has ended for want of RAM; None: it doesn't tell
        self.answers = dict(
            this_machine=machine,
            matmul_peak=PEAK,
            matmul_rate=4e12,
            copy_rate=2e10,
            free_memory=[81_000],
        )
        for name, value in (self.processes() | self.surroundings(build)).items():
            monkeypatch.setattr(name, value)

    def processes(self) -> dict[str, Callable]:
        """By its name in the tools, what answers instead of a process."""
        return {
            "gpt_speed.children.run_child": self.run_child,
            "bench.processes.ask_machine": self.ask_machine,
            "bench.measure.look.describe_here": lambda: self.answers["this_machine"],
            "bench.measure.sizing.configurations": self.configurations,
            "bench.processes.git_commit": lambda: "0123456789abcdef",
        }

    def surroundings(self, build: Path) -> dict[str, object]:
        """By its name in the tools, what else differs: the folder that they build in, the one whose
        processes are theirs, the order of runs, which here is that of the plan, and Linux's
        counter."""
        modules = ("common", "measure.launch", "measure.plan", "measure.run")
        return {
            **{f"bench.{module}.BUILD": build for module in modules},
            "gpt_speed.children.HOME": build.parent,
            "bench.measure.run.order_seed": lambda id: None,
            "bench.measure.launch.programs_out_of_ram": lambda: self.out_of_ram,
        }

    def run_child(self, command, timeout=None, cores=None, environment=None):
        command = [str(part) for part in command]
        name, seed, folder = (
            command[command.index(option) + 1] for option in ("--name", "--seed", "--results-dir")
        )
        self.calls.append(
            SimpleNamespace(command=command, environment=environment, cores=cores, timeout=timeout)
        )
        if len(self.calls) == self.stop_at:
            raise children.Interrupted(signal.SIGTERM)
        self.ran.append((name, int(seed)))
        does = self.does.get(name, {})
        if callable(does):
            return does(command, environment)
        record = write_record(Path(folder), name, seed=int(seed), **does)
        if any(part.endswith("gradients.py") for part in command):
            with open(record, "a", encoding="utf-8") as file:
                print(json.dumps(RIGHT_GRADIENTS), file=file)
        return 0, "", ""

    def ask_machine(self, question, python=None):
        self.asked.append(question)
        return self.answers[question]

    def configurations(self, runs, setup):
        if self.refuses:
            raise UserError(self.refuses, 2)
        return {
            run.name: dict(
                model="cpu-demo",
                batch_size=4,
                context_length=256,
                learning_rate=1e-3,
                epochs=15,
                compile=False,
            )
            for run in runs
        }


FILES_OF_TOOLS = (
    "measure.py",
    "plot_results.py",
    "requirements-extras.txt",
    "README.md",
    "data/prepare.py",
    "results/reference/published-a100.json",
)


def copy_of_checkout(folder: Path, machine: dict | None = None) -> Path:
    """What the tools need of this checkout, elsewhere, without measurements, with a model of one
    small layer. With a `machine`, it answers what is asked of the machine at once."""
    for name in ("bench", "gpt_speed", "patches"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (*ROOT.glob("0?_*.py"), *(ROOT / name for name in FILES_OF_TOOLS)):
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    for path in (*folder.glob("0?_*.py"), *folder.glob("patches/**/*.patch")):
        path.write_bytes(path.read_bytes().replace(*map(str.encode, SIZES)))
    if machine:
        answer_at_once(folder, answers_of(machine))
    return folder


def answers_of(machine: dict) -> dict:
    """What bench/measure/hardware.py answers on a made-up machine, by the question."""
    return dict(
        this_machine=machine,
        matmul_peak=PEAK,
        matmul_rate=4e12,
        look=dict(machine=machine, memory_gb=8.0, matmul_peak=PEAK, compile_error=None, missing=[]),
        free_memory=[81_000],
        compile_error=None,
        rank_count=2,
    )


def answer_at_once(folder: Path, answers: dict) -> None:
    """Replaces, in a copy of the checkout, the program that is asked about the machine."""
    program = folder / "bench" / "measure" / "hardware.py"
    program.write_text(f"import json, sys\n\nprint(json.dumps({answers!r}[sys.argv[1]]))\n")


def speeds_of(plan: Plan) -> list[dict]:
    """For write_journal: rounds of every run that can run, each faster than the one before unless
    the plan has new seeds; the baseline also with other seeds, where the plan wants them."""
    runs = []
    for number in range(1, (plan.rounds or 4) + 1):
        for place, run in enumerate(run for run in plan.runs if not run.error):
            faster = 0 if plan.new_seeds else 10 * place
            row = dict(
                name=run.name,
                round=number,
                speed=100.0 + faster + number,
                loss=8.0,
                tokens=(plan.loss_tokens or 4096) * run.processes,
                reserved_gb=2.0 + place / 10,
                config=dict(world_size=run.processes),
            )
            runs.append(row)
            if plan.seed_noise and run is plan.runs[0]:
                runs.append(row | dict(seed=plan.first_seed + number, loss=8 + number / 100))
    return runs


def carry_out(study: Study, setup: Setup, runs_of=speeds_of) -> Iterator[tuple[Plan, list]]:
    """Drives a study as run_study does, with made-up runs: (each plan, the rows that come back)."""
    plans, measured, kinds = study.plans(setup), None, []
    while True:
        try:
            plan = plans.send(measured)
        except StopIteration:
            return
        if plan.kind not in kinds:
            kinds.append(plan.kind)
        runs = runs_of(plan)
        whole = replace(plan, rounds=max((run.get("round", 1) for run in runs), default=1))
        path = write_journal(
            setup.results,
            study.name,
            whole,
            runs,
            setup.machine,
            options=setup.options,
            id=str(kinds.index(plan.kind)),
        )
        measured = [entry for entry in read_journal(path) if entry.kind == plan.kind][-1]
        yield plan, Rows(measured)


def measured_with(plan: Plan, events: dict, machine: dict = CPU) -> Measurement:
    """A plan whose runs, in round 1, came to their ends with such events or failed so."""
    measured = measured_of("a", plan, machine)
    for name, lines in events.items():
        run = dict(name=name, round=1, seed=plan.seed_of(1), source_sha256="s")
        error = lines if isinstance(lines, str) else None
        measured.add(
            make_result(
                run,
                [] if error else lines,
                dict(
                    seconds=1.0,
                    error=error,
                    matmul_rate=None,
                    outcome=Status.FAILED if error else Status.COMPLETE,
                ),
            )
        )
    return measured


def cells_of(markdown: str) -> dict[str, dict[str, str]]:
    """The cells of a table by the first one of their row, then by their heading."""
    headings, _, *lines = rows_of_text(markdown, heading=True)
    return {line[0]: dict(zip(headings, line, strict=True)) for line in lines}


def shown(figure) -> list[str]:
    """Every text of a picture, after a look that none is cut off, and that no two overlap."""
    figure.canvas.draw()
    texts = visible_texts(figure)
    boxes = {text: text.get_window_extent() for text in texts}
    inside = figure.bbox.padded(1)
    for text, box in boxes.items():
        assert inside.contains(*box.min) and inside.contains(*box.max), text
    for one, other in combinations(texts, 2):
        assert not boxes[one].padded(-1).overlaps(boxes[other].padded(-1)), (one, other)
    return [text.get_text() for text in texts]


def visible_texts(figure) -> list:
    """A drawn picture's texts, without the labels of ticks beyond the limits, which it keeps."""
    from matplotlib.text import Text

    hidden = {
        label
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for label in labels_beyond(axis)
    }
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    return [text for text in texts if text not in hidden]


def labels_beyond(axis) -> Iterator:
    low, high = sorted(axis.get_view_interval())
    ticks = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
    return (label for place, label in ticks if not low <= place <= high)


def complete_results(folder: Path) -> None:
    """What a machine has measured, as `measure.py pack` takes it."""
    folder.mkdir()
    look = dict(machine=CPU, matmul_peak=PEAK, missing=[], memory_gb=8.0, compile_error=None)
    (folder / "machine.json").write_text(json.dumps(look))
    for study, rounds in (("stages", 4), ("ladder", 4)):
        measure_again(folder, study, rounds)
    (folder / "report.md").write_text("# GPT\n\nMade by `python measure.py report`.\n")


def measure_again(folder: Path, study: str, rounds: int, first: int = 0, **changes) -> None:
    """A journal of two scripts, 00 and 01 or from the `first` technique on, each run with
    `changes`."""
    plan = plan_of("a", "b", rounds=rounds)
    last = len(technique_names()) - 1
    plan.runs = [
        run.replace(stage=f"0{k}" if study == "stages" else None, number=number)
        for (k, run), number in zip(enumerate(plan.runs), (first, last), strict=True)
    ]
    write_journal(
        folder,
        study,
        plan,
        [
            dict(name=name, round=number) | changes
            for number in range(1, rounds + 1)
            for name in "ab"
        ],
    )
