"""bench/measure/records.py: what a run leaves, read back."""

import re

import pytest
from made_up import record_events, write_record

from bench.measure.journal import loose_records
from bench.measure.records import Kind, RecordError, make_record, read_record

GPU = "NVIDIA A100-SXM4-80GB"


def record_of(events=None, **settings):
    return make_record("a.jsonl", events or record_events("00_orig", **settings))


def logs_of(events: list[dict]) -> list[dict]:
    return [event for event in events if event["event"] == "log"]


def test_record(tmp_path):
    record = read_record(write_record(tmp_path, "00_orig", config=dict(compile=False)))
    assert (record.stage, record.status, record.outcome.kind) == (
        "00_orig", "complete", Kind.COMPLETE)
    assert (record.tok_per_sec, record.speed_is_average) == (100.0, False)
    assert (record.device_name, record.uncompiled, record.mfu) == ("Some CPU", True, None)
    assert record.steps_per_epoch == 390 // 4  # of 100,000 // 256 windows, in batches of 4
    short = record_of(steps=4, start=dict(data=None))
    assert (short.tok_per_sec, short.speed_is_average) == (90.0, True)
    assert (short.uncompiled, short.steps_per_epoch) == (False, None)


def test_losses_and_times():
    """A step of 1,024 tokens takes 10.24 s, the first one 10; log lines after 1, 4 and 8 steps."""
    record = record_of(record_events("a"))
    assert [point.tokens for point in record.curve] == [1024, 4096, 8192]
    assert [point.seconds for point in record.curve] == pytest.approx([10, 40.72, 81.68])
    assert [point[2:] for point in record.curve] == [(10.5, 10.0), (8.5, 8.0), (7.5, 7.0)]
    assert record.first_step_seconds == 10.0
    assert record.first_step_excess == pytest.approx(-0.24)
    assert record.quartiles == pytest.approx((100, 100, 100))
    losses = {1000: 10.0, 1024: 10.0, 4096: 8.0, 4097: None, None: 7.0}
    assert {tokens: record.val_loss_after(tokens) for tokens in losses} == losses
    # The first step counts as long as the others.
    assert record.reached(9.0) == pytest.approx((2560, 25.6))
    assert record.reached(8.0) == pytest.approx((4096, 40.96))
    assert record.reached(11.0) == pytest.approx((1024, 10.24))
    assert record.reached(6.9) is None
    # The lines are after 10.24, 40.96 and 81.92 s; before the first one nothing is known.
    assert [record.loss_at(seconds) for seconds in (10.0, 10.24, 25.6, 40.96, 100.0)] == [
        None, *map(pytest.approx, (10.0, 9.0, 8.0, 7.0))]


@pytest.mark.parametrize(("losses", "lowest", "last", "tokens"), [
    ((10.0, 6.0, 6.5), 6.0, 6.5, 1024 + 3072 / 4),
    ((10.0, None, 7.0), 7.0, 7.0, 1024 + 7168 / 3),  # not finite: by the lines around it
    ((None, None, None), None, None, None),
])
def test_other_losses(losses, lowest, last, tokens):
    events = record_events("a")
    for log, loss in zip(logs_of(events), losses, strict=True):
        log["val_loss"] = loss
    record = record_of(events)
    assert (record.lowest_val_loss, record.val_loss_after(None)) == (lowest, last)
    assert (record.reached(9.0) or [None])[0] == (tokens and pytest.approx(tokens))


def test_quartiles():
    """Of single steps, without the two of warm-up; too few steps have none."""
    events = record_events("a")
    logs_of(events)[1]["seconds"] = [999.0, 1024 / 10, 1024 / 20]
    logs_of(events)[2]["seconds"] = [1024 / rate for rate in (30, 40, 60, 50)]
    assert record_of(events).quartiles == pytest.approx((22.5, 35.0, 47.5))
    assert record_of(steps=4).quartiles is None


def test_a_run_that_went_on():
    """Its times begin where the earlier run stopped."""
    events = record_events("a")
    events[1:1] = [dict(event="resume", train_seconds=100.0), dict(event="checkpoint", seconds=0.5)]
    record = record_of(events)
    assert (record.curve[0].seconds, record.first_step_seconds) == (110, 10)
    assert record.reached(9.0) == pytest.approx((2560, 125.6))
    assert [save["seconds"] for save in record.checkpoints] == [0.5]


