"""Partition of a sequence of costs into consecutive parts that are as equal as possible."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise


def split_evenly(costs: Sequence[float], num_parts: int) -> tuple[tuple[int, int], ...]:
    """The bounds (low, high) of consecutive, non-empty parts with the least possible largest sum.

    Among these, the numbers of entries are as equal as possible (least sum of squares), and the last parts are the
    longer ones. The result is exact.

    Args: costs: at least `num_parts` entries, each at least 0, in any unit.
    """
    return _split_evenly(tuple(costs), num_parts)


@lru_cache(maxsize=4096)  # equal numbers of equal images are frequent
def _split_evenly(costs: tuple[float, ...], num_parts: int) -> tuple[tuple[int, int], ...]:
    count = len(costs)
    assert 1 <= num_parts <= count
    assert min(costs) >= 0
    prefix = [0.0, *accumulate(costs)]
    limit = _least_maximum(prefix, num_parts)
    squares = [0.0] + [math.inf] * count  # [high]: least sum of squared lengths of the parts before high
    starts: list[list[int]] = []  # [part][high]: where that part then starts
    for index in range(num_parts):
        row, row_starts = [math.inf] * (count + 1), [0] * (count + 1)
        for high in range(index + 1, count + 1):
            for low in range(high - 1, index - 1, -1):
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


def _least_maximum(prefix: Sequence[float], num_parts: int) -> float:
    """The least possible largest sum of at most `num_parts` consecutive parts; it is the sum of one of them.

    What fits changes at sums of parts alone, so halving finds the very number of the least one that fits.
    """
    count = len(prefix) - 1

    def fits(limit: float) -> bool:
        low = 0
        for _ in range(num_parts):
            start = prefix[low]
            low = bisect_right(prefix, limit, lo=low, key=lambda end: end - start) - 1
        return low == count

    too_small, enough = 0.0, max(high - low for low, high in pairwise(prefix))
    while not fits(enough):
        too_small, enough = enough, 2 * enough
    while too_small < (middle := (too_small + enough) / 2) < enough:
        too_small, enough = (too_small, middle) if fits(middle) else (middle, enough)
    return enough
