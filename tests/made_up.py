"""Made-up runs, plans and records, for the tests of the tools."""

import json
from pathlib import Path

from bench import runner
from bench.plans import Plan, Run

MACHINE = dict(
    device="cuda", gpus=1, name="Some | GPU", torch="2.13", python="3.11", os="Linux x86_64",
    threads=2, cpu="Some CPU", driver="570", capability="8.0", cuda="12.8",
)
CPU = MACHINE | dict(device="cpu", gpus=0, name="Some CPU")
PEAK = dict(float32=1e12, TF32=2e12, bfloat16=4e12)


def write_record(
    folder: Path, name: str, round: int = 1, speed: float | None = 100.0, *, seed: int = 123,
    loss: float = 8.0, config: dict | None = None, gpu: str | None = None, **end
) -> dict:
    """Writes the record of a run with a log line at 4,096 tokens; returns its result."""
    config = dict(
        model="cpu-demo", device="cuda" if gpu else "cpu", batch_size=4, context_length=256,
        world_size=1, flops_per_token=10**9, dtype="float32", matmul_precision="highest",
    ) | (config or {})
    environment = dict(torch="2.13", gpu=gpu, cpu="Some CPU")
    end = dict(
        status="complete", error=None, avg_tok_per_sec=5.0, median_step_tok_per_sec=speed,
        reserved_gb=1.0, first_step_seconds=10.0 / round, val_loss=1.0, attention_backend="manual",
        p25_step_tok_per_sec=speed, p75_step_tok_per_sec=speed,
    ) | end
    events = [
        dict(event="start", schema=1, stage=name, time="2026-01-01T00:00:00Z", config=config,
             environment=environment),
        *(dict(event="log", tokens=tokens, train_seconds=tokens / 1000, train_loss=9.0,
               val_loss=val_loss)
          for tokens, val_loss in ((1024, 10.0), (4096, loss), (9216, 1.0))),
        dict(event="epoch", epoch=1), dict(event="end", **end),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-cuda-{round}-{seed}.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return dict(name=name, round=round, seed=seed, record=path.name, error=None, seconds=1.0)


def make_plan(folder: Path, *names: str, machine: dict = MACHINE, **settings) -> Plan:
    """A ladder of `names`, its state at folder/plan/plan.json."""
    script = folder / "script.py"
    script.write_text("")
    runs = [Run(name, name, script, f"technique {name}", "rounding", compared_to=before)
            for before, name in zip([None, *names], names, strict=False)]
    settings = dict(tokens=4096, data=folder, results=folder) | settings
    return Plan("plan", runs, machine, **settings)


def make_state(plan: Plan, results: list[dict]) -> dict:
    return runner.new_state(plan, 4) | dict(matmul_peak=PEAK, results=results)
