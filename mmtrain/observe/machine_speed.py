"""How fast a CPU runs while something is timed on it.

The speed of a shared machine changes by tens of per cent, for milliseconds to minutes, and no clock of a process shows
it: a neighbour on the other half of a core slows every instruction. A fixed piece of work, timed again and again beside
what is measured, does.
"""

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from statistics import median

import torch

_SIDE, _PRODUCTS = 128, 3


class WatchedClock:
    """A clock of the host that looks, between two readings, how fast the machine is, and stands still meanwhile."""

    def __init__(self, clock: Callable[[], float], *, every_s: float | None) -> None:
        """Args: every_s: least seconds from one look to the next, which takes about 0.2 ms; inf: it looks at its first
        reading and when told to; None: it never looks."""
        self.moments: list[float] = []
        """Of the looks, on this clock."""
        self.speeds_s: list[float] = []
        """Of each look, the seconds of its work on the thread's own clock: more where the machine is slower."""
        self._clock, self._every_s = clock, every_s
        self._stood_s = 0.0
        self._square = torch.ones(_SIDE, _SIDE) / _SIDE

    def __call__(self) -> float:
        now = self._clock() - self._stood_s
        if self._every_s is not None and (not self.moments or now - self.moments[-1] >= self._every_s):
            self._look(now, 1)
        return now

    def look(self) -> None:
        """Looks now, five times, of which the median counts; does nothing if it never looks."""
        if self._every_s is not None:
            self._look(self._clock() - self._stood_s, 5)

    def _look(self, now: float, times: int) -> None:
        """Args: now: the reading from which on the clock stands still."""
        self.moments.append(now)
        self._work()  # fetches what it needs into the caches
        self.speeds_s.append(median(self._timed_work() for _ in range(times)))
        self._stood_s = self._clock() - now

    def speed_s(self, start: float, end: float) -> float:
        """The mean of the looks from the last one at or before a moment to the first one at or after another; 0: there
        are none."""
        first = max(0, bisect_right(self.moments, start) - 1)
        found = self.speeds_s[first : bisect_left(self.moments, end) + 1]
        return sum(found) / len(found) if found else 0.0

    def _timed_work(self) -> float:
        before = time.thread_time()
        for _ in range(_PRODUCTS):
            self._work()
        return time.thread_time() - before

    def _work(self) -> None:
        torch.nn.functional.gelu(self._square @ self._square)
