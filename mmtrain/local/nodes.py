"""Runs a function on nodes that are groups of processes of this machine, as an elastic job: nodes may die and come.

The launcher is the membership service: local rank 0 of each node asks it through a pipe, over which JSON travels. A
node that loses a process is killed whole, and started again under a new name as often as is allowed. Ranks rendezvous
in files of a folder that only this user can open: no port is open.
"""

import logging
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from mmtrain.errors import MMTrainError, RankLostError
from mmtrain.launch.board import FolderBoard
from mmtrain.launch.hub import Hub, HubPipes, PipeSource
from mmtrain.launch.launched import whole_number
from mmtrain.launch.member import Member
from mmtrain.launch.membership import Node
from mmtrain.launch.processes import LOOPBACK, STOPS, end_with_parent, environment, stops_held, take_stops
from mmtrain.local.ranks import (
    RankDiedError,
    Stopped,
    finish,
    forwarded_signals,
    raise_reason,
    send,
    value_of,
)

logger = logging.getLogger("mmtrain")

_AGAIN_S = 1.0
"""How often a signal is forwarded again: one that comes before the trainer runs ends the rank."""


@dataclass(frozen=True, kw_only=True)
class NodeJob:
    """What runs on local nodes."""

    fn: Callable[..., Any]
    """`fn(member, *args)` runs on each rank; importable, its arguments and results picklable."""
    args: tuple[Any, ...]
    nodes: int
    """Number of them at the start."""
    ranks: int
    """Number of ranks of each node."""
    digest: str
    """The digest of version, config and data, as `make_digest` writes it."""
    silent_s: float
    """A node without a sign of life for so many seconds is left out."""
    max_restarts: int = 0
    """How often each node is started again after a failure."""


@dataclass(slots=True)
class _LocalNode:
    """The processes of one start of a node."""

    node: Node
    slot: int
    """The index of the job's node that this is a start of."""
    restarts: int
    """The restarts that are left."""
    folder: Path
    processes: list[SpawnProcess]


def run_on_nodes(job: NodeJob) -> dict[str, list[Any]]:
    """The results of all nodes that ended without an error: name -> those of its ranks.

    SIGINT and SIGTERM of this process are forwarded to all ranks; a second SIGINT kills them. A lost node alone is no
    failure.

    Raises:
        ConfigError: OMP_NUM_THREADS is no number.
        MMTrainError: no node of the last generation ended without an error: the error of the first of them.
        RankDiedError: the same, but a rank died in another way.
        Stopped: SIGINT or SIGTERM was received, and did not lead to an error.
    """
    return LocalNodes(job).run()


