"""Linear functions of a work's size as matrices: FLOPs, bytes and rows of operators, bytes of tensors. Pure."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from mmtrain.spec.work_size import Rates, WorkSize

Coefficients = npt.NDArray[np.float64]


def coefficients(rates: Iterable[Rates]) -> Coefficients:
    """[rates, 8]: the matrix whose product with `values(size)` gives all amounts."""
    return np.array([*rates], dtype=np.float64).reshape(-1, len(Rates._fields))


def values(size: WorkSize, of: int = 1) -> Coefficients:
    """[8]: the vector to multiply with `coefficients`, for one of the `of` equal parts of a work."""
    counts = (size.rows, size.pairs, size.outputs, size.window_pairs, size.cross_pairs, size.texts, size.clips)
    return np.array((1.0, *(count / of for count in counts)), dtype=np.float64)
