"""The attention windows of an encoder, and the order of its rows. Pure.

A frame is cut into windows of window x window units, smaller at its right and lower edges; a unit is the merge x merge
patches that become one feature. Rows are ordered window by window, so that each window is one segment, and inside of a
window in the order of the image. With a window of 0 (no windows) the rows keep their order.

Source: arXiv:2502.13923, sec. 2.1.1.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Grid = tuple[int, int, int]


def feature_order(grids: Sequence[Grid], merge: int, window: int) -> Indices:
    """[V] int64: for each position in the order of the rows, the unit of the images, counted row by row.

    Args:
        grids: patches (time, height, width) of each image.
        merge: patches along a side of a unit.
        window: units along a side of a window; 0: no windows.
    """
    order, start = [], 0
    for t, h, w in grids:
        height, width = h // merge, w // merge
        frame = np.arange(height * width, dtype=np.int64)
        if window:
            down, across = np.divmod(frame, width)
            # Stable: inside of a window the units stay in the order of the image.
            frame = np.argsort(down // window * width + across // window, kind="stable")
        for _ in range(t):
            order.append(frame + start)
            start += height * width
    return np.concatenate(order) if order else np.empty(0, dtype=np.int64)


def row_order(grids: Sequence[Grid], merge: int, window: int) -> Indices:
    """[R] int64: for each row in order, the packed patch of the images. Args: see `feature_order`."""
    inside = np.arange(merge**2, dtype=np.int64)
    return (feature_order(grids, merge, window)[:, None] * merge**2 + inside).reshape(-1)


def window_rows(grids: Iterable[Grid], merge: int, window: int) -> list[int]:
    """Number of rows of each window, in the order of the rows. Args: see `feature_order`."""
    rows = []
    for t, h, w in grids:
        heights, widths = _cut(h // merge, window), _cut(w // merge, window)
        rows += [down * across * merge**2 for down in heights for across in widths] * t
    return rows


def window_pairs(grid: Grid, merge: int, window: int) -> int:
    """Number of (query, key) pairs inside of the windows of one image. Args: see `feature_order`."""
    t, h, w = grid
    down, across = (sum(length**2 for length in _cut(total // merge, window)) for total in (h, w))
    return t * down * across * merge**4


def _cut(total: int, size: int) -> list[int]:
    """Lengths of the pieces of `size`, and of the remainder."""
    return [size] * (total // size) + [total % size] * (total % size > 0)
