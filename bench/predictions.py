"""What a script would take on GPUs that aren't there: traced once (bench.trace), then kept.

What was predicted stands in NAME, in a folder of results: by the checksum of a script's code
and its options, the memory at each batch size, and the work of a step at two of them.
"""

import ast
import hashlib
import io
import json
import re
import sys
import tempfile
import tokenize
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from bench import processes, speed
from bench.common import REFERENCE, ROOT, UserError, write_whole
from bench.memory import Need, need
from bench.speed import TERA, Card

BATCHES = [2**k for k in range(10)]
OTHERS = 614  # MiB: the driver's own, its kernels, and a display
TRACED = 8, 16  # from these two follow the larger ones: all sizes are a + b times the batch
NAME = "predict.json"


class Prediction(NamedTuple):
    needs: dict[int, Need]  # by the batch size
    works: dict[int, dict]  # at two batch sizes: "step" and "evaluation", as in bench.trace.Notes
    context_length: int
    flops_per_token: int

    def seconds(self, batch: int, card: Card, part: str = "step") -> dict[str, float] | None:
        """As bench.speed.seconds, of a step (or an evaluation of a batch of each text)."""
        works = {size: work[part] for size, work in self.works.items()}
        return speed.seconds(speed.work_at(batch, works), card)

    def tok_per_sec(self, batch: int, card: Card, micro_batches: int = 1) -> float | None:
        """Of one GPU, with an update after so many batches; None where the card lacks what the
        script needs."""
        times = self.seconds(batch, card)
        if not times:
            return None
        # Instead of an update, which passes 7 times over the weights, gradients are added: 3 times.
        saved = times["optimizer"] * 4 / 7 * (1 - 1 / micro_batches)
        return batch * self.context_length / (sum(times.values()) - saved)

    def speed_range(self, batch: int, card: Card) -> str:
        """Of tok/sec, in thousands."""
        expected = self.tok_per_sec(batch, card)
        if not expected:
            return "not in bfloat16"
        low, high = (expected * (1 + sign * speed.RANGE) / 1000 for sign in (-1, 1))
        return f"{low:,.0f}–{high:,.0f}" if high >= 10 else f"{low:,.1f}–{high:,.1f}"

    def mfu(self, batch: int, card: Card) -> float | None:
        """The share of the datasheet's bfloat16 rate, as bench.records.Record.mfu."""
        expected = self.tok_per_sec(batch, card)
        return expected and expected * self.flops_per_token / (card.bfloat16 * TERA)


def largest_within(needs: dict[int, Need], mib: int) -> int:
    """The largest power of two that fits so many MiB; 0 where none does."""
    return max((batch for batch in BATCHES if batch in needs and needs[batch].least <= mib),
               default=0)


def largest(needs: dict[int, Need], mib: int) -> int:
    """That of a card with so many MiB in all."""
    return largest_within(needs, mib - OTHERS)


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


def ask(text: bytes, options: list[str], batches: Sequence[int]) -> dict[int, dict]:
    """What bench.trace.trace tells, by the batch size. Raises UserError."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_bytes(text)
        request = dict(script=str(script), options=options, batches=batches)
        code, out, err = processes.run_child(
            [sys.executable, "-m", "bench.trace", json.dumps(request)], ROOT,
            OMP_NUM_THREADS="1")  # it computes nothing
    if code:
        told = processes.error_line(err or f"ended by {code}")
        raise UserError(f"what it takes can't be predicted: {told}")
    return dict(json.loads(out))


def predict(text: bytes, options: list[str], results: Path, smallest: int | None = None,
            batch: int | None = None) -> Prediction:
    """What a script with these options needs at each of BATCHES, and at `batch`. The smaller ones,
    which have to be traced one by one, only if a card of `smallest` MiB doesn't have what the first
    of TRACED takes.

    What was predicted once is kept in `results` or results/reference. Raises UserError.
    """
    known = kept(text, options, results) or kept(text, options, REFERENCE)
    new = not known
    if new:
        traces = ask(text, options, TRACED)
        events = [each["events"] for each in traces.values()]
        needs = {size: need(each["events"]) for size, each in traces.items()}
        for size in BATCHES:
            if size > max(TRACED):
                with suppress(ValueError):  # it is traced below
                    needs[size] = need(at_batch(size, *events))
        works = {size: {part: each[part] for part in ("step", "evaluation")}
                 for size, each in traces.items()}
        size, trace = next(iter(traces.items()))
        known = Prediction(needs, works, trace["tokens"] // size, trace["flops_per_token"])
    small = smallest is not None and smallest < known.needs[TRACED[0]].least
    wanted = [size for size in BATCHES if small or size > TRACED[0]] + [batch] * bool(batch)
    wanted = [size for size in wanted if size not in known.needs]
    for size in wanted:
        try:
            (trace,) = ask(text, options, [size]).values()
            known.needs[size] = need(trace["events"])
        except UserError:  # such as a batch that isn't a multiple of --micro-batches
            if size == batch:
                raise
    if wanted or new:
        saved = read(results)
        needs = {size: known.needs[size] for size in sorted(known.needs)}
        saved[key_of(text, options)] = known._replace(needs=needs)._asdict() | dict(
            version=version())
        write_whole(results / NAME, one_entry_per_line(saved))
    return known


def one_entry_per_line(saved: dict) -> str:
    return "{\n" + ",\n".join(
        f"{json.dumps(key)}: {json.dumps(each, separators=(',', ':'))}"
        for key, each in saved.items()) + "\n}\n"


def version() -> int:
    """That of bench.trace, read and not imported: it loads PyTorch."""
    text = (ROOT / "bench" / "trace.py").read_text(encoding="utf-8")
    return int(re.search(r"^VERSION = (\d+)", text, re.MULTILINE)[1])


def key_of(text: bytes, options: list[str]) -> str:
    return f"{hashlib.sha256(code_of(text)).hexdigest()} {' '.join(options)}"


@cache
def code_of(text: bytes) -> bytes:
    """A script without comments, docstrings and empty lines: what is predicted doesn't depend on
    them."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return text
    lines = text.decode().replace("\r\n", "\n").split("\n")
    for token in tokenize.tokenize(io.BytesIO(text).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            lines[line - 1] = lines[line - 1][:column]
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            first, last = node.lineno - 1, node.end_lineno - 1
            before = lines[first][:node.col_offset]
            after = lines[last].encode()[node.end_col_offset:]
            if not before.strip() and not after.strip():  # alone on its lines
                lines[first:last + 1] = [""] * (last + 1 - first)
    return "\n".join(line.rstrip() for line in lines if line.strip()).encode()


def read(folder: Path) -> dict:
    try:
        return dict(json.loads((folder / NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def kept(text: bytes, options: list[str], folder: Path) -> Prediction | None:
    """What was predicted before."""
    try:
        saved = read(folder)[key_of(text, options)]
        needs = {int(size): Need(*each) for size, each in saved["needs"].items()}
        works = {size: {part: {name: [float(a), float(b), float(c)] for name, (a, b, c) in
                               saved["works"][str(size)][part].items()}
                        for part in ("step", "evaluation")} for size in TRACED}
        found = Prediction(needs, works, saved["context_length"], saved["flops_per_token"])
        return found if TRACED[0] in needs and saved["version"] == version() else None
    except (LookupError, ValueError, TypeError, AttributeError):  # of an older form, or damaged
        return None
