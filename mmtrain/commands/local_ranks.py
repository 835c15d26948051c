"""Runs a function on ranks that are processes of this machine, and brings back what each returned.

The ranks meet in a file of a folder that only this user can open, and talk over the loopback interface: nothing listens
to other machines. What ends one rank ends all of them, and so does the end of this process.
"""

import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from mmtrain import errors
from mmtrain.config.config import Config
from mmtrain.config.sections import CommConfig
from mmtrain.errors import MMTrainError
from mmtrain.launch.processes import LOOPBACK, STOPS, end_with_parent, environment, leave, stops_held, take_stops

GRACE_S = 3.0
"""How long the other ranks have to end by themselves after the first that failed."""


class RankDiedError(Exception):
    """A rank that ended by an error that is not mmtrain's, or from outside."""

    def __init__(self, rank: int, exit_code: int, text: str = "") -> None:
        """Args: exit_code: as of multiprocessing, negative of a signal. text: the traceback; empty: there is none."""
        self.exit_status = exit_code if exit_code > 0 else 128 - exit_code
        self.text = text
        how = f"died with exit status {exit_code}"
        if exit_code < 0:
            how = f"was killed by {signal.Signals(-exit_code).name}"
            how += ", mostly for memory (dmesg names it)" if exit_code == -signal.SIGKILL else ""
        super().__init__(f"rank {rank} {how}")


class Stopped(KeyboardInterrupt):
    """The ranks were told to end, by Ctrl-C or SIGTERM, and have ended."""

    def __init__(self, number: int) -> None:
        """Args: number: of the signal."""
        super().__init__(number)
        self.exit_status = 128 + number


def train_on_ranks(job: Config) -> None:
    """Runs a training job to its end, each rank a process of this machine. Raises: as `run_on_ranks`."""
    run_on_ranks(_train, job.parallelism.mesh_shape.world_size, job, comm=job.comm)


def _train(device: Any, job: Config) -> None:
    from mmtrain.trainer import Trainer

    Trainer(job).run()


def run_on_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    comm: CommConfig,
    copies: int = 1,
    variables: Mapping[str, str] | None = None,
) -> list[Any]:
    """What `fn(device, *args)` returned in each process: `copies` process groups of `world` ranks side by side.

    The default process group exists while it runs, gloo or NCCL as in training. Each process has as many threads as
    OMP_NUM_THREADS says, else one. `fn` must be importable, its arguments and what it returns can be pickled. SIGINT
    and SIGTERM of this process go on to the ranks; a second SIGINT kills them.

    Args: variables: of the environment of the ranks, besides those of this process.
    Raises:
        MMTrainError: as the first rank that failed raised it; the others are killed.
        RankDiedError: it failed in another way.
        Stopped: SIGINT or SIGTERM came, and no rank failed.
    """
    wanted = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), **LOOPBACK, **(variables or {})}
    # A temporary folder of this process, which the ranks take for theirs as well: who is killed leaves nothing behind.
    shared = multiprocessing.util.get_temp_dir()
    with tempfile.TemporaryDirectory(prefix="ranks-", dir=shared) as name, environment(wanted):
        folder, context = Path(name), multiprocessing.get_context("spawn")
        ranks = [
            context.Process(target=_rank, args=(index, os.getpid(), fn, world, comm, folder, args))
            for index in range(copies * world)
        ]
        with _forwarded_signals(ranks) as signals:
            failed = _run(ranks, signals)
        ended_by_signal = any(-(rank.exitcode or 0) in signals for rank in ranks)  # others then miss that rank
        if failed is not None and not ended_by_signal:
            _raise_reason(failed, ranks[failed].exitcode or 0, folder)
        if signals:
            raise Stopped(signals[0])
        return [pickle.loads((folder / f"value-{index}").read_bytes()) for index in range(len(ranks))]


# ------------------------------------------------------------------------------------------ in this process


