"""Least squares with weights that are never negative: how measured seconds become functions of a work's size. Pure.

A layer's seconds are `row * rows + pair * pairs + window_pair * window_pairs + output * outputs + fixed`, of a DiT also
`cross_pair * cross_pairs + text * texts + clip * clips`: products and element-wise work go with rows, attention with
the pairs that it visits, last layers with what leaves them. For one image or causal document of x rows, which attends
to x^2 or (x^2 + x) / 2 pairs, that is a x^2 + b x + c with no weight below 0; for several of them in one work it stays
exact where a polynomial of their total length is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from mmtrain.spec.spec import WorkSize

FEATURES = ("row", "pair", "window_pair", "output", "cross_pair", "text", "clip", "fixed")
"""What each weight of a `SizeFit` stands beside, in order; `fixed` is for one call."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeFit:
    """An amount (seconds, bytes) as a function of a work's size, with what is known of its error."""

    row: float = 0.0
    pair: float = 0.0
    window_pair: float = 0.0
    output: float = 0.0
    fixed: float = 0.0
    cross_pair: float = 0.0
    text: float = 0.0
    clip: float = 0.0
    error: float = 0.0
    """Mean of |fit - measured| / measured over the points it was made from."""
    worst: float = 0.0
    """The largest of these."""

    def __call__(self, size: WorkSize) -> float:
        pairs = self.pair * size.pairs + self.window_pair * size.window_pairs
        total = self.row * size.rows + pairs + self.output * size.outputs + self.fixed
        return total + self.cross_pair * size.cross_pairs + self.text * size.texts + self.clip * size.clips


def fit_sizes(sizes: Sequence[WorkSize], amounts: Sequence[float], *, floor: float = 0.0) -> SizeFit:
    """The non-negative weights with the least sum of squared errors, each relative to its amount.

    Where every amount is 0, so is every weight.

    Args: floor: what an amount counts as at least when its error is weighed.
    """
    assert len(sizes) == len(amounts) > 0
    table = np.array([_features(size) for size in sizes], dtype=np.float64)
    wanted = np.maximum(np.array(amounts, dtype=np.float64), 0.0)
    scale = np.maximum(wanted, max(floor, 1e-3 * float(wanted.max())))
    if not scale.all():
        return SizeFit()
    weights = non_negative_least_squares(table / scale[:, None], wanted / scale)
    off = np.abs(table @ weights - wanted) / scale
    return SizeFit(
        **dict(zip(FEATURES, weights.tolist(), strict=True)), error=float(off.mean()), worst=float(off.max())
    )


def _features(size: WorkSize) -> tuple[float, ...]:
    of_clips = (size.cross_pairs, size.texts, size.clips)
    return (size.rows, size.pairs, size.window_pairs, size.outputs, *of_clips, 1.0)


def non_negative_least_squares(matrix: Array, target: Array) -> Array:
    """The x >= 0 with the least |matrix x - target|; among equals the one with the fewest columns, the first ones.

    Exact: the least squares of every set of columns, which is cheap for the few that a fit has.
    """
    columns = matrix.shape[1]
    assert columns <= 8
    # Columns of one scale, so that a rank is told by ratios and not by units.
    norms = np.linalg.norm(matrix, axis=0)
    used = [int(c) for c in np.flatnonzero(norms)]
    scaled = matrix / np.where(norms > 0, norms, 1.0)
    best, best_error = np.zeros(columns), float(target @ target)
    for count in range(1, len(used) + 1):
        for chosen in combinations(used, count):
            part = scaled[:, chosen]
            found, _, rank, _ = np.linalg.lstsq(part, target, rcond=1e-9)
            if rank < count or (found < 0).any():
                continue
            error = float(((part @ found - target) ** 2).sum())
            if error < best_error - 1e-12 * float(target @ target):
                best, best_error = np.zeros(columns), error
                best[list(chosen)] = found / norms[list(chosen)]
    return best
