"""What a script takes on GPUs that aren't there: traced once (bench.predict.trace), then stored.

Predictions are stored in NAME, in a folder of results: by a script's name and its options, the
memory at each batch size, the work of a step at two of them, and a hash of the script's code. A
prediction stays when the code changes; `predict` then names the script.
"""

import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bench import processes
from bench.catalogue import EPOCHS, Scripts
from bench.common import BOOK_TOKENS, DAMAGE, REFERENCE, ROOT, read_kept, write_whole
from bench.predict.code_hash import code_of
from gpt_speed import children, speed
from gpt_speed.cards import Card
from gpt_speed.common import UserError
from gpt_speed.memory import OTHERS, Event, MemoryNeed, memory_need
from gpt_speed.speed import Work

BATCHES = [2**k for k in range(10)]
TRACED = 8, 16  # from these two follow the larger ones: all sizes are a + b × batch
NAME = "predict.json"
REFUSED = "what it takes can't be predicted: "


class Prediction(NamedTuple):
    """What a script takes. Methods return None if the card lacks what it needs."""

    needs: dict[int, MemoryNeed]  # by the batch size
    steps: dict[int, list[Work]]  # the work of a step, by the batch sizes of TRACED
    context_length: int
    flops_per_token: int
    code: str  # code_of() the traced script

    @classmethod
    def from_json(cls, entry: dict) -> "Prediction":
        """Returns what is stored. Raises one of common.DAMAGE for something else."""
        return cls(
            needs={int(size): MemoryNeed(*need) for size, need in entry["needs"].items()},
            steps={
                size: [Work(*work) for work in entry["works"][str(size)]["step"]] for size in TRACED
            },
            context_length=entry["context_length"],
            flops_per_token=entry["flops_per_token"],
            code=entry["code"],
        )

    def as_json(self) -> dict:
        return dict(
            needs=self.needs,
            works={size: dict(step=step) for size, step in self.steps.items()},
            context_length=self.context_length,
            flops_per_token=self.flops_per_token,
            code=self.code,
        )

    def seconds(self, batch: int, card: Card) -> dict[str, float] | None:
        """Returns the seconds of a step, as gpt_speed.speed.seconds()."""
        return speed.seconds(speed.work_at(batch, self.steps), card)

    def tok_per_sec(self, batch: int, card: Card) -> float | None:
        """Returns the tok/sec of one GPU."""
        times = self.seconds(batch, card)
        if not times:
            return None
        return batch * self.context_length / sum(times.values())

    def speeds(self, batch: int, card: Card, gpus: int = 1) -> tuple[float, float] | None:
        """Returns the least and the most tok/sec to expect of all GPUs, whose communication takes
        no time; None also outside the model."""
        expected = self.tok_per_sec(batch, card)
        if not expected or not speed.is_inside(card, batch):
            return None
        compiled = speed.is_compiled(self.steps[TRACED[0]])
        margin = speed.margin(card, compiled, self.seconds(batch, card))
        return gpus * expected * (1 - margin), gpus * expected * (1 + margin)

    def speed_range(self, batch: int, card: Card, gpus: int = 1) -> str:
        """Writes speeds() in thousands, or why there are none."""
        speeds = self.speeds(batch, card, gpus)
        if speeds:
            least, most = speeds
            return span((least / 1000, most / 1000))
        if self.tok_per_sec(batch, card):
            return speed.UNCHECKED
        precision = speed.missing_precision(self.steps[TRACED[0]], card)
        if precision == "float32":  # every GPU computes in it; one of --memory has no speed
            return "float32 speed unknown"
        return f"not in {precision}"

    def minutes(self, batch: int, card: Card) -> float | None:
        """Returns the minutes of the published epochs on the book."""
        expected = self.tok_per_sec(batch, card)
        if not expected:
            return None
        return EPOCHS * BOOK_TOKENS / expected / 60

    def mfu(self, batch: int, card: Card) -> float | None:
        """Returns the share of the datasheet's 16-bit throughput that is used."""
        expected = self.tok_per_sec(batch, card)
        if not expected:
            return None
        return expected * self.flops_per_token / card.peak


