"""What a script would take on GPUs that aren't there: traced once (bench.predict.trace), then
stored.

Predictions stand in NAME, in a folder of results: by a script's name and its options, the memory at
each batch size, the work of a step at two of them, and a hash of the script's code. They stay when
the code changes; `changed` then names the script.
"""

import ast
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from bench import processes
from bench.cards import Card
from bench.catalogue import EPOCHS, Scripts
from bench.common import (
    BOOK_TOKENS,
    REFERENCE,
    ROOT,
    UserError,
    listed,
    read_kept,
    sha256,
    write_whole,
)
from bench.predict import speed
from bench.predict.allocator import Need, need
from bench.predict.speed import Work

BATCHES = [2**k for k in range(10)]
OTHERS = 614  # MiB: the driver's own, its kernels, and a display
TRACED = 8, 16  # from these two follow the larger ones: all sizes are a + b times the batch
NAME = "predict.json"
SECONDS = 1800  # for one trace, on a slow machine too
REFUSED = "what it takes can't be predicted: "


class Prediction(NamedTuple):
    needs: dict[int, Need]  # by the batch size
    works: dict[int, dict[str, list[Work]]]  # of a "step", at two batch sizes
    context_length: int
    flops_per_token: int
    code: str | None = None  # as code_of() the script that was traced; None: not known

    def seconds(self, batch: int, card: Card) -> dict[str, float] | None:
        """Returns the seconds of a step, as bench.predict.speed.seconds() does."""
        works = {size: work["step"] for size, work in self.works.items()}
        return speed.seconds(speed.work_at(batch, works), card)

    def tok_per_sec(self, batch: int, card: Card, micro_batches: int = 1) -> float | None:
        """Of one GPU, with an update after this many batches; None where the card lacks what the
        script needs."""
        times = self.seconds(batch, card)
        if not times:
            return None
        # Instead of an update, which passes 7 times over the weights, gradients are added: 3 times.
        saved = times["optimizer"] * 4 / 7 * (1 - 1 / micro_batches)
        return batch * self.context_length / (sum(times.values()) - saved)

    @property
    def is_compiled(self) -> bool:
        """As bench.predict.speed.is_compiled."""
        return speed.is_compiled(next(iter(self.works.values()))["step"])

    def range(self, batch: int, card: Card) -> float:
        """Either way of tok_per_sec(), as a share of it."""
        return speed.range_of(card, self.is_compiled, self.seconds(batch, card))

    def speeds(self, batch: int, card: Card, gpus: int = 1) -> tuple[float, float] | None:
        """The least and the most tok/sec to expect of this many GPUs that send in no time; None as
        in tok_per_sec()."""
        expected = self.tok_per_sec(batch, card)
        if not expected:
            return None
        share = self.range(batch, card)
        return gpus * expected * (1 - share), gpus * expected * (1 + share)

    def speed_range(self, batch: int, card: Card, gpus: int = 1) -> str:
        """speeds(), in thousands; or why there are none."""
        speeds = self.speeds(batch, card, gpus)
        if not speeds:
            work = next(iter(self.works.values()))["step"]
            precision = speed.lacking(work, card)
            # Every GPU computes in float32; how fast this one does, its file doesn't say.
            return "speed unknown" if precision == "float32" else f"not in {precision}"
        return span(*(each / 1000 for each in speeds))

    def minutes(self, batch: int, card: Card, gpus: int = 1) -> float | None:
        """Of the published epochs on the book; None as in tok_per_sec()."""
        expected = self.tok_per_sec(batch, card)
        return expected and EPOCHS * BOOK_TOKENS / (gpus * expected) / 60

    def mfu(self, batch: int, card: Card) -> float | None:
        """The share of the datasheet's 16-bit rate, as bench.measure.records.Record.mfu."""
        expected = self.tok_per_sec(batch, card)
        return expected and expected * self.flops_per_token / card.peak


def largest(needs: dict[int, Need], mib: int, others: int = OTHERS) -> int:
    """The largest power of two that fits a card with this many MiB, of which `others` are left
    free; 0 where none does."""
    return max((batch for batch in BATCHES if batch in needs
                and needs[batch].least <= mib - others), default=0)


