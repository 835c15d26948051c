"""The simulator of orders: when each action of a plan runs, given costs and transfers."""

from mmtrain.schedule.action import Action, Kind
from mmtrain.schedule.plan import Plan, entry_costs, held_over
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.timeline import Timeline


def simulate(problem: PlanningProblem, plan: Plan) -> Timeline:
    """The timeline of a plan: each rank runs its order, an action starts once its inputs have arrived.

    A result reaches another rank `latency_s + bytes / bytes_per_s` after its end, its own rank at once; transfers
    occupy no rank. Memory and peaks follow the chosen options.

    Raises: PlanError: deadlock; with rank, step, the waiting action and the missing one, and the orders.
    """
    costs = entry_costs(plan, problem)
    run = plan.run([[cost.seconds for cost in of_rank] for of_rank in costs], problem.message_s)
    rows: list[tuple[int, Action, float, float]] = []
    memory, peaks = [], []
    for rank, held in enumerate(held_over(costs)):
        order, starts, ends = plan.orders[rank], run.starts[rank], run.ends[rank]
        rows += zip([rank] * len(order), order, starts, ends, strict=True)
        profile = [(0.0, 0.0)]
        for action, start, end, (during, after) in zip(order, starts, ends, held, strict=True):
            if action.kind is Kind.F or during > max(profile[-1][1], after):
                profile.append((start, during))
            profile.append((end, after))
        memory.append(tuple(profile))
        peaks.append(max((during for during, _ in held), default=0.0))
    return Timeline.from_rows(plan.graph, rows, memory=tuple(memory), peak_bytes=tuple(peaks))


def makespan_without_transfers_s(problem: PlanningProblem, plan: Plan) -> float:
    """Seconds that the orders of a plan would take if every message arrived at once."""
    run = plan.run([[cost.seconds for cost in costs] for costs in entry_costs(plan, problem)])
    return max((ends[-1] for ends in run.ends if ends), default=0.0)
