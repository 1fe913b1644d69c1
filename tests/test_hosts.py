"""02 on two hosts: network namespaces of this machine, with a wire between them."""

import contextlib
import json
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

from bench.measure import hosts as made
from patches import stack

ONE_HOST = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"]


@pytest.fixture
def hosts():
    try:
        with made.two_hosts() as hosts:
            yield hosts
    except made.NoHosts as reason:
        pytest.skip(str(reason))


@pytest.fixture
def data(tmp_path):
    return write_tokens(tmp_path / "data", train=700)


def script(names: list[str], folder):
    """02 with variants, and a model of one small layer."""
    text = stack.compose(names, stack.DDP) if names else (ROOT / stack.DDP).read_bytes()
    path = folder / "script.py"
    path.write_text(small(text.decode()))
    return path


def start(host, *command, **how) -> subprocess.Popen:
    return subprocess.Popen(host.torchrun(*command, **how), env=environment(), text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def losses(results) -> list:
    return [(log["step"], log["train_loss"], log["val_loss"])
            for log in read_record(results) if log["event"] == "log"]


RECEIVER = """
import socket, sys
with socket.create_server((sys.argv[1], 29400)) as server:
    print("listening", flush=True)
    with server.accept()[0].makefile("rb") as stream:
        print(len(stream.read()))
"""
SENDER = """
import socket, sys
with socket.create_connection((sys.argv[1], 29400)) as stream:
    stream.sendall(bytes(1_000_000))
"""


def test_a_wire_joins_them():
    """What one sends arrives at the other, no faster than it may; at the end both are gone."""
    try:
        with made.two_hosts(mbit=8) as (first, second):
            def inside(host, code):
                return subprocess.Popen(
                    ["ip", "netns", "exec", host.name, sys.executable, "-c", code, first.address],
                    text=True, stdout=subprocess.PIPE)

            receiver = inside(first, RECEIVER)
            assert receiver.stdout.readline() == "listening\n"
            began, sender = time.monotonic(), inside(second, SENDER)
            assert receiver.communicate(timeout=30)[0] == "1000000\n" and sender.wait() == 0
            assert time.monotonic() - began > 0.5  # 0.75 s for all but the first 256 kB
    except made.NoHosts as reason:
        pytest.skip(str(reason))
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert first.name not in names and second.name not in names


@pytest.mark.slow
def test_two_hosts_train_as_one(hosts, data, tmp_path):
    """Of two processes each: as one host with four. One record, one sample."""
    command = [script([], tmp_path), *TINY, "--device", "cpu", "--no-compile", "--dtype", "float32",
               "--max-steps", 3, "--eval-freq", 1, "--data", data]
    runs = [start(host, *command, "--results-dir", tmp_path / "two", processes=2)
            for host in hosts]
    outputs = [run.communicate(timeout=240) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert sorted(out.count("Reserved memory") for out, _ in outputs) == [0, 1]
    one = run_python(*ONE_HOST, *command, "--results-dir", tmp_path / "one")
    assert one.returncode == 0, one.stderr
    assert len(losses(tmp_path / "one")) == 3
    assert losses(tmp_path / "two") == losses(tmp_path / "one")  # read_record: there is just one


@pytest.mark.slow
@pytest.mark.parametrize("way", ["killed", "cut off"])
def test_a_host_goes_and_the_other_goes_on(hosts, data, tmp_path, way):
    """With --nnodes=1:2, where the host that goes doesn't hold the rendezvous."""
    skip_without("package safetensors")
    names = ["checkpoint-resume", "timeout-ranks"]
    command = [script(names, tmp_path), *TINY, "--device", "cpu", "--no-compile", "--dtype",
               "float32", "--epochs", 10, "--data", data, "--results-dir", tmp_path / "results",
               "--rank-timeout", 5,
               "--checkpoint-dir", tmp_path / "saved", "--checkpoint-every", 10,
               "--resume", "auto"]
    first, second = hosts
    conf = "join_timeout=120,last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"
    runs = [start(host, "--max-restarts=3", *command, nnodes="1:2", conf=conf)
            for host in hosts]
    try:
        wait_for_two_ranks(tmp_path / "saved", runs[0])
        if way == "killed":
            second.kill()
        else:
            made.run(f"ip -n {second.name} link set {second.wire} down")
        _, err = runs[0].communicate(timeout=240)
    finally:
        for host in hosts:
            host.kill()
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