def fitting(needs: dict[int, Need], mib: int, batch: int | None = None) -> int:
    """`batch`, or else the largest power of two; 0 where it doesn't fit such a card."""
    batch = batch or largest(needs, mib)
    return batch if batch and needs[batch].least <= mib - OTHERS else 0


def span(low: float, high: float) -> str:
    """A range of figures, whose places follow from its upper end."""
    places = 0 if high >= 10 else 1 if high >= 1 else 2
    return f"{low:,.{places}f}–{high:,.{places}f}"


def at_batch(batch: int, first: list[int], second: list[int]) -> list[int]:
    """The events at a batch size, from those at the two of TRACED. Raises ValueError where they
    aren't the same events."""
    (a, b), events = TRACED, []
    for one, other in zip(first, second, strict=True):
        size = one + (other - one) * (batch - a) / (b - a)
        if (one < 0 or other < 0) and one != other or size != int(size):
            raise ValueError("what is made differs between batches by more than its size")
        events.append(int(size))
    return events


def predict(scripts: Scripts, script: str | Path, options: list[str], results: Path,
            smallest: int | None = None, batch: int | None = None, retrace: bool = False
            ) -> Prediction:
    """Predicts what a script with these options needs at each of BATCHES, and at `batch`. The
    smaller ones, which have to be traced one by one, are left out unless a card of `smallest` MiB
    lacks what the first of TRACED takes.

    A prediction that `results` or results/reference stores is returned as it is, unless `retrace`
    is asked for, also where the script has changed since: see changed(). Raises UserError.
    """
    text = scripts.text(script)
    old = None if retrace else (load(scripts, script, options, results)
                             or load(scripts, script, options, REFERENCE))
    new = extend(old or trace(text, options), text, options, smallest, batch)
    if new is not old and results.is_dir():  # it may be misspelt: nothing is made for this alone
        save(results, {key_of(scripts, script, options): new})
    return new


def ask(text: bytes, options: list[str], batches: Sequence[int]) -> dict:
    """Returns what bench.predict.trace.trace() does, by the batch size, or the UserError in place
    of a trace that a script doesn't let be made. Raises UserError where the child breaks, or is
    stuck."""
    if not batches:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_bytes(text)
        requests = [dict(script=str(script), options=options, batch=batch) for batch in batches]
        try:
            code, out, err = processes.run_child(
                [sys.executable, "-m", "bench.predict.trace", json.dumps(requests)], ROOT,
                timeout=SECONDS * len(batches),
                OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="",  # it computes nothing
                PYTHONUTF8="1")  # PyTorch reads its own files by the locale
        except subprocess.TimeoutExpired as stuck:
            raise UserError(f"{REFUSED}no answer after {stuck.timeout:.0f} s")
    if code:
        raise UserError(REFUSED + processes.error_line(err))
    return {batch: answer["trace"] if "trace" in answer else UserError(REFUSED + answer["error"])
            for batch, answer in zip(batches, json.loads(out.splitlines()[-1]), strict=True)}


