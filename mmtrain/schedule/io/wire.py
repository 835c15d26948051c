"""A plan as a few bytes, for ranks that hold the same work graph."""

from array import array
from collections.abc import Iterator
from itertools import islice

from mmtrain.errors import PlanError
from mmtrain.schedule.action import Action, Braid, Kind
from mmtrain.schedule.graph import WorkGraph
from mmtrain.schedule.plan import Plan

KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)
"""A kind is sent as its index among these and then those of the graph's instructions, by name; plus their number where
the next action runs in the same braid."""

_ITEM = "i"
"""A signed integer of the machine; ranks of one job run on one kind of machine."""


def to_bytes(plan: Plan) -> bytes:
    """The orders and options of a plan: 12 bytes an action or part of a braid, and an option that is not the first.

    Raises: PlanError: an action that neither is compute nor an instruction, or of a stage or work that the plan's graph
        lacks.
    """
    kinds = _kinds(plan.graph)
    chosen = sorted((stage, work, option) for (stage, work), option in plan.options.items() if option)
    numbers = array(_ITEM, [len(plan.orders), len(chosen), *map(len, plan.parts)])
    for order, works in zip(plan.orders, plan.works, strict=True):
        for entry, work in zip(order, works, strict=True):
            for action in entry.parts:
                if action.kind not in kinds:
                    raise PlanError(
                        f"{action} is none of {', '.join(kinds[:-1])} and {kinds[-1]}, which alone are sent"
                    )
                joined = len(kinds) * (action is not entry.parts[-1])
                of = work if len(entry.parts) == 1 else plan.graph.work_of(action)
                numbers.extend((kinds.index(action.kind) + joined, action.stage, of))
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
    kinds = _kinds(graph)
    orders = tuple(tuple(_entries(graph, kinds, list(islice(actions, length)))) for length in lengths)
    return Plan(graph, orders, {(stage, work): option for stage, work, option in actions})


def _kinds(graph: WorkGraph) -> tuple[Kind, ...]:
    """What is sent of a graph, in the order of their numbers."""
    return (*KINDS, *sorted({given.kind for given in graph.instructions}))


def _entries(graph: WorkGraph, kinds: tuple[Kind, ...], rows: list[tuple[int, ...]]) -> Iterator[Action]:
    parts: list[Action] = []
    for kind, stage, work in rows:
        joined = len(kinds) <= kind < 2 * len(kinds)
        parts.append(_action(graph, kinds, kind - len(kinds) * joined, stage, work))
        if not joined:
            yield Braid.of(*parts) if len(parts) > 1 else parts[0]
            parts = []
    if parts:
        raise PlanError(f"kind {rows[-1][0]} of an action joins it with a next one, but it is the last of its rank")


def _action(graph: WorkGraph, kinds: tuple[Kind, ...], kind: int, stage: int, work: int) -> Action:
    if not 0 <= kind < len(kinds):
        raise PlanError(f"kind {kind} of an action is outside of 0 .. {len(kinds) - 1}")
    if not 0 <= work < len(graph.works):
        raise PlanError(f"work {work} of an action is outside of 0 .. {len(graph.works) - 1}")
    if stage not in graph.stages(work):
        raise PlanError(f"work {work} does not pass through stage {stage}; the plan belongs to another iteration")
    return graph.action(kinds[kind], stage, work)
