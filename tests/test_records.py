"""bench/records.py: what a run leaves, read back."""

import pytest
from made_up import write_record

from bench.records import RecordError, read_record


def read(folder, *args, **kwargs):
    return read_record(folder / write_record(folder, "00_orig", *args, **kwargs)["record"])


def test_record(tmp_path):
    record = read(tmp_path, config=dict(compile=False))
    assert (record.stage, record.status, record.error) == ("00_orig", "complete", None)
    assert (record.tok_per_sec, record.speed_is_average) == (100.0, False)
    assert (record.device_name, record.uncompiled, record.mfu) == ("Some CPU", True, None)
    assert [record.val_loss_at(tokens) for tokens in (1024, 4096, 4097)] == [10.0, 8.0, None]
    short = read(tmp_path, speed=None)
    assert (short.tok_per_sec, short.speed_is_average) == (5.0, True)
    assert short.uncompiled is False


def test_gpu(tmp_path):
    gpu = "NVIDIA A100-SXM4-80GB"
    record = read(tmp_path, speed=31_200.0, gpu=gpu)
    assert record.device_name == gpu
    assert record.mfu == pytest.approx(0.1)
    assert read(tmp_path, speed=31_200.0, gpu="Some GPU").mfu is None


def test_precision(tmp_path):
    def precision(gpu=None, **config):
        return read(tmp_path, gpu=gpu, config=config).precision

    assert precision("A GPU") == "float32"
    assert precision("A GPU", matmul_precision="high") == "TF32"
    assert precision(matmul_precision="high") == "float32"  # a CPU has no TF32
    assert precision("A GPU", matmul_precision="high", dtype="bfloat16") == "bfloat16"
    assert precision(dtype=None) is None  # a record of before it was kept


def test_killed_and_failed(tmp_path):
    path = tmp_path / write_record(tmp_path, "00_orig")["record"]
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])  # cut off within its last line
    record = read_record(path)
    assert (record.status, record.error) == ("killed", "killed: its record has no end")
    assert (record.tok_per_sec, record.val_loss_at(4096)) == (None, 8.0)
    failed = read(tmp_path, status="out_of_memory", error="out of memory: lower --batch-size")
    assert failed.error == "out of memory: lower --batch-size"


@pytest.mark.parametrize(("text", "says"), [
    ("", "not a whole record"),
    ("{\n", "line 1"),
    ("[]\n", "line 1"),
    ('{"event": "strange"}\n', "line 1"),
    ('{"event": "start", "schema": 3}\n', "schema 3"),
    ('{"event": "start", "schema": 2}\n', "not a whole record"),
    ('{"event": "start", "schema": 1}\n', "not a whole record"),
])
def test_damaged(tmp_path, text, says):
    path = tmp_path / "record.jsonl"
    path.write_text(text)
    with pytest.raises(RecordError, match=says):
        read_record(path)
