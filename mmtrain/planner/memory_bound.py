"""A lower bound on the makespan of every plan that keeps the memory limits, from bytes x seconds."""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

from mmtrain.planner.bound import lower_bound_s, one_machine_s, rank_jobs
from mmtrain.schedule.action import Kind
from mmtrain.schedule.problem import Option, PlanningProblem


class _Way(NamedTuple):
    """One way to run a stage for a work: with one option, its backward whole or split."""

    area: float
    """Bytes x seconds that it holds at least."""
    seconds: float
    """The least seconds for which its rank is busy."""
    held: float
    """Bytes that it holds between forward and backward."""


def memory_bound_s(problem: PlanningProblem, *, split: bool = True) -> float:
    """A lower bound in seconds on the makespan of every plan within the memory limits, at least `lower_bound_s`.

    Activations of (stage, work) are held at least while its forward, its backward and the shortest chain of later
    stages between them run. On each rank all that takes place between its least head and its least tail, so that bytes
    x seconds are at most limit x the time between them, and busy seconds at most that time. Options that hold less take
    longer; the bound lets each (stage, work) run with a mixture of its options. Where instructions change what is held,
    it is `lower_bound_s`.

    Args: split: as of `lower_bound_s`.
    """
    jobs = rank_jobs(problem, split=split)
    found_s = max(map(one_machine_s, jobs), default=0.0)
    graph = problem.graph
    if any(given.growth_bytes for given in graph.instructions):
        return found_s
    of_list = [[way for option in options for way in _ways(option, split=split)] for options in problem.costs]
    ways: list[list[list[_Way]]] = [[] for _ in jobs]
    for (stage, work), chain_s in _chains_s(problem, split=split).items():
        listed = of_list[problem.cost_index[work][graph.position[stage]]]
        of_node = [_Way(area + held * chain_s, seconds, held) for area, seconds, held in listed]
        ways[graph.stage_rank[stage]].append(of_node)
    for limit, rank_jobs_, rank_ways in zip(problem.memory_limit_bytes, jobs, ways, strict=True):
        if limit and rank_jobs_:  # with a limit of 0 nothing can be held, or no plan exists
            around_s = min(head for head, _, _ in rank_jobs_) + min(tail for _, _, tail in rank_jobs_)
            found_s = max(found_s, around_s + _least_s(rank_ways, limit * (1 + 1e-9)))
    return found_s


def over_bounds(makespan_s: float, problem: PlanningProblem) -> str:
    """How far a makespan is above both bounds, in words that follow it; empty if it is 0."""
    bounds = (lower_bound_s(problem), "the lower bound"), (memory_bound_s(problem), "that with memory limits")
    texts = [f"{100 * (makespan_s / s - 1):.2f} % over {name} {s:.6g} s" for s, name in bounds if s > 0]
    return "".join(f", {text}" for text in texts)


def _chains_s(problem: PlanningProblem, *, split: bool) -> dict[tuple[int, int], float]:
    """For each (stage, work), the least seconds from the end of its forward to the start of its backward."""
    graph, backward = problem.graph, Kind.I if split else Kind.B
    through_s = [min(o.duration_s(Kind.F) + o.duration_s(backward) for o in options) for options in problem.costs]
    found: dict[tuple[int, int], float] = {}
    for stage, work in reversed(list(graph.nodes())):
        found[stage, work] = max(
            (
                2 * problem.transfer_s(edge)
                + through_s[problem.cost_index[edge.target_work][graph.position[edge.target]]]
                + found[edge.target, edge.target_work]
                for edge in graph.outputs(stage, work)
                if edge.grad
            ),
            default=0.0,
        )
    return found


def _ways(option: Option, *, split: bool) -> Iterator[_Way]:
    """The ways to run one option, with no time between forward and backward."""
    held, forward_s = option.activation_bytes, option.duration_s(Kind.F)
    busy_s = option.busy_s(Kind.F)
    if not option.has_backward:
        yield _Way(held * forward_s, busy_s, 0.0)
        return
    for kind in (Kind.B, Kind.I) if split else (Kind.B,):
        backward_s = option.duration_s(kind)
        area = held * (forward_s + backward_s) + option.restored_bytes * backward_s
        seconds = busy_s + option.busy_s(kind)
        if kind is Kind.I:
            area += option.held_for_weight_bytes * option.duration_s(Kind.W)
            seconds += option.busy_s(Kind.W)
        yield _Way(area, seconds, held)


def _least_s(nodes: Iterable[Iterable[_Way]], limit: float) -> float:
    """The least T >= seconds of all nodes with area <= limit x T, where each node mixes its ways.

    From the fastest ways on, those exchanges are made first that take the fewest seconds for the area that they save.
    """
    area = seconds = 0.0
    exchanges: list[tuple[float, float, float]] = []  # (seconds for area, saved area, more seconds)
    for ways in nodes:
        hull: list[_Way] = []  # the lower convex hull, from the most area
        for way in sorted(ways, key=lambda way: (way.seconds, way.area)):
            if hull and way.area >= hull[-1].area:
                continue
            while len(hull) > 1 and _price(hull[-1], way) <= _price(hull[-2], hull[-1]):
                hull.pop()
            hull.append(way)
        area, seconds = area + hull[0].area, seconds + hull[0].seconds
        exchanges += (
            (_price(one, other), one.area - other.area, other.seconds - one.seconds) for one, other in pairwise(hull)
        )
    for _, saved, more_s in sorted(exchanges):
        if area <= limit * seconds:
            return seconds
        part = min(1.0, (area - limit * seconds) / (saved + limit * more_s))
        area, seconds = area - part * saved, seconds + part * more_s
    return max(seconds, area / limit)


def _price(large: _Way, small: _Way) -> float:
    """Seconds for the area that one way saves against another one."""
    return (small.seconds - large.seconds) / (large.area - small.area)
