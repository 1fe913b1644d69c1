"""02 on two nodes: two torchruns that meet on the loopback, so that LOCAL_RANK isn't the rank."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import fields
from unittest import mock

import pytest
import torch
from conftest import (
    ROOT,
    TINY,
    environment,
    read_record,
    run_python,
    skip_without,
    small,
    write_tokens,
)

from patches import stack

DDP = "02_opt_multi_gpu_ddp"
ONE_NODE = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
            "--nproc_per_node=4"]


@pytest.fixture
def data(tmp_path):
    return write_tokens(tmp_path / "data", train=700)


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def script(names: list[str], folder):
    """02 with variants, and a model of one small layer."""
    text = stack.compose(names, stack.DDP) if names else (ROOT / stack.DDP).read_bytes()
    path = folder / "script.py"
    path.write_text(small(text.decode()))
    return path


def start(node: int, port: int, *command, nodes: str = "2", processes: int = 1,
          conf: str = "") -> subprocess.Popen:
    """Starts a torchrun; node 0 holds the rendezvous."""
    conf = f"is_host={int(node == 0)}{conf and ','}{conf}"
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes,
         "--nproc_per_node", str(processes), "--rdzv-backend", "c10d",
         "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", conf, "--local-addr", "127.0.0.1",
         *map(str, command)], env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def kill(run: subprocess.Popen) -> None:
    """Ends a torchrun and its ranks, which are in sessions of their own, as a power cut would."""
    ranks = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True)
    run.kill()
    for number in ranks.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(number), signal.SIGKILL)


def losses(results) -> list:
    return [(log["step"], log["train_loss"], log["val_loss"])
            for log in read_record(results) if log["event"] == "log"]


@pytest.mark.slow
def test_two_nodes_train_as_one(port, data, tmp_path):
    """Of two processes each: as one node with four. One record, one sample."""
    command = [script([], tmp_path), *TINY, "--device", "cpu", "--no-compile", "--dtype", "float32",
               "--max-steps", 3, "--eval-freq", 1, "--data", data]
    runs = [start(node, port, *command, "--results-dir", tmp_path / "two", processes=2)
            for node in (0, 1)]
    outputs = [run.communicate(timeout=240) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert sorted(out.count("Reserved memory") for out, _ in outputs) == [0, 1]
    one = run_python(*ONE_NODE, *command, "--results-dir", tmp_path / "one")
    assert one.returncode == 0, one.stderr
    assert len(losses(tmp_path / "one")) == 3
    assert losses(tmp_path / "two") == losses(tmp_path / "one")  # read_record: there is just one


@pytest.mark.slow
def test_a_node_is_killed_and_the_other_goes_on(port, data, tmp_path):
    """With --nnodes=1:2, where the node that is killed doesn't hold the rendezvous."""
    skip_without("package safetensors")
    command = [script(["checkpoint-resume", "timeout-ranks"], tmp_path), *TINY, "--device", "cpu",
               "--no-compile", "--dtype", "float32", "--epochs", 10, "--data", data,
               "--results-dir", tmp_path / "results", "--rank-timeout", 5,
               "--checkpoint-dir", tmp_path / "saved", "--checkpoint-every", 10, "--resume", "auto"]
    conf = "join_timeout=120,last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"
    runs = [start(node, port, "--max-restarts=3", *command, nodes="1:2", conf=conf)
            for node in (0, 1)]
    try:
        wait_for_two_ranks(tmp_path / "saved", runs[0])
        kill(runs[1])
        _, err = runs[0].communicate(timeout=240)
    finally:
        for run in runs:
            kill(run)
    assert runs[0].returncode == 0, err
    events = [json.loads(line) for path in (tmp_path / "results").glob("*.jsonl")
              for line in path.read_text().splitlines()]
    resumes = [event for event in events if event["event"] == "resume"]
    assert (resumes[-1]["ranks"], resumes[-1]["earlier_ranks"]) == (1, 2)


