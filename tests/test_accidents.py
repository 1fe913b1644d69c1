"""Bad input and accidents: one clear line, a non-zero exit, and nothing lost or half-written."""

import json
import resource
import signal
import subprocess
import sys

import pytest
from conftest import ROOT, STAGES, TINY, environment, run_python, write_tokens


def no_record(bench) -> bool:
    return not bench.results.exists() or not list(bench.results.iterdir())


def test_text_too_short(bench):
    write_tokens(bench.data, train=60, val=30)
    bench.fails("--batch-size", 4, says="4 window(s) of context length 16 need 65")
    write_tokens(bench.data, val=16)
    bench.fails(says="1 window(s) of context length 16 need 17")
    assert no_record(bench)


@pytest.mark.parametrize("part", ["train.bin", "val.bin"])
def test_truncated_tokens(bench, part):
    (bench.data / part).write_bytes((bench.data / part).read_bytes()[:-2])
    bench.fails(says=f"{part} is damaged")
    (bench.data / part).unlink()
    bench.fails(says=f"{part} is damaged: 0 bytes")
    assert no_record(bench)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"tokens": {"train": "many"}}'])
def test_damaged_meta(bench, text):
    (bench.data / "meta.json").write_text(text)
    bench.fails(says="meta.json is damaged")


def test_ids_outside_the_vocabulary(bench):
    meta = json.loads((bench.data / "meta.json").read_text())
    (bench.data / "meta.json").write_text(json.dumps(meta | {"vocabulary": 120}))
    bench.fails(says="and the vocabulary has 120")
    assert bench.record()[-1]["status"] == "failed"
    (bench.data / "meta.json").write_text(json.dumps(meta | {"vocabulary": 60_000}))
    bench.fails(says="60000 token ids")


def test_tokenizer_files_are_missing(bench):
    meta = json.loads((bench.data / "meta.json").read_text())
    (bench.data / "meta.json").write_text(json.dumps(meta | {"tokenizer": "gpt2"}))
    bench.fails(says="GPT-2's tokenizer isn't in")


def test_width_and_heads(bench):
    program = (
        "import sys; from pathlib import Path\n"
        f"sys.path.insert(0, {str(ROOT / 'tests')!r}); from conftest import load\n"
        "script = load(Path(sys.argv[1])); script.MODELS['cpu-demo']['heads'] = 7\n"
        "sys.argv = sys.argv[1:]; sys.exit(script.main())"
    )
    result = run_python("-c", program, *bench.command("00_orig"))
    assert result.returncode == 1
    assert result.stderr == "error: width 256 can't be divided among 7 heads\n"


@pytest.mark.parametrize("name", ["tpu", "cuda", "cuda:7", "cuda:x", "mps"])
def test_unknown_device(bench, name):
    bench.fails("--device", name, says="device")
    assert no_record(bench)


@pytest.mark.parametrize(
    "options", [["--batch-size", "0"], ["--dropout", "1"], ["--learning-rate", "nan"],
                ["--epochs", "some"], ["--model", "gpt5"], ["--name", "a/b"], ["--unknown"]]
)
def test_options_out_of_range(bench, options):
    bench.fails(*options, code=2)
    assert no_record(bench)


def test_results_cannot_be_written(bench):
    bench.results.write_text("a file where the folder should be")
    for stage in ("00_orig", "01_opt_single_gpu"):
        bench.fails(stage=stage, says="can't write results to")
    bench.results = bench.results / "below"
    bench.fails(says="can't write results to")


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space as Linux does")
@pytest.mark.parametrize("stage", ["00_orig", "01_opt_single_gpu"])
def test_out_of_memory(bench, stage):
    write_tokens(bench.data, train=200_000)
    limit = (5 * 1024**3,) * 2
    how = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_AS, limit)}
    options = ["--batch-size", 4000, *(["--no-compile"] if stage[1] == "1" else [])]
    bench.fails(*options, stage=stage, says="lower --batch-size", **how)
    assert bench.record()[-1]["status"] == "out_of_memory"