def largest_that_fits(
    needs: dict[int, MemoryNeed], mib: int, batch: int | None = None, others: int = OTHERS
) -> int:
    """Returns the largest of BATCHES, or `batch` instead, if it fits a card with this many MiB, of
    which `others` are left free; 0 where none does."""
    sizes = BATCHES
    if batch:
        sizes = [batch]
    fits = [size for size in sizes if size in needs and needs[size].minimum <= mib - others]
    return max(fits, default=0)


def span(ends: tuple[float, float] | None) -> str:
    """Writes a range of figures, with decimals by its upper end; "" without one."""
    if not ends:
        return ""
    low, high = ends
    places = 2
    if high >= 10:
        places = 0
    elif high >= 1:
        places = 1
    return f"{low:,.{places}f}–{high:,.{places}f}"


class Program(NamedTuple):
    """A script with its options: what is traced."""

    key: str  # by which its prediction is stored
    text: bytes
    options: list[str]


def program_of(scripts: Scripts, script: str | Path, options: list[str]) -> Program:
    """Raises StackError where patches don't fit together, OSError."""
    return Program(key_of(scripts, script, options), scripts.text(script), options)


def key_of(scripts: Scripts, script: str | Path, options: list[str]) -> str:
    return " ".join([scripts.canonical(script), *options])


# ---- Predictions, from what is stored or traced


@dataclass(frozen=True)
class Sizes:
    """Which batch sizes a prediction has to have: those of BATCHES that are larger than TRACED; the
    smaller ones, which have to be traced one by one, for a card that is too small for TRACED; and
    `batch`, if one is asked for."""

    card: int | None = None  # the MiB of it that a script may take (None: no card is meant)
    batch: int | None = None

    def missing_in(self, prediction: Prediction) -> list[int]:
        """Returns those that a prediction lacks."""
        is_small = self.card is not None and self.card < prediction.needs[TRACED[0]].minimum
        sizes = {size for size in BATCHES if is_small or size > TRACED[0]}
        if self.batch:
            sizes.add(self.batch)
        return sorted(sizes - prediction.needs.keys())


def predict(
    program: Program, results: Path, sizes: Sizes = Sizes(), retrace: bool = False
) -> Prediction:
    """Predicts what a program takes at these batch sizes. A prediction stored in `results` or
    results/reference is returned as it is, also where the script has changed since; unless it lacks
    a size then, since sizes of two scripts don't mix, or all shall be traced again. Raises
    UserError."""
    stored = None if retrace else load(program.key, results, REFERENCE)
    if stored and sizes.missing_in(stored) and stored.code != code_of(program.text):
        stored = None
    prediction = stored or traced(program)
    missing = sizes.missing_in(prediction)
    if missing:
        needs = prediction.needs | traced_needs(program, missing, sizes.batch)
        prediction = prediction._replace(needs=dict(sorted(needs.items())))
    if prediction != stored and results.is_dir():  # a misspelt one isn't made for this alone
        save(results, program.key, prediction)
    return prediction


def traced_needs(
    program: Program, sizes: Sequence[int], batch: int | None
) -> dict[int, MemoryNeed]:
    """Returns the memory at each of the batch sizes. Raises UserError where the script refuses
    `batch`; others, which nobody asked for, may be no multiple of --micro-batches."""
    optional = [size for size in sizes if size != batch]
    traces = run_traces(program.text, program.options, sizes, optional)
    return {size: memory_need(trace["events"]) for size, trace in traces.items()}


def predict_all(
    programs: Iterable[Program], results: Path, sizes: Sizes, retrace: bool = False
) -> str:
    """Predicts the programs of which nothing is stored or whose code has changed, or all of them.
    Returns how many are predicted. Raises OSError."""
    results.mkdir(parents=True, exist_ok=True)
    unique = {program.key: program for program in programs}
    failed = 0
    for number, (key, program) in enumerate(unique.items(), 1):
        stored = load(key, results, REFERENCE)
        has_changed = stored is None or stored.code != code_of(program.text)
        try:
            predict(program, results, sizes, retrace or has_changed)
            outcome = "predicted"
        except UserError as error:
            failed, outcome = failed + 1, str(error)
        print(f"{number} of {len(unique)}: {key}: {outcome}", flush=True)
    return f"{len(unique) - failed} of {len(unique)} are predicted."


