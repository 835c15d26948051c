"""Making consecutive parts of several rows of costs level over those who own them."""

from collections.abc import Sequence
from itertools import accumulate, pairwise, permutations

import numpy as np
import numpy.typing as npt

_ROUNDING = 1e-9
"""Differences by a smaller part than this are those of a sum's order."""

Floats = npt.NDArray[np.float64]


def level_owners(
    bounds: Sequence[tuple[int, int]], costs: Sequence[float], owners: Sequence[int], loads: Sequence[float]
) -> tuple[tuple[int, int], ...]:
    """The bounds with entries moved between parts until no move makes the owners' loads more equal.

    A move makes one part an entry longer and another one shorter, and shifts what lies between. No part becomes empty,
    or larger than the largest was. The best move comes first, by the sum of squared loads.

    Args:
        bounds: (low, high) of consecutive, non-empty parts of `costs`.
        owners: [part] -> who gets it.
        loads: [owner] -> what each has beside these parts.
    """
    prefix = np.array([0.0, *accumulate(costs)])
    cuts = np.array([bounds[0][0], *(high for _, high in bounds)])
    places = np.arange(len(cuts))
    moves = np.array(list(permutations(range(len(bounds)), 2)), np.int64).reshape(-1, 2)
    longer, shorter = moves.T
    between = (np.minimum(longer, shorter)[:, None] < places) & (places <= np.maximum(longer, shorter)[:, None])
    shifts = np.where((longer < shorter)[:, None], 1, -1) * between

    def unevenness(sums: Floats) -> Floats:
        # Column by column, so that the bits do not depend on how a library adds.
        totals = np.array(loads, np.float64)[:, None] + np.zeros((1, len(sums)))
        for part, owner in enumerate(owners):
            totals[owner] += sums[:, part]
        found = np.zeros(len(sums))
        for total in totals:
            found += total * total
        return found

    now = np.diff(prefix[cuts])
    most, least = now.max() * (1 + _ROUNDING), unevenness(now[None])[0]
    while len(moves):
        moved = cuts + shifts
        allowed = np.take_along_axis(np.diff(moved, axis=1), shorter[:, None], 1)[:, 0] > 0
        sums = np.diff(prefix[np.where(allowed[:, None], moved, cuts)], axis=1)
        values = np.where(allowed & (sums.max(axis=1) <= most), unevenness(sums), np.inf)
        best = int(np.argmin(values))
        if not values[best] < least * (1 - _ROUNDING):
            break
        least, cuts = values[best], moved[best]
    return tuple((int(low), int(high)) for low, high in pairwise(cuts))
