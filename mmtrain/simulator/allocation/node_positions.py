"""The position of each node in a layout, such that the fewest bytes of state are copied. Pure."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

from mmtrain.simulator.allocation.compositions import Layer

Gains = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLayout:
    """The pipelines of some nodes."""

    depths: tuple[int, ...]
    """[pipeline] -> its pipeline ranks: `parallelism.pipelines`."""
    nodes: tuple[str, ...]
    """Nodes that train, in the order of their ranks."""
    idle: tuple[str, ...]
    """Nodes that do not, by name."""


def node_positions(
    wanted: Sequence[Set[Layer]], nodes: Sequence[str], held: Mapping[str, Mapping[Layer, int]]
) -> tuple[str, ...]:
    """[position] -> its node, such that nodes lack the fewest bytes in all; of equal ones, the first by names.

    Args:
        wanted: [position] -> layers of its ranks.
        nodes: at least as many as positions.
        held: node -> layer -> bytes of its state there; a node that is absent holds nothing.
    """
    names = sorted(nodes)
    assert len(set(names)) == len(names) >= len(wanted), (names, len(wanted))
    gains = np.zeros((len(wanted), len(names)), np.int64)
    for column, name in enumerate(names):
        own = held.get(name, {})
        for row, layers in enumerate(wanted):
            gains[row, column] = sum(num_bytes for layer, num_bytes in own.items() if layer in layers)
    return tuple(names[column] for column in first_best(gains))


def first_best(gains: Gains) -> list[int]:
    """[row] -> its column, no column twice, with the largest sum; of equal ones the first in the order of lists.

    Sums are exact below 2**53, so that every machine finds the same.

    Args: gains: [row, column], at least as many columns as rows.
    """
    total, best = _largest(gains)
    free = list(range(gains.shape[1]))
    for row in range(len(gains)):
        for column in free:
            if column == best[row]:
                break
            others = [other for other in free if other != column]
            rest = gains[row + 1 :, others]
            if gains[row, column] + rest.max(axis=1).sum() < total:  # which no choice of the others exceeds
                continue
            rest_total, columns = _largest(rest)
            if gains[row, column] + rest_total == total:
                best[row:] = [column, *(others[index] for index in columns)]
                break
        total -= int(gains[row, best[row]])
        free.remove(best[row])
    return best


def _largest(gains: Gains) -> tuple[int, list[int]]:
    """The largest sum, and one choice of columns that has it."""
    rows, columns = linear_sum_assignment(gains, maximize=True)
    return int(gains[rows, columns].sum()), columns.tolist()
