"""Splitting backwards: which are worth it, and a plan's Ws delayed by a number of pairs."""

from collections import deque
from collections.abc import Callable

from mmtrain.schedule.action import Action, Kind
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import Option, PlanningProblem

LEAST_SHARE = 0.01
"""Least share of I and of W in a backward that is worth splitting."""


def worth_splitting(option: Option) -> bool:
    """Whether I and W both take time (a frozen stage has no W)."""
    least = LEAST_SHARE * (option.backward_input_s + option.backward_weight_s)
    return option.has_backward and min(option.backward_input_s, option.backward_weight_s) >= least


def delay_weights(
    problem: PlanningProblem, orders: tuple[tuple[Action, ...], ...], delay: Callable[[int], int]
) -> Plan:
    """The plan of orders of F and B with each B split into I, and W some pairs later on its rank.

    A pair is one microbatch in one stage. Backwards that are not worth splitting stay B.

    Args: delay: rank -> number of pairs whose I may run between a pair's I and its W.
    """
    graph = problem.graph
    plan = Plan(graph, orders)
    split_orders = []
    for rank, (order, works) in enumerate(zip(orders, plan.works, strict=True)):
        split_order: list[Action] = []
        waiting: deque[tuple[int, Action]] = deque()
        pairs: dict[tuple[int, int], int] = {}
        for action, work in zip(order, works, strict=True):
            if action.kind is not Kind.B or not worth_splitting(problem.options(action.stage, work)[0]):
                split_order.append(action)
                continue
            number = pairs.setdefault((action.stage, action.microbatch), len(pairs))
            split_order.append(graph.action(Kind.I, action.stage, work))
            waiting.append((number, graph.action(Kind.W, action.stage, work)))
            while waiting and waiting[0][0] + delay(rank) < len(pairs):
                split_order.append(waiting.popleft()[1])
        split_orders.append((*split_order, *(weight for _, weight in waiting)))
    return Plan(graph, tuple(split_orders))
