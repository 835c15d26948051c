"""Plans that are improved action by action, after the search of orders that a decoder makes."""

import math
import random

import numpy as np

from mmtrain.planner.search.chains import Start
from mmtrain.planner.search.evaluate import evaluate
from mmtrain.planner.search.instance import Searched
from mmtrain.planner.search.kernels.arrays import Workspace
from mmtrain.planner.search.kernels.polish import Timing, polish

TRIES = 100
"""Tries that count as one evaluation: they take about as long."""
HOT, COLD = 0.1, 0.005
"""Temperature at the start and at the end, as a part of the makespan an action: in a plan of few actions each matters
more. A hotter one leaves what was decoded, and on a large problem does not find a plan as good again."""


class Polished:
    """One chain of changes to a plan."""

    def __init__(self, searched: Searched, start: Start, iterations: int, seed: int, begin: float) -> None:
        """Args:
        start: its order is decoded, without blocks.
        iterations: of the choice of options.
        begin: part of the budget of the search that is used up.
        """
        self.searched, self._begin = searched, begin
        self._workspace = w = searched.workspace()
        """With the current plan."""
        self.cost = evaluate(searched, w, start.order, start.how._replace(braid=False), iterations)
        """Makespan of the best plan; inf: it did not fit."""
        self._random = np.array([2 * random.Random(f"polish {seed}").getrandbits(62) + 1], np.uint64)
        self._order, self._option = w.order.copy(), w.option.copy()
        n = w.option.size
        self._timing = Timing(
            place=np.zeros(4 * n, np.uint32),
            slot=np.zeros(4 * n, np.uint32),
            end=np.zeros(4 * n),
            backward=np.zeros(n, np.uint32),
            dirty=np.zeros(3 * n, np.uint8),
            changed=np.zeros(3 * n, np.uint32),
            before=np.zeros(3 * n),
        )

    def run(self, evaluations: int, before: float, after: float) -> None:
        """Tries changes. Args: before, after: part of the budget used up at the start and at the end."""
        if self.cost < math.inf:
            self._run(TRIES * evaluations, before, after)

    def best(self) -> Workspace:
        """The workspace with the best plan."""
        w = self._workspace
        w.order[:], w.option[:] = self._order, self._option
        self._run(0, 1.0, 1.0)  # sets the sequence of its actions
        return w

    def _run(self, tries: int, before: float, after: float) -> None:
        actions, rest = max(1, int(self._workspace.length.sum())), max(1e-9, 1 - self._begin)
        hot, cold = (HOT * (COLD / HOT) ** ((part - self._begin) / rest) / actions for part in (before, after))
        p, w, best = self.searched.arrays, self._workspace, (self._order, self._option)
        self.cost = float(polish(p, w, self._timing, *best, self.cost, self._random, tries, hot, cold))
