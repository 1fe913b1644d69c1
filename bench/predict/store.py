"""What a script takes on GPUs that aren't there: traced once (bench.predict.trace), then stored.

Predictions are stored in NAME, in a folder of results: by a script's name and its options, the
memory at each batch size, the work of a step at two of them, and a hash of the script's code. A
prediction stays when the code changes; `predict` then names the script.
"""

import ast
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from bench import processes
from bench.catalogue import EPOCHS, Scripts
from bench.common import BOOK_TOKENS, REFERENCE, ROOT, read_kept, sha256, write_whole
from gpt_speed import children, speed
from gpt_speed.cards import Card
from gpt_speed.common import UserError
from gpt_speed.memory import MemoryNeed, memory_need
from gpt_speed.speed import Work

BATCHES = [2**k for k in range(10)]
OTHERS = 614  # MiB: the driver's own, its kernels, and a display
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

    def seconds(self, batch: int, card: Card) -> dict[str, float] | None:
        """Returns the seconds of a step, as gpt_speed.speed.seconds()."""
        return speed.seconds(speed.work_at(batch, self.steps), card)

    def tok_per_sec(self, batch: int, card: Card) -> float | None:
        """Returns the tok/sec of one GPU."""
        times = self.seconds(batch, card)
        return batch * self.context_length / sum(times.values()) if times else None

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
        if speeds := self.speeds(batch, card, gpus):
            return span(*(tok_per_sec / 1000 for tok_per_sec in speeds))
        if self.tok_per_sec(batch, card):
            return speed.UNCHECKED
        precision = speed.missing_precision(self.steps[TRACED[0]], card)
        # Every GPU computes in float32; how fast one by --memory does isn't known.
        return "float32 speed unknown" if precision == "float32" else f"not in {precision}"

    def minutes(self, batch: int, card: Card) -> float | None:
        """Returns the minutes of the published epochs on the book."""
        expected = self.tok_per_sec(batch, card)
        return expected and EPOCHS * BOOK_TOKENS / expected / 60

    def mfu(self, batch: int, card: Card) -> float | None:
        """Returns the share of the datasheet's 16-bit throughput that is used."""
        expected = self.tok_per_sec(batch, card)
        return expected and expected * self.flops_per_token / card.peak


def fitting(
    needs: dict[int, MemoryNeed], mib: int, batch: int | None = None, others: int = OTHERS
) -> int:
    """Returns the largest of BATCHES, or `batch` instead, if it fits a card with this many MiB, of
    which `others` are left free; 0 where none does."""
    return max(
        (
            size
            for size in ([batch] if batch else BATCHES)
            if size in needs and needs[size].minimum <= mib - others
        ),
        default=0,
    )


def span(low: float, high: float) -> str:
    """Writes a range of figures, with decimals by its upper end."""
    if high >= 10:
        places = 0
    else:
        places = 1 if high >= 1 else 2
    return f"{low:,.{places}f}–{high:,.{places}f}"


def predict(
    scripts: Scripts,
    script: str | Path,
    options: list[str],
    results: Path,
    smallest: int | None = None,
    batch: int | None = None,
    retrace: bool = False,
) -> Prediction:
    """Predicts what a script with these options takes at each of BATCHES, and at `batch`; the sizes
    below TRACED, which have to be traced one by one, only if a card of `smallest` MiB is too small
    for these. Unless `retrace`, a prediction stored in `results` or results/reference is returned
    as it is, also where the script has changed since. Raises UserError, StackError."""
    text = scripts.text(script)
    old = None if retrace else load(scripts, script, options, results, REFERENCE)
    new = old or trace(text, options)
    is_small = smallest is not None and smallest < new.needs[TRACED[0]].minimum
    new = with_sizes(new, text, options, sizes_wanted(is_small, batch), batch)
    if new != old and results.is_dir():  # it may be misspelt: nothing is made for this alone
        save(results, key_of(scripts, script, options), new)
    return new


def sizes_wanted(is_small: bool, batch: int | None) -> set[int]:
    """Returns those of BATCHES that a prediction is made for, on a small card all, and `batch`."""
    sizes = {size for size in BATCHES if is_small or size > TRACED[0]}
    return sizes | {batch} if batch else sizes


def with_sizes(
    prediction: Prediction, text: bytes, options: list[str], sizes: set[int], batch: int | None
) -> Prediction:
    """Adds the memory at those sizes that a prediction lacks. Raises UserError where the script
    refuses `batch`; others, which nobody asked for, may be no multiple of --micro-batches."""
    missing = sorted(sizes - prediction.needs.keys())
    if not missing:
        return prediction
    traces = ask(text, options, missing, optional=[size for size in missing if size != batch])
    needs = {size: memory_need(answer["events"]) for size, answer in traces.items()}
    return prediction._replace(needs=dict(sorted((prediction.needs | needs).items())))


def predict_all(
    scripts: Scripts,
    wanted: list[tuple[str | Path, list[str]]],
    results: Path,
    smallest: int,
    retrace: bool = False,
) -> str:
    """Predicts the scripts of which nothing is stored or whose code has changed, or all of them.
    Returns how many are predicted. Raises StackError, OSError."""
    results.mkdir(parents=True, exist_ok=True)
    runs = {key_of(scripts, script, options): (script, options) for script, options in wanted}
    failed = 0
    for number, (key, (script, options)) in enumerate(runs.items(), 1):
        old = load(scripts, script, options, results, REFERENCE)
        is_current = old and old.code == code_of(scripts.text(script)) and not retrace
        try:
            predict(scripts, script, options, results, smallest, retrace=not is_current)
            outcome = "predicted"
        except UserError as error:
            failed, outcome = failed + 1, str(error)
        print(f"{number} of {len(runs)}: {key}: {outcome}", flush=True)
    return f"{len(runs) - failed} of {len(runs)} are predicted."