# ---- Traces


def traced(program: Program) -> Prediction:
    """Traces a program at the batch sizes of TRACED. Raises UserError."""
    traces = run_traces(program.text, program.options, TRACED)
    events = [trace["events"] for trace in traces.values()]
    needs = dict(zip(TRACED, map(memory_need, events), strict=True))
    with suppress(ValueError):  # then predict() traces the larger sizes
        needs |= {
            size: memory_need(at_batch(size, *events)) for size in BATCHES if size > TRACED[-1]
        }
    first = traces[TRACED[0]]
    return Prediction(
        needs=needs,
        steps={size: [*map(as_floats, trace["step"])] for size, trace in traces.items()},
        context_length=first["tokens"] // TRACED[0],
        flops_per_token=first["flops_per_token"],
        code=code_of(program.text),
    )


def as_floats(row: list) -> Work:
    """Returns the work of a row of a trace, in floats, as it is stored."""
    work = Work(*row)
    return work._replace(
        kernels=float(work.kernels), flops=float(work.flops), size=float(work.size)
    )


def at_batch(batch: int, first: list[Event], second: list[Event]) -> list[Event]:
    """Returns the events at a multiple of the first of TRACED, from those at both. Raises
    ValueError where these aren't the same events."""
    steps = (batch - TRACED[0]) // (TRACED[1] - TRACED[0])
    events = []
    for one, other in zip(first, second, strict=True):
        if one.released != other.released:
            raise ValueError("what is made differs between batches by more than its size")
        events.append(Event(one.size + (other.size - one.size) * steps, one.released))
    return events


def run_traces(
    text: bytes, options: list[str], batches: Sequence[int], optional: Sequence[int] = ()
) -> dict[int, dict]:
    """Returns what bench.predict.trace.trace() does of a script, by the batch size, without the
    `optional` ones that the script refuses. Raises UserError."""
    traces = {}
    for batch, answer in zip(batches, answers_of_child(text, options, batches), strict=True):
        if "trace" in answer:
            trace = answer["trace"]
            traces[batch] = trace | dict(events=[Event(*event) for event in trace["events"]])
        elif batch not in optional:
            raise UserError(REFUSED + answer["error"])
    return traces


def answers_of_child(text: bytes, options: list[str], batches: Sequence[int]) -> list[dict]:
    """Returns the answers of bench.predict.trace, in a process of its own, to each batch size.
    Raises UserError."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_bytes(text)
        requests = [dict(script=str(script), options=options, batch=batch) for batch in batches]
        code, out, err = children.run_child(
            [sys.executable, "-m", "bench.predict.trace", json.dumps(requests)],
            ROOT,
            environment=dict(
                OMP_NUM_THREADS="1",
                CUDA_VISIBLE_DEVICES="",  # it computes nothing
                PYTHONUTF8="1",  # PyTorch reads its own files by the locale
            ),
        )
    if code:
        raise UserError(REFUSED + processes.error_line(err))
    return json.loads(out.splitlines()[-1])


# ---- What is stored


def load(key: str, *folders: Path) -> Prediction | None:
    """Returns the prediction that the first of the folders stores by this key, maybe of other code
    of the script; None where none does."""
    for folder in folders:
        entry = read_kept(folder / NAME).get(key)
        if entry:
            with suppress(*DAMAGE):  # an older form
                return Prediction.from_json(entry)
    return None


def save(results: Path, key: str, prediction: Prediction) -> None:
    """Adds a prediction to the stored ones, a line for each; waits while another process does."""
    from filelock import FileLock  # PyTorch brings it along, and who only reads needs neither

    with FileLock(results / ".predict.lock"):
        entries = read_kept(results / NAME) | {key: prediction.as_json()}
        lines = (
            f"{json.dumps(key)}: {json.dumps(entry, separators=(',', ':'))}"
            for key, entry in entries.items()
        )
        write_whole(results / NAME, "{\n" + ",\n".join(lines) + "\n}\n")
