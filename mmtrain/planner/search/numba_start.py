"""Whether numba is there, and what it loads before it runs a first kernel, less what no kernel of ours needs."""

import importlib.util
import sys

HAS_NUMBA = importlib.util.find_spec("numba") is not None
"""Without it no plan is searched, and those of `interleave` take their place."""


def load_numba() -> None:
    """Loads numba's library of types and functions, which its first call of a kernel needs, without scipy.

    numba asks there whether scipy has a BLAS, for kernels with `np.dot`, and the answer takes as long as numba itself:
    all of `scipy.linalg` is imported. Here it takes a yes; who compiles such a kernel has numba ask again.
    """
    if "numba.np.arraymath" in sys.modules:
        return
    from numba.np import linalg

    asks = getattr(linalg, "ensure_blas", None)
    if asks is None:  # another version of numba
        return
    linalg.ensure_blas = _take_a_yes
    try:
        from numba.np import arraymath
    finally:
        linalg.ensure_blas = asks
    arraymath.ensure_blas = asks


def _take_a_yes() -> None:
    """In the place of the question, which raises where the answer is no."""
