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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from unittest import mock

import pytest
import torch
from conftest import environment, read_record, run_python, skip_without, small, write_tokens

from patches import stack

DDP = "02_opt_multi_gpu_ddp"
TORCHRUN = ["-m", "torch.distributed.run", "--local-addr", "127.0.0.1"]


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def node(number: int, port: int, *options, nodes: str, conf: str) -> list:
    """The words of a torchrun of several; node 0 holds the rendezvous."""
    return [
        *TORCHRUN,
        "--nnodes",
        nodes,
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
        "--rdzv-conf",
        f"is_host={int(number == 0)}{conf}",
        *options,
    ]


def two_nodes(bench, port, *options: list, ranks: int = 1) -> list[subprocess.CompletedProcess]:
    """02 on two nodes, each with a torchrun and options of its own. Their ranks are given: else
    they are in the order of process numbers, which two at once may get either way."""
    script = bench.program(DDP)
    meeting = ["--nnodes", 2, "--master-addr", "127.0.0.1", "--master-port", port]
    commands = [
        [
            *TORCHRUN,
            *meeting,
            "--node-rank",
            number,
            "--nproc-per-node",
            ranks,
            script,
            *bench.options(DDP, *own),
        ]
        for number, own in enumerate(options)
    ]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda command: run_python(*command), commands))


def kill(run: subprocess.Popen) -> None:
    """Ends a torchrun and its ranks, which are in sessions of their own, as a power cut would."""
    ranks = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True)
    run.kill()
    for number in ranks.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(number), signal.SIGKILL)


def losses(results) -> list:
    return [
        (log["step"], log["train_loss"], log["val_loss"])
        for log in read_record(results)
        if log["event"] == "log"
    ]


@pytest.mark.slow
def test_two_nodes_train_as_one(bench, port):
    """Of two ranks each: as one node with four. One record, one sample. Folders with the same
    tokens, and a name, may differ."""
    same, steps = bench.folder / "same", ["--max-steps", 3, "--eval-freq", 1]
    shutil.copytree(bench.data, same)
    own = bench.folder / "own"
    runs = two_nodes(
        bench,
        port,
        steps,
        [*steps, "--data", same, "--results-dir", own, "--name", "other"],
        ranks=2,
    )
    assert [run.returncode for run in runs] == [0, 0], runs
    assert sorted(run.stdout.count("Reserved memory") for run in runs) == [0, 1]
    one = run_python(
        *TORCHRUN,
        "--standalone",
        "--nproc-per-node=4",
        bench.program(DDP),
        *bench.options(DDP, *steps, "--results-dir", bench.folder / "one"),
    )
    assert one.returncode == 0, one.stderr
    (first,) = {path.parent for where in (bench.results, own) for path in where.glob("*.jsonl")}
    alone = losses(bench.folder / "one")
    assert len(alone) == 3 and losses(first) == alone


@pytest.mark.slow
def test_a_node_is_killed_and_the_other_goes_on(bench, port):
    """With --nnodes=1:2, where the node that is killed doesn't hold the rendezvous."""
    skip_without("package safetensors")
    script, saved = bench.folder / "script.py", bench.folder / "saved"
    text = small(stack.compose(["checkpoint-resume", "timeout-ranks"], stack.DDP).decode())
    step = "            times.append(now(config.device))\n"
    pause = "            time.sleep(0.2 * (config.world_size - 1))\n"  # two ranks take their time
    script.write_text(text.replace(step, step + pause))
    options = bench.options(
        DDP,
        "--max-steps",
        30,
        "--rank-timeout",
        5,
        "--resume",
        "auto",
        "--checkpoint-dir",
        saved,
        "--checkpoint-every",
        10,
    )
    conf = ",join_timeout=120,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
    runs = [
        subprocess.Popen(
            [
                sys.executable,
                *node(number, port, "--max-restarts=3", nodes="1:2", conf=conf),
                script,
                *map(str, options),
            ],
            env=environment(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for number in (0, 1)
    ]
    try:
        wait_for_two_ranks(saved, runs[0])
        kill(runs[1])
        _, err = runs[0].communicate(timeout=240)
    finally:
        for run in runs:
            kill(run)
    assert runs[0].returncode == 0, err
    events = [
        json.loads(line)
        for path in bench.results.glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (["--batch-size", 4], [], "rank 1 has batch_size 2, rank 0 has 4"),
        ([], ["--data", "none"], "rank 1 has data/meta.json missing, rank 0 has "),
    ],
)
def test_two_nodes_that_differ(bench, port, monkeypatch, first, second, says):
    monkeypatch.chdir(bench.folder)
    for rank, run in enumerate(two_nodes(bench, port, first, second)):
        assert run.returncode != 0
        (line,) = [line for line in run.stderr.splitlines() if line.startswith("error: rank ")]
        assert line.startswith(f"error: rank {rank}: {says}") and "[rank" not in run.stderr
    assert bench.no_record()


def test_ranks_are_compared(stages, monkeypatch, tmp_path):
    """Every setting but folders, the name and the device; and the tokens."""
    script, data = stages[DDP], write_tokens(tmp_path / "data")

    def compare(**other) -> str | None:
        def all_gather_object(everyone, mine):
            everyone[:] = [mine, mine, mine | theirs]

        theirs = {}
        monkeypatch.setattr(
            script, "dist", mock.Mock(all_gather_object=lambda _, mine: theirs.update(mine))
        )
        script.compare_ranks(script.Config(**dict(data=str(data), world_size=3) | other))
        monkeypatch.setattr(script, "dist", mock.Mock(all_gather_object=all_gather_object))
        try:
            script.compare_ranks(script.Config(data=str(data), world_size=3))
        except script.UserError as error:
            return str(error)

    assert compare() is None
    same = shutil.copytree(data, tmp_path / "same")
    assert compare(data=str(same), results_dir="x", name="y", device=torch.device("cuda:1")) is None
    own = {"data", "results_dir", "name", "device"}
    for setting in fields(script.Config):
        if setting.name not in own:
            says = f"rank 2 has {setting.name} 7, rank 0 has "
            assert compare(**{setting.name: 7}).startswith(says)
    other = write_tokens(tmp_path / "other", train=3000)
    assert compare(data=str(other)).startswith("rank 2 has data/meta.json ")