class LocalNodes:
    """An elastic job on this machine. `run` runs it; another thread may look at its nodes and add some meanwhile."""

    def __init__(self, job: NodeJob) -> None:
        self._job = job
        self._nodes: dict[str, _LocalNode] = {}
        self._processes: list[SpawnProcess] = []
        """The processes of all nodes that run."""
        self._starts = 0
        self._slots = 0
        self._results: dict[str, list[Any]] = {}
        self._errors: dict[str, MMTrainError | RankDiedError] = {}
        self._stopped: dict[str, MMTrainError | RankDiedError] = {}
        """The errors of nodes that were told to end."""
        self._hub = Hub(job.silent_s)
        self._pipes = HubPipes(self._hub, job.silent_s, time.monotonic())
        self._wanted, self._ends = 0, False
        self._sent_s = 0.0
        """The time at which a signal was forwarded again."""
        self._lock = threading.Lock()
        self._wake_receiver, self._wake_sender = multiprocessing.Pipe(duplex=False)

    def run(self) -> dict[str, list[Any]]:
        """Runs the job to its end. Returns, raises: as `run_on_nodes`."""
        wanted = {"OMP_NUM_THREADS": str(whole_number("OMP_NUM_THREADS") or 1), **LOOPBACK}
        shared = multiprocessing.util.get_temp_dir()
        with tempfile.TemporaryDirectory(prefix="nodes-", dir=shared) as name, environment(wanted):
            with forwarded_signals(self._processes) as signals:
                try:
                    for _ in range(self._job.nodes):
                        self._start_new(Path(name))
                    while self._nodes and not self._ends:
                        self._look(Path(name), signals)
                finally:
                    for node in list(self._nodes.values()):
                        self._remove(node)
            return self._end(signals)

    def add(self) -> None:
        """Starts one more node, which joins the job when it is ready."""
        with self._lock:
            self._wanted += 1
        self._wake_sender.send_bytes(b"")

    def end(self) -> None:
        """Kills all nodes; `run` returns what has ended before."""
        self._ends = True
        with suppress(OSError):
            self._wake_sender.send_bytes(b"")

    @property
    def pids(self) -> dict[str, list[int]]:
        """Processes of the nodes that run, by name of the node, in the order of their local ranks."""
        return {
            name: [process.pid for process in node.processes if process.pid is not None]
            for name, node in sorted(self._nodes.items())
        }

    # ------------------------------------------------------------------------------------------ one look

    def _look(self, folder: Path, signals: Sequence[int]) -> None:
        """Waits for news of nodes, and acts on all."""
        sentinels = [process.sentinel for process in self._processes if process.is_alive()]
        pause_s = min(self._pipes.pause_s, _AGAIN_S)
        multiprocessing.connection.wait([*sentinels, *self._pipes.pipes, self._wake_receiver], timeout=pause_s)
        while self._wake_receiver.poll():
            self._wake_receiver.recv_bytes()
        with self._lock:
            wanted, self._wanted = self._wanted, 0
        for _ in range(wanted):
            self._start_new(folder)
        if signals and time.monotonic() - self._sent_s >= _AGAIN_S:
            self._sent_s = time.monotonic()
            for process in self._processes:
                send(process, signals[0])
        for node in list(self._nodes.values()):
            self._check(node, folder, signals)
        self._pipes.serve(time.monotonic())
        if self._succeeded():  # what did not take part in the last round is stopped, or comes too late
            last = {node.name for node in self._hub.last_round}
            for node in [node for name, node in self._nodes.items() if name not in last]:
                self._remove(node)

    def _check(self, node: _LocalNode, folder: Path, signals: Sequence[int]) -> None:
        """Handles the end of a node, if it has ended or lost a process."""
        ended = not any(process.is_alive() for process in node.processes)  # before the look at exit codes
        codes = {rank: process.exitcode for rank, process in enumerate(node.processes)}
        failed = {rank: code for rank, code in codes.items() if code}
        if not failed and not ended:
            return
        name = node.node.name
        self._remove(node)
        if not failed:
            self._results[name] = [value_of(node.folder, rank) for rank in range(self._job.ranks)]
            return
        error = _reason(failed, node.folder)
        if signals or any(-code in STOPS for code in failed.values()):  # it was told to end
            self._stopped[name] = error
            return
        self._errors[name] = error
        again = node.restarts > 0 and not self._succeeded() and _may_help(error)
        logger.warning(
            "node %s is lost: %s; %s",
            name,
            error,
            f"it is started again, {node.restarts - 1} more times at most" if again else "it is not started again",
        )
        if again:
            self._start(node.slot, node.restarts - 1, folder)

    def _remove(self, node: _LocalNode) -> None:
        """Kills what is left of a node."""
        for process in node.processes:
            process.kill()
        for process in node.processes:
            process.join()
            self._processes.remove(process)
        self._pipes.remove(node.node.name)
        del self._nodes[node.node.name]

    def _start_new(self, folder: Path) -> None:
        self._start(self._slots, self._job.max_restarts, folder)
        self._slots += 1

    def _start(self, slot: int, restarts: int, folder: Path) -> None:
        """Starts the processes of a node under a name of its own."""
        job, name = self._job, f"node-{slot:03d}-{self._starts:03d}"
        self._starts += 1
        own = folder / name
        own.mkdir()
        node = Node(name=name, ranks=job.ranks, store=f"file://{own}", digest=job.digest)
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        with stops_held(), theirs:
            for index in range(job.ranks):
                args = (index, os.getpid(), job, node, own, theirs if index == 0 else None)
                process = context.Process(target=_rank, args=args)
                process.start()
                self._processes.append(process)
            started = self._processes[-job.ranks :]
            self._nodes = {**self._nodes, name: _LocalNode(node, slot, restarts, own, started)}
            self._pipes.add(name, ours, time.monotonic())

    # --------------------------------------------------------------------------------------------- the end

    def _succeeded(self) -> bool:
        """Whether a node of the last generation has ended without an error, other than one that left it."""
        return any(node.name in self._results for node in self._last())

    def _last(self) -> Sequence[Node]:
        """The nodes of the last round that were to stay; all if none was."""
        return [node for node in self._hub.last_round if not node.leaving] or self._hub.last_round

    def _end(self, signals: Sequence[int]) -> dict[str, list[Any]]:
        """Returns, raises: as `run_on_nodes`."""
        names = [node.name for node in self._last()]
        errors = [error for name, error in self._errors.items() if name in names] or list(self._errors.values())
        if errors and not self._succeeded() and not self._ends:
            raise errors[0]
        if signals:
            raise Stopped(signals[0])
        if self._stopped and not self._results and not self._ends:
            raise next(iter(self._stopped.values()))
        return self._results


def _reason(failed: Mapping[int, int], folder: Path) -> MMTrainError | RankDiedError:
    """Why a node failed."""
    try:
        raise_reason(failed, folder)
    except (MMTrainError, RankDiedError) as error:
        return error
    raise AssertionError("a failure has a reason")


def _may_help(error: Exception) -> bool:
    """Whether another start of a node may go better: not after a mistake of the user's."""
    return isinstance(error, (RankDiedError, RankLostError))


# ----------------------------------------------------------------------------------------------- in a rank


def _rank(local_rank: int, parent: int, job: NodeJob, node: Node, folder: Path, pipe: Connection | None) -> None:
    """The main function of a process."""
    end_with_parent(parent)
    take_stops()
    names = {"RANK": local_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": job.ranks, "LOCAL_WORLD_SIZE": job.ranks}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update(own_devices(int(node.name.split("-")[1]), job.ranks))
    member = Member(
        node,
        local_rank=local_rank,
        board=FolderBoard(folder / "board"),
        source=None if pipe is None else PipeSource(pipe),
        silent_s=job.silent_s,
    )
    finish(lambda: job.fn(member, *job.args), local_rank, folder)


def own_devices(
    slot: int, ranks: int, variables: Mapping[str, str] = os.environ, device_files: str = "/dev"
) -> dict[str, str]:
    """The variable by which the ranks of a node see CUDA devices of their own; empty where there are not enough.

    Args: slot: which of the job's nodes it is; ranks: of a node.
    """
    given = variables.get("CUDA_VISIBLE_DEVICES")
    found = [path.name for path in Path(device_files).glob("nvidia*") if path.name[6:].isdecimal()]
    names = [str(number) for number in range(len(found))] if given is None else given.split(",")
    own = names[slot * ranks : (slot + 1) * ranks]
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)} if len(own) == ranks and all(own) else {}