def test_several_processes():
    """They see as many times the tokens, and have as many times the peak."""
    record = record_of(speed=31_200.0, gpu=GPU, config=dict(world_size=4), tokens=16_384)
    assert (record.device_name, record.tokens_per_step) == (GPU, 4096)
    assert (record.val_loss_after(4000), record.steps_per_epoch) == (8.0, 390 // 16)
    # Of a text of less than 8 steps they make more passes in an epoch.
    many = record_of(gpu=GPU, config=dict(world_size=64), tokens=16_384)
    assert many.steps_per_epoch == 6 * 390 // (4 * 64) == 9
    assert record.mfu == pytest.approx(0.1 / 4)
    assert record_of(gpu="Some GPU").mfu is None


@pytest.mark.parametrize(("gpu", "config", "precision"), [
    (GPU, {}, "float32"),
    (GPU, dict(matmul_precision="high"), "TF32"),
    (None, dict(matmul_precision="high"), "float32"),  # a CPU has no TF32
    (GPU, dict(matmul_precision="high", dtype="bfloat16"), "bfloat16"),
    (GPU, dict(autocast="bfloat16"), "bfloat16"),
    (None, dict(dtype=None), None),  # a record of before it was kept
])
def test_precision(gpu, config, precision):
    assert record_of(gpu=gpu, config=config).precision == precision


def test_too_large(tmp_path, capsys):
    """A line of 1 GB is no reason to fill the memory."""
    path = write_record(tmp_path, "00_orig")
    with open(path, "ab") as file:
        file.truncate(2**30)
    with pytest.raises(OSError, match="Too large for a record"):
        read_record(path)
    assert loose_records(tmp_path) == []
    assert "00_orig-20260101T000000Z-1.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_after_an_evaluation_stand_apart_among_ranks(ranks):
    """As 02 counts: there they start on idle GPUs."""
    events = record_events("02_opt_multi_gpu_ddp", tokens=4096 * ranks, steps=12,
                           config=dict(world_size=ranks))
    start, first, log, *_, end = events
    second = log["seconds"][0]
    events = [start, first, *[log | dict(seconds=[1000.0, second])] * 5, end]
    low, *_ = make_record("x", events).quartiles
    assert (low == pytest.approx(100)) is (ranks == 2)


def test_killed(tmp_path):
    path = write_record(tmp_path, "00_orig")
    path.write_bytes(path.read_bytes()[:-9])  # cut off within its last line
    record = read_record(path)
    assert (record.status, record.outcome.text) == ("killed", "killed: its record has no end")
    assert (record.tok_per_sec, record.val_loss, record.val_loss_after(4096)) == (None, None, 8.0)


@pytest.mark.parametrize(("settings", "says"), [
    (dict(status="out_of_memory", error="out of memory: lower it"), "^out of memory: lower it$"),
    (dict(status="diverged", error="lower it"), "^diverged: lower it$"),
    (dict(status="interrupted"), "^interrupted: no reason given$"),
    (dict(steps=4, avg_tok_per_sec=None), "too short .* raise --max-tokens"),
    (dict(config=dict(flops_per_token=None)), "flops_per_token is None"),
    (dict(reserved_gb="much"), "reserved_gb is 'much'"),
    (dict(reserved_gb=None), None),  # it isn't known everywhere
])
def test_without_figures(settings, says):
    record = record_of(**settings)
    if not says:
        assert record.outcome.complete and record.tok_per_sec == 100
        return
    assert re.search(says, record.outcome.text)
    assert record.outcome.kind is (
        Kind.OUT_OF_MEMORY if record.status == "out_of_memory" else Kind.FAILED)


@pytest.mark.parametrize(("damage", "says"), [
    (lambda text: "", "not a whole record"),
    (lambda text: "{\n" + text, "line 1"),
    (lambda text: "[]\n", "line 1"),
    (lambda text: "[" * 100_000 + "\n", "line 1"),
    (lambda text: text.replace('"epoch"', '"strange"'), "line 5: .*no such event: 'strange'"),
    (lambda text: text.replace('"schema": 3', '"schema": 2'), "schema 2"),
    (lambda text: text + text, "not a whole record"),
    (lambda text: text.replace('"config"', '"other"'), "not a whole record"),
    (lambda text: text.replace('"seconds"', '"other"'), "not a whole record"),
    (lambda text: text.replace("10.24", "0"), "not a whole record"),  # steps of no time
    (lambda text: text.replace('"complete", "error"', '"failed", "other"'), "not a whole record"),
])
def test_damaged(tmp_path, damage, says):
    path = write_record(tmp_path, "a")
    path.write_text(damage(path.read_text()))
    with pytest.raises(RecordError, match=says):
        read_record(path)
