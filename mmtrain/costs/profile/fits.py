"""Non-negative least squares, which fits measured seconds as functions of a work's size. Pure.

A layer's seconds are `row * rows + pair * pairs + window_pair * window_pairs + output * outputs + fixed`, for a DiT
also `cross_pair * cross_pairs + text * texts + clip * clips`: products and element-wise operators are proportional to
rows, attention to attended pairs, last layers to output rows. For one image or causal document of x rows, which has x^2
or (x^2 + x) / 2 pairs, that is a x^2 + b x + c with non-negative weights; for several of them in one work it remains
exact, unlike a polynomial of their total length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from mmtrain.spec.work_size import WorkSize

FEATURES = ("row", "pair", "window_pair", "output", "cross_pair", "text", "clip", "fixed")
"""Names of the weights of a `SizeFit`, in the order of the columns of a fit; `fixed` is the time of one call."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeFit:
    """An amount (seconds or bytes) as a function of a work's size, with its error on the measured points."""

    row: float = 0.0
    pair: float = 0.0
    window_pair: float = 0.0
    output: float = 0.0
    fixed: float = 0.0
    cross_pair: float = 0.0
    text: float = 0.0
    clip: float = 0.0
    error: float = 0.0
    """Mean of |fit - measured| / measured over the measured points."""
    worst: float = 0.0
    """Largest |fit - measured| / measured."""

    def __call__(self, size: WorkSize) -> float:
        pairs = self.pair * size.pairs + self.window_pair * size.window_pairs
        total = self.row * size.rows + pairs + self.output * size.outputs + self.fixed
        return total + self.cross_pair * size.cross_pairs + self.text * size.texts + self.clip * size.clips


def fit_sizes(sizes: Sequence[WorkSize], amounts: Sequence[float], *, floor: float = 0.0) -> SizeFit:
    """The fit with non-negative weights and the least sum of squared relative errors; 0 if all amounts are 0.

    Args:
        sizes: sizes of the measured works.
        amounts: [works] -> seconds or bytes.
        floor: errors are relative to the amount or this, whichever is larger; in the unit of the amounts.
    """
    assert len(sizes) == len(amounts) > 0
    table = np.array([_features(size) for size in sizes], dtype=np.float64)
    targets = np.maximum(np.array(amounts, dtype=np.float64), 0.0)
    scale = np.maximum(targets, max(floor, 1e-3 * float(targets.max())))
    if not scale.all():
        return SizeFit()
    weights = non_negative_least_squares(table / scale[:, None], targets / scale)
    errors = np.abs(table @ weights - targets) / scale
    return SizeFit(
        **dict(zip(FEATURES, weights.tolist(), strict=True)), error=float(errors.mean()), worst=float(errors.max())
    )


def _features(size: WorkSize) -> tuple[float, ...]:
    of_clips = (size.cross_pairs, size.texts, size.clips)
    return (size.rows, size.pairs, size.window_pairs, size.outputs, *of_clips, 1.0)


def non_negative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """[columns]: the x >= 0 with the least |matrix x - target|; ties go to the fewest, then to the first columns.

    It is exact: it solves the least squares of every subset of columns, which is cheap for at most 8 columns.

    Args: matrix: [rows, columns]. target: [rows].
    """
    columns = matrix.shape[1]
    assert columns <= 8
    # Scale columns to one norm, so that the rank of a submatrix does not depend on units.
    norms = np.linalg.norm(matrix, axis=0)
    nonzero = [int(c) for c in np.flatnonzero(norms)]
    scaled = matrix / np.where(norms > 0, norms, 1.0)
    best_weights, best_error = np.zeros(columns), float(target @ target)
    for count in range(1, len(nonzero) + 1):
        for chosen in combinations(nonzero, count):
            submatrix = scaled[:, chosen]
            weights, _, rank, _ = np.linalg.lstsq(submatrix, target, rcond=1e-9)
            if rank < count or (weights < 0).any():
                continue
            error = float(((submatrix @ weights - target) ** 2).sum())
            if error < best_error - 1e-12 * float(target @ target):
                best_weights, best_error = np.zeros(columns), error
                best_weights[list(chosen)] = weights / norms[list(chosen)]
    return best_weights