def test_diverged(bench):
    bench.fails("--learning-rate", 1e30, "--max-steps", 20, "--eval-freq", 2, says="not finite")
    *_, log, end = bench.record()
    assert log["event"] == "log" and log["train_loss"] is None  # JSON has no NaN
    assert end["status"] == "diverged"


def test_diverged_on_all_ranks(bench):
    stage = "02_opt_multi_gpu_ddp"
    result = bench.run(stage, "--no-compile", "--learning-rate", 1e30, "--eval-freq", 2)
    assert result.returncode != 0
    assert result.stderr.count("not finite") == 1 and "rank 1:" not in result.stderr
    assert bench.record()[-1]["status"] == "diverged"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other signals")
@pytest.mark.parametrize(
    "stage, number, code",
    [("00_orig", signal.SIGINT, 130), ("01_opt_single_gpu", signal.SIGTERM, 143),
     ("02_opt_multi_gpu_ddp", signal.SIGTERM, None)],
)
def test_interrupted(bench, stage, number, code):
    options = ["--eval-freq", 1, "--epochs", 1000, *(["--no-compile"] if stage[1] != "0" else [])]
    process = subprocess.Popen(
        [sys.executable, *map(str, bench.command(stage, *options))],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
    )
    printed = 0
    while printed < 2:
        printed += "Step tok/sec" in process.stdout.readline()
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code if code else process.returncode != 0
    assert "error: interrupted by signal" in stderr
    events = bench.record()
    assert events[-1]["status"] == "interrupted" and events[-1]["val_loss"] is not None
    assert sum(event["event"] == "log" for event in events) >= 2


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other signals")
def test_killed_run_keeps_its_lines(bench):
    command = bench.command("00_orig", "--eval-freq", 1, "--epochs", 1000)
    process = subprocess.Popen([sys.executable, *map(str, command)], stdout=subprocess.PIPE,
                               text=True, env=environment())
    printed = 0
    while printed < 3:
        printed += "Step tok/sec" in process.stdout.readline()
    process.kill()
    process.communicate()
    assert sum(event["event"] == "log" for event in bench.record()) >= 3


def test_two_runs_at_once_write_two_records(bench):
    command = [sys.executable, *map(str, bench.command("00_orig", "--max-steps", 1))]
    runs = [subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment()) for _ in "ab"]
    assert [run.wait(timeout=120) for run in runs] == [0, 0]
    assert len(list(bench.results.iterdir())) == 2


def test_ddp_without_torchrun(bench):
    result = run_python(*bench.command("02_opt_multi_gpu_ddp")[4:])
    assert result.returncode == 2
    assert "torchrun --nproc_per_node=2 02_opt_multi_gpu_ddp.py" in result.stderr
    assert no_record(bench)


def test_ddp_error_is_told_once(bench):
    (bench.data / "meta.json").write_text("{")
    result = bench.run("02_opt_multi_gpu_ddp")
    assert result.returncode != 0 and result.stderr.count("error: ") == 1
    assert "meta.json is damaged" in result.stderr


def test_more_ranks_than_gpus(bench, stages, monkeypatch, capsys):
    script = stages["02_opt_multi_gpu_ddp"]
    monkeypatch.setattr(script.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(script, "LOCAL_WORLD_SIZE", 2)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as stop:
        script.parse_arguments([])
    assert stop.value.code == 2
    says = "2 local ranks and 1 GPU(s): --nproc_per_node=1, or --device cpu"
    assert says in capsys.readouterr().err
    assert script.parse_arguments(["--device", "cpu"]).device == "cpu"


def test_paths_with_spaces_from_elsewhere(tmp_path):
    """Copied beside data/ into a path with a space, and started from another folder."""
    home = tmp_path / "a folder"
    for stage in STAGES[:2]:
        home.mkdir(exist_ok=True)
        (home / f"{stage}.py").write_bytes((ROOT / f"{stage}.py").read_bytes())
    write_tokens(home / "data")
    for stage in STAGES[:2]:
        result = run_python(home / f"{stage}.py", *TINY, "--max-steps", 1, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
    assert len(list((home / "results").iterdir())) == 2