def trace(text: bytes, options: list[str]) -> Prediction:
    """Traces a script at the batch sizes of TRACED. Raises UserError."""
    traces = ask(text, options, TRACED)
    events = [answer["events"] for answer in traces.values()]
    needs = dict(zip(TRACED, map(memory_need, events), strict=True))
    with suppress(ValueError):  # then predict() traces these
        needs |= {
            size: memory_need(at_batch(size, *events)) for size in BATCHES if size > TRACED[-1]
        }
    steps = {
        size: [Work(*row[:3], *map(float, row[3:])) for row in answer["step"]]
        for size, answer in traces.items()
    }
    first = traces[TRACED[0]]
    return Prediction(
        needs, steps, first["tokens"] // TRACED[0], first["flops_per_token"], code_of(text)
    )


def at_batch(batch: int, first: list[int], second: list[int]) -> list[int]:
    """Returns the events at a multiple of the first of TRACED, from those at both. Raises
    ValueError where these aren't the same events."""
    steps, events = (batch - TRACED[0]) // (TRACED[1] - TRACED[0]), []
    for one, other in zip(first, second, strict=True):
        if one != other and min(one, other) < 0:
            raise ValueError("what is made differs between batches by more than its size")
        events.append(one + (other - one) * steps)
    return events


def ask(
    text: bytes, options: list[str], batches: Sequence[int], optional: Sequence[int] = ()
) -> dict[int, dict]:
    """Traces a script in a process of its own. Returns what bench.predict.trace.trace() does, by
    the batch size, without the `optional` ones that the script refuses. Raises UserError."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_bytes(text)
        requests = [dict(script=str(script), options=options, batch=batch) for batch in batches]
        code, out, err = children.run_child(
            [sys.executable, "-m", "bench.predict.trace", json.dumps(requests)],
            ROOT,
            OMP_NUM_THREADS="1",
            CUDA_VISIBLE_DEVICES="",  # it computes nothing
            PYTHONUTF8="1",
        )  # PyTorch reads its own files by the locale
    if code:
        raise UserError(REFUSED + processes.error_line(err))
    traces = {}
    for batch, answer in zip(batches, json.loads(out.splitlines()[-1]), strict=True):
        if "trace" in answer:
            traces[batch] = answer["trace"]
        elif batch not in optional:
            raise UserError(REFUSED + answer["error"])
    return traces


def key_of(scripts: Scripts, script: str | Path, options: list[str]) -> str:
    return " ".join([scripts.canonical(script), *options])


def code_of(text: bytes) -> str:
    """Hashes a script without its comments, docstrings and help texts; in every version of Python
    to the same."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [
                line
                for line in node.body
                if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
            ]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", None) == "option":
            node.args[1:2] = []  # option(default, help text, ...)
        elif isinstance(node, ast.JoinedStr):  # 3.12.1 adds empty texts to the formats of f-strings
            node.values = [part for part in node.values if getattr(part, "value", None) != ""]
    return sha256(json.dumps(plain(tree)).encode())[:16]


def plain(node):
    """Returns a part of a syntax tree for json, without empty fields: which ones there are depends
    on the version of Python."""
    if isinstance(node, ast.AST):
        fields = {
            name: plain(value) for name, value in ast.iter_fields(node) if value not in ([], None)
        }
        return {type(node).__name__: fields}
    return [plain(part) for part in node] if isinstance(node, list) else repr(node)


def load(
    scripts: Scripts, script: str | Path, options: list[str], *folders: Path
) -> Prediction | None:
    """Returns the prediction that the first of the folders stores, maybe of other code of the
    script; None where none does. Raises StackError."""
    key = key_of(scripts, script, options)
    for folder in folders:
        if entry := read_kept(folder / NAME).get(key):
            with suppress(AttributeError, LookupError, TypeError, ValueError):  # an older form
                return Prediction(
                    {int(size): MemoryNeed(*need) for size, need in entry["needs"].items()},
                    {
                        size: [Work(*work) for work in entry["works"][str(size)]["step"]]
                        for size in TRACED
                    },
                    entry["context_length"],
                    entry["flops_per_token"],
                    entry["code"],
                )
    return None


def save(results: Path, key: str, prediction: Prediction) -> None:
    """Adds a prediction to the stored ones, a line for each; waits while another process does."""
    from filelock import FileLock  # which PyTorch brings along

    works = {size: dict(step=step) for size, step in prediction.steps.items()}
    entry = dict(
        needs=prediction.needs,
        works=works,
        context_length=prediction.context_length,
        flops_per_token=prediction.flops_per_token,
        code=prediction.code,
    )
    with FileLock(results / ".predict.lock"):
        entries = read_kept(results / NAME) | {key: entry}
        lines = (
            f"{json.dumps(key)}: {json.dumps(entry, separators=(',', ':'))}"
            for key, entry in entries.items()
        )
        write_whole(results / NAME, "{\n" + ",\n".join(lines) + "\n}\n")
