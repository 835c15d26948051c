"""A time that no plan of a problem can beat."""

from mmtrain.schedule.action import Kind
from mmtrain.schedule.graph import Edge, Result
from mmtrain.schedule.problem import PlanningProblem


def lower_bound_s(problem: PlanningProblem) -> float:
    """Seconds that every plan takes, whole or split backwards, whatever the memory.

    The longest of: each chain of dependencies; and for each rank its load, after the earliest start
    that any of its actions can have, and before the least that must follow any of them. Weight halves
    count in the load alone, since nothing waits for them. Each action counts with its fastest option.
    """
    graph = problem.graph
    nodes = list(graph.nodes())
    order: list[Result] = [(Kind.F, *node) for node in nodes]
    order += [(Kind.B, *node) for node in reversed(nodes) if graph.has_backward(*node)]
    needs = {result: graph.needs(*result) for result in order}
    seconds: dict[Result, float] = {}
    for kind, stage, work in order:
        half = Kind.I if kind is Kind.B else Kind.F
        seconds[kind, stage, work] = min(o.duration_s(half) for o in problem.options(stage, work))

    def arrival(edge: Edge | None) -> float:
        return problem.transfer_s(edge) if edge else 0.0

    head = dict.fromkeys(order, 0.0)
    for result in order:
        head[result] = max((head[r] + seconds[r] + arrival(edge) for r, edge in needs[result]), default=0.0)
    tail = dict.fromkeys(order, 0.0)
    for result in reversed(order):
        for before, edge in needs[result]:
            tail[before] = max(tail[before], arrival(edge) + seconds[result] + tail[result])
    bounds = [head[result] + seconds[result] + tail[result] for result in order]
    for rank in range(graph.num_ranks):
        mine = [result for result in order if graph.stage_rank[result[1]] == rank]
        if not mine:
            continue
        start = min(head[result] for result in mine)
        load = sum(seconds[result] for result in mine)
        weights = sum(
            min(o.backward_weight_s for o in problem.options(stage, work))
            for kind, stage, work in mine
            if kind is Kind.B
        )
        bounds += [start + load + min(tail[result] for result in mine), start + load + weights]
    return max(bounds, default=0.0)
