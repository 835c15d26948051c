"""How fast a CPU runs while something is timed on it.

The speed of a shared machine changes by tens of per cent, for milliseconds to minutes, and no clock of a process shows
it: a process on the other hyperthread of a core slows every instruction. Timing a fixed piece of work repeatedly during
the measurement does.
"""

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from statistics import median

import torch

_SIDE, _PRODUCTS = 128, 3


class WatchedClock:
    """A clock that measures the speed of the machine between readings, and stands still while it does."""

    def __init__(self, clock: Callable[[], float], *, every_s: float | None) -> None:
        """Args: every_s: least seconds between two speed measurements, of about 0.2 ms each; inf: only at the first
        reading and on `look`; None: never."""
        self.moments: list[float] = []
        """Times of the speed measurements, on this clock."""
        self.speeds_s: list[float] = []
        """Duration of the fixed work in each measurement, on the thread's own clock: longer on a slower machine."""
        self._clock, self._every_s = clock, every_s
        self._stood_s = 0.0
        self._square = torch.ones(_SIDE, _SIDE) / _SIDE

    def __call__(self) -> float:
        now = self._clock() - self._stood_s
        if self._every_s is not None and (not self.moments or now - self.moments[-1] >= self._every_s):
            self._look(now, 1)
        return now

    def look(self) -> None:
        """Measures the speed now, as the median of five; nothing if `every_s` is None."""
        if self._every_s is not None:
            self._look(self._clock() - self._stood_s, 5)

    def _look(self, now: float, times: int) -> None:
        """Args: now: the reading at which the clock stands still."""
        self.moments.append(now)
        self._work()  # warms up the caches
        self.speeds_s.append(median(self._timed_work() for _ in range(times)))
        self._stood_s = self._clock() - now

    def speed_s(self, start: float, end: float) -> float:
        """The mean of the measurements from the last one at or before `start` to the first one at or after `end`; 0:
        none."""
        first = max(0, bisect_right(self.moments, start) - 1)
        speeds = self.speeds_s[first : bisect_left(self.moments, end) + 1]
        return sum(speeds) / len(speeds) if speeds else 0.0

    def _timed_work(self) -> float:
        before = time.thread_time()
        for _ in range(_PRODUCTS):
            self._work()
        return time.thread_time() - before

    def _work(self) -> None:
        torch.nn.functional.gelu(self._square @ self._square)
