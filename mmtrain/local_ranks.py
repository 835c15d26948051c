"""Runs a function on ranks that are processes of this machine, and brings back what each returned."""

import os
import pickle
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from mmtrain import errors
from mmtrain.config import CommConfig
from mmtrain.errors import MMTrainError
from mmtrain.parallel.mesh import backend_of, pick_device


def run_on_ranks(fn: Callable[..., Any], world: int, *args: Any, comm: CommConfig, copies: int = 1) -> list[Any]:
    """What `fn(device, *args)` returned in each process: `copies` process groups of `world` ranks side by side.

    The default process group exists while it runs, gloo or NCCL as in training. Each process has as many threads as
    OMP_NUM_THREADS says, else one. `fn` must be importable, its arguments and what it returns can be pickled.

    Raises: MMTrainError: as a rank raised it; the others are stopped.
    """
    with tempfile.TemporaryDirectory(prefix="mmtrain-ranks-") as name:
        folder = Path(name)
        try:
            torch.multiprocessing.start_processes(
                _rank, (fn, world, comm, folder, args), nprocs=copies * world, start_method="spawn"
            )
        except Exception:
            for path in folder.glob("error-*"):
                kind, text = pickle.loads(path.read_bytes())
                raise getattr(errors, kind)(text) from None
            raise
        return [pickle.loads((folder / f"value-{index}").read_bytes()) for index in range(copies * world)]


def _rank(
    index: int, fn: Callable[..., Any], world: int, comm: CommConfig, folder: Path, args: tuple[Any, ...]
) -> None:
    """The whole life of one process."""
    warnings.simplefilter("ignore")  # what is run is the user's job, not a test of the libraries
    rank, group = index % world, index // world
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    store, limit = dist.FileStore(f"{folder}/store-{group}", world), timedelta(seconds=comm.timeout_seconds)
    try:
        device = pick_device(comm)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend_of(comm, device),
            store=store,
            rank=rank,
            world_size=world,
            timeout=limit,
        )
        value = fn(device, *args)
    except MMTrainError as error:
        _save((type(error).__name__, str(error)), folder / f"error-{index}")
        raise
    _save(value, folder / f"value-{index}")
    # Who closes its connections while another rank still reads from them resets these.
    store.set(f"done {rank}", "")
    store.wait([f"done {other}" for other in range(world)], limit)
    os._exit(0)  # as in `cli.leave`: finalisation has nothing left to do, and may abort


def _save(value: Any, path: Path) -> None:
    """Writes a file that is either absent or whole."""
    path.with_suffix(".part").write_bytes(pickle.dumps(value))
    os.replace(path.with_suffix(".part"), path)
