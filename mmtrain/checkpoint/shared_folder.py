"""The check that all ranks have one run folder, since each of them saves its part of a checkpoint there."""

import os
import socket
import uuid
from pathlib import Path

import torch.distributed as dist

from mmtrain.errors import ConfigError
from mmtrain.parallel.alike import describe_ranks
from mmtrain.parallel.collectives import on_rank_zero, sum_over


def check_shared(folder: Path) -> None:
    """Refuses a run folder in which a rank does not see what rank 0 writes, or cannot write. Collective over the job.

    The file that is looked for has a new name: a name that was asked for before may be cached as absent (NFS).

    Raises: ConfigError: the same on all ranks, naming these ranks and their folders.
    """
    name = f".shared-{uuid.uuid4().hex}"
    name = on_rank_zero(lambda: _touched(folder, name))
    problem = ""
    if not (folder / name).is_file():
        problem = "does not see what rank 0 writes in"
    elif not os.access(folder, os.W_OK):
        problem = "cannot write into"
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    failed = sum_over(group, int(bool(problem)))
    on_rank_zero(lambda: (folder / name).unlink(missing_ok=True))
    if failed:
        _refuse(folder, problem)


def _touched(folder: Path, name: str) -> str:
    (folder / name).touch()
    return name


def _refuse(folder: Path, problem: str) -> None:
    answers: list[tuple[str, str, str]] = [("", "", "")] * dist.get_world_size()
    dist.all_gather_object(answers, (socket.gethostname(), str(folder.absolute()), problem))
    hosts = [host for host, _, _ in answers]
    ranks = [rank for rank, (_, _, found) in enumerate(answers) if found]
    _, path, found = answers[ranks[0]]
    raise ConfigError(
        f"job.dump_folder = {answers[0][1]!r} ({hosts[0]}): {describe_ranks(ranks, hosts)} {found} {path!r}, but each "
        "rank saves its part of a checkpoint there; name a folder on a file system that all nodes mount and may write, "
        "or set checkpoint.enable = false"
    )
