"""Bad input and errors: one clear line, a non-zero exit, and nothing lost or half-written."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import conftest
import pytest
import torch
from conftest import ROOT, STAGES, call_main, environment, one_error_line, run_python, write_tokens
from made_up import CPU, copy_of_checkout


def test_text_too_short(bench):
    write_tokens(bench.data, train=60, val=30)
    says = "3 windows to train on, 1 to validate on: lower --context-length or --batch-size"
    bench.fails("--batch-size", 4, says=f"the text is too short: {says}")
    write_tokens(bench.data, val=16)
    bench.fails(says="the text is too short: 124 windows to train on, 0 to validate on")
    assert bench.no_record()


def pretend_gpus(monkeypatch, count: int) -> None:
    for name, answer in (("device_count", count), ("is_available", count > 0), ("init", None)):
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)


@pytest.mark.parametrize(
    ("stage", "fails", "error"),
    [
        *(
            (
                stage,
                (torch, "ones"),
                torch.AcceleratorError(
                    "CUDA error: no kernel image is available for execution on the device\n"
                    "CUDA kernel errors"
                ),
            )
            for stage in STAGES
        ),
        (
            STAGES[2],
            (torch.cuda, "init"),
            RuntimeError("Unexpected error\nError 802: not yet ready"),
        ),
    ],
)
def test_a_gpu_that_does_not_work(bench, stage, fails, error, monkeypatch):
    """PyTorch's builds for CUDA 13 have no code for a V100; 02 counts GPUs before it looks at one.
    What PyTorch raises is one line."""
    pretend_gpus(monkeypatch, 1)
    monkeypatch.setattr(*fails, mock.Mock(side_effect=error))
    bench.fails(
        "--device",
        "cuda",
        stage=stage,
        says=f"{str(error).splitlines()[0]} (see docs/troubleshooting.md)",
    )
    assert bench.no_record()


@pytest.mark.parametrize("stage", STAGES)
def test_a_folder_for_compiled_code_that_cant_be_made(bench, stage, monkeypatch):
    """Each script names the variable: PyTorch's optimizers need the folder, too."""
    (bench.folder / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(bench.folder / "file" / "cache"))
    result = bench.fails(stage=stage, says=str(bench.folder / "file"))
    assert "(see TORCHINDUCTOR_CACHE_DIR)\n" in result.stderr


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((part, content) for part in ("train.bin", "val.bin") for content in (None, b"", b"a")),
        ("train.bin", b"a\0" * 1999),
        ("train.bin", b"a\0" * 1999 + b"a"),
        ("train.bin", b"\xff\xff" * 2000),  # an id that no model has
        *(
            ("meta.json", content)
            for content in (
                None,
                b"",
                b"{",
                b"[]",
                b"{}",
                b'{"tokens": {"train": "many"}}',
                b'{"tokens": {"train": 2000, "val": 200}}',
                b'{"tokens": {"train": 0, "val": 200}, "tokenizer": "bytes"}',
            )
        ),
        *(
            ("vocabulary.json", content)
            for content in (
                None,
                b"",
                b"[]",
                b"{}",
                b'{"tokens": [1], "pattern": ".", "special": {}}',
                '{"tokens": ["€"], "pattern": ".", "special": {}}'.encode(),
                b'{"tokens": ["a"], "pattern": "(", "special": {}}',
                b'{"tokens": ["a"], "pattern": ".", "special": []}',
            )
        ),
    ],
)
def test_damaged_tokens(bench, name, content):
    """Missing, empty, cut off, or not what it has to be: also a folder of an earlier version."""
    path = bench.data / name
    path.unlink() if content is None else path.write_bytes(content)
    result = bench.fails(says=f" tokens in {bench.data}: run `python data/prepare.py --out ")
    assert result.stderr.startswith("error: no " if content is None else "error: damaged ")
    assert bench.no_record()


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "cuda:99", "meta", "xpu"])
def test_unknown_device(bench, name):
    bench.fails("--device", name, says=" (see docs/troubleshooting.md)")
    bench.fails(
        "--device",
        name,
        stage="02_opt_multi_gpu_ddp",
        code=2,
        says=f"argument --device: invalid choice: {name!r}",
    )
    assert bench.no_record()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--batch-size", "0"),
        ("--batch-size", "1.5"),
        ("--dropout", "1"),
        ("--learning-rate", "nan"),
        ("--learning-rate", "1e300"),
        ("--seed", "-1"),
        ("--seed", "9223372036854775808"),
        ("--epochs", "some"),
        ("--max-tokens", "0"),
        ("--model", "gpt5"),
        ("--batch", "4"),
        ("left", "over"),
        ("--name", "../evil"),
        ("--name", ""),
        ("--name", "x\x1b"),
    ],
)
def test_options_out_of_range(bench, stage, option, value):
    bench.fails(option, value, stage=stage, code=2)
    assert bench.no_record() and not list(bench.folder.glob("evil*"))


