"""Deals the microbatches of a step to replicas in pipelines of unequal depth. Pure.

Every process that makes batches deals the whole step by itself; equal metadata and costs give equal hands.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmtrain.config.config import Config
from mmtrain.modality.metadata import IterationMeta, MicrobatchMeta
from mmtrain.planner.assignment.assignment import Dealt
from mmtrain.planner.batching import make_batching
from mmtrain.planner.job import Job
from mmtrain.planner.make_problem import rank_seconds


@dataclass(frozen=True, kw_only=True)
class Dealer:
    """Deals microbatches to whichever replica would finish them first."""

    jobs: tuple[Job, ...]
    """[pipeline] -> its job."""
    shards: int
    """Replicas of each pipeline."""

    @classmethod
    def of(cls, config: Config, jobs: Sequence[Job]) -> "Dealer | None":
        """The dealer of a job; None: its pipelines have one depth, and its replicas take turns.

        Args: jobs: [pipeline] -> its job.
        """
        layout = config.parallelism.layout
        return None if layout.is_even else cls(jobs=tuple(jobs), shards=layout.dp_shard)

    def __call__(self, microbatches: Sequence[MicrobatchMeta]) -> Dealt:
        """The microbatches of each replica. Raises: DataError: the model cannot read one."""
        return deal(self.seconds(microbatches))

    def seconds(self, microbatches: Sequence[MicrobatchMeta]) -> list[NDArray[np.float64]]:
        """[replica] -> [microbatch, pp_rank] -> seconds of the works. Raises: DataError: the model cannot read one."""
        meta = IterationMeta(microbatches=tuple(microbatches))
        of_depth: dict[int, NDArray[np.float64]] = {}
        for job in self.jobs:
            if job.partition.num_ranks not in of_depth:
                of_depth[job.partition.num_ranks] = microbatch_seconds(job, meta)
        return [of_depth[job.partition.num_ranks] for job in self.jobs for _ in range(self.shards)]


def microbatch_seconds(job: Job, meta: IterationMeta) -> NDArray[np.float64]:
    """[microbatch, pp_rank] -> seconds of the works of a batch, forward and backward. Errors: see `make_batching`."""
    batching = make_batching(meta, job.spec, job.sub_microbatch_size, job.submesh.attention_mask)
    return rank_seconds(job.spec, job.partition, batching, job.costs, memory=job.memory, submesh=job.submesh)


def replica_seconds(seconds: NDArray[np.float64]) -> float:
    """Seconds of a replica's batch: its busiest pipeline rank's works, and those of the first microbatch on the other
    ranks, which fill and drain the pipeline. Args: seconds: [microbatch, pp_rank] of the batch."""
    busiest = seconds.sum(axis=0).argmax()
    return float(seconds[:, busiest].sum() + seconds[0].sum() - seconds[0, busiest])


def deal(seconds: Sequence[NDArray[np.float64]]) -> Dealt:
    """Each microbatch, in order, goes to the replica that would finish it first, the lower number of equal ones; the
    last ones to those that have none yet.

    Of equal microbatches no other hands make the slowest replica faster.

    Args: seconds: [replica] -> [microbatch, pp_rank], at least as many microbatches as replicas.
    """
    count, num = len(seconds), len(seconds[0])
    assert num >= count, (num, count)
    widest = max(own.shape[1] for own in seconds)
    table = np.zeros((num, count, widest))
    for replica, own in enumerate(seconds):
        table[:, replica, : own.shape[1]] = own
    busy, first = np.zeros((count, widest)), np.zeros((count, widest))
    empty, hands = np.ones(count, dtype=bool), [list[int]() for _ in seconds]
    places = np.arange(count)
    for index, costs in enumerate(table):
        after = busy + costs
        filling = np.where(empty[:, None], costs, first)
        busiest = after.argmax(axis=1)
        ends = after[places, busiest] + filling.sum(axis=1) - filling[places, busiest]
        if num - index == empty.sum():
            ends[~empty] = np.inf
        chosen = int(ends.argmin())
        hands[chosen].append(index)
        busy[chosen], first[chosen] = after[chosen], filling[chosen]
        empty[chosen] = False
    return tuple(map(tuple, hands))


def paces(seconds: Sequence[NDArray[np.float64]]) -> tuple[int, ...]:
    """[replica] -> nanoseconds of its busiest pipeline rank for a mean microbatch. Args: seconds: as of `deal`."""
    return tuple(max(1, round(1e9 * float(own.mean(axis=0).max()))) for own in seconds)


def digest_of(dealt: Dealt) -> str:
    """A hash by which processes compare how they dealt a step."""
    return hashlib.sha256(repr(dealt).encode()).hexdigest()[:16]
