"""DistTrain's reordering of samples and microbatches, as a baseline. Source: DistTrain, arXiv:2408.04275, section 5."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from mmtrain.planner.assignment.assignment import Assignment
from mmtrain.planner.assignment.filling import AssignmentInput, NoRoomError, assignment_of, falling, fill


def disttrain(step: AssignmentInput, num_ranks: Sequence[int]) -> Assignment:
    """The assignment of a step; first-fit's where DistTrain's has no room. Args: num_ranks: [replica] -> pipeline
    ranks."""
    try:
        return _assigned(step, num_ranks)
    except NoRoomError as full:
        return replace(step.first_fit, status="first-fit", message=f"disttrain: {full}; first-fit's bins are kept")


def _assigned(step: AssignmentInput, num_ranks: Sequence[int]) -> Assignment:
    """DistTrain's two reorderings: samples over replicas, longest encoder work first to the least encoder load; then
    the microbatches of each replica, of equal numbers of samples in the order of the step.

    The microbatch of least encoder work comes first, so that later stages start early, and those of least work except
    for it come last, where the encoder has nothing more to fill. Between them each position takes the microbatch whose
    encoder work is closest to the language work that is done meanwhile, num_ranks - 1 positions earlier.
    """
    replicas = step.replicas()
    fill(
        step,
        falling(step, range(len(step.samples))),
        replicas,
        lambda load, cost: (
            (len(load.samples) * step.pace(load.index), load.index)
            if not cost.encoder_ns
            else (load.encoder_ns * step.pace(load.index), len(load.samples), load.index)
        ),
    )
    return assignment_of(
        _reordered(step, _runs(step, sorted(own.samples), count), ranks)
        for own, count, ranks in zip(replicas, step.counts, num_ranks, strict=True)
    )


def _runs(step: AssignmentInput, members: list[int], count: int) -> list[list[int]]:
    """Samples in consecutive microbatches of equal numbers."""
    ends = [len(members) * m // count for m in range(count + 1)]
    runs = [members[low:high] for low, high in itertools.pairwise(ends)]
    if not all(runs):
        raise NoRoomError(f"a replica has {len(members)} samples for {count} microbatches")
    for m, run in enumerate(runs):
        if not step.fits(run):
            raise NoRoomError(f"microbatch {m} of {len(run)} samples exceeds its capacity")
    return runs


def _reordered(step: AssignmentInput, microbatches: list[list[int]], num_ranks: int) -> list[list[int]]:
    work = [sum(step.samples[i].encoder_ns for i in own) for own in microbatches]
    rising = sorted(range(len(microbatches)), key=lambda m: (work[m], m))
    last = rising[1:num_ranks]
    middle, order, depth = rising[num_ranks:], rising[:1], max(1, num_ranks - 1)
    while middle:
        meanwhile = step.language_ns(microbatches[order[max(0, len(order) - depth)]])
        order.append(min(middle, key=lambda m: (abs(work[m] - meanwhile), m)))
        middle.remove(order[-1])
    return [microbatches[m] for m in (*order, *reversed(last))]
