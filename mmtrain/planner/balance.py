"""Cutting a row of costs into consecutive parts that are as equal as possible, alone and together with others."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, permutations

import numpy as np
import numpy.typing as npt

_ROUNDING = 1e-9
"""Differences by a smaller part than this are those of a sum's order."""

Floats = npt.NDArray[np.float64]


def split_evenly(costs: Sequence[float], num_parts: int) -> tuple[tuple[int, int], ...]:
    """The bounds (low, high) of consecutive, non-empty parts whose largest sum is the least possible.

    Among those, the numbers of entries are as equal as possible (least sum of squares), and the last
    parts the longer ones. Exact.

    Args: costs: at least 0 each; at least `num_parts` entries.
    """
    return _split_evenly(tuple(costs), num_parts)


@lru_cache(maxsize=4096)  # pictures of one size come in the same numbers again and again
def _split_evenly(costs: tuple[float, ...], num_parts: int) -> tuple[tuple[int, int], ...]:
    count = len(costs)
    assert 1 <= num_parts <= count
    assert min(costs) >= 0
    prefix = [0.0, *accumulate(costs)]
    limit = _least_maximum(prefix, num_parts)
    squares = [0.0] + [math.inf] * count  # [high]: least sum of squared lengths of the parts before high
    starts: list[list[int]] = []  # [part][high]: where that part then starts
    for part in range(num_parts):
        row, row_starts = [math.inf] * (count + 1), [0] * (count + 1)
        for high in range(part + 1, count + 1):
            for low in range(high - 1, part - 1, -1):
                if prefix[high] - prefix[low] > limit:
                    break
                value = squares[low] + (high - low) ** 2
                if value <= row[high]:
                    row[high], row_starts[high] = value, low
        squares = row
        starts.append(row_starts)
    bounds, high = [], count
    for row_starts in reversed(starts):
        bounds.append((row_starts[high], high))
        high = row_starts[high]
    return tuple(reversed(bounds))


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


def _least_maximum(prefix: Sequence[float], num_parts: int) -> float:
    """The least largest sum of all cuts into at most `num_parts` parts; it is the sum of some part."""
    count = len(prefix) - 1
    sums = sorted({prefix[high] - prefix[low] for low in range(count) for high in range(low + 1, count + 1)})

    def fits(limit: float) -> bool:
        low = 0
        for _ in range(num_parts):
            high = low
            while high < count and prefix[high + 1] - prefix[low] <= limit:
                high += 1
            low = high
        return low == count

    return sums[bisect_left(sums, True, key=fits)]
