"""What idle ranks waited for: each idle interval is attributed to the computation that delayed it.

A rank that waits for a gradient of the language model may really wait for the vision encoder, whose output the language
model did not have yet. So an idle interval is traced back along the chain of delays for its whole length: first the
action that was waited for, then what that action waited for itself (the action before it on its rank, or a result of
another rank, whichever ended later), and so on. Intervals in which no action of this chain computed (transfers, the
start of actions) are attributed to nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from mmtrain.schedule.action import BRAID
from mmtrain.schedule.plan import Plan

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Idle intervals of one timeline, from its first start to its last end; arrays of [n]."""

    rank: Ints
    start_s: Floats
    end_s: Floats
    action: Ints
    """Index of the action that was waited for, over the orders of all ranks; -1: nothing computed."""
    module: Ints
    """The module of each action, as an index into the graph; -1: none."""

    def module_s(self, num_modules: int) -> tuple[float, ...]:
        """[module] -> rank-seconds in which ranks waited for it."""
        attributed = self.module >= 0
        lengths = (self.end_s - self.start_s)[attributed]
        return tuple(np.bincount(self.module[attributed], lengths, num_modules).tolist())


def waits(plan: Plan, starts_s: Sequence[Floats], ends_s: Sequence[Floats]) -> Waits:
    """The idle time of all ranks that ran a plan. A rank that has ended waits for the action that ends last.

    Args: starts_s, ends_s: [rank] -> of each action of its order, on a clock shared by the ranks.
    """
    rows = _Rows.of(plan)
    start, end = np.concatenate(starts_s), np.concatenate(ends_s)
    if not start.size:
        none = np.empty(0, np.int64)
        return Waits(rank=none, start_s=np.empty(0), end_s=np.empty(0), action=none, module=none)
    needed = rows.needed_last(end)
    behind = rows.before
    # What delayed an action: the later end of the action before it and of its inputs from other stages.
    needs_later = (needed >= 0) & ((behind < 0) | (end[needed] > end[behind]))
    held_up_by = np.where(needs_later, needed, behind)
    low = np.where(behind >= 0, end[behind], start.min())
    last = np.array([ends[-1] if len(ends) else start.min() for ends in ends_s])
    ranks = np.arange(len(ends_s))
    chain = _Chain(start, end, held_up_by)
    chain.follow(
        rank=np.concatenate([rows.rank, ranks]),
        low=np.concatenate([low, last]),
        high=np.concatenate([start, np.full(len(ranks), end.max())]),
        action=np.concatenate([needed, np.full(len(ranks), int(end.argmax()))]),
    )
    rank, begin, stop, action = chain.found()
    return Waits(
        rank=rank, start_s=begin, end_s=stop, action=action, module=np.where(action >= 0, rows.module[action], -1)
    )


class _Chain:
    """Intervals that are traced back, all at once."""

    def __init__(self, start: Floats, end: Floats, held_up_by: Ints) -> None:
        self._start, self._end, self._held_up_by = start, end, held_up_by
        self._found: list[tuple[Ints, Floats, Floats, Ints]] = []

    def follow(self, *, rank: Ints, low: Floats, high: Floats, action: Ints) -> None:
        """Splits intervals. Args: action: the one that is waited for at the end of each; -1: none."""
        while rank.size:
            known = action >= 0
            stop = np.where(known, np.clip(self._end[action], low, np.maximum(low, high)), low)
            begin = np.where(known, np.clip(self._start[action], low, stop), low)
            self._add(rank, stop, high, np.full_like(action, -1))
            self._add(rank, begin, stop, action)
            more = known & (begin > low)
            rank, low, high = rank[more], low[more], begin[more]
            action = self._held_up_by[action[more]]

    def _add(self, rank: Ints, start: Floats, end: Floats, action: Ints) -> None:
        some = end > start
        self._found.append((rank[some], start[some], end[some], action[some]))

    def found(self) -> tuple[Ints, Floats, Floats, Ints]:
        """All parts, by rank and start."""
        rank, start, end, action = (np.concatenate(parts) for parts in zip(*self._found, strict=True))
        order = np.lexsort((start, rank))
        return rank[order], start[order], end[order], action[order]


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """The actions of all ranks in one list."""

    rank: Ints
    module: Ints
    before: Ints
    """Index of the action before it on its rank; -1: it is the first."""
    pairs: Ints
    """[n, 2]: index, and an index that it needs of another stage, as in `WorkGraph.needs`."""

    @classmethod
    def of(cls, plan: Plan) -> "_Rows":
        graph, items = plan.graph, plan.graph.items
        lengths = list(map(len, plan.orders))
        row_of = np.full(items.num_items, -1)
        numbers = chain.from_iterable(map(items.of_order, plan.orders, plan.works))
        row_of[np.fromiter(numbers, np.int64, sum(lengths))] = np.arange(sum(lengths))
        for first, order in zip(accumulate(lengths, initial=0), plan.orders, strict=False):
            for step, entry in enumerate(order):
                for part in entry.parts if entry.kind is BRAID else ():
                    row_of[items.item(part.kind, part.stage, graph.work_of(part))] = first + step
        over_edges = np.array(items.over_edges, np.int64).reshape(-1, 3)
        pairs = row_of[over_edges[:, [1, 0]]]
        ranks = np.repeat(np.arange(len(lengths)), lengths)
        module_of = np.array([work.module for work in graph.works], np.int64)
        module = module_of[np.array([work for works in plan.works for work in works], np.int64)]
        before = np.arange(len(ranks)) - 1
        before[np.flatnonzero(np.diff(ranks, prepend=-1))] = -1
        return cls(rank=ranks, module=module, before=before, pairs=pairs[(pairs >= 0).all(axis=1)])

    def needed_last(self, end: Floats) -> Ints:
        """For each action, the needed one that ends last; -1: it needs none."""
        last = np.full(len(self.rank), -1, np.int64)
        by_end = self.pairs[np.argsort(end[self.pairs[:, 1]], kind="stable")]
        last[by_end[:, 0]] = by_end[:, 1]  # of several values for one index the last one is kept
        return last
