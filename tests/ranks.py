"""Runs a function on several ranks that talk over gloo: real processes, a file store, no ports."""

import datetime
import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from types import SimpleNamespace
from typing import Any

import pytest

from mmtrain.launch.processes import end_with_parent

_context = multiprocessing.get_context("forkserver")
_FAMILIES = ("qwen2", "llama", "qwen2_vl", "qwen2_5_vl", "siglip", "vit", "whisper")
_context.set_forkserver_preload(
    [
        "mmtrain.training.trainer",
        "tests.reference",
        "datasets",
        "torch.utils.tensorboard",
        "numba",
        "peft",
        "scipy.stats",
    ]
    + [
        "diffusers.models.transformers.transformer_wan",
        "diffusers.models.autoencoders",
        "torch.utils.serialization.config",
    ]
    + [f"transformers.models.{family}.modeling_{family}" for family in _FAMILIES]
    + ["pytest", "tests.jobs", "tests.parallel.parity", "tests.server"]
)
"""What ranks import, some of it late (a second and more each), is imported once where they are forked."""


def start_server() -> None:
    """Starts the server that ranks are forked from, with everything that they need imported.

    There is one a process, and whoever starts it first decides what it has imported: call this first.
    """
    forkserver.ensure_running()


def run_ranks(
    fn: Callable[..., Any], world: int, *args: Any, timeout: float = 240, leave_together: bool = True
) -> list[Any]:
    """What `fn(rank, *args)` returned on each of `world` ranks, in order.

    `fn` must be importable (a module-level function); the default process group exists while it runs. Where a rank
    is to find that another one has gone, it must not wait for it: `leave_together=False`.
    Raises: AssertionError: a rank raised, died or took longer than `timeout` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        queue = _context.Queue()
        processes = [
            _context.Process(
                target=_entry, args=(fn, rank, world, f"{folder}/store", timeout, leave_together, args, queue)
            )
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        try:
            answers = _collect(queue, processes, world, timeout)
        finally:
            for process in processes:
                process.join(10)
                if process.is_alive():
                    process.kill()
    failed = [f"rank {rank}:\n{text}" for rank, (ok, text) in sorted(answers.items()) if not ok]
    assert not failed, "\n".join(failed)
    return [answers[rank][1] for rank in range(world)]


def run_alone(fn: Callable[..., Any], *args: Any, timeout: float = 600) -> Any:
    """What `fn(*args)` returned in a process of its own, without a process group."""
    queue = _context.Queue()
    process = _context.Process(target=_alone, args=(fn, args, queue))
    process.start()
    try:
        answers = _collect(queue, [process], 1, timeout)
    finally:
        process.join(10)
        if process.is_alive():
            process.kill()
    ok, value = answers[0]
    assert ok, value
    return value


@contextmanager
def warm_ranks() -> Iterator[None]:
    """Inside, the ranks that a command of mmtrain starts are forked where torch is imported: 5 s less for each.

    How they start for a user is held by `tests/local/test_ranks.py` and `tests/test_launch.py`.
    """
    from mmtrain.local import ranks as local_ranks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_ranks.multiprocessing, "get_context", lambda method: SimpleNamespace(Process=_start_warm))
        yield


def _start_warm(target: Callable[..., None], args: tuple[Any, ...]) -> Any:
    return _context.Process(target=_warm, args=(os.getcwd(), dict(os.environ), target, args))


def _warm(folder: str, variables: dict[str, str], target: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.chdir(folder)
    os.environ.update(variables)
    index, _, *more = args
    target(index, os.getppid(), *more)  # the parent is the server


def _alone(fn: Any, args: Any, queue: Any) -> None:
    end_with_parent()
    try:
        queue.put((0, True, _packed(fn(*args))))
    except BaseException:
        queue.put((0, False, traceback.format_exc()))
    finally:
        queue.close()
        queue.join_thread()


def _packed(value: Any) -> bytes:
    """A queue would send tensors as names of memory that the process has to live on to give away."""
    return pickle.dumps(value)


def _collect(queue: Any, processes: list[Any], world: int, timeout: float) -> dict[int, tuple[bool, Any]]:
    import queue as queues
    import time

    answers: dict[int, tuple[bool, Any]] = {}
    gone: list[int] = []  # processes that had ended at the last look: what they sent was in the queue by then
    deadline = time.monotonic() + timeout
    while len(answers) < world:
        try:
            rank, ok, value = queue.get(timeout=0.2)
            answers[rank] = (ok, pickle.loads(value) if ok else value)
            if not ok:  # the others wait for this rank in vain
                break
        except queues.Empty:
            dead = [r for r in gone if r not in answers]
            gone = [r for r, p in enumerate(processes) if not p.is_alive()]
            for rank in dead:
                answers[rank] = (False, f"process died with exit code {processes[rank].exitcode}")
            if dead:
                break
            if time.monotonic() > deadline:
                for process in processes:
                    process.kill()
                raise AssertionError(
                    f"ranks {sorted(set(range(world)) - set(answers))} took over {timeout} s"
                ) from None
    if any(not ok for ok, _ in answers.values()):
        for process in processes:
            process.kill()
    return answers


def _entry(
    fn: Any, rank: int, world: int, store: str, timeout: float, leave_together: bool, args: Any, queue: Any
) -> None:
    end_with_parent()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    limit = datetime.timedelta(seconds=timeout)
    meeting = dist.FileStore(store, world)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=world, timeout=limit)
    dist.barrier()  # who ends the group at once closes connections that slower ranks still make
    try:
        queue.put((rank, True, _packed(fn(rank, *args))))
        if leave_together:  # who closes its connections while another rank still reads from them resets these
            meeting.set(f"done {rank}", "")
            meeting.wait([f"done {other}" for other in range(world)], limit)
    except BaseException:
        queue.put((rank, False, traceback.format_exc()))
    finally:
        queue.close()
        queue.join_thread()
        dist.destroy_process_group()
