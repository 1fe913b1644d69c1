"""Golden losses: every script still trains to the losses that it trained to before.

A change of the code must not move them; one that has to, says why in its commit, and writes them
anew with `PYTHONPATH=. python tests/test_golden.py`, which prints what moved, and by how much. With
names behind it, it writes only theirs: so a new variant gets its own.

Each script trains 20 steps on a text made by a formula, on a CPU, not compiled (but for one), in
float32; so do the variants that convert to a type by themselves, by a stand-in for torch.bfloat16.
"""

import contextlib
import json
import sys
import tempfile
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import (
    ONE_RANK,
    TINY,
    call_main,
    in_float32,
    load,
    read_record,
    settings_restored,
    without_bfloat16,
    write_ids,
)

from bench.machine import lacking as lacking_here
from patches import stack

GOLDEN = Path(__file__).with_name("golden.json")
# How far a loss may be off: 50 times what PyTorch 2.11 to 2.15 and a CPU held to AVX2 differed by
# (2e-7), and 5 times with PowerSGD (4e-6), Muon (2e-5) and, on another CPU, the modern model.
TOLERANCE = 1e-5
TOLERANCES = {  # what takes small differences further; besides those three, float16, and 8 bits
    "model-modern": 1e-4,
    "ddp-compression": 1e-4,
    "optimizer-muon": 1e-4,
    "precision-fp16": 2e-3,
    "optimizer-adamw-8bit": 1e-3,
    "precision-float8": 3e-3,
    "precision-stochastic": 1e-3,
    "parallel-muon": 1e-4,
}
LOG_STEPS = [0, 5, 10, 15, 19]


def write_formula(folder: Path) -> Path:
    """Tokens with something to learn: three alphabets, one after the other, that shift slowly."""
    i = np.arange(4_400)
    ids = 65 + (i * i // 50 + 7 * (i % 3)) % 60
    return write_ids(folder, "formula", train=ids[:4_000], val=ids[4_000:])


@cache
def scripts() -> dict[str, bytes]:
    return stack.rebuild_all()


def rows() -> dict[str, tuple[str, list[str], str]]:
    """What is trained: its script, its options, and what it can't do without."""
    names = stack.Series.of(stack.load()).names
    trained = {
        name: (name, ["--no-compile"] if b"compile: bool" in scripts()[name] else [], "")
        for name in names
    }
    trained["01 compiled"] = names[-2], ["--compile"], "a compiler"
    trained["00 dropout"] = names[0], ["--dropout", "0.1"], ""
    for variant in stack.load_variants():
        options, needs = variant.option_sets[0]
        # It says that it needs a GPU; so few products it can do without.
        needs = "" if variant.name == "precision-fp16" else needs
        trained[variant.name] = variant.name, ["--no-compile", *options], needs
    return trained


def losses_of(name: str, options: list[str], folder: Path) -> list[list[float]]:
    """The training and the validation loss of each log line."""
    path = folder / stack.file_of(name)
    path.write_bytes(scripts()[name])
    with settings_restored():
        script = load(path)
    small = mock.patch.dict(script.MODELS["cpu-demo"], layers=2, heads=2, width=32)
    with small, mock.patch.object(torch, "bfloat16", torch.float32), without_bfloat16():
        result = call_main(
            script,
            *TINY,
            *in_float32(script),
            "--batch-size",
            4,
            "--device",
            "cpu",
            "--learning-rate",
            1e-3,
            "--max-steps",
            20,
            "--eval-freq",
            5,
            "--eval-windows",
            6,
            "--results-dir",
            folder / "results",
            "--data",
            write_formula(folder / "data"),
            *(option.replace("{scratch}", str(folder / "scratch")) for option in options),
            variables=ONE_RANK if b"torch.distributed as dist" in scripts()[name] else {},
        )
    assert result.returncode == 0, result.stderr
    start, *events = read_record(folder / "results")
    assert start["config"].get("compile", False) is ("--compile" in options)
    logs = [event for event in events if event["event"] == "log"]
    assert [log["step"] for log in logs] == LOG_STEPS
    return [[log["train_loss"], log["val_loss"]] for log in logs]


def largest_difference(losses: list, others: list) -> float:
    return float(np.abs(np.array(losses) - np.array(others)).max())


def lacking(needs: str) -> str | None:
    if needs != "a compiler":
        return lacking_here(needs, dict(gpus=0))
    try:
        torch.compile(lambda x: 2 * x + 1)(torch.ones(8))
    except Exception as error:
        return f"torch.compile doesn't work here: {str(error).splitlines()[0]}"
    return None


# The variants, and what compiles, are slow tests.
LADDER = {*stack.Series.of(stack.load()).names, "00 dropout"}


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.slow] * (row not in LADDER)) for row in rows()]
)
def test_losses_are_those_of_before(row, tmp_path):
    name, options, needs = rows()[row]
    if reason := lacking(needs):
        pytest.skip(reason)
    difference = largest_difference(
        losses_of(name, options, tmp_path), json.loads(GOLDEN.read_text())["rows"][row]
    )
    assert difference < TOLERANCES.get(name, TOLERANCE)


def test_every_script_has_golden_losses():
    golden = json.loads(GOLDEN.read_text())
    missing = " ".join(rows().keys() - golden["rows"].keys() - golden["left out"].keys())
    assert not missing, f"to write them: PYTHONPATH=. python tests/test_golden.py {missing}"


def test_what_changes_no_loss_has_the_losses_of_its_base():
    """As each patch's header says; and so has the compiled script."""
    golden, series = json.loads(GOLDEN.read_text())["rows"], stack.Series.of(stack.load())
    bases = {"01 compiled": series.last} | {
        patch.name: series.base_of(patch)
        for patch in stack.load() + stack.load_variants()
        if patch.fields["Loss"] == "unchanged" and patch.name in golden
    }
    for name, base in bases.items():
        assert largest_difference(golden[name], golden[base]) < 1e-6, name


def main() -> None:
    """Writes the losses anew, of the rows that are named or of all, and prints what moved."""
    names = sys.argv[1:] or [*rows()]
    if unknown := {*names} - rows().keys():
        sys.exit(f"error: no script {', '.join(unknown)}; there are {', '.join(rows())}")
    golden = json.loads(GOLDEN.read_text())
    golden["torch"] = golden["torch"] if sys.argv[1:] else torch.__version__
    for row in names:
        name, options, needs = rows()[row]
        if reason := lacking(needs):  # what was measured elsewhere stays
            golden["left out"][row] = reason
            continue
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(None):
            losses = losses_of(name, options, Path(folder))
        before = golden["rows"].get(row)
        moved = f"{largest_difference(losses, before):.1e}" if before else "new"
        print(f"{row}: {moved}", flush=True)
        golden["rows"][row] = losses
        golden["left out"].pop(row, None)
    stored = golden.pop("rows")
    lines = [f"  {json.dumps(row)}: {json.dumps(stored[row])}" for row in rows() if row in stored]
    about = json.dumps(golden, indent=1).removesuffix("\n}")
    GOLDEN.write_text(f'{about},\n "rows": {{\n' + ",\n".join(lines) + "\n }\n}\n")


if __name__ == "__main__":
    main()
