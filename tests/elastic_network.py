"""Nodes of elastic jobs on one machine: network namespaces on one switch, with a lighthouse and a torchrun each."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.launched import Job, is_alive
from tests.lighthouse import need_torchft
from tests.two_nodes import HOSTS, ip

LIGHTHOUSE = "http://lighthouse:29510"
"""Its address as nodes know it; the port is its default."""
HEARTBEAT_MS = 3000
"""After which the lighthouse counts a node as dead."""

_SERVER = str(Path(sys.executable).parent / "torchft_lighthouse")


class Network:
    """A lighthouse and nodes node0, node1, ...: each has a name, an address, and a cable to one switch."""

    def __init__(self, number: int, nodes: int, folder: Path) -> None:
        """Args: number: that no other network on this machine has at this time. folder: for the output of all."""
        self._hosts = ["lighthouse", *(f"node{index}" for index in range(nodes))]
        self._number, self._folder, self._jobs = number, folder, list[Job]()
        self.names = [f"mmtrain-{number}-{host}" for host in self._hosts]

    # ------------------------------------------------------------------------------------------- processes

    def lighthouse(self) -> Job:
        """A lighthouse that was started, with the options of docs/multi_node.md."""
        options = ("--min_replicas", "1", "--join_timeout_ms", "600000", "--heartbeat_timeout_ms", str(HEARTBEAT_MS))
        job = self._start("lighthouse", _SERVER, *options)
        job.wait_for("listening on")
        return job

    def node(self, index: int, *words: str, ranks: int = 1, max_restarts: int = 0) -> Job:
        """A node that was started, with the command of docs/multi_node.md. Args: words: of train.py."""
        host = f"node{index}"
        counts = ("--nnodes", "1", "--nproc-per-node", str(ranks), "--max-restarts", str(max_restarts))
        meet = ("--master-addr", host, "--master-port", "29500")
        return self._start(host, "-m", "torch.distributed.run", *counts, *meet, "train.py", *words)

    def _start(self, host: str, *words: str) -> Job:
        folder = self._folder / f"{host}-{len(self._jobs)}"
        folder.mkdir(parents=True)
        within = ("ip", "netns", "exec", self.names[self._hosts.index(host)], "unshare", "--uts", "sh", "-c")
        self._jobs.append(Job(folder, *words, within=(*within, f'hostname {host} && exec "$@"', "host")))
        return self._jobs[-1]

    def end(self) -> None:
        """Ends all processes."""
        for job in self._jobs:
            job.__exit__()

    # ---------------------------------------------------------------------------------------------- cables

    def cut(self, index: int) -> None:
        """Takes a node's cable out at the switch: what is sent is lost, and nobody is told."""
        ip("-n", self.names[0], "link", "set", f"port{index + 1}", "down")

    def mend(self, index: int) -> None:
        """Puts a node's cable in again."""
        ip("-n", self.names[0], "link", "set", f"port{index + 1}", "up")

    def make(self) -> None:
        """Raises: OSError, CalledProcessError: this machine does not allow it."""
        table = "".join(f"10.78.0.{index + 1} {host}\n" for index, host in enumerate(self._hosts))
        for name in self.names:
            ip("netns", "add", name)
            (HOSTS / name).mkdir(parents=True)
            (HOSTS / name / "hosts").write_text(f"127.0.0.1 localhost\n{table}")
        switch = self.names[0]
        ip("-n", switch, "link", "add", "switch", "type", "bridge")
        for index, name in enumerate(self.names):
            device = "switch"
            if index:
                device, port = "eth0", f"port{index}"
                ip("link", "add", port, "netns", switch, "type", "veth", "peer", "name", device, "netns", name)
                ip("-n", switch, "link", "set", port, "master", "switch", "up")
            ip("-n", name, "addr", "add", f"10.78.0.{index + 1}/24", "dev", device)
            for link in ("lo", device):
                ip("-n", name, "link", "set", link, "up")

    def remove(self) -> None:
        """Removes what `make` made."""
        for name in self.names:
            _remove(name)


def _remove(name: str) -> None:
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    (HOSTS / name / "hosts").unlink(missing_ok=True)
    if (HOSTS / name).is_dir():
        (HOSTS / name).rmdir()


def _remove_left_over() -> None:
    """Removes the networks of tests that were killed."""
    for folder in HOSTS.glob("mmtrain-*-*"):
        _, number, host = folder.name.split("-", 2)
        if (host == "lighthouse" or host.startswith("node")) and not is_alive(int(number)):
            _remove(folder.name)


@contextmanager
def network(nodes: int, folder: Path) -> Iterator[Network]:
    """A network, or a skipped test with the reason. Args: folder: for the output of all processes."""
    need_torchft()
    made = Network(os.getpid(), nodes, folder)
    try:
        _remove_left_over()
        made.make()
    except (OSError, subprocess.CalledProcessError) as error:
        made.remove()
        detail = getattr(error, "stderr", "") or error
        pytest.skip(f"no network namespaces can be made here (root and `ip` are needed): {detail}")
    try:
        yield made
    finally:
        made.end()
        made.remove()
