"""bench/stages.py: which runs are compared, what is told of the others, and the table."""

import json

import pytest
from synthetic import rows_of, write_record

from bench import stages
from patches import stack


def test_latest_run_of_each_stage_and_group(tmp_path, capsys):
    write_record(tmp_path, "00_orig", "2026-01-01T00:00:00Z", 1000)
    write_record(tmp_path / "stages", "00_orig", "2026-01-03T00:00:00Z", 1500)  # the latest
    write_record(tmp_path, "00_orig", "2026-01-04T00:00:00Z", 9999, status="interrupted")
    write_record(tmp_path / "reference" / "a", "00_orig", "2026-01-05T00:00:00Z", 1200)  # not ours
    write_record(tmp_path, "01_opt_single_gpu", "2026-01-01T00:00:00Z", 4500)
    # An H100's record of before `mfu` moved to the tools: what stands in it isn't used.
    write_record(tmp_path, "02_opt_multi_gpu_ddp", "2026-01-01T00:00:00Z", 412_345,
                 gpu="NVIDIA H100 80GB HBM3", mfu=0.9, reserved_gb=None,
                 median_step_tok_per_sec=None, p25_step_tok_per_sec=None,
                 p75_step_tok_per_sec=None)
    write_record(tmp_path, "02_opt_multi_gpu_ddp", "2026-01-02T00:00:00Z", 2000,
                 gpu="Fast | $x_1$ GPU")
    write_record(tmp_path, "03_fused_adamw", "2026-01-09T00:00:00Z", 8888)  # none of the stages
    killed = write_record(tmp_path, "00_orig", "2026-01-06T00:00:00Z", 7777)
    killed.write_text("".join(killed.read_text().splitlines(keepends=True)[:-1]))
    torn = write_record(tmp_path, "00_orig", "2026-01-07T00:00:00Z", 7777)
    torn.write_text(torn.read_text()[:-30])

    runs = stages.read_runs(tmp_path)
    said = capsys.readouterr()
    assert said.out == "3 runs that did not complete are left out\n"
    assert said.err == ""
    published, _ = stages.read_published(stack.load())
    cells = {(row[0], row[2]): row for row in rows_of(stages.table(runs, published))}
    assert len(cells) == 4
    assert cells["Test CPU", "00 original"][1:] == [
        "cpu-demo / 256", "00 original", "1,500", "1.00", "1,400–1,600", "1.25", "n/a", "7.500",
        "12,525", "1.00",
    ]
    assert cells["Test CPU", "01 optimized"][3:5] == ["4,500", "3.00"]
    # No 00 in this group: no factor. No median: the average. MFU: of two GPUs' 989e12 FLOP/s.
    assert cells["NVIDIA H100 80GB HBM3", "02 DDP × 2"][3:] == [
        "412,344", "n/a", "n/a", "n/a", "20.8%", "7.500", "419,259", "33.47",
    ]
    assert (r"Fast \| $x_1$ GPU", "02 DDP × 2") in cells


def test_damaged_records_are_named_and_skipped(tmp_path, capsys):
    good = write_record(tmp_path, "00_orig", "2026-01-02T00:00:00Z", 2000).read_bytes()
    lines = good.splitlines(keepends=True)
    damaged = {
        "broken": b"".join([*lines[:1], b'{"event": \n', *lines[2:]]),
        "utf8": b"".join([*lines[:2], b'{"event": "\xff"}\n', *lines[3:]]),
        "fields": good.replace(b'"val_loss": 7.5', b'"loss": 7.5'),
        "nan": good.replace(b'"reserved_gb": 1.25', b'"reserved_gb": NaN'),
        "loss": good.replace(b'"train_loss": 9', b'"train_loss": "nine"'),
        "list": b"[]\n" + good,
        "type": good.replace(b'"context_length": 256', b'"context_length": "many"'),
        "empty": b"",
        "no_start": b"".join(lines[1:]),
        "deep": good + b"[" * 100_000 + b"\n",
    }
    for name, content in damaged.items():
        (tmp_path / f"z-{name}.jsonl").write_bytes(content)
    (run,) = stages.read_runs(tmp_path)
    assert run.tok_per_sec == 2000
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == len(damaged)
    for line, name in zip(said.err.splitlines(), sorted(damaged), strict=True):
        assert line.startswith("skipped: ") and f"z-{name}.jsonl, " in line


def test_published_figures():
    runs, source = stages.read_published(stack.load())
    assert [run.tok_per_sec for run in runs] == [12525, 142156, 419259]
    assert [run.reserved_gb for run in runs] == [26.2617, 22.5078, 22.7969]
    assert [run.world_size for run in runs] == [1, 1, 4]
    assert runs[0].group.title == "A100 (published): GPT-2 124M, context 1,024"
    assert source.endswith("02 DDP × 4; <https://github.com/rasbt/LLMs-from-scratch/tree/main/ch05/"
                           "10_llm-training-speed>")
    data = json.loads(stages.PUBLISHED.read_text(encoding="utf-8"))
    assert data["bf16_flops"] == 312e12
    # Without runs the table has the published ones.
    cells = rows_of(stages.table([], runs))
    assert [row[3] for row in cells] == ["12,525", "142,156", "419,259"]


def test_published_figures_of_every_technique():
    """As the series was published; the techniques after it are ours."""
    published = {patch.name: patch.published for patch in stack.load()}
    assert [published.pop(name) for name in list(published) if name[:2] <= "10"] == [
        (12526, 26.2422, 1), (27648, 26.2422, 1), (28399, 26.2422, 1), (28402, 26.2422, 1),
        (45486, 13.7871, 1), (55256, 11.5645, 1), (91901, 5.9004, 1), (112046, 6.1875, 1),
        (127345, 5.8906, 1), (142156, 22.5078, 1),
    ]
    assert published.pop("ddp") == (419259, 22.7969, 4)
    assert set(published.values()) == {None}


@pytest.mark.parametrize("content", ["{", "[]", '{"gpu": "A100"}'])
def test_published_figures_damaged(tmp_path, monkeypatch, content):
    monkeypatch.setattr(stages, "PUBLISHED", tmp_path / "published.json")
    stages.PUBLISHED.write_text(content)
    with pytest.raises((ValueError, LookupError, TypeError)):
        stages.read_published(stack.load())
