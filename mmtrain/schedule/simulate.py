"""The simulator of orders: when each action of a plan runs, given costs and transfers."""

from mmtrain.schedule.action import RESULT_OF, Action, Kind
from mmtrain.schedule.graph import Result
from mmtrain.schedule.plan import Plan, held_bytes
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.timeline import Timeline


def simulate(problem: PlanningProblem, plan: Plan) -> Timeline:
    """The timeline of a plan: each rank runs its order, an action starts once what it needs has arrived.

    A result reaches another rank `latency_s + bytes / bytes_per_s` after its end, its own rank at
    once; transfers occupy no rank. Memory and peaks follow the chosen options.

    Raises: PlanError: deadlock; with rank, step, the waiting action and the missing one, and the orders.
    """
    end: dict[Result, float] = {}
    free = [0.0] * plan.graph.num_ranks
    rows: list[tuple[int, Action, float, float]] = []
    ends: list[list[float]] = [[] for _ in plan.orders]
    starts: list[list[float]] = [[] for _ in plan.orders]
    for rank, action, work, needs in plan.run_order():
        start = free[rank]
        for result, edge in needs:
            start = max(start, end[result] + (problem.transfer_s(edge) if edge else 0.0))
        stop = start + plan.option(problem, action.stage, work).duration_s(action.kind)
        end[RESULT_OF[action.kind], action.stage, work] = free[rank] = stop
        rows.append((rank, action, start, stop))
        starts[rank].append(start)
        ends[rank].append(stop)
    memory, peaks = [], []
    for rank, held in enumerate(held_bytes(plan, problem)):
        profile = [(0.0, 0.0)]
        for step, (during, after) in enumerate(held):
            if plan.orders[rank][step].kind is Kind.F:
                profile.append((starts[rank][step], during))
            profile.append((ends[rank][step], after))
        memory.append(tuple(profile))
        peaks.append(max((during for during, _ in held), default=0.0))
    return Timeline.from_rows(plan.graph, rows, memory=tuple(memory), peak_bytes=tuple(peaks))
