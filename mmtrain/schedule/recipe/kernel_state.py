"""The kernel's state of a recipe bound to a problem.

What recipes of one problem have in common is made once; a recipe adds its rules and limits, and copies of what the
kernel changes.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from mmtrain.schedule.action import Kind
from mmtrain.schedule.problem import Option
from mmtrain.schedule.recipe import kernel
from mmtrain.schedule.recipe.bound_recipe import INSTRUCTION, Bound
from mmtrain.schedule.recipe.kernel import Costs, State
from mmtrain.schedule.recipe.language import traversal
from mmtrain.schedule.recipe.shared import Level, Settled, Shared

Array = npt.NDArray[Any]
PREFERRED = {"backward": kernel.BACKWARD_FIRST, "forward": kernel.FORWARD_FIRST, "alternate": kernel.ALTERNATE}
ORDERS = {"breadth": kernel.BREADTH, "depth": kernel.DEPTH, "oldest": kernel.OLDEST}
KINDS = ((Kind.F, Kind.F), (Kind.B, Kind.I), (Kind.W, Kind.W))
"""[slot] -> kind with a whole backward, and with a split one."""


class Arrays:
    """The states of recipes of one problem."""

    def __init__(self, shared: Shared) -> None:
        """Args: shared: of the problem."""
        graph, items = shared.graph, shared.items
        self._graph, self._items = graph, items
        self._rank = _integers(items.rank)
        self._component = _integers(shared.component)[_integers(items.work)]
        self._has_backward = np.array(items.has_backward)
        self._waiting = _integers(items.num_needs)
        edges = _integers(chain.from_iterable(chain.from_iterable(items.dependents))).reshape(-1, 2)
        self._delay = np.array([*shared.problem.message_s, 0.0])[edges[:, 1]]
        instructions: list[list[int]] = [[] for _ in range(graph.num_ranks)]
        for number, given in enumerate(graph.instructions):
            instructions[graph.stage_rank[given.stage]].append(INSTRUCTION * items.num_nodes + number)
        self._fixed = {
            "dependents": edges[:, 0].copy(),
            "of_item": _bounds(map(len, items.dependents)),
            "rank_of": _integers(items.rank_of),
            "stage": _integers(items.stage),
            "component": self._component,
            "microbatch": _integers(shared.microbatch),
            "has_backward": _integers(items.has_backward),
            "age": _integers(shared.age),
            "stages": _integers(chain.from_iterable(shared.stages)),
            "first_stage": _bounds(map(len, shared.stages)),
            "instructions": _integers(chain.from_iterable(instructions)),
            "first_instruction": _bounds(map(len, instructions)),
        }
        self._remaining = self._add_queues()
        self._costs: dict[Settled, Costs] = {}
        self._limits: dict[tuple[Level, ...], dict[str, Array]] = {}

    def _add_queues(self) -> Array:
        """Adds the queues of all rows (slot, stage); returns their lengths."""
        stage, num_stages = self._fixed["stage"], len(self._graph.stage_rank)
        row = np.concatenate([stage, num_stages + stage])
        oldest = np.argsort(self._fixed["age"])
        oldest = oldest[np.concatenate([np.full(len(stage), True), self._has_backward])[oldest]]
        lengths = np.bincount(row[oldest], minlength=2 * num_stages)
        self._fixed["queue"] = oldest[np.argsort(row[oldest], kind="stable")]
        self._fixed["first"] = _bounds(lengths)
        return lengths

    def state(self, bound: Bound) -> State:
        """The state of a recipe before its first action. Raises: RecipeError: as `Bound.rules`."""
        num_items, num_stages = self._items.num_items, len(self._graph.stage_rank)
        num_components, num_actions = int(self._component.max()) + 1, bound.num_actions
        costs, first, split = self.costs(bound.settled), self._fixed["first"], _integers(bound.split)
        if bound.recipe.clock == "lockstep":
            seconds, delay = np.ones(num_items), np.zeros(len(self._delay))
        else:
            seconds, delay = costs.seconds, costs.delay
        due = _bounds(np.bincount(self._rank, split, self._graph.num_ranks))
        sizes = [self._items.num_nodes, num_stages, num_components, len(bound.limits.levels), num_actions]
        return State(
            **self._fixed,
            **_of_rules(bound),
            **self._of_limits(bound, num_components),
            waiting=self._waiting.copy(),
            arrival=np.zeros(num_items),
            delay=delay,
            seconds=seconds,
            status=np.full(num_items, kernel.WAITING),
            split=split,
            at=first[:-1].copy(),
            num_ready=np.zeros(2 * num_stages, np.int64),
            remaining=self._remaining.copy(),
            due=np.full(due[-1], -1),
            first_due=due[:-1].copy(),
            last_due=due[:-1].copy(),
            begun=np.full(num_actions, -1),
            ends=np.zeros(num_items),
            sizes=_integers(sizes),
        )

    def _of_limits(self, bound: Bound, num_components: int) -> dict[str, Array]:
        levels, limits = tuple(bound.limits.levels), [pool.limit for pool in bound.limits.pools]
        if levels not in self._limits:
            self._limits[levels] = self._of_levels(levels, len(limits), num_components)
        fixed = self._limits[levels]
        alone = fixed["to_hold"].reshape(len(limits), num_components).max(axis=1, initial=0.0)
        return fixed | {
            "limit": np.maximum(limits, alone),  # one component always has room
            "total": np.zeros(len(limits)),
            "held": np.zeros(len(fixed["to_hold"])),
            "to_hold": fixed["to_hold"].copy(),
            "forwards": fixed["forwards"].copy(),
        }

    def _of_levels(self, levels: Sequence[Level], num_pools: int, num_components: int) -> dict[str, Array]:
        pool, amount = (
            _integers(_joined(levels, lambda level: level.pool)),
            _floats(_joined(levels, lambda level: level.amount)),
        )
        count, entry = num_pools * num_components, np.flatnonzero(pool >= 0)
        at = (pool * num_components + np.tile(self._component, len(levels)))[entry]
        trained = np.tile(self._has_backward, len(levels))[entry]
        passing, of = entry[~trained], at[~trained]
        return {
            "pool": pool,
            "amount": amount,
            "kept": _floats(_joined(levels, lambda level: level.kept)),
            "to_hold": np.bincount(at[trained], amount[entry[trained]], count).astype(np.float64),
            "forwards": np.bincount(at, minlength=count),
            "passing": passing[np.lexsort((-amount[passing], of))],
            "first_passing": _bounds(np.bincount(of, minlength=count)),
        }

    def costs(self, settled: Settled) -> Costs:
        """Seconds and bytes of all items."""
        if settled not in self._costs:
            self._costs[settled] = self._costs_of(settled)
        return self._costs[settled]

    def _costs_of(self, settled: Settled) -> Costs:
        distinct = {id(option): option for option in settled.options}
        numbers = {key: number for number, key in enumerate(distinct)}
        option, split = _integers(numbers[id(option)] for option in settled.options), _integers(settled.split)

        def of_items(value: Callable[[Option, Kind], float], of_instructions: list[float]) -> Array:
            tables = (np.array([[value(o, kind) for o in distinct.values()] for kind in kinds]) for kinds in KINDS)
            return np.concatenate([*(table[split, option] for table in tables), of_instructions])

        given = self._graph.instructions
        return Costs(
            dependents=self._fixed["dependents"],
            of_item=self._fixed["of_item"],
            rank_of=self._fixed["rank_of"],
            delay=self._delay,
            seconds=of_items(Option.duration_s, [one.seconds for one in given]),
            needed_bytes=of_items(Option.needed_bytes, [max(0.0, one.growth_bytes) for one in given]),
            growth_bytes=of_items(Option.growth_bytes, [one.growth_bytes for one in given]),
        )


def _of_rules(bound: Bound) -> dict[str, Array]:
    P, rules = bound.graph.num_ranks, bound.rules
    sides = [traversal(order) for rule in rules for order in (rule.forward, rule.backward)]
    return {
        "preferred": _integers(PREFERRED[rule.first] for rule in rules),
        "unit": _integers(chain.from_iterable(rule.units for rule in rules)),
        "order": _integers(ORDERS[side.order] for side in sides),
        "every": _integers(side.every for side in sides),
        "waits": _integers(side.wait for side in sides),
        "cursor": np.zeros(2 * P, np.int64),
        "served": np.zeros(2 * P, np.int64),
        "last": np.full(P, -1),
        "in_a_row": np.zeros(P, np.int64),
        "busy": np.zeros(P, np.int64),
        "awake": np.zeros(P, np.int64),
    }


def _integers(values: Iterable[int]) -> Array:
    return np.array(values, np.int64) if isinstance(values, list) else np.fromiter(values, np.int64)


def _floats(values: list[float]) -> Array:
    return np.array(values, np.float64)


def _bounds(lengths: Iterable[int]) -> Array:
    """The start of each of several rows that lie one after the other, and the end of the last."""
    return np.concatenate([[0], np.cumsum(_integers(lengths))])


def _joined(levels: Sequence[Level], column: Callable[[Level], list[Any]]) -> list[Any]:
    return [entry for level in levels for entry in column(level)]
