"""Records and ladders as the programs leave them, with figures that are made up."""

import json
from pathlib import Path


def write_record(folder: Path, stage: str, time: str, speed: float, *, gpu=None,
                 status="complete", error=None, **end) -> Path:
    """The record of a run; `end` changes fields of its last line."""
    device = "cuda" if gpu else "cpu"
    start = {
        "event": "start", "schema": 1, "stage": stage, "time": time,
        "config": {
            "model": "cpu-demo", "context_length": 256, "batch_size": 8, "world_size": 2,
            "device": device, "dtype": "bfloat16", "flops_per_token": 1e9,
        },
        "environment": {"gpu": gpu, "cpu": "Test CPU"},
    }
    logs = [
        {"event": "log", "epoch": 1, "step": step, "tokens": 2048 * (step + 1),
         "train_loss": 10 - step, "val_loss": 10.5 - step, "train_seconds": step + 0.5}
        for step in range(3)
    ]
    last = {
        "event": "end", "status": status, "error": error, "avg_tok_per_sec": speed - 1,
        "median_step_tok_per_sec": speed, "p25_step_tok_per_sec": speed - 100,
        "p75_step_tok_per_sec": speed + 100, "reserved_gb": 1.25, "val_loss": 7.5,
    } | end
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stage}-{device}-{time.replace(':', '')}-1.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in (start, *logs, last)))
    return path


def ladder_row(k: int, **changes) -> dict:
    """Rung k of a ladder, k % faster than the baseline; from rung 10 on its loss is far off."""
    speeds = [100.0 + k, 110.0 + k, 104.0 + k, 106.0 + k]
    return dict(
        name=f"{k:02}-a-technique" if k else "00_orig", label=f"{k} technique {k}",
        technique=f"technique number {k}", loss="unchanged", processes=1, error=None, rounds=4,
        speeds=speeds, tok_per_sec=105.0 + k, reserved_gb=2 - k / 20, mfu=None,
        val_loss=8.0 + k / 1000 + (k > 9), factor=1 + 1 / (104 + k) if k else None,
        factor_baseline=(105 + k) / 105 if k else None, published_factor=1.5 if k else None,
        published_factor_baseline=k + 0.5 if k else None, verdict="faster" if k else None,
    ) | changes


def ladder_state(device="cpu", name="Test $x_1$ CPU", count=13, **changes) -> dict:
    """A ladder of which rung 7 failed."""
    rows = [ladder_row(k) for k in range(count)]
    rows[7] = ladder_row(7, speeds=[], rounds=0, tok_per_sec=None, factor_baseline=None,
                         factor=None, reserved_gb=None, val_loss=None, verdict=None,
                         error="failed: out of memory: lower --batch-size")
    return dict(schema=2, time="2026-01-01T00:00:00Z", rows=rows, seed_noise=0.05, results=[],
                matmul_peak={},
                plan=dict(machine=dict(device=device, name=name))) | changes


def without_state() -> dict:
    """A leave-one-out beside such a ladder: rung 1 conflicts, 2 failed, 3 is clear, 4 isn't."""
    rows = [dict(name="01_opt_single_gpu", error=None, factor_technique=None, verdict=None)]
    for k, error, factor, verdict in (
        (1, "conflict: later patches build on its lines", None, None),
        (2, "failed: ended by signal 9", None, None),
        (3, None, 1.25, "faster"), (4, None, 1.01, "no measurable change"),
    ):
        rows.append(dict(name=f"without-{k:02}-a-technique", error=error, verdict=verdict,
                         factor_technique=factor))
    return ladder_state(rows=rows)


def write_state(folder: Path, state: dict, kind: str = "ladder") -> Path:
    path = folder / kind / f"{kind}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(state))
    return path


def rows_of(markdown: str) -> list[list[str]]:
    """The cells of a table, without its two lines of heading."""
    lines = [line[2:-2].split(" | ") for line in markdown.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines[2:]]
