"""What the replicas of a job agree on, whatever pipelines they run in: totals of a step, and its samples."""

import torch.distributed as dist

from mmtrain.errors import DataError
from mmtrain.modality.metadata import IterationMeta
from mmtrain.parallel.collectives import equal_over, sum_over
from mmtrain.parallel.mesh import Mesh


def sum_over_replicas(mesh: Mesh, count: int) -> int:
    """The sum of a count of each replica. Collective over the job. Args: count: of this rank's replica."""
    counts = mesh.replicas_group is None or mesh.is_leader
    return sum_over(mesh.replicas_group, count if counts else 0)


def check_same_assignment(meta: IterationMeta, mesh: Mesh) -> None:
    """Refuses a step whose replicas assigned its samples in different ways. Collective over the job.

    Raises: DataError: naming the ranks that differ from the first replica's.
    """
    group = mesh.replicas_group
    if meta.assignment is None or group is None:
        return
    if equal_over(group, int(meta.assignment.digest, 16) >> 1):
        return
    digests: list[str] = [""] * mesh.layout.world_size
    dist.all_gather_object(digests, meta.assignment.digest, group=group)
    differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    raise DataError(
        f"assignment: the replicas of ranks {differing} put the step's samples into other microbatches than that of "
        "rank 0; all machines need the same data, costs (planner.profile, planner.hardware) and version of mmtrain"
    )
