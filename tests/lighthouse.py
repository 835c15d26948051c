"""A real lighthouse for tests, on a free port of loopback."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest

from mmtrain.launch.processes import end_with_parent

SERVER = (
    "import sys, time; from torchft.coordination import LighthouseServer; server = LighthouseServer(bind=sys.argv[1], "
    "min_replicas=1, join_timeout_ms=600000, quorum_tick_ms=20, heartbeat_timeout_ms=int(sys.argv[2])); "
    "print('up', flush=True); time.sleep(3600)"
)


class Lighthouse:
    """A lighthouse in a process of its own: one that ends in this process keeps its connections."""

    def __init__(self, late_s: float) -> None:
        """Args: late_s: after which a node without a heartbeat is dead."""
        self._bind, self._late_s = f"127.0.0.1:{free_port()}", late_s
        self.address = f"http://{self._bind}"
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = [sys.executable, "-c", SERVER, self._bind, f"{1000 * self._late_s:.0f}"]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, preexec_fn=end_with_parent
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "up\n"

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@contextmanager
def started(late_s: float) -> Iterator[Lighthouse]:
    """A lighthouse, or a skipped test with the reason; it ends with the context, and requests of threads with it."""
    need_torchft()
    lighthouse = Lighthouse(late_s)
    lighthouse.start()
    try:
        yield lighthouse
    finally:
        lighthouse.kill()


def need_torchft() -> None:
    """Skips the test where there is none: the extra `dev` has it, but torchft has no wheel for every platform."""
    if find_spec("torchft") is None:
        pytest.skip("torchft, of mmtrain[elastic], is not installed")


def free_port() -> int:
    """A port of loopback that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
