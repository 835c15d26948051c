"""The one entry point of planning, its result, and the JSON form of a planned iteration."""

import json
from dataclasses import dataclass
from typing import Any, Literal

from mmtrain.errors import PlanError
from mmtrain.planner.bound import lower_bound_s
from mmtrain.schedule.action import Action, Kind
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.library.forward_only import forward_only
from mmtrain.schedule.plan import Plan, check
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.simulate import simulate
from mmtrain.schedule.strict_json import fields, integer, items, loads, string
from mmtrain.schedule.timeline import Timeline

VERSION = 1
"""Version of the JSON form."""

KEYS = (
    "version",
    "status",
    "message",
    "makespan_s",
    "lower_bound_s",
    "search_s",
    "evaluations",
    "seed",
    "peak_bytes",
    "orders",
)
STATUSES = ("optimal", "improved", "first", "infeasible")


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """What planning came to: a plan with its simulated timeline, or the reason why there is none."""

    status: Literal["optimal", "improved", "first", "infeasible"]
    message: str
    """One sentence for the user."""
    plan: Plan | None = None
    timeline: Timeline | None = None


def make_plan(problem: PlanningProblem, schedule: str) -> PlanResult:
    """The checked plan of a named schedule, simulated; an iteration without any backward gets forward_only.

    An infeasible problem is a result with that status and a sentence, never an exception.

    Raises: PlanError: there is no schedule of that name.
    """
    if schedule not in CATALOGUE:
        raise PlanError(f"schedule {schedule!r} does not exist; choose one of {', '.join(CATALOGUE)}")
    make = CATALOGUE[schedule].make if problem.graph.has_any_backward else forward_only
    try:
        plan = make(problem)
        check(plan, problem)
    except PlanError as error:
        return PlanResult(status="infeasible", message=str(error))
    name = schedule if problem.graph.has_any_backward else "forward_only"
    return PlanResult(
        status="first", message=f"the order of schedule {name}", plan=plan, timeline=simulate(problem, plan)
    )


def plan_to_json(
    problem: PlanningProblem,
    result: PlanResult,
    *,
    search_s: float = 0.0,
    evaluations: int = 1,
    seed: int = 0,
) -> str:
    """The result as JSON text of version 1, one line a rank.

    Args: search_s: seconds that planning took, measured by the caller; planning itself reads no clock.
    """
    bound = lower_bound_s(problem)
    orders: list[list[dict[str, Any]]] = []
    if result.plan and result.timeline:
        for rank in range(problem.graph.num_ranks):
            orders.append(
                [
                    {
                        "op": row.action.kind.value,
                        "stage": row.action.stage,
                        "work": result.plan.works[rank][step],
                        "option": result.plan.options.get((row.action.stage, result.plan.works[rank][step]), 0),
                        "start_s": row.start_s,
                        "end_s": row.end_s,
                    }
                    for step, row in enumerate(_in_plan_order(result.plan, result.timeline, rank))
                ]
            )
    head = {
        "version": VERSION,
        "status": result.status,
        "message": result.message,
        "makespan_s": result.timeline.makespan_s if result.timeline else 0.0,
        "lower_bound_s": bound,
        "search_s": search_s,
        "evaluations": evaluations,
        "seed": seed,
        "peak_bytes": list(result.timeline.peak_bytes) if result.timeline else [],
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    body = ",\n".join("  " + json.dumps(order) for order in orders)
    lines.append(f' "orders": [\n{body}\n ]' if orders else ' "orders": []')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _in_plan_order(plan: Plan, timeline: Timeline, rank: int) -> list[Any]:
    rows = {row.action: row for row in timeline.of_rank(rank)}
    return [rows[action] for action in plan.orders[rank]]


def plan_from_json(problem: PlanningProblem, text: str) -> Plan:
    """The checked plan of a JSON text that `plan_to_json` (or another program) wrote for this problem.

    Raises: PlanError: the text breaks a rule of the format, holds no plan, or its plan fails `check`.
    """
    table = loads(text)
    fields(table, "", KEYS)
    if integer(table["version"], "version") != VERSION:
        raise PlanError(f"version = {table['version']}; this program reads version {VERSION}")
    if table["status"] not in STATUSES:
        raise PlanError(f"status = {table['status']!r}; it is one of {', '.join(STATUSES)}")
    if table["status"] == "infeasible":
        raise PlanError(f"the file holds no plan: {string(table['message'], 'message')}")
    orders: list[tuple[Action, ...]] = []
    options: dict[tuple[int, int], int] = {}
    for rank, rows in enumerate(items(table["orders"], "orders")):
        order = []
        for step, row in enumerate(items(rows, f"orders[{rank}]")):
            where = f"orders[{rank}][{step}]"
            action, work, option = _read_row(problem, row, where)
            order.append(action)
            if options.setdefault((action.stage, work), option) != option:
                raise PlanError(f"{where}.option = {option}, but another action of this stage and work has another one")
        orders.append(tuple(order))
    plan = Plan(problem.graph, tuple(orders), {node: option for node, option in options.items() if option})
    check(plan, problem)
    return plan


def _read_row(problem: PlanningProblem, row: Any, where: str) -> tuple[Action, int, int]:
    fields(row, where, ("op", "stage", "work", "option", "start_s", "end_s"))
    if row["op"] not in ("F", "B", "I", "W"):
        raise PlanError(f"{where}.op = {row['op']!r}; it is F, B, I or W")
    stage, work, option = (integer(row[key], f"{where}.{key}") for key in ("stage", "work", "option"))
    if not 0 <= work < len(problem.graph.works):
        raise PlanError(f"{where}.work = {work} is outside of 0 .. {len(problem.graph.works) - 1}")
    if stage not in problem.graph.stages(work):
        raise PlanError(f"{where}.stage = {stage}: work {work} does not pass through it")
    return problem.graph.action(Kind(row["op"]), stage, work), work, option
