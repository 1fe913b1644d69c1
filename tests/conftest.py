"""What the tests share: tiny token files, the scripts as modules, and the scripts as programs."""

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
STAGES = ["00_orig", "01_opt_single_gpu", "02_opt_multi_gpu_ddp"]
# cpu-demo cut down to steps of a moment.
TINY = "--model cpu-demo --context-length 16 --batch-size 2 --eval-windows 2".split()


def load(path: Path):
    """A script as a module; its name begins with a digit, so that `import` can't."""
    spec = importlib.util.spec_from_file_location("stage_" + path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def write_tokens(folder: Path, train: int = 2000, val: int = 200, vocabulary: int = 256) -> Path:
    """Tokens with something to learn: a noisy cycle through the alphabet."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    meta = dict(corpus="alphabet", tokenizer="bytes", vocabulary=vocabulary, tokens={}, sha256={})
    for part, count in (("train", train), ("val", val)):
        ids = (97 + (np.arange(count) + (rng.random(count) < 0.2)) % 26).astype("<u2")
        (folder / f"{part}.bin").write_bytes(ids.tobytes())
        meta["tokens"][part] = count
        meta["sha256"][part] = hashlib.sha256(ids.tobytes()).hexdigest()
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def environment(**extra: str) -> dict[str, str]:
    """Without a GPU, without a network, and without what torchrun leaves behind."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "TIKTOKEN_CACHE_DIR")}
    proxies = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy")}
    return env | proxies | {"no_proxy": "", "CUDA_VISIBLE_DEVICES": ""} | extra


def run_python(*command, env: dict[str, str] | None = None, **options):
    options = {"capture_output": True, "text": True, "timeout": 240} | options
    return subprocess.run([sys.executable, *map(str, command)], env=env or environment(), **options)


def read_record(results: Path) -> list[dict]:
    (path,) = results.glob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


class Bench:
    """Runs a stage on tiny data, in a folder of its own."""

    def __init__(self, folder: Path):
        self.data, self.results = write_tokens(folder / "data"), folder / "results"

    def command(self, stage: str, *options) -> list:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        return [
            *(launcher if stage.startswith("02") else []),
            ROOT / f"{stage}.py", *TINY, "--device", "cpu",
            "--data", self.data, "--results-dir", self.results, *options,
        ]

    def run(self, stage: str, *options, **how):
        return run_python(*self.command(stage, *options), **how)

    def record(self) -> list[dict]:
        return read_record(self.results)

    def fails(self, *options, stage: str = "00_orig", code: int = 1, says: str = "", **how):
        """Runs it and checks what every accident owes: one line on stderr, and no traceback."""
        result = self.run(stage, *options, **how)
        assert result.returncode == code, result.stderr
        assert "Traceback" not in result.stderr
        *usage, line = result.stderr.strip().splitlines()
        assert "error: " in line and says in line, line
        assert not usage or (code == 2 and usage == [f"usage: {stage}.py [options]"])
        return result


@pytest.fixture
def bench(tmp_path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture(scope="session")
def stages() -> dict:
    return {name: load(ROOT / f"{name}.py") for name in STAGES}
