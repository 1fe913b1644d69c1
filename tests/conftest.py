"""What the tests share: tiny token files, the scripts as modules, and the scripts as programs."""

import contextlib
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import forked
import numpy as np
import pytest

from gpt_speed.script import load_script

# Before anything imports torch, and for the processes that tests start: two tests or ranks at once
# that each use every core run several times slower than with one thread each.
os.environ["OMP_NUM_THREADS"] = "1"
# A rank that waits for one that is gone takes no notice of SIGTERM; torchrun kills it after 30 s.
os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "5"

# What tests compile, some with stand-ins for parts of PyTorch, is never taken for the user's own.
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    COMPILED = tempfile.TemporaryDirectory(prefix="compiled-by-tests-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = COMPILED.name

# Inductor makes its table of C++ types when it first generates code, which a warm cache puts off
# to the middle of a test. Made while a test has torch.float32 in the place of torch.bfloat16, the
# table would declare float32 tensors as bfloat16, and every later test would train on NaN.
import torch._inductor.codegen.cpp_utils  # noqa: E402
import torch.distributed as dist  # noqa: E402

# A command in a shell's background ignores Ctrl-C, and so would all programs that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent
STAGES = ["00_orig", "01_opt_single_gpu", "02_opt_multi_gpu_ddp"]
# cpu-demo cut down to steps of a moment.
TINY = "--model cpu-demo --context-length 16 --batch-size 2 --eval-windows 2".split()
# What torchrun sets for one process; PyTorch picks a port that is free.
ONE_RANK = dict(
    RANK="0",
    LOCAL_RANK="0",
    WORLD_SIZE="1",
    LOCAL_WORLD_SIZE="1",
    MASTER_ADDR="127.0.0.1",
    MASTER_PORT="0",
)


def load(path: Path):
    """A script as a module."""
    return load_script(path, f"stage_{path.stem}")


# One layer, 32 wide, in the place of cpu-demo's four.
SMALL = dict(layers=1, heads=2, width=32)
SIZES = "layers=4, heads=4, width=256", "layers=1, heads=2, width=32"


def small(script: str) -> str:
    """The text of a script whose cpu-demo is SMALL."""
    assert script.count(SIZES[0]) == 1
    return script.replace(*SIZES)


def in_float32(script) -> list[str]:
    """The option for it, if there is one: some CPUs take a hundred times as long for 16 bits."""
    if "--dtype" in script.make_parser().format_help():
        return ["--dtype", "float32"]
    return []


def without_bfloat16():
    """For torch.optim.Muon, which multiplies in bfloat16 whatever the weights are: not here."""
    return mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone)


def skip_without(needs: str) -> None:
    """Skips a test of a variant whose header says that it needs what isn't here."""
    from bench.machine import lacking

    missing = lacking(needs, dict(gpus=0))
    if missing:
        pytest.skip(missing)


def write_ids(folder: Path, corpus: str, vocabulary: int = 256, **parts) -> Path:
    """Tokens `train` and `val`, whose ids are bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    meta = dict(corpus=corpus, tokenizer="bytes", vocabulary=vocabulary, tokens={}, sha256={})
    for part, ids in parts.items():
        data = ids.astype("<u2").tobytes()
        (folder / f"{part}.bin").write_bytes(data)
        meta["tokens"][part], meta["sha256"][part] = len(ids), hashlib.sha256(data).hexdigest()
    (folder / "vocabulary.json").write_text(
        json.dumps(dict(pattern="(?s:.)", special={}, tokens=list(map(chr, range(256)))))
    )
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def write_tokens(folder: Path, train: int = 2000, val: int = 200, vocabulary: int = 256) -> Path:
    """Tokens with something to learn: a noisy cycle through the alphabet."""
    rng = np.random.default_rng(0)
    return write_ids(
        folder,
        "alphabet",
        vocabulary,
        **{
            part: 97 + (np.arange(count) + (rng.random(count) < 0.2)) % 26
            for part, count in (("train", train), ("val", val))
        },
    )


def environment(**extra: str) -> dict[str, str]:
    """Without a GPU, a network, an address of this machine's name, and what torchrun leaves."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "TIKTOKEN_CACHE_DIR")}
    proxies = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy")}
    return (
        env
        | proxies
        | {"no_proxy": "", "CUDA_VISIBLE_DEVICES": "", "PET_LOCAL_ADDR": "127.0.0.1"}
        | extra
    )


def run_python(*command, before=(), env: dict[str, str] | None = None, fork=True, **options):
    """`python command`: a subprocess.CompletedProcess. A fork, which saves the import of PyTorch,
    unless `before`, or an option of subprocess.run(), asks for a process of its own."""
    command, env = [str(part) for part in command], env or environment()
    if fork and not before and forked.can_run(command, env, **options):
        return forked.run(command, env, **({"timeout": 240} | options))
    options = {"capture_output": True, "text": True, "timeout": 240} | options
    return subprocess.run([*before, sys.executable, *command], env=env, **options)


