"""Deterministic orders to start a search from. Pure numpy.

An order is a permutation of the groups for forwards and one for backwards; the first is served first.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from mmtrain.planner.search import kernels
from mmtrain.planner.search.instance import Searched

Order = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""(position of each group [2, G], group at each position [2, G])."""

SEEDS = ("fifo", "shortest", "longest", "hill", "valley", "zigzag", "longest first", "longest few first")
"""Names of the orders of clusters."""


def order_of(group_at: npt.NDArray[np.int64]) -> Order:
    """An order from the group at each position. Args: group_at: [2, G]."""
    at = np.empty_like(group_at)
    for half in range(2):
        at[half, group_at[half]] = np.arange(group_at.shape[1], dtype=np.int64)
    return at, group_at


def by_cluster(searched: Searched, clusters: Iterable[int]) -> Order:
    """Clusters one after the other: their groups as they are fed forwards, and the other way round backwards."""
    members: dict[int, list[int]] = {}
    first_work = [work for work, _ in searched.groups]
    place = {work: i for i, work in enumerate(searched.problem.graph.work_order)}
    for group in sorted(range(searched.num_groups), key=lambda g: (place[first_work[g]], searched.groups[g][1])):
        members.setdefault(int(searched.cluster_of[group]), []).append(group)
    listed = list(clusters)
    forward = [group for cluster in listed for group in members.get(cluster, [])]
    backward = [group for cluster in listed for group in reversed(members.get(cluster, []))]
    return order_of(np.array([forward, backward], np.int64))


def cluster_orders(searched: Searched) -> tuple[tuple[int, ...], ...]:
    """The orders of clusters named in `SEEDS`, by the seconds that all actions of a cluster take."""
    p = searched.arrays
    fastest = p.option[p.first[p.node[:, kernels.KIND]], kernels.TOTAL]
    load = np.bincount(p.node[:, kernels.CLUSTER], weights=fastest)
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
    low, high, found = 0, len(rising) - 1, []
    while low <= high:
        found.append(rising[high])
        if low < high:
            found.append(rising[low])
        low, high = low + 1, high - 1
    return found