def trace(text: bytes, options: list[str]) -> Prediction:
    """Traces a script at the batch sizes of TRACED. Raises UserError."""
    traces = ask(text, options, TRACED)
    for traced in traces.values():
        if isinstance(traced, UserError):
            raise traced
    events = [traced["events"] for traced in traces.values()]
    needs = {size: need(traced["events"]) for size, traced in traces.items()}
    for size in BATCHES:
        if size > max(TRACED):
            with suppress(ValueError):  # it is traced in extend()
                needs[size] = need(at_batch(size, *events))
    size, first = next(iter(traces.items()))
    return Prediction(needs, {size: works_from(traced) for size, traced in traces.items()},
                      first["tokens"] // size, first["flops_per_token"], code_of(text))


def extend(old: Prediction, text: bytes, options: list[str], smallest: int | None,
           batch: int | None) -> Prediction:
    """Adds what predict() is asked for besides; returns `old` itself where nothing is missing.
    Raises UserError."""
    small = smallest is not None and smallest < old.needs[TRACED[0]].least
    sizes = [size for size in BATCHES if small or size > TRACED[0]] + ([batch] if batch else [])
    needs = dict(old.needs)
    traces = ask(text, options, [size for size in sizes if size not in needs])
    for size, traced in traces.items():
        if not isinstance(traced, UserError):
            needs[size] = need(traced["events"])
        elif size == batch:  # else it may be one that isn't a multiple of --micro-batches
            raise traced
    return old if needs == old.needs else old._replace(
        needs={size: needs[size] for size in sorted(needs)})


def works_from(parts: dict) -> dict[str, list[Work]]:
    """Reads the work of a step from JSON. Raises LookupError, TypeError, ValueError."""
    return dict(step=[Work(str(kind), str(precision), bool(aligned), *map(float, figures))
                      for kind, precision, aligned, *figures in parts["step"]])


# ---- What is stored ----------------------------------------------------------------------------


def key_of(scripts: Scripts, script: str | Path, options: list[str]) -> str:
    return " ".join([scripts.canonical(script), *options])


def code_of(text: bytes) -> str:
    """Hashes a script without its comments, docstrings and help texts; all of it, if it isn't
    Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return sha256(text)[:16]
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [line for line in node.body if not (
                isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", None) == "option":
            node.args[1:2] = []  # option(default, help text, ...)
    return sha256(ast.unparse(tree).encode())[:16]


def load(scripts: Scripts, script: str | Path, options: list[str], folder: Path
         ) -> Prediction | None:
    """Returns a stored prediction, maybe of other code of the script; None where there is none.
    Raises StackError."""
    try:
        saved = read_kept(folder / NAME)[key_of(scripts, script, options)]
        needs = {int(size): Need(*need) for size, need in saved["needs"].items()}
        works = {size: works_from(saved["works"][str(size)]) for size in TRACED}
        prediction = Prediction(needs, works, saved["context_length"], saved["flops_per_token"],
                                saved["code"])
        return prediction if TRACED[0] in needs else None
    except (LookupError, ValueError, TypeError, AttributeError):  # of an older form, or damaged
        return None


def save(results: Path, predictions: dict[str, Prediction], only: bool = False) -> None:
    """Adds predictions to the stored ones, or keeps `only` these."""
    entries = {} if only else read_kept(results / NAME)
    entries |= {key: prediction._asdict() for key, prediction in predictions.items()}
    write_whole(results / NAME, as_lines(entries))


def as_lines(entries: dict) -> str:
    """JSON with a line for each entry."""
    return "{\n" + ",\n".join(
        f"{json.dumps(key)}: {json.dumps(entry, separators=(',', ':'))}"
        for key, entry in entries.items()) + "\n}\n"


def changed(scripts: Scripts, predicted: Iterable[tuple[str | Path, Prediction]]) -> str | None:
    """Names the scripts whose code isn't that which was predicted, in a line; None where there are
    none. Raises StackError."""
    names = dict.fromkeys(scripts.canonical(script) for script, prediction in predicted
                          if prediction.code != code_of(scripts.text(script)))
    return f"The code of {listed(names)} has changed since it was predicted." if names else None


# ---- All of them -------------------------------------------------------------------------------


def predict_all(scripts: Scripts, wanted: list[tuple[str | Path, list[str]]], results: Path,
                smallest: int, retrace: bool = False) -> str:
    """Predicts those of which nothing is stored or whose code has changed, or all of them, and
    stores these alone. Returns how many there are. Raises UserError, StackError, OSError."""
    keys = {key_of(scripts, script, options): (script, options) for script, options in wanted}
    same: dict[tuple, list[str]] = {}  # the keys of equal code and options
    for key, (script, options) in keys.items():
        same.setdefault((code_of(scripts.text(script)), *options), []).append(key)
    predictions: dict[str, Prediction] = {}
    for number, ((code, *options), names) in enumerate(same.items(), 1):
        text = scripts.text(keys[names[0]][0])
        stored = [] if retrace else [load(scripts, *keys[key], folder)
                                  for key in names for folder in (results, REFERENCE)]
        old = next((prediction for prediction in stored
                    if prediction and prediction.code == code), None)
        try:
            new = extend(old or trace(text, options), text, options, smallest, None)
            predictions |= dict.fromkeys(names, new)
            outcome = "as it was" if new is old else "predicted"
        except UserError as error:
            outcome = str(error)
        print(f"{number} of {len(same)}: {', '.join(names)}: {outcome}", flush=True)
        save(results, {key: predictions[key] for key in names if key in predictions})
    save(results, {key: predictions[key] for key in keys if key in predictions}, only=True)
    return f"{len(predictions)} of {len(keys)} are predicted."
