"""Random numbers that are the same in compiled code and in Python."""

from typing import Any

import numpy as np

from mmtrain.planner.search.kernels.compiler import inner


@inner
def uniform(state: Any) -> float:
    """The next number in [0, 1) (xorshift64*)."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return float((x * np.uint64(2685821657736338717)) >> np.uint64(11)) / 9007199254740992.0


@inner
def below(state: Any, count: int) -> int:
    """The next index in [0, count)."""
    return min(count - 1, int(uniform(state) * count))
