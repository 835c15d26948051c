"""What the ranks of a job send in a step, counted in two ways, where two jobs take turns on one machine.

Each rank counts the calls of its process groups by thread and operation, and the bytes that the kernel has sent on its
connections, which also shows what nobody called from Python.
"""

import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mmtrain.config import config
from mmtrain.observe.observer import Observer, RunningStep

OPERATIONS = (
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base"),
    *("allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather"),
    *("monitored_barrier", "reduce", "reduce_scatter", "reduce_scatter_tensor_coalesced", "_reduce_scatter_base"),
    *("recv", "recv_anysource", "scatter", "send"),
)
"""Methods of a process group."""
_BYTES_SENT = 200
"""Where `tcpi_bytes_sent` is in the kernel's `struct tcp_info`."""

Counts = Counter[tuple[str, str]]
"""(thread, operation) -> calls."""


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """What a rank has done when it comes to the end of a turn."""

    rank: int
    time_s: float
    """Of `time.monotonic`."""
    cpu_s: float
    """Of all its threads, in the turn that ends."""
    main_s: float
    """Of its main thread, in that turn."""
    sent_bytes: int
    """On TCP connections, since these were made."""
    calls: Counts


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Where the ranks of one job wait for their turn."""

    go: Semaphore
    arrived: SimpleQueue
    warm: int
    """Steps before the first turn."""
    block: int
    """Steps of a turn."""


class Turns(Observer):
    """Lets a rank wait before the first step of each turn."""

    def __init__(self, turn: Turn, calls: Counts) -> None:
        self._turn, self._calls = turn, calls
        self._start_s = 0.0, 0.0

    def before_step(self, step: RunningStep) -> None:
        """See `Observer`."""
        turn, done = self._turn, step.step - 1 - self._turn.warm
        if done < 0 or done % turn.block:
            return
        turn.arrived.put(
            Arrival(
                rank=dist.get_rank(),
                time_s=time.monotonic(),
                cpu_s=time.process_time() - self._start_s[0],
                main_s=time.thread_time() - self._start_s[1],
                sent_bytes=sent_bytes(),
                calls=Counter(self._calls),
            )
        )
        turn.go.acquire()
        self._start_s = time.process_time(), time.thread_time()


def sent_bytes() -> int:
    """Bytes that this process has sent on its TCP connections."""
    from mmtrain.parallel import leave

    found = 0
    for descriptor in leave.connections().values():
        with leave._socket(descriptor) as own:
            info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        found += struct.unpack_from("<Q", info, _BYTES_SENT)[0]
    return found


def counted_calls() -> Counts:
    """Counts all calls of process groups of this process from now on."""
    from torch._C._distributed_c10d import Backend, ProcessGroup

    calls: Counts = Counter()
    for kind in (Backend, ProcessGroup):
        for name in OPERATIONS:
            if name in vars(kind):
                setattr(kind, name, _counting(vars(kind)[name], name, calls))
    return calls


def count_asks(calls: Counts) -> None:
    """Counts what a node says to the membership service, too."""
    from mmtrain.launch.hub import PipeSource

    for name in ("ask", "beat"):
        setattr(PipeSource, name, _counting(getattr(PipeSource, name), name, calls, "membership"))


def _counting(method: Callable[..., Any], name: str, calls: Counts, thread: str = "") -> Callable[..., Any]:
    def counting(*args: Any, **kwargs: Any) -> Any:
        calls[thread or threading.current_thread().name, name] += 1
        return method(*args, **kwargs)

    return counting


# ------------------------------------------------------------------------------------------------- in ranks


def train_ordinary(device: Any, path: Path, overrides: Sequence[str], turn: Turn) -> None:
    """A rank of an ordinary job."""
    from mmtrain.training.trainer import Trainer

    Trainer(config.load(path, overrides), observers=[Turns(turn, counted_calls())]).run()


def train_elastic(member: Any, path: Path, overrides: Sequence[str], turn: Turn) -> None:
    """A rank of an elastic job, of nodes of one rank."""
    from mmtrain.training.elastic_job import ElasticJob

    calls = counted_calls()
    count_asks(calls)
    ElasticJob(config.load(path, overrides), member, observers=[Turns(turn, calls)]).run()
