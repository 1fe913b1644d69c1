"""bench/studies/stages.py: the plan, which runs are compared, what is told of the others, the table
and the pictures."""

import re

import pytest
from made_up import (
    CPU,
    MACHINE,
    carry_out,
    cells_of,
    rows_of_text,
    setup_of,
    shown,
    write_journal,
    write_record,
)
from matplotlib import pyplot as plt

from bench.common import ROOT
from bench.measure.lengths import epochs_within
from bench.report.tables import found_in, markdown
from bench.studies.stages import (
    Stages,
    bars_table,
    draw_speed,
    published_bars,
    read_bars,
)
from patches import stack

FIRST, LAST, DDP = "00_orig", "01_opt_single_gpu", "02_opt_multi_gpu_ddp"
H100 = "NVIDIA H100 80GB HBM3"
LONG = "A processor whose name is longer than what a title of a picture has room for @ 2.70GHz"


@pytest.mark.parametrize(("gpus", "ranks", "published"), [(0, 2, None), (1, 1, None),
                                                          (4, 4, 419_259)])
def test_plan(tmp_path, gpus, ranks, published):
    machine = MACHINE | dict(gpus=gpus) if gpus else CPU
    plan = next(Stages().plans(setup_of(tmp_path, machine)))
    assert [run.script for run in plan.runs] == [
        ROOT / name for name in (stack.FIRST, stack.LAST, stack.DDP)]
    assert [run.compared_to for run in plan.runs] == [None, FIRST, LAST]
    assert [run.published for run in plan.runs] == [12_525, 142_156, published]
    assert (plan.runs[2].processes, plan.runs[2].torchrun) == (ranks, True)
    assert (plan.whole, plan.tokens, plan.epochs) == (True, None, None)


@pytest.mark.parametrize(("machine", "minutes", "args", "limited"), [
    (MACHINE, 25, {}, True), (MACHINE, 25, dict(max_tokens=9), False), (MACHINE, None, {}, False),
    (CPU, 25, {}, False)])
def test_a_report_limits_them_on_a_gpu(tmp_path, machine, minutes, args, limited):
    setup = setup_of(tmp_path, machine, **args)
    setup.minutes = minutes
    plan = next(Stages().plans(setup))
    assert bool(plan.within) == limited and plan.tokens == args.get("max_tokens")


@pytest.mark.parametrize(("peak", "epochs"), [(312e12, range(2, 15)), (312e13, [15]), (312e9, [1])])
def test_epochs_that_fit(tmp_path, peak, epochs):
    """The published 15, or as many as the limit holds."""
    setup = setup_of(tmp_path, MACHINE)
    setup.minutes = 25
    plan = next(Stages().plans(setup))
    assert epochs_within(plan, setup, dict(bfloat16=peak), {}) in epochs


def test_newest_complete_run_of_each_stage_and_group(tmp_path, capsys):
    """By hand or in the journal; runs that did not complete are counted."""
    plan = next(Stages().plans(setup_of(tmp_path)))
    write_journal(tmp_path, "stages", plan, [
        dict(name=FIRST, speed=1500.0, start=dict(time="20260103T000000Z")),
        dict(name=LAST, speed=4000.0, start=dict(time="20260101T000000Z")),
        dict(name=DDP, error="it broke")])
    write_record(tmp_path, FIRST, "20260102T000000Z", speed=1000.0)
    write_record(tmp_path, FIRST, "20260104T000000Z", speed=9999.0, status="interrupted")
    write_record(tmp_path / "reference" / "a", FIRST, "20260105T000000Z", speed=1200.0)  # not ours
    # Times of schema 1 had signs within.
    write_record(tmp_path, LAST, "2026-01-02T00:00:00Z", speed=4500.0, steps=5,
                 config=dict(batch_size=8))
    write_record(tmp_path, LAST, "20260103T000000Z", avg_tok_per_sec=None,
                 steps=4)
    write_record(tmp_path, DDP, speed=400_000.0, gpu=H100, reserved_gb=None,
                 config=dict(world_size=2, batch_size=32))
    write_record(tmp_path, DDP, "20260102T000000Z", gpu="Fast | $x_1$ GPU")
    write_record(tmp_path, "03_fused_adamw", "20260109T000000Z")  # none of the stages
    killed = write_record(tmp_path, FIRST, "20260106T000000Z", speed=7777.0)
    killed.write_text("".join(killed.read_text().splitlines(keepends=True)[:-1]))
    torn = write_record(tmp_path, FIRST, "20260107T000000Z", speed=7777.0)
    torn.write_text(torn.read_text()[:-30])

    bars = read_bars(tmp_path)
    assert capsys.readouterr() == (
        "5 runs that did not complete are left out\n", "")
    cells = {(line[0], line[2]): line[1:] for line in rows_of_text(
        markdown(bars_table(bars, published_bars())))}
    assert len(cells) == 4
    assert cells["Some CPU", "00 original, batch 4"] == [
        "cpu-demo / 256", "00 original, batch 4", "1,500", "1.00", "1,500–1,500", "1.25", "",
        "7.000"]
    assert cells["Some CPU", "01 optimized, batch 8"][2:4] == ["4,500", "3.00"]
    # No 00 in this group: no factor. MFU: of two GPUs' 989e12 FLOP/s.
    assert cells[H100, "02 DDP × 2, batch 32"][2:] == [
        "400,000", "n/a", "400,000–400,000", "n/a", "20.2%", "7.000"]
    assert (r"Fast \| $x_1$ GPU", "02 DDP × 1, batch 4") in cells  # not the published one
    summary = Stages().summary(tmp_path)
    assert rows_of_text(summary) == rows_of_text(markdown(bars_table(bars, published_bars())))
    assert "\nPublished figures: A100, PyTorch 2.6" in summary


