"""Which sample of a step runs in which microbatch of which replica, under a policy of `[assignment]`. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from mmtrain.config.assignment import LEVELS, Policy
from mmtrain.planner.assignment.assignment import Assignment, Judge, SampleCost
from mmtrain.planner.assignment.balanced import longest_first, refined
from mmtrain.planner.assignment.disttrain import disttrain
from mmtrain.planner.assignment.entrain import entrain
from mmtrain.planner.assignment.filling import NoRoomError, Step


def assign(
    policy: Policy,
    samples: Sequence[SampleCost],
    bins: Sequence[Sequence[int]],
    *,
    num_replicas: int,
    capacity: tuple[int, ...] = (),
    defer: bool = False,
    fewer_microbatches: bool = False,
    levels: int = LEVELS,
    num_ranks: int = 1,
    judge: Judge | None = None,
    evaluations: int = 0,
    seed: int = 0,
) -> Assignment:
    """The microbatches of a step's samples under a policy.

    A policy that cannot place the samples within the capacity, or leaves a microbatch empty, gives the bins as they
    are, with a status that says so.

    Args:
        policy: see [assignment]; `none`: the bins as they are.
        samples: the step's samples.
        bins: indices of `samples` in each bin of first-fit, each in one; replica r of R has the bins r, r + R, ...
        num_replicas: data-parallel replicas; they divide the number of bins.
        capacity: most of a microbatch under each limit. It holds for the samples of a microbatch, and for those whose
            language work it does.
        defer: microbatches may leave language work to the next one, with `entrain`.
        fewer_microbatches: a replica may have fewer microbatches than bins: with `entrain` the thesis's K_eff, with
            `balanced` as many as make its makespan shortest.
        levels: steps into which the language work of a microbatch is divided when subsets of it are summed.
        num_ranks: pipeline ranks, for `disttrain`.
        judge: for `balanced`, gives the makespan of one replica; the slowest one counts. None: no refinement.
        evaluations: calls of `judge`, at most.
        seed: of the refinement.
    """
    assert len(bins) % num_replicas == 0 and sorted(i for own in bins for i in own) == list(range(len(samples)))
    assert all(len(sample.size) == len(capacity) for sample in samples if capacity)
    step = Step(samples, bins, num_replicas, capacity)
    try:
        if policy == "entrain":
            return entrain(step, defer=defer, fewer=fewer_microbatches, levels=levels)
        if policy == "disttrain":
            return disttrain(step, num_ranks)
    except NoRoomError as full:
        return replace(step.first_fit, status="first-fit", message=f"{policy}: {full}; first-fit's bins are kept")
    if policy == "none":
        return step.first_fit
    start = longest_first(step)
    return start if judge is None else refined(step, start, judge, evaluations, seed, fewer=fewer_microbatches)
