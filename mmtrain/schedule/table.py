"""A policy as a table: which action each rank prefers, and how many microbatches it may have in flight.

Ranks run one action after another from two queues, forwards and backwards, each in a fixed order (the priority of
stages), and choose between the two by a rule (the priority of kinds). Each queue is strict: only its head may start. No
memory is counted; `in_flight` bounds the held activations.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mmtrain.schedule.action import Action, Kind
from mmtrain.schedule.engine import Engine
from mmtrain.schedule.graph import WorkGraph

Turn = Literal["alternate", "forward", "backward"]


@dataclass(frozen=True, kw_only=True)
class Table:
    """The priorities and limits of all ranks."""

    forwards: Sequence[int]
    """All F, as items of the graph, in the order in which each rank runs its own."""
    backwards: Sequence[int]
    """All B, as items of the graph."""
    turn: Turn = "alternate"
    """What a rank prefers where both could start. alternate: the other kind than before, and after a backward it waits
    for a forward that only lacks results which are being computed."""
    pair: Sequence[int]
    """[node] -> number of the pair that counts once as in flight: the works of one microbatch in one stage, for
    example."""
    in_flight: Sequence[int]
    """[rank] -> how many pairs it may have between their first F and last B."""
    ticks: Sequence[int]
    """[node] -> duration of its F and of its B, each."""

    def run(self, graph: WorkGraph) -> tuple[tuple[Action, ...], ...]:
        """The orders of all ranks: F and B in the order of their start.

        Where the limits block all ranks, the first remaining forward may exceed them.
        """
        return _Run(self, graph).run()


class _Run:
    """One run of a table in unit time: a policy of the engine."""

    def __init__(self, table: Table, graph: WorkGraph) -> None:
        items, ranks = graph.items, range(graph.num_ranks)
        self.table, self.graph, self.items, self.engine = table, graph, items, Engine(items)
        self.queues: list[list[deque[int]]] = [[deque() for _ in ranks] for _ in range(2)]
        """[0: F, 1: B][rank] -> items."""
        self.remaining = [0] * (max(table.pair, default=-1) + 1)
        """[pair] -> backwards that have not ended."""
        for item in (*table.forwards, *table.backwards):
            slot, node = divmod(item, items.num_nodes)
            self.queues[slot][items.rank[node]].append(item)
            self.remaining[table.pair[node]] += slot
        self.open: set[int] = set()
        """Pairs in flight."""
        self.room = list(table.in_flight)
        self.end: list[float] = [math.inf for _ in ranks]
        """[rank] -> when its action ends; inf: it is idle."""
        self.running = [-1 for _ in ranks]
        """[rank] -> its last item."""
        self.last = [-1 for _ in ranks]
        """[rank] -> slot of that item; -1: none."""
        self.orders: list[list[Action]] = [[] for _ in ranks]

    def run(self) -> tuple[tuple[Action, ...], ...]:
        now, ranks = 0.0, range(self.graph.num_ranks)
        forwards = iter(self.table.forwards)
        while any(queue for queues in self.queues for queue in queues):
            # A rank whose turn is a forward that cannot start decides last: it may wait for one that now starts.
            blocked = [self.last[rank] == 1 and not self._can_start(0, rank, now) for rank in ranks]
            for rank in sorted(ranks, key=blocked.__getitem__):
                if self.end[rank] == math.inf and (slot := self._turn(rank, now, blocked[rank])) is not None:
                    self._start(slot, rank, now)
            if min(self.end) == math.inf:  # blocked by the limits (on unusual placements only)
                node = next(node for node in forwards if self.engine.end[node] is None)
                self._start(0, self.items.rank[node], now)
            now = self._finish()
        return tuple(map(tuple, self.orders))

    def _can_start(self, slot: int, rank: int, now: float) -> bool:
        """Whether the head of a queue may start: all that it needs has ended by now, and the limit admits it."""
        if not (queue := self.queues[slot][rank]):
            return False
        item = queue[0]
        if self.engine.waiting[item] or self.engine.arrival[item] > now:
            return False
        opens = slot == 0 and self.items.has_backward[item] and self.table.pair[item] not in self.open
        return not opens or self.room[rank] > 0

    def _turn(self, rank: int, now: float, blocked: bool) -> int | None:
        """The slot that an idle rank starts; None: it waits. Args: blocked: its turn is a forward that cannot start."""
        alternate = self.table.turn == "alternate"
        forward, backward = self._can_start(0, rank, now), self._can_start(1, rank, now)
        if alternate and blocked and self._can_start(0, rank, math.inf):
            return None
        if forward and backward:
            return 0 if self.table.turn == "forward" or (alternate and self.last[rank] == 1) else 1
        return 0 if forward else 1 if backward else None

    def _start(self, slot: int, rank: int, now: float) -> None:
        item = self.queues[slot][rank].popleft()
        node = item - slot * self.items.num_nodes
        self.running[rank], self.last[rank] = item, slot
        self.end[rank] = now + self.table.ticks[node]
        self.engine.start(item, self.end[rank])
        kind = Kind.B if slot else Kind.F
        self.orders[rank].append(self.graph.action(kind, self.items.stage[node], self.items.work[node]))
        pair = self.table.pair[node]
        if slot == 0 and self.items.has_backward[node] and pair not in self.open:
            self.open.add(pair)
            self.room[rank] -= 1

    def _finish(self) -> float:
        """Ends the actions that end next; returns that time."""
        end = min(self.end)
        for rank in range(len(self.end)):
            if self.end[rank] == end:
                self.end[rank] = math.inf
                if self.last[rank] == 1:
                    pair = self.table.pair[self.running[rank] - self.items.num_nodes]
                    self.remaining[pair] -= 1
                    if not self.remaining[pair] and pair in self.open:
                        self.open.remove(pair)
                        self.room[rank] += 1
        return end
