"""Two nodes on one machine: network namespaces with a cable between them, and a host name each."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.launched import Job

HOSTS = Path("/etc/netns")
"""`ip netns exec` shows its files NAME/hosts as /etc/hosts."""


class TwoNodes:
    """Nodes node0, where processes meet, and node1."""

    def __init__(self, number: int) -> None:
        """Args: number: that no other pair on this machine has at this time."""
        self.names = tuple(f"mmtrain-{number}-{index}" for index in range(2))
        self._devices = tuple(f"mm{number}n{index}" for index in range(2))

    def start(self, index: int, folder: Path, *words: str, torchrun: tuple[str, ...] = ()) -> Job:
        """A job's part on a node: torchrun with one process. Args: folder: for its output."""
        folder.mkdir(parents=True, exist_ok=True)
        node = ("ip", "netns", "exec", self.names[index], "unshare", "--uts", "sh", "-c")
        inside = f'hostname node{index} && export GLOO_SOCKET_IFNAME={self._devices[index]} && exec "$@"'
        meet = ("--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", "node0:29500")
        launcher = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *meet, *torchrun)
        return Job(folder, *launcher, "train.py", *words, within=(*node, inside, "node"))

    def cut(self) -> None:
        """Takes the cable out: what is sent is lost, and nobody is told."""
        ip("-n", self.names[1], "link", "set", self._devices[1], "down")


@contextmanager
def two_nodes() -> Iterator[TwoNodes]:
    """Two nodes, or a skipped test with the reason."""
    nodes = TwoNodes(os.getpid() % 1_000_000)
    try:
        for name in nodes.names:
            ip("netns", "add", name)
            (HOSTS / name).mkdir(parents=True)
            (HOSTS / name / "hosts").write_text("127.0.0.1 localhost\n10.77.0.1 node0\n10.77.0.2 node1\n")
        _plug(nodes)
    except (OSError, subprocess.CalledProcessError) as error:
        _remove(nodes)
        detail = getattr(error, "stderr", "") or error
        pytest.skip(f"no network namespaces can be made here (root and `ip` are needed): {detail}")
    try:
        yield nodes
    finally:
        _remove(nodes)


def _plug(nodes: TwoNodes) -> None:
    (one, other), (device, peer) = nodes.names, nodes._devices
    ip("link", "add", device, "netns", one, "type", "veth", "peer", "name", peer, "netns", other)
    for index, (name, end) in enumerate(zip(nodes.names, nodes._devices, strict=True)):
        ip("-n", name, "addr", "add", f"10.77.0.{index + 1}/24", "dev", end)
        for link in ("lo", end):
            ip("-n", name, "link", "set", link, "up")


def _remove(nodes: TwoNodes) -> None:
    for name in nodes.names:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)
        (HOSTS / name / "hosts").unlink(missing_ok=True)
        if (HOSTS / name).is_dir():
            (HOSTS / name).rmdir()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
