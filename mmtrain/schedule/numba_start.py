"""Loading numba without scipy, and one line where it compiles: else a first search would be silent for a minute."""

import logging
import sys
from functools import cache
from typing import Any

logger = logging.getLogger("mmtrain")

_COMPILING = (
    "compiling the planner's kernels for this processor: up to a minute, once, then they are kept "
    "(docs/troubleshooting.md#slow)"
)


def load_numba() -> None:
    """Loads numba's library of types and functions, which its first call of a kernel needs, without scipy. From then
    on the first kernel that is compiled, not read from numba's cache, is announced: in the log of a job, or on stderr.

    numba checks there whether scipy has a BLAS, for kernels with `np.dot`. The check imports all of `scipy.linalg`,
    which takes as long as numba itself. Here it is skipped; compiling a kernel with `np.dot` runs it again.
    """
    _announce()
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


@cache
def _announce() -> None:
    """Listens to numba from now on."""
    from numba.core import event

    class Once(event.Listener):  # type: ignore[misc]
        announced = False

        def on_start(self, event: Any) -> None:
            if self.announced:
                return
            self.announced = True
            if logger.handlers:
                logger.info(_COMPILING)
            else:  # a command, which has no log
                print(_COMPILING, file=sys.stderr, flush=True)

        def on_end(self, event: Any) -> None:
            pass

    event.register("numba:compile", Once())


def _skip() -> None:
    """Replaces the check, which raises if there is no BLAS."""
