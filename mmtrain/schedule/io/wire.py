"""A plan as a few bytes, for ranks that hold the same work graph."""

from array import array
from itertools import islice

from mmtrain.errors import PlanError
from mmtrain.schedule.action import COMPUTE, Action, Kind
from mmtrain.schedule.graph import WorkGraph
from mmtrain.schedule.plan import Plan

KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)
"""A kind is sent as its index."""

_ITEM = "i"
"""A signed integer of the machine; ranks of one job run on one kind of machine."""


def to_bytes(plan: Plan) -> bytes:
    """The orders and options of a plan: 12 bytes an action, 12 bytes an option that is not the first.

    Raises: PlanError: an action that is not compute, or of a stage or work that the plan's graph lacks.
    """
    chosen = sorted((stage, work, option) for (stage, work), option in plan.options.items() if option)
    numbers = array(_ITEM, [len(plan.orders), len(chosen), *map(len, plan.orders)])
    for order, works in zip(plan.orders, plan.works, strict=True):
        for action, work in zip(order, works, strict=True):
            if action.kind not in COMPUTE:
                raise PlanError(f"{action} is none of F, B, I and W, which alone are sent")
            numbers.extend((KINDS.index(action.kind), action.stage, work))
    for row in chosen:
        numbers.extend(row)
    return numbers.tobytes()


def from_bytes(graph: WorkGraph, data: bytes) -> Plan:
    """The plan that `to_bytes` wrote, over this graph; it is not checked.

    Raises: PlanError: the bytes are cut short or too long, or name a kind, stage or work that this graph lacks.
    """
    numbers = array(_ITEM)
    numbers.frombytes(data[: len(data) // numbers.itemsize * numbers.itemsize])
    num_orders, num_options = numbers[:2] if len(numbers) >= 2 else (0, 0)
    first = 2 + max(0, num_orders)
    lengths = numbers[2:first]
    rows = [tuple(numbers[at : at + 3]) for at in range(first, len(numbers), 3)]
    counts = (num_orders, num_options, *lengths)
    if min(counts) < 0 or numbers.itemsize * (first + 3 * (sum(lengths) + num_options)) != len(data):
        raise PlanError(f"{len(data)} bytes are not a whole plan; send all of its bytes and no others")
    actions = iter(rows)
    orders = tuple(tuple(_action(graph, *row) for row in islice(actions, length)) for length in lengths)
    return Plan(graph, orders, {(stage, work): option for stage, work, option in actions})


def _action(graph: WorkGraph, kind: int, stage: int, work: int) -> Action:
    if not 0 <= kind < len(KINDS):
        raise PlanError(f"kind {kind} of an action is outside of 0 .. {len(KINDS) - 1}")
    if not 0 <= work < len(graph.works):
        raise PlanError(f"work {work} of an action is outside of 0 .. {len(graph.works) - 1}")
    if stage not in graph.stages(work):
        raise PlanError(f"work {work} does not pass through stage {stage}; the plan belongs to another iteration")
    return graph.action(KINDS[kind], stage, work)
