"""The judge of plans: whether a plan in JSON is valid for a problem, and whether its times and bytes are true."""

import math
from dataclasses import dataclass

from mmtrain.errors import PlanError
from mmtrain.planner.bound import lower_bound_s
from mmtrain.planner.plan_json import PlanRow, PlanText, plan_of, read_plan_text
from mmtrain.planner.scheduled import scheduled
from mmtrain.schedule.action import RESULT_OF, Kind
from mmtrain.schedule.items import Result
from mmtrain.schedule.plan import Plan, exceeds, held_bytes
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.simulate import simulate

TOLERANCE = 1e-6
"""Largest accepted error of a time, as a fraction of the makespan, and of peak bytes, as a fraction of the peak."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Makespan, bound and peaks of a valid plan."""

    feasible: bool
    """Whether there is a plan. False: the file says that the problem has no plan; the other fields are then 0."""
    proven: bool = True
    """Whether that is proven. False: the file has no plan, and `interleave` found none, but there may be one."""
    makespan_s: float = 0.0
    lower_bound_s: float = 0.0
    """A lower bound on the makespan of every plan."""
    peak_bytes: tuple[float, ...] = ()


def judge(problem: PlanningProblem, text: str) -> Verdict:
    """The verdict on a plan: it is complete, without deadlock, within memory, and its times and peaks are true.

    A claim that there is no plan is proven if a stage has no option that fits even by itself.

    Args: text: the plan as JSON, version 1.
    Raises: PlanError: the first rule that the plan breaks, in one sentence, with the position in the file.
    """
    claim = read_plan_text(text)
    if claim.status == "infeasible":
        result = scheduled(problem, "interleave")
        if result.has_plan or claim.orders:
            why = f"but {result.message} is one" if result.has_plan else "but it has orders"
            raise PlanError(f'status = "infeasible": the file says that there is no plan, {why}')
        return Verdict(feasible=False, proven=_has_no_plan(problem))
    plan = plan_of(problem, claim)
    _check_times(problem, plan, claim)
    if claim.lower_bound_s > claim.makespan_s * (1 + TOLERANCE):
        raise PlanError(
            f"lower_bound_s = {claim.lower_bound_s:.9g} is above makespan_s = {claim.makespan_s:.9g}, which the plan "
            "itself reaches"
        )
    bound = lower_bound_s(problem)
    if claim.lower_bound_s > bound * (1 + TOLERANCE):
        raise PlanError(
            f"lower_bound_s = {claim.lower_bound_s:.9g} is above {bound:.9g}, which is proven for this problem; "
            "write that, or a smaller one"
        )
    if claim.status == "optimal" and claim.makespan_s > claim.lower_bound_s * (1 + TOLERANCE):
        raise PlanError(
            f'status = "optimal", but makespan_s = {claim.makespan_s:.9g} does not reach lower_bound_s = '
            f'{claim.lower_bound_s:.9g}; say "improved"'
        )
    peaks = tuple(max((during for during, _ in instants), default=0.0) for instants in held_bytes(plan, problem))
    if len(claim.peak_bytes) != len(peaks):
        raise PlanError(f"peak_bytes has {len(claim.peak_bytes)} entries for {len(peaks)} ranks; give one a rank")
    for rank, (claimed, peak) in enumerate(zip(claim.peak_bytes, peaks, strict=True)):
        if not math.isclose(claimed, peak, rel_tol=TOLERANCE, abs_tol=1.0):
            raise PlanError(f"peak_bytes[{rank}] = {claimed:.6g}, but the activations of that rank reach {peak:.6g}")
    return Verdict(feasible=True, makespan_s=claim.makespan_s, lower_bound_s=bound, peak_bytes=peaks)


def _has_no_plan(problem: PlanningProblem) -> bool:
    """Whether some stage has no option that fits even by itself."""
    for stage, work in problem.graph.nodes():
        limit = problem.memory_limit_bytes[problem.graph.stage_rank[stage]]
        least_bytes = min(option.activation_bytes + option.restored_bytes for option in problem.options(stage, work))
        if limit is not None and exceeds(least_bytes, limit):
            return True
    return False


def _check_times(problem: PlanningProblem, plan: Plan, claim: PlanText) -> None:
    rows = [row for order in claim.orders for row in order]
    first_s = min((row.start_s for row in rows), default=0.0)
    last_s = max((row.end_s for row in rows), default=0.0)
    # Relative to the least makespan of these orders, not to the claimed one.
    earliest = simulate(problem, plan)
    slack = TOLERANCE * earliest.makespan_s
    starts = {(row.rank, row.action): row.start_s for row in earliest.rows}
    if abs(claim.makespan_s - (last_s - first_s)) > slack:
        raise PlanError(
            f"makespan_s = {claim.makespan_s:.9g}, but the time from the first start to the last end is "
            f"{last_s - first_s:.9g} s"
        )
    end: dict[Result, float] = {
        (RESULT_OF.get(part.kind, part.kind), part.stage, part.work): row.end_s for row in rows for part in row.parts
    }
    for rank, order in enumerate(claim.orders):
        for step, row in enumerate(order):
            _check_row(problem, plan, (rank, step), row, order[step - 1] if step else None, slack)
    for rank, order in enumerate(claim.orders):
        for step, row in enumerate(order):
            needs = (need for p in row.parts for need in plan.graph.needs(p.kind, p.stage, p.work))
            for needed, edge in needs:
                ready = end[needed] + (problem.transfer_s(edge) if edge else 0.0)
                if row.start_s < ready - slack:
                    kind, stage, work = needed
                    kind = Kind.I if kind is Kind.B and (stage, work) in plan.split else kind
                    raise PlanError(
                        f"orders[{rank}][{step}].start_s = {row.start_s:.9g}: {plan.orders[rank][step]} starts before "
                        f"{plan.graph.action(kind, stage, work)} has arrived at {ready:.9g}"
                    )
            earliest_s = starts[rank, plan.orders[rank][step]]
            if row.start_s - first_s < earliest_s - slack:
                raise PlanError(
                    f"orders[{rank}][{step}].start_s = {row.start_s:.9g}: {plan.orders[rank][step]} cannot start "
                    f"before {first_s + earliest_s:.9g} in these orders"
                )


def _check_row(
    problem: PlanningProblem,
    plan: Plan,
    position: tuple[int, int],
    row: PlanRow,
    previous: PlanRow | None,
    slack: float,
) -> None:
    rank, step = position
    where, action = f"orders[{rank}][{step}]", plan.orders[rank][step]
    seconds = problem.entry_cost(action, row.parts[0].work, plan.options).seconds
    if abs(row.end_s - row.start_s - seconds) > slack:
        raise PlanError(f"{where}: {action} takes {row.end_s - row.start_s:.9g} s, but its option says {seconds:.9g}")
    if previous and row.start_s < previous.end_s - slack:
        raise PlanError(
            f"{where}.start_s = {row.start_s:.9g}: {action} starts before the action ahead of it ends at "
            f"{previous.end_s:.9g}"
        )
