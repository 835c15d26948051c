"""A time that no plan of a problem can beat."""

import heapq
from collections.abc import Iterable

from mmtrain.schedule.action import Kind
from mmtrain.schedule.graph import Edge, Result
from mmtrain.schedule.problem import PlanningProblem


def lower_bound_s(problem: PlanningProblem, *, split: bool = True) -> float:
    """Seconds that every plan takes, whatever the memory.

    For each rank, Jackson's preemptive schedule of its actions: each has a head (the chain of dependencies before it)
    and a tail (the chain after it), and could be interrupted. Each action counts with its fastest option.

    Args: split: also of plans with split backwards, for whose W nothing waits; False: of whole backwards alone.
    Source: one-machine bound with heads and tails, Carlier 1982.
    """
    graph = problem.graph
    nodes = list(graph.nodes())
    order: list[Result] = [(Kind.F, *node) for node in nodes]
    order += [(Kind.B, *node) for node in reversed(nodes) if graph.has_backward(*node)]
    needs = {result: graph.needs(*result) for result in order}
    seconds: dict[Result, float] = {}
    for kind, stage, work in order:
        half = kind if kind is Kind.F else Kind.I if split else Kind.B
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
    jobs: list[list[tuple[float, float, float]]] = [[] for _ in range(graph.num_ranks)]
    for result in order:
        kind, stage, work = result
        mine = jobs[graph.stage_rank[stage]]
        mine.append((head[result], seconds[result], tail[result]))
        if split and kind is Kind.B:
            weight = min(o.backward_weight_s for o in problem.options(stage, work))
            mine.append((head[result] + seconds[result], weight, 0.0))
    return max(map(one_machine_s, jobs), default=0.0)


def one_machine_s(jobs: Iterable[tuple[float, float, float]]) -> float:
    """The least makespan of jobs (head, seconds, tail) on one machine that may interrupt them: at any time the job
    with the longest tail of those that have arrived (Jackson's preemptive schedule)."""
    arriving = sorted(jobs)
    ready: list[list[float]] = []  # [-tail, seconds left]
    now = makespan = 0.0
    place = 0
    while ready or place < len(arriving):
        if not ready:
            now = max(now, arriving[place][0])
        while place < len(arriving) and arriving[place][0] <= now:
            _, seconds, tail = arriving[place]
            heapq.heappush(ready, [-tail, seconds])
            place += 1
        until = arriving[place][0] if place < len(arriving) else float("inf")
        tail, left = -ready[0][0], ready[0][1]
        if now + left <= until:
            heapq.heappop(ready)
            now += left
            makespan = max(makespan, now + tail)
        else:
            ready[0][1] = left - (until - now)
            now = until
    return makespan
