"""What the replicas of a job agree on, whatever pipelines they run in: totals of a step, and its samples."""

import torch
import torch.distributed as dist

from mmtrain.errors import DataError
from mmtrain.modality.metadata import IterationMeta
from mmtrain.parallel.mesh import Mesh


def sum_over_replicas(mesh: Mesh, count: int) -> int:
    """The sum of a count of each replica. Collective over the job. Args: count: of this rank's replica."""
    if mesh.replicas_group is None:
        return count
    total = torch.tensor(count if mesh.is_leader else 0)
    dist.all_reduce(total, group=mesh.replicas_group)
    return int(total)


def check_same_assignment(meta: IterationMeta, mesh: Mesh) -> None:
    """Refuses a step whose replicas assigned its samples in different ways. Collective over the job.

    Raises: DataError: naming the ranks that differ from the first replica's.
    """
    group = mesh.replicas_group
    if meta.assignment is None or group is None:
        return
    number = int(meta.assignment.digest, 16) >> 1
    range_of = torch.tensor([number, -number], dtype=torch.int64)
    dist.all_reduce(range_of, op=dist.ReduceOp.MAX, group=group)
    if int(range_of[0]) == -int(range_of[1]):
        return
    digests: list[str] = [""] * mesh.layout.world_size
    dist.all_gather_object(digests, meta.assignment.digest, group=group)
    differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    raise DataError(
        f"assignment: the replicas of ranks {differing} put the step's samples into other microbatches than that of "
        "rank 0; all machines need the same data, costs (planner.profile, planner.hardware) and version of mmtrain"
    )
