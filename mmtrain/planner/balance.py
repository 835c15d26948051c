"""Cutting a row of costs into consecutive parts that are as equal as possible."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate


def split_evenly(costs: Sequence[float], num_parts: int) -> tuple[tuple[int, int], ...]:
    """The bounds (low, high) of consecutive, non-empty parts whose largest sum is the least possible.

    Among those, the numbers of entries are as equal as possible (least sum of squares), then earlier
    parts are the smaller ones. Exact.

    Args: costs: at least 0 each; at least `num_parts` entries.
    """
    count = len(costs)
    assert 1 <= num_parts <= count
    assert min(costs) >= 0
    prefix = [0.0, *accumulate(costs)]
    limit = _least_maximum(prefix, num_parts)
    # best[j]: (sum of squared lengths, where the last part starts) over the first j entries, part by part.
    best: list[tuple[float, int]] = [(0.0, 0)] + [(float("inf"), 0)] * count
    starts: list[list[int]] = []
    for part in range(1, num_parts + 1):
        row: list[tuple[float, int]] = [(float("inf"), 0)] * (count + 1)
        for high in range(part, count + 1):
            low = max(part - 1, bisect_left(prefix, prefix[high] - limit, 0, high))
            while (
                low > part - 1 and prefix[high] - prefix[low - 1] <= limit
            ):  # undo the rounding of the bisection
                low -= 1
            choices = (
                (best[k][0] + (high - k) ** 2, -k)
                for k in range(low, high)
                if prefix[high] - prefix[k] <= limit
            )
            row[high] = min(choices, default=(float("inf"), 0))
        starts.append([-k for _, k in row])
        best = row
    bounds, high = [], count
    for row_starts in reversed(starts):
        bounds.append((row_starts[high], high))
        high = row_starts[high]
    return tuple(reversed(bounds))


def _least_maximum(prefix: Sequence[float], num_parts: int) -> float:
    """The least largest sum of all cuts into at most `num_parts` parts; it is the sum of some part."""
    count = len(prefix) - 1
    sums = sorted({prefix[high] - prefix[low] for low in range(count) for high in range(low + 1, count + 1)})

    def fits(limit: float) -> bool:
        low, parts = 0, 0
        while low < count and parts < num_parts:
            high = max(low, bisect_right(prefix, prefix[low] + limit, low) - 1)
            while high < count and prefix[high + 1] - prefix[low] <= limit:
                high += 1
            while high > low and prefix[high] - prefix[low] > limit:
                high -= 1
            if high == low:
                return False
            low, parts = high, parts + 1
        return low == count

    return sums[bisect_left(sums, True, key=fits)]
