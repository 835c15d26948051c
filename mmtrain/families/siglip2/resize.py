"""Learned positions resized to many grids at once: which of them a patch reads, and with which weights. Pure.

Shape legend: R patches; K positions that they read, one patch after another.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Taps(NamedTuple):
    """The weighted sum of positions that each patch reads."""

    offsets: Integers
    """[R] index of the first one of each patch."""
    positions: Integers
    """[K] row-major index in the square of positions."""
    weights: Floats
    """[K] whose sum is 1 for each patch."""


def resize_taps(cells: Integers, sizes: Integers, side: int) -> Taps:
    """What bilinear interpolation with antialiasing reads, which is separable.

    Args: cells: [R, 2] row and column of each patch. sizes: [R, 2] height and width of its image. side: of the square.
    Source: `torch.nn.functional.interpolate(mode="bilinear", align_corners=False, antialias=True)`.
    """
    first, count, weight = zip(*(_along(cells[:, axis], sizes[:, axis], side) for axis in (0, 1)), strict=True)
    number = count[0] * count[1]
    patch = np.repeat(np.arange(len(cells)), number)
    nth = np.arange(len(patch)) - np.repeat(np.cumsum(number) - number, number)
    down, across = np.divmod(nth, count[1][patch])
    positions = (first[0][patch] + down) * side + first[1][patch] + across
    return Taps(np.cumsum(number) - number, positions, weight[0][patch, down] * weight[1][patch, across])


def _along(cell: Integers, size: Integers, side: int) -> tuple[Integers, Integers, Floats]:
    """First position, number of positions [R], and their weights [R, most], along one axis."""
    scale = side / size
    reach, centre = np.maximum(scale, 1), scale * (cell + 0.5)
    first = np.maximum((centre - reach + 0.5).astype(np.int64), 0)
    count = np.minimum((centre + reach + 0.5).astype(np.int64), side) - first
    nth = np.arange(count.max(initial=0))
    distance = np.abs(first[:, None] + nth - centre[:, None] + 0.5) / reach[:, None]
    weights = np.where(nth < count[:, None], np.maximum(1 - distance, 0), 0)
    return first, count, weights / weights.sum(axis=1, keepdims=True)
