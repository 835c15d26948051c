"""Deterministic orders to start a search from. Pure numpy.

An order is a permutation of the groups for forwards and one for backwards; the first is served first.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from mmtrain.planner.search.instance import Searched
from mmtrain.planner.search.kernels.arrays import COMPONENT, KIND, TOTAL

GroupOrder = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""(position of each group [2, G], group at each position [2, G])."""


def order_of(group_at: npt.NDArray[np.int64]) -> GroupOrder:
    """An order from the group at each position. Args: group_at: [2, G]."""
    return inverse(group_at), group_at


def inverse(permutations: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The inverse of each row. Args: permutations: [2, G]."""
    inverted = np.empty_like(permutations)
    for row, permutation in zip(inverted, permutations, strict=True):
        row[permutation] = np.arange(len(row), dtype=np.int64)
    return inverted


def by_component(searched: Searched, components: Iterable[int]) -> GroupOrder:
    """Clusters one after the other: their groups as they are fed forwards, and the other way round backwards."""
    members: dict[int, list[int]] = {}
    first_work = [work for work, _ in searched.groups]
    position = {work: i for i, work in enumerate(searched.problem.graph.work_order)}
    for group in sorted(range(searched.num_groups), key=lambda g: (position[first_work[g]], searched.groups[g][1])):
        members.setdefault(int(searched.component_of[group]), []).append(group)
    listed = list(components)
    forward = [group for component in listed for group in members.get(component, [])]
    backward = [group for component in listed for group in reversed(members.get(component, []))]
    return order_of(np.array([forward, backward], np.int64))


def component_orders(searched: Searched) -> tuple[tuple[int, ...], ...]:
    """Eight orders of components, by the total seconds of the actions of each: fifo, shortest, longest, hill, valley,
    zigzag, the longest first, the longest few first."""
    p = searched.arrays
    fastest = p.option[p.first[p.node[:, KIND]], TOTAL]
    load = np.bincount(p.node[:, COMPONENT], weights=fastest)
    fifo = list(range(load.size))
    rising = sorted(fifo, key=lambda c: (load[c], c))
    falling = rising[::-1]
    few = falling[: p.limit.size]
    return tuple(
        map(
            tuple,
            (
                fifo,
                rising,
                falling,
                rising[::2] + rising[1::2][::-1],
                falling[::2] + falling[1::2][::-1],
                _zigzag(rising),
                falling[:1] + [c for c in fifo if c != falling[0]] if falling else [],
                few + [c for c in fifo if c not in few],
            ),
        )
    )


def _zigzag(rising: Sequence[int]) -> list[int]:
    """The longest, the shortest, the next longest, ..."""
    low, high, mixed = 0, len(rising) - 1, []
    while low <= high:
        mixed.append(rising[high])
        if low < high:
            mixed.append(rising[low])
        low, high = low + 1, high - 1
    return mixed