def test_damaged_records_are_named_and_skipped(tmp_path, capsys):
    good = write_record(tmp_path, FIRST, speed=2000.0).read_bytes()
    lines = good.splitlines(keepends=True)
    damaged = {
        "broken": b"".join([*lines[:1], b'{"event": \n', *lines[2:]]),
        "utf8": b"".join([*lines[:2], b'{"event": "\xff"}\n', *lines[3:]]),
        "fields": good.replace(b'"val_loss": 7.0', b'"loss": 7.0'),
        "nan": good.replace(b'"reserved_gb": 1.25', b'"reserved_gb": NaN'),
        "loss": good.replace(b'"val_loss": 7.0', b'"val_loss": "seven"'),
        "list": b"[]\n" + good,
        "type": good.replace(b'"context_length": 256', b'"context_length": "many"'),
        "empty": b"",
        "no_start": b"".join(lines[1:]),
        "deep": good + b"[" * 100_000 + b"\n",
    }
    for name, content in damaged.items():
        assert content != good
        (tmp_path / f"z-{name}.jsonl").write_bytes(content)
    (bar,) = read_bars(tmp_path)
    assert bar.tok_per_sec == 2000
    said = capsys.readouterr()
    assert said.out == ""
    names = [re.match(r"skipped: .*z-(\w+)\.jsonl, ", line)[1] for line in said.err.splitlines()]
    assert sorted(names) == sorted(damaged)


def test_published_figures():
    """They stand alone where nothing is measured."""
    bars = published_bars()
    assert bars[0].group.title == "A100 (published): GPT-2 124M, context 1,024"
    assert [line[2:6] for line in rows_of_text(markdown(bars_table([], bars)))] == [
        ["00 original", "12,525", "1.00", "n/a"], ["01 optimized", "142,156", "11.35", "n/a"],
        ["02 DDP × 4", "419,259", "33.47", "n/a"]]


def test_losses_beside_the_published_ones(tmp_path):
    for _ in carry_out(Stages(), setup_of(tmp_path)):
        pass
    cells = cells_of(Stages().extra(tmp_path, found_in(tmp_path, "stages")))
    assert list(cells) == [
        "00 original, batch 4", "01 optimized, batch 4", "02 DDP × 2, batch 4", "00, published"]
    assert list(cells["00 original, batch 4"].values())[1:] == ["10.500, 10.000", "7.500, 7.000"]
    assert list(cells["00, published"].values())[1:] == ["9.535, 9.609", "0.150, 6.914"]


# ---- Pictures


def bars_of(folder, *machines) -> list:
    for day, (gpu, speed) in enumerate(machines, 1):
        for factor, stage in enumerate((FIRST, LAST, DDP), 1):
            write_record(folder, stage, f"2026010{day}T000000Z", speed=speed * factor**4.0, gpu=gpu,
                         config=dict(world_size=2 if stage == DDP else 1))
    return read_bars(folder)


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def test_speed(tmp_path):
    """Also where the memory isn't known, and of another text."""
    write_record(tmp_path, LAST, "20260108T000000Z", start=dict(data=dict(
        corpus="x" * 99, tokenizer="bytes")))
    write_record(tmp_path, FIRST, "20260109T000000Z", gpu="$x_1$", reserved_gb=None)
    bars = bars_of(tmp_path, (None, 1000), (LONG, 100_000))
    told = "01 16.0× and 02 81.0× as fast as 00 (one run of each)\n"
    assert {f"{told}Some CPU: cpu-demo, context 256", "16,000  (16.00×)",
            "8,100,000  (81.00×)", "1.25",
            "02 DDP × 2, batch 4,\n16,384 tokens", "02 DDP × 4", "419,259  (33.47×)", "26.26",
            "speed, tok/sec (all processes)", "reserved memory, GB (per process)", "n/a",
            f"{told}{LONG[:59]}…: cpu-demo, context 256", "$x_1$: cpu-demo, context 256",
            f"Some CPU: cpu-demo, context 256\ntext: {'x' * 59}…, its tokens bytes",
            } <= set(shown(draw_speed([*bars, *published_bars()])))