def wait_for_two_ranks(saved, run) -> None:
    """Until a complete checkpoint of two ranks is there."""
    deadline = time.monotonic() + 120
    while run.poll() is None and time.monotonic() < deadline:
        for path in saved.glob("step-*/.metadata"):
            with contextlib.suppress(OSError, ValueError):  # it may just be removed
                if json.loads(path.with_name("checkpoint.json").read_text())["ranks"] == 2:
                    return
        time.sleep(0.2)
    pytest.fail("no checkpoint of two ranks")


def two_nodes(bench, port, *options: list) -> list[tuple[int, str]]:
    """Of each node's own torchrun with one rank: (exit code, stderr)."""
    runs = [start(node, port, bench.program(DDP), *bench.options(DDP), *own)
            for node, own in enumerate(options)]
    try:
        errors = [run.communicate(timeout=200)[1] for run in runs]
    finally:
        for run in runs:
            kill(run)
    return [(run.returncode, error) for run, error in zip(runs, errors, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second", "says"), [
    (["--max-steps", 3], ["--max-steps", 6], "rank 1 has --max-steps 6, rank 0 has 3"),
    (["--batch-size", 4], [], "rank 1 has --batch-size 2, rank 0 has 4"),
    ([], ["--data", "other"], "rank 1 has --data/meta.json "),
    ([], ["--data", "none"], "rank 1 has --data/meta.json missing, rank 0 has "),
])
def test_two_nodes_that_differ(bench, port, first, second, says):
    other = write_tokens(bench.folder / "other", train=3000)
    second = [str(other.with_name(text)) if text in ("other", "none") else text for text in second]
    for node, (code, error) in enumerate(two_nodes(bench, port, first, second)):
        assert code != 0
        (line,) = [line for line in error.splitlines() if line.startswith("error: rank ")]
        assert line.startswith(f"error: rank {node}: {says}") and "[rank" not in error
    assert bench.no_record()


@pytest.mark.slow
def test_two_nodes_with_folders_of_their_own(bench, port):
    """What belongs to a machine may differ: folders with the same tokens, and a name."""
    same = shutil.copytree(bench.data, bench.folder / "same")
    own = ["--data", same, "--results-dir", bench.folder / "own", "--name", "other"]
    runs = two_nodes(bench, port, ["--max-steps", 2], [*own, "--max-steps", 2])
    assert [code for code, _ in runs] == [0, 0]
    assert bench.record()[-1]["status"] == "complete"


def test_ranks_are_compared(stages, monkeypatch, tmp_path):
    """Every setting but folders, the name and the device; and the tokens."""
    script, data = stages[DDP], write_tokens(tmp_path / "data")
    monkeypatch.setattr(script, "WORLD_SIZE", 3)

    def compare(**other) -> str | None:
        def all_gather_object(everyone, mine):
            everyone[:] = [mine, mine, mine | theirs]

        theirs = {}
        monkeypatch.setattr(script, "dist", mock.Mock(all_gather_object=lambda _, mine:
                                                      theirs.update(mine)))
        script.compare_ranks(script.Config(**dict(data=str(data)) | other))
        monkeypatch.setattr(script, "dist", mock.Mock(all_gather_object=all_gather_object))
        try:
            script.compare_ranks(script.Config(data=str(data)))
        except script.UserError as error:
            return str(error)

    assert compare() is None
    same = shutil.copytree(data, tmp_path / "same")
    assert compare(data=str(same), results_dir="x", name="y", device=torch.device("cuda:1")) is None
    assert compare(learning_rate=1e-5) == "rank 2 has --learning-rate 1e-05, rank 0 has 0.0005"
    for setting in fields(script.Config):
        if setting.name not in ("data", "results_dir", "name", "device"):
            flag = "--" + setting.name.replace("_", "-")
            assert compare(**{setting.name: 7}).startswith(f"rank 2 has {flag} 7, rank 0 has ")
    other = write_tokens(tmp_path / "other", train=3000)
    assert compare(data=str(other)).startswith("rank 2 has --data/meta.json ")
    assert compare(data=str(tmp_path)).startswith("rank 2 has --data/meta.json missing, rank 0")
