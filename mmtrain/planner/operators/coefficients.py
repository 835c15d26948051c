"""Many linear functions of a work's size at once: FLOPs, bytes and rows of operators, bytes of tensors. Pure."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from mmtrain.spec.spec import Rates, WorkSize

Coefficients = npt.NDArray[np.float64]


def coefficients(rates: Iterable[Rates]) -> Coefficients:
    """[rates, 8]: times `values(size)` it gives all of them at once."""
    return np.array([*rates], dtype=np.float64).reshape(-1, len(Rates._fields))


def values(size: WorkSize, of: int = 1) -> Coefficients:
    """[8]: what `coefficients` are multiplied with, for one of `of` equal works that the size is cut into."""
    counts = (size.rows, size.pairs, size.outputs, size.window_pairs, size.cross_pairs, size.texts, size.clips)
    return np.array((1.0, *(count / of for count in counts)), dtype=np.float64)
