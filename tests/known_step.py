"""Trains with a step whose cost is known, for tests/test_hardware.py.

    python -m tests.known_step SCRIPT CASE DEVICE

The model's step is replaced by matrix products, and a stopwatch beside them says what they took;
all else is the script's own. A CASE is what is made slow besides: see SLOW. Prints as JSON what the
record says and what is true: seconds per step, and the bytes by which a tensor makes memory grow.
"""

import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median

import numpy as np
import torch

from bench.analysis.training import WARM_UP, Training
from bench.measure.hardware import best_dtype
from bench.measure.records import read_record
from gpt_speed.script import load_script

STEPS, EPOCHS, STEP_SECONDS = 40, 4, 0.05
TENSOR = 2**30
# The functions of a script, or methods of its classes, that are made slow, by so many seconds.
SLOW = {
    "nothing": {},
    "log line": {"Run.log": 0.3},
    "first step": {},
    "sample and memory": {"sample": 0.5, "Run.epoch": 0.5, "evaluate": 0.2},
}


def slowed(function, seconds: float):
    def slow(*arguments, **named):
        time.sleep(seconds)
        return function(*arguments, **named)

    return slow


class Products:
    """In place of compute_loss: products of about STEP_SECONDS, and the seconds that each took."""

    def __init__(self, device: torch.device, dtype: torch.dtype, first: float):
        size = 8192 if device.type == "cuda" else 1024
        self.device, self.first, self.seconds = device, first, []
        self.one = torch.ones(size, size, device=device, dtype=dtype)
        self.out = torch.empty_like(self.one)
        self.count = 3
        self()
        self()
        self.count = max(1, round(self.count * STEP_SECONDS / self.seconds[-1]))
        self.seconds.clear()

    def __call__(self, *_):
        began = time.perf_counter()
        for _ in range(self.count):
            torch.mm(self.one, self.one, out=self.out)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - began)
        if self.first and len(self.seconds) == 1:
            time.sleep(self.first)  # as compilation would
        return torch.zeros(())


def write_tokens(folder: Path, train: int) -> None:
    """Bytes to train on, so many, and fewer to evaluate."""
    tokens = {"train": train, "val": 100}
    for part, count in tokens.items():
        np.full(count, 97, "<u2").tofile(folder / f"{part}.bin")
    (folder / "meta.json").write_text(json.dumps(dict(tokenizer="bytes", tokens=tokens)))
    (folder / "vocabulary.json").write_text(
        json.dumps(dict(pattern="(?s:.)", special={}, tokens=list(map(chr, range(256)))))
    )


def growth_by_a_tensor(script, device: torch.device) -> list[int]:
    """By how many bytes the script's figure of its memory grows with a tensor; and by how many it
    should: on a GPU by what the driver then has less, as nvidia-smi tells, else by the tensor's."""
    name = "reserved_gb"
    with contextlib.suppress(OSError):  # Linux: the peak of the resident set starts again
        Path("/proc/self/clear_refs").write_text("5")
    before, free = script.memory_gb(device)[name], free_bytes(device)
    tensor = torch.ones(TENSOR, dtype=torch.uint8, device=device)  # written, so that it is there
    true = free - free_bytes(device) if device.type == "cuda" else tensor.nbytes
    return [round((script.memory_gb(device)[name] - before) * 1024**3), true]


def free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def main() -> int:
    path, case, device = sys.argv[1:]
    dtype = torch.float32 if device == "cpu" else getattr(torch, best_dtype()[0])
    script = load_script(Path(path))
    products = Products(torch.device(device), dtype, first=3.0 * (case == "first step"))
    script.compute_loss, script.backward_and_update = products, lambda loss, optimizer: None
    for name, seconds in SLOW[case].items():
        owner, _, method = name.rpartition(".")
        owner = getattr(script, owner) if owner else script
        setattr(owner, method, slowed(getattr(owner, method), seconds))
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(Path(folder), train=STEPS // EPOCHS * 2 * 16 + 1)
        sys.argv[1:] = [
            "--model",
            "cpu-demo",
            "--context-length",
            "16",
            "--batch-size",
            "2",
            "--eval-windows",
            "2",
            "--eval-freq",
            "5",
            "--epochs",
            str(EPOCHS),
            "--device",
            device,
            "--data",
            folder,
            "--results-dir",
            folder,
        ]
        if "compile" in script.Config.__dataclass_fields__:
            sys.argv.append("--no-compile")  # there is nothing to compile
        # Before the training, whose freed memory 01 keeps: a tensor would take its place.
        memory = growth_by_a_tensor(script, products.device)
        with contextlib.redirect_stdout(sys.stderr):
            code = script.main()
        if code:
            return code
        (file,) = Path(folder).glob("*.jsonl")
        record = read_record(file)
    tokens, true = record.tokens_per_step, products.seconds
    print(
        json.dumps(
            dict(
                average=[tokens / record.end["avg_tok_per_sec"], mean(true[1:])],
                median=[tokens / Training(record).tok_per_sec, median(true[WARM_UP:])],
                memory=memory,
            )
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
