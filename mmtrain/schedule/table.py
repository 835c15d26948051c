"""A policy as a table: which action each rank prefers, and how many microbatches it may have in flight.

Ranks take one action after another from two queues, forwards and backwards, each in a fixed order of its own
(the priority of stages), and choose between the two by a rule (the priority of kinds). Each runs its queues strictly:
what is not at the head waits. No memory is counted; `in_flight` bounds what a rank holds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from types import FunctionType
from typing import Any, Literal, NamedTuple

from mmtrain.schedule.action import Action, Kind
from mmtrain.schedule.graph import WorkGraph

TURNS = ("alternate", "forward", "backward")


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

    def run(self, graph: WorkGraph, *, compiled: bool = False) -> tuple[tuple[Action, ...], ...]:
        """The orders of all ranks: F and B in the order of their start.

        Where the limits let nothing go on, the first forward that is left may exceed them.

        Args: compiled: by numba, with equal results; worth its start where many tables are run.
        """
        items = graph.items
        columns = self._columns(graph)
        if compiled:
            columns = _as_arrays(columns)
        (_compiled() if compiled else run_table)(columns, TURNS.index(self.turn))
        orders: list[list[Action]] = [[] for _ in range(graph.num_ranks)]
        for item in columns.started:
            slot, node = divmod(int(item), items.num_nodes)
            action = graph.action(Kind.B if slot else Kind.F, items.stage[node], items.work[node])
            orders[items.rank[node]].append(action)
        return tuple(map(tuple, orders))

    def _columns(self, graph: WorkGraph) -> "_Columns":
        items, ranks = graph.items, graph.num_ranks
        queues: list[list[int]] = [[] for _ in range(2 * ranks)]
        owed = [0] * (max(self.pair, default=-1) + 1)
        for item in (*self.forwards, *self.backwards):
            slot, node = divmod(item, items.num_nodes)
            queues[slot * ranks + items.rank[node]].append(item)
            owed[self.pair[node]] += slot
        queue, first = _rows(queues)
        dependents, of_item = _rows([[item for item, _ in row] for row in items.dependents])
        return _Columns(
            waiting=items.num_needs.copy(),
            arrival=[0] * items.num_items,
            dependents=dependents,
            of_item=of_item,
            queue=queue,
            first=first,
            at=first[:-1],
            forwards=self.forwards,
            rank_of=items.rank,
            has_backward=items.has_backward,
            pair=self.pair,
            opened=[0] * len(owed),
            owed=owed,
            room=list(self.in_flight),
            ticks=self.ticks,
            begun=[0] * items.num_nodes,
            ends=[-1] * ranks,
            running=[-1] * ranks,
            last=[-1] * ranks,
            late=[0] * ranks,
            started=[0] * len(queue),
        )


class _Columns(NamedTuple):
    """What a run reads and changes; lists, or arrays of int64."""

    waiting: Any
    """[item] -> how many of the results that it needs have not been started."""
    arrival: Any
    """[item] -> when those that have been started will have ended."""
    dependents: Any
    """Items that wait for item i: entries of_item[i] .. of_item[i + 1] - 1."""
    of_item: Any
    queue: Any
    """What rank r runs of slot s (0: F, 1: B): entries first[s * ranks + r] and on, the next at `at`."""
    first: Any
    at: Any
    forwards: Any
    rank_of: Any
    """[node]"""
    has_backward: Any
    """[node]"""
    pair: Any
    """[node]"""
    opened: Any
    """[pair] -> whether it is in flight."""
    owed: Any
    """[pair] -> backwards that have not ended."""
    room: Any
    """[rank] -> how many pairs more it may have in flight."""
    ticks: Any
    """[node]"""
    begun: Any
    """[node] -> whether its F has started."""
    ends: Any
    """[rank] -> when its action ends; -1: it is idle."""
    running: Any
    """[rank] -> item."""
    last: Any
    """[rank] -> slot of its last action; -1: none."""
    late: Any
    """[rank] -> whether it would go forward now but cannot; it then decides after the others."""
    started: Any
    """The items in the order of their start."""


def _rows(rows: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """All rows one after the other, and where each begins, with the end of the last."""
    return [entry for row in rows for entry in row], [0, *accumulate(map(len, rows))]


def _as_arrays(columns: _Columns) -> _Columns:
    import numpy as np

    return _Columns(*(np.array(column, np.int64) for column in columns))


@cache
def _compiled() -> Callable[..., Any]:
    """`run_table`, compiled. numba loads here: a caller that runs few tables does not wait for it."""
    import numba

    scope = dict(globals())
    for function in (_head, _turn, _start, _finish, run_table):
        scope[function.__name__] = numba.njit(nogil=True)(FunctionType(function.__code__, scope, function.__name__))
    compiled: Callable[..., Any] = scope["run_table"]
    return compiled


# What follows runs as it is, on lists, and compiled, on arrays.

_EVER = 1 << 62


def _head(t: Any, slot: int, rank: int, now: int) -> int:
    """The next item of a rank's queue, if all that it needs has ended by now and the limit admits it; else -1."""
    row = slot * len(t.room) + rank
    if t.at[row] == t.first[row + 1]:
        return -1
    item = t.queue[t.at[row]]
    if t.waiting[item] or t.arrival[item] > now:
        return -1
    if slot == 0 and t.has_backward[item] and not t.opened[t.pair[item]] and t.room[rank] <= 0:
        return -1
    return item  # type: ignore[no-any-return]


