"""More forwards in flight on the ranks of encoders, as memory allows."""

import math
from collections.abc import Callable, Sequence

from mmtrain.schedule.graph import WorkGraph
from mmtrain.schedule.plan import Plan, exceeds, held_bytes
from mmtrain.schedule.problem import PlanningProblem


def encoders(graph: WorkGraph) -> set[int]:
    """The modules that feed another one in this iteration."""
    return {graph.works[other].module for work in range(len(graph.works)) for other in graph.sources(work)}


def with_eager(problem: PlanningProblem, count: int, make: Callable[[Sequence[int]], Plan]) -> Plan:
    """The plan of a schedule whose ranks with encoders may have more pairs in flight than it lets them have.

    Backwards of deferred images come late; the forwards that ran ahead leave time for them.

    Args:
        count: such pairs on each rank that holds a stage of an encoder; fewer on a rank whose memory limit the plan
            would exceed.
        make: [rank] -> such pairs, to the plan.
    Source: Entrain (Jang, Efficient Multimodal Model Training at Scale, dissertation, University of Michigan, 2026,
        section 4.5.3, eager forward pass execution).
    """
    graph = problem.graph
    ahead = encoders(graph)
    extra = [
        count * any(graph.module_of[stage] in ahead for stage in graph.stages_of_rank(rank))
        for rank in range(graph.num_ranks)
    ]
    limits = [math.inf if limit is None else limit for limit in problem.memory_limit_bytes]
    while True:
        plan = make(extra)
        peaks = [max((during for during, _ in held), default=0.0) for held in held_bytes(plan, problem)]
        over = [rank for rank, peak in enumerate(peaks) if extra[rank] and exceeds(peak, limits[rank])]
        if not over:
            return plan
        extra = [number - (rank in over) for rank, number in enumerate(extra)]
