"""Training jobs as a user starts them, with `mmtrain train` or torchrun, and what their processes do."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from mmtrain.launch.processes import end_with_parent

ROOT = Path(__file__).resolve().parent.parent

MMTRAIN = ("-m", "mmtrain.commands.cli", "train")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
"""To be followed by the number of processes and train.py."""


class Job:
    """A job that was started in `folder`; its output goes to `folder`/output, its temporary files to `folder`/tmp.

    It ends with the tests, however these end: the kernel kills it, and its ranks with it.
    """

    def __init__(self, folder: Path, *words: str, within: tuple[str, ...] = ()) -> None:
        """Args: within: command that runs the one behind it, in the same process."""
        # A short name, since those of sockets below it have at most 107 characters.
        self.tmp = Path(tempfile.mkdtemp(prefix="job-", dir=os.environ["MMTRAIN_TEST_STORE"]))
        self._output = folder / "output"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [*within, sys.executable, *words],
                cwd=ROOT,
                env={**os.environ, "TMPDIR": str(self.tmp)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self._output.read_text()

    def wait_for(self, text: str, timeout: float = 180) -> None:
        """Returns once it has printed a text. Raises: AssertionError: it ends first, or takes longer."""
        deadline = time.monotonic() + timeout
        while text not in self.output:
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.output}"
            assert time.monotonic() < deadline, f"did not print {text!r}:\n{self.output}"
            time.sleep(0.05)

    def processes(self) -> dict[int, str]:
        """Its processes, the launcher first: id -> command line."""
        parents = {int(p.name): _parent(p) for p in Path("/proc").iterdir() if p.name.isdigit()}
        found = [self.process.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return {pid: _command(pid) for pid in found}

    def ranks(self) -> list[int]:
        """Ids of the processes of its ranks, in order."""
        marks = ("spawn_main", "train.py")
        return [
            pid
            for pid, command in self.processes().items()
            if pid != self.process.pid and _parent(Path(f"/proc/{pid}")) == self.process.pid
            and any(mark in command for mark in marks)
        ]  # fmt: skip

    def end(self, timeout: float = 120) -> int:
        """Waits for its end, and gives the exit status."""
        return self.process.wait(timeout)

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *error: object) -> None:
        for pid in self.processes():
            kill(pid)
        self.process.wait(30)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Sends a signal to a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def listening(pids: list[int] | dict[int, str]) -> list[str]:
    """Addresses, as /proc/net has them, on which processes take connections."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = os.readlink(link)
            except OSError:  # closed meanwhile
                continue
            if target.startswith("socket:["):
                inodes.add(target[len("socket:[") : -1])
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and (fields[3] == "0A" or table.startswith("udp")):
                found.append(fields[1])
    return found


def is_loopback(address: str) -> bool:
    """Whether an address of /proc/net is 127.0.0.0/8 or ::1."""
    host = address.partition(":")[0]
    return host.endswith("7F") if len(host) == 8 else host == "00000000000000000000000001000000"


def _parent(folder: Path) -> int:
    try:
        return int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