def _turn(t: Any, rank: int, now: int, turn: int) -> int:
    """The slot of what an idle rank starts; -1: it waits."""
    forward, backward = _head(t, 0, rank, now), _head(t, 1, rank, now)
    if turn == 0 and t.late[rank] and _head(t, 0, rank, _EVER) >= 0:
        return -1
    if forward >= 0 and backward >= 0:
        return 0 if turn == 1 or (turn == 0 and t.last[rank] == 1) else 1
    return 0 if forward >= 0 else 1 if backward >= 0 else -1


def _start(t: Any, slot: int, rank: int, now: int) -> int:
    """Starts the next item of a rank's queue, by the rule of `Engine.start`; the item."""
    row = slot * len(t.room) + rank
    item = t.queue[t.at[row]]
    node = item - slot * len(t.ticks)
    t.at[row] += 1
    t.running[rank], t.last[rank] = item, slot
    end = t.ends[rank] = now + t.ticks[node]
    for i in range(t.of_item[item], t.of_item[item + 1]):
        dependent = t.dependents[i]
        t.waiting[dependent] -= 1
        t.arrival[dependent] = max(t.arrival[dependent], end)
    if slot == 0:
        t.begun[node] = 1
        if t.has_backward[node] and not t.opened[t.pair[node]]:
            t.opened[t.pair[node]] = 1
            t.room[rank] -= 1
    return item  # type: ignore[no-any-return]


def _finish(t: Any) -> int:
    """Ends what ends next; when that is."""
    end = _EVER
    for rank in range(len(t.room)):
        if 0 <= t.ends[rank] < end:
            end = t.ends[rank]
    for rank in range(len(t.room)):
        if t.ends[rank] == end:
            t.ends[rank] = -1
            if t.last[rank] == 1:
                pair = t.pair[t.running[rank] - len(t.ticks)]
                t.owed[pair] -= 1
                if not t.owed[pair] and t.opened[pair]:
                    t.opened[pair] = 0
                    t.room[rank] += 1
    return end


def run_table(t: Any, turn: int) -> None:
    """Runs a table in unit time and fills in `started`. Args: turn: index into `TURNS`."""
    now = count = 0
    while count < len(t.started):
        for rank in range(len(t.room)):
            t.late[rank] = 1 if t.last[rank] == 1 and _head(t, 0, rank, now) < 0 else 0
        # Whose turn it is to go forward but cannot decides last: it may wait for what now starts.
        for late in range(2):
            for rank in range(len(t.room)):
                if t.ends[rank] < 0 and t.late[rank] == late:
                    slot = _turn(t, rank, now, turn)
                    if slot >= 0:
                        t.started[count] = _start(t, slot, rank, now)
                        count += 1
        if max(t.ends) < 0:
            # The limits stand in the way (on unusual placements only): the earliest forward may exceed them.
            for node in t.forwards:
                if not t.begun[node]:
                    t.started[count] = _start(t, 0, t.rank_of[node], now)
                    count += 1
                    break
        now = _finish(t)