@pytest.fixture
def forked_children(monkeypatch):
    """For tests whose tools ask children that need PyTorch: they are forked, too."""

    def run_child(command, cwd=None, timeout=240, cores=None, environment=None):
        variables = os.environ | (environment or {})
        done = run_python(*command[1:], cwd=cwd, timeout=timeout, env=variables)
        return done.returncode, done.stdout, done.stderr

    monkeypatch.setattr("gpt_speed.children.run_child", run_child)


def read_record(results: Path) -> list[dict]:
    (path,) = results.glob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@contextlib.contextmanager
def settings_restored():
    """Undoes what a script changes in the process that it runs in."""
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    precision, attention = torch.get_float32_matmul_precision(), torch.backends.cuda
    cudnn_attention = attention.cudnn_sdp_enabled()
    with mock.patch.dict(os.environ), mock.patch.object(sys, "argv", sys.argv):
        try:
            yield
        finally:
            if dist.is_initialized():  # after an error the scripts leave that to the process's end
                dist.destroy_process_group()
            for number, handler in signals.items():
                signal.signal(number, handler)
            torch.set_float32_matmul_precision(precision)
            torch.set_num_threads(1)
            attention.enable_cudnn_sdp(cudnn_attention)


def call_main(script, *options, variables: dict[str, str] = ONE_RANK):
    """`python script options` in this process, which saves the seconds of importing torch."""
    command = [script.__file__, *map(str, options)]
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    one_core = mock.patch.object(os, "cpu_count", lambda: 1)  # 02 would use them all
    with (
        settings_restored(),
        one_core,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        sys.argv = command
        os.environ.update(variables)
        try:
            code = script.main()
        except SystemExit as stop:
            code = stop.code
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]
    return subprocess.CompletedProcess(command, code, *texts)


class Bench:
    """Runs a stage on tiny data, in a folder of its own."""

    def __init__(self, folder: Path, stages: dict):
        self.data, self.results = write_tokens(folder / "data"), folder / "results"
        self.stages, self.folder = stages, folder

    def program(self, stage: str) -> Path:
        """The file that is run in a process of its own: the stage with a model of a moment."""
        path = self.folder / f"{stage}.py"
        path.write_text(small((ROOT / path.name).read_text()))
        return path

    def options(self, stage: str, *options) -> list:
        """TINY on a CPU and, unless they say otherwise, in float32 without torch.compile."""
        usual = [] if stage == "00_orig" else ["--no-compile", "--dtype", "float32"]
        return [
            *TINY,
            "--device",
            "cpu",
            "--data",
            self.data,
            "--results-dir",
            self.results,
            *usual,
            *options,
        ]

    def command(self, stage: str, *options) -> list:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        return [
            *(launcher if stage.startswith("02") else []),
            self.program(stage),
            *self.options(stage, *options),
        ]

    def run(self, stage: str, *options, **how):
        """In a process of its own, or in two for 02."""
        return run_python(*self.command(stage, *options), **how)

    def main(self, stage: str, *options):
        """In this process; the only rank for 02; with a model of a moment."""
        script = self.stages[stage]
        with mock.patch.dict(script.MODELS["cpu-demo"], SMALL):
            return call_main(script, *self.options(stage, *options))

    def record(self) -> list[dict]:
        return read_record(self.results)

    def no_record(self) -> bool:
        return not self.results.exists() or not list(self.results.iterdir())

    def fails(self, *options, stage: str = "00_orig", code: int = 1, says: str = ""):
        """Runs main() and checks what every error owes the user."""
        result = self.main(stage, *options)
        assert result.returncode == code, result.stderr
        one_error_line(result.stderr, stage, code, says)
        return result


def one_error_line(stderr: str, stage: str, code: int = 1, says: str = "") -> None:
    """One line that says it, and no traceback. PyTorch may have added lines of its own."""
    rank = "rank 0: " if stage.startswith("02") else ""
    form = f"{stage}.py: error: " if code == 2 else f"error: {rank}"
    (line,) = [line for line in stderr.splitlines() if "error: " in line]
    assert line.startswith(form) and says in line, line
    assert "Traceback" not in stderr
    assert ("usage: " in stderr) is (code == 2)


@pytest.fixture(autouse=True)
def settings_stay():
    """What a script's configure() or prepare_model() sets isn't there for the next test."""
    with settings_restored():
        yield


@pytest.fixture
def bench(tmp_path, stages) -> Bench:
    return Bench(tmp_path, stages)


@pytest.fixture(scope="session")
def stages() -> dict:
    with settings_restored():
        return {name: load(ROOT / f"{name}.py") for name in STAGES}