def _run(ranks: Sequence[SpawnProcess], signals: Sequence[int]) -> int | None:
    """Starts the processes and waits for them; the first that failed, None if none did.

    Args: signals: that were sent on; a rank that one of them ended has not failed.
    """
    first: int | None = None
    deadline = float("inf")
    try:
        with stops_held():
            for rank in ranks:
                rank.start()
        running: Sequence[SpawnProcess] = ranks
        while running and time.monotonic() < deadline:
            multiprocessing.connection.wait([rank.sentinel for rank in running], timeout=1.0)
            for rank in running if signals else ():
                _send(rank, signals[0])  # again: before the trainer runs, it ends the rank
            running = [rank for rank in ranks if rank.is_alive()]  # before the look at those that ended
            for index, rank in enumerate(ranks):
                if first is None and rank.exitcode and -rank.exitcode not in signals:
                    first, deadline = index, time.monotonic() + GRACE_S
    finally:
        for rank in ranks:
            if rank.pid is not None:
                rank.kill()
                rank.join()
    return first


@contextmanager
def _forwarded_signals(ranks: Sequence[SpawnProcess]) -> Iterator[list[int]]:
    """Inside, SIGINT and SIGTERM go on to the ranks, a second SIGINT as SIGKILL; gives those that came."""
    came: list[int] = []

    def forward(number: int, frame: Any) -> None:
        quit_now = number == signal.SIGINT and number in came
        came.append(signal.SIGKILL if quit_now else number)
        for rank in ranks:
            _send(rank, came[-1])

    if threading.current_thread() is not threading.main_thread():  # only this one can take signals
        yield came
        return
    before = {number: signal.signal(number, forward) for number in STOPS}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _send(rank: SpawnProcess, number: int) -> None:
    if rank.pid is not None and rank.is_alive():
        os.kill(rank.pid, number)


def _raise_reason(failed: int, exit_code: int, folder: Path) -> None:
    """Raises what ended the first process that failed; of several at about the same time, the first that wrote why."""
    reasons = sorted(folder.glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
    if not reasons or exit_code < 0:
        raise RankDiedError(failed, exit_code)
    kind, text = pickle.loads(reasons[0].read_bytes())
    if kind:
        raise getattr(errors, kind)(text)
    raise RankDiedError(int(reasons[0].name.partition("-")[2]), 1, text)


# ----------------------------------------------------------------------------------------------- in a rank


def _rank(
    index: int, parent: int, fn: Callable[..., Any], world: int, comm: CommConfig, folder: Path, args: tuple[Any, ...]
) -> None:
    """The whole life of one process."""
    end_with_parent(parent)
    take_stops()
    try:
        _save(_value(fn, index, world, comm, folder, args), folder / f"value-{index}")
    except MMTrainError as error:
        _save((type(error).__name__, str(error)), folder / f"error-{index}")
        leave(2)
    except BaseException:
        _save(("", traceback.format_exc()), folder / f"error-{index}")
        leave(1)
    leave(0)


def _value(
    fn: Callable[..., Any], index: int, world: int, comm: CommConfig, folder: Path, args: tuple[Any, ...]
) -> Any:
    """What the function returns on this rank, with the process group around it."""
    import torch
    import torch.distributed as dist

    from mmtrain.parallel.mesh import init_process_group, pick_device

    rank, group = index % world, index // world
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    device, store = pick_device(comm), dist.FileStore(f"{folder}/store-{group}", world)
    init_process_group(comm, device, store)
    value = fn(device, *args)
    # Who closes its connections while another rank still reads from them resets these.
    store.set(f"done {rank}", "")
    store.wait([f"done {other}" for other in range(world)], timedelta(seconds=comm.timeout_seconds))
    return value


def _save(value: Any, path: Path) -> None:
    """Writes a file that is either absent or whole."""
    part = path.with_name(f"part-{path.name}")
    part.write_bytes(pickle.dumps(value))
    os.replace(part, path)
