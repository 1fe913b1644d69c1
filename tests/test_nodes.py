"""02 on two nodes: two torchruns that meet on the loopback, so that LOCAL_RANK isn't the rank."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
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
