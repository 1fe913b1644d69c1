"""Two hosts on one Linux machine: network namespaces with a wire between them, as slow as asked.
Root only.

    python -m bench.measure.hosts 02_opt_multi_gpu_ddp.py --max-steps 3
    python -m bench.measure.hosts --mbit 400 --nproc-per-node 2 02_opt_multi_gpu_ddp.py
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

ADDRESSES = "10.231.77.1", "10.231.77.2"
PORT = 29400


class NoHosts(Exception):
    """Why this machine can't make hosts."""


@dataclass
class Host:
    name: str  # of its network namespace
    wire: str  # its end of the wire
    address: str

    def start(self, *command, nnodes: str = "2", nproc_per_node: int = 1, rdzv_conf: str = "",
              **how):
        """torchrun of a script with its options, as a Popen; the first host holds the rendezvous.

        `how`: what Popen takes; its env is that of this process if it has none.
        """
        environment = how.pop("env", os.environ) | {"GLOO_SOCKET_IFNAME": self.wire}
        # Told here, since torchrun would ask the machine's name, which both hosts share.
        conf = f"is_host={int(self.address == ADDRESSES[0])}" + f",{rdzv_conf}" * bool(rdzv_conf)
        line = ["ip", "netns", "exec", self.name, sys.executable, "-m", "torch.distributed.run",
                "--nnodes", nnodes, "--nproc_per_node", nproc_per_node, "--rdzv-backend", "c10d",
                "--rdzv-endpoint", f"{ADDRESSES[0]}:{PORT}", "--rdzv-conf", conf,
                "--local-addr", self.address, *command]
        return subprocess.Popen([str(part) for part in line], env=environment, **how)

    def kill(self) -> None:
        """Ends all its processes at once, as a power cut would."""
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True)
        for number in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(number), signal.SIGKILL)

    def cut_off(self) -> None:
        """Takes its end of the wire down."""
        run("ip", "-n", self.name, "link", "set", self.wire, "down")


def run(*command) -> None:
    subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)


@contextmanager
def two_hosts(mbit: float | None = None) -> Iterator[list[Host]]:
    """Two hosts, each of which sends at most `mbit` Mbit/s (None: as fast as the machine can);
    removed at the end. Raises NoHosts."""
    for program in ("ip", "tc"):
        if not shutil.which(program):
            raise NoHosts(f"two hosts need network namespaces: there is no program {program}")
    hosts = [Host(f"gpt{os.getpid()}{letter}", f"w{os.getpid()}{letter}", address)
             for letter, address in zip("ab", ADDRESSES, strict=True)]
    first, second = hosts
    try:
        try:
            for host in hosts:
                run("ip", "netns", "add", host.name)
            run("ip", "link", "add", first.wire, "netns", first.name, "type", "veth",
                "peer", "name", second.wire, "netns", second.name)
            for host in hosts:
                inside = "ip", "-n", host.name
                run(*inside, "addr", "add", f"{host.address}/24", "dev", host.wire)
                run(*inside, "link", "set", host.wire, "up")
                run(*inside, "link", "set", "lo", "up")
                if mbit:
                    run("tc", "-n", host.name, "qdisc", "add", "dev", host.wire, "root", "tbf",
                        "rate", f"{mbit:g}mbit", "burst", "256kb", "latency", "100ms")
        except subprocess.CalledProcessError as error:
            raise NoHosts(f"two hosts need network namespaces: {error.stderr.strip()}")
        yield hosts
    finally:
        for host in hosts:
            host.kill()
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--mbit", type=float,
                        help="Mbit/s that each host sends at most (default: no limit)")
    parser.add_argument("--nproc-per-node", type=int, default=1, metavar="N",
                        help="processes on each host (default: %(default)s)")
    parser.add_argument("script", help="what torchrun starts")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="options of the script")
    args = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # so that the hosts are removed
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    try:
        with two_hosts(args.mbit) as hosts:
            started = []
            for host, own in zip(hosts, (cores[:half], cores[half:] or cores), strict=True):
                os.sched_setaffinity(0, own)  # which the host's processes inherit
                started.append(host.start(args.script, *args.options,
                                          nproc_per_node=args.nproc_per_node))
            return max(abs(host.wait()) for host in started)
    except NoHosts as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
