"""Balancing of consecutive parts of a sequence of costs over the owners of the parts."""

from collections.abc import Sequence
from itertools import accumulate, pairwise, permutations

import numpy as np
import numpy.typing as npt

_ROUNDING = 1e-9
"""Relative differences below this come from the order of floating-point additions."""

Floats = npt.NDArray[np.float64]


def level_owners(
    bounds: Sequence[tuple[int, int]], costs: Sequence[float], owners: Sequence[int], loads: Sequence[float]
) -> tuple[tuple[int, int], ...]:
    """The bounds after moving entries between parts until no move makes the owners' loads more equal.

    A move makes one part an entry longer and another one an entry shorter, and shifts the parts between them. No part
    becomes empty, or larger than the largest part was. Each step applies the move with the least sum of squared loads.

    Args:
        bounds: (low, high) of consecutive, non-empty parts of `costs`.
        costs: [entry] -> cost, in any unit.
        owners: [part] -> index of its owner.
        loads: [owner] -> its cost in addition to these parts.
    """
    prefix = np.array([0.0, *accumulate(costs)])
    cuts = np.array([bounds[0][0], *(high for _, high in bounds)])
    positions = np.arange(len(cuts))
    moves = np.array(list(permutations(range(len(bounds)), 2)), np.int64).reshape(-1, 2)
    longer, shorter = moves.T
    between = (np.minimum(longer, shorter)[:, None] < positions) & (positions <= np.maximum(longer, shorter)[:, None])
    shifts = np.where((longer < shorter)[:, None], 1, -1) * between

    def unevenness(sums: Floats) -> Floats:
        # Column by column, so that the bits do not depend on a library's order of additions.
        totals = np.array(loads, np.float64)[:, None] + np.zeros((1, len(sums)))
        for index, owner in enumerate(owners):
            totals[owner] += sums[:, index]
        sums_of_squares = np.zeros(len(sums))
        for total in totals:
            sums_of_squares += total * total
        return sums_of_squares

    costs_of_parts = np.diff(prefix[cuts])
    largest, least_unevenness = costs_of_parts.max() * (1 + _ROUNDING), unevenness(costs_of_parts[None])[0]
    while len(moves):
        moved = cuts + shifts
        allowed = np.take_along_axis(np.diff(moved, axis=1), shorter[:, None], 1)[:, 0] > 0
        sums = np.diff(prefix[np.where(allowed[:, None], moved, cuts)], axis=1)
        values = np.where(allowed & (sums.max(axis=1) <= largest), unevenness(sums), np.inf)
        best_move = int(np.argmin(values))
        if not values[best_move] < least_unevenness * (1 - _ROUNDING):
            break
        least_unevenness, cuts = values[best_move], moved[best_move]
    return tuple((int(low), int(high)) for low, high in pairwise(cuts))
