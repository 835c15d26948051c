"""Runs a function on ranks that are processes of this machine, and returns their results.

The ranks rendezvous in a file of a folder that only this user can open, and communicate over the loopback interface: no
port is open to other machines. The end of one rank ends all of them, as does the end of this process.
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
from typing import Any, NoReturn

from mmtrain import errors
from mmtrain.config.config import Config
from mmtrain.config.sections import CommConfig
from mmtrain.errors import MMTrainError
from mmtrain.launch.launched import whole_number
from mmtrain.launch.processes import LOOPBACK, STOPS, end_with_parent, environment, leave, stops_held, take_stops

GRACE_S = 3.0
"""How long the other ranks have to end by themselves after the first failure."""


class RankDiedError(Exception):
    """A rank that ended by an error other than those of mmtrain, or was killed."""

    def __init__(self, rank: int, exit_code: int, text: str = "") -> None:
        """Args: exit_code: as of multiprocessing, negative for a signal. text: the traceback, if any."""
        self.exit_status = exit_code if exit_code > 0 else 128 - exit_code
        self.text = text
        how = f"died with exit status {exit_code}"
        if exit_code < 0:
            how = f"was killed by {signal.Signals(-exit_code).name}"
            how += ", mostly for memory (dmesg names it)" if exit_code == -signal.SIGKILL else ""
        super().__init__(f"rank {rank} {how}")


class Stopped(KeyboardInterrupt):
    """The ranks have ended after Ctrl-C or SIGTERM."""

    def __init__(self, number: int) -> None:
        """Args: number: of the signal."""
        super().__init__(number)
        self.exit_status = 128 + number


def train_on_ranks(job: Config) -> None:
    """Runs a training job to its end, each rank a process of this machine. Raises: as `run_on_ranks`."""
    run_on_ranks(_train, job.parallelism.layout.world_size, job, comm=job.comm)


def _train(device: Any, job: Config) -> None:
    from mmtrain.training.trainer import Trainer

    Trainer(job).run()


def run_on_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    comm: CommConfig,
    copies: int = 1,
    variables: Mapping[str, str] | None = None,
) -> list[Any]:
    """The results of `fn(device, *args)` in each process: `copies` process groups of `world` ranks in parallel.

    The default process group exists while it runs, gloo or NCCL as in training. The number of threads of each process
    is OMP_NUM_THREADS, else 1. `fn` must be importable, its arguments and results must be picklable. SIGINT and SIGTERM
    of this process are forwarded to the ranks; a second SIGINT kills them.

    Args: variables: additional environment variables of the ranks.
    Raises:
        ConfigError: OMP_NUM_THREADS is no number.
        MMTrainError: the error of the first rank that failed; the others are killed.
        RankDiedError: it failed in another way.
        Stopped: SIGINT or SIGTERM was received, and no rank failed.
    """
    wanted = {"OMP_NUM_THREADS": str(whole_number("OMP_NUM_THREADS") or 1), **LOOPBACK, **(variables or {})}
    # A temporary folder of this process, which the ranks use as theirs as well: a killed rank leaves no files behind.
    shared = multiprocessing.util.get_temp_dir()
    with tempfile.TemporaryDirectory(prefix="ranks-", dir=shared) as name, environment(wanted):
        folder, context = Path(name), multiprocessing.get_context("spawn")
        ranks = [
            context.Process(target=_rank, args=(index, os.getpid(), fn, world, comm, folder, args))
            for index in range(copies * world)
        ]
        with forwarded_signals(ranks) as signals:
            failed = _run(ranks, signals)
        ended_by_signal = any(-(rank.exitcode or 0) in signals for rank in ranks)  # then others fail, too
        if failed and not ended_by_signal:
            raise_reason(failed, folder)
        if signals:
            raise Stopped(signals[0])
        return [value_of(folder, index) for index in range(len(ranks))]


# ------------------------------------------------------------------------------------------ in this process


def _run(ranks: Sequence[SpawnProcess], signals: Sequence[int]) -> dict[int, int]:
    """Starts the processes and waits for them; returns rank -> exit status of those that were the first to fail.

    Args: signals: that were forwarded; a rank that ended by one of them has not failed.
    """
    failed: dict[int, int] = {}
    deadline = float("inf")
    try:
        with stops_held():
            for rank in ranks:
                rank.start()
        running: Sequence[SpawnProcess] = ranks
        while running and time.monotonic() < deadline:
            multiprocessing.connection.wait([rank.sentinel for rank in running], timeout=1.0)
            for rank in running if signals else ():
                send(rank, signals[0])  # again: a signal before the trainer runs ends the rank
            running = [rank for rank in ranks if rank.is_alive()]  # before the check of ended ranks
            if not failed:
                codes = ((index, rank.exitcode) for index, rank in enumerate(ranks))
                failed = {index: code for index, code in codes if code and -code not in signals}
                deadline = time.monotonic() + GRACE_S if failed else deadline
    finally:
        for rank in ranks:
            if rank.pid is not None:
                rank.kill()
                rank.join()
    return failed


@contextmanager
def forwarded_signals(ranks: Sequence[SpawnProcess]) -> Iterator[list[int]]:
    """A context that forwards SIGINT and SIGTERM to the ranks, a second SIGINT as SIGKILL; yields the received
    signals."""
    came: list[int] = []

    def forward(number: int, frame: Any) -> None:
        quit_now = number == signal.SIGINT and number in came
        came.append(signal.SIGKILL if quit_now else number)
        for rank in ranks:
            send(rank, came[-1])

    if threading.current_thread() is not threading.main_thread():  # only the main thread can handle signals
        yield came
        return
    before = {number: signal.signal(number, forward) for number in STOPS}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def send(rank: SpawnProcess, number: int) -> None:
    """Sends a signal to a process, unless it has ended."""
    if rank.pid is not None and rank.is_alive():
        os.kill(rank.pid, number)


def value_of(folder: Path, index: int) -> Any:
    """What the function of a rank returned, which has ended with status 0."""
    return pickle.loads((folder / f"value-{index}").read_bytes())


def raise_reason(failed: Mapping[int, int], folder: Path) -> None:
    """Raises the reason of a failure: the end of a rank that wrote no error, since others' errors follow from it, else
    the error that was written first.

    Args: failed: as `_run` returns it. folder: where `finish` wrote.
    """
    for index, code in failed.items():
        if code < 0 or not (folder / f"error-{index}").exists():
            raise RankDiedError(index, code)
    reason = min(folder.glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
    kind, text = pickle.loads(reason.read_bytes())
    if kind:
        raise getattr(errors, kind)(text)
    raise RankDiedError(int(reason.name.partition("-")[2]), 1, text)


# ----------------------------------------------------------------------------------------------- in a rank


def _rank(
    index: int, parent: int, fn: Callable[..., Any], world: int, comm: CommConfig, folder: Path, args: tuple[Any, ...]
) -> None:
    """The main function of a process."""
    end_with_parent(parent)
    take_stops()
    finish(lambda: _value(fn, index, world, comm, folder, args), index, folder)


def finish(compute: Callable[[], Any], index: int, folder: Path) -> NoReturn:
    """Ends the process of a rank with what it computes, or with its error, in a file of a folder of its launcher."""
    try:
        _save(compute(), folder / f"value-{index}")
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
    """The result of the function on this rank, within its process group."""
    import torch
    import torch.distributed as dist

    from mmtrain.parallel.meeting import meet
    from mmtrain.parallel.mesh import init_process_group, pick_device

    rank, group = index % world, index // world
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    device, store = pick_device(comm), meet(comm, dist.FileStore(f"{folder}/store-{group}", world))
    init_process_group(comm, device, store)
    value = fn(device, *args)
    # Closing connections while another rank still reads from them would reset these.
    store.set(f"done {rank}", "")
    store.wait([f"done {other}" for other in range(world)], timedelta(seconds=comm.timeout_seconds))
    return value


def _save(value: Any, path: Path) -> None:
    """Writes a file that is either complete or absent."""
    part = path.with_name(f"part-{path.name}")
    part.write_bytes(pickle.dumps(value))
    os.replace(part, path)
