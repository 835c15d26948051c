"""What runs on the nodes of tests that must start at once: nothing here loads torch."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mmtrain.errors import ConfigError
from mmtrain.launch.member import Member
from mmtrain.launch.membership import Membership
from mmtrain.local.nodes import LocalNodes, NodeJob

SILENT_S = 1.0


class RunningNodes:
    """Local nodes that another thread runs."""

    def __init__(self, job: NodeJob) -> None:
        self.nodes = LocalNodes(job)
        self._found: Any = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found = self.nodes.run()
        except BaseException as error:
            self._found = error

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Sends a signal to all processes of a node."""
        for pid in self.nodes.pids[name]:
            os.kill(pid, number)

    def wait(self, timeout_s: float = 60.0) -> dict[str, list[Any]]:
        """The results. Raises: what `LocalNodes.run` does."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"{sorted(self.nodes.pids)} still run"
        if isinstance(self._found, BaseException):
            raise self._found
        return self._found

    def end(self) -> None:
        self.nodes.end()
        self._thread.join()


@contextmanager
def running_nodes(
    fn: Any, *args: Any, nodes: int, ranks: int = 1, silent_s: float = SILENT_S, max_restarts: int = 0
) -> Iterator[RunningNodes]:
    """Runs `fn(member, *args)` on each rank; kills all at the end of the context."""
    job = NodeJob(
        fn=fn,
        args=args,
        nodes=nodes,
        ranks=ranks,
        digest="version=1",
        silent_s=silent_s,
        max_restarts=max_restarts,
    )
    running = RunningNodes(job)
    try:
        yield running
    finally:
        running.end()


class HungUpError(Exception):
    """A peer does not answer."""


class Files:
    """Collectives of the ranks of one generation through files in the store of its first node."""

    def __init__(self, membership: Membership, name: str, local_rank: int) -> None:
        self._folder = Path(membership.nodes[0].store.removeprefix("file://"), f"generation-{membership.generation}")
        self._folder.mkdir(exist_ok=True)
        self._rank, self._size = membership.first_rank(name) + local_rank, membership.num_ranks

    def gather(self, what: str, value: int) -> list[int]:
        deadline, left = time.monotonic() + SILENT_S, self._folder / "left"
        part = self._folder / f"part-{self._rank}"
        part.write_text(str(value))
        part.rename(self._folder / f"{what}-{self._rank}")
        paths = [self._folder / f"{what}-{rank}" for rank in range(self._size)]
        while not all(path.exists() for path in paths):
            if left.exists() or time.monotonic() > deadline:
                left.touch()
                raise HungUpError
            time.sleep(0.002)
        return [int(path.read_text()) for path in paths]

    def hang_up(self) -> None:
        (self._folder / "left").touch()


def trains(member: Member, folder: Path) -> list[tuple[int, str, int]]:
    """Takes steps that all ranks take together; the memberships that it took up: generation, names, step.

    A node that was told to end leaves once all know it. While `folder/hold` exists, no step after the third one is
    taken; all end after the step in which one finds `folder/enough`. The files NAME-RANK-STEP and NAME-RANK-of-NAMES
    say how far a rank is.
    """
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: (told.append(number), member.mark_leaving()))
    state, log = 0, []
    membership: Membership | None = member.first()
    while membership is not None and not membership.nodes[membership.names.index(member.name)].leaving:
        files = Files(membership, member.name, member.local_rank)
        try:
            state = max(files.gather("state", state))
            log.append((membership.generation, " ".join(membership.names), state))
            (folder / f"{member.name}-{member.local_rank}-of-{'+'.join(membership.names)}").touch()
            membership, enough = None, [0]
            while not any(enough) and membership is None:
                (folder / f"{member.name}-{member.local_rank}-{state}").touch()
                while (folder / "hold").exists() and state >= 3:
                    time.sleep(0.002)
                member.holds(state)
                member.begin_step(state + 1)
                enough = files.gather(f"step-{state + 1}", int((folder / "enough").exists()))
                state += 1
                membership = member.end_step(state)
        except HungUpError:
            files.hang_up()
            member.left()
            membership = member.next()
    member.close()
    return log


def variables(member: Member) -> list[str]:
    member.first()
    return [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")]


def fails(member: Member, folder: Path) -> None:
    """A mistake of the user's on all nodes."""
    member.first()
    (folder / f"start-{member.name}").touch()
    raise ConfigError("training.steps = 0; make it larger")


def dies(member: Member, folder: Path) -> str:
    """Dies in the first start of its node."""
    if member.name.endswith("-000"):
        os._exit(7)
    return member.first().names[0]
