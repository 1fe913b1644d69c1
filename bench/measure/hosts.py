"""Two hosts on one Linux machine: network namespaces with a wire between them, as slow as asked.
Root only.

    python -m bench.measure.hosts MBIT SCRIPT OPTIONS   # torchrun of a script, a process on each
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

ADDRESSES = "10.231.77.1", "10.231.77.2"
PORT = 29400


class NoHosts(Exception):
    """Why this machine can't make hosts."""


class Host(NamedTuple):
    name: str  # of its network namespace
    wire: str  # its end of the wire
    address: str

    def torchrun(self, *command, nnodes: str = "2", processes: int = 1, conf: str = "") -> list:
        """The command that starts a script with its options here, by torchrun; the first host holds
        the rendezvous."""
        # Told here, since torchrun would ask the machine's name, which both hosts share.
        conf = f"is_host={int(self.address == ADDRESSES[0])}" + f",{conf}" * bool(conf)
        return ["ip", "netns", "exec", self.name, "env", f"GLOO_SOCKET_IFNAME={self.wire}",
                sys.executable, "-m", "torch.distributed.run", "--nnodes", nnodes,
                "--nproc_per_node", str(processes), "--rdzv-backend", "c10d",
                "--rdzv-endpoint", f"{ADDRESSES[0]}:{PORT}", "--rdzv-conf", conf,
                "--local-addr", self.address, *map(str, command)]

    def kill(self) -> None:
        """Ends all its processes at once, as a power cut would."""
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True)
        for number in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(number), signal.SIGKILL)


def run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)


@contextmanager
def two_hosts(mbit: float | None = None) -> Iterator[list[Host]]:
    """Two hosts, each of which sends at most `mbit` Mbit/s (None: as fast as the machine can);
    removed at the end. Raises NoHosts."""
    for program in ("ip", "tc"):
        if not shutil.which(program):
            raise NoHosts(f"two hosts need network namespaces: there is no program {program}")
    first, second = hosts = [
        Host(f"gpt{os.getpid()}{letter}", f"w{os.getpid()}{letter}", address)
        for letter, address in zip("ab", ADDRESSES, strict=True)]
    try:
        for host in hosts:
            run(f"ip netns add {host.name}")
        run(f"ip link add {first.wire} netns {first.name} type veth"
            f" peer name {second.wire} netns {second.name}")
        for name, wire, address in hosts:
            run(f"ip -n {name} addr add {address}/24 dev {wire}")
            run(f"ip -n {name} link set {wire} up")
            run(f"ip -n {name} link set lo up")
            if mbit:
                run(f"tc -n {name} qdisc add dev {wire} root tbf rate {mbit:g}mbit burst 256kb"
                    " latency 100ms")
        yield hosts
    except subprocess.CalledProcessError as error:
        raise NoHosts(f"two hosts need network namespaces: {error.stderr.strip()}")
    finally:
        for host in hosts:
            host.kill()
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)


def main() -> int:
    mbit, *command = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM):  # so that the hosts are removed
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    try:
        with two_hosts(float(mbit)) as hosts:
            started = []
            for host, own in zip(hosts, (cores[:half], cores[half:] or cores), strict=True):
                os.sched_setaffinity(0, own)  # which the host's processes inherit
                started.append(subprocess.Popen(host.torchrun(*command)))
            return max(abs(process.wait()) for process in started)
    except NoHosts as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
