"""Deferral within memory limits. Pure.

Works of deferred images belong to the component of the microbatch that has their document, so schedules that keep
limits keep them with deferral, too. But where the activations of deferred images do not fit in addition to those of the
microbatch with which they are encoded, they would wait for its end, and nothing is gained.

Source: Entrain (Jang, Efficient Multimodal Model Training at Scale, dissertation, University of Michigan, 2026, section
4.5.2).
"""

from mmtrain.schedule.library.memory import oversize_groups
from mmtrain.schedule.problem import PlanningProblem


def oversize_pairs(problem: PlanningProblem) -> tuple[int, ...]:
    """The microbatches whose images must not be encoded with the microbatch before, ascending.

    In addition to that one they exceed the memory limit of a rank, even with the options of least memory. `len` of the
    result is the number of such pairs; `without_deferral` takes it.
    """
    graph = problem.graph
    if not graph.deferred or all(limit is None for limit in problem.memory_limit_bytes):
        return ()
    oversize = oversize_groups(problem, [work.microbatch for work in graph.works])
    return tuple(
        sorted(
            {
                work.microbatch
                for index, work in enumerate(graph.works)
                for source in graph.deferred.intersection(graph.sources(index))
                if graph.works[source].microbatch in oversize
            }
        )
    )
