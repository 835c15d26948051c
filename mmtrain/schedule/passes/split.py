"""Splits whole backwards: the simplest way to a plan with I and W."""

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import replace

from mmtrain.errors import PlanError
from mmtrain.schedule.action import Action, Kind
from mmtrain.schedule.plan import Plan, exceeds
from mmtrain.schedule.problem import PlanningProblem


def split_backwards(
    plan: Plan, problem: PlanningProblem, delay: int, *, nodes: Collection[tuple[int, int]] | None = None
) -> Plan:
    """The plan with each B replaced by I, and its W `delay` actions later on its rank.

    The Ws of a rank keep the order of its backwards. A W runs earlier where the memory limit requires it. A backward
    whose I and W do not fit even so stays whole.

    Args:
        delay: number of forwards and backwards of the rank between I and W; 0: W follows at once.
        nodes: the (stage, work) whose backwards are split; None: all.
    Raises: PlanError: delay is below 0.
    """
    if delay < 0:
        raise PlanError(f"delay = {delay}; W cannot run before its I; use 0 or more")
    chosen = set(plan.graph.nodes() if nodes is None else nodes)
    ranks = range(len(plan.orders))
    return replace(plan, orders=tuple(tuple(_split(plan, problem, rank, delay, chosen)) for rank in ranks))


def _split(
    plan: Plan, problem: PlanningProblem, rank: int, delay: int, chosen: Collection[tuple[int, int]]
) -> Iterator[Action]:
    limit, held = problem.held_limit_bytes[rank], 0.0
    waiting: deque[tuple[int, Action, float]] = deque()
    """The Ws that wait: (step of its I, W, bytes that it holds)."""
    for step, (action, work) in enumerate(zip(plan.orders[rank], plan.works[rank], strict=True)):
        option = plan.option(problem, action.stage, work)
        splits = action.kind is Kind.B and (action.stage, work) in chosen
        more = option.growth_bytes(Kind.I if splits else action.kind)
        # A forward without a backward needs its bytes while it runs.
        needed = option.activation_bytes if action.kind is Kind.F else more
        while waiting and (waiting[0][0] + delay < step or _is_over(held + needed, limit)):
            _, weight, freed = waiting.popleft()
            held -= freed
            yield weight
        if splits and not _is_over(held + more, limit):
            yield replace(action, kind=Kind.I)
            waiting.append((step, replace(action, kind=Kind.W), option.held_for_weight_bytes))
            held += more
        else:
            yield action
            held += option.growth_bytes(action.kind)
    yield from (weight for _, weight, _ in waiting)


def _is_over(amount: float, limit: float | None) -> bool:
    return limit is not None and exceeds(amount, limit)
