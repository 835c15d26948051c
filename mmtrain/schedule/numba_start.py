"""Loading numba without scipy."""

import sys


def load_numba() -> None:
    """Loads numba's library of types and functions, which its first call of a kernel needs, without scipy.

    numba checks there whether scipy has a BLAS, for kernels with `np.dot`. The check imports all of `scipy.linalg`,
    which takes as long as numba itself. Here it is skipped; compiling a kernel with `np.dot` runs it again.
    """
    if "numba.np.arraymath" in sys.modules:
        return
    from numba.np import linalg

    check = getattr(linalg, "ensure_blas", None)
    if check is None:  # another version of numba
        return
    linalg.ensure_blas = _skip
    try:
        from numba.np import arraymath
    finally:
        linalg.ensure_blas = check
    arraymath.ensure_blas = check


def _skip() -> None:
    """Replaces the check, which raises if there is no BLAS."""
