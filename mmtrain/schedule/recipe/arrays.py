"""The kernel's state of a recipe bound to a problem."""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from mmtrain.schedule.recipe import kernel
from mmtrain.schedule.recipe.bound import Bound
from mmtrain.schedule.recipe.kernel import INSTRUCTION, State
from mmtrain.schedule.recipe.language import traversal

PREFERRED = {"backward": kernel.BACKWARD_FIRST, "forward": kernel.FORWARD_FIRST, "alternate": kernel.ALTERNATE}
ORDERS = {"breadth": kernel.BREADTH, "depth": kernel.DEPTH, "oldest": kernel.OLDEST}


def state_of(bound: Bound) -> State:
    """The state before the first action. Raises: RecipeError: as `Bound.rules`."""
    return State(**_of_items(bound), **_of_queues(bound), **_of_rules(bound), **_of_limits(bound))


def _of_items(bound: Bound) -> dict[str, Any]:
    graph, items, shared = bound.graph, bound.items, bound.shared
    message_s = [*(bound.message_s or [0.0] * items.num_messages), 0.0]
    dependents, of_item = _rows([[item for item, _ in row] for row in items.dependents])
    sizes = (
        items.num_nodes,
        len(graph.stage_rank),
        max(shared.component) + 1,
        len(bound.limits.levels),
        bound.num_actions,
    )
    return {
        "waiting": items.num_needs.copy(),
        "arrival": [0.0] * items.num_items,
        "dependents": dependents,
        "delay": [message_s[message] for row in items.dependents for _, message in row],
        "of_item": of_item,
        "seconds": [duration or 0.0 for duration in bound.seconds()],
        "rank_of": [*items.rank * 3, *(graph.stage_rank[given.stage] for given in graph.instructions)],
        "status": [kernel.WAITING] * items.num_items,
        "stage": items.stage,
        "component": [shared.component[work] for work in items.work],
        "microbatch": shared.microbatch,
        "has_backward": items.has_backward,
        "split": bound.split,
        "begun": [-1] * bound.num_actions,
        "ends": [0.0] * items.num_items,
        "sizes": list(sizes),
    }


def _of_queues(bound: Bound) -> dict[str, Any]:
    graph, items, shared = bound.graph, bound.items, bound.shared
    N, S, P = items.num_nodes, len(graph.stage_rank), graph.num_ranks
    queues: list[list[int]] = [[] for _ in range(2 * S)]
    for item in sorted(range(2 * N), key=shared.age.__getitem__):
        if item < N or items.has_backward[item - N]:
            queues[item // N * S + items.stage[item % N]].append(item)
    queue, first = _rows(queues)
    stages, first_stage = _rows(shared.stages)
    num_split = Counter(rank for rank, split in zip(items.rank, bound.split, strict=True) if split)
    first_due = [0, *accumulate(num_split[rank] for rank in range(P))]
    instructions: list[list[int]] = [[] for _ in range(P)]
    for number, given in enumerate(graph.instructions):
        instructions[graph.stage_rank[given.stage]].append(INSTRUCTION * N + number)
    instruction, first_instruction = _rows(instructions)
    return {
        "age": shared.age,
        "queue": queue,
        "first": first,
        "at": first[:-1],
        "num_ready": [0] * (2 * S),
        "remaining": list(map(len, queues)),
        "stages": stages,
        "first_stage": first_stage,
        "due": [-1] * first_due[-1],
        "first_due": first_due[:-1],
        "last_due": first_due[:-1],
        "instructions": instruction,
        "first_instruction": first_instruction,
    }


def _of_rules(bound: Bound) -> dict[str, Any]:
    P = bound.graph.num_ranks
    sides = [traversal(order) for rule in bound.rules for order in (rule.forward, rule.backward)]
    return {
        "preferred": [PREFERRED[rule.first] for rule in bound.rules],
        "unit": [unit for rule in bound.rules for unit in rule.units],
        "order": [ORDERS[side.order] for side in sides],
        "every": [side.every for side in sides],
        "waits": [side.wait for side in sides],
        "cursor": [0] * (2 * P),
        "served": [0] * (2 * P),
        "last": [-1] * P,
        "in_a_row": [0] * P,
        "busy": [0] * P,
        "awake": [0] * P,
    }


def _of_limits(bound: Bound) -> dict[str, Any]:
    items, component = bound.items, bound.shared.component
    levels, pools = bound.limits.levels, bound.limits.pools
    N, C = items.num_nodes, max(component) + 1
    pool = [x for level in levels for x in level.pool]
    amount = [x for level in levels for x in level.amount]
    to_hold, forwards = [0.0] * (len(pools) * C), [0] * (len(pools) * C)
    passing: list[list[int]] = [[] for _ in to_hold]
    for i, (number, taken) in enumerate(zip(pool, amount, strict=True)):
        if number >= 0:
            at = number * C + component[items.work[i % N]]
            forwards[at] += 1
            if items.has_backward[i % N]:
                to_hold[at] += taken
            else:
                passing[at].append(i)
    for row in passing:
        row.sort(key=lambda i: -amount[i])
    passing_nodes, first_passing = _rows(passing)
    return {
        "pool": pool,
        "amount": amount,
        "kept": [x for level in levels for x in level.kept],
        # One component always has room.
        "limit": [max(given.limit, *to_hold[i * C : (i + 1) * C]) for i, given in enumerate(pools)],
        "total": [0.0] * len(pools),
        "held": [0.0] * len(to_hold),
        "to_hold": to_hold,
        "forwards": forwards,
        "passing": passing_nodes,
        "first_passing": first_passing,
    }


def _rows(rows: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """All rows one after the other, and where each begins, with the end of the last."""
    return [entry for row in rows for entry in row], [0, *accumulate(map(len, rows))]
