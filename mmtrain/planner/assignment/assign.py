"""The assignment of a step's samples to microbatches and replicas, under a policy of `[assignment]`. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from mmtrain.config.assignment import LEVELS, AssignmentPolicy
from mmtrain.planner.assignment.assignment import Assignment, Dealt, MakespanOf, SampleCost
from mmtrain.planner.assignment.balanced import longest_first, refined
from mmtrain.planner.assignment.entrain import entrain
from mmtrain.planner.assignment.filling import AssignmentInput, NoRoomError


def assign(
    policy: AssignmentPolicy,
    samples: Sequence[SampleCost],
    bins: Sequence[Sequence[int]],
    *,
    dealt: Dealt,
    paces: Sequence[int] = (),
    capacity: tuple[int, ...] = (),
    defer: bool = False,
    fewer_microbatches: bool = False,
    levels: int = LEVELS,
    judge: MakespanOf | None = None,
    evaluations: int = 0,
    seed: int = 0,
) -> Assignment:
    """The microbatches of a step's samples under a policy.

    A policy that cannot place the samples within the capacity, or leaves a microbatch empty, gives the bins as they
    are, with a status that says so.

    Args:
        policy: see [assignment]; `none`: the bins as they are.
        samples: the step's samples.
        bins: indices of `samples` in each bin of first-fit, each in one.
        dealt: [replica] -> its bins, if they stay as they are; it has as many microbatches.
        paces: [replica] -> time of its pipeline for equal work, in any unit; empty: equal ones.
        capacity: most of a microbatch under each limit. It holds for the samples of a microbatch, and for those whose
            language work it does.
        defer: microbatches may leave language work to the next one, with `entrain`.
        fewer_microbatches: a replica may have fewer microbatches than bins: with `entrain` the thesis's K_eff, with
            `balanced` as many as make its makespan shortest.
        levels: steps into which the language work of a microbatch is divided when subsets of it are summed.
        judge: for `balanced`, gives the makespan of a replica; the slowest one counts. None: no refinement.
        evaluations: calls of `judge`, at most.
        seed: of the refinement.
    """
    assert sorted(b for own in dealt for b in own) == list(range(len(bins)))
    assert sorted(i for own in bins for i in own) == list(range(len(samples)))
    assert all(len(sample.size) == len(capacity) for sample in samples if capacity)
    step = AssignmentInput(samples, bins, dealt, capacity, tuple(paces))
    try:
        if policy == "entrain":
            return entrain(step, defer=defer, fewer=fewer_microbatches, levels=levels)
    except NoRoomError as full:
        return replace(step.first_fit, status="first-fit", message=f"{policy}: {full}; first-fit's bins are kept")
    if policy == "none":
        return step.first_fit
    start = longest_first(step)
    return start if judge is None else refined(step, start, judge, evaluations, seed, fewer=fewer_microbatches)
