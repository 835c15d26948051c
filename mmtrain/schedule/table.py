"""A policy as a table: which action each rank prefers, and how many microbatches it may have in flight.

Ranks take one action after another from two queues, forwards and backwards, each in a fixed order of its own
(the priority of stages), and choose between the two by a rule (the priority of kinds). Each runs its queues strictly:
what is not at the head waits. No memory is counted; `in_flight` bounds what a rank holds.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mmtrain.errors import PlanError
from mmtrain.schedule.action import Action, Kind
from mmtrain.schedule.engine import Engine, Policy
from mmtrain.schedule.graph import WorkGraph

F, B = 0, 1
"""Slots of items."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """The priorities and limits of all ranks."""

    forwards: Sequence[int]
    """All F, as items of the graph, in the order in which each rank runs its own."""
    backwards: Sequence[int]
    """All B, as items of the graph."""
    turn: Literal["alternate", "forward", "backward"] = "alternate"
    """What a rank prefers where both could start. alternate: the other than before, and after a backward it waits for
    a forward that only lacks results which are being computed."""
    pair: Sequence[int]
    """[node] -> number of what is in flight together: the works of one microbatch in one stage, for example."""
    in_flight: Sequence[int]
    """[rank] -> how many pairs it may have between their first F and last B."""
    ticks: Sequence[int]
    """[node] -> what its F and its B take, each."""

    def run(self, graph: WorkGraph) -> tuple[tuple[Action, ...], ...]:
        """The orders of all ranks: F and B in the order of their start.

        Where the limits let nothing go on, the first forward that is left may exceed them.

        Raises: PlanError: the graph has instructions, which a table cannot wait for.
        """
        if graph.instructions:
            raise PlanError("a table plans no instructions; plan the problem without, then add them (passes.instruct)")
        items = graph.items
        orders: list[list[Action]] = [[] for _ in range(graph.num_ranks)]
        for item in (engine := Engine(items)).run(_Turns(self, engine)):
            slot, node = divmod(item, items.num_nodes)
            action = graph.action(Kind.B if slot else Kind.F, items.stage[node], items.work[node])
            orders[items.rank[node]].append(action)
        return tuple(map(tuple, orders))


class _Turns(Policy):
    """One run of a table."""

    all_decide = True

    def __init__(self, table: Table, engine: Engine) -> None:
        items = engine.items
        self._table, self._engine, self._items = table, engine, items
        self.seconds: list[float | None] = [None] * items.num_items
        self._queues = [[deque[int]() for _ in range(items.num_ranks)] for _ in (F, B)]
        """The queues, [slot][rank]."""
        for item in (*table.forwards, *table.backwards):
            slot, node = divmod(item, items.num_nodes)
            self._queues[slot][items.rank[node]].append(item)
            self.seconds[item] = float(table.ticks[node])
        self._remaining_backwards = Counter(table.pair[item - items.num_nodes] for item in table.backwards)
        """Pair -> backwards that have not ended."""
        self._opened: set[int] = set()
        """The pairs in flight."""
        self._room = list(table.in_flight)
        """[rank] -> how many pairs more it may have in flight."""
        self._last: list[int | None] = [None] * items.num_ranks
        """[rank] -> slot of its last action."""
        self._late: set[int] = set()
        """The ranks that would go forward now but cannot; they decide after the others, for whose results they may
        wait."""

    def arrive(self, item: int) -> None:
        """The table has the queues; `_head` asks the engine what has arrived."""

    def turns(self, idle: list[int], now: float) -> list[int]:
        self._late = {rank for rank in idle if self._last[rank] == B and self._head(F, rank, now) is None}
        return sorted(idle, key=lambda rank: (rank in self._late, rank))

    def choose(self, rank: int, now: float) -> int | None:
        forward, backward, turn = self._head(F, rank, now), self._head(B, rank, now), self._table.turn
        if turn == "alternate" and rank in self._late and self._head(F, rank) is not None:
            return None
        if forward is None or backward is None:
            return backward if forward is None else forward
        goes_forward = turn == "forward" or (turn == "alternate" and self._last[rank] == B)
        return forward if goes_forward else backward

    def _head(self, slot: int, rank: int, now: float | None = None) -> int | None:
        """The next item of a rank's queue, if the limit admits it and all that it needs has ended by now; or, without
        a time, has started."""
        queue = self._queues[slot][rank]
        if not queue or self._engine.waiting[queue[0]] or (now is not None and self._engine.arrival[queue[0]] > now):
            return None
        return None if slot == F and self._room[rank] <= 0 and self._opens(queue[0]) else queue[0]

    def _opens(self, forward: int) -> bool:
        return self._items.has_backward[forward] and self._table.pair[forward] not in self._opened

    def start(self, item: int, now: float, end: float) -> None:
        slot, node = divmod(item, self._items.num_nodes)
        rank = self._items.rank[node]
        self._queues[slot][rank].popleft()
        self._last[rank] = slot
        if slot == F and self._opens(node):
            self._opened.add(self._table.pair[node])
            self._room[rank] -= 1

    def end(self, item: int) -> None:
        slot, node = divmod(item, self._items.num_nodes)
        pair = self._table.pair[node]
        if slot == B:
            self._remaining_backwards[pair] -= 1
            if not self._remaining_backwards[pair] and pair in self._opened:
                self._opened.remove(pair)
                self._room[self._items.rank[node]] += 1

    def force(self, now: float) -> int | None:
        # The limits stand in the way (on unusual placements only): the earliest forward may exceed them.
        return next((item for item in self._table.forwards if self._engine.end[item] is None), None)
