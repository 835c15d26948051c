"""A lower bound on the makespan of every plan of a problem, without its memory limits."""

import heapq
from collections.abc import Iterable

from mmtrain.schedule.action import Kind
from mmtrain.schedule.graph import Edge
from mmtrain.schedule.items import Result
from mmtrain.schedule.passes.instruct import without_instructions
from mmtrain.schedule.problem import PlanningProblem


def lower_bound_s(problem: PlanningProblem, *, split: bool = True) -> float:
    """A lower bound in seconds on the makespan of every plan; memory limits are ignored.

    It is the largest makespan over the ranks of Jackson's preemptive schedule of a rank's actions. Each action has a
    head (the longest chain of dependencies before it) and a tail (the longest chain after it), may be interrupted, and
    takes the time of its fastest option. Instructions count as if they took no time.

    Args: split: the bound also holds for plans with split backwards, in which no action waits for a W; False: it holds
        for plans with whole backwards only.
    Source: one-machine bound with heads and tails, Carlier 1982.
    """
    return max(map(one_machine_s, rank_jobs(problem, split=split)), default=0.0)


def rank_jobs(problem: PlanningProblem, *, split: bool) -> list[list[tuple[float, float, float]]]:
    """[rank] -> (head, least seconds in which the rank is busy, tail) of each of its actions, see `lower_bound_s`."""
    problem = without_instructions(problem)
    graph = problem.graph
    nodes = list(graph.nodes())
    order: list[Result] = [(Kind.F, *node) for node in nodes]
    order += [(Kind.B, *node) for node in reversed(nodes) if graph.has_backward(*node)]
    dependencies = {result: graph.needs(*result) for result in order}
    index, position = problem.cost_index, graph.position
    backward = Kind.I if split else Kind.B
    shortest = {Kind.F: _shortest(problem, Kind.F), Kind.B: _shortest(problem, backward)}
    weights = [min(option.backward_weight_s for option in options) for options in problem.costs]
    seconds: dict[Result, float] = {}
    busy: dict[Result, float] = {}  # less than its seconds where exchanges may be hidden
    for kind, stage, work in order:
        seconds[kind, stage, work], busy[kind, stage, work] = shortest[kind][index[work][position[stage]]]

    def arrival(edge: Edge | None) -> float:
        return problem.transfer_s(edge) if edge else 0.0

    head = dict.fromkeys(order, 0.0)
    for result in order:
        head[result] = max((head[r] + seconds[r] + arrival(edge) for r, edge in dependencies[result]), default=0.0)
    tail = dict.fromkeys(order, 0.0)
    for result in reversed(order):
        for needed, edge in dependencies[result]:
            tail[needed] = max(tail[needed], arrival(edge) + seconds[result] + tail[result])
    jobs: list[list[tuple[float, float, float]]] = [[] for _ in range(graph.num_ranks)]
    for result in order:
        kind, stage, work = result
        rank_jobs = jobs[graph.stage_rank[stage]]
        rank_jobs.append((head[result], busy[result], tail[result]))
        if busy[result] < seconds[result]:  # the rank may do something else meanwhile, but its result takes that long
            rank_jobs.append((head[result] + seconds[result], 0.0, tail[result]))
        if split and kind is Kind.B:
            # In a whole B, weight gradients run while exchanges of the I do.
            rank_jobs.append((head[result] + busy[result], weights[index[work][position[stage]]], 0.0))
    return jobs


def _shortest(problem: PlanningProblem, kind: Kind) -> list[tuple[float, float]]:
    """[list of options] -> the least seconds of an action of a kind, and the least in which its rank is busy."""
    return [
        (min(option.duration_s(kind) for option in options), min(option.busy_s(kind) for option in options))
        for options in problem.costs
    ]


def one_machine_s(jobs: Iterable[tuple[float, float, float]]) -> float:
    """The least makespan in seconds of jobs on one machine that may interrupt them (Jackson's preemptive schedule).

    At any time the machine runs the job with the longest tail among those that have arrived.

    Args: jobs: (head, processing time, tail) of each, in seconds.
    """
    arriving = sorted(jobs)
    ready: list[list[float]] = []  # [-tail, remaining seconds]
    now_s = makespan = 0.0
    next_job = 0
    while ready or next_job < len(arriving):
        if not ready:
            now_s = max(now_s, arriving[next_job][0])
        while next_job < len(arriving) and arriving[next_job][0] <= now_s:
            _, seconds, tail = arriving[next_job]
            heapq.heappush(ready, [-tail, seconds])
            next_job += 1
        until = arriving[next_job][0] if next_job < len(arriving) else float("inf")
        tail, remaining_s = -ready[0][0], ready[0][1]
        if now_s + remaining_s <= until:
            heapq.heappop(ready)
            now_s += remaining_s
            makespan = max(makespan, now_s + tail)
        else:
            ready[0][1] = remaining_s - (until - now_s)
            now_s = until
    return makespan