def test_results_cannot_be_written(bench):
    bench.results.write_text("a file where the folder should be")
    link = bench.folder / "link"
    link.symlink_to(bench.folder / "gone")
    for path, says in (
        (bench.results, "File exists"),
        (bench.results / "x", "Not a directory"),
        (link, "File exists"),
        (link / "x", "File exists"),
    ):
        bench.results = path
        for stage in STAGES:
            bench.fails(stage=stage, says=says)


@pytest.mark.parametrize("stage", STAGES)
def test_out_of_memory(bench, stage, monkeypatch):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 12.27 GiB")
    monkeypatch.setattr(bench.stages[stage], "compute_loss", mock.Mock(side_effect=error))
    bench.fails(stage=stage, says="out of memory: lower --batch-size or --context-length")
    end = bench.record()[-1]
    assert end["status"] == "out_of_memory" and end["error"].startswith("out of memory: ")


@pytest.mark.parametrize("stage", STAGES)
def test_what_counts_as_out_of_memory(stages, stage, capsys):
    script = stages[stage]
    with pytest.raises(RuntimeError) as too_large:
        torch.empty(2**60, dtype=torch.uint8)
    for error in (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 12.27 GiB. GPU 0 has"),
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(h)`"),
        RuntimeError("could not create a memory object"),  # oneDNN, on a CPU
        RuntimeError("std::bad_alloc"),
        MemoryError(),
        too_large.value,
    ):
        status, text, code = script.explain(error)
        assert (status, code) == ("out_of_memory", 1), error
        hint = "out of memory: lower --batch-size or --context-length ("
        assert text.startswith(hint) and "\n" not in text
    assert capsys.readouterr().err == ""  # no traceback
    for error in (
        script.UserError("the text is too short"),
        OSError(28, "No space left on device"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        KeyError("memory"),
        ValueError("cublas"),
        AssertionError(),
        RuntimeError(
            "No valid triton configs. OutOfMemoryError: out of resource: triton_mm"
            " Required: 147456 Hardware limit: 101376"
        ),  # shared memory, of a kernel
    ):
        try:
            raise error
        except Exception:
            status, text, code = script.explain(error)
        assert (status, code) == ("failed", 1), error
        surprising = not isinstance(error, script.UserError | OSError)
        assert text.startswith(type(error).__name__) is surprising
        assert ("Traceback" in capsys.readouterr().err) is surprising  # for a report of the bug


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals(stages, stage, number, code):
    script = stages[stage]
    with conftest.settings_restored():
        with pytest.raises(KeyboardInterrupt) as caught:
            script.interrupt(number, None)
        for either in (signal.SIGINT, signal.SIGTERM):  # a second one can't cut the end short
            assert signal.getsignal(either) is signal.SIG_IGN
    text = f"interrupted by signal {int(number)}"
    assert script.explain(caught.value) == ("interrupted", text, code)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other signals")
def test_ctrl_c_while_measure_starts(tmp_path):
    """A module that it imports stands in for a slow disk. The shell then has the exit code 130."""
    (tmp_path / "difflib.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n"
    )
    result = run_python(
        ROOT / "measure.py", "--help", fork=False, env=environment(PYTHONPATH=str(tmp_path))
    )
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("stage", STAGES)
def test_diverged(bench, stage):
    options = "--learning-rate", 9e35, "--max-steps", 20, "--eval-freq", 2
    bench.fails(*options, stage=stage, says="is not finite: lower --learning-rate")
    *_, log, end = bench.record()
    assert log["event"] == "log" and log["train_loss"] is None  # JSON has no NaN
    assert end["status"] == "diverged"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other signals")
def test_interrupted(bench):
    command = bench.command("01_opt_single_gpu", "--eval-freq", 1, "--epochs", 1000)
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    next(line for line in process.stdout if "Step tok/sec" in line)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143 and "error: interrupted by signal 15\n" in err
    *_, log, end = bench.record()
    assert log["event"] == "log"
    assert end["status"] == "interrupted" and "avg_tok_per_sec" in end


def test_two_runs_at_once_write_two_records(bench, monkeypatch):
    """Also in one second, with one process number and one seed, as on machines that share a
    folder."""
    script = bench.stages["00_orig"]
    monkeypatch.setattr(script.time, "gmtime", lambda: (2026, 1, 2, 3, 4, 5, 4, 2, 0))
    monkeypatch.setattr(os, "getpid", lambda: 12)
    for count in (1, 2, 3):
        assert bench.main("00_orig", "--max-steps", 1).returncode == 0
        records = [*bench.results.glob("00_orig-cpu-20260102T030405Z-*.jsonl")]
        assert len(records) == len([*bench.results.iterdir()]) == count
        assert all(path.read_text().count('"event": "end"') == 1 for path in records)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_system_that_does_not_tell_the_peak_of_memory(bench, monkeypatch):
    """As gVisor, whose /proc/self/status has no VmHWM."""
    read_text = Path.read_text

    def without_peak(path, *arguments, **how):
        text = read_text(path, *arguments, **how)
        return text.replace("VmHWM:", "Other:") if path == Path("/proc/self/status") else text

    monkeypatch.setattr(Path, "read_text", without_peak)
    result = bench.main("00_orig", "--max-steps", 1)
    assert result.returncode == 0, result.stderr
    *_, epoch, end = bench.record()
    assert end["status"] == "complete"
    assert {epoch["reserved_gb"], epoch["peak_reserved_gb"], end["reserved_gb"]} == {None}


@pytest.mark.parametrize(
    ("gpus", "variables"),
    [
        (4, {}),
        (0, dict(RANK="0")),
        (0, dict(RANK="0", WORLD_SIZE="2")),
        (0, dict(RANK="")),
        (0, conftest.ONE_RANK | dict(MASTER_ADDR="")),
    ],
)
def test_ddp_without_torchrun(bench, monkeypatch, gpus, variables):
    """Also where a job's wrapper has set some of its variables; `RANK=` is no rank either."""
    for name in conftest.ONE_RANK:
        monkeypatch.delenv(name, raising=False)
    pretend_gpus(monkeypatch, gpus)
    stage, device = "02_opt_multi_gpu_ddp", ["--device", "cuda"] if gpus else []
    result = call_main(bench.stages[stage], *bench.options(stage, *device), variables=variables)
    assert result.returncode == 1
    says = f"torchrun --nproc_per_node={gpus or 2} {stage}.py"
    one_error_line(result.stderr, stage, says=says)
    assert bench.no_record()


def test_every_rank_names_itself(bench):
    """Rank 1 of 2: nothing on stdout, no record, and its number in its error line."""
    stage, variables = "02_opt_multi_gpu_ddp", conftest.ONE_RANK | dict(RANK="1", WORLD_SIZE="2")
    with mock.patch.dict(os.environ, variables):
        script = conftest.load(ROOT / f"{stage}.py")
    (bench.data / "meta.json").write_text("{")
    with (
        mock.patch.object(script, "join_ranks"),
        mock.patch.object(script, "dist", mock.Mock(get_rank=lambda: 1)),
        mock.patch.object(script, "compare_ranks"),
    ):
        result = call_main(script, *bench.options(stage), variables=variables)
        assert result.returncode == 1 and result.stdout == "" and bench.no_record()
        assert result.stderr.startswith("error: rank 1: damaged (JSONDecodeError(")
        assert result.stderr.count("\n") == 1


def test_more_ranks_than_gpus(stages, monkeypatch):
    """Each rank that has none says so."""
    script = stages["02_opt_multi_gpu_ddp"]
    pretend_gpus(monkeypatch, 1)
    variables = dict(RANK="1", LOCAL_RANK="1", TORCHELASTIC_RUN_ID="7")
    for name, value in (conftest.ONE_RANK | variables).items():
        monkeypatch.setenv(name, value)
    for given in ({}, dict(device="cuda")):
        with pytest.raises(script.UserError, match="torchrun --nproc_per_node=1$"):
            script.configure(given)
    assert script.configure(dict(device="cpu")).device == torch.device("cpu")


def test_text_that_a_terminal_cannot_show(bench, monkeypatch):
    """A sample is what an untrained model makes of bytes; the terminal may know only ASCII."""
    script = bench.stages["00_orig"]
    monkeypatch.setattr(script, "sample", lambda *_: "Every \u2603 \ud800 effort\x1b[2J\n")
    out = io.TextIOWrapper(io.BytesIO(), "ascii", write_through=True)
    monkeypatch.setattr(io, "TextIOWrapper", lambda *_, **__: out)
    assert bench.main("00_orig", "--max-steps", 1).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other names and no umask")
@pytest.mark.parametrize("program", ["00_orig.py", "data/prepare.py", "measure.py"])
def test_odd_surroundings(tmp_path, program):
    """A folder of odd characters, no HOME, the locale C, files that only their owner may read."""
    home = tmp_path / "a b;'\"$(x)\n&é"
    data, text = write_tokens(home / "data"), home / "text.txt"
    text.write_text("Dorothea " * 100)
    options = {
        "00_orig.py": [
            *conftest.TINY,
            "--max-steps",
            4,
            "--data",
            data,
            "--results-dir",
            home / "results",
        ],
        "data/prepare.py": [text, "--out", home / "tokens"],
        "measure.py": [
            "ladder",
            "--techniques",
            "0",
            "--rounds",
            "1",
            "--max-tokens",
            "64",
            "--data",
            data,
            "--",
            *conftest.TINY,
        ],
    }[program]
    tree = copy_of_checkout(home / "tree", CPU) if program == "measure.py" else ROOT
    variables = {name: value for name, value in environment().items() if name != "HOME"}
    before = os.umask(0o077)
    try:
        result = run_python(
            tree / program,
            *options,
            cwd=home,
            env=variables
            | dict(LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING="", PYTHONCOERCECLOCALE="0"),
        )
    finally:
        os.umask(before)
    assert result.returncode == 0, result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {home.name}


def test_a_script_started_from_elsewhere(stages):
    for script in stages.values():
        config = script.Config()
        assert [config.data, config.results_dir] == [str(ROOT / "data"), str(ROOT / "results")]


@pytest.mark.parametrize("stage", STAGES[1:])
@pytest.mark.parametrize(
    ("version", "dropout", "says"),
    [
        ("2.9.1", 0.1, None),
        ("2.10.0+cu128", 0.0, "NaN"),
        ("2.11.0+cu130", 0.1, None),
        ("2.13.0", 0.0, None),
        ("2.13.0", 0.1, "dropout"),
        ("3.0.0a0", 0.1, "dropout"),
    ],
)
def test_known_bugs_of_the_compiler_are_named(
    stages, monkeypatch, capsys, stage, version, dropout, says
):
    script = stages[stage]
    monkeypatch.setattr(torch, "__version__", version)
    script.warn_of_compiler_bugs(script.Config(dropout=dropout))
    out = capsys.readouterr().out
    assert out.count("\n") == (says is not None) and (says or "") in out


@pytest.mark.parametrize(
    "program",
    [
        *(f"{stage}.py" for stage in STAGES),
        "measure.py",
        "plot_results.py",
        "data/prepare.py",
        "patches/stack.py",
    ],
)
@pytest.mark.parametrize("how", ["closed", "-OO"])
def test_no_stdout_and_no_docstrings(program, how):
    before = ["sh", "-c", 'exec "$@" >&-', "sh"] if how == "closed" else []
    flags = [] if how == "closed" else ["-OO"]
    result = run_python(*flags, ROOT / program, "--help", before=before, fork=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("usage: " if how == "-OO" else "")
