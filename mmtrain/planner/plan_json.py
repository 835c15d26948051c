"""The JSON format of a planned iteration, version 1: a writer and a strict reader."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from reprlib import repr as show
from typing import Any

from mmtrain.errors import PlanError
from mmtrain.planner.bound import lower_bound_s
from mmtrain.planner.result import PlanResult
from mmtrain.schedule.action import BRAID, NOT_COMPUTE, Action, Braid, Kind
from mmtrain.schedule.graph import WorkGraph
from mmtrain.schedule.io.strict_json import amount, fields, integer, items, loads, string
from mmtrain.schedule.plan import Plan, check
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.timeline import Row, Timeline

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
_PART = ("op", "stage", "work", "option")
STATUSES = ("optimal", "improved", "first", "infeasible")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPart:
    """One action as read from a file."""

    kind: Kind
    stage: int
    work: int
    option: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """One entry of an order as read from a file; times in seconds."""

    parts: tuple[PlanPart, ...]
    """One action, or those of a braid."""
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class PlanText:
    """The contents of a well-formed file; not yet checked against a problem."""

    status: str
    message: str
    makespan_s: float
    lower_bound_s: float
    peak_bytes: tuple[float, ...]
    orders: tuple[tuple[PlanRow, ...], ...]


def plan_to_json(result: PlanResult, *, search_s: float = 0.0) -> str:
    """The result as JSON text of version 1, with one line for each rank; times in seconds, memory in bytes.

    Args: search_s: seconds that planning took, measured by the caller; planning itself reads no clock.
    """
    bound = lower_bound_s(result.problem)
    orders: list[list[dict[str, Any]]] = []
    if result.has_plan:
        for rank in range(result.problem.graph.num_ranks):
            orders.append(
                [
                    {**_parts(result.plan, row.action), "start_s": row.start_s, "end_s": row.end_s}
                    for row in _in_plan_order(result.plan, result.timeline, rank)
                ]
            )
    head = {
        "version": VERSION,
        "status": result.status,
        "message": result.message,
        "makespan_s": result.makespan_s if result.has_plan else 0.0,
        "lower_bound_s": bound,
        "search_s": search_s,
        "evaluations": result.evaluations,
        "seed": result.seed,
        "peak_bytes": list(result.timeline.peak_bytes) if result.has_plan else [],
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    body = ",\n".join("  " + json.dumps(order) for order in orders)
    lines.append(f' "orders": [\n{body}\n ]' if orders else ' "orders": []')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _parts(plan: Plan, entry: Action) -> dict[str, Any]:
    """The first action of an entry; the second one of a braid as `with`."""
    listed = []
    for action in entry.parts:
        work = plan.graph.work_of(action)
        option = plan.options.get((action.stage, work), 0)
        listed.append({"op": action.kind.value, "stage": action.stage, "work": work, "option": option})
    first, *others = listed
    return {**first, **({"with": others[0]} if others else {})}


def _in_plan_order(plan: Plan, timeline: Timeline, rank: int) -> Sequence[Row]:
    rows = {row.action: row for row in timeline.of_rank(rank)}
    return [rows[action] for action in plan.orders[rank]]


def plan_from_json(problem: PlanningProblem, text: str) -> Plan:
    """The checked plan in a JSON text that `plan_to_json` (or another program) wrote for this problem.

    Raises: PlanError: the text breaks a rule of the format, holds no plan, or its plan fails `check`.
    """
    return plan_of(problem, read_plan_text(text))


def read_plan_text(text: str) -> PlanText:
    """The contents of a JSON text of version 1.

    Raises: PlanError: the text breaks a rule of the format; names the dotted path of the fault.
    """
    table = loads(text)
    fields(table, "", KEYS)
    if integer(table["version"], "version") != VERSION:
        raise PlanError(f"version = {table['version']}; this program reads version {VERSION}")
    if table["status"] not in STATUSES:
        raise PlanError(f"status = {show(table['status'])}; it is one of {', '.join(STATUSES)}")
    amount(table["search_s"], "search_s")
    for key in ("evaluations", "seed"):
        if integer(table[key], key) < 0:
            raise PlanError(f"{key} = {table[key]} must not be negative")
    return PlanText(
        status=table["status"],
        message=string(table["message"], "message"),
        makespan_s=amount(table["makespan_s"], "makespan_s"),
        lower_bound_s=amount(table["lower_bound_s"], "lower_bound_s"),
        peak_bytes=tuple(
            amount(value, f"peak_bytes[{rank}]") for rank, value in enumerate(items(table["peak_bytes"], "peak_bytes"))
        ),
        orders=tuple(
            tuple(_read_row(row, f"orders[{rank}][{step}]") for step, row in enumerate(items(rows, f"orders[{rank}]")))
            for rank, rows in enumerate(items(table["orders"], "orders"))
        ),
    )


def _read_row(row: Any, where: str) -> PlanRow:
    fields(row, where, (*_PART, "start_s", "end_s"), optional=("with",))
    parts = [_read_part(row, where)]
    if "with" in row:
        fields(row["with"], f"{where}.with", _PART)
        parts.append(_read_part(row["with"], f"{where}.with"))
    start_s, end_s = (amount(row[key], f"{where}.{key}") for key in ("start_s", "end_s"))
    return PlanRow(parts=tuple(parts), start_s=start_s, end_s=end_s)


def _read_part(row: Any, where: str) -> PlanPart:
    op = row["op"]
    if not isinstance(op, str) or op not in Kind.names() or op in (*NOT_COMPUTE, BRAID):
        raise PlanError(f"{where}.op = {show(op)}; it is F, B, I, W or an instruction of the problem")
    stage, work, option = (integer(row[key], f"{where}.{key}") for key in ("stage", "work", "option"))
    return PlanPart(kind=Kind(op), stage=stage, work=work, option=option)


def _entry(graph: WorkGraph, row: PlanRow) -> Action:
    actions = [graph.action(part.kind, part.stage, part.work) for part in row.parts]
    return Braid.of(*actions) if len(actions) > 1 else actions[0]


def plan_of(problem: PlanningProblem, claim: PlanText) -> Plan:
    """The checked plan that the contents of a file describe.

    Raises: PlanError: the file says that there is no plan, or its actions or options are not those of the problem, or
        the plan fails `check`.
    """
    if claim.status == "infeasible":
        raise PlanError(f"the file holds no plan, since {show(claim.message)}; plan the problem again")
    graph = problem.graph
    options: dict[tuple[int, int], int] = {}
    for rank, rows in enumerate(claim.orders):
        for step, row in ((step, part) for step, entry in enumerate(rows) for part in entry.parts):
            where = f"orders[{rank}][{step}]"
            if not 0 <= row.work < len(graph.works):
                raise PlanError(f"{where}.work = {row.work} is outside of 0 .. {len(graph.works) - 1}")
            if row.stage not in graph.stages(row.work):
                raise PlanError(f"{where}.stage = {row.stage}: work {row.work} does not pass through it")
            if options.setdefault((row.stage, row.work), row.option) != row.option:
                raise PlanError(
                    f"{where}.option = {row.option}, but another action of this stage and work has another one"
                )
    orders = tuple(tuple(_entry(graph, row) for row in rows) for rows in claim.orders)
    plan = Plan(graph, orders, {node: option for node, option in options.items() if option})
    check(plan, problem)
    return plan
